"""Durable files, complete or absent after a crash: write a temporary file, fsync, rename, fsync the directory.

The disk may be full when a file has to be written. `reserve` allocates blocks beside its name in advance; they are
overwritten in place, so no other file can take them meanwhile. Reserve files are created in advance, too, so that a
full disk still takes results and locks.
"""

from __future__ import annotations

import contextlib
import errno
import os
from typing import Final, TypeVar

import msgspec

from forebay.cluster.agent.limits import FILE_BYTES_MAX, RESERVE_BYTES, RESERVE_FILES
from forebay.cluster.system import closing, is_disk_full, names_in, write_all

_T = TypeVar("_T")

BUFFERS: Final = "buffers"
OPERATIONS: Final = "operations"
STEPS: Final = "steps"
OUTBOX: Final = "outbox"
SPARE: Final = "spare"
LEFTOVERS: Final = "leftovers"
CALLS: Final = "calls"
RECEIPTS: Final = "receipts"
PERSISTENT: Final = "persistent"


TEMPORARY_SUFFIX: Final = ".new"
"""Suffix of a file being written; one found at start was left by a crash and is removed."""

RESERVE_SUFFIX: Final = ".room"
"""Suffix of a file's reserved space."""

_PAGE_BYTES: Final = 4096


class FileRefused(Exception):
    """File of the agent that is damaged or not its own; the message names it and the remedy."""


def is_resource_exhausted(error: OSError) -> bool:
    """Return whether waiting helps: the disk, the memory or the table of open files is full."""
    return is_disk_full(error) or error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def write_durably(directory: int, name: str, data: bytes, *, lasting: bool = True) -> None:
    """Write `name` in the open directory so that a crash leaves the old or the new file; durable on return.

    A file that is not `lasting` survives this process, but may be damaged or missing after a power failure. On a full
    disk, space reserved for `name` is used; the file then ends in spaces.

    Raises:
        OSError: The disk is full or fails.
    """
    temporary = name + TEMPORARY_SUFFIX
    try:
        _fill(directory, temporary, os.O_CREAT | os.O_TRUNC, data, lasting=lasting)
        os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
    except OSError as error:
        # A partial file would take space that others need.
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=directory)
        if not is_disk_full(error) or len(data) > RESERVE_BYTES:
            raise
        if not write_reserved(directory, name, data, lasting=lasting):
            raise error from None
        return
    if lasting:
        os.fsync(directory)


def write_reserved(directory: int, name: str, data: bytes, *, lasting: bool = True) -> bool:
    """Write `name` like `write_durably` into its reserved space; return False if there is none.

    Raises:
        OSError: The disk fails.
    """
    if len(data) > RESERVE_BYTES:
        return False
    room = name + RESERVE_SUFFIX
    try:
        _fill(directory, room, 0, data.ljust(RESERVE_BYTES), lasting=lasting)
    except FileNotFoundError:
        return False
    os.rename(room, name, src_dir_fd=directory, dst_dir_fd=directory)
    if lasting:
        os.fsync(directory)
    return True


def write_new(
    directory: int, name: str, data: bytes, *, mode: int = 0o600, owner: tuple[int, int] | None = None
) -> None:
    """Write a file in a directory that is not in use yet; its content, but not its name, is durable on return.

    `owner` is the user and group ID to give the file to.

    Raises:
        OSError: The disk is full or fails.
    """
    _fill(directory, name, os.O_CREAT | os.O_EXCL, data, mode, owner)


def _fill(
    directory: int,
    name: str,
    how: int,
    data: bytes,
    mode: int = 0o600,
    owner: tuple[int, int] | None = None,
    *,
    lasting: bool = True,
) -> None:
    with closing(
        os.open(name, os.O_WRONLY | how | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=directory)
    ) as descriptor:
        write_all(descriptor, data)
        if owner is not None:
            os.fchown(descriptor, *owner)
        os.fchmod(descriptor, mode)
        if lasting:
            os.fsync(descriptor)


