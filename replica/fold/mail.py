"""Fold events of mail: note the mail that a job's event makes due, and settle sent and dropped mail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from forebay.replica.messages import events as e
from forebay.replica.model import Job, JobState, Mail, MailKind, wants_mail
from forebay.replica.state import StateBuilder
from forebay.replica.values import MAILS_OWED_MAX, MICROSECONDS_PER_SECOND, NEVER, Instant


def with_mail(fold: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Wrap the fold of a job's event so that it also notes the mail that becomes due."""

    def fold_and_owe(builder: StateBuilder, event: Any) -> None:
        before: Job | None = builder.jobs.get(event.job)
        fold(builder, event)
        if before is None or before.request.options is None or not before.request.options.mail_types:
            return
        if len(builder.mails) >= MAILS_OWED_MAX:
            return
        # Use the job after the event: a requeue is reported once, when it is requested.
        after: Job | None = builder.jobs.get(event.job)
        requeueing = after is not None and after.effective_interruptions.requeueing
        mail = mail_of(event, before, Instant(builder.at), requeueing=requeueing)
        if mail is not None:
            builder.mails = builder.mails.set(mail.key, mail)

    return fold_and_owe


def mail_of(event: e.Event, before: Job, at: Instant, *, requeueing: bool = False) -> Mail | None:
    """Return the mail that an event makes due, or None; `before` is the job before the event."""
    found = _content(event, before, at, requeueing)
    if found is None:
        return None
    kind, since, result, exit_code, signal = found
    options, array = before.request.effective_options, before.request.array
    if kind is MailKind.FAIL and not wants_mail(options, kind):
        # As in Slurm, a user who requested only END receives a failure as END.
        kind = MailKind.END
    if not wants_mail(options, kind):
        return None
    return Mail(
        job=before.id,
        kind=kind,
        number=before.attempt,
        recipient=options.mail_user or before.request.user,
        name=before.request.name,
        at=at,
        duration_s=0 if since == NEVER else max(0, at - since) // MICROSECONDS_PER_SECOND,
        result=result,
        exit_code=exit_code,
        signal=signal,
        array_job=0 if array is None else array.job,
        array_task=0 if array is None else array.task,
    )


_Content = tuple[MailKind, Instant, JobState, int, int]


def _content(event: e.Event, before: Job, at: Instant, requeueing: bool) -> _Content | None:
    """Return the content of a mail: its kind, the start of the period it reports, and the job's result."""
    if isinstance(event, e.RunStarted):
        return MailKind.BEGIN, before.submitted_at, JobState.RUNNING, 0, 0
    if isinstance(event, e.RunEnded):
        if requeueing:
            return None  # already reported when the requeue was requested
        return _end(event.result), before.started_at, event.result, event.exit_code, event.signal
    if isinstance(event, e.StagedOut):
        return MailKind.STAGE_OUT, before.ended_at, before.result, before.exit_code, before.signal
    if isinstance(event, e.RequeueRequested):
        return MailKind.REQUEUE, before.started_at, JobState.PENDING, 0, 0
    if isinstance(event, e.JobCancelled):
        return MailKind.END, before.started_at, JobState.CANCELLED, 0, 0
    # If the script has ended, the mail was already due then.
    if isinstance(event, e.TeardownStarted) and before.ended_at == NEVER and event.result in _RESULTS:
        return _end(event.result), before.started_at, event.result, 0, 0
    return None


_RESULTS = frozenset({JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED, JobState.TIMEOUT, JobState.NODE_FAIL})


def _end(result: JobState) -> MailKind:
    """Map COMPLETED and CANCELLED to END, all other results to FAIL (Slurm: job_completion_logger)."""
    return MailKind.END if result in (JobState.COMPLETED, JobState.CANCELLED) else MailKind.FAIL


MAIL_EVENTS: tuple[type, ...] = (
    e.RunStarted,
    e.RunEnded,
    e.StagedOut,
    e.RequeueRequested,
    e.JobCancelled,
    e.TeardownStarted,
)
"""Events that may make mail due."""


# Settling mail --------------------------------------------------------------------------------------------------------


def fold_sent(builder: StateBuilder, event: e.MailSent) -> None:
    """Remove a sent mail."""
    _settle(builder, event.mail)


def fold_dropped(builder: StateBuilder, event: e.MailDropped) -> None:
    """Remove a mail that could not be sent."""
    _settle(builder, event.mail)


def _settle(builder: StateBuilder, key: str) -> None:
    if key in builder.mails:
        builder.mails = builder.mails.delete(key)
