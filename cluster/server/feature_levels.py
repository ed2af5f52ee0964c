"""Feature levels that the members support, collected before the cluster's level may be raised (law 12).

Each replica reports its level in its status; a release that reports none supports level 1. The leader asks all members
of the configuration in force, voters and learners, and includes their reports in the command as facts. If a replica
changes between report and commit, only that replica is affected: it stops with a message.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import msgspec

from forebay.cluster.consensus import Engine
from forebay.cluster.schemas import StatusView
from forebay.replica.messages import features

LOGGER = logging.getLogger(__name__)

UNHEARD = 0
"""Level of a member that did not report."""

Ask = Callable[[str], Awaitable[StatusView]]
"""Returns the status of a peer, by name; any exception means that no status is available."""


class MemberLevel(msgspec.Struct, frozen=True):
    """Highest feature level that a member supports (UNHEARD without a report), and the version of its release."""

    id: str
    name: str
    votes: bool
    known: int
    version: str = ""


async def never_ask(peer: str) -> StatusView:
    """Replacement for a status request on a replica without peers."""
    raise LookupError(f"this replica cannot ask {peer}")


class FeatureLevels:
    """Collects the feature levels that the members support."""

    def __init__(self, name: str, engine: Engine, *, ask: Ask, version: str) -> None:
        """Initialize for the replica called `name`, whose release has `version`."""
        self._name = name
        self._engine = engine
        self.ask = ask
        """Returns the status of a peer; any exception means that no status is available."""
        self._version = version

    async def gather(self) -> tuple[MemberLevel, ...]:
        """Request and return the report of each member of the configuration in force, by name."""
        configuration = self._engine.configuration
        members = sorted(configuration.members(), key=lambda member: member.name)
        found = await asyncio.gather(*(self._ask(member.name) for member in members))
        return tuple(
            MemberLevel(member.id, member.name, configuration.votes(member.id), known, version)
            for member, (known, version) in zip(members, found, strict=True)
        )

    async def _ask(self, name: str) -> tuple[int, str]:
        if name == self._name:
            return features.FEATURE_LEVEL_KNOWN, self._version
        try:
            status = await self.ask(name)
        except Exception as error:
            # Any failure counts as no report, and the level is not raised.
            LOGGER.info("%s did not report the feature level that it supports: %s", name, error)
            return UNHEARD, ""
        # The replica at this address must be the intended member.
        return (status.feature_level_known, status.version) if status.replica == name else (UNHEARD, "")
