"""Paths of records: find the directories below an item's anchor and keep them open.

Items may share destination directories, so different files may have the same path. Destinations are compared by their
real paths: `$DW_JOB_STRIPED/a`, `${DW_JOB_STRIPED}/a` and `$FOREBAY_JOB_DIR/striped/a` are equal. Memory grows with the
items, not with the files: records of an item are sorted by path, so the items are merged as sorted streams.
"""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import itertools
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple, TypeVar

from forebay.cluster.agent.files import (
    FileIdentity,
    PathRefused,
    Target,
    identity_of,
    join,
    kind_of,
    leads_to,
    open_target,
    open_target_parent,
)
from forebay.cluster.agent.transfer.errors import TransferFailed, file_message, os_message
from forebay.cluster.agent.transfer.fence import BatchDirectory
from forebay.cluster.agent.transfer.manifest import DIRECTORY, FILE, LINK, ODD, ManifestRecord, TransferManifest
from forebay.cluster.agent.transfer.options import ItemKind, TransferItem
from forebay.cluster.agent.transfer.status_table import CopiedFile
from forebay.cluster.system import open_directory

_T = TypeVar("_T")

PART_SUFFIX: Final = b".part"


class _Side:
    """Sources or destinations of all items, with one chain of open directories at a time."""

    def __init__(self, items: Sequence[TransferItem], *, destination: bool) -> None:
        self._items = items
        self._is_destination = destination
        self._item = -1
        self._top = -1
        self._name = b""
        self._chain: list[tuple[bytes, int]] = []
        self._parent: bytes | None = None
        self._followed = -1

    def find(self, record: ManifestRecord) -> tuple[int, bytes]:
        """Return an open directory and the record's name in it."""
        self._change(record.item)
        if self._items[record.item].kind is ItemKind.FILE:
            return self._top, self._name
        if record.target and record.kind == FILE and not self._is_destination:
            return self._follow(record.path)
        parent, _, name = record.path.rpartition(b"/")
        return self._enter(parent), name

    def _follow(self, path: bytes) -> tuple[int, bytes]:
        """Return the open parent directory of a link's target, and the target's name."""
        with open_target_parent(self._led_to(path), forbidden=self._target(self._item)[1]) as (directory, name):
            self._forget_followed()
            self._followed = os.dup(directory)
            return self._followed, os.fsencode(name)

    def _led_to(self, path: bytes) -> Target:
        """Resolve the links of a path below the item, with an anchor of its own.

        Raises:
            TransferFailed: The path leads elsewhere than before.
        """
        target = self._target(self._item)[0]
        whole = target._replace(parts=(*target.parts, *(os.fsdecode(part) for part in path.split(b"/"))))
        found = leads_to(whole)
        if found is None:
            raise TransferFailed(
                f"{whole.path} leads to another file than before; stage it while it is not being changed"
            )
        return found._replace(anchor=os.dup(found.anchor))

    def _forget_followed(self) -> None:
        if self._followed >= 0:
            os.close(self._followed)
            self._followed = -1

    def directory(self, record: ManifestRecord) -> int:
        """Return the open directory of a tree's record."""
        self._change(record.item)
        return self._enter(record.path)

    def above(self) -> tuple[int, bytes]:
        """Return the parent of the directory found last, which lies below the item, and its name there."""
        return (self._chain[-2][1] if len(self._chain) > 1 else self._top), self._chain[-1][0]

    def forget(self) -> None:
        """Look up the directory found last again, because it was replaced."""
        os.close(self._chain.pop()[1])
        self._parent = None

    def close(self) -> None:
        """Close all descriptors."""
        self._forget_followed()
        while self._chain:
            os.close(self._chain.pop()[1])
        if self._top >= 0:
            os.close(self._top)
        self._item = self._top = -1
        self._parent = None

    def _target(self, number: int) -> tuple[Target, FileIdentity | None]:
        item = self._items[number]
        if self._is_destination:
            return item.destination, item.destination_barred
        return item.source, item.source_barred

    def _change(self, number: int) -> None:
        if number == self._item:
            return
        self.close()
        target, barred = self._target(number)
        mine = target._replace(anchor=os.dup(target.anchor))
        if self._items[number].kind is ItemKind.FILE:
            with open_target_parent(mine, forbidden=barred, create=self._is_destination) as (directory, name):
                self._top, self._name = os.dup(directory), os.fsencode(name)
        else:
            with open_target(mine, forbidden=barred, create=self._is_destination) as directory:
                self._top = os.dup(directory)
        self._item = number

    def _enter(self, path: bytes) -> int:
        """Return the open directory at a path below the item."""
        if path != self._parent:
            self._parent = None
            self._go(path)
            self._parent = path
        return self._chain[-1][1] if self._chain else self._top

    def _go(self, path: bytes) -> None:
        target, barred = self._target(self._item)
        parts = path.split(b"/") if path else []
        common = 0
        while common < min(len(parts), len(self._chain)) and self._chain[common][0] == parts[common]:
            common += 1
        while len(self._chain) > common:
            os.close(self._chain.pop()[1])
        for number in range(common, len(parts)):
            above = self._chain[-1][1] if self._chain else self._top
            shown = join(target.path, [os.fsdecode(part) for part in parts[: number + 1]])
            if self._follows and _is_link(above, parts[number]):
                with open_target(self._led_to(b"/".join(parts[: number + 1])), forbidden=barred) as directory:
                    self._chain.append((parts[number], os.dup(directory)))
                continue
            self._chain.append((parts[number], enter(above, parts[number], shown, barred)))

    @property
    def _follows(self) -> bool:
        return not self._is_destination and self._items[self._item].links == "follow"


