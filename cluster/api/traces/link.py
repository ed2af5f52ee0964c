"""Replica's side of the trace exporter: supervises the process while a collector is configured."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
import sys
from contextlib import suppress
from typing import Final

from forebay.cluster.config import TracesConfig
from forebay.cluster.server import Controller
from forebay.cluster.system.eventloop import end_within

LOGGER = logging.getLogger(__name__)

COUNTS: Final = struct.Struct(">QQQ")
"""Report of the process: traces sent, dropped and waiting since its start, counts."""

LEADS: Final = b"1"
FOLLOWS: Final = b"0"
"""Messages to the process: whether its replica leads."""

LOOK_S: Final = 0.5
"""Interval of leadership checks, seconds."""

EXIT_NOT_INSTALLED: Final = 78
"""Exit code without OpenTelemetry; the process is then not restarted."""

BACK_OFF_S: Final = 1.0
BACK_OFF_S_MAX: Final = 60.0
"""Delay before a restart, seconds, doubled each time; it is not urgent."""

SOUND_S: Final = 60.0
"""Run time after which the delay is reset, seconds."""

STOP_S: Final = 2.0
"""Time for the process to exit, seconds."""


class Tracer:
    """Trace exporter of a replica, if configured."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._config = TracesConfig()
        self._keeper: asyncio.Task[None] | None = None
        self._before = (0, 0)
        """Sent and dropped counts of earlier processes."""
        self._said = (0, 0, 0)

    @property
    def sent_count(self) -> int:
        """Traces accepted by a collector, count."""
        return self._before[0] + self._said[0]

    @property
    def dropped_count(self) -> int:
        """Traces dropped without being accepted, count."""
        return self._before[1] + self._said[1]

    @property
    def waiting(self) -> int:
        """Traces waiting for a collector, count."""
        return self._said[2]

    @property
    def is_on(self) -> bool:
        """Return whether a collector is configured."""
        return bool(self._config.endpoint)

    def renew(self, config: TracesConfig) -> None:
        """Use the collector of this configuration, if any."""
        if config == self._config:
            return
        self._config = config
        if self._keeper is not None:
            self._keeper.cancel()
        self._keeper = asyncio.get_running_loop().create_task(self._keep(config.url)) if config.endpoint else None

    async def stop(self) -> None:
        """Stop the process."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)

    async def _keep(self, url: str) -> None:
        loop = asyncio.get_running_loop()
        pause_s = BACK_OFF_S
        while True:
            began_s = loop.time()
            try:
                code: int | str = await self._run(url)
            except OSError as error:
                code = str(error)
            if code == EXIT_NOT_INSTALLED:
                return
            if loop.time() - began_s > SOUND_S:
                pause_s = BACK_OFF_S
            LOGGER.warning("the trace exporter has ended (%s); it is restarted in %.3g s", code, pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, BACK_OFF_S_MAX)

    async def _run(self, url: str) -> int:
        """Start the process, report leadership to it, receive its counts, and return its exit code."""
        ours, its = socket.socketpair()
        ours.setblocking(False)
        controller = self._controller
        home = controller.config.storage.directory / controller.name
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "forebay.cluster.api.traces", str(its.fileno()), str(os.getpid()), str(home), url,
                pass_fds=[its.fileno()], stdin=asyncio.subprocess.DEVNULL,
            )  # fmt: skip
        except OSError:
            ours.close()
            raise
        finally:
            its.close()
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        telling = asyncio.create_task(self._tell(writer))
        try:
            with suppress(asyncio.IncompleteReadError, ConnectionResetError):
                while True:
                    sent, dropped, waiting = COUNTS.unpack(await reader.readexactly(COUNTS.size))
                    self._said = (sent, dropped, waiting)
            return await process.wait()
        finally:
            telling.cancel()
            writer.close()  # closing the socket stops the process
            self._before, self._said = (self.sent_count, self.dropped_count + self.waiting), (0, 0, 0)
            await asyncio.shield(end_within(process, STOP_S))

    async def _tell(self, writer: asyncio.StreamWriter) -> None:
        told = b""
        while True:
            word = LEADS if self._controller.leads else FOLLOWS
            if word != told:
                writer.write(word)
                told = word
            await asyncio.sleep(LOOK_S)
