"""Which feature level this release knows, and what came with which: how replicas of two releases agree (law 12).

The feature level is replicated state: it begins at 1 and goes up by one with `FeatureLevelRaised`, when an operator has
asked for it and every member has said that it knows the next level. Below a level nothing that came with it is written,
so every member can read what a leader of a newer release writes. The event that raises the level names the first
release that knows it: whoever does not know the level stops there, says which release is needed, and changes nothing.

To add a level: append it to LEVELS with the release that brings it; its events say it as their `since_level`, and what
leads to them is refused below it (`level_refusal`). A record that an earlier level writes never grows, since a replica
of an earlier release could not read it: what is new is a new event. Values that are new to an enumeration (a refusal's
code, a job's state) are for events of the new level, too.
"""

from __future__ import annotations

import msgspec

from replica.values import Refusal, RefusalCode

FOUNDING_LEVEL = 1
"""The level at which every cluster begins: its founders need not be of one release."""


class Level(msgspec.Struct, frozen=True):
    """A feature level. `release` is the first release that supports it; `brings` describes the feature."""

    number: int
    release: str
    brings: str


LEVELS: tuple[Level, ...] = (Level(1, "1.0.0", "everything that the first release can do"),)
"""Every level there ever was, in order. Append only."""

FEATURE_LEVEL_KNOWN = LEVELS[-1].number
"""The highest level that this release can carry out; read it as `features.FEATURE_LEVEL_KNOWN`, so that tests can be an
earlier release."""


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
