"""What an order moves: every transfer of it, and every line of its lists, as one item each.

The roots, and the buffers that the transfers name, are opened once; items share them, and `RecordPaths` closes them.

Lists of files to move (`type=list`): a file outside with one path a line.

    stage_in    each line is an absolute path outside
    stage_out   each line is a path in a buffer, such as $DW_JOB_STRIPED/out
    both        the file goes into the directory that is the transfer's destination, under the last part of its path

A line is the whole path, blanks in it and around it included. Empty lines and lines that begin with `#` are skipped: no
path begins so. Two lines that would become one file are refused, since one would replace the other.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple, Self

from cluster.agent.files import (
    Identity,
    PathRefused,
    Target,
    inside_target,
    kind_of,
    opened_parent,
    outside_target,
    split,
    variable_of,
)
from cluster.agent.transfer import Item, Kind, TransferFailed
from cluster.system import closing
from replica.model import (
    NO_CHOICE,
    NOTHING_SPECIAL,
    ListTransfer,
    Order,
    TransferChoice,
    TransferKind,
    persistent_variable,
)

LIST_BYTES_MAX: Final = 32 * 1024 * 1024
"""A file that lists what to move, bytes: a third of a kilobyte for each of the lines that may be."""

LIST_LINES_MAX: Final = 100_000
"""Files that one list may name, count: each costs about a kilobyte of memory; more of them are a directory."""

_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class Listed(NamedTuple):
    """One line: which it is (from 1), the path as it stands there, and its last part."""

    line: int
    path: str
    name: str


def read_list(roots: tuple[str, ...], path: str, barred: Identity) -> list[Listed]:
    """Return what the file at `path`, which must lie beneath one of `roots`, lists.

    PathRefused names the file, and the line, of what cannot be; OSError as the file system has it.
    """
    return list(_lines(_content(roots, path, barred), path))


def _content(roots: tuple[str, ...], path: str, barred: Identity) -> bytes:
    with opened_parent(outside_target(roots, path, "a list"), forbidden=barred) as (directory, name):
        try:
            # A look first: opening a device or a pipe can do something.
            _check_kind(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode, path)
            descriptor = os.open(name, _READ, dir_fd=directory)
        except FileNotFoundError as error:
            raise PathRefused(f"the list {path} does not exist") from error
    with closing(descriptor):
        _check_kind(os.fstat(descriptor).st_mode, path)
        with os.fdopen(os.dup(descriptor), "rb") as file:
            data = file.read(LIST_BYTES_MAX + 1)
    if len(data) > LIST_BYTES_MAX:
        raise PathRefused(f"the list {path} is longer than {LIST_BYTES_MAX} bytes; stage a directory instead")
    return data


def _check_kind(mode: int, path: str) -> None:
    if kind_of(mode) != "regular file":
        raise PathRefused(f"the list {path} is a {kind_of(mode)}; name a regular file")


def _lines(data: bytes, path: str) -> Iterator[Listed]:
    seen: dict[str, int] = {}
    for number, line in enumerate(data.split(b"\n"), start=1):
        text = os.fsdecode(line.removesuffix(b"\r"))
        if not text or text.startswith("#"):
            continue
        try:
            parts = split(text, text)
        except PathRefused as error:
            raise PathRefused(f"the list {path}, line {number}: {error}") from error
        if not parts or text.endswith("/"):
            raise PathRefused(f"the list {path}, line {number}: {text!r} names no file; write one file a line")
        if parts[-1] in seen:
            raise PathRefused(
                f"the list {path}, lines {seen[parts[-1]]} and {number}: both would become {parts[-1]!r}; "
                "stage one of them with type=file and another destination"
            )
        if len(seen) >= LIST_LINES_MAX:
            raise PathRefused(f"the list {path} names more than {LIST_LINES_MAX} files; stage a directory instead")
        seen[parts[-1]] = number
        yield Listed(number, text, parts[-1])


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
        found.append(
            Movement(item, source, destination, choice, "" if outgoing else persistent_of(destination, order.uses))
        )
    for index, listed in enumerate(special.lists):
        choice = special.list_choices[index] if special.list_choices else NO_CHOICE
        with named(stage, listed.source, listed.destination):
            found += _listed(order, paths, home, listed, choice)
    return found


def persistent_of(path: str, uses: Sequence[str]) -> str:
    """Return which of the persistent buffers `uses` a path such as `$DW_PERSISTENT_STRIPED_lake/a` is in, or ""."""
    variable = variable_of(path)
    return next((name for name in uses if persistent_variable(name) == variable), "")


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
    persistent = "" if transfer.outgoing else persistent_of(transfer.destination, order.uses)
    if transfer.outgoing:
        directory = paths.outside(order.roots, transfer.destination, order.stage)
    else:
        directory = paths.inside(transfer.destination)
    for line in lines:
        try:
            below = directory._replace(parts=(*directory.parts, line.name))
            if transfer.outgoing:
                item = Item(Kind.FILE, paths.inside(line.path), below, destination_barred=home)
            else:
                source = paths.outside(order.roots, line.path, order.stage)
                item = Item(Kind.FILE, source, below, source_barred=home)
        except PathRefused as error:
            raise PathRefused(f"line {line.line} of the list: {error}") from error
        yield Movement(item, line.path, prefix + line.name, choice, persistent)


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
