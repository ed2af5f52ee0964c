"""Which feature level this release knows, and what came with which: how replicas of two releases agree (law 12).

The feature level is replicated state: it begins at 1 and goes up by one with `FeatureLevelRaised`, when an operator has
asked for it and every member has said that it knows the next level. Below a level nothing that came with it is written,
so every member can read what a leader of a newer release writes. The event that raises the level names the first
release that knows it: whoever does not know the level stops there, says which release is needed, and changes nothing.

To add a level: append it to LEVELS with the release that brings it, and name its events in EVENT_LEVELS. A record that
an earlier level writes never grows, since a replica of an earlier release could not read it: what is new is a new
event. Values that are new to an enumeration (a refusal's code, a job's state) are for events of the new level, too.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from replica.messages import events as e
from replica.values import Refusal, RefusalCode

FOUNDING_LEVEL = 1
"""The level at which every cluster begins: its founders need not be of one release."""


class Level(msgspec.Struct, frozen=True):
    """One feature level. `release` is the first one that knows it; `brings` says in words what it allows."""

    number: int
    release: str
    brings: str


LEVELS: tuple[Level, ...] = (
    Level(1, "0.1.0.dev0", "everything that a cluster could do before there were feature levels"),
    Level(2, "0.1.0", "feature levels themselves: a release that is too old names the one that is needed"),
    Level(3, "0.2.0", "burst buffers as Slurm documents them whole"),
    Level(4, "0.3.0", "transfers with receipts, partitions, changes of waiting jobs"),
)
"""Every level there ever was, in order. Append only."""

FEATURE_LEVEL_KNOWN = LEVELS[-1].number
"""The highest level that this release can carry out; read it as `features.FEATURE_LEVEL_KNOWN`, so that tests can be an
earlier release."""

BURST_BUFFERS_WHOLE = 3
"""The level from which on jobs may have options, buffers may be persistent, and all that belongs to them."""

TRANSFERS_AND_PARTITIONS = 4
"""The level from which on transfers leave receipts and follow rules, there are partitions, and jobs change while they
wait."""

EVENT_LEVELS: Mapping[type, int] = {
    e.FeatureLevelRaised: 2,
    e.PersistentReserved: BURST_BUFFERS_WHOLE,
    e.PersistentCreated: BURST_BUFFERS_WHOLE,
    e.PersistentDeletionStarted: BURST_BUFFERS_WHOLE,
    e.PersistentDeleted: BURST_BUFFERS_WHOLE,
    e.PreRunFailed: BURST_BUFFERS_WHOLE,
    e.JobSuspended: BURST_BUFFERS_WHOLE,
    e.JobResumed: BURST_BUFFERS_WHOLE,
    e.RequeueRequested: BURST_BUFFERS_WHOLE,
    e.RunRequeued: BURST_BUFFERS_WHOLE,
    e.OperationsRestarted: BURST_BUFFERS_WHOLE,
    e.BufferCleared: BURST_BUFFERS_WHOLE,
    e.OperationQueued: BURST_BUFFERS_WHOLE,
    e.OperationOrdered: BURST_BUFFERS_WHOLE,
    e.SiteConfigured: BURST_BUFFERS_WHOLE,
    e.PoolRemoved: BURST_BUFFERS_WHOLE,
    e.PoolUnitSet: BURST_BUFFERS_WHOLE,
    e.AccountSet: BURST_BUFFERS_WHOLE,
    e.AccountDeleted: BURST_BUFFERS_WHOLE,
    e.QosSet: BURST_BUFFERS_WHOLE,
    e.QosDeleted: BURST_BUFFERS_WHOLE,
    e.LicenseSet: BURST_BUFFERS_WHOLE,
    e.LicenseDeleted: BURST_BUFFERS_WHOLE,
    e.ReservationSet: BURST_BUFFERS_WHOLE,
    e.ReservationDeleted: BURST_BUFFERS_WHOLE,
    e.ReservationStarted: BURST_BUFFERS_WHOLE,
    e.ReservationEnded: BURST_BUFFERS_WHOLE,
    e.SchedulingRulesSet: BURST_BUFFERS_WHOLE,
    e.MailDropped: BURST_BUFFERS_WHOLE,
    e.MailSent: BURST_BUFFERS_WHOLE,
    e.TransferRulesSet: TRANSFERS_AND_PARTITIONS,
    e.PartitionSet: TRANSFERS_AND_PARTITIONS,
    e.PartitionDeleted: TRANSFERS_AND_PARTITIONS,
    e.UsageReset: TRANSFERS_AND_PARTITIONS,
    e.JobUpdated: TRANSFERS_AND_PARTITIONS,
    e.TransferRecorded: TRANSFERS_AND_PARTITIONS,
    e.TransferCheckpointed: TRANSFERS_AND_PARTITIONS,
}
"""The level that an event came with; 1 for all that are not here. The cluster is at it once the event is folded."""


class ReleaseNeeded(Exception):
    """This replica met what only a later release knows. It must stop, with everything as it is (law 10).

    `level` is the feature level that is needed, `release` the first one that knows it; 0 and "" where that is not said.
    `revision` is that of the command at which it shows; None where it is not one command's.
    """

    def __init__(
        self, what: str, *, level: int = 0, release: str = "", revision: int | None = None, place: str = ""
    ) -> None:
        where = f"revision {revision}" if revision is not None else place
        super().__init__(f"{where}: {what}; {_remedy(release)}, on the same directory: nothing in it was changed")
        self.level = level
        self.release = release
        self.revision = revision


def _remedy(release: str) -> str:
    return f"start release {release} or a later one" if release else "start a later release"


def release_of(level: int) -> str:
    """Return the first release that knows a level; "" for a level that this release does not know."""
    return next((known.release for known in LEVELS if known.number == level), "")


def check_level(level: int, release: str, *, revision: int | None = None, place: str = "") -> None:
    """Raise ReleaseNeeded for a level above what this release knows. `release` is the one that its writer names."""
    if level > FEATURE_LEVEL_KNOWN:
        what = f"the cluster has feature level {level}, and this release knows levels up to {FEATURE_LEVEL_KNOWN}"
        raise ReleaseNeeded(what, level=level, release=release, revision=revision, place=place)


def level_refusal(feature_level: int, needed: int, what: str, place: str = "") -> Refusal | None:
    """Return why `what` cannot be asked for below level `needed`, with the remedy; None where it can."""
    if feature_level >= needed:
        return None
    return Refusal(
        RefusalCode.WRONG_STATE,  # a refusal is in the ledger, too: only codes that level 1 knows
        f"{what} came with feature level {needed}, and the cluster is at {feature_level}",
        "raise it once every replica runs a release that knows it: forebay cluster raise-feature-level",
        place,
    )
