"""What a buffer holds, as it is counted for the watch over what jobs write: until there is too much, and no further.

Files that were removed and that a process of the job still holds open, or has mapped, count as well. Not seen are those
that only a socket's queue holds, and those of processes outside the job's cgroup.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Generator, Iterable, Iterator
from contextlib import suppress
from typing import Final

import msgspec

from cluster.agent.files import subvolumes
from cluster.agent.limits import BUFFER_DEPTH_MAX
from cluster.agent.processes import Cgroup, CgroupName
from cluster.system import closing, open_directory

MIB: Final = 1024**2

INODES_LEAST: Final = 10_000
INODE_BYTES: Final = 512
"""Files, directories and links that a job may make in its buffer: one for so many bytes of its capacity, and so many at
least. File systems have one for 16 KiB as a rule, but most buffers are large and hold few files."""

PREALLOCATED_TIMES: Final = 2
PREALLOCATED_BYTES: Final = 64 * MIB
"""How much may be reserved beyond the ends of files, as a multiple of the capacity and bytes: file systems do that by
themselves for files that grow, and take it back."""


QUOTA_PART: Final = 16
QUOTA_BYTES: Final = 4 * MIB
"""What a file system may count beyond the lengths of files: one part of so many of the capacity, and bytes."""


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be counted."""

    path: str
    """Of the buffer: the agent's own directory, and beneath that nothing that a user can replace."""
    most_bytes: int
    most_inodes: int
    cgroup: CgroupName | None = None
    """Of the script; None: there is none, and removed files are not counted."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What was found, as far as it was counted."""

    size_bytes: int = 0
    """Of the files, as far as they have blocks."""
    inodes: int = 0
    excess: str = ""
    """What there is too much of: bytes, reserved, inodes or depth; empty: nothing."""


class Asked(msgspec.Struct, frozen=True):
    """One buffer to count."""

    number: int
    look: Look


class Answered(msgspec.Struct, frozen=True):
    """Answer to an `Asked`, with its number."""

    number: int
    usage: Usage
    took_s: float
    """Seconds that counting this buffer took, without those in which others were counted."""
    fault: str = ""
    """Why it cannot be counted; empty: it was."""


def inodes_of(capacity_bytes: int) -> int:
    """Return how many files, directories and links a job may make in a buffer of so many bytes."""
    return max(INODES_LEAST, capacity_bytes // INODE_BYTES)


def blocks_of(capacity_bytes: int) -> int:
    """Return how much of its file system a buffer of so many bytes may take where that is kept by the file system.

    It counts whole blocks, and those of directories: what fits by the lengths of its files should fit.
    """
    return capacity_bytes + capacity_bytes // QUOTA_PART + QUOTA_BYTES


SLICE: Final = 1_000
"""Entries between two pauses of a count: some milliseconds."""


def measure(look: Look) -> Usage:
    """Count what is in a buffer, until there is too much. OSError if it cannot be opened."""
    counting = measuring(look)
    while True:
        try:
            next(counting)
        except StopIteration as over:
            usage: Usage = over.value
            return usage


def measuring(look: Look) -> Generator[None, None, Usage]:
    """Count what is in a buffer, until there is too much, with a pause after each SLICE of entries.

    By descriptors and never through a link; what changes meanwhile is counted as it was met.

    Raises:
        OSError: the buffer cannot be opened.
    """
    size_bytes = reserved_bytes = inodes = met = 0
    seen: set[tuple[int, int]] = set()
    with closing(open_directory(look.path)) as root:
        block, device = os.statvfs(root).f_frsize, os.fstat(root).st_dev
        for depth, status in _found(root, device, look.cgroup):
            met += 1
            if met % SLICE == 0:
                yield
            if status is None:
                continue
            if stat.S_ISREG(status.st_mode) and status.st_nlink != 1:
                identity = (status.st_dev, status.st_ino)
                if identity in seen:
                    continue
                seen.add(identity)
            inodes += 1
            if stat.S_ISREG(status.st_mode):
                held = status.st_blocks * 512
                size_bytes += min(status.st_size, held)
                reserved_bytes += status.st_size if 0 <= held - status.st_size <= block else held
            if excess := _excess(look, size_bytes, reserved_bytes, inodes, depth):
                return Usage(size_bytes=size_bytes, inodes=inodes, excess=excess)
    return Usage(size_bytes=size_bytes, inodes=inodes)


def _excess(look: Look, size_bytes: int, reserved_bytes: int, inodes: int, depth: int) -> str:
    if size_bytes > look.most_bytes:
        return "bytes"
    if reserved_bytes > look.most_bytes * PREALLOCATED_TIMES + PREALLOCATED_BYTES:
        return "reserved"
    if inodes > look.most_inodes:
        return "inodes"
    return "depth" if depth > BUFFER_DEPTH_MAX else ""


def _found(root: int, device: int, name: CgroupName | None) -> Iterator[tuple[int, os.stat_result | None]]:
    """Give everything in an open buffer with its depth, and what was removed and is held; None for what is neither."""
    yield from _walk(root, device)
    cgroup = Cgroup.find(name)
    if cgroup is None:
        return
    with closing(cgroup.directory):
        pids = cgroup.pids()
    for status in removed(pids, os.readlink(f"/proc/self/fd/{root}") + "/"):
        yield 1, status


def removed(pids: Iterable[int], beneath: str) -> Iterator[os.stat_result | None]:
    """Give the removed files that processes hold open or mapped, and that were beneath a path; None for each other."""
    for pid in pids:
        for kind in ("fd", "map_files"):
            yield from _held(f"/proc/{pid}/{kind}", beneath)


def _held(directory: str, beneath: str) -> Iterator[os.stat_result | None]:
    """Give the removed files that a process holds and that were in a buffer; None for each other file."""
    # The process may end at any time, and one of another user is not this agent's to look at.
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            status = None
            with suppress(OSError):
                # By its name first: a file elsewhere may be of a file system that does not answer.
                where = os.readlink(entry.path)
                if where.startswith(beneath) and where.endswith(" (deleted)"):
                    status = os.stat(entry.path)
            is_removed = status is not None and stat.S_ISREG(status.st_mode) and status.st_nlink == 0
            yield status if is_removed else None


def _walk(root: int, device: int) -> Iterator[tuple[int, os.stat_result]]:
    """Give everything beneath the open directory, with how deep it lies."""
    stack: list[tuple[int, Iterator[os.DirEntry[str]]]] = [(os.dup(root), os.scandir(root))]
    try:
        while stack:
            directory, entries = stack[-1]
            entry = next(entries, None)
            if entry is None:
                os.close(stack.pop()[0])
                continue
            try:
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(status.st_mode) and len(stack) <= BUFFER_DEPTH_MAX:
                    below = open_directory(entry.name, dir_fd=directory)
                    # What is mounted here is not the job's, but subvolumes are, which anybody may make.
                    if status.st_dev == device or subvolumes.is_subvolume(below):
                        stack.append((below, os.scandir(below)))
                    else:
                        os.close(below)
            except OSError:
                # It is gone, or another kind of thing by now.
                continue
            yield len(stack), status
    finally:
        for directory, _ in stack:
            os.close(directory)
