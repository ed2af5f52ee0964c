"""Small files: many are written, one sync makes all of them durable, and only then each gets its name.

The sync of one group is also what makes the names of the group before it durable: `finish` has the last one."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

from cluster.agent.files import READ_FLAGS, is_local
from cluster.agent.limits import COPY_TRIES_MAX
from cluster.agent.transfer.digests import digest_of_bytes, digest_on_disk, hasher
from cluster.agent.transfer.errors import Paused, ReadBackFailed, SourceChanged, TransferFailed
from cluster.agent.transfer.fence import BATCH_DIRECTORY_FILES_MIN, BatchDirectory
from cluster.agent.transfer.file_copy import (
    check_target,
    check_unchanged,
    create_part,
    open_source,
    publish,
    set_metadata,
)
from cluster.agent.transfer.manifest import Record
from cluster.agent.transfer.options import Verify
from cluster.agent.transfer.rate_limit import Stopped
from cluster.agent.transfer.record_paths import RecordPaths, discard
from cluster.agent.transfer.status_table import Copied, State
from cluster.agent.transfer.transfer_state import Moved, Shown, Tally, TransferState, directory_of
from cluster.system import closing, names_in, sync_file_system, write_all

READ_BYTES: Final = 1024 * 1024
"""Bytes read at once of what is not so small."""

READ_AT_ONCE_BYTES: Final = 64 * 1024
"""Bytes of a file that is read, digested and written as a whole: most are shorter."""

GROUPED_FILES_MIN: Final = 32
"""Files of a batch from which on one sync of the file system costs less than one for each file, count: measured, a file
by itself takes 0.3 to 0.6 ms, a file system 10 to 25 ms, in which others' files are written too."""

TELL_FILES: Final = 64
"""Files between two times that progress is told."""

_VOLUME: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class Unfinished(Exception):
    """A file of a batch that cannot be moved; `__cause__` says why."""

    def __init__(self, record: Record) -> None:
        """Name it."""
        super().__init__(record.path)
        self.record = record


class _Written(NamedTuple):
    record: Record
    part: bytes
    copied: Copied
    tries: int
    batch_directory: BatchDirectory | None
    """Where it is; None: where `RecordPaths.part` says."""


