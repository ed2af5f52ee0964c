"""Parser of the table in docs/operate/tasks.md."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Final, NamedTuple

from tests.repo.tree import ROOT

TABLE: Final = ROOT / "docs" / "operate" / "tasks.md"
PART: Final = TABLE.read_text(encoding="utf-8").partition("<!-- begin: tasks -->\n")[2].partition("<!-- end -->")[0]


class Row(NamedTuple):
    """One row: what is to be done, what to type, and the link to the page that says what comes before and after."""

    task: str
    command: str
    section: str

    def words(self, names: Mapping[str, str]) -> list[str]:
        """Return the words after `forebay`; `names` says what a word of the document is here."""
        return [names.get(word, word) for word in shlex.split(self.command)[1:]]


ROWS: Final = tuple(
    Row(*found) for found in re.findall(r"^\| ([^|]+) \| `(forebay [^`]+)` \| ([^|]+) \|$", PART, flags=re.MULTILINE)
)
