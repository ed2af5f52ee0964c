"""The committed history for audits, replay and verification: read in short steps, every checksum and digest checked."""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import lmdb

from wal import overlay, records
from wal.environment import Environment
from wal.overlay import Overlay
from wal.records import ChainRow, Damaged, Entry, Gap

__all__ = ["Gap", "Ledger", "LedgerBroken", "LedgerEntry", "Verified"]

STEP_MAX_ENTRIES: Final = 256
STEP_MAX_BYTES: Final = 8 << 20
"""What one read transaction looks at: LMDB cannot reuse pages while one is open, so none waits for its caller."""


class LedgerEntry(NamedTuple):
    """A committed entry, with the digest of the ledger up to and with it."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here
    term: int
    data: bytes
    digest: bytes


class Verified(NamedTuple):
    """What `Ledger.verify` found: how many entries, from where to where, the last digest, and what is not held here."""

    entries: int
    first_index: int
    last_index: int
    digest: bytes
    gaps: tuple[Gap, ...]


class LedgerBroken(Exception):
    """The history is not what was once agreed, from `index` on; `sentence` says how that shows."""

    def __init__(self, index: int, sentence: str) -> None:
        super().__init__(f"the ledger is broken at entry {index}: {sentence}")
        self.index = index
        self.sentence = sentence


class Ledger:
    """Reads the ledger of an Environment, live or read-only from another process.

    In the process of a live journal it sees what LMDB was given: all that was applied after `flush_hints`. From another
    process it sees what was synced, in LMDB and in the sync log, whether the replica runs or not. May be used in other
    threads than the journal's. Besides what it says itself, every method raises RecoveryRefused for what would be
    refused at a start, and StorageFailed.
    """

    def __init__(self, env: Environment) -> None:
        self._env = env

    @property
    def first_index(self) -> int:
        """First entry held; the one after `applied_index` if none is."""
        over = self._overlay()
        with self._env.read() as transaction:
            cursor = transaction.cursor(self._env.table(records.ENTRIES))
            try:
                stored = records.key_index(cursor.key()) if cursor.first() else over.marks.applied_index + 1
            except Damaged as error:
                raise LedgerBroken(0, str(error)) from error
        return min([stored, over.marks.applied_index + 1, *over.entries])

    @property
    def applied_index(self) -> int:
        """Last entry of the ledger; 0 when it is empty."""
        return self._overlay().marks.applied_index

    @property
    def applied_revision(self) -> int:
        """Revision after the entry at `applied_index`."""
        return self._overlay().marks.applied_revision

    @property
    def applied_digest(self) -> bytes:
        """Digest of the whole ledger."""
        return self._overlay().marks.applied_digest

    def gaps(self) -> tuple[Gap, ...]:
        """What this replica does not hold, because a snapshot was installed instead."""
        with self._env.read() as transaction:
            return self._gaps(transaction)

    def read(self, first: int, *, limit: int) -> Iterator[LedgerEntry]:
        """Up to `limit` entries from `first` on, in order; gaps are passed over. LedgerBroken at the first damage.

        What is applied after the first one was asked for is not among them.
        """
        over = self._overlay()
        step = self._step(over, first, min(limit, STEP_MAX_ENTRIES))
        while step:
            yield from step
            limit -= len(step)
            step = self._step(over, step[-1].index + 1, min(limit, STEP_MAX_ENTRIES))

    def index_of_revision(self, revision: int) -> int:
        """The entry that settled `revision`. LookupError, naming what is held, before or after it or inside a gap."""
        over = self._overlay()
        marks = over.marks
        with self._env.read() as transaction:
            gaps = self._gaps(transaction)
            if not 0 < revision <= marks.applied_revision:
                raise LookupError(f"no revision {revision}: the ledger holds {_held(over, gaps)}")
            for gap in gaps:
                if gap.revision_before < revision <= gap.revision_after:
                    raise LookupError(f"revision {revision} is not held here: the ledger holds {_held(over, gaps)}")
            if revision > over.stored_revision:
                return over.revisions[bisect_left(over.revisions, (revision, 0))][1]
            cursor = transaction.cursor(self._env.table(records.REVISIONS))
            if not cursor.set_range(records.index_key(revision)):
                raise LedgerBroken(marks.applied_index, f"no entry is recorded for revision {revision}")
            key, value = cursor.item()
            try:
                return records.unpack_number(key, value)
            except Damaged as error:
                raise LedgerBroken(marks.applied_index, f"the row of revision {revision}: {error}") from error

    def verify(self, *, progress: Callable[[int, int], None] | None = None) -> Verified:
        """Check every entry held up to the present `applied_index`: checksums, order, chain, and the last digest.

        `progress(done index, last index)` is called now and then. LedgerBroken at the first damage.
        """
        over = self._overlay()
        marks, gaps = over.marks, self.gaps()
        count, following, digest, first = 0, 1, records.GENESIS, 0
        while following <= marks.applied_index:
            step = self._step(over, following, STEP_MAX_ENTRIES)
            if not step:
                break
            first = first or step[0].index
            count += len(step)
            following, digest = step[-1].index + 1, step[-1].digest
            if progress is not None:
                progress(step[-1].index, marks.applied_index)
        if gaps and gaps[-1].last_index == marks.applied_index:
            with self._env.read() as transaction:
                digest = self._chain_row(over, transaction, marks.applied_index).digest
            following = marks.applied_index + 1
        if following != marks.applied_index + 1:
            raise LedgerBroken(following, f"it is missing; {marks.applied_index} is applied")
        if digest != marks.applied_digest:
            raise LedgerBroken(marks.applied_index, "its digest is not the one that was recorded as applied")
        return Verified(count, first or marks.applied_index + 1, marks.applied_index, digest, gaps)

    def rows_before(self, first: int, last: int) -> list[ChainRow]:
        """Digest and revision before each of the held entries `first` to `last`. LedgerBroken if one is missing."""
        over = self._overlay()
        with self._env.read() as transaction:
            return [self._chain_row(over, transaction, index - 1) for index in range(first, last + 1)]

    def _overlay(self) -> Overlay:
        return overlay.read(self._env)

    def _step(self, over: Overlay, first: int, limit: int) -> list[LedgerEntry]:
        found: list[LedgerEntry] = []
        size_bytes, following = 0, max(first, 1)
        with self._env.read() as transaction:
            gaps = {gap.first_index: gap for gap in self._gaps(transaction)}
            for gap in gaps.values():
                if gap.first_index <= following <= gap.last_index:
                    following = gap.last_index + 1
            applied_index = over.marks.applied_index
            digest = self._chain_row(over, transaction, following - 1).digest if following <= applied_index else b""
            cursor = transaction.cursor(self._env.table(records.ENTRIES))
            more = cursor.set_range(records.index_key(following))
            while following <= applied_index and len(found) < limit and size_bytes < STEP_MAX_BYTES:
                if following in gaps:
                    following = gaps[following].last_index + 1
                    digest = self._chain_row(over, transaction, following - 1).digest
                    continue
                entry = over.entries.get(following)
                if entry is None:
                    entry = self._entry(following, cursor.item() if more else None)
                digest = records.chained(digest, entry)
                if self._chain_row(over, transaction, following).digest != digest:
                    raise LedgerBroken(following, "it is not the entry that its digest speaks of")
                found.append(LedgerEntry(entry.index, entry.term, entry.data, digest))
                size_bytes += len(entry.data)
                following += 1
                more = cursor.next()
        return found

    def _entry(self, index: int, item: tuple[bytes, bytes] | None) -> Entry:
        if item is None or item[0] != records.index_key(index):
            raise LedgerBroken(index, "it is missing")
        try:
            return records.unpack_entry(*item)
        except Damaged as error:
            raise LedgerBroken(index, str(error)) from error

    def _chain_row(self, over: Overlay, transaction: "lmdb.Transaction[bytes]", index: int) -> ChainRow:
        if index == 0:
            return ChainRow(records.GENESIS, 0)
        if index in over.chain:
            return over.chain[index]
        key = records.index_key(index)
        try:
            return records.unpack_chain(key, transaction.get(key, b"", db=self._env.table(records.CHAIN)))
        except Damaged as error:
            raise LedgerBroken(index, f"its digest: {error}") from error

    def _gaps(self, transaction: "lmdb.Transaction[bytes]") -> tuple[Gap, ...]:
        try:
            rows = transaction.cursor(self._env.table(records.GAPS))
            return tuple(records.unpack_gap(key, value) for key, value in rows)
        except Damaged as error:
            raise LedgerBroken(0, f"the table of gaps: {error}") from error


def _held(over: Overlay, gaps: tuple[Gap, ...]) -> str:
    """The ranges of revisions that are held, in words."""
    ranges, start = [], 1
    for gap in gaps:
        if start <= gap.revision_before:
            ranges.append(f"{start} to {gap.revision_before}")
        start = gap.revision_after + 1
    last = over.marks.applied_revision
    if start <= last:
        ranges.append(f"{start} to {last}")
    return " and ".join(ranges) or "none"
