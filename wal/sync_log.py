"""Sync log: one file in front of LMDB, so that a sync costs one write and one flush of the disk.

An LMDB transaction needs two flushes, and writes whole pages for a few changed bytes. A sync is therefore written to
this log as one record, and a later LMDB transaction, the checkpoint, receives the changes of many syncs. The checkpoint
also begins the next generation of the log, which makes records of older generations void. The file is created at full
size and filled with zeros. A growing file, or space that is only reserved, would make the file system write its own
journal in every sync.
"""

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

from forebay.wal import records, sectors
from forebay.wal.failures import LOG_FILE, BrokenInvariant, Condition, RecoveryRefused
from forebay.wal.records import StorageIdentity

LOG_BYTES: Final = 4 << 20
"""Size of a new log: fits a thousand small syncs between two checkpoints, and is written in milliseconds."""

RECORD_MAX_BYTES: Final = 256 << 10
"""Maximum size of a sync in the log. Larger syncs go straight to LMDB, because writing them twice costs more time."""


READ_BYTES: Final = 1 << 20
"""Bytes read at a time."""


class DiskFile:
    """System calls on the log's file, in a class that a simulated disk can replace. Methods raise OSError."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read(self, limit_bytes: int) -> bytes:
        """Read the whole file, up to a limit."""
        pieces, offset = [], 0
        while piece := os.pread(self._descriptor, min(READ_BYTES, limit_bytes - offset), offset):
            pieces.append(piece)
            offset += len(piece)
        return b"".join(pieces)

    def write(self, data: bytes, offset: int) -> None:
        """Write all of `data` at `offset`."""
        written = os.pwrite(self._descriptor, data, offset)
        if written != len(data):
            raise OSError(errno.EIO, f"{os.strerror(errno.EIO)}: {written} of {len(data)} bytes were written")

    def sync(self) -> None:
        """Make written data durable."""
        os.fdatasync(self._descriptor)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


class DiskStore:
    """Factory of a replica's log in the directory with this descriptor. Methods raise OSError."""

    def __init__(self, directory: int, *, readonly: bool = False) -> None:
        self._directory = directory
        self._readonly = readonly

    @property
    def size_bytes(self) -> int:
        """Size of a new log."""
        return LOG_BYTES

    def make(self, first_block: bytes) -> None:
        """Create a log that begins with this block, durable on return; replace an existing log."""
        with suppress(FileNotFoundError):
            os.unlink(LOG_FILE, dir_fd=self._directory)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        file = DiskFile(os.open(LOG_FILE, flags, mode=0o600, dir_fd=self._directory))
        try:
            file.write(first_block.ljust(self.size_bytes, b"\0"), 0)
            file.sync()
        finally:
            file.close()
        self.sync_directory()

    def open(self) -> DiskFile:
        """Open the log."""
        flags = os.O_RDONLY if self._readonly else os.O_RDWR
        flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(LOG_FILE, flags, dir_fd=self._directory)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "it is not a regular file")
        return DiskFile(descriptor)

    def sync_directory(self) -> None:
        """Make the names of the files durable."""
        os.fsync(self._directory)


class SyncRecord:
    """Sync record, ready to be written."""

    __slots__ = ("_file", "data", "offset")

    def __init__(self, file: DiskFile, data: bytes, offset: int) -> None:
        self._file, self.data, self.offset = file, data, offset

    def commit(self) -> None:
        """Write the record, durable on return.

        Raises:
            OSError: The disk fails.
        """
        self._file.write(self.data, self.offset)
        self._file.sync()


