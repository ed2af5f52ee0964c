"""Results of the user sections: a row per figure, printed as docs/explain/performance.md has it, and its figures."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

Say = Callable[[str], None]


class Row(NamedTuple):
    """One figure: of Forebay, and of what stands beside it (empty: nothing does)."""

    what: str
    forebay: str
    beside: str = ""


class Found(NamedTuple):
    """What a section found."""

    rows: list[Row]
    figures: dict[str, Any]
    whole: bool = True
    """Whether everything was measured without an error."""


def markdown(rows: Sequence[Row]) -> str:
    """Return the rows as a table of a page."""
    return "\n".join(
        [
            "| what a user does | Forebay | beside it |",
            "|---|---|---|",
            *("|" + "".join(f" {cell} |" if cell else " |" for cell in row) for row in rows),
        ]
    )


def median(values: Sequence[float], digits: int = 3) -> float:
    """Return the median, rounded; 0.0 of nothing."""
    return round(statistics.median(values), digits) if values else 0.0


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Return the median and, of several, the least and the greatest: `13.4 (12.9 to 14.2)`."""
    if len(values) < 2:
        return f"{median(values):.{digits}f}"
    return f"{median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"
