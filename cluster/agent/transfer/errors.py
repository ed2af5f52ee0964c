"""How a transfer ends when it does not end well."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cluster.agent.transfer.receipt import Receipt


class TransferFailed(Exception):
    """A transfer that cannot be done; the message names the file, says why, and what would be right.

    Its `__cause__` tells whether trying again is of use (cluster.agent.worker.worker.is_final).
    """

    item: int | None = None
    """The item that it was about, its place in what `carry` was given."""
    receipt: Receipt | None = None
    """What had been done by then."""


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
