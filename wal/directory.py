"""Directory of a replica's journal: locked by one process, and guarded against replaced files.

If an open file is removed or replaced, writes to it succeed but are lost at the next restart. The identity of each
opened file is therefore recorded, and each checkpoint checks that the file names still lead to these files.

The two meta pages are compared before LMDB opens its file. LMDB writes the pages alternately and uses the page with the
larger transaction number, without any checksum. One flipped bit can make LMDB silently return to an older state. One
case is not detected: a flip that lowers the newer number by exactly two, on a file that did not grow.
"""

import errno
import fcntl
import os
import struct
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

import lmdb

from forebay.wal.failures import DATA_FILE, LOG_FILE, READERS_FILE, Condition, RecoveryRefused

# struct MDB_page header (16 bytes), then struct MDB_meta of LMDB 0.9 on a 64-bit machine, in its own byte order:
# magic, version, address, map size, two MDB_db of 48 bytes, last page number, transaction number.
_META: Final = struct.Struct("=16x II QQ 48s48s QQ")
_DATABASE: Final = struct.Struct("=I HH QQQQQ")
_MAGIC: Final = 0xBEEFC0DE
_VERSION: Final = 1
_PAGE_SIZES_BYTES: Final = frozenset(1 << power for power in range(9, 17))


class _Meta(NamedTuple):
    page_size_bytes: int
    last_page: int
    transaction: int


