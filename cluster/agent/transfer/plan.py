"""Planning: walk the items, write a sealed manifest with a row for each record, and reuse an earlier attempt's work.

The walk uses descriptors only and always has the same order, so the earlier manifest is compared in a single pass. A
file unchanged at the source and at the destination is done; a partly copied large file keeps its chunk marks; files
that no longer exist at the source are cleared.

`Walk` decides from an item's `links` whether a link is recreated, followed, left out or an error.
`cluster.agent.worker.staging` sets `links` from the directive and the site's TransferOutsideLinks.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from array import array
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec
import xxhash

from forebay.cluster.agent.files import (
    FileIdentity,
    PathRefused,
    Target,
    beneath,
    identity_of,
    join,
    leads_to,
    names_of,
    open_target,
    open_target_parent,
)
from forebay.cluster.agent.limits import DIRECTORY_DEPTH_MAX, DIRECTORY_ENTRIES_MAX
from forebay.cluster.agent.transfer.digests import digest_of
from forebay.cluster.agent.transfer.errors import TransferFailed, file_message, is_absence, special_file_reason
from forebay.cluster.agent.transfer.fence import is_home
from forebay.cluster.agent.transfer.manifest import (
    DIRECTORY,
    FILE,
    LINK,
    MANIFEST_DIGEST,
    ODD,
    ManifestRecord,
    ManifestWriter,
    TransferManifest,
    extra_of,
)
from forebay.cluster.agent.transfer.options import ItemKind, TransferItem, TransferOptions, chunks_of
from forebay.cluster.agent.transfer.progress import Counters
from forebay.cluster.agent.transfer.receipts import with_rows
from forebay.cluster.agent.transfer.record_paths import RecordPaths, discard, enter, is_there, remove_left
from forebay.cluster.agent.transfer.status_table import (
    EMPTY,
    ITEMS_NAMED_BYTES_MAX,
    MARK_BYTES,
    NO_FLAG,
    Flag,
    RecordsHeader,
    RecordState,
    StatusRow,
    StatusTable,
    read_header,
    reserve,
    write_header,
)
from forebay.cluster.agent.transfer.transfer_state import TransferContext, TransferPlan
from forebay.cluster.agent.transfer.workspace import RecordFiles, Workspace
from forebay.cluster.system import boot_id, closing, is_disk_full


class Walk:
    """Walk of the items in order, depth first, with names in byte order."""

    def __init__(self, items: Sequence[TransferItem], options: TransferOptions) -> None:
        """Begin."""
        self._items = items
        self._options = options
        self._index = 0
        self._chunks = 0
        self._item = 0
        self.absent: list[tuple[int, str]] = []
        """Items whose source is missing, each with the reason."""
        self._names: tuple[tuple[str, ...], ...] = ()
        """Names by which absolute links may refer to the top of the tree."""
        self._within: list[FileIdentity] = []
        """Directories that enclose the current one, if links are followed."""

    def records(self) -> Iterator[ManifestRecord]:
        """Yield the records.

        Raises:
            TransferFailed: A file cannot be copied; the message names it, with its item.
        """
        for number, item in enumerate(self._items):
            self._item = number
            try:
                yield from self._tree(item) if item.kind is ItemKind.DIRECTORY else self._file(item)
            except TransferFailed as error:
                error.item = number
                raise
            except PathRefused as error:
                # The kernel's error, if any, decides whether a retry is useful.
                raise TransferFailed(str(error), number) from error

    def _file(self, item: TransferItem) -> Iterator[ManifestRecord]:
        try:
            with open_target_parent(_reopened_source(item), forbidden=item.source_barred) as (directory, name):
                status = _status(directory, os.fsencode(name), join(item.source.shown, item.source.parts[:-1]))
                why = special_file_reason(status.st_mode, item.source.path)
                if why is not None:
                    raise TransferFailed(why)
                record = self._file_record(b"", status, directory, os.fsencode(name))
        except (PathRefused, TransferFailed) as error:
            record = self._absent(error)
        yield record

    def _tree(self, item: TransferItem) -> Iterator[ManifestRecord]:
        with contextlib.ExitStack() as held:
            try:
                directory = held.enter_context(open_target(_reopened_source(item), forbidden=item.source_barred))
            except PathRefused as error:
                yield self._absent(error)
                return
            self._names = tuple((*names, *item.source.parts) for names in names_of(item.source))
            self._names = (*self._names, *names_of(item.source._replace(anchor=directory, shown="")))
            yield self._record(DIRECTORY, b"", os.fstat(directory))
            self._within = [identity_of(directory)]
            yield from self._inside(item, directory, b"", item.source.path, 1)

    def _absent(self, error: PathRefused | TransferFailed) -> ManifestRecord:
        """Return the record of an item with a missing source; raise the error if the transfer must not continue without
        it.
        """
        if not self._options.outgoing or not is_absence(error):
            raise error
        self.absent.append((self._item, str(error)))
        self._index += 1
        return ManifestRecord(self._index - 1, self._item, ODD, b"", 0, 0, 0, 0, 0, 0, 0, 0, reason=str(error))

    def _inside(
        self, item: TransferItem, directory: int, path: bytes, shown: str, depth: int
    ) -> Iterator[ManifestRecord]:
        for name in _entries(directory, shown, depth):
            below = path + b"/" + name if path else name
            status = _status(directory, name, shown)
            if stat.S_ISREG(status.st_mode):
                yield self._file_record(below, status, directory, name)
                continue
            shown_below = join(shown, (os.fsdecode(name),))
            if stat.S_ISDIR(status.st_mode):
                if is_home(directory, name, status):
                    reason = "temporary files of a transfer under way"
                    yield msgspec.structs.replace(self._record(ODD, below, status), reason=reason)
                    continue
                with closing(enter(directory, name, shown_below, item.source_barred)) as inner:
                    yield from self._directory(item, inner, below, shown_below, depth)
            elif stat.S_ISLNK(status.st_mode):
                yield from self._link(item, directory, name, below, shown_below, status, depth)
            else:
                yield self._record(ODD, below, status)

    def _directory(
        self, item: TransferItem, inner: int, path: bytes, shown: str, depth: int, target: bytes = b""
    ) -> Iterator[ManifestRecord]:
        if item.links == "follow":
            self._within.append(identity_of(inner))
        yield msgspec.structs.replace(self._record(DIRECTORY, path, os.fstat(inner)), target=target)
        yield from self._inside(item, inner, path, shown, depth + 1)
        if item.links == "follow":
            self._within.pop()

    def _link(
        self,
        item: TransferItem,
        directory: int,
        name: bytes,
        path: bytes,
        shown: str,
        status: os.stat_result,
        depth: int,
    ) -> Iterator[ManifestRecord]:
        """Yield the result for a link: the link itself, its target, or a record that it was left out."""
        try:
            target = os.readlink(name, dir_fd=directory)
        except OSError as error:
            raise TransferFailed(file_message(shown, error)) from error
        told = f"{shown} is a symbolic link to {os.fsdecode(target)!r}"
        if item.links in ("keep", "keep_all", "asis"):
            kept = None if item.links == "asis" else stays_inside(path, target, self._names)
            if kept is not None or item.links != "keep":
                dangles = self._dangles(item, directory, name, target, stays=kept is not None)
                yield msgspec.structs.replace(
                    self._record(LINK, path, status), target=target if kept is None else kept, reason=dangles
                )
                return
            reason = "outside the staged tree"
        elif item.links == "follow":
            reason = "which has no target in the permitted directories"
            whole = (*item.source.parts, *(os.fsdecode(part) for part in path.split(b"/")))
            found = leads_to(item.source._replace(parts=whole))
            if found is not None and found.parts:
                yield from self._follow_link(item, found, path, shown, status, target, depth)
                return
        elif item.links == "fail" and not self._options.partial:
            raise TransferFailed(f"{told}, which links=fail forbids; remove it or use links=skip")
        else:
            reason = ""
        if reason and not self._options.outgoing:
            raise TransferFailed(
                f"{told}, {reason}; stage its target by a separate directive, or use links=skip, "
                "which leaves it out"
                + (", or links=follow, or links=asis where the site allows it" if item.links == "keep" else "")
            )
        yield msgspec.structs.replace(self._record(ODD, path, status), target=target, reason=reason)

    def _dangles(self, item: TransferItem, directory: int, name: bytes, target: bytes, *, stays: bool) -> str:
        """Return why a link would be dangling at its destination; "" if it is not, or that is unknown."""
        try:
            # Uses the user's rights, reads nothing, and reveals only whether the target exists.
            os.stat(name, dir_fd=directory)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                return "its target does not exist"
        leaves_buffer = self._options.outgoing and not stays and target.startswith(b"/")
        if leaves_buffer and beneath(os.fsdecode(target), names_of(item.source)) is not None:
            return "its target is in the buffer, which is removed"
        return ""

    def _follow_link(
        self,
        item: TransferItem,
        found: Target,
        path: bytes,
        shown: str,
        link: os.stat_result,
        target: bytes,
        depth: int,
    ) -> Iterator[ManifestRecord]:
        """Yield the target of a link under the link's own name."""
        replace = msgspec.structs.replace
        mine = found._replace(anchor=os.dup(found.anchor))
        with open_target_parent(mine, forbidden=item.source_barred) as (directory, last):
            name = os.fsencode(last)
            status = _status(directory, name, join(found.shown, found.parts[:-1]))
            if stat.S_ISREG(status.st_mode):
                yield replace(self._file_record(path, status, directory, name), target=target)
                return
            if not stat.S_ISDIR(status.st_mode):
                yield self._record(ODD, path, status)
                return
            with closing(enter(directory, name, shown, item.source_barred)) as inner:
                if identity_of(inner) in self._within:
                    yield replace(self._record(ODD, path, link), target=target, reason="which contains the link itself")
                else:
                    yield from self._directory(item, inner, path, shown, depth, target)

    def _file_record(self, path: bytes, status: os.stat_result, directory: int, name: bytes) -> ManifestRecord:
        record = self._record(FILE, path, status)
        if not record.is_large:
            return record
        sparse = self._options.sparse and record.is_sparse
        extra = extra_of(directory, name, status, xattrs=self._options.xattrs, sparse=sparse)
        return record if extra is None else msgspec.structs.replace(record, extra=extra)

    def _record(self, kind: int, path: bytes, status: os.stat_result) -> ManifestRecord:
        chunks = chunks_of(status.st_size, self._options) if kind == FILE else 0
        record = ManifestRecord(
            self._index,
            self._item,
            kind,
            path,
            status.st_size if kind == FILE else 0,
            status.st_mtime_ns,
            status.st_ctime_ns,
            status.st_mode,
            status.st_ino,
            status.st_dev,
            status.st_blocks * 512,
            status.st_nlink,
            self._chunks if chunks else -1,
        )
        self._index += 1
        self._chunks += chunks
        return record


