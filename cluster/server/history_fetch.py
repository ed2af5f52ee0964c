"""Fetching of missing history: ranges that a snapshot replaced, or that are damaged in storage.

The fetch runs in the background, from any peer that has the entries, newest first, a megabyte at a time. Afterwards
this replica can answer queries about old jobs again, and every member can prove the whole history. Peers are not
trusted: the digest after an entry proves the entry (`wal.ledger`), and the entry itself determines the revisions that
it settled.

The whole ledger is read and checked continuously and slowly, so that damage is found while a peer still has the
original. (A start checks the newest entries only.)
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, NoReturn

from forebay.cluster.client import ApiError
from forebay.cluster.schemas import HandedView
from forebay.cluster.system import Clock
from forebay.cluster.system.eventloop import Background
from forebay.wal import (
    DAMAGED_MAX,
    BrokenInvariant,
    CodecError,
    Entry,
    Gap,
    HistoryEntry,
    Ledger,
    LedgerBroken,
    NotThisHistory,
    StorageFailed,
    counted_revision_after,
    revision_after,
)

LOGGER = logging.getLogger(__name__)

POLL_PERIOD_S = 15.0
"""Interval of checks for a gap, and of repeated requests without success, seconds."""

PAUSE_S = 0.05
"""Pause between two steps, seconds: at 1 MiB a step, at most 20 MB a second, so that the disk is mostly idle."""

PRUNED: Final = "pruned"
"""Error code of a peer that has pruned the requested range."""

PRUNED_AGAIN_S = 600.0
"""Pause before a range that all peers have pruned is requested again, seconds."""

JOURNAL_FILL_MAX = 0.5
"""Share of the journal's space above which no history is fetched: the rest is for new entries."""

SCRUB_ENTRIES = 32
SCRUB_BYTES = 64 * 1024
"""Limits of one check, in a thread: entries, and their bytes without the last entry. Meanwhile the event loop may wait
for the interpreter: less than a millisecond, or 2.5 ms with the largest entry.
"""

SCRUB_PAUSE_S = 0.05
"""Pause between two checks, seconds: a million small entries take half an hour and a hundredth of a processor."""

SCRUB_BYTES_PER_S = 2 << 20
"""Maximum rate for large entries, so that other users of the disk are not slowed down."""

SCRUB_ROUND_S = 600.0
"""Pause between two rounds, seconds."""

SCRUB_AGAIN_S = 60.0
"""Pause between two rounds if damage could not be repaired, seconds."""

Ask = Callable[[str, int], Awaitable[Iterable[HandedView]]]
"""Returns a peer's entries up to an index, newest first; any exception means that the peer has none."""

Fill = Callable[[Gap, Sequence[HistoryEntry]], Gap | None]
"""Writes entries into the ledger; returns the remaining gap (`wal.ledger.fill`)."""


Mend = Callable[[Gap, Sequence[HistoryEntry]], Gap | None]
"""Replaces damaged entries; returns the remaining range (`wal.ledger.replace_damaged`)."""


