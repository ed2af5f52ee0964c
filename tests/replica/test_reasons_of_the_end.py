"""Reasons that name the cause: a job whose script was ended, a hold after a failure, and names that do not exist."""

from __future__ import annotations

from forebay.cluster.api.render.jobs import holders
from forebay.replica.messages import commands as c
from forebay.replica.model.job_states import JobState
from forebay.replica.model.requests import JobOptions, JobRequest
from forebay.replica.values.errors import Rejection
from tests.replica.test_persistent import made, world
from tests.replica.world import SCRIPT, World, user

OVERFULL = "ended because the job's buffer holds at least 5 MiB (limit: 1 MiB)"


def ended(message: str, exit_code: int, signal: int) -> tuple[World, int]:
    here = World({"fast": 100})
    job = here.submit("capacity=1")
    here.done(job)
    here.report(job, c.ScriptStarted())
    here.report(job, c.ScriptEnded(JobState.FAILED, exit_code, signal, message))
    here.finish(job)
    assert here.state.jobs[job].state is JobState.FAILED
    return here, job


def test_a_script_that_was_ended_for_its_buffer_has_that_reason() -> None:
    here, job = ended(OVERFULL, 0, 9)
    assert here.reason(job) == OVERFULL


def test_a_script_that_failed_by_itself_has_slurms_reason() -> None:
    here, job = ended("", 3, 0)
    assert here.reason(job) == "NonZeroExitCode"


def test_a_hold_after_a_failure_is_not_called_an_operators() -> None:
    here = World({"fast": 100})
    job = here.submit("capacity=1")
    here.report(job, c.OperationFailed("no such file", final=True))
    # The user's own requeue clears the message of the failure, and the hold stays.
    here.settle(c.RequeueJob(job), user())
    here.done(job)
    assert here.reason(job) == "JobHeldAdmin"
    assert "an operation failed; release it" in here.verdict(job).sentence


def test_a_name_that_does_not_exist_comes_with_what_to_do() -> None:
    here = World({"fast": 100})
    request = JobRequest("job", "alan", SCRIPT, "/out", 60, options=JobOptions(qos="nosuch"))
    found = here.settle(c.SubmitJob(request), user())
    assert isinstance(found, Rejection)
    assert found.sentence == "qos 'nosuch' does not exist" and "defined no qos" in found.remedy


def test_persistent_buffers_count_among_the_holders_of_a_pool() -> None:
    here = world(pools={"fast": 100})
    made(here)
    assert holders(here.state)["fast"] == 1
