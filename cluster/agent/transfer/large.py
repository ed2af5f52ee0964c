"""Large file, copied in chunks, resumed from the marks of an earlier attempt.

The chunks are moved by threads: each stream has one at a time, and a digest of each is taken. Python gives its lock up
while the kernel reads and writes and while a long digest is taken, so threads are enough here. What is written goes
past the page cache where the file system lets it. Measured, that is as fast as writing through the cache at its best
and several times faster where memory is short; it leaves the node's memory to its jobs, and a sync has nothing left to
write."""

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

from cluster.agent.files import allocate, clone, is_local, open_direct
from cluster.agent.limits import COPY_TRIES_MAX
from cluster.agent.transfer.digests import Hasher, combine, digest_of, digest_on_disk, hasher
from cluster.agent.transfer.errors import ReadBackFailed, SourceChanged
from cluster.agent.transfer.file_copy import (
    check_target,
    check_unchanged,
    create_part,
    open_part,
    open_source,
    publish,
    set_metadata,
)
from cluster.agent.transfer.manifest import Record
from cluster.agent.transfer.options import Verify
from cluster.agent.transfer.record_paths import RecordPaths, discard
from cluster.agent.transfer.status_table import Chunks, ChunkState, Copied, Flag, State, StatusRow
from cluster.agent.transfer.transfer_state import Moved, Tally, TransferState

BLOCK_BYTES: Final = 4 * 1024 * 1024
"""Bytes that a stream reads, digests and writes at once: measured, 1 MiB costs more calls, and more gains nothing."""

ALIGNED_BYTES: Final = 4096
"""What offsets and lengths past the page cache are multiples of: no disk in use has larger sectors."""

POLL_S: Final = 0.1
"""Seconds between two polls of the thread that waits for the streams: how old the progress that is shown may be."""

SETTLE_S: Final = 0.5
"""Seconds between two syncs of what is written so far: what a power cut may cost, besides what is under way."""

_ZEROS: Final = memoryview(bytes(1024 * 1024))
_NO_KERNEL_COPY: Final = frozenset({errno.EXDEV, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.EPERM})


class Way(Enum):
    """How the bytes of a chunk get to where they belong."""

    WRITE = "write"
    """Read, digested, and the very same bytes written."""
    KERNEL = "kernel"
    """copy_file_range(2): no digest is taken."""
    CLONED = "cloned"
    """They are there already, in blocks that are shared with the source: only digested."""


class _Abandoned(Exception):
    """Another stream failed."""


class SyncFailed(Exception):
    """What was written is not on the disk, and nothing says which part of it. `__cause__` is the OSError."""


