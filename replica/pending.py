"""Why a job waits: the gates in their order, and the reason that each gives.

The gate that keeps a job back and the gate that names its reason are the same call (SPUR.md), so what is shown is what
was decided. Order: hold, deadline, begin time, dependency, burst buffer, placement. Partitions, reservations, account
and QOS limits and licences come between dependency and burst buffer when a job can ask for them.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from replica.buffers import Buffer, BufferState
from replica.jobs import ENDED, DependencyKind, Hold, Job, JobState
from replica.staging import PROVIDER
from replica.state import State
from replica.state_index import is_finished
from replica.units import NEVER


class Reason(StrEnum):
    """Slurm's names for why a job waits, byte for byte, as far as Forebay gives them."""

    NONE = "None"
    PRIORITY = "Priority"
    RESOURCES = "Resources"
    DEPENDENCY = "Dependency"
    DEPENDENCY_NEVER_SATISFIED = "DependencyNeverSatisfied"
    NODE_DOWN = "NodeDown"
    REQ_NODE_NOT_AVAIL = "ReqNodeNotAvail"
    JOB_HELD_USER = "JobHeldUser"
    JOB_HELD_ADMIN = "JobHeldAdmin"
    BEGIN_TIME = "BeginTime"
    DEADLINE = "DeadLine"
    BURST_BUFFER_RESOURCES = "BurstBufferResources"
    BURST_BUFFER_STAGE_IN = "BurstBufferStageIn"
    BURST_BUFFER_OPERATION = "BurstBufferOperation"


class Verdict(msgspec.Struct, frozen=True):
    """What one gate says of one job: the reason as it is shown, a sentence, and the figures behind it."""

    reason: str
    sentence: str
    figures: tuple[tuple[str, str], ...] = ()


def early_gate(state: State, job: Job) -> Verdict | None:
    """Return the first gate before the burst buffer that keeps a pending job back, or None."""
    return _hold(job) or _deadline(job) or _begin(job) or _dependency(state, job)


def _hold(job: Job) -> Verdict | None:
    if job.hold is Hold.NONE:
        return None
    if job.stuck and job.message:
        return Verdict(
            job.message,
            "an operation failed and is not tried again by itself; release the job to try again, or cancel it",
            (("failures", str(job.failures)),),
        )
    reason = Reason.JOB_HELD_USER if job.hold is Hold.USER else Reason.JOB_HELD_ADMIN
    return Verdict(reason, f"the job is held by {'its user' if job.hold is Hold.USER else 'an operator'}", ())


def _deadline(job: Job) -> Verdict | None:
    if not job.late:
        return None
    figures = (("deadline_us", str(job.spec.deadline)),)
    return Verdict(Reason.DEADLINE, "the job could no longer end before its deadline", figures)


def _begin(job: Job) -> Verdict | None:
    if job.eligible_at != NEVER:
        return None
    return Verdict(Reason.BEGIN_TIME, "the job's begin time has not come", (("begin_at_us", str(job.spec.begin_at)),))


def _dependency(state: State, job: Job) -> Verdict | None:
    unmet: list[str] = []
    for dependency in job.spec.dependencies:
        other = state.jobs.get(dependency.job)
        name = f"{dependency.kind.word}:{dependency.job}"
        # A purged job is over long since, but how it ended is no longer in the state.
        met = _dependency_met(dependency.kind, other, state.buffers.get(dependency.job), job.has_buffer)
        if met is None:
            return Verdict(Reason.DEPENDENCY_NEVER_SATISFIED, f"{name} can no longer be met", (("dependency", name),))
        if not met:
            unmet.append(name)
    if not unmet:
        return None
    return Verdict(Reason.DEPENDENCY, "the job waits for other jobs", (("waits_for", ",".join(unmet)),))


def _dependency_met(
    kind: DependencyKind, other: Job | None, buffer: Buffer | None, waiter_has_buffer: bool
) -> bool | None:
    """Return whether a dependency is met; None where it never can be."""
    if other is None:
        return (
            True
            if kind in (DependencyKind.AFTER, DependencyKind.AFTER_ANY, DependencyKind.AFTER_BURST_BUFFER)
            else None
        )
    if kind is DependencyKind.AFTER:
        return other.state not in (JobState.PENDING, JobState.CONFIGURING)
    if kind is DependencyKind.AFTER_BURST_BUFFER:
        return is_finished(other, buffer)
    # A job with a buffer that depends on a job with a buffer also waits for its stage-out (the guide).
    result = other.state if waiter_has_buffer or other.state in ENDED else other.result
    if result not in ENDED:
        return False
    if kind is DependencyKind.AFTER_ANY:
        return True
    return True if (result is JobState.COMPLETED) == (kind is DependencyKind.AFTER_OK) else None


def buffer_gate(buffer: Buffer | None, job: Job) -> Verdict | None:
    """Return why the buffer keeps a pending job back, or None where the job has its data or needs none."""
    if buffer is None or buffer.state is BufferState.STAGED_IN:
        return None
    if buffer.state is BufferState.PENDING:
        return Verdict(Reason.BURST_BUFFER_RESOURCES, "the job waits for space in its pool")
    if buffer.state is BufferState.STAGING_IN:
        figures = (("attempt", str(job.attempt)), ("failures", str(job.failures)))
        sentence = "the job's data is being staged in"
        if job.retry_at:
            sentence = f"staging in failed ({job.message}) and will be tried again"
        return Verdict(Reason.BURST_BUFFER_STAGE_IN, sentence, figures)
    return Verdict(Reason.BURST_BUFFER_OPERATION, "the job's former buffer is being torn down")


def later_reason(job: Job, buffer: Buffer | None) -> Verdict:
    """Return the reason of a job that is not pending."""
    if job.state is JobState.STAGE_OUT:
        if (job.stuck or job.retry_at) and job.message:
            return Verdict(
                job.message,
                "an operation after the run failed; release the job to try again"
                if job.stuck
                else "an operation after the run failed and will be tried again",
            )
        return Verdict(f"{PROVIDER}: Stage-out in progress", "the job's results are being staged out")
    if buffer is not None and buffer.state is BufferState.TEARDOWN_FAIL and job.message:
        return Verdict(job.message, "the buffer could not be removed; its space stays counted")
    return Verdict(Reason.NONE, "nothing holds the job back" if job.state not in ENDED else "the job is over")
