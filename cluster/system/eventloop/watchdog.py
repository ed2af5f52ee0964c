"""Watchdog of a process: notifies the service manager only while the process is sound."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from forebay.cluster.system.service_manager import ALIVE, tell_manager, watchdog_s

LOOKS_PER_PERIOD: Final = 3
"""Number of checks within the service manager's timeout: one may fail, and one may be late."""


class Watchdog:
    """Notifies the service manager after each check that finds the process sound; idle if no watchdog was requested."""

    def __init__(self, is_sound: Callable[[], bool], status: Callable[[], str] = str) -> None:
        """Initialize. `is_sound` is called on the loop, so a blocked loop sends no notification either."""
        self._is_sound: Final = is_sound
        self._status: Final = status
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the checks in the running loop."""
        period_s = watchdog_s()
        if period_s is not None:
            self._task = asyncio.get_running_loop().create_task(self._watch(period_s / LOOKS_PER_PERIOD))

    async def stop(self) -> None:
        """Stop the checks."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _watch(self, look_s: float) -> None:
        while True:
            if self._is_sound():
                tell_manager(ALIVE, status=self._status())
            await asyncio.sleep(look_s)
