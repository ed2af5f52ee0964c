"""Deliberate differences between Forebay and the Slurm that was recorded, as data: tests/conformance/differences.toml.

A row says what differs, where it applies (patterns over the provider and the situation, never over a scenario) and why,
with the place in SEMANTICS that says so. It is used or not; how often is counted and printed.
"""

import re
import tomllib
from collections import Counter
from enum import StrEnum
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

import msgspec


class Kind(StrEnum):
    """What a row is about."""

    SHOWN = "shown"
    """Slurm shows one thing of a job and Forebay another: `slurm` and `forebay` match `STATE REASON BUFFER`."""
    MISSING = "missing"
    """Slurm shows what Forebay never does: `slurm` matches it."""
    EXTRA = "extra"
    """Forebay shows what Slurm never does: `forebay` matches it."""
    ANSWER = "answer"
    """A command is answered otherwise: both match the whole answer, lines joined by ` / `."""
    LINE = "line"
    """One line of a text is another one; an empty pattern stands for a line that is not there."""
    CALL = "call"
    """A call of the provider is another one; an empty pattern stands for a call that is not made."""
    UNSEEN = "unseen"
    """The transcript does not say enough to do the same; `slurm` matches the command."""


POWERS: Final = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15} | {
    letter + end: 2 ** (10 * (index + 1)) for index, letter in enumerate("KMGTP") for end in ("", "IB")
}
"""What the suffixes of sizes mean (SEMANTICS, Sizes)."""

_KEYS: Final = (
    *("id", "kind", "what", "why", "provider", "situation", "slurm", "forebay", "same"),
    *("most_s", "before_run", "previous", "size"),
)  # fmt: skip
SAME: Final = ("state", "reason", "buffer")
"""What a row about something shown may demand to be the same on both sides, in the order of the text."""
_REQUIRED: Final = ("id", "kind", "what", "why")
WHY: Final = re.compile(r"(SEMANTICS|SPUR|SLURM-OBSERVED|README)\b", re.ASCII)
"""A reason names the document that says so."""


class DifferencesError(Exception):
    """The file of differences cannot be used; the message names file, row and key."""


class Difference(msgspec.Struct, frozen=True):
    """One row."""

    id: str
    kind: Kind
    what: str
    why: str
    provider: re.Pattern[str]
    situation: re.Pattern[str]
    slurm: re.Pattern[str]
    forebay: re.Pattern[str]
    same: tuple[str, ...] = ()
    """Which words of `STATE REASON BUFFER` must be the same on both sides all the same."""
    most_s: float | None = None
    """missing: how long Slurm may have shown it, seconds; what it showed longer was no mere lag."""
    before_run: re.Pattern[str] | None = None
    """shown, extra: what Forebay must have shown of the job between this wait and its next run."""
    previous: re.Pattern[str] | None = None
    """extra: what Forebay must have shown just before."""
    size: bool = False
    """line: the `Size=` of Forebay's line must be what the request says, rounded up to Slurm's, which is one grain."""


class Situation(msgspec.Struct, frozen=True):
    """Where a row may apply: what was done last to the job, by which command, with which request."""

    provider: str
    act: str = ""
    """What was done last: submit, cancel, cancel hurry, release, hold, requeue, update, show."""
    command: str = ""
    request: str = ""
    """The directives of the job, lines joined by ` / `."""
    flags: str = ""
    """`Flags=` of the site."""
    after: str = ""
    """For what was seen of a job: what was seen of it just before. For a listing: what was done last to any job, by
    which command, with which request."""
    fact: str = ""
    """What else was found out, in words."""

    @property
    def text(self) -> str:
        """What patterns over the situation are matched with."""
        words = f"act={self.act}; command={self.command}; request={self.request}; flags={self.flags};"
        return f"{words} after={self.after}; fact={self.fact};"


class Differences:
    """The rows, and how often each was used."""

    def __init__(self, rows: tuple[Difference, ...]) -> None:
        self.rows = rows
        self.used: Counter[str] = Counter()

    def find(
        self, kind: Kind, where: Situation, slurm: str, forebay: str, *, lasted_s: float = 0.0
    ) -> Difference | None:
        """Return the first row that allows this, or None. It is not counted: see `use`.

        `lasted_s` is how long Slurm showed it.
        """
        for row in self.rows:
            if (
                row.kind is kind
                and row.provider.fullmatch(where.provider)
                and row.situation.search(where.text)
                and row.slurm.fullmatch(slurm)
                and row.forebay.fullmatch(forebay)
                and _same(row, slurm, forebay)
                and (row.most_s is None or lasted_s <= row.most_s)
                and (not row.size or size_as_asked(where.request, slurm, forebay))
            ):
                return row
        return None

    def use(self, row: Difference) -> None:
        """Count one use of a row."""
        self.used[row.id] += 1


