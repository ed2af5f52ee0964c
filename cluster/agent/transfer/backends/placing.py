"""Comparing what a program copied with its source, and putting it in place like any other file."""

from __future__ import annotations

import os
import stat
from typing import Final, NamedTuple

from cluster.agent.files import kind_of
from cluster.agent.transfer.backends.scratch import Scratch
from cluster.agent.transfer.copying.file_copy import check_target, check_unchanged, open_source, publish, set_metadata
from cluster.agent.transfer.copying.transfer_state import TransferState
from cluster.agent.transfer.planning.record_paths import RecordPaths
from cluster.agent.transfer.records.digests import READ_BYTES, combine, digest_of, digest_on_disk
from cluster.agent.transfer.records.errors import ReadBackFailed
from cluster.agent.transfer.records.manifest import Record
from cluster.agent.transfer.records.options import Algorithm, Verify
from cluster.agent.transfer.records.status_table import Copied, Flag

_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class NotCopied(Exception):
    """What a program left is not the file that it was told to copy; the message is a clause that says how."""


class Checked(NamedTuple):
    """A file that was compared and has its metadata, but is not durable yet."""

    record: Record
    copied: Copied


def check(transfer: TransferState, record: Record, path: bytes, scratch: Scratch, paths: RecordPaths) -> Checked:
    """Compare one file with its source and the manifest, and give it its metadata.

    NotCopied or ReadBackFailed if it is not what it should be, SourceChanged if the source was written to;
    TransferFailed, OSError.
    """
    options = transfer.options
    source, shown = transfer.shown(record)
    check_target(*paths.destination(record), shown, replace=options.replace)
    reading, status = open_source(*paths.source(record), source)
    try:
        writing = _open(scratch, path, status)
        try:
            size = os.fstat(writing).st_size
            check_unchanged(reading, status)
            if size != status.st_size:
                raise NotCopied(f"it has {size} bytes there instead of {status.st_size}")
            digest = b""
            if options.verify >= Verify.DIGEST:
                digest = _digest(transfer, record, reading)
                if _digest(transfer, record, writing) != digest:
                    raise NotCopied("its contents are others there")
                check_unchanged(reading, status)
            flags = set_metadata(reading, writing, status, options)
            if options.verify >= Verify.READ_BACK:
                os.fsync(writing)
                if _digest(transfer, record, writing, on_disk=True) != digest:
                    raise ReadBackFailed(f"{shown} does not hold what was read from {source}; check the disk")
            if os.fstat(writing).st_blocks * 512 < size:
                flags |= Flag.SPARSE
            return Checked(record, Copied(size, status.st_mtime_ns, os.fstat(writing).st_ino, digest, flags))
        finally:
            os.close(writing)
    finally:
        os.close(reading)


def sync(path: bytes, scratch: Scratch) -> None:
    """Make one file durable. OSError."""
    with scratch.holding(path) as (directory, name):
        descriptor = os.open(name, _READ, dir_fd=directory)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def place(transfer: TransferState, record: Record, path: bytes, scratch: Scratch, paths: RecordPaths) -> None:
    """Give a durable file its name; its directory is to be synced. TransferFailed, OSError."""
    _, shown = transfer.shown(record)
    directory, name = paths.destination(record)
    with scratch.holding(path) as (holding, part):
        publish(holding, part, directory, name, shown, replace=transfer.options.replace)


def _open(scratch: Scratch, path: bytes, source: os.stat_result) -> int:
    """Return a descriptor of what the program left. NotCopied if it is no file of its own."""
    with scratch.holding(path) as (directory, name):
        try:
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:
            raise NotCopied("it is not there") from None
        if not stat.S_ISREG(status.st_mode):
            raise NotCopied(f"it is a {kind_of(status.st_mode)} there")
        descriptor = os.open(name, _READ, dir_fd=directory)
        status = os.fstat(descriptor)
    if status.st_nlink != 1 or (status.st_dev, status.st_ino) == (source.st_dev, source.st_ino):
        os.close(descriptor)
        raise NotCopied("it is a second name of another file there")
    return descriptor


def _digest(transfer: TransferState, record: Record, descriptor: int, *, on_disk: bool = False) -> bytes:
    """Return the digest of a file as Forebay's own copying takes it. What it takes to read is progress, too."""
    algorithm: Algorithm = transfer.options.algorithm
    take = digest_on_disk if on_disk else digest_of
    if not record.is_large:
        transfer.advance(steps=1)
        return take(descriptor, algorithm)
    size = os.fstat(descriptor).st_size
    chunk_bytes = transfer.chunks(record, size).chunk_bytes
    digests = []
    for offset in range(0, size, chunk_bytes):
        transfer.context.pace.check()
        transfer.advance(steps=1 + chunk_bytes // READ_BYTES)
        digests.append(take(descriptor, algorithm, offset, chunk_bytes))
    return combine(algorithm, chunk_bytes, digests)
