"""Reads say what they are: current by proof, old on request, and the same in the past as they were then."""

import asyncio
from typing import Any

import msgspec
import pytest

from forebay.cluster.api.metrics.registry import SYNCS_KEPT_MAX
from forebay.cluster.api.render.jobs import job_view, why_view
from forebay.cluster.api.render.reasons import JobVerdicts
from forebay.cluster.config.config import Config
from forebay.cluster.consensus import ClockBounds
from forebay.replica.fold.apply import apply_entry
from forebay.replica.messages.features import FEATURE_LEVEL_KNOWN
from forebay.replica.state.state import EMPTY, State
from forebay.replica.values import Instant
from forebay.replica.views.jobs import reason_of, verdict_of
from tests.cluster.harness import Harness, compared, story, until


async def busy(harness: Harness) -> dict[int, State]:
    """Have things happen, more than fit at once; return the state after each batch by revision."""
    states = {}
    original = harness.controller.apply

    def apply(index: int, term: int, data: bytes) -> bool:
        if original(index, term, data):
            return True
        states[int(harness.controller.state.revision)] = harness.controller.state
        return False

    harness.engine.machine.apply = apply  # type: ignore[method-assign]
    agent = {"command_id": harness.new_id(), "instance": "i", "storage_id": "s", "cpus": 2}
    await harness.ask("POST", "/v1/agents/n1/register", agent, who="n1")
    big = "#!/bin/sh\n#DW jobdw capacity=40MiB access_mode=striped type=scratch\ntrue\n"
    for _ in range(4):
        await harness.submit(script=big)
    await harness.ask("POST", "/v1/jobs/4/hold", {"command_id": harness.new_id()}, who="alice")
    for job, stage, result in ((1, "stage_in", {"type": "done"}), (1, "run", {"type": "started"})):
        await until(lambda: harness.controller.state.jobs[1].attempt > 0)
        report = {
            "command_id": harness.new_id(),
            "job": job,
            "attempt": harness.controller.state.jobs[job].attempt,
            "stage": stage,
            "result": result,
        }
        answer = await harness.ask("POST", "/v1/agents/n1/reports", {"reports": [report]}, who="n1")
        assert answer.body["results"][0]["outcome"] == "accepted", answer
    await harness.ask("POST", "/v1/jobs/2/cancel", {"command_id": harness.new_id(), "hurry": True}, who="alice")
    return states


@story
async def test_why_at_a_revision_gives_the_reason_that_show_gave_at_that_revision(config: Config) -> None:
    async with Harness(config) as harness:
        states = await busy(harness)
        reasons = set()
        # Once with the process that saw it happen, once with one that knows only the files.
        for _ in range(2):
            for revision, state in states.items():
                for job in state.jobs:
                    shown = reason_of(state, job)
                    answer = await harness.ask("GET", f"/v1/jobs/{job}/why?at={revision}", who="alice")
                    assert answer.status == 200, answer
                    assert (answer.body["reason"], answer.body["state"]) == (shown, state.jobs[job].state.name)
                    assert answer.body["revision"] == revision
                    reasons.add(shown)
            await harness.restart()
        assert {"BurstBufferResources", "BurstBufferStageIn", "JobHeldUser", "None"} <= reasons


@story
async def test_the_reason_in_a_view_is_the_one_that_a_scheduling_pass_gives(config: Config) -> None:
    async with Harness(config) as harness:
        states = await busy(harness)
        plain = {"script": "#!/bin/sh\n", "cpus": 2}
        for changes in ({}, {}, {"dependencies": ["afterok:3"]}, {"begin_at": "2100-01-01T00:00:00Z"}, {"hold": True}):
            await harness.submit(**{**plain, **changes})
        seen = set()
        for state in [*states.values(), harness.controller.state]:
            for job in state.jobs:
                shown = job_view(state, job, JobVerdicts(state))
                assert shown.reason == reason_of(state, job)
                seen.add(shown.reason)
        assert {"BurstBufferResources", "Dependency", "BeginTime", "JobHeldUser", "None", "Resources"} <= seen


