"""Applied entries in order: the newest from memory, all others from the ledger.

Histories, the event stream and queries of past states use this log. The ledger on disk may lag because the journal's
marks are written lazily, so the newest entries are kept in memory, within a bound. A thread reads older entries, a few
at a time, and they are decoded in slices, so that reading the whole ledger never blocks the loop.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import deque
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, Protocol

import msgspec

from forebay.cluster.system.eventloop import SlicedWork
from forebay.replica.messages import Batch
from forebay.replica.state import State
from forebay.replica.values import Revision
from forebay.wal import (
    Configuration,
    EntryKind,
    Journal,
    Ledger,
    LedgerEntry,
    decode_batch,
    decode_configuration,
    is_configuration,
    kind_of,
)

RECENT_ENTRIES_MAX = 4096
"""Maximum number of applied entries in memory. Event subscribers normally lag by less than ten."""

RECENT_BYTES_MAX = 16 * 1024 * 1024
"""Maximum size of the entries in memory: sixteen of the largest."""

READ_ENTRIES = 256
READ_BYTES = 256 * 1024
"""Limits of one read from the ledger: entries, and their bytes without the last entry, which has at most 1 MiB."""


class AppliedEntry(msgspec.Struct, frozen=True):
    """Applied entry. `revision` is the state's after the entry; `void` means that the base check rejected the entry."""

    index: int
    term: int
    digest: bytes
    base: Revision
    revision: Revision
    batch: Batch | None
    """None if the entry is no batch."""
    void: bool
    size_bytes: int
    configuration: Configuration | None = None
    """Membership from this entry on; None if the entry does not change it."""


class Transition(NamedTuple):
    """Entry that was just applied, and the states before and after it."""

    before: State
    after: State
    entry: AppliedEntry
    data: bytes = b""
    """Data of the entry in the ledger."""

    @property
    def batch(self) -> Batch | None:
        """Settled batch; None for an entry that is no batch or is void."""
        return None if self.entry.void else self.entry.batch


class Observer(Protocol):
    """Part of the controller that follows applied entries. It cannot reject an entry."""

    def applied(self, transition: Transition, /) -> None:
        """Handle an entry that was just applied."""


def read_batch(data: bytes) -> Batch | None:
    """Return the batch in an entry's data, None for an entry of consensus itself.

    Raises:
        CodecError: The data is of an unknown kind or invalid.
    """
    return decode_batch(data) if kind_of(data) is EntryKind.BATCH else None


def read_configuration(data: bytes) -> Configuration | None:
    """Return the configuration in an entry's data; None for other entries."""
    return decode_configuration(data) if is_configuration(data) else None


