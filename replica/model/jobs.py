"""Jobs: where each stands, and what became of it. What was asked of it is a JobRequest."""

from __future__ import annotations

import re
from enum import IntEnum
from typing import Any

import msgspec

from replica.model.job_states import JobState
from replica.model.requests import JobRequest
from replica.values import MICROSECONDS_PER_SECOND, NAME_CHARACTERS_MAX, NEVER, Instant, Pattern


class Hold(IntEnum):
    """Who holds a pending job back."""

    NONE = 0
    USER = 1
    ADMIN = 2
    SYSTEM = 3
    """An operation failed for good; the job's user may release it."""


class Interruptions(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What has kept a job from going straight to its end. Times are Instants, durations microseconds."""

    held_because: str = ""
    """The reason that is shown while the job is held by the system, in Slurm's form; it outlives the teardown."""
    operation: str = ""
    """The operation that failed last, for example `setup`."""
    pre_run_failures: int = 0
    """Failures of pre-run since somebody released the job last."""
    requeues: int = 0
    """How often the job was requeued (SLURM_RESTART_COUNT)."""
    requeueing: bool = False
    """The present run is being ended, or its results staged out, and the job waits again afterwards."""
    revocations: int = 0
    """How often its staged buffer was taken back for another job."""
    suspended_at: Instant = NEVER
    suspended_us: int = 0
    """When the job was suspended, NEVER if it is not; and for how long in all before: its time limit stands still."""
    partial: bool = False
    """Whether somebody said that results which are not there are given up, and the others staged out."""


NO_INTERRUPTIONS = Interruptions()
"""The interruptions of a job that had none: its record has None instead."""


class ExternalJobStep(IntEnum):
    """How far the scheduler of an external job has come; where its buffer stands, the buffer's state says. Wire
    numbers.
    """

    SET_UP = 1
    """Its space is wanted or held, and no stage-in was asked for since."""
    STAGED = 2
    """Its stage-in was asked for, and perhaps what follows."""
    LINGERING = 3
    """Its scheduler has torn it down before it ran: the data is kept for a while, its space is anybody's."""
    PARKED = 4
    """Its scheduler has torn it down, and there are results that nobody has exported."""


class ExternalJob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What is peculiar to an external job: a buffer whose job belongs to another scheduler."""

    scheduler: str
    job: str
    """Its number there, as text (`external_job_id_fault`)."""
    epoch: int
    """From 1: how often that number has been set up. What lingers and is taken up is in its next epoch, so that a call
    which comes late from the one before finds nothing.
    """
    digest: bytes
    """Digest of what its setup asked for: tells a repeat from another job with the same number."""
    uid: int
    step: ExternalJobStep = ExternalJobStep.SET_UP
    since: Instant = NEVER
    """When it asked for space, or began to linger."""

    @property
    def name(self) -> str:
        """Name shown to users: `slurm:42`."""
        return external_job_name(self.scheduler, self.job)


EXTERNAL_JOB_ID_CHARACTERS_MAX = 40
"""The number of a job at another scheduler, characters: `12345678_1000` with room to spare; part of a file name."""

_EXTERNAL_JOB_ID = Pattern(r"[A-Za-z0-9][A-Za-z0-9_-]*", re.ASCII)
_SCHEDULER = Pattern(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", re.ASCII)


def external_job_name(scheduler: str, job: str) -> str:
    """Return the name of an external job, which is its key in the state: `slurm:42`. Neither part has a colon."""
    return f"{scheduler}:{job}"


def external_job_id_fault(job: str) -> str | None:
    """Return what is wrong with the number of a job at another scheduler, in words that follow `the job `, or None."""
    if len(job) <= EXTERNAL_JOB_ID_CHARACTERS_MAX and _EXTERNAL_JOB_ID.fullmatch(job):
        return None
    return (
        f"{job[:48]!r} has not 1 to {EXTERNAL_JOB_ID_CHARACTERS_MAX} letters, digits, _ or -, "
        "the first a letter or digit"
    )


def scheduler_fault(name: str) -> str | None:
    """Return what is wrong with the name of a scheduler, in words that follow `the scheduler `, or None."""
    if len(name) <= NAME_CHARACTERS_MAX and _SCHEDULER.fullmatch(name):
        return None
    return f"{name[:48]!r} has not 1 to {NAME_CHARACTERS_MAX} letters, digits, '_', '.' or '-'"


class ExternalJobEpochs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The jobs here of one job of another scheduler, one for each epoch of it that is still in the state."""

    name: str
    job: int
    """The job of the last epoch; it may be purged already. One that is taken up is that of several epochs."""
    epoch: int
    """The last epoch, from 1."""
    jobs: int
    """Jobs of any epoch that are in the state, count: with the last one of them this record goes."""


class Scheduler(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Another scheduler that has external jobs here, bound to its name at first contact."""

    name: str
    cluster: str
    """What its instances have in common and no other scheduler has, whatever its name."""
    address: str
    """From where it came first, for people."""
    at: Instant = NEVER


class Job(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Job. Times are Instants; NEVER where it has not happened."""

    id: int
    request: JobRequest
    state: JobState
    hold: Hold = Hold.NONE
    message: str = ""
    """What the last failed operation said, shown as the reason while the job is held or stuck in stage-out."""
    comment: str = ""
    """The last thing that went wrong, kept to the end: `SystemComment`."""
    node: str = ""
    attempt: int = 0
    """The number of the last order given for this job; every order has its own, and a report of an older one is
    refused (law 7).
    """
    failures: int = 0
    """Failures of the present operation since it last made progress."""
    retry_at: Instant = NEVER
    """When the failed operation is to be ordered again; NEVER: when somebody releases the job."""
    stuck: bool = False
    """The present operation failed and no retry is planned."""
    order_at: Instant = NEVER
    """When the present operation was ordered: its timeout counts from here."""
    cancelled: bool = False
    hurry: bool = False
    result: JobState = JobState.PENDING
    """What the job will be once stage-out is over; PENDING while the script has not ended."""
    passed: int = 0
    """How often a smaller request was let past this job (SPUR.md, 3)."""
    promised_at: Instant = NEVER
    """When it was expected to get its space as it was first passed: after this, only counted passes are allowed."""
    late: bool = False
    """Whether it can no longer end before its deadline."""
    submitted_at: Instant = NEVER
    eligible_at: Instant = NEVER
    """When its begin time had come; NEVER before."""
    held_at: Instant = NEVER
    started_at: Instant = NEVER
    ended_at: Instant = NEVER
    exit_code: int = 0
    signal: int = 0
    interruptions: Interruptions | None = None
    """None, which most have: NO_INTERRUPTIONS."""
    mover: str = ""
    """The mover that stages for the job and removes its buffer, where that lies in a shared filesystem; empty:
    `node` does it.
    """
    external_job: ExternalJob | None = None
    """None: the job is Forebay's own."""

    @property
    def display_name(self) -> str:
        """Name shown to users: `42`, an external job `slurm:42`."""
        return str(self.id) if self.external_job is None else self.external_job.name

    @property
    def staged_by(self) -> str:
        """The node whose agent moves the job's data and removes its buffer."""
        return self.mover or self.node

    @property
    def effective_interruptions(self) -> Interruptions:
        """The interruptions, NO_INTERRUPTIONS where there were none."""
        return NO_INTERRUPTIONS if self.interruptions is None else self.interruptions


def update_interruptions(job: Job, **changes: Any) -> Interruptions | None:
    """Return a job's interruptions with these fields changed, as its record keeps them."""
    after = msgspec.structs.replace(job.effective_interruptions, **changes)
    return None if after == NO_INTERRUPTIONS else after


# ---- systemComment: what went wrong in a job's life, a line each with the time, as Slurm keeps it


COMMENT_CHARACTERS_MAX = 1024
"""All of a job's SystemComment, characters: Slurm stops there, too. The last lines are kept."""

_DAY_S = 86_400
_DAYS_OF_400_YEARS = 146_097
_MONTHS = (31, 30, 31, 30, 31, 31, 30, 31, 30, 31, 31, 29)
"""Days of the months from March on, so that the day of a leap year is the last one."""


def append_comment(before: str, text: str, at: Instant) -> str:
    """Return a job's comment with one more line; unchanged where it says the same of the same second already."""
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
    """Return an instant to the second in UTC, as Slurm stamps comments: `11/20/26 22:14:57`."""
    days, second = divmod(at // MICROSECONDS_PER_SECOND, _DAY_S)
    year, month, day = civil_date(days)
    clock = f"{second // 3600:02d}:{second % 3600 // 60:02d}:{second % 60:02d}"
    return f"{month:02d}/{day:02d}/{year % 100:02d} {clock}"


def civil_date(days: int) -> tuple[int, int, int]:
    """Return year, month and day of the Gregorian calendar for days since 1970-01-01."""
    # Counted from 1600-03-01, where a period of 400 years begins, each year with its leap day last.
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