@story
async def test_what_is_said_of_every_revision_is_what_folding_the_ledger_to_it_gives(config: Config) -> None:
    async with Harness(config) as harness:
        await busy(harness)
        await harness.ask("POST", "/v1/snapshots")
        await harness.submit(hold=True)
        for _ in range(2):
            folded = EMPTY
            for applied in await harness.applied():
                if applied.batch is None:
                    continue
                for entry in applied.batch.entries:
                    folded = apply_entry(folded, entry, applied.batch.at)
                    for job in folded.jobs:
                        answer = await harness.ask("GET", f"/v1/jobs/{job}/why?at={folded.revision}")
                        view = why_view(folded, job, verdict_of(folded, job))
                        assert answer.body == msgspec.json.decode(msgspec.json.encode(view))
            assert folded == harness.controller.state
            await harness.restart()


@story
async def test_a_history_tells_what_happened_with_the_state_and_reason_after_each_event(config: Config) -> None:
    async with Harness(config) as harness:
        states = await busy(harness)
        for _ in range(2):
            answer = await compared(lambda: harness.ask("GET", "/v1/jobs/1/history", who="bob"))
            rows = answer.body["rows"]
            events = [row["event"] for row in rows]
            assert events[:4] == ["job_submitted", "buffer_allocated", "staged_in", "run_ordered"], events
            assert rows[0]["actor"] == "user alice" and rows[1]["actor"] == "scheduler"
            assert [row["revision"] for row in rows] == sorted(row["revision"] for row in rows)
            for row in rows:
                assert row["sentence"] and row["at"]
                if row["revision"] in states:
                    state = states[row["revision"]]
                    assert (row["reason"], row["state"]) == (reason_of(state, 1), state.jobs[1].state.name)
            await harness.restart()


@story
async def test_a_revision_that_has_not_happened_or_is_not_a_number_is_refused(config: Config) -> None:
    async with Harness(config) as harness:
        await harness.submit()
        answer = await harness.ask("GET", "/v1/jobs/1/why?at=999", who="alice")
        assert (answer.status, answer.code) == (404, "unknown_revision")
        assert (await harness.ask("GET", "/v1/jobs/1/why?at=now", who="alice")).status == 400
        answer = await harness.ask("GET", "/v1/jobs/1/why?at=1", who="alice")
        assert (answer.status, answer.code) == (404, "unknown_job")


