"""A cluster that is founded now works at the highest level that all its members know: its leader raises it at once.

It begins at level 1 all the same, since its founders need not be of one release. A cluster that has jobs was founded
before, and its level is an operator's to raise: there may be somebody who wants to go back to an earlier release.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from cluster.answers import Answer
from cluster.levels import FeatureLevels
from cluster.proposer import CannotDecide, NotLeading, OutcomeUnknown, QueueFull
from replica.messages import features
from replica.messages.commands import CONTROLLER, RaiseFeatureLevel, Request
from replica.state.state import EMPTY, State

LOGGER = logging.getLogger(__name__)


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
        self.look()

    def look(self) -> None:
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
