"""Background tasks of a process, and its reaction to termination signals."""

from __future__ import annotations

import asyncio
import logging
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from forebay.cluster.system.processes import is_terminated


def stop_on_signals(stop: asyncio.Event) -> None:
    """Let SIGTERM and SIGINT set `stop` in the running loop, and ignore SIGHUP.

    SIGHUP then has no effect before there is a configuration to reload.
    """
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, lambda: None)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if is_terminated():
        stop.set()


async def end_within(process: asyncio.subprocess.Process, grace_s: float) -> None:
    """Wait for the end of a process that was told to stop; send SIGKILL after `grace_s`."""
    # Check `returncode` first: kill() reaps a process that has just ended, and the event loop would lose its exit code.
    try:
        async with asyncio.timeout(grace_s):
            await process.wait()
    except TimeoutError:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
        await process.wait()


def failure_logged(logger: logging.Logger, sentence: str) -> Callable[[asyncio.Task[None]], None]:
    """Return a done callback that logs the failure of a task that no caller awaits."""

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error(sentence, exc_info=error)

    return ended


class Background(ABC):
    """Task that runs `_run` until cancelled. Any exception of `_run` stops the replica.

    A background task must not end silently.
    """

    _task: asyncio.Task[None] | None = None

    def __init__(self, fail: Callable[[BaseException], NoReturn]) -> None:
        """Initialize without starting. `fail` stops the replica."""
        self._fail = fail

    def start(self) -> None:
        """Start in the running loop."""
        self._task = asyncio.get_running_loop().create_task(self._guarded())

    async def stop(self) -> None:
        """Cancel the task, and wait for its end."""
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
