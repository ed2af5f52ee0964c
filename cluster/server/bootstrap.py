"""Bootstrap of a new cluster: its first command, and its initial feature level.

The leader of a new cluster raises the level at once to the highest level that all members support.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from contextlib import suppress

from forebay.cluster.config import Config
from forebay.cluster.server.feature_levels import FeatureLevels
from forebay.cluster.server.pending import Answer, CannotDecide, NotLeading, OutcomeUnknown, QueueFull
from forebay.cluster.system.eventloop import failure_logged
from forebay.replica.messages import CONTROLLER, FoundCluster, RaiseFeatureLevel, Request, features
from forebay.replica.state import EMPTY, State
from forebay.replica.values import DISCLOSURE_KEY_BYTES, RejectionCode

LOGGER = logging.getLogger(__name__)


class Bootstrap:
    """Founds a cluster without state, and raises a new cluster to the level that all its members support."""

    def __init__(
        self,
        config: Config,
        levels: FeatureLevels,
        *,
        state: Callable[[], State],
        leads: Callable[[], bool],
        submit: Callable[[Request], Answer],
        raises: bool = True,
        draw: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        """Initialize the bootstrap.

        `leads` returns whether this replica may decide and knows the time. `submit` is `Controller.submit`. `raises`
        False: operators raise the level. `draw` returns unpredictable bytes.
        """
        self._draw = draw
        self._config = config
        self._levels = levels
        self._state = state
        self._leads = leads
        self._submit = submit
        self._raises = raises
        self._answer: Answer | None = None
        self._founded_here = False
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Found the cluster if this replica leads and it is not founded yet."""
        if not self._leads() or self._state().revision or self._answer is not None:
            return
        config = self._config
        nodes = tuple(agent.name for agent in config.agents)
        command = FoundCluster(
            config.cluster.id,
            config.cluster.name,
            config.policy,
            config.pools,
            nodes,
            config.filesystems,
            self._draw(DISCLOSURE_KEY_BYTES),
        )
        try:
            self._answer = self._submit(Request(b"", CONTROLLER, command))
        except (QueueFull, NotLeading):
            return
        self._answer.add_done_callback(self._founded)

    def poll(self) -> None:
        """Found the cluster or start to raise its level, if due and nothing is pending."""
        self.begin()
        self._founded_here = self._founded_here and self._leads()
        if (self._task is None or self._task.done()) and self._is_due():
            self._task = asyncio.create_task(self._raise())
            self._task.add_done_callback(
                failure_logged(LOGGER, "the feature level of the new cluster could not be raised")
            )

    def stop(self) -> None:
        """Abandon pending work."""
        if self._task is not None:
            self._task.cancel()

    def _founded(self, answer: Answer) -> None:
        self._answer = None
        if answer.cancelled() or answer.exception() is not None:
            return
        rejection = answer.result().rejection
        if rejection is None:
            LOGGER.info("the cluster %s was founded", self._config.cluster.name)
            self._founded_here = True
            self.poll()
        elif rejection.code is not RejectionCode.ALREADY_FOUNDED:
            LOGGER.error(
                "the cluster cannot be founded from %s: %s; %s", self._config.file, rejection.sentence, rejection.remedy
            )

    def _is_due(self) -> bool:
        state = self._state()
        new = self._founded_here or state.next_job == EMPTY.next_job
        return self._raises and self._leads() and new and 0 < state.feature_level < features.FEATURE_LEVEL_KNOWN

    async def _raise(self) -> None:
        members = await self._levels.gather()
        lowest = min(member.known for member in members)
        known = tuple((member.id, member.known) for member in members)
        while self._is_due() and self._state().feature_level < lowest:
            command = RaiseFeatureLevel(self._state().feature_level + 1, known)
            with suppress(QueueFull, NotLeading, OutcomeUnknown, CannotDecide):
                if (await self._submit(Request(b"", CONTROLLER, command))).rejection is None:
                    LOGGER.info("the feature level of the new cluster is %d", command.level)
                    continue
            return
