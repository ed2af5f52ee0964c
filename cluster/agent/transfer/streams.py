"""Copies everything that is pending: one thing here, more with helper processes.

A small file is mostly Python, so those are shared out, batch by batch, between processes. This one only hands out the
batches, adds up what was done, and ends everybody when it is ended itself."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Iterator
from typing import Final

from cluster.agent.transfer.copying import Copier
from cluster.agent.transfer.helpers import Helpers
from cluster.agent.transfer.state import Batch, Desk
from cluster.agent.transfer.tally import Moved

WAITING: Final = 1
"""Helpers besides one for each stream: at any time about one of them waits for its group of files to be synced."""


def copy_all(desk: Desk) -> None:
    """Copy every pending file; each is durable at its destination on return.

    TransferFailed names the one that cannot be; Fenced, or what the pace raises.
    """
    batches = desk.pending()
    first = list(itertools.islice(batches, 2))
    if len(first) == 2 and desk.options.streams > 1:
        helpers = _helpers(desk)
        if helpers is not None:
            _together(desk, itertools.chain(first, batches), helpers)
            return
    with Copier(desk, lambda moved: advance(desk, moved)) as copier:
        for batch in itertools.chain(first, batches):
            copier.copy(batch)
        copier.finish()


def _helpers(desk: Desk) -> Helpers | None:
    """Start helpers; None if this user may not have any more processes."""
    try:
        return Helpers(desk, desk.options.streams + WAITING)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE):
            raise
        return None


def _together(desk: Desk, batches: Iterator[Batch], helpers: Helpers) -> None:
    with helpers:
        for batch in batches:
            while not helpers.idle:
                _take(desk, helpers)
            helpers.give(batch)
        helpers.finish()
        while helpers.working:
            _take(desk, helpers)


def _take(desk: Desk, helpers: Helpers) -> None:
    for moved in helpers.wait():
        advance(desk, moved)
    desk.context.pace.check()


def advance(desk: Desk, moved: Moved) -> None:
    """Tell what was done. TransferFailed if more was copied than may be."""
    if moved.path:
        desk.context.at(moved.path)
    desk.advance(
        files=moved.files,
        size_bytes=moved.size_bytes,
        written_bytes=moved.written_bytes,
        resumed_bytes=moved.resumed_bytes,
        retries=moved.retries,
        durable_bytes=moved.durable_bytes,
        steps=moved.steps,
    )
