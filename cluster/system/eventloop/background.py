"""What a process does in the background from its start to its stop, one task of the loop; and who asks it to stop."""

from __future__ import annotations

import asyncio
import logging
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn


def stop_on_signals(stop: asyncio.Event) -> None:
    """Have SIGTERM and SIGINT set `stop`, in the running loop; SIGHUP ends nothing: until there is something to read
    again, who asks for it too early loses nothing.
    """
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, lambda: None)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)


async def end_within(process: asyncio.subprocess.Process, grace_s: float) -> None:
    """Wait until a process has ended that was asked to; SIGKILL if it has not in so many seconds."""
    # Not killed while it ends by itself: kill() looks first, and takes the exit code from the event loop.
    try:
        async with asyncio.timeout(grace_s):
            await process.wait()
    except TimeoutError:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
        await process.wait()


def failure_logged(logger: logging.Logger, sentence: str) -> Callable[[asyncio.Task[None]], None]:
    """Return what logs how a task has failed, as its done callback: nobody waits for the task."""

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error(sentence, exc_info=error)

    return ended


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
