"""Another scheduler beside the cluster's own: its external jobs in a shared filesystem, movers that stage for it, and
what must be true.

The scheduler is one as Slurm was seen to be (`tests/replica/test_external_job_simulation.py`): it restarts at any
moment, sets up and stages again what has not run, repeats calls whose answer it never got, and its calls of before come
late. A mover that was not heard of may come back; what it still does then is fenced by the shared filesystem, as in
`cluster.agent.transfer`.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from forebay.replica.grammar.burst_buffer_conf import ConfSetting
from forebay.replica.messages import commands as c
from forebay.replica.model.jobs import Job
from forebay.replica.model.orders import Order
from forebay.replica.model.pools import ObservedFilesystem
from forebay.replica.operations.external_jobs import ExternalJobLookup, ExternalJobPhase, find_external_job
from forebay.replica.values.errors import RejectionCode
from tests.replica.external_job_world import CLUSTER, DATA, RESULTS, SLURM, asked
from tests.simulation.clients import GRAIN_BYTES, OPERATOR, Caller, SimAgent

if TYPE_CHECKING:
    from forebay.cluster.server.pending import Settlement
    from forebay.replica.state.state import State
    from tests.simulation.world import World

PROFILES_WITH_EXTERNAL_JOBS: Final = ("external_jobs", "all")
EXTERNAL_JOBS: Final = 4
MOVERS: Final = ("m1", "m2")
FILESYSTEM: Final = "bb"
POOL: Final = "shared"
POOL_GRAINS: Final = 5
"""Space for two external jobs at once; the others wait, or take the space of lingering buffers."""
WANTED: Final = asked(2 * GRAIN_BYTES, DATA, RESULTS, pool=POOL)
FOUNDING: Final[tuple[c.Command, ...]] = (
    c.AddFilesystem(FILESYSTEM, "/bb"),
    *(c.AdmitNode(mover) for mover in MOVERS),
    c.ChangePool(POOL, exists=False, quantity=POOL_GRAINS * GRAIN_BYTES, granularity=GRAIN_BYTES),
    c.ChangePool(POOL, filesystem=FILESYSTEM),
    c.ConfigureSite((ConfSetting("ExternalJobSetupWait", "2"), ConfSetting("ExternalJobLinger", "3")), True),
)
SET_AHEAD_S: Final = 1.5
"""Less than answers are kept at least: so no step is too long."""
STAGED_ANEW: Final = (
    ExternalJobPhase.STAGING_IN,
    ExternalJobPhase.STAGE_IN_FAILED,
    ExternalJobPhase.STAGED_IN,
)
"""Where a stage-in is asked for again: it may be under way, or over, where the answer to the first call never came."""
GONE: Final = (ExternalJobPhase.TEARDOWN, ExternalJobPhase.TEARDOWN_FAILED, ExternalJobPhase.OVER)


class ExternalJobs:
    """The scheduler, its external jobs, and the shared filesystem as movers have filled it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.rng = world.fork()
        self.jobs = [SimExternalJob(world, self, str(number)) for number in range(1, EXTERNAL_JOBS + 1)]
        self.movers = [SimMover(world, self, mover) for mover in MOVERS]
        self.claimed: dict[str, int] = {}
        """Directory in the shared filesystem -> the newest attempt that has begun there: what older ones do is
        fenced.
        """
        self.filled: dict[str, str] = {}
        """Directory with all its data in it -> its external job."""
        self.exported: dict[str, str] = {}
        """Directory whose results are out -> its external job."""
        self.discarded: set[tuple[str, int]] = set()
        """External jobs and epochs that the scheduler has torn down with hurry: nobody wants their results."""
        self.copies: Counter[str] = Counter()
        """External job -> how often its data was written."""
        self.removed: Counter[str] = Counter()
        """External job -> directories that were removed although its job had not run, as far as the scheduler knows."""

    def begin(self) -> None:
        """Found shared filesystem and pool; then movers register, and jobs come."""
        Founder(self.world, self).next()

    def founded(self) -> None:
        """Begin."""
        self.world.agents += self.movers
        for caller in (*self.movers, *self.jobs):
            self.world.timeline.after(self.rng.uniform(0, 0.5), caller.start)
        self._restart_later()

    def _restart_later(self) -> None:
        self.world.timeline.after(self.rng.expovariate(1 / (1.5 * self.world.pace)), self._restart)

    def _restart(self) -> None:
        if not self.world.ending:
            self.world.counts["scheduler_restarts"] += 1
            for job in self.jobs:
                job.restart()
            self._restart_later()

    def performed(self, order: Order) -> bool:
        """Do in the shared filesystem what an order says; return whether it could be done. `violate` is told what
        should not be.
        """
        if order.filesystem is None or order.stage not in ("stage_in", "stage_out", "teardown"):
            return True
        where, state = order.filesystem.directory, self.world.oracle.state
        if order.attempt < self.claimed[where]:
            return False
        job = state.jobs[order.job]
        assert job.external_job is not None
        name, ran = job.external_job.name, bool(job.started_at)
        if order.stage == "stage_in":
            if where not in self.filled:
                self._written(where, name)
        elif order.stage == "stage_out":
            if where not in self.filled:
                self.world.violate(f"the results of {name} are staged out of {where}, where no data is")
            self.exported[where] = name
        else:
            wanted = ran and (name, job.external_job.epoch) not in self.discarded
            if wanted and where not in self.exported:
                self.world.violate(f"the results of {name} in {where} are removed, and nobody has exported them")
            self.removed[name] += where in self.filled and not wanted
            self.filled.pop(where, None)
        return True

    def _written(self, where: str, name: str) -> None:
        """What is written again was taken away before, or is of an epoch that ran."""
        state = self.world.oracle.state
        for other, external_job in self.filled.items():
            job = state.jobs.get(int(other.rpartition("/")[2].partition(".")[0]))
            if external_job == name and job is not None and not job.started_at and job.external_job is not None:
                found = find_external_job(state, name, job.external_job.epoch)
                if found.job is not None and found.phase not in GONE:
                    self.world.violate(f"the data of {name} is written to {where}, and lies in {other} already")
        self.filled[where] = name
        self.copies[name] += 1

    def is_done(self) -> bool:
        """Whether every job has gone its way, and everything of it is gone."""
        return all(job.step == "done" for job in self.jobs) and not self.unfinished

    @property
    def unfinished(self) -> list[Job]:
        """What is not over of any, an epoch each."""
        state = self.world.oracle.state
        return [job for number in sorted(state.unfinished) if (job := state.jobs[number]).external_job is not None]

    def check_end(self) -> None:
        """Nothing of any epoch is left, none was lost or doubled, and nothing was copied twice without cause."""
        world = self.world
        if self.filled:
            world.violate(f"all external jobs are gone, and {sorted(self.filled)} are still in the shared filesystem")
        for job in self.jobs:
            exported = sorted(where for where, name in self.exported.items() if name == job.name)
            if len(exported) != 1:
                world.violate(f"the results of {job.name} came out of {exported}, instead of one run's buffer")
        for name, copies in self.copies.items():
            if copies > 1 + self.removed[name]:
                world.violate(f"the data of {name} was written {copies} times, and removed {self.removed[name]} times")
        world.counts["external_job_copies"] = self.copies.total()

    def describe(self) -> str:
        """Describe the progress of each external job, and all leftovers."""
        buffers = self.world.oracle.state.buffers
        left = [
            f"job {job.id} of {job.external_job} {job.state.name}/{buffers[job.id].state.word}, {job.node or 'nowhere'}"
            for job in self.unfinished
        ]
        return ", ".join([*(f"{job.name} {job.step} ({job.found().phase.value})" for job in self.jobs), *left])


