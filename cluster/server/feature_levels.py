"""Which feature level each member knows: what a leader gathers before the cluster's level may be raised (law 12).

Each replica says in its status which level it knows; one of a release that says nothing of it knows level 1. The leader
asks every member of the configuration in force, voters and learners, and what they say goes into the command as facts.
What changes between the asking and the commit can harm nobody but the replica that changed: it stops, and says why.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

import msgspec

from cluster.consensus import Engine
from cluster.schemas import StatusView
from cluster.server.pending import Answer, CannotDecide, NotLeading, OutcomeUnknown, QueueFull
from replica.messages import CONTROLLER, RaiseFeatureLevel, Request, features
from replica.state import EMPTY, State

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

    def __init__(self, name: str, engine: Engine) -> None:
        """For the replica called `name`; `ask` and `version` are set by whoever can ask and knows."""
        self._name = name
        self._engine = engine
        self.ask: Ask = unasked
        self.version = ""

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
            return features.FEATURE_LEVEL_KNOWN, self.version
        try:
            status = await self.ask(name)
        except Exception as error:
            # Whatever it is: not to know is an answer, and the level is not raised then.
            LOGGER.info("%s did not say which feature level it knows: %s", name, error)
            return UNHEARD, ""
        # Who answers at this address must be the member that was meant.
        return (status.feature_level_known, status.version) if status.replica == name else (UNHEARD, "")


# ---- a cluster that is founded now works at the highest level that all its members know: its leader raises it at once


class FirstRaise:
    """Raises the level of a new cluster, as often as it is asked to look and there is something to raise."""

    def __init__(
        self, levels: FeatureLevels, *, state: Callable[[], State], leads: Callable[[], bool],
        submit: Callable[[Request], Answer],
    ) -> None:  # fmt: skip
        """`submit` as `Controller.submit`."""
        self._levels = levels
        self._state = state
        self._leads = leads
        self._submit = submit
        self._task: asyncio.Task[None] | None = None
        self._founded_here = False
        self.enabled = True
        """False: the level stays where it is, for whoever wants to raise it by hand."""

    def founded(self) -> None:
        """Note that this replica has founded the cluster, and begin."""
        self._founded_here = True
        self.poll()

    def poll(self) -> None:
        """Begin to raise the level if it is this replica's to raise and nothing is under way."""
        self._founded_here = self._founded_here and self._leads()
        if self._task is None and self._is_due():
            self._task = asyncio.create_task(self._raise())
            self._task.add_done_callback(self._ended)

    def stop(self) -> None:
        """Give up what is under way."""
        if self._task is not None:
            self._task.cancel()

    def _is_due(self) -> bool:
        state = self._state()
        new = self._founded_here or state.next_job == EMPTY.next_job
        return self.enabled and self._leads() and new and 0 < state.feature_level < features.FEATURE_LEVEL_KNOWN

    async def _raise(self) -> None:
        members = await self._levels.gather()
        lowest = min(member.known for member in members)
        known = tuple((member.id, member.known) for member in members)
        while self._is_due() and self._state().feature_level < lowest:
            command = RaiseFeatureLevel(self._state().feature_level + 1, known)
            with suppress(QueueFull, NotLeading, OutcomeUnknown, CannotDecide):
                if (await self._submit(Request(b"", CONTROLLER, command))).refusal is None:
                    LOGGER.info("the feature level of the new cluster is %d", command.level)
                    continue
            return

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if not task.cancelled() and (error := task.exception()) is not None:
            LOGGER.error("the feature level of the new cluster could not be raised", exc_info=error)
