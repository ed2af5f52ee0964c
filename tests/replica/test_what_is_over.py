"""What is asked of jobs that are over, as Slurm answers it: a cancel, a requeue, a dependency on one that is gone."""

from __future__ import annotations

import pytest

from forebay.replica.messages import commands as c
from forebay.replica.model.job_states import ENDED, JobState
from forebay.replica.model.jobs import Hold
from forebay.replica.model.requests import AfterTask, Dependency, DependencyKind, JobChange
from forebay.replica.values.errors import Rejection, RejectionCode
from tests.replica.scheduler.test_index import IndexedWorld
from tests.replica.world import OPERATOR, World, user

BB = "capacity=10 pool=fast"


def ended(here: World, result: JobState, bb: str) -> int:
    """Return a job that has ended so, with its buffer torn down."""
    job = here.submit(bb)
    if result is JobState.CANCELLED:
        here.settle(c.CancelJob(job), user())
    while job in here.state.unfinished:
        order = here.order(job)
        if order.stage == "run":
            here.report(job, c.ScriptStarted(), order)
            assert not isinstance(here.report(job, c.ScriptEnded(result, 1), order), Rejection)
        else:
            here.done(job)
    assert here.state.jobs[job].state is result
    return job


@pytest.mark.parametrize("bb", ["", BB])
@pytest.mark.parametrize("hurry", [False, True])
@pytest.mark.parametrize("result", sorted(ENDED))
def test_a_cancel_of_what_is_over_changes_nothing_and_is_no_failure(result: JobState, hurry: bool, bb: str) -> None:
    here = World(requeue_on_node_fail=False)
    job = ended(here, result, bb)
    before = here.state.jobs[job]
    assert not isinstance(here.settle(c.CancelJob(job, hurry=hurry), user()), Rejection)
    assert here.state.jobs[job] == before
    rejection = here.settle(c.CancelJob(job), user("mallory"))
    assert isinstance(rejection, Rejection) and rejection.code is RejectionCode.PERMISSION_DENIED


@pytest.mark.parametrize("bb", ["", BB])
@pytest.mark.parametrize("result", sorted(ENDED))
def test_a_job_that_is_over_shows_why_where_it_did_not_end_well(result: JobState, bb: str) -> None:
    words = {
        JobState.FAILED: "NonZeroExitCode",
        JobState.TIMEOUT: "TimeLimit",
        JobState.NODE_FAIL: "NodeDown",
    }
    here = World(requeue_on_node_fail=False)
    job = here.submit(bb)
    while here.order(job).stage != "run":
        here.done(job)
    here.report(job, c.ScriptStarted())
    if result is JobState.CANCELLED:
        here.settle(c.CancelJob(job), user())
    here.report(job, c.ScriptEnded(result, 1))
    while job in here.state.unfinished:
        over = here.state.jobs[job].state in ENDED
        shown = words.get(result, "None") if over else "burst_buffer/native: Stage-out in progress"
        assert here.reason(job) == shown
        here.done(job)
    assert here.reason(job) == words.get(result, "None")


@pytest.mark.parametrize("bb", ["", BB])
@pytest.mark.parametrize("result", sorted(ENDED))
def test_a_job_that_is_over_is_requeued_and_lives_its_whole_life_again(result: JobState, bb: str) -> None:
    here = World(requeue_on_node_fail=False)
    job = ended(here, result, bb)
    attempt = here.state.jobs[job].attempt
    assert not isinstance(here.settle(c.RequeueJob(job), user()), Rejection)
    again = here.state.jobs[job]
    assert (
        again.effective_interruptions.requeues == 1 and not again.cancelled and not again.hurry and again.ended_at == 0
    )
    assert here.order(job).attempt > attempt, "no report of its former life counts"
    here.finish(job)
    assert here.state.jobs[job].state is JobState.COMPLETED
    assert here.free() == 100