class Punctual(Caller):
    """Somebody who sets the clock ahead when a command was too old: a real one has the cluster's time by the answer."""

    def is_too_old(self, answer: Settlement | State) -> bool:
        """Return whether a command was refused for its age alone, so that it is to be sent again."""
        rejection = getattr(answer, "rejection", None)
        if rejection is None or rejection.code is not RejectionCode.COMMAND_TOO_OLD:
            return False
        self.clock.set_back(-SET_AHEAD_S)
        return True


class Founder(Punctual):
    """The operator who makes shared filesystem and pool, one command after the other, and the scheduler that
    registers.
    """

    def __init__(self, world: World, external_jobs: ExternalJobs) -> None:
        super().__init__(world, "founder")
        self._external_jobs = external_jobs
        self._left = [*((command, OPERATOR) for command in FOUNDING), (c.RegisterScheduler(CLUSTER, "head1"), SLURM)]

    def next(self) -> None:
        """Give the next command, or say that all is there."""
        if not self._left:
            self._external_jobs.founded()
            return
        command, actor = self._left[0]
        self.begin(c.Request(self.new_id(), actor, command))

    def done(self, answer: Settlement | State) -> None:
        if not self.is_too_old(answer):
            self._left.pop(0)
        self.next()

    def gave_up(self) -> None:
        self.world.timeline.after(0.1, self.next)


