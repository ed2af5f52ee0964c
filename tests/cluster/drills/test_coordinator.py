"""Drills on a double of the cluster: their results, stop conditions, and recorded ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from forebay.cluster.client import ApiError, Client
from forebay.cluster.drills import coordinator as module
from forebay.cluster.drills import final_checks, stop_conditions
from forebay.cluster.drills import prober as probing
from forebay.cluster.drills.coordinator import CHECKS, EVENTS, LEADERS, STATES, WRITES, Coordinator
from forebay.cluster.drills.copies.exercises import ExerciseInputs, Outcome, SnapshotUnavailable
from forebay.cluster.drills.copies.replicas import CopyFailed
from forebay.cluster.drills.figures import Probe
from forebay.cluster.drills.helper import BeginRequest, EndRequest, HelperAnswer, HelperRefused, RenewRequest
from forebay.cluster.drills.machines import Machines
from forebay.cluster.drills.preconditions import DURATION_MORE_S, ClusterFacts, DrillRequest, Plan, Site
from forebay.cluster.drills.prober import CONNECTIONS, Report, make_sender, send_writes
from forebay.cluster.drills.probes import MeasurementFailed, Probes, Writer
from forebay.cluster.drills.report import render_page
from forebay.cluster.drills.stop_conditions import (
    OF_COPIES,
    OF_MEMBERS,
    OF_WRITES,
    Goals,
    Observations,
    StopConditions,
)
from forebay.cluster.schemas import NodesAnswer, TransferAnswer, TransfersAnswer
from forebay.cluster.schemas import operations as ops
from forebay.cluster.schemas.drills import DrillAnswer, DrillLockView, DrillProbeAnswer, DrillsAnswer, EndDrillRequest
from forebay.cluster.schemas.ledger import LeadersAnswer, LeaderTermView, StoryAnswer, StoryRow
from forebay.cluster.system import Address, SystemClock
from forebay.replica.values import DRILL_S_MAX, MESSAGE_CHARACTERS_MAX
from tests.cluster.drills.test_preconditions import STATUS, WELL
from tests.cluster.harness import story

GOALS = Goals(write_stop_us=60_000_000, abort_after_us=60_000_000, slower_max=0)
"""Limits so large that a busy machine does not end these drills."""
IMPATIENT = Goals(write_stop_us=500_000, abort_after_us=400_000)
PLAN = Plan(
    id="1",
    scenario="switchover",
    target="r2",
    leader="r1",
    term=7,
    preconditions=(),
    forced=(),
    will_happen="so",
    stops_writes=True,
)
DRILL = DrillAnswer(
    revision=9,
    drill=3,
    scenario="switchover",
    target="r2",
    by="root",
    verdict="under way",
    until=None,
    began="2026-01-31T12:00:00Z",
)


TERM = LeaderTermView(
    term=PLAN.term, leader="r1", first_index=1, last_index=STATUS.commit_index, from_at="2026-01-31T11:00:00Z",
    to_at=None, silent_s=None,
)  # fmt: skip
"""Term in which the plan is made."""

REPLICAS = {f"r{port}": Address("127.0.0.1", port) for port in (1, 2, 3)}


class ClusterDouble:
    """Double of `cluster.client.Client`. `on_transfer` is called at a switchover."""

    def __init__(self) -> None:
        self.ids = 0
        self.revision = 10
        self.given: dict[str, int] = {}
        self.ended: EndDrillRequest | None = None
        self.leader = "r1"
        self.silent = self.forgets = self.disagree = self.hangs = self.mute = False
        self.dead: set[str] = set()
        self.rejection: ApiError | None = None
        self.abort = self.second = self.unmeasured = self.alarm = ""
        self.takes_s = 0.0
        self.terms = (TERM,)
        self.refuses: ApiError | None = None
        """The answer to the request of a switchover."""
        self.fails: dict[str, ApiError] = {}
        """Operations that fail after the measurements -> error."""
        self.is_done = False
        self.told: list[str] = []
        self.odd, self.not_ready = False, ""
        self.nodes = {row.name: row.state for row in WELL.nodes}
        self.locks: tuple[DrillLockView, ...] = ()
        self.events: tuple[str, ...] = ()
        self.stretch = 1
        """Revisions that one event page covers."""
        self.on_transfer: Callable[[], None] = lambda: None

    def led(self, name: str, from_at: str = DRILL.began or "") -> None:
        """Record a later term with this leader in the history."""
        last = self.terms[-1]
        self.terms = (*self.terms, replace(last, term=last.term + 1, leader=name, from_at=from_at))

    def new_command_id(self) -> str:
        self.ids += 1
        return f"id{self.ids}"

    async def call(self, operation: Any, request: Any = None, *, replica: Address | None = None, **more: Any) -> Any:
        await asyncio.sleep(0)
        if self.is_done and operation.name in self.fails:
            raise self.fails[operation.name]
        if operation is ops.LIST_LEADERS:
            return LeadersAnswer(revision=9, terms=self.terms)
        if operation is ops.START_DRILL:
            return DRILL
        if operation is ops.END_DRILL:
            self.ended = request
            return DRILL
        if operation is ops.PROBE_DRILL:
            return await self._probed(request.command_id)
        if operation is ops.SHOW_DRILL:
            return replace(DRILL, abort=self.abort, second=self.second)
        if operation is ops.LIST_NODES:
            if self.mute:
                await asyncio.sleep(more["deadline_s"])
                raise ApiError(0, "unreachable", "it does not answer")
            rows = tuple(replace(row, last_contact_s=0.0, state=self.nodes[row.name]) for row in WELL.nodes)
            return NodesAnswer(revision=9, nodes=rows)
        if operation is ops.LIST_DIGESTS:
            return replace(WELL.digests["r1"], verdict="odd" if self.odd else "agrees")
        if operation is ops.LIST_DRILLS:
            return DrillsAnswer(revision=9, drills=(), locks=self.locks)
        if operation is ops.SHOW_STATUS and replica is None:
            return STATUS
        if operation is ops.SHOW_STATUS:
            assert replica is not None
            name = f"r{replica.port}"
            if name in self.dead:
                raise ApiError(0, "unreachable", "it does not answer")
            return replace(
                STATUS, leader=self.leader, ready=name != self.not_ready, state_digest=name if self.disagree else "same"
            )
        if operation is ops.SHOW_HISTORY:
            rows = [
                StoryRow(revision=at, at="", actor="a", command="c", event=event, sentence="s", detail={"node": "n1"})
                for at, event in enumerate(self.events, start=10)
            ]
            first, last = max(10, 1 + (more["after"] or 0)), 9 + len(rows)
            read = min(last, first + self.stretch - 1)
            stretch = tuple(row for row in rows if first <= row.revision <= read)
            return StoryAnswer(revision=last, rows=stretch, read=read, read_at=None, last=last)
        assert operation is ops.TRANSFER_LEADERSHIP
        if self.refuses is not None:
            self.on_transfer()
            raise self.refuses
        self.leader = request.name
        self.led(request.name)
        self.on_transfer()
        if self.hangs:
            await asyncio.sleep(30)
        return TransferAnswer(revision=9, leader=self.leader, term=8)

    async def ask_once(self, operation: Any, request: Any, *, replica: Address, timeout_s: float, **more: Any) -> Any:
        return await self.call(operation, request, **more)

    async def _probed(self, command_id: str) -> DrillProbeAnswer:
        if self.rejection is not None:
            raise self.rejection
        await asyncio.sleep(30 if self.silent else self.takes_s)
        known = self.given.get(command_id)
        if known is None or self.forgets:
            self.revision += 1
            known = self.given[command_id] = self.revision
        return DrillProbeAnswer(revision=known, drill=3)


class MachinesDouble:
    """Double of `cluster.drills.machines.Machines` with one helper."""

    def __init__(self, cluster: ClusterDouble) -> None:
        self.cluster = cluster
        self.halt_file = ""
        self.config = self.identity = None
        self.asked: list[Any] = []
        self.refuses: type[Any] | None = None
        self.broken = False
        self.on_begin: Callable[[], None] = lambda: None
        self.on_end: Callable[[], None] = lambda: None

    def site(self) -> Site:
        return Site()

    async def certificates_s(self) -> dict[str, float]:
        return WELL.certificates_s

    async def look(self, scenario: str, target: str) -> tuple[HelperAnswer | str, float]:
        return f"{scenario} of {target}; so", 0.0

    async def channel(self, target: str) -> MachinesDouble:
        return self

    async def ask(self, ask: Any) -> HelperAnswer:
        await asyncio.sleep(0)
        if self.refuses is not None and isinstance(ask, self.refuses):
            raise HelperRefused("it does not", "so")
        self.asked.append(ask)
        if isinstance(ask, BeginRequest):
            self.broken = True
            self.on_begin()
        if isinstance(ask, EndRequest):
            self.broken = False
            self.on_end()
        return HelperAnswer(done=True)

    async def close(self) -> None:
        pass


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> ClusterDouble:
    short = {
        "CONTROL_S": 0.1, "LATE_S": 0.2, "SETTLE_S": 0.6, "LOOK_S": 0.02, "MEMBERS_EVERY_S": 0.04, "BACK_S": 0.2,
        "RENEW_EVERY_S": 0.1, "SLOW_US_LEAST": 60_000_000,
    }  # fmt: skip
    for name, value in short.items():
        for place in (module, stop_conditions):
            if hasattr(place, name):
                monkeypatch.setattr(place, name, value)
    for name, value in (("AGREE_S", 0.2), ("LOOK_S", 0.02)):
        monkeypatch.setattr(final_checks, name, value)
    monkeypatch.setattr(probing, "PROBE_S", 0.5)
    return ClusterDouble()


def writes_of(cluster: ClusterDouble) -> Writer:
    """Return a writer that sends writes to the double from this process."""

    @contextlib.asynccontextmanager
    async def writing(drill: int, take: Callable[[Report], None]) -> AsyncIterator[Callable[[], str]]:
        ask = make_sender(cast(Client, cluster), REPLICAS, drill)
        begun = asyncio.Event()

        def tell(report: Report) -> None:
            if report.command_id:
                take(report)
            else:
                begun.set()

        sending = asyncio.create_task(send_writes(REPLICAS, ask, cluster.new_command_id, SystemClock(), tell))
        await begun.wait()
        try:
            yield lambda: cluster.unmeasured
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    return writing


def carried_out_by(cluster: ClusterDouble, machines: MachinesDouble | None = None, **more: Any) -> Coordinator:
    machines, writer = machines or MachinesDouble(cluster), more.pop("writer", None) or writes_of(cluster)

    def tell(sentence: str) -> None:
        cluster.told.append(sentence)
        cluster.is_done |= sentence.startswith("checking every acknowledged write")

    return Coordinator(cast(Client, cluster), SystemClock(), REPLICAS, cast(Machines, machines), writer, tell, **more)


async def ended(cluster: ClusterDouble, goals: Goals = GOALS) -> EndDrillRequest:
    await carried_out_by(cluster).run(PLAN, goals)
    assert cluster.ended is not None
    return cluster.ended


@story
async def test_a_drill_without_a_stop_passes_with_figures(cluster: ClusterDouble) -> None:
    cluster.events = ("stage_retried", "run_requeued", "job_requeued")
    found = await ended(cluster)
    assert found.verdict == "passed", found.sentence
    figures = found.figures
    assert figures["writes_acknowledged"] > 0 and figures["writes_lost"] == 0 and figures["states_agree"] == 1
    assert (figures["stages_again"], figures["runs_again"], figures["nodes_lost"]) == (1, 2, 0)
    assert 0 < figures["write_stop_us"] and figures["client_late_us"] >= 0


@story
async def test_the_delay_of_the_measuring_client_is_recorded(cluster: ClusterDouble) -> None:
    def busy() -> None:
        clock = SystemClock()
        until_s = clock.monotonic_s() + 0.2
        while clock.monotonic_s() < until_s:
            pass

    cluster.on_transfer = busy
    figures = (await ended(cluster)).figures
    assert figures["client_late_us"] >= 150_000 and figures["write_stop_us"] >= 150_000


@story
async def test_a_write_stop_beyond_the_goal_fails_the_drill(cluster: ClusterDouble) -> None:
    found = await ended(cluster, Goals(write_stop_us=1, abort_after_us=30_000_000))
    assert found.verdict == "failed" and found.sentence.startswith("writes stopped for ")


@story
async def test_a_lost_acknowledged_write_fails_the_drill(cluster: ClusterDouble) -> None:
    def forget() -> None:
        cluster.forgets = True

    cluster.on_transfer = forget
    found = await ended(cluster)
    assert found.verdict == "failed" and "acknowledged writes are lost" in found.sentence
    assert found.figures["writes_lost"] > 0


@story
async def test_differing_states_and_a_wrong_leader_fail_the_drill(cluster: ClusterDouble) -> None:
    cluster.disagree = True

    def other() -> None:
        cluster.leader, cluster.terms = "r3", (TERM,)
        cluster.led("r3")

    cluster.on_transfer = other
    found = await ended(cluster)
    assert found.verdict == "failed"
    assert found.sentence == "the replicas' states differ; r3 leads, not r2"


REFUSED = ApiError(409, "wrong_state", "drill 3 is aborted", outcome="rejected")

STOPS: dict[str, tuple[Callable[[ClusterDouble, MachinesDouble], None], str]] = {
    "writes stop": (lambda cluster, _: setattr(cluster, "silent", True), "no write was acknowledged for 0.4 s"),
    "writes are slower": (lambda cluster, _: setattr(cluster, "takes_s", 0.2), "the p99 write latency is "),
    "a write is rejected": (
        lambda cluster, _: setattr(cluster, "rejection", REFUSED),
        "a write was rejected: drill 3 is aborted",
    ),
    "measurement failed": (lambda cluster, _: setattr(cluster, "unmeasured", "it has ended"), "it has ended"),
    "aborted by an operator": (
        lambda cluster, _: setattr(cluster, "abort", "eve: the phone rings"),
        "eve: the phone rings",
    ),
    "the halt file exists": (
        lambda _, machines: setattr(machines, "halt_file", "/etc/drill.halt"),
        "/etc/drill.halt exists",
    ),
    "drills are locked": (
        lambda cluster, _: setattr(cluster, "locks", (DrillLockView(by="eve", reason="an audit", since=None),)),
        "drills are locked by eve: an audit",
    ),
    "a member is silent": (lambda cluster, _: cluster.dead.add("r3"), "r3 did not answer within "),
    "a node is down": (lambda cluster, _: cluster.nodes.update(n2="DOWN"), "n2 went DOWN and is not the target"),
    "states differ": (lambda cluster, _: setattr(cluster, "odd", True), " differ in state from the other replicas"),
    "the site's query": (lambda cluster, _: setattr(cluster, "alarm", "Prometheus says so"), "Prometheus says so"),
}
"""Stop condition -> function that makes it hold, and its message."""

HOLDS_OF = {"writes stop": IMPATIENT, "writes are slower": replace(GOALS, slower_max=10)}


def test_every_stop_condition_is_tested() -> None:
    assert STOPS.keys() == OF_WRITES.keys() | OF_MEMBERS.keys()
    assert COPY_STOPS.keys() == OF_COPIES.keys() | OF_MEMBERS.keys()


@pytest.mark.parametrize(
    ("stop", "when"),
    [
        *((stop, "after it") for stop in STOPS),
        # A node that was DOWN before is no reason, and neither is a state without a comparable one.
        *((stop, "before it") for stop in STOPS if stop not in ("a node is down", "writes are slower")),
    ],
)
def test_each_stop_condition_aborts_a_drill(
    cluster: ClusterDouble, stop: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, sentence = STOPS[stop]
    machines = MachinesDouble(cluster)
    monkeypatch.setattr(module, "SETTLE_S", 20.0)
    if when == "after it":
        cluster.on_transfer = lambda: begin(cluster, machines)
    else:
        monkeypatch.setattr(module, "CONTROL_S", 20.0)
        begin(cluster, machines)
    found = stopped(cluster, machines, PLAN, stop, monkeypatch)
    assert found.verdict == "aborted" and sentence in found.sentence
    assert cluster.leader == ("r2" if when == "after it" else "r1"), "before the fault it is not done"


def stopped(
    cluster: ClusterDouble, machines: MachinesDouble, plan: Plan, stop: str, monkeypatch: pytest.MonkeyPatch
) -> EndDrillRequest:
    """Return the end of a drill in which a condition holds."""
    if stop == "writes are slower":
        monkeypatch.setattr(stop_conditions, "SLOW_US_LEAST", 100_000)
        monkeypatch.setattr(stop_conditions, "CALM_S", 0.4)

    async def alarm() -> str:
        return cluster.alarm

    async def run() -> None:
        await carried_out_by(cluster, machines, alarm=alarm).run(plan, HOLDS_OF.get(stop, GOALS))

    asyncio.run(run())
    assert cluster.ended is not None
    return cluster.ended


@story
async def test_an_aborted_drill_does_not_wait_for_a_hanging_transfer(cluster: ClusterDouble) -> None:
    cluster.hangs = True
    cluster.on_transfer = lambda: setattr(cluster, "abort", "eve: enough")
    async with asyncio.timeout(60):
        found = await ended(cluster)
    assert (found.verdict, found.sentence) == ("aborted", f"eve: enough{NOTHING_CHECKED}")


@story
async def test_long_operator_texts_do_not_prevent_recording_the_end(cluster: ClusterDouble) -> None:
    cluster.abort = "eve: \x1b[2J\n" + "x" * MESSAGE_CHARACTERS_MAX
    found = await ended(cluster)
    assert found.verdict == "aborted" and found.sentence.startswith("eve: ")
    assert found.sentence.isprintable() and len(found.sentence) == MESSAGE_CHARACTERS_MAX


@story
async def test_a_keyboard_interrupt_is_recorded_in_the_ledger(cluster: ClusterDouble) -> None:
    running = asyncio.create_task(carried_out_by(cluster).run(PLAN, GOALS))
    await asyncio.sleep(0.05)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert cluster.ended is not None
    assert (cluster.ended.verdict, cluster.ended.sentence) == ("aborted", "interrupted by Ctrl-C or SIGTERM")
    left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    assert left == [], "no probe goes on"


def answer_who_looks(cluster: ClusterDouble) -> None:
    """Let the double also answer the requests of a plan."""

    async def call(operation: Any, request: Any = None, *, replica: Address | None = None, **more: Any) -> Any:
        if operation is ops.LIST_MEMBERS:
            return WELL.members
        if operation is ops.LIST_TRANSFERS:
            return TransfersAnswer(revision=9, transfers=())
        return await ClusterDouble.call(cluster, operation, request, replica=replica, **more)

    cluster.call = call  # type: ignore[method-assign]


@story
async def test_a_plan_asks_each_replica_directly(cluster: ClusterDouble) -> None:
    answer_who_looks(cluster)
    cluster.dead.add("r3")
    found: ClusterFacts = await carried_out_by(cluster).look(DrillRequest(scenario="switchover"))
    assert set(found.statuses) == {"r1", "r2"} and set(found.digests) == {"r1", "r2", "r3"}


# ---- with a helper


NOTHING_CHECKED = f"; not checked: {', '.join(CHECKS)}"
HANG = replace(PLAN, scenario="leader-hang", target="r1", hold_s=1)


async def held(
    cluster: ClusterDouble, machines: MachinesDouble, plan: Plan = HANG, goals: Goals = GOALS
) -> EndDrillRequest:
    await carried_out_by(cluster, machines).run(plan, goals)
    assert cluster.ended is not None and not machines.broken, "nothing is left of it"
    return cluster.ended


@story
async def test_a_fault_is_injected_renewed_and_undone_while_others_lead(cluster: ClusterDouble) -> None:
    machines = MachinesDouble(cluster)
    machines.on_begin = lambda: setattr(cluster, "leader", "r3")
    found = await held(cluster, machines)
    assert found.verdict == "passed", found.sentence
    kinds = [type(ask) for ask in machines.asked]
    assert kinds[0] is BeginRequest and kinds.count(RenewRequest) >= 3 and kinds[-1] is EndRequest
    assert machines.asked[0] == BeginRequest(3, "1", "leader-hang", "r1", 1 + DURATION_MORE_S)
    assert found.figures["held_us"] >= 1_000_000 and found.figures["target_back_us"] >= 0


@story
async def test_a_hanging_leader_does_not_hide_its_successor(
    cluster: ClusterDouble,
) -> None:
    machines = MachinesDouble(cluster)
    timers = list[asyncio.TimerHandle]()

    def hang() -> None:
        cluster.mute = True
        elected = asyncio.get_running_loop().call_later(0.4, setattr, cluster, "leader", "r3")
        timers.append(elected)

    machines.on_begin = hang
    machines.on_end = lambda: setattr(cluster, "mute", False)
    found = await held(cluster, machines)
    assert found.verdict == "passed" and timers, found.sentence


FAILS: dict[str, tuple[Callable[[ClusterDouble], None], Plan, str]] = {
    "nobody else led": (lambda cluster: None, HANG, "no other replica led while r1 could not"),
    "its node was not down": (
        lambda cluster: None,
        replace(HANG, scenario="node-down", target="n1"),
        "n1 did not go DOWN",
    ),
    "another node was lost": (
        lambda cluster: setattr(cluster, "events", ("node_went_down",)),
        replace(HANG, scenario="agent-kill", target="n2"),
        "1 other nodes went DOWN",
    ),
    "a script ran again": (
        lambda cluster: setattr(cluster, "events", ("run_requeued",)),
        replace(HANG, scenario="agent-kill", target="n1"),
        "1 jobs were rerun",
    ),
}  # fmt: skip


@pytest.mark.parametrize("why", FAILS)
def test_unexpected_outcomes_fail_the_drill(cluster: ClusterDouble, why: str) -> None:
    begin, plan, sentence = FAILS[why]
    machines = MachinesDouble(cluster)
    machines.on_begin = lambda: begin(cluster)
    found = asyncio.run(held(cluster, machines, plan))
    assert found.verdict == "failed" and sentence in found.sentence, found.sentence


HELPER_STOPS: dict[str, tuple[Callable[[ClusterDouble, MachinesDouble], None], str]] = {
    **STOPS,
    "the lease ends": (
        lambda cluster, machines: setattr(machines, "refuses", RenewRequest),
        "the fault ended early: it does not; so",
    ),
}


@pytest.mark.parametrize("stop", HELPER_STOPS)
def test_each_stop_condition_undoes_the_fault_and_aborts_the_drill(
    cluster: ClusterDouble, stop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, sentence = HELPER_STOPS[stop]
    machines = MachinesDouble(cluster)
    machines.on_begin = lambda: begin(cluster, machines)
    found = stopped(cluster, machines, replace(HANG, hold_s=20), stop, monkeypatch)
    assert found.verdict == "aborted" and sentence in found.sentence
    assert not machines.broken


@story
async def test_a_keyboard_interrupt_undoes_the_fault(cluster: ClusterDouble) -> None:
    machines = MachinesDouble(cluster)
    begun = asyncio.Event()
    machines.on_begin = begun.set
    running = asyncio.create_task(carried_out_by(cluster, machines).run(HANG, GOALS))
    await begun.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not machines.broken and cluster.ended is not None and cluster.ended.verdict == "aborted"


@story
async def test_a_rejecting_helper_ends_the_drill_with_its_reason(cluster: ClusterDouble) -> None:
    machines = MachinesDouble(cluster)
    machines.refuses = BeginRequest
    found = await held(cluster, machines)
    assert (found.verdict, found.sentence) == ("aborted", f"the helper failed: it does not; so{NOTHING_CHECKED}")


@story
async def test_only_the_target_of_a_fault_may_be_silent(cluster: ClusterDouble) -> None:
    machines = MachinesDouble(cluster)

    def gone() -> None:
        cluster.leader = "r3"
        cluster.dead.add("r1")

    machines.on_begin = gone
    machines.on_end = lambda: cluster.dead.discard("r1")
    found = await held(cluster, machines)
    assert found.verdict == "passed", found.sentence


# ---- impossible checks, and facts from the history


MEASURED = {"write_stop_us", "write_stop_at_us", "user_write_stop_us", "read_stop_us", "control_write_gap_us",
            "client_late_us", "writes_acknowledged", "fault_at_us", "watched_us", "goal_us"}  # fmt: skip
"""Figures of every drill whose fault began."""
AWAY = ApiError(503, "no_leader", "no replica leads", outcome="unknown")
CHECKED_BY = {"probe_drill": WRITES, "show_status": STATES, "show_history": EVENTS, "list_leaders": LEADERS}
"""Operation -> the only check in this test that needs it."""


@given(st.sets(st.sampled_from(sorted(CHECKED_BY))))
@settings(max_examples=2 ** len(CHECKED_BY), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_an_impossible_check_is_named_and_keeps_the_figures(cluster: ClusterDouble, failing: set[str]) -> None:
    cluster.__init__()  # type: ignore[misc]  # one for each example
    cluster.fails = dict.fromkeys(failing, AWAY)
    # The history is needed only if the client missed the event.
    cluster.refuses = ApiError(409, "not_taken", "r2 has not taken over yet")
    cluster.led("r2")
    if "show_status" in failing:
        cluster.fails["list_leaders"] = AWAY
    found = asyncio.run(ended(cluster))
    missing = [CHECKED_BY[name] for name in CHECKED_BY if name in cluster.fails]
    assert found.verdict == ("failed" if missing else "passed"), found.sentence
    assert found.figures.keys() >= MEASURED
    _, _, named = found.sentence.partition("; not checked: ")
    assert [name for name in CHECKS if name in named] == [name for name in CHECKS if name in missing]
    assert "gone" not in found.sentence or not missing, "silence is no loss"
    assert ("states_agree" in found.figures) == (STATES not in missing)
    assert drawn(found)


def drawn(found: EndDrillRequest) -> str:
    """Return the page of a drill that ended so."""
    shown = {name: getattr(found, name) for name in ("verdict", "sentence", "figures")}
    return render_page(replace(DRILL, ended="2026-01-31T12:00:30Z", **shown), (), (TERM,), (), "made")


@story
async def test_an_aborted_drill_keeps_its_figures_and_names_missing_checks(
    cluster: ClusterDouble,
) -> None:
    machines = MachinesDouble(cluster)
    machines.on_begin = lambda: setattr(cluster, "abort", "eve: enough")
    found = await held(cluster, machines)
    assert (found.verdict, found.sentence) == ("aborted", f"eve: enough{NOTHING_CHECKED}")
    assert found.figures.keys() >= MEASURED | {"begun_us", "held_us"} and drawn(found)


@story
async def test_a_drill_aborted_before_the_fault_has_only_control_figures(
    cluster: ClusterDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CONTROL_S", 20.0)
    cluster.abort = "eve: enough"
    found = await ended(cluster)
    assert (found.verdict, found.sentence) == ("aborted", "eve: enough")
    assert "control_write_gap_us" in found.figures and "write_stop_us" not in found.figures and drawn(found)


@story
async def test_a_drill_end_that_cannot_be_recorded_is_printed_with_figures(cluster: ClusterDouble) -> None:
    cluster.fails = {"end_drill": AWAY}
    with pytest.raises(ApiError):
        await carried_out_by(cluster).run(PLAN, GOALS)
    assert "could not be recorded: passed: " in cluster.told[-1] and "write_stop_us" in cluster.told[-1]


@story
async def test_a_target_that_leads_after_a_failed_request_counts_as_leader(cluster: ClusterDouble) -> None:
    cluster.refuses = ApiError(409, "not_taken", "r2 has not taken over yet")
    cluster.on_transfer = lambda: setattr(cluster, "leader", "r2")
    found = await ended(cluster)
    assert found.verdict == "passed" and found.sentence.startswith("r2 took over; "), found.sentence


@story
async def test_a_target_that_never_leads_fails_the_drill_with_the_reason(cluster: ClusterDouble) -> None:
    cluster.refuses = ApiError(409, "lagging", "r2 is 600 entries behind")
    found = await ended(cluster)
    assert (found.verdict, found.sentence) == ("failed", "r1 leads, not r2: r2 is 600 entries behind")
    assert found.figures.keys() >= MEASURED and "handover_us" not in found.figures


@pytest.mark.parametrize(
    ("from_at", "verdict"), [("2026-01-31T12:00:00.2Z", "passed"), ("2026-01-31T12:00:59Z", "failed")]
)
def test_the_history_shows_the_leader_that_the_client_missed(
    cluster: ClusterDouble, from_at: str, verdict: str
) -> None:
    machines = MachinesDouble(cluster)
    machines.on_begin = lambda: cluster.led("r3", from_at)
    found = asyncio.run(held(cluster, machines))
    assert found.verdict == verdict, found.sentence
    if verdict == "failed":
        assert found.sentence == "no other replica led while r1 could not; r3 led afterwards"


@story
async def test_a_node_down_only_in_the_history_counts_as_down(cluster: ClusterDouble) -> None:
    cluster.events = ("node_went_down",)
    found = await held(cluster, MachinesDouble(cluster), replace(HANG, scenario="node-down", target="n1"))
    assert found.verdict == "passed" and found.figures["nodes_lost"] == 0, found.sentence


@story
async def test_an_unplanned_write_stop_is_reported_as_such(cluster: ClusterDouble) -> None:
    plan = replace(HANG, scenario="follower-stop", target="r2", stops_writes=False)
    found = await held(cluster, MachinesDouble(cluster), plan, Goals(write_stop_us=1, abort_after_us=30_000_000))
    assert found.verdict == "failed" and "1 is the goal" not in found.sentence
    assert found.sentence.endswith("and the goal is 0.001 ms, though the plan expects no stop")


@story
async def test_the_users_program_has_its_own_client(cluster: ClusterDouble) -> None:
    """A client that the drill uses for other requests asks replicas last that did not answer."""
    its_own = ClusterDouble()
    coordinator = carried_out_by(cluster, user=lambda: contextlib.nullcontext(cast(Client, its_own)))
    await coordinator.run(PLAN, GOALS)
    assert its_own.given, "the user's program wrote with it"


async def unwell(stops: StopConditions) -> str:
    """Return the stop condition of the cluster that holds."""
    return "; ".join([said for ask in OF_MEMBERS.values() if (said := await ask(stops))])


@pytest.mark.parametrize("target", ["r1", "n1"])
@pytest.mark.parametrize("turns", ["into the target", "back into one of many"])
def test_a_changing_target_is_not_mistaken_for_a_lost_member(cluster: ClusterDouble, target: str, turns: str) -> None:
    before, after = frozenset({target}), frozenset[str]()
    if turns == "into the target":
        before, after = after, before

    class Turning(ClusterDouble):
        """The target changes before the last answer."""

        async def call(self, operation: Any, request: Any = None, **more: Any) -> Any:
            late = ops.LIST_NODES if target == "n1" else ops.SHOW_STATUS
            try:
                return await super().call(operation, request, **more)
            finally:
                if operation is late:
                    stops.spared = after

    double = Turning()
    double.dead = {target} if turns == "into the target" else set()
    double.nodes["n1"] = "DOWN" if target == "n1" else "UP"
    stops = StopConditions(cast(Client, double), SystemClock(), REPLICAS, cast(Machines, MachinesDouble(double)))
    stops.spared, stops.up = before, frozenset({"n1"})
    assert asyncio.run(unwell(stops)) == ""
    stops.spared, after = frozenset(), frozenset()
    double.dead = {target}
    assert target in asyncio.run(unwell(stops)), "somebody else is"


@story
async def test_the_node_of_a_target_agent_may_be_down(cluster: ClusterDouble) -> None:
    cluster.events = ("node_went_down",)
    found = await held(cluster, MachinesDouble(cluster), replace(HANG, scenario="agent-kill", target="n1"))
    assert found.verdict == "passed" and found.figures["nodes_lost"] == 0


@story
async def test_a_target_that_does_not_return_fails_the_drill(
    cluster: ClusterDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    machines = MachinesDouble(cluster)
    machines.on_begin = lambda: setattr(cluster, "leader", "r3")
    machines.on_end = lambda: setattr(cluster, "not_ready", "r1")
    found = await held(cluster, machines)
    assert found.verdict == "failed" and "r1 was not back within 0.2 s" in found.sentence


@story
async def test_without_a_measuring_process_no_fault_is_injected(cluster: ClusterDouble) -> None:
    @contextlib.asynccontextmanager
    async def none(drill: int, take: Callable[[Report], None]) -> AsyncIterator[Callable[[], str]]:
        raise MeasurementFailed("it does not begin")
        yield lambda: ""

    machines = MachinesDouble(cluster)
    await carried_out_by(cluster, machines, writer=none).run(HANG, GOALS)
    assert cluster.ended is not None and machines.asked == []
    assert (cluster.ended.verdict, cluster.ended.sentence) == ("aborted", "it does not begin")


@story
async def test_writes_go_to_the_answering_replica_and_to_all_if_it_is_silent() -> None:
    asked, told = list[tuple[str, str]](), list[Report]()
    leader, never = ["r3"], asyncio.Event()
    moved, over = asyncio.Event(), asyncio.Event()

    async def ask(name: str, command_id: str) -> int | None:
        asked.append((name, command_id))
        if name == "r1":
            await never.wait()
        (moved if len(told) > 20 else asyncio.Event()).set()
        (over if len(told) > 40 else asyncio.Event()).set()
        return 7 if name == leader[0] else None

    ids = iter(range(10_000))
    sending = asyncio.create_task(send_writes(REPLICAS, ask, lambda: f"id{next(ids)}", SystemClock(), told.append))
    await moved.wait()
    leader[0], count = "r2", len(asked)
    await over.wait()
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    writes = [report for report in told if report.command_id]
    assert {name for name, _ in asked[:count]} == {name for name, _ in asked[count:]} | {"r1"} == set(REPLICAS)
    assert sum(name == "r1" for name, _ in asked) <= CONNECTIONS, "one that hangs gets no more"
    by_id = [{name for name, sent in asked if sent == report.command_id} for report in writes]
    assert {"r2"} in by_id and {"r3"} in by_id and set(REPLICAS) in by_id
    assert len({report.command_id for report in writes}) == len(writes), "each is reported once"


@story
async def test_a_drill_waits_for_the_second_operator(cluster: ClusterDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    machines = MachinesDouble(cluster)
    monkeypatch.setattr(module, "SECOND_S", 0)
    await carried_out_by(cluster, machines, require_second=True).run(HANG, GOALS)
    assert cluster.ended is not None and cluster.ended.sentence == "no second operator approved the drill within 0 s"
    assert machines.asked == []
    monkeypatch.setattr(module, "ALIVE_EVERY_S", 0.0)
    monkeypatch.setattr(module, "SECOND_S", 1)
    cluster.given.clear()
    await carried_out_by(cluster, machines, require_second=True).run(HANG, GOALS)
    assert cluster.given and machines.asked == [], "the cluster knows meanwhile that somebody is there"
    monkeypatch.setattr(module, "ALIVE_EVERY_S", 1.0)
    monkeypatch.setattr(module, "SECOND_S", 5)
    cluster.second, machines.on_begin = "eve", lambda: setattr(cluster, "leader", "r3")
    await carried_out_by(cluster, machines, require_second=True).run(HANG, GOALS)
    assert cluster.ended.verdict == "passed"


@story
async def test_a_plan_includes_the_helpers_answer(cluster: ClusterDouble) -> None:
    answer_who_looks(cluster)
    found = await carried_out_by(cluster).look(DrillRequest(scenario="leader-hang"))
    assert found.helper == "leader-hang of r1; so"


def answered(took_s: float, until_s: float, every_s: float = 0.01) -> list[Probe]:
    """Return writes that were sent before a time, with this latency."""
    moments = [until_s - every_s * number for number in range(1, round(3 / every_s))]
    return [Probe(at, at + took_s, "id", 1) for at in moments if at + took_s <= until_s]


def slow(writes: list[Probe], normal_us: int = 4_000) -> str:
    probes = Probes(cast(Client, None), SystemClock(), {}, 1)
    probes.writes.extend(writes)
    return OF_WRITES["writes are slower"](
        Observations(probes, Goals(write_stop_us=1, abort_after_us=1), "", 100.0, normal_us)
    )


def test_writes_ten_times_slower_after_the_fault_abort_the_drill() -> None:
    assert slow(answered(0.3, 100.0)) == "the p99 write latency is 300 ms, and was 4 ms before the fault"
    assert slow(answered(0.09, 100.0)) == "", "that is never slow"
    assert slow(answered(0.3, 100.0), normal_us=40_000) == "", "it was slow before"
    assert slow(answered(0.3, 100.0), normal_us=0) == "", "nobody knows yet what is normal"
    assert slow([one for one in answered(0.3, 100.0) if not 98.6 < one.sent_s < 99.2]) == "", "they do not go on yet"


# ---- on a copy


COPY = replace(PLAN, scenario="restore", scratch="/scratch", backup="/b.fbs", hold_s=2)
OUTCOME = Outcome(faults=[], figures={"held_revision": 7, "write_stop_us": 2_000_000}, sentence="everything was there")


class ExerciseDouble:
    """Double of an exercise: runs until its outcome is set or it is cancelled."""

    def __init__(self) -> None:
        self.figures = {"held_revision": 7}
        self.given: ExerciseInputs | None = None
        self.full = ""
        self.outcome: Outcome | Exception | None = None
        self.begun = asyncio.Event()
        self.left = False

    def __call__(self, given: ExerciseInputs, *more: object) -> ExerciseDouble:
        self.given = given
        return self

    def room_fault(self) -> str:
        return self.full

    async def run(self) -> Outcome:
        self.left = True
        self.begun.set()
        try:
            while self.outcome is None:
                await asyncio.sleep(0.01)
            if isinstance(self.outcome, Exception):
                raise self.outcome
            return self.outcome
        finally:
            await asyncio.sleep(0)
            self.left = False


async def exercised(cluster: ClusterDouble, exercise: ExerciseDouble, **more: Any) -> EndDrillRequest:
    coordinator = carried_out_by(cluster, more.pop("machines", None), exercise=exercise, **more)
    await coordinator.run(COPY, GOALS)
    assert cluster.ended is not None and not exercise.left, "nothing is left of it"
    return cluster.ended


OUTCOMES: dict[str, tuple[Outcome | Exception, str, str, int]] = {
    "as it should": (OUTCOME, "passed", "everything was there", 2_000_000),
    "a fault": (
        Outcome(faults=["r3 had another state"], figures=OUTCOME.figures, sentence="s"),
        "failed",
        "r3 had another state",
        2_000_000,
    ),
    "too long": (
        Outcome(faults=[], figures={"write_stop_us": 61_000_000}, sentence="s"),
        "failed",
        "writes stopped for 61000.0 ms, and the goal is 60000 ms",
        61_000_000,
    ),
    "a copy that fails": (CopyFailed("copy1 ended with 70: so"), "failed", "copy1 ended with 70: so", 0),
    "no snapshot": (
        SnapshotUnavailable("r2 gave 0 bytes of 9"),
        "aborted",
        "the copy could not be made: r2 gave 0 bytes of 9",
        0,
    ),
    "no room": (OSError(28, "No space left"), "aborted", "the copy could not be made: [Errno 28] No space left", 0),
    "no prober": (MeasurementFailed("it has ended"), "aborted", "it has ended", 0),
}


@pytest.mark.parametrize("name", OUTCOMES)
def test_the_result_and_figures_of_a_copy_are_recorded(cluster: ClusterDouble, name: str) -> None:
    outcome, verdict, sentence, stop_us = OUTCOMES[name]

    async def run() -> EndDrillRequest:
        exercise = ExerciseDouble()
        exercise.outcome = outcome
        found = await exercised(cluster, exercise)
        assert exercise.given is not None and exercise.given.away_s == 2
        assert (str(exercise.given.base), str(exercise.given.backup)) == ("/scratch", "/b.fbs")
        return found

    found = asyncio.run(run())
    assert (found.verdict, found.sentence) == (verdict, sentence)
    assert found.figures.get("write_stop_us", 0) == stop_us
    assert found.figures["held_revision"] == 7


COPY_STOPS = {name: STOPS[name] for name in OF_MEMBERS | OF_COPIES if name in STOPS} | {
    "too little disk space": (None, "full")
}


@pytest.mark.parametrize("stop", COPY_STOPS)
def test_each_stop_condition_aborts_a_copy_and_removes_it(cluster: ClusterDouble, stop: str) -> None:
    machines = MachinesDouble(cluster)
    begin, sentence = COPY_STOPS[stop]

    async def run() -> EndDrillRequest:
        exercise = ExerciseDouble()

        async def alarm() -> str:
            return cluster.alarm

        async def hold() -> None:
            await exercise.begun.wait()
            if begin is not None:
                begin(cluster, machines)
            else:
                exercise.full = sentence

        holding = asyncio.create_task(hold())
        found = await exercised(cluster, exercise, machines=machines, alarm=alarm)
        await holding
        return found

    found = asyncio.run(run())
    assert found.verdict == "aborted" and sentence in found.sentence


def test_a_copy_that_exceeds_its_time_limit_is_ended(cluster: ClusterDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "END_S", 2 * (DRILL_S_MAX - 0.2))
    found = asyncio.run(exercised(cluster, ExerciseDouble()))
    assert (found.verdict, found.sentence) == ("aborted", "the drill exceeded its time limit")


@story
async def test_an_interrupted_copy_is_removed_before_the_end_is_recorded(cluster: ClusterDouble) -> None:
    exercise = ExerciseDouble()
    running = asyncio.create_task(exercised(cluster, exercise))
    await exercise.begun.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert cluster.ended is not None and not exercise.left
    assert (cluster.ended.verdict, cluster.ended.sentence) == ("aborted", "interrupted by Ctrl-C or SIGTERM")
