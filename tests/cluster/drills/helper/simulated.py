"""Drill in a simulated world, in which any process can be killed at any step.

The coordinator's client, the helper, its undo record on disk and the decisions about drills are real. Event loops,
clock, machine and network are simulated.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from forebay.cluster.api.members import _drill_fields
from forebay.cluster.client import ApiError, Client
from forebay.cluster.config import Config
from forebay.cluster.drills.coordinator import Coordinator, Goals
from forebay.cluster.drills.helper import HelperAnswer, HelperRefused
from forebay.cluster.drills.helper.channel import ANSWER_S
from forebay.cluster.drills.helper.faults import Cut, Fault, Fill, Kill, Stop, TargetProcess, Throttle, of_target
from forebay.cluster.drills.helper.messages import JSON
from forebay.cluster.drills.helper.performer import FaultAssignment, Lease
from forebay.cluster.drills.helper.record import Busy, UndoRecord
from forebay.cluster.drills.helper.service import Helper
from forebay.cluster.drills.machines import Machines
from forebay.cluster.drills.preconditions import Plan, Site
from forebay.cluster.drills.prober import Report
from forebay.cluster.drills.scenarios import SCENARIOS
from forebay.cluster.schemas import NodesAnswer, TransferAnswer
from forebay.cluster.schemas import operations as ops
from forebay.cluster.schemas.drills import DrillAnswer, DrillProbeAnswer, DrillsAnswer
from forebay.cluster.schemas.ledger import StoryAnswer
from forebay.cluster.security import Credentials, Identity, Role
from forebay.cluster.system import Address
from forebay.replica.messages import commands as c
from forebay.replica.model import DrillVerdict
from forebay.replica.values import Instant, Rejection
from tests.cluster.drills.test_preconditions import STATUS, WELL
from tests.replica.world import World
from tests.simulation.loop import Died, SimClock, Timeline, VirtualLoop

VICTIMS: Final = ("coordinator", "network", "operator", "helper", "performer", "helper and performer", "target")
RESTART_S: Final = 1.0
"""Restart delay of a service manager."""

PROBE_S: Final = 1.0
WHO: Final = Identity(Role.OPERATOR, "operator")
ACTOR: Final = c.Actor(c.ActorRole.OPERATOR, "operator")
REPLICAS: Final = {f"r{port}": Address("127.0.0.1", port) for port in (1, 2, 3)}
TARGETS: Final = {"leader": "r1", "follower": "r2", "member": "r1", "agent": "n1"}


STEPS: Final = ((ops.START_DRILL, "start"), (ops.END_DRILL, "end"), (ops.TRANSFER_LEADERSHIP, "transfer"))


class Loop(VirtualLoop):
    """Event loop of a process; calls in executors run at once."""

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:  # type: ignore[override]
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except BaseException as error:
            future.set_exception(error)
        return future


class SimMachine:
    """Target's machine, on which faults are caused."""

    waits_for_others = False

    def __init__(self, world: Simulated) -> None:
        self.world = world
        self.pid = 100
        self.is_running, self.is_stopped = True, False
        self.tables, self.files = set[str](), set[str]()

    def holder(self, directory: str) -> TargetProcess | None:
        return TargetProcess(self.pid, self.pid, "boot") if self.is_running else None

    def signal(self, process: TargetProcess, number: signal.Signals) -> bool:
        self.world.step(f"{number.name}")
        if not self.is_running or process.pid != self.pid:
            return False
        if number is signal.SIGKILL:
            self.is_running = False
        else:
            self.is_stopped = number is signal.SIGSTOP
        self.world.step(f"{number.name} is done")
        return True

    def cut(self, rules: str) -> None:
        self.world.step("cut")
        self.tables.add("t")
        self.world.step("cut is done")

    def mend(self, table: str) -> None:
        self.world.step("mend")
        self.tables.clear()
        self.world.step("mend is done")

    def fill(self, file: str) -> None:
        self.world.step("fill")
        self.files.add(file)
        self.world.step("fill is done")

    def empty(self, file: str) -> None:
        self.world.step("empty")
        self.files.discard(file)
        self.world.step("empty is done")

    def throttle(self, group: str, bound: str) -> None:
        self.world.step("throttle")
        self.files = {group} if bound == "bound" else set()
        self.world.step("throttle is done")

    def start(self, name: str, command: tuple[str, ...]) -> None:
        self.world.step("start")
        self.restart()
        self.world.step("start is done")

    def rest(self, length_s: float) -> None:
        raise AssertionError("nobody else starts anything")

    def restart(self) -> None:
        """Start a new process."""
        if not self.is_running:
            self.pid, self.is_running, self.is_stopped = self.pid + 1, True, False

    @property
    def fault(self) -> str:
        """Return the remains of a fault."""
        found = [
            "" if self.is_running else "it does not run", "it is stopped" if self.is_stopped else "",
            "it is cut off" if self.tables else "", "its disk is full" if self.files else "",
        ]  # fmt: skip
        return ", ".join(filter(None, found))

    @property
    def is_away(self) -> bool:
        """Return whether the target does not answer."""
        return bool(self.fault) and not self.files


