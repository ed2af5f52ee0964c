"""Unsent mail: notifications that jobs requested and whose events have happened.

Folding sends nothing (law 7). It keeps an index of unsent mail, derived from a job's events and options. The leader
sends the mail in the index and settles it with a command. A new leader therefore needs only the State, and each mail is
sent at least once; `message_id_local_part` is the same for each attempt.

Sources: sbatch(1) (`--mail-type`); the guide (mail at the end of stage-out); SEMANTICS.md.
"""

from __future__ import annotations

from enum import IntEnum

import msgspec

from forebay.replica.model.job_states import JobState
from forebay.replica.model.requests import JobOptions
from forebay.replica.values import Instant

ALL = "all"
NONE = "none"


class MailKind(IntEnum):
    """Subjects of mail. The numbers are wire numbers (law 12)."""

    BEGIN = 1
    END = 2
    FAIL = 3
    REQUEUE = 4
    STAGE_OUT = 5

    @property
    def word(self) -> str:
        """Return the kind as in `--mail-type`, for example `stage_out`."""
        return self.name.lower()


MAIL_TYPES = (NONE, ALL, *(kind.word for kind in MailKind))
"""Supported values of `--mail-type`."""


class Mail(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An unsent mail with its whole content, so that the job may be purged before it is sent."""

    job: int
    kind: MailKind
    number: int
    """Attempt of the job, which distinguishes mail of successive runs."""
    recipient: str
    name: str
    at: Instant
    """Time of the event."""
    duration_s: int = 0
    """Duration of the wait (BEGIN), run (END, FAIL, REQUEUE) or stage-out (STAGE_OUT), seconds."""
    result: JobState = JobState.PENDING
    exit_code: int = 0
    signal: int = 0
    array_job: int = 0
    array_task: int = 0

    @property
    def key(self) -> str:
        """Return its key in the State: `12.stage_out.7`."""
        return f"{self.job}.{self.kind.word}.{self.number}"


def message_id_local_part(cluster_id: str, mail: Mail) -> str:
    """Return the part of the Message-ID before the @. It is the same for each attempt, so that duplicates are
    recognisable.
    """
    return f"{mail.key}.{cluster_id}"


def wants_mail(options: JobOptions, kind: MailKind) -> bool:
    """Return whether a job requested mail of a kind."""
    asked = {word.strip().lower() for word in options.mail_types}
    return kind.word in asked or ALL in asked
