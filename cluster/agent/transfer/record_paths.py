"""Paths of records: finds and keeps open the directories beneath the anchor of an item.

Items may share destination directories, so different files may have the same path. Destinations are compared as the
kernel knows them: `$DW_JOB_STRIPED/a`, `${DW_JOB_STRIPED}/a`, and `$FOREBAY_JOB_DIR/striped/a` are one path. Memory
grows with the items, never with the files: the records of an item are in the order of their paths, so the items are
merged as sorted streams.
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

from cluster.agent.files import (
    Identity,
    PathRefused,
    Target,
    identity_of,
    join,
    kind_of,
    leads_to,
    opened,
    opened_parent,
)
from cluster.agent.transfer.errors import TransferFailed, file_message, os_message
from cluster.agent.transfer.fence import BatchDirectory
from cluster.agent.transfer.manifest import DIRECTORY, FILE, LINK, ODD, Manifest, Record
from cluster.agent.transfer.options import Item, Kind
from cluster.agent.transfer.status_table import Copied
from cluster.system import open_directory

_T = TypeVar("_T")

PART_SUFFIX: Final = b".part"


class _Side:
    """The sources, or the destinations, of all items: one chain of open directories at a time."""

    def __init__(self, items: Sequence[Item], *, destination: bool) -> None:
        self._items = items
        self._is_destination = destination
        self._item = -1
        self._top = -1
        self._name = b""
        self._chain: list[tuple[bytes, int]] = []
        self._parent: bytes | None = None
        self._followed = -1

    def find(self, record: Record) -> tuple[int, bytes]:
        """Return an open directory and the record's name in it."""
        self._change(record.item)
        if self._items[record.item].kind is Kind.FILE:
            return self._top, self._name
        if record.target and record.kind == FILE and not self._is_destination:
            return self._follow(record.path)
        parent, _, name = record.path.rpartition(b"/")
        return self._enter(parent), name

    def _follow(self, path: bytes) -> tuple[int, bytes]:
        """Return the open directory in which lies what a link leads to, and its name there."""
        with opened_parent(self._led_to(path), forbidden=self._target(self._item)[1]) as (directory, name):
            self._forget_followed()
            self._followed = os.dup(directory)
            return self._followed, os.fsencode(name)

    def _led_to(self, path: bytes) -> Target:
        """Return where a path beneath the item leads to through links, with an anchor of its own. TransferFailed."""
        target = self._target(self._item)[0]
        whole = target._replace(parts=(*target.parts, *(os.fsdecode(part) for part in path.split(b"/"))))
        found = leads_to(whole)
        if found is None:
            raise TransferFailed(f"{whole.path} leads to something else than it did; stage when nobody writes to it")
        return found._replace(anchor=os.dup(found.anchor))

    def _forget_followed(self) -> None:
        if self._followed >= 0:
            os.close(self._followed)
            self._followed = -1

    def directory(self, record: Record) -> int:
        """Return the open directory that a record of a tree is."""
        self._change(record.item)
        return self._enter(record.path)

    def above(self) -> tuple[int, bytes]:
        """Return what holds the directory that was found last, and its name there; only of one beneath the item."""
        return (self._chain[-2][1] if len(self._chain) > 1 else self._top), self._chain[-1][0]

    def forget(self) -> None:
        """Find the directory that was found last anew: another one has its place."""
        os.close(self._chain.pop()[1])
        self._parent = None

    def close(self) -> None:
        """Close what is open."""
        self._forget_followed()
        while self._chain:
            os.close(self._chain.pop()[1])
        if self._top >= 0:
            os.close(self._top)
        self._item = self._top = -1
        self._parent = None

    def _target(self, number: int) -> tuple[Target, Identity | None]:
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
        if self._items[number].kind is Kind.FILE:
            with opened_parent(mine, forbidden=barred, create=self._is_destination) as (directory, name):
                self._top, self._name = os.dup(directory), os.fsencode(name)
        else:
            with opened(mine, forbidden=barred, create=self._is_destination) as directory:
                self._top = os.dup(directory)
        self._item = number

    def _enter(self, path: bytes) -> int:
        """Return the open directory beneath the item that a path leads to."""
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
                with opened(self._led_to(b"/".join(parts[: number + 1])), forbidden=barred) as directory:
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
    """Finds the directories of records; one for each process or thread. Descriptors stay its own."""

    def __init__(self, items: Sequence[Item], tag: str) -> None:
        """Begin with nothing open; `tag` is what temporary names begin with."""
        self._items = items
        self._tag = tag
        self._wholes: dict[int, bytes] = {}
        """What the path of each item begins with in the names of its temporary files."""
        self._source = _Side(items, destination=False)
        self._destination = _Side(items, destination=True)

    def source(self, record: Record) -> tuple[int, bytes]:
        """Return the open directory that holds a record's source, and its name there; good until the next call.

        TransferFailed names what is in the way, with the record's item.
        """
        return _found(self._source.find, record)

    def destination(self, record: Record) -> tuple[int, bytes]:
        """Return the open directory that the record goes to, and its name there; otherwise as `source`."""
        return _found(self._destination.find, record)

    def takes_place(self, record: Record, batch_directory: BatchDirectory) -> bool:
        """Give a batch directory the place of the directory that the record goes to: at once, or False.

        OSError, TransferFailed.

        Only where no other process copies into that directory: what it had open is gone.
        """
        replaced, _ = self.destination(record)
        above, name = self._destination.above()
        if not batch_directory.takes_place(above, name, replaced):
            return False
        self._destination.forget()
        return True

    def part(self, record: Record) -> tuple[int, bytes]:
        """Return the open directory that the record's temporary file is in, and its name; otherwise as `destination`.

        The name comes from the item and the whole path, so that it is the only one of its kind in a directory for all
        of them, even where two items go to the same file.
        """
        item = self._items[record.item]
        whole = self._wholes.get(record.item)
        if whole is None:
            whole = b"%d:" % record.item + os.fsencode(item.destination.path) + b"/"
            self._wholes[record.item] = whole
        staging = item.staging if item.staging >= 0 else self.destination(record)[0]
        return staging, part_name(self._tag, whole + record.path)

    def source_directory(self, record: Record) -> int:
        """Return the open directory that a DIRECTORY record is at its source."""
        return _found(self._source.directory, record)

    def destination_directory(self, record: Record) -> int:
        """Return the open directory that a DIRECTORY record is at its destination."""
        assert record.kind == DIRECTORY
        return _found(self._destination.directory, record)

    def close(self) -> None:
        """Close what is open."""
        self._source.close()
        self._destination.close()


