"""Descriptors of files and directories: opened without following links, written completely, always closed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final


@contextlib.contextmanager
def closing(descriptor: int) -> Iterator[int]:
    """Provide a descriptor, and close it at the end."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)


SLOW_SYNC_S: Final = 0.02
"""Duration of a sync that counts as slow, seconds: twice the time of a rotating disk."""


def open_directory(path: str | bytes | os.PathLike[str], *, dir_fd: int | None = None) -> int:
    """Return a descriptor of the directory.

    Raises:
        OSError: The path is a link or not a directory, or cannot be opened.
    """
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)


def try_lock(descriptor: int) -> bool:
    """Lock a file or directory exclusively; return False if another process holds the lock.

    Raises:
        OSError: The lock failed for another reason.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def names_in(directory: int) -> list[str]:
    """Return the names in an open directory, unordered.

    Includes names created since it was opened or listed: from Linux 6.5 on, btrfs shows them only after a seek to the
    start, which os.listdir omits.

    Raises:
        OSError: The directory cannot be read.
    """
    os.lseek(directory, 0, os.SEEK_SET)
    return os.listdir(directory)


def free_bytes(directory: Path) -> int:
    """Return the free space of a directory's file system, bytes.

    Raises:
        OSError: The file system does not answer.
    """
    room = os.statvfs(directory)
    return room.f_bavail * room.f_frsize


def is_disk_full(error: OSError) -> bool:
    """Return whether an error means that the disk, or a quota on it, is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write all of `data`, in as many calls as needed."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def sync_directory(directory: Path) -> None:
    """Make the names in the directory durable.

    Raises:
        OSError: The sync failed.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
