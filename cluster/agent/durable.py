"""Files that are whole or absent, whatever happens: temporary name, fsync, rename, fsync of the directory."""

from __future__ import annotations

import os
from typing import Final

from cluster.agent.limits import FILE_BYTES_MAX

TEMPORARY_SUFFIX: Final = ".new"
"""Ends the name of a file that is being written; one that is found at a start is what a crash left, and is removed."""


class FileRefused(Exception):
    """A file of the agent's own that cannot be believed; the message names it and says what would be right."""


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write all of `data`, however many calls it takes."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def write_durably(
    directory: int, name: str, data: bytes, *, mode: int = 0o600, owner: tuple[int, int] | None = None
) -> None:
    """Write `name` in the open directory so that a crash leaves the old file or the new one; durable on return.

    `owner` is a user and group id to give it to. OSError if the disk does not take it.
    """
    temporary = name + TEMPORARY_SUFFIX
    descriptor = os.open(
        temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=directory
    )
    try:
        write_all(descriptor, data)
        if owner is not None:
            os.fchown(descriptor, *owner)
        os.fchmod(descriptor, mode)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
    os.fsync(directory)


def read_bounded(directory: int, name: str) -> bytes | None:
    """Return what the regular file `name` holds, None if there is none.

    FileRefused if it is longer than any of ours.
    """
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    except FileNotFoundError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        data = file.read(FILE_BYTES_MAX + 1)
    if len(data) > FILE_BYTES_MAX:
        raise FileRefused(f"{name} is longer than {FILE_BYTES_MAX} bytes: the agent did not write it; move it away")
    return data


def open_directory(path: str | os.PathLike[str], *, dir_fd: int | None = None) -> int:
    """Return a descriptor of the directory; OSError if it is a link or no directory."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
