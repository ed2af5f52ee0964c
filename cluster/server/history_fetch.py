"""Fetching the history that this replica was spared: a snapshot took its place, and the ledger has a gap there.

In the background, from any peer that holds it, newest first, a megabyte at a time: whoever asks this replica for the
history of a job gets an answer again, and every member can prove all of it. Nothing that a peer says is believed: each
entry is proven by the digest behind it (`wal.ledger`), and the entry itself says which revisions it settled.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import NoReturn

from cluster.eventloop import Background
from cluster.schemas import HandedView
from wal import (
    BrokenInvariant,
    CodecError,
    Entry,
    Gap,
    Handed,
    Ledger,
    LedgerBroken,
    NotThisHistory,
    StorageFailed,
    revision_after,
)

LOGGER = logging.getLogger(__name__)

POLL_PERIOD_S = 15.0
"""How often a replica polls its ledger for a gap, and asks again where nobody could help, seconds."""

PAUSE_S = 0.05
"""Between two steps, seconds: at 1 MiB a step, 20 MB a second at most, and the disk is free most of the time."""

JOURNAL_FILL_MAX = 0.5
"""Share of the journal's room beyond which no history is fetched: the other half is for what is still to come."""

Ask = Callable[[str, int], Awaitable[Iterable[HandedView]]]
"""Returns a peer's entries that end with an index, the newest first; raises what it likes when there are none."""

Fill = Callable[[Gap, Sequence[Handed]], Gap | None]
"""Writes entries into the ledger; returns what is left of the gap (`wal.ledger.fill`)."""


class Backfill(Background):
    """Fills the gaps of one replica's ledger."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        fill: Fill,
        journal_fill: Callable[[], float],
        peers: Callable[[], tuple[str, ...]],
        ask: Ask,
        fail: Callable[[BaseException], NoReturn],
    ) -> None:
        """`peers` names the other members now; `fail` stops the replica."""
        super().__init__(fail)
        self._ledger = ledger
        self._fill = fill
        self._journal_fill = journal_fill
        self._peers = peers
        self._ask = ask
        self._began = 0
        """The last entry of the gap that is being filled; 0: none is."""

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(PAUSE_S if await self.step() else POLL_PERIOD_S)

    async def step(self) -> bool:
        """Fill a part of the newest gap; return whether to go on at once.

        BrokenInvariant where this replica's own history turns out not to be the cluster's.
        """
        gaps = self._ledger.gaps()
        if not gaps or self._journal_fill() > JOURNAL_FILL_MAX:
            return False
        gap = gaps[-1]
        for peer in self._peers():
            try:
                entries = await self._ask(peer, gap.last_index)
                handed = _checked(gap, entries, gap.revision_after)
                if not handed:
                    continue
                left = self._fill(gap, handed)
            except (BrokenInvariant, StorageFailed, LedgerBroken):
                raise
            except NotThisHistory as error:
                LOGGER.error("what %s says of entry %d and before is not the history: %s", peer, gap.last_index, error)
                continue
            except Exception as error:  # whoever cannot be asked now, or does not hold it either
                LOGGER.debug("%s does not hand entry %d over: %s", peer, gap.last_index, error)
                continue
            self._log(gap, left, peer)
            return True
        return False

    def _log(self, gap: Gap, left: Gap | None, peer: str) -> None:
        if not self._began:
            self._began = gap.last_index
            LOGGER.info("entries %d to %d, missed by a snapshot, are fetched from %s", *gap[:2], peer)
        if left is None:
            LOGGER.info("entries %d to %d, missed by a snapshot, are here", gap.first_index, self._began)
            self._began = 0


def _checked(gap: Gap, entries: Iterable[HandedView], revision: int) -> list[Handed]:
    """Return what belongs to the gap. NotThisHistory where an entry did not settle the revisions that are claimed."""
    found = []
    for view in entries:
        if view.index < gap.first_index:
            break
        try:
            settled = revision_after(view.data, view.revision_before)
            digest = bytes.fromhex(view.digest_before)
        except (CodecError, ValueError) as error:
            raise NotThisHistory(f"entry {view.index}: {error}") from error
        if settled != revision:
            raise NotThisHistory(
                f"entry {view.index} leads from revision {view.revision_before} to {settled}, not to {revision}"
            )
        revision = view.revision_before
        found.append(Handed(Entry(view.index, view.term, view.data), digest, revision))
    return found
