"""Golden text files of the contract: compared line by line, written again with FOREBAY_REWRITE_GOLDEN=1.

Look at the difference before it is committed: what people, programs and ledgers rely on has changed then.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

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


def difference(golden: list[str], found: list[str], name: str) -> list[str]:
    """Return the first differing lines with those around them, as a unified diff."""
    # Comparing megabytes line by line takes minutes; beyond the first difference all else may follow from it.
    same = next((at for at, (one, other) in enumerate(zip(golden, found, strict=False)) if one != other), None)
    start = max(0, (min(len(golden), len(found)) if same is None else same) - DIFFERENCE_LINES_MAX)
    stop = start + 10 * DIFFERENCE_LINES_MAX
    rows = difflib.unified_diff(golden[start:stop], found[start:stop], f"golden {name}", f"now, from line {start + 1}")
    return [row.rstrip("\n") for row in islice(rows, DIFFERENCE_LINES_MAX)]
