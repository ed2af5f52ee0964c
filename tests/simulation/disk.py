"""The disk of one replica: a store with LMDB's semantics in memory, and files that forget what was not synced.

Above it everything is real: `wal.Environment`, `Journal`, `Ledger`, recovery, `SnapshotStore`. A transaction is there
whole or not at all; one that was not synced is lost in a crash, as are unsynced bytes and names of files. Every put,
commit and file call is a place where the replica can die, or be told that the disk is full or broken.
"""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lmdb

from forebay.wal import environment as wal_environment
from forebay.wal.environment import Environment
from forebay.wal.failures import Condition, RecoveryRefused, StorageFailed
from forebay.wal.records import (
    ENTRIES,
    FIRST_INCARNATION,
    HARD_KEY,
    MARKS_KEY,
    STATE,
    HardState,
    Incarnation,
    Marks,
    StorageIdentity,
    index_key,
    unpack_entry,
    unpack_hard,
    unpack_marks,
)
from tests.simulation.files import SimFiles
from tests.simulation.sync_log import SimLog

SYNC_S = 0.000_5
"""What a sync takes on a disk that is well, seconds."""

PAGE_BYTES = 4096


class Table:
    """One named table: keys in order, and what they hold."""

    def __init__(self) -> None:
        self.keys: list[bytes] = []
        self.values: dict[bytes, bytes] = {}
        self.size_bytes = 0
        """What the values add up to."""

    def put(self, key: bytes, value: bytes) -> bytes | None:
        before = self.values.get(key)
        if before is None:
            if not self.keys or key > self.keys[-1]:
                self.keys.append(key)
            else:
                insort(self.keys, key)
        else:
            self.size_bytes -= len(before)
        self.size_bytes += len(value)
        self.values[key] = value
        return before

    def delete(self, key: bytes) -> bytes:
        del self.keys[bisect_left(self.keys, key)]
        value = self.values.pop(key)
        self.size_bytes -= len(value)
        return value


Undo = list[tuple[Table, bytes, bytes | None]]


class SimDisk:
    """What one replica's disk holds and how it is today. Outlives the replica's processes."""

    def __init__(self, rng: random.Random, directory: Path) -> None:
        self.rng = rng
        self.tables: dict[bytes, Table] = {}
        self.transactions = 0
        self.unsynced: list[Undo] = []
        self.sync = True
        self.files = SimFiles(self, directory)
        self.dead = False
        """Mark that no process uses the disk."""
        self.die: Callable[[str], None] = lambda where: None
        """Function that ends the process that uses the disk, by raising an exception."""
        self.work: Callable[[float], None] = lambda duration_s: None
        self.operations_left: int | None = None
        """The process dies at the operation that makes this 0."""
        self.sync_s = SYNC_S
        self.stall_s = 0.0
        """What the next sync takes besides."""
        self.next_sync_fails = False
        self.full = False
        self.files_full = False
        self.fatal = False
        self.syncs = 0
        self.raised = False
        """Whether it has failed the process that runs: that explains why its replica stops."""
        self.damaged = ""
        """Damage to the journal while no process ran."""
        self.log = SimLog(self)

    # What is on it: LMDB's tables, and what the sync log adds to them

    def holds(self, index: int, term: int) -> bool:
        """Whether an entry is on it, or part of what a snapshot on it stands for; of a damaged one that is believed."""
        if self.damaged:
            return True
        if STATE not in self.tables:
            return False
        if self._marks.base_index >= index:
            return True
        for sync in reversed(self.log.valid()):
            if index >= sync.first:
                at = index - sync.first
                return at < len(sync.entries) and sync.entries[at].term == term
        key = index_key(index)
        value = self.tables[ENTRIES].values.get(key)
        return value is not None and unpack_entry(key, value).term == term

    @property
    def hard(self) -> HardState:
        """Term and vote."""
        said = [sync.hard for sync in self.log.valid() if sync.hard is not None]
        return said[-1] if said else unpack_hard(self.tables[STATE].values[HARD_KEY])

    @property
    def last_index(self) -> int:
        """The last entry."""
        syncs = self.log.valid()
        return syncs[-1].first - 1 + len(syncs[-1].entries) if syncs else self._marks.last_index

    @property
    def applied_index(self) -> int:
        """The last entry that is marked as applied."""
        return self._marks.applied_index

    @property
    def is_synced(self) -> bool:
        """Return whether a crash would lose nothing."""
        return not self.unsynced and self.log.is_synced

    @property
    def _marks(self) -> Marks:
        return unpack_marks(self.tables[STATE].values[MARKS_KEY])

    # How it fails

    def step(self, where: str) -> None:
        """One operation: where the process may die."""
        if self.dead:
            self.die(where)
        if self.operations_left is not None:
            self.operations_left -= 1
            if self.operations_left <= 0:
                self.operations_left = None
                self.die(where)

    def lose_power(self) -> None:
        """Forget what was not synced: all of it, or by chance only the newest part."""
        self.dead = True
        keep = self.rng.randrange(len(self.unsynced) + 1) if self.unsynced else 0
        for undo in reversed(self.unsynced[keep:]):
            self.take_back(undo)
        self.unsynced.clear()
        self.log.tear()
        self.operations_left = None
        self.next_sync_fails = False
        self.files.lose_power()

    def take_back(self, undo: Undo) -> None:
        for table, key, before in reversed(undo):
            if before is None:
                table.delete(key)
            else:
                table.put(key, before)

    def start(self, die: Callable[[str], None], work: Callable[[float], None]) -> None:
        """A new process uses the disk."""
        self.dead = False
        self.fatal = self.raised = False
        self.die, self.work = die, work

    def flip_a_bit(self) -> str | None:
        """Damage one stored value; return where, None if nothing is stored yet."""
        filled = [name for name in sorted(self.tables) if self.tables[name].keys]
        if not filled:
            return None
        if self.log.content and self.rng.random() < 0.2:
            return self.log.flip_a_bit()
        name = self.rng.choice(filled)
        table = self.tables[name]
        key = self.rng.choice(table.keys)
        value = bytearray(table.values[key])
        at = self.rng.randrange(len(value))
        value[at] ^= 1 << self.rng.randrange(8)
        table.values[key] = bytes(value)
        return f"table {name.decode()}, key {key.hex()}, byte {at}"


