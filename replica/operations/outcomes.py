"""Outcomes of buffer operations: the events that follow success or failure, with retries and attempts.

Source: SEMANTICS.md, "When something fails" and "Cancelling".
"""

from __future__ import annotations

from replica.messages import events as e
from replica.model import (
    NATIVE,
    Buffer,
    BufferState,
    Hold,
    Job,
    JobState,
    Site,
    Stage,
    awaited_slot,
    failure_comment,
    failure_reason,
    operation_of,
    stage_of,
    tears_down_on_failure,
)
from replica.operations.movers import stage_out_event
from replica.operations.transfer_limits import longest_transfer_s
from replica.state import Facts
from replica.values import MESSAGE_CHARACTERS_MAX, NEVER, PERSISTENT_PER_JOB_MAX, Instant, seconds

PROVIDER = "burst_buffer/native"
"""Name of the native provider in reasons, in the form of Slurm's plugins."""

PROVIDER_SLACK_S = 60
"""Seconds added to a stage's own time limit for starting, ending and reporting its operations."""


def timeout_s(site: Site, stage: Stage) -> int:
    """Return how long an operation may take, seconds."""
    if stage is Stage.STAGE_IN:
        return site.stage_in_timeout_s
    if stage is Stage.STAGE_OUT:
        return site.stage_out_timeout_s
    return site.other_timeout_s


def active_stage(job: Job, buffer: Buffer | None) -> Stage | None:
    """Return the operation that is ordered now.

    None while a failed one waits for a retry or release, or a new one for its slot.
    """
    if job.stuck or job.retry_at or awaited_slot(job, buffer) is not None:
        return None
    return stage_of(job, buffer)


def waiting_stage(job: Job, buffer: Buffer) -> Stage | None:
    """Return the operation that failed and is to be ordered again, or None."""
    if not job.stuck and not job.retry_at:
        return None
    return Stage.TEARDOWN if buffer.state is BufferState.TEARDOWN_FAIL else stage_of(job, buffer)


def timeout_at(state: Facts, job: Job, buffer: Buffer | None) -> Instant:
    """Return when the ordered operation is over its time, or NEVER: a script's own limit is kept by its agent.

    A provider's agent keeps the time of each operation of the stage, and names the one that took too long; so does one
    that moves data with progress timeouts. The leader only ends what an agent that hangs did not.
    """
    stage = active_stage(job, buffer)
    if stage is None or stage is Stage.RUN or job.order_at == NEVER:
        return NEVER
    site, most_s = state.site, longest_transfer_s(state, stage)
    if state.site.provider != NATIVE:
        limit_s = provided_limit_s(site, stage)
    else:
        limit_s = most_s + PROVIDER_SLACK_S if most_s else timeout_s(site, stage)
    return Instant(job.order_at + seconds(limit_s))


def timeout_message(state: Facts, stage: Stage) -> str:
    """Return the message on an operation that is over its time, in Slurm's words where the time is one of Slurm's."""
    most_s = longest_transfer_s(state, stage)
    if most_s:
        return f"it took longer than TransferTimeMax allows, {most_s} s"
    return f"Timeout @ {timeout_s(state.site, stage) * 1000} msec"


def provided_limit_s(site: Site, stage: Stage) -> int:
    """Return how long all operations of a stage may take together where a provider performs them, seconds.

    Stage-in: creating and destroying, setup and paths have the time of other operations each, data-in and real-size
    that of stage-in.
    """
    own_s = timeout_s(site, stage)
    if stage is Stage.STAGE_IN:
        own_s = 2 * own_s + (2 * PERSISTENT_PER_JOB_MAX + 2) * site.other_timeout_s
    elif stage is Stage.TEARDOWN:
        own_s *= 2
    return own_s + PROVIDER_SLACK_S