def stays_inside(path: bytes, target: bytes, names: Sequence[Sequence[str]]) -> bytes | None:
    """Return the text of the link at `path` for the tree's destination, or None if it leads out of the tree.

    `names` are those by which an absolute link may refer to the tree; such links become relative, because the tree has
    another name at its destination. The decision is textual: a link along the way may lead elsewhere, which is left to
    programs that follow it there.
    """
    depth = path.count(b"/")
    if not target.startswith(b"/"):
        level = depth
        for part in target.split(b"/"):
            level += 0 if part in (b"", b".") else -1 if part == b".." else 1
            if level < 0:
                return None
        return target
    parts = beneath(os.fsdecode(target), names)
    if parts is None or ".." in parts:
        return None
    return b"/".join([*[b".."] * depth, *map(os.fsencode, parts)]) or b"."


def order_of(record: ManifestRecord) -> tuple[int, tuple[bytes, ...]]:
    """Return the sort key of the walk's order, by which two manifests can be compared in one pass."""
    return record.item, tuple(record.path.split(b"/")) if record.path else ()


def _reopened_source(item: TransferItem) -> Target:
    # `open_target` closes the anchor.
    return item.source._replace(anchor=os.dup(item.source.anchor))


def _status(directory: int, name: bytes, directory_shown: str) -> os.stat_result:
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False)
    except OSError as error:
        raise TransferFailed(file_message(join(directory_shown, (os.fsdecode(name),)), error)) from error


