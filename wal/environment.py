"""The one LMDB environment of a replica: for one process, with an identity, stopped by the first failure."""

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import lmdb

from wal import meta_pages, records
from wal.failures import BrokenInvariant, Condition, RecoveryRefused, StorageFailed
from wal.records import GENESIS, TABLES, Damaged, HardState, Identity, Marks

if TYPE_CHECKING:
    from lmdb import _Database

__all__ = ["MAP_SIZE_BYTES", "BrokenInvariant", "Environment", "StorageFailed"]

MAP_SIZE_BYTES: Final = 16 << 30
"""Default bound of the data file: address space, not disk, until it is used; years of history for most sites."""

LMDB_ENGINE: Final = 0
"""LMDB's major version, pinned: the durability and damage figures in HAZARDS.md were measured on 0.9."""

READERS_MAX: Final = 64
"""Read transactions open at once, over all processes: the replica itself has one or two, the rest are audits."""

DATA_FILE: Final = "data.mdb"
LOCK_FILE: Final = "replica.lock"
_LOCK_TEXT_MAX_BYTES: Final = 512


class Environment:
    """The storage of one replica: five tables in one file, written by one transaction at a time, each one durable.

    Made by `open` or `open_readonly`. A second process is refused by name while one is open. After the first write that
    fails, every later call raises the same StorageFailed: LMDB itself would let the next transaction succeed, with
    what was promised before it lost.
    """

    def __init__(
        self, directory: Path, environment: lmdb.Environment, tables: "dict[bytes, _Database]", identity: Identity
    ):
        self.directory: Final = directory
        self.identity: Final = identity
        self.failure: StorageFailed | None = None
        self.commit: Callable[[lmdb.Transaction[bytes]], None] = _commit
        """The seam where a test makes a sync fail: called with the transaction to commit."""
        self._environment: lmdb.Environment | None = environment
        self._tables: Final = tables
        self._lock: int | None = None

    @classmethod
    def open(
        cls, directory: Path, *, cluster_id: str, replica: str, map_size_bytes: int = MAP_SIZE_BYTES, create: bool
    ) -> Self:
        """Open the storage of `replica`, as the only process that may.

        With `create` an empty directory becomes a new storage; without it an empty directory is refused, because a
        replica that starts empty under its old name has forgotten its promises. Raises RecoveryRefused with the row of
        the recovery table, StorageFailed, or ValueError for names that are too long.
        """
        identity = Identity(cluster_id, replica)
        records.pack_identity(identity)
        lock = _lock_directory(directory, replica, create=create)
        environment: lmdb.Environment | None = None
        try:
            fresh = not _has_data(lock.directory)
            if fresh and not create:
                raise RecoveryRefused(Condition.DIRECTORY_EMPTY, str(directory))
            if not fresh:
                meta_pages.check(lock.directory, directory / DATA_FILE)
            environment = _open_lmdb(directory, map_size_bytes, readonly=False)
            if environment.info()["last_txnid"] == 0:
                if not create:
                    raise RecoveryRefused(Condition.DIRECTORY_EMPTY, str(directory))
                tables = _create(environment, identity)
                # LMDB syncs its file, not the directory that names it.
                os.fsync(lock.directory)
            else:
                tables = _open_tables(directory, environment)
                _check_identity(directory, environment, tables, identity)
        except lmdb.MapFullError as error:
            _close(environment, lock.file)
            raise StorageFailed(_map_full(directory, map_size_bytes)) from error
        except (lmdb.Error, OSError) as error:
            _close(environment, lock.file)
            raise RecoveryRefused(Condition.DATA_FILE_UNREADABLE, f"{directory / DATA_FILE} ({error})") from error
        except BaseException:
            _close(environment, lock.file)
            raise
        finally:
            os.close(lock.directory)
        opened = cls(directory, environment, tables, identity)
        opened._lock = lock.file
        return opened

    @classmethod
    def open_readonly(cls, directory: Path) -> Self:
        """Open the storage for reading, from another process than the replica's, which may be running or not.

        Raises RecoveryRefused if there is nothing to read or it cannot be read.
        """
        environment: lmdb.Environment | None = None
        try:
            if not (directory / DATA_FILE).is_file():
                raise RecoveryRefused(Condition.DIRECTORY_EMPTY, str(directory))
            environment = _open_lmdb(directory, 0, readonly=True)
            size_bytes = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
            if (directory / DATA_FILE).stat().st_size < size_bytes:
                raise RecoveryRefused(
                    Condition.DATA_FILE_UNREADABLE, f"{directory / DATA_FILE} (it ends before its last page)"
                )
            if environment.info()["last_txnid"] == 0:
                raise RecoveryRefused(Condition.DIRECTORY_EMPTY, str(directory))
            tables = _open_tables(directory, environment)
            identity = _read_identity(directory, environment, tables)
        except (lmdb.Error, OSError) as error:
            _close(environment, None)
            raise RecoveryRefused(Condition.DATA_FILE_UNREADABLE, f"{directory / DATA_FILE} ({error})") from error
        except BaseException:
            _close(environment, None)
            raise
        return cls(directory, environment, tables, identity)

    def close(self) -> None:
        """Close the files and let go of the lock; what was not synced is forgotten. May be called again."""
        environment, self._environment = self._environment, None
        lock, self._lock = self._lock, None
        _close(environment, lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def table(self, name: bytes) -> "_Database":
        """The handle of a table, for the transactions of `read` and `write`."""
        return self._tables[name]

    def check(self) -> None:
        """Raise the failure that stopped this environment, or BrokenInvariant if it is closed."""
        if self.failure is not None:
            raise self.failure
        if self._environment is None:
            raise BrokenInvariant(f"the storage in {self.directory} is closed")

    @contextmanager
    def read(self) -> "Iterator[lmdb.Transaction[bytes]]":
        """A consistent view; keep it short, because the file cannot reuse pages while a view needs them.

        Raises StorageFailed if LMDB finds a broken page.
        """
        self.check()
        assert self._environment is not None
        try:
            try:
                transaction = self._environment.begin()
            except lmdb.MapResizedError:
                # The replica's own process was restarted with a larger map: adopt its size.
                self._environment.set_mapsize(0)
                transaction = self._environment.begin()
            with transaction:
                yield transaction
        except lmdb.Error as error:
            raise self.fail(f"{self.directory / DATA_FILE} cannot be read: {error}") from error

    @contextmanager
    def write(self) -> "Iterator[lmdb.Transaction[bytes]]":
        """One transaction, durable when the block ends; any exception in it stops the environment for ever.

        Raises StorageFailed.
        """
        self.check()
        assert self._environment is not None
        try:
            transaction = self._environment.begin(write=True)
            try:
                yield transaction
                self.commit(transaction)
            except BaseException:
                with suppress(lmdb.Error):
                    transaction.abort()
                raise
        except lmdb.MapFullError as error:
            raise self.fail(_map_full(self.directory, self._environment.info()["map_size"])) from error
        except (lmdb.Error, OSError) as error:
            raise self.fail(
                f"{self.directory / DATA_FILE} could not be written durably: {error}. Free space or replace the disk, "
                "then start the replica again: it must not go on, because what the disk holds is not known"
            ) from error
        except BaseException as error:
            self.fail(f"{self.directory / DATA_FILE}: a write was interrupted ({error!r}); start the replica again")
            raise

    @property
    def fill(self) -> float:
        """How much of the map is used, from 0 to 1. The journal only grows, so this only grows."""
        self.check()
        assert self._environment is not None
        info = self._environment.info()
        return float((info["last_pgno"] + 1) * self._environment.stat()["psize"] / info["map_size"])

    def fail(self, sentence: str) -> StorageFailed:
        """Stop this environment for ever, and give the exception to raise."""
        if self.failure is None:
            self.failure = StorageFailed(sentence)
        return self.failure


class _Lock:
    def __init__(self, directory: int, file: int) -> None:
        self.directory = directory
        self.file = file


def _commit(transaction: "lmdb.Transaction[bytes]") -> None:
    transaction.commit()


def _map_full(directory: Path, map_size_bytes: int) -> str:
    return (
        f"{directory / DATA_FILE} has reached its bound of {map_size_bytes} bytes. Set a larger map_size in [storage] "
        "of forebay.toml, see that the disk has the space, and start the replica again"
    )


def _lock_directory(directory: Path, replica: str, *, create: bool) -> _Lock:
    try:
        if create:
            _make_directory(directory)
        elif not directory.exists():
            raise RecoveryRefused(Condition.DIRECTORY_EMPTY, str(directory))
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise RecoveryRefused(Condition.DIRECTORY_UNUSABLE, f"{directory} ({error.strerror})") from error
    file: int | None = None
    try:
        file = os.open(LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, mode=0o600, dir_fd=descriptor)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(file, 0)
        os.pwrite(file, f"process {os.getpid()} of replica {replica}".encode(), 0)
    except OSError as error:
        held = error.errno in (errno.EWOULDBLOCK, errno.EACCES) and file is not None
        holder = os.pread(file, _LOCK_TEXT_MAX_BYTES, 0).decode(errors="replace") if held and file is not None else ""
        if file is not None:
            os.close(file)
        os.close(descriptor)
        if held:
            raise RecoveryRefused(Condition.HELD_BY_ANOTHER_PROCESS, f"{directory} (by {holder})") from error
        raise RecoveryRefused(Condition.DIRECTORY_UNUSABLE, f"{directory / LOCK_FILE} ({error.strerror})") from error
    return _Lock(descriptor, file)


def _make_directory(directory: Path) -> None:
    """Make the directory and its parents, each name durable before the next is made."""
    if directory.is_dir():
        return
    _make_directory(directory.parent)
    directory.mkdir(mode=0o700, exist_ok=True)
    parent = os.open(directory.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(parent)
    finally:
        os.close(parent)


def _has_data(directory: int) -> bool:
    try:
        return os.stat(DATA_FILE, dir_fd=directory, follow_symlinks=False).st_size > 0
    except FileNotFoundError:
        return False


def _open_lmdb(directory: Path, map_size_bytes: int, *, readonly: bool) -> lmdb.Environment:
    return lmdb.open(
        os.fspath(directory),
        map_size=map_size_bytes,
        max_dbs=len(TABLES),
        max_readers=READERS_MAX,
        mode=0o600,
        readonly=readonly,
        create=not readonly,
        sync=True,
        metasync=True,
        writemap=False,
        lock=True,
        lib_version=LMDB_ENGINE,
    )


def _create(environment: lmdb.Environment, identity: Identity) -> "dict[bytes, _Database]":
    """Make the tables, identity, hard state and marks in one transaction: all of them exist or none."""
    with environment.begin(write=True) as transaction:
        tables = {name: environment.open_db(name, txn=transaction) for name in TABLES}
        state = tables[records.STATE]
        transaction.put(records.FORMAT_KEY, records.pack_number(records.FORMAT_KEY, records.FORMAT_VERSION), db=state)
        transaction.put(records.IDENTITY_KEY, records.pack_identity(identity), db=state)
        transaction.put(records.HARD_KEY, records.pack_hard(HardState(0, None)), db=state)
        transaction.put(records.MARKS_KEY, records.pack_marks(Marks(0, 0, 0, 0, 0, 0, GENESIS)), db=state)
    return tables


def _open_tables(directory: Path, environment: lmdb.Environment) -> "dict[bytes, _Database]":
    tables = {}
    for name in TABLES:
        try:
            tables[name] = environment.open_db(name, create=False)
        except (lmdb.NotFoundError, lmdb.IncompatibleError) as error:
            raise RecoveryRefused(Condition.TABLE_MISSING, f"{directory / DATA_FILE}, table {name.decode()}") from error
    return tables


def _read_identity(directory: Path, environment: lmdb.Environment, tables: "dict[bytes, _Database]") -> Identity:
    """The stored identity, after the format version was found to be one that is understood."""
    place = f"{directory / DATA_FILE}, table state, key "
    with environment.begin(tables[records.STATE]) as transaction:
        stored_format = transaction.get(records.FORMAT_KEY, b"")
        stored_identity = transaction.get(records.IDENTITY_KEY, b"")
    try:
        version = records.unpack_number(records.FORMAT_KEY, stored_format)
    except Damaged as error:
        raise RecoveryRefused(Condition.IDENTITY_DAMAGED, f"{place}format ({error})") from error
    if version != records.FORMAT_VERSION:
        raise RecoveryRefused(
            Condition.FORMAT_UNKNOWN, f"{place}format (it is {version}; this release reads {records.FORMAT_VERSION})"
        )
    try:
        return records.unpack_identity(stored_identity)
    except Damaged as error:
        raise RecoveryRefused(Condition.IDENTITY_DAMAGED, f"{place}identity ({error})") from error


def _check_identity(
    directory: Path, environment: lmdb.Environment, tables: "dict[bytes, _Database]", wanted: Identity
) -> None:
    stored = _read_identity(directory, environment, tables)
    if stored.cluster_id != wanted.cluster_id:
        place = f"{directory} (it belongs to cluster {stored.cluster_id}, not {wanted.cluster_id})"
        raise RecoveryRefused(Condition.CLUSTER_FOREIGN, place)
    if stored.replica != wanted.replica:
        place = f"{directory} (it belongs to replica {stored.replica}, not {wanted.replica})"
        raise RecoveryRefused(Condition.REPLICA_FOREIGN, place)


def _close(environment: lmdb.Environment | None, lock: int | None) -> None:
    if environment is not None:
        environment.close()
    if lock is not None:
        os.close(lock)
