"""Descriptors of files and directories: opened without following a link, written whole, closed whatever happens."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
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


def keep_ownership(descriptor: int, name: str | os.PathLike[str], *, directory: int | None = None) -> None:
    """Give an open file the owner, group and mode of the file `name`, if that exists and is a regular file.

    Call it before the rename. A command that an administrator runs as root would otherwise leave a service with a file
    it cannot read. `name` is relative to the open `directory` if one is given. A file in a directory that more accounts
    than its owner may write to says nothing: an attacker may have put it there to be given a key. OSError.
    """
    try:
        replaced = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return
    above = os.stat(os.path.dirname(name) or ".", dir_fd=directory)
    if not stat.S_ISREG(replaced.st_mode) or above.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return
    new = os.fstat(descriptor)
    if (new.st_uid, new.st_gid) != (replaced.st_uid, replaced.st_gid):
        # Only root may give a file away. Other accounts replace files as before.
        with contextlib.suppress(PermissionError):
            os.fchown(descriptor, replaced.st_uid, replaced.st_gid)
    # After fchown, which clears the set-user-ID and set-group-ID bits.
    os.fchmod(descriptor, stat.S_IMODE(replaced.st_mode))


def replace_private(path: Path, data: bytes) -> None:
    """Replace a file as a whole, durably; a new one is readable for its owner alone. OSError leaves the old file."""
    part = path.with_name(f".{path.name}.tmp")
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        keep_ownership(file.fileno(), path)
        os.fsync(file.fileno())
    part.replace(path)
    sync_directory(path.parent)
