"""Shared filesystems on the agent's machine: identification, buffers, and transfer records.

A marker file in the filesystem, created once by an operator (`forebay pool filesystem mark`), identifies it. Where it
is not mounted the marker is missing, so nothing is written to the mount point. Buffers are in `ROOT/CLUSTER/JOB.EPOCH`,
their transfer records in `ROOT/.forebay-records/CLUSTER/JOB.EPOCH/ATTEMPT`. Each attempt has its own records: a late
one may still be writing, so a newer attempt begins with a copy, never with the files themselves.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import uuid
from collections.abc import Iterator
from typing import Final

from forebay.cluster.agent.files import capacity
from forebay.cluster.agent.files.durable import BUFFERS, PERSISTENT, RECEIPTS, read_bounded, write_durably
from forebay.cluster.agent.files.removal import remove_tree
from forebay.cluster.system import closing, names_in, open_directory, sync_file_system
from forebay.replica.model import Order, OrderFilesystem

MARK: Final = ".forebay-filesystem"
"""Marker file that identifies a shared filesystem."""

RECORDS: Final = ".forebay-records"

_MARKED: Final = re.compile(r"[0-9a-f]{32}", re.ASCII)
_PRIVATE: Final = 0o700
_PASSABLE: Final = 0o711
_SHARED_BITS: Final = stat.S_IWGRP | stat.S_IWOTH


class FilesystemRefused(Exception):
    """The path is not a usable shared filesystem; the message names the remedy."""


def buffer_path(home: str, order: Order) -> str:
    """Return the absolute path of an order's buffer for an agent in `home`."""
    if order.filesystem is None:
        return os.path.join(home, BUFFERS, str(order.job))
    return os.path.join(order.filesystem.path, order.filesystem.directory)


def identity_at(path: str) -> str:
    """Return the identity of the shared filesystem at a path.

    Raises:
        FilesystemRefused: The path has no marker, or other users could change it.
    """
    try:
        with closing(open_directory(path)) as directory:
            return _identity(directory, path)
    except OSError as error:
        raise FilesystemRefused(f"there is no shared filesystem at {path}: {error.strerror}; mount it there") from error


def mark(path: str) -> str:
    """Mark a directory as a shared filesystem and return its identity; an existing marker is kept.

    Raises:
        FilesystemRefused: Other users could change the directory.
        OSError: The directory cannot be written.
    """
    with closing(open_directory(path)) as directory:
        if read_bounded(directory, MARK) is None:
            write_durably(directory, MARK, uuid.uuid4().hex.encode() + b"\n")
        return _identity(directory, path)


def _identity(directory: int, path: str) -> str:
    status = os.fstat(directory)
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & _SHARED_BITS:
        raise FilesystemRefused(
            f"{path} can be changed by other accounts; make the account of the agents its owner, with mode 0711"
        )
    data = read_bounded(directory, MARK)
    if data is None:
        raise FilesystemRefused(
            f"{path} has no {MARK}: mount the shared filesystem there, "
            "or mark a new one with `forebay pool filesystem mark`"
        )
    text = data.decode("ascii", "replace").strip()
    if _MARKED.fullmatch(text) is None:
        raise FilesystemRefused(f"{path}/{MARK} does not contain 32 hexadecimal digits; restore the original file")
    return text


def open_filesystem(filesystem: OrderFilesystem) -> int:
    """Return a descriptor of the shared filesystem.

    Raises:
        FilesystemRefused: It is not mounted, or another one is.
    """
    try:
        directory = open_directory(filesystem.path)
    except OSError as error:
        raise FilesystemRefused(
            f"shared filesystem {filesystem.name} is not mounted at {filesystem.path}: {error.strerror}; mount it there"
        ) from error
    try:
        if filesystem.identity and _identity(directory, filesystem.path) != filesystem.identity:
            raise FilesystemRefused(
                f"another filesystem is mounted at {filesystem.path}; mount {filesystem.name} there"
            )
        return directory
    except BaseException:
        os.close(directory)
        raise


def open_parent_of(home: str, order: Order, *, switch: bool, make: bool = False) -> tuple[int, str]:
    """Return a descriptor of the parent of a job's buffer, and the buffer's name in it.

    Raises:
        FilesystemRefused: The shared filesystem is not mounted.
        OSError: The directory cannot be opened.
    """
    if order.filesystem is None:
        return open_directory(os.path.join(home, BUFFERS)), str(order.job)
    return open_parent(order.filesystem, switch=switch, make=make)


def sync_written(home: str, order: Order, *, switch: bool) -> None:
    """Sync the filesystems of the job's buffer and of its persistent buffers on this node; skip missing ones.

    Raises:
        FilesystemRefused: The shared filesystem is not mounted.
        ImageFailed: An image cannot be mounted.
        OSError: A sync failed.
    """
    synced: set[int] = set()
    for parent, name in _written_to(home, order, switch=switch):
        with contextlib.suppress(FileNotFoundError), closing(parent):
            with closing(capacity.open_buffer(parent, name)) as buffer:
                device = os.fstat(buffer).st_dev
                if device not in synced:
                    sync_file_system(buffer)
                    synced.add(device)


def _written_to(home: str, order: Order, *, switch: bool) -> Iterator[tuple[int, str]]:
    with contextlib.suppress(FileNotFoundError):
        yield open_parent_of(home, order, switch=switch)
    placed = dict(order.persistent)
    for name in order.uses:
        if name not in placed:
            yield open_directory(os.path.join(home, PERSISTENT)), name


