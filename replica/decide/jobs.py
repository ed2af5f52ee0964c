"""Decide commands about jobs: submit, cancel, hold, release, suspend, resume, requeue, update, clear, export."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from forebay.replica.decide.external_jobs import export_again
from forebay.replica.decide.reports import _report_operation, _settle_mails
from forebay.replica.decide.runs import (
    clear_job_buffer,
    clear_persistent,
    requeue_job,
    restart_operations,
    resume_job,
    suspend_job,
)
from forebay.replica.decide.submit import submit_job
from forebay.replica.decide.update import update_job
from forebay.replica.messages import NOTHING, Acceptance, Decision, decision_of
from forebay.replica.messages import commands as c
from forebay.replica.messages import events as e
from forebay.replica.model import ENDED, BufferState, ExternalJob, Hold, Job, JobState, Stage
from forebay.replica.operations import (
    rollback_events,
    waiting_stage,
)
from forebay.replica.state import Facts
from forebay.replica.values import Instant, Rejection, RejectionCode, run_to_end


def _submit_job(state: Facts, actor: c.Actor, command: c.SubmitJob, at: Instant) -> Decision:
    submitted = run_to_end(submit_job(state, actor, command))
    return submitted if isinstance(submitted, Rejection) else Acceptance((submitted,))


def _find_job(state: Facts, actor: c.Actor, job_id: int, *, of_external_jobs: bool = False) -> Job | Rejection:
    """Return the job if it exists and the actor may act on it, else a Rejection.

    `of_external_jobs`: the command is also permitted for external jobs.
    """
    job = state.jobs.get(job_id)
    if job is None:
        gone = 0 < job_id < state.next_job
        return Rejection(
            RejectionCode.UNKNOWN_JOB,
            f"job {job_id} was purged" if gone else f"job {job_id} does not exist",
            f"forebay job history {job_id} shows its history" if gone else "forebay queue shows the jobs",
            "job",
        )
    if actor.role is c.ActorRole.USER and actor.name != job.request.user:
        return Rejection(
            RejectionCode.PERMISSION_DENIED,
            f"job {job_id} belongs to user {job.request.user}",
            "ask its user or an operator",
            "job",
        )
    return job if job.external_job is None or of_external_jobs else _external_job_rejection(job, job.external_job)


def _external_job_rejection(job: Job, external_job: ExternalJob) -> Rejection:
    return Rejection(
        RejectionCode.WRONG_STATE,
        f"job {job.id} is external job {external_job.name}, which only its scheduler controls",
        "use its scheduler; for retained results, use `forebay buffer export`",
        "job",
    )


def cancel_job(state: Facts, actor: c.Actor, command: c.CancelJob, at: Instant) -> Decision:
    """Decide a cancellation. A finished job is left as it is, without an error."""
    job = _find_job(state, actor, command.job)
    if isinstance(job, Rejection):
        return job
    buffer = state.buffers.get(job.id)
    if job.state is JobState.PENDING:
        if buffer is None or buffer.state is BufferState.PENDING:
            return Acceptance((e.JobCancelled(job.id),))
        if buffer.state in (BufferState.STAGING_IN, BufferState.STAGED_IN):
            return Acceptance(
                (
                    e.CancelRequested(job.id, command.hurry),
                    *rollback_events(state, job),
                    e.TeardownStarted(job.id, job.attempt + 1, JobState.CANCELLED, command.hurry, "cancelled"),
                )
            )
        return Acceptance((e.CancelRequested(job.id, command.hurry),))
    if job.state in ENDED:
        # The job has finished, which is the goal of cancelling it: no error, as in Slurm.
        return NOTHING
    if job.state is JobState.STAGE_OUT:
        requeueing = job.result is JobState.PENDING
        if not command.hurry:
            # The stage-out continues, but a requeued job does not run again.
            ends = requeueing and not job.cancelled
            return Acceptance((e.CancelRequested(job.id, False),)) if ends else NOTHING
        result = JobState.CANCELLED if requeueing else job.result
        return Acceptance(
            (
                e.CancelRequested(job.id, True),
                e.TeardownStarted(job.id, job.attempt + 1, result, True, "stage-out skipped: cancelled with --hurry"),
            )
        )
    if job.cancelled and (job.hurry or not command.hurry):
        return NOTHING
    return Acceptance((e.CancelRequested(job.id, command.hurry),))


def _hold_job(state: Facts, actor: c.Actor, command: c.HoldJob, at: Instant) -> Decision:
    job = _find_job(state, actor, command.job)
    if isinstance(job, Rejection):
        return job
    if job.state is not JobState.PENDING:
        return Rejection(
            RejectionCode.WRONG_STATE, f"job {job.id} is {job.state.name}", "only pending jobs can be held", "job"
        )
    hold = Hold.ADMIN if actor.role is c.ActorRole.OPERATOR and actor.name != job.request.user else Hold.USER
    return NOTHING if job.hold >= hold else Acceptance((e.JobHeld(job.id, hold),))


def _release_job(state: Facts, actor: c.Actor, command: c.ReleaseJob, at: Instant) -> Decision:
    job = _find_job(state, actor, command.job, of_external_jobs=True)
    if isinstance(job, Rejection):
        return job
    if job.hold is Hold.ADMIN and actor.role is c.ActorRole.USER:
        return Rejection(
            RejectionCode.PERMISSION_DENIED,
            f"job {job.id} is held by an operator",
            "ask an operator to release it",
            "job",
        )
    events: list[e.Event] = []
    if job.hold is not Hold.NONE and job.state not in ENDED:
        events.append(e.JobReleased(job.id))
    buffer = state.buffers.get(job.id)
    stage = None if buffer is None else waiting_stage(job, buffer)
    if job.external_job is not None and stage is Stage.STAGE_IN:
        return _external_job_rejection(job, job.external_job)
    if command.partial and stage is not Stage.STAGE_OUT:
        return Rejection(
            RejectionCode.WRONG_STATE,
            f"job {job.id} has no failed stage-out",
            "use partial only after a failed stage-out",
            "job",
        )
    if stage is not None:
        why = "released, without missing files" if command.partial else "released"
        events.append(e.StageRetried(job.id, stage, job.attempt + 1, why, command.partial))
    if not events:
        return Rejection(
            RejectionCode.WRONG_STATE,
            f"job {job.id} is not held and has no failed operation",
            "no action is needed",
            "job",
        )
    return Acceptance(tuple(events))


def _suspend_job(state: Facts, actor: c.Actor, command: c.SuspendJob, at: Instant) -> Decision:
    job = _find_job(state, actor, command.job)
    return job if isinstance(job, Rejection) else decision_of(suspend_job(state, job))


def _resume_job(state: Facts, actor: c.Actor, command: c.ResumeJob, at: Instant) -> Decision:
    job = _find_job(state, actor, command.job)
    return job if isinstance(job, Rejection) else decision_of(resume_job(state, job))


def _requeue_job(state: Facts, actor: c.Actor, command: c.RequeueJob, at: Instant) -> Decision:
    job = _find_job(state, actor, command.job)
    return job if isinstance(job, Rejection) else decision_of(requeue_job(state, actor, job))


def _update_job(state: Facts, actor: c.Actor, command: c.UpdateJob, at: Instant) -> Decision:
    return update_one(state, actor, command, command.job, 1)


def update_one(state: Facts, actor: c.Actor, command: c.UpdateJob, job_id: int, jobs: int) -> Decision:
    """Decide the update of one job. `jobs` is the number of jobs updated together, for the QOS's limit of jobs."""
    job = _find_job(state, actor, job_id)
    return job if isinstance(job, Rejection) else decision_of(update_job(state, actor, job, command, jobs))


