"""Figures computed from probes: longest gap without an answer, latency, lost writes."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Final

import msgspec

from forebay.replica.values import MICROSECONDS_PER_SECOND

SLOWER_MAX: Final = 10
"""Default of --abort-if-slower: largest ratio of the p99 write latency after the fault to that before."""


class Probe(msgspec.Struct):
    """Read or write that a drill's client sent. Times are seconds of its monotonic clock."""

    sent_s: float
    answered_s: float | None = None
    """None if the probe was rejected or not answered."""
    command_id: str = ""
    """Command ID of a write."""
    revision: int = 0
    """Revision in the answer."""


def longest_gap_us(probes: Iterable[Probe], from_s: float, until_s: float) -> int:
    """Return the longest time without an answer in a period, µs.

    A gap that overlaps the period is counted in full: it may begin before `from_s` and end after `until_s`.
    """
    begin_s, end_s = _longest_gap(probes, from_s, until_s)
    return round((end_s - begin_s) * MICROSECONDS_PER_SECOND)


def gap_at_us(probes: Iterable[Probe], from_s: float, until_s: float) -> int:
    """Return the start of the longest gap, µs after `from_s`; negative if it began earlier."""
    return round((_longest_gap(probes, from_s, until_s)[0] - from_s) * MICROSECONDS_PER_SECOND)


def _longest_gap(probes: Iterable[Probe], from_s: float, until_s: float) -> tuple[float, float]:
    answers = sorted(one.answered_s for one in probes if one.answered_s is not None)
    before = max((one for one in answers if one <= from_s), default=from_s)
    after = min((one for one in answers if one >= until_s), default=until_s)
    moments = [before, *(one for one in answers if from_s < one < until_s), after]
    return max(zip(moments, moments[1:], strict=False), key=lambda gap: gap[1] - gap[0])


def latency_us(probes: Iterable[Probe], from_s: float, until_s: float, share: float) -> int:
    """Return a quantile of the latency of the probes sent in a period, µs; 0 without answers."""
    taken = sorted(
        one.answered_s - one.sent_s for one in probes if one.answered_s is not None and from_s <= one.sent_s < until_s
    )
    return round(taken[min(len(taken) - 1, int(share * len(taken)))] * MICROSECONDS_PER_SECOND) if taken else 0


def find_lost(probes: Sequence[Probe], answered_again: dict[str, int], unanswered: Container[str] = ()) -> list[str]:
    """Return the IDs of acknowledged writes that got a different answer or a rejection when they were resent.

    Writes in `unanswered` are skipped, because their state is unknown.
    """
    acknowledged = {one.command_id: one.revision for one in probes if one.answered_s is not None and one.command_id}
    return sorted(
        name
        for name, revision in acknowledged.items()
        if name not in unanswered and answered_again.get(name) != revision
    )
