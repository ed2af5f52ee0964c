"""Checks of a replica's storage at opening, with the reactions of the recovery table.

Damage is never repaired by guessing. An LMDB transaction is complete or absent, so the only torn tail is a transaction
that never became visible and carried no promise. Visible data was synced before any promise about it was sent, so a
majority may rely on this copy. Visible data is therefore accepted or rejected, never truncated.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, NoReturn

from forebay.wal import directory as directories
from forebay.wal import records, sync_log
from forebay.wal.environment import Environment
from forebay.wal.failures import DATA_FILE, LOG_FILE, Condition, RecoveryRefused
from forebay.wal.records import ChainRow, DamagedValue, Entry, HardState, Marks
from forebay.wal.replay import Contradiction, ReplayedLog, replay


class SoundStorage(NamedTuple):
    """Hard state and marks of a storage that passed all checks."""

    hard: HardState
    marks: Marks


def check(env: Environment, on_entry: Callable[[Entry], None] | None = None) -> SoundStorage:
    """Check hard state, marks, and all entries and digests visible to consensus. `Ledger.verify` checks older entries.

    Calls `on_entry` with each entry after the base, in order, so that the caller need not read the entries again.

    Raises:
        RecoveryRefused: A check failed; `condition` is the row of the table.
        StorageFailed: LMDB finds a broken page.
    """
    with env.read() as transaction:
        state = env.table(records.STATE)
        stored_hard = transaction.get(records.HARD_KEY, db=state)
        stored_marks = transaction.get(records.MARKS_KEY, db=state)
    if stored_hard is None:
        _refuse(env, Condition.HARD_STATE_MISSING, "table state, key hard")
    if stored_marks is None:
        _refuse(env, Condition.MARKS_MISSING, "table state, key marks")
    try:
        hard = records.unpack_hard(stored_hard)
    except DamagedValue as error:
        _refuse(env, Condition.HARD_STATE_DAMAGED, f"table state, key hard ({error})")
    try:
        marks = records.unpack_marks(stored_marks)
    except DamagedValue as error:
        _refuse(env, Condition.MARKS_DAMAGED, f"table state, key marks ({error})")
    _check_marks(env, hard, marks)
    _check_entries(env, hard, marks, on_entry)
    return SoundStorage(hard, marks)


def replay_log(env: Environment, checked: SoundStorage, stored: Callable[[int], Entry]) -> ReplayedLog:
    """Combine the checked LMDB state with the sync log, without writing. `stored` reads an entry from LMDB.

    Raises:
        RecoveryRefused: The log is damaged or contradicts LMDB.
    """
    bodies = env.log.read(env.log_mark().generation)
    try:
        return replay(checked.hard, checked.marks, bodies, stored)
    except Contradiction as error:
        raise RecoveryRefused(Condition.SYNC_LOG_CONTRADICTS, f"{env.log.path} ({error})") from error


def read_chain(env: Environment, index: int) -> ChainRow:
    """Return the chain row of an applied entry or of a gap's end.

    Raises:
        RecoveryRefused: The row is missing or damaged.
    """
    if index == 0:
        return ChainRow(records.GENESIS, 0)
    key = records.index_key(index)
    with env.read() as transaction:
        value = transaction.get(key, db=env.table(records.CHAIN))
    if value is None:
        _refuse(env, Condition.CHAIN_ROW_MISSING, f"table chain, index {index}")
    try:
        return records.unpack_chain(key, value)
    except DamagedValue as error:
        _refuse(env, Condition.CHAIN_ROW_DAMAGED, f"table chain, index {index} ({error})")


def _check_marks(env: Environment, hard: HardState, marks: Marks) -> None:
    place = "table state, key marks"
    if not marks.base_index <= marks.applied_index <= marks.commit_index or marks.base_index > marks.last_index:
        _refuse(
            env,
            Condition.MARKS_OUT_OF_ORDER,
            f"{place} (base {marks.base_index}, applied {marks.applied_index}, commit {marks.commit_index}, "
            f"last {marks.last_index})",
        )
    if marks.commit_index > marks.last_index:
        _refuse(
            env, Condition.COMMIT_BEYOND_LAST, f"{place} (commit {marks.commit_index}, last entry {marks.last_index})"
        )
    if marks.base_term > hard.term:
        _refuse(
            env, Condition.TERM_OUT_OF_ORDER, f"{place} (base term {marks.base_term}, hard state's term {hard.term})"
        )


def _check_entries(env: Environment, hard: HardState, marks: Marks, on_entry: Callable[[Entry], None] | None) -> None:
    digest = read_chain(env, marks.base_index).digest
    expected, term = marks.base_index + 1, marks.base_term
    with env.read() as transaction:
        chain = transaction.cursor(env.table(records.CHAIN))
        more_chain = chain.set_range(records.index_key(expected))
        cursor = transaction.cursor(env.table(records.ENTRIES))
        more = cursor.set_range(records.index_key(expected))
        while more:
            key, value = cursor.item()
            place = f"table entries, key {key.hex()}"
            if expected > marks.last_index:
                _refuse(env, Condition.ENTRY_BEYOND_LAST, f"{place} (the last index is {marks.last_index})")
            if key != records.index_key(expected):
                _refuse(env, Condition.ENTRY_MISSING, f"{place} (index {expected} was expected)")
            try:
                entry = records.unpack_entry(key, value)
            except DamagedValue as error:
                applied = expected <= marks.applied_index
                condition = Condition.APPLIED_ENTRY_DAMAGED if applied else Condition.TAIL_ENTRY_DAMAGED
                _refuse(env, condition, f"table entries, index {expected} ({error})")
            if not term <= entry.term <= hard.term:
                _refuse(
                    env,
                    Condition.TERM_OUT_OF_ORDER,
                    f"table entries, index {expected} (term {entry.term} after {term}, hard state's term {hard.term})",
                )
            if expected <= marks.applied_index:
                digest = records.chain_digest(digest, entry)
                _check_chain(env, expected, digest, chain.item() if more_chain else None)
                more_chain = chain.next()
            if on_entry is not None:
                on_entry(entry)
            expected, term = expected + 1, entry.term
            more = cursor.next()
    if expected <= marks.last_index:
        _refuse(env, Condition.ENTRY_MISSING, f"table entries, index {expected} of {marks.last_index}")
    if digest != marks.applied_digest:
        _refuse(env, Condition.CHAIN_MISMATCH, "table state, key marks (the digest differs from the chain's)")


def _check_chain(env: Environment, index: int, digest: bytes, item: tuple[bytes, bytes] | None) -> None:
    place = f"table chain, index {index}"
    if item is None or item[0] != records.index_key(index):
        _refuse(env, Condition.CHAIN_ROW_MISSING, place)
    try:
        row = records.unpack_chain(*item)
    except DamagedValue as error:
        _refuse(env, Condition.CHAIN_ROW_DAMAGED, f"{place} ({error})")
    if row.digest != digest:
        _refuse(env, Condition.CHAIN_MISMATCH, place)


def _refuse(env: Environment, condition: Condition, place: str) -> NoReturn:
    raise RecoveryRefused(condition, f"{env.directory}, {place}")


def may_have_run(directory: Path) -> Path | None:
    """Return a file that shows that a replica may have run here and made promises; None if there is none.

    Leftovers of an interrupted first start do not count. An unreadable file counts. Nothing is locked.
    """
    if directories.may_hold_a_transaction(directory / DATA_FILE):
        return directory / DATA_FILE
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        return directory
    try:
        # The log is created after the data file, so a log without a data file means that the data file was lost.
        alone = os.path.lexists(directory / LOG_FILE) and not os.path.lexists(directory / DATA_FILE)
        used = alone or sync_log.is_used(sync_log.DiskStore(descriptor, readonly=True), directory)
    except RecoveryRefused:
        used = True
    finally:
        os.close(descriptor)
    return directory / LOG_FILE if used else None