class SimProcess:
    """Process that causes a fault, as its helper sees it."""

    def __init__(self, world: Simulated, helper: Loop, directory: Path) -> None:
        self.world, self.directory = world, directory
        self.loop = Loop(world.timeline, world.faults.append)
        self.stdin = self
        self.stdout = asyncio.StreamReader(loop=helper)
        self.over = helper.create_future()
        self.input = asyncio.StreamReader(loop=self.loop)
        self.record: UndoRecord | None = None
        self.is_over = False
        self.loop.call_soon(lambda: self.loop.create_task(self._run()))

    def write(self, data: bytes) -> None:
        if not self.is_over:
            self.input.feed_data(data)

    async def wait(self) -> int:
        await asyncio.shield(self.over)
        return 0

    def end(self) -> None:
        """End the process and release its locks."""
        if self.is_over:
            return
        self.is_over = True
        if self.record is not None:
            self.record.close()
        self.stdout.feed_eof()
        if not self.over.done():
            self.over.set_result(None)

    def say(self, line: str) -> None:
        self.world.step(line.partition(" ")[0])
        if not self.is_over:
            self.stdout.feed_data(f"{line}\n".encode())

    async def _run(self) -> None:
        """Do the work of `cluster.drills.helper.performer.run` without the operating system."""
        world = self.world
        assignment = msgspec.json.decode(await self.input.readline(), type=FaultAssignment)
        try:
            record = self.record = UndoRecord(self.directory)
            assert record.settle(world.machine) is None
            record.begin(of_target(assignment.drill, assignment.target, assignment.fault, world.machine), world.machine)
            self.say("done")
            lease = Lease(world.clock, assignment.lease_s, assignment.duration_s)
            while lease.left_s > 0:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(lease.left_s):
                        lease.hear((await self.input.readline()).decode().strip())
            record.settle(world.machine)
        except (HelperRefused, Busy) as error:
            self.say(f"refused {error}; so")
        else:
            self.say("undone")
        self.end()


