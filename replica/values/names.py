"""Names of users, pools, nodes and jobs: validation, symbols, node lists, and unprintable characters."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from forebay.replica.values.limits import (
    JOB_NAME_CHARACTERS_MAX,
    MAIL_USER_CHARACTERS_MAX,
    MAILBOX_CHARACTERS_MAX,
    NAME_CHARACTERS_MAX,
    NODES_MAX,
)
from forebay.replica.values.patterns import Pattern

_CONTROL = Pattern(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Control characters (C0, DEL, C1), line and paragraph separators, and Unicode's Bidi_Control. Each can make a text
look like another one, or start a terminal command.
"""

_SYMBOL = Pattern(r"%([0-9]*)(.?)", re.DOTALL)
_NAME = Pattern(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")
_MAILBOX = Pattern(r"[A-Za-z0-9_][A-Za-z0-9_+=-]*(\.[A-Za-z0-9_+=-]+)*")
_DOMAIN = Pattern(r"[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?)*")


def name_fault(name: str) -> str | None:
    """Return the fault of a name, to follow `the … name `, or None if it is valid."""
    if not name:
        return "is empty"
    if len(name) > NAME_CHARACTERS_MAX:
        return f"is longer than {NAME_CHARACTERS_MAX} characters"
    if _NAME.fullmatch(name) is None:
        return f"{name!r} has a character other than letters, digits, _ . + - (and starts with a letter, digit or _)"
    return None


def job_name_fault(name: str) -> str | None:
    """Return the fault of a job's name, to follow `the name `, or None if it is valid.

    Wider than `name_fault`: workflow managers submit names such as `nf-align_(sample 1)`.
    """
    if not name.strip():
        return "is empty"
    if len(name) > JOB_NAME_CHARACTERS_MAX:
        return f"is longer than {JOB_NAME_CHARACTERS_MAX} characters"
    if not name.isprintable():
        return f"{name[:48]!r} has a character that cannot be printed"
    return None


def is_mail_address(text: str) -> bool:
    """Return whether a text is a mail address or user name that all mail programs read alike.

    The rule is narrower than RFC 5321's dot-atom: the local part contains no character that a mail program or a shell
    interprets, because GNU mailutils runs the command after a `|`.
    """
    mailbox, at, domain = text.partition("@")
    if len(text) > MAIL_USER_CHARACTERS_MAX or len(mailbox) > MAILBOX_CHARACTERS_MAX:
        return False
    return _MAILBOX.fullmatch(mailbox) is not None and (not at or is_mail_domain(domain))


def is_mail_domain(text: str) -> bool:
    """Return whether a text is valid after the @ of a mail address."""
    return len(text) <= MAIL_USER_CHARACTERS_MAX and _DOMAIN.fullmatch(text) is not None


class UnknownSymbol(ValueError):
    """A `%` symbol that does not exist or has no meaning here."""


SYMBOLS = "%% %A %d %j %u %x, and %a in an array"
"""Symbols of paths in directives, for messages."""

FILE_SYMBOLS = "%% %A %J %N %d %j %n %s %t %u %x, and %a and %b in an array"
"""Symbols of a script's input and output files, for messages."""

SYMBOL_WIDTH_MAX = 10
"""Maximum width of a padded number in a file name, digits; larger widths are reduced to it, as in sbatch."""


def expand_symbols(
    text: str,
    *,
    job: int | str,
    user: str,
    name: str,
    workdir: str,
    array_job: int = 0,
    array_task: int = 0,
    node: str | None = None,
) -> str:
    """Return `text` with Slurm's symbols (SYMBOLS) replaced; `\\\\` stops the replacement and is removed.

    With `node`, the job's node, those of FILE_SYMBOLS are replaced, and a width pads a number: `%4j`. With `array_job`
    0 the job is not in an array: `%a` does not exist and `%A` is the job. Sources: the burst buffer guide, Symbol
    Replacement; sbatch(1), filename pattern.

    Raises:
        UnknownSymbol: the text has a symbol that does not exist here.
    """
    if "%" not in text and "\\\\" not in text:
        return text
    values = {"%": "%", "A": str(array_job or job), "d": workdir, "j": str(job), "u": user, "x": name}
    if array_job:
        values["a"] = str(array_task)
    if node is not None:
        values |= {"J": str(job), "N": node, "n": "0", "s": "batch", "t": "0"}
        if array_job:
            values["b"] = str(array_task % 10)
    head, _, tail = text.partition("\\\\")

    def value(found: re.Match[str]) -> str:
        width, symbol = found[1], found[2]
        if symbol not in values or (width and node is None):
            raise UnknownSymbol(found[0])
        numeric = symbol in _NUMERIC_SYMBOLS
        return values[symbol].zfill(min(int(width[:3]), SYMBOL_WIDTH_MAX)) if width and numeric else values[symbol]

    return _SYMBOL.sub(value, head) + tail


_NUMERIC_SYMBOLS = frozenset("AJabjnt")


# ---- untrusted texts, made harmless to terminals, logs and mail


def has_control_character(text: str) -> bool:
    """Return whether a text contains a line break, a terminal control character or a bidirectional control
    character.
    """
    # Most texts are printable, and that check is much faster than the search.
    return not text.isprintable() and _CONTROL.search(text) is not None


def plain(text: str) -> str:
    """Return the text on one line with unprintable characters escaped, such as `\\x1b`."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
        for character in text
    )


# ---- node lists in the usual form: `n[1-4,7],login`, and `ALL`


EVERY_NODE = "ALL"
"""Replaces a node list: all present and future nodes."""

_ITEM = Pattern(r"([^\[\],\s]*)(?:\[([0-9,-]{1,4096})\])?([^\[\],\s]*)", re.ASCII)
_RANGE = Pattern(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", re.ASCII)
_NUMBERED = Pattern(r"(.*?)([0-9]{1,9})", re.ASCII)


class NodeListError(ValueError):
    """An invalid node list; the message has the cause, and after `; ` the remedy."""


def parse_nodes(text: str) -> tuple[str, ...]:
    """Return the names in a list such as `n[01-03],m`, ascending and without duplicates.

    Raises:
        NodeListError: the list is invalid or too long.
    """
    names: set[str] = set()
    for count, name in enumerate(name for item in _split_items(text) for name in _expand_item(item)):
        if count >= NODES_MAX:
            raise NodeListError(f"more than {NODES_MAX} nodes are listed; write {EVERY_NODE} for all nodes")
        names.add(name)
    for name in sorted(names):
        fault = name_fault(name)
        if fault is not None:
            raise NodeListError(f"the node {fault}; write for example n[1-4],n7")
    return tuple(sorted(names))


def _split_items(text: str) -> Iterator[str]:
    """Yield the parts between commas outside brackets."""
    depth, start = 0, 0
    for place, character in enumerate(text):
        depth += (character == "[") - (character == "]")
        if character == "," and depth == 0:
            yield text[start:place]
            start = place + 1
    yield text[start:]


def _expand_item(item: str) -> Iterator[str]:
    found = _ITEM.fullmatch(item.strip())
    if found is None or not item.strip():
        raise NodeListError(f"{item[:48]!r} lists no nodes; write for example n[1-4],n7")
    before, ranges, after = found.groups()
    if ranges is None:
        yield before + after
        return
    for part in ranges.split(","):
        matched = _RANGE.fullmatch(part)
        first = int(matched[1]) if matched is not None else 0
        last = int(matched[2]) if matched is not None and matched[2] is not None else first
        if matched is None or last < first or last - first >= NODES_MAX:
            raise NodeListError(f"[{part[:48]}] is not a range of at most {NODES_MAX} nodes; write for example n[1-4]")
        for number in range(first, last + 1):
            yield f"{before}{number:0{len(matched[1])}d}{after}"


def format_nodes(names: Iterable[str]) -> str:
    """Format a node list as `parse_nodes` reads it, with ranges in brackets."""
    groups: dict[tuple[str, int], list[int]] = {}
    plain: list[str] = []
    for name in names:
        found = _NUMBERED.fullmatch(name)
        if found is None:
            plain.append(name)
        else:
            # Numbers without leading zeros form one group, whatever their width.
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
        # A range has the width of its first number, so 09 and 10 can share one, and so can 9 and 10.
        if number == last + 1 and (not width or len(str(number)) <= width):
            last = number
            continue
        yield f"{first:0{width}d}" if first == last else f"{first:0{width}d}-{last:0{width}d}"
        first = last = number
