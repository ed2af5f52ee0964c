"""What a naive reader says of a request that was accepted: written apart from the grammar, in another way, on purpose.

It takes the words of the directives as they lie there and holds against them what was made of them: a directive that
does not exist, a size that is none, a name or a path that may not be, something asked for twice, something that is in
the text and not in the request.
"""

from __future__ import annotations

import re
from fractions import Fraction
from itertools import takewhile
from typing import Final, NamedTuple

from forebay.replica.model.requests import BufferRequest
from tests.fuzzing.generator import Case

LARGEST: Final = 9_223_372_036_854_775_807
POWERS: Final = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15} | {
    letter + end: 2 ** (10 * (index + 1)) for index, letter in enumerate("KMGTP") for end in ("", "IB")
}
GIB: Final = 2**30
SIZE: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)([A-Za-z]*)")
NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,63}")
INSIDE: Final = re.compile(r"(?:\$(?:DW_JOB_[A-Za-z0-9_.+-]+|FOREBAY_JOB_DIR|DW_PERSISTENT_STRIPED_[^/]+)|"
                           r"\$\{(?:DW_JOB_[A-Za-z0-9_.+-]+|FOREBAY_JOB_DIR|DW_PERSISTENT_STRIPED_[^/]+)\})"
                           r"/(.*)")  # fmt: skip
PERSISTENT: Final = re.compile(r"(?:\\\\)?\$\{?DW_PERSISTENT_STRIPED_([^/}]+).*")
VERBS: Final = {
    "#DW": {"jobdw", "persistentdw", "swap", "stage_in", "stage_out", "copy_in", "copy_out"},
    "#BB": {"create_persistent", "destroy_persistent"},
}


class Line(NamedTuple):
    """One directive: its kind, its words, and whether it came from --bb."""

    kind: str
    words: list[str]
    from_bb: bool


def nonsense(case: Case, request: BufferRequest | None) -> str | None:
    """Return what is wrong with a request that was accepted, or None."""
    lines = [
        *directives(case.bb, case, True),
        *directives(case.bbf, case, False),
        *directives(case.script, case, False),
    ]
    if request is None:
        return "there is a directive, and no request" if lines or case.bb or case.bbf else None
    if re.search(
        r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]", request.text
    ):
        return "a control character is in what is shown"
    if not 0 <= request.capacity_bytes <= LARGEST or not 0 <= request.swap_bytes <= LARGEST:
        return "a size is out of range"
    if case.provider == "lua":
        return _lua_nonsense(lines, request)
    return _nonsense(case, lines, request)


def directives(text: str, case: Case, from_bb: bool) -> list[Line]:
    """Return the directives of one text, joined where they are continued."""
    kinds = ["#" + case.directive] if case.provider == "lua" else ["#DW", "#BB"]
    found: list[Line] = []
    joined = ""
    if from_bb and not text.startswith("#"):
        return []
    for raw in text.split("\n"):
        line = raw.rstrip("\r").rstrip(" \t")
        head = line.split()[0] if line.startswith("#") else ""
        if case.provider == "lua" and line.startswith(kinds[0]):
            head = kinds[0]  # a prefix
        if line.strip() and not line.startswith("#"):
            break
        if head not in kinds:
            continue
        joined = joined + " " + line[len(head) :]
        slashes = len(line) - len(line.rstrip("\\"))
        if slashes % 2:
            joined = joined[:-1]
            continue
        found.append(Line(head, joined.replace("\t", " ").split(" "), from_bb))
        joined = ""
    found = [Line(line.kind, [word for word in line.words if word], line.from_bb) for line in found]
    if case.provider == "lua":
        return found
    # What follows a word that begins with # is a comment.
    return [
        Line(line.kind, list(takewhile(lambda word: not word.startswith("#"), line.words)), line.from_bb)
        for line in found
    ]


