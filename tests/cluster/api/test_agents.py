"""Agents: orders as soon as they change, reports settled once, silence noticed, progress shown."""

import asyncio
from typing import Any

import msgspec
import pytest

from forebay.cluster.config.config import Config
from forebay.cluster.consensus.interface import PeerStatus
from forebay.cluster.schemas.agents import OperationProgress
from forebay.cluster.security.identity import Role
from forebay.cluster.security.pki import issue, load_authority
from forebay.cluster.server import liveness as liveness_module
from forebay.cluster.server.liveness import (
    INATTENTION_S,
    LEADERLESS_S,
    NODE_DOWN_S,
    ROUND_S,
    AgentReport,
    Liveness,
    NodeWatch,
    Transfer,
    read_news,
)
from forebay.cluster.system.clock import SystemClock
from forebay.replica.model.nodes import Node
from forebay.replica.state.state import EMPTY
from forebay.replica.values.units import Instant
from tests.clocks import ManualClock
from tests.cluster.harness import SCRIPT, Answer, Harness, story, until


async def register(harness: Harness, node: str = "n1", instance: str = "i") -> Answer:
    body = {"command_id": harness.new_id(), "instance": instance, "storage_id": "s", "cpus": 2}
    return await harness.ask("POST", f"/v1/agents/{node}/register", body, who=node)


WOKEN_S = 25.0
"""Seconds in which a poll that waits for 30 s is to be answered because something happened."""


async def poll(harness: Harness, node: str = "n1", **fields: Any) -> Answer:
    body = {"instance": "i", "seen_revision": 0, "wait_s": 0, **fields}
    return await harness.ask("POST", f"/v1/agents/{node}/poll", body, who=node)


async def report(
    harness: Harness, stage: str, result: dict[str, Any], command_id: str | None = None, **fields: Any
) -> Answer:
    row = {
        "command_id": command_id or harness.new_id(),
        "job": 1,
        "attempt": harness.controller.state.jobs[1].attempt,
        "stage": stage,
        "result": result,
        **fields,
    }
    return await harness.ask("POST", "/v1/agents/n1/reports", {"reports": [row]}, who="n1")


@story
async def test_an_agents_certificate_alone_makes_no_node_until_an_operator_has_admitted_it(config: Config) -> None:
    tls = config.tls.certificates
    issue(load_authority(tls), tls, role=Role.AGENT, name="n7", at=SystemClock().now(), replace=True)
    async with Harness(config) as harness:
        for _ in range(2):
            answer = await register(harness, "n7")
            assert (answer.status, answer.code) == (404, "unknown_node")
            assert answer.sentence == "node n7 is not admitted to this cluster"
            assert "forebay node admit n7" in answer.body["error"]["remedy"]
            assert (await poll(harness, "n7")).status == 404
        assert "n7" not in harness.controller.state.nodes
        for who in ("alice", "n7", "n1"):
            body = {"command_id": harness.new_id()}
            assert (await harness.ask("POST", "/v1/nodes/n7/admit", body, who=who)).status == 403
        admitted = await harness.ask("POST", "/v1/nodes/n7/admit", {"command_id": harness.new_id()})
        assert (admitted.status, admitted.body["node"]) == (200, "n7")
        assert (await register(harness, "n7")).status == 200
        assert harness.controller.state.nodes["n7"].cpus == 2
        # Those of the configuration that the cluster was founded with need nobody.
        assert (await register(harness, "n1")).status == 200


@story
async def test_a_job_goes_from_submit_to_complete_by_orders_and_reports_alone(config: Config) -> None:
    async with Harness(config) as harness:
        await register(harness)
        await harness.submit(script=SCRIPT)
        stages = []
        results: dict[str, list[dict[str, Any]]] = {
            "stage_in": [{"type": "done", "files": 0, "size_bytes": 0}],
            "run": [{"type": "started"}, {"type": "ended", "result": 6, "exit_code": 0}],
            "post_run": [{"type": "done"}],
            "stage_out": [{"type": "done"}],
            "teardown": [{"type": "done"}],
        }
        async with asyncio.timeout(20):
            while harness.controller.state.unfinished:
                orders = (await poll(harness)).body["orders"]
                if not orders:
                    await asyncio.sleep(0.01)
                    continue
                (order,) = orders
                stages.append(order["stage"])
                for result in results[order["stage"]]:
                    answer = await report(harness, order["stage"], result, attempt=order["attempt"])
                    assert answer.body["results"][0]["outcome"] == "accepted", answer
        assert stages == ["stage_in", "run", "post_run", "stage_out", "teardown"]
        shown = (await harness.ask("GET", "/v1/jobs/1", who="alice")).body
        assert (shown["state"], shown["burst_buffer_state"], shown["reason"]) == ("COMPLETED", "complete", "None")
        pools = (await harness.ask("GET", "/v1/pools", who="alice")).body["pools"]
        assert all(pool["free_bytes"] == pool["quantity_bytes"] for pool in pools)


