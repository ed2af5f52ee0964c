"""Pruning of a running replica's ledger: what `forebay audit prune` found that may go, removed a little at a time.

Whoever may write into the replica's directory leaves a note there; nobody else can ask for it. What the note says was
checked against archives, checkpoint and snapshot in a process of its own (`cluster.audit.archive`), which takes a
while; the replica looks again only at what could cost it its own life. The note is taken over into the storage and
removed, so that what is begun is finished whenever the replica is killed.
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

from cluster.system import replace_private
from cluster.system.eventloop import Background
from wal import BrokenInvariant, LedgerBroken, PrunedRange, PrunedSegment
from wal import directory as directories

LOGGER = logging.getLogger(__name__)

NOTE_NAME: Final = "prune"
REFUSED_NAME: Final = "prune.refused"
"""Files beside `wal`: what is to go, and why it was not begun."""

NOTE_BYTES_MAX: Final = 8 << 20
"""Bound of a note: a row of 60 bytes for each segment of the largest archive."""

POLL_PERIOD_S: Final = 2.0
"""How often a replica looks for a note, seconds."""

PAUSE_S: Final = 0.05
"""Between two steps, seconds: 5,000 entries or 20 MB a second at most, and the disk is free most of the time."""

AGAIN_S: Final = 60.0
"""Before it is tried again where the digest that is to stay is damaged, seconds: the scrub mends it meanwhile."""


class PruneNote(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is to go: the entries before `below`, the last of which leads to `digest`, and the segments that have it
    (`wal.PrunedSegment`).
    """

    cluster_id: str
    below: int
    digest: str
    segments: tuple[PrunedSegment, ...]

    @property
    def pruned(self) -> PrunedRange:
        """What is recorded of it."""
        return PrunedRange(self.below, self.segments)


def leave_note(home: Path, note: PruneNote) -> None:
    """Leave a note for the replica of a directory, whole or not at all, durable on return; OSError."""
    with suppress(FileNotFoundError):
        os.unlink(home / REFUSED_NAME)
    replace_private(home / NOTE_NAME, msgspec.json.encode(note))


def answer_to_note(home: Path) -> str | None:
    """Return why a note was refused, nothing where it was taken, None while it waits; OSError."""
    if (home / NOTE_NAME).exists():
        return None
    with suppress(FileNotFoundError):
        return (home / REFUSED_NAME).read_text(encoding="utf-8")
    return ""


class Pruner(Background):
    """Takes notes, and removes what they say."""

    def __init__(
        self,
        home: Path,
        *,
        authorise: Callable[[PruneNote], None],
        prune_some: Callable[[], bool],
        fail: Callable[[BaseException], NoReturn],
    ) -> None:
        """`authorise` records what is to go, or raises BrokenInvariant; `prune_some` removes some of it, and returns
        whether some is left (`wal.prune_some`); `fail` stops the replica.
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
        """Take a note, or remove some; return for how long to rest, seconds. StorageFailed."""
        if (self._home / NOTE_NAME).exists():
            self._take()
        try:
            more = self._prune_some()
        except LedgerBroken as error:
            LOGGER.error("nothing more is pruned until that is mended: %s", error)
            return AGAIN_S
        if more != self._removing:
            LOGGER.info("entries that are in the archive are removed" if more else "what was to be pruned is removed")
        self._removing = more
        return PAUSE_S if more else POLL_PERIOD_S

    def _take(self) -> None:
        """Record what the note says, and remove it; or say beside it why not."""
        path = self._home / NOTE_NAME
        try:
            with path.open("rb") as file:
                note = msgspec.json.decode(file.read(NOTE_BYTES_MAX), type=PruneNote)
            self._authorise(note)
        except (BrokenInvariant, msgspec.MsgspecError, UnicodeError, ValueError, OSError) as error:
            LOGGER.error("nothing is pruned as %s says: %s", path, error)
            with suppress(OSError):
                replace_private(self._home / REFUSED_NAME, f"{error}\n".encode())
        else:
            LOGGER.warning("entries before %d are removed from the ledger: they are in the archive", note.below)
        with suppress(OSError):
            os.unlink(path)
            directories.sync(self._home)