def _entries(directory: int, shown: str, depth: int) -> list[bytes]:
    if depth > DIRECTORY_DEPTH_MAX:
        raise TransferFailed(
            f"{shown} is nested more than {DIRECTORY_DEPTH_MAX} directories deep; stage a part of the tree"
        )
    names: list[bytes] = []
    try:
        # Rewind as names_in does.
        os.lseek(directory, 0, os.SEEK_SET)
        with os.scandir(directory) as found:
            for entry in found:
                names.append(os.fsencode(entry.name))
                if len(names) > DIRECTORY_ENTRIES_MAX:
                    raise TransferFailed(
                        f"{shown} has more than {DIRECTORY_ENTRIES_MAX} entries; pack them into an archive"
                    )
    except OSError as error:
        raise TransferFailed(file_message(shown, error)) from error
    names.sort()
    return names


ROWS_AT_ONCE: Final = 4096
"""Rows written at a time."""

STEP_RECORDS: Final = 512
"""Records between two progress updates."""

PLANNING: Final = 1
"""Phase in the counters (cluster.agent.transfer.progress.PHASES)."""


class _OwnDiskFull(Exception):
    """The agent's disk is too full for the records."""


def find_generations(
    items: Sequence[TransferItem], options: TransferOptions, workspace: Workspace
) -> tuple[int, RecordsHeader] | None:
    """Return the newest complete generation of records of the same transfer, or None.

    Raises:
        OSError: The records cannot be read.
    """
    found: list[tuple[int, RecordsHeader]] = []
    for number, files in enumerate(workspace.generations):
        header = read_header(files.control)
        if (
            header is not None
            and header.items_digest == _digest_of(items)
            and header.shape == _shape(options)
            and os.fstat(files.manifest).st_size == header.manifest_bytes
            and digest_of(files.manifest, MANIFEST_DIGEST, 0, header.manifest_bytes) == header.manifest_digest
        ):
            found.append((number, header))
    return max(found, key=lambda pair: pair[1].sequence, default=None)


