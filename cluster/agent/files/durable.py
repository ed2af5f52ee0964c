"""Files that are whole or absent, whatever happens: temporary name, fsync, rename, fsync of the directory.

A disk may be full just when a file has to be written. `reserve` puts room beside its name while there is some: blocks
of its own, which are overwritten in place, so that nobody can take them meanwhile. Spare files are made while there is
room, too, to be used when there is none: a full disk still takes results and locks."""

from __future__ import annotations

import contextlib
import errno
import os
from typing import Final, TypeVar

import msgspec

from cluster.agent.limits import FILE_BYTES_MAX, RESERVE_BYTES, RESERVE_FILES
from cluster.system import closing, is_disk_full, names_in, write_all

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
"""Ends the name of a file that is being written; one that is found at a start is what a crash left, and is removed."""

RESERVE_SUFFIX: Final = ".room"
"""Ends the name of the room that is reserved for a file."""

_PAGE_BYTES: Final = 4096


class FileRefused(Exception):
    """A file of the agent's own that cannot be believed; the message names it and says what would be right."""


def is_no_room(error: OSError) -> bool:
    """Return whether waiting helps: the disk, the memory or the table of open files is full."""
    return is_disk_full(error) or error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def write_durably(directory: int, name: str, data: bytes, *, lasting: bool = True) -> None:
    """Write `name` in the open directory so that a crash leaves the old file or the new one; durable on return.

    What is not written as `lasting` outlives this process, but after a power cut it may be damaged, or not there. Where
    the disk is full, room that was reserved for `name` is used; the file then ends in spaces. OSError if the disk does
    not take it.
    """
    temporary = name + TEMPORARY_SUFFIX
    try:
        _fill(directory, temporary, os.O_CREAT | os.O_TRUNC, data, lasting=lasting)
        os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
    except OSError as error:
        # A part of it would keep room that others need.
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
    """Write `name` as `write_durably` does, in the room that was reserved for it; False if there is none. OSError."""
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
    """Write a file of a directory that nobody looks into yet; what is in it, and not its name, is durable on return.

    `owner` is a user and group id to give it to. OSError if the disk does not take it.
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
    """Make an empty file of RESERVE_BYTES whose blocks are its own; OSError if there is no room for it."""
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
    """Return what the regular file `name` holds, None if there is none.

    FileRefused if it is longer than any of ours.
    """
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    except FileNotFoundError:
        return None
    with closing(descriptor):
        # Many are read for each job: a page at once, and what else there is.
        data = os.read(descriptor, _PAGE_BYTES)
        if len(data) == _PAGE_BYTES:
            while len(data) <= FILE_BYTES_MAX and (more := os.read(descriptor, FILE_BYTES_MAX + 1 - len(data))):
                data += more
    if len(data) > FILE_BYTES_MAX:
        raise FileRefused(f"{name} is longer than {FILE_BYTES_MAX} bytes: the agent did not write it; move it away")
    return data


def read_record(directory: int, name: str, kind: type[_T], *, shown: str) -> _T | None:
    """Return what a file that was written as JSON says, None if there is none; FileRefused, which calls it `shown`."""
    data = read_bounded(directory, name)
    try:
        return None if data is None else msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FileRefused(f"{shown} is damaged ({error}); the disk may be failing: move the directory away") from error


class ReserveFiles:
    """Spare files in one directory; nothing is ever read of them."""

    def __init__(self, directory: int) -> None:
        """Take stock of the open directory, and make what is missing as far as there is room."""
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
        """Make what is missing, as far as there is room."""
        try:
            while len(self._free) < RESERVE_FILES:
                name = self._unused()
                reserve(self._directory, name)
                self._free.append(name)
        except OSError as error:
            if not is_no_room(error):
                raise

    def lend(self, directory: int, name: str) -> bool:
        """Make one reserve file the file `name` of an open directory on the same disk; False if none is left."""
        if not self._free:
            return False
        os.rename(self._free[-1], name, src_dir_fd=self._directory, dst_dir_fd=directory)
        self._free.pop()
        return True

    def write(self, directory: int, name: str, data: bytes, *, lasting: bool = True) -> None:
        """Write a file as `write_durably` does, into a reserve file if the disk is full. OSError if none is left."""
        try:
            write_durably(directory, name, data, lasting=lasting)
        except OSError as error:
            if not is_disk_full(error) or not self.lend(directory, name + RESERVE_SUFFIX):
                raise
            write_durably(directory, name, data, lasting=lasting)

    def drop(self, directory: int, name: str) -> None:
        """Remove the file `name` of an open directory: a reserve file that was lent comes back as one."""
        with contextlib.suppress(FileNotFoundError):
            if (
                len(self._free) < RESERVE_FILES
                and os.stat(name, dir_fd=directory, follow_symlinks=False).st_size == RESERVE_BYTES
            ):
                free = self._unused()
                os.rename(name, free, src_dir_fd=directory, dst_dir_fd=self._directory)
                self._free.append(free)
                return
            os.unlink(name, dir_fd=directory)

    def _unused(self) -> str:
        taken = set(self._free)
        return next(name for name in map(str, range(RESERVE_FILES + 1)) if name not in taken)