class AppliedLog:
    """Reads applied entries by index or revision, and notifies waiters of new ones."""

    def __init__(self, journal: Journal, ledger: Ledger, *, index: int, revision: Revision) -> None:
        """Start after entry `index`, whose state has `revision`; earlier entries are in the ledger."""
        self._journal = journal
        self._ledger = ledger
        self._recent: deque[AppliedEntry] = deque()
        self._recent_bytes = 0
        self._index = index
        self._revision = revision
        self._more: set[asyncio.Future[None]] = set()
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="ledger-reader")

    @property
    def last_index(self) -> int:
        """Index of the last applied entry."""
        return self._index

    @property
    def first_index(self) -> int:
        """Index of the first entry in this replica's ledger."""
        return self._ledger.first_index

    def applied(self, transition: Transition) -> None:
        """Add an entry that was just applied, and wake waiters."""
        entry = transition.entry
        self._recent.append(entry)
        self._recent_bytes += entry.size_bytes
        while len(self._recent) > RECENT_ENTRIES_MAX or self._recent_bytes > RECENT_BYTES_MAX:
            self._recent_bytes -= self._recent.popleft().size_bytes
        self._index, self._revision = entry.index, entry.revision
        self._wake()

    def reset(self, index: int, revision: Revision) -> None:
        """Continue after an installed snapshot: this replica lacks the entries in between."""
        self._recent.clear()
        self._recent_bytes = 0
        self._index, self._revision = index, revision
        self._wake()

    async def more(self, index: int, timeout_s: float) -> bool:
        """Wait until an entry after `index` is applied; return False after `timeout_s` seconds without one."""
        if self._index > index:
            return True
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._more.add(future)
        try:
            async with asyncio.timeout(timeout_s):
                await future
        except TimeoutError:
            return False
        finally:
            self._more.discard(future)
        return True

    def recent(self, first: int) -> list[AppliedEntry] | None:
        """Return the entries from index `first` on if all are in memory, otherwise None."""
        if first > self._index:
            return []
        if not self._recent or first < self._recent[0].index:
            return None
        skipped = first - self._recent[0].index
        return [self._recent[position] for position in range(skipped, len(self._recent))]

    async def walk(self, first: int, last: int, work: SlicedWork) -> AsyncIterator[AppliedEntry]:
        """Yield the entries from index `first` to `last`, or to the last applied entry; gaps are skipped.

        Decoding uses slices of `work`; the caller uses slices for its own processing.
        """
        while first <= min(last, self._index):
            if self._recent and first >= self._recent[0].index:
                applied = self._recent[first - self._recent[0].index]
                first = applied.index + 1
                yield applied
                continue
            stop = self._recent[0].index if self._recent else self._index + 1
            entries_max = min(READ_ENTRIES, last + 1 - first, stop - first)
            stored = await self._stored(first, entries_max, READ_BYTES)
            if not stored:
                return
            for entry in stored:
                await work.take(0, size_bytes=len(entry.data))
                first = entry.index + 1
                yield _applied(entry)

    def index_of(self, revision: int) -> int:
        """Return the index of the entry that settled `revision`.

        Raises:
            LookupError: This replica has not settled the revision, or lacks it; the message names the range it has.
        """
        if revision > self._revision:
            raise LookupError(f"revision {revision} is not settled here yet; the last one is {self._revision}")
        if self._recent and revision > self._recent[0].base:
            position = bisect_left(self._recent, revision, key=_revision_of)
            return self._recent[position].index
        if revision > self._ledger.applied_revision:
            self._journal.flush_hints()
        return self._ledger.index_of_revision(revision)

    async def _stored(self, first: int, entries_max: int, bytes_max: int) -> list[LedgerEntry]:
        """Read from the ledger in a single thread, so that only one transaction is open at a time."""
        if self._ledger.applied_index < first:
            self._journal.flush_hints()
        read = partial(self._ledger.read_some, first, entries_max=entries_max, bytes_max=bytes_max)
        return await asyncio.get_running_loop().run_in_executor(self._reader, read)

    def close(self) -> None:
        """Stop reading; a pending read has ended on return, so that the files may be closed."""
        self._reader.shutdown(cancel_futures=True)

    def digest_at(self, index: int) -> bytes | None:
        """Return the digest of the ledger up to `index`; None if this replica does not hold it."""
        return self._journal.digest_at(index)

    def _wake(self) -> None:
        futures, self._more = self._more, set()
        for future in futures:
            if not future.done():
                future.set_result(None)


def settled_at(applied: AppliedEntry, position: int) -> Revision:
    """Return the revision settled by the command at `position` (from 0) of an applied batch."""
    return Revision(applied.base + position + 1)


def _revision_of(applied: AppliedEntry) -> int:
    return applied.revision


def _applied(entry: LedgerEntry) -> AppliedEntry:
    """Convert a ledger entry."""
    batch = read_batch(entry.data)
    base = Revision(entry.base)
    void = batch is not None and batch.base != base
    return AppliedEntry(
        *(entry.index, entry.term, entry.digest, base, Revision(entry.revision)),
        *(batch, void, len(entry.data), read_configuration(entry.data)),
    )
