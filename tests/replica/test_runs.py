"""Runs and their failures: suspend, resume, requeue, pre-run, TeardownFailure, clear, restart-policy slurm."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from forebay.replica.fold.fold import fold
from forebay.replica.grammar.burst_buffer_conf import ConfSetting
from forebay.replica.messages import commands as c
from forebay.replica.messages import events as e
from forebay.replica.model.job_states import JobState
from forebay.replica.model.requests import JobOptions
from forebay.replica.values.errors import Rejection
from forebay.replica.values.units import NEVER
from tests.replica.world import World, user


def site(**settings: str) -> World:
    """A world without retries, with a site of these settings."""
    here = World(stage_retries=0)
    if settings:
        wanted = tuple(ConfSetting(key, value) for key, value in settings.items())
        assert not isinstance(here.settle(c.ConfigureSite(settings=wanted, partial=True)), Rejection)
    return here


def running(here: World, bb: str = "capacity=40", **more: Any) -> int:
    """Submit a job and bring it to where its script runs."""
    job = here.submit(bb, **more)
    if bb:
        here.done(job)
    here.report(job, c.ScriptStarted())
    return job


def state_of(here: World, job: int) -> str:
    return here.state.jobs[job].state.name


def fails(here: World, job: int, message: str, operation: str = "") -> None:
    assert not isinstance(here.report(job, c.OperationFailed(message, operation=operation)), Rejection)


@pytest.mark.parametrize("bb", ["capacity=40", ""])
def test_a_suspended_job_stands_still_and_goes_on_where_it_was(bb: str) -> None:
    here = site()
    job = running(here, bb)
    attempt = here.state.jobs[job].attempt
    assert not isinstance(here.settle(c.SuspendJob(job), user()), Rejection)
    assert (state_of(here, job), here.reason(job)) == ("SUSPENDED", "None")
    order = here.order(job)
    assert (order.suspend, order.started, order.attempt, order.cancel) == (True, True, attempt, False)
    here.advance(100)
    here.settle(c.ResumeJob(job), user())
    assert (state_of(here, job), here.order(job).suspend) == ("RUNNING", False)
    assert here.state.jobs[job].effective_interruptions.suspended_us == 100_000_000
    here.report(job, c.ScriptEnded(JobState.COMPLETED))
    if bb:
        here.finish(job)
    assert state_of(here, job) == "COMPLETED"


def test_only_its_user_or_an_operator_suspends_a_job() -> None:
    here = site()
    job = running(here)
    for command in (c.SuspendJob(job), c.ResumeJob(job), c.RequeueJob(job)):
        rejection = here.settle(command, user("ben"))
        assert isinstance(rejection, Rejection) and rejection.code.name == "PERMISSION_DENIED"


def test_a_suspended_job_that_is_cancelled_is_ended_and_drained_as_one_that_runs() -> None:
    here = site()
    job = running(here)
    here.settle(c.SuspendJob(job))
    here.settle(c.CancelJob(job))
    assert here.order(job).cancel
    here.report(job, c.ScriptEnded(JobState.CANCELLED, 0, 15))
    assert here.shown(job)[2] == "post-run"
    here.finish(job)
    assert state_of(here, job) == "CANCELLED"


def test_a_running_job_that_is_requeued_is_ended_drained_torn_down_and_stages_in_again() -> None:
    here = site()
    job = running(here)
    here.settle(c.RequeueJob(job), user())
    assert here.order(job).cancel
    here.report(job, c.ScriptEnded(JobState.CANCELLED, 0, 15))
    seen = []
    while here.state.buffers[job].state.word != "staging-in":
        seen.append(here.shown(job)[2])
        here.done(job)
    assert seen == ["post-run", "staging-out", "teardown"]
    assert state_of(here, job) == "PENDING"
    found = here.state.jobs[job]
    assert (found.result, found.started_at, found.ended_at, found.cancelled) == (JobState.PENDING, 0, 0, False)
    assert here.state.jobs[job].effective_interruptions.requeues == 1
    here.finish(job)
    assert state_of(here, job) == "COMPLETED"


def test_a_running_job_without_a_buffer_is_requeued_as_soon_as_its_script_has_ended() -> None:
    here = site()
    job = running(here, "")
    here.settle(c.RequeueJob(job))
    here.report(job, c.ScriptEnded(JobState.CANCELLED, 0, 15))
    assert state_of(here, job) == "CONFIGURING" and here.state.jobs[job].effective_interruptions.requeues == 1


def test_a_pending_job_that_is_requeued_gives_its_buffer_back_and_stages_in_again() -> None:
    here = site()
    here.submit(cpus=8, time_limit_s=9999)
    job = here.submit("capacity=40", cpus=8)
    here.done(job)
    assert here.shown(job)[2] == "staged-in"
    here.settle(c.RequeueJob(job), user())
    assert (here.shown(job)[2], here.free()) == ("teardown", 60)
    here.done(job)
    assert here.shown(job)[2] == "staging-in" and here.state.buffers[job].staged_in_files == 0


@pytest.mark.parametrize("event", [e.JobRequeued, e.RunRequeued])
@settings(max_examples=20)
@given(failures=st.integers(0, 9), message=st.text(max_size=5))
def test_a_requeued_job_begins_anew_and_keeps_no_failures_of_its_last_life(
    event: type[e.JobRequeued | e.RunRequeued], failures: int, message: str
) -> None:
    here = site()
    job = running(here)
    here.finish(job)
    former = replace(here.state.jobs[job], failures=failures, message=message, node="n1", order_at=here.at)
    state = fold(replace(here.state, jobs=here.state.jobs.set(job, former)), [event(job)], here.at)
    found = state.jobs[job]
    assert (found.failures, found.node, found.mover, found.order_at) == (0, "", "", NEVER)


def test_a_job_submitted_with_no_requeue_is_not_requeued() -> None:
    here = site()
    job = running(here, options=JobOptions(requeue=False))
    rejection = here.settle(c.RequeueJob(job))
    assert isinstance(rejection, Rejection) and "--no-requeue" in rejection.sentence


def test_a_requeued_job_that_is_cancelled_is_cancelled_and_not_run_again() -> None:
    for hurry in (False, True):
        here = site()
        job = running(here)
        here.settle(c.RequeueJob(job))
        here.report(job, c.ScriptEnded(JobState.CANCELLED, 0, 15))
        here.settle(c.CancelJob(job, hurry))
        here.finish(job)
        assert state_of(here, job) == "CANCELLED"


def test_a_dependency_on_a_requeued_job_waits_for_its_next_run() -> None:
    from forebay.replica.model.requests import Dependency, DependencyKind

    here = site()
    job = running(here)
    waiter = here.submit(dependencies=(Dependency(DependencyKind.AFTER_ANY, job),))
    here.settle(c.RequeueJob(job))
    here.report(job, c.ScriptEnded(JobState.CANCELLED, 0, 15))
    while here.state.jobs[job].state is not JobState.PENDING:
        here.done(job)
    here.done(job)
    assert here.reason(waiter) == "Dependency"


def test_the_job_of_a_node_that_failed_is_requeued_where_the_site_says_so_unless_it_said_no() -> None:
    here = site(RequeueOnNodeFail="yes")
    again, not_again = running(here), running(here, options=JobOptions(requeue=False))
    for job in (again, not_again):
        here.report(job, c.ScriptEnded(JobState.NODE_FAIL))
        for _ in range(3):
            here.done(job)
    assert (state_of(here, again), state_of(here, not_again)) == ("PENDING", "NODE_FAIL")


OPERATIONS = (
    ("setup", "burst_buffer/native: slurm_bb_setup: why", "burst_buffer/native: setup: why"),
    ("data_in", "burst_buffer/native: slurm_bb_data_in: why", "burst_buffer/native: data_in: why"),
    ("paths", "burst_buffer/native: slurm_bb_paths: why", "burst_buffer/native: paths: why"),
)


@pytest.mark.parametrize(("operation", "reason", "comment"), OPERATIONS)
def test_a_failed_stage_in_holds_the_job_with_the_operations_name_and_keeps_the_buffer(
    operation: str, reason: str, comment: str
) -> None:
    here = site()
    job = here.submit("capacity=40")
    fails(here, job, "why", operation)
    assert here.shown(job) == ("PENDING", reason, "staging-in")
    assert here.state.jobs[job].comment.endswith(comment) and here.free() == 60
    here.settle(c.ReleaseJob(job), user())
    here.finish(job)
    assert state_of(here, job) == "COMPLETED"


@pytest.mark.parametrize(("operation", "reason", "comment"), OPERATIONS)
def test_with_teardown_failure_it_is_torn_down_still_held_with_the_reason_and_a_release_stages_again(
    operation: str, reason: str, comment: str
) -> None:
    here = site(Flags="TeardownFailure")
    job = here.submit("capacity=40")
    fails(here, job, "why", operation)
    assert here.shown(job) == ("PENDING", reason, "teardown")
    here.done(job)
    assert here.shown(job) == ("PENDING", reason, "complete")
    assert here.state.jobs[job].comment.endswith(comment) and here.free() == 100
    here.settle(c.ReleaseJob(job), user())
    assert here.shown(job)[2] == "staging-in"


def test_reasons_name_the_functions_as_each_plugin_of_slurm_does() -> None:
    from forebay.replica.model.failure_texts import failure_reason

    assert failure_reason("lua", "setup", "why") == "burst_buffer/lua: slurm_bb_setup: why"
    assert failure_reason("datawarp", "setup", "why") == "burst_buffer/datawarp: setup: why"
    assert failure_reason("datawarp", "data_in", "why") == "burst_buffer/datawarp: dws_data_in: why"
    assert failure_reason("lua", "teardown", "why") == "burst_buffer/lua: teardown: why"


def test_a_failed_pre_run_holds_the_job_with_the_reason_tears_down_and_a_release_stages_again() -> None:
    here = site()
    job = here.submit("capacity=40")
    here.done(job)
    fails(here, job, "mount failed", "pre_run")
    held = "burst_buffer/native: slurm_bb_pre_run: mount failed"
    assert here.shown(job) == ("PENDING", held, "teardown")
    here.done(job)
    assert here.shown(job) == ("PENDING", held, "complete")
    here.settle(c.ReleaseJob(job), user())
    assert here.shown(job)[2] == "staging-in"
    here.finish(job)
    assert state_of(here, job) == "COMPLETED"


def test_a_site_may_have_failed_pre_runs_requeued_by_themselves_up_to_a_limit() -> None:
    here = site(PreRunRequeues="2")
    job = here.submit("capacity=40")
    for failures in (1, 2, 3):
        here.done(job)
        fails(here, job, "mount failed", "pre_run")
        assert here.state.jobs[job].effective_interruptions.pre_run_failures == failures
        here.done(job)
        assert here.shown(job)[2] == ("staging-in" if failures < 3 else "complete")


def test_what_an_operator_holds_stays_held_by_an_operator_when_an_operation_fails_too() -> None:
    here = site(Flags="TeardownFailure")
    job = here.submit("capacity=40")
    here.settle(c.HoldJob(job))
    fails(here, job, "why", "setup")
    here.done(job)
    rejection = here.settle(c.ReleaseJob(job), user())
    assert isinstance(rejection, Rejection) and rejection.code.name == "PERMISSION_DENIED"


def test_results_that_cannot_be_staged_out_are_never_torn_down_unless_an_operator_says_so_by_name() -> None:
    here = site(Flags="TeardownFailure")
    job = running(here)
    here.report(job, c.ScriptEnded(JobState.COMPLETED))
    here.done(job)
    fails(here, job, "EIO writing", "data_out")
    reason = "burst_buffer/native: slurm_bb_data_out: EIO writing"
    assert here.shown(job) == ("STAGE_OUT", reason, "staging-out")
    here.advance(10**6)
    assert here.shown(job)[2] == "staging-out"
    for command in (c.ClearBuffer(job), c.CancelJob(job)):
        here.settle(command)
        assert here.shown(job)[2] == "staging-out"
    assert isinstance(here.settle(c.ClearBuffer(job, discard=True), user()), Rejection)
    here.settle(c.ClearBuffer(job, discard=True))
    assert here.shown(job)[2] == "teardown"
    here.finish(job)
    assert state_of(here, job) == "COMPLETED"


def test_a_buffer_that_cannot_be_removed_stays_listed_and_counted_until_an_operator_clears_it() -> None:
    here = site()
    job = here.submit("capacity=40")
    here.settle(c.CancelJob(job))
    fails(here, job, "dws unreachable", "teardown")
    assert here.shown(job) == ("CANCELLED", "burst_buffer/native: teardown: dws unreachable", "teardown-fail")
    here.advance(10**6)
    assert (here.free(), job in here.state.unfinished) == (60, True)
    assert isinstance(here.settle(c.ClearBuffer(job), user()), Rejection)
    assert not isinstance(here.settle(c.ClearBuffer(job)), Rejection)
    assert (here.free(), here.shown(job)[2], job in here.state.finished) == (100, "complete", True)


def test_a_new_leader_changes_nothing_unless_the_site_wants_operations_started_again() -> None:
    here = site()
    job = here.submit("capacity=40")
    before = here.state.jobs
    here.settle(c.RestartOperations((job,)), c.CONTROLLER)
    assert here.state.jobs == before


def test_with_restart_policy_slurm_a_new_leader_starts_every_operation_again() -> None:
    here = site(RestartPolicy="slurm")
    jobs = {state: here.submit("capacity=10") for state in ("staging-in", "staging-out", "post-run", "teardown")}
    steps = {"staging-in": 0, "post-run": 2, "staging-out": 3, "teardown": 4}
    for state, job in jobs.items():
        for _ in range(steps[state]):
            here.done(job)
        assert here.shown(job)[2] == state
    attempts = {job: here.state.jobs[job].attempt for job in jobs.values()}
    here.settle(c.RestartOperations(tuple(jobs.values())), c.CONTROLLER)
    after = {state: here.shown(job)[2] for state, job in jobs.items()}
    begins_again = {"staging-in": "teardown", "post-run": "post-run", "staging-out": "post-run", "teardown": "teardown"}
    assert after == begins_again
    assert all(here.state.jobs[job].attempt > attempts[job] for job in jobs.values())
    for job in jobs.values():
        here.finish(job)
        assert state_of(here, job) == "COMPLETED"


def test_with_restart_policy_slurm_a_running_job_runs_on() -> None:
    here = site(RestartPolicy="slurm")
    job = running(here)
    before = here.order(job)
    here.settle(c.RestartOperations((job,)), c.CONTROLLER)
    assert here.order(job) == before
