"""State of a transfer: its context, and the data needed for copying.

Contains the manifest with its pending parts, rows, marks, paths and counters. It remains valid after a fork: everything
in it is constant or a file shared by the processes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

from forebay.cluster.agent.files import join
from forebay.cluster.agent.transfer.errors import TransferFailed, os_message
from forebay.cluster.agent.transfer.fence import WriterFenced, is_removed
from forebay.cluster.agent.transfer.manifest import DIRECTORY, FILE, ManifestRecord, TransferManifest
from forebay.cluster.agent.transfer.options import TransferItem, TransferOptions, chunk_bytes_again
from forebay.cluster.agent.transfer.progress import Counters, no_op
from forebay.cluster.agent.transfer.rate_limit import Pace
from forebay.cluster.agent.transfer.record_paths import RecordPaths, find_overlaps
from forebay.cluster.agent.transfer.status_table import Chunks, RecordsFailed, RecordsHeader, RecordState, StatusTable
from forebay.cluster.agent.transfer.workspace import RecordFiles, Workspace
from forebay.cluster.system import Clock
from forebay.replica.model import Stage


class MovedAmounts(msgspec.Struct, array_like=True, gc=False):
    """Amounts since the last report; negative if work has to be repeated. Bytes and counts."""

    files: int = 0
    size_bytes: int = 0
    """Bytes now available, resumed or not."""
    written_bytes: int = 0
    """Bytes written to the disk."""
    resumed_bytes: int = 0
    retries: int = 0
    durable_bytes: int = 0
    """Bytes that no later attempt has to move."""
    steps: int = 0
    """Signs of progress that move nothing."""
    path: bytes = b""
    """Current file; empty if unchanged."""


_COUNTS: Final = MovedAmounts.__struct_fields__[:-1]


class ProgressTally:
    """Sums amounts from all threads of a process; one of them calls `tell`."""

    def __init__(self, tell: Callable[[MovedAmounts], None]) -> None:
        """Begin at zero; `tell` receives the sums."""
        self._tell = tell
        self._lock = threading.Lock()
        self._sums = MovedAmounts()

    def add(self, more: MovedAmounts) -> None:
        """Add amounts."""
        with self._lock:
            for name in _COUNTS:
                setattr(self._sums, name, getattr(self._sums, name) + getattr(more, name))

    def at(self, path: bytes) -> None:
        """Set the current file."""
        self._sums.path = path

    def tell(self) -> None:
        """Report the sums; an exception from the receiver ends the copying."""
        with self._lock:
            sums, self._sums = self._sums, MovedAmounts()
        if sums != MovedAmounts():
            self._tell(sums)


def _beside(item: TransferItem) -> int:
    return item.staging


class TransferContext(NamedTuple):
    """Context of a transfer, given by its caller."""

    tag: str
    """Prefix of temporary names, for example `.forebay-7-0123abcd`."""
    workspace: Workspace
    clock: Clock
    pace: Pace
    stage: Stage
    attempt: int
    progress: Callable[[Counters], None] = no_op
    """Receives the progress, in the main process."""
    at: Callable[[bytes], None] = no_op
    """Receives the current file."""
    claim: Callable[[TransferItem], int] = _beside
    """Returns an item's staging directory (TransferItem.staging), once for each item before the first temporary file.
    Called only when the sources are known to exist, because it creates directories at the destination.
    """
    planned: Callable[[Sequence[tuple[int, int]]], None] = no_op
    """Receives files and bytes of each item before copying; an exception ends the transfer."""
    release: Callable[[], None] = no_op
    """Called when the staging directories are no longer needed, before the times of top directories are set."""
    before_removal: Callable[[], None] = no_op
    """Called before each source is removed; blocks while another process may have begun the transfer, or raises to end
    it.
    """


SMALL_BATCH_FILES: Final = 4096
SMALL_BATCH_FILES_MIN: Final = 256
"""Files of one batch, count: the unit of a sync, and the most a crash may repeat. Batches of small transfers are
smaller, so that every helper gets some.
"""

SMALL_BATCHES: Final = 32
"""Minimum number of batches that small files are divided into, count: some for each of a few helpers."""

SMALL_BATCH_BYTES: Final = 64 * 1024 * 1024
"""Bytes of the files in one batch."""

POLL_RECORDS: Final = 4096
"""Records whose rows are read at a time."""

_OF_DIRECTORIES: Final = 0.75
"""Share of a batch from which on it ends with a directory, so that most directories are complete in one batch."""

_PENDING: Final = frozenset({RecordState.NEW, RecordState.STARTED, RecordState.READY})


class RecordBatch(NamedTuple):
    """Consecutive records that are copied together."""

    place: int
    """Place of the first record in the manifest."""
    length: int
    """Number of records, some of which may be no files or done."""
    large: bool = False
    """True for a single file copied in chunks."""


def directory_of(record: ManifestRecord) -> tuple[int, bytes]:
    """Return the item and path of the directory that contains a record."""
    return record.item, record.path.rpartition(b"/")[0]


class TransferPlan(NamedTuple):
    """Result of planning, with its open files."""

    files: RecordFiles
    header: RecordsHeader
    amounts: tuple[tuple[int, int], ...]
    """Files and bytes of each item."""
    resumed_files: int
    resumed_bytes: int
    same_boot: bool
    directories: Sequence[int]
    """Places of the directory records in the manifest."""
    links: Sequence[int] = ()
    """Places of links to recreate."""
    begins: Sequence[int] = ()
    """Place of each item's first record; empty if nothing remains to be copied."""
    absent: tuple[tuple[int, str], ...] = ()
    """Items whose source is missing, each with the reason; nothing of them is moved."""
    is_recorded: bool = True
    """True if the next attempt can see these records."""


