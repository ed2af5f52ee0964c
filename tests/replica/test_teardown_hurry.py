"""What a provider is told of a teardown: `hurry` where nothing was exported, as Slurm tells it (SLURM-OBSERVED.md)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from forebay.replica.messages import commands as c
from forebay.replica.model.job_states import JobState
from tests.replica.world import World


def staging_in(world: World, job: int) -> None:
    assert world.shown(job)[2] == "staging-in"


def pre_run(world: World, job: int) -> None:
    world.done(job)
    assert world.shown(job)[2] == "pre-run"


def running(world: World, job: int) -> None:
    pre_run(world, job)
    world.report(job, c.ScriptStarted())


def staging_out(world: World, job: int) -> None:
    running(world, job)
    world.report(job, c.ScriptEnded(JobState.COMPLETED))
    world.done(job)
    assert world.shown(job)[2] == "staging-out"


def cancel(world: World, job: int, hurry: bool) -> None:
    world.settle(c.CancelJob(job, hurry))
    while world.shown(job)[2] != "teardown":
        if world.order(job).stage == "run":
            world.report(job, c.ScriptEnded(JobState.CANCELLED))
        else:
            world.done(job)


Reach = Callable[[World, int], None]


@pytest.mark.parametrize(
    ("reach", "hurry", "told"),
    [
        (staging_in, False, True),
        (staging_in, True, True),
        (pre_run, False, True),
        (pre_run, True, True),
        (running, False, False),
        (running, True, True),
        (staging_out, False, False),
        (staging_out, True, True),
    ],
)
def test_a_teardown_hurries_where_nothing_ran_or_stage_out_was_skipped(reach: Reach, hurry: bool, told: bool) -> None:
    world = World()
    job = world.submit("capacity=40")
    reach(world, job)
    if reach is staging_out and not hurry:
        world.done(job)
    else:
        cancel(world, job, hurry)
    order = world.order(job)
    assert (order.stage, order.hurry) == ("teardown", told)


def test_what_ran_and_staged_out_is_torn_down_without_hurry() -> None:
    world = World()
    job = world.submit("capacity=40")
    staging_out(world, job)
    world.done(job)
    assert (world.order(job).stage, world.order(job).hurry) == ("teardown", False)


def test_what_gave_its_place_up_before_it_ran_is_torn_down_with_hurry() -> None:
    world = World()
    job = world.submit("capacity=40")
    pre_run(world, job)
    world.settle(c.RequeueJob(job))
    if world.order(job).stage == "run":
        world.report(job, c.ScriptEnded(JobState.CANCELLED))
    assert (world.order(job).stage, world.order(job).hurry) == ("teardown", True)
