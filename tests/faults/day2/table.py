"""The table "Day 2: what to type" of docs/operate/operations.md, as it stands there."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Final, NamedTuple

from tests.repo.tree import ROOT

TITLE: Final = "Day 2: what to type"
TEXT: Final = (ROOT / "docs" / "operate" / "operations.md").read_text(encoding="utf-8")
PART: Final = TEXT.partition(f"## {TITLE}\n")[2].partition("\n## ")[0]


class Row(NamedTuple):
    """One row: what is to be done, what to type, and the section that says what comes before and after."""

    task: str
    command: str
    section: str

    def words(self, names: Mapping[str, str]) -> list[str]:
        """Return the words after `forebay`; `names` says what a word of the document is here."""
        return [names.get(word, word) for word in shlex.split(self.command)[1:]]


ROWS: Final = tuple(
    Row(*found) for found in re.findall(r"^\| ([^|]+) \| `(forebay [^`]+)` \| ([^|]+) \|$", PART, flags=re.MULTILINE)
)
