"""Golden text files of the contract: compared line by line, written again with FOREBAY_REWRITE_GOLDEN=1.

Look at the difference before it is committed: what people, programs and ledgers rely on has changed then.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import msgspec

HERE = Path(__file__).parent
DIFFERENCE_LINES_MAX = 120
"""Lines of a difference that are shown, count: the first one is what matters."""


def compare(name: str, lines: Iterable[str]) -> None:
    """Assert that the golden file `name` below this directory has these lines; show the first differences."""
    found, path = [*lines], HERE / name
    if os.environ.get("FOREBAY_REWRITE_GOLDEN") == "1":
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(f"{line}\n" for line in found), encoding="utf-8")
    golden = path.read_text(encoding="utf-8").splitlines()
    if found != golden:
        shown = difference(golden, found, name)
        raise AssertionError("\n".join([f"{name} is not what it was:", *shown]))


_ANSWER_FIELD = re.compile(r"  [a-z_0-9]+: ")
"""The beginning of a row with a field of an answer."""


def compare_kept(name: str, lines: Iterable[str]) -> None:
    """Assert that the recorded steps are all there, with every recorded field as it was.

    A field that was added to an answer or an object is no difference, so a new option rewrites nothing. Steps begin
    with `== `.
    """
    if os.environ.get("FOREBAY_REWRITE_GOLDEN") == "1":
        compare(name, lines)
        return
    golden, found = (_steps(rows) for rows in ((HERE / name).read_text(encoding="utf-8").splitlines(), [*lines]))
    for before, now in zip_longest(golden, found, fillvalue=[]):
        if not _is_kept(before, now):
            rows = difflib.unified_diff(before, now, f"golden {name}", "now", n=1, lineterm="")
            raise AssertionError("\n".join([f"{name} is not what it was:", *islice(rows, DIFFERENCE_LINES_MAX)]))


def _steps(rows: Iterable[str]) -> list[list[str]]:
    steps: list[list[str]] = []
    for row in rows:
        if row.startswith("== ") or not steps:
            steps.append([])
        steps[-1].append(row)
    return steps


def _is_kept(before: list[str], now: list[str]) -> bool:
    rows = iter(now)
    for wanted in before:
        row = next(rows, None)
        while row is not None and not _extends(wanted, row) and _ANSWER_FIELD.match(row):
            row = next(rows, None)
        if row is None or not _extends(wanted, row):
            return False
    return all(_ANSWER_FIELD.match(row) for row in rows)


def _extends(before: str, now: str) -> bool:
    """Return whether a row is the recorded one, perhaps with further fields in its JSON object or list of changes."""
    if before == now:
        return True
    if before.startswith("  ~ ") and now.startswith("  ~ "):
        named, changes = _changes(before)
        named_now, changes_now = _changes(now)
        return named == named_now and changes <= changes_now
    at = before.find("{")
    if at < 0 or before[:at] != now[:at]:
        return False
    try:
        return _holds(msgspec.json.decode(now[at:]), msgspec.json.decode(before[at:]))
    except msgspec.DecodeError:
        return False


def _changes(row: str) -> tuple[str, frozenset[str]]:
    """Return the name in `  ~ KIND NAME FIELD OLD -> NEW; …`, and the changes."""
    _, _, kind, name, *rest = row.split(" ")
    if kind == "buffer" and name == "of" or kind == "order":
        name, rest = f"{name} {rest[0]}", rest[1:]
    return f"{kind} {name}", frozenset(" ".join(rest).split("; "))


def _holds(now: Any, before: Any) -> bool:
    """Return whether a decoded value has everything that another one has."""
    if isinstance(before, dict) and isinstance(now, dict):
        return all(key in now and _holds(now[key], value) for key, value in before.items())
    if isinstance(before, list) and isinstance(now, list):
        return len(before) == len(now) and all(map(_holds, now, before))
    return bool(now == before)


def difference(golden: list[str], found: list[str], name: str) -> list[str]:
    """Return the first differing lines with those around them, as a unified diff."""
    # Comparing megabytes line by line takes minutes; beyond the first difference all else may follow from it.
    same = next((at for at, (one, other) in enumerate(zip(golden, found, strict=False)) if one != other), None)
    start = max(0, (min(len(golden), len(found)) if same is None else same) - DIFFERENCE_LINES_MAX)
    stop = start + 10 * DIFFERENCE_LINES_MAX
    rows = difflib.unified_diff(golden[start:stop], found[start:stop], f"golden {name}", f"now, from line {start + 1}")
    return [row.rstrip("\n") for row in islice(rows, DIFFERENCE_LINES_MAX)]
