"""Items that share destination directories: which do, and whether two files would have the same path.

Destinations are compared as the kernel knows them: `$DW_JOB_STRIPED/a`, `${DW_JOB_STRIPED}/a`, and
`$FOREBAY_JOB_DIR/striped/a` are one path. Memory grows with the items, never with the files: the records of an item are
in the order of their paths, so the items are merged as sorted streams.
"""

from __future__ import annotations

import heapq
import itertools
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from cluster.agent.files import join
from cluster.agent.transfer.errors import TransferFailed
from cluster.agent.transfer.manifest import DIRECTORY, LINK, ODD, Manifest, Record
from cluster.agent.transfer.options import Item, Kind

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
