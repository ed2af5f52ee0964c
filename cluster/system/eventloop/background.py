"""What a replica does in the background from its start to its stop: one task of the loop."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NoReturn


class Background(ABC):
    """Runs `_run`, which goes on until it is cancelled. Anything that it raises stops the replica.

    A watch that ended in silence would be worse than none.
    """

    _task: asyncio.Task[None] | None = None

    def __init__(self, fail: Callable[[BaseException], NoReturn]) -> None:
        """`fail` stops the replica."""
        self._fail = fail

    def start(self) -> None:
        """Begin, in the running loop."""
        self._task = asyncio.get_running_loop().create_task(self._guarded())

    async def stop(self) -> None:
        """End it, and wait until it has ended."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _guarded(self) -> None:
        try:
            await self._run()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._fail(error)

    @abstractmethod
    async def _run(self) -> None: ...
