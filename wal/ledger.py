"""The committed history for audits, replay and verification: read in short steps, every checksum and digest checked."""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import lmdb

from wal import read_view, records
from wal.environment import Environment
from wal.read_view import ReadView
from wal.records import ChainRow, Damaged, Entry, Gap

STEP_MAX_ENTRIES: Final = 256
STEP_MAX_BYTES: Final = 8 << 20
"""What one read transaction reads: LMDB cannot reuse pages while one is open, so none waits for its caller."""


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


class _Scan(NamedTuple):
    """What the ledger was at one moment: all that later transactions read is read under these marks."""

    view: ReadView
    gaps: tuple[Gap, ...]

    def after_gaps(self, index: int) -> int:
        """The first index from this one on that lies in no gap."""
        for gap in self.gaps:
            if gap.first_index <= index <= gap.last_index:
                index = gap.last_index + 1
        return index


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

    Each call reads the ledger as it is then. What several calls answer, of a replica that goes on, belongs
    together only if they are made on what `as_of_now` returned.
    """

    def __init__(self, env: Environment) -> None:
        self._env = env
        self._seen: _Scan | None = None

    def as_of_now(self) -> "Ledger":
        """The ledger up to what is applied now, whatever is applied, installed or fetched later; itself if it is one.

        It reads the marks and the sync log this once, and holds no transaction between two calls: entries are
        never changed once they are applied, so they are read when they are asked for.
        """
        if self._seen is not None:
            return self
        ledger = Ledger(self._env)
        ledger._seen = self._scan()
        return ledger

    @property
    def first_index(self) -> int:
        """First entry held; the one after `applied_index` if none is."""
        scan = self._scan()
        view = scan.view
        with self._env.read() as transaction:
            cursor = transaction.cursor(self._env.table(records.ENTRIES))
            try:
                stored = records.key_index(cursor.key()) if cursor.first() else view.marks.applied_index + 1
            except Damaged as error:
                raise LedgerBroken(0, str(error)) from error
        return scan.after_gaps(min([stored, view.marks.applied_index + 1, *view.entries]))

    @property
    def applied_index(self) -> int:
        """Last entry of the ledger; 0 when it is empty."""
        return self._view().marks.applied_index

    @property
    def applied_revision(self) -> int:
        """Revision after the entry at `applied_index`."""
        return self._view().marks.applied_revision

    @property
    def applied_digest(self) -> bytes:
        """Digest of the whole ledger."""
        return self._view().marks.applied_digest

    def gaps(self) -> tuple[Gap, ...]:
        """What this replica does not hold, because a snapshot was installed instead."""
        if self._seen is not None:
            return self._seen.gaps
        with self._env.read() as transaction:
            return self._gaps(transaction)

    def read(self, first: int, *, limit: int) -> Iterator[LedgerEntry]:
        """Up to `limit` entries from `first` on, in order; gaps are passed over. LedgerBroken at the first damage.

        What is applied after the first one was asked for is not among them.
        """
        scan = self._scan()
        step = self._step(scan, first, min(limit, STEP_MAX_ENTRIES))
        while step:
            yield from step
            limit -= len(step)
            step = self._step(scan, step[-1].index + 1, min(limit, STEP_MAX_ENTRIES))

    def index_of_revision(self, revision: int) -> int:
        """The entry that settled `revision`. LookupError, naming what is held, before or after it or inside a gap."""
        scan = self._scan()
        view, marks = scan.view, scan.view.marks
        if not 0 < revision <= marks.applied_revision:
            raise LookupError(f"no revision {revision}: the ledger holds {_held(scan)}")
        for gap in scan.gaps:
            if gap.revision_before < revision <= gap.revision_after:
                raise LookupError(f"revision {revision} is not held here: the ledger holds {_held(scan)}")
        if revision > view.stored_revision:
            return view.revisions[bisect_left(view.revisions, (revision, 0))][1]
        with self._env.read() as transaction:
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
        scan = self._scan()
        view, gaps = scan
        marks = view.marks
        count, following, digest, first = 0, 1, records.GENESIS, 0
        while following <= marks.applied_index:
            step = self._step(scan, following, STEP_MAX_ENTRIES)
            if not step:
                break
            first = first or step[0].index
            count += len(step)
            following, digest = step[-1].index + 1, step[-1].digest
            if progress is not None:
                progress(step[-1].index, marks.applied_index)
        if gaps and gaps[-1].last_index == marks.applied_index:
            with self._env.read() as transaction:
                digest = self._chain_row(view, transaction, marks.applied_index).digest
            following = marks.applied_index + 1
        if following != marks.applied_index + 1:
            raise LedgerBroken(following, f"it is missing; {marks.applied_index} is applied")
        if digest != marks.applied_digest:
            raise LedgerBroken(marks.applied_index, "its digest is not the one that was recorded as applied")
        return Verified(count, first or marks.applied_index + 1, marks.applied_index, digest, gaps)

    def rows_before(self, first: int, last: int) -> list[ChainRow]:
        """Digest and revision before each of the held entries `first` to `last`. LedgerBroken if one is missing."""
        view = self._view()
        with self._env.read() as transaction:
            return [self._chain_row(view, transaction, index - 1) for index in range(first, last + 1)]

    def _view(self) -> ReadView:
        return read_view.read(self._env) if self._seen is None else self._seen.view

    def _scan(self) -> _Scan:
        if self._seen is not None:
            return self._seen
        view = read_view.read(self._env)
        with self._env.read() as transaction:
            gaps = self._gaps(transaction)
        # A snapshot may have been installed since the marks were read; its gap begins behind what was applied then.
        return _Scan(view, tuple(gap for gap in gaps if gap.first_index <= view.marks.applied_index))

    def _step(self, scan: _Scan, first: int, limit: int) -> list[LedgerEntry]:
        found: list[LedgerEntry] = []
        view, gaps = scan.view, {gap.first_index: gap for gap in scan.gaps}
        size_bytes, following = 0, scan.after_gaps(max(first, 1))
        with self._env.read() as transaction:
            applied_index = view.marks.applied_index
            digest = self._chain_row(view, transaction, following - 1).digest if following <= applied_index else b""
            cursor = transaction.cursor(self._env.table(records.ENTRIES))
            more = cursor.set_range(records.index_key(following))
            while following <= applied_index and len(found) < limit and size_bytes < STEP_MAX_BYTES:
                if following in gaps:
                    following = gaps[following].last_index + 1
                    digest = self._chain_row(view, transaction, following - 1).digest
                    continue
                entry = view.entries.get(following)
                if entry is None:
                    entry = self._entry(following, cursor.item() if more else None)
                digest = records.chained(digest, entry)
                if self._chain_row(view, transaction, following).digest != digest:
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

    def _chain_row(self, view: ReadView, transaction: "lmdb.Transaction[bytes]", index: int) -> ChainRow:
        if index == 0:
            return ChainRow(records.GENESIS, 0)
        if index in view.chain:
            return view.chain[index]
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


def _held(scan: _Scan) -> str:
    """The ranges of revisions that are held, in words."""
    ranges, start = [], 1
    for gap in scan.gaps:
        if start <= gap.revision_before:
            ranges.append(f"{start} to {gap.revision_before}")
        start = gap.revision_after + 1
    last = scan.view.marks.applied_revision
    if start <= last:
        ranges.append(f"{start} to {last}")
    return " and ".join(ranges) or "none"