def _is_link(directory: int, name: bytes) -> bool:
    try:
        return stat.S_ISLNK(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode)
    except OSError:
        return False


class RecordPaths:
    """Finds the directories of records, for one process or thread. Descriptors stay its own."""

    def __init__(self, items: Sequence[TransferItem], tag: str) -> None:
        """Begin without open directories; temporary names start with `tag`."""
        self._items = items
        self._tag = tag
        self._wholes: dict[int, bytes] = {}
        """Prefix for hashing the temporary names of each item."""
        self._source = _Side(items, destination=False)
        self._destination = _Side(items, destination=True)

    def source(self, record: ManifestRecord) -> tuple[int, bytes]:
        """Return the open parent directory of a record's source and its name there; valid until the next call.

        Raises:
            TransferFailed: A directory cannot be entered; the error has the record's item.
        """
        return _find_with_item(self._source.find, record)

    def destination(self, record: ManifestRecord) -> tuple[int, bytes]:
        """Return the open parent directory of a record's destination and its name there; otherwise as `source`."""
        return _find_with_item(self._destination.find, record)

    def takes_place(self, record: ManifestRecord, batch_directory: BatchDirectory) -> bool:
        """Replace the directory of the record's destination by a batch directory in one rename; return False if
        impossible.

        No other process may copy into that directory, because it is removed.

        Raises:
            OSError: The directory cannot be renamed.
            TransferFailed: The directory cannot be entered.
        """
        replaced, _ = self.destination(record)
        above, name = self._destination.above()
        if not batch_directory.takes_place(above, name, replaced):
            return False
        self._destination.forget()
        return True

    def part(self, record: ManifestRecord) -> tuple[int, bytes]:
        """Return the open directory and the name of the record's temporary file; otherwise as `destination`.

        The name is derived from the item and the whole path, so it is unique in a shared directory even if two items
        have the same destination.
        """
        item = self._items[record.item]
        whole = self._wholes.get(record.item)
        if whole is None:
            whole = b"%d:" % record.item + os.fsencode(item.destination.path) + b"/"
            self._wholes[record.item] = whole
        staging = item.staging if item.staging >= 0 else self.destination(record)[0]
        return staging, part_name(self._tag, whole + record.path)

    def source_directory(self, record: ManifestRecord) -> int:
        """Return the open source directory of a DIRECTORY record."""
        return _find_with_item(self._source.directory, record)

    def destination_directory(self, record: ManifestRecord) -> int:
        """Return the open destination directory of a DIRECTORY record."""
        assert record.kind == DIRECTORY
        return _find_with_item(self._destination.directory, record)

    def close(self) -> None:
        """Close all descriptors."""
        self._source.close()
        self._destination.close()


def _find_with_item(find: Callable[[ManifestRecord], _T], record: ManifestRecord) -> _T:
    try:
        return find(record)
    except PathRefused as error:
        raise TransferFailed(str(error), record.item) from error
    except TransferFailed as error:
        error.item = record.item
        raise


def is_there(paths: RecordPaths, record: ManifestRecord, copied: CopiedFile) -> bool:
    """Return whether the record's destination is the file put there."""
    try:
        directory, name = paths.destination(record)
        status = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except (OSError, TransferFailed):
        return False
    return (status.st_size, status.st_mtime_ns, status.st_ino) == (copied.size, copied.mtime_ns, copied.inode)


def enter(directory: int, name: bytes, shown: str, barred: FileIdentity | None) -> int:
    """Return a descriptor of a subdirectory, following no link.

    Raises:
        TransferFailed: It cannot be opened or is `barred`.
    """
    try:
        inner = open_directory(name, dir_fd=directory)
    except OSError as error:
        raise TransferFailed(file_message(shown, error)) from error
    if barred is not None and identity_of(inner) == barred:
        os.close(inner)
        raise TransferFailed(f"{shown} is the agent's own directory; jobs may not name files in it")
    return inner


PRIVATE_MODE: Final = 0o700
"""Initial mode of a created directory: only its owner has access until it is complete."""

UNRECORDED_MODE: Final = 0o1700
"""Initial mode if the creator cannot be recorded. An own directory normally never has it (sticky and private), so a
later attempt recognizes it as unfinished.
"""


def is_unrecorded(mode: int) -> bool:
    """Return whether a directory was created without a record; it may have inherited its group."""
    return mode & 0o1777 == UNRECORDED_MODE


