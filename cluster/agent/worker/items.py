"""Transfer items of an order: one for each transfer, match of a pattern, and line of a list.

Roots and buffers are opened once and shared by the items; `OrderPaths` closes them.

A list (`type=list`) is a file outside the buffer with one path per line:

    stage_in    each line is an absolute path outside
    stage_out   each line is a path in a buffer, such as $DW_JOB_STRIPED/out
    both        the file goes into the transfer's destination directory, under the last component of its path

The whole line is the path, including any blanks. Empty lines and lines that begin with `#` are skipped. Two lines with
the same last component are rejected, because one file would replace the other.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple, Self

from msgspec.structs import replace

from forebay.cluster.agent.files import (
    FileIdentity,
    PathRefused,
    Target,
    inside_target,
    kind_of,
    open_target_parent,
    outside_target,
    split,
    variable_of,
)
from forebay.cluster.agent.transfer import ItemKind, TransferFailed, TransferItem, is_absence
from forebay.cluster.agent.worker.patterns import find_matches
from forebay.cluster.system import closing
from forebay.replica.grammar import with_file_name
from forebay.replica.model import (
    NO_CHOICE,
    NO_SPECIAL_TRANSFERS,
    Access,
    ListTransfer,
    Order,
    Transfer,
    TransferChoice,
    TransferKind,
    named_path,
    persistent_variable,
)

LIST_BYTES_MAX: Final = 32 * 1024 * 1024
"""Size limit of a list, bytes: a third of a kilobyte for each permitted line."""

LIST_LINES_MAX: Final = 100_000
"""Limit on files in one list, count: each costs about a kilobyte of memory. Stage more as a directory."""

_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class ListEntry(NamedTuple):
    """Line number (from 1), path and last path component of a list entry."""

    line: int
    path: str
    name: str


def read_list(roots: tuple[str, ...], path: str, barred: FileIdentity) -> list[ListEntry]:
    """Return the entries of the list at `path`, which must lie beneath one of `roots`.

    Raises:
        PathRefused: The list is unusable; the message names the file and the line.
        OSError: The list cannot be read.
    """
    return list(_lines(_content(roots, path, barred), path))


def _content(roots: tuple[str, ...], path: str, barred: FileIdentity) -> bytes:
    with open_target_parent(outside_target(roots, path, "a list"), forbidden=barred) as (directory, name):
        try:
            # Check the type first: opening a device or a pipe can have side effects.
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


def _lines(data: bytes, path: str) -> Iterator[ListEntry]:
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
            raise PathRefused(f"the list {path}, line {number}: {text!r} does not name a file; write one path per line")
        if parts[-1] in seen:
            raise PathRefused(
                f"the list {path}, lines {seen[parts[-1]]} and {number}: both would become {parts[-1]!r}; "
                "stage one of them with type=file and another destination"
            )
        if len(seen) >= LIST_LINES_MAX:
            raise PathRefused(f"the list {path} names more than {LIST_LINES_MAX} files; stage a directory instead")
        seen[parts[-1]] = number
        yield ListEntry(number, text, parts[-1])


SHOWN_CHARACTERS: Final = 200
"""Limit on characters of a path in a transfer's label; the error itself names the whole path."""

_KINDS: Final = {TransferKind.FILE: ItemKind.FILE, TransferKind.DIRECTORY: ItemKind.DIRECTORY}


class Movement(NamedTuple):
    """Item of a transfer, with its options and the paths as the job's script wrote them."""

    item: TransferItem
    source: str
    """Source path as requested, for messages; likewise the destination."""
    destination: str
    choice: TransferChoice = NO_CHOICE
    persistent: str = ""
    """Persistent buffer that is the destination; empty for the job's own buffer and for stage-out."""
    is_match: bool = False
    """True if a pattern named it; its temporary files are then in the pattern's destination."""


class OrderPaths:
    """Roots of an order's paths, each opened once."""

    def __init__(self, order: Order, buffer: int, persistent: Mapping[str, str]) -> None:
        """Use the open directory `buffer` as the job's own; `persistent` maps variables to persistent buffers."""
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
        """Resolve an absolute path beneath one of `roots`.

        Raises:
            PathRefused: The path lies beneath none of them.
        """
        return self._share_anchor(outside_target(roots, path, what))

    def inside(self, path: str) -> Target:
        """Resolve a path such as `$DW_JOB_STRIPED/data`.

        Raises:
            PathRefused: The path lies in no buffer of the order.
        """
        access = [Access[word.upper()] for word in self._order.access] or [Access.STRIPED]
        found = named_path(path, self._order.names, access) or path
        return self._share_anchor(inside_target(self._buffer, found, self._persistent))

    def _share_anchor(self, target: Target) -> Target:
        """Replace the target's anchor by the first one opened for the same root, which may since have been replaced."""
        known = self._anchors.setdefault(target.shown, target.anchor)
        if known != target.anchor:
            os.close(target.anchor)
        return target._replace(anchor=known)


