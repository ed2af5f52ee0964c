"""Backfill of history that a snapshot replaced, by whoever holds it: a gap of the ledger is filled from its end.

The digest after the gap is known, and a digest proves the one before it together with the entry in between. So each
entry is proven as it comes, the gap becomes shorter with each transaction, and what a crash interrupts goes on where it
was. The first entry of the gap must follow on what is held before it.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from wal import records
from wal.environment import Environment
from wal.failures import BrokenInvariant
from wal.ledger import Ledger
from wal.records import ChainRow, Entry, Gap, chained
from wal.rows import read_chain_row

HANDED_ENTRIES_MAX: Final = 512
HANDED_BYTES_MAX: Final = 1 << 20
"""Entries handed over at once, count and bytes, but at least one: a transaction of a few milliseconds for each side."""


class Handed(NamedTuple):
    """An entry of the ledger, with the digest and the revision before it."""

    entry: Entry
    digest_before: bytes
    revision_before: int


class NotThisHistory(Exception):
    """What was handed over is not what the digests speak of; nothing was written."""


def hand_over(
    ledger: Ledger, last: int, *, entries_max: int = HANDED_ENTRIES_MAX, bytes_max: int = HANDED_BYTES_MAX
) -> list[Handed]:
    """Entries of a ledger that end with `last`, the newest first, within both bounds but at least one.

    LookupError if `last` is not held; LedgerBroken.
    """
    behind = max((gap.last_index for gap in ledger.gaps() if gap.first_index <= last), default=0)
    count = min(entries_max, last - max(behind, ledger.first_index - 1))
    if count < 1 or last > ledger.applied_index:
        raise LookupError(f"entry {last} is not held here")
    held = list(ledger.read(last - count + 1, limit=count))
    rows = ledger.rows_before(held[0].index, last)
    found: list[Handed] = []
    size_bytes = 0
    for one, row in zip(reversed(held), reversed(rows), strict=True):
        size_bytes += len(one.data)
        if found and size_bytes > bytes_max:
            break
        found.append(Handed(Entry(one.index, one.term, one.data), row.digest, row.revision))
    return found


def fill(env: Environment, gap: Gap, handed: Sequence[Handed]) -> Gap | None:
    """Give the ledger entries that end with the last one of a gap, the newest first; return what is left of the gap.

    Durable on return. NotThisHistory if they do not follow from each other and from what is held behind the gap;
    BrokenInvariant if they do, but not on what is held before it: then this replica's own history is another one.
    Raises StorageFailed.
    """
    last = read_chain_row(env, gap.last_index)
    if last is None:
        raise BrokenInvariant(f"the gap {gap.first_index} to {gap.last_index} has no digest at its end")
    rows: list[tuple[Entry, ChainRow, ChainRow]] = []
    after, index = last, gap.last_index
    for entry, digest_before, revision_before in handed:
        if entry.index != index or index < gap.first_index:
            raise NotThisHistory(f"entry {entry.index} came where entry {index} was to come")
        if len(digest_before) != records.DIGEST_BYTES or chained(digest_before, entry) != after.digest:
            raise NotThisHistory(f"entry {index} is not the one that the digest behind it speaks of")
        if not gap.revision_before <= revision_before <= after.revision:
            raise NotThisHistory(f"revision {revision_before} before entry {index}, and {after.revision} after it")
        before = ChainRow(digest_before, revision_before)
        rows.append((entry, before, after))
        after, index = before, index - 1
    if not rows:
        return gap
    if index < gap.first_index:
        held = ChainRow(records.GENESIS, 0) if index == 0 else read_chain_row(env, index)
        if after != held:
            raise BrokenInvariant(
                f"the history up to entry {index} is not the cluster's: entry {index + 1} follows on digest "
                f"{after.digest.hex()[:16]} and revision {after.revision}"
            )
    left = Gap(gap.first_index, index, gap.revision_before, after.revision) if index >= gap.first_index else None
    _write(env, gap, rows, left)
    return left


def _write(env: Environment, gap: Gap, rows: list[tuple[Entry, ChainRow, ChainRow]], left: Gap | None) -> None:
    entries, chain, revisions, gaps = (
        env.table(name) for name in (records.ENTRIES, records.CHAIN, records.REVISIONS, records.GAPS)
    )
    with env.write() as transaction:
        for entry, before, after in rows:
            key = records.index_key(entry.index)
            transaction.put(key, records.pack_entry(key, entry), db=entries)
            if after.revision > before.revision:
                key = records.index_key(after.revision)
                transaction.put(key, records.pack_number(key, entry.index), db=revisions)
            if entry.index > gap.first_index:
                key = records.index_key(entry.index - 1)
                transaction.put(key, records.pack_chain(key, before), db=chain)
        key = records.index_key(gap.first_index)
        if left is None:
            transaction.delete(key, db=gaps)
        else:
            transaction.put(key, records.pack_gap(key, left), db=gaps)
