"""A drill carried out on a double of the cluster: what ends it, and that its end is always said."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest
from msgspec.structs import replace

from cluster.cli.drills import coordinator as module
from cluster.cli.drills.coordinator import Coordinator, Goals
from cluster.cli.drills.preconditions import Found, Plan
from cluster.client import ApiError, Client
from cluster.schemas import TransferAnswer
from cluster.schemas import operations as ops
from cluster.schemas.drills import DrillAnswer, DrillLockView, DrillProbeAnswer, DrillsAnswer, EndDrillRequest
from cluster.schemas.ledger import StoryAnswer, StoryRow
from cluster.system import Address, SystemClock
from replica.values import MESSAGE_CHARACTERS_MAX
from tests.cluster.cli.drills.test_preconditions import STATUS, WELL
from tests.cluster.harness import story

GOALS = Goals(write_stop_us=500_000, abort_after_us=400_000)
PLAN = Plan(
    id="1", scenario="switchover", target="r2", leader="r1", term=7, preconditions=(), forced=(), will_happen="so"
)
DRILL = DrillAnswer(
    revision=9, drill=3, scenario="switchover", target="r2", by="root", verdict="under way", began=None, until=None
)


class ClusterDouble:
    """What `cluster.client.Client` is to the coordinator. `on_transfer` is called when the fault is done."""

    def __init__(self) -> None:
        self.ids = 0
        self.revision = 10
        self.given: dict[str, int] = {}
        self.ended: EndDrillRequest | None = None
        self.leader = "r1"
        self.silent = self.forgets = self.disagree = self.hangs = False
        self.dead: set[str] = set()
        self.refusal: ApiError | None = None
        self.abort = ""
        self.locks: tuple[DrillLockView, ...] = ()
        self.events: tuple[str, ...] = ()
        self.on_transfer: Callable[[], None] = lambda: None

    def new_command_id(self) -> str:
        self.ids += 1
        return f"id{self.ids}"

    async def call(self, operation: Any, request: Any = None, *, replica: Address | None = None, **more: Any) -> Any:
        await asyncio.sleep(0)
        if operation is ops.START_DRILL:
            return DRILL
        if operation is ops.END_DRILL:
            self.ended = request
            return DRILL
        if operation is ops.PROBE_DRILL:
            return await self._probed(request.command_id)
        if operation is ops.SHOW_DRILL:
            return replace(DRILL, abort=self.abort)
        if operation is ops.LIST_DRILLS:
            return DrillsAnswer(revision=9, drills=(), locks=self.locks)
        if operation is ops.SHOW_STATUS:
            assert replica is not None
            name = f"r{replica.port}"
            if name in self.dead:
                raise ApiError(0, "unreachable", "it does not answer")
            return replace(STATUS, state_digest=name if self.disagree else "same")
        if operation is ops.SHOW_HISTORY:
            rows = [
                StoryRow(revision=9, at="", actor="a", command="c", event=event, sentence="s") for event in self.events
            ]
            return StoryAnswer(revision=9, rows=tuple(rows), read=9, read_at=None, last=9)
        assert operation is ops.TRANSFER_LEADERSHIP
        self.leader = request.name
        self.on_transfer()
        if self.hangs:
            await asyncio.sleep(30)
        return TransferAnswer(revision=9, leader=self.leader, term=8)

    async def _probed(self, command_id: str) -> DrillProbeAnswer:
        if self.refusal is not None:
            raise self.refusal
        if self.silent:
            await asyncio.sleep(30)
        known = self.given.get(command_id)
        if known is None or self.forgets:
            self.revision += 1
            known = self.given[command_id] = self.revision
        return DrillProbeAnswer(revision=known, drill=3)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> ClusterDouble:
    short = {"CONTROL_S": 0.1, "SETTLE_S": 0.6, "LOOK_S": 0.02, "MEMBERS_EVERY": 2, "AGREE_S": 0.2}
    for name, value in short.items():
        monkeypatch.setattr(module, name, value)
    return ClusterDouble()


def carried_out_by(cluster: ClusterDouble) -> Coordinator:
    replicas = {f"r{port}": Address("127.0.0.1", port) for port in (1, 2, 3)}
    return Coordinator(cast(Client, cluster), SystemClock(), replicas, lambda sentence: None)


async def ended(cluster: ClusterDouble, goals: Goals = GOALS) -> EndDrillRequest:
    await carried_out_by(cluster).run(PLAN, goals)
    assert cluster.ended is not None
    return cluster.ended


@story
async def test_a_drill_in_which_nothing_stops_is_passed_with_its_figures(cluster: ClusterDouble) -> None:
    cluster.events = ("stage_retried", "run_requeued", "job_requeued")
    found = await ended(cluster)
    assert found.verdict == "passed", found.sentence
    figures = found.figures
    assert figures["writes_acknowledged"] > 0 and figures["writes_lost"] == 0 and figures["states_agree"] == 1
    assert (figures["stages_again"], figures["runs_again"], figures["nodes_lost"]) == (1, 2, 0)
    assert 0 < figures["write_stop_us"] <= 500_000


@story
async def test_writes_that_stop_for_longer_than_the_goal_fail_it(cluster: ClusterDouble) -> None:
    found = await ended(cluster, Goals(write_stop_us=1, abort_after_us=30_000_000))
    assert found.verdict == "failed" and found.sentence.startswith("writes stopped for ")


@story
async def test_an_acknowledged_write_that_is_gone_fails_it(cluster: ClusterDouble) -> None:
    def forget() -> None:
        cluster.forgets = True

    cluster.on_transfer = forget
    found = await ended(cluster)
    assert found.verdict == "failed" and "acknowledged writes are gone" in found.sentence
    assert found.figures["writes_lost"] > 0


@story
async def test_states_that_differ_and_another_leader_fail_it(cluster: ClusterDouble) -> None:
    cluster.disagree = True

    def other() -> None:
        cluster.leader = "r3"

    cluster.on_transfer = other
    found = await ended(cluster)
    assert found.verdict == "failed"
    assert found.sentence == "not all replicas hold the same state; r3 leads, not r2"


REFUSED = ApiError(409, "wrong_state", "drill 3 is aborted", outcome="refused")

STOPS: dict[str, tuple[Callable[[ClusterDouble], None], str]] = {
    "silence": (lambda cluster: setattr(cluster, "silent", True), "no write was acknowledged for 0.4 s"),
    "refusal": (
        lambda cluster: setattr(cluster, "refusal", REFUSED),
        "a write was refused: drill 3 is aborted",
    ),
    "somebody": (lambda cluster: setattr(cluster, "abort", "eve: the phone rings"), "eve: the phone rings"),
    "lock": (
        lambda cluster: setattr(cluster, "locks", (DrillLockView(by="eve", reason="an audit", since=None),)),
        "eve wants no drills: an audit",
    ),
    "member": (lambda cluster: cluster.dead.add("r3"), "r3 did not answer for 2 s"),
}  # fmt: skip


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("when", ["before the fault", "after it"])
def test_each_stop_condition_ends_it_as_aborted(
    cluster: ClusterDouble, stop: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, sentence = STOPS[stop]
    if when == "after it":
        cluster.on_transfer = lambda: begin(cluster)
    else:
        monkeypatch.setattr(module, "CONTROL_S", 5.0)
        begin(cluster)
    found = asyncio.run(ended(cluster))
    assert (found.verdict, found.sentence) == ("aborted", sentence)
    assert cluster.leader == ("r2" if when == "after it" else "r1"), "before the fault it is not done"


@story
async def test_nobody_waits_for_a_hand_over_that_hangs_once_the_drill_is_to_end(cluster: ClusterDouble) -> None:
    cluster.hangs = True
    cluster.on_transfer = lambda: setattr(cluster, "abort", "eve: enough")
    async with asyncio.timeout(10):
        found = await ended(cluster)
    assert (found.verdict, found.sentence) == ("aborted", "eve: enough")


@story
async def test_what_somebody_else_said_never_keeps_the_end_from_being_written_down(cluster: ClusterDouble) -> None:
    cluster.abort = "eve: \x1b[2J\n" + "x" * MESSAGE_CHARACTERS_MAX
    found = await ended(cluster)
    assert found.verdict == "aborted" and found.sentence.startswith("eve: ")
    assert found.sentence.isprintable() and len(found.sentence) == MESSAGE_CHARACTERS_MAX


@story
async def test_one_that_is_ended_from_the_keyboard_says_so_in_the_ledger(cluster: ClusterDouble) -> None:
    running = asyncio.create_task(carried_out_by(cluster).run(PLAN, GOALS))
    await asyncio.sleep(0.05)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert cluster.ended is not None
    assert (cluster.ended.verdict, cluster.ended.sentence) == ("aborted", "ended from the keyboard")
    left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    assert left == [], "no probe goes on"


@story
async def test_who_looks_for_a_plan_asks_each_replica_itself(cluster: ClusterDouble) -> None:
    async def call(operation: Any, request: Any = None, *, replica: Address | None = None, **more: Any) -> Any:
        if operation is ops.LIST_MEMBERS:
            return WELL.members
        if operation is ops.LIST_DIGESTS:
            return WELL.digests["r1"]
        return await ClusterDouble.call(cluster, operation, request, replica=replica, **more)

    cluster.call = call  # type: ignore[method-assign]
    cluster.dead.add("r3")
    found: Found = await carried_out_by(cluster).look()
    assert set(found.statuses) == {"r1", "r2"} and set(found.digests) == {"r1", "r2", "r3"}