def plan(items: Sequence[TransferItem], options: TransferOptions, context: TransferContext) -> TransferPlan:
    """Walk the sources and return the work to do.

    Raises:
        TransferFailed: A file cannot be copied; the message names it.
        OSError: The agent's own records cannot be written.
    """
    workspace = context.workspace
    known = find_generations(items, options, workspace)
    if known is not None and known[1].complete and any(item.move for item in items):
        # Sources may have been removed already, so there is nothing to walk.
        return _as_it_was(workspace.generations[known[0]], known[1], len(items))
    sequence = 1 + max(
        (header.sequence for files in workspace.generations if (header := read_header(files.control))), default=0
    )
    old = None if known is None else workspace.generations[known[0]]
    new = workspace.generations[0 if known is None else 1 - known[0]]
    try:
        planned = _Planning(items, options, context, old, known and known[1], new, sequence).run()
    except _OwnDiskFull:
        # Equally safe, but the next attempt cannot resume.
        memory = Workspace.in_memory_only()
        planned = _Planning(items, options, context, old, known and known[1], memory.generations[0], sequence).run()
        return planned._replace(is_recorded=False)
    for files in workspace.generations:
        if files is not new:
            _empty(files)
    return planned


def _as_it_was(files: RecordFiles, header: RecordsHeader, items: int) -> TransferPlan:
    amounts = [(0, 0)] * items
    for record in TransferManifest(files.manifest, header.manifest_bytes).records():
        if record.kind == FILE:
            count, size_bytes = amounts[record.item]
            amounts[record.item] = count + 1, size_bytes + record.size
    same_boot = header.boot == boot_id()
    return TransferPlan(files, header, tuple(amounts), header.files, header.size_bytes, same_boot, ())


