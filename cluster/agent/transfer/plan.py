"""From items to a sealed manifest with a row for each record, taking over what an earlier attempt had done.

The walk goes through the sources by descriptors only, in the same order every time, so the earlier attempt's manifest
is compared with it in one go. What did not change at the source, and is at the destination as that attempt left it, is
done; the chunks of a large file that was under way keep their marks; what is no longer there is cleared away."""

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

from cluster.agent.files import (
    Identity,
    PathRefused,
    Target,
    beneath,
    identity_of,
    join,
    leads_to,
    names_of,
    opened,
    opened_parent,
)
from cluster.agent.limits import DIRECTORY_DEPTH_MAX, DIRECTORY_ENTRIES_MAX
from cluster.agent.transfer.digests import digest_of
from cluster.agent.transfer.errors import TransferFailed, file_message, is_absence, oddity
from cluster.agent.transfer.fence import is_home
from cluster.agent.transfer.manifest import (
    DIRECTORY,
    FILE,
    LINK,
    MANIFEST_DIGEST,
    ODD,
    Manifest,
    ManifestWriter,
    Record,
    extra_of,
)
from cluster.agent.transfer.options import Item, Kind, Options, chunks_of
from cluster.agent.transfer.progress import Counters
from cluster.agent.transfer.receipts import with_rows
from cluster.agent.transfer.record_paths import RecordPaths, discard, enter, is_there, remove_left
from cluster.agent.transfer.status_table import (
    EMPTY,
    ITEMS_NAMED_BYTES_MAX,
    MARK_BYTES,
    NO_FLAG,
    Flag,
    Header,
    State,
    StatusRow,
    StatusTable,
    read_header,
    reserve,
    write_header,
)
from cluster.agent.transfer.transfer_state import Context, Planned
from cluster.agent.transfer.workspace import Files, Workspace
from cluster.system import boot_id, closing, is_disk_full