def make_directory(directory: int, name: bytes, shown: str, mode: int = PRIVATE_MODE) -> bool:
    """Create a private subdirectory; return False if it exists."""
    try:
        os.mkdir(name, mode, dir_fd=directory)
        return True
    except FileExistsError:
        mode = os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode
        if mode & 0o170000 != 0o040000:
            raise TransferFailed(f"{shown} exists and is a {kind_of(mode)}, not a directory") from None
        return False
    except OSError as error:
        raise TransferFailed(f"the directory {shown} cannot be created: {os_message(error)}") from error


def remove_left(
    directories: list[ManifestRecord],
    record: ManifestRecord | None,
    find: Callable[[ManifestRecord], tuple[int, bytes]],
) -> None:
    """Remove directories at the end of a list that do not contain the record, if they are empty.

    `find` returns the open parent directory and the name.
    """
    while directories and (record is None or not record.lies_in(directories[-1])):
        gone = directories.pop()
        if gone.path:
            # It may contain files of others, or an earlier attempt removed it.
            with contextlib.suppress(OSError, TransferFailed):
                directory, name = find(gone)
                os.rmdir(name, dir_fd=directory)


def part_name(tag: str, target: bytes) -> bytes:
    """Return the temporary name for the whole path `target`, the same in every attempt.

    It is short regardless of the path. The digest is collision-resistant: if two files had the same temporary name, a
    user could put one in place of the other.
    """
    return os.fsencode(tag) + hashlib.blake2b(target, digest_size=16).hexdigest().encode() + PART_SUFFIX


def discard(directory: int, part: bytes) -> None:
    """Remove a temporary file if it exists."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(part, dir_fd=directory)


# ---- items that share directories


Parts = tuple[bytes, ...]


class DestinationEntry(NamedTuple):
    """Record with its destination path."""

    path: Parts
    record: ManifestRecord


def find_overlaps(items: Sequence[TransferItem]) -> dict[int, Parts]:
    """Return the destinations of items that overlap with another item, by item number.

    Items overlap if they have the same destination or one lies below the other.
    """
    anchors: dict[int, Parts] = {}
    rows = sorted((_destination(item, anchors), number) for number, item in enumerate(items))
    found: dict[int, Parts] = {}
    above: list[tuple[Parts, int]] = []
    for path, number in rows:
        while above and path[: len(above[-1][0])] != above[-1][0]:
            above.pop()
        if above:
            found[number] = path
            found.update((other, where) for where, other in above)
        above.append((path, number))
    return found


def check_collisions(items: Sequence[TransferItem], manifest: TransferManifest, places: Sequence[int]) -> None:
    """Raise TransferFailed if different files of two items have the same destination: the last copy would win.

    `places` gives the first record of each item.

    Raises:
        TransferFailed: Two files collide; the message names them.
        OSError: The manifest cannot be read.
    """
    destinations = find_overlaps(items)
    trees = [number for number in destinations if items[number].kind is ItemKind.DIRECTORY]
    files = sorted(
        (
            DestinationEntry(destinations[number], manifest.at(places[number]))
            for number in sorted(destinations.keys() - {*trees})
        ),
        key=lambda entry: entry.path,
    )
    streams = [_entries(number, destinations[number], manifest, places[number]) for number in trees]
    merged = heapq.merge(iter(files), *streams, key=lambda entry: entry.path)
    for one, other in itertools.pairwise(entry for entry in merged if entry.record.kind != ODD):
        if one.path == other.path and not _are_alike(one.record, other.record):
            first, second = sorted((one.record, other.record), key=lambda record: record.item)
            raise TransferFailed(
                f"{_source(items, first)} and {_source(items, second)} have the same destination "
                f"{_record_path(items[second.item].destination.path, second)}; give each its own destination",
                second.item,
            )


def _entries(number: int, destination: Parts, manifest: TransferManifest, place: int) -> Iterator[DestinationEntry]:
    for record in manifest.records(place):
        if record.item != number:
            return
        yield DestinationEntry((*destination, *record.path.split(b"/")) if record.path else destination, record)


def _are_alike(one: ManifestRecord, other: ManifestRecord) -> bool:
    """Return whether two records are interchangeable at the same destination."""
    if one.kind != other.kind:
        return False
    if one.kind == LINK:
        return one.target == other.target
    return one.kind == DIRECTORY or (one.device, one.inode) == (other.device, other.inode)


def _destination(item: TransferItem, anchors: dict[int, Parts]) -> Parts:
    anchor = item.destination.anchor
    if anchor not in anchors:
        path = os.fsencode(os.readlink(f"/proc/self/fd/{anchor}"))
        anchors[anchor] = tuple(part for part in path.split(b"/") if part)
    return (*anchors[anchor], *map(os.fsencode, item.destination.parts))


def _source(items: Sequence[TransferItem], record: ManifestRecord) -> str:
    return _record_path(items[record.item].source.path, record)


def _record_path(path: str, record: ManifestRecord) -> str:
    return join(path, (os.fsdecode(record.path),)) if record.path else path
