"""Fold events of external jobs: setup, lingering and retained buffers, and the schedulers they belong to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from forebay.replica.messages import events as e
from forebay.replica.model import (
    Buffer,
    BufferInput,
    BufferState,
    ExternalJob,
    ExternalJobEpochs,
    ExternalJobStep,
    Job,
    JobState,
    append_comment,
)
from forebay.replica.state import StateBuilder, intern_request
from forebay.replica.values import NEVER, Instant, LedgerViolation

_NOT_FAILED: dict[str, Any] = {"failures": 0, "retry_at": NEVER, "stuck": False, "message": ""}


def _fold_external_job_set_up(builder: StateBuilder, event: e.ExternalJobSetUp) -> None:
    if event.job != builder.next_job:
        raise LedgerViolation(f"job {event.job} was set up while {builder.next_job} was next")
    builder.next_job = event.job + 1
    at, name = Instant(builder.at), event.external_job.name
    job = Job(
        id=event.job,
        request=intern_request(event.request),
        state=JobState.PENDING,
        submitted_at=at,
        eligible_at=at,
        external_job=event.external_job,
    )
    buffer = Buffer(event.job, BufferState.PENDING, event.pool, event.granted_bytes, created_at=at, changed_at=at)
    known = builder.external_jobs.get(name)
    builder.external_jobs[name] = ExternalJobEpochs(
        name, event.job, event.external_job.epoch, 1 + (0 if known is None else known.jobs)
    )
    builder.put(job, buffer)


def _find_external_job(builder: StateBuilder, job_id: int) -> ExternalJob:
    external_job = builder.job(job_id).external_job
    if external_job is None:
        raise LedgerViolation(f"job {job_id} is not an external job")
    return external_job


def _fold_external_job_space_allocated(builder: StateBuilder, event: e.ExternalJobSpaceAllocated) -> None:
    if event.passed:
        builder.change(event.passed, None, passed=builder.job(event.passed).passed + 1)
    _find_external_job(builder, event.job)
    # Users see the buffer from now on, as they see a native one.
    buffer = builder.transition(builder.buffers[event.job], BufferInput.ALLOCATED)
    builder.put(builder.job(event.job), replace(buffer, created_at=Instant(builder.at), filesystems=event.filesystems))


def _fold_external_job_setup_failed(builder: StateBuilder, event: e.ExternalJobSetupFailed) -> None:
    at = Instant(builder.at)
    builder.change(
        event.job,
        BufferInput.ABANDONED,
        state=JobState.CANCELLED,
        result=JobState.CANCELLED,
        cancelled=True,
        ended_at=at,
        message=event.reason,
        comment=append_comment(builder.job(event.job).comment, event.reason, at),
    )


def _fold_external_job_stage_in_ordered(builder: StateBuilder, event: e.ExternalJobStageInOrdered) -> None:
    ordered = replace(
        builder.job(event.job),
        external_job=replace(_find_external_job(builder, event.job), step=ExternalJobStep.STAGED),
        mover=event.mover,
        attempt=event.attempt,
        order_at=Instant(builder.at),
        **_NOT_FAILED,
    )
    buffer = builder.buffers[event.job]
    # A lingering buffer keeps its directory.
    builder.put(ordered, replace(buffer, epoch=buffer.epoch or event.attempt))


def _fold_external_job_lingered(builder: StateBuilder, event: e.ExternalJobLingered) -> None:
    external_job = replace(
        _find_external_job(builder, event.job), step=ExternalJobStep.LINGERING, since=Instant(builder.at)
    )
    builder.change(event.job, None, external_job=external_job, attempt=event.attempt, order_at=NEVER, **_NOT_FAILED)


def _fold_external_job_reactivated(builder: StateBuilder, event: e.ExternalJobReactivated) -> None:
    before = _find_external_job(builder, event.job)
    external_job = replace(before, step=ExternalJobStep.SET_UP, since=Instant(builder.at), epoch=event.epoch)
    builder.external_jobs[external_job.name] = replace(builder.external_jobs[external_job.name], epoch=event.epoch)
    builder.change(event.job, BufferInput.TAKEN_UP, external_job=external_job, order_at=NEVER)


def _fold_external_job_run_began(builder: StateBuilder, event: e.ExternalJobRunBegan) -> None:
    _find_external_job(builder, event.job)
    ordered = builder.transition(builder.buffers[event.job], BufferInput.RUN_ORDERED)
    begun = replace(
        builder.job(event.job),
        state=JobState.RUNNING,
        attempt=event.attempt,
        started_at=Instant(builder.at),
        order_at=NEVER,
        message="",
    )
    builder.put(begun, builder.transition(ordered, BufferInput.RUN_STARTED))


def _fold_external_job_run_ended(builder: StateBuilder, event: e.ExternalJobRunEnded) -> None:
    _find_external_job(builder, event.job)
    builder.change(
        event.job,
        BufferInput.RUN_ENDED,
        state=JobState.STAGE_OUT,
        result=JobState.COMPLETED,
        attempt=event.attempt,
        order_at=NEVER,
        ended_at=Instant(builder.at),
    )


def _fold_external_job_retained(builder: StateBuilder, event: e.ExternalJobRetained) -> None:
    job, at = builder.job(event.job), Instant(builder.at)
    external_job = replace(_find_external_job(builder, event.job), step=ExternalJobStep.RETAINED, since=at)
    builder.change(event.job, None, external_job=external_job, comment=append_comment(job.comment, event.reason, at))


def forget_external_job(builder: StateBuilder, job: Job) -> None:
    """Remove a purged job from its external job's record, and the record with its last job."""
    if job.external_job is None:
        return
    known = builder.external_jobs[job.external_job.name]
    if known.jobs > 1:
        builder.external_jobs[known.name] = replace(known, jobs=known.jobs - 1)
    else:
        del builder.external_jobs[known.name]


def _fold_scheduler_bound(builder: StateBuilder, event: e.SchedulerBound) -> None:
    bound = replace(event.scheduler, at=Instant(builder.at))
    builder.schedulers = builder.schedulers.set(bound.name, bound)


def _fold_scheduler_released(builder: StateBuilder, event: e.SchedulerReleased) -> None:
    builder.schedulers = builder.schedulers.delete(event.scheduler)


def _fold_external_job_missing(builder: StateBuilder, event: e.ExternalJobMissing) -> None:
    """Change nothing: the event documents in the ledger that Slurm and Forebay disagreed."""


EXTERNAL_JOB_FOLDS: dict[type, Callable[[StateBuilder, Any], None]] = {
    e.ExternalJobSetUp: _fold_external_job_set_up,
    e.ExternalJobSpaceAllocated: _fold_external_job_space_allocated,
    e.ExternalJobSetupFailed: _fold_external_job_setup_failed,
    e.ExternalJobStageInOrdered: _fold_external_job_stage_in_ordered,
    e.ExternalJobLingered: _fold_external_job_lingered,
    e.ExternalJobReactivated: _fold_external_job_reactivated,
    e.ExternalJobRunBegan: _fold_external_job_run_began,
    e.ExternalJobRunEnded: _fold_external_job_run_ended,
    e.ExternalJobRetained: _fold_external_job_retained,
    e.SchedulerBound: _fold_scheduler_bound,
    e.SchedulerReleased: _fold_scheduler_released,
    e.ExternalJobMissing: _fold_external_job_missing,
}
"""Event type -> fold, merged in `replica.fold.fold`."""