class Walk:
    """Walks the items in their order, each depth first, names in the order of their bytes."""

    def __init__(self, items: Sequence[Item], options: Options) -> None:
        """Begin."""
        self._items = items
        self._options = options
        self._index = 0
        self._chunks = 0
        self._item = 0
        self.absent: list[tuple[int, str]] = []
        """Items whose source cannot be found, each with the reason."""
        self._names: tuple[tuple[str, ...], ...] = ()
        """What absolute links may call the top of the tree that is walked."""
        self._within: list[Identity] = []
        """The directories that the walk is in, where it follows links."""

    def records(self) -> Iterator[Record]:
        """Yield what there is. TransferFailed names what cannot be copied, with its item."""
        for number, item in enumerate(self._items):
            self._item = number
            try:
                yield from self._tree(item) if item.kind is Kind.DIRECTORY else self._file(item)
            except TransferFailed as error:
                error.item = number
                raise
            except PathRefused as error:
                # What the kernel said of the path, if it did, decides whether another try is of use.
                raise TransferFailed(str(error), number) from error

    def _file(self, item: Item) -> Iterator[Record]:
        try:
            with opened_parent(_kept(item), forbidden=item.source_barred) as (directory, name):
                status = _status(directory, os.fsencode(name), join(item.source.shown, item.source.parts[:-1]))
                why = oddity(status.st_mode, item.source.path)
                if why is not None:
                    raise TransferFailed(why)
                record = self._file_record(b"", status, directory, os.fsencode(name))
        except (PathRefused, TransferFailed) as error:
            record = self._absent(error)
        yield record

    def _tree(self, item: Item) -> Iterator[Record]:
        with contextlib.ExitStack() as held:
            try:
                directory = held.enter_context(opened(_kept(item), forbidden=item.source_barred))
            except PathRefused as error:
                yield self._absent(error)
                return
            self._names = tuple((*names, *item.source.parts) for names in names_of(item.source))
            self._names = (*self._names, *names_of(item.source._replace(anchor=directory, shown="")))
            yield self._record(DIRECTORY, b"", os.fstat(directory))
            self._within = [identity_of(directory)]
            yield from self._inside(item, directory, b"", item.source.path, 1)

    def _absent(self, error: PathRefused | TransferFailed) -> Record:
        """Return the record of an item whose source is not there. The error itself where that is to be waited for."""
        if not self._options.outgoing or not is_absence(error):
            raise error
        self.absent.append((self._item, str(error)))
        self._index += 1
        return Record(self._index - 1, self._item, ODD, b"", 0, 0, 0, 0, 0, 0, 0, 0, reason=str(error))

    def _inside(self, item: Item, directory: int, path: bytes, shown: str, depth: int) -> Iterator[Record]:
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
        self, item: Item, inner: int, path: bytes, shown: str, depth: int, target: bytes = b""
    ) -> Iterator[Record]:
        if item.links == "follow":
            self._within.append(identity_of(inner))
        yield msgspec.structs.replace(self._record(DIRECTORY, path, os.fstat(inner)), target=target)
        yield from self._inside(item, inner, path, shown, depth + 1)
        if item.links == "follow":
            self._within.pop()

    def _link(
        self, item: Item, directory: int, name: bytes, path: bytes, shown: str, status: os.stat_result, depth: int
    ) -> Iterator[Record]:
        """Yield what becomes of a link: itself, what it leads to, or a line that says that it was left out."""
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
            reason = "outside of what is staged"
        elif item.links == "follow":
            reason = "which leads to nothing beneath the directories that may be used"
            whole = (*item.source.parts, *(os.fsdecode(part) for part in path.split(b"/")))
            found = leads_to(item.source._replace(parts=whole))
            if found is not None and found.parts:
                yield from self._followed(item, found, path, shown, status, target, depth)
                return
        elif item.links == "fail" and not self._options.partial:
            raise TransferFailed(f"{told}, and links=fail says that there is to be none; remove it, or say links=skip")
        else:
            reason = ""
        if reason and not self._options.outgoing:
            raise TransferFailed(
                f"{told}, {reason}; stage what it leads to by a directive of its own, or say links=skip, "
                "which leaves it out"
                + (", or links=follow, or links=asis where the site allows it" if item.links == "keep" else "")
            )
        yield msgspec.structs.replace(self._record(ODD, path, status), target=target, reason=reason)

    def _dangles(self, item: Item, directory: int, name: bytes, target: bytes, *, stays: bool) -> str:
        """Return why a link leads to nothing at its destination; empty if it leads somewhere, or nothing is known."""
        try:
            # With the rights of the user: nothing is read, and only whether it is there is said.
            os.stat(name, dir_fd=directory)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                return "it leads to nothing"
        leaves_buffer = self._options.outgoing and not stays and target.startswith(b"/")
        if leaves_buffer and beneath(os.fsdecode(target), names_of(item.source)) is not None:
            return "it leads into the buffer, which is removed"
        return ""

    def _followed(
        self, item: Item, found: Target, path: bytes, shown: str, link: os.stat_result, target: bytes, depth: int
    ) -> Iterator[Record]:
        """Yield what a link leads to, under the link's own name."""
        replace = msgspec.structs.replace
        mine = found._replace(anchor=os.dup(found.anchor))
        with opened_parent(mine, forbidden=item.source_barred) as (directory, last):
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
                    yield replace(self._record(ODD, path, link), target=target, reason="which it lies in itself")
                else:
                    yield from self._directory(item, inner, path, shown, depth, target)

    def _file_record(self, path: bytes, status: os.stat_result, directory: int, name: bytes) -> Record:
        record = self._record(FILE, path, status)
        if not record.is_large:
            return record
        sparse = self._options.sparse and record.is_sparse
        extra = extra_of(directory, name, status, xattrs=self._options.xattrs, sparse=sparse)
        return record if extra is None else msgspec.structs.replace(record, extra=extra)

    def _record(self, kind: int, path: bytes, status: os.stat_result) -> Record:
        chunks = chunks_of(status.st_size, self._options) if kind == FILE else 0
        record = Record(
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
    """Return what the link at `path` in a tree is to say at the tree's destination; None if it leads out of the tree.

    `names` are those that an absolute link may call the tree by: one that leads into it is made relative, since the
    tree has another name at its destination. Decided by what is written: a link on the way may lead elsewhere, which
    is the affair of whoever follows it there.
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


def order_of(record: Record) -> tuple[int, tuple[bytes, ...]]:
    """Return what the walk's order is by: two manifests of the same items can be compared in one go."""
    return record.item, tuple(record.path.split(b"/")) if record.path else ()


def _kept(item: Item) -> Target:
    # `opened` takes the anchor and closes it.
    return item.source._replace(anchor=os.dup(item.source.anchor))


def _status(directory: int, name: bytes, directory_shown: str) -> os.stat_result:
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False)
    except OSError as error:
        raise TransferFailed(file_message(join(directory_shown, (os.fsdecode(name),)), error)) from error


