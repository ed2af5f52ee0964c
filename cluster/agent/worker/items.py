"""What an order moves: every transfer of it, and every line of its lists, as one item each.

The roots, and the buffers that the transfers name, are opened once; items share them, and `Places` closes them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Final, NamedTuple, Self

from cluster.agent.files import Identity, PathRefused, Target, inside_target, outside_target
from cluster.agent.transfer import Item, Kind, TransferFailed
from cluster.agent.worker.lists import Listed, read_list
from replica.model import NO_CHOICE, NOTHING_SPECIAL, ListTransfer, Order, TransferChoice, TransferKind

SHOWN_CHARACTERS: Final = 200
"""Characters of a path that the name of a transfer repeats: the failure itself names the whole path."""

_KINDS: Final = {TransferKind.FILE: Kind.FILE, TransferKind.DIRECTORY: Kind.DIRECTORY}


class Movement(NamedTuple):
    """One item, and what is special about it."""

    item: Item
    source: str
    """As it was asked for, for messages; so is the destination."""
    destination: str
    choice: TransferChoice = NO_CHOICE
    persistent: str = ""
    """The persistent buffer that it goes to; empty for the job's own and for what goes out."""


class RecordPaths:
    """Where paths of one order begin, each opened once."""

    def __init__(self, order: Order, buffer: int, persistent: Mapping[str, str]) -> None:
        """`buffer` is the job's own, an open directory; `persistent` are the directories of others, by variable."""
        self._order = order
        self._buffer = buffer
        self._persistent = persistent
        self._anchors: dict[str, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while self._anchors:
            os.close(self._anchors.popitem()[1])

    def outside(self, roots: tuple[str, ...], path: str, what: str) -> Target:
        """Return where an absolute path lies beneath one of `roots`; PathRefused if it lies beneath none."""
        return self._shared(outside_target(roots, path, what))

    def inside(self, path: str) -> Target:
        """Return where a path such as `$DW_JOB_STRIPED/data` lies; PathRefused if it is in none of the buffers."""
        return self._shared(inside_target(self._buffer, path, self._persistent))

    def _shared(self, target: Target) -> Target:
        """Return the target with the anchor that was opened first, which later ones need not be the same as."""
        known = self._anchors.setdefault(target.shown, target.anchor)
        if known != target.anchor:
            os.close(target.anchor)
        return target._replace(anchor=known)


def movements(order: Order, paths: RecordPaths, home: Identity) -> list[Movement]:
    """Return everything that the order moves, in its order; TransferFailed names the transfer that is wrong."""
    special = order.special or NOTHING_SPECIAL
    stage, outgoing = order.stage, order.stage == "stage_out"
    found: list[Movement] = []
    for index, transfer in enumerate(order.transfers):
        source, destination = transfer.outside, transfer.inside
        if outgoing:
            source, destination = destination, source
        with named(stage, source, destination):
            item = _item(order, paths, home, _KINDS[transfer.kind], source, destination)
        choice = special.choices[index] if special.choices else NO_CHOICE
        found.append(Movement(item, source, destination, choice, "" if outgoing else persistent_of(destination)))
    for index, listed in enumerate(special.lists):
        choice = special.list_choices[index] if special.list_choices else NO_CHOICE
        with named(stage, listed.source, listed.destination):
            found += _listed(order, paths, home, listed, choice)
    return found


def persistent_of(path: str) -> str:
    """Return the name of the persistent buffer that a path such as `$DW_PERSISTENT_STRIPED_lake/a` is in, or ""."""
    head = path.partition("/")[0].removeprefix("$").removeprefix("{").removesuffix("}")
    prefix = "DW_PERSISTENT_STRIPED_"
    return head.removeprefix(prefix) if path.startswith("$") and head.startswith(prefix) else ""


def _item(order: Order, paths: RecordPaths, home: Identity, kind: Kind, source: str, destination: str) -> Item:
    if order.stage == "stage_out":
        outside = paths.outside(order.roots, destination, order.stage)
        return Item(kind, paths.inside(source), outside, destination_barred=home)
    return Item(kind, paths.outside(order.roots, source, order.stage), paths.inside(destination), source_barred=home)


def _listed(
    order: Order, paths: RecordPaths, home: Identity, transfer: ListTransfer, choice: TransferChoice
) -> Iterator[Movement]:
    special = order.special or NOTHING_SPECIAL
    lines = read_list(special.list_roots, transfer.source, home)
    prefix = transfer.destination.rstrip("/") + "/"
    persistent = "" if transfer.outgoing else persistent_of(transfer.destination)
    of_line: Callable[[Listed], Item]
    if transfer.outgoing:
        directory = paths.outside(order.roots, transfer.destination, order.stage)

        def of_line(line: Listed) -> Item:
            return Item(Kind.FILE, paths.inside(line.path), _below(directory, line.name), destination_barred=home)
    else:
        directory = paths.inside(transfer.destination)

        def of_line(line: Listed) -> Item:
            source = paths.outside(order.roots, line.path, order.stage)
            return Item(Kind.FILE, source, _below(directory, line.name), source_barred=home)

    for line in lines:
        try:
            item = of_line(line)
        except PathRefused as error:
            raise PathRefused(f"line {line.line} of the list: {error}") from error
        yield Movement(item, line.path, prefix + line.name, choice, persistent)


def _below(directory: Target, name: str) -> Target:
    return directory._replace(parts=(*directory.parts, name))


@contextlib.contextmanager
def named(stage: str, source: str, destination: str) -> Iterator[None]:
    """Put the name of the transfer before whatever is wrong with it."""
    try:
        yield
    except (PathRefused, TransferFailed) as error:
        raise TransferFailed(f"{name_of(stage, source, destination)}: {error}") from error
    except OSError as error:
        raise TransferFailed(f"{name_of(stage, source, destination)}: {error.strerror}") from error


def name_of(stage: str, source: str, destination: str) -> str:
    """Return how messages name a transfer."""
    return f"{stage} source={_short(source)} destination={_short(destination)}"


def _short(path: str) -> str:
    return path if len(path) <= SHOWN_CHARACTERS else "…" + path[-SHOWN_CHARACTERS:]
