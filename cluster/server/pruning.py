"""Pruning of a running replica's ledger, in small steps, as approved by `forebay audit prune`.

A request is a note in the replica's directory, so it needs write access there. A separate process has checked the note
against archives, checkpoint and snapshot (`cluster.audit.archive`), which takes a while. The replica only repeats the
checks that protect itself. It then records the range in its storage, so that a removal is completed even if the replica
is killed.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, NoReturn

import msgspec

from forebay.cluster.system import replace_private
from forebay.cluster.system.eventloop import Background
from forebay.wal import BrokenInvariant, LedgerBroken, PrunedRange, PrunedSegment
from forebay.wal import directory as directories

LOGGER = logging.getLogger(__name__)

NOTE_NAME: Final = "prune"
REFUSED_NAME: Final = "prune.refused"
"""Files beside `wal`: the range to prune, and the reason for a rejection."""

NOTE_BYTES_MAX: Final = 8 << 20
"""Maximum size of a note: a row of 60 bytes for each segment of the largest archive."""

POLL_PERIOD_S: Final = 2.0
"""Interval of checks for a note, seconds."""

PAUSE_S: Final = 0.05
"""Pause between two steps, seconds: at most 5,000 entries or 20 MB a second, so that the disk is mostly idle."""

AGAIN_S: Final = 60.0
"""Pause before a retry if the digest that must stay is damaged, seconds. The scrub may repair it meanwhile."""


class PruneNote(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Range to prune: the entries before `below`, the ledger's digest after the last of them, and their archive
    segments (`wal.PrunedSegment`).
    """

    cluster_id: str
    below: int
    digest: str
    segments: tuple[PrunedSegment, ...]

    @property
    def pruned(self) -> PrunedRange:
        """Range in the form that the storage records."""
        return PrunedRange(self.below, self.segments)


def leave_note(home: Path, note: PruneNote) -> None:
    """Write a note for the replica in this directory, atomic and durable on return.

    Raises:
        OSError: The note cannot be written.
    """
    with suppress(FileNotFoundError):
        os.unlink(home / REFUSED_NAME)
    replace_private(home / NOTE_NAME, msgspec.json.encode(note))


def answer_to_note(home: Path) -> str | None:
    """Return the reason for a note's rejection; empty if the note was accepted, None while it waits.

    Raises:
        OSError: The answer cannot be read.
    """
    if (home / NOTE_NAME).exists():
        return None
    with suppress(FileNotFoundError):
        return (home / REFUSED_NAME).read_text(encoding="utf-8")
    return ""


class Pruner(Background):
    """Accepts notes, and prunes the ranges that they name."""

    def __init__(
        self,
        home: Path,
        *,
        authorise: Callable[[PruneNote], None],
        prune_some: Callable[[], bool],
        fail: Callable[[BaseException], NoReturn],
    ) -> None:
        """Initialize.

        `authorise` records the range, or raises BrokenInvariant. `prune_some` removes a part of the range, and returns
        whether entries remain (`wal.prune_some`). `fail` stops the replica.
        """
        super().__init__(fail)
        self._home = home
        self._authorise = authorise
        self._prune_some = prune_some
        self._removing = False

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self.step())

    def step(self) -> float:
        """Read a request to prune, if any, and prune some entries; return the pause until the next call, seconds.

        Raises:
            StorageFailed: The ledger cannot be read or written.
        """
        if (self._home / NOTE_NAME).exists():
            self._take()
        try:
            more = self._prune_some()
        except LedgerBroken as error:
            LOGGER.error("pruning stops until the ledger is repaired: %s", error)
            return AGAIN_S
        if more != self._removing:
            LOGGER.info(
                "pruning entries that are in the archive" if more else "all entries to be pruned have been removed"
            )
        self._removing = more
        return PAUSE_S if more else POLL_PERIOD_S

    def _take(self) -> None:
        """Record the range in the note, or write the reason for a rejection beside it; remove the note."""
        path = self._home / NOTE_NAME
        try:
            with path.open("rb") as file:
                note = msgspec.json.decode(file.read(NOTE_BYTES_MAX), type=PruneNote)
            self._authorise(note)
        except (BrokenInvariant, msgspec.MsgspecError, UnicodeError, ValueError, OSError) as error:
            LOGGER.error("the pruning request %s is rejected: %s", path, error)
            with suppress(OSError):
                replace_private(self._home / REFUSED_NAME, f"{error}\n".encode())
        else:
            LOGGER.warning("entries before %d will be removed from the ledger; they are in the archive", note.below)
        with suppress(OSError):
            os.unlink(path)
            directories.sync(self._home)
