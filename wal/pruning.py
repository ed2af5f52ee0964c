"""Pruning: removal of old entries from the ledger in small transactions, which leaves an intentional gap.

The range and its archive segments are first recorded durably. If the removal is interrupted, the next process that
opens the storage completes it. Each transaction removes some of the oldest entries with their digests and revision
rows, and lengthens the gap accordingly, so the ledger verifies at any moment. The digest at the end of the gap stays,
and so do the first KEPT_ENTRIES entries.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import lmdb

from forebay.wal import records
from forebay.wal.environment import Environment
from forebay.wal.failures import BrokenInvariant
from forebay.wal.ledger import LedgerBroken
from forebay.wal.records import (
    GENESIS,
    KEPT_ENTRIES,
    PRUNED_SEGMENTS_MAX,
    ChainRow,
    DamagedValue,
    Entry,
    Gap,
    PrunedRange,
    chain_digest,
)
from forebay.wal.rows import peek_base

if TYPE_CHECKING:
    from lmdb import _Database

PRUNE_ENTRIES: Final = 256
PRUNE_BYTES: Final = 1 << 20
"""Limits of one transaction, which blocks the event loop for milliseconds; the last entry may exceed the bytes."""


def prunable_below(env: Environment) -> int:
    """Return the highest index below which entries may be pruned. Entries visible to consensus stay."""
    return peek_base(env)[0] + 1


def authorise(env: Environment, pruned: PrunedRange) -> None:
    """Record the range to prune; durable on return. Nothing is removed yet.

    Raises:
        BrokenInvariant: Consensus needs entries of the range, or more was pruned already.
        StorageFailed: The record cannot be written.
    """
    before = read_pruned(env)
    if pruned.below > prunable_below(env) or len(pruned.segments) > PRUNED_SEGMENTS_MAX:
        raise BrokenInvariant(
            f"pruning below entry {pruned.below}, but consensus needs {prunable_below(env)} and later"
        )
    if before is not None and before.below > pruned.below:
        raise BrokenInvariant(f"pruning below entry {pruned.below}, but the ledger is pruned below {before.below}")
    with env.write() as transaction:
        transaction.put(records.PRUNED_KEY, records.pack_pruned(pruned), db=env.table(records.STATE))


def read_pruned(env: Environment) -> PrunedRange | None:
    """Return the recorded range to prune; None if there is none.

    Raises:
        LedgerBroken: The record is damaged.
    """
    with env.read() as transaction:
        value = transaction.get(records.PRUNED_KEY, db=env.table(records.STATE))
    try:
        return None if value is None else records.unpack_pruned(value)
    except DamagedValue as error:
        raise LedgerBroken(0, f"the record of pruned entries: {error}") from error


class _Removal(NamedTuple):
    """Removal of entries `first` to `last` in one transaction, with the gaps between them and the resulting gap."""

    first: int
    last: int
    absorbed: tuple[Gap, ...]
    grown: Gap
    revision_before: int


def prune_some(env: Environment, *, entries_max: int = PRUNE_ENTRIES, bytes_max: int = PRUNE_BYTES) -> bool:
    """Remove a part of the recorded range, durable on return. Return whether entries remain to be removed.

    Raises:
        LedgerBroken: The digest that must stay is damaged; nothing was removed.
        StorageFailed: The storage cannot be read or written.
    """
    pruned = read_pruned(env)
    removal = None if pruned is None else _plan(env, pruned, entries_max, bytes_max)
    if pruned is None or removal is None:
        return False
    with env.write() as transaction:
        _remove(transaction, env.table(records.ENTRIES), removal.first, removal.last)
        # Keep the digest before the first removed entry, unless that entry was the end of the growing gap.
        _remove(
            transaction, env.table(records.CHAIN), max(removal.grown.first_index, removal.first - 1), removal.last - 1
        )
        revisions = removal.revision_before + 1, removal.grown.revision_after
        _remove(transaction, env.table(records.REVISIONS), *revisions)
        gaps = env.table(records.GAPS)
        for gap in removal.absorbed:
            transaction.delete(records.index_key(gap.first_index), db=gaps)
        key = records.index_key(removal.grown.first_index)
        transaction.put(key, records.pack_gap(key, removal.grown), db=gaps)
    return removal.last + 1 < pruned.below


def _plan(env: Environment, pruned: PrunedRange, entries_max: int, bytes_max: int) -> _Removal | None:
    """Return the work of the next transaction; None if nothing is left to remove.

    Raises:
        LedgerBroken: A row that the plan needs is damaged.
    """
    begin = KEPT_ENTRIES + 1
    with env.read() as transaction:
        gaps = _gaps(env, transaction)
        front = next((gap for gap in gaps if gap.first_index <= begin <= gap.last_index), None)
        first = begin if front is None else front.last_index + 1
        if first >= pruned.below:
            return None
        index, count, size_bytes, absorbed = first, 0, 0, list[Gap]()
        cursor = transaction.cursor(env.table(records.ENTRIES))
        more = cursor.set_range(records.index_key(first))
        while index < pruned.below and count < entries_max and size_bytes < bytes_max:
            gap = next((gap for gap in gaps if gap.first_index == index), None)
            if gap is not None:
                absorbed.append(gap)
                index = gap.last_index + 1
                continue
            # Remove an entry even if it is missing or damaged here: the archive has it.
            if more and cursor.key() == records.index_key(index):
                size_bytes += len(cursor.value())
                more = cursor.next()
            index, count = index + 1, count + 1
        last = index - 1
        row = _chain_row(env, transaction, last)
        start = _chain_row(env, transaction, begin - 1).revision if front is None else front.revision_after
    grown = Gap(begin, last, start, row.revision)
    if front is not None:
        grown = front._replace(last_index=last, revision_after=row.revision)
    return _Removal(first, last, tuple(absorbed), grown, start)


def _remove(transaction: "lmdb.Transaction[bytes]", table: "_Database", first: int, last: int) -> None:
    cursor = transaction.cursor(table)
    end = records.index_key(last)
    more = cursor.set_range(records.index_key(first))
    while more and cursor.key() <= end:
        more = cursor.delete()
    cursor.close()


def _gaps(env: Environment, transaction: "lmdb.Transaction[bytes]") -> list[Gap]:
    try:
        return [records.unpack_gap(key, value) for key, value in transaction.cursor(env.table(records.GAPS))]
    except DamagedValue as error:
        raise LedgerBroken(0, f"the table of gaps: {error}") from error


def _chain_row(env: Environment, transaction: "lmdb.Transaction[bytes]", index: int) -> ChainRow:
    key = records.index_key(index)
    try:
        return records.unpack_chain(key, transaction.get(key, b"", db=env.table(records.CHAIN)))
    except DamagedValue as error:
        raise LedgerBroken(index, f"its digest: {error}") from error


def insert_beginning(env: Environment, gap: Gap, first: Sequence[tuple[Entry, bytes, int]]) -> None:
    """Insert the first entries into a ledger that lacks its beginning, each with its digest and revision.

    Durable on return. The caller must have compared the digest after the gap with the digest in the entries' source.

    Raises:
        BrokenInvariant: The entries do not follow those held before the gap.
    """
    index, digest, revision = gap.first_index - 1, GENESIS, 0
    if index:
        with env.read() as transaction:
            digest, revision = _chain_row(env, transaction, index)
    for entry, digest_after, revision_after in first:
        digest, index = chain_digest(digest, entry), index + 1
        if entry.index != index or digest != digest_after or not revision <= revision_after <= gap.revision_after:
            raise BrokenInvariant(f"entry {entry.index} does not continue entry {index - 1}")
        revision = revision_after
    if not first or index >= gap.last_index:
        return
    before = gap.revision_before
    with env.write() as transaction:
        for entry, digest_after, revision_after in first:
            key = records.index_key(entry.index)
            transaction.put(key, records.pack_entry(key, entry), db=env.table(records.ENTRIES))
            row = ChainRow(digest_after, revision_after)
            transaction.put(key, records.pack_chain(key, row), db=env.table(records.CHAIN))
            if revision_after > before:
                number = records.index_key(revision_after)
                transaction.put(number, records.pack_number(number, entry.index), db=env.table(records.REVISIONS))
            before = revision_after
        gaps = env.table(records.GAPS)
        transaction.delete(records.index_key(gap.first_index), db=gaps)
        left = Gap(index + 1, gap.last_index, revision, gap.revision_after)
        key = records.index_key(left.first_index)
        transaction.put(key, records.pack_gap(key, left), db=gaps)
