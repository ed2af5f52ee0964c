"""Exercise of one row: the cluster, its clients, and the row of the task table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tests.faults.day2.load import Load
from tests.faults.day2.site import Site, Typed
from tests.faults.day2.table import ROWS, Row
from tests.faults.local_cluster import RunFailed

COMMANDS: Final = {row.task: row for row in ROWS}


def check(holds: object, sentence: str) -> None:
    """RunFailed with the sentence unless it holds."""
    if not holds:
        raise RunFailed(sentence)


class Day:
    """A cluster with clients at work, and the row that is exercised."""

    def __init__(self, site: Site, load: Load) -> None:
        self.site = site
        self.load = load
        self.task = ""

    def command(self) -> Row:
        """Return the row as it stands in the document."""
        return COMMANDS[self.task]

    async def types(
        self, *more: str, at: str | None = None, code: int = 0, names: Mapping[str, str] | None = None
    ) -> Typed:
        """Type the row's command; `names` says what its placeholders are here, `more` comes behind it."""
        words = self.command().words(names or {})
        return await self.site.typed([*words, *more], at=at, code=code)
