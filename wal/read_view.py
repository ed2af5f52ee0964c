"""Read view of the ledger: what the sync log adds to LMDB, for a reader that must not write.

The replica goes on while its files are read: a checkpoint may come between reading LMDB and reading the log, and a
record may be half written. So LMDB's generation is read again after the log, whatever was found in the log, and what
seems damaged is read again.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

import lmdb

from wal import records
from wal.environment import Environment, log_mark
from wal.failures import Condition, RecoveryRefused
from wal.records import ChainRow, Damaged, Entry, Marks
from wal.replay import Contradiction, replay
from wal.sync_log import SyncLog

SCANS_MAX: Final = 20
"""How often a reader scans before it gives up: a scan takes milliseconds, and checkpoints are much further apart."""


class ReadView(NamedTuple):
    """The marks of the whole ledger, and those applied entries and rows that LMDB does not have or has otherwise."""

    marks: Marks
    entries: Mapping[int, Entry]
    chain: Mapping[int, ChainRow]
    revisions: list[tuple[int, int]]
    """The last revision that an entry settled, and its index; ascending."""
    stored_revision: int
    """LMDB has the rows of revisions up to here."""


def read(env: Environment) -> ReadView:
    """What is to be added to LMDB's rows now; nothing for the replica's own process. Raises RecoveryRefused.

    What it says stays true while LMDB is given more: nothing that was applied is ever changed. A log is refused only by
    a scan during which no checkpoint came; if one came during the last one too, it is refused as restless.
    """
    if not env.readonly:
        with env.read() as transaction:
            marks = _marks(env, transaction)
        return ReadView(marks, {}, {}, [], marks.applied_revision)
    refused: RecoveryRefused | None = None
    for _ in range(SCANS_MAX):
        with env.read() as transaction:
            mark = log_mark(env.directory, transaction.get(records.LOG_KEY, db=env.table(records.STATE)))
            found: ReadView | RecoveryRefused
            try:
                found = _scan(env, env.log, transaction, mark.generation)
            except RecoveryRefused as error:
                found = error
        if env.log_mark().generation != mark.generation:
            # What was found is of two moments: as a ledger it would be too short, as a damage it would be none.
            refused = None
        elif isinstance(found, ReadView):
            return found
        else:
            refused = found
    raise refused or RecoveryRefused(Condition.SYNC_LOG_RESTLESS, str(env.log.path))


def _scan(env: Environment, log: SyncLog, transaction: "lmdb.Transaction[bytes]", generation: int) -> ReadView:
    """The read view by what LMDB says, which is of this generation, and then the log."""
    marks = _marks(env, transaction)
    try:
        hard = records.unpack_hard(transaction.get(records.HARD_KEY, b"", db=env.table(records.STATE)))
    except Damaged as error:
        place = f"{env.directory}, table state, key hard ({error})"
        raise RecoveryRefused(Condition.HARD_STATE_DAMAGED, place) from error
    bodies = log.read(generation)

    def stored(index: int) -> Entry:
        key = records.index_key(index)
        return records.unpack_entry(key, transaction.get(key, b"", db=env.table(records.ENTRIES)))

    try:
        replayed = replay(hard, marks, bodies, stored)
    except (Contradiction, Damaged) as error:
        raise RecoveryRefused(Condition.SYNC_LOG_CONTRADICTS, f"{log.path} ({error})") from error
    after = replayed.marks
    return ReadView(
        after,
        {entry.index: entry for entry in replayed.entries if entry.index <= after.applied_index},
        {applied.at: applied.row for applied in replayed.applied},
        [(applied.row.revision, applied.at) for applied in replayed.applied if applied.advanced],
        marks.applied_revision,
    )


def _marks(env: Environment, transaction: "lmdb.Transaction[bytes]") -> Marks:
    try:
        return records.unpack_marks(transaction.get(records.MARKS_KEY, b"", db=env.table(records.STATE)))
    except Damaged as error:
        place = f"{env.directory}, table state, key marks ({error})"
        raise RecoveryRefused(Condition.MARKS_DAMAGED, place) from error
