"""Watchdog of a process: the service manager hears of it for as long as it is sound, and no longer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from cluster.system.service_manager import ALIVE, tell_manager, watchdog_s

LOOKS_PER_PERIOD: Final = 3
"""How often a process is looked at within the silence that the service manager takes, count: one look may fail, and
one may be late."""


class Watchdog:
    """Tells the service manager on every look that finds the process sound; where nobody asked for it, nothing."""

    def __init__(self, is_sound: Callable[[], bool], status: Callable[[], str] = str) -> None:
        """`is_sound` is asked on the loop, so that a loop that stands still tells nothing either."""
        self._is_sound: Final = is_sound
        self._status: Final = status
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Look from now on, in the running loop."""
        period_s = watchdog_s()
        if period_s is not None:
            self._task = asyncio.get_running_loop().create_task(self._watch(period_s / LOOKS_PER_PERIOD))

    async def stop(self) -> None:
        """Look no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _watch(self, look_s: float) -> None:
        while True:
            if self._is_sound():
                tell_manager(ALIVE, status=self._status())
            await asyncio.sleep(look_s)
