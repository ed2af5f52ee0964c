"""Jobs: their state and results. The request of a job is a JobRequest."""

from __future__ import annotations

import re
from enum import IntEnum
from typing import Any

import msgspec

from forebay.replica.model.job_states import JobState
from forebay.replica.model.requests import JobRequest
from forebay.replica.values import MICROSECONDS_PER_SECOND, NAME_CHARACTERS_MAX, NEVER, Instant, Pattern


class Hold(IntEnum):
    """Origins of a hold on a pending job."""

    NONE = 0
    USER = 1
    ADMIN = 2
    SYSTEM = 3
    """An operation failed for good; the job's user may release it."""


class Interruptions(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Failures, requeues, revocations and suspensions of a job. Times are Instants, durations microseconds."""

    held_because: str = ""
    """Reason shown during a hold by the system, in Slurm's form; kept through the teardown."""
    operation: str = ""
    """The operation that failed last, for example `setup`."""
    pre_run_failures: int = 0
    """Failures of pre-run since the last release."""
    requeues: int = 0
    """Number of requeues (SLURM_RESTART_COUNT)."""
    requeueing: bool = False
    """True if the present run ends or stages out before the job waits again."""
    revocations: int = 0
    """Number of revocations of its staged buffer for other jobs."""
    suspended_at: Instant = NEVER
    suspended_us: int = 0
    """Start of the present suspension (`suspended_at`, NEVER if none) and total of finished ones (`suspended_us`). The
    time limit does not run during suspensions.
    """
    partial: bool = False
    """True if missing results are given up and the others staged out, on request."""


NO_INTERRUPTIONS = Interruptions()
"""Interruptions of a job without any, whose record has None instead."""


class ExternalJobStep(IntEnum):
    """Progress of an external job's scheduler; the buffer's state says what the buffer does. Wire numbers."""

    SET_UP = 1
    """Space is requested or held; stage-in has not been requested since."""
    STAGED = 2
    """Stage-in has been requested, and perhaps later operations."""
    LINGERING = 3
    """Torn down by its scheduler before the run: the data is kept for a while, and any job may take the space."""
    RETAINED = 4
    """Torn down by its scheduler with unexported results."""


class ExternalJob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The part of a job's record that only external jobs have. Another scheduler schedules an external job."""

    scheduler: str
    job: str
    """Its job ID at that scheduler, as text (`external_job_id_fault`)."""
    epoch: int
    """Number of setups of that ID, from 1.

    A lingering job that is set up again gets the next epoch, so that late calls of the previous one find nothing.
    """
    digest: bytes
    """Digest of the setup request, to tell a repetition from another job with the same ID."""
    uid: int
    step: ExternalJobStep = ExternalJobStep.SET_UP
    since: Instant = NEVER
    """Time of the request for space, or of the beginning of lingering."""

    @property
    def name(self) -> str:
        """Return the name shown to users: `slurm:42`."""
        return external_job_name(self.scheduler, self.job)


EXTERNAL_JOB_ID_CHARACTERS_MAX = 40
"""Maximum length of a job ID of another scheduler, characters: more than `12345678_1000`; part of a file name."""

_EXTERNAL_JOB_ID = Pattern(r"[A-Za-z0-9][A-Za-z0-9_-]*", re.ASCII)
_SCHEDULER = Pattern(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", re.ASCII)


def external_job_name(scheduler: str, job: str) -> str:
    """Return the name of an external job, its key in the state: `slurm:42`. Neither part has a colon."""
    return f"{scheduler}:{job}"


def external_job_id_fault(job: str) -> str | None:
    """Return the fault of an external job ID, to follow `the job `, or None if it is valid."""
    if len(job) <= EXTERNAL_JOB_ID_CHARACTERS_MAX and _EXTERNAL_JOB_ID.fullmatch(job):
        return None
    return (
        f"{job[:48]!r} does not have 1 to {EXTERNAL_JOB_ID_CHARACTERS_MAX} letters, digits, _ or -, the first a "
        "letter or digit"
    )


def scheduler_fault(name: str) -> str | None:
    """Return the fault of a scheduler's name, to follow `the scheduler `, or None if it is valid."""
    if len(name) <= NAME_CHARACTERS_MAX and _SCHEDULER.fullmatch(name):
        return None
    return f"{name[:48]!r} does not have 1 to {NAME_CHARACTERS_MAX} letters, digits, '_', '.' or '-'"


class ExternalJobEpochs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Jobs in the state that belong to one external job, one for each epoch."""

    name: str
    job: int
    """Job of the last epoch, which may have been purged. A job set up again serves several epochs."""
    epoch: int
    """Last epoch, from 1."""
    jobs: int
    """Number of its jobs in the state; this record is deleted with the last one."""


class Scheduler(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Another scheduler with external jobs, bound to its name at first contact."""

    name: str
    cluster: str
    """Identifier that all its instances share and no other scheduler has."""
    address: str
    """Address of its first contact, for display."""
    at: Instant = NEVER


class Job(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A job. Times are Instants, NEVER before the event."""

    id: int
    request: JobRequest
    state: JobState
    hold: Hold = Hold.NONE
    message: str = ""
    """Message of the last failed operation, shown as the reason while the job is held or stuck in stage-out."""
    comment: str = ""
    """History of failures, kept to the end: `SystemComment`."""
    node: str = ""
    attempt: int = 0
    """Number of the last order for this job. Each order has its own; reports of older orders are rejected (law 7)."""
    failures: int = 0
    """Failures of the present operation since its last progress."""
    retry_at: Instant = NEVER
    """Time of the next attempt of a failed operation; NEVER: after a release."""
    stuck: bool = False
    """True if the present operation failed without a planned retry."""
    order_at: Instant = NEVER
    """Time at which the present operation was ordered; its timeout counts from here."""
    cancelled: bool = False
    hurry: bool = False
    result: JobState = JobState.PENDING
    """State after stage-out; PENDING until the script has ended."""
    passed: int = 0
    """Number of smaller requests that overtook this job (SPUR.md, 3)."""
    promised_at: Instant = NEVER
    """Start expected when the job was first overtaken; after it, only counted passes are allowed."""
    late: bool = False
    """True if it can no longer end before its deadline."""
    submitted_at: Instant = NEVER
    eligible_at: Instant = NEVER
    """Time at which its begin time had passed."""
    held_at: Instant = NEVER
    started_at: Instant = NEVER
    ended_at: Instant = NEVER
    exit_code: int = 0
    signal: int = 0
    interruptions: Interruptions | None = None
    """None, as for most jobs, means NO_INTERRUPTIONS."""
    mover: str = ""
    """Mover that stages for the job and removes its buffer in a shared filesystem; empty: `node` does both."""
    external_job: ExternalJob | None = None
    """None unless another scheduler has the job."""

    @property
    def display_name(self) -> str:
        """Return the name shown to users: `42`, or `slurm:42` for an external job."""
        return str(self.id) if self.external_job is None else self.external_job.name

    @property
    def staged_by(self) -> str:
        """Return the node whose agent moves the job's data and removes its buffer."""
        return self.mover or self.node

    @property
    def effective_interruptions(self) -> Interruptions:
        """Return the interruptions, NO_INTERRUPTIONS if there are none."""
        return NO_INTERRUPTIONS if self.interruptions is None else self.interruptions


def update_interruptions(job: Job, **changes: Any) -> Interruptions | None:
    """Return a job's interruptions with fields replaced, in the form that its record stores."""
    after = msgspec.structs.replace(job.effective_interruptions, **changes)
    return None if after == NO_INTERRUPTIONS else after


# ---- SystemComment: failures in a job's life, one per line with the time, as Slurm records them


COMMENT_CHARACTERS_MAX = 1024
"""Maximum length of a SystemComment, characters, as in Slurm. The last lines are kept."""

_DAY_S = 86_400
_DAYS_OF_400_YEARS = 146_097
_MONTHS = (31, 30, 31, 30, 31, 31, 30, 31, 30, 31, 31, 29)
"""Days of the months from March on, so that a leap year's extra day is the last."""


def append_comment(before: str, text: str, at: Instant) -> str:
    """Return a job's comment with a line added, unless the last line has the same time and text."""
    if not text:
        return before
    line = f"{format_comment_time(at)} {text}"[:COMMENT_CHARACTERS_MAX]
    lines = before.split("\n") if before else []
    if lines and lines[-1] == line:
        return before
    lines.append(line)
    while sum(map(len, lines)) + len(lines) - 1 > COMMENT_CHARACTERS_MAX:
        del lines[0]
    return "\n".join(lines)


def format_comment_time(at: Instant) -> str:
    """Format an instant to the second in UTC, as Slurm stamps comments: `11/20/26 22:14:57`."""
    days, second = divmod(at // MICROSECONDS_PER_SECOND, _DAY_S)
    year, month, day = civil_date(days)
    clock = f"{second // 3600:02d}:{second % 3600 // 60:02d}:{second % 60:02d}"
    return f"{month:02d}/{day:02d}/{year % 100:02d} {clock}"


def civil_date(days: int) -> tuple[int, int, int]:
    """Return year, month and day of the Gregorian calendar for days since 1970-01-01."""
    # Counting starts at 1600-03-01, the beginning of a 400-year period, with leap days at the end of years.
    periods, rest = divmod(days + 135_080, _DAYS_OF_400_YEARS)
    centuries = min(rest // 36_524, 3)
    rest -= centuries * 36_524
    fours, rest = divmod(rest, 1_461)
    ones = min(rest // 365, 3)
    rest -= ones * 365
    year = 1600 + periods * 400 + centuries * 100 + fours * 4 + ones
    for place, length in enumerate(_MONTHS):
        if rest < length:
            month = place + 3
            return (year, month, rest + 1) if month <= 12 else (year + 1, month - 12, rest + 1)
        rest -= length
    raise AssertionError("a year has no thirteenth month")
