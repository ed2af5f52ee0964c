"""Moving by a program, a batch at a time: run it, compare what it left, run it again for the rest, put it in place."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Final, NamedTuple

from cluster.agent.files import PathRefused, RemovalFailed, join, kind_of, opened, remove_tree
from cluster.agent.limits import COPY_TRIES_MAX
from cluster.agent.transfer.digests import READ_BYTES, combine, digest_of, digest_on_disk
from cluster.agent.transfer.errors import ReadBackFailed, SourceChanged, TransferFailed
from cluster.agent.transfer.file_copy import check_target, check_unchanged, open_source, publish, set_metadata
from cluster.agent.transfer.manifest import Record
from cluster.agent.transfer.options import Algorithm, Item, Kind, Verify
from cluster.agent.transfer.programs import Backend, Job, run_program
from cluster.agent.transfer.record_paths import RecordPaths, enter, part_name
from cluster.agent.transfer.status_table import Copied, Flag, State
from cluster.agent.transfer.transfer_state import Batch, Moved, TransferState
from cluster.system import closing, open_directory, sync_file_system


class Scratch:
    """Scratch directory, while it is used; what is left in it goes when it is removed."""

    def __init__(self, transfer: TransferState, record: Record, paths: RecordPaths) -> None:
        """Make or find that of the record's item, which `record` is the first of. OSError."""
        number = record.item
        self._parent = os.dup(paths.part(record)[0])
        self._name = os.fsdecode(part_name(transfer.context.tag, b"%d:scratch" % number))
        self.shown = join(transfer.items[number].destination.path, (self._name,))
        self.is_old = False
        """Whether an earlier attempt left something in it, maybe."""
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
        """Remove it with everything in it. RemovalFailed."""
        remove_tree(self._parent, self._name, shown=self.shown)

    def close(self) -> None:
        """Close it."""
        os.close(self.descriptor)
        os.close(self._parent)

    @contextlib.contextmanager
    def holding(self, path: bytes) -> Iterator[tuple[int, bytes]]:
        """Give the open directory in which a file of the program lies, and its name there; never through a link.

        TransferFailed if there is no such directory.
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
        """Remove a file unless it has this size and this time. OSError, RemovalFailed."""
        with contextlib.suppress(FileNotFoundError, TransferFailed), self.holding(path) as (directory, name):
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
            if (status.st_size, status.st_mtime_ns) == (size_bytes, mtime_ns):
                return
        self.discard(path)

    def discard(self, path: bytes) -> None:
        """Remove a file of the program, or what it made in its place. OSError, RemovalFailed."""
        with contextlib.suppress(FileNotFoundError, TransferFailed), self.holding(path) as (directory, name):
            try:
                os.unlink(name, dir_fd=directory)
            except IsADirectoryError:
                remove_tree(directory, os.fsdecode(name), shown=self.shown)


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
    with closing(reading):
        with closing(_open(scratch, path, status)) as writing:
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
            flags = set_metadata(reading, writing, status, options, acls=transfer.items[record.item].acls)
            if options.verify >= Verify.READ_BACK:
                os.fsync(writing)
                if _digest(transfer, record, writing, on_disk=True) != digest:
                    raise ReadBackFailed(f"{shown} does not hold what was read from {source}; check the disk")
            if os.fstat(writing).st_blocks * 512 < size:
                flags |= Flag.SPARSE
            return Checked(record, Copied(size, status.st_mtime_ns, os.fstat(writing).st_ino, digest, flags))


def sync(path: bytes, scratch: Scratch) -> None:
    """Make one file durable. OSError."""
    with scratch.holding(path) as (directory, name):
        with closing(os.open(name, _READ, dir_fd=directory)) as descriptor:
            os.fsync(descriptor)


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
        transfer.advance(Moved(steps=1))
        return take(descriptor, algorithm)
    size = os.fstat(descriptor).st_size
    chunk_bytes = transfer.chunks(record, size).chunk_bytes
    digests = []
    for offset in range(0, size, chunk_bytes):
        transfer.context.pace.check()
        transfer.advance(Moved(steps=1 + chunk_bytes // READ_BYTES))
        digests.append(take(descriptor, algorithm, offset, chunk_bytes))
    return combine(algorithm, chunk_bytes, digests)


SYNCED_ALONE_MAX: Final = 16
"""Files that are synced one by one, count: from there on one sync of their file system costs less."""


def move_by(transfer: TransferState, backend: Backend) -> None:
    """Move every pending file whose item is the backend's. TransferFailed names the one that cannot be; Fenced."""

    def wanted(item: Item) -> bool:
        return item.backend == backend.name

    with contextlib.closing(transfer.paths()) as paths:
        mover = _Mover(transfer, backend, paths)
        try:
            for batch in transfer.pending(wanted):
                for number, records in _by_item(transfer, batch, wanted):
                    mover.move(number, records)
            mover.finish()
        except Exception:
            # What is half done would be begun again anyway, and takes room that may be what is lacking.
            with contextlib.suppress(TransferFailed):
                mover.finish()
            raise
        finally:
            mover.close()


