"""Fold events of failures and runs: failed pre-runs, cleared and abandoned buffers, suspension, requeues, restarts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from forebay.replica.fold.persistent import (
    _fold_persistent_created,
    _fold_persistent_deleted,
    _fold_persistent_deletion_started,
    _fold_persistent_reserved,
)
from forebay.replica.messages import events as e
from forebay.replica.model import (
    AbandonedBuffer,
    AbandonedBuffers,
    BufferInput,
    BufferState,
    JobState,
    append_comment,
    update_interruptions,
)
from forebay.replica.state import StateBuilder
from forebay.replica.values import NEVER, Instant

# Failures --------------------------------------------------------------------------------------------------


def _fold_pre_run_failed(builder: StateBuilder, event: e.PreRunFailed) -> None:
    job = builder.job(event.job)
    builder.change(
        event.job,
        BufferInput.ALLOCATION_REVOKED,
        comment=append_comment(job.comment, event.comment, Instant(builder.at)),
        interruptions=update_interruptions(
            job, pre_run_failures=job.effective_interruptions.pre_run_failures + 1, operation="pre_run"
        ),
    )


def _fold_buffer_cleared(builder: StateBuilder, event: e.BufferCleared) -> None:
    builder.change(
        event.job,
        BufferInput.CLEARED,
        failures=0,
        retry_at=NEVER,
        stuck=False,
        order_at=NEVER,
        message="",
        comment=append_comment(builder.job(event.job).comment, event.reason, Instant(builder.at)),
    )


def _fold_buffer_abandoned(builder: StateBuilder, event: e.BufferAbandoned) -> None:
    job, buffer = builder.job(event.job), builder.buffers[event.job]
    builder.change(
        event.job,
        BufferInput.CLEARED if buffer.state is BufferState.TEARDOWN_FAIL else BufferInput.TORN_DOWN,
        failures=0,
        retry_at=NEVER,
        stuck=False,
        order_at=NEVER,
        message="",
    )
    known = builder.abandoned.get(event.node) or AbandonedBuffers(event.node, ())
    given_up = AbandonedBuffer(job.id, job.attempt, job.request.user, event.persistent)
    builder.abandoned = builder.abandoned.set(event.node, replace(known, buffers=(*known.buffers, given_up)))


# Runs ----------------------------------------------------------------------------------------------------------------


def _fold_job_suspended(builder: StateBuilder, event: e.JobSuspended) -> None:
    suspended = update_interruptions(builder.job(event.job), suspended_at=Instant(builder.at))
    builder.change(event.job, BufferInput.SUSPENDED, state=JobState.SUSPENDED, interruptions=suspended)


def _fold_job_resumed(builder: StateBuilder, event: e.JobResumed) -> None:
    job = builder.job(event.job)
    before = job.effective_interruptions
    since = builder.at - before.suspended_at if before.suspended_at != NEVER else 0
    resumed = update_interruptions(job, suspended_at=NEVER, suspended_us=before.suspended_us + since)
    builder.change(event.job, BufferInput.RESUMED, state=JobState.RUNNING, interruptions=resumed)


def _fold_requeue_requested(builder: StateBuilder, event: e.RequeueRequested) -> None:
    job = builder.job(event.job)
    comment = append_comment(job.comment, event.reason, Instant(builder.at))
    builder.change(event.job, None, comment=comment, interruptions=update_interruptions(job, requeueing=True))


def _fold_run_requeued(builder: StateBuilder, event: e.RunRequeued) -> None:
    job = builder.job(event.job)
    requeues = job.effective_interruptions.requeues + 1
    builder.change(
        event.job,
        None,
        state=JobState.PENDING,
        result=JobState.PENDING,
        node="",
        mover="",
        failures=0,
        retry_at=NEVER,
        stuck=False,
        order_at=NEVER,
        cancelled=False,
        hurry=False,
        started_at=NEVER,
        ended_at=NEVER,
        exit_code=0,
        signal=0,
        message="",
        interruptions=update_interruptions(
            job, requeues=requeues, requeueing=False, suspended_at=NEVER, suspended_us=0, partial=False
        ),
    )


def _fold_operations_restarted(builder: StateBuilder, event: e.OperationsRestarted) -> None:
    builder.change(
        event.job,
        BufferInput.RESTARTED,
        attempt=event.attempt,
        order_at=Instant(builder.at),
        failures=0,
        retry_at=NEVER,
        stuck=False,
        message="",
    )


RUN_FOLDS: dict[type, Callable[[StateBuilder, Any], None]] = {
    e.PersistentReserved: _fold_persistent_reserved,
    e.PersistentCreated: _fold_persistent_created,
    e.PersistentDeletionStarted: _fold_persistent_deletion_started,
    e.PersistentDeleted: _fold_persistent_deleted,
    e.PreRunFailed: _fold_pre_run_failed,
    e.JobSuspended: _fold_job_suspended,
    e.JobResumed: _fold_job_resumed,
    e.RequeueRequested: _fold_requeue_requested,
    e.RunRequeued: _fold_run_requeued,
    e.OperationsRestarted: _fold_operations_restarted,
    e.BufferCleared: _fold_buffer_cleared,
    e.BufferAbandoned: _fold_buffer_abandoned,
}
"""Event type -> fold, merged in `replica.fold.fold`."""