class TransferState:
    """State of a transfer shared by all its processes."""

    def __init__(
        self, items: Sequence[TransferItem], options: TransferOptions, context: TransferContext, planned: TransferPlan
    ) -> None:
        """Use the plan."""
        self.items = items
        self.options = options
        self.context = context
        self.header = planned.header
        self.manifest = TransferManifest(planned.files.manifest, planned.header.manifest_bytes)
        self.slots = StatusTable(planned.files.control)
        self.same_boot = planned.same_boot
        """True if data written but not synced before the checkpoint can still be in memory."""
        self._chunks = planned.files.chunks
        self._apart = not find_overlaps(items)
        """True if no two items share directories."""
        self.written_bytes = 0
        self.counters = Counters(files_total=self.header.files, bytes_total=self.header.size_bytes)

    def paths(self) -> RecordPaths:
        """Return a new `RecordPaths`, one for each process or thread."""
        return RecordPaths(self.items, self.context.tag)

    def pending(
        self, wanted: Callable[[TransferItem], bool] = lambda item: item.backend == "native"
    ) -> Iterator[RecordBatch]:
        """Yield the batches to copy for the wanted items, in manifest order.

        Raises:
            OSError: The records cannot be read.
        """
        place, count, files, size_bytes = 0, 0, 0, 0
        states, base = b"", 0
        ahead = (-2, 0)
        chosen = [wanted(item) for item in self.items]
        files_max = min(SMALL_BATCH_FILES, max(SMALL_BATCH_FILES_MIN, self.header.files // SMALL_BATCHES))
        for at, record in self.manifest.records_with_places():
            if record.index >= base + len(states):
                base = record.index
                states = self.slots.states(base, POLL_RECORDS)
            if record.kind != FILE or not chosen[record.item] or states[record.index - base] not in _PENDING:
                if record.kind == DIRECTORY:
                    if files >= files_max * _OF_DIRECTORIES:
                        yield RecordBatch(place, count)
                        files = count = size_bytes = 0
                    ahead = (record.index, at)
                if files:
                    count += 1
                    if count >= POLL_RECORDS:
                        yield RecordBatch(place, count)
                        files = count = size_bytes = 0
                continue
            if record.is_large:
                if files:
                    yield RecordBatch(place, count)
                    files = count = size_bytes = 0
                yield RecordBatch(at, 1, True)
                continue
            if not files:
                # Include the directory if this is its first file, because `leaves` needs it.
                place, count = (ahead[1], 1) if ahead[0] == record.index - 1 else (at, 0)
            files, count, size_bytes = files + 1, count + 1, size_bytes + record.size
            if files >= files_max or size_bytes >= SMALL_BATCH_BYTES:
                yield RecordBatch(place, count)
                files = count = size_bytes = 0
        if files:
            yield RecordBatch(place, count)

    def records(
        self, batch: RecordBatch, wanted: Callable[[TransferItem], bool] = lambda item: item.backend == "native"
    ) -> list[ManifestRecord]:
        """Return the files of a batch that are not done.

        Raises:
            OSError: The records cannot be read.
        """
        found = list(self.manifest.records(batch.place, batch.length))
        states = self.slots.states(found[0].index, batch.length) if found else b""
        return [
            record
            for record, state in zip(found, states, strict=True)
            if record.kind == FILE
            and state in _PENDING
            and record.is_large is batch.large
            and wanted(self.items[record.item])
        ]

    def leaves(self, batch: RecordBatch, chosen: Sequence[ManifestRecord]) -> set[tuple[int, bytes]]:
        """Return directories (item and path) of a batch that this transfer created and that contain only `chosen`
        files.

        Raises:
            OSError: The records cannot be read.
        """
        if not self._apart:
            return set()
        taken = {record.index for record in chosen}
        found: set[tuple[int, bytes]] = set()
        under_way: ManifestRecord | None = None
        # The record after the batch shows whether its last directory is complete.
        records = [*self.manifest.records(batch.place, batch.length + 1)]
        states = self.slots.states(records[0].index, len(records)) if records else b""
        for number, record in enumerate(records):
            if under_way is not None and not record.lies_in(under_way):
                found.add((under_way.item, under_way.path))
                under_way = None
            if number == batch.length:
                break
            if record.kind == DIRECTORY:
                under_way = record if states[number] == RecordState.MADE and record.path else None
            elif under_way is not None and record.index not in taken and record.kind == FILE:
                under_way = None
        else:
            if under_way is not None:
                found.add((under_way.item, under_way.path))
        return found

    def chunks(self, record: ManifestRecord, size_bytes: int | None = None) -> Chunks:
        """Return the marks of a large file with this current size; None means the planned size."""
        if size_bytes is None:
            return self.chunks(record, record.size)
        chunk_bytes = chunk_bytes_again(record.size, size_bytes, self.options)
        return Chunks(self._chunks, record.chunk_at, -(-size_bytes // chunk_bytes), chunk_bytes)

    def display_paths(self, record: ManifestRecord) -> tuple[str, str]:
        """Return source and destination for messages."""
        item = self.items[record.item]
        parts = (os.fsdecode(record.path),) if record.path else ()
        return join(item.source.path, parts), join(item.destination.path, parts)

    def failure_of(self, record: ManifestRecord, error: OSError | TransferFailed) -> Exception:
        """Return the exception to raise `from error`, naming both files or the newer attempt.

        An error of the agent's own records is returned unchanged.
        """
        if isinstance(error, RecordsFailed):
            return error
        if isinstance(error, TransferFailed):
            # A new exception, because one raised from itself would be its own cause.
            return type(error)(str(error), record.item)
        source, destination = self.display_paths(record)
        staging = self.items[record.item].staging
        if isinstance(error, FileNotFoundError) and staging >= 0 and is_removed(staging):
            return WriterFenced(f"a newer attempt has taken over {destination}; this one may no longer write there")
        return TransferFailed(f"{source} cannot be copied to {destination}: {os_message(error)}", record.item)

    def source_changed_error(self, record: ManifestRecord, tries: int) -> TransferFailed:
        """Return the error for a source that changed in every attempt."""
        source, _ = self.display_paths(record)
        return TransferFailed(
            f"{source} changed during {tries} attempts to copy it; stage it while it is not being written", record.item
        )

    def advance(self, moved: MovedAmounts) -> None:
        """Add to the counters, in the main process; counted files are durable at their destination.

        Raises:
            TransferFailed: More was copied than the limit permits.
        """
        if moved.path:
            self.context.at(moved.path)
        now = self.counters
        self.written_bytes += moved.written_bytes
        self.tell(
            now._replace(
                files_done=now.files_done + moved.files,
                bytes_done=now.bytes_done + moved.size_bytes,
                resumed_bytes=now.resumed_bytes + moved.resumed_bytes,
                retries=now.retries + moved.retries,
                durable_files=now.durable_files + moved.files,
                durable_bytes=now.durable_bytes + moved.durable_bytes,
                steps=now.steps + moved.steps,
            )
        )
        self.check_limit(self.counters.bytes_done)

    def check_limit(self, needed_bytes: int) -> None:
        """Raise TransferFailed if the total exceeds the limit, because a source grew after planning."""
        limit_bytes = self.options.limit_bytes
        if limit_bytes and needed_bytes > limit_bytes:
            raise TransferFailed(
                "a source grew while it was copied: "
                f"the transfers need more than the {limit_bytes} bytes of the buffer; "
                "stage it while it is not being written"
            )

    def tell(self, counters: Counters) -> None:
        """Publish the counters, in the main process."""
        self.counters = counters
        self.context.progress(counters)

    def at(self, record: ManifestRecord) -> None:
        """Set the current file."""
        self.context.at(self.label(record))

    def label(self, record: ManifestRecord) -> bytes:
        """Return the displayed name of a file."""
        return record.path or os.fsencode(self.items[record.item].source.path)


class DisplayPath:
    """Path of a file for messages, built only when needed."""

    __slots__ = ("_record", "_side", "_transfer")

    def __init__(self, transfer: TransferState, record: ManifestRecord, side: int) -> None:
        """Refer to the source (side 0) or the destination (side 1)."""
        self._transfer = transfer
        self._record = record
        self._side = side

    def __str__(self) -> str:
        """Return the path."""
        return self._transfer.display_paths(self._record)[self._side]
