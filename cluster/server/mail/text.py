"""What a mail says: Slurm's subject, byte for byte where the guide shows it, and a few lines of text.

Sources: the guide (stage-out), the manual page of sbatch (`--mail-type`).
"""

from __future__ import annotations

from email import policy
from email.message import EmailMessage
from typing import Final

from cluster.system import format_instant
from replica.model import JobState, Mail, MailKind, message_name
from replica.values import plain

MESSAGE_ID_DOMAIN: Final = "forebay"
"""Right of the @ in a Message-ID: the same on every replica, unlike a host name."""

NAME_CHARACTERS_MAX: Final = 128
"""Of a job's name in a subject, characters: mail programs fold what is longer than a line anyhow."""

_POLICY: Final = policy.SMTP.clone(max_line_length=900)
"""A subject stays on one line, for whoever sorts mail by it; SMTP allows lines of 998 characters."""

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
    """Return whole seconds as Slurm writes them: `HH:MM:SS`, or `D-HH:MM:SS`."""
    days, rest = divmod(duration_s, 86_400)
    clock = f"{rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"{days}-{clock}" if days else clock


def message_id(cluster_id: str, mail: Mail) -> str:
    """Return the Message-ID, the same for every try of this mail by whichever replica."""
    return f"<{message_name(cluster_id, mail)}@{MESSAGE_ID_DOMAIN}>"


def body_of(cluster: str, cluster_id: str, mail: Mail) -> str:
    """Return the text below the subject."""
    return (
        f"Job {mail.job} ({plain(mail.name)[:NAME_CHARACTERS_MAX]}) of the cluster {plain(cluster)}: "
        f"{_SENTENCES[mail.kind]}.\n"
        f"Time: {format_instant(mail.at)}\n"
        f"Message: {message_id(cluster_id, mail)} (a mail with the same one is the same mail, sent twice)\n"
    )


def message_of(cluster: str, cluster_id: str, mail: Mail, *, sender: str, recipient: str) -> bytes:
    """Return the whole message for SMTP: ASCII lines that end with CR LF."""
    message = EmailMessage(policy=_POLICY)
    message["From"] = sender
    message["To"] = recipient
    message["Subject"] = subject_of(mail)
    message["Message-ID"] = message_id(cluster_id, mail)
    message["Auto-Submitted"] = "auto-generated"
    # ASCII alone, whatever a job is called: not every server takes more.
    message.set_content(body_of(cluster, cluster_id, mail), cte="quoted-printable")
    return message.as_bytes()
