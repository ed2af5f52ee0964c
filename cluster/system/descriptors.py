"""Descriptors of files and directories: opened without following a link, written whole, closed whatever happens."""

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
    """Give a descriptor, which is closed at the end."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)


SLOW_SYNC_S: Final = 0.02
"""What a sync takes on a slow disk, seconds: twice what disks with spindles need."""


def open_directory(path: str | bytes | os.PathLike[str], *, dir_fd: int | None = None) -> int:
    """Return a descriptor of the directory; OSError if it is a link or no directory."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)


def try_lock(descriptor: int) -> bool:
    """Lock a file or a directory for this descriptor alone; return whether nobody else had. OSError."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def names_in(directory: int) -> list[str]:
    """Return the names in an open directory, in no order. OSError.

    What was made in it since it was opened, or listed, is among them: btrfs shows that only after a seek to the start
    (Linux from 6.5 on), which os.listdir leaves out.
    """
    os.lseek(directory, 0, os.SEEK_SET)
    return os.listdir(directory)


def free_bytes(directory: Path) -> int:
    """Return what is free in the file system of a directory, bytes; OSError."""
    room = os.statvfs(directory)
    return room.f_bavail * room.f_frsize


def is_disk_full(error: OSError) -> bool:
    """Return whether the disk, or a quota on it, is full: what is to be written finds no room."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write all of `data`, however many calls it takes."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def sync_directory(directory: Path) -> None:
    """Return when the names in the directory are durable. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