class _Planning:
    def __init__(
        self,
        items: Sequence[TransferItem],
        options: TransferOptions,
        context: TransferContext,
        old: RecordFiles | None,
        old_header: RecordsHeader | None,
        new: RecordFiles,
        sequence: int,
    ) -> None:
        self._items = items
        self._options = options
        self._context = context
        self._old_chunks = -1 if old is None else old.chunks
        self._boot = boot_id()
        self._old_header = old_header
        self._same_boot = old_header is not None and old_header.boot == self._boot
        self._new = new
        self._sequence = sequence
        self._paths = RecordPaths(items, context.tag)
        self._table = StatusTable(new.control)
        self._block: list[StatusRow] = []
        self._written = 0
        self._amounts = [(0, 0)] * len(items)
        self._resumed_files = self._resumed_bytes = 0
        self._gone: list[ManifestRecord] = []
        self._directories = array("Q")
        self._links = array("Q")
        self._begins = array("Q")
        self._earlier: Iterator[tuple[ManifestRecord, StatusRow]] = iter(())
        if old is not None and old_header is not None:
            self._earlier = with_rows(
                TransferManifest(old.manifest, old_header.manifest_bytes), StatusTable(old.control)
            )
        self._next = next(self._earlier, None)

    def run(self) -> TransferPlan:
        with _own_disk():
            _empty(self._new)
        writer = ManifestWriter(self._new.manifest)
        try:
            walk = Walk(self._items, self._options)
            for record in walk.records():
                chunks = chunks_of(record.size, self._options) if record.is_large else 0
                with _own_disk():
                    place = writer.add(record, chunks)
                if not record.path:
                    self._begins.append(place)
                if record.kind == DIRECTORY:
                    self._directories.append(place)
                elif record.kind == LINK:
                    self._links.append(place)
                row = self._row_of(record, chunks)
                self._block.append(row)
                if len(self._block) >= ROWS_AT_ONCE:
                    self._flush()
                if record.kind == FILE:
                    files, size_bytes = self._amounts[record.item]
                    self._amounts[record.item] = files + 1, size_bytes + record.size
                if record.index % STEP_RECORDS == 0:
                    self._context.pace.check()
                    self._context.progress(Counters(steps=record.index + 1, phase=PLANNING))
            self._clear_until(None)
            return self._seal(writer)._replace(links=self._links, begins=self._begins, absent=tuple(walk.absent))
        finally:
            self._paths.close()

    def _seal(self, writer: ManifestWriter) -> TransferPlan:
        self._flush()
        with _own_disk():
            totals = writer.seal()
            reserve(self._new.control, totals.records, self._new.chunks, totals.chunks)
            if self._old_header is not None:
                # Before the transfer starts, lost rows equal the previous ones, so only resumed ones need a sync.
                self._table.sync()
            header = RecordsHeader(
                sequence=self._sequence,
                items=_named_items(self._items),
                items_digest=_digest_of(self._items),
                boot=self._boot,
                shape=_shape(self._options),
                **totals._asdict(),
            )
            write_header(self._new.control, header)
        return TransferPlan(
            self._new,
            header,
            tuple(self._amounts),
            self._resumed_files,
            self._resumed_bytes,
            self._same_boot,
            self._directories,
        )

    def _flush(self) -> None:
        with _own_disk():
            self._table.put_many(self._written, self._block)
        self._written += len(self._block)
        self._block = []

    # Earlier attempt.

    def _row_of(self, record: ManifestRecord, chunks: int) -> StatusRow:
        if record.kind == ODD:
            return EMPTY._replace(state=RecordState.LEFT_OUT)
        self._clear_until(record)
        if self._next is None or order_of(self._next[0]) != order_of(record):
            return EMPTY
        before, row = self._next
        self._next = next(self._earlier, None)
        if record.kind == DIRECTORY and before.kind == DIRECTORY:
            return row if row.state is RecordState.MADE else EMPTY
        if record.kind == LINK:
            made = (
                before.kind == LINK
                and row.state in (RecordState.READY, RecordState.DONE)
                and before.target == record.target
            )
            return row._replace(state=RecordState.DONE) if made and is_there(self._paths, record, row.copied) else EMPTY
        if before.kind != FILE or not before.is_as(record):
            # Its temporary file has the same name in this attempt and is replaced.
            return EMPTY
        if (row.copied.size, row.copied.mtime_ns) != (record.size, record.mtime_ns):
            # The earlier copy was made from content that has changed since.
            return EMPTY
        if row.state in (RecordState.READY, RecordState.DONE) and is_there(self._paths, record, row.copied):
            if row.state is RecordState.READY:
                self._settle(record)
            self._resumed_files += 1
            self._resumed_bytes += row.copied.size
            return StatusRow(RecordState.DONE, row.tries, row.copied._replace(flags=row.copied.flags | Flag.RESUMED))
        if row.state in (RecordState.STARTED, RecordState.READY) and chunks:
            marks = os.pread(self._old_chunks, chunks * MARK_BYTES, before.chunk_at * MARK_BYTES)
            with _own_disk():
                os.pwrite(self._new.chunks, marks, record.chunk_at * MARK_BYTES)
            return StatusRow(RecordState.STARTED, row.tries, row.copied._replace(digest=b"", flags=NO_FLAG))
        return EMPTY

    def _settle(self, record: ManifestRecord) -> None:
        """The file was renamed just before the interruption: make its name durable."""
        staging, part = self._paths.part(record)
        discard(staging, part)
        os.fsync(self._paths.destination(record)[0])

    def _clear_until(self, record: ManifestRecord | None) -> None:
        """Clear records of the earlier manifest that precede this one and no longer exist."""
        limit = None if record is None else order_of(record)
        while self._next is not None and (limit is None or order_of(self._next[0]) < limit):
            before, row = self._next
            self._next = next(self._earlier, None)
            self._remove_gone_directories(before)
            with contextlib.suppress(OSError, TransferFailed):
                if before.kind in (FILE, LINK):
                    self._clear_file(before, row)
                elif before.kind == DIRECTORY and row.state is RecordState.MADE and self._options.owned:
                    self._gone.append(before)
        self._remove_gone_directories(record)

    def _clear_file(self, before: ManifestRecord, row: StatusRow) -> None:
        if row.state is not RecordState.DONE:
            discard(*self._paths.part(before))
        elif self._options.owned and is_there(self._paths, before, row.copied):
            directory, name = self._paths.destination(before)
            os.unlink(name, dir_fd=directory)

    def _remove_gone_directories(self, record: ManifestRecord | None) -> None:
        """Remove directories that no longer exist at the source and do not contain the record."""
        remove_left(self._gone, record, self._paths.destination)


