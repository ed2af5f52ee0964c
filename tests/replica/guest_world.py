"""A world with guests: another scheduler that sets them up, stages them and tears them down, and honest movers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from replica.grammar.directives import read_request
from replica.messages import commands as c
from replica.model.buffers import Buffer
from replica.model.jobs import Job
from replica.model.orders import Order
from replica.model.pools import SeenPlace
from replica.model.requests import JobOptions, JobRequest, with_options
from replica.operations.guests import GuestPhase, find_guest
from replica.values.errors import Refusal
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


class GuestWorld(World):
    """A world whose pools are in a place that its nodes stage for."""

    def __init__(self, pools: dict[str, int] | None = None, **settings: Any) -> None:
        super().__init__(pools, **settings)
        self.share()
        assert self.ask(c.RegisterScheduler(CLUSTER, "head1")) == 0

    def share(self) -> None:
        """Have all pools in a place with two movers."""
        commands: list[c.Command] = [c.AddPlace("bb", "/bb"), *(c.AdmitNode(mover) for mover in MOVERS)]
        for command in (*commands, *(c.ChangePool(pool, place="bb") for pool in self.state.pools)):
            assert self.settle(command) == 0
        for mover in MOVERS:
            assert self.register(mover) == 0

    def register(self, node: str, cpus: int = 8, instance: str = "i1", storage: str = "s1") -> Refusal | int:
        if node not in MOVERS:
            return super().register(node, cpus, instance, storage)
        return self.settle(c.RegisterNode(node, 0, instance, storage, places=(SeenPlace("bb", "bb0"),)), agent(node))

    def orders(self, node: str = "m1") -> tuple[Order, ...]:
        return super().orders(node)

    def ask(self, command: Any, actor: c.Actor = SLURM) -> Refusal | int:
        return self.settle(command, actor)

    def setup(self, job: str = "42", request: JobRequest = WANTED, *, uid: int = 1000, epoch: int = 0) -> Refusal | int:
        return self.ask(c.SetupGuest(CLUSTER, job, uid, request, epoch))

    def stage_in(self, job: str = "42", epoch: int = 0) -> Refusal | int:
        return self.ask(c.StageInGuest(CLUSTER, job, epoch))

    def begin(self, job: str = "42", epoch: int = 0) -> Refusal | int:
        return self.ask(c.BeginGuestRun(CLUSTER, job, epoch))

    def end(self, job: str = "42", epoch: int = 0) -> Refusal | int:
        return self.ask(c.EndGuestRun(CLUSTER, job, epoch))

    def stage_out(self, job: str = "42", epoch: int = 0) -> Refusal | int:
        return self.ask(c.StageOutGuest(CLUSTER, job, epoch))

    def tear_down(self, job: str = "42", *, hurry: bool = False, epoch: int = 0) -> Refusal | int:
        return self.ask(c.TearDownGuest(CLUSTER, job, hurry, epoch))

    def phase(self, job: str = "42", scheduler: str = "slurm") -> GuestPhase:
        return find_guest(self.state, f"{scheduler}:{job}").phase

    def guest(self, job: str = "42") -> Job:
        found = find_guest(self.state, f"slurm:{job}").job
        assert found is not None
        return found

    def buffer(self, job: str = "42") -> Buffer:
        return self.state.buffers[self.guest(job).id]

    def finish_operation(self, job: str = "42") -> None:
        """Have the agent do what is ordered for a guest."""
        self.done(self.guest(job).id)

    def fail(self, job: str = "42") -> None:
        """Have what is ordered for a guest fail for good."""
        failed = c.OperationFailed("no such file", final=True)
        assert not isinstance(self.report(self.guest(job).id, failed), Refusal)

    def ready(self, job: str = "42", request: JobRequest = WANTED) -> None:
        """Have a guest staged in."""
        for step in (self.setup(job, request), self.stage_in(job)):
            assert not isinstance(step, Refusal), step
        self.finish_operation(job)
        assert self.phase(job) is GuestPhase.STAGED_IN

    def running(self, job: str = "42", request: JobRequest = WANTED) -> None:
        self.ready(job, request)
        assert not isinstance(self.begin(job), Refusal)


def _waiting(world: GuestWorld) -> None:
    world.setup("1", asked(95, DATA))
    world.setup()


def _staging_in(world: GuestWorld) -> None:
    world.setup()
    world.stage_in()


def _stage_in_failed(world: GuestWorld) -> None:
    _staging_in(world)
    world.fail()


def _post_run(world: GuestWorld) -> None:
    world.running()
    world.end()


def _staging_out(world: GuestWorld) -> None:
    _post_run(world)
    world.stage_out()


def _stage_out_failed(world: GuestWorld) -> None:
    _staging_out(world)
    world.fail()


def _lingering(world: GuestWorld) -> None:
    world.ready()
    world.tear_down(hurry=True)


def _parked(world: GuestWorld) -> None:
    _stage_out_failed(world)
    world.tear_down()


def _teardown(world: GuestWorld) -> None:
    _staging_out(world)
    world.finish_operation()


def _teardown_failed(world: GuestWorld) -> None:
    _teardown(world)
    world.fail()


def _over(world: GuestWorld) -> None:
    _teardown(world)
    world.finish_operation()


WAYS: dict[GuestPhase, Callable[[GuestWorld], object]] = {
    GuestPhase.NONE: lambda world: None,
    GuestPhase.WAITING: _waiting,
    GuestPhase.SET_UP: lambda world: world.setup(),
    GuestPhase.STAGING_IN: _staging_in,
    GuestPhase.STAGE_IN_FAILED: _stage_in_failed,
    GuestPhase.STAGED_IN: lambda world: world.ready(),
    GuestPhase.RUNNING: lambda world: world.running(),
    GuestPhase.POST_RUN: _post_run,
    GuestPhase.STAGING_OUT: _staging_out,
    GuestPhase.STAGE_OUT_FAILED: _stage_out_failed,
    GuestPhase.LINGERING: _lingering,
    GuestPhase.PARKED: _parked,
    GuestPhase.TEARDOWN: _teardown,
    GuestPhase.TEARDOWN_FAILED: _teardown_failed,
    GuestPhase.OVER: _over,
}
"""Each phase -> how a guest comes there."""


def world_at(phase: GuestPhase) -> GuestWorld:
    """Return a world whose guest 42 is in this phase."""
    world = GuestWorld()
    WAYS[phase](world)
    assert world.phase() is phase
    return world


COMMANDS: dict[str, Callable[[GuestWorld], Refusal | int]] = {
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
