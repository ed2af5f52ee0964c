"""The comparison, as pure functions: what Slurm was seen to show of a job, and everything that Forebay showed of it.

The rule. Slurm was sampled about every 0.1 s, so short states are missing there; of Forebay every event is known. The
two sequences of (job state, reason, buffer state) are laid beside each other in order, so that the least differs:

- What Slurm showed must stand in Forebay's sequence. It may be missing only where the sample was torn (the two
  questions of one sample contradict each other), or where a row of the differences says so.
- What Forebay showed must stand in Slurm's, unless it lasted less than `TRANSIENT_S`: a sampler may not see it, and
  what takes no time in one may take a moment in the other. Otherwise a row must say so.
- Of a job that only listings told of, what lies between two listings is not compared: nobody looked.
- The same thing may be seen twice in a row: it is one thing.

What a sample does not tell (a listing has no buffer state) is not compared.
"""

import re
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Final

import msgspec

from tests.conformance.replayer.differences import Difference, Differences, Kind, Situation

TRANSIENT_S: Final = 1.5
"""Seconds that Forebay may show something that Slurm was not seen to show: its agents start a process for each
operation. The delays in scripts are longer. It is the same however busy this machine is (`--transient`)."""

_NEWER: Final = re.compile(r"^(burst_buffer/lua:_)(?:JobHeldAdmin:_)?(slurm_bb_\w+)_failed:_")
"""How releases from 25.05 on begin the reason of a failed operation."""

_EXACT, _DECLARED, _WRONG = 0, 1, 1_000
_STAY: Final = 0
_FREE: Final = 0


class Seen(msgspec.Struct, frozen=True):
    """What Slurm was seen to show; None is what the sample does not tell."""

    line: int
    at_s: float
    state: str | None
    reason: str | None
    buffer: str | None
    held: bool | None = None
    torn: bool = False
    where: Situation = Situation("")
    listed: bool = False
    """Whether a listing told it in passing: nobody looked between two listings."""
    lasted_s: float = 0.0
    """How long it was shown, up to the first thing that was seen to be otherwise; 0 for the last one."""

    @property
    def text(self) -> str:
        """As patterns see it."""
        return shown_text(self.state, self.reason, self.buffer, self.held)


class Shown(msgspec.Struct, frozen=True):
    """What Forebay showed, from `at_s` on for `lasted_s` seconds of the run."""

    revision: int
    at_s: float
    lasted_s: float
    state: str
    reason: str
    buffer: str
    held: bool = False

    @property
    def text(self) -> str:
        """As patterns see it."""
        return shown_text(self.state, self.reason, self.buffer, self.held)


class Outcome(StrEnum):
    """What became of one thing that was compared."""

    MATCHED = "matched"
    DECLARED = "declared"
    ASIDE = "aside"
    """Transient: neither for nor against."""
    FAILED = "failed"


class Step(msgspec.Struct, frozen=True):
    """One thing that was compared: expected of Slurm, got from Forebay; either may be absent."""

    outcome: Outcome
    line: int
    expected: str
    got: str
    row: Difference | None = None
    note: str = ""


def shown_text(state: str | None, reason: str | None, buffer: str | None, held: bool | None) -> str:
    """Return one thing shown as `STATE REASON BUFFER`, with `held` where a pending job is."""
    words = [state or "?", normal_reason(reason) if reason is not None else "?"]
    words.append("?" if buffer is None else buffer or "-")
    if held and state == "PENDING":
        words.append("held")
    return " ".join(words)


def normal_reason(reason: str) -> str:
    """Return a reason as scontrol writes it, without what a provider's last newline left behind, and of a failed
    operation in the words of releases before 25.05.
    """
    return _NEWER.sub(r"\1\2:_", reason.strip().replace(" ", "_")).rstrip("_") or "None"


def agrees(seen: Seen, shown: Shown) -> bool:
    """Say whether all that the sample tells is what Forebay showed."""
    return (
        (seen.state is None or seen.state == shown.state)
        and (seen.reason is None or normal_reason(seen.reason) == normal_reason(shown.reason))
        and (seen.buffer is None or seen.buffer == shown.buffer)
        and (seen.held is None or shown.state != "PENDING" or seen.held == shown.held)
    )


def merge(shown: Sequence[Shown]) -> list[Shown]:
    """Return the sequence with what did not change in between as one."""
    found: list[Shown] = []
    for one in shown:
        if found and found[-1].text == one.text:
            found[-1] = msgspec.structs.replace(found[-1], lasted_s=found[-1].lasted_s + one.lasted_s)
        else:
            found.append(one)
    return found


def compare_sequences(
    seen: Sequence[Seen], shown: Sequence[Shown], differences: Differences, *, transient_s: float = TRANSIENT_S
) -> list[Step]:
    """Lay the two sequences beside each other; return one step for each thing, in order."""
    shown = merge(shown)
    rows, columns = len(seen), len(shown)
    pairs: dict[tuple[int, int], tuple[int, Difference | None]] = {}

    def pair(i: int, j: int) -> tuple[int, Difference | None]:
        if (i, j) not in pairs:
            pairs[i, j] = _pair(seen[i], shown[j], differences)
        return pairs[i, j]

    lone_seen = [_lone_seen(one, differences) for one in seen]
    where = seen[-1].where if seen else Situation("")
    lone_shown = [
        _lone_shown(one, _nearest(seen, shown, j, where), differences, transient_s) for j, one in enumerate(shown)
    ]
    watched = [number for number, one in enumerate(seen) if not one.listed]

    def cost_shown(i: int, j: int) -> tuple[int, Outcome, Difference | None]:
        # Between listings nobody looked: only from the first sample to the last thing seen.
        if not watched or (i < watched[0] and seen[0].listed):
            return _FREE, Outcome.ASIDE, None
        return lone_shown[j]

    best: list[list[tuple[int, str]]] = [[(0, "")] * (columns + 1) for _ in range(rows + 1)]
    for i in range(rows + 1):
        for j in range(columns + 1):
            if i == j == 0:
                continue
            ways: list[tuple[int, str]] = []
            if i and j:
                cost = pair(i - 1, j - 1)[0]
                ways.append((best[i - 1][j - 1][0] + cost, "both"))
                ways.append((best[i - 1][j][0] + max(cost, _STAY), "again seen"))
                ways.append((best[i][j - 1][0] + max(cost, _STAY), "again shown"))
            if i:
                ways.append((best[i - 1][j][0] + lone_seen[i - 1][0], "seen"))
            if j:
                ways.append((best[i][j - 1][0] + cost_shown(i, j - 1)[0], "shown"))
            best[i][j] = min(ways, key=lambda way: way[0])
    return _steps(seen, shown, best, pairs, lone_seen, cost_shown)


