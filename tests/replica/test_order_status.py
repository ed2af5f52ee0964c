"""What an order says of its job's status, for the scripts of a provider."""

from __future__ import annotations

from forebay.replica.grammar.directives import read_request
from forebay.replica.messages import commands as c
from forebay.replica.model.job_states import JobState
from forebay.replica.model.jobs import Hold
from forebay.replica.model.orders import JobStatus
from forebay.replica.model.requests import Dependency, DependencyKind, JobOptions
from forebay.replica.values.errors import Rejection
from forebay.replica.values.units import Instant
from tests.replica.world import World

SCRIPT = "#!/bin/sh\n#BB_LUA pool=fast capacity=10\ntrue\n"


def lua_world() -> World:
    """Return a cluster whose provider is a Lua script."""
    world = World()
    world.configure(BurstBufferType="burst_buffer/lua", LuaScript="/site/burst_buffer.lua")
    return world


def submit(world: World, **spec: object) -> int:
    """Submit a job with a directive of the site."""
    return world.submit(script="#!/bin/sh\ntrue\n", buffer=read_request(SCRIPT, provider="lua").request, **spec)


def status(world: World, job: int) -> JobStatus:
    """Return the status in the order for a job."""
    found = world.order(job).status
    assert found is not None
    return found


def test_an_order_says_where_its_job_stands() -> None:
    world = lua_world()
    at = world.at
    job = submit(world, priority=3, output="/out/o", deadline=Instant(at + 9_000_000_000))
    first = status(world, job)
    assert first == JobStatus(
        state="PENDING",
        buffer_state="staging-in",
        priority=3,
        output="/out/o",
        tres="cpu=1,node=1,bb/lua=1M",
        submitted_at=at,
        eligible_at=at,
        deadline=Instant(at + 9_000_000_000),
    )
    world.done(job)
    world.advance(5)
    world.report(job, c.ScriptStarted())
    world.advance(5)
    world.report(job, c.ScriptEnded(JobState.FAILED, 3, 9))
    after = status(world, job)
    assert (after.state, after.result, after.buffer_state) == ("STAGE_OUT", "FAILED", "post-run")
    assert (after.exit_code, after.signal) == (3, 9)
    assert at < after.started_at < after.ended_at


def test_of_dependencies_those_that_are_met_are_left_out() -> None:
    world = lua_world()
    done, waiting = submit(world), submit(world, hold=Hold.USER)
    world.finish(done)
    asked = (Dependency(DependencyKind.AFTER_OK, done), Dependency(DependencyKind.AFTER_ANY, waiting))
    job = submit(world, dependencies=asked, options=JobOptions(any_of=True, singleton=True))
    assert status(world, job).dependency == f"afterany:{waiting}?singleton"


def test_a_job_that_was_started_waits_for_nothing_and_counts_its_restarts() -> None:
    world = lua_world()
    job = submit(world, options=JobOptions(singleton=True))
    assert status(world, job).dependency == "singleton"
    world.done(job)
    assert (status(world, job).dependency, status(world, job).restarts) == ("", 0)
    world.report(job, c.ScriptStarted())
    assert not isinstance(world.settle(c.RequeueJob(job)), Rejection)
    while world.state.jobs[job].state is not JobState.PENDING or world.state.buffers[job].state.word != "staging-in":
        world.done(job)
    assert status(world, job).restarts == 1


def test_the_own_agents_are_told_no_status() -> None:
    world = World()
    assert world.order(world.submit("capacity=10")).status is None
