"""Results that are not there: who gives them up, and what the agent is told of it."""

from __future__ import annotations

import pytest

from forebay.replica.messages import commands as c
from forebay.replica.model.job_states import JobState
from forebay.replica.values.errors import Rejection, RejectionCode
from tests.replica.world import World, user


def staging_out(world: World, result: JobState) -> int:
    """Bring a job to its stage-out."""
    job = world.submit("capacity=40")
    world.done(job)
    world.report(job, c.ScriptStarted())
    world.report(job, c.ScriptEnded(result))
    world.done(job)
    assert world.order(job).stage == "stage_out"
    return job


@pytest.mark.parametrize("result", [JobState.COMPLETED, JobState.FAILED, JobState.TIMEOUT, JobState.NODE_FAIL])
def test_a_stage_out_gives_up_what_is_not_there_exactly_where_the_script_did_not_succeed(result: JobState) -> None:
    world = World()
    job = staging_out(world, result)
    assert world.order(job).partial == (result is not JobState.COMPLETED)


def test_the_user_ends_a_job_without_what_its_script_did_not_make_and_keeps_the_rest() -> None:
    world = World()
    job = staging_out(world, JobState.COMPLETED)
    world.report(job, c.OperationFailed("$DW_JOB_STRIPED/gone does not exist", True))
    assert world.state.jobs[job].stuck
    world.settle(c.ReleaseJob(job), user())
    assert not world.order(job).partial
    world.report(job, c.OperationFailed("$DW_JOB_STRIPED/gone does not exist", True))
    world.settle(c.ReleaseJob(job, partial=True), user())
    assert (world.order(job).stage, world.order(job).partial) == ("stage_out", True)
    # It stands for every further attempt of this stage-out.
    world.report(job, c.OperationFailed("Input/output error"))
    world.advance(3600)
    assert world.order(job).partial
    world.done(job)
    world.done(job)
    assert world.state.jobs[job].state is JobState.COMPLETED and world.state.held_bytes.get("fast", 0) == 0


def test_partial_is_refused_where_no_stage_out_has_failed_and_of_somebody_elses_job() -> None:
    world = World()
    job = staging_out(world, JobState.COMPLETED)
    for who, code in ((user(), RejectionCode.WRONG_STATE), (user("eve"), RejectionCode.PERMISSION_DENIED)):
        refused = world.settle(c.ReleaseJob(job, partial=True), who)
        assert isinstance(refused, Rejection) and refused.code is code


def test_a_jobs_output_may_be_nowhere() -> None:
    world = World()
    job = world.submit(output="/dev/null")
    assert world.state.jobs[job].request.output == "/dev/null"
