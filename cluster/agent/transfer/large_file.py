"""Copy of one large file in chunks, resumable from the marks of an earlier attempt.

Threads move the chunks: each stream handles one at a time and computes its digest. Python releases its lock during
reads, writes and long digests, so threads suffice. Writes bypass the page cache where the filesystem permits. Measured,
this is as fast as cached writes at best and several times faster when memory is short; it leaves the node's memory to
its jobs, and a sync has nothing left to write.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from typing import Final

import msgspec

from forebay.cluster.agent.adapters import is_local
from forebay.cluster.agent.files import allocate, clone, open_direct
from forebay.cluster.agent.limits import COPY_TRIES_MAX
from forebay.cluster.agent.transfer.digests import Hasher, combine, digest_of, digest_on_disk, hasher
from forebay.cluster.agent.transfer.errors import ReadBackFailed, SourceChanged
from forebay.cluster.agent.transfer.file_copy import (
    check_target,
    check_unchanged,
    create_part,
    open_part,
    open_source,
    publish,
    set_metadata,
)
from forebay.cluster.agent.transfer.manifest import ManifestRecord
from forebay.cluster.agent.transfer.options import Verify
from forebay.cluster.agent.transfer.record_paths import RecordPaths, discard
from forebay.cluster.agent.transfer.status_table import Chunks, ChunkState, CopiedFile, Flag, RecordState, StatusRow
from forebay.cluster.agent.transfer.transfer_state import MovedAmounts, ProgressTally, TransferState

BLOCK_BYTES: Final = 4 * 1024 * 1024
"""Bytes that a stream reads, digests and writes at a time: measured, 1 MiB needs more calls and larger blocks gain
nothing.
"""

ALIGNED_BYTES: Final = 4096
"""Alignment of direct I/O, bytes: no disk in use has larger sectors."""

POLL_S: Final = 0.1
"""Seconds between two checks of the streams: the age of the displayed progress."""

SETTLE_S: Final = 0.5
"""Seconds between two syncs of written data: the loss in a power failure, besides data in transit."""

_ZEROS: Final = memoryview(bytes(1024 * 1024))
_NO_KERNEL_COPY: Final = frozenset({errno.EXDEV, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.EPERM})


class CopyMethod(Enum):
    """Method of moving the bytes of a chunk."""

    WRITE = "write"
    """Read, digest, and write the same bytes."""
    KERNEL = "kernel"
    """copy_file_range(2), without a digest."""
    CLONED = "cloned"
    """Blocks are shared with the source; only compute the digest."""


class _StreamAbandoned(Exception):
    """Another stream failed."""


class SyncFailed(Exception):
    """A sync failed, so it is unknown which data is on disk. `__cause__` is the OSError."""


class ChunkCopy:
    """Moves the chunks of one open file to another."""

    def __init__(
        self,
        transfer: TransferState,
        record: ManifestRecord,
        chunks: Chunks,
        reading: int,
        writing: int,
        direct: int | None,
        way: CopyMethod,
        tally: ProgressTally,
    ) -> None:
        """Use the record with the file's current size, its marks and open descriptors, which stay the caller's.

        `direct` is `writing` opened without the page cache.
        """
        self._transfer = transfer
        self._record = record
        self._chunks = chunks
        self._reading = reading
        self._writing = writing
        self._direct = direct if self._chunks.chunk_bytes % ALIGNED_BYTES == 0 else None
        self._way = way
        self._tally = tally
        self._sparse = record.is_sparse and transfer.options.sparse
        self._of_zeros: dict[int, bytes] = {}
        self._lock = threading.Lock()
        self._written: list[int] = []
        self.moved_bytes = 0
        """Bytes counted as moved, to be subtracted if the file is moved again."""
        self.durable_bytes = 0
        """Bytes counted as durable."""
        self.kernel_copied = False
        self.differing: list[int] = []
        """Chunks that differ when read back."""

    def run(self) -> None:
        """Move the missing chunks. Also raises the exceptions of the pace.

        Raises:
            SourceChanged: The source was modified.
            SyncFailed: Written data may be lost.
            OSError: A read or write failed.
        """
        settled_s = self._transfer.context.clock.monotonic_s()

        def settle() -> None:
            nonlocal settled_s
            now_s = self._transfer.context.clock.monotonic_s()
            if now_s - settled_s >= SETTLE_S:
                self._settle()
                settled_s = self._transfer.context.clock.monotonic_s()

        self._each(self._move, settle)

    def read_back(self) -> list[int]:
        """Return the chunks that differ when read back from storage.

        Raises:
            OSError: A chunk cannot be read.
        """
        self.differing = []
        self._each(self._compare, lambda: None)
        return sorted(self.differing)

    # Threads.

    def _each(self, work: Callable[[int, memoryview], None], meanwhile: Callable[[], None]) -> None:
        numbers = iter(range(self._chunks.count))
        failures: list[BaseException] = []
        ended: list[None] = []
        stopping, wake = threading.Event(), threading.Event()

        def stream() -> None:
            try:
                # Never closed explicitly: exceptions below still refer to parts of it.
                block = memoryview(mmap.mmap(-1, BLOCK_BYTES))
                while not stopping.is_set():
                    with self._lock:
                        number = next(numbers, None)
                    if number is None:
                        break
                    work(number, block)
            except _StreamAbandoned:
                pass
            except BaseException as error:
                failures.append(error)
                stopping.set()
            finally:
                ended.append(None)
                wake.set()

        self._stopping = stopping
        streams = max(1, min(self._transfer.options.streams, self._chunks.count))
        threads = [threading.Thread(target=stream, name=f"stream-{number}") for number in range(streams)]
        try:
            started = _start(threads)
            if not started:
                # Copy sequentially in this thread.
                started = 1
                stream()
            while len(ended) < started:
                wake.wait(POLL_S)
                wake.clear()
                self._tally.tell()
                if not failures:
                    meanwhile()
        finally:
            stopping.set()
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
        self._tally.tell()
        if failures:
            raise failures[0]

    def _settle(self) -> None:
        """Sync the written chunks, then mark them as durable."""
        with self._lock:
            numbers, self._written = self._written, []
        if not numbers:
            return
        try:
            os.fdatasync(self._writing)
        except OSError as error:
            raise SyncFailed from error
        self._chunks.mark_durable(numbers)
        self._keep(numbers)

    def _keep(self, numbers: Sequence[int]) -> None:
        """Count chunks that no later attempt has to move."""
        size_bytes = sum(end - begin for begin, end in map(self._range, numbers))
        with self._lock:
            self.durable_bytes += size_bytes
        self._tally.add(MovedAmounts(durable_bytes=size_bytes))

    # Single chunks.

    def _range(self, number: int) -> tuple[int, int]:
        begin = number * self._chunks.chunk_bytes
        return begin, min(begin + self._chunks.chunk_bytes, self._record.size)

    def _move(self, number: int, block: memoryview) -> None:
        begin, end = self._range(number)
        state = self._chunks.state(number)
        if state is ChunkState.DURABLE or (state is ChunkState.COPIED and self._is_there(number, begin, end)):
            with self._lock:
                self.moved_bytes += end - begin
            self._tally.add(MovedAmounts(size_bytes=end - begin, resumed_bytes=end - begin))
            if state is ChunkState.DURABLE:
                self._keep([number])
            return
        digest = self._copy_range(begin, end, block, whole=state is not ChunkState.NONE)
        self._chunks.mark_copied(number, digest)
        with self._lock:
            self._written.append(number)

    def _is_there(self, number: int, begin: int, end: int) -> bool:
        known = self._chunks.digest(number)
        if not known:
            return self._transfer.same_boot
        return digest_of(self._writing, self._transfer.options.algorithm, begin, end - begin) == known

    def _copy_range(self, begin: int, end: int, block: memoryview, *, whole: bool) -> bytes:
        """Move a chunk and return its digest, or b"" if none was computed.

        `whole` copies holes too, because the destination may contain wrong data there.
        """
        taken = hasher(self._transfer.options.algorithm)
        for is_data, start, stop in self._segments(begin, end) if self._sparse and not whole else [(True, begin, end)]:
            if not is_data:
                if (start, stop) == (begin, end):
                    self._count(end - begin, 0)
                    return self._digest_of_zeros(end - begin)
                for at in range(start, stop, len(_ZEROS)):
                    taken.update(_ZEROS[: min(len(_ZEROS), stop - at)])
                self._count(stop - start, 0)
            elif self._way is CopyMethod.KERNEL and self._kernel_copies(start, stop):
                self.kernel_copied = True
            else:
                self._copy(start, stop, block, taken)
        return b"" if self.kernel_copied else taken.digest()

    def _copy(self, at: int, end: int, block: memoryview, taken: Hasher) -> None:
        source = self._writing if self._way is CopyMethod.CLONED else self._reading
        while at < end:
            step = self._take(end - at)
            filled = 0
            while filled < step:
                got = os.preadv(source, [block[filled:step]], at + filled)
                if not got:
                    raise SourceChanged
                filled += got
            taken.update(block[:step])
            if self._way is CopyMethod.CLONED:
                self._count(step, 0)
            else:
                self._write(block[:step], at)
                self._count(step, step)
            at += step

    def _write(self, data: memoryview, at: int) -> None:
        direct = self._direct
        if direct is not None and at % ALIGNED_BYTES == 0:
            while len(data) >= ALIGNED_BYTES and at % ALIGNED_BYTES == 0:
                try:
                    written = os.pwrite(direct, data[: len(data) // ALIGNED_BYTES * ALIGNED_BYTES], at)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                    self._direct = None
                    break
                data, at = data[written:], at + written
        while data:
            written = os.pwrite(self._writing, data, at)
            data, at = data[written:], at + written

    def _kernel_copies(self, at: int, end: int) -> bool:
        """Let the kernel or a file server copy; return False, with nothing counted, if it cannot."""
        first = True
        while at < end:
            step = self._take(end - at)
            try:
                copied = os.copy_file_range(self._reading, self._writing, step, at, at)
            except OSError as error:
                if error.errno not in _NO_KERNEL_COPY or not first:
                    raise
                self._way = CopyMethod.WRITE
                return False
            if not copied:
                raise SourceChanged
            first = False
            self._count(copied, copied)
            at += copied
        return True

    def _take(self, most: int) -> int:
        if self._stopping.is_set():
            raise _StreamAbandoned
        pace = self._transfer.context.pace
        step = pace.step_bytes(min(most, BLOCK_BYTES))
        if step > ALIGNED_BYTES:
            step -= step % ALIGNED_BYTES if step < most else 0
        pace.take(step)
        return step

    def _count(self, size_bytes: int, written_bytes: int) -> None:
        with self._lock:
            self.moved_bytes += size_bytes
        self._tally.add(MovedAmounts(size_bytes=size_bytes, written_bytes=written_bytes))

    # Holes.

    def _segments(self, begin: int, end: int) -> Iterator[tuple[bool, int, int]]:
        """Yield the segments of a chunk as (is data, begin, end)."""
        at = begin
        while at < end:
            data = _seek(self._reading, at, os.SEEK_DATA, end)
            if data > at:
                yield False, at, data
            if data >= end:
                return
            hole = _seek(self._reading, data, os.SEEK_HOLE, end)
            if hole <= data:
                raise SourceChanged
            yield True, data, hole
            at = hole

    def _digest_of_zeros(self, size_bytes: int) -> bytes:
        found = self._of_zeros.get(size_bytes)
        if found is None:
            taken = hasher(self._transfer.options.algorithm)
            for at in range(0, size_bytes, len(_ZEROS)):
                taken.update(_ZEROS[: min(len(_ZEROS), size_bytes - at)])
            found = self._of_zeros[size_bytes] = taken.digest()
        return found

    # Reading back.

    def _compare(self, number: int, block: memoryview) -> None:
        begin, end = self._range(number)
        if self._read_digest(begin, end, block) != self._chunks.digest(number):
            with self._lock:
                self.differing.append(number)

    def _read_digest(self, begin: int, end: int, block: memoryview) -> bytes:
        direct, at = self._direct, begin
        taken = hasher(self._transfer.options.algorithm)
        while direct is not None and at < end:
            self._poll()
            try:
                got = os.preadv(direct, [block], at)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                direct = None
                continue
            if not got:
                break
            taken.update(block[: min(got, end - at)])
            at += got
        if direct is None:
            self._poll()
            return digest_on_disk(self._writing, self._transfer.options.algorithm, begin, end - begin)
        return taken.digest()

    def _poll(self) -> None:
        if self._stopping.is_set():
            raise _StreamAbandoned
        self._transfer.context.pace.check()
        self._tally.add(MovedAmounts(steps=1))


def _start(threads: list[threading.Thread]) -> int:
    """Start the threads and return how many started: processes and threads of a user share one limit."""
    for number, thread in enumerate(threads):
        try:
            thread.start()
        except RuntimeError:
            return number
    return len(threads)


def _seek(descriptor: int, at: int, how: int, end: int) -> int:
    """Return the start of the next data or hole, at most `end`."""
    try:
        return min(os.lseek(descriptor, at, how), end)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return end
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            # The filesystem does not report holes.
            return at if how == os.SEEK_DATA else end
        raise


def quietly_close(descriptors: Iterable[int | None]) -> None:
    """Close the descriptors that are not None."""
    for descriptor in descriptors:
        if descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def copy_file(transfer: TransferState, record: ManifestRecord, paths: RecordPaths, tally: ProgressTally) -> None:
    """Copy one large file, a second time if it changes or reads back incorrectly. Also raises the exceptions of the
    pace.

    Copies the file's current content; only a file that keeps changing fails.

    Raises:
        TransferFailed: The file cannot be copied.
        SourceChanged: The source keeps changing.
        OSError: A read or write failed.
    """
    tally.at(transfer.label(record))
    for tried in range(1, COPY_TRIES_MAX + 1):
        attempt = _Attempt(transfer, record, paths, tally)
        try:
            attempt.run()
            return
        except (SourceChanged, ReadBackFailed):
            transfer.slots.count_try(record.index)
            tally.add(MovedAmounts(size_bytes=-attempt.moved_bytes, durable_bytes=-attempt.durable_bytes, retries=1))
            if tried == COPY_TRIES_MAX:
                raise


class _Attempt:
    def __init__(
        self, transfer: TransferState, record: ManifestRecord, paths: RecordPaths, tally: ProgressTally
    ) -> None:
        self._transfer = transfer
        self._record = record
        """Record with the current size, once the source is open."""
        self._paths = paths
        self._tally = tally
        self._planned = self._chunks = transfer.chunks(record)
        self._source_shown, self._shown = transfer.display_paths(record)
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
            # It is unknown which part is on disk.
            self._start_over(staging, part)
            assert isinstance(failure.__cause__, OSError)
            raise failure.__cause__ from None
        finally:
            quietly_close((reading, writing))
        transfer.slots.mark(record.index, RecordState.READY, copied)
        if not transfer.options.replace:
            transfer.slots.sync()
        publish(staging, part, directory, name, self._shown, replace=transfer.options.replace)
        os.fsync(directory)
        transfer.slots.mark(record.index, RecordState.DONE, copied)
        transfer.slots.sync()
        self._tally.add(MovedAmounts(files=1, durable_bytes=record.size - self.durable_bytes))
        self._tally.tell()

    def _plan_again(self, status: os.stat_result, staging: int, part: bytes) -> ManifestRecord:
        """Restart with the file's current size, since all marks refer to the planned one.

        Raises:
            TransferFailed: The file has outgrown the limit.
        """
        transfer, planned = self._transfer, self._record
        transfer.check_limit(transfer.header.size_bytes - planned.size + status.st_size)
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
        if row.state is RecordState.STARTED:
            writing = open_part(staging, part, row.copied.inode)
            if writing is not None:
                return writing
        writing = create_part(staging, part)
        try:
            self._chunks.clear()
            # Size and time identify what the marks refer to; the manifest may differ.
            started = CopiedFile(record.size, record.mtime_ns, os.fstat(writing).st_ino)
            table.put(index, StatusRow(RecordState.STARTED, row.tries, started))
        except OSError:
            # Remove it, since no record refers to it.
            with contextlib.suppress(OSError):
                discard(staging, part)
            quietly_close((writing,))
            raise
        return writing

    def _start_over(self, staging: int, part: bytes) -> None:
        with contextlib.suppress(OSError):
            discard(staging, part)
        self._planned.clear()

    def _fill(self, reading: int, status: os.stat_result, writing: int, staging: int, part: bytes) -> CopiedFile:
        options, record = self._transfer.options, self._record
        way = self._way(reading, writing)
        direct: int | None = None
        try:
            if way is not CopyMethod.CLONED:
                if not record.is_sparse and way is CopyMethod.WRITE:
                    allocate(writing, record.size)
                os.ftruncate(writing, record.size)
                direct = open_direct(staging, part, writing) if way is CopyMethod.WRITE else None
            pouring = ChunkCopy(self._transfer, record, self._chunks, reading, writing, direct, way, self._tally)
            try:
                if way is not CopyMethod.CLONED or options.verify >= Verify.DIGEST:
                    pouring.run()
                else:
                    self._tally.add(MovedAmounts(size_bytes=record.size))
            finally:
                self.moved_bytes, self.durable_bytes = pouring.moved_bytes, pouring.durable_bytes
            check_unchanged(reading, status)
            acls = self._transfer.items[record.item].acls
            flags = set_metadata(reading, writing, status, options, acls=acls) | _flags(way, pouring, record)
            try:
                os.fsync(writing)
            except OSError as error:
                raise SyncFailed from error
            if options.verify >= Verify.READ_BACK:
                self._read_back(pouring)
            written = os.fstat(writing)
            if written.st_size != record.size:
                raise ReadBackFailed(f"{self._shown} has {written.st_size} bytes instead of {record.size}")
            return CopiedFile(record.size, status.st_mtime_ns, written.st_ino, self._digest(), flags)
        finally:
            quietly_close((direct,))

    def _way(self, reading: int, writing: int) -> CopyMethod:
        """Choose a method: clone if possible, let a file server copy if no digest is needed, otherwise write."""
        if all(self._chunks.state(number) is ChunkState.NONE for number in range(min(2, self._chunks.count))) and clone(
            reading, writing
        ):
            return CopyMethod.CLONED
        if self._transfer.options.verify >= Verify.DIGEST or is_local(writing):
            return CopyMethod.WRITE
        return CopyMethod.KERNEL

    def _read_back(self, pouring: ChunkCopy) -> None:
        differing = pouring.read_back()
        if differing:
            raise ReadBackFailed(
                f"{self._shown} differs from the data read from {self._source_shown}: "
                f"{len(differing)} of {self._chunks.count} chunks differ on the disk; check the disk"
            )

    def _digest(self) -> bytes:
        digests = [self._chunks.digest(number) for number in range(self._chunks.count)]
        return combine(self._transfer.options.algorithm, self._chunks.chunk_bytes, digests) if all(digests) else b""


def _flags(way: CopyMethod, pouring: ChunkCopy, record: ManifestRecord) -> Flag:
    flags = Flag(0)
    if way is CopyMethod.CLONED:
        flags |= Flag.REFLINKED
    if pouring.kernel_copied:
        flags |= Flag.KERNEL_COPIED
    if record.is_sparse:
        flags |= Flag.SPARSE
    return flags