def _clear_buffer(state: Facts, actor: c.Actor, command: c.ClearBuffer, at: Instant) -> Decision:
    if command.name:
        return decision_of(clear_persistent(state, actor, command.name, command.discard))
    job = _find_job(state, actor, command.job, of_external_jobs=True)
    return job if isinstance(job, Rejection) else decision_of(clear_job_buffer(state, actor, job, command.discard))


def _export_buffer(state: Facts, actor: c.Actor, command: c.ExportBuffer, at: Instant) -> Decision:
    job = _find_job(state, actor, command.job, of_external_jobs=True)
    return job if isinstance(job, Rejection) else decision_of(export_again(state, job, command.partial))


def _restart_operations(state: Facts, actor: c.Actor, command: c.RestartOperations, at: Instant) -> Decision:
    return decision_of(restart_operations(state, command.jobs))


JOBS_BY_KEY: dict[type, Callable[[Facts, c.Actor, Any, Instant], Decision]] = {
    c.SubmitJob: _submit_job,
    c.CancelJob: cancel_job,
    c.HoldJob: _hold_job,
    c.ReleaseJob: _release_job,
    c.SuspendJob: _suspend_job,
    c.ResumeJob: _resume_job,
    c.RequeueJob: _requeue_job,
    c.UpdateJob: _update_job,
    c.ClearBuffer: _clear_buffer,
    c.ExportBuffer: _export_buffer,
    c.RestartOperations: _restart_operations,
    c.ReportOperation: _report_operation,
    c.SettleMails: _settle_mails,
}
"""Command type -> handler that needs lookups by key only."""
