"""Transfers by external programs, in batches: run the program, verify, rerun it for the rest, and move into place."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Final, NamedTuple

from forebay.cluster.agent.files import PathRefused, RemovalFailed, join, kind_of, open_target, remove_tree
from forebay.cluster.agent.limits import COPY_TRIES_MAX
from forebay.cluster.agent.transfer.digests import READ_BYTES, combine, digest_of, digest_on_disk
from forebay.cluster.agent.transfer.errors import ReadBackFailed, SourceChanged, TransferFailed
from forebay.cluster.agent.transfer.file_copy import check_target, check_unchanged, open_source, publish, set_metadata
from forebay.cluster.agent.transfer.manifest import ManifestRecord
from forebay.cluster.agent.transfer.options import Algorithm, ItemKind, TransferItem, Verify
from forebay.cluster.agent.transfer.programs import Backend, CopyJob, run_program
from forebay.cluster.agent.transfer.record_paths import RecordPaths, enter, part_name
from forebay.cluster.agent.transfer.status_table import CopiedFile, Flag, RecordState
from forebay.cluster.agent.transfer.transfer_state import MovedAmounts, RecordBatch, TransferState
from forebay.cluster.system import closing, open_directory, sync_file_system


class Scratch:
    """Scratch directory in use; its remaining content goes when it is removed."""

    def __init__(self, transfer: TransferState, record: ManifestRecord, paths: RecordPaths) -> None:
        """Create or open the scratch directory of an item, whose first record is `record`.

        Raises:
            OSError: The directory cannot be created.
        """
        number = record.item
        self._parent = os.dup(paths.part(record)[0])
        self._name = os.fsdecode(part_name(transfer.context.tag, b"%d:scratch" % number))
        self.shown = join(transfer.items[number].destination.path, (self._name,))
        self.is_old = False
        """True if an earlier attempt may have left files in it."""
        try:
            try:
                os.mkdir(self._name, 0o700, dir_fd=self._parent)
            except FileExistsError:
                self.is_old = True
            self.descriptor = open_directory(self._name, dir_fd=self._parent)
        except BaseException:
            os.close(self._parent)
            raise

    def remove(self) -> None:
        """Remove the directory with its content.

        Raises:
            RemovalFailed: A file cannot be removed.
        """
        remove_tree(self._parent, self._name, shown=self.shown)

    def close(self) -> None:
        """Close the descriptors."""
        os.close(self.descriptor)
        os.close(self._parent)

    @contextlib.contextmanager
    def holding(self, path: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield the open directory of a file written by the program, and its name in it; follows no link.

        Raises:
            TransferFailed: There is no such directory.
        """
        *above, name = path.split(b"/")
        current, shown = os.dup(self.descriptor), self.shown
        try:
            for part in above:
                shown = join(shown, (os.fsdecode(part),))
                following = enter(current, part, shown, None)
                os.close(current)
                current = following
            yield current, name
        finally:
            os.close(current)

    def discard_unlike(self, path: bytes, size_bytes: int, mtime_ns: int) -> None:
        """Remove a file unless it has this size and time.

        Raises:
            OSError: The file cannot be read.
            RemovalFailed: The file cannot be removed.
        """
        with contextlib.suppress(FileNotFoundError, TransferFailed), self.holding(path) as (directory, name):
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
            if (status.st_size, status.st_mtime_ns) == (size_bytes, mtime_ns):
                return
        self.discard(path)

    def discard(self, path: bytes) -> None:
        """Remove a file written by the program, or anything in its place.

        Raises:
            OSError: The file cannot be removed.
            RemovalFailed: A directory in its place cannot be removed.
        """
        with contextlib.suppress(FileNotFoundError, TransferFailed), self.holding(path) as (directory, name):
            try:
                os.unlink(name, dir_fd=directory)
            except IsADirectoryError:
                remove_tree(directory, os.fsdecode(name), shown=self.shown)