@story
async def test_a_poll_is_answered_as_soon_as_the_nodes_orders_change_and_not_before(config: Config) -> None:
    async with Harness(config) as harness:
        await register(harness)
        seen = (await poll(harness)).body["revision"]
        waiting = asyncio.create_task(poll(harness, seen_revision=seen, wait_s=30))
        await until(lambda: harness.controller.orders.waiting == 1)
        await harness.submit(hold=True)
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await harness.submit()
        answer = await waiting
        assert [order["stage"] for order in answer.body["orders"]] == ["stage_in"]
        assert answer.body["revision"] > seen


@story
async def test_a_poll_that_has_not_seen_the_latest_orders_is_answered_at_once(config: Config) -> None:
    async with Harness(config) as harness:
        await register(harness)
        seen = (await poll(harness)).body["revision"]
        await harness.submit()
        answer = await asyncio.wait_for(poll(harness, seen_revision=seen, wait_s=30), WOKEN_S)
        assert len(answer.body["orders"]) == 1


@story
async def test_a_poll_waits_no_longer_than_it_says_and_a_newer_one_replaces_it(config: Config) -> None:
    async with Harness(config) as harness:
        await register(harness)
        seen = (await poll(harness)).body["revision"]
        answer = await asyncio.wait_for(poll(harness, seen_revision=seen, wait_s=0.05), WOKEN_S)
        assert answer.body["orders"] == []
        older = asyncio.create_task(poll(harness, seen_revision=seen, wait_s=30))
        await until(lambda: harness.controller.orders.waiting == 1)
        newer = asyncio.create_task(poll(harness, seen_revision=seen, wait_s=30))
        assert (await asyncio.wait_for(older, WOKEN_S)).status == 200
        assert not newer.done()
        await harness.submit()
        assert len((await newer).body["orders"]) == 1


@story
async def test_a_poll_waits_on_while_the_leadership_changes_and_is_answered_with_a_new_proof(config: Config) -> None:
    async with Harness(config) as harness:
        await register(harness)
        seen = (await poll(harness)).body["revision"]
        waiting = asyncio.create_task(poll(harness, seen_revision=seen, wait_s=30))
        await until(lambda: harness.controller.orders.waiting == 1)
        harness.engine.depose(None)
        harness.engine.lead()
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await harness.submit()
        answer = await asyncio.wait_for(waiting, WOKEN_S)
        assert (answer.status, len(answer.body["orders"])) == (200, 1)


@story
async def test_a_follower_answers_a_poll_once_the_leader_has_said_how_far_it_must_be_and_heard_the_agent(
    config: Config,
) -> None:
    async with Harness(config) as harness:
        await register(harness)
        await harness.submit()
        engine = harness.engine
        engine.depose("r2")
        asked = asyncio.create_task(poll(harness))
        await until(lambda: len(engine.questions) > 1)
        assert not asked.done()
        engine.answers_reads = harness.controller.applied_index + 1
        await until(lambda: len(engine.questions) > 2)
        await asyncio.sleep(0.05)
        assert not asked.done(), "it has not applied what the leader had committed when it was asked"
        engine.answers_reads = harness.controller.applied_index
        harness.controller._index += 1
        harness.controller._release_appliers()
        answer = await asyncio.wait_for(asked, WOKEN_S)
        harness.controller._index -= 1
        assert (answer.status, [order["stage"] for order in answer.body["orders"]]) == (200, ["stage_in"])
        assert read_news(engine.questions[-1]) == [AgentReport("n1", "i")]


@story
async def test_a_follower_without_a_leader_answers_no_poll_and_wakes_those_that_wait(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness_module, "PROVE_S_MAX", 0.2)
    clock = ManualClock(Instant(1_750_000_000_000_000))
    async with Harness(config, clock=clock) as harness:
        await register(harness)
        seen = (await poll(harness)).body["revision"]
        waiting = asyncio.create_task(poll(harness, seen_revision=seen, wait_s=30))
        await until(lambda: harness.controller.orders.waiting == 1)
        harness.engine.depose(None)
        assert (await poll(harness)).status == 503
        harness.controller._duties.poll()
        clock.advance(LEADERLESS_S + 1)
        harness.controller._duties.poll()
        assert (await asyncio.wait_for(waiting, WOKEN_S)).status == 503


