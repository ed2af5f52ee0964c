"""Where a stage-out may leave a temporary file if it is killed, so that the file is removed whoever dies.

`leftovers/JOB` is there while a stage-out of the job may have left something. A line of JSON says whose it is, and a
slot behind it holds the directory in which the worker makes temporary files, durable before the first one. One
directory is enough: a worker goes on to the next when its file in the one before is complete or removed. The file has
its whole size from the beginning, so that it can be a spare one, and a stage-out works on a full disk.

The worker writes the slot as the job's user, and whoever removes does so as that user too: the name is not trusted."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from cluster.agent.beneath import Identity, opened, outside_target
from cluster.agent.durable import ROOM_SUFFIX, FileRefused, is_disk_full, read_bounded, write_durably
from cluster.agent.spares import Spares
from replica.orders import Order

SLOT_BYTES: Final = 4096
"""Bytes of the slot for a directory, and what it begins at a multiple of: one page, written by one call; a path has no
more bytes. Torn by a power cut it names nothing, and then no temporary file was made there yet."""

SWEEP: Final = "sweep"
"""What a worker is told to do about it; no order of the controller says that."""


class Whose(msgspec.Struct, frozen=True, kw_only=True):
    """Of whom the directory is, and what it lies beneath."""

    user: str
    roots: tuple[str, ...]


class Left(NamedTuple):
    """What one file of `leftovers/` says."""

    whose: Whose
    directory: bytes
    """Empty if no temporary file was made."""


def part_name(job: int, storage_id: str, target_digest: str) -> str:
    """Return the temporary name of a file of a job; `storage_id` tells nodes and clusters apart."""
    return f".forebay-{job}-{storage_id[:8]}{target_digest}.part"


def begin(leftovers: int, spares: Spares, order: Order) -> int:
    """Make the file for a stage-out in the open directory, and return it, open for a Recorder.

    OSError if the disk does not take it.
    """
    name = str(order.job)
    line = msgspec.json.encode(Whose(user=order.user, roots=order.roots)) + b"\n"
    data = line.ljust(_slot_offset(line)) + bytes(SLOT_BYTES)
    try:
        write_durably(leftovers, name, data)
    except OSError as error:
        if not is_disk_full(error) or not spares.lend(leftovers, name + ROOM_SUFFIX):
            raise
        write_durably(leftovers, name, data)
    return os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=leftovers)


def forget(leftovers: int, spares: Spares, job: int) -> None:
    """Nothing can be left of the job's stage-outs any more."""
    spares.drop(leftovers, str(job))


def jobs_with_leftovers(leftovers: int) -> list[int]:
    """Return the jobs of which something may be left."""
    return sorted(int(name) for name in os.listdir(leftovers) if name.isdecimal())


def read(leftovers: int, job: int) -> Left | None:
    """Return what is known of a job, None if nothing can be left of it; FileRefused if the file is damaged."""
    data = read_bounded(leftovers, str(job))
    if data is None:
        return None
    line, newline, _ = data.partition(b"\n")
    try:
        whose = msgspec.json.decode(line, type=Whose)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FileRefused(
            f"leftovers/{job} is damaged ({error}): remove .forebay-{job}-*.part in the destinations of the job, "
            "and then this file"
        ) from error
    slot = _slot_offset(line + newline)
    return Left(whose, data[slot : slot + SLOT_BYTES].partition(b"\0")[0])


def _slot_offset(line: bytes) -> int:
    return -(-len(line) // SLOT_BYTES) * SLOT_BYTES


class Recorder:
    """A worker's side: writes down a directory before a temporary file is made in it."""

    def __init__(self, descriptor: int) -> None:
        """Take the open file."""
        self._descriptor = descriptor
        self._offset = os.fstat(descriptor).st_size - SLOT_BYTES
        self._last = ""

    def enter(self, directory: str) -> None:
        """Record the absolute path of a directory, durably; OSError if the disk does not take it."""
        if directory == self._last:
            return
        os.pwrite(self._descriptor, os.fsencode(directory)[: SLOT_BYTES - 1].ljust(SLOT_BYTES, b"\0"), self._offset)
        os.fdatasync(self._descriptor)
        self._last = directory


def sweep(job: int, storage_id: str, directory: bytes, roots: Sequence[str], home: Identity) -> int:
    """Remove the temporary files of a job from a directory beneath `roots`, and return how many there were.

    PathRefused or OSError if it cannot be looked at; a directory that is gone has nothing in it.
    """
    pattern = re.compile(re.escape(f".forebay-{job}-{storage_id[:8]}") + r"[0-9a-f]{16}\.part", re.ASCII)
    path = os.fsdecode(directory)
    if not path:
        return 0
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return 0
    with opened(outside_target(roots, path, "stage_out"), forbidden=home) as descriptor:
        names = [name for name in os.listdir(descriptor) if pattern.fullmatch(name)]
        for name in names:
            os.unlink(name, dir_fd=descriptor)
        os.fsync(descriptor)
    return len(names)
