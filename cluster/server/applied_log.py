"""The entries that were applied, in order: the newest in memory, all others from the ledger.

Histories, the event stream and questions about the past read here. The ledger on disk may lag behind what is applied by
the marks that the journal writes lazily, so the newest entries are kept in memory, within a bound.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator

import msgspec

from replica.messages import Batch
from replica.values import Revision
from wal import Configuration, Journal, Kind, Ledger, decode_batch, decode_configuration, is_configuration, kind_of

RECENT_ENTRIES_MAX = 4096
"""Applied entries kept in memory, count: what subscribers of events are behind by, normally less than ten."""

RECENT_BYTES_MAX = 16 * 1024 * 1024
"""Bytes of those entries: sixteen of the largest."""

READ_ENTRIES = 64
"""Entries read from the ledger at a time: at most 64 MiB, and rarely more than one."""


class Applied(msgspec.Struct, frozen=True):
    """One applied entry. `revision` is that after it; `void`: the base check refused it; `batch`: None if it holds
    none."""

    index: int
    term: int
    digest: bytes
    base: Revision
    revision: Revision
    batch: Batch | None
    void: bool
    size_bytes: int
    configuration: Configuration | None = None
    """Who is a member from this entry on; None if it does not say that."""


def read_batch(data: bytes) -> Batch | None:
    """Return the batch in an entry's data, None for an entry of consensus' own; CodecError for what is unknown."""
    return decode_batch(data) if kind_of(data) is Kind.BATCH else None


def read_configuration(data: bytes) -> Configuration | None:
    """Return the configuration in an entry's data; None for any other entry."""
    return decode_configuration(data) if is_configuration(data) else None


class AppliedLog:
    """Reads applied entries by index or by revision, and tells when there are more."""

    def __init__(self, journal: Journal, ledger: Ledger, *, index: int, revision: Revision) -> None:
        """Begin after `index`, whose state has `revision`: what came before is in the ledger."""
        self._journal = journal
        self._ledger = ledger
        self._recent: deque[Applied] = deque()
        self._recent_bytes = 0
        self._index = index
        self._revision = revision
        self._more: set[asyncio.Future[None]] = set()

    @property
    def last_index(self) -> int:
        """Index of the last applied entry."""
        return self._index

    @property
    def first_index(self) -> int:
        """Index of the first entry that this replica holds of the ledger."""
        return self._ledger.first_index

    def append(self, applied: Applied) -> None:
        """Note an entry that was just applied, and wake who waits for more."""
        self._recent.append(applied)
        self._recent_bytes += applied.size_bytes
        while len(self._recent) > RECENT_ENTRIES_MAX or self._recent_bytes > RECENT_BYTES_MAX:
            self._recent_bytes -= self._recent.popleft().size_bytes
        self._index, self._revision = applied.index, applied.revision
        self._wake()

    def reset(self, index: int, revision: Revision) -> None:
        """Continue after an installed snapshot: this replica does not hold the entries in between."""
        self._recent.clear()
        self._recent_bytes = 0
        self._index, self._revision = index, revision
        self._wake()

    async def more(self, index: int, timeout_s: float) -> bool:
        """Wait until an entry after `index` is applied; False after `timeout_s` seconds without one."""
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

    def read(self, first: int, *, limit: int) -> Iterator[Applied]:
        """Give at most `limit` entries from index `first` on; LookupError names the range where `first` is not held."""
        given = 0
        while given < limit and first <= self._index:
            chunk = self._chunk(first, min(READ_ENTRIES, limit - given))
            if not chunk:
                return
            yield from chunk
            given += len(chunk)
            first = chunk[-1].index + 1

    def index_of(self, revision: int) -> int:
        """Return the index of the entry that settled `revision`; LookupError names the range that is held."""
        if revision > self._revision:
            raise LookupError(f"revision {revision} is not settled here yet; the last one is {self._revision}")
        if self._recent and revision > self._recent[0].base:
            position = bisect_left(self._recent, revision, key=_revision_of)
            return self._recent[position].index
        self._journal.flush_hints()
        return self._ledger.index_of_revision(revision)

    def digest_at(self, index: int) -> bytes | None:
        """Return the digest of the ledger up to `index`; None if this replica does not hold it."""
        return self._journal.digest_at(index)

    def _chunk(self, first: int, limit: int) -> list[Applied]:
        if self._recent and first >= self._recent[0].index:
            start = first - self._recent[0].index
            return [self._recent[position] for position in range(start, min(start + limit, len(self._recent)))]
        if self._ledger.applied_index < min(self._index, first + limit):
            self._journal.flush_hints()
        stop = self._recent[0].index if self._recent else self._index + 1
        chunk: list[Applied] = []
        revision: Revision | None = None
        following = first
        for entry in self._ledger.read(first, limit=min(limit, stop - first)):
            batch = read_batch(entry.data)
            if revision is None or entry.index != following:
                # After a gap, which the ledger passes over, it is not what it was: a snapshot came in between.
                revision = self._revision_before(entry.index)
            following = entry.index + 1
            void = batch is not None and batch.base != revision
            base = revision
            if batch is not None and not void:
                revision = Revision(revision + len(batch.entries))
            applied = Applied(entry.index, entry.term, entry.digest, base, revision, batch, void, len(entry.data))
            configuration = read_configuration(entry.data)
            if configuration is not None:
                applied = msgspec.structs.replace(applied, configuration=configuration)
            chunk.append(applied)
        return chunk

    def _revision_before(self, index: int) -> Revision:
        """Return the revision before the entry at `index`: the base of the next batch that was not void."""
        for gap in self._ledger.gaps():
            if gap.last_index == index - 1:
                return Revision(gap.revision_after)
        for entry in self._ledger.read(index, limit=self._index):
            for gap in self._ledger.gaps():
                if gap.last_index == entry.index - 1 and entry.index > index:
                    return Revision(gap.revision_before)
            batch = read_batch(entry.data)
            if batch is not None and self._settled_by(batch.base + 1) == entry.index:
                return batch.base
        return Revision(self._ledger.applied_revision)

    def _settled_by(self, revision: int) -> int | None:
        try:
            return self._ledger.index_of_revision(revision)
        except LookupError:
            return None

    def _wake(self) -> None:
        futures, self._more = self._more, set()
        for future in futures:
            if not future.done():
                future.set_result(None)


def _revision_of(applied: Applied) -> int:
    return applied.revision