@story
async def test_one_proof_serves_all_polls_that_came_meanwhile(config: Config) -> None:
    async with Harness(config) as harness:
        await register(harness)
        before, loop = harness.controller.polls.rounds, asyncio.get_running_loop()
        began_s = loop.time()
        answers = await asyncio.gather(*(poll(harness) for _ in range(200)))
        assert {answer.status for answer in answers} == {200}
        # However long the polls took to come in.
        assert harness.controller.polls.rounds - before <= 2 + (loop.time() - began_s) / ROUND_S


@story
async def test_what_a_follower_says_of_agents_counts_for_known_instances_and_their_own_jobs_alone(
    config: Config,
) -> None:
    async with Harness(config) as harness:
        await register(harness)
        await harness.submit()
        controller = harness.controller
        attempt = controller.state.jobs[1].attempt
        row = OperationProgress(job=1, attempt=attempt, stage="stage_in", bytes_done=5)
        controller.liveness.lead()
        for news in (b"", b"\xc1", b"\x93", msgspec.msgpack.encode([[1, 2, 3]])):
            controller.hear("r2", news)
        said = [AgentReport("n9", "i"), AgentReport("n1", "other", (row,)), AgentReport("n2", "i", (row,))]
        controller.hear("r2", msgspec.msgpack.encode(said))
        assert controller.liveness.last_contact_s("n1") is None
        assert controller.liveness.transfers(controller.state) == []
        controller.hear("r2", msgspec.msgpack.encode([AgentReport("n1", "i", (row,))]))
        assert controller.liveness.last_contact_s("n1") is not None
        assert [one.bytes_done for one in controller.liveness.transfers(controller.state)] == [5]


def test_silence_counts_from_when_the_replica_went_away_that_told_of_a_node() -> None:
    clock = ManualClock(Instant(1))
    liveness = Liveness(clock)
    nodes = EMPTY.nodes.set("n1", Node("n1", 1, "i", "s")).set("n2", Node("n2", 1, "i", "s"))
    state = type(EMPTY)(nodes=nodes)
    peers = [PeerStatus("r2", True, 0, 0, 0.0, 0, False)]
    unused: Any = None
    watch = NodeWatch(liveness, state=lambda: state, leads=lambda: False, submit=unused, peers=lambda: peers)
    marked: list[str] = []
    watch._command = lambda command: marked.append(command.node)  # type: ignore[method-assign]
    liveness.heard("n1", "r2")
    liveness.heard("n2")
    for second in range(int(NODE_DOWN_S) + 1):
        watch.poll()
        clock.advance(1)
        if second == 20:
            peers[0] = msgspec.structs.replace(peers[0], last_contact_s=5.0)
    watch.poll()
    assert marked == ["n2"]
    for _ in range(25):
        clock.advance(1)
        watch.poll()
    assert "n1" in marked


@story
async def test_an_agent_that_is_unknown_or_replaced_is_told_so(config: Config) -> None:
    async with Harness(config) as harness:
        unknown = await poll(harness)
        assert (unknown.status, unknown.code) == (404, "unknown_node")
        await register(harness, instance="first")
        await register(harness, instance="second")
        old = await poll(harness, instance="first")
        assert (old.status, old.code) == (409, "stale_instance")
        assert (await poll(harness, instance="second")).status == 200


@story
async def test_a_report_is_settled_once_and_a_stale_one_is_refused_and_acknowledged(config: Config) -> None:
    async with Harness(config) as harness:
        await register(harness)
        await harness.submit()
        id_ = harness.new_id()
        attempt = harness.controller.state.jobs[1].attempt
        first = await report(harness, "stage_in", {"type": "done"}, id_, attempt=attempt)
        assert first.body["results"] == [{"command_id": id_, "outcome": "accepted", "code": None, "sentence": None}]
        revision = harness.controller.state.revision
        again = await report(harness, "stage_in", {"type": "done"}, id_, attempt=attempt)
        assert again.body["results"] == first.body["results"]
        assert harness.controller.state.revision == revision
        stale = await report(harness, "stage_in", {"type": "failed", "message": "late"}, attempt=attempt)
        assert stale.status == 200
        assert stale.body["results"][0]["outcome"] == "rejected"
        assert stale.body["results"][0]["code"] == "stale_attempt"