class ScrubResults:
    """Results of the scrub, the continuous check of one replica's ledger."""

    def __init__(self) -> None:
        self.verified_index = 0
        """Last entry checked in this round."""
        self.round_ended_s: float | None = None
        """End of the last complete round, by the monotonic clock."""
        self.damaged: dict[int, int] = {}
        """Damaged ranges that could not be repaired: first index -> last index."""
        self.mended = 0
        """Number of repaired entries, including entries of which only derived rows were damaged."""

    @property
    def damaged_entries(self) -> int:
        """Number of entries in damaged ranges."""
        return sum(last - first + 1 for first, last in self.damaged.items())


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
        """Initialize. `peers` returns the other members; `fail` stops the replica."""
        super().__init__(fail)
        self._ledger = ledger
        self._fill = fill
        self._journal_fill = journal_fill
        self._peers = peers
        self._ask = ask
        self._began = 0
        """Last entry of the gap being filled; 0 for none."""
        self._hopeless: tuple[Gap, tuple[str, ...], float] | None = None
        """Gap that all peers have pruned, the peers, and the time of their answers."""

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(PAUSE_S if await self.step() else POLL_PERIOD_S)

    async def step(self) -> bool:
        """Fill a part of the newest gap; return whether to continue at once.

        Raises:
            BrokenInvariant: This replica's own history differs from the cluster's.
        """
        missing, peers = self._ledger.missing(), self._peers()
        if not missing or self._journal_fill() > JOURNAL_FILL_MAX or self._is_hopeless(missing[-1], peers):
            return False
        # The pruned part of the gap is not fetched again.
        gap = next(gap for gap in self._ledger.gaps() if gap.last_index == missing[-1].last_index)
        pruned_by: list[str] = []
        for peer in peers:
            try:
                entries = await self._ask(peer, gap.last_index)
                handed = _checked(missing[-1], entries, gap.revision_after)
                if not handed:
                    continue
                left = self._fill(gap, handed)
            except (BrokenInvariant, StorageFailed, LedgerBroken):
                raise
            except ApiError as error:
                if error.code == PRUNED:
                    pruned_by.append(peer)
                LOGGER.debug("%s did not return entry %d: %s", peer, gap.last_index, error)
                continue
            except NotThisHistory as error:
                LOGGER.error("%s returned another history up to entry %d: %s", peer, gap.last_index, error)
                continue
            except Exception as error:  # the peer cannot be asked now, or lacks the entry too
                LOGGER.debug("%s did not return entry %d: %s", peer, gap.last_index, error)
                continue
            self._log(gap, left, peer)
            return True
        if pruned_by and len(pruned_by) == len(peers):
            self._given_up(missing[-1], peers)
        return False

    def _is_hopeless(self, gap: Gap, peers: tuple[str, ...]) -> bool:
        """Return whether these peers reported recently that they have pruned the missing range."""
        hopeless = self._hopeless
        if hopeless is None or hopeless[:2] != (gap, peers):
            return False
        return asyncio.get_running_loop().time() - hopeless[2] < PRUNED_AGAIN_S

    def _given_up(self, gap: Gap, peers: tuple[str, ...]) -> None:
        if self._hopeless is None or self._hopeless[:2] != (gap, peers):
            LOGGER.warning(
                "entries %d to %d were pruned by all peers that answered; they are in the archive: `forebay audit "
                "restore` restores the parts that proofs need",
                *gap[:2],
            )
        self._hopeless = gap, peers, asyncio.get_running_loop().time()

    def _log(self, gap: Gap, left: Gap | None, peer: str) -> None:
        if not self._began:
            self._began = gap.last_index
            LOGGER.info("entries %d to %d, which a snapshot skipped, are fetched from %s", *gap[:2], peer)
        if left is None:
            LOGGER.info("entries %d to %d, which a snapshot skipped, are complete", gap.first_index, self._began)
            self._began = 0


def _checked(gap: Gap, entries: Iterable[HandedView], revision: int) -> list[HistoryEntry]:
    """Return the entries of the gap.

    Raises:
        NotThisHistory: An entry did not settle the claimed revisions.
    """
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
        found.append(HistoryEntry(Entry(view.index, view.term, view.data, view.seal), digest, revision))
    return found


