"""What probes saw: how long nothing was acknowledged, and whether anything that was is gone."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Final

import msgspec

from replica.values import MICROSECONDS_PER_SECOND

SLOWER_MAX: Final = 10
"""How many times as long as before writes may take after the fault, at their 99th percentile, where nobody says
otherwise."""


class Probe(msgspec.Struct):
    """Question of a drill's client. Times are seconds of its monotonic clock."""

    sent_s: float
    answered_s: float | None = None
    """None: no answer came, or a refusal."""
    command_id: str = ""
    """Of a write."""
    revision: int = 0
    """That the answer gave."""


def longest_gap_us(probes: Iterable[Probe], from_s: float, until_s: float) -> int:
    """Return the longest time without an answer between two moments, µs: from the last before to the first after.

    Answers before `from_s` and after `until_s` count as ends of it, so that one which no answer ended is as long as it
    was looked at.
    """
    begin_s, end_s = _longest_gap(probes, from_s, until_s)
    return round((end_s - begin_s) * MICROSECONDS_PER_SECOND)


def gap_at_us(probes: Iterable[Probe], from_s: float, until_s: float) -> int:
    """Return when that time begins, µs after `from_s`; less than 0 where it began before."""
    return round((_longest_gap(probes, from_s, until_s)[0] - from_s) * MICROSECONDS_PER_SECOND)


def _longest_gap(probes: Iterable[Probe], from_s: float, until_s: float) -> tuple[float, float]:
    answers = sorted(one.answered_s for one in probes if one.answered_s is not None)
    before = max((one for one in answers if one <= from_s), default=from_s)
    after = min((one for one in answers if one >= until_s), default=until_s)
    moments = [before, *(one for one in answers if from_s < one < until_s), after]
    return max(zip(moments, moments[1:], strict=False), key=lambda gap: gap[1] - gap[0])


def latency_us(probes: Iterable[Probe], from_s: float, until_s: float, share: float) -> int:
    """Return the quantile of the time to an answer of the probes that were sent then, µs; 0 for none."""
    taken = sorted(
        one.answered_s - one.sent_s for one in probes if one.answered_s is not None and from_s <= one.sent_s < until_s
    )
    return round(taken[min(len(taken) - 1, int(share * len(taken)))] * MICROSECONDS_PER_SECOND) if taken else 0


def find_lost(probes: Sequence[Probe], answered_again: dict[str, int], unanswered: Container[str] = ()) -> list[str]:
    """Return the IDs of acknowledged writes with another answer, or a rejection, when they are sent again.

    Nothing is known of those in `unanswered`.
    """
    acknowledged = {one.command_id: one.revision for one in probes if one.answered_s is not None and one.command_id}
    return sorted(
        name
        for name, revision in acknowledged.items()
        if name not in unanswered and answered_again.get(name) != revision
    )
