"""Mail that is owed: what a job asked to be told, as far as it has happened and nobody has said yet that it was sent.

Law 7: folding sends nothing. It keeps an index of what is owed, derived from the events of a job and from what the job
asked for; the leader sends what the index holds and settles it with a command. So a new leader owes nobody anything but
what is in the State, and a mail is sent at least once: `message_name` is the same for each try, whoever makes it.

Source: the manual page of sbatch (`--mail-type`), the guide (mail on the end of stage-out), SEMANTICS.md.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any, Protocol

import immutables
import msgspec

from replica.messages import events as e
from replica.model.job_options import JobOptions
from replica.model.jobs import Job, JobState
from replica.values.limits import MAILS_OWED_MAX
from replica.values.units import MICROSECONDS_PER_SECOND, NEVER, Instant

ALL = "all"
NONE = "none"


class MailKind(IntEnum):
    """What a mail is about; the numbers are wire numbers (law 12)."""

    BEGIN = 1
    END = 2
    FAIL = 3
    REQUEUE = 4
    STAGE_OUT = 5

    @property
    def word(self) -> str:
        """As in `--mail-type`, for example `stage_out`."""
        return self.name.lower()


MAIL_TYPES = (NONE, ALL, *(kind.word for kind in MailKind))
"""What a job may ask for with `--mail-type`, as far as it means something here."""


class Mail(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One mail that is owed: all that it says, so that the job may be purged before it is sent."""

    job: int
    kind: MailKind
    number: int
    """The attempt of the job that it is about: tells the mail of one run from that of the next."""
    recipient: str
    name: str
    at: Instant
    """When it happened."""
    duration_s: int = 0
    """How long the job waited (BEGIN), ran (END, FAIL, REQUEUE) or was staged out (STAGE_OUT)."""
    result: JobState = JobState.PENDING
    exit_code: int = 0
    signal: int = 0
    array_job: int = 0
    array_task: int = 0

    @property
    def key(self) -> str:
        """What names it in the State: `12.stage_out.7`."""
        return f"{self.job}.{self.kind.word}.{self.number}"


def message_name(cluster_id: str, mail: Mail) -> str:
    """Return what is left of the @ in the Message-ID: the same for every try, so that duplicates are recognisable."""
    return f"{mail.key}.{cluster_id}"


def wants(options: JobOptions, kind: MailKind) -> bool:
    """Return whether a job asked for mail of a kind."""
    asked = {word.strip().lower() for word in options.mail_types}
    return kind.word in asked or ALL in asked


class Drafted(Protocol):
    """What these folds need of a Draft."""

    at: int
    options: Any
    extras: Any
    jobs: Any
    mails: immutables.Map[str, Mail]


def owing(fold: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Return the fold of an event of a job that also notes the mail that is owed because of it."""

    def fold_and_owe(draft: Drafted, event: Any) -> None:
        options = draft.options.get(event.job)
        if options is None or not options.mail_types:
            fold(draft, event)
            return
        before = draft.jobs.get(event.job)
        fold(draft, event)
        if before is None or len(draft.mails) >= MAILS_OWED_MAX:
            return
        extra = draft.extras.get(event.job)
        mail = mail_of(event, before, options, Instant(draft.at), requeueing=extra is not None and extra.requeueing)
        if mail is not None:
            draft.mails = draft.mails.set(mail.key, mail)

    return fold_and_owe


def mail_of(event: e.Event, before: Job, options: JobOptions, at: Instant, *, requeueing: bool = False) -> Mail | None:
    """Return the mail that an event makes owed, None if none; `before` is the job as it was."""
    found = _about(event, before, at, requeueing)
    if found is None:
        return None
    kind, since, result, exit_code, signal = found
    if kind is MailKind.FAIL and not wants(options, kind):
        # Slurm: who asked for the end only hears of a failure as of an end.
        kind = MailKind.END
    if not wants(options, kind):
        return None
    return Mail(
        job=before.id,
        kind=kind,
        number=before.attempt,
        recipient=options.mail_user or before.spec.user,
        name=before.spec.name,
        at=at,
        duration_s=0 if since == NEVER else max(0, at - since) // MICROSECONDS_PER_SECOND,
        result=result,
        exit_code=exit_code,
        signal=signal,
        array_job=options.array_job,
        array_task=options.array_task,
    )


_About = tuple[MailKind, Instant, JobState, int, int]


def _about(event: e.Event, before: Job, at: Instant, requeueing: bool) -> _About | None:
    """Return what a mail would be about: the kind, since when it lasted, and how the job ended."""
    if isinstance(event, e.RunStarted):
        return MailKind.BEGIN, before.submitted_at, JobState.RUNNING, 0, 0
    if isinstance(event, e.RunEnded):
        if requeueing:
            return None  # it was told as the requeue was asked for
        return _end(event.result), before.started_at, event.result, event.exit_code, event.signal
    if isinstance(event, e.StagedOut):
        return MailKind.STAGE_OUT, before.ended_at, before.result, before.exit_code, before.signal
    if isinstance(event, e.RequeueRequested):
        return MailKind.REQUEUE, before.started_at, JobState.PENDING, 0, 0
    if isinstance(event, e.JobCancelled):
        return MailKind.END, before.started_at, JobState.CANCELLED, 0, 0
    # A job whose script has ended was told so then.
    if isinstance(event, e.TeardownStarted) and before.ended_at == NEVER and event.result in _RESULTS:
        return _end(event.result), before.started_at, event.result, 0, 0
    return None


_RESULTS = frozenset({JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED, JobState.TIMEOUT, JobState.NODE_FAIL})


def _end(result: JobState) -> MailKind:
    """COMPLETED and CANCELLED are ends, everything else is a failure (Slurm: job_completion_logger)."""
    return MailKind.END if result in (JobState.COMPLETED, JobState.CANCELLED) else MailKind.FAIL


OWING: tuple[type, ...] = (
    e.RunStarted,
    e.RunEnded,
    e.StagedOut,
    e.RequeueRequested,
    e.JobCancelled,
    e.TeardownStarted,
)
"""The events that may make mail owed."""


# Settling it ----------------------------------------------------------------------------------------------------------


def fold_sent(draft: Drafted, event: e.MailSent) -> None:
    """The mail is no longer owed."""
    _settle(draft, event.mail)


def fold_dropped(draft: Drafted, event: e.MailDropped) -> None:
    """The mail is given up."""
    _settle(draft, event.mail)


def _settle(draft: Drafted, key: str) -> None:
    if key in draft.mails:
        draft.mails = draft.mails.delete(key)


def settling_events(
    owed: immutables.Map[str, Mail], sent: tuple[str, ...], dropped: tuple[tuple[str, str], ...]
) -> tuple[e.Event, ...]:
    """Return the events that settle mails; what is not owed (any more) is passed over."""
    found: list[e.Event] = [e.MailSent(owed[key].job, key) for key in dict.fromkeys(sent) if key in owed]
    gone = set(sent)
    for key, reason in dropped:
        if key in owed and key not in gone:
            gone.add(key)
            found.append(e.MailDropped(owed[key].job, key, reason))
    return tuple(found)
