"""Mail that is owed: what a job asked to be told, as far as it has happened and nobody has said yet that it was sent.

Law 7: folding sends nothing. It keeps an index of what is owed, derived from the events of a job and from what the job
asked for; the leader sends what the index holds and settles it with a command. So a new leader owes nobody anything but
what is in the State, and a mail is sent at least once: `message_id_local_part` is
the same for each try, whoever makes it.

Source: the manual page of sbatch (`--mail-type`), the guide (mail on the end of stage-out), SEMANTICS.md.
"""

from __future__ import annotations

from enum import IntEnum

import msgspec

from replica.model.job_states import JobState
from replica.model.requests import JobOptions
from replica.values import Instant

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
    """Mail that is owed: all that it says, so that the job may be purged before it is sent."""

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


def message_id_local_part(cluster_id: str, mail: Mail) -> str:
    """Return what is left of the @ in the Message-ID: the same for every try, so that duplicates are recognisable."""
    return f"{mail.key}.{cluster_id}"


def wants_mail(options: JobOptions, kind: MailKind) -> bool:
    """Return whether a job asked for mail of a kind."""
    asked = {word.strip().lower() for word in options.mail_types}
    return kind.word in asked or ALL in asked