class SimLmdb:
    """`lmdb.Environment` over a SimDisk, as far as wal uses it; anything else is an AttributeError."""

    def __init__(self, disk: SimDisk, *, map_size: int, sync: bool, readonly: bool) -> None:
        self.disk = disk
        self.map_size = map_size
        self.disk.sync = sync
        self.readonly = readonly

    def info(self) -> dict[str, int]:
        stored_bytes = sum(table.size_bytes for table in self.disk.tables.values())
        pages = stored_bytes // PAGE_BYTES + 2
        return {"last_txnid": self.disk.transactions, "map_size": self.map_size, "last_pgno": pages}

    def stat(self) -> dict[str, int]:
        return {"psize": PAGE_BYTES, **pages_of(0)}

    def open_db(self, name: bytes, txn: SimTransaction | None = None, create: bool = True) -> Table:
        tables = self.disk.tables
        if name not in tables:
            if not create:
                raise lmdb.NotFoundError(f"no table {name.decode()}")
            tables[name] = Table()
            if txn is not None:
                txn.made.append(name)
        return tables[name]

    def begin(self, db: Table | None = None, write: bool = False) -> SimTransaction:
        if write and self.disk.fatal:
            raise lmdb.PanicError("an earlier write failed")
        return SimTransaction(self.disk, db, write=write)

    def set_mapsize(self, size: int) -> None:
        self.map_size = size or self.map_size

    def close(self) -> None:
        pass