@contextlib.contextmanager
def _own_disk() -> Iterator[None]:
    """Distinguish a full agent disk from a full destination."""
    try:
        yield
    except OSError as error:
        if not is_disk_full(error):
            raise
        raise _OwnDiskFull from error


def _empty(files: RecordFiles) -> None:
    # Truncate the header first: partly cleared records must not look complete.
    for descriptor in files:
        os.ftruncate(descriptor, 0)


def _shape(options: TransferOptions) -> tuple[int, int, str, int]:
    return options.chunk_bytes, options.large_bytes, options.algorithm, int(options.verify)


def _item_descriptions(items: Sequence[TransferItem]) -> Iterator[tuple[str, bytes, bytes]]:
    for item in items:
        yield item.kind.value, os.fsencode(item.source.path), os.fsencode(item.destination.path)


def _named_items(items: Sequence[TransferItem]) -> tuple[tuple[str, bytes, bytes], ...]:
    named: list[tuple[str, bytes, bytes]] = []
    size_bytes = 0
    for described in _item_descriptions(items):
        size_bytes += 32 + len(described[1]) + len(described[2])
        if size_bytes > ITEMS_NAMED_BYTES_MAX:
            return ()
        named.append(described)
    return tuple(named)


def _digest_of(items: Sequence[TransferItem]) -> bytes:
    taken = xxhash.xxh3_128()
    for item, words in zip(items, _item_descriptions(items), strict=True):
        flags = bytes((item.move, item.acls))
        how = item.backend.encode(), item.links.encode(), flags
        for word in (words[0].encode(), words[1], words[2], *how):
            taken.update(b"%d:" % len(word) + word)
    return taken.digest()