class Scrub(Background):
    """Reads and checks one replica's ledger continuously, and repairs damage."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        found: ScrubResults,
        mend: Mend,
        peers: Callable[[], tuple[str, ...]],
        ask: Ask,
        clock: Clock,
        fail: Callable[[BaseException], NoReturn],
    ) -> None:
        """Initialize. `found` receives the results; other arguments as for `Backfill`."""
        super().__init__(fail)
        self._ledger = ledger
        self._found = found
        self._mend = mend
        self._peers = peers
        self._ask = ask
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, "scrub")
        self._following = 1
        """Next entry to check."""
        self._singly_to = 0
        """Last entry of a range that is checked one by one, because an entry in it is damaged."""
        self._mended_at = 0
        """Last entry repaired in this round."""

    async def stop(self) -> None:
        """Cancel the scrub, and wait until it no longer reads the ledger."""
        await super().stop()
        self._thread.shutdown()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(await self.step())

    async def step(self) -> float:
        """Check some entries; return the pause until the next call, seconds.

        Raises:
            BrokenInvariant: This replica's own history differs from the cluster's.
        """
        first, is_single = self._following, self._following <= self._singly_to
        check = partial(
            self._ledger.check_some,
            first,
            entries_max=1 if is_single else SCRUB_ENTRIES,
            bytes_max=SCRUB_BYTES,
            revision_after=counted_revision_after,
        )
        try:
            checked = await asyncio.get_running_loop().run_in_executor(self._thread, check)
        except LedgerBroken as error:
            if first <= error.index and not is_single:
                self._singly_to = error.index
                return 0.0
            return await self._damage(error)
        if checked is None:
            return self._end_round()
        following, size_bytes = checked
        self._following, self._found.verified_index = following, following - 1
        for start in [start for start in self._found.damaged if first <= start < following]:
            del self._found.damaged[start]
        return 0.0 if is_single else max(SCRUB_PAUSE_S, size_bytes / SCRUB_BYTES_PER_S)

    def _end_round(self) -> float:
        self._following, self._singly_to, self._mended_at = 1, 0, 0
        self._found.round_ended_s = self._clock.monotonic_s()
        return SCRUB_AGAIN_S if self._found.damaged else SCRUB_ROUND_S

    async def _damage(self, error: LedgerBroken) -> float:
        """Repair the damaged range at the next entry, or record it and continue after it."""
        first, find = self._following, partial(self._ledger.damaged_from, self._following, counted_revision_after)
        stretch = await asyncio.get_running_loop().run_in_executor(self._thread, find)
        if stretch is not None and self._mended_at != first:
            left: Gap | None = stretch
            while left is not None and (less := await self._mended(left)) != left:
                left = less
            if left is None:
                self._mended_at = first
                self._found.mended += stretch.last_index - first + 1
                LOGGER.warning("%s; entries %d to %d were repaired", error, first, stretch.last_index)
                return 0.0
            stretch = stretch._replace(last_index=left.last_index)
        last = first if stretch is None else stretch.last_index
        if self._found.damaged.get(first) != last:
            LOGGER.error(
                "%s; no peer returned entries %d to %d, and they will be requested again: check that a peer has them "
                "(`forebay audit verify`), or bring this replica back with `forebay cluster replace`",
                error,
                first,
                last,
            )
        self._found.damaged[first] = last
        self._following = last + 1 if stretch is not None else max(first, error.index) + DAMAGED_MAX
        if self._following > self._ledger.applied_index:
            return self._end_round()
        return SCRUB_PAUSE_S

    async def _mended(self, stretch: Gap) -> Gap | None:
        """Repair a damaged range from its own entries if only rows are damaged, else from a peer; return the rest."""
        try:
            return self._mend(stretch, self._ledger.held_in(stretch, counted_revision_after))
        except (LedgerBroken, NotThisHistory, CodecError):
            pass
        for peer in self._peers():
            try:
                handed = _checked(stretch, await self._ask(peer, stretch.last_index), stretch.revision_after)
                if handed:
                    return self._mend(stretch, handed)
            except (BrokenInvariant, StorageFailed):
                raise
            except NotThisHistory as error:
                LOGGER.error("%s returned another history at entry %d: %s", peer, stretch.last_index, error)
            except Exception as error:  # the peer cannot be asked now, or lacks the entry too
                LOGGER.debug("%s did not return entry %d: %s", peer, stretch.last_index, error)
        return stretch