@story
async def test_a_read_proves_leadership_first_and_a_stale_one_does_not(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.cluster.server.controller.READ_WAIT_S", 0.05)
    async with Harness(config) as harness:
        await harness.submit()
        before = harness.engine.confirmations
        assert (await harness.ask("GET", "/v1/jobs/1", who="alice")).status == 200
        assert harness.engine.confirmations == before + 1
        harness.engine.confirms = False
        cut_off = await harness.ask("GET", "/v1/jobs/1", who="alice")
        assert (cut_off.status, cut_off.code) == (503, "no_leader")
        stale = await harness.ask("GET", "/v1/jobs/1?stale=ok", who="alice")
        assert (stale.status, stale.body["job_id"]) == (200, 1)


@story
async def test_a_read_waits_until_what_was_committed_before_it_is_applied(config: Config) -> None:
    async with Harness(config, automatic=False) as harness:
        submitted = asyncio.create_task(harness.submit())
        await until(lambda: harness.engine.uncommitted == 1)

        async def confirm() -> int:
            return harness.engine.last_index

        harness.engine.confirm_leadership = confirm  # type: ignore[method-assign]
        read = asyncio.create_task(harness.ask("GET", "/v1/jobs/1", who="alice"))
        await asyncio.sleep(0.05)
        assert not read.done()
        harness.engine.commit()
        assert (await read).body["job_id"] == 1
        await submitted


@story
async def test_ready_means_that_a_command_can_be_committed(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.cluster.api.ledger.READY_WAIT_S", 0.05)
    async with Harness(config) as harness:

        async def ready() -> int:
            return (await harness.ask("GET", "/readyz", who="n1")).status

        assert await ready() == 200
        harness.engine.confirms = False
        assert await ready() == 503
        harness.engine.confirms = True
        harness.engine.depose(None)
        assert await ready() == 503
        assert (await harness.ask("GET", "/healthz", who="n1")).status == 200
        status = await harness.ask("GET", "/v1/status")
        assert (status.body["ready"], status.body["not_ready"]) == (False, "no leader is known")


@story
async def test_jobs_are_listed_by_state_and_user_and_within_a_limit(config: Config) -> None:
    async with Harness(config) as harness:
        for who in ("alice", "bob", "alice"):
            await harness.submit(who=who, hold=True)
        await harness.ask("POST", "/v1/jobs/1/cancel", {"command_id": harness.new_id()}, who="alice")

        async def listed(query: str) -> tuple[list[int], bool]:
            answer = await harness.ask("GET", "/v1/jobs" + query, who="bob")
            return [job["job_id"] for job in answer.body["jobs"]], answer.body["truncated"]

        assert await listed("") == ([1, 2, 3], False)
        assert await listed("?user=alice") == ([1, 3], False)
        assert await listed("?state=pending") == ([2, 3], False)
        assert await listed("?state=CANCELLED,RUNNING") == ([1], False)
        assert await listed("?limit=2") == ([2, 3], True)
        assert await listed("?user=nobody") == ([], False)


@story
async def test_pools_show_derived_free_capacity_and_buffers_what_they_hold(config: Config) -> None:
    async with Harness(config) as harness:
        await busy(harness)
        pools = {pool["name"]: pool for pool in (await harness.ask("GET", "/v1/pools", who="bob")).body["pools"]}
        buffers = (await harness.ask("GET", "/v1/buffers", who="bob")).body["buffers"]
        held = sum(buffer["held_bytes"] for buffer in buffers if buffer["pool"] == "fast")
        assert held > 0
        assert pools["fast"]["held_bytes"] == held
        assert pools["fast"]["free_bytes"] == pools["fast"]["quantity_bytes"] - held
        assert pools["fast"]["buffers"] == sum(1 for buffer in buffers if buffer["held_bytes"])


@story
async def test_the_ledger_is_read_with_its_digests_and_says_what_the_status_says(config: Config) -> None:
    async with Harness(config) as harness:
        await busy(harness)
        for _ in range(2):
            found: list[dict[str, Any]] = []
            first = 1
            while True:
                answer = await harness.ask("GET", f"/v1/ledger?from={first}&limit=3")
                if not answer.body["entries"]:
                    break
                found += answer.body["entries"]
                first = found[-1]["index"] + 1
            status = (await harness.ask("GET", "/v1/status?digest=yes")).body
            assert [entry["index"] for entry in found] == list(range(1, status["applied_index"] + 1))
            assert found[-1]["digest"] == status["ledger_digest"]
            revisions = [record["revision"] for entry in found for record in entry["records"]]
            assert revisions == list(range(1, status["revision"] + 1))
            assert len(status["state_digest"]) == 64
            await harness.restart()


@story
async def test_each_sync_is_in_the_histogram_whether_it_was_told_before_the_scrape_or_for_it(config: Config) -> None:
    async with Harness(config) as harness:
        for _ in range(SYNCS_KEPT_MAX + 2):
            harness.service.metrics.record_sync(0.0002)
        harness.service.metrics.record_sync(5.0)
        for _ in range(2):
            text = (await harness.ask("GET", "/metrics", who="alice")).body.decode()
            assert f"forebay_journal_sync_seconds_count {SYNCS_KEPT_MAX + 3}.0" in text
            assert f'forebay_journal_sync_seconds_bucket{{le="0.0003"}} {SYNCS_KEPT_MAX + 2}.0' in text


@story
async def test_metrics_show_pools_jobs_queue_and_latency(config: Config) -> None:
    async with Harness(config) as harness:
        await busy(harness)
        await harness.submit(user="bob")
        text = (await harness.ask("GET", "/metrics", who="alice")).body.decode()
        for line in (
            'forebay_role{role="leader"} 1.0',
            'forebay_pool_bytes{pool="fast"} 1.00663296e+08',
            'forebay_jobs{state="RUNNING"} 1.0',
            "forebay_queue_commands 0.0",
            f"forebay_feature_level {float(harness.controller.state.feature_level)}",
            f"forebay_feature_level_known {float(FEATURE_LEVEL_KNOWN)}",
            f"forebay_revision {float(harness.controller.state.revision)}",
        ):
            assert line in text, line
        assert 'forebay_api_request_seconds_count{route="submit_job",status="2xx"}' in text
        assert 'forebay_api_problems_total{code="permission_denied"}' in text


@story
async def test_metrics_say_how_long_ago_each_drill_was_tried_and_which_is_under_way(config: Config) -> None:
    async with Harness(config) as harness:

        async def asked(what: str, **body: object) -> None:
            answer = await harness.ask("POST", f"/v1/drills{what}", {"command_id": harness.new_id(), **body})
            assert answer.status < 300, answer

        async def shown() -> dict[str, float]:
            text = (await harness.ask("GET", "/metrics")).body.decode()
            rows = [row.split() for row in text.splitlines() if row.startswith("forebay_drill")]
            return {name: float(value) for name, value in rows}

        assert await shown() == {"forebay_drill_under_way": 0.0}, "what was never tried has no age"
        for number, (scenario, verdict) in enumerate(
            (("switchover", "passed"), ("leader-hang", "failed"), ("leader-kill", "aborted")), 1
        ):
            await asked("", scenario=scenario, target="r1", lasts_s=60)
            assert (await shown())["forebay_drill_under_way"] == number
            await asked(f"/{number}/end", verdict=verdict, sentence="so")
        found = await shown()
        assert found.pop("forebay_drill_under_way") == 0.0
        assert set(found) == {
            f'forebay_drill_age_seconds{{scenario="{name}"}}' for name in ("leader-hang", "switchover")
        }
        assert all(0 <= age_s < 60 for age_s in found.values())


class PeerDouble:
    """A peer as consensus describes it."""

    def __init__(self, *, connected: bool = True, last_contact_s: float | None = 0.0) -> None:
        self.name = "r2"
        self.connected = connected
        self.match_index = self.lag_entries = 0
        self.last_contact_s = last_contact_s
        self.sending_snapshot = self.forgot = self.clock_off = False
        self.clock_offset_s: float | None = None


@story
async def test_a_follower_is_ready_only_while_it_hears_its_leader(config: Config) -> None:
    async with Harness(config) as harness:
        silence_s = config.timing.election_max_s
        cases: list[tuple[bool, list[PeerDouble], int]] = [
            (True, [PeerDouble()], 200),
            (True, [PeerDouble(last_contact_s=silence_s)], 200),
            (True, [PeerDouble(last_contact_s=silence_s * 3)], 503),
            (True, [PeerDouble(last_contact_s=None)], 503),
            (True, [PeerDouble(connected=False)], 503),
            (True, [], 503),
            (False, [PeerDouble()], 503),
        ]
        harness.engine.depose("r2")
        for in_step, peers, status in cases:
            harness.engine.ready = in_step
            harness.engine.peers = lambda peers=peers: peers  # type: ignore[method-assign,misc]
            answer = await harness.ask("GET", "/readyz", who="n1")
            assert answer.status == status, (in_step, peers[0].__dict__ if peers else None, answer)


@story
async def test_how_far_clocks_are_off_is_shown_to_people_and_to_prometheus(config: Config) -> None:
    async with Harness(config) as harness:
        peer = PeerDouble()
        peer.clock_offset_s = -3600.0
        harness.engine.peers = lambda: [peer]  # type: ignore[method-assign,list-item,return-value]
        state = harness.controller.state
        harness.engine.off = True
        harness.engine.bounds = ClockBounds(Instant(state.at - 60_000_000), Instant(state.at - 60_000_000))
        scraped = (await harness.ask("GET", "/metrics", who="alice", headers={"Accept": "text/plain"})).body
        text = scraped.decode()
        assert 'forebay_peer_clock_offset_seconds{peer="r2"} -3600.0' in text
        assert "forebay_clock_skewed 1.0" in text
        status = (await harness.ask("GET", "/v1/status", who="alice")).body
        assert status["clock_off"] and 60.0 <= status["clock_ahead_s"] < 120.0
        members = (await harness.ask("GET", "/v1/members", who="alice")).body["members"]
        assert [(row["clock_offset_s"], row["clock_off"]) for row in members] == [(0.0, True)]
        assert (await harness.ask("GET", "/v1/clock", who="alice")).body["off"] == ["r1"]
        harness.engine.off = False
        assert (await harness.ask("GET", "/v1/clock", who="alice")).body["off"] == []


@story
async def test_a_peer_that_forgot_what_it_acknowledged_is_shown_to_people_and_to_prometheus(config: Config) -> None:
    async with Harness(config) as harness:
        for forgot in (True, False):
            peer = PeerDouble()
            peer.forgot = forgot
            harness.engine.peers = lambda peer=peer: [peer]  # type: ignore[method-assign,misc]
            text = (await harness.ask("GET", "/metrics", who="alice")).body.decode()
            assert f'forebay_peer_rejected{{peer="r2"}} {float(forgot)}' in text


@story
async def test_all_jobs_can_be_read_page_by_page_after_the_last_id(config: Config) -> None:
    async with Harness(config) as harness:
        for _ in range(5):
            await harness.submit()
        await harness.ask("POST", "/v1/jobs/3/cancel", {"command_id": harness.new_id()}, who="alice")
        pages, after, more = [], 0, True
        while more:
            answer = (await harness.ask("GET", f"/v1/jobs?after={after}&limit=2", who="alice")).body
            pages.append([job["job_id"] for job in answer["jobs"]])
            after, more = pages[-1][-1], answer["truncated"]
        assert pages == [[1, 2], [3, 4], [5]]
        newest = (await harness.ask("GET", "/v1/jobs?limit=2", who="alice")).body
        assert ([job["job_id"] for job in newest["jobs"]], newest["truncated"]) == ([4, 5], True)
        pending = (await harness.ask("GET", "/v1/jobs?after=1&limit=2&state=CANCELLED", who="alice")).body
        assert ([job["job_id"] for job in pending["jobs"]], pending["truncated"]) == ([3], False)
        assert (await harness.ask("GET", "/v1/jobs?after=-1", who="alice")).status == 400


@story
async def test_live_buffers_leave_out_those_that_hold_nothing_any_more(config: Config) -> None:
    async with Harness(config) as harness:
        for _ in range(2):
            await harness.submit()
        await harness.ask("POST", "/v1/jobs/1/cancel", {"command_id": harness.new_id()}, who="alice")
        everything = (await harness.ask("GET", "/v1/buffers", who="alice")).body["buffers"]
        live = (await harness.ask("GET", "/v1/buffers?live=yes", who="alice")).body["buffers"]
        assert [buffer["job_id"] for buffer in everything] == [1, 2]
        assert [buffer["job_id"] for buffer in live] == [2]
        assert (await harness.ask("GET", "/v1/buffers?live=no", who="alice")).status == 400


@story
async def test_a_drained_node_is_draining_while_it_has_jobs_and_drained_afterwards(config: Config) -> None:
    async with Harness(config) as harness:
        agent = {"command_id": harness.new_id(), "instance": "i", "storage_id": "s", "cpus": 2}
        await harness.ask("POST", "/v1/agents/n1/register", agent, who="n1")
        await harness.submit()
        drained = await harness.ask("POST", "/v1/nodes/n1/drain", {"command_id": harness.new_id(), "reason": "disks"})
        assert (drained.body["state"], drained.body["jobs"]) == ("DRAINING", [1])
        await harness.ask("POST", "/v1/jobs/1/cancel", {"command_id": harness.new_id(), "hurry": True}, who="alice")
        attempt = harness.controller.state.jobs[1].attempt
        report = {
            "command_id": harness.new_id(), "job": 1, "attempt": attempt, "stage": "teardown",
            "result": {"type": "done"},
        }  # fmt: skip
        await harness.ask("POST", "/v1/agents/n1/reports", {"reports": [report]}, who="n1")
        node = (await harness.ask("GET", "/v1/nodes")).body["nodes"][0]
        assert (node["state"], node["drained"], node["jobs"]) == ("DRAINED", True, [])


@story
async def test_the_operator_is_named_once_in_a_history_and_everybody_else_with_their_role(config: Config) -> None:
    async with Harness(config) as harness:
        await harness.submit(who="operator", hold=True)
        await harness.ask("POST", "/v1/jobs/1/release", {"command_id": harness.new_id()})
        rows = (await harness.ask("GET", "/v1/jobs/1/history")).body["rows"]
        assert {row["actor"] for row in rows if row["command"] != "run_scheduling_cycle"} == {"operator"}