def movements(order: Order, paths: OrderPaths, home: FileIdentity) -> list[Movement]:
    """Return all movements of the order, in its order.

    Raises:
        TransferFailed: A transfer is invalid; the message names it.
    """
    special = order.special or NO_SPECIAL_TRANSFERS
    stage, outgoing = order.stage, order.stage == "stage_out"
    found: list[Movement] = []
    for index, transfer in enumerate(order.transfers):
        source, destination = transfer.outside, transfer.inside
        if outgoing:
            source, destination = destination, source
        choice = special.choices[index] if special.choices else NO_CHOICE
        if transfer.pattern:
            with label_errors(stage, f"{source.rstrip('/')}/{transfer.pattern}", destination):
                found += _matches(order, paths, home, transfer, choice)
            continue
        with label_errors(stage, source, destination):
            if transfer.kind is TransferKind.EITHER:
                transfer = _determined(order, paths, transfer)
                destination = transfer.outside if outgoing else transfer.inside
            item = _item(order, paths, home, _KINDS[transfer.kind], source, destination)
        found.append(
            Movement(item, source, destination, choice, "" if outgoing else persistent_of(destination, order.uses))
        )
    for index, listed in enumerate(special.lists):
        choice = special.list_choices[index] if special.list_choices else NO_CHOICE
        with label_errors(stage, listed.source, listed.destination):
            found += _list_movements(order, paths, home, listed, choice)
    return found


def persistent_of(path: str, uses: Sequence[str]) -> str:
    """Return the persistent buffer in `uses` that a path such as `$DW_PERSISTENT_STRIPED_lake/a` lies in, or ""."""
    variable = variable_of(path)
    return next((name for name in uses if persistent_variable(name) == variable), "")


def _item(
    order: Order, paths: OrderPaths, home: FileIdentity, kind: ItemKind, source: str, destination: str
) -> TransferItem:
    if order.stage == "stage_out":
        outside = paths.outside(order.roots, destination, order.stage)
        return TransferItem(kind, paths.inside(source), outside, destination_barred=home)
    return TransferItem(
        kind, paths.outside(order.roots, source, order.stage), paths.inside(destination), source_barred=home
    )


def _determined(order: Order, paths: OrderPaths, transfer: Transfer) -> Transfer:
    """Return the transfer of a file or of a directory, whichever its source is; of a file if it is missing."""
    outgoing = order.stage == "stage_out"
    source = paths.inside(transfer.inside) if outgoing else paths.outside(order.roots, transfer.outside, order.stage)
    is_directory = not source.parts
    if source.parts:
        mine = source._replace(anchor=os.dup(source.anchor))
        with contextlib.suppress(PathRefused, OSError), open_target_parent(mine) as (directory, name):
            # A link stands for what it leads to.
            is_directory = stat.S_ISDIR(os.stat(name, dir_fd=directory).st_mode)
    if is_directory:
        return replace(transfer, kind=TransferKind.DIRECTORY)
    return with_file_name(replace(transfer, kind=TransferKind.FILE), outgoing=outgoing)


def _matches(
    order: Order, paths: OrderPaths, home: FileIdentity, transfer: Transfer, choice: TransferChoice
) -> Iterator[Movement]:
    """Yield the movements of a pattern's matches: each goes into the destination, under its last name.

    A stage-out without a match has one movement, whose source is missing: the transfer reports it after the others.
    """
    outgoing, kind = order.stage == "stage_out", _KINDS[transfer.kind]
    source, destination = (transfer.inside, transfer.outside) if outgoing else (transfer.outside, transfer.inside)
    whole = _item(order, paths, home, kind, source, destination)
    try:
        found = find_matches(
            whole.source, transfer.pattern, directories=kind is ItemKind.DIRECTORY, barred=whole.source_barred
        )
    except PathRefused as error:
        if not outgoing or not is_absence(error):
            raise
        found = []
    if not found:
        if not outgoing:
            what = "directory" if kind is ItemKind.DIRECTORY else "file"
            raise PathRefused(f"no {what} matches the pattern {transfer.pattern!r} in {whole.source.path}")
        found = [split(transfer.pattern, transfer.pattern)]
    persistent = "" if outgoing else persistent_of(destination, order.uses)
    for match in found:
        item = whole._replace(
            source=whole.source._replace(parts=(*whole.source.parts, *match)),
            destination=whole.destination._replace(parts=(*whole.destination.parts, match[-1])),
        )
        shown = "/".join((source.rstrip("/"), *match))
        yield Movement(item, shown, f"{destination.rstrip('/')}/{match[-1]}", choice, persistent, is_match=True)


def _list_movements(
    order: Order, paths: OrderPaths, home: FileIdentity, transfer: ListTransfer, choice: TransferChoice
) -> Iterator[Movement]:
    special = order.special or NO_SPECIAL_TRANSFERS
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
                item = TransferItem(ItemKind.FILE, paths.inside(line.path), below, destination_barred=home)
            else:
                source = paths.outside(order.roots, line.path, order.stage)
                item = TransferItem(ItemKind.FILE, source, below, source_barred=home)
        except PathRefused as error:
            raise PathRefused(f"line {line.line} of the list: {error}") from error
        yield Movement(item, line.path, prefix + line.name, choice, persistent)


@contextlib.contextmanager
def label_errors(stage: str, source: str, destination: str) -> Iterator[None]:
    """Prefix errors with the label of the transfer."""
    try:
        yield
    except (PathRefused, TransferFailed) as error:
        raise TransferFailed(f"{name_of(stage, source, destination)}: {error}") from error
    except OSError as error:
        raise TransferFailed(f"{name_of(stage, source, destination)}: {error.strerror}") from error


def name_of(stage: str, source: str, destination: str) -> str:
    """Return the label of a transfer for messages."""
    return f"{stage} source={_short(source)} destination={_short(destination)}"


def _short(path: str) -> str:
    return path if len(path) <= SHOWN_CHARACTERS else "…" + path[-SHOWN_CHARACTERS:]
