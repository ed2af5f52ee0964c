"""Drills: faults that operators inject on purpose into a running cluster, with their measurements.

Events record the beginning and the end of a drill, so that histories, metrics and auditors can tell exercises from
accidents. The coordinating client (`cluster/drills`) injects the fault. Replicas know only that a drill runs and
its deadline; one runs at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

import msgspec

from forebay.replica.values import MICROSECONDS_PER_SECOND, NEVER, Instant

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
"""Scenarios of drills. A replica performs the first itself; the last three run on a copy made from the target's state;
the others need a helper on the target's host.
"""


class DrillVerdict(IntEnum):
    """Results of drills. The numbers are wire numbers (law 12)."""

    UNDER_WAY = 1
    PASSED = 2
    """All measurements met the goals."""
    FAILED = 3
    ABORTED = 4
    """A stop condition or an operator ended it early."""
    LOST = 5
    """Its coordinator stopped renewing the lease."""

    @property
    def word(self) -> str:
        """Return the verdict as listings show it, for example `under way`."""
        return self.name.lower().replace("_", " ")


class Drill(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A drill and its result."""

    id: int
    scenario: str
    target: str
    """The replica or agent under test, or the replica that was to become leader."""
    by: str
    """The operator who ran it."""
    lasts_s: int
    """Maximum duration, seconds."""
    forced: tuple[str, ...] = ()
    """Preconditions that did not hold and were overridden."""
    at: Instant = NEVER
    verdict: DrillVerdict = DrillVerdict.UNDER_WAY
    abort: str = ""
    """Reason of a request to end it early."""
    sentence: str = ""
    """Summary of the result."""
    figures: tuple[tuple[str, int], ...] = ()
    """Measurements by name; the name ends with the unit."""
    ended_at: Instant = NEVER
    plan: str = ""
    """ID of the confirmed plan; helpers reject any other."""
    second: str = ""
    """Second operator who approved it; empty: none."""
    lease_s: int = 0
    """Time without renewal after which it ends, seconds; 0: only `lasts_s` counts."""
    renewed_at: Instant = NEVER
    """Last renewal of the lease after the beginning."""

    @property
    def hard_deadline(self) -> Instant:
        """Return the time at which it ends regardless of renewals."""
        return Instant(self.at + self.lasts_s * MICROSECONDS_PER_SECOND)

    @property
    def deadline(self) -> Instant:
        """Return the time at which it ends without a further renewal."""
        if not self.lease_s:
            return self.hard_deadline
        return min(self.hard_deadline, Instant(max(self.at, self.renewed_at) + self.lease_s * MICROSECONDS_PER_SECOND))

    def needs_renewal(self, at: Instant) -> bool:
        """Return whether a third of the lease has passed, so that a renewal is worth an event."""
        since = at - max(self.at, self.renewed_at)
        return self.lease_s > 0 and 3 * since >= self.lease_s * MICROSECONDS_PER_SECOND

    def is_under_way(self, at: Instant) -> bool:
        """Return whether it may still run."""
        return self.verdict is DrillVerdict.UNDER_WAY and at < self.deadline


def latest_completed(drills: Iterable[Drill]) -> dict[str, Drill]:
    """Return the latest drill of each scenario that passed or failed, by scenario."""
    found: dict[str, Drill] = {}
    for drill in drills:
        if drill.verdict in (DrillVerdict.PASSED, DrillVerdict.FAILED):
            before = found.get(drill.scenario)
            if before is None or before.ended_at < drill.ended_at:
                found[drill.scenario] = drill
    return found


class DrillLock(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An operator's ban on drills."""

    by: str
    reason: str
    at: Instant = NEVER
