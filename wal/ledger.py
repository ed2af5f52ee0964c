"""The committed history for audits, replay and verification: read in short steps, every checksum and digest checked."""

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import lmdb

from wal import records
from wal.environment import Environment
from wal.failures import Condition, RecoveryRefused
from wal.records import ChainRow, Damaged, Entry, Gap, Marks

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

    It sees what was synced: what a live journal applied since then appears with its next sync or `flush_hints`. May be
    used in other threads than the journal's.
    """

    def __init__(self, env: Environment) -> None:
        self._env = env

    @property
    def first_index(self) -> int:
        """First entry held; the one after `applied_index` if none is."""
        with self._env.read() as transaction:
            cursor = transaction.cursor(self._env.table(records.ENTRIES))
            applied_index = self._marks(transaction).applied_index
            try:
                stored = records.key_index(cursor.key()) if cursor.first() else applied_index + 1
            except Damaged as error:
                raise LedgerBroken(0, str(error)) from error
            return min(stored, applied_index + 1)

    @property
    def applied_index(self) -> int:
        """Last entry of the ledger; 0 when it is empty."""
        with self._env.read() as transaction:
            return self._marks(transaction).applied_index

    @property
    def applied_revision(self) -> int:
        """Revision after the entry at `applied_index`."""
        with self._env.read() as transaction:
            return self._marks(transaction).applied_revision

    @property
    def applied_digest(self) -> bytes:
        """Digest of the whole ledger."""
        with self._env.read() as transaction:
            return self._marks(transaction).applied_digest

    def gaps(self) -> tuple[Gap, ...]:
        """What this replica does not hold, because a snapshot was installed instead."""
        with self._env.read() as transaction:
            return self._gaps(transaction)

    def read(self, first: int, *, limit: int) -> Iterator[LedgerEntry]:
        """Up to `limit` entries from `first` on, in order; gaps are passed over. LedgerBroken at the first damage."""
        step = self._step(first, min(limit, STEP_MAX_ENTRIES))
        while step:
            yield from step
            limit -= len(step)
            step = self._step(step[-1].index + 1, min(limit, STEP_MAX_ENTRIES))

    def index_of_revision(self, revision: int) -> int:
        """The entry that settled `revision`. LookupError, naming what is held, before or after it or inside a gap."""
        with self._env.read() as transaction:
            marks, gaps = self._marks(transaction), self._gaps(transaction)
            if not 0 < revision <= marks.applied_revision:
                raise LookupError(f"no revision {revision}: the ledger holds {_held(marks, gaps)}")
            for gap in gaps:
                if gap.revision_before < revision <= gap.revision_after:
                    raise LookupError(f"revision {revision} is not held here: the ledger holds {_held(marks, gaps)}")
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
        with self._env.read() as transaction:
            marks, gaps = self._marks(transaction), self._gaps(transaction)
        count, following, digest, first = 0, 1, records.GENESIS, 0
        while following <= marks.applied_index:
            step = self._step(following, min(STEP_MAX_ENTRIES, marks.applied_index - following + 1))
            step = [entry for entry in step if entry.index <= marks.applied_index]
            if not step:
                break
            first = first or step[0].index
            count += len(step)
            following, digest = step[-1].index + 1, step[-1].digest
            if progress is not None:
                progress(step[-1].index, marks.applied_index)
        if gaps and gaps[-1].last_index == marks.applied_index:
            with self._env.read() as transaction:
                digest = self._chain_row(transaction, marks.applied_index).digest
            following = marks.applied_index + 1
        if following != marks.applied_index + 1:
            raise LedgerBroken(following, f"it is missing; {marks.applied_index} is applied")
        if digest != marks.applied_digest:
            raise LedgerBroken(marks.applied_index, "its digest is not the one that was recorded as applied")
        return Verified(count, first or marks.applied_index + 1, marks.applied_index, digest, gaps)

    def _step(self, first: int, limit: int) -> list[LedgerEntry]:
        found: list[LedgerEntry] = []
        size_bytes, following = 0, max(first, 1)
        with self._env.read() as transaction:
            applied_index = self._marks(transaction).applied_index
            gaps = {gap.first_index: gap for gap in self._gaps(transaction)}
            for gap in gaps.values():
                if gap.first_index <= following <= gap.last_index:
                    following = gap.last_index + 1
            digest = self._chain_row(transaction, following - 1).digest if following <= applied_index else b""
            cursor = transaction.cursor(self._env.table(records.ENTRIES))
            more = cursor.set_range(records.index_key(following))
            while following <= applied_index and len(found) < limit and size_bytes < STEP_MAX_BYTES:
                if following in gaps:
                    following = gaps[following].last_index + 1
                    digest = self._chain_row(transaction, following - 1).digest
                    continue
                entry = self._entry(following, cursor.item() if more else None)
                digest = records.chained(digest, entry)
                if self._chain_row(transaction, following).digest != digest:
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

    def _chain_row(self, transaction: "lmdb.Transaction[bytes]", index: int) -> ChainRow:
        if index == 0:
            return ChainRow(records.GENESIS, 0)
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

    def _marks(self, transaction: "lmdb.Transaction[bytes]") -> Marks:
        try:
            return records.unpack_marks(transaction.get(records.MARKS_KEY, b"", db=self._env.table(records.STATE)))
        except Damaged as error:
            place = f"{self._env.directory}, table state, key marks ({error})"
            raise RecoveryRefused(Condition.MARKS_DAMAGED, place) from error


def _held(marks: Marks, gaps: tuple[Gap, ...]) -> str:
    """The ranges of revisions that are held, in words."""
    ranges, start = [], 1
    for gap in gaps:
        if start <= gap.revision_before:
            ranges.append(f"{start} to {gap.revision_before}")
        start = gap.revision_after + 1
    if start <= marks.applied_revision:
        ranges.append(f"{start} to {marks.applied_revision}")
    return " and ".join(ranges) or "none"
