"""Storage of a replica: LMDB and the sync log, with an identity, for one process.

The first failure stops the storage permanently.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import lmdb

from forebay.wal import directory as directories
from forebay.wal import records
from forebay.wal.directory import Lock, OpenedFiles
from forebay.wal.failures import (
    DATA_FILE,
    LOG_FILE,
    READERS_FILE,
    BrokenInvariant,
    Condition,
    RecoveryRefused,
    StorageFailed,
)
from forebay.wal.records import (
    FIRST_INCARNATION,
    GENESIS,
    TABLES,
    DamagedValue,
    HardState,
    Incarnation,
    LogMark,
    Marks,
    StorageIdentity,
)
from forebay.wal.sync_log import DiskStore, SyncLog, SyncRecord, is_used, make_log, open_log

if TYPE_CHECKING:
    from lmdb import _Database


def create_tables(
    environment: lmdb.Environment,
    identity: StorageIdentity,
    mark: LogMark,
    incarnation: Incarnation = FIRST_INCARNATION,
) -> "dict[bytes, _Database]":
    """Create tables, identity, hard state and marks in one transaction: either all exist or none."""
    with environment.begin(write=True) as transaction:
        tables = {name: environment.open_db(name, txn=transaction) for name in TABLES}
        state = tables[records.STATE]
        transaction.put(records.FORMAT_KEY, records.pack_format(records.FORMAT_VERSION), db=state)
        transaction.put(records.IDENTITY_KEY, records.pack_identity(identity), db=state)
        transaction.put(records.HARD_KEY, records.pack_hard(HardState(0, None)), db=state)
        transaction.put(records.MARKS_KEY, records.pack_marks(Marks(0, 0, 0, 0, 0, 0, GENESIS)), db=state)
        transaction.put(records.LOG_KEY, records.pack_log(mark), db=state)
        if incarnation != FIRST_INCARNATION:
            transaction.put(records.INCARNATION_KEY, records.pack_incarnation(incarnation), db=state)
    return tables


def log_mark(directory: Path, value: bytes | None) -> LogMark:
    """Decode the stored mark of the sync log.

    Raises:
        RecoveryRefused: The mark is missing or damaged.
    """
    place = f"{directory / DATA_FILE}, table state, key log"
    if value is None:
        raise RecoveryRefused(Condition.LOG_MARK_MISSING, place)
    try:
        return records.unpack_log(value)
    except DamagedValue as error:
        raise RecoveryRefused(Condition.LOG_MARK_DAMAGED, f"{place} ({error})") from error


def open_tables(directory: Path, environment: lmdb.Environment) -> "dict[bytes, _Database]":
    """Return the handles of all tables.

    Raises:
        RecoveryRefused: A table is missing.
    """
    tables = {}
    for name in TABLES:
        try:
            tables[name] = environment.open_db(name, create=False)
        except (lmdb.NotFoundError, lmdb.IncompatibleError) as error:
            raise RecoveryRefused(Condition.TABLE_MISSING, f"{directory / DATA_FILE}, table {name.decode()}") from error
    return tables


def read_identity(directory: Path, environment: lmdb.Environment, tables: "dict[bytes, _Database]") -> StorageIdentity:
    """Return the stored identity.

    Raises:
        RecoveryRefused: The identity is missing or damaged, or this release does not read the format.
    """
    place = f"{directory / DATA_FILE}, table state, key "
    with environment.begin(tables[records.STATE]) as transaction:
        stored_format = transaction.get(records.FORMAT_KEY, b"")
        stored_identity = transaction.get(records.IDENTITY_KEY, b"")
    try:
        version = records.unpack_format(stored_format)
    except DamagedValue as error:
        raise RecoveryRefused(Condition.IDENTITY_DAMAGED, f"{place}format ({error})") from error
    if version == records.FORMAT_OF_A_STEP:
        raise RecoveryRefused(Condition.FORMAT_OF_A_CONSTRUCTION_STEP, f"{place}format")
    if version != records.FORMAT_VERSION:
        raise RecoveryRefused(
            Condition.FORMAT_UNKNOWN, f"{place}format (version {version}; this release reads {records.FORMAT_VERSION})"
        )
    try:
        return records.unpack_identity(stored_identity)
    except DamagedValue as error:
        raise RecoveryRefused(Condition.IDENTITY_DAMAGED, f"{place}identity ({error})") from error


def read_incarnation(directory: Path, environment: lmdb.Environment, tables: "dict[bytes, _Database]") -> Incarnation:
    """Return the cluster's incarnation, as stored.

    Raises:
        RecoveryRefused: The stored incarnation is damaged.
    """
    with environment.begin(tables[records.STATE]) as transaction:
        stored = transaction.get(records.INCARNATION_KEY)
    try:
        return FIRST_INCARNATION if stored is None else records.unpack_incarnation(stored)
    except DamagedValue as error:
        place = f"{directory / DATA_FILE}, table state, key incarnation ({error})"
        raise RecoveryRefused(Condition.IDENTITY_DAMAGED, place) from error


def check_identity(
    directory: Path, environment: lmdb.Environment, tables: "dict[bytes, _Database]", wanted: StorageIdentity
) -> None:
    """Check that the storage belongs to `wanted`.

    Raises:
        RecoveryRefused: The storage belongs to another cluster or replica.
    """
    stored = read_identity(directory, environment, tables)
    if stored.cluster_id != wanted.cluster_id:
        place = f"{directory} (the storage belongs to cluster {stored.cluster_id}, not {wanted.cluster_id})"
        raise RecoveryRefused(Condition.CLUSTER_FOREIGN, place)
    if stored.replica != wanted.replica:
        place = f"{directory} (the storage belongs to replica {stored.replica}, not {wanted.replica})"
        raise RecoveryRefused(Condition.REPLICA_FOREIGN, place)


MAP_SIZE_BYTES: Final = 16 << 30
"""Default maximum size of the data file: years of history for most sites. Unused space takes no disk."""

LMDB_ENGINE: Final = 0
"""LMDB's major version: 0.9, because durability and damage were measured on it (HAZARDS.md)."""

