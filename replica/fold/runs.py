"""Folding what came with feature level 3 for buffers and runs: persistent buffers, suspension, requeues, holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from replica.fold.persistent import (
    _persistent_created,
    _persistent_deleted,
    _persistent_deletion_started,
    _persistent_reserved,
)
from replica.messages import events as e
from replica.model import NO_EXTRA, BufferInput, Hold, JobState, Stage, commented
from replica.state import Draft
from replica.values import NEVER, Instant


def note(draft: Draft, job_id: int, **changes: Any) -> None:
    """Change what is known of a job beyond its record; the record goes where nothing is left of it."""
    extra = replace(draft.extras.get(job_id, NO_EXTRA), **changes)
    if extra != NO_EXTRA:
        draft.extras[job_id] = extra
    elif job_id in draft.extras:
        del draft.extras[job_id]


# Failures and holds --------------------------------------------------------------------------------------------------


def _held_because(draft: Draft, event: e.HeldBecause) -> None:
    job = draft.job(event.job)
    comment = commented(job.comment, event.comment, Instant(draft.at))
    hold = Hold.ADMIN if job.hold is Hold.ADMIN else Hold.SYSTEM  # what an operator holds, only one releases
    draft.change(event.job, None, hold=hold, held_at=Instant(draft.at), comment=comment)
    note(draft, event.job, held_because=event.reason)


def _stage_operation_failed(draft: Draft, event: e.StageOperationFailed) -> None:
    happening = BufferInput.TEARDOWN_FAILED if event.stage is Stage.TEARDOWN else BufferInput.STAGE_FAILED
    job = draft.job(event.job)
    draft.change(
        event.job,
        happening,
        failures=job.failures + 1,
        message=event.reason,
        comment=commented(job.comment, event.comment, Instant(draft.at)),
        retry_at=event.retry_at,
        stuck=event.retry_at == NEVER,
    )
    note(draft, event.job, operation=event.operation)


def _pre_run_failed(draft: Draft, event: e.PreRunFailed) -> None:
    comment = commented(draft.job(event.job).comment, event.comment, Instant(draft.at))
    draft.change(event.job, BufferInput.ALLOCATION_REVOKED, comment=comment)
    failures = draft.extras.get(event.job, NO_EXTRA).pre_run_failures + 1
    note(draft, event.job, pre_run_failures=failures, operation="pre_run")


def _buffer_cleared(draft: Draft, event: e.BufferCleared) -> None:
    draft.change(
        event.job,
        BufferInput.CLEARED,
        failures=0,
        retry_at=NEVER,
        stuck=False,
        order_at=NEVER,
        message="",
        comment=commented(draft.job(event.job).comment, event.reason, Instant(draft.at)),
    )


# Runs ----------------------------------------------------------------------------------------------------------------


def _job_suspended(draft: Draft, event: e.JobSuspended) -> None:
    draft.change(event.job, BufferInput.SUSPENDED, state=JobState.SUSPENDED)
    note(draft, event.job, suspended_at=Instant(draft.at))


def _job_resumed(draft: Draft, event: e.JobResumed) -> None:
    draft.change(event.job, BufferInput.RESUMED, state=JobState.RUNNING)
    extra = draft.extras.get(event.job, NO_EXTRA)
    since = draft.at - extra.suspended_at if extra.suspended_at != NEVER else 0
    note(draft, event.job, suspended_at=NEVER, suspended_us=extra.suspended_us + since)


def _requeue_requested(draft: Draft, event: e.RequeueRequested) -> None:
    comment = commented(draft.job(event.job).comment, event.reason, Instant(draft.at))
    draft.change(event.job, None, comment=comment)
    note(draft, event.job, requeueing=True)


def _run_requeued(draft: Draft, event: e.RunRequeued) -> None:
    draft.change(
        event.job,
        None,
        state=JobState.PENDING,
        result=JobState.PENDING,
        node="",
        failures=0,
        retry_at=NEVER,
        stuck=False,
        order_at=NEVER,
        started_at=NEVER,
        ended_at=NEVER,
        exit_code=0,
        signal=0,
        message="",
    )
    extra = draft.extras.get(event.job, NO_EXTRA)
    note(
        draft, event.job, requeues=extra.requeues + 1, requeueing=False, suspended_at=NEVER, suspended_us=0
    )  # fmt: skip


def _operations_restarted(draft: Draft, event: e.OperationsRestarted) -> None:
    draft.change(
        event.job,
        BufferInput.RESTARTED,
        attempt=event.attempt,
        order_at=Instant(draft.at),
        failures=0,
        retry_at=NEVER,
        stuck=False,
        message="",
    )


FOLDS: dict[type, Callable[[Draft, Any], None]] = {
    e.PersistentReserved: _persistent_reserved,
    e.PersistentCreated: _persistent_created,
    e.PersistentDeletionStarted: _persistent_deletion_started,
    e.PersistentDeleted: _persistent_deleted,
    e.HeldBecause: _held_because,
    e.StageOperationFailed: _stage_operation_failed,
    e.PreRunFailed: _pre_run_failed,
    e.JobSuspended: _job_suspended,
    e.JobResumed: _job_resumed,
    e.RequeueRequested: _requeue_requested,
    e.RunRequeued: _run_requeued,
    e.OperationsRestarted: _operations_restarted,
    e.BufferCleared: _buffer_cleared,
}
"""What each event does; `replica.fold.fold` has them all."""