def open_parent(filesystem: OrderFilesystem, *, switch: bool, make: bool = False) -> tuple[int, str]:
    """Return a descriptor of the parent of an order's buffer, and the buffer's name in it.

    `switch` makes the parent traversable for users.

    Raises:
        FilesystemRefused: The shared filesystem is not mounted.
        FileNotFoundError: The parent does not exist and `make` is false.
        OSError: The directory cannot be opened.
    """
    cluster, _, name = filesystem.directory.partition("/")
    with closing(open_filesystem(filesystem)) as directory:
        if make:
            with contextlib.suppress(FileExistsError):
                os.mkdir(cluster, _PRIVATE, dir_fd=directory)
                os.fsync(directory)
        parent = open_directory(cluster, dir_fd=directory)
    # Check each time: its creator may have been killed before this, or may not switch accounts.
    if make and switch and stat.S_IMODE(os.fstat(parent).st_mode) != _PASSABLE:
        os.fchmod(parent, _PASSABLE)
    return parent, name


def open_records(filesystem: OrderFilesystem, attempt: int) -> int:
    """Return a descriptor of an attempt's records directory, initialized with a copy of the previous attempt's.

    Raises:
        FilesystemRefused: The shared filesystem is not mounted.
        OSError: The records cannot be copied.
    """
    with contextlib.ExitStack() as opened:
        directory = open_filesystem(filesystem)
        opened.callback(os.close, directory)
        for name in (RECORDS, *filesystem.directory.split("/")):
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, _PRIVATE, dir_fd=directory)
            directory = open_directory(name, dir_fd=directory)
            opened.callback(os.close, directory)
        names = names_in(directory)
        earlier = sorted(int(name) for name in names if name.isdecimal() and int(name) < attempt)
        if str(attempt) not in names:
            # Complete or not at all: the next attempt begins with these alone.
            begun = f"{attempt}.copying"
            remove_tree(directory, begun, shown="a partial copy of an earlier attempt's records")
            os.mkdir(begun, _PRIVATE, dir_fd=directory)
            with closing(open_directory(begun, dir_fd=directory)) as copy:
                if earlier:
                    _copy(directory, str(earlier[-1]), copy)
                    _keep_receipts(directory, str(earlier[-1]), copy)
                os.fsync(copy)
            os.rename(begun, str(attempt), src_dir_fd=directory, dst_dir_fd=directory)
            os.fsync(directory)
        for former in earlier[:-1]:
            remove_tree(directory, str(former), shown="the records of an earlier attempt")
        return open_directory(str(attempt), dir_fd=directory)


_ORDER: Final = ("control", "manifest", "chunks", "made")
"""Order of copying records: entries that mark progress before the data they refer to, which only grows."""


def _copy(directory: int, former: str, own: int) -> None:
    with contextlib.ExitStack() as opened:
        for name in (former, "transfers"):
            try:
                directory = open_directory(name, dir_fd=directory)
            except FileNotFoundError:
                return
            opened.callback(os.close, directory)
        os.mkdir("transfers", _PRIVATE, dir_fd=own)
        target = open_directory("transfers", dir_fd=own)
        opened.callback(os.close, target)
        names = sorted(names_in(directory), key=lambda name: [kind in name for kind in _ORDER], reverse=True)
        for name in names:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with (
                os.fdopen(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory), "rb") as source,
                os.fdopen(os.open(name, flags, 0o600, dir_fd=target), "wb") as destination,
            ):
                shutil.copyfileobj(source, destination)
        os.fsync(target)


def _keep_receipts(directory: int, former: str, own: int) -> None:
    """Link the receipts of earlier attempts, which are complete, into the newest records.

    Raises:
        OSError: A receipt cannot be linked.
    """
    with contextlib.suppress(FileNotFoundError), contextlib.ExitStack() as opened:
        for name in (former, RECEIPTS):
            directory = open_directory(name, dir_fd=directory)
            opened.callback(os.close, directory)
        os.mkdir(RECEIPTS, _PRIVATE, dir_fd=own)
        target = open_directory(RECEIPTS, dir_fd=own)
        opened.callback(os.close, target)
        for name in names_in(directory):
            os.link(name, name, src_dir_fd=directory, dst_dir_fd=target, follow_symlinks=False)
        os.fsync(target)


def records_of(path: str, cluster: str, job: int) -> dict[int, str]:
    """Return the record directories of the last attempts of a job's buffers on a shared filesystem, by epoch.

    Raises:
        FilesystemRefused: The path is not a marked shared filesystem.
        OSError: The path cannot be read.
    """
    identity_at(path)
    found: dict[int, str] = {}
    top = os.path.join(path, RECORDS, cluster)
    for name in os.listdir(top) if os.path.isdir(top) else ():
        of_job, _, epoch = name.partition(".")
        if of_job == str(job) and epoch.isdecimal():
            attempts = [int(attempt) for attempt in os.listdir(os.path.join(top, name)) if attempt.isdecimal()]
            if attempts:
                found[int(epoch)] = os.path.join(top, name, str(max(attempts)))
    return found


def forget_records(filesystem: OrderFilesystem) -> None:
    """Remove the transfer records of a buffer.

    Raises:
        FilesystemRefused: The shared filesystem is not mounted.
        RemovalFailed: A record cannot be removed.
        OSError: A directory cannot be opened.
    """
    cluster, _, name = filesystem.directory.partition("/")
    with contextlib.suppress(FileNotFoundError), contextlib.ExitStack() as opened:
        directory = open_filesystem(filesystem)
        opened.callback(os.close, directory)
        for part in (RECORDS, cluster):
            directory = open_directory(part, dir_fd=directory)
            opened.callback(os.close, directory)
        remove_tree(directory, name, shown="the transfer records of a buffer")
