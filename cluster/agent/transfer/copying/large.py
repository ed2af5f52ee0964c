"""Large file, copied in chunks, resumed from the marks of an earlier attempt."""

from __future__ import annotations

import contextlib
import os

import msgspec

from cluster.agent.files import allocate, clone, is_local, open_direct
from cluster.agent.limits import COPY_TRIES_MAX
from cluster.agent.transfer.copying.chunks import Pouring, SyncFailed, Way, quietly_close
from cluster.agent.transfer.copying.file_copy import (
    check_target,
    check_unchanged,
    create_part,
    open_part,
    open_source,
    publish,
    set_metadata,
)
from cluster.agent.transfer.copying.tally import Tally
from cluster.agent.transfer.copying.transfer_state import TransferState
from cluster.agent.transfer.planning.record_paths import RecordPaths, discard
from cluster.agent.transfer.records.digests import combine
from cluster.agent.transfer.records.errors import ReadBackFailed, SourceChanged
from cluster.agent.transfer.records.manifest import Record
from cluster.agent.transfer.records.options import Verify
from cluster.agent.transfer.records.status_table import ChunkState, Copied, Flag, State, StatusRow


def copy_file(transfer: TransferState, record: Record, paths: RecordPaths, tally: Tally) -> None:
    """Copy one large file, once more if it changes or storage gives it back wrong.

    What it has become since the walk is what is copied: only a file that goes on changing fails. TransferFailed,
    OSError, SourceChanged, or what the pace raises.
    """
    tally.at(transfer.label(record))
    for tried in range(1, COPY_TRIES_MAX + 1):
        attempt = _Attempt(transfer, record, paths, tally)
        try:
            attempt.run()
            return
        except (SourceChanged, ReadBackFailed):
            transfer.slots.tried(record.index)
            tally.add(size_bytes=-attempt.moved_bytes, durable_bytes=-attempt.durable_bytes, retries=1)
            if tried == COPY_TRIES_MAX:
                raise