def check_meta_pages(directory: int, path: Path, *, readonly: bool = False) -> None:
    """Check the meta pages of the data file in the directory with this descriptor; `path` is used in messages only.

    A file that ends before its last page is extended with zeros, because reading past its end would kill this process
    by SIGBUS. LMDB reports a page of zeros as broken. An early end alone is no damage: LMDB counts a page that a
    transaction allocated and freed, but never writes it (53 of 300 random histories of puts and deletes end so).

    Raises:
        RecoveryRefused: The meta pages are damaged or do not belong together.
        OSError: The file cannot be read.
    """
    access = os.O_RDONLY if readonly else os.O_RDWR
    file = os.open(path.name, access | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    try:
        first = _read(file, 0)
        if first is None:
            raise RecoveryRefused(Condition.DATA_FILE_UNREADABLE, f"{path}, meta page 0")
        second = _read(file, first.page_size_bytes)
        if second is None:
            raise RecoveryRefused(Condition.DATA_FILE_UNREADABLE, f"{path}, meta page 1")
        oldest, newest = sorted((first, second), key=lambda meta: meta.transaction)
        fresh = first.transaction == second.transaction == 0
        successive = (
            abs(first.transaction - second.transaction) == 1
            and first.transaction % 2 == 0
            and second.transaction % 2 == 1
            and oldest.last_page <= newest.last_page
        )
        if first.page_size_bytes != second.page_size_bytes or not (fresh or successive):
            raise RecoveryRefused(
                Condition.META_PAGES_DISAGREE,
                f"{path} (transactions {first.transaction} and {second.transaction}, "
                f"pages of {first.page_size_bytes} and {second.page_size_bytes} bytes)",
            )
        size_bytes = (newest.last_page + 1) * newest.page_size_bytes
        if newest.last_page >= 1 << 48:
            raise RecoveryRefused(Condition.DATA_FILE_UNREADABLE, f"{path} (last page {newest.last_page})")
        if not readonly and os.fstat(file).st_size < size_bytes:
            os.ftruncate(file, size_bytes)
    finally:
        os.close(file)


def ends_early(environment: lmdb.Environment, path: Path) -> int:
    """Return the size that an open data file should have, bytes; 0 if it does not end before LMDB's last page."""
    size_bytes = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
    return size_bytes if path.stat().st_size < size_bytes else 0


def lengthen(environment: lmdb.Environment, path: Path) -> None:
    """Extend a data file to the length that LMDB expects. Call it after a transaction, in the writing process only.

    A reader in another process cannot distinguish a file that legitimately ends early from a truncated file, which
    would kill the reader by SIGBUS.

    Raises:
        OSError: The file cannot be extended.
    """
    if size_bytes := ends_early(environment, path):
        os.truncate(path, size_bytes)


def may_hold_a_transaction(path: Path) -> bool:
    """Return whether a data file may hold a transaction; True if the file cannot be read."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    try:
        if os.fstat(file).st_size == 0:
            return False
        first = _read(file, 0)
        second = None if first is None else _read(file, first.page_size_bytes)
        return first is None or second is None or max(first.transaction, second.transaction) > 0
    except OSError:
        return True
    finally:
        os.close(file)


def _read(file: int, offset: int) -> _Meta | None:
    head = os.pread(file, _META.size, offset)
    if len(head) < _META.size:
        return None
    magic, version, _address, _map_size, free, _main, last_page, transaction = _META.unpack(head)
    page_size_bytes = _DATABASE.unpack(free)[0]  # LMDB keeps the page size in the free database's unused field
    if magic != _MAGIC or version != _VERSION or page_size_bytes not in _PAGE_SIZES_BYTES:
        return None
    return _Meta(page_size_bytes, last_page, transaction)


LOCK_FILE: Final = "replica.lock"
_LOCK_TEXT_MAX_BYTES: Final = 512

_READERS_MAGIC: Final = (0xBEEFC0DE).to_bytes(4, "little")
"""First bytes of LMDB's reader table on little-endian machines, the only ones Forebay runs on."""

_NO_DAMAGE: Final = frozenset(
    {
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
        errno.ELOOP,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EAGAIN,
        errno.ENOLCK,
        errno.ENODEV,
        errno.EOPNOTSUPP,
    }
)
"""Errors from opening a file whose causes lie outside the file."""


class Lock:
    """Lock on the directory and on the file that names the lock holder. Both are kept open.

    Only the directory's lock excludes other processes reliably: a locked file can be removed, and the next process
    would lock a new file of the same name. The file's lock excludes processes of an earlier release, which lock only
    the file.
    """

    def __init__(self, directory: int, file: int) -> None:
        self.directory: Final = directory
        self.file: Final = file

    def release(self) -> None:
        """Release the lock."""
        os.close(self.file)
        os.close(self.directory)


def lock(directory: Path, replica: str, *, create: bool) -> Lock:
    """Lock the directory, creating it if `create`.

    Raises:
        RecoveryRefused: Another process holds the lock, or the directory cannot be used.
    """
    try:
        if create:
            make(directory)
        elif not directory.exists():
            raise RecoveryRefused(Condition.DIRECTORY_EMPTY, str(directory))
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise RecoveryRefused(Condition.DIRECTORY_UNUSABLE, f"{directory} ({error.strerror})") from error
    file: int | None = None
    try:
        file = os.open(LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, mode=0o600, dir_fd=descriptor)
        for locked in (descriptor, file):
            fcntl.flock(locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(file, 0)
        os.pwrite(file, f"process {os.getpid()} of replica {replica}".encode(), 0)
    except OSError as error:
        held = error.errno in (errno.EWOULDBLOCK, errno.EACCES) and file is not None
        holder = os.pread(file, _LOCK_TEXT_MAX_BYTES, 0).decode(errors="replace") if held and file is not None else ""
        if file is not None:
            os.close(file)
        os.close(descriptor)
        if held:
            who = holder or f"an unknown process, because {LOCK_FILE} was removed"
            raise RecoveryRefused(Condition.HELD_BY_ANOTHER_PROCESS, f"{directory} (by {who})") from error
        raise RecoveryRefused(Condition.DIRECTORY_UNUSABLE, f"{directory / LOCK_FILE} ({error.strerror})") from error
    return Lock(descriptor, file)


def make(directory: Path) -> None:
    """Create the directory and its parents. Each name is durable before its child is created.

    Raises:
        OSError: A directory cannot be created.
    """
    if directory.is_dir():
        return
    make(directory.parent)
    directory.mkdir(mode=0o700, exist_ok=True)
    sync(directory.parent)


def sync(directory: Path) -> None:
    """Make the names in the directory durable.

    Raises:
        OSError: The directory cannot be synced.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def has_data(directory: int) -> bool:
    """Return whether the directory with this descriptor has a non-empty data file.

    Raises:
        OSError: The file cannot be examined.
    """
    try:
        return os.stat(DATA_FILE, dir_fd=directory, follow_symlinks=False).st_size > 0
    except FileNotFoundError:
        return False


class OpenedFiles:
    """Identity of the opened directory and files, by device and inode."""

    def __init__(self, directory: Path, descriptor: int) -> None:
        self._directory: Final = directory.absolute()
        self._descriptor: Final = descriptor
        self._opened: Final = {self._directory: _identity(os.fstat(descriptor))}

    def note(self, *names: str) -> None:
        """Record the existing files of these names, unless already recorded.

        Raises:
            OSError: A file cannot be examined.
        """
        for name in names:
            with suppress(FileNotFoundError):
                found = os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
                self._opened.setdefault(self._directory / name, _identity(found))

    def find_altered(self) -> str | None:
        """Return a message if a recorded file is no longer found under its name.

        The check takes a few system calls and does not access the disk.
        """
        for path, opened in self._opened.items():
            try:
                found = _identity(os.stat(path, follow_symlinks=path == self._directory))
            except OSError as error:
                return _gone(path, f"no longer exists ({error.strerror})")
            if found != opened:
                return _gone(path, "is not the file that this replica has open")
        return None


def rejection(directory: Path, error: Exception) -> RecoveryRefused:
    """Return the rejection for an error that LMDB or the system raised on opening. Only some errors mean damage."""
    code = error.errno if isinstance(error, OSError) else getattr(error, "code", None)
    if isinstance(error, lmdb.InvalidError | lmdb.VersionMismatchError) or code in (errno.EISDIR, errno.EINVAL):
        wrong = _wrong_with_readers(directory / READERS_FILE, error)
        if wrong is not None:
            return RecoveryRefused(Condition.TABLE_OF_READERS_UNUSABLE, f"{directory / READERS_FILE} ({wrong})")
    # lmdb raises its own classes for some system errors; the message names the error.
    if code in _NO_DAMAGE or isinstance(error, lmdb.ReadersFullError):
        return RecoveryRefused(Condition.CANNOT_BE_OPENED, f"{directory / DATA_FILE} ({error})")
    return RecoveryRefused(Condition.DATA_FILE_UNREADABLE, f"{directory / DATA_FILE} ({error})")


def _wrong_with_readers(path: Path, error: Exception) -> str | None:
    """Return the problem with LMDB's reader table if the table prevents opening. LMDB does not report such a problem.

    LMDB reads the table only while another process has it open, and otherwise creates it again.
    """
    try:
        with path.open("rb") as file:
            head = file.read(len(_READERS_MAGIC))
    except FileNotFoundError:
        return None
    except OSError as unreadable:
        return str(unreadable.strerror)
    # The version of the data file was already checked, so a version mismatch concerns the reader table.
    if head != _READERS_MAGIC or isinstance(error, lmdb.VersionMismatchError):
        return "the file is not a reader table"
    return None


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _gone(path: Path, what: str) -> str:
    remedy = {
        READERS_FILE: "Restart the replica and the readers of its directory, such as audits",
        DATA_FILE: "Restore the original file, not a copy, or replace the replica",
        LOG_FILE: "Restore the original file, not a copy, or replace the replica",
    }.get(path.name, "Restore the original directory, not a copy, or replace the replica")
    return (
        f"{path} {what}: it was removed or replaced while the replica ran. The replica stops, because a restart would "
        f"not find its new writes. {remedy}"
    )
