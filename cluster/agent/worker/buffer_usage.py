"""Usage of a buffer, counted until a limit is exceeded, for the watch over jobs.

Removed files that a process of the job still holds open or mapped count as well. Files held only in a socket's queue,
or by processes outside the job's cgroup, are missed.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Generator, Iterable, Iterator
from contextlib import suppress
from typing import Final

import msgspec

from forebay.cluster.agent.adapters import subvolumes
from forebay.cluster.agent.limits import BUFFER_DEPTH_MAX
from forebay.cluster.agent.processes import Cgroup, CgroupName
from forebay.cluster.system import closing, open_directory

MIB: Final = 1024**2

INODES_LEAST: Final = 10_000
INODE_BYTES: Final = 512
"""Inode limit of a buffer: one per INODE_BYTES of its capacity, but at least INODES_LEAST. Filesystems usually provide
one per 16 KiB, but most buffers are large and hold few files.
"""

PREALLOCATED_TIMES: Final = 2
PREALLOCATED_BYTES: Final = 64 * MIB
"""Space that may be reserved beyond the ends of files, as a multiple of the capacity plus bytes. Filesystems
preallocate it for growing files and release it later.
"""


QUOTA_PART: Final = 16
QUOTA_BYTES: Final = 4 * MIB
"""Allowance for filesystem overhead: this fraction of the capacity (1/QUOTA_PART) plus QUOTA_BYTES."""


class UsageQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Buffer to count, with its limits."""

    path: str
    """Path of the buffer. Users cannot replace any component of it."""
    most_bytes: int
    most_inodes: int
    cgroup: CgroupName | None = None
    """Cgroup of the script; None skips removed files."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a count, which may have stopped early at a limit."""

    size_bytes: int = 0
    """Total size of the files, excluding holes."""
    inodes: int = 0
    excess: str = ""
    """Limit exceeded: bytes, reserved, inodes or depth; empty if none."""


class UsageRequest(msgspec.Struct, frozen=True):
    """Request to count one buffer."""

    number: int
    look: UsageQuery


class UsageReply(msgspec.Struct, frozen=True):
    """Reply to a `UsageRequest`, with its number."""

    number: int
    usage: Usage
    took_s: float
    """Seconds spent counting this buffer, excluding time spent on others."""
    fault: str = ""
    """Error that prevented the count; empty if there was none."""


def inodes_of(capacity_bytes: int) -> int:
    """Return the inode limit of a buffer with this capacity."""
    return max(INODES_LEAST, capacity_bytes // INODE_BYTES)


def blocks_of(capacity_bytes: int) -> int:
    """Return the quota for a buffer with this capacity, where the filesystem enforces it.

    The filesystem counts whole blocks, including those of directories; files that fit by their lengths should fit.
    """
    return capacity_bytes + capacity_bytes // QUOTA_PART + QUOTA_BYTES


SLICE: Final = 1_000
"""Entries counted between two pauses: some milliseconds."""


def measure(look: UsageQuery) -> Usage:
    """Count the content of a buffer until a limit is exceeded.

    Raises:
        OSError: The buffer cannot be opened.
    """
    counting = measuring(look)
    while True:
        try:
            next(counting)
        except StopIteration as over:
            usage: Usage = over.value
            return usage


def measuring(look: UsageQuery) -> Generator[None, None, Usage]:
    """Count the content of a buffer until a limit is exceeded, yielding after each SLICE of entries.

    Works on descriptors and follows no link. Concurrent changes may or may not be counted.

    Raises:
        OSError: The buffer cannot be opened.
    """
    size_bytes = reserved_bytes = inodes = met = 0
    seen: set[tuple[int, int]] = set()
    with closing(open_directory(look.path)) as root:
        block, device = os.statvfs(root).f_frsize, os.fstat(root).st_dev
        for depth, status in _entries(root, device, look.cgroup):
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


def _excess(look: UsageQuery, size_bytes: int, reserved_bytes: int, inodes: int, depth: int) -> str:
    if size_bytes > look.most_bytes:
        return "bytes"
    if reserved_bytes > look.most_bytes * PREALLOCATED_TIMES + PREALLOCATED_BYTES:
        return "reserved"
    if inodes > look.most_inodes:
        return "inodes"
    return "depth" if depth > BUFFER_DEPTH_MAX else ""


def _entries(root: int, device: int, name: CgroupName | None) -> Iterator[tuple[int, os.stat_result | None]]:
    """Yield depth and status of each entry in an open buffer, then of removed files still held; None for other open
    files.
    """
    yield from _walk(root, device)
    cgroup = Cgroup.find(name)
    if cgroup is None:
        return
    with closing(cgroup.directory):
        pids = cgroup.pids()
    for status in removed_files(pids, os.readlink(f"/proc/self/fd/{root}") + "/"):
        yield 1, status


def removed_files(pids: Iterable[int], beneath: str) -> Iterator[os.stat_result | None]:
    """Yield the removed files beneath a path that processes hold open or mapped; None for each other file."""
    for pid in pids:
        for kind in ("fd", "map_files"):
            yield from _held_files(f"/proc/{pid}/{kind}", beneath)


def _held_files(directory: str, beneath: str) -> Iterator[os.stat_result | None]:
    """Yield the removed files beneath a path that one process holds; None for each other file."""
    # The process may end at any time, and the agent may not inspect processes of other users.
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            status = None
            with suppress(OSError):
                # Check the name first: the filesystem of an unrelated file may hang.
                where = os.readlink(entry.path)
                if where.startswith(beneath) and where.endswith(" (deleted)"):
                    status = os.stat(entry.path)
            is_removed = status is not None and stat.S_ISREG(status.st_mode) and status.st_nlink == 0
            yield status if is_removed else None


def _walk(root: int, device: int) -> Iterator[tuple[int, os.stat_result]]:
    """Yield depth and status of each entry beneath the open directory."""
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
                    # Skip mounted filesystems, but count subvolumes, which any user may create.
                    if status.st_dev == device or subvolumes.is_subvolume(below):
                        stack.append((below, os.scandir(below)))
                    else:
                        os.close(below)
            except OSError:
                # The entry was removed or replaced meanwhile.
                continue
            yield len(stack), status
    finally:
        for directory, _ in stack:
            os.close(directory)
