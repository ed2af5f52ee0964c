"""A drill's client: a write and two kinds of reads every few milliseconds, sent as long as they are measured.

It waits for nobody, follows no redirect and never backs off: it asks the replica that answered last, and once that does
not, all of them. So what it measures is when the cluster answers, not when a client comes to try again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

import msgspec

from cluster.cli.drills.figures import Probe
from cluster.client import ApiError, Client
from cluster.schemas import Command
from cluster.schemas import operations as ops
from cluster.system import Address, Clock

PROBE_EVERY_S: Final = 0.01
"""Between two probes of a kind, seconds: the resolution of the figures."""

PROBE_S: Final = 5.0
"""Seconds after which a probe is given up."""

SILENT_S: Final = 0.03
"""Seconds without an answer after which all replicas are asked."""

UNDER_WAY_MAX: Final = 24
"""Probes of a kind that wait for one replica, count: one that hangs holds no more, and gets no more when it goes on."""


class Probes:
    """What is sent during one drill, and what came of it."""

    def __init__(self, client: Client, clock: Clock, replicas: dict[str, Address], drill: int) -> None:
        """`replicas`: where each answers."""
        self._client = client
        self._clock = clock
        self._replicas = replicas
        self._drill = drill
        self.writes: list[Probe] = []
        self.reads: list[Probe] = []
        self.stale_reads: list[Probe] = []
        self.refusal = ""
        """Why a write was refused, the first time."""
        self.abort = ""
        """Who wants the drill to end, and why."""
        self.late_s = 0.0
        """How late the client itself was at most to send a probe, seconds: as far off may a figure be."""
        self.answered_s = clock.monotonic_s()
        """When a write was acknowledged last."""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Send probes until the end of the block; those that wait for an answer then are given up."""
        turns = itertools.cycle(self._replicas)
        tasks = [
            asyncio.create_task(self._send(self.writes, self._write)),
            asyncio.create_task(self._send(self.reads, self._read)),
            asyncio.create_task(self._send(self.stale_reads, self._stale_read, lambda: (next(turns),))),
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _send(
        self,
        probes: list[Probe],
        ask: Callable[[Probe, Address], Awaitable[int | None]],
        choose: Callable[[], tuple[str, ...]] | None = None,
    ) -> None:
        under_way, waits = set[asyncio.Task[None]](), Counter[str]()
        leads, last_s = "", self._clock.monotonic_s()

        async def one(probe: Probe, name: str) -> None:
            nonlocal leads, last_s
            waits[name] += 1
            try:
                revision = await ask(probe, self._replicas[name])
            finally:
                waits[name] -= 1
            if revision is None:
                leads = "" if leads == name else leads
                return
            leads, last_s = name, self._clock.monotonic_s()
            if probe.answered_s is None:
                probe.answered_s, probe.revision = last_s, revision

        try:
            due_s = self._clock.monotonic_s()
            while True:
                probe = Probe(self._clock.monotonic_s(), command_id=self._client.new_command_id())
                probes.append(probe)
                silent = not leads or probe.sent_s - last_s > SILENT_S
                names = choose() if choose is not None else (tuple(self._replicas) if silent else (leads,))
                for name in names:
                    if waits[name] < UNDER_WAY_MAX:
                        task = asyncio.create_task(one(probe, name))
                        under_way.add(task)
                        task.add_done_callback(under_way.discard)
                # By the clock, not one interval after the last: what sending costs must not thin them out. But a
                # client that is late sends none of those that it missed: it would be later still.
                due_s = max(due_s + PROBE_EVERY_S, self._clock.monotonic_s() + PROBE_EVERY_S / 2)
                await asyncio.sleep(due_s - self._clock.monotonic_s())
                self.late_s = max(self.late_s, self._clock.monotonic_s() - due_s)
        finally:
            for task in list(under_way):
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)

    async def _write(self, probe: Probe, replica: Address) -> int | None:
        request = Command(command_id=probe.command_id)
        try:
            answer = await self._client.ask_once(
                ops.PROBE_DRILL, request, replica=replica, timeout_s=PROBE_S, drill=self._drill
            )
        except (ApiError, msgspec.MsgspecError) as error:
            self.refusal = self.refusal or str(error)
            return None
        if answer is None:
            return None
        self.answered_s = self._clock.monotonic_s()
        return answer.revision

    async def _read(self, probe: Probe, replica: Address) -> int | None:
        return await self._read_as(replica)

    async def _stale_read(self, probe: Probe, replica: Address) -> int | None:
        return await self._read_as(replica, stale="ok")

    async def _read_as(self, replica: Address, **more: str) -> int | None:
        try:
            drill = await self._client.ask_once(
                ops.SHOW_DRILL, None, replica=replica, timeout_s=PROBE_S, drill=self._drill, **more
            )
        except (ApiError, msgspec.MsgspecError):
            return None  # a replica that is behind does not know the drill yet
        if drill is None:
            return None
        self.abort = self.abort or drill.abort
        return drill.revision
