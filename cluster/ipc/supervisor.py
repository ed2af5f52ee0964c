"""Supervision of a child by its parent: start, connect, and restart with back-off."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from forebay.cluster.ipc.connection import FrameConnection
from forebay.cluster.system.eventloop import end_within

LOGGER = logging.getLogger(__name__)


class RestartDelays(NamedTuple):
    """Delays before a child is restarted, seconds: doubled each time up to a limit, and reset after a long run."""

    first_s: float = 0.1
    most_s: float = 5.0
    sound_s: float = 30.0
    """Run time after which the delay is reset."""


DELAYS: Final = RestartDelays()


class SupervisedProcess:
    """Child process, `python -m MODULE SOCKET PARENT ARGUMENTS`, that is restarted when it ends."""

    def __init__(
        self,
        name: str,
        module: str,
        connect: Callable[[], FrameConnection[Any, Any]],
        *,
        arguments: Callable[[], Sequence[str]] = tuple,
        descriptors: Sequence[int] = (),
        delays: RestartDelays = DELAYS,
        judge: Callable[[int | str, float], float | None] = lambda ending, delay_s: delay_s,
        stop_signal: signal.Signals | None = None,
        stop_s: float = 5.0,
    ) -> None:
        """Initialize without starting the child.

        `name` is for log messages. `connect` makes this end of each process's socket. `descriptors` are inherited.
        `judge` receives the ending of a process (exit code, or the reason why it did not start) and the delay in
        seconds; it returns the delay to use, or None for no restart. To stop, a process gets `stop_signal`, or by
        default the end of its socket, and SIGKILL after `stop_s` seconds.
        """
        self.name: Final = name
        self.link: FrameConnection[Any, Any] | None = None
        """This end of the running process's socket."""
        self.started = 0
        """Number of processes started."""
        self._module: Final = module
        self._connect: Final = connect
        self._arguments: Final = arguments
        self._descriptors: Final = descriptors
        self._delays: Final = delays
        self._judge: Final = judge
        self._stop_signal: Final = stop_signal
        self._stop_s: Final = stop_s
        self._keeper: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = False

    @property
    def pid(self) -> int | None:
        """PID of the running process, or None."""
        return None if self._process is None else self._process.pid

    def start(self, after: asyncio.Event | None = None, within_s: float = 0) -> None:
        """Keep the child running from now on, or from the event `after` on, but at the latest `within_s` from now."""
        if self._keeper is None:
            self._stopping = False
            self._keeper = asyncio.get_running_loop().create_task(self._keep(after, within_s))

    async def stop(self) -> None:
        """Stop the process, and do not restart it."""
        keeper, self._keeper = self._keeper, None
        if keeper is None:
            return
        self._stopping = True
        if self._process is not None and self._stop_signal is not None:
            self.send_signal(self._stop_signal)
            await end_within(self._process, self._stop_s)
        else:
            keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, if it is running."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def _keep(self, after: asyncio.Event | None, within_s: float) -> None:
        if after is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(within_s):
                    await after.wait()
        loop, delay_s = asyncio.get_running_loop(), self._delays.first_s
        while not self._stopping:
            began_s = loop.time()
            try:
                ending: int | str = await self._run()
            except OSError as error:
                ending = str(error)
            if self._stopping:
                return
            if loop.time() - began_s > self._delays.sound_s:
                delay_s = self._delays.first_s
            judged_s = self._judge(ending, delay_s)
            if judged_s is None:
                return
            delay_s = judged_s
            LOGGER.error("%s has ended (%s); it is restarted in %.3g s", self.name, ending, delay_s)
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, self._delays.most_s)

    async def _run(self) -> int:
        """Start a process, hold its connection until it ends, and return its exit code."""
        ours, its = socket.socketpair()
        ours.setblocking(False)
        descriptors = [its.fileno(), *self._descriptors]
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", self._module, str(its.fileno()), str(os.getpid()), *self._arguments()),
                pass_fds=descriptors,
                stdin=asyncio.subprocess.DEVNULL,
            )
        except OSError:
            ours.close()
            raise
        finally:
            its.close()
        self.started += 1
        self._process = process
        try:
            _, self.link = await asyncio.get_running_loop().create_unix_connection(self._connect, sock=ours)
            await self.link.ended.wait()
        finally:
            if self.link is not None:
                self.link.close()
                self.link = None
            # The process ends because its socket is closed.
            await asyncio.shield(end_within(process, self._stop_s))
            self._process = None
        assert process.returncode is not None
        return process.returncode