class Simulated:
    """World of one drill. The victim `kill` is killed just before the step number `at`."""

    def __init__(self, config: Config, scenario: str, directory: Path, victim: str = "", at: int = -1) -> None:
        self.timeline = Timeline()
        self.clock = SimClock(self.timeline)
        self.config, self.directory = config, directory
        self.victim, self.at = victim, at
        self.steps: list[str] = []
        self.process: SimProcess | None = None
        self.killed_s: float | None = None
        self.faults: list[BaseException] = []
        self.scenario = SCENARIOS[scenario]
        target = "r2" if scenario == "switchover" else TARGETS[self.scenario.of]
        self.plan = Plan(
            id="f003ad4d", scenario=scenario, target=target, leader="r1", term=7, preconditions=(), forced=(),
            will_happen="so", hold_s=3 if self.scenario.needed_capability else 0,
        )  # fmt: skip
        self.machine = SimMachine(self)
        self.leader = "r1"
        self.state = World(nodes=0)
        self.began_at = self.state.at
        self.is_cut = self.is_dying = False
        self.ids = 0
        self.said = ""
        """Error that ended the coordinator."""
        self.coordinator = Loop(self.timeline, self.faults.append)
        self.main: asyncio.Task[Any] | None = None
        self.start_helper()

    # ---- steps and kills

    def step(self, name: str) -> None:
        """Count a step, and kill the victim if it is due."""
        self.check_alive()
        self.steps.append(name)
        if len(self.steps) - 1 == self.at:
            # Raise in the victim's own code, so that the current action does not happen and no cleanup runs.
            self.is_dying = True
            self.timeline.after(0.0, self.kill)
            self.check_alive()

    def check_alive(self) -> None:
        """Raise Died if a killed process requests something."""
        loops = {"helper": [self.helper_loop], "performer": [self.process.loop] if self.process else []}
        if self.is_dying and any(
            one.is_running() for name in self.victim.split(" and ") for one in loops.get(name, [])
        ):
            raise Died

    def kill(self) -> None:
        self.killed_s, self.is_dying = self.timeline.now_s, False
        for victim in self.victim.split(" and "):
            self._kill(victim)

    def _kill(self, victim: str) -> None:
        match victim:
            case "coordinator":
                self.coordinator.kill()
            case "network":
                self.is_cut = True
            case "operator":
                self.coordinator.call_soon(self.main.cancel if self.main is not None else lambda: None)
            case "helper":
                self.helper_loop.kill()
                if self.process is not None and not self.process.is_over:
                    self.process.input.feed_eof()
                self.timeline.after(RESTART_S, self.start_helper)
            case "performer":
                if self.process is not None and not self.process.is_over:
                    self.process.loop.kill()
                    self.process.end()
            case "target":
                self.machine.is_running = self.machine.is_stopped = False
                self.timeline.after(RESTART_S, self.machine.restart)

    # ---- the machine's helper

    def start_helper(self) -> None:
        """Start the helper, which first undoes leftovers and waits for a process that is doing so."""
        loop = self.helper_loop = Loop(self.timeline, self.faults.append)
        credentials = cast(Credentials, None)
        helper = Helper(
            self.config, "h1", self._known, self.clock, credentials=credentials, spawn=cast(Any, self._spawn)
        )
        self.helper: Helper | None = None

        def settle() -> None:
            try:
                helper._settle()
            except Busy:
                self.timeline.after(RESTART_S, loop.call_soon, settle)
            else:
                self.helper = helper

        loop.call_soon(settle)

    def _check_alive(self) -> None:
        """Close the coroutines of a killed process, and suppress what their cleanup code sends."""
        if self.coordinator.is_closed():
            raise RuntimeError("it is no more")

    async def _known(self, drill: int) -> DrillAnswer:
        return self.answer()

    async def _spawn(self, *command: str, **options: Any) -> SimProcess:
        self.process = SimProcess(self, self.helper_loop, Path(command[command.index("--directory") + 1]))
        return self.process

    def fault_of(self, *ignored: Any) -> Fault:
        """Return the fault of the scenario."""
        needs, name = self.scenario.needed_capability, self.scenario.name
        if needs == "network":
            return Cut("t", "rules")
        if name == "slow-disk":
            return Throttle("group", "bound", "before")
        if needs == "disk":
            return Fill("file", "d", self.plan.target)
        return Kill("d", self.plan.target) if name.endswith("-kill") else Stop("d")

    # ---- the cluster

    def settle(self, command: c.Command) -> None:
        """Settle a command at the present time; raise ApiError for a rejection."""
        self.state.at = Instant(max(self.state.at, self.began_at + round(self.timeline.now_s * 1e6)))
        found = self.state.settle(command, ACTOR)
        if isinstance(found, Rejection):
            raise ApiError(409, "wrong_state", found.sentence, outcome="rejected")

    def answer(self, number: int = 1) -> DrillAnswer:
        at = Instant(self.began_at + round(self.timeline.now_s * 1e6))
        return DrillAnswer(revision=self.state.state.revision, **_drill_fields(self.state.state.drills[number], at))

    def new_command_id(self) -> str:
        self.ids += 1
        return f"id{self.ids}"

    async def call(self, operation: Any, request: Any = None, *, replica: Address | None = None, **more: Any) -> Any:
        self._check_alive()
        named = next((word for one, word in STEPS if operation is one), "")
        if named:
            self.step(f"{named} is asked")
        await asyncio.sleep(0.01)
        if self.is_cut:
            await asyncio.sleep(more.get("deadline_s") or 10.0)
            raise ApiError(0, "unreachable", "no replica answered in time")
        answer = self._answered(operation, request, replica)
        if named:
            self.step(f"{named} is answered")
            await asyncio.sleep(0)
        return answer

    async def ask_once(self, operation: Any, request: Any, *, replica: Address, timeout_s: float, **more: Any) -> Any:
        try:
            return await self.call(operation, request, replica=replica, deadline_s=timeout_s)
        except ApiError as error:
            if error.status == 0:
                return None
            raise

    def _answered(self, operation: Any, request: Any, replica: Address | None) -> Any:
        drill, away = 1, self.machine.is_away
        if away and not self.scenario.targets_agent and self.plan.target == self.leader:
            self.leader = "r3"
        if operation is ops.START_DRILL:
            self.settle(
                c.StartDrill(
                    request.scenario, request.target, request.lasts_s, plan=request.plan, lease_s=request.lease_s
                )
            )
            return self.answer()
        if operation is ops.END_DRILL:
            verdict = next(one for one in DrillVerdict if one.word == request.verdict)
            self.settle(c.EndDrill(drill, verdict, request.sentence, tuple(sorted(request.figures.items()))))
            return self.answer()
        if operation is ops.PROBE_DRILL:
            self.settle(c.ProbeDrill(drill))
            return DrillProbeAnswer(revision=1, drill=drill)
        if operation is ops.SHOW_DRILL:
            return self.answer()
        if operation is ops.LIST_DRILLS:
            return DrillsAnswer(revision=9, drills=(), locks=())
        if operation is ops.LIST_NODES:
            state = "DOWN" if away and self.scenario.targets_agent else "UP"
            rows = (
                msgspec.structs.replace(row, last_contact_s=0.0, state=state if row.name == self.plan.target else "UP")
                for row in WELL.nodes
            )
            return NodesAnswer(revision=9, nodes=tuple(rows))
        if operation is ops.LIST_DIGESTS:
            return msgspec.structs.replace(WELL.digests["r1"], verdict="agrees")
        if operation is ops.SHOW_STATUS:
            assert replica is not None
            if away and f"r{replica.port}" == self.plan.target:
                raise ApiError(0, "unreachable", "it does not answer")
            return msgspec.structs.replace(STATUS, leader=self.leader, ready=True, state_digest="same")
        if operation is ops.SHOW_HISTORY:
            return StoryAnswer(revision=9, rows=(), read=9, read_at=None, last=9)
        assert operation is ops.TRANSFER_LEADERSHIP
        self.leader = request.name
        return TransferAnswer(revision=9, leader=self.leader, term=8)

    # ---- the coordinator

    halt_file = ""

    def site(self) -> Site:
        return Site()

    async def channel(self, target: str) -> Simulated:
        self.step("channel is asked")
        await asyncio.sleep(0.01)
        if self.is_cut or self.helper is None:
            raise HelperRefused("helper h1 does not answer", "start it")
        return self

    async def ask(self, ask: Any) -> HelperAnswer:
        """Return the connection to the helper."""
        self._check_alive()
        name = type(ask).__name__
        self.step(f"{name} is asked")
        await asyncio.sleep(0.01)
        helper, loop, future = self.helper, self.helper_loop, self.coordinator.create_future()
        if helper is not None and not self.is_cut:

            async def answered() -> None:
                answer = await helper._answered(JSON.encode(ask), WHO)
                if not self.is_cut and not future.done():
                    future.set_result(answer)

            loop.call_soon(lambda: loop.create_task(answered()))
        try:
            async with asyncio.timeout(ANSWER_S):
                while not future.done() and (self.is_cut or self.helper is helper is not None):
                    await asyncio.sleep(0.2)
                if not future.done():
                    raise HelperRefused("helper h1 does not answer", "see its log")
                answer: HelperAnswer = future.result()
        except TimeoutError as error:
            raise HelperRefused("helper h1 does not answer (in time)", "see its log") from error
        if not answer.done:
            raise HelperRefused(answer.sentence, answer.remedy)
        self.step(f"{name} is answered")
        await asyncio.sleep(0)
        return answer

    async def close(self) -> None:
        """The connection is closed."""

    @contextlib.asynccontextmanager
    async def _writing(self, drill: int, take: Callable[[Report], None]) -> AsyncIterator[Callable[[], str]]:
        async def write() -> None:
            while True:
                sent_s, name = self.clock.monotonic_s(), self.new_command_id()
                with contextlib.suppress(ApiError):
                    await self.call(ops.PROBE_DRILL, None, deadline_s=5.0)
                    take(Report(sent_s, name, self.clock.monotonic_s(), 1))
                await asyncio.sleep(PROBE_S)

        sending = asyncio.create_task(write())
        try:
            yield lambda: ""
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    def run(self, length_s: float) -> Simulated:
        """Run the drill for some time."""
        coordinator = Coordinator(
            cast(Client, self), self.clock, REPLICAS, cast(Machines, self), self._writing, lambda sentence: None
        )
        goals = Goals(write_stop_us=60_000_000, abort_after_us=5_000_000)

        async def main() -> None:
            try:
                await coordinator.run(self.plan, goals)
            except (ApiError, asyncio.CancelledError) as error:
                self.said = str(error)
            except Exception as error:
                if not self.coordinator.is_closed():
                    self.faults.append(error)

        def begin() -> None:
            self.main = self.coordinator.create_task(main())

        self.coordinator.call_soon(begin)
        self.timeline.run(length_s)
        return self

    def is_over(self) -> bool:
        """Return whether the drill has ended, also in the cluster's records."""
        gone = self.coordinator.is_closed() or (self.main is not None and self.main.done())
        return gone and (1 not in self.state.state.drills or self.answer().verdict != "under way")

    @property
    def left(self) -> Iterator[str]:
        """Return the remains of the fault and the undo record."""
        yield from filter(None, (self.machine.fault,))
        try:
            record = UndoRecord(self.config.drill.directory / "h1")
        except Busy:
            yield "somebody is at it"
            return
        undo = record.read()
        record.close()
        if undo is not None:
            yield f"the record has {undo}"