def _found(find: Callable[[Record], _T], record: Record) -> _T:
    try:
        return find(record)
    except PathRefused as error:
        raise TransferFailed(str(error), record.item) from error
    except TransferFailed as error:
        error.item = record.item
        raise


def is_there(paths: RecordPaths, record: Record, copied: Copied) -> bool:
    """Return whether the record's destination is what was put there."""
    try:
        directory, name = paths.destination(record)
        status = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except (OSError, TransferFailed):
        return False
    return (status.st_size, status.st_mtime_ns, status.st_ino) == (copied.size, copied.mtime_ns, copied.inode)


def enter(directory: int, name: bytes, shown: str, barred: Identity | None) -> int:
    """Return a descriptor of a subdirectory, never through a link; TransferFailed if it cannot be, or may not."""
    try:
        inner = open_directory(name, dir_fd=directory)
    except OSError as error:
        raise TransferFailed(file_message(shown, error)) from error
    if barred is not None and identity_of(inner) == barred:
        os.close(inner)
        raise TransferFailed(f"{shown} is the agent's own directory; jobs may not name files in it")
    return inner


PRIVATE_MODE: Final = 0o700
"""Mode of a directory that is made, until it has all that it gets: its owner's alone."""

UNRECORDED_MODE: Final = 0o1700
"""That mode where no record can be kept of who made it. A directory of one's own is never so (sticky, and nobody else's
to use), so a later attempt knows what it has to finish."""


def is_unrecorded(mode: int) -> bool:
    """Return whether a directory was made where no record could be kept of it; it may have inherited its group."""
    return mode & 0o1777 == UNRECORDED_MODE