def _steps(
    seen: Sequence[Seen],
    shown: Sequence[Shown],
    best: list[list[tuple[int, str]]],
    pairs: dict[tuple[int, int], tuple[int, Difference | None]],
    lone_seen: list[tuple[int, Outcome, Difference | None]],
    lone_shown: Callable[[int, int], tuple[int, Outcome, Difference | None]],
) -> list[Step]:
    steps: list[Step] = []
    i, j = len(seen), len(shown)
    while i or j:
        way = best[i][j][1]
        if way in ("both", "again seen", "again shown"):
            cost, row = pairs[i - 1, j - 1]
            outcome = {_EXACT: Outcome.MATCHED, _DECLARED: Outcome.DECLARED}.get(cost, Outcome.FAILED)
            if way == "again shown" and outcome is Outcome.MATCHED:
                outcome = Outcome.ASIDE
            step = Step(outcome, seen[i - 1].line, seen[i - 1].text, shown[j - 1].text, row)
            steps.append(_held_to(step, shown, j - 1))
        elif way == "seen":
            _, outcome, row = lone_seen[i - 1]
            steps.append(Step(outcome, seen[i - 1].line, seen[i - 1].text, "", row))
        else:
            _, outcome, row = lone_shown(i, j - 1)
            line = seen[i - 1].line if i else (seen[0].line if seen else 0)
            step = Step(outcome, line, "", shown[j - 1].text, row, f"for {shown[j - 1].lasted_s:.1f} s")
            steps.append(_held_to(step, shown, j - 1))
        i, j = i - (way in ("both", "again seen", "seen")), j - (way in ("both", "again shown", "shown"))
    steps.reverse()
    return steps


_RUNS: Final = ("CONFIGURING", "RUNNING")


def _held_to(step: Step, shown: Sequence[Shown], j: int) -> Step:
    """Return the step, failed where what its row demands of Forebay's other states is not so."""
    row = step.row
    if row is None or step.outcome is not Outcome.DECLARED:
        return step
    if row.previous is not None and not (j and row.previous.fullmatch(shown[j - 1].text)):
        note = f"just before it was {shown[j - 1].text if j else 'nothing'}"
        return msgspec.structs.replace(step, outcome=Outcome.FAILED, note=note)
    waited = None if row.before_run is None else _waited(shown, j)
    if row.before_run is not None and waited is not None:
        if any(row.before_run.fullmatch(one.text) for one in waited):
            return step
        note = f"it ran and never showed {row.before_run.pattern}"
        return msgspec.structs.replace(step, outcome=Outcome.FAILED, note=note)
    return step


def _waited(shown: Sequence[Shown], j: int) -> Sequence[Shown] | None:
    """Return what was shown between the end of the former run and the one that comes next, or is under way; None
    where none comes.
    """
    run = next((k for k in range(j, len(shown)) if shown[k].state in _RUNS), None)
    if run is None:
        return None
    while run and shown[run - 1].state in _RUNS:
        run -= 1
    first = run
    while first and shown[first - 1].state == "PENDING":
        first -= 1
    return shown[first:run]


def _pair(seen: Seen, shown: Shown, differences: Differences) -> tuple[int, Difference | None]:
    if agrees(seen, shown):
        return _EXACT, None
    row = differences.find(Kind.SHOWN, seen.where, seen.text, shown.text)
    # A wrong pair costs as much as two lone ones, so that a diff shows what stands against what.
    return (_DECLARED, row) if row is not None else (2 * _WRONG - 1, None)


def _lone_seen(seen: Seen, differences: Differences) -> tuple[int, Outcome, Difference | None]:
    if seen.torn:
        return _FREE, Outcome.ASIDE, None
    row = differences.find(Kind.MISSING, seen.where, seen.text, "", lasted_s=seen.lasted_s)
    return (_DECLARED, Outcome.DECLARED, row) if row is not None else (_WRONG, Outcome.FAILED, None)


def _lone_shown(
    shown: Shown, where: Situation, differences: Differences, transient_s: float
) -> tuple[int, Outcome, Difference | None]:
    if shown.lasted_s < transient_s:
        return _FREE, Outcome.ASIDE, None
    row = differences.find(Kind.EXTRA, where, "", shown.text)
    return (_DECLARED, Outcome.DECLARED, row) if row is not None else (_WRONG, Outcome.FAILED, None)


def _nearest(seen: Sequence[Seen], shown: Sequence[Shown], j: int, default: Situation) -> Situation:
    """Return the situation of the last sample that is surely not later than this: by position, as times differ."""
    if not seen:
        return default
    return seen[min(len(seen) - 1, j * len(seen) // max(1, len(shown)))].where