@story
async def test_a_report_from_before_a_long_outage_is_still_heard_and_happens_once(config: Config) -> None:
    """Ids expire; what an agent has to tell does not: its attempt is fence enough."""
    clock = ManualClock(Instant(1_750_000_000_000_000))
    async with Harness(config, clock=clock) as harness:
        await register(harness)
        await harness.submit()
        id_, attempt = harness.new_id(), harness.controller.state.jobs[1].attempt
        clock.advance(3_000)
        first = await report(harness, "stage_in", {"type": "done"}, id_, attempt=attempt)
        assert first.body["results"][0]["outcome"] == "accepted", first
        again = await report(harness, "stage_in", {"type": "done"}, id_, attempt=attempt)
        assert again.body["results"][0]["outcome"] == "rejected"
        assert harness.controller.state.buffers[1].state.word in ("staged-in", "pre-run")


@story
async def test_reports_that_were_not_settled_are_not_acknowledged(config: Config) -> None:
    async with Harness(config) as harness:
        await register(harness)
        await harness.submit()
        harness.engine.automatic = False
        asked = asyncio.create_task(report(harness, "stage_in", {"type": "done"}))
        await until(lambda: harness.engine.uncommitted > 0)
        harness.engine.depose(None)
        answer = await asked
        assert (answer.status, answer.code) == (503, "outcome_unknown")


@story
async def test_progress_of_current_attempts_is_shown_and_of_others_is_not(config: Config) -> None:
    async with Harness(config) as harness:
        await register(harness)
        await harness.submit()
        attempt = harness.controller.state.jobs[1].attempt
        row = {
            "job": 1,
            "attempt": attempt,
            "stage": "stage_in",
            "bytes_done": 5,
            "bytes_total": 9,
            "rate_bytes_s": 2.5,
        }
        await poll(harness, progress=[row, {**row, "job": 7}])
        transfers = (await harness.ask("GET", "/v1/transfers", who="bob")).body["transfers"]
        assert [(t["job_id"], t["bytes_done"], t["bytes_total"], t["node"]) for t in transfers] == [(1, 5, 9, "n1")]
        await report(harness, "stage_in", {"type": "done"})
        assert (await harness.ask("GET", "/v1/transfers", who="bob")).body["transfers"] == []


@story
async def test_a_silent_node_is_marked_down_and_taken_back_when_it_is_heard(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock(Instant(1_750_000_000_000_000))
    async with Harness(config, clock=clock) as harness:
        await register(harness)
        poll_duties = harness.controller._duties.poll
        for _ in range(int(NODE_DOWN_S) + 2):
            assert not harness.controller.state.nodes["n1"].down
            clock.advance(1)
            poll_duties()
            await asyncio.sleep(0)
        await until(lambda: harness.controller.state.nodes["n1"].down)
        nodes = (await harness.ask("GET", "/v1/nodes", who="bob")).body["nodes"]
        assert (nodes[0]["state"], nodes[0]["reason"][:28]) == ("DOWN", "its agent has not been heard")
        await poll(harness)
        await until(lambda: not harness.controller.state.nodes["n1"].down)


def test_a_leader_that_was_away_itself_does_not_take_the_nodes_for_dead() -> None:
    clock = ManualClock(Instant(1))
    liveness = Liveness(clock)
    state = type(EMPTY)(nodes=EMPTY.nodes.set("n1", Node("n1", 1, "i", "s")))
    liveness.heard("n1")
    clock.advance(NODE_DOWN_S * 10)
    assert liveness.silent(state) == []
    for _ in range(int(NODE_DOWN_S / INATTENTION_S) + 1):
        clock.advance(INATTENTION_S)
        found = liveness.silent(state)
    assert [name for name, _ in found] == ["n1"]


def test_a_new_leader_counts_silence_from_its_own_start() -> None:
    clock = ManualClock(Instant(1))
    liveness = Liveness(clock)
    state = type(EMPTY)(nodes=EMPTY.nodes.set("n1", Node("n1", 1, "i", "s")))
    for _ in range(100):
        clock.advance(1)
        liveness.lead()
        assert liveness.silent(state) == []


def test_progress_of_a_node_is_replaced_as_a_whole() -> None:
    liveness = Liveness(ManualClock(Instant(1)))
    row = Transfer(1, 1, "n1", "stage_in", 0, 0, 0, 0, 0.0, Instant(1))
    liveness.progressed("n1", [row], EMPTY)
    assert liveness.transfers(EMPTY) == []