class SimExternalJob(Punctual):
    """One job of the scheduler: what that believes of it, and the calls that it makes."""

    def __init__(self, world: World, external_jobs: ExternalJobs, job: str) -> None:
        super().__init__(world, f"slurm:{job}")
        self._external_jobs = external_jobs
        self.job = job
        self.step = "pending"
        self._next = ""
        """The step that follows when the call has succeeded."""
        self._running_until_s = 0.0
        self._stages = 0
        """The epoch whose stage-in it has asked for, and has not given back since."""

    def start(self) -> None:
        """Begin."""
        self._look_later()

    def found(self) -> ExternalJobLookup:
        """Where it stands."""
        return find_external_job(self.world.oracle.state, self.name)

    def restart(self) -> None:
        """The scheduler dies and starts again: nobody waits for the call that is under way."""
        if self.step in ("setup", "data_in"):
            self._give_back()
        elif self.step in ("post_run", "data_out"):
            self._call(c.EndExternalJobRun(CLUSTER, self.job, self.found().epoch), "post_run")

    def _give_back(self) -> None:
        """Tear down with hurry what has not run, as far as the scheduler knows."""
        epoch = self.found().epoch
        self._stages = 0
        self._external_jobs.discarded.add((self.name, epoch))
        self._call(c.TearDownExternalJob(CLUSTER, self.job, True, epoch), "pending")

    def _call(self, command: c.Command, following: str, actor: c.Actor = SLURM) -> None:
        self._next = following
        self.begin(c.Request(self.new_id(), actor, command))

    def done(self, answer: Settlement | State) -> None:
        if not self.is_too_old(answer) and getattr(answer, "rejection", None) is None:
            self.world.note("slurm", self.name, self.step, self._next)
            self.step = self._next
            self._running_until_s = self.world.timeline.now_s + self.rng.uniform(0.05, 0.5)
        self._look_later()

    def gave_up(self) -> None:
        self._look_later()

    def _look_later(self) -> None:
        self._try += 1
        self.world.timeline.after(self.rng.uniform(0.02, 0.15) * self.world.pace, self._look, self._try)

    def _look(self, attempt: int) -> None:
        if attempt != self._try or self.step == "done":
            return
        found = self.found()
        phase, epoch = found.phase, found.epoch
        match self.step, phase:
            case "pending", _:
                self._call(c.SetUpExternalJob(CLUSTER, self.job, 1000, WANTED, epoch + 1), "setup")
            case "setup", ExternalJobPhase.OVER | ExternalJobPhase.NONE:
                self.step = "pending"  # no space in time: held, and released by its user
                self._look_later()
            case "setup", _ if phase is ExternalJobPhase.SET_UP or (phase in STAGED_ANEW and self._stages == epoch):
                self._stages = epoch
                self._call(c.StageInExternalJob(CLUSTER, self.job, epoch), "data_in")
            case "data_in", ExternalJobPhase.STAGE_IN_FAILED:
                self._call(c.TearDownExternalJob(CLUSTER, self.job, True, epoch), "pending")
            case (("data_in" | "staged"), (ExternalJobPhase.STAGED_IN | ExternalJobPhase.RUNNING)):
                self._call(c.BeginExternalJobRun(CLUSTER, self.job, epoch), "running")
            case "running", _ if self.world.timeline.now_s > self._running_until_s:
                self._call(c.EndExternalJobRun(CLUSTER, self.job, epoch), "post_run")
            case "post_run", _ if self.rng.random() < 0.2:
                self._call(
                    c.TearDownExternalJob(CLUSTER, self.job, False, epoch), "retained"
                )  # it gave the stage-out up
            case "post_run", _:
                self._call(c.StageOutExternalJob(CLUSTER, self.job, epoch), "data_out")
            case "data_out", ExternalJobPhase.STAGE_OUT_FAILED if self.rng.random() < 0.5:
                self._call(c.StageOutExternalJob(CLUSTER, self.job, epoch), "data_out")
            case "data_out", ExternalJobPhase.STAGE_OUT_FAILED:
                self._call(c.TearDownExternalJob(CLUSTER, self.job, False, epoch), "retained")
            case "retained", ExternalJobPhase.RETAINED if found.job is not None:
                self._call(c.ExportBuffer(found.job.id), "retained", OPERATOR)
            case (("data_out" | "retained"), ExternalJobPhase.TEARDOWN_FAILED):
                self._call(c.TearDownExternalJob(CLUSTER, self.job, False, epoch), self.step)
            case (("data_out" | "retained"), (ExternalJobPhase.OVER | ExternalJobPhase.NONE)):
                self._call(c.TearDownExternalJob(CLUSTER, self.job, False, epoch), "done")
            case _:
                self._look_later()


class SimMover(SimAgent):
    """A mover of the shared filesystem."""

    def __init__(self, world: World, external_jobs: ExternalJobs, node: str) -> None:
        super().__init__(world, node)
        self._external_jobs = external_jobs

    def registration(self) -> c.RegisterNode:
        return c.RegisterNode(
            self.node, 0, f"i{self.instance}", f"{self.node}-disk", filesystems=(ObservedFilesystem(FILESYSTEM, "bb0"),)
        )

    def _take(self, epoch: int, orders: tuple[Order, ...]) -> None:
        if epoch == self._epoch:
            for order in orders:
                if order.filesystem is not None:
                    claimed = self._external_jobs.claimed
                    where = order.filesystem.directory
                    claimed[where] = max(order.attempt, claimed.get(where, 0))
        super()._take(epoch, orders)

    def _finished(self, epoch: int | None, order: Order, result: c.OperationResult) -> None:
        if epoch == self._epoch and isinstance(result, c.OperationDone) and not self._external_jobs.performed(order):
            result = c.OperationFailed("a newer attempt has taken over", operation="")
        super()._finished(epoch, order, result)
