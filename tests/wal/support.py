"""Storage of a replica in a temporary directory, and helpers that damage it."""

import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb

from forebay.wal import records
from forebay.wal.environment import DATA_FILE, Environment
from forebay.wal.journal import Entry, Journal
from forebay.wal.records import TABLES

CLUSTER = "cluster-1"
REPLICA = "r1"
NO_OP = b"\x00"
MAP_SIZE_BYTES = 64 << 20


def open_env(directory: Path, *, create: bool = True, map_size_bytes: int = MAP_SIZE_BYTES) -> Environment:
    return Environment.open(
        directory, cluster_id=CLUSTER, replica=REPLICA, map_size_bytes=map_size_bytes, create=create
    )


@contextmanager
def opened(directory: Path, *, create: bool = True) -> Iterator[Journal]:
    """Open a journal, and close it at the end without a sync."""
    with open_env(directory, create=create) as env:
        yield Journal(env)


def entry(index: int, term: int = 1, size_bytes: int = 40) -> Entry:
    """Return an entry whose data differs for each index and term."""
    return Entry(index, term, struct.pack(">QQ", index, term) * (size_bytes // 16 + 1))


def fill(journal: Journal, last: int, *, applied: int = 0, term: int = 1) -> None:
    """Append entries up to `last`, apply some of them, and sync."""
    journal.set_term(max(term, journal.term), journal.voted_for)
    journal.append([entry(index, term) for index in range(journal.last_index + 1, last + 1)])
    apply(journal, applied)
    journal.sync()


def apply(journal: Journal, last: int) -> None:
    """Commit and apply entries up to `last`; each entry settles two commands."""
    journal.set_commit(max(last, journal.commit_index))
    for index in range(journal.applied_index + 1, last + 1):
        journal.record_applied(journal.entry(index), journal.applied_revision + 2)


def edit(directory: Path, change: Callable[[lmdb.Transaction, dict[bytes, lmdb._Database]], None]) -> None:
    """Change the tables in a separate transaction, without the journal's knowledge."""
    raw = lmdb.open(str(directory), max_dbs=len(TABLES), map_size=MAP_SIZE_BYTES, lib_version=0)
    tables = {name: raw.open_db(name) for name in TABLES}
    with raw.begin(write=True) as transaction:
        change(transaction, tables)
    raw.close()


def flip_value_in_file(directory: Path, key: bytes, value: bytes, *, offset: int = -1) -> None:
    """Flip one bit of a stored value in every page of the data file that contains the value.

    The value is found by its bytes, so all copy-on-write versions of it are damaged alike.
    """
    path = directory / DATA_FILE
    content = bytearray(path.read_bytes())
    stored = records.pack_checked(key, value)
    position, found = content.find(stored), 0
    while position >= 0:
        content[position + offset % len(stored)] ^= 0x10
        found += 1
        position = content.find(stored, position + 1)
    assert found, "the value is not in the file"
    with path.open("r+b") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
