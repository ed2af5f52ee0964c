"""Decide suspend, resume, requeue and clear, and the restart of operations by a new leader (RestartPolicy slurm).

Sources: SEMANTICS.md ("States", "When something fails", "When the controller dies"), SLURM-OBSERVED.md.
"""

from __future__ import annotations

from collections.abc import Iterable

from forebay.replica.decide.checks import RejectionError
from forebay.replica.decide.submit import check_requeue
from forebay.replica.decide.update import check_dependency_cycle
from forebay.replica.messages import commands as c
from forebay.replica.messages import events as e
from forebay.replica.model import ENDED, BufferState, Hold, Job, JobState
from forebay.replica.operations import removal_events, revocation_events
from forebay.replica.state import Facts
from forebay.replica.values import RESTARTED_MAX, Rejection, RejectionCode

Events = tuple[e.Event, ...]

_RESTARTABLE = (BufferState.PRE_RUN, BufferState.POST_RUN, BufferState.STAGING_OUT, BufferState.TEARDOWN)
_STAGED_BEFORE_RUN = (BufferState.STAGING_IN, BufferState.STAGED_IN)


def _wrong_state(job: Job, sentence: str, remedy: str) -> Rejection:
    return Rejection(RejectionCode.WRONG_STATE, f"job {job.display_name} {sentence}", remedy, "job")


def suspend_job(state: Facts, job: Job) -> Events | Rejection:
    """Return the events that stop the script of a job."""
    if job.state is JobState.SUSPENDED:
        return ()
    if job.state is not JobState.RUNNING:
        return _wrong_state(job, f"is {job.state.name}", "only running jobs can be suspended")
    if job.cancelled or job.effective_interruptions.requeueing:
        return _wrong_state(job, "is ending", "no action is needed")
    return (e.JobSuspended(job.id),)


def resume_job(state: Facts, job: Job) -> Events | Rejection:
    """Return the events that continue the script of a suspended job."""
    if job.state is not JobState.SUSPENDED:
        return _wrong_state(job, f"is {job.state.name}", "only suspended jobs can be resumed")
    return (e.JobResumed(job.id),)


def requeue_job(state: Facts, actor: c.Actor, job: Job) -> Events | Rejection:
    """Return the events of a requeue: the job releases its space and CPUs, waits, and is staged in again."""
    if not job.request.effective_options.requeue:
        return Rejection(
            RejectionCode.WRONG_STATE,
            f"job {job.id} was submitted with --no-requeue",
            "cancel it, and submit it again",
            "job",
        )
    reason = f"requeued by {actor.name}"
    if job.state in ENDED:
        return _requeue_finished(state, job)
    if job.state is JobState.PENDING:
        buffer = state.buffers.get(job.id)
        if buffer is None or buffer.state is BufferState.PENDING:
            return _wrong_state(job, "is pending and has no buffer yet", "no action is needed: the job already waits")
        return revocation_events(state, job, reason) if buffer.state in _STAGED_BEFORE_RUN else ()
    if job.state not in (JobState.CONFIGURING, JobState.RUNNING, JobState.SUSPENDED):
        return _wrong_state(job, f"is {job.state.name}", "only jobs that wait or run can be requeued; submit it again")
    if job.cancelled:
        return _wrong_state(job, "is being cancelled", "submit it again")
    if job.effective_interruptions.requeueing:
        return ()
    return (e.RequeueRequested(job.id, reason),)


def _requeue_finished(state: Facts, job: Job) -> Events | Rejection:
    """Return the events that requeue a finished job, as if it had never run."""
    buffer = state.buffers.get(job.id)
    if job.id in state.unfinished:
        return _wrong_state(
            job, f"is {job.state.name} and its buffer is not torn down yet", "requeue it after the teardown"
        )
    try:
        check_requeue(state, job.request, "" if buffer is None else buffer.pool)
        check_dependency_cycle(state, job, job.request)
    except RejectionError as error:
        return error.rejection
    run = (e.RunRequeued(job.id),)
    return run if buffer is None else (e.JobRequeued(job.id), *run)


