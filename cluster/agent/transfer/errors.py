"""Ends of a transfer: its failures, and what they say of a file."""

from __future__ import annotations

import errno
import stat
from typing import Final

from cluster.agent.files import kind_of
from replica.model import TransferReceipt


class TransferFailed(Exception):
    """A transfer that cannot be done; the message names the file, says why, and what would be right.

    Its `__cause__` tells whether trying again is of use (cluster.agent.worker.worker.is_final).
    """

    receipt: TransferReceipt | None = None
    """What had been done by then."""

    def __init__(self, message: str, item: int | None = None) -> None:
        """`item` is what it is about, its place in what `run_transfer` was given."""
        super().__init__(message)
        self.item = item


class ReadBackFailed(TransferFailed):
    """What is on the disk is not what was written; another try may find a better place."""


def root_cause(error: BaseException) -> BaseException:
    """Return what a failure came from in the first place."""
    while error.__cause__ is not None and error.__cause__ is not error:
        error = error.__cause__
    return error


class SourceChanged(Exception):
    """A source that was written to while it was read."""


class Paused(BaseException):
    """Somebody ends this process who will have the transfer go on: what is half done stays for the next attempt.

    Whatever else ends a transfer from outside (any other BaseException) has what is half done removed.
    """


_ABSENT: Final = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG}
)
"""What the kernel says of a path that leads to nothing that may be read, and will not by itself."""


def is_absence(error: BaseException) -> bool:
    """Return whether a failure means that there is nothing to be moved, and not that storage is in trouble."""
    cause = root_cause(error)
    return not isinstance(cause, OSError) or cause.errno in _ABSENT


def os_message(error: OSError) -> str:
    """Return what the kernel says."""
    return error.strerror or str(error)


def file_message(shown: object, error: OSError) -> str:
    """Return what is wrong with a file that cannot be looked at."""
    return f"{shown} does not exist" if isinstance(error, FileNotFoundError) else f"{shown}: {os_message(error)}"


def oddity(mode: int, shown: object) -> str | None:
    """Return why something cannot be copied as a file, None if it is a regular one.

    Here and below, `shown` is how messages name it: it is only turned into text for a message.
    """
    if stat.S_ISREG(mode):
        return None
    kind = kind_of(mode)
    remedy = {
        "directory": "; stage it with type=directory",
        "symbolic link": "; links are not followed: name or copy the file that it points to",
    }.get(kind, "; only regular files and directories are copied")
    return f"{shown} is a {kind}{remedy}"
