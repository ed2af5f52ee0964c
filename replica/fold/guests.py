"""Folding what is peculiar to guests: their setups, what lingers, what is parked, and whose names they stand under."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from replica.messages import events as e
from replica.model import (
    Buffer,
    BufferInput,
    BufferState,
    Guest,
    GuestJobs,
    GuestStep,
    Job,
    JobState,
    commented,
)
from replica.state import StateBuilder, shared_request
from replica.values import NEVER, Instant, LedgerViolation

_NOT_FAILED: dict[str, Any] = {"failures": 0, "retry_at": NEVER, "stuck": False, "message": ""}


def _guest_set_up(builder: StateBuilder, event: e.GuestSetUp) -> None:
    if event.job != builder.next_job:
        raise LedgerViolation(f"job {event.job} was set up while {builder.next_job} was next")
    builder.next_job = event.job + 1
    at, name = Instant(builder.at), event.guest.name
    job = Job(
        id=event.job,
        request=shared_request(event.request),
        state=JobState.PENDING,
        submitted_at=at,
        eligible_at=at,
        guest=event.guest,
    )
    buffer = Buffer(event.job, BufferState.PENDING, event.pool, event.granted_bytes, created_at=at, changed_at=at)
    known = builder.guests.get(name)
    builder.guests[name] = GuestJobs(name, event.job, event.guest.epoch, 1 + (0 if known is None else known.jobs))
    builder.put(job, buffer)


def _guest(builder: StateBuilder, job_id: int) -> Guest:
    guest = builder.job(job_id).guest
    if guest is None:
        raise LedgerViolation(f"job {job_id} is no guest")
    return guest


def _guest_space_given(builder: StateBuilder, event: e.GuestSpaceGiven) -> None:
    if event.passed:
        builder.change(event.passed, None, passed=builder.job(event.passed).passed + 1)
    _guest(builder, event.job)
    # Only now it is there as a buffer that people see, like a native one.
    buffer = builder.moved(builder.buffers[event.job], BufferInput.ALLOCATED)
    builder.put(builder.job(event.job), replace(buffer, created_at=Instant(builder.at), places=event.places))


def _guest_setup_failed(builder: StateBuilder, event: e.GuestSetupFailed) -> None:
    at = Instant(builder.at)
    builder.change(
        event.job,
        BufferInput.ABANDONED,
        state=JobState.CANCELLED,
        result=JobState.CANCELLED,
        cancelled=True,
        ended_at=at,
        message=event.reason,
        comment=commented(builder.job(event.job).comment, event.reason, at),
    )


def _guest_stage_in_ordered(builder: StateBuilder, event: e.GuestStageInOrdered) -> None:
    ordered = replace(
        builder.job(event.job),
        guest=replace(_guest(builder, event.job), step=GuestStep.STAGED),
        mover=event.mover,
        attempt=event.attempt,
        order_at=Instant(builder.at),
        **_NOT_FAILED,
    )
    buffer = builder.buffers[event.job]
    # What lingered is where it was.
    builder.put(ordered, replace(buffer, epoch=buffer.epoch or event.attempt))


def _guest_lingered(builder: StateBuilder, event: e.GuestLingered) -> None:
    guest = replace(_guest(builder, event.job), step=GuestStep.LINGERING, since=Instant(builder.at))
    builder.change(event.job, None, guest=guest, attempt=event.attempt, order_at=NEVER, **_NOT_FAILED)


def _guest_taken_up(builder: StateBuilder, event: e.GuestTakenUp) -> None:
    before = _guest(builder, event.job)
    guest = replace(before, step=GuestStep.SET_UP, since=Instant(builder.at), epoch=event.epoch)
    builder.guests[guest.name] = replace(builder.guests[guest.name], epoch=event.epoch)
    builder.change(event.job, BufferInput.TAKEN_UP, guest=guest, order_at=NEVER)


def _guest_run_began(builder: StateBuilder, event: e.GuestRunBegan) -> None:
    _guest(builder, event.job)
    ordered = builder.moved(builder.buffers[event.job], BufferInput.RUN_ORDERED)
    begun = replace(
        builder.job(event.job),
        state=JobState.RUNNING,
        attempt=event.attempt,
        started_at=Instant(builder.at),
        order_at=NEVER,
        message="",
    )
    builder.put(begun, builder.moved(ordered, BufferInput.RUN_STARTED))


def _guest_run_ended(builder: StateBuilder, event: e.GuestRunEnded) -> None:
    _guest(builder, event.job)
    builder.change(
        event.job,
        BufferInput.RUN_ENDED,
        state=JobState.STAGE_OUT,
        result=JobState.COMPLETED,
        attempt=event.attempt,
        order_at=NEVER,
        ended_at=Instant(builder.at),
    )


def _guest_parked(builder: StateBuilder, event: e.GuestParked) -> None:
    job, at = builder.job(event.job), Instant(builder.at)
    guest = replace(_guest(builder, event.job), step=GuestStep.PARKED, since=at)
    builder.change(event.job, None, guest=guest, comment=commented(job.comment, event.reason, at))


def purged(builder: StateBuilder, job: Job) -> None:
    """Forget a job of a guest that leaves the state; the last one of it takes along which epochs there were."""
    if job.guest is None:
        return
    known = builder.guests[job.guest.name]
    if known.jobs > 1:
        builder.guests[known.name] = replace(known, jobs=known.jobs - 1)
    else:
        del builder.guests[known.name]


def _scheduler_bound(builder: StateBuilder, event: e.SchedulerBound) -> None:
    bound = replace(event.scheduler, at=Instant(builder.at))
    builder.schedulers = builder.schedulers.set(bound.name, bound)


def _scheduler_released(builder: StateBuilder, event: e.SchedulerReleased) -> None:
    builder.schedulers = builder.schedulers.delete(event.scheduler)


def _guest_missed(builder: StateBuilder, event: e.GuestMissed) -> None:
    """Change nothing: who reads the ledger sees that the two differed."""


GUEST_FOLDS: dict[type, Callable[[StateBuilder, Any], None]] = {
    e.GuestSetUp: _guest_set_up,
    e.GuestSpaceGiven: _guest_space_given,
    e.GuestSetupFailed: _guest_setup_failed,
    e.GuestStageInOrdered: _guest_stage_in_ordered,
    e.GuestLingered: _guest_lingered,
    e.GuestTakenUp: _guest_taken_up,
    e.GuestRunBegan: _guest_run_began,
    e.GuestRunEnded: _guest_run_ended,
    e.GuestParked: _guest_parked,
    e.SchedulerBound: _scheduler_bound,
    e.SchedulerReleased: _scheduler_released,
    e.GuestMissed: _guest_missed,
}
"""What each event does; `replica.fold.fold` has them all."""
