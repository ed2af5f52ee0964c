"""What a buffer holds, as it is counted for the watch over what jobs write: until there is too much, and no further."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from typing import Final

import msgspec

from cluster.agent.files import subvolumes
from cluster.agent.limits import BUFFER_DEPTH_MAX
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


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What was found, as far as it was counted."""

    size_bytes: int = 0
    """Of the files, as far as they have blocks."""
    inodes: int = 0
    excess: str = ""
    """What there is too much of: bytes, reserved, inodes or depth; empty: nothing."""


def inodes_of(capacity_bytes: int) -> int:
    """Return how many files, directories and links a job may make in a buffer of so many bytes."""
    return max(INODES_LEAST, capacity_bytes // INODE_BYTES)


def blocks_of(capacity_bytes: int) -> int:
    """Return how much of its file system a buffer of so many bytes may take where that is kept by the file system.

    It counts whole blocks, and those of directories: what fits by the lengths of its files should fit.
    """
    return capacity_bytes + capacity_bytes // QUOTA_PART + QUOTA_BYTES


def measure(look: Look) -> Usage:
    """Count what is in a buffer, until there is too much. OSError if it cannot be opened.

    By descriptors and never through a link; what changes meanwhile is counted as it was met.
    """
    size_bytes = reserved_bytes = inodes = 0
    seen: set[tuple[int, int]] = set()
    with closing(open_directory(look.path)) as root:
        block, device = os.statvfs(root).f_frsize, os.fstat(root).st_dev
        for depth, status in _walk(root, device):
            if stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
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