META_SCANS_MAX: Final = 20
"""Number of scans of the meta pages before a reader treats a disagreement as damage. A scan takes microseconds; a
replica's checkpoints are milliseconds apart.
"""

READERS_MAX: Final = 64
"""Concurrent read transactions of all processes: the replica uses one or two, audits the rest."""


META_PAGES: Final = 2
"""Number of pages that belong to no table."""

FREE_PAGES_SHARE: Final = 0.9
"""Share of the free pages that counts as available. LMDB stores an entry in consecutive pages, and extends the file if
it finds no free run that is long enough. Removed entries leave runs of their own length, so most searches succeed.
"""

FREE_BYTES_KEPT: Final = 16 << 20
"""Reserve that never counts as available (less on a small map): a transaction cannot reuse the pages that it frees."""


class Environment:
    """Storage of one replica: five tables in one LMDB file, and the sync log with the changes that LMDB lacks.

    Transactions are durable and run one at a time. Create an instance with `open` or `open_readonly`. While one process
    has the storage open for writing, a second writer is rejected with the name of the first. After the first failed
    write, every later call raises the same StorageFailed. (LMDB itself would let the next transaction succeed after
    losing earlier promises.)
    """

    def __init__(
        self,
        directory: Path,
        environment: lmdb.Environment,
        tables: "dict[bytes, _Database]",
        identity: StorageIdentity,
        log: SyncLog,
    ):
        self.directory: Final = directory
        self.identity: Final = identity
        self.incarnation = read_incarnation(directory, environment, tables)
        """Incarnation of the cluster."""
        self.failure: StorageFailed | None = None
        self.readonly = False
        self.log: Final = log
        self.commit: Callable[[lmdb.Transaction[bytes] | SyncRecord], None] = _commit
        """Called with each transaction and record; a hook to measure syncs, and to make one fail in tests."""
        self._environment: lmdb.Environment | None = environment
        self._tables: Final = tables
        self._counted: tuple[int, int] | None = None
        """Number of a transaction, and the pages in use after it."""
        self._lock: Lock | None = None
        self._files: OpenedFiles | None = None
        """The opened files; None if read-only or on a simulated disk."""

    @classmethod
    def open(
        cls,
        directory: Path,
        *,
        cluster_id: str,
        replica: str,
        map_size_bytes: int = MAP_SIZE_BYTES,
        create: bool,
        incarnation: Incarnation = FIRST_INCARNATION,
    ) -> Self:
        """Open the storage of `replica` exclusively.

        With `create`, an empty directory becomes a new storage of this incarnation of the cluster. Otherwise an empty
        directory is rejected, because a replica that starts empty under its old name has forgotten its promises.

        Raises:
            RecoveryRefused: The storage cannot be used; `condition` is the row of the recovery table.
            StorageFailed: The storage cannot be written.
            ValueError: A name is too long.
        """
        identity = StorageIdentity(cluster_id, replica)
        records.pack_identity(identity)
        lock = directories.lock(directory, replica, create=create)
        environment: lmdb.Environment | None = None
        try:
            files = OpenedFiles(directory, lock.directory)
            fresh = not directories.has_data(lock.directory)
            if fresh and not create:
                raise RecoveryRefused(Condition.DIRECTORY_EMPTY, str(directory))
            if not fresh:
                directories.check_meta_pages(lock.directory, directory / DATA_FILE)
            files.note(DATA_FILE)
            environment = _open_lmdb(directory, map_size_bytes, readonly=False)
            files.note(DATA_FILE, READERS_FILE)
            # The lock and the checks used descriptors, but LMDB opened the file by path: check that both are the same
            # file.
            if (altered := files.find_altered()) is not None:
                raise StorageFailed(altered)
            environment.reader_check()
            opened = cls.prepare(
                directory, environment, identity, DiskStore(lock.directory), create=create, incarnation=incarnation
            )
            files.note(LOG_FILE)
        except lmdb.MapFullError as error:
            _close(environment, lock)
            raise StorageFailed(_map_full(directory, map_size_bytes)) from error
        except (lmdb.Error, OSError) as error:
            _close(environment, lock)
            raise directories.rejection(directory, error) from error
        except BaseException:
            _close(environment, lock)
            raise
        opened._lock, opened._files = lock, files
        return opened

    @classmethod
    def prepare(
        cls,
        directory: Path,
        environment: lmdb.Environment,
        identity: StorageIdentity,
        store: DiskStore,
        *,
        create: bool,
        incarnation: Incarnation = FIRST_INCARNATION,
    ) -> Self:
        """Create or check the content of an LMDB environment that is open for writing, and open its sync log.

        The log is durable before LMDB records that it exists.

        Raises:
            RecoveryRefused: The content or the sync log is damaged, missing, or belongs to another replica.
            lmdb.Error: LMDB rejects an operation.
            OSError: The disk fails.
        """
        if environment.info()["last_txnid"] == 0:
            if not create:
                raise RecoveryRefused(Condition.DIRECTORY_EMPTY, str(directory))
            if is_used(store, directory):
                raise RecoveryRefused(Condition.DATA_FILE_MISSING, str(directory / LOG_FILE))
            make_log(store, directory, identity)
            tables = create_tables(environment, identity, LogMark(1, store.size_bytes), incarnation)
            # LMDB syncs its file, but not the directory.
            store.sync_directory()
        else:
            tables = open_tables(directory, environment)
            check_identity(directory, environment, tables, identity)
        with environment.begin(tables[records.STATE]) as transaction:
            mark = log_mark(directory, transaction.get(records.LOG_KEY))
        return cls(directory, environment, tables, identity, open_log(store, directory, identity, mark.size_bytes))

    @classmethod
    def open_readonly(cls, directory: Path) -> Self:
        """Open the storage for reading, from another process than the replica's. The replica may be running.

        Raises:
            RecoveryRefused: The storage is missing or unreadable.
        """
        environment: lmdb.Environment | None = None
        try:
            if not (directory / DATA_FILE).is_file():
                raise RecoveryRefused(Condition.DIRECTORY_EMPTY, str(directory))
            environment = _open_lmdb(directory, 0, readonly=True)
            if directories.ends_early(environment, directory / DATA_FILE):
                raise RecoveryRefused(
                    Condition.DATA_FILE_UNREADABLE, f"{directory / DATA_FILE} (the file ends before its last page)"
                )
            if environment.info()["last_txnid"] == 0:
                raise RecoveryRefused(Condition.DIRECTORY_EMPTY, str(directory))
            _check_meta_pages_beside(directory)
            environment.reader_check()
            tables = open_tables(directory, environment)
            identity = read_identity(directory, environment, tables)
            with environment.begin(tables[records.STATE]) as transaction:
                mark = log_mark(directory, transaction.get(records.LOG_KEY))
            del transaction  # a referenced transaction keeps its slot in the reader table
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                log = open_log(DiskStore(descriptor, readonly=True), directory, identity, mark.size_bytes)
            finally:
                os.close(descriptor)
        except (lmdb.Error, OSError) as error:
            _close(environment, None)
            raise directories.rejection(directory, error) from error
        except BaseException:
            _close(environment, None)
            raise
        opened = cls(directory, environment, tables, identity, log)
        opened.readonly = True
        return opened

    def close(self) -> None:
        """Close the files and release the lock. Unsynced changes are dropped. Further calls do nothing."""
        environment, self._environment = self._environment, None
        lock, self._lock = self._lock, None
        if environment is not None:
            self.log.close()
        _close(environment, lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def table(self, name: bytes) -> "_Database":
        """Return the handle of a table, for the transactions of `read` and `write`."""
        return self._tables[name]

    def check(self) -> None:
        """Raise an exception if this environment is not usable.

        Raises:
            StorageFailed: An earlier failure has stopped the environment.
            BrokenInvariant: The environment is closed.
        """
        if self.failure is not None:
            raise self.failure
        if self._environment is None:
            raise BrokenInvariant(f"the storage in {self.directory} is closed")

    @contextmanager
    def read(self) -> "Iterator[lmdb.Transaction[bytes]]":
        """Provide a consistent read view. Keep views short: LMDB cannot reuse the pages of an open view.

        Raises:
            StorageFailed: LMDB finds a broken page.
        """
        self.check()
        assert self._environment is not None
        try:
            try:
                transaction = self._environment.begin()
            except lmdb.MapResizedError:
                # The replica restarted with a larger map: adopt its size.
                self._environment.set_mapsize(0)
                transaction = self._environment.begin()
            except lmdb.ReadersFullError:
                # Slots of killed readers stay occupied until a live process checks the table.
                self._environment.reader_check()
                transaction = self._environment.begin()
            with transaction:
                yield transaction
        except lmdb.Error as error:
            raise self.fail(f"{self.directory / DATA_FILE} cannot be read: {error}") from error

    @contextmanager
    def write(self) -> "Iterator[lmdb.Transaction[bytes]]":
        """Run one transaction, durable when the block ends. An exception inside stops the environment permanently.

        Raises:
            StorageFailed: This write or an earlier one failed.
        """
        self.check()
        assert self._environment is not None
        self.check_files()
        try:
            transaction = self._environment.begin(write=True)
            try:
                yield transaction
                self.commit(transaction)
                directories.lengthen(self._environment, self.directory / DATA_FILE)
            except BaseException:
                with suppress(lmdb.Error):
                    transaction.abort()
                raise
        except lmdb.MapFullError as error:
            raise self.fail(_map_full(self.directory, self._environment.info()["map_size"])) from error
        except (lmdb.Error, OSError) as error:
            raise self.fail(_not_durable(self.directory / DATA_FILE, error)) from error
        except BaseException as error:
            self.fail(f"{self.directory / DATA_FILE}: a write was interrupted ({error!r}); start the replica again")
            raise

    def log_mark(self) -> LogMark:
        """Return the mark of the sync log, as stored in LMDB.

        Raises:
            RecoveryRefused: The mark is missing or damaged.
        """
        with self.read() as transaction:
            return log_mark(self.directory, transaction.get(records.LOG_KEY, db=self.table(records.STATE)))

    def next_log_mark(self) -> LogMark:
        """Return the mark of the sync log for the next checkpoint."""
        before = self.log_mark()
        return before._replace(generation=before.generation + 1)

    def append(self, body: bytes) -> None:
        """Append a record to the sync log, durable on return. An exception stops the environment permanently.

        The caller must have checked the size with `log.fits`.

        Raises:
            StorageFailed: This write or an earlier one failed.
        """
        self.check()
        log = self.log
        try:
            record = log.record(body)
            self.commit(record)
            log.note_added(record)
        except (lmdb.Error, OSError) as error:
            raise self.fail(_not_durable(log.path, error)) from error
        except BaseException as error:
            self.fail(f"{log.path}: a write was interrupted ({error!r}); start the replica again")
            raise

    @property
    def map_size_bytes(self) -> int:
        """Maximum size of the data file."""
        self.check()
        assert self._environment is not None
        return int(self._environment.info()["map_size"])

    @property
    def fill(self) -> float:
        """Used share of the map, from 0 to 1."""
        return self.fill_with(0)

    def fill_with(self, size_bytes: int) -> float:
        """Return the used share of the map after adding this many bytes."""
        self.check()
        assert self._environment is not None
        info, page_bytes = self._environment.info(), self._environment.stat()["psize"]
        pages = info["last_pgno"] + 1
        # Pages freed by pruning are reused, but not all of them, because an entry needs consecutive pages.
        free_bytes = (pages - self._used_pages()) * page_bytes
        kept_bytes = min(FREE_BYTES_KEPT, info["map_size"] // 16)
        room_bytes = FREE_PAGES_SHARE * max(0, free_bytes - kept_bytes)
        return float((pages * page_bytes - room_bytes + size_bytes) / info["map_size"])

    def _used_pages(self) -> int:
        """Return the pages used by tables, plus the two meta pages, as of the last transaction."""
        assert self._environment is not None
        transaction_id = self._environment.info()["last_txnid"]
        if self._counted is None or self._counted[0] != transaction_id:
            with self.read() as transaction:
                stats = [self._environment.stat(), *(transaction.stat(table) for table in self._tables.values())]
            pages = sum(one["branch_pages"] + one["leaf_pages"] + one["overflow_pages"] for one in stats)
            self._counted = transaction_id, META_PAGES + pages
        return self._counted[1]

    def check_files(self) -> None:
        """Stop if an opened file was replaced or removed, and release the pages of killed readers.

        The check takes a few microseconds. Call it outside transactions.
        @524-525 ~Free space or replace the disk, then start the replica again: "
                "it must not continue, because the content of the disk is unknown"~The content of the disk is unknown,
                so the replica stops. " "Free space or replace the disk, then start the replica again"~

        Raises:
            StorageFailed: A file was replaced or removed.
        """
        if self._files is None or self._environment is None:
            return
        if (altered := self._files.find_altered()) is not None:
            raise self.fail(altered)
        try:
            self._environment.reader_check()
        except lmdb.Error as error:
            raise self.fail(f"{self.directory / READERS_FILE} cannot be read: {error}") from error

    def fail(self, sentence: str) -> StorageFailed:
        """Stop this environment permanently, and return the exception to raise."""
        if self.failure is None:
            self.failure = StorageFailed(sentence)
        return self.failure


def _commit(sync: "lmdb.Transaction[bytes] | SyncRecord") -> None:
    sync.commit()


def _not_durable(path: Path, error: Exception) -> str:
    return (
        f"{path} could not be written durably: {error}. Free space or replace the disk, then start the replica again: "
        "it must not continue, because the content of the disk is unknown"
    )


def _map_full(directory: Path, map_size_bytes: int) -> str:
    return (
        f"{directory / DATA_FILE} has reached its maximum of {map_size_bytes} bytes. Set a larger map_size in "
        "[storage] of forebay.toml, check that the disk has the space, and start the replica again"
    )


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


def _check_meta_pages_beside(directory: Path) -> None:
    """Check the meta pages while a replica may write them. Only a problem found in every scan is an error."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for left in reversed(range(META_SCANS_MAX)):
            try:
                directories.check_meta_pages(descriptor, directory / DATA_FILE, readonly=True)
                return
            except RecoveryRefused:
                if not left:
                    raise
    finally:
        os.close(descriptor)


def _close(environment: lmdb.Environment | None, lock: Lock | None) -> None:
    if environment is not None:
        environment.close()
    if lock is not None:
        lock.release()