def _by_item(transfer: TransferState, batch: Batch, wanted: object) -> Iterator[tuple[int, list[Record]]]:
    assert callable(wanted)
    for number, records in groupby(transfer.records(batch, wanted), key=lambda record: record.item):
        yield number, list(records)


class _Mover:
    """Items of one backend, one after the other, each with its scratch directory."""

    def __init__(self, transfer: TransferState, backend: Backend, paths: RecordPaths) -> None:
        self._transfer = transfer
        self._backend = backend
        self._paths = paths
        self._scratch: Scratch | None = None
        self._item = -1

    def move(self, number: int, records: Sequence[Record]) -> None:
        """Move files of one item, all of them or none that is not whole."""
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
            raise self._failed(first, error) from error

    def finish(self) -> None:
        """Remove the scratch directory of the item before. TransferFailed if that is not possible."""
        if self._scratch is None:
            return
        try:
            self._scratch.remove()
        except RemovalFailed as error:
            raise TransferFailed(str(error)) from error
        self.close()

    def close(self) -> None:
        """Close it, and leave what is in it to the next attempt."""
        if self._scratch is not None:
            self._scratch.close()
        self._scratch, self._item = None, -1

    def _move(self, source: int, records: Sequence[Record], *, run: bool) -> None:
        assert self._scratch is not None
        transfer, scratch = self._transfer, self._scratch
        left: Sequence[Record] = records
        wrong: Exception | None = None
        if scratch.is_old and not self._backend.at_once:
            # Half a file of a killed attempt: rclone, told not to look at what changes, goes by the size that this had.
            for record in records:
                scratch.discard_unlike(self._path(record), record.size, record.mtime_ns)
        for tried in range(COPY_TRIES_MAX):
            if run or tried:
                names = [self._path(record) for record in left]
                job = Job(source, scratch.descriptor, names, transfer.items[records[0].item].kind is Kind.DIRECTORY)
                run_program(transfer, self._backend.name, self._backend.call(job), job)
            good: list[Checked] = []
            bad: list[Record] = []
            for record in left:
                try:
                    good.append(check(transfer, record, self._path(record), scratch, self._paths))
                except (SourceChanged, ReadBackFailed, NotCopied) as error:
                    wrong = wrong if bad else error
                    bad.append(record)
                    transfer.slots.tried(record.index)
                    # What is wrong with it may be what the program takes for right: size and time.
                    scratch.discard(self._path(record))
                except (OSError, TransferFailed) as error:
                    raise self._failed(record, error) from error
            self._put_in_place(good)
            if not bad:
                return
            transfer.advance(Moved(retries=len(bad)))
            left = bad
        raise self._wrong(left[0], wrong)

    def _put_in_place(self, good: Sequence[Checked]) -> None:
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
            transfer.slots.mark(record.index, State.READY, copied)
        if not transfer.options.replace:
            transfer.slots.sync()
        for record, _ in good:
            try:
                place(transfer, record, self._path(record), scratch, paths)
            except (OSError, TransferFailed) as error:
                raise self._failed(record, error) from error
        self._sync_directories(good)
        for record, copied in good:
            transfer.slots.mark(record.index, State.DONE, copied)
            transfer.advance(Moved(files=1, size_bytes=copied.size, written_bytes=copied.size))
        transfer.slots.sync()

    def _sync_directories(self, good: Sequence[Checked]) -> None:
        """Make the new names durable."""
        last = b"\0"
        for record, _ in good:
            parent = record.path.rpartition(b"/")[0]
            if parent != last:
                os.fsync(self._paths.destination(record)[0])
            last = parent

    @contextlib.contextmanager
    def _source(self, record: Record) -> Iterator[int]:
        """Give the open directory that names are beneath: a tree's own, or the one that a file is in."""
        item = self._transfer.items[record.item]
        if item.kind is Kind.FILE:
            yield self._paths.source(record)[0]
            return
        target = item.source._replace(anchor=os.dup(item.source.anchor))
        with opened(target, forbidden=item.source_barred) as directory:
            yield directory

    def _path(self, record: Record) -> bytes:
        """Return what the program calls a file."""
        return record.path or os.fsencode(self._transfer.items[record.item].source.parts[-1])

    def _check_name(self, record: Record) -> None:
        fault = self._backend.fault(self._path(record))
        if fault is not None:
            source, _ = self._transfer.shown(record)
            raise TransferFailed(
                f"{self._backend.name} cannot be told of {source!r}: its name {fault}; use backend=native"
            )

    def _failed(self, record: Record, error: OSError | TransferFailed | PathRefused) -> Exception:
        if isinstance(error, PathRefused):
            return TransferFailed(str(error), record.item)
        return self._transfer.failed(record, error)

    def _wrong(self, record: Record, wrong: Exception | None) -> Exception:
        """Return what is said of a file that was wrong every time."""
        if isinstance(wrong, SourceChanged):
            return self._transfer.changed(record, COPY_TRIES_MAX)
        source, _ = self._transfer.shown(record)
        os_message = (
            str(wrong)
            if isinstance(wrong, ReadBackFailed)
            else f"{self._backend.name} said that it was done, but did not copy {source}: {wrong}"
        )
        return ReadBackFailed(os_message, record.item)
