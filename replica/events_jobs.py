"""Facts about jobs from submit to purge, but for what is done for them on nodes (`replica.events_operations`)."""

from __future__ import annotations

import msgspec

from replica.model.buffers import BufferRequest, Transfer
from replica.model.job_options import JobOptions
from replica.model.jobs import Hold, JobSpec


class JobSubmitted(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=9):
    """A job exists, PENDING. `request` is None where it asked for no buffer."""

    job: int
    spec: JobSpec
    request: BufferRequest | None
    pool: str
    granted_bytes: int
    hold: Hold = Hold.NONE


class JobOptionsGiven(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=31):
    """What the job asked for beyond its JobSpec; in the entry that submitted it."""

    job: int
    options: JobOptions


class ArraySubmitted(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=50):
    """A job array exists: task number n of `tasks` is job `job` + n, PENDING. What the tasks share is written once."""

    job: int
    """The array, and its first task."""
    tasks: tuple[int, ...]
    """Ascending."""
    spec: JobSpec
    request: BufferRequest | None
    pool: str
    granted_bytes: int
    hold: Hold
    options: JobOptions
    """Those of each task, but for `array_job` and `array_task`."""
    outputs: tuple[str, ...] = ()
    """Where the output of each task goes; empty: all of them where `spec` says."""
    transfers: tuple[tuple[tuple[Transfer, ...], tuple[Transfer, ...]], ...] = ()
    """What each task stages in and out; empty: all of them what `request` says."""


class JobHeld(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=10):
    """A pending job is held back."""

    job: int
    hold: Hold


class HeldBecause(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=36):
    """The system holds a pending job, and says why: `reason` is what is shown, `comment` the SystemComment."""

    job: int
    reason: str
    comment: str = ""


class JobReleased(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=11):
    """The hold is over; an operation that had failed for good is ordered again by StageRetried."""

    job: int


class JobBecameEligible(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=28):
    """The begin time of a pending job has come."""

    job: int


class DeadlineMissed(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=29):
    """A pending job could no longer end before its deadline, and will not be started."""

    job: int


class JobSuspended(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=39):
    """The script is stopped; its time limit stands still."""

    job: int


class JobResumed(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=40):
    """The script goes on."""

    job: int


class RequeueRequested(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=41):
    """The present run of the job is to end; then its results are staged out, its buffer torn down, and it waits."""

    job: int
    reason: str


class RunRequeued(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=42):
    """The run that was requeued is over and nothing of it is left: the job waits as if it had never run."""

    job: int


class CancelRequested(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=23):
    """The script of a started job is to be ended, or with `hurry` stage-out be skipped."""

    job: int
    hurry: bool


class JobCancelled(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=24):
    """A job that held nothing is over: CANCELLED."""

    job: int


class MailSent(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=89):
    """The mail that a job had asked for was taken by the mailer. The job may be purged."""

    job: int
    mail: str


class MailDropped(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=88):
    """The mail that a job had asked for is given up: `reason` says why. The job may be purged."""

    job: int
    mail: str
    reason: str


class JobPurged(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=25):
    """A finished job left the state; its history stays in the ledger."""

    job: int