class SmallFiles:
    """Moves batches of small files, in one process and one thread."""

    def __init__(self, transfer: TransferState, paths: RecordPaths, tally: Tally) -> None:
        """Begin with nothing written."""
        self._transfer = transfer
        self._options = transfer.options
        self._pace = transfer.context.pace
        self._paths = paths
        self._tally = tally
        self._begun: list[Record] = []
        """Of the batch, in order, but for those in batch directories: from when on they may have a temporary file."""
        self._batch_directories: list[BatchDirectory] = []
        self._batch_directory: BatchDirectory | None = None
        """Where the next file is written."""
        self._mixed: dict[int, BatchDirectory] = {}
        """Batch directories for what is alone in its directory, by their staging directories."""
        self._named = 0
        """How many of those have their names."""
        self._written: list[_Written] = []
        """Whole under their temporary names."""
        self._placed: list[_Written] = []
        """In place, and their names perhaps not durable."""
        self._moved_bytes = 0
        """Written and not told yet."""
        self._tried_bytes = 0
        """Written of the file that is being read."""
        self._tries: dict[int, int] = {}
        self._grouping = False
        """Whether the batch is large enough to be synced as a whole."""
        self._alone = False
        """Whether files of the batch were synced one by one: then their directories are, too."""
        self._volumes: dict[int, int] = {}
        """File systems that are synced as a whole: device -> a descriptor of our own, which was opened before anything
        was written, so that it tells of whatever got lost since. -1: files are synced one by one."""
        # Only as much of it takes memory as is read at once.
        self._buffer = memoryview(mmap.mmap(-1, READ_BYTES))

    def copy(self, records: Sequence[Record], leaves: Collection[tuple[int, bytes]] = ()) -> None:
        """Move files; they are in place on return, and durable there after the next call or `finish`.

        `leaves` are directories, each item and path, whose place a batch directory may take: all of their files are
        here, and nobody else copies into them. Unfinished names the one that cannot be moved; what the pace raises.
        """
        self._read_tries(records)
        self._grouping, self._alone = len(records) >= GROUPED_FILES_MIN, False
        try:
            for here, found in itertools.groupby(records, directory_of):
                self._copy_into(list(found), here in leaves)
            self._tell()
            self._put_in_place()
        except (Paused, Stopped):
            raise
        except BaseException:
            self._discard()
            raise

    def _copy_into(self, records: Sequence[Record], leaf: bool) -> None:
        """Write the temporary files of one directory."""
        self._choose_batch_directory(records, leaf)
        for number, record in enumerate(records):
            if number % TELL_FILES == 0:
                self._tally.at(self._transfer.label(record))
            try:
                self._written.append(self._write(record))
            except (OSError, TransferFailed, SourceChanged) as error:
                raise Unfinished(record) from error
            if number % TELL_FILES == 0:
                self._tell()
        if self._batch_directory is not None:
            self._batch_directory.files += len(records)
            self._batch_directory.close()

    def _choose_batch_directory(self, records: Sequence[Record], leaf: bool) -> None:
        """Say where the files of a directory are written: where there are few of them, with others that are alone."""
        first = records[0]
        item = self._transfer.items[first.item]
        self._batch_directory = None
        try:
            if not self._grouping or item.staging < 0:
                return
            if not self._is_grouped(os.fstat(item.staging).st_dev, item.staging, item.staging):
                return
            if len(records) >= BATCH_DIRECTORY_FILES_MIN:
                whole = leaf and not names_in(self._paths.destination(first)[0])
                self._batch_directory = self._new_batch_directory(item.staging, first, whole=whole)
                return
            self._batch_directory = self._mixed.get(item.staging)
            if self._batch_directory is None:
                self._batch_directory = self._mixed[item.staging] = self._new_batch_directory(
                    item.staging, first, whole=False
                )
        except (OSError, TransferFailed) as error:
            raise Unfinished(first) from error

    def _new_batch_directory(self, staging: int, first: Record, *, whole: bool) -> BatchDirectory:
        batch_directory = BatchDirectory(staging, self._transfer.context.tag, first.item, first.index, whole=whole)
        self._batch_directories.append(batch_directory)
        return batch_directory

    def finish(self) -> None:
        """Make everything durable that was put in place, and say so in the rows. Unfinished."""
        if self._placed:
            # Nothing to do if they were synced one by one: then there is no volume.
            self._sync(self._placed[-1].record)
            self._settle()

    def close(self) -> None:
        """Close what is open."""
        for descriptor in self._volumes.values():
            if descriptor >= 0:
                os.close(descriptor)
        self._volumes.clear()

    # One file.

    def _write(self, record: Record) -> _Written:
        """Write the temporary file of a record, once more if its source changes."""
        for tried in range(1, COPY_TRIES_MAX + 1):
            try:
                return self._write_once(record)
            except SourceChanged:
                self._again(record, self._tried_bytes)
                if tried == COPY_TRIES_MAX:
                    raise
        raise AssertionError("the last try returns or raises")

    def _write_once(self, record: Record) -> _Written:
        batch_directory, options = self._batch_directory, self._options
        self._tried_bytes = 0
        source_directory, source_name = self._paths.source(record)
        if batch_directory is None or not batch_directory.whole:
            directory, name = self._paths.destination(record)
            check_target(directory, name, Shown(self._transfer, record, 1), replace=options.replace)
        reading, status = open_source(source_directory, source_name, Shown(self._transfer, record, 0))
        try:
            if batch_directory is None:
                holder, part = self._paths.part(record)
                if not self._begun or self._begun[-1] is not record:
                    self._begun.append(record)
                writing = create_part(holder, part)
            else:
                holder, part = batch_directory.opened(), source_name if batch_directory.whole else b"%d" % record.index
                writing = create_part(holder, part, status.st_mode)
            try:
                own = os.fstat(writing)
                if status.st_size <= READ_AT_ONCE_BYTES and self._pace.step_bytes(status.st_size + 1) > status.st_size:
                    digest = self._copy_at_once(reading, writing, status.st_size)
                else:
                    digest = self._copy_in_steps(reading, writing, status.st_size)
                check_unchanged(reading, status)
                flags = set_metadata(
                    reading, writing, status, options, mode=own.st_mode, acls=self._transfer.items[record.item].acls
                )
                if batch_directory is None and not (self._grouping and self._is_grouped(own.st_dev, holder, writing)):
                    self._alone = True
                    os.fsync(writing)
                copied = Copied(status.st_size, status.st_mtime_ns, own.st_ino, digest, flags)
                return _Written(record, part, copied, self._tries.get(record.index, 0), batch_directory)
            finally:
                os.close(writing)
        finally:
            os.close(reading)

    def _copy_at_once(self, reading: int, writing: int, size_bytes: int) -> bytes:
        """Copy a file that one call reads, and return its digest. SourceChanged if it has another size."""
        self._pace.take(size_bytes + 1)
        data = os.read(reading, size_bytes + 1)
        while 0 < len(data) < size_bytes and (more := os.read(reading, size_bytes + 1 - len(data))):
            data += more
        if len(data) != size_bytes:
            raise SourceChanged
        digest = digest_of_bytes(self._options.algorithm, data)
        written = os.write(writing, data) if size_bytes else 0
        if written != size_bytes:
            write_all(writing, data[written:])
        self._moved_bytes += size_bytes
        self._tried_bytes += size_bytes
        return digest

    def _copy_in_steps(self, reading: int, writing: int, size_bytes: int) -> bytes:
        """Copy a file that is not so small, or held to a rate; otherwise as `_copy_at_once`."""
        taken = hasher(self._options.algorithm)
        moved_bytes = 0
        while moved_bytes <= size_bytes:
            step = self._pace.step_bytes(min(size_bytes - moved_bytes + 1, READ_BYTES))
            self._pace.take(step)
            got = os.readv(reading, [self._buffer[:step]])
            if not got:
                break
            data = self._buffer[:got]
            taken.update(data)
            write_all(writing, data)
            moved_bytes += got
            self._moved_bytes += got
            self._tried_bytes += got
            if moved_bytes < size_bytes:
                # It has to be seen that it goes on.
                self._tell()
            elif moved_bytes == size_bytes and got < step:
                break
        if moved_bytes != size_bytes:
            raise SourceChanged
        return taken.digest()

    def _tell(self) -> None:
        """Pass on what was written."""
        self._tally.add(Moved(size_bytes=self._moved_bytes, written_bytes=self._moved_bytes))
        self._moved_bytes = 0
        self._tally.tell()

    def _again(self, record: Record, moved_bytes: int) -> None:
        self._tally.add(Moved(size_bytes=-moved_bytes, retries=1))
        self._tries[record.index] = self._transfer.slots.tried(record.index)

    def _is_grouped(self, device: int, staging: int, writing: int) -> bool:
        """Whether files of the file system are synced together."""
        volume = self._volumes.get(device)
        if volume is None:
            volume = os.open(".", _VOLUME, dir_fd=staging) if is_local(writing) else -1
            self._volumes[device] = volume
        return volume >= 0

    # A group of files.

    def _put_in_place(self) -> None:
        """Make durable what was written, and give it its names."""
        if not self._written:
            return
        if self._grouping:
            self._sync(self._written[0].record)
            self._settle()
        if self._options.verify >= Verify.READ_BACK:
            for number, written in enumerate(self._written):
                self._written[number] = self._read_back(written)
        self._pace.check()
        self._keep(State.READY, self._written)
        if not self._options.replace:
            self._transfer.slots.sync()
        for batch_directory, found in itertools.groupby(self._written, lambda written: written.batch_directory):
            files = list(found)
            if (
                batch_directory is not None
                and batch_directory.whole
                and self._takes_place(files[0].record, batch_directory)
            ):
                self._placed += files
                self._batch_directories.remove(batch_directory)
                continue
            for written in files:
                try:
                    self._publish(written)
                except (OSError, TransferFailed) as error:
                    raise Unfinished(written.record) from error
                self._named += batch_directory is None
                self._placed.append(written)
            if batch_directory is not None:
                batch_directory.close()
        placed = self._written
        self._remove_batch_directories(placed)
        self._written, self._begun, self._named = [], [], 0
        if self._alone:
            self._sync_directories(placed)

    def _takes_place(self, record: Record, batch_directory: BatchDirectory) -> bool:
        try:
            return self._paths.takes_place(record, batch_directory)
        except (OSError, TransferFailed) as error:
            raise Unfinished(record) from error

    def _publish(self, written: _Written) -> None:
        record, batch_directory, replace = written.record, written.batch_directory, self._options.replace
        directory, name = self._paths.destination(record)
        shown = Shown(self._transfer, record, 1)
        if batch_directory is not None and batch_directory.whole:
            # Nobody looked: the directory was empty.
            check_target(directory, name, shown, replace=replace)
        publish(self._holder(written), written.part, directory, name, shown, replace=replace)

    def _holder(self, written: _Written) -> int:
        """Return the open directory that a temporary file is in."""
        return (
            self._paths.part(written.record)[0] if written.batch_directory is None else written.batch_directory.opened()
        )

    def _remove_batch_directories(self, placed: Sequence[_Written]) -> None:
        """Remove the batch directories, which are empty."""
        try:
            while self._batch_directories:
                self._batch_directories[-1].remove()
                self._batch_directories.pop()
        except OSError as error:
            raise Unfinished(placed[0].record) from error
        self._mixed = {}

    def _sync(self, record: Record) -> None:
        """Sync the file systems; Unfinished names a record if that fails."""
        for descriptor in self._volumes.values():
            if descriptor >= 0:
                try:
                    sync_file_system(descriptor)
                except OSError as error:
                    raise Unfinished(record) from error
        self._tally.add(Moved(steps=1))
        self._tally.tell()

    def _sync_directories(self, placed: Sequence[_Written]) -> None:
        last: tuple[int, bytes] | None = None
        for written in placed:
            record = written.record
            here = record.item, record.path.rpartition(b"/")[0]
            if here != last:
                try:
                    os.fsync(self._paths.destination(record)[0])
                except (OSError, TransferFailed) as error:
                    raise Unfinished(record) from error
                last = here

    def _settle(self) -> None:
        """Say of what is durable at its destination that it is."""
        if self._placed:
            self._keep(State.DONE, self._placed)
            self._transfer.slots.sync()
            durable_bytes = sum(written.copied.size for written in self._placed)
            self._tally.add(Moved(files=len(self._placed), durable_bytes=durable_bytes))
            self._tally.tell()
            self._placed = []

    def _read_back(self, written: _Written) -> _Written:
        """Compare with what storage holds; write it once more if that is something else. Unfinished."""
        record, again = written.record, written
        try:
            for tried in range(1, COPY_TRIES_MAX + 1):
                self._pace.check()
                with closing(os.open(again.part, READ_FLAGS, dir_fd=self._holder(again))) as descriptor:
                    if tried > 1:
                        os.fsync(descriptor)
                    found = digest_on_disk(descriptor, self._options.algorithm)
                self._tally.add(Moved(steps=1))
                if found == again.copied.digest:
                    return again
                if tried < COPY_TRIES_MAX:
                    self._again(record, record.size)
                    self._batch_directory = again.batch_directory
                    again = self._write(record)
            source, shown = self._transfer.shown(record)
            raise ReadBackFailed(f"{shown} does not hold what was read from {source}; check the disk")
        except (OSError, TransferFailed, SourceChanged) as error:
            raise Unfinished(record) from error

    def _discard(self) -> None:
        """Remove the temporary files."""
        for record in self._begun[self._named :]:
            with contextlib.suppress(OSError, TransferFailed):
                discard(*self._paths.part(record))
        for batch_directory in self._batch_directories:
            batch_directory.discard()
        self._batch_directories, self._mixed = [], {}
        self._written, self._begun, self._named = [], [], 0

    # Slots.

    def _read_tries(self, records: Sequence[Record]) -> None:
        self._tries = {}
        for run in _runs([record.index for record in records]):
            for index, row in zip(run, self._transfer.slots.many(run.start, len(run)), strict=True):
                if row.tries:
                    self._tries[index] = row.tries

    def _keep(self, state: State, files: Sequence[_Written]) -> None:
        kept = {file.record.index: (file.tries, file.copied) for file in files}
        for run in _runs(list(kept)):
            self._transfer.slots.put_files(run.start, state, [kept[index] for index in run])


def _runs(indexes: Sequence[int]) -> list[range]:
    """Return the indexes, which rise, as ranges without gaps."""
    found: list[range] = []
    for index in indexes:
        if found and found[-1].stop == index:
            found[-1] = range(found[-1].start, index + 1)
        else:
            found.append(range(index, index + 1))
    return found