class _Attempt:
    def __init__(self, transfer: TransferState, record: Record, paths: RecordPaths, tally: Tally) -> None:
        self._transfer = transfer
        self._record = record
        """As it is now, once its source is open."""
        self._paths = paths
        self._tally = tally
        self._planned = self._chunks = transfer.chunks(record)
        self._source_shown, self._shown = transfer.shown(record)
        self.moved_bytes = self.durable_bytes = 0

    def run(self) -> None:
        transfer, record = self._transfer, self._record
        directory, name = self._paths.destination(record)
        check_target(directory, name, self._shown, replace=transfer.options.replace)
        staging, part = self._paths.part(record)
        reading, status = open_source(*self._paths.source(record), self._source_shown)
        writing: int | None = None
        try:
            if (status.st_size, status.st_mtime_ns) != (record.size, record.mtime_ns):
                record = self._plan_again(status, staging, part)
            writing = self._open_part(staging, part)
            copied = self._fill(reading, status, writing, staging, part)
        except (SourceChanged, ReadBackFailed):
            self._start_over(staging, part)
            raise
        except SyncFailed as failure:
            # Nothing says which part of it is on the disk.
            self._start_over(staging, part)
            assert isinstance(failure.__cause__, OSError)
            raise failure.__cause__ from None
        finally:
            quietly_close((reading, writing))
        transfer.slots.ready(record.index, copied)
        if not transfer.options.replace:
            transfer.slots.sync()
        publish(staging, part, directory, name, self._shown, replace=transfer.options.replace)
        os.fsync(directory)
        transfer.slots.done(record.index, copied)
        transfer.slots.sync()
        self._tally.add(files=1, durable_bytes=record.size - self.durable_bytes)
        self._tally.tell()

    def _plan_again(self, status: os.stat_result, staging: int, part: bytes) -> Record:
        """Take the file as it has become since the walk: from its beginning, since all marks are of what was planned.

        TransferFailed if there is no room for what it has grown to.
        """
        transfer, planned = self._transfer, self._record
        transfer.check_limit(transfer.totals.size_bytes - planned.size + status.st_size)
        self._start_over(staging, part)
        self._chunks = transfer.chunks(planned, status.st_size)
        self._record = msgspec.structs.replace(
            planned,
            size=status.st_size,
            mtime_ns=status.st_mtime_ns,
            ctime_ns=status.st_ctime_ns,
            data_bytes=status.st_blocks * 512,
        )
        return self._record

    def _open_part(self, staging: int, part: bytes) -> int:
        """Return the temporary file of an earlier attempt, or a new one."""
        table, index, record = self._transfer.slots, self._record.index, self._record
        row = table.get(index)
        if row.state is State.STARTED:
            writing = open_part(staging, part, row.copied.inode)
            if writing is not None:
                return writing
        writing = create_part(staging, part)
        try:
            self._chunks.clear()
            # Size and time say what the marks are of: the manifest may say something else.
            started = Copied(record.size, record.mtime_ns, os.fstat(writing).st_ino)
            table.put(index, StatusRow(State.STARTED, row.tries, started))
        except OSError:
            # No record leads to it.
            with contextlib.suppress(OSError):
                discard(staging, part)
            quietly_close((writing,))
            raise
        return writing

    def _start_over(self, staging: int, part: bytes) -> None:
        with contextlib.suppress(OSError):
            discard(staging, part)
        self._planned.clear()

    def _fill(self, reading: int, status: os.stat_result, writing: int, staging: int, part: bytes) -> Copied:
        options, record = self._transfer.options, self._record
        way = self._way(reading, writing)
        direct: int | None = None
        try:
            if way is not Way.CLONED:
                if not record.is_sparse and way is Way.WRITE:
                    allocate(writing, record.size)
                os.ftruncate(writing, record.size)
                direct = open_direct(staging, part, writing) if way is Way.WRITE else None
            pouring = Pouring(self._transfer, record, self._chunks, reading, writing, direct, way, self._tally)
            try:
                if way is not Way.CLONED or options.verify >= Verify.DIGEST:
                    pouring.run()
                else:
                    self._tally.add(size_bytes=record.size)
            finally:
                self.moved_bytes, self.durable_bytes = pouring.moved_bytes, pouring.durable_bytes
            check_unchanged(reading, status)
            flags = set_metadata(reading, writing, status, options) | _flags(way, pouring, record)
            try:
                os.fsync(writing)
            except OSError as error:
                raise SyncFailed from error
            if options.verify >= Verify.READ_BACK:
                self._read_back(pouring)
            written = os.fstat(writing)
            if written.st_size != record.size:
                raise ReadBackFailed(f"{self._shown} has {written.st_size} bytes instead of {record.size}")
            return Copied(record.size, status.st_mtime_ns, written.st_ino, self._digest(), flags)
        finally:
            quietly_close((direct,))

    def _way(self, reading: int, writing: int) -> Way:
        """Share blocks if that is possible; let a file server copy by itself if no digest is wanted; else write."""
        if all(self._chunks.state(number) is ChunkState.NONE for number in range(min(2, self._chunks.count))) and clone(
            reading, writing
        ):
            return Way.CLONED
        if self._transfer.options.verify >= Verify.DIGEST or is_local(writing):
            return Way.WRITE
        return Way.KERNEL

    def _read_back(self, pouring: Pouring) -> None:
        differing = pouring.read_back()
        if differing:
            raise ReadBackFailed(
                f"{self._shown} does not hold what was read from {self._source_shown}: "
                f"{len(differing)} of {self._chunks.count} chunks differ on the disk; check the disk"
            )

    def _digest(self) -> bytes:
        digests = [self._chunks.digest(number) for number in range(self._chunks.count)]
        return combine(self._transfer.options.algorithm, self._chunks.chunk_bytes, digests) if all(digests) else b""


def _flags(way: Way, pouring: Pouring, record: Record) -> Flag:
    flags = Flag(0)
    if way is Way.CLONED:
        flags |= Flag.REFLINKED
    if pouring.kernel_copied:
        flags |= Flag.KERNEL_COPIED
    if record.is_sparse:
        flags |= Flag.SPARSE
    return flags