def size_of(text: str, bare: int = 1) -> int | None:
    """Return what a size says, 0 for nodes counted as they are, None for what is no size."""
    matched = SIZE.fullmatch(text)
    if matched is None:
        return None
    number, suffix = Fraction(matched[1]), matched[2].upper()
    if suffix in ("N", "NODE", "NODES"):
        return int(number) if number.denominator == 1 and "." not in matched[1] and 0 < number <= LARGEST else None
    if suffix not in POWERS:
        return None
    value = number * (bare if not suffix else POWERS[suffix])
    whole = -(-value.numerator // value.denominator)
    return whole if 0 < whole <= LARGEST else None


def _pairs(words: list[str]) -> dict[str, str]:
    return {key: value for key, _, value in reversed([word.partition("=") for word in words])}


def _lua_nonsense(lines: list[Line], request: BufferRequest) -> str | None:
    total = 0
    pools: set[str] = set()
    for line in lines:
        # A word without a value is the site's, `capacity` and `pool` too.
        pairs = _pairs([word for word in line.words if "=" in word])
        if any(word.startswith("pool=") for word in line.words):
            pools.add(pairs["pool"])
        if any(word.startswith("capacity=") for word in line.words):
            size = size_of(pairs["capacity"])
            if size is None:
                return f"{pairs['capacity']!r} is no size"
            if not any(word.startswith("pool=") for word in line.words):
                return "a capacity without a pool"
            total += size
    if len(pools) > 1 or any(NAME.fullmatch(pool) is None for pool in pools):
        return f"pools {sorted(pools)}"
    if total != request.capacity_bytes or (pools or {""}) != {request.pool}:
        return f"{request.capacity_bytes} of {request.pool!r} instead of {total} of {sorted(pools)}"
    return None


def _nonsense(case: Case, lines: list[Line], request: BufferRequest) -> str | None:
    capacities: list[int] = []
    names: dict[str, list[str]] = {"create_persistent": [], "destroy_persistent": [], "persistentdw": []}
    moves: list[tuple[str, str, str]] = []
    named = swaps = 0
    short: list[list[str]] = []
    for line in lines:
        if not line.words:
            return "a directive that says nothing"
        verb, pairs = line.words[0], _pairs(line.words[1:])
        if line.kind == "#BB" and "=" in verb and case.provider != "datawarp":
            short.append(line.words)
            continue
        if verb not in VERBS[line.kind]:
            return f"unknown directive {line.kind} {verb}"
        if line.kind == "#BB" and line.from_bb:
            return "--bb makes or removes a persistent buffer"
        if verb in names:
            names[verb].append(pairs.get("name", ""))
        if verb in ("jobdw", "create_persistent"):
            size = size_of(pairs.get("capacity", ""))
            if size is None:
                return f"{pairs.get('capacity')!r} is no size"
            if verb == "jobdw":
                capacities.append(size)
                named += "name" in pairs
            elif size not in [record.capacity_bytes for record in request.creates]:
                return "a persistent buffer has another size"
        if verb == "swap":
            swaps += 1
            if size_of(line.words[1] if len(line.words) > 1 else "", GIB) != request.swap_bytes:
                return "another swap"
        if verb in ("copy_in", "copy_out"):
            if case.provider != "native" or "type" in pairs and not request.options:
                return f"{verb} of another provider, or with a type"
            verb, pairs["type"] = verb.replace("copy", "stage"), "directory"
        if verb in ("stage_in", "stage_out") and case.provider == "native":
            if pairs.get("move", "no") not in ("no",) + ("yes",) * (verb == "stage_out"):
                return f"a move of {pairs['move']!r}"
            if pairs.get("backend", "native") not in ("native", "rsync", "rclone", "template"):
                return f"the backend {pairs['backend']!r}"
            if pairs.get("acls", "no") not in ("yes", "no"):
                return f"access lists of {pairs['acls']!r}"
            links = pairs.get("links", "keep")
            if links not in ("keep", "follow", "skip", "fail"):
                return f"links that are {links!r}"
            if links == "follow" and (pairs.get("move") == "yes" or pairs.get("backend", "native") != "native"):
                return "links that are followed by others, or moved"
            moves.append((verb + " " + pairs.get("type", ""), pairs.get("source", ""), pairs.get("destination", "")))
        for key in ("pool",):
            if key in pairs and verb not in ("persistentdw", "stage_in", "stage_out", "destroy_persistent"):
                if NAME.fullmatch(pairs[key]) is None:
                    return f"the pool {pairs[key]!r}"
    if case.bb and not case.bb.startswith("#"):
        if ";" in case.bb or case.bb.lstrip(" \t").startswith(("stage_in:", "stage_out:")):
            wrong = _spur_nonsense(case.bb, capacities, request)
            if wrong is not None:
                return wrong
        else:
            short.append(case.bb.replace("\r\n", " ").replace("\n", " ").replace("\t", " ").split())
    for words in short:
        pairs = _pairs(words)
        if set(pairs) - {"capacity", "pool", "access", "type", "swap"} or len(pairs) != len(words):
            return f"a short form of {words}"
        swaps += "swap" in pairs
        if "capacity" in pairs:
            capacities.append(size_of(pairs["capacity"]) or -1)
        if "swap" in pairs and size_of(pairs["swap"], GIB) != request.swap_bytes:
            return "another swap"
    if (
        (len(capacities) > 1 and (named < len(capacities) or case.provider != "native"))
        or swaps > 1
        or sum(capacities) != request.capacity_bytes
    ):
        return f"capacities {capacities} and {swaps} swaps for a request of {request.capacity_bytes}"
    return _names_nonsense(names, request) or _moves_nonsense(moves, request)


def _spur_nonsense(text: str, capacities: list[int], request: BufferRequest) -> str | None:
    pieces = [piece.strip(" \t") for piece in text.split(";")]
    sizes = [size_of(piece[9:], GIB) for piece in pieces if piece.startswith("capacity=")]
    if any(size is None for size in sizes):
        return f"a size in {text!r}"
    if sizes:
        capacities.append(sum(size for size in sizes if size))
    known = [piece for piece in pieces if piece.startswith(("capacity=", "stage_in:", "stage_out:"))]
    if len(known) + pieces.count("") != len(pieces) or not known or pieces.count("") > 1:
        return f"no request of Spur: {text!r}"
    commands = [piece[9:].strip(" \t") for piece in pieces if piece.startswith("stage_in:")]
    return None if "\n".join(commands) == request.stage_in_command and all(commands) else "other commands"


def _names_nonsense(names: dict[str, list[str]], request: BufferRequest) -> str | None:
    every = [name for found in names.values() for name in found]
    if any(NAME.fullmatch(name) is None or name[0].isdigit() for name in every):
        return f"persistent names {every}"
    created, destroyed, used = names["create_persistent"], names["destroy_persistent"], names["persistentdw"]
    if set(destroyed) & {*created, *used}:
        return "a persistent buffer is destroyed and needed by one job"
    same = (
        created == [record.name for record in request.creates]
        and destroyed == [record.name for record in request.destroys]
        and used == list(request.uses)
    )
    if not same or any(len(set(found)) != len(found) for found in names.values()):
        return f"{names} became something else"
    return None


def _moves_nonsense(moves: list[tuple[str, str, str]], request: BufferRequest) -> str | None:
    for what, source, destination in moves:
        stage, kind = what.split(" ")
        if kind not in ("file", "directory", "list"):
            return f"a transfer of type {kind!r}"
        outside, inside = (source, destination) if stage == "stage_in" else (destination, source)
        if kind == "list" and stage == "stage_out":
            inside = "$FOREBAY_JOB_DIR/x"
        for path in (source, destination) if kind == "list" and stage == "stage_out" else (outside,):
            path = path.removeprefix("\\\\")
            if not path or re.match(r"~|%d[^/]|\$(?!HOME|\{HOME)", path) or ".." in path.split("/"):
                return f"the path {path!r}"
        matched = INSIDE.fullmatch(inside.removeprefix("\\\\"))
        if matched is None or ".." in matched[1].split("/") or not matched[1].strip("/"):
            return f"the path {inside!r} on the buffer"
        persistent = PERSISTENT.fullmatch(inside)
        if persistent is not None and persistent[1] not in request.uses:
            return f"the path {inside!r} on a persistent buffer that is not used"
    made = len(request.stage_in) + len(request.stage_out) + len(request.lists)
    return None if made == len(moves) else f"{made} transfers instead of {len(moves)}"
