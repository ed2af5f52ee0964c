"""Records of a transfer on the agent's disk, opened before the worker switches to the job's user.

`transfers/JOB.STAGE.{control,manifest,chunks}.{0,1}` are two generations: a new attempt writes one while reading the
other, so that a crash always leaves one intact; a first attempt has one. `JOB.STAGE.made` lists top directories of
trees before the transfer creates them. `receipts/JOB.ATTEMPT.STAGE` has a line for every file. They belong to the
agent: the worker, running as the job's user, can neither open nor change them by name.

If the agent's disk is full, the records are kept in memory: the transfer is equally safe but cannot be resumed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from typing import Final, NamedTuple

from forebay.cluster.agent.files import RECEIPTS
from forebay.cluster.system import closing, is_disk_full, names_in, open_directory

TRANSFERS: Final = "transfers"
STAGES: Final = ("stage_in", "stage_out")

RECEIPT_FILES_MAX: Final = 4_096
"""Receipt files kept by an agent, count; the oldest are removed first. Each has about 120 bytes per file moved."""

RECEIPT_BYTES_MAX: Final = 4 * 1024**3
"""Total size of receipt files, bytes: about thirty million files."""

_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_KINDS: Final = ("control", "manifest", "chunks")


class RecordFiles(NamedTuple):
    """Open files of one generation."""

    control: int
    """Header, and a row for each record."""
    manifest: int
    chunks: int
    """Marks of the chunks of large files."""


class Workspace:
    """Open files of one transfer."""

    def __init__(
        self, generations: tuple[RecordFiles, RecordFiles], receipts: int, made: int, *, in_memory: bool
    ) -> None:
        """Take ownership of the descriptors."""
        self.generations = generations
        self._made = made
        self._known: set[bytes] = set()
        self.receipts = receipts
        self.in_memory = in_memory

    @classmethod
    def open(cls, home: int, job: int, attempt: int, stage: str) -> Workspace:
        """Open or create the files in the agent's open directory, or in memory if the disk is full.

        Raises:
            OSError: The disk fails.
        """
        with contextlib.ExitStack() as opened:
            try:
                transfers = _subdirectory(home, TRANSFERS, opened)
                receipts = _subdirectory(home, RECEIPTS, opened)
                begun = _is_there(transfers, _name(job, stage, _KINDS[0], 0))
                first = RecordFiles(*(_open(transfers, _name(job, stage, kind, 0), opened) for kind in _KINDS))
                if begun:
                    second = RecordFiles(*(_open(transfers, _name(job, stage, kind, 1), opened) for kind in _KINDS))
                else:
                    # There is nothing to resume, so the second generation is never needed on disk.
                    second = RecordFiles(*(_close_later(_memory(kind), opened) for kind in _KINDS))
                made = _open(transfers, _made_name(job, stage), opened)
                lines = _open(receipts, f"{job}.{attempt}.{stage}", opened)
                os.fsync(transfers)
                os.fsync(receipts)
                opened.pop_all()
                os.close(transfers)
                os.close(receipts)
                return cls((first, second), lines, made, in_memory=False)
            except OSError as error:
                if not is_disk_full(error):
                    raise
        return cls.in_memory_only()

    @classmethod
    def in_memory_only(cls) -> Workspace:
        """Return a workspace whose files are in memory."""
        first, second = (RecordFiles(*(_memory(kind) for kind in _KINDS)) for _ in (0, 1))
        return cls((first, second), _memory("receipts"), _memory("made"), in_memory=True)

    def note_made(self, path: bytes) -> bool:
        """Record that a directory is about to be created; return False if the disk is too full to make that durable."""
        key = _key(path)
        self._known.add(key)
        try:
            os.pwrite(self._made, key, os.fstat(self._made).st_size)
            os.fdatasync(self._made)
        except OSError as error:
            if not is_disk_full(error):
                raise
            return False
        return not self.in_memory

    def was_made(self, path: bytes) -> bool:
        """Return whether an attempt at this transfer recorded the directory as its own.

        Raises:
            OSError: The file cannot be read.
        """
        if _key(path) in self._known:
            return True
        size_bytes = os.fstat(self._made).st_size
        data = os.pread(self._made, size_bytes, 0)
        self._known.update(data[at : at + _KEY_BYTES] for at in range(0, size_bytes, _KEY_BYTES))
        return _key(path) in self._known

    def close(self) -> None:
        """Close the files."""
        for descriptor in (*self.generations[0], *self.generations[1], self.receipts, self._made):
            os.close(descriptor)


def forget(home: int, job: int, stages: tuple[str, ...] = STAGES) -> None:
    """Remove the records, but not the receipts, of a job's transfers.

    Raises:
        OSError: A file cannot be removed.
    """
    with contextlib.ExitStack() as opened:
        try:
            transfers = open_directory(TRANSFERS, dir_fd=home)
        except FileNotFoundError:
            return
        opened.callback(os.close, transfers)
        for stage in stages:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(_made_name(job, stage), dir_fd=transfers)
            for kind in _KINDS:
                for number in (0, 1):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(_name(job, stage, kind, number), dir_fd=transfers)


def prune_receipts(home: int, files_max: int = RECEIPT_FILES_MAX, bytes_max: int = RECEIPT_BYTES_MAX) -> int:
    """Remove the oldest receipt files until the rest is within the limits; return the number removed.

    Raises:
        OSError: A file cannot be removed.
    """
    try:
        receipts = open_directory(RECEIPTS, dir_fd=home)
    except FileNotFoundError:
        return 0
    with closing(receipts):
        kept: list[tuple[int, str, int]] = []
        for name in names_in(receipts):
            status = os.stat(name, dir_fd=receipts, follow_symlinks=False)
            kept.append((status.st_mtime_ns, name, status.st_size))
        kept.sort(reverse=True)
        removed, total_bytes = 0, 0
        for number, (_, name, size_bytes) in enumerate(kept):
            total_bytes += size_bytes
            if number >= files_max or total_bytes > bytes_max:
                os.unlink(name, dir_fd=receipts)
                removed += 1
        return removed


_KEY_BYTES: Final = 16


def _key(path: bytes) -> bytes:
    return hashlib.blake2b(path, digest_size=_KEY_BYTES).digest()


def _made_name(job: int, stage: str) -> str:
    return f"{job}.{stage}.made"


def _name(job: int, stage: str, kind: str, generation: int) -> str:
    return f"{job}.{stage}.{kind}.{generation}"


def _subdirectory(home: int, name: str, opened: contextlib.ExitStack) -> int:
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=home)
        os.fsync(home)
    descriptor = open_directory(name, dir_fd=home)
    opened.callback(os.close, descriptor)
    return descriptor


def _is_there(directory: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _open(directory: int, name: str, opened: contextlib.ExitStack) -> int:
    return _close_later(os.open(name, _FLAGS, 0o600, dir_fd=directory), opened)


def _close_later(descriptor: int, opened: contextlib.ExitStack) -> int:
    opened.callback(os.close, descriptor)
    return descriptor


def _memory(name: str) -> int:
    return os.memfd_create(f"forebay-{name}", os.MFD_CLOEXEC)
