"""What follows when an operation of a buffer succeeds or fails: retries, attempts and failures as data.

Source: SEMANTICS.md, "When something fails" and "Cancelling".
"""

from __future__ import annotations

from replica import events as e
from replica.buffers import Buffer, BufferState
from replica.jobs import Hold, Job, JobState
from replica.limits import MESSAGE_CHARACTERS_MAX
from replica.orders import stage_of
from replica.policy import Policy
from replica.state import Facts
from replica.units import NEVER, Instant, seconds

PROVIDER = "burst_buffer/native"
"""How reasons name what performs the operations, in the form of Slurm's plugins."""

_OPERATION_NAMES = {
    e.Stage.STAGE_IN: "slurm_bb_data_in",
    e.Stage.POST_RUN: "slurm_bb_post_run",
    e.Stage.STAGE_OUT: "slurm_bb_data_out",
    e.Stage.TEARDOWN: "teardown",
}


def failure_message(stage: e.Stage, message: str) -> str:
    """Return the reason that a failed operation gives, in Slurm's form: `burst_buffer/native: slurm_bb_data_in:
    MESSAGE`.
    """
    return f"{PROVIDER}: {_OPERATION_NAMES[stage]}: {message}"[:MESSAGE_CHARACTERS_MAX]


def timeout_s(policy: Policy, stage: e.Stage) -> int:
    """Return how long an operation may take, seconds."""
    if stage is e.Stage.STAGE_IN:
        return policy.stage_in_timeout_s
    if stage is e.Stage.STAGE_OUT:
        return policy.stage_out_timeout_s
    return policy.other_timeout_s


def active_stage(job: Job, buffer: Buffer | None) -> e.Stage | None:
    """Return the operation that stands ordered now: none while a failed one waits for its retry or for somebody."""
    return None if job.stuck or job.retry_at else stage_of(job, buffer)


def waiting_stage(job: Job, buffer: Buffer) -> e.Stage | None:
    """Return the operation that failed and is to be ordered again, or None."""
    if not job.stuck and not job.retry_at:
        return None
    return e.Stage.TEARDOWN if buffer.state is BufferState.TEARDOWN_FAIL else stage_of(job, buffer)


def timeout_at(policy: Policy, job: Job, buffer: Buffer | None) -> Instant:
    """Return when the ordered operation is over its time, or NEVER: a script's own limit is kept by its agent."""
    stage = active_stage(job, buffer)
    if stage is None or stage is e.Stage.RUN or job.order_at == NEVER:
        return NEVER
    return Instant(job.order_at + seconds(timeout_s(policy, stage)))


def failed(
    state: Facts, job: Job, stage: e.Stage, message: str, at: Instant, *, final: bool = False
) -> tuple[e.Event, ...]:
    """Return what follows from a failed operation: a retry with back-off while there are retries left, then a hold.
    A `final` failure is not retried.

    A failed stage-out never leads to teardown by itself, and a failed teardown keeps its space counted.
    """
    policy = state.policy
    text = failure_message(stage, message)
    if job.failures < policy.stage_retries and not final:
        backoff_s = min(policy.retry_backoff_s * 2 ** min(job.failures, 32), policy.retry_backoff_max_s)
        return (e.StageFailed(job.id, stage, job.attempt, text, Instant(max(at + seconds(backoff_s), 1))),)
    events: list[e.Event] = [e.StageFailed(job.id, stage, job.attempt, text, NEVER)]
    if stage is e.Stage.STAGE_IN and job.hold is Hold.NONE:
        events.append(e.JobHeld(job.id, Hold.SYSTEM))
    return tuple(events)


def succeeded(
    job: Job, buffer: Buffer, stage: e.Stage, files: int, size_bytes: int, digest: str
) -> tuple[e.Event, ...]:
    """Return what follows from an operation that succeeded."""
    if stage is e.Stage.STAGE_IN:
        return (e.StagedIn(job.id, files, size_bytes, digest),)
    if stage is e.Stage.POST_RUN:
        if job.hurry:
            return (e.TeardownStarted(job.id, job.attempt + 1, job.result, True),)
        return (e.StageOutStarted(job.id, job.attempt + 1),)
    if stage is e.Stage.STAGE_OUT:
        return (
            e.StagedOut(job.id, files, size_bytes, digest),
            e.TeardownStarted(job.id, job.attempt + 1, job.result, job.hurry),
        )
    return torn_down(job)


def torn_down(job: Job) -> tuple[e.Event, ...]:
    """Return what follows when a buffer is gone: a job that has not run waits for a new one, unless cancelled."""
    events: list[e.Event] = [e.TornDown(job.id)]
    if job.state is JobState.PENDING:
        events.append(e.JobRequeued(job.id))
        if job.cancelled:
            events.append(e.JobCancelled(job.id))
    return tuple(events)


def script_ended(
    job: Job, buffer: Buffer | None, result: JobState, exit_code: int, signal: int, message: str
) -> tuple[e.Event, ...]:
    """Return what follows when the script has ended, however it did."""
    if job.cancelled:
        result = JobState.CANCELLED
        if buffer is not None and job.state is JobState.CONFIGURING:
            return (
                e.TeardownStarted(job.id, job.attempt + 1, result, job.hurry, "cancelled before the script started"),
            )
    ended = e.RunEnded(job.id, result, exit_code, signal, job.attempt + 1, message[:MESSAGE_CHARACTERS_MAX])
    if buffer is not None and job.hurry:
        return (
            ended,
            e.TeardownStarted(job.id, job.attempt + 2, result, True, "stage-out skipped: cancelled with --hurry"),
        )
    return (ended,)
