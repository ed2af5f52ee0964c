"""Lists of nodes as people write them, in the field's form: `n[1-4,7],login`, and `ALL`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from replica.limits import NODES_MAX
from replica.names import name_fault

EVERY_NODE = "ALL"
"""In place of names: every node that there is, and any that comes."""

_ITEM = re.compile(r"([^\[\],\s]*)(?:\[([0-9,-]{1,4096})\])?([^\[\],\s]*)", re.ASCII)
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", re.ASCII)
_NUMBERED = re.compile(r"(.*?)([0-9]{1,9})", re.ASCII)


class NodeListFault(ValueError):
    """A list of nodes that cannot be read: its words say why; after `; ` what would be right."""


def parse_nodes(text: str) -> tuple[str, ...]:
    """Return the names that `n[01-03],m` lists, ascending, each once; NodeListFault."""
    names: set[str] = set()
    for count, name in enumerate(name for item in _items(text) for name in _expanded(item)):
        if count >= NODES_MAX:
            raise NodeListFault(f"more than {NODES_MAX} nodes are listed; write {EVERY_NODE} for all there are")
        names.add(name)
    for name in sorted(names):
        fault = name_fault(name)
        if fault is not None:
            raise NodeListFault(f"the node {fault}; write for example n[1-4],n7")
    return tuple(sorted(names))


def _items(text: str) -> Iterator[str]:
    """Yield what stands between the commas that are not in brackets."""
    depth, start = 0, 0
    for place, character in enumerate(text):
        depth += (character == "[") - (character == "]")
        if character == "," and depth == 0:
            yield text[start:place]
            start = place + 1
    yield text[start:]


def _expanded(item: str) -> Iterator[str]:
    found = _ITEM.fullmatch(item.strip())
    if found is None or not item.strip():
        raise NodeListFault(f"{item[:48]!r} lists no nodes; write for example n[1-4],n7")
    before, ranges, after = found.groups()
    if ranges is None:
        yield before + after
        return
    for part in ranges.split(","):
        matched = _RANGE.fullmatch(part)
        first = int(matched[1]) if matched is not None else 0
        last = int(matched[2]) if matched is not None and matched[2] is not None else first
        if matched is None or last < first or last - first >= NODES_MAX:
            raise NodeListFault(f"[{part[:48]}] is no range of at most {NODES_MAX} nodes; write for example n[1-4]")
        for number in range(first, last + 1):
            yield f"{before}{number:0{len(matched[1])}d}{after}"


def format_nodes(names: Iterable[str]) -> str:
    """Return what `parse_nodes` reads, neighbours with numbers at their ends in brackets."""
    groups: dict[tuple[str, int], list[int]] = {}
    plain: list[str] = []
    for name in names:
        found = _NUMBERED.fullmatch(name)
        if found is None:
            plain.append(name)
        else:
            # Numbers without leading zeros have any width: they are one group.
            width = len(found[2]) if found[2].startswith("0") and len(found[2]) > 1 else 0
            groups.setdefault((found[1], width), []).append(int(found[2]))
    for (before, width), numbers in groups.items():
        ranges = list(_ranges(sorted(numbers), width))
        bare = len(ranges) == 1 and "-" not in ranges[0]
        plain.append(before + (ranges[0] if bare else f"[{','.join(ranges)}]"))
    return ",".join(sorted(plain))


def _ranges(numbers: list[int], width: int) -> Iterator[str]:
    first = last = numbers[0]
    for number in [*numbers[1:], -1]:
        # A range is written with the width of its first number, so 09 and 10 stand in one and 9 and 10 do, too.
        if number == last + 1 and (not width or len(str(number)) <= width):
            last = number
            continue
        yield f"{first:0{width}d}" if first == last else f"{first:0{width}d}-{last:0{width}d}"
        first = last = number
