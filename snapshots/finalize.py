"""Atomic writing of a snapshot: the file is complete or absent.

A file consists of eight bytes (magic, format version), MessagePack frames `[section, sequence, payload, crc32]`, and
the SHA-256 of everything before. The file is written under a temporary name, synced and renamed; then the directory is
synced. A crash at any moment leaves older snapshots unchanged.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from zlib import crc32

import msgpack  # type: ignore[import-untyped]
import msgspec

from forebay.replica.state import TABLES
from forebay.snapshots.image import Image, ImageRejected, Slice, nothing, to_sections

MAGIC = b"FBIMAG"
MAGIC_OF_A_STEP = b"FBSNAP"
"""Magic of snapshots from the preliminary versions 0.1 to 0.3, which no release reads."""

FORMAT_VERSION = 1
"""Format version after the magic, two bytes big-endian. Raised when an older release could misread the file."""

PREAMBLE = MAGIC + FORMAT_VERSION.to_bytes(2, "big")
TRAILER_BYTES = 32
"""Size of the SHA-256 at the end."""

SNAPSHOT_BYTES_MAX = 4 * 1024**3
"""Maximum size of a snapshot: 100,000 jobs of 40 KiB. A larger one exceeds a replica's memory."""

TEMPORARY_SUFFIX = ".saving"

RESERVE_BYTES = 64 * 1024**2
RESERVE_SHARE = 16
"""Space that a snapshot leaves free on its disk: the smaller of this size and the disk's size / RESERVE_SHARE.

The journal is on the same disk. A failed journal write stops the replica; a failed snapshot is only retried.
"""

_NAME = re.compile(r"snapshot-([0-9]{20})-([0-9]{1,19})\.fbs")


class SnapshotFailed(Exception):
    """Snapshot that could not be written. Older snapshots are unchanged. The message names the file and a remedy."""


class SnapshotAbandoned(SnapshotFailed):
    """Snapshot abandoned because the replica is stopping."""


class SnapshotName(msgspec.Struct, frozen=True, order=True):
    """Parsed file name of a snapshot; ordered by age."""

    index: int
    term: int

    def __str__(self) -> str:
        return f"snapshot-{self.index:020d}-{self.term}.fbs"

    @classmethod
    def parse(cls, name: str) -> SnapshotName | None:
        """Parse the file name of a snapshot; return None for other names."""
        found = _NAME.fullmatch(name)
        if found is None:
            return None
        parsed = cls(int(found.group(1)), int(found.group(2)))
        return parsed if str(parsed) == name else None


