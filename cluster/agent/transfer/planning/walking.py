"""A walk through the sources: what there is, in an order that is the same every time, by descriptors only."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence

import msgspec

from cluster.agent.files import PathRefused, Target, join, opened, opened_parent
from cluster.agent.limits import DIRECTORY_DEPTH_MAX, DIRECTORY_ENTRIES_MAX
from cluster.agent.transfer.planning.record_paths import enter
from cluster.agent.transfer.records.errors import TransferFailed, file_message, oddity
from cluster.agent.transfer.records.extras import extra_of
from cluster.agent.transfer.records.manifest import DIRECTORY, FILE, ODD, Record
from cluster.agent.transfer.records.options import Item, Kind, Options, chunks_of


class Walk:
    """Walks the items in their order, each depth first, names in the order of their bytes."""

    def __init__(self, items: Sequence[Item], options: Options) -> None:
        """Begin."""
        self._items = items
        self._options = options
        self._index = 0
        self._chunks = 0
        self._item = 0

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
                failed = TransferFailed(str(error))
                failed.item = number
                # What the kernel said of the path, if it did, decides whether another try is of use.
                raise failed from error

    def _file(self, item: Item) -> Iterator[Record]:
        with opened_parent(_kept(item), forbidden=item.source_barred) as (directory, name):
            status = _status(directory, os.fsencode(name), join(item.source.shown, item.source.parts[:-1]))
            why = oddity(status.st_mode, item.source.path)
            if why is not None:
                raise TransferFailed(why)
            record = self._file_record(b"", status, directory, os.fsencode(name))
        yield record

    def _tree(self, item: Item) -> Iterator[Record]:
        with opened(_kept(item), forbidden=item.source_barred) as directory:
            yield self._record(DIRECTORY, b"", os.fstat(directory))
            yield from self._inside(item, directory, b"", item.source.path, 1)

    def _inside(self, item: Item, directory: int, path: bytes, shown: str, depth: int) -> Iterator[Record]:
        for name in _entries(directory, shown, depth):
            below = path + b"/" + name if path else name
            status = _status(directory, name, shown)
            if stat.S_ISREG(status.st_mode):
                yield self._file_record(below, status, directory, name)
                continue
            shown_below = join(shown, (os.fsdecode(name),))
            if stat.S_ISDIR(status.st_mode):
                inner = enter(directory, name, shown_below, item.source_barred)
                try:
                    yield self._record(DIRECTORY, below, os.fstat(inner))
                    yield from self._inside(item, inner, below, shown_below, depth + 1)
                finally:
                    os.close(inner)
                continue
            if stat.S_ISLNK(status.st_mode) and not self._options.leave_out_links:
                # It stands for contents that whoever made it may miss. What is left out stands for none.
                raise TransferFailed(oddity(status.st_mode, shown_below) or shown_below)
            yield self._record(ODD, below, status)

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
