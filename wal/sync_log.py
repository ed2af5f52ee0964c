"""The sync log: one file in front of LMDB, to which a sync is one write and one flush of the disk.

LMDB needs two flushes for a transaction, and its pages cost more than the bytes in them. So a sync is written here as
one record, and LMDB gets the changes of many syncs in one transaction later, the checkpoint, which also says that the
next generation of the log begins: whatever the file holds of an older one is void from then on. The file has its size
from the beginning and is full of zeros that were really written: growing it, or blocks that were only reserved, would
make the file system write its own journal in every sync.
"""

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

from wal import records, sectors
from wal.failures import LOG_FILE, BrokenInvariant, Condition, RecoveryRefused
from wal.records import Identity

LOG_BYTES: Final = 4 << 20
"""Size of a new log: a thousand small syncs between two checkpoints, written in some milliseconds when it is made."""

RECORD_MAX_BYTES: Final = 256 << 10
"""A sync with more than this goes straight into LMDB: writing it twice costs more than the second flush saves."""


READ_BYTES: Final = 1 << 20
"""What is read at a time."""


class DiskFile:
    """The calls on the file of the log, in one place so that a simulated disk can stand behind them. Raise OSError."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read(self, limit_bytes: int) -> bytes:
        """All of it, but not more than this."""
        pieces, offset = [], 0
        while piece := os.pread(self._descriptor, min(READ_BYTES, limit_bytes - offset), offset):
            pieces.append(piece)
            offset += len(piece)
        return b"".join(pieces)

    def write(self, data: bytes, offset: int) -> None:
        """Write all of `data` there."""
        written = os.pwrite(self._descriptor, data, offset)
        if written != len(data):
            raise OSError(errno.EIO, f"{os.strerror(errno.EIO)}: {written} of {len(data)} bytes were written")

    def sync(self) -> None:
        """Return when what was written is durable."""
        os.fdatasync(self._descriptor)

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._descriptor)


class DiskStore:
    """Where a replica's log is made and found: the directory with this descriptor. Raises OSError."""

    def __init__(self, directory: int, *, readonly: bool = False) -> None:
        self._directory = directory
        self._readonly = readonly

    @property
    def size_bytes(self) -> int:
        """Size of a new log."""
        return LOG_BYTES

    def make(self, first_block: bytes) -> None:
        """Make a log that begins with this block, durably; one that is there already is replaced."""
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
        """Return when the names of the files are durable."""
        os.fsync(self._directory)


class Record:
    """One sync, ready to be written."""

    __slots__ = ("_file", "data", "offset")

    def __init__(self, file: DiskFile, data: bytes, offset: int) -> None:
        self._file, self.data, self.offset = file, data, offset

    def commit(self) -> None:
        """Write it, durable on return. Raises OSError."""
        self._file.write(self.data, self.offset)
        self._file.sync()


class SyncLog:
    """The log of one replica. Nothing is added before `begin` says of which generation it is."""

    def __init__(self, file: DiskFile, path: Path, identity: Identity, size_bytes: int) -> None:
        self.path: Final = path
        self._file = file
        self._identity = records.pack_identity(identity)
        self._size_bytes = size_bytes
        self._generation = self._sequence = 0
        self._offset = size_bytes
        self._tags = sectors.Tags(self._identity, 0)

    @property
    def generation(self) -> int:
        """The generation that `begin` named; 0 before."""
        return self._generation

    def read(self, generation: int) -> list[bytes]:
        """The bodies of the records of this generation, in order. Raises RecoveryRefused."""
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
        """Begin again at the first record: LMDB is durably of this generation."""
        self._generation, self._sequence, self._offset = generation, 0, sectors.BLOCK_BYTES
        self._tags = sectors.Tags(self._identity, generation)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was added since `begin`."""
        return self._sequence == 0

    def fits(self, body_bytes: int) -> bool:
        """Whether a sync of this size may go here, and there is room for it."""
        if body_bytes > RECORD_MAX_BYTES:
            return False
        return self._offset + sectors.size_on_disk_bytes(body_bytes) <= self._size_bytes

    def record(self, body: bytes) -> Record:
        """Lay out the next record. BrokenInvariant unless it `fits`."""
        if not self.fits(len(body)):
            raise BrokenInvariant(f"{self.path}: a sync of {len(body)} bytes does not fit at byte {self._offset}")
        sequence = self._sequence + 1
        return Record(
            self._file, sectors.lay_out(self._tags.of(sequence), self._generation, sequence, body), self._offset
        )

    def added(self, record: Record) -> None:
        """Note that this record is durable."""
        self._sequence += 1
        self._offset = record.offset + len(record.data)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def make_log(store: DiskStore, directory: Path, identity: Identity) -> None:
    """Make the log of a replica that has promised nothing with one. Raises RecoveryRefused."""
    try:
        store.make(sectors.first_block(records.pack_identity(identity), store.size_bytes))
    except OSError as error:
        raise RecoveryRefused(Condition.SYNC_LOG_NOT_MADE, f"{directory / LOG_FILE} ({error})") from error


def is_used(store: DiskStore, directory: Path) -> bool:
    """Whether there is a log that something was ever added to: one that was only made is zeros after its first block.

    Raises RecoveryRefused if that cannot be seen.
    """
    try:
        file = store.open()
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno == errno.ELOOP:
            return False  # no replica runs with a symbolic link there, and making a log removes the link alone
        raise RecoveryRefused(Condition.SYNC_LOG_NOT_MADE, f"{directory / LOG_FILE} ({error})") from error
    try:
        return any(file.read(store.size_bytes)[sectors.BLOCK_BYTES :])
    except OSError as error:
        raise RecoveryRefused(Condition.SYNC_LOG_UNREADABLE, f"{directory / LOG_FILE} ({error})") from error
    finally:
        file.close()


def open_log(store: DiskStore, directory: Path, identity: Identity, size_bytes: int) -> SyncLog:
    """Open the log that LMDB speaks of. Raises RecoveryRefused."""
    try:
        return SyncLog(store.open(), directory / LOG_FILE, identity, size_bytes)
    except FileNotFoundError as error:
        raise RecoveryRefused(Condition.SYNC_LOG_MISSING, str(directory / LOG_FILE)) from error
    except OSError as error:
        raise RecoveryRefused(Condition.SYNC_LOG_UNREADABLE, f"{directory / LOG_FILE} ({error})") from error