_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class CopyMismatch(Exception):
    """The program's output is not a correct copy; the message is a clause that describes the difference."""


class CheckedFile(NamedTuple):
    """Verified file with its metadata, not yet durable."""

    record: ManifestRecord
    copied: CopiedFile


def check(
    transfer: TransferState, record: ManifestRecord, path: bytes, scratch: Scratch, paths: RecordPaths
) -> CheckedFile:
    """Compare a file with its source and the manifest, and set its metadata.

    Raises:
        CopyMismatch: The program's output is not a correct copy.
        ReadBackFailed: The data on disk differs.
        SourceChanged: The source was modified.
        TransferFailed: The file cannot be put at its destination.
        OSError: A file cannot be read.
    """
    options = transfer.options
    source, shown = transfer.display_paths(record)
    check_target(*paths.destination(record), shown, replace=options.replace)
    reading, status = open_source(*paths.source(record), source)
    with closing(reading):
        with closing(_open(scratch, path, status)) as writing:
            size = os.fstat(writing).st_size
            check_unchanged(reading, status)
            if size != status.st_size:
                raise CopyMismatch(f"the copy has {size} bytes instead of {status.st_size}")
            digest = b""
            if options.verify >= Verify.DIGEST:
                digest = _digest(transfer, record, reading)
                if _digest(transfer, record, writing) != digest:
                    raise CopyMismatch("the content of the copy differs")
                check_unchanged(reading, status)
            flags = set_metadata(reading, writing, status, options, acls=transfer.items[record.item].acls)
            if options.verify >= Verify.READ_BACK:
                os.fsync(writing)
                if _digest(transfer, record, writing, on_disk=True) != digest:
                    raise ReadBackFailed(f"{shown} differs from the data read from {source}; check the disk")
            if os.fstat(writing).st_blocks * 512 < size:
                flags |= Flag.SPARSE
            return CheckedFile(record, CopiedFile(size, status.st_mtime_ns, os.fstat(writing).st_ino, digest, flags))


def sync(path: bytes, scratch: Scratch) -> None:
    """Make one file durable.

    Raises:
        OSError: The sync failed.
    """
    with scratch.holding(path) as (directory, name):
        with closing(os.open(name, _READ, dir_fd=directory)) as descriptor:
            os.fsync(descriptor)


def place(transfer: TransferState, record: ManifestRecord, path: bytes, scratch: Scratch, paths: RecordPaths) -> None:
    """Rename a durable file to its final name; the caller syncs the directory.

    Raises:
        TransferFailed: The name is taken.
        OSError: The file cannot be renamed.
    """
    _, shown = transfer.display_paths(record)
    directory, name = paths.destination(record)
    with scratch.holding(path) as (holding, part):
        publish(holding, part, directory, name, shown, replace=transfer.options.replace)


def _open(scratch: Scratch, path: bytes, source: os.stat_result) -> int:
    """Open a file written by the program.

    Raises:
        CopyMismatch: It is not a regular file of its own.
    """
    with scratch.holding(path) as (directory, name):
        try:
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:
            raise CopyMismatch("the copy does not exist") from None
        if not stat.S_ISREG(status.st_mode):
            raise CopyMismatch(f"the copy is a {kind_of(status.st_mode)}")
        descriptor = os.open(name, _READ, dir_fd=directory)
        status = os.fstat(descriptor)
    if status.st_nlink != 1 or (status.st_dev, status.st_ino) == (source.st_dev, source.st_ino):
        os.close(descriptor)
        raise CopyMismatch("the copy is a hard link to another file")
    return descriptor


