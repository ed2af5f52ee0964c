"""Reads of the journal's rows from LMDB, and the checkpoint: one transaction that writes all changes LMDB lacks."""

from collections.abc import Sequence
from typing import NamedTuple

import lmdb

from forebay.wal import records
from forebay.wal.environment import Environment
from forebay.wal.failures import REPLACE, BrokenInvariant, StorageFailed
from forebay.wal.records import ChainRow, DamagedValue, Entry, Gap, HardState, Incarnation, Marks


class AppliedRow(NamedTuple):
    """Index and chain row of an applied entry. `advanced`: the entry raised the revision."""

    at: int
    row: ChainRow
    advanced: bool


class CheckpointChanges(NamedTuple):
    """Changes of a checkpoint. Stored entries from `delete_from` on are deleted first; then `entries` are added."""

    delete_from: int | None
    entries: Sequence[Entry]
    applied: Sequence[AppliedRow]
    gaps: Sequence[Gap]
    hard: HardState | None
    marks: Marks
    incarnation: Incarnation | None = None
    """New incarnation of the cluster; None if it stays the same."""


def peek_base(env: Environment) -> tuple[int, int]:
    """Return base index and base term without checks; `recovery.check` rejects damaged marks later."""
    with env.read() as transaction:
        value = transaction.get(records.MARKS_KEY, b"", db=env.table(records.STATE))
    try:
        marks = records.unpack_marks(value)
    except DamagedValue:
        return 0, 0
    return marks.base_index, marks.base_term


def read_entries(env: Environment, first: int, last: int, *, max_bytes: int, max_entries: int) -> list[Entry]:
    """Return stored entries from `first` to at most `last`, within both bounds but at least one, each checked.

    Raises:
        StorageFailed: An entry is missing or damaged. The environment is stopped.
    """
    found: list[Entry] = []
    size_bytes = 0
    with env.read() as transaction:
        cursor = transaction.cursor(env.table(records.ENTRIES))
        more = cursor.set_range(records.index_key(first))
        for index in range(first, last + 1):
            key = records.index_key(index)
            if not more or cursor.key() != key:
                raise _damage_failure(env, "entries", index, "the entry is missing")
            try:
                entry = records.unpack_entry(key, cursor.value())
            except DamagedValue as error:
                raise _damage_failure(env, "entries", index, str(error)) from error
            size_bytes += len(entry.data)
            if found and (size_bytes > max_bytes or len(found) >= max_entries):
                break
            found.append(entry)
            more = cursor.next()
    return found


def read_chain_row(env: Environment, index: int) -> ChainRow | None:
    """Return the stored chain row of an entry, or None.

    Raises:
        StorageFailed: The row is damaged. The environment is stopped.
    """
    key = records.index_key(index)
    with env.read() as transaction:
        value = transaction.get(key, db=env.table(records.CHAIN))
    if value is None:
        return None
    try:
        return records.unpack_chain(key, value)
    except DamagedValue as error:
        raise _damage_failure(env, "chain", index, str(error)) from error


def write(env: Environment, changes: CheckpointChanges) -> None:
    """Write all changes in one transaction, durable on return, and begin the next generation of the sync log.

    A crash after the transaction leaves sync records of the previous generation. They are void, because LMDB has them.

    Raises:
        StorageFailed: The transaction fails. The environment is stopped.
    """
    mark = env.next_log_mark()
    with env.write() as transaction:
        _write_entries(env, transaction, changes)
        chain, revisions, gaps = (env.table(name) for name in (records.CHAIN, records.REVISIONS, records.GAPS))
        for index, row, advanced in changes.applied:
            key = records.index_key(index)
            transaction.put(key, records.pack_chain(key, row), db=chain)
            if advanced:
                key = records.index_key(row.revision)
                transaction.put(key, records.pack_number(key, index), db=revisions)
        for gap in changes.gaps:
            key = records.index_key(gap.first_index)
            transaction.put(key, records.pack_gap(key, gap), db=gaps)
        state = env.table(records.STATE)
        if changes.hard is not None:
            transaction.put(records.HARD_KEY, records.pack_hard(changes.hard), db=state)
        transaction.put(records.MARKS_KEY, records.pack_marks(changes.marks), db=state)
        transaction.put(records.LOG_KEY, records.pack_log(mark), db=state)
        if changes.incarnation is not None:
            transaction.put(records.INCARNATION_KEY, records.pack_incarnation(changes.incarnation), db=state)
    # LMDB has durably recorded the new generation.
    env.log.begin(mark.generation)


def _write_entries(env: Environment, transaction: "lmdb.Transaction[bytes]", changes: CheckpointChanges) -> None:
    table = env.table(records.ENTRIES)
    if changes.delete_from is not None:
        cursor = transaction.cursor(table)
        if cursor.set_range(records.index_key(changes.delete_from)):
            while cursor.delete():
                pass
        cursor.close()
    for entry in changes.entries:
        key = records.index_key(entry.index)
        # MDB_APPEND, because the key is larger than all others: no search, full pages, and no overwriting.
        if not transaction.put(key, records.pack_entry(key, entry), append=True, db=table):
            raise BrokenInvariant(f"entry {entry.index} or a later one is already stored")


def _damage_failure(env: Environment, table: str, index: int, what: str) -> StorageFailed:
    # The replica's configured name is unknown here.
    remedy = REPLACE.replace("NAME", "<its name>")
    return env.fail(f"{env.directory}, table {table}, index {index}: {what}. The replica stops. {remedy}.")