class Pouring:
    """Moves the chunks of one file from one open file into another."""

    def __init__(
        self,
        transfer: TransferState,
        record: Record,
        chunks: Chunks,
        reading: int,
        writing: int,
        direct: int | None,
        way: Way,
        tally: Tally,
    ) -> None:
        """Take the record as the file is now, its marks, and open descriptors, which stay the caller's. `direct` is
        `writing` past the page cache.
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
        """What was counted of the file: to be taken back if it has to be moved again."""
        self.durable_bytes = 0
        """What was counted of it as durable."""
        self.kernel_copied = False
        self.differing: list[int] = []
        """Chunks that storage does not give back as they were written."""

    def run(self) -> None:
        """Move what is not there yet. SourceChanged, SyncFailed, OSError, or what the pace raises."""
        settled_s = self._transfer.context.clock.monotonic_s()

        def settle() -> None:
            nonlocal settled_s
            now_s = self._transfer.context.clock.monotonic_s()
            if now_s - settled_s >= SETTLE_S:
                self._settle()
                settled_s = self._transfer.context.clock.monotonic_s()

        self._each(self._move, settle)

    def read_back(self) -> list[int]:
        """Return the chunks of which storage gives back something else than was written. OSError."""
        self.differing = []
        self._each(self._compare, lambda: None)
        return sorted(self.differing)

    # The threads.

    def _each(self, work: Callable[[int, memoryview], None], meanwhile: Callable[[], None]) -> None:
        numbers = iter(range(self._chunks.count))
        failures: list[BaseException] = []
        ended: list[None] = []
        stopping, wake = threading.Event(), threading.Event()

        def stream() -> None:
            try:
                # Not closed by hand: what is raised below still refers to parts of it.
                block = memoryview(mmap.mmap(-1, BLOCK_BYTES))
                while not stopping.is_set():
                    with self._lock:
                        number = next(numbers, None)
                    if number is None:
                        break
                    work(number, block)
            except _Abandoned:
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
                # Then one after the other.
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
        """Make durable what was written, and then the marks that say so."""
        with self._lock:
            numbers, self._written = self._written, []
        if not numbers:
            return
        try:
            os.fdatasync(self._writing)
        except OSError as error:
            raise SyncFailed from error
        self._chunks.durable(numbers)
        self._keep(numbers)

    def _keep(self, numbers: Sequence[int]) -> None:
        """Count chunks that no other attempt has to move again."""
        size_bytes = sum(end - begin for begin, end in map(self._range, numbers))
        with self._lock:
            self.durable_bytes += size_bytes
        self._tally.add(Moved(durable_bytes=size_bytes))

    # One chunk.

    def _range(self, number: int) -> tuple[int, int]:
        begin = number * self._chunks.chunk_bytes
        return begin, min(begin + self._chunks.chunk_bytes, self._record.size)

    def _move(self, number: int, block: memoryview) -> None:
        begin, end = self._range(number)
        state = self._chunks.state(number)
        if state is ChunkState.DURABLE or (state is ChunkState.COPIED and self._is_there(number, begin, end)):
            with self._lock:
                self.moved_bytes += end - begin
            self._tally.add(Moved(size_bytes=end - begin, resumed_bytes=end - begin))
            if state is ChunkState.DURABLE:
                self._keep([number])
            return
        digest = self._pour(begin, end, block, whole=state is not ChunkState.NONE)
        self._chunks.copied(number, digest)
        with self._lock:
            self._written.append(number)

    def _is_there(self, number: int, begin: int, end: int) -> bool:
        known = self._chunks.digest(number)
        if not known:
            return self._transfer.same_boot
        return digest_of(self._writing, self._transfer.options.algorithm, begin, end - begin) == known

    def _pour(self, begin: int, end: int, block: memoryview, *, whole: bool) -> bytes:
        """Move a chunk and return its digest, empty if none was taken.

        `whole`: something wrong may be in it, also where the source has holes.
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
            elif self._way is Way.KERNEL and self._kernel_copies(start, stop):
                self.kernel_copied = True
            else:
                self._copy(start, stop, block, taken)
        return b"" if self.kernel_copied else taken.digest()

    def _copy(self, at: int, end: int, block: memoryview, taken: Hasher) -> None:
        source = self._writing if self._way is Way.CLONED else self._reading
        while at < end:
            step = self._take(end - at)
            filled = 0
            while filled < step:
                got = os.preadv(source, [block[filled:step]], at + filled)
                if not got:
                    raise SourceChanged
                filled += got
            taken.update(block[:step])
            if self._way is Way.CLONED:
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
        """Have the kernel, or a file server, copy; False if it does not, and then nothing of this was counted."""
        first = True
        while at < end:
            step = self._take(end - at)
            try:
                copied = os.copy_file_range(self._reading, self._writing, step, at, at)
            except OSError as error:
                if error.errno not in _NO_KERNEL_COPY or not first:
                    raise
                self._way = Way.WRITE
                return False
            if not copied:
                raise SourceChanged
            first = False
            self._count(copied, copied)
            at += copied
        return True

    def _take(self, most: int) -> int:
        if self._stopping.is_set():
            raise _Abandoned
        pace = self._transfer.context.pace
        step = pace.step_bytes(min(most, BLOCK_BYTES))
        if step > ALIGNED_BYTES:
            step -= step % ALIGNED_BYTES if step < most else 0
        pace.take(step)
        return step

    def _count(self, size_bytes: int, written_bytes: int) -> None:
        with self._lock:
            self.moved_bytes += size_bytes
        self._tally.add(Moved(size_bytes=size_bytes, written_bytes=written_bytes))

    # Holes.

    def _segments(self, begin: int, end: int) -> Iterator[tuple[bool, int, int]]:
        """Yield the parts of a chunk: (whether there is data, begin, end)."""
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
            raise _Abandoned
        self._transfer.context.pace.check()
        self._tally.add(Moved(steps=1))


def _start(threads: list[threading.Thread]) -> int:
    """Start threads, and return how many there may be: a user's processes and threads are limited together."""
    for number, thread in enumerate(threads):
        try:
            thread.start()
        except RuntimeError:
            return number
    return len(threads)


def _seek(descriptor: int, at: int, how: int, end: int) -> int:
    """Return where the next data or hole begins, `end` at most."""
    try:
        return min(os.lseek(descriptor, at, how), end)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return end
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            # A file system without holes.
            return at if how == os.SEEK_DATA else end
        raise


def quietly_close(descriptors: Iterable[int | None]) -> None:
    """Close what is open of them."""
    for descriptor in descriptors:
        if descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(descriptor)


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
            tally.add(Moved(size_bytes=-attempt.moved_bytes, durable_bytes=-attempt.durable_bytes, retries=1))
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
        transfer.slots.mark(record.index, State.READY, copied)
        if not transfer.options.replace:
            transfer.slots.sync()
        publish(staging, part, directory, name, self._shown, replace=transfer.options.replace)
        os.fsync(directory)
        transfer.slots.mark(record.index, State.DONE, copied)
        transfer.slots.sync()
        self._tally.add(Moved(files=1, durable_bytes=record.size - self.durable_bytes))
        self._tally.tell()

    def _plan_again(self, status: os.stat_result, staging: int, part: bytes) -> Record:
        """Take the file as it has become since the walk: from its beginning, since all marks are of what was planned.

        TransferFailed if there is no room for what it has grown to.
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
                    self._tally.add(Moved(size_bytes=record.size))
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
