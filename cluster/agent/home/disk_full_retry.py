"""Waiting until a full disk has room again, and saying so once a minute: the agent goes on meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import TypeVar

from cluster.agent.files import is_no_room
from cluster.agent.limits import DISK_FULL_RETRY_S, DISK_FULL_RETRY_S_MAX, DISK_FULL_WARNING_S
from cluster.system import Clock

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class GivenUp(Exception):
    """What waited for room is not wanted any more."""


class DiskFullRetry:
    """The room on the disk of one agent, as those see it who need some."""

    def __init__(self, shown: str, clock: Clock) -> None:
        """Begin with no complaint; `shown` names the disk."""
        self._shown = shown
        self._clock = clock
        self._warned_s: float | None = None

    async def keep_trying(self, what: str, act: Callable[[], _T], given_up: asyncio.Event) -> _T:
        """Return what `act` returns as soon as there is room for it; `what` is what waits, in words.

        GivenUp once `given_up` is set; OSError that has nothing to do with room.
        """
        wait_s = DISK_FULL_RETRY_S
        while not given_up.is_set():
            try:
                result = act()
            except OSError as error:
                if not is_no_room(error):
                    raise
                self.warn(what, error)
            else:
                self.found()
                return result
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(given_up.wait(), wait_s)
            wait_s = min(DISK_FULL_RETRY_S_MAX, 2 * wait_s)
        raise GivenUp

    def warn(self, what: str, error: OSError) -> None:
        """Say that `what` has to wait, unless something of the kind was said within the last minute."""
        now_s = self._clock.monotonic_s()
        if self._warned_s is None or now_s - self._warned_s >= DISK_FULL_WARNING_S:
            self._warned_s = now_s
            logger.warning(
                "%s: %s: %s waits until there is room; make some, nothing is lost", self._shown, error.strerror, what
            )

    def found(self) -> None:
        """There was room for something."""
        if self._warned_s is not None:
            self._warned_s = None
            logger.info("%s: there is room again", self._shown)
