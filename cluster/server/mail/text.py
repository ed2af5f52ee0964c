"""Text of mails: Slurm's subject, byte for byte where the guide shows it, and a short body.

Sources: the guide (stage-out), and the manual page of sbatch (`--mail-type`).
"""

from __future__ import annotations

from collections.abc import Mapping
from email import policy
from email.message import EmailMessage
from typing import Final, NamedTuple

from forebay.cluster.system import format_instant
from forebay.replica.model import JobState, Mail, MailKind, message_id_local_part
from forebay.replica.values import plain

MESSAGE_ID_DOMAIN: Final = "forebay"
"""Domain of a Message-ID: the same on every replica, unlike a host name."""

NAME_CHARACTERS_MAX: Final = 128
"""Maximum length of a job's name in a subject: mail programs fold longer lines."""

_POLICY: Final = policy.SMTP.clone(max_line_length=900)
"""Policy that keeps a subject on one line, for filters; SMTP allows lines of 998 characters."""

_WORDS: Final = {
    MailKind.BEGIN: "Began",
    MailKind.END: "Ended",
    MailKind.FAIL: "Failed",
    MailKind.REQUEUE: "Requeued",
    MailKind.STAGE_OUT: "Staged Out",
}
_TIMES: Final = {
    MailKind.BEGIN: "Queued time",
    MailKind.END: "Run time",
    MailKind.FAIL: "Run time",
    MailKind.REQUEUE: "Run time",
    MailKind.STAGE_OUT: "StageOut time",
}
_SENTENCES: Final = {
    MailKind.BEGIN: "its script has started",
    MailKind.END: "its script has ended",
    MailKind.FAIL: "it failed",
    MailKind.REQUEUE: "it was requeued and waits again",
    MailKind.STAGE_OUT: "its results have been staged out",
}


class Letter(NamedTuple):
    """Message to a recipient."""

    recipient: str
    """Address, or a name known to the sending machine."""
    subject: str
    body: str
    message_id: str
    """Message-ID; the same for every attempt by any replica."""
    variables: Mapping[str, str] = {}
    """Additional environment variables for a mail program."""


def letter_of(cluster: str, cluster_id: str, mail: Mail) -> Letter:
    """Return the letter for a mail about a job."""
    variables = {
        "SLURM_CLUSTER_NAME": cluster,
        "SLURM_JOB_ID": str(mail.job),
        "SLURM_JOB_NAME": mail.name,
        "SLURM_JOB_MAIL_TYPE": mail.kind.word,
    }
    body = _body_of(cluster, cluster_id, mail)
    return Letter(mail.recipient, subject_of(mail), body, _message_id(cluster_id, mail), variables)


def subject_of(mail: Mail) -> str:
    """Return the subject: `SLURM Job_id=12 Name=my_app Staged Out, StageOut time 00:05:07`."""
    parts = [f"{_job(mail)} Name={plain(mail.name)[:NAME_CHARACTERS_MAX]} {_WORDS[mail.kind]}"]
    # A job that never ran has no run time.
    if mail.duration_s or mail.result is not JobState.CANCELLED:
        parts.append(f"{_TIMES[mail.kind]} {_duration(mail.duration_s)}")
    if mail.kind in (MailKind.END, MailKind.FAIL):
        parts.append(mail.result.name)
        if mail.signal:
            parts.append(f"Signal {mail.signal}")
        elif mail.result in (JobState.COMPLETED, JobState.FAILED):
            parts.append(f"ExitCode {mail.exit_code}")
    return "SLURM " + ", ".join(parts)


def _job(mail: Mail) -> str:
    if mail.array_job:
        return f"Array Task Job_id={mail.array_job}_{mail.array_task} ({mail.job})"
    return f"Job_id={mail.job}"


def _duration(duration_s: int) -> str:
    """Format whole seconds as Slurm does: `HH:MM:SS`, or `D-HH:MM:SS`."""
    days, rest = divmod(duration_s, 86_400)
    clock = f"{rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"{days}-{clock}" if days else clock


def _message_id(cluster_id: str, mail: Mail) -> str:
    return f"<{message_id_local_part(cluster_id, mail)}@{MESSAGE_ID_DOMAIN}>"


def _body_of(cluster: str, cluster_id: str, mail: Mail) -> str:
    return (
        f"Job {mail.job} ({plain(mail.name)[:NAME_CHARACTERS_MAX]}) of the cluster {plain(cluster)}: "
        f"{_SENTENCES[mail.kind]}.\n"
        f"Time: {format_instant(mail.at)}\n{message_id_line(_message_id(cluster_id, mail))}"
    )


def message_id_line(message_id: str) -> str:
    """Return the last line of a mail, which helps to recognize duplicates."""
    return f"Message: {message_id} (a mail with the same ID is a duplicate)\n"


def message_of(letter: Letter, *, sender: str, recipient: str) -> bytes:
    """Return the whole SMTP message to an address: ASCII lines that end with CR LF."""
    message = EmailMessage(policy=_POLICY)
    message["From"] = sender
    message["To"] = recipient
    message["Subject"] = letter.subject
    message["Message-ID"] = letter.message_id
    message["Auto-Submitted"] = "auto-generated"
    # Encode all text as ASCII, because not every server accepts more.
    message.set_content(letter.body, cte="quoted-printable")
    return message.as_bytes()