def pages_of(size_bytes: int) -> dict[str, int]:
    return {"branch_pages": 0, "leaf_pages": -(-size_bytes // PAGE_BYTES), "overflow_pages": 0}


class SimTransaction:
    """One transaction. Writes change the tables at once, with what takes them back: no reader runs meanwhile."""

    def __init__(self, disk: SimDisk, db: Table | None, *, write: bool) -> None:
        self._disk, self._db, self._write = disk, db, write
        self._undo: Undo = []
        self.made: list[bytes] = []
        self._over = False

    def __enter__(self) -> SimTransaction:
        return self

    def __exit__(self, kind: Any, *rest: Any) -> None:
        if self._write and not self._over:
            if kind is None:
                self.commit()
            else:
                self.abort()

    def get(self, key: bytes, default: bytes | None = None, db: Table | None = None) -> bytes | None:
        table = db or self._db
        assert table is not None
        return table.values.get(key, default)

    def put(self, key: bytes, value: bytes, *, append: bool = False, db: Table | None = None) -> bool:
        assert self._write
        table = db or self._db
        assert table is not None
        self._disk.step("a write to the journal")
        if self._disk.full:
            self._disk.raised = True
            raise lmdb.MapFullError("the disk is full")
        if append and table.keys and key <= table.keys[-1]:
            return False
        self._undo.append((table, key, table.put(key, value)))
        return True

    def stat(self, db: Table) -> dict[str, int]:
        return pages_of(db.size_bytes)

    def cursor(self, db: Table) -> SimCursor:
        return SimCursor(db, self._undo if self._write else None)

    def commit(self) -> None:
        disk = self._disk
        self._over = True
        try:
            disk.step("the sync of the journal, before it")
        except BaseException:
            self._take_back()
            raise
        disk.work(disk.sync_s + disk.stall_s)
        disk.stall_s = 0.0
        if disk.full:
            disk.raised = True
            self._take_back()
            raise lmdb.DiskError("No space left on device")
        if disk.next_sync_fails:
            disk.next_sync_fails, disk.raised = False, True
            # What a failed sync leaves on the disk is not known: nothing, or everything with the environment unusable.
            if disk.rng.random() < 0.7:
                self._take_back()
            else:
                disk.fatal = True
            raise lmdb.DiskError("Input/output error")
        disk.transactions += 1
        disk.syncs += 1
        if disk.sync:
            disk.unsynced.clear()
        else:
            disk.unsynced.append(self._undo)
        disk.step("the sync of the journal, after it")

    def abort(self) -> None:
        if not self._over:
            self._over = True
            self._take_back()

    def _take_back(self) -> None:
        self._disk.take_back(self._undo)
        self._undo = []
        for name in self.made:
            self._disk.tables.pop(name, None)


class SimCursor:
    """A cursor as wal moves it."""

    def __init__(self, table: Table, undo: Undo | None) -> None:
        self._table, self._undo, self._at = table, undo, 0

    def _stands(self) -> bool:
        return self._at < len(self._table.keys)

    def first(self) -> bool:
        self._at = 0
        return self._stands()

    def last(self) -> bool:
        self._at = max(0, len(self._table.keys) - 1)
        return self._stands()

    def set_range(self, key: bytes) -> bool:
        self._at = bisect_left(self._table.keys, key)
        return self._stands()

    def next(self) -> bool:
        self._at += 1
        return self._stands()

    def key(self) -> bytes:
        return self._table.keys[self._at] if self._stands() else b""

    def value(self) -> bytes:
        return self._table.values[self.key()] if self._stands() else b""

    def item(self) -> tuple[bytes, bytes]:
        return self.key(), self.value()

    def delete(self) -> bool:
        if not self._stands():
            return False
        assert self._undo is not None
        key = self.key()
        self._undo.append((self._table, key, self._table.delete(key)))
        return True

    def close(self) -> None:
        pass

    def __iter__(self) -> Iterator[tuple[bytes, bytes]]:
        for key in list(self._table.keys):
            yield key, self._table.values[key]


class SimEnvironments:
    """Stands in for the class `wal.Environment` where a replica opens its storage: the real one, over a SimDisk."""

    def __init__(self) -> None:
        self.disks: dict[Path, SimDisk] = {}
        """By the directory of the journal."""

    def open_lmdb(self, path: str, *, map_size: int, sync: bool, readonly: bool = False, **options: Any) -> SimLmdb:
        """Stand in for `lmdb.open`: `wal.environment._open_lmdb` says how it wants to be synced."""
        assert not options["writemap"] and options["metasync"]
        return SimLmdb(self.disks[Path(path)], map_size=map_size, sync=sync, readonly=readonly)

    def open(
        self,
        directory: Path,
        *,
        cluster_id: str,
        replica: str,
        map_size_bytes: int,
        create: bool,
        incarnation: Incarnation = FIRST_INCARNATION,
    ) -> Environment:
        """Open as `Environment.open` does, without its file lock and its look at the bytes of LMDB's meta pages."""
        identity = StorageIdentity(cluster_id, replica)
        disk = self.disks[directory]
        directory.mkdir(parents=True, exist_ok=True)
        (directory / wal_environment.DATA_FILE).touch()  # that there is one is all that is asked of the file
        opened: Any = wal_environment._open_lmdb(directory, map_size_bytes, readonly=False)
        try:
            return Environment.prepare(directory, opened, identity, disk.log, create=create, incarnation=incarnation)
        except lmdb.MapFullError as error:
            raise StorageFailed(str(error)) from error
        except (lmdb.Error, OSError) as error:
            raise RecoveryRefused(Condition.DATA_FILE_UNREADABLE, str(error)) from error
