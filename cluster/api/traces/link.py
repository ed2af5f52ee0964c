"""Replica's side of the trace exporter: keeps the process running while a collector is configured."""

from __future__ import annotations

import asyncio
from typing import Final

from forebay.cluster.api.traces.frames import EXIT_NOT_INSTALLED, REPLICA_CODEC, Leadership, TraceCounts
from forebay.cluster.config import TracesConfig
from forebay.cluster.ipc import FrameConnection, RestartDelays, SupervisedProcess
from forebay.cluster.server import Controller

LOOK_S: Final = 0.5
"""Interval of leadership checks, seconds."""

DELAYS: Final = RestartDelays(first_s=1.0, most_s=60.0, sound_s=60.0)
"""A restart is not urgent."""

STOP_S: Final = 2.0
"""Time for the process to exit, seconds."""


class Tracer:
    """Trace exporter of a replica, if configured."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._config = TracesConfig()
        self._process: SupervisedProcess | None = None
        self._changes = asyncio.Lock()
        self._changing: asyncio.Task[None] | None = None
        self._before = (0, 0)
        """Sent and dropped counts of earlier processes."""
        self._said = TraceCounts(0, 0, 0)

    @property
    def sent_count(self) -> int:
        """Traces accepted by a collector, count."""
        return self._before[0] + self._said.sent

    @property
    def dropped_count(self) -> int:
        """Traces dropped without being accepted, count."""
        return self._before[1] + self._said.dropped

    @property
    def waiting(self) -> int:
        """Traces waiting for a collector, count."""
        return self._said.waiting

    @property
    def is_on(self) -> bool:
        """Return whether a collector is configured."""
        return bool(self._config.endpoint)

    def renew(self, config: TracesConfig) -> None:
        """Use the collector of this configuration, if any."""
        if config != self._config:
            self._config = config
            self._changing = asyncio.get_running_loop().create_task(self._change())

    async def stop(self) -> None:
        """Stop the process."""
        self._config = TracesConfig()
        await self._change()

    async def _change(self) -> None:
        """End the process, and start one with the present configuration."""
        async with self._changes:
            process, self._process = self._process, None
            if process is not None:
                await process.stop()
            if self.is_on:
                self._process = SupervisedProcess(
                    "the trace exporter",
                    "forebay.cluster.api.traces",
                    lambda: TracerConnection(self, self._controller),
                    arguments=self._arguments,
                    delays=DELAYS,
                    judge=lambda ending, delay_s: None if ending == EXIT_NOT_INSTALLED else delay_s,
                    stop_s=STOP_S,
                )
                self._process.start()

    def _arguments(self) -> list[str]:
        controller = self._controller
        return [str(controller.config.storage.directory / controller.name), self._config.url]

    def receive(self, said: TraceCounts) -> None:
        """Take the counts of the running process."""
        self._said = said

    def add_up(self) -> None:
        """Add the counts of a process that has ended; what waited there is lost."""
        self._before, self._said = (self.sent_count, self.dropped_count + self.waiting), TraceCounts(0, 0, 0)


class TracerConnection(FrameConnection[Leadership, TraceCounts]):
    """Connection to one process of the trace exporter, which is told when its replica begins or ceases to lead."""

    def __init__(self, tracer: Tracer, controller: Controller) -> None:
        super().__init__(REPLICA_CODEC, "the trace exporter")
        self._tracer = tracer
        self._controller = controller
        self._leads: bool | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connected(self) -> None:
        self._look()

    def receive(self, frame: TraceCounts) -> None:
        self._tracer.receive(frame)

    def disconnected(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._tracer.add_up()

    def _look(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)
        leads = self._controller.leads
        if leads != self._leads:
            self._leads = leads
            self.send(Leadership(leads))