def _digest(transfer: TransferState, record: ManifestRecord, descriptor: int, *, on_disk: bool = False) -> bytes:
    """Return a file's digest as computed by the native backend; reading counts as progress."""
    algorithm: Algorithm = transfer.options.algorithm
    take = digest_on_disk if on_disk else digest_of
    if not record.is_large:
        transfer.advance(MovedAmounts(steps=1))
        return take(descriptor, algorithm)
    size = os.fstat(descriptor).st_size
    chunk_bytes = transfer.chunks(record, size).chunk_bytes
    digests = []
    for offset in range(0, size, chunk_bytes):
        transfer.context.pace.check()
        transfer.advance(MovedAmounts(steps=1 + chunk_bytes // READ_BYTES))
        digests.append(take(descriptor, algorithm, offset, chunk_bytes))
    return combine(algorithm, chunk_bytes, digests)


SYNCED_ALONE_MAX: Final = 16
"""Files synced individually, count: beyond that, one sync of the filesystem costs less."""


def move_by(transfer: TransferState, backend: Backend) -> None:
    """Move every pending file whose item uses the backend.

    Raises:
        TransferFailed: A file cannot be moved; the message names it.
        WriterFenced: A newer attempt owns the destination.
    """

    def wanted(item: TransferItem) -> bool:
        return item.backend == backend.name

    with contextlib.closing(transfer.paths()) as paths:
        mover = _Mover(transfer, backend, paths)
        try:
            for batch in transfer.pending(wanted):
                for number, records in _by_item(transfer, batch, wanted):
                    mover.move(number, records)
            mover.finish()
        except Exception:
            # Partial files would be copied again anyway, and may use the space that is missing.
            with contextlib.suppress(TransferFailed):
                mover.finish()
            raise
        finally:
            mover.close()


def _by_item(transfer: TransferState, batch: RecordBatch, wanted: object) -> Iterator[tuple[int, list[ManifestRecord]]]:
    assert callable(wanted)
    for number, records in groupby(transfer.records(batch, wanted), key=lambda record: record.item):
        yield number, list(records)


class _Mover:
    """Moves items of one backend one at a time, each with its scratch directory."""

    def __init__(self, transfer: TransferState, backend: Backend, paths: RecordPaths) -> None:
        self._transfer = transfer
        self._backend = backend
        self._paths = paths
        self._scratch: Scratch | None = None
        self._item = -1

    def move(self, number: int, records: Sequence[ManifestRecord]) -> None:
        """Move files of one item."""
        transfer, first = self._transfer, records[0]
        transfer.at(first)
        try:
            for record in records:
                self._check_name(record)
            fresh = number != self._item
            if fresh:
                self.finish()
                self._scratch, self._item = Scratch(transfer, first, self._paths), number
            with self._source(first) as source:
                self._move(source, records, run=fresh or not self._backend.at_once)
        except RemovalFailed as error:
            raise TransferFailed(str(error)) from error
        except (OSError, TransferFailed, PathRefused) as error:
            raise self._failure_of(first, error) from error

    def finish(self) -> None:
        """Remove the scratch directory of the previous item.

        Raises:
            TransferFailed: The directory cannot be removed.
        """
        if self._scratch is None:
            return
        try:
            self._scratch.remove()
        except RemovalFailed as error:
            raise TransferFailed(str(error)) from error
        self.close()

    def close(self) -> None:
        """Close the scratch directory and leave its content to the next attempt."""
        if self._scratch is not None:
            self._scratch.close()
        self._scratch, self._item = None, -1

    def _move(self, source: int, records: Sequence[ManifestRecord], *, run: bool) -> None:
        assert self._scratch is not None
        transfer, scratch = self._transfer, self._scratch
        left: Sequence[ManifestRecord] = records
        wrong: Exception | None = None
        if scratch.is_old and not self._backend.at_once:
            # A killed attempt may have left half a file, which rclone would accept by its expected size.
            for record in records:
                scratch.discard_unlike(self._path(record), record.size, record.mtime_ns)
        for tried in range(COPY_TRIES_MAX):
            if run or tried:
                names = [self._path(record) for record in left]
                job = CopyJob(
                    source, scratch.descriptor, names, transfer.items[records[0].item].kind is ItemKind.DIRECTORY
                )
                run_program(transfer, self._backend.name, self._backend.call(job), job)
            good: list[CheckedFile] = []
            bad: list[ManifestRecord] = []
            for record in left:
                try:
                    good.append(check(transfer, record, self._path(record), scratch, self._paths))
                except (SourceChanged, ReadBackFailed, CopyMismatch) as error:
                    wrong = wrong if bad else error
                    bad.append(record)
                    transfer.slots.count_try(record.index)
                    # The program may judge a wrong file by its size and time and skip it.
                    scratch.discard(self._path(record))
                except (OSError, TransferFailed) as error:
                    raise self._failure_of(record, error) from error
            self._put_in_place(good)
            if not bad:
                return
            transfer.advance(MovedAmounts(retries=len(bad)))
            left = bad
        raise self._wrong(left[0], wrong)

    def _put_in_place(self, good: Sequence[CheckedFile]) -> None:
        assert self._scratch is not None
        transfer, scratch, paths = self._transfer, self._scratch, self._paths
        if not good:
            return
        if len(good) <= SYNCED_ALONE_MAX:
            for record, _ in good:
                sync(self._path(record), scratch)
        else:
            sync_file_system(scratch.descriptor)
        for record, copied in good:
            transfer.slots.mark(record.index, RecordState.READY, copied)
        if not transfer.options.replace:
            transfer.slots.sync()
        for record, _ in good:
            try:
                place(transfer, record, self._path(record), scratch, paths)
            except (OSError, TransferFailed) as error:
                raise self._failure_of(record, error) from error
        self._sync_directories(good)
        for record, copied in good:
            transfer.slots.mark(record.index, RecordState.DONE, copied)
            transfer.advance(MovedAmounts(files=1, size_bytes=copied.size, written_bytes=copied.size))
        transfer.slots.sync()

    def _sync_directories(self, good: Sequence[CheckedFile]) -> None:
        """Sync the directories of new names."""
        last = b"\0"
        for record, _ in good:
            parent = record.path.rpartition(b"/")[0]
            if parent != last:
                os.fsync(self._paths.destination(record)[0])
            last = parent

    @contextlib.contextmanager
    def _source(self, record: ManifestRecord) -> Iterator[int]:
        """Yield the open directory that names are relative to: the tree's own, or the parent of a file."""
        item = self._transfer.items[record.item]
        if item.kind is ItemKind.FILE:
            yield self._paths.source(record)[0]
            return
        target = item.source._replace(anchor=os.dup(item.source.anchor))
        with open_target(target, forbidden=item.source_barred) as directory:
            yield directory

    def _path(self, record: ManifestRecord) -> bytes:
        """Return the name of a file for the program."""
        return record.path or os.fsencode(self._transfer.items[record.item].source.parts[-1])

    def _check_name(self, record: ManifestRecord) -> None:
        fault = self._backend.fault(self._path(record))
        if fault is not None:
            source, _ = self._transfer.display_paths(record)
            raise TransferFailed(f"{self._backend.name} cannot copy {source!r}: its name {fault}; use backend=native")

    def _failure_of(self, record: ManifestRecord, error: OSError | TransferFailed | PathRefused) -> Exception:
        if isinstance(error, PathRefused):
            return TransferFailed(str(error), record.item)
        return self._transfer.failure_of(record, error)

    def _wrong(self, record: ManifestRecord, wrong: Exception | None) -> Exception:
        """Return the error for a file that was wrong in every attempt."""
        if isinstance(wrong, SourceChanged):
            return self._transfer.source_changed_error(record, COPY_TRIES_MAX)
        source, _ = self._transfer.display_paths(record)
        os_message = (
            str(wrong)
            if isinstance(wrong, ReadBackFailed)
            else f"{self._backend.name} reported success but did not copy {source}: {wrong}"
        )
        return ReadBackFailed(os_message, record.item)
