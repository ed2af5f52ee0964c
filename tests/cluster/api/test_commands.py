"""Commands through the API: exactly once, in order, bounded, and honest about what is not known."""

import asyncio
import json

import msgspec
import pytest

import forebay.cluster.server.proposer
from forebay.cluster.config.config import Config
from forebay.cluster.consensus import ClockBounds
from forebay.cluster.schemas.command_ids import new_command_id
from forebay.replica.grammar.burst_buffer_conf import ConfSetting
from forebay.replica.messages.commands import CONTROLLER, ConfigureSite, Request
from forebay.replica.values.units import Instant
from tests.clocks import ManualClock
from tests.cluster.harness import Answer, Harness, story, until


@story
async def test_a_submitted_job_is_answered_with_its_place_after_the_commit(config: Config) -> None:
    async with Harness(config) as harness:
        answer = await harness.submit()
        assert answer.status == 201, answer
        assert answer.body["job_id"] == 1
        assert answer.body["user"] == "alice"
        assert answer.body["state"] == "PENDING"
        assert answer.body["burst_buffer_state"] == "pending"
        assert answer.revision == answer.body["revision"] == harness.controller.state.revision
        shown = await harness.ask("GET", "/v1/jobs/1", who="bob")
        # With no node yet nobody knows when it starts.
        assert shown.body == {**answer.body, "expected_after": ["space", "cpus"]}


@story
async def test_a_retry_with_the_same_id_gets_the_first_answer_also_after_a_restart(config: Config) -> None:
    async with Harness(config) as harness:
        body = harness.job()
        first = await harness.ask("POST", "/v1/jobs", body, who="alice")
        again = await harness.ask("POST", "/v1/jobs", body, who="alice")
        assert (again.status, again.body["job_id"]) == (first.status, first.body["job_id"]) == (201, 1)
        revision = harness.controller.state.revision
        await harness.restart()
        third = await harness.ask("POST", "/v1/jobs", body, who="alice")
        assert (third.status, third.body["job_id"]) == (201, 1)
        assert harness.controller.state.revision == revision
        assert len(harness.controller.state.jobs) == 1


@story
async def test_a_retry_of_a_refused_command_gets_the_rejection_again(config: Config) -> None:
    async with Harness(config) as harness:
        body = {"command_id": harness.new_id()}
        first = await harness.ask("POST", "/v1/jobs/7/cancel", body, who="alice")
        again = await harness.ask("POST", "/v1/jobs/7/cancel", body, who="alice")
        assert first.status == again.status == 404
        assert first.body == again.body


@story
async def test_receipts_survive_a_snapshot_and_a_restart(config: Config) -> None:
    async with Harness(config) as harness:
        body = harness.job()
        await harness.ask("POST", "/v1/jobs", body, who="alice")
        saved = await harness.ask("POST", "/v1/snapshots")
        assert saved.status == 200, saved
        assert saved.body["revision"] == harness.controller.state.revision
        await harness.restart()
        assert harness.storage.replayed <= 2
        again = await harness.ask("POST", "/v1/jobs", body, who="alice")
        assert (again.status, again.body["job_id"]) == (201, 1)
        assert len(harness.controller.state.jobs) == 1


@story
async def test_many_clients_at_once_get_one_job_each(config: Config) -> None:
    async with Harness(config) as harness:
        answers = await asyncio.gather(*(harness.submit(hold=True) for _ in range(40)))
        assert sorted(answer.body["job_id"] for answer in answers) == list(range(1, 41))


@story
async def test_a_full_queue_is_429_with_retry_after_and_nothing_happens(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forebay.cluster.server.proposer, "QUEUE_COMMANDS_MAX", 2)
    async with Harness(config, automatic=False) as harness:
        commands = [{"type": "submit_job", **harness.job(hold=True)} for _ in range(5)]
        asked = asyncio.create_task(harness.ask("POST", "/v1/commands", {"commands": commands}, who="alice"))
        await until(lambda: harness.engine.uncommitted > 0)
        harness.engine.commit()
        answer = await asked
        assert answer.status == 200
        statuses = [result["status"] for result in answer.body["results"]]
        assert statuses == [201, 201, 429, 429, 429]
        assert answer.body["results"][4]["error"]["outcome"] == "rejected"
        assert len(harness.controller.state.jobs) == 2


