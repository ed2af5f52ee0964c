"""Dependencies as the guide has them: who waits for whose run, stage-out and teardown, and jobs of one name in turn."""

from __future__ import annotations

import pytest

from forebay.replica.messages import commands as c
from forebay.replica.model.job_names import NamedJobs, add_job, first_job, remove_job
from forebay.replica.model.job_states import JobState
from forebay.replica.model.jobs import Hold
from forebay.replica.model.requests import Dependency, DependencyKind, JobOptions
from forebay.replica.values.errors import Rejection, RejectionCode
from forebay.replica.values.limits import WHOLE_ARRAYS_MAX
from tests.replica.world import World, user

K = DependencyKind
SINGLETON = JobOptions(singleton=True)


def waiting(world: World, kind: DependencyKind, job: int, bb: str = "", **spec: object) -> int:
    return world.submit(bb, dependencies=(Dependency(kind, job),), **spec)


def test_children_of_a_job_with_a_buffer_start_when_the_guide_says() -> None:
    """Transcript 06 but for ok_bb: Slurm 22.05 started it before stage-out had ended, the guide and Forebay do not."""
    world = World({"fast": 100})
    parent = world.submit("capacity=10")
    ok_bb, ok, any_, after_bb, after_bb_with, not_ok = (
        waiting(world, K.AFTER_OK, parent, "capacity=10"),
        waiting(world, K.AFTER_OK, parent),
        waiting(world, K.AFTER_ANY, parent),
        waiting(world, K.AFTER_BURST_BUFFER, parent),
        waiting(world, K.AFTER_BURST_BUFFER, parent, "capacity=10"),
        waiting(world, K.AFTER_NOT_OK, parent),
    )
    children = (ok_bb, ok, any_, after_bb, after_bb_with, not_ok)
    assert [world.reason(job) for job in children] == ["Dependency"] * 6
    world.done(parent)  # staged in
    world.done(parent)  # run
    assert world.shown(parent)[2] == "post-run"
    assert [world.reason(job) for job in children] == [
        "Dependency", "None", "None", "Dependency", "Dependency", "DependencyNeverSatisfied",
    ]  # fmt: skip
    world.done(parent)  # post-run
    assert world.shown(parent)[2] == "staging-out" and world.reason(ok_bb) == "Dependency"
    world.done(parent)  # staged out
    assert world.shown(parent)[2] == "teardown"
    assert world.shown(ok_bb)[2] == "staging-in"
    assert [world.reason(job) for job in (after_bb, after_bb_with)] == ["Dependency"] * 2
    world.done(parent)  # torn down
    assert world.state.jobs[after_bb].state is JobState.CONFIGURING
    assert world.shown(after_bb_with)[2] == "staging-in"


def test_a_failed_stage_out_keeps_children_with_buffers_waiting() -> None:
    world = World({"fast": 100}, stage_retries=0)
    parent = world.submit("capacity=10")
    ok_bb, after_bb = waiting(world, K.AFTER_OK, parent, "capacity=10"), waiting(world, K.AFTER_BURST_BUFFER, parent)
    for _ in range(3):
        world.done(parent)
    world.report(parent, c.OperationFailed("disk full", final=True))
    assert [world.reason(job) for job in (ok_bb, after_bb)] == ["Dependency"] * 2
    world.settle(c.CancelJob(parent, hurry=True), user())
    assert world.reason(after_bb) == "Dependency"
    world.done(parent)
    assert world.reason(after_bb) == "None"


def test_after_a_burst_buffer_of_a_job_without_one_is_after_its_end() -> None:
    world = World({"fast": 100})
    parent = world.submit()
    child = waiting(world, K.AFTER_BURST_BUFFER, parent, "capacity=10")
    assert world.reason(child) == "Dependency"
    world.finish(parent)
    assert world.reason(child) == "BurstBufferStageIn"


@pytest.mark.parametrize("kind", [K.AFTER_OK, K.AFTER_ANY, K.AFTER_NOT_OK, K.AFTER])
def test_a_parent_that_is_cancelled_while_it_waits_has_failed(kind: DependencyKind) -> None:
    world = World(cpus=1)
    world.submit()
    parent = world.submit()
    child = waiting(world, kind, parent)
    world.settle(c.CancelJob(parent), user())
    assert world.reason(child) == ("DependencyNeverSatisfied" if kind is K.AFTER_OK else "Resources")


# One of a name at a time ---------------------------------------------------------------------------------------------


def test_jobs_of_one_name_that_ask_for_it_run_one_after_the_other() -> None:
    world = World(cpus=8)
    jobs = [world.submit(name="daily", options=SINGLETON) for _ in range(3)]
    other = world.submit(name="weekly", options=SINGLETON)
    of_ada = world.submit(name="daily", who="ada", options=SINGLETON)
    assert [world.reason(job) for job in jobs] == ["None", "Dependency", "Dependency"]
    assert [world.reason(job) for job in (other, of_ada)] == ["None", "None"]
    verdict = world.verdict(jobs[2])
    assert dict(verdict.figures)["waits_for"] == f"singleton:{jobs[0]}"
    world.finish(jobs[0])
    assert [world.reason(job) for job in jobs[1:]] == ["None", "Dependency"]
    world.settle(c.CancelJob(jobs[1]), user())
    assert world.reason(jobs[2]) == "Dependency"  # its script is still being ended
    world.report(jobs[1], c.ScriptEnded(JobState.CANCELLED))
    assert world.reason(jobs[2]) == "None"


def test_a_singleton_waits_for_earlier_jobs_that_did_not_ask_and_for_their_stage_out() -> None:
    world = World({"fast": 100})
    first = world.submit("capacity=10", name="daily")
    second = world.submit(name="daily", options=SINGLETON)
    later = world.submit(name="daily")
    assert world.reason(second) == "Dependency"
    assert world.state.jobs[later].state is JobState.CONFIGURING  # it did not ask
    while world.state.jobs[first].state not in (JobState.COMPLETED,):
        assert world.reason(second) == "Dependency"
        world.done(first)
    assert world.shown(first)[2] == "teardown"
    assert world.reason(second) == "None"


def test_a_group_of_a_name_knows_its_first_job_whatever_comes_and_goes() -> None:
    from random import Random

    random = Random(4)
    names, model = None, set[int]()
    for _ in range(3_000):
        job = random.randrange(1, 400)
        if job in model:
            model.discard(job)
            assert names is not None
            names = remove_job(names, "daily", job)
        else:
            model.add(job)
            names = add_job(names, "daily", job)
        group = names.get("daily")
        assert (0 if group is None else first_job(group)) == min(model, default=0)
        assert not isinstance(group, NamedJobs) or set(group.jobs) == model
        assert isinstance(group, NamedJobs) == (len(model) > 1)


@pytest.mark.parametrize("kind", [kind for kind in DependencyKind if kind.is_for_array])
def test_a_job_waits_for_no_more_whole_arrays_than_can_be_looked_at_in_a_turn_of_the_loop(kind: DependencyKind) -> None:
    world = World(cpus=64)
    arrays = [world.submit(array=(0, 1), hold=Hold.USER) for _ in range(WHOLE_ARRAYS_MAX + 1)]
    named = tuple(Dependency(kind, array) for array in arrays)
    assert isinstance(world.try_submit(dependencies=named[1:]), int)
    rejection = world.try_submit(dependencies=named)
    assert isinstance(rejection, Rejection) and (rejection.code, rejection.place) == (
        RejectionCode.LIMIT_EXCEEDED,
        "dependencies",
    )
    assert isinstance(world.try_submit(dependencies=(*named[1:], named[1])), int), "the same one again is no more"
