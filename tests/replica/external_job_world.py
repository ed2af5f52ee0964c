"""A world with external jobs: another scheduler that sets them up, stages them and tears them down, and honest
movers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from forebay.replica.grammar.directives import read_request
from forebay.replica.messages import commands as c
from forebay.replica.model.buffers import Buffer
from forebay.replica.model.jobs import Job
from forebay.replica.model.orders import Order
from forebay.replica.model.pools import ObservedFilesystem
from forebay.replica.model.requests import JobOptions, JobRequest, with_options
from forebay.replica.operations.external_jobs import ExternalJobPhase, find_external_job
from forebay.replica.values.errors import Rejection
from tests.replica.world import World, agent

SLURM = c.Actor(c.ActorRole.SCHEDULER, "slurm")
CLUSTER = "6f1c"
MOVERS = ("m1", "m2")
RESULTS = "#DW stage_out type=file source=$DW_JOB_STRIPED/r destination=/out/r"
DATA = "#DW stage_in type=file source=/in/a destination=$DW_JOB_STRIPED/a"


def asked(capacity: int = 10, *lines: str, pool: str = "fast", who: str = "alan", name: str = "job") -> JobRequest:
    """Return what a setup asks for: capacity, and these directives."""
    text = "\n".join((f"#DW jobdw capacity={capacity} access_mode=striped type=scratch pool={pool}", *lines))
    plain = JobRequest(name, who, "", "/out", 0, buffer=read_request("#!/bin/sh\n" + text + "\n", "").request)
    return with_options(plain, JobOptions(gid=100))


WANTED = asked(10, DATA, RESULTS)
OTHER = asked(10, DATA)


class ExternalJobWorld(World):
    """A world whose pools are in a shared filesystem that its nodes stage for."""

    def __init__(self, pools: dict[str, int] | None = None, **settings: Any) -> None:
        super().__init__(pools, **settings)
        self.share()
        assert self.ask(c.RegisterScheduler(CLUSTER, "head1")) == 0

    def share(self) -> None:
        """Have all pools in a shared filesystem with two movers."""
        commands: list[c.Command] = [c.AddFilesystem("bb", "/bb"), *(c.AdmitNode(mover) for mover in MOVERS)]
        for command in (*commands, *(c.ChangePool(pool, filesystem="bb") for pool in self.state.pools)):
            assert self.settle(command) == 0
        for mover in MOVERS:
            assert self.register(mover) == 0

    def register(self, node: str, cpus: int = 8, instance: str = "i1", storage: str = "s1") -> Rejection | int:
        if node not in MOVERS:
            return super().register(node, cpus, instance, storage)
        return self.settle(
            c.RegisterNode(node, 0, instance, storage, filesystems=(ObservedFilesystem("bb", "bb0"),)), agent(node)
        )

    def orders(self, node: str = "m1") -> tuple[Order, ...]:
        return super().orders(node)

    def ask(self, command: Any, actor: c.Actor = SLURM) -> Rejection | int:
        return self.settle(command, actor)

    def setup(
        self, job: str = "42", request: JobRequest = WANTED, *, uid: int = 1000, epoch: int = 0
    ) -> Rejection | int:
        return self.ask(c.SetUpExternalJob(CLUSTER, job, uid, request, epoch))

    def stage_in(self, job: str = "42", epoch: int = 0) -> Rejection | int:
        return self.ask(c.StageInExternalJob(CLUSTER, job, epoch))

    def begin(self, job: str = "42", epoch: int = 0) -> Rejection | int:
        return self.ask(c.BeginExternalJobRun(CLUSTER, job, epoch))

    def end(self, job: str = "42", epoch: int = 0) -> Rejection | int:
        return self.ask(c.EndExternalJobRun(CLUSTER, job, epoch))

    def stage_out(self, job: str = "42", epoch: int = 0) -> Rejection | int:
        return self.ask(c.StageOutExternalJob(CLUSTER, job, epoch))

    def tear_down(self, job: str = "42", *, hurry: bool = False, epoch: int = 0) -> Rejection | int:
        return self.ask(c.TearDownExternalJob(CLUSTER, job, hurry, epoch))

    def phase(self, job: str = "42", scheduler: str = "slurm") -> ExternalJobPhase:
        return find_external_job(self.state, f"{scheduler}:{job}").phase

    def external_job(self, job: str = "42") -> Job:
        found = find_external_job(self.state, f"slurm:{job}").job
        assert found is not None
        return found

    def buffer(self, job: str = "42") -> Buffer:
        return self.state.buffers[self.external_job(job).id]

    def finish_operation(self, job: str = "42") -> None:
        """Have the agent do what is ordered for an external job."""
        self.done(self.external_job(job).id)

    def fail(self, job: str = "42") -> None:
        """Have what is ordered for an external job fail for good."""
        failed = c.OperationFailed("no such file", final=True)
        assert not isinstance(self.report(self.external_job(job).id, failed), Rejection)

    def ready(self, job: str = "42", request: JobRequest = WANTED) -> None:
        """Have an external job staged in."""
        for step in (self.setup(job, request), self.stage_in(job)):
            assert not isinstance(step, Rejection), step
        self.finish_operation(job)
        assert self.phase(job) is ExternalJobPhase.STAGED_IN

    def running(self, job: str = "42", request: JobRequest = WANTED) -> None:
        self.ready(job, request)
        assert not isinstance(self.begin(job), Rejection)


def _waiting(world: ExternalJobWorld) -> None:
    world.setup("1", asked(95, DATA))
    world.setup()


def _staging_in(world: ExternalJobWorld) -> None:
    world.setup()
    world.stage_in()


def _stage_in_failed(world: ExternalJobWorld) -> None:
    _staging_in(world)
    world.fail()


def _post_run(world: ExternalJobWorld) -> None:
    world.running()
    world.end()


def _staging_out(world: ExternalJobWorld) -> None:
    _post_run(world)
    world.stage_out()


def _stage_out_failed(world: ExternalJobWorld) -> None:
    _staging_out(world)
    world.fail()


def _lingering(world: ExternalJobWorld) -> None:
    world.ready()
    world.tear_down(hurry=True)


def _retained(world: ExternalJobWorld) -> None:
    _stage_out_failed(world)
    world.tear_down()


def _teardown(world: ExternalJobWorld) -> None:
    _staging_out(world)
    world.finish_operation()


def _teardown_failed(world: ExternalJobWorld) -> None:
    _teardown(world)
    world.fail()


def _over(world: ExternalJobWorld) -> None:
    _teardown(world)
    world.finish_operation()


WAYS: dict[ExternalJobPhase, Callable[[ExternalJobWorld], object]] = {
    ExternalJobPhase.NONE: lambda world: None,
    ExternalJobPhase.WAITING: _waiting,
    ExternalJobPhase.SET_UP: lambda world: world.setup(),
    ExternalJobPhase.STAGING_IN: _staging_in,
    ExternalJobPhase.STAGE_IN_FAILED: _stage_in_failed,
    ExternalJobPhase.STAGED_IN: lambda world: world.ready(),
    ExternalJobPhase.RUNNING: lambda world: world.running(),
    ExternalJobPhase.POST_RUN: _post_run,
    ExternalJobPhase.STAGING_OUT: _staging_out,
    ExternalJobPhase.STAGE_OUT_FAILED: _stage_out_failed,
    ExternalJobPhase.LINGERING: _lingering,
    ExternalJobPhase.RETAINED: _retained,
    ExternalJobPhase.TEARDOWN: _teardown,
    ExternalJobPhase.TEARDOWN_FAILED: _teardown_failed,
    ExternalJobPhase.OVER: _over,
}
"""Each phase -> how an external job comes there."""


def world_at(phase: ExternalJobPhase) -> ExternalJobWorld:
    """Return a world whose external job 42 is in this phase."""
    world = ExternalJobWorld()
    WAYS[phase](world)
    assert world.phase() is phase
    return world


COMMANDS: dict[str, Callable[[ExternalJobWorld], Rejection | int]] = {
    "setup": lambda world: world.setup(),
    "setup of another": lambda world: world.setup(request=OTHER),
    "stage-in": lambda world: world.stage_in(),
    "run begins": lambda world: world.begin(),
    "run ends": lambda world: world.end(),
    "stage-out": lambda world: world.stage_out(),
    "teardown": lambda world: world.tear_down(),
    "teardown --hurry": lambda world: world.tear_down(hurry=True),
}
"""What a scheduler can ask, by the words of the table in replica/DESIGN.md."""
