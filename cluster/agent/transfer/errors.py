"""Errors of a transfer and their messages about files."""

from __future__ import annotations

import errno
import stat
from typing import Final

from forebay.cluster.agent.files import kind_of
from forebay.replica.model import TransferReceipt


class TransferFailed(Exception):
    """A transfer failed; the message names the file, the reason and the remedy.

    Its `__cause__` decides whether a retry is useful (cluster.agent.worker.worker.is_final).
    """

    receipt: TransferReceipt | None = None
    """Receipt of the work done before the failure."""

    def __init__(self, message: str, item: int | None = None) -> None:
        """Name the item concerned by its index in the items of `run_transfer`."""
        super().__init__(message)
        self.item = item


class ReadBackFailed(TransferFailed):
    """The data on disk differs from the data written; another attempt may use other blocks."""


def root_cause(error: BaseException) -> BaseException:
    """Return the original cause of an error."""
    while error.__cause__ is not None and error.__cause__ is not error:
        error = error.__cause__
    return error


class SourceChanged(Exception):
    """A source was modified while it was read."""


class TransferPaused(BaseException):
    """The process is being stopped, but the transfer will resume: partial files are kept.

    Any other BaseException from outside removes partial files.
    """


_ABSENT: Final = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG}
)
"""Errors of a path that leads to nothing readable and will not by itself."""


def is_absence(error: BaseException) -> bool:
    """Return whether an error means that the source is missing, rather than that storage has failed."""
    cause = root_cause(error)
    return not isinstance(cause, OSError) or cause.errno in _ABSENT


def os_message(error: OSError) -> str:
    """Return the kernel's message."""
    return error.strerror or str(error)


def file_message(shown: object, error: OSError) -> str:
    """Return the message for a file whose status cannot be read."""
    return f"{shown} does not exist" if isinstance(error, FileNotFoundError) else f"{shown}: {os_message(error)}"


def special_file_reason(mode: int, shown: object) -> str | None:
    """Return why a file of this mode cannot be copied, or None if it is a regular file.

    Here and below, `shown` is its name for messages and is converted to text only for one.
    """
    if stat.S_ISREG(mode):
        return None
    kind = kind_of(mode)
    remedy = {
        "directory": "; stage it with type=directory",
        "symbolic link": "; links are not followed: name the file that it points to",
    }.get(kind, "; only regular files and directories are copied")
    return f"{shown} is a {kind}{remedy}"