def failure_events(
    state: Facts,
    job: Job,
    stage: Stage,
    message: str,
    at: Instant,
    *,
    final: bool = False,
    operation: str = "",
) -> tuple[e.Event, ...]:
    """Return what follows from a failed operation: a retry with back-off while there are retries left, then a hold.
    A `final` failure is not retried.

    A failed stage-out never leads to teardown by itself, and a failed teardown keeps its space counted.
    """
    site = state.site
    if job.failures < site.stage_retries and not final:
        backoff_s = min(site.retry_backoff_s * 2 ** min(job.failures, 32), site.retry_backoff_max_s)
        return (_failure(state, job, stage, operation, message, Instant(max(at + seconds(backoff_s), 1))),)
    failure = _failure(state, job, stage, operation, message, NEVER)
    events: list[e.Event] = [failure]
    if stage is Stage.STAGE_IN and job.external_job is None:
        # The job of an external job is held, and its buffer torn down, by its own scheduler.
        if tears_down_on_failure(state.site):
            why = failure.reason
            events += (
                *rollback_events(state, job),
                e.TeardownStarted(job.id, job.attempt + 1, JobState.PENDING, True, why),
            )
            events.append(e.JobHeld(job.id, Hold.SYSTEM, why, failure.comment))
        elif job.hold is Hold.NONE:
            events.append(e.JobHeld(job.id, Hold.SYSTEM))
    return tuple(events)


def _failure(state: Facts, job: Job, stage: Stage, operation: str, message: str, retry_at: Instant) -> e.StageFailed:
    """Return the event of a failed operation."""
    operation, provider = operation_of(stage, operation), state.site.provider
    reason, comment = failure_reason(provider, operation, message), failure_comment(provider, operation, message)
    return e.StageFailed(job.id, stage, job.attempt, reason, retry_at, operation, comment)


def pre_run_failure_events(state: Facts, job: Job, message: str) -> tuple[e.Event, ...]:
    """Return what follows when the operation before the script failed: the buffer is torn down, and the job is held
    with the reason, or waits again by itself as often as the site allows that.
    """
    provider = state.site.provider
    reason, comment = failure_reason(provider, "pre_run", message), failure_comment(provider, "pre_run", message)
    result = JobState.CANCELLED if job.cancelled else JobState.PENDING
    events: list[e.Event] = [
        e.PreRunFailed(job.id, reason, comment),
        e.TeardownStarted(job.id, job.attempt + 1, result, True, reason),
    ]
    again = job.effective_interruptions.pre_run_failures < state.site.pre_run_requeues
    may_requeue = job.request.effective_options.requeue
    if result is JobState.PENDING and not (again and may_requeue):
        events.append(e.JobHeld(job.id, Hold.SYSTEM, reason, comment))
    return tuple(events)


def own_persistent(state: Facts, job: Job, wanted: BufferState) -> list[str]:
    """Return the persistent buffers that the job is creating or destroying and that are `wanted`."""
    asked = job.request.buffer
    if asked is None:
        return []
    names = dict.fromkeys((*(one.name for one in asked.creates), *(one.name for one in asked.destroys)))
    found = ((name, state.persistent.get(name)) for name in names)
    return [name for name, buffer in found if buffer is not None and (buffer.job, buffer.state) == (job.id, wanted)]


def _persistent_deletions(state: Facts, job: Job) -> tuple[e.PersistentDeleted, ...]:
    return tuple(e.PersistentDeleted(name, job.id) for name in own_persistent(state, job, BufferState.DELETING))


def persistent_change_events(state: Facts, job: Job, stage: Stage, name: str) -> tuple[e.Event, ...]:
    """Return what follows when one persistent buffer of a job's order is there or gone, before the rest of the order
    is done; nothing where that is known, or the buffer is none that the job creates or destroys now.
    """
    if stage is Stage.STAGE_IN and name in own_persistent(state, job, BufferState.ALLOCATING):
        return (e.PersistentCreated(name, job.id),)
    if stage in (Stage.STAGE_IN, Stage.TEARDOWN) and name in own_persistent(state, job, BufferState.DELETING):
        return (e.PersistentDeleted(name, job.id),)
    return ()


def rollback_events(state: Facts, job: Job) -> tuple[e.Event, ...]:
    """Return what becomes of the persistent buffers that a job has not finished creating: its teardown removes them."""
    names = own_persistent(state, job, BufferState.ALLOCATING)
    return tuple(e.PersistentDeletionStarted(name, job.id, True) for name in names)


def revocation_events(state: Facts, job: Job, reason: str) -> tuple[e.Event, ...]:
    """Return the events that take back the buffer of a job that is being or was staged in; the job waits again."""
    return (
        e.AllocationRevoked(job.id, job.attempt, reason),
        *rollback_events(state, job),
        e.TeardownStarted(job.id, job.attempt + 1, JobState.PENDING, True, reason),
    )


