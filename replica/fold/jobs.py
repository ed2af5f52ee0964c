"""Fold events of jobs from submit to purge: record, buffer, operations, runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import immutables
from msgspec.structs import replace

from forebay.replica.fold.accounts import (
    _fold_partition_deleted,
    _fold_partition_set,
    _fold_usage_reset,
    measure_operation,
)
from forebay.replica.fold.external_jobs import forget_external_job
from forebay.replica.messages import events as e
from forebay.replica.model import (
    ENDED,
    ArrayTask,
    Buffer,
    BufferInput,
    BufferState,
    Hold,
    Job,
    JobRequest,
    JobState,
    Stage,
    append_comment,
    apply_change,
    update_interruptions,
)
from forebay.replica.state import StateBuilder, intern_buffer_request, intern_request
from forebay.replica.values import NEVER, Instant, LedgerViolation, Steps, run_to_end


def _fold_job_submitted(builder: StateBuilder, event: e.JobSubmitted) -> None:
    run_to_end(fold_submit_steps(builder, event))


def fold_submit_steps(builder: StateBuilder, event: e.JobSubmitted) -> Steps[None]:
    """Fold a submit, one step for each task."""
    request, array = intern_request(event.request), event.array  # shared by all tasks
    if array is None:
        _new_job(builder, event, event.job, request)
        return
    for number, task in enumerate(array.tasks):
        own = replace(request, array=ArrayTask(event.job, task, array.throttle))
        if array.outputs:
            own = replace(own, output=array.outputs[number])
        if array.transfers and own.buffer is not None:
            stage_in, stage_out = array.transfers[number]
            own = replace(own, buffer=replace(own.buffer, stage_in=stage_in, stage_out=stage_out))
        _new_job(builder, event, event.job + number, own)
        yield 1
    builder.arrays[event.job] = immutables.Map({task: event.job + number for number, task in enumerate(array.tasks)})


def _new_job(builder: StateBuilder, event: e.JobSubmitted, job_id: int, request: JobRequest) -> None:
    if job_id != builder.next_job:
        raise LedgerViolation(f"job {job_id} was submitted while {builder.next_job} was next")
    builder.next_job = job_id + 1
    at = Instant(builder.at)
    job = Job(
        id=job_id,
        request=request,
        state=JobState.PENDING,
        hold=event.hold,
        submitted_at=at,
        eligible_at=at if request.begin_at <= at else NEVER,
        held_at=at if event.hold else NEVER,
    )
    builder.put(job, None if request.buffer is None else _new_buffer(job, event.pool, event.granted_bytes, at))


def _new_buffer(job: Job, pool: str, granted_bytes: int, at: Instant) -> Buffer:
    return Buffer(
        job=job.id,
        state=BufferState.PENDING,
        pool=pool,
        granted_bytes=granted_bytes,
        created_at=at,
        changed_at=at,
    )


def _fold_job_held(builder: StateBuilder, event: e.JobHeld) -> None:
    job = builder.job(event.job)
    builder.change(
        event.job,
        None,
        hold=Hold.ADMIN if job.hold is Hold.ADMIN else event.hold,  # only an operator releases an operator's hold
        held_at=Instant(builder.at),
        comment=append_comment(job.comment, event.comment, Instant(builder.at)),
        interruptions=update_interruptions(job, held_because=event.reason) if event.reason else job.interruptions,
    )


def _fold_job_released(builder: StateBuilder, event: e.JobReleased) -> None:
    released = update_interruptions(builder.job(event.job), held_because="", pre_run_failures=0)
    builder.change(event.job, None, hold=Hold.NONE, held_at=NEVER, message="", failures=0, interruptions=released)


def _fold_buffer_allocated(builder: StateBuilder, event: e.BufferAllocated) -> None:
    if event.passed:
        first = builder.job(event.passed)
        promised_at = event.promised_at if first.promised_at == NEVER else first.promised_at
        builder.change(first.id, None, passed=first.passed + event.counted, promised_at=promised_at)
    job, buffer = builder.job(event.job), builder.buffers.get(event.job)
    if buffer is None:
        raise LedgerViolation(f"job {event.job} has no buffer to allocate")
    builder.put(
        replace(
            job,
            node=event.node,
            mover=event.mover,
            attempt=event.attempt,
            order_at=Instant(builder.at),
            failures=0,
            message="",
        ),
        replace(
            builder.transition(buffer, BufferInput.ALLOCATED),
            node=event.node,
            created_at=Instant(builder.at),
            epoch=event.attempt if event.mover else 0,
            filesystems=event.filesystems,
        ),
    )


def _fold_staged_in(builder: StateBuilder, event: e.StagedIn) -> None:
    measure_operation(builder, builder.buffers[event.job], Stage.STAGE_IN, event.size_bytes)
    buffer = builder.transition(builder.buffers[event.job], BufferInput.STAGED_IN)
    builder.put(
        replace(builder.job(event.job), failures=0, message="", order_at=NEVER),
        replace(buffer, staged_in_bytes=event.size_bytes, staged_in_files=event.files),
    )


def _fold_stage_failed(builder: StateBuilder, event: e.StageFailed) -> None:
    job = builder.job(event.job)
    builder.change(
        event.job,
        BufferInput.TEARDOWN_FAILED if event.stage is Stage.TEARDOWN else BufferInput.STAGE_FAILED,
        failures=job.failures + 1,
        message=event.reason,
        comment=append_comment(job.comment, event.comment, Instant(builder.at)),
        retry_at=event.retry_at,
        stuck=event.retry_at == NEVER,
        interruptions=update_interruptions(job, operation=event.operation),
    )


def _fold_stage_retried(builder: StateBuilder, event: e.StageRetried) -> None:
    builder.change(
        event.job,
        BufferInput.STAGE_RETRIED,
        attempt=event.attempt,
        retry_at=NEVER,
        stuck=False,
        order_at=Instant(builder.at),
        **({"interruptions": update_interruptions(builder.job(event.job), partial=True)} if event.partial else {}),
    )


def _fold_mover_changed(builder: StateBuilder, event: e.MoverChanged) -> None:
    job = builder.job(event.job)
    builder.change(
        event.job,
        BufferInput.STAGE_RETRIED,
        mover=event.mover,
        attempt=event.attempt,
        retry_at=NEVER,
        # An operation that waits for its slot keeps waiting.
        order_at=NEVER if job.order_at == NEVER else Instant(builder.at),
    )


def _fold_run_ordered(builder: StateBuilder, event: e.RunOrdered) -> None:
    builder.change(
        event.job,
        BufferInput.RUN_ORDERED,
        state=JobState.CONFIGURING,
        node=event.node,
        attempt=event.attempt,
        order_at=Instant(builder.at),
        message="",
    )


def _fold_run_started(builder: StateBuilder, event: e.RunStarted) -> None:
    builder.change(event.job, BufferInput.RUN_STARTED, state=JobState.RUNNING, started_at=Instant(builder.at))


def _fold_run_ended(builder: StateBuilder, event: e.RunEnded) -> None:
    job = builder.job(event.job)
    builder.change(
        event.job,
        BufferInput.RUN_ENDED,
        state=event.result if job.request.buffer is None else JobState.STAGE_OUT,
        result=event.result,
        exit_code=event.exit_code,
        signal=event.signal,
        attempt=event.attempt,
        order_at=NEVER if job.request.buffer is None else Instant(builder.at),
        ended_at=Instant(builder.at),
        message=event.message,
        comment=event.message or job.comment,
    )


def _fold_stage_out_started(builder: StateBuilder, event: e.StageOutStarted) -> None:
    builder.change(
        event.job,
        BufferInput.STAGE_OUT_STARTED,
        attempt=event.attempt,
        **({"mover": event.mover} if event.mover else {}),
        order_at=Instant(builder.at),
        failures=0,
        retry_at=NEVER,
        stuck=False,
        message="",
    )


def _fold_staged_out(builder: StateBuilder, event: e.StagedOut) -> None:
    measure_operation(builder, builder.buffers[event.job], Stage.STAGE_OUT, event.size_bytes)
    buffer = builder.buffers[event.job]
    builder.put(
        builder.job(event.job), replace(buffer, staged_out_bytes=event.size_bytes, staged_out_files=event.files)
    )


def _fold_teardown_started(builder: StateBuilder, event: e.TeardownStarted) -> None:
    job = builder.job(event.job)
    over = event.result in ENDED
    buffer = builder.transition(builder.buffers[event.job], BufferInput.TEARDOWN_STARTED)
    builder.put(
        replace(
            job,
            state=event.result,
            attempt=event.attempt,
            order_at=Instant(builder.at),
            failures=0,
            retry_at=NEVER,
            stuck=False,
            message="",
            ended_at=Instant(builder.at) if over and job.ended_at == NEVER else job.ended_at,
        ),
        replace(buffer, hurry=event.hurry),
    )


def _fold_torn_down(builder: StateBuilder, event: e.TornDown) -> None:
    measure_operation(builder, builder.buffers[event.job], Stage.TEARDOWN, 0)
    builder.change(
        event.job, BufferInput.TORN_DOWN, failures=0, retry_at=NEVER, stuck=False, order_at=NEVER, message=""
    )


def _fold_cancel_requested(builder: StateBuilder, event: e.CancelRequested) -> None:
    job = builder.job(event.job)
    builder.change(event.job, None, cancelled=True, hurry=job.hurry or event.hurry)


def _fold_job_cancelled(builder: StateBuilder, event: e.JobCancelled) -> None:
    builder.change(
        event.job,
        BufferInput.ABANDONED,
        state=JobState.CANCELLED,
        result=JobState.CANCELLED,
        cancelled=True,
        ended_at=Instant(builder.at),
        message="",
    )


def _fold_job_purged(builder: StateBuilder, event: e.JobPurged) -> None:
    if event.job not in builder.finished:
        raise LedgerViolation(f"job {event.job} was purged though it has not finished")
    job = builder.job(event.job)
    del builder.jobs[event.job]
    del builder.finished[event.job]
    if event.job in builder.buffers:
        del builder.buffers[event.job]
    if event.job in builder.transfers:
        del builder.transfers[event.job]
    forget_external_job(builder, job)
    array = job.request.array
    if array is not None:
        tasks = builder.arrays[array.job].delete(array.task)
        if tasks:
            builder.arrays[array.job] = tasks
        else:
            del builder.arrays[array.job]


def _fold_allocation_revoked(builder: StateBuilder, event: e.AllocationRevoked) -> None:
    job = builder.job(event.job)
    revocations = job.effective_interruptions.revocations + (event.beneficiary > 0)
    builder.change(
        event.job, BufferInput.ALLOCATION_REVOKED, interruptions=update_interruptions(job, revocations=revocations)
    )


def _fold_job_requeued(builder: StateBuilder, event: e.JobRequeued) -> None:
    job = builder.job(event.job)
    buffer = builder.transition(builder.buffers[event.job], BufferInput.REQUEUED)
    builder.put(
        replace(job, node="", mover="", failures=0, order_at=NEVER),
        replace(buffer, node="", hurry=False, staged_in_bytes=0, staged_in_files=0, epoch=0),
    )


def _fold_job_became_eligible(builder: StateBuilder, event: e.JobBecameEligible) -> None:
    builder.change(event.job, None, eligible_at=Instant(builder.at))


def _fold_deadline_missed(builder: StateBuilder, event: e.DeadlineMissed) -> None:
    builder.change(event.job, None, late=True)


def _fold_operation_queued(builder: StateBuilder, event: e.OperationQueued) -> None:
    builder.change(event.job, None, order_at=NEVER)


def _fold_operation_ordered(builder: StateBuilder, event: e.OperationOrdered) -> None:
    builder.change(event.job, None, order_at=Instant(builder.at))


JOB_FOLDS: dict[type, Callable[[StateBuilder, Any], None]] = {
    e.JobSubmitted: _fold_job_submitted,
    e.JobHeld: _fold_job_held,
    e.JobReleased: _fold_job_released,
    e.BufferAllocated: _fold_buffer_allocated,
    e.StagedIn: _fold_staged_in,
    e.StageFailed: _fold_stage_failed,
    e.StageRetried: _fold_stage_retried,
    e.MoverChanged: _fold_mover_changed,
    e.RunOrdered: _fold_run_ordered,
    e.RunStarted: _fold_run_started,
    e.RunEnded: _fold_run_ended,
    e.StageOutStarted: _fold_stage_out_started,
    e.StagedOut: _fold_staged_out,
    e.TeardownStarted: _fold_teardown_started,
    e.TornDown: _fold_torn_down,
    e.CancelRequested: _fold_cancel_requested,
    e.JobCancelled: _fold_job_cancelled,
    e.JobPurged: _fold_job_purged,
    e.AllocationRevoked: _fold_allocation_revoked,
    e.JobRequeued: _fold_job_requeued,
    e.JobBecameEligible: _fold_job_became_eligible,
    e.DeadlineMissed: _fold_deadline_missed,
    e.OperationQueued: _fold_operation_queued,
    e.OperationOrdered: _fold_operation_ordered,
}
"""Event type -> fold, merged in `replica.fold.fold`."""


# ---- partitions, usage, and changes of pending jobs


def _pending_job(builder: StateBuilder, job_id: int) -> Job:
    job = builder.job(job_id)
    if job.state is not JobState.PENDING:
        raise LedgerViolation(f"job {job_id} was changed though it does not wait")
    return job


def _fold_job_updated(builder: StateBuilder, event: e.JobUpdated) -> None:
    job, change, at = _pending_job(builder, event.job), event.change, Instant(builder.at)
    if change.name is not None:
        builder.rename(job, change.name)
    changed = replace(job, request=intern_request(apply_change(job.request, change)))
    if change.begin_at is not None:
        changed = replace(changed, eligible_at=at if change.begin_at <= at else NEVER)
    if change.deadline is not None or change.time_limit_s is not None:
        changed = replace(changed, late=False)  # the next scheduling cycle decides again
    buffer = builder.buffers.get(job.id)
    if event.buffer is not None:
        if buffer is not None and buffer.state is not BufferState.PENDING:
            raise LedgerViolation(f"the request of job {job.id} was changed though its buffer is {buffer.state.word}")
        asked = intern_buffer_request(event.buffer)
        changed = replace(changed, request=replace(changed.request, buffer=asked))
        buffer = _new_buffer(changed, event.pool, event.granted_bytes, at)
    builder.put(changed, buffer)


CHANGE_FOLDS: Mapping[type, Callable[[StateBuilder, Any], None]] = {
    e.PartitionSet: _fold_partition_set,
    e.PartitionDeleted: _fold_partition_deleted,
    e.UsageReset: _fold_usage_reset,
    e.JobUpdated: _fold_job_updated,
}
"""Event type -> fold, merged in `replica.fold.fold`."""