def reserve(directory: int, name: str) -> None:
    """Create a file of RESERVE_BYTES with allocated blocks.

    Raises:
        OSError: The disk is full or fails.
    """
    descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=directory)
    try:
        os.posix_fallocate(descriptor, 0, RESERVE_BYTES)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=directory)
        raise
    finally:
        os.close(descriptor)


def read_bounded(directory: int, name: str) -> bytes | None:
    """Return the content of the regular file `name`, or None if it does not exist.

    Raises:
        FileRefused: The file is longer than any the agent writes.
    """
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    except FileNotFoundError:
        return None
    with closing(descriptor):
        # Many small files are read for each job: read one page first.
        data = os.read(descriptor, _PAGE_BYTES)
        if len(data) == _PAGE_BYTES:
            while len(data) <= FILE_BYTES_MAX and (more := os.read(descriptor, FILE_BYTES_MAX + 1 - len(data))):
                data += more
    if len(data) > FILE_BYTES_MAX:
        raise FileRefused(f"{name} is longer than {FILE_BYTES_MAX} bytes: the agent did not write it; move it away")
    return data


def read_record(directory: int, name: str, kind: type[_T], *, shown: str) -> _T | None:
    """Return the content of a JSON file, or None if it does not exist.

    Raises:
        FileRefused: The file is damaged; the message calls it `shown`.
    """
    data = read_bounded(directory, name)
    try:
        return None if data is None else msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FileRefused(f"{shown} is damaged ({error}); the disk may be failing: move the directory away") from error


class ReserveFiles:
    """Reserve files in one directory, whose content is never read."""

    def __init__(self, directory: int) -> None:
        """Count the files in an open directory and create missing ones if there is space."""
        self._directory = directory
        self._free: list[str] = []
        for name in sorted(names_in(directory)):
            if os.stat(name, dir_fd=directory, follow_symlinks=False).st_size == RESERVE_BYTES:
                self._free.append(name)
            else:
                os.unlink(name, dir_fd=directory)
        self.fill()

    def __len__(self) -> int:
        return len(self._free)

    def fill(self) -> None:
        """Create missing files if there is space."""
        try:
            while len(self._free) < RESERVE_FILES:
                name = self._unused_name()
                reserve(self._directory, name)
                self._free.append(name)
        except OSError as error:
            if not is_resource_exhausted(error):
                raise

    def lend(self, directory: int, name: str) -> bool:
        """Rename one reserve file to `name` in an open directory on the same disk; return False if none is left."""
        if not self._free:
            return False
        os.rename(self._free[-1], name, src_dir_fd=self._directory, dst_dir_fd=directory)
        self._free.pop()
        return True

    def write(self, directory: int, name: str, data: bytes, *, lasting: bool = True) -> None:
        """Write a file like `write_durably`, using a reserve file if the disk is full.

        Raises:
            OSError: No reserve file is left, or the disk fails.
        """
        try:
            write_durably(directory, name, data, lasting=lasting)
        except OSError as error:
            if not is_disk_full(error) or not self.lend(directory, name + RESERVE_SUFFIX):
                raise
            write_durably(directory, name, data, lasting=lasting)

    def drop(self, directory: int, name: str) -> None:
        """Remove the file `name` of an open directory; a lent reserve file is taken back."""
        with contextlib.suppress(FileNotFoundError):
            if (
                len(self._free) < RESERVE_FILES
                and os.stat(name, dir_fd=directory, follow_symlinks=False).st_size == RESERVE_BYTES
            ):
                free = self._unused_name()
                os.rename(name, free, src_dir_fd=directory, dst_dir_fd=self._directory)
                self._free.append(free)
                return
            os.unlink(name, dir_fd=directory)

    def _unused_name(self) -> str:
        taken = set(self._free)
        return next(name for name in map(str, range(RESERVE_FILES + 1)) if name not in taken)