def final_state(job: Job) -> JobState:
    """Return what a job will be once its results are out; one that was requeued and then cancelled is CANCELLED."""
    return JobState.CANCELLED if job.cancelled and job.result is JobState.PENDING else job.result


def success_events(
    state: Facts, job: Job, buffer: Buffer, stage: Stage, files: int, size_bytes: int, digest: str
) -> tuple[e.Event, ...]:
    """Return what follows from an operation that succeeded."""
    if stage is Stage.STAGE_IN:
        events: list[e.Event] = [e.StagedIn(job.id, files, size_bytes, digest)]
        events.extend(e.PersistentCreated(name, job.id) for name in own_persistent(state, job, BufferState.ALLOCATING))
        events.extend(_persistent_deletions(state, job))
        if not job.request.effective_options.nodes:
            # It has nothing to run (-N0): what it was submitted for is done.
            events.append(e.TeardownStarted(job.id, job.attempt + 1, JobState.COMPLETED, True))
        return tuple(events)
    if stage is Stage.POST_RUN:
        if job.hurry:
            return (e.TeardownStarted(job.id, job.attempt + 1, final_state(job), True),)
        return (stage_out_event(state, job, buffer, job.attempt + 1),)
    if stage is Stage.STAGE_OUT:
        return (
            e.StagedOut(job.id, files, size_bytes, digest),
            e.TeardownStarted(job.id, job.attempt + 1, final_state(job), job.hurry),
        )
    return (e.TornDown(job.id), *removal_events(state, job))


def removal_events(state: Facts, job: Job) -> tuple[e.Event, ...]:
    """Return what follows when a buffer is gone: persistent ones that were being removed are, too, and a job that has
    not run, or was requeued, waits for a new one, unless cancelled.
    """
    events: list[e.Event] = []
    events.extend(_persistent_deletions(state, job))
    if job.state is JobState.PENDING:
        events.append(e.JobRequeued(job.id))
        if job.cancelled:
            events.append(e.JobCancelled(job.id))
        elif job.effective_interruptions.requeueing:
            events.append(e.RunRequeued(job.id))
    return tuple(events)


def _is_requeued(state: Facts, job: Job, result: JobState) -> bool:
    """Return whether a job is requeued after its script: by request, or after a node failure if the site requeues such
    jobs.
    """
    if job.effective_interruptions.requeueing:
        return True
    by_site = result is JobState.NODE_FAIL and state.site.requeue_on_node_fail
    return by_site and job.request.effective_options.requeue


def script_end_events(
    state: Facts, job: Job, buffer: Buffer | None, result: JobState, exit_code: int, signal: int, message: str
) -> tuple[e.Event, ...]:
    """Return what follows when the script has ended, however it did."""
    if job.cancelled:
        result = JobState.CANCELLED
        if buffer is not None and job.state is JobState.CONFIGURING:
            return (
                e.TeardownStarted(job.id, job.attempt + 1, result, job.hurry, "cancelled before the script started"),
            )
    elif _is_requeued(state, job, result):
        return _requeue_events(state, job, buffer, result, message)
    ended = e.RunEnded(job.id, result, exit_code, signal, job.attempt + 1, message[:MESSAGE_CHARACTERS_MAX])
    if buffer is not None and job.hurry:
        return (
            ended,
            e.TeardownStarted(job.id, job.attempt + 2, result, True, "stage-out skipped: cancelled with --hurry"),
        )
    return (ended,)


def _requeue_events(
    state: Facts, job: Job, buffer: Buffer | None, result: JobState, message: str
) -> tuple[e.Event, ...]:
    """Return what follows when the run of a requeued job has ended: as always up to the teardown, then it waits."""
    asked = job.effective_interruptions.requeueing
    events: list[e.Event] = [] if asked else [e.RequeueRequested(job.id, f"requeued after {result.name}")]
    if buffer is not None and job.state is JobState.CONFIGURING:
        # The script has not started, so there is nothing to stage out.
        events.append(e.TeardownStarted(job.id, job.attempt + 1, JobState.PENDING, True, "requeued"))
        return tuple(events)
    events.append(e.RunEnded(job.id, JobState.PENDING, 0, 0, job.attempt + 1, message[:MESSAGE_CHARACTERS_MAX]))
    if buffer is None:
        events.append(e.RunRequeued(job.id))
    return tuple(events)