def make_directory(directory: int, name: bytes, shown: str, mode: int = PRIVATE_MODE) -> bool:
    """Make a subdirectory only its owner may use as yet, and return whether it was made: False if it was there."""
    try:
        os.mkdir(name, mode, dir_fd=directory)
        return True
    except FileExistsError:
        mode = os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode
        if mode & 0o170000 != 0o040000:
            raise TransferFailed(f"{shown} exists and is a {kind_of(mode)}, not a directory") from None
        return False
    except OSError as error:
        raise TransferFailed(f"the directory {shown} cannot be made: {os_message(error)}") from error


def remove_left(directories: list[Record], record: Record | None, find: Callable[[Record], tuple[int, bytes]]) -> None:
    """Remove the directories at the end of a list that a record does not lie in, as far as they are empty.

    `find` returns the open directory that holds one, and its name there.
    """
    while directories and (record is None or not record.lies_in(directories[-1])):
        gone = directories.pop()
        if gone.path:
            # Something may be in it that somebody else made, or an earlier attempt removed it.
            with contextlib.suppress(OSError, TransferFailed):
                directory, name = find(gone)
                os.rmdir(name, dir_fd=directory)


def part_name(tag: str, target: bytes) -> bytes:
    """Return the temporary name of the file that `target`, a whole path, names: the same in every attempt.

    It is short, however long the path is. What the user may choose goes through a digest that nobody finds two inputs
    for: with two files of one temporary name the one could be put in place of the other.
    """
    return os.fsencode(tag) + hashlib.blake2b(target, digest_size=16).hexdigest().encode() + PART_SUFFIX


def discard(directory: int, part: bytes) -> None:
    """Remove a temporary file; nothing to do if it is gone."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(part, dir_fd=directory)


# ---- items that share directories


Parts = tuple[bytes, ...]


class Entry(NamedTuple):
    """A record and the path that it goes to."""

    path: Parts
    record: Record


def overlapping(items: Sequence[Item]) -> dict[int, Parts]:
    """Return the destination of each item that shares it with another item, or lies beneath a tree, or has one beneath.

    Keys are the numbers of the items.
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


def check_collisions(items: Sequence[Item], manifest: Manifest, places: Sequence[int]) -> None:
    """Raise TransferFailed if different files of two items have one destination: the last one copied would win.

    `places` says where the records of each item begin. OSError if the manifest cannot be read.
    """
    destinations = overlapping(items)
    trees = [number for number in destinations if items[number].kind is Kind.DIRECTORY]
    files = sorted(
        (Entry(destinations[number], manifest.at(places[number])) for number in sorted(destinations.keys() - {*trees})),
        key=lambda entry: entry.path,
    )
    streams = [_entries(number, destinations[number], manifest, places[number]) for number in trees]
    merged = heapq.merge(iter(files), *streams, key=lambda entry: entry.path)
    for one, other in itertools.pairwise(entry for entry in merged if entry.record.kind != ODD):
        if one.path == other.path and not _are_alike(one.record, other.record):
            first, second = sorted((one.record, other.record), key=lambda record: record.item)
            raise TransferFailed(
                f"{_source(items, first)} and {_source(items, second)} have the same destination "
                f"{_named(items[second.item].destination.path, second)}; give each a destination of its own",
                second.item,
            )


def _entries(number: int, destination: Parts, manifest: Manifest, place: int) -> Iterator[Entry]:
    for record in manifest.records(place):
        if record.item != number:
            return
        yield Entry((*destination, *record.path.split(b"/")) if record.path else destination, record)


def _are_alike(one: Record, other: Record) -> bool:
    """Return whether it does not matter which of the two is there in the end."""
    if one.kind != other.kind:
        return False
    if one.kind == LINK:
        return one.target == other.target
    return one.kind == DIRECTORY or (one.device, one.inode) == (other.device, other.inode)


def _destination(item: Item, anchors: dict[int, Parts]) -> Parts:
    anchor = item.destination.anchor
    if anchor not in anchors:
        path = os.fsencode(os.readlink(f"/proc/self/fd/{anchor}"))
        anchors[anchor] = tuple(part for part in path.split(b"/") if part)
    return (*anchors[anchor], *map(os.fsencode, item.destination.parts))


def _source(items: Sequence[Item], record: Record) -> str:
    return _named(items[record.item].source.path, record)


def _named(path: str, record: Record) -> str:
    return join(path, (os.fsdecode(record.path),)) if record.path else path