class SnapshotDisk:
    """System calls that change a disk, in a class so that tests can make each fail. Methods raise OSError."""

    def create(self, directory: int, name: str) -> int:
        """Create a new file that only its owner can read."""
        return os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=directory)

    def reopen(self, directory: int, name: str) -> int:
        """Open an existing file to continue writing it."""
        return os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)

    def truncate(self, file: int, size_bytes: int) -> None:
        """Truncate a file to `size_bytes` and continue writing there."""
        os.ftruncate(file, size_bytes)
        os.lseek(file, size_bytes, os.SEEK_SET)

    def write(self, file: int, data: bytes) -> None:
        """Write all of `data`. Fails with ENOSPC if too little space would remain for the journal."""
        room = os.fstatvfs(file)
        reserve_bytes = min(RESERVE_BYTES, room.f_blocks * room.f_frsize // RESERVE_SHARE)
        if room.f_bavail * room.f_frsize < len(data) + reserve_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left = memoryview(data)
        while left:
            left = left[os.write(file, left) :]

    def sync(self, file: int) -> None:
        """Make a file's content durable."""
        os.fsync(file)

    def rename(self, directory: int, old: str, new: str) -> None:
        """Rename a file, replacing an existing target."""
        os.rename(old, new, src_dir_fd=directory, dst_dir_fd=directory)

    def sync_directory(self, directory: int) -> None:
        """Make the names in a directory durable."""
        os.fsync(directory)

    def remove(self, directory: int, name: str) -> None:
        """Remove a name."""
        os.unlink(name, dir_fd=directory)


DISK = SnapshotDisk()


def frame_of(piece: Slice, sequence: int) -> bytes:
    """Return one frame: the checksum covers the section, the sequence number and the payload."""
    packed: bytes = msgpack.packb(
        (piece.section, sequence, piece.payload, frame_checksum(piece.section, sequence, piece.payload))
    )
    return packed


def frame_checksum(section: int, sequence: int, payload: bytes) -> int:
    """Return the CRC-32 of a frame."""
    return crc32(payload, crc32(section.to_bytes(8, "big") + sequence.to_bytes(8, "big")))


def open_directory(directory: Path) -> int:
    """Return a descriptor of the directory.

    Raises:
        SnapshotFailed: The directory cannot be opened.
    """
    with failing(directory):
        return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def create_temporary(disk: SnapshotDisk, directory: int, name: str) -> int:
    """Return a new file, locked while open; replace a file left by a dead process.

    The lock distinguishes a live writer from a dead one.

    Raises:
        BlockingIOError: A live process is writing the file.
        OSError: The file cannot be created.
    """
    for last in (False, True):
        try:
            file = disk.create(directory, name)
        except FileExistsError:
            if last or not remove_if_abandoned(disk, directory, name):
                raise BlockingIOError(errno.EAGAIN, "another process is writing the file") from None
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(file)
            raise
        return file
    raise AssertionError("the second round returns or raises")


def reopen_temporary(disk: SnapshotDisk, directory: int, name: str) -> int:
    """Open and lock a temporary file left by an earlier process, as `create_temporary` does.

    Raises:
        BlockingIOError: Another process is writing the file.
        OSError: The file cannot be opened.
    """
    file = disk.reopen(directory, name)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise FileNotFoundError(errno.ENOENT, "it is not a regular file")
    except BaseException:
        os.close(file)
        raise
    return file


def remove_if_abandoned(disk: SnapshotDisk, directory: int, name: str) -> bool:
    """Remove a temporary file unless a live process holds it; return whether the file is gone.

    Raises:
        OSError: The file cannot be removed.
    """
    try:
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        disk.remove(directory, name)
    except BlockingIOError:
        return False
    finally:
        os.close(file)
    return True


def write_snapshot(
    directory: Path,
    image: Image,
    *,
    progress: Callable[[int, int], None] | None = None,
    breathe: Callable[[], None] = nothing,
    disk: SnapshotDisk = DISK,
) -> Path:
    """Write the image into the directory; return the path once the file would survive a power cut.

    `progress` receives the numbers of written and total records. `breathe` is called between two slices; it may block
    to let other threads run, and may raise SnapshotAbandoned.

    Raises:
        SnapshotFailed: The disk fails. No file remains, except if the sync of the directory failed: then the new file
        is
            complete, but not yet durable.
    """
    name = str(SnapshotName(image.index, image.term))
    temporary = f".{name}{TEMPORARY_SUFFIX}"
    path = directory / name
    folder = open_directory(directory)
    try:
        with failing(path):
            file = create_temporary(disk, folder, temporary)
        try:
            _fill(file, image, path, progress, breathe, disk)
            disk.sync(file)
            disk.rename(folder, temporary, name)
        except BaseException as why:
            with suppress(OSError):
                disk.remove(folder, temporary)
            if isinstance(why, OSError):
                raise failure(path, why) from why
            if isinstance(why, ImageRejected):
                raise SnapshotFailed(f"{path}: {why.sentence}") from why
            raise
        finally:
            os.close(file)
        with failing(path):
            disk.sync_directory(folder)
    finally:
        os.close(folder)
    return path


class UnsyncedDisk(SnapshotDisk):
    """Disk without syncs, for images that may be lost in a power cut and are checked when read."""

    def sync(self, file: int) -> None:
        """Do nothing."""

    def sync_directory(self, folder: int) -> None:
        """Do nothing."""


@contextmanager
def failing(path: Path) -> Iterator[None]:
    """Convert OSError into SnapshotFailed with the path."""
    try:
        yield
    except OSError as why:
        raise failure(path, why) from why


def failure(path: Path, why: OSError) -> SnapshotFailed:
    """Return SnapshotFailed with cause and remedy."""
    remedy = {
        errno.ENOSPC: "free space on that file system",
        errno.EDQUOT: "raise the quota",
        errno.EFBIG: "raise the limit on file sizes (ulimit -f)",
        errno.EROFS: "mount that file system for writing",
        errno.EACCES: "give the replica's account that directory",
        errno.ENOENT: "create the directory",
        errno.EIO: "replace the disk",
        errno.EAGAIN: "let the other process finish",
    }.get(why.errno or 0, "remove the cause; the replica tries again with its next snapshot")
    return SnapshotFailed(f"{path}: the snapshot was not written: {why.strerror or why}; {remedy}")


def _fill(
    file: int,
    image: Image,
    path: Path,
    progress: Callable[[int, int], None] | None,
    breathe: Callable[[], None],
    disk: SnapshotDisk,
) -> None:
    state = image.state
    total = sum(len(getattr(state, table.field)) for table in TABLES)
    done = 0
    digest = sha256(PREAMBLE)
    disk.write(file, PREAMBLE)
    size_bytes = len(PREAMBLE) + TRAILER_BYTES
    for sequence, piece in enumerate(to_sections(image, breathe=breathe)):
        frame = frame_of(piece, sequence)
        size_bytes += len(frame)
        if size_bytes > SNAPSHOT_BYTES_MAX:
            raise SnapshotFailed(
                f"{path}: the state needs more than {SNAPSHOT_BYTES_MAX} bytes; keep fewer finished jobs"
            )
        digest.update(frame)
        disk.write(file, frame)
        done = min(total, done + piece.records)
        if progress is not None:
            progress(done, total)
    disk.write(file, digest.digest())
