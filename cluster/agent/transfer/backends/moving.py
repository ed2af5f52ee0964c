"""Moving by a program, a batch at a time: run it, compare what it left, run it again for the rest, put it in place."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Final

from cluster.agent.files import PathRefused, RemovalFailed, opened
from cluster.agent.limits import COPY_TRIES_MAX
from cluster.agent.transfer.backends.placing import Checked, NotCopied, check, place, sync
from cluster.agent.transfer.backends.programs import run_program
from cluster.agent.transfer.backends.scratch import Scratch
from cluster.agent.transfer.backends.tools import Backend, Job
from cluster.agent.transfer.copying.transfer_state import Batch, TransferState
from cluster.agent.transfer.planning.record_paths import RecordPaths, failed
from cluster.agent.transfer.records.errors import ReadBackFailed, SourceChanged, TransferFailed
from cluster.agent.transfer.records.manifest import Record
from cluster.agent.transfer.records.options import Item, Kind
from cluster.system import sync_file_system

SYNCED_ALONE_MAX: Final = 16
"""Files that are synced one by one, count: from there on one sync of their file system costs less."""


def move_by(transfer: TransferState, backend: Backend) -> None:
    """Move every pending file whose item is the backend's. TransferFailed names the one that cannot be; Fenced."""

    def wanted(item: Item) -> bool:
        return item.backend == backend.name

    with transfer.paths() as paths:
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
            transfer.advance(retries=len(bad))
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
            transfer.slots.ready(record.index, copied)
        if not transfer.options.replace:
            transfer.slots.sync()
        for record, _ in good:
            try:
                place(transfer, record, self._path(record), scratch, paths)
            except (OSError, TransferFailed) as error:
                raise self._failed(record, error) from error
        self._sync_directories(good)
        for record, copied in good:
            transfer.slots.done(record.index, copied)
            transfer.advance(files=1, size_bytes=copied.size)
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
            return failed(error, record.item)
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
        found = ReadBackFailed(os_message)
        found.item = record.item
        return found
