"""What an LMDB environment must hold to be a replica's: its tables, format, identity, and the mark of the sync log."""

from pathlib import Path
from typing import TYPE_CHECKING

import lmdb

from wal import records
from wal.failures import DATA_FILE, Condition, RecoveryRefused
from wal.records import GENESIS, TABLES, Damaged, HardState, Identity, LogMark, Marks

if TYPE_CHECKING:
    from lmdb import _Database


def create(environment: lmdb.Environment, identity: Identity, mark: LogMark) -> "dict[bytes, _Database]":
    """Make the tables, identity, hard state and marks in one transaction: all of them exist or none."""
    with environment.begin(write=True) as transaction:
        tables = {name: environment.open_db(name, txn=transaction) for name in TABLES}
        state = tables[records.STATE]
        transaction.put(records.FORMAT_KEY, records.pack_format(records.FORMAT_VERSION), db=state)
        transaction.put(records.IDENTITY_KEY, records.pack_identity(identity), db=state)
        transaction.put(records.HARD_KEY, records.pack_hard(HardState(0, None)), db=state)
        transaction.put(records.MARKS_KEY, records.pack_marks(Marks(0, 0, 0, 0, 0, 0, GENESIS)), db=state)
        transaction.put(records.LOG_KEY, records.pack_log(mark), db=state)
    return tables


def log_mark(directory: Path, value: bytes | None) -> LogMark:
    """What is stored of the sync log. RecoveryRefused if it is missing or damaged."""
    place = f"{directory / DATA_FILE}, table state, key log"
    if value is None:
        raise RecoveryRefused(Condition.LOG_MARK_MISSING, place)
    try:
        return records.unpack_log(value)
    except Damaged as error:
        raise RecoveryRefused(Condition.LOG_MARK_DAMAGED, f"{place} ({error})") from error


def open_all(directory: Path, environment: lmdb.Environment) -> "dict[bytes, _Database]":
    """The handles of all tables. RecoveryRefused if one is missing."""
    tables = {}
    for name in TABLES:
        try:
            tables[name] = environment.open_db(name, create=False)
        except (lmdb.NotFoundError, lmdb.IncompatibleError) as error:
            raise RecoveryRefused(Condition.TABLE_MISSING, f"{directory / DATA_FILE}, table {name.decode()}") from error
    return tables


def read_identity(directory: Path, environment: lmdb.Environment, tables: "dict[bytes, _Database]") -> Identity:
    """The stored identity, where the format is one that is understood. Raises RecoveryRefused."""
    place = f"{directory / DATA_FILE}, table state, key "
    with environment.begin(tables[records.STATE]) as transaction:
        stored_format = transaction.get(records.FORMAT_KEY, b"")
        stored_identity = transaction.get(records.IDENTITY_KEY, b"")
    try:
        version = records.unpack_format(stored_format)
    except Damaged as error:
        raise RecoveryRefused(Condition.IDENTITY_DAMAGED, f"{place}format ({error})") from error
    if version == records.FORMAT_OF_A_STEP:
        raise RecoveryRefused(Condition.FORMAT_OF_A_CONSTRUCTION_STEP, f"{place}format")
    if version != records.FORMAT_VERSION:
        raise RecoveryRefused(
            Condition.FORMAT_UNKNOWN, f"{place}format (it is {version}; this release reads {records.FORMAT_VERSION})"
        )
    try:
        return records.unpack_identity(stored_identity)
    except Damaged as error:
        raise RecoveryRefused(Condition.IDENTITY_DAMAGED, f"{place}identity ({error})") from error


def check_identity(
    directory: Path, environment: lmdb.Environment, tables: "dict[bytes, _Database]", wanted: Identity
) -> None:
    """Return if the storage is `wanted`'s. RecoveryRefused if it is not."""
    stored = read_identity(directory, environment, tables)
    if stored.cluster_id != wanted.cluster_id:
        place = f"{directory} (it belongs to cluster {stored.cluster_id}, not {wanted.cluster_id})"
        raise RecoveryRefused(Condition.CLUSTER_FOREIGN, place)
    if stored.replica != wanted.replica:
        place = f"{directory} (it belongs to replica {stored.replica}, not {wanted.replica})"
        raise RecoveryRefused(Condition.REPLICA_FOREIGN, place)
