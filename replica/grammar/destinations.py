"""Destinations of a job's transfers: the path of a file that goes into a directory, and overlaps.

Two transfers of one stage overlap if both may write the same file. The second then replaces what the first has copied,
and both count as complete. So a stage-out that overlaps another is rejected when the job is submitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from forebay.replica.grammar.paths import split_inside
from forebay.replica.model import (
    VARIABLE_DIRECTORIES,
    WHOLE_BUFFER,
    BufferRequest,
    ListTransfer,
    Transfer,
    TransferKind,
)
from forebay.replica.values import Rejection, RejectionCode

Parts = tuple[str, ...]


class TransferPaths(NamedTuple):
    """A transfer with its paths split into parts; `source` is empty for a list and for a pattern."""

    is_file: bool
    source: Parts
    destination: Parts
    shown: str
    """The destination as error messages show it."""
    place: str


def with_file_name(transfer: Transfer, *, outgoing: bool) -> Transfer:
    """Return the transfer with the source's name added if a file goes into a directory, as cp does.

    The destination is a directory if it ends with a slash or is the root of a buffer. Symbols must have been replaced.
    """
    source, destination = (transfer.inside, transfer.outside) if outgoing else (transfer.outside, transfer.inside)
    is_root = not outgoing and not split_inside(destination)[1].strip("/")
    if transfer.pattern or transfer.kind is not TransferKind.FILE or not (destination.endswith("/") or is_root):
        return transfer
    named = f"{destination.rstrip('/')}/{source.rstrip('/').rpartition('/')[2]}"
    return Transfer(transfer.kind, *((named, source) if outgoing else (source, named)))


def find_overlap(
    transfers: Sequence[tuple[Transfer, str]], lists: Sequence[ListTransfer], *, outgoing: bool
) -> Rejection | None:
    """Return a rejection if two transfers of one stage overlap; each transfer comes with the place of its directive.

    Of a stage-in only two files with one destination are rejected: its sources stay, and directories are often merged
    on purpose.
    """
    if len(transfers) + len(lists) < 2:
        return None
    copies = [_copy(transfer, place, outgoing=outgoing) for transfer, place in transfers]
    copies += [_list_copy(listed) for listed in lists if listed.outgoing and outgoing]
    # In this order the contents of a directory follow it, so each copy is compared with few others. Nested
    # directories copy the same files, or have been rejected, so the innermost represents all of them.
    rows = sorted(enumerate(copies), key=lambda row: (row[1].destination, row[1].is_file, not row[1].source))
    above: list[tuple[int, TransferPaths]] = []
    before: tuple[int, TransferPaths] | None = None
    for row in rows:
        destination = row[1].destination
        while above and destination[: len(above[-1][1].destination)] != above[-1][1].destination:
            above.pop()
        for other in (*above[-1:], *(() if before is None else (before,))):
            if _overlap(other[1], row[1], outgoing=outgoing):
                (_, earlier), (_, later) = sorted((other, row), key=lambda known: known[0])
                return Rejection(
                    RejectionCode.INVALID_DIRECTIVE,
                    f"the destination {later.shown!r} overlaps {earlier.shown!r} of another directive, "
                    "so one would replace files of the other",
                    "give each directive its own destination",
                    later.place,
                )
        if outgoing and row[1].source and not row[1].is_file:
            above.append(row)
        before = row
    return None


def find_overlap_in(request: BufferRequest) -> Rejection | None:
    """Return a rejection if transfers of a request overlap whose symbols have no values yet.

    One text becomes one path, whatever its symbols stand for. A stage with symbols in its sources, or with a backslash,
    after which symbols mean themselves, is left to `find_overlap` with the paths of the job.
    """
    places = iter(request.places[2:])
    for outgoing, transfers in ((False, request.stage_in), (True, request.stage_out)):
        copies = [(with_file_name(transfer, outgoing=outgoing), next(places, "")) for transfer in transfers]
        lists = [listed for listed in request.lists if listed.outgoing and outgoing]
        sources = [transfer.inside if outgoing else transfer.outside for transfer in transfers]
        texts = [text for transfer in transfers for text in (transfer.outside, transfer.inside)]
        texts += [listed.destination for listed in lists]
        if any("%" in source for source in sources) or any("\\" in text for text in texts):
            continue
        rejection = find_overlap(copies, lists, outgoing=outgoing)
        if rejection is not None:
            return rejection
    return None


def _copy(transfer: Transfer, place: str, *, outgoing: bool) -> TransferPaths:
    outside, inside = _outside_parts(transfer.outside), _inside_parts(transfer.inside)
    is_file = transfer.kind is TransferKind.FILE
    if transfer.pattern or (transfer.kind is TransferKind.EITHER and transfer.outside.endswith("/") and outgoing):
        # Its files are unknown until the agent has read the directories, like those of a list.
        into = outside if outgoing else inside
        return TransferPaths(False, (), into, transfer.outside if outgoing else transfer.inside, place)
    if outgoing:
        return TransferPaths(is_file, inside, outside, transfer.outside, place)
    return TransferPaths(is_file, outside, inside, transfer.inside, place)


def _list_copy(listed: ListTransfer) -> TransferPaths:
    return TransferPaths(False, (), _outside_parts(listed.destination), listed.destination, listed.place)


def _outside_parts(path: str) -> Parts:
    return tuple(part for part in path.split("/") if part not in ("", "."))


def _inside_parts(path: str) -> Parts:
    variable, rest = split_inside(path)
    directory = VARIABLE_DIRECTORIES.get(variable)
    above = (variable,) if directory is None else (WHOLE_BUFFER, directory)
    return (*above, *_outside_parts(rest))


def _overlap(one: TransferPaths, other: TransferPaths, *, outgoing: bool) -> bool:
    """Return whether both may write the same file with different contents."""
    if one.is_file and other.is_file:
        return one.destination == other.destination and one.source != other.source
    if not outgoing or not (one.source or other.source):
        # The files of two lists are unknown until the agent reads and compares them.
        return False
    upper, lower = sorted((one, other), key=lambda copy: (len(copy.destination), copy.is_file))
    if upper.is_file or lower.destination[: len(upper.destination)] != upper.destination:
        return False
    if not upper.source:
        # A list copies files, not trees, into its directory. The agent compares them with other files.
        return lower.destination == upper.destination
    # Both copy the same files to the same places.
    return not lower.source or lower.source != upper.source + lower.destination[len(upper.destination) :]