class SyncLog:
    """Sync log of one replica. Records can be added after `begin` has set the generation."""

    def __init__(self, file: DiskFile, path: Path, identity: StorageIdentity, size_bytes: int) -> None:
        self.path: Final = path
        self._file = file
        self._identity = records.pack_identity(identity)
        self._size_bytes = size_bytes
        self._generation = self._sequence = 0
        self._offset = size_bytes
        self._tags = sectors.Tags(self._identity, 0)

    @property
    def generation(self) -> int:
        """Generation set by `begin`; 0 before the first call."""
        return self._generation

    def read(self, generation: int) -> list[bytes]:
        """Return the bodies of this generation's records, in order.

        Raises:
            RecoveryRefused: The log is damaged, ahead of LMDB, or belongs to another replica.
        """
        try:
            content = self._file.read(self._size_bytes + 1)
        except OSError as error:
            raise RecoveryRefused(Condition.SYNC_LOG_UNREADABLE, f"{self.path} ({error})") from error
        if len(content) != self._size_bytes:
            place = f"{self.path} ({len(content)} of {self._size_bytes} bytes can be read)"
            raise RecoveryRefused(Condition.SYNC_LOG_OF_ANOTHER_SIZE, place)
        try:
            return sectors.read(content, self._identity, generation)
        except sectors.LogForeign as error:
            raise RecoveryRefused(Condition.SYNC_LOG_FOREIGN, f"{self.path} ({error})") from error
        except sectors.LogAhead as error:
            raise RecoveryRefused(Condition.SYNC_LOG_AHEAD, f"{self.path} ({error})") from error
        except sectors.LogDamaged as error:
            raise RecoveryRefused(Condition.SYNC_LOG_DAMAGED, f"{self.path} ({error})") from error

    def begin(self, generation: int) -> None:
        """Begin a generation at the first record. LMDB must have durably recorded the generation."""
        self._generation, self._sequence, self._offset = generation, 0, sectors.BLOCK_BYTES
        self._tags = sectors.Tags(self._identity, generation)

    @property
    def is_empty(self) -> bool:
        """Return whether no record was added since `begin`."""
        return self._sequence == 0

    def fits(self, body_bytes: int) -> bool:
        """Return whether the log accepts a record of this size: small enough, and space is left."""
        if body_bytes > RECORD_MAX_BYTES:
            return False
        return self._offset + sectors.size_on_disk_bytes(body_bytes) <= self._size_bytes

    def record(self, body: bytes) -> SyncRecord:
        """Lay out the next record.

        Raises:
            BrokenInvariant: `fits` is false for the record.
        """
        if not self.fits(len(body)):
            raise BrokenInvariant(f"{self.path}: a sync of {len(body)} bytes does not fit at byte {self._offset}")
        sequence = self._sequence + 1
        return SyncRecord(
            self._file, sectors.lay_out(self._tags.of(sequence), self._generation, sequence, body), self._offset
        )

    def note_added(self, record: SyncRecord) -> None:
        """Move the position past a record that is durable now."""
        self._sequence += 1
        self._offset = record.offset + len(record.data)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def make_log(store: DiskStore, directory: Path, identity: StorageIdentity) -> None:
    """Create the log of a new replica, which has made no promises.

    Raises:
        RecoveryRefused: The log cannot be created.
    """
    try:
        store.make(sectors.first_block(records.pack_identity(identity), store.size_bytes))
    except OSError as error:
        raise RecoveryRefused(Condition.SYNC_LOG_NOT_MADE, f"{directory / LOG_FILE} ({error})") from error


def is_used(store: DiskStore, directory: Path) -> bool:
    """Return whether a record was ever written: a new log has only zeros after its first block.

    Raises:
        RecoveryRefused: The log cannot be read.
    """
    try:
        file = store.open()
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno == errno.ELOOP:
            return False  # no replica ever ran with a symbolic link here; creating a log removes only the link
        raise RecoveryRefused(Condition.SYNC_LOG_NOT_MADE, f"{directory / LOG_FILE} ({error})") from error
    try:
        return any(file.read(store.size_bytes)[sectors.BLOCK_BYTES :])
    except OSError as error:
        raise RecoveryRefused(Condition.SYNC_LOG_UNREADABLE, f"{directory / LOG_FILE} ({error})") from error
    finally:
        file.close()


def open_log(store: DiskStore, directory: Path, identity: StorageIdentity, size_bytes: int) -> SyncLog:
    """Open the log that LMDB refers to.

    Raises:
        RecoveryRefused: The log is missing or cannot be opened.
    """
    try:
        return SyncLog(store.open(), directory / LOG_FILE, identity, size_bytes)
    except FileNotFoundError as error:
        raise RecoveryRefused(Condition.SYNC_LOG_MISSING, str(directory / LOG_FILE)) from error
    except OSError as error:
        raise RecoveryRefused(Condition.SYNC_LOG_UNREADABLE, f"{directory / LOG_FILE} ({error})") from error
