"""State of a transfer: what whoever runs it gives, and what copying needs at hand.

That is the manifest and what is still to be done of it, rows, marks, places, counters. It is used as
it is after a fork: everything in it is a file that processes share, or constant."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

from cluster.agent.files import join
from cluster.agent.transfer.errors import TransferFailed, os_message
from cluster.agent.transfer.fence import Fenced, is_removed
from cluster.agent.transfer.manifest import DIRECTORY, FILE, Manifest, Record
from cluster.agent.transfer.options import Item, Options, chunk_bytes_again
from cluster.agent.transfer.progress import Counters, nothing
from cluster.agent.transfer.rate_limit import Pace
from cluster.agent.transfer.record_paths import RecordPaths, overlapping
from cluster.agent.transfer.status_table import Chunks, Header, RecordsFailed, State, StatusTable
from cluster.agent.transfer.workspace import Files, Workspace
from cluster.system import Clock
from replica.model import Stage


class Moved(msgspec.Struct, array_like=True, gc=False):
    """What was done since it was told the last time; negative where it has to be done again. Bytes, and counts."""

    files: int = 0
    size_bytes: int = 0
    """Of what is at hand now, resumed or not."""
    written_bytes: int = 0
    """That went to the disk."""
    resumed_bytes: int = 0
    retries: int = 0
    durable_bytes: int = 0
    """That no other attempt has to move again."""
    steps: int = 0
    """Signs of life that move nothing."""
    path: bytes = b""
    """The file that it is at; empty: as before."""


_COUNTS: Final = Moved.__struct_fields__[:-1]


class Tally:
    """Sums up, for all threads of a process; `tell` is called by one of them."""

    def __init__(self, tell: Callable[[Moved], None]) -> None:
        """Begin with nothing; `tell` is given the sums."""
        self._tell = tell
        self._lock = threading.Lock()
        self._sums = Moved()

    def add(self, more: Moved) -> None:
        """Count what was done."""
        with self._lock:
            for name in _COUNTS:
                setattr(self._sums, name, getattr(self._sums, name) + getattr(more, name))

    def at(self, path: bytes) -> None:
        """Say which file it is at."""
        self._sums.path = path

    def tell(self) -> None:
        """Pass on what was counted; whatever the other side raises ends the copying."""
        with self._lock:
            sums, self._sums = self._sums, Moved()
        if sums != Moved():
            self._tell(sums)


def _beside(item: Item) -> int:
    return item.staging


class Context(NamedTuple):
    """Context of a transfer, given by whoever runs it."""

    tag: str
    """What temporary names begin with, such as `.forebay-7-0123abcd`."""
    workspace: Workspace
    clock: Clock
    pace: Pace
    stage: Stage
    attempt: int
    progress: Callable[[Counters], None] = nothing
    """Told in the main process how far it is."""
    at: Callable[[bytes], None] = nothing
    """Told which file is being moved."""
    claim: Callable[[Item], int] = _beside
    """Asked once for each item's staging directory (Item.staging), before the first temporary file: not before it is
    known that the sources are there, since it makes directories at the destination."""
    planned: Callable[[Sequence[tuple[int, int]]], None] = nothing
    """Told the files and bytes of each item before anything is copied; what it raises ends the transfer."""
    release: Callable[[], None] = nothing
    """Told when the staging directories are needed no more, before the tops of trees get their times."""
    before_removal: Callable[[], None] = nothing
    """Asked before each source is removed: returns while nobody else can have begun with the transfer, and raises what
    ends this one."""


SMALL_BATCH_FILES: Final = 4096
SMALL_BATCH_FILES_MIN: Final = 256
"""Files of one batch, count: what one sync is for, and what a crash may have to copy again. Of few files a batch has
fewer, so that there is something for everybody."""

SMALL_BATCHES: Final = 32
"""Batches that small files are shared out in at least, count: some for each of a handful of helpers."""

SMALL_BATCH_BYTES: Final = 64 * 1024 * 1024
"""Bytes of the files of one batch."""

POLL_RECORDS: Final = 4096
"""Records whose rows are read at once."""

_OF_DIRECTORIES: Final = 0.75
"""From this share of a batch on it ends with a directory, if one ends: so that most have all of their files in one."""

_PENDING: Final = frozenset({State.NEW, State.STARTED, State.READY})


class Batch(NamedTuple):
    """Records in a row that are copied together."""

    place: int
    """Where the first one is in the manifest."""
    length: int
    """Records, of which some may be no files, or done."""
    large: bool = False
    """File that is copied in chunks."""


def directory_of(record: Record) -> tuple[int, bytes]:
    """Return the item and the path of the directory that a record lies in."""
    return record.item, record.path.rpartition(b"/")[0]


class Planned(NamedTuple):
    """What there is to do, and the open files that say so."""

    files: Files
    header: Header
    amounts: tuple[tuple[int, int], ...]
    """Files and bytes of each item."""
    resumed_files: int
    resumed_bytes: int
    same_boot: bool
    directories: Sequence[int]
    """The places of their records in the manifest."""
    links: Sequence[int] = ()
    """Those of links that are made again."""
    begins: Sequence[int] = ()
    """The place of the first record of each item; empty if nothing is copied any more."""
    absent: tuple[tuple[int, str], ...] = ()
    """Items whose source cannot be found, each with the reason: nothing of them is moved."""
    is_recorded: bool = True
    """Whether the next attempt will know of this one."""


class TransferState:
    """State of a transfer that all its processes share."""

    def __init__(self, items: Sequence[Item], options: Options, context: Context, planned: Planned) -> None:
        """Take what was planned."""
        self.items = items
        self.options = options
        self.context = context
        self.header = planned.header
        self.manifest = Manifest(planned.files.manifest, planned.header.manifest_bytes)
        self.slots = StatusTable(planned.files.control)
        self.same_boot = planned.same_boot
        """Whether what was only written, not synced, when the checkpoint was made can still be there."""
        self._chunks = planned.files.chunks
        self._apart = not overlapping(items)
        """Whether no two items go to the same directories."""
        self.written_bytes = 0
        self.counters = Counters(files_total=self.header.files, bytes_total=self.header.size_bytes)

    def paths(self) -> RecordPaths:
        """Return a new finder of directories: one for each process or thread."""
        return RecordPaths(self.items, self.context.tag)

    def pending(self, wanted: Callable[[Item], bool] = lambda item: item.backend == "native") -> Iterator[Batch]:
        """Yield what is to be copied of the items that are wanted, in the manifest's order. OSError."""
        place, count, files, size_bytes = 0, 0, 0, 0
        states, base = b"", 0
        ahead = (-2, 0)
        chosen = [wanted(item) for item in self.items]
        files_max = min(SMALL_BATCH_FILES, max(SMALL_BATCH_FILES_MIN, self.header.files // SMALL_BATCHES))
        for at, record in self.manifest.located():
            if record.index >= base + len(states):
                base = record.index
                states = self.slots.states(base, POLL_RECORDS)
            if record.kind != FILE or not chosen[record.item] or states[record.index - base] not in _PENDING:
                if record.kind == DIRECTORY:
                    if files >= files_max * _OF_DIRECTORIES:
                        yield Batch(place, count)
                        files = count = size_bytes = 0
                    ahead = (record.index, at)
                if files:
                    count += 1
                    if count >= POLL_RECORDS:
                        yield Batch(place, count)
                        files = count = size_bytes = 0
                continue
            if record.is_large:
                if files:
                    yield Batch(place, count)
                    files = count = size_bytes = 0
                yield Batch(at, 1, True)
                continue
            if not files:
                # With the directory that it is the first file of: `leaves` wants to see it.
                place, count = (ahead[1], 1) if ahead[0] == record.index - 1 else (at, 0)
            files, count, size_bytes = files + 1, count + 1, size_bytes + record.size
            if files >= files_max or size_bytes >= SMALL_BATCH_BYTES:
                yield Batch(place, count)
                files = count = size_bytes = 0
        if files:
            yield Batch(place, count)

    def records(
        self, batch: Batch, wanted: Callable[[Item], bool] = lambda item: item.backend == "native"
    ) -> list[Record]:
        """Return the files of a batch that are not done. OSError."""
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

    def leaves(self, batch: Batch, chosen: Sequence[Record]) -> set[tuple[int, bytes]]:
        """Return the directories of a batch, each item and path, that this transfer made and that hold nothing but
        files `chosen` of it. OSError.
        """
        if not self._apart:
            return set()
        taken = {record.index for record in chosen}
        found: set[tuple[int, bytes]] = set()
        under_way: Record | None = None
        # What follows the batch says whether its last directory ended in it.
        records = [*self.manifest.records(batch.place, batch.length + 1)]
        states = self.slots.states(records[0].index, len(records)) if records else b""
        for number, record in enumerate(records):
            if under_way is not None and not record.lies_in(under_way):
                found.add((under_way.item, under_way.path))
                under_way = None
            if number == batch.length:
                break
            if record.kind == DIRECTORY:
                under_way = record if states[number] == State.MADE and record.path else None
            elif under_way is not None and record.index not in taken and record.kind == FILE:
                under_way = None
        else:
            if under_way is not None:
                found.add((under_way.item, under_way.path))
        return found

    def chunks(self, record: Record, size_bytes: int | None = None) -> Chunks:
        """Return the marks of a large file, which has this size by now; None: the one that was planned."""
        if size_bytes is None:
            return self.chunks(record, record.size)
        chunk_bytes = chunk_bytes_again(record.size, size_bytes, self.options)
        return Chunks(self._chunks, record.chunk_at, -(-size_bytes // chunk_bytes), chunk_bytes)

    def shown(self, record: Record) -> tuple[str, str]:
        """Return source and destination as messages name them."""
        item = self.items[record.item]
        parts = (os.fsdecode(record.path),) if record.path else ()
        return join(item.source.path, parts), join(item.destination.path, parts)

    def failed(self, record: Record, error: OSError | TransferFailed) -> Exception:
        """Return what to raise `from error`: a sentence that names both files, or that a newer attempt is here; itself
        if it is about the agent's records.
        """
        if isinstance(error, RecordsFailed):
            return error
        if isinstance(error, TransferFailed):
            # Another one: raised from itself it would have no cause but itself.
            return type(error)(str(error), record.item)
        source, destination = self.shown(record)
        staging = self.items[record.item].staging
        if isinstance(error, FileNotFoundError) and staging >= 0 and is_removed(staging):
            return Fenced(f"a newer attempt has taken over {destination}: this one may not write there any more")
        return TransferFailed(f"{source} cannot be copied to {destination}: {os_message(error)}", record.item)

    def changed(self, record: Record, tries: int) -> TransferFailed:
        """Return what is said of a source that changed every time it was read."""
        source, _ = self.shown(record)
        return TransferFailed(
            f"{source} changed while it was copied, {tries} times; stage it when nobody writes to it", record.item
        )

    def advance(self, moved: Moved) -> None:
        """Add to the counters, in the main process. TransferFailed if more was copied than may be.

        Files are durable at their destination.
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
        """Raise TransferFailed if that is more than may be copied in all: a source grew since it was planned."""
        limit_bytes = self.options.limit_bytes
        if limit_bytes and needed_bytes > limit_bytes:
            raise TransferFailed(
                "a source grew while it was copied: "
                f"the transfers need more than the {limit_bytes} bytes of the buffer; stage when nobody writes to it"
            )

    def tell(self, counters: Counters) -> None:
        """Publish the counters, in the main process."""
        self.counters = counters
        self.context.progress(counters)

    def at(self, record: Record) -> None:
        """Say which file is being moved."""
        self.context.at(self.label(record))

    def label(self, record: Record) -> bytes:
        """Return what is shown of a file that is being moved."""
        return record.path or os.fsencode(self.items[record.item].source.path)


class Shown:
    """The name of a file for a message that is hardly ever needed."""

    __slots__ = ("_record", "_side", "_transfer")

    def __init__(self, transfer: TransferState, record: Record, side: int) -> None:
        """Of its source, side 0, or of its destination, side 1."""
        self._transfer = transfer
        self._record = record
        self._side = side

    def __str__(self) -> str:
        """Return it."""
        return self._transfer.shown(self._record)[self._side]