def _entries(directory: int, shown: str, depth: int) -> list[bytes]:
    if depth > DIRECTORY_DEPTH_MAX:
        raise TransferFailed(f"{shown} lies more than {DIRECTORY_DEPTH_MAX} directories deep; stage a part of the tree")
    names: list[bytes] = []
    try:
        # As names_in does.
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
"""Slots written at once."""

STEP_RECORDS: Final = 512
"""Records between two signs of life."""

PLANNING: Final = 1
"""The phase in the counters (cluster.agent.transfer.progress.PHASES)."""


class _OwnDiskFull(Exception):
    """The agent's disk does not take the records."""


def earlier(items: Sequence[Item], options: Options, workspace: Workspace) -> tuple[int, Header] | None:
    """Return the generation that an earlier attempt at the same transfer left whole, None if there is none. OSError."""
    found: list[tuple[int, Header]] = []
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


def plan(items: Sequence[Item], options: Options, context: Context) -> Planned:
    """Walk the sources, and return what is to be done. TransferFailed names what cannot be copied; OSError."""
    workspace = context.workspace
    known = earlier(items, options, workspace)
    if known is not None and known[1].complete and any(item.move for item in items):
        # Sources may be removed already: there is nothing to walk.
        return _as_it_was(workspace.generations[known[0]], known[1], len(items))
    sequence = 1 + max(
        (header.sequence for files in workspace.generations if (header := read_header(files.control))), default=0
    )
    old = None if known is None else workspace.generations[known[0]]
    new = workspace.generations[0 if known is None else 1 - known[0]]
    try:
        planned = _Planning(items, options, context, old, known and known[1], new, sequence).run()
    except _OwnDiskFull:
        # As safe, but what this attempt does is not known to the next one.
        memory = Workspace.in_memory_only()
        planned = _Planning(items, options, context, old, known and known[1], memory.generations[0], sequence).run()
        return planned._replace(is_recorded=False)
    for files in workspace.generations:
        if files is not new:
            _empty(files)
    return planned


def _as_it_was(files: Files, header: Header, items: int) -> Planned:
    amounts = [(0, 0)] * items
    for record in Manifest(files.manifest, header.manifest_bytes).records():
        if record.kind == FILE:
            count, size_bytes = amounts[record.item]
            amounts[record.item] = count + 1, size_bytes + record.size
    same_boot = header.boot == boot_id()
    return Planned(files, header, tuple(amounts), header.files, header.size_bytes, same_boot, ())


