"""Small files: write many, make them durable with one sync, then rename each.

The sync of one group also makes the names of the previous group durable; `finish` does so for the last.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

from forebay.cluster.agent.adapters import is_local
from forebay.cluster.agent.files import READ_FLAGS
from forebay.cluster.agent.limits import COPY_TRIES_MAX
from forebay.cluster.agent.transfer.digests import digest_of_bytes, digest_on_disk, hasher
from forebay.cluster.agent.transfer.errors import ReadBackFailed, SourceChanged, TransferFailed, TransferPaused
from forebay.cluster.agent.transfer.fence import BATCH_DIRECTORY_FILES_MIN, BatchDirectory
from forebay.cluster.agent.transfer.file_copy import (
    check_target,
    check_unchanged,
    create_part,
    open_source,
    publish,
    set_metadata,
)
from forebay.cluster.agent.transfer.manifest import ManifestRecord
from forebay.cluster.agent.transfer.options import Verify
from forebay.cluster.agent.transfer.rate_limit import TransferStopped
from forebay.cluster.agent.transfer.record_paths import RecordPaths, discard
from forebay.cluster.agent.transfer.status_table import CopiedFile, RecordState
from forebay.cluster.agent.transfer.transfer_state import (
    DisplayPath,
    MovedAmounts,
    ProgressTally,
    TransferState,
    directory_of,
)
from forebay.cluster.system import closing, names_in, sync_file_system, write_all

READ_BYTES: Final = 1024 * 1024
"""Bytes read at a time from larger files."""

READ_AT_ONCE_BYTES: Final = 64 * 1024
"""Size up to which a file is read, digested and written as a whole: most are smaller."""

GROUPED_FILES_MIN: Final = 32
"""Files of a batch for which one filesystem sync is cheaper than a sync for each, count: measured, a file takes 0.3 to
0.6 ms, a filesystem 10 to 25 ms, which includes writing other files.
"""

TELL_FILES: Final = 64
"""Files between two progress reports."""

_VOLUME: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class RecordFailed(Exception):
    """A file of a batch cannot be moved; `__cause__` is the reason."""

    def __init__(self, record: ManifestRecord) -> None:
        """Name the record."""
        super().__init__(record.path)
        self.record = record


class _Written(NamedTuple):
    record: ManifestRecord
    part: bytes
    copied: CopiedFile
    tries: int
    batch_directory: BatchDirectory | None
    """Directory that holds it; None means the one `RecordPaths.part` returns."""


class SmallFiles:
    """Moves batches of small files in one process and one thread."""

    def __init__(self, transfer: TransferState, paths: RecordPaths, tally: ProgressTally) -> None:
        """Begin without files."""
        self._transfer = transfer
        self._options = transfer.options
        self._pace = transfer.context.pace
        self._paths = paths
        self._tally = tally
        self._begun: list[ManifestRecord] = []
        """Records of the batch that may have a temporary file outside batch directories, in order."""
        self._batch_directories: list[BatchDirectory] = []
        self._batch_directory: BatchDirectory | None = None
        """Batch directory for the next file."""
        self._mixed: dict[int, BatchDirectory] = {}
        """Shared batch directories for directories with few files, by staging directory."""
        self._named = 0
        """Number of those that have been renamed."""
        self._written: list[_Written] = []
        """Files complete under their temporary names."""
        self._placed: list[_Written] = []
        """Files in place whose names may not be durable yet."""
        self._moved_bytes = 0
        """Bytes written and not yet reported."""
        self._tried_bytes = 0
        """Bytes written of the current file."""
        self._tries: dict[int, int] = {}
        self._grouping = False
        """True if the batch is large enough for one common sync."""
        self._alone = False
        """True if files of the batch were synced individually, so that their directories need a sync too."""
        self._volumes: dict[int, int] = {}
        """Filesystems synced as a whole: device -> descriptor opened before anything was written, so that it reports
        all lost writes; -1 if files are synced individually.
        """
        # Only the pages actually used take memory.
        self._buffer = memoryview(mmap.mmap(-1, READ_BYTES))

    def copy(self, records: Sequence[ManifestRecord], leaves: Collection[tuple[int, bytes]] = ()) -> None:
        """Move files; they are in place on return, and durable after the next call or `finish`.

        `leaves` are directories (item and path) that a batch directory may replace: all of their files are in
        `records`, and no other process copies into them. Also raises the exceptions of the pace.

        Raises:
            RecordFailed: A file cannot be moved.
        """
        self._read_tries(records)
        self._grouping, self._alone = len(records) >= GROUPED_FILES_MIN, False
        try:
            for here, found in itertools.groupby(records, directory_of):
                self._copy_into(list(found), here in leaves)
            self._tell()
            self._put_in_place()
        except (TransferPaused, TransferStopped):
            raise
        except BaseException:
            self._discard()
            raise

    def _copy_into(self, records: Sequence[ManifestRecord], leaf: bool) -> None:
        """Copy the small files of one directory under temporary names."""
        self._choose_batch_directory(records, leaf)
        for number, record in enumerate(records):
            if number % TELL_FILES == 0:
                self._tally.at(self._transfer.label(record))
            try:
                self._written.append(self._write(record))
            except (OSError, TransferFailed, SourceChanged) as error:
                raise RecordFailed(record) from error
            if number % TELL_FILES == 0:
                self._tell()
        if self._batch_directory is not None:
            self._batch_directory.files += len(records)
            self._batch_directory.close()

    def _choose_batch_directory(self, records: Sequence[ManifestRecord], leaf: bool) -> None:
        """Choose where to write a directory's files; directories with few files share a batch directory."""
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
            raise RecordFailed(first) from error

    def _new_batch_directory(self, staging: int, first: ManifestRecord, *, whole: bool) -> BatchDirectory:
        batch_directory = BatchDirectory(staging, self._transfer.context.tag, first.item, first.index, whole=whole)
        self._batch_directories.append(batch_directory)
        return batch_directory

    def finish(self) -> None:
        """Make all files in place durable and record that.

        Raises:
            RecordFailed: A sync failed.
        """
        if self._placed:
            # Does nothing for files synced individually, for which there is no volume.
            self._sync(self._placed[-1].record)
            self._settle()

    def close(self) -> None:
        """Close all descriptors."""
        for descriptor in self._volumes.values():
            if descriptor >= 0:
                os.close(descriptor)
        self._volumes.clear()

    # Single files.

    def _write(self, record: ManifestRecord) -> _Written:
        """Write the temporary file of a record, a second time if its source changes."""
        for tried in range(1, COPY_TRIES_MAX + 1):
            try:
                return self._write_once(record)
            except SourceChanged:
                self._again(record, self._tried_bytes)
                if tried == COPY_TRIES_MAX:
                    raise
        raise AssertionError("the last try returns or raises")

    def _write_once(self, record: ManifestRecord) -> _Written:
        batch_directory, options = self._batch_directory, self._options
        self._tried_bytes = 0
        source_directory, source_name = self._paths.source(record)
        if batch_directory is None or not batch_directory.whole:
            directory, name = self._paths.destination(record)
            check_target(directory, name, DisplayPath(self._transfer, record, 1), replace=options.replace)
        reading, status = open_source(source_directory, source_name, DisplayPath(self._transfer, record, 0))
        try:
            if batch_directory is None:
                holder, part = self._paths.part(record)
                if not self._begun or self._begun[-1] is not record:
                    self._begun.append(record)
                writing = create_part(holder, part)
            else:
                holder, part = (
                    batch_directory.descriptor(),
                    source_name if batch_directory.whole else b"%d" % record.index,
                )
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
                copied = CopiedFile(status.st_size, status.st_mtime_ns, own.st_ino, digest, flags)
                return _Written(record, part, copied, self._tries.get(record.index, 0), batch_directory)
            finally:
                os.close(writing)
        finally:
            os.close(reading)

    def _copy_at_once(self, reading: int, writing: int, size_bytes: int) -> bytes:
        """Copy a file in a single read and return its digest.

        Raises:
            SourceChanged: The size differs.
        """
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
        """Copy a larger or rate-limited file; otherwise as `_copy_at_once`."""
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
                # Progress must be visible.
                self._tell()
            elif moved_bytes == size_bytes and got < step:
                break
        if moved_bytes != size_bytes:
            raise SourceChanged
        return taken.digest()

    def _tell(self) -> None:
        """Report the bytes written."""
        self._tally.add(MovedAmounts(size_bytes=self._moved_bytes, written_bytes=self._moved_bytes))
        self._moved_bytes = 0
        self._tally.tell()

    def _again(self, record: ManifestRecord, moved_bytes: int) -> None:
        self._tally.add(MovedAmounts(size_bytes=-moved_bytes, retries=1))
        self._tries[record.index] = self._transfer.slots.count_try(record.index)

    def _is_grouped(self, device: int, staging: int, writing: int) -> bool:
        """Return whether files on this filesystem are synced together."""
        volume = self._volumes.get(device)
        if volume is None:
            volume = os.open(".", _VOLUME, dir_fd=staging) if is_local(writing) else -1
            self._volumes[device] = volume
        return volume >= 0

    # Groups of files.

    def _put_in_place(self) -> None:
        """Make the written files durable and rename them."""
        if not self._written:
            return
        if self._grouping:
            self._sync(self._written[0].record)
            self._settle()
        if self._options.verify >= Verify.READ_BACK:
            for number, written in enumerate(self._written):
                self._written[number] = self._read_back(written)
        self._pace.check()
        self._keep(RecordState.READY, self._written)
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
                    raise RecordFailed(written.record) from error
                self._named += batch_directory is None
                self._placed.append(written)
            if batch_directory is not None:
                batch_directory.close()
        placed = self._written
        self._remove_batch_directories(placed)
        self._written, self._begun, self._named = [], [], 0
        if self._alone:
            self._sync_directories(placed)

    def _takes_place(self, record: ManifestRecord, batch_directory: BatchDirectory) -> bool:
        try:
            return self._paths.takes_place(record, batch_directory)
        except (OSError, TransferFailed) as error:
            raise RecordFailed(record) from error

    def _publish(self, written: _Written) -> None:
        record, batch_directory, replace = written.record, written.batch_directory, self._options.replace
        directory, name = self._paths.destination(record)
        shown = DisplayPath(self._transfer, record, 1)
        if batch_directory is not None and batch_directory.whole:
            # The check was skipped because the directory was empty.
            check_target(directory, name, shown, replace=replace)
        publish(self._holder(written), written.part, directory, name, shown, replace=replace)

    def _holder(self, written: _Written) -> int:
        """Return the open directory of a temporary file."""
        return (
            self._paths.part(written.record)[0]
            if written.batch_directory is None
            else written.batch_directory.descriptor()
        )

    def _remove_batch_directories(self, placed: Sequence[_Written]) -> None:
        """Remove the empty batch directories."""
        try:
            while self._batch_directories:
                self._batch_directories[-1].remove()
                self._batch_directories.pop()
        except OSError as error:
            raise RecordFailed(placed[0].record) from error
        self._mixed = {}

    def _sync(self, record: ManifestRecord) -> None:
        """Sync the filesystems.

        Raises:
            RecordFailed: A sync failed; it names the given record.
        """
        for descriptor in self._volumes.values():
            if descriptor >= 0:
                try:
                    sync_file_system(descriptor)
                except OSError as error:
                    raise RecordFailed(record) from error
        self._tally.add(MovedAmounts(steps=1))
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
                    raise RecordFailed(record) from error
                last = here

    def _settle(self) -> None:
        """Record the files that are durable at their destination."""
        if self._placed:
            self._keep(RecordState.DONE, self._placed)
            self._transfer.slots.sync()
            durable_bytes = sum(written.copied.size for written in self._placed)
            self._tally.add(MovedAmounts(files=len(self._placed), durable_bytes=durable_bytes))
            self._tally.tell()
            self._placed = []

    def _read_back(self, written: _Written) -> _Written:
        """Compare a file with its stored data; write it a second time if they differ.

        Raises:
            RecordFailed: The data still differs or cannot be read.
        """
        record, again = written.record, written
        try:
            for tried in range(1, COPY_TRIES_MAX + 1):
                self._pace.check()
                with closing(os.open(again.part, READ_FLAGS, dir_fd=self._holder(again))) as descriptor:
                    if tried > 1:
                        os.fsync(descriptor)
                    found = digest_on_disk(descriptor, self._options.algorithm)
                self._tally.add(MovedAmounts(steps=1))
                if found == again.copied.digest:
                    return again
                if tried < COPY_TRIES_MAX:
                    self._again(record, record.size)
                    self._batch_directory = again.batch_directory
                    again = self._write(record)
            source, shown = self._transfer.display_paths(record)
            raise ReadBackFailed(f"{shown} differs from the data read from {source}; check the disk")
        except (OSError, TransferFailed, SourceChanged) as error:
            raise RecordFailed(record) from error

    def _discard(self) -> None:
        """Remove the temporary files."""
        for record in self._begun[self._named :]:
            with contextlib.suppress(OSError, TransferFailed):
                discard(*self._paths.part(record))
        for batch_directory in self._batch_directories:
            batch_directory.discard()
        self._batch_directories, self._mixed = [], {}
        self._written, self._begun, self._named = [], [], 0

    # Rows.

    def _read_tries(self, records: Sequence[ManifestRecord]) -> None:
        self._tries = {}
        for run in _runs([record.index for record in records]):
            for index, row in zip(run, self._transfer.slots.many(run.start, len(run)), strict=True):
                if row.tries:
                    self._tries[index] = row.tries

    def _keep(self, state: RecordState, files: Sequence[_Written]) -> None:
        kept = {file.record.index: (file.tries, file.copied) for file in files}
        for run in _runs(list(kept)):
            self._transfer.slots.put_files(run.start, state, [kept[index] for index in run])


def _runs(indexes: Sequence[int]) -> list[range]:
    """Group ascending indexes into contiguous ranges."""
    found: list[range] = []
    for index in indexes:
        if found and found[-1].stop == index:
            found[-1] = range(found[-1].start, index + 1)
        else:
            found.append(range(index, index + 1))
    return found
