"""Which feature level each member knows: what a leader gathers before the cluster's level may be raised (law 12).

Each replica says in its status which level it knows; one of a release that says nothing of it knows level 1. The leader
asks every member of the configuration in force, voters and learners, and what they say goes into the command as facts.
What changes between the asking and the commit can harm nobody but the replica that changed: it stops, and says why.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import msgspec

from cluster.consensus import Engine
from cluster.schemas import StatusView
from replica.messages import features

LOGGER = logging.getLogger(__name__)

UNHEARD = 0
"""What is noted for a member that did not say which level it knows."""

Ask = Callable[[str], Awaitable[StatusView]]
"""Returns the status of a peer, by its name; raises what it likes when the peer cannot be asked."""


class MemberLevel(msgspec.Struct, frozen=True):
    """What one member knows: the highest feature level, UNHEARD if it did not say, and the version of its release."""

    id: str
    name: str
    votes: bool
    known: int
    version: str = ""


async def unasked(peer: str) -> StatusView:
    """Stand in for asking in a replica that has nobody to ask."""
    raise LookupError(f"this replica cannot ask {peer}")


class FeatureLevels:
    """Asks the members which feature level they know."""

    def __init__(self, name: str, engine: Engine, *, ask: Ask, version: str) -> None:
        """For the replica called `name`, whose release has `version`."""
        self._name = name
        self._engine = engine
        self.ask = ask
        """Returns the status of a peer; raises what it likes."""
        self._version = version

    async def gather(self) -> tuple[MemberLevel, ...]:
        """Return what each member of the configuration in force knows, by name; all are asked at once."""
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
            # Whatever it is: not to know is an answer, and the level is not raised then.
            LOGGER.info("%s did not say which feature level it knows: %s", name, error)
            return UNHEARD, ""
        # Who answers at this address must be the member that was meant.
        return (status.feature_level_known, status.version) if status.replica == name else (UNHEARD, "")