class _Planning:
    def __init__(
        self,
        items: Sequence[Item],
        options: Options,
        context: Context,
        old: Files | None,
        old_header: Header | None,
        new: Files,
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
        self._gone: list[Record] = []
        self._directories = array("Q")
        self._links = array("Q")
        self._begins = array("Q")
        self._earlier: Iterator[tuple[Record, StatusRow]] = iter(())
        if old is not None and old_header is not None:
            self._earlier = with_rows(Manifest(old.manifest, old_header.manifest_bytes), StatusTable(old.control))
        self._next = next(self._earlier, None)

    def run(self) -> Planned:
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
            return self._sealed(writer)._replace(links=self._links, begins=self._begins, absent=tuple(walk.absent))
        finally:
            self._paths.close()

    def _sealed(self, writer: ManifestWriter) -> Planned:
        self._flush()
        with _own_disk():
            totals = writer.seal()
            reserve(self._new.control, totals.records, self._new.chunks, totals.chunks)
            if self._old_header is not None:
                # Of a transfer that nobody has begun, rows that are lost say what they said.
                self._table.sync()
            header = Header(
                sequence=self._sequence,
                items=_named(self._items),
                items_digest=_digest_of(self._items),
                boot=self._boot,
                shape=_shape(self._options),
                **totals._asdict(),
            )
            write_header(self._new.control, header)
        return Planned(
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

    # What an earlier attempt did

    def _row_of(self, record: Record, chunks: int) -> StatusRow:
        if record.kind == ODD:
            return EMPTY._replace(state=State.LEFT_OUT)
        self._clear_until(record)
        if self._next is None or order_of(self._next[0]) != order_of(record):
            return EMPTY
        before, row = self._next
        self._next = next(self._earlier, None)
        if record.kind == DIRECTORY and before.kind == DIRECTORY:
            return row if row.state is State.MADE else EMPTY
        if record.kind == LINK:
            made = before.kind == LINK and row.state in (State.READY, State.DONE) and before.target == record.target
            return row._replace(state=State.DONE) if made and is_there(self._paths, record, row.copied) else EMPTY
        if before.kind != FILE or not before.is_as(record):
            # Its temporary file has the same name in this attempt, and is replaced.
            return EMPTY
        if (row.copied.size, row.copied.mtime_ns) != (record.size, record.mtime_ns):
            # What was copied, or half copied, is what the source had become by then, and is not any more.
            return EMPTY
        if row.state in (State.READY, State.DONE) and is_there(self._paths, record, row.copied):
            if row.state is State.READY:
                self._settle(record)
            self._resumed_files += 1
            self._resumed_bytes += row.copied.size
            return StatusRow(State.DONE, row.tries, row.copied._replace(flags=row.copied.flags | Flag.RESUMED))
        if row.state in (State.STARTED, State.READY) and chunks:
            marks = os.pread(self._old_chunks, chunks * MARK_BYTES, before.chunk_at * MARK_BYTES)
            with _own_disk():
                os.pwrite(self._new.chunks, marks, record.chunk_at * MARK_BYTES)
            return StatusRow(State.STARTED, row.tries, row.copied._replace(digest=b"", flags=NO_FLAG))
        return EMPTY

    def _settle(self, record: Record) -> None:
        """The file got its name in the last moment: see that it keeps it."""
        staging, part = self._paths.part(record)
        discard(staging, part)
        os.fsync(self._paths.destination(record)[0])

    def _clear_until(self, record: Record | None) -> None:
        """Clear away what comes before the record in the earlier manifest, and is no longer in this one."""
        limit = None if record is None else order_of(record)
        while self._next is not None and (limit is None or order_of(self._next[0]) < limit):
            before, row = self._next
            self._next = next(self._earlier, None)
            self._remove_gone_directories(before)
            with contextlib.suppress(OSError, TransferFailed):
                if before.kind in (FILE, LINK):
                    self._clear_file(before, row)
                elif before.kind == DIRECTORY and row.state is State.MADE and self._options.owned:
                    self._gone.append(before)
        self._remove_gone_directories(record)

    def _clear_file(self, before: Record, row: StatusRow) -> None:
        if row.state is not State.DONE:
            discard(*self._paths.part(before))
        elif self._options.owned and is_there(self._paths, before, row.copied):
            directory, name = self._paths.destination(before)
            os.unlink(name, dir_fd=directory)

    def _remove_gone_directories(self, record: Record | None) -> None:
        """Remove the directories that are gone from the source and that the record does not lie in any more."""
        remove_left(self._gone, record, self._paths.destination)


@contextlib.contextmanager
def _own_disk() -> Iterator[None]:
    """Tell a full disk of the agent's from one at the destination."""
    try:
        yield
    except OSError as error:
        if not is_disk_full(error):
            raise
        raise _OwnDiskFull from error


def _empty(files: Files) -> None:
    # The header first: what is half gone must not look whole.
    for descriptor in files:
        os.ftruncate(descriptor, 0)


def _shape(options: Options) -> tuple[int, int, str, int]:
    return options.chunk_bytes, options.large_bytes, options.algorithm, int(options.verify)


def _described(items: Sequence[Item]) -> Iterator[tuple[str, bytes, bytes]]:
    for item in items:
        yield item.kind.value, os.fsencode(item.source.path), os.fsencode(item.destination.path)


def _named(items: Sequence[Item]) -> tuple[tuple[str, bytes, bytes], ...]:
    named: list[tuple[str, bytes, bytes]] = []
    size_bytes = 0
    for described in _described(items):
        size_bytes += 32 + len(described[1]) + len(described[2])
        if size_bytes > ITEMS_NAMED_BYTES_MAX:
            return ()
        named.append(described)
    return tuple(named)


def _digest_of(items: Sequence[Item]) -> bytes:
    taken = xxhash.xxh3_128()
    for item, words in zip(items, _described(items), strict=True):
        flags = bytes((item.move, item.acls))
        how = item.backend.encode(), item.links.encode(), flags
        for word in (words[0].encode(), words[1], words[2], *how):
            taken.update(b"%d:" % len(word) + word)
    return taken.digest()
