"""Drills: faults that operators cause on purpose in the running cluster, and what was measured of each.

A drill is an event when it begins and when it ends, so that histories, metrics and auditors tell an exercise from an
accident. What is done to whom is the business of the client that carries it out (`cluster/cli/drills`); replicas know
that there is one, one at a time, and until when it may last.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

import msgspec

from replica.values import MICROSECONDS_PER_SECOND, NEVER, Instant

SCENARIOS = (
    "switchover",
    "leader-kill",
    "leader-hang",
    "follower-stop",
    "agent-kill",
    "node-down",
    "partition",
    "partition-in",
    "partition-out",
    "disk-full",
    "slow-disk",
    "restore",
    "majority-lost",
    "upgrade",
)
"""What a drill may be. Of the first a replica is the cause; the last three are done to a copy, for which the target
gives the state; the others need a helper on the target's host."""


class DrillVerdict(IntEnum):
    """How a drill ended; the numbers are wire numbers (law 12)."""

    UNDER_WAY = 1
    PASSED = 2
    """All that was measured is within the goals."""
    FAILED = 3
    ABORTED = 4
    """A stop condition, or somebody, ended it before its time."""
    LOST = 5
    """Who carried it out was not heard of again."""

    @property
    def word(self) -> str:
        """As in listings, for example `under way`."""
        return self.name.lower().replace("_", " ")


class Drill(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Drill."""

    id: int
    scenario: str
    target: str
    """The replica or agent that it was done to, or the replica that was to lead."""
    by: str
    """Who carried it out."""
    lasts_s: int
    """After so many seconds it is over, whatever is heard of it."""
    forced: tuple[str, ...] = ()
    """The preconditions that did not hold and were overridden."""
    at: Instant = NEVER
    verdict: DrillVerdict = DrillVerdict.UNDER_WAY
    abort: str = ""
    """Why somebody wants it to end before its time."""
    sentence: str = ""
    """What came of it."""
    figures: tuple[tuple[str, int], ...] = ()
    """What was measured, by name; the name ends with the unit."""
    ended_at: Instant = NEVER
    plan: str = ""
    """Id of the plan that was confirmed: helpers do nothing for another one."""
    second: str = ""
    """The other operator who agreed to it; none: nobody did."""
    lease_s: int = 0
    """After so many seconds without a word of who carries it out it is over; 0: only after its time."""
    renewed_at: Instant = NEVER
    """When that was heard last, after its beginning."""

    @property
    def hard_deadline(self) -> Instant:
        """When it is over whatever is heard of it."""
        return Instant(self.at + self.lasts_s * MICROSECONDS_PER_SECOND)

    @property
    def deadline(self) -> Instant:
        """When it is over unless something is heard of it."""
        if not self.lease_s:
            return self.hard_deadline
        return min(self.hard_deadline, Instant(max(self.at, self.renewed_at) + self.lease_s * MICROSECONDS_PER_SECOND))

    def needs_renewal(self, at: Instant) -> bool:
        """Return whether a word of who carries it out is worth an event: a third of its lease is over."""
        since = at - max(self.at, self.renewed_at)
        return self.lease_s > 0 and 3 * since >= self.lease_s * MICROSECONDS_PER_SECOND

    def is_under_way(self, at: Instant) -> bool:
        """Return whether it may still be carried out."""
        return self.verdict is DrillVerdict.UNDER_WAY and at < self.deadline


def latest_completed(drills: Iterable[Drill]) -> dict[str, Drill]:
    """Return by its scenario the last drill of each that came to its end: it was passed or failed."""
    found: dict[str, Drill] = {}
    for drill in drills:
        if drill.verdict in (DrillVerdict.PASSED, DrillVerdict.FAILED):
            before = found.get(drill.scenario)
            if before is None or before.ended_at < drill.ended_at:
                found[drill.scenario] = drill
    return found


class DrillLock(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An operator's word that there shall be no drill."""

    by: str
    reason: str
    at: Instant = NEVER