def test_a_job_that_is_over_is_not_requeued_before_its_buffer_is_torn_down() -> None:
    here = World()
    job = here.submit(BB)
    while here.order(job).stage != "teardown":
        here.done(job)
    rejection = here.settle(c.RequeueJob(job), user())
    assert isinstance(rejection, Rejection) and "not torn down yet" in rejection.sentence


def test_a_requeued_job_meets_what_has_changed_since_it_was_over() -> None:
    here = World(pools={"fast": 100, "other": 50})
    job, mine = ended(here, JobState.COMPLETED, "capacity=10 pool=other"), ended(here, JobState.COMPLETED, BB)
    assert not isinstance(here.settle(c.RemovePool("other")), Rejection)
    rejection = here.settle(c.RequeueJob(job), user())
    assert isinstance(rejection, Rejection) and rejection.code is RejectionCode.UNKNOWN_POOL
    here.configure(DenyUsers="alan")
    assert isinstance(here.settle(c.RequeueJob(mine), user()), Rejection)
    assert isinstance(here.settle(c.RequeueJob(mine), OPERATOR), Rejection)


def test_a_requeue_of_what_is_over_closes_no_circle() -> None:
    here = World()
    first = here.submit("")
    second = here.submit("", dependencies=(Dependency(DependencyKind.AFTER_ANY, first),))
    here.finish(first)
    here.finish(second)
    blocker = here.submit("", cpus=8)
    assert not isinstance(here.settle(c.RequeueJob(first), user()), Rejection)
    after_second = JobChange(dependencies=(Dependency(DependencyKind.AFTER_ANY, second),))
    assert not isinstance(here.settle(c.UpdateJob(first, after_second), user()), Rejection)
    rejection = here.settle(c.RequeueJob(second), user())
    assert isinstance(rejection, Rejection) and "would wait for itself" in rejection.sentence
    here.finish(blocker)
    here.finish(first)
    assert not isinstance(here.settle(c.RequeueJob(second), user()), Rejection)


@pytest.mark.parametrize("asked", [{"dependencies": True}, {"after_tasks": True}])
@pytest.mark.parametrize("kind", [DependencyKind.AFTER_BURST_BUFFER, DependencyKind.AFTER_OK, DependencyKind.AFTER_ANY])
def test_a_buffer_that_is_unknown_is_not_waited_for_and_other_dependencies_on_the_unknown_are_refused(
    kind: DependencyKind, asked: dict[str, bool]
) -> None:
    here = World()
    on_job = (Dependency(kind, 999),) if "dependencies" in asked else ()
    on_task = (AfterTask(kind, 999, 1),) if "after_tasks" in asked else ()
    job = here.try_submit("", dependencies=on_job, after_tasks=on_task)
    if kind is not DependencyKind.AFTER_BURST_BUFFER:
        assert isinstance(job, Rejection) and job.code is RejectionCode.UNKNOWN_DEPENDENCY
        return
    assert isinstance(job, int)
    assert here.state.jobs[job].request.dependencies == (), "nor is a later job of that number"
    assert here.order(job).stage == "run"


@pytest.mark.parametrize("bb", ["", BB])
@pytest.mark.parametrize("held", [False, True])
def test_a_job_that_was_over_and_is_requeued_is_not_purged_for_those_that_are_over_since(bb: str, held: bool) -> None:
    here = IndexedWorld(finished_jobs_kept=1)
    job = ended(here, JobState.COMPLETED, bb)
    here.settle(c.DrainNode("n1", ""))
    assert not isinstance(here.settle(c.RequeueJob(job), user()), Rejection)
    if held:
        assert not isinstance(here.settle(c.HoldJob(job), user()), Rejection)
    for _ in range(3):
        other = here.submit(hold=Hold.USER)
        here.settle(c.CancelJob(other), user())
    assert here.state.jobs[job].state is JobState.PENDING
    assert len(here.state.finished) == 1