@story
async def test_a_single_command_to_a_full_queue_is_429(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Harness(config) as harness:
        monkeypatch.setattr(forebay.cluster.server.proposer, "QUEUE_COMMANDS_MAX", 0)
        answer = await harness.submit()
        assert (answer.status, answer.code, answer.headers["Retry-After"]) == (429, "queue_full", "1")
        assert not harness.controller.state.jobs


@story
async def test_loss_of_leadership_is_503_outcome_unknown_and_the_retry_happens_once(config: Config) -> None:
    async with Harness(config, automatic=False) as harness:
        body = harness.job()
        asked = asyncio.create_task(harness.ask("POST", "/v1/jobs", body, who="alice"))
        await until(lambda: harness.engine.uncommitted == 1)
        harness.engine.depose(lose=False)
        answer = await asked
        assert (answer.status, answer.code) == (503, "outcome_unknown")
        assert answer.body["error"]["outcome"] == "unknown"
        assert answer.headers["Retry-After"]
        harness.engine.automatic = True
        harness.engine.lead()
        again = await harness.ask("POST", "/v1/jobs", body, who="alice")
        assert (again.status, again.body["job_id"]) == (201, 1)
        assert len(harness.controller.state.jobs) == 1


@story
async def test_a_commit_that_does_not_come_is_503_outcome_unknown_in_bounded_time(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.cluster.api.service.COMMIT_WAIT_S", 0.05)
    async with Harness(config, automatic=False) as harness:
        answer = await harness.submit()
        assert (answer.status, answer.code) == (503, "outcome_unknown")
        harness.engine.commit()
        assert len(harness.controller.state.jobs) == 1


@story
async def test_bulk_commands_are_settled_in_order_and_a_rejection_stops_none(config: Config) -> None:
    async with Harness(config) as harness:
        commands = [
            {"type": "submit_job", **harness.job(hold=True)},
            {"type": "release_job", "command_id": harness.new_id(), "job_id": 1},
            {"type": "cancel_job", "command_id": harness.new_id(), "job_id": 99},
            {"type": "hold_job", "command_id": harness.new_id(), "job_id": 1},
            {"type": "submit_job", **harness.job(script="#!/bin/sh\n#DW nonsense\n")},
            {"type": "submit_job", **harness.job()},
            {
                "type": "set_pool",
                "command_id": harness.new_id(),
                "name": "new",
                "quantity": "1GiB",
                "granularity": "1MiB",
            },
        ]
        answer = await harness.ask("POST", "/v1/commands", {"commands": commands})
        assert answer.status == 200, answer
        results = answer.body["results"]
        assert [result["status"] for result in results] == [201, 200, 404, 200, 400, 201, 200]
        assert [result["command_id"] for result in results] == [command["command_id"] for command in commands]
        assert results[0]["job"]["job_id"] == 1
        assert results[3]["job"]["hold"] == "user"
        assert results[4]["error"]["place"].startswith("script line 2")
        assert results[5]["job"]["job_id"] == 2
        assert results[6]["pool"]["quantity_bytes"] == 2**30
        revisions = [result["revision"] for result in results if result["revision"]]
        assert revisions == sorted(revisions)


@story
async def test_a_follower_sends_writes_and_current_reads_to_the_leader_and_answers_stale_reads(config: Config) -> None:
    import msgspec

    from forebay.cluster.system.address import Address

    other = msgspec.structs.replace(config.replicas[0], name="r2", api=Address("127.0.0.2", 7))
    config = msgspec.structs.replace(config, replicas=(*config.replicas, other))
    async with Harness(config) as harness:
        await harness.submit()
        harness.engine.depose("r2")
        for method, path, body in (
            ("POST", "/v1/jobs", harness.job()),
            ("GET", "/v1/jobs/1", None),
            ("GET", "/v1/pools", None),
            ("GET", "/v1/jobs/1/why?at=1", None),
            ("POST", "/v1/jobs/1/cancel", {"command_id": harness.new_id(), "hurry": True}),
        ):
            answer = await harness.ask(method, path, body, who="alice")
            assert answer.status == 307, (path, answer)
            assert answer.headers["Location"] == f"https://127.0.0.2:7{path}"
            assert answer.revision == harness.controller.state.revision
        stale = await harness.ask("GET", "/v1/jobs/1?stale=ok", who="alice")
        assert (stale.status, stale.body["job_id"]) == (200, 1)
        harness.engine.depose(None)
        nobody = await harness.submit()
        assert (nobody.status, nobody.code, nobody.body["error"]["outcome"]) == (503, "no_leader", "rejected")


@story
@pytest.mark.parametrize("off_s", [-31, -301, 31, 301, 3600])
async def test_a_leader_whose_wall_clock_is_off_refuses_nobody_for_it(config: Config, off_s: int) -> None:
    truth = ManualClock(Instant(1_750_000_000_000_000))
    async with Harness(config, clock=truth) as harness:
        # Two others, whose clocks are right, are its majority; its own is set.
        harness.engine.bounds = ClockBounds(truth.now(), truth.now())
        body = harness.job()
        truth.set_wall(Instant(truth.now() + off_s * 1_000_000))
        assert (await harness.ask("POST", "/v1/jobs", body, who="alice")).status == 201
        assert harness.controller.state.at == harness.engine.bounds.latest


@story
async def test_a_command_id_far_from_the_leaders_clock_is_refused_unless_it_was_answered(config: Config) -> None:
    clock = ManualClock(Instant(1_750_000_000_000_000))
    async with Harness(config, clock=clock) as harness:
        body = harness.job()
        early = harness.job()
        assert (await harness.ask("POST", "/v1/jobs", body, who="alice")).status == 201
        revision = harness.controller.state.revision
        clock.advance(301)
        assert (await harness.ask("POST", "/v1/jobs", body, who="alice")).status == 201
        answer = await harness.ask("POST", "/v1/jobs", early, who="alice")
        assert (answer.status, answer.code) == (400, "command_too_old")
        assert "301 s ago" in answer.sentence
        assert answer.body["error"]["outcome"] == "unknown", "its receipt may be gone"
        for ahead_s in (302, 32, 12):
            made = new_command_id(ManualClock(Instant(clock.now() + ahead_s * 1_000_000)))
            answer = await harness.ask("POST", "/v1/jobs", {**early, "command_id": made}, who="alice")
            assert (answer.status, answer.code) == (400, "command_too_old")
            assert f"{ahead_s} s from now" in answer.sentence
            assert answer.body["error"]["outcome"] == "rejected", "nobody can have sent it"
            assert f"back by {ahead_s} s" in answer.body["error"]["remedy"]
        assert harness.controller.state.revision == revision


@story
async def test_nobody_is_called_ahead_of_a_time_that_no_majority_has_confirmed(config: Config) -> None:
    """After all were down the time is that of the last entry, until the clocks of a majority have been read."""
    clock = ManualClock(Instant(1_750_000_000_000_000))
    async with Harness(config, clock=clock) as harness:
        later = new_command_id(ManualClock(Instant(clock.now() + 1_000 * 1_000_000)))
        body = {**harness.job(), "command_id": later}
        harness.engine.bounds = ClockBounds(None, None)
        answer = await harness.ask("POST", "/v1/jobs", body, who="alice")
        assert (answer.status, answer.code) == (503, "no_leader"), "clients ask again"
        now = Instant(clock.now() + 1_000 * 1_000_000)
        harness.engine.bounds = ClockBounds(now, now)
        assert (await harness.ask("POST", "/v1/jobs", body, who="alice")).status == 201


@story
async def test_an_agent_whose_clock_is_ahead_is_heard_and_keeps_nobody_out_by_its_ids(config: Config) -> None:
    clock = ManualClock(Instant(1_750_000_000_000_000))
    async with Harness(config, clock=clock) as harness:
        for ahead_s in (-1000, 290, 1000):
            made = new_command_id(ManualClock(Instant(clock.now() + ahead_s * 1_000_000)))
            register = {"command_id": made, "instance": f"i{ahead_s}", "storage_id": "s", "cpus": 4}
            assert (await harness.ask("POST", "/v1/agents/n1/register", register, who="n1")).status == 200
            assert harness.controller.state.nodes["n1"].instance == f"i{ahead_s}"
            report = {"command_id": made, "job": 1, "attempt": 1, "stage": "stage_in", "result": {"type": "done"}}
            answer = await harness.ask("POST", "/v1/agents/n1/reports", {"reports": [report]}, who="n1")
            assert (answer.status, answer.body["results"][0]["outcome"]) == (200, "rejected"), "it has no such job"
            # A receipt of the future, once it is dropped, would have every honest id taken for an older one.
            latest = max((int.from_bytes(one[:6], "big") for one in harness.controller.state.receipts), default=0)
            assert latest <= clock.now() // 1000 + 10_000


@story
async def test_what_was_carried_out_is_not_called_refused_because_its_job_has_left_the_list(config: Config) -> None:
    async with Harness(config) as harness:
        await until(lambda: harness.controller.state.feature_level >= 1)
        operator = msgspec.structs.replace(CONTROLLER, role=type(CONTROLLER.role).OPERATOR)
        keep_none = ConfigureSite((ConfSetting("FinishedJobsKept", "0"),), partial=True)
        assert (await harness.controller.submit(Request(b"", operator, keep_none))).rejection is None
        body = harness.job(hold=True)
        assert (await harness.ask("POST", "/v1/jobs", body, who="alice")).status == 201
        cancel = {"command_id": harness.new_id()}
        await harness.ask("POST", "/v1/jobs/1/cancel", cancel, who="alice")
        await until(lambda: 1 not in harness.controller.state.jobs)
        for path, again in (("/v1/jobs", body), ("/v1/jobs/1/cancel", cancel)):
            answer = await harness.ask("POST", path, again, who="alice")
            assert (answer.status, answer.body["error"]["outcome"]) == (404, "unknown")
            assert "was carried out at revision" in answer.sentence


@story
async def test_a_replica_that_does_not_lead_refuses_nothing_that_the_leader_may_take(config: Config) -> None:
    async with Harness(config) as harness:
        harness.engine.depose("r2")
        for script in ("#!/bin/sh\n", "#!/bin/sh\n#DW jobdw capacity=oops\n"):
            answer = await harness.ask("POST", "/v1/jobs", harness.job(script=script), who="alice")
            assert answer.status in (307, 503), answer.body


@story
async def test_users_act_on_their_own_jobs_only_and_operators_on_all(config: Config) -> None:
    async with Harness(config) as harness:
        await harness.submit(hold=True)

        async def act(what: str, who: str) -> Answer:
            return await harness.ask("POST", f"/v1/jobs/1/{what}", {"command_id": harness.new_id()}, who=who)

        for what in ("release", "hold", "cancel"):
            foreign = await act(what, "bob")
            assert (foreign.status, foreign.code) == (403, "permission_denied"), what
        assert (await act("release", "alice")).status == 200
        assert (await act("hold", "operator")).status == 200
        assert (await act("cancel", "operator")).body["state"] == "CANCELLED"
        own = await harness.submit(user="bob")
        assert (own.status, own.code) == (403, "permission_denied")
        behalf = await harness.submit(who="operator", user="bob")
        assert (behalf.status, behalf.body["user"]) == (201, "bob")


@story
async def test_unknown_outcomes_of_bodies_that_are_the_same_bytes_do_not_confuse_ids(config: Config) -> None:
    async with Harness(config) as harness:
        one, two = harness.job(), harness.job()
        assert json.dumps(one) != json.dumps(two)
        answers = [await harness.ask("POST", "/v1/jobs", body, who="alice") for body in (one, two, one, two)]
        assert [answer.body["job_id"] for answer in answers] == [1, 2, 1, 2]