def clear_job_buffer(state: Facts, actor: c.Actor, job: Job, discard: bool) -> Events | Rejection:
    """Return the events that clear the buffer of a job.

    A buffer that could not be removed is deleted from the state. With `discard`, results that could not be staged out
    are deleted, too.
    """
    buffer = state.buffers.get(job.id)
    if buffer is None:
        return _wrong_state(job, "has no burst buffer", "forebay buffer list shows the buffers")
    by = f"cleared by {actor.name}"
    if buffer.state is BufferState.TEARDOWN_FAIL:
        return (e.BufferCleared(job.id, by), *removal_events(state, job))
    node = state.nodes.get(job.node)
    if node is not None and node.down and not node.lost and not job.mover:
        return _wrong_state(
            job,
            f"has its buffer on node {node.name}, which is DOWN",
            f"start the node's agent, or declare the node lost: forebay node lost {node.name}",
        )
    if job.state is JobState.STAGE_OUT:
        if not discard:
            again = "release it" if job.external_job is None else "export it (forebay buffer export)"
            return _wrong_state(
                job,
                f"has results that are not staged out (its buffer is {buffer.state.word})",
                f"{again} to retry, or use --discard to delete them",
            )
        result = JobState.CANCELLED if job.result is JobState.PENDING else job.result
        return (e.TeardownStarted(job.id, job.attempt + 1, result, True, f"results discarded, {by}"),)
    return _wrong_state(
        job,
        f"has a buffer that is {buffer.state.word}",
        "only buffers whose teardown or stage-out failed can be cleared",
    )


def clear_persistent(state: Facts, actor: c.Actor, name: str, discard: bool) -> Events | Rejection:
    """Return the events that delete a persistent buffer from the state and release its space."""
    buffer = state.persistent.get(name)
    if buffer is None:
        return Rejection(
            RejectionCode.WRONG_STATE,
            f"persistent buffer {name!r} does not exist",
            "forebay slurm burst shows the buffers",
            "name",
        )
    using = len(state.using.get(name, ()))
    if using:
        sentence = f"persistent buffer {name} is in use by {using} jobs"
        return Rejection(RejectionCode.WRONG_STATE, sentence, "wait until they have finished", "name")
    if buffer.state is BufferState.ALLOCATED and not discard:
        return Rejection(
            RejectionCode.WRONG_STATE,
            f"persistent buffer {name} is allocated",
            "submit a job with destroy_persistent, or use --discard if it cannot be removed",
            "name",
        )
    removal = e.PersistentDeleted(name, buffer.job, f"cleared by {actor.name}")
    if buffer.state is BufferState.DELETING:
        return (removal,)
    return (e.PersistentDeletionStarted(name, buffer.job, True), removal)


def restart_operations(state: Facts, jobs: Iterable[int]) -> Events | Rejection:
    """Return the events that restart the operations of `jobs` after a change of the leader (RestartPolicy slurm)."""
    if state.site.restart_policy != "slurm":
        return ()
    found: list[e.Event] = []
    wanted = list(jobs)
    if len(wanted) > RESTARTED_MAX:
        return Rejection(
            RejectionCode.LIMIT_EXCEEDED,
            f"{len(wanted)} jobs exceed the limit of one restart",
            f"name at most {RESTARTED_MAX} at once",
            "jobs",
        )
    for job_id in wanted:
        job, buffer = state.jobs.get(job_id), state.buffers.get(job_id)
        if job is None or buffer is None or job.external_job is not None:
            continue  # the scheduler of an external job restarts it
        if buffer.state in _STAGED_BEFORE_RUN:
            held_back = job.stuck and job.hold is not Hold.NONE
            found.extend(() if held_back else revocation_events(state, job, "the controller was restarted"))
        elif buffer.state in _RESTARTABLE:
            found.append(e.OperationsRestarted(job.id, job.attempt + 1))
    return tuple(found)
