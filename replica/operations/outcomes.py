"""Outcomes of buffer operations: the events that follow success or failure, with retries and attempts.

Source: SEMANTICS.md, "When something fails" and "Cancelling".
"""

from __future__ import annotations

from forebay.replica.messages import events as e
from forebay.replica.model import (
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
from forebay.replica.operations.movers import stage_out_event
from forebay.replica.operations.transfer_limits import longest_transfer_s
from forebay.replica.state import Facts
from forebay.replica.values import MESSAGE_CHARACTERS_MAX, NEVER, PERSISTENT_PER_JOB_MAX, Instant, seconds

PROVIDER = "burst_buffer/native"
"""Name of the native provider in reasons, in the form of Slurm's plugins."""

PROVIDER_SLACK_S = 60
"""Seconds added to a stage's own time limit for starting, ending and reporting its operations."""


def timeout_s(site: Site, stage: Stage) -> int:
    """Return the time limit of an operation, seconds."""
    if stage is Stage.STAGE_IN:
        return site.stage_in_timeout_s
    if stage is Stage.STAGE_OUT:
        return site.stage_out_timeout_s
    return site.other_timeout_s


def active_stage(job: Job, buffer: Buffer | None) -> Stage | None:
    """Return the operation that is ordered at present.

    None while a failed one waits for a retry or release, or a new one for its slot.
    """
    if job.stuck or job.retry_at or awaited_slot(job, buffer) is not None:
        return None
    return stage_of(job, buffer)


def waiting_stage(job: Job, buffer: Buffer) -> Stage | None:
    """Return the failed operation that is to be ordered again, or None."""
    if not job.stuck and not job.retry_at:
        return None
    return Stage.TEARDOWN if buffer.state is BufferState.TEARDOWN_FAIL else stage_of(job, buffer)


def timeout_at(state: Facts, job: Job, buffer: Buffer | None) -> Instant:
    """Return the time at which the ordered operation times out, or NEVER: agents enforce the limits of scripts.

    A provider's agent limits each operation of the stage and names the slow one; so does an agent with progress
    timeouts. The leader only ends operations of agents that hang.
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
    """Return the message on a timed-out operation, in Slurm's words for Slurm's limits."""
    most_s = longest_transfer_s(state, stage)
    if most_s:
        return f"the operation took longer than TransferTimeMax, {most_s} s"
    return f"Timeout @ {timeout_s(state.site, stage) * 1000} msec"


def provided_limit_s(site: Site, stage: Stage) -> int:
    """Return the time limit of all operations of a stage together with a provider, seconds.

    Stage-in: create, destroy, setup and paths have OtherTimeout each, data-in and real-size StageInTimeout.
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
    """Return the events that follow a failed operation: a retry with back-off while retries are left, then a hold.

    A `final` failure is not retried; the agent decides that (`cluster.agent.worker.worker.is_final`). A failed
    stage-out never leads to teardown by itself, and a failed teardown keeps its space counted.
    """
    site = state.site
    if job.failures < site.stage_retries and not final:
        backoff_s = min(site.retry_backoff_s * 2 ** min(job.failures, 32), site.retry_backoff_max_s)
        return (_failure(state, job, stage, operation, message, Instant(max(at + seconds(backoff_s), 1))),)
    failure = _failure(state, job, stage, operation, message, NEVER)
    events: list[e.Event] = [failure]
    if stage is Stage.STAGE_IN and job.external_job is None:
        # The scheduler of an external job holds it and tears down its buffer.
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
    """Return the events that follow a failed pre-run: teardown, and a hold with the reason.

    The job waits again without a hold as often as the site allows.
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
    """Return the persistent buffers in state `wanted` that the job is creating or destroying."""
    asked = job.request.buffer
    if asked is None:
        return []
    names = dict.fromkeys((*(one.name for one in asked.creates), *(one.name for one in asked.destroys)))
    found = ((name, state.persistent.get(name)) for name in names)
    return [name for name, buffer in found if buffer is not None and (buffer.job, buffer.state) == (job.id, wanted)]


def _persistent_deletions(state: Facts, job: Job) -> tuple[e.PersistentDeleted, ...]:
    return tuple(e.PersistentDeleted(name, job.id) for name in own_persistent(state, job, BufferState.DELETING))


def persistent_change_events(state: Facts, job: Job, stage: Stage, name: str) -> tuple[e.Event, ...]:
    """Return the events for one persistent buffer of an order that was created or deleted before the rest is done.

    Empty if that is known, or if the job does not create or destroy the buffer.
    """
    if stage is Stage.STAGE_IN and name in own_persistent(state, job, BufferState.ALLOCATING):
        return (e.PersistentCreated(name, job.id),)
    if stage in (Stage.STAGE_IN, Stage.TEARDOWN) and name in own_persistent(state, job, BufferState.DELETING):
        return (e.PersistentDeleted(name, job.id),)
    return ()


def rollback_events(state: Facts, job: Job) -> tuple[e.Event, ...]:
    """Return the events that delete the persistent buffers a job has not finished creating; its teardown
    removes them.
    """
    names = own_persistent(state, job, BufferState.ALLOCATING)
    return tuple(e.PersistentDeletionStarted(name, job.id, True) for name in names)


def revocation_events(state: Facts, job: Job, reason: str) -> tuple[e.Event, ...]:
    """Return the events that revoke the buffer of a job in or after stage-in; the job waits again."""
    return (
        e.AllocationRevoked(job.id, job.attempt, reason),
        *rollback_events(state, job),
        e.TeardownStarted(job.id, job.attempt + 1, JobState.PENDING, True, reason),
    )


def final_state(job: Job) -> JobState:
    """Return the state of a job after its results are out; CANCELLED if it was requeued and then cancelled."""
    return JobState.CANCELLED if job.cancelled and job.result is JobState.PENDING else job.result


def success_events(
    state: Facts, job: Job, buffer: Buffer, stage: Stage, files: int, size_bytes: int, digest: str
) -> tuple[e.Event, ...]:
    """Return the events that follow a successful operation."""
    if stage is Stage.STAGE_IN:
        events: list[e.Event] = [e.StagedIn(job.id, files, size_bytes, digest)]
        events.extend(e.PersistentCreated(name, job.id) for name in own_persistent(state, job, BufferState.ALLOCATING))
        events.extend(_persistent_deletions(state, job))
        if not job.request.effective_options.nodes:
            # The job has no script (-N0) and has now done its work.
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
    """Return the events that follow the removal of a buffer.

    Persistent buffers under deletion are deleted, and a job that has not run, or was requeued, waits for a new buffer
    unless cancelled.
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
    """Return whether a job is requeued after its script: on request, or after a node failure if the site requeues such
    jobs.
    """
    if job.effective_interruptions.requeueing:
        return True
    by_site = result is JobState.NODE_FAIL and state.site.requeue_on_node_fail
    return by_site and job.request.effective_options.requeue


def script_end_events(
    state: Facts, job: Job, buffer: Buffer | None, result: JobState, exit_code: int, signal: int, message: str
) -> tuple[e.Event, ...]:
    """Return the events that follow the end of the script, whatever its result."""
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
    """Return the events that follow the run of a requeued job: as usual up to the teardown, then it waits."""
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
