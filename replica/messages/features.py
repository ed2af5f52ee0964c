"""Feature levels: how replicas of different releases agree on the record formats in use (law 12).

The feature level is replicated state. It starts at 1. `FeatureLevelRaised` raises it by one when an operator requests
it and every member supports the next level. Records of a level are not written below that level, so every member can
read the records of a leader of a newer release. The event names the first release that supports the level. A replica
that does not support it stops there, names the required release, and changes nothing.

To add a level, append it to LEVELS with the release that introduces it. Set `since_level` of its events, and reject
commands that lead to them below the level (`level_rejection`). Never add fields to a record of an earlier level,
because a replica of an earlier release could not read it: define a new event. New values of an enumeration (rejection
codes, job states) may also occur only in events of the new level.
"""

from __future__ import annotations

import msgspec

from forebay.replica.values import Rejection, RejectionCode

FOUNDING_LEVEL = 1
"""Level of a new cluster, whose members may have different releases."""


class Level(msgspec.Struct, frozen=True):
    """A feature level. `release` is the first release that supports it; `brings` describes its features."""

    number: int
    release: str
    brings: str


LEVELS: tuple[Level, ...] = (Level(1, "1.0.0", "everything that the first release can do"),)
"""Levels in ascending order. Append only."""

FEATURE_LEVEL_KNOWN = LEVELS[-1].number
"""Highest level that this release supports. Read it as `features.FEATURE_LEVEL_KNOWN`, so that tests can replace it."""


class ReleaseNeeded(Exception):
    """This replica read a record that only a later release supports. It must stop and change nothing (law 10).

    `level` is the required feature level, 0 if unknown. `release` is the first release that supports it, empty if
    unknown. `revision` is the revision of the record; None if the record belongs to no single command.
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
    """Return the first release that supports a level; empty if this release does not know the level."""
    return next((known.release for known in LEVELS if known.number == level), "")


def check_level(level: int, release: str, *, revision: int | None = None, place: str = "") -> None:
    """Check that this release supports a feature level.

    `release` is the first release that supports it, as named by the record's writer.

    Raises:
        ReleaseNeeded: The level is not supported.
    """
    if level > FEATURE_LEVEL_KNOWN:
        what = f"the cluster has feature level {level}, but this release supports levels up to {FEATURE_LEVEL_KNOWN}"
        raise ReleaseNeeded(what, level=level, release=release, revision=revision, place=place)


def level_rejection(feature_level: int, needed: int, what: str, place: str = "") -> Rejection | None:
    """Return the rejection of a command that needs level `needed`, or None if the cluster has reached it.

    `what` names the feature in the message.
    """
    if feature_level >= needed:
        return None
    return Rejection(
        RejectionCode.WRONG_STATE,  # the ledger contains rejections, so only codes of level 1 are possible
        f"{what} requires feature level {needed}, but the cluster has {feature_level}",
        "raise it once every replica runs a release that supports it: forebay cluster raise-feature-level",
        place,
    )