def _same(row: Difference, slurm: str, forebay: str) -> bool:
    """Say whether what must be the same is; what a sample does not tell (`?`) may be anything."""
    ones, others = slurm.split(), forebay.split()
    return all(
        ones[SAME.index(word)] in ("?", others[SAME.index(word)])
        for word in row.same
        if SAME.index(word) < min(len(ones), len(others))
    )


_ASKED: Final = re.compile(r"\bcapacity=(\d+(?:\.\d+)?)([A-Za-z]*)")
_SIZE: Final = re.compile(r"\bSize=(\d+)([A-Za-z]*)")


def size_as_asked(request: str, slurm: str, forebay: str) -> bool:
    """Say whether a line of a listing has the size that the request says, in grains of the size that Slurm's has."""
    asked, grain, got = _ASKED.search(request), _SIZE.search(slurm), _SIZE.search(forebay)
    if asked is None or grain is None or got is None:
        return False
    wanted, one, found = (Fraction(match[1]) * POWERS[match[2].upper()] for match in (asked, grain, got))
    return one > 0 and found == -(-wanted // one) * one


def read_differences(path: Path) -> Differences:
    """Read the rows; DifferencesError says what is wrong with which."""
    try:
        table = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise DifferencesError(f"{path.name}: {error}") from error
    if set(table) - {"difference"}:
        raise DifferencesError(f"{path.name}: only [[difference]] is known here, not {sorted(table)}")
    rows: list[Difference] = []
    for number, values in enumerate(table.get("difference", []), start=1):
        rows.append(_row(path.name, number, values))
    names = Counter(row.id for row in rows)
    for name, count in names.items():
        if count > 1:
            raise DifferencesError(f"{path.name}: {count} rows are called {name!r}; each needs a name of its own")
    return Differences(tuple(rows))


def _row(file: str, number: int, values: dict[str, Any]) -> Difference:
    place = f"{file}: row {number} ({values.get('id', 'without id')})"
    unknown = sorted(set(values) - set(_KEYS))
    if unknown:
        raise DifferencesError(f"{place}: unknown key {unknown[0]!r}; known are {', '.join(_KEYS)}")
    for key in _KEYS:
        if not isinstance(values.get(key, "") if key not in _REQUIRED else values.get(key), str):
            raise DifferencesError(f"{place}: {key} must be there, as text")
    if not WHY.search(values["why"]):
        raise DifferencesError(f"{place}: `why` must name the document that says so, for example SEMANTICS, States")
    try:
        kind = Kind(values["kind"])
    except ValueError:
        raise DifferencesError(f"{place}: kind {values['kind']!r} is not one of {', '.join(Kind)}") from None
    same = tuple(values.get("same", "").split())
    if set(same) - set(SAME) or (same and kind is not Kind.SHOWN):
        raise DifferencesError(f"{place}: `same` names some of {', '.join(SAME)}, in a row of the kind shown")
    patterns = {}
    conditions = [(key, values[key]) for key in ("before_run", "previous") if key in values]
    for key, default in (("provider", ".*"), ("situation", ""), ("slurm", ""), ("forebay", ""), *conditions):
        try:
            patterns[key] = re.compile(values.get(key, default))
        except re.error as error:
            raise DifferencesError(f"{place}: {key} is not a pattern ({error})") from error
    return Difference(
        id=values["id"],
        kind=kind,
        what=values["what"],
        why=values["why"],
        provider=patterns["provider"],
        situation=patterns["situation"],
        slurm=patterns["slurm"],
        forebay=patterns["forebay"],
        same=same,
        most_s=_seconds(place, values),
        before_run=patterns.get("before_run"),
        previous=patterns.get("previous"),
        size=values.get("size", "") == "as asked",
    )


def _seconds(place: str, values: dict[str, Any]) -> float | None:
    if "most_s" not in values:
        return None
    try:
        return float(values["most_s"])
    except ValueError:
        raise DifferencesError(f"{place}: most_s is a number of seconds, as text") from None
