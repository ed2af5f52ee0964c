"""A drill's clients: what the cluster acknowledges and when, what is read of it, and what a user meets.

Writes are sent by a process of their own (`prober`), which measures. Here two kinds of reads are sent every few
milliseconds, each once and without redirects, and one write after the other as a user's program does: with the waits
between its tries, and following whoever leads.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Final

import msgspec

from cluster.cli.drills.figures import Probe, gap_at_us, longest_gap_us
from cluster.cli.drills.prober import LINE_BYTES_MAX, PROBE_EVERY_S, PROBE_S, Assignment, Report
from cluster.client import ApiError, Client
from cluster.schemas import Command
from cluster.schemas import operations as ops
from cluster.system import Address, Clock
from cluster.system.eventloop import end_within

READ_EVERY_S: Final = 0.02
"""Between two reads of a kind, seconds."""

SILENT_S: Final = 0.03
"""Seconds without an answer after which all replicas are asked."""

UNDER_WAY_MAX: Final = 24
"""Probes of a kind that wait for one replica, count: one that hangs holds no more, and gets no more when it goes on."""

USER_S: Final = 30.0
"""Seconds until a user's program gives one write up."""

READY_S: Final = 20.0
"""Seconds in which the process that measures is to begin."""

ENDS_S: Final = 5.0
"""Seconds in which it is to end."""

Writer = Callable[[int, Callable[[Report], None]], AbstractAsyncContextManager[Callable[[], str]]]
"""Sends the writes of a drill during a block and reports each; NotMeasured where it cannot begin. What the block is
given says why it measures no more, and nothing while it does."""


class MeasurementFailed(Exception):
    """The process that measures has ended, or does not begin."""


def prober_starter(config: Path, identity: str, replicas: dict[str, Address]) -> Writer:
    """Return what starts the process that measures, for the replicas of a configuration."""

    @contextlib.asynccontextmanager
    async def writing(drill: int, take: Callable[[Report], None]) -> AsyncIterator[Callable[[], str]]:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "cluster.cli.drills.prober"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # The keyboard ends a drill through who carries it out, who has it measured to its end.
            start_new_session=True,
            limit=LINE_BYTES_MAX,
        )
        assert process.stdin is not None
        places = {name: (at.host, at.port) for name, at in replicas.items()}
        reading = None
        try:
            process.stdin.write(msgspec.json.encode(Assignment(str(config), identity, drill, places)) + b"\n")
            begun = asyncio.Event()
            reading = asyncio.create_task(_read(process, take, begun))
            await asyncio.wait(
                (reading, begin := asyncio.create_task(begun.wait())),
                timeout=READY_S,
                return_when=asyncio.FIRST_COMPLETED,
            )
            begin.cancel()
            if not begun.is_set():
                raise MeasurementFailed("the process that measures writes does not begin")
            read = reading
            yield lambda: "the process that measures writes has ended" if read.done() else ""
        finally:
            process.stdin.close()
            if reading is not None:
                await asyncio.wait((reading,), timeout=ENDS_S)
                reading.cancel()
            await end_within(process, ENDS_S)

    return writing


async def _read(process: asyncio.subprocess.Process, take: Callable[[Report], None], begun: asyncio.Event) -> None:
    assert process.stdout is not None
    decoder = msgspec.json.Decoder(Report)
    while line := await process.stdout.readline():
        report = decoder.decode(line)
        if report.command_id:
            take(report)
        else:
            begun.set()


class Probes:
    """What is sent during one drill, and what came of it."""

    def __init__(
        self,
        client: Client,
        clock: Clock,
        replicas: dict[str, Address],
        drill: int,
        writer: Writer | None = None,
        user: Callable[[], AbstractAsyncContextManager[Client]] | None = None,
    ) -> None:
        """`replicas`: where each answers. `user` makes the client of the user's program; None: `client` is it.

        A client asks first who answered last: one that the drill uses for its own questions, too, would have the user's
        program wait for whoever did not answer those.
        """
        self._client = client
        self._clock = clock
        self._replicas = replicas
        self._drill = drill
        self._writer = writer
        self._user = user or (lambda: contextlib.nullcontext(client))
        self.writes: list[Probe] = []
        self.reads: list[Probe] = []
        self.stale_reads: list[Probe] = []
        self.user_writes: list[Probe] = []
        """Those of a user's program."""
        self.refusal = ""
        """Why a write was refused, the first time."""
        self.abort = ""
        """Who wants the drill to end, and why."""
        self.late_s = 0.0
        """How late a write was sent at most, seconds: as far off may a figure be."""
        self.answered_s = clock.monotonic_s()
        """When a write was acknowledged last."""
        self.unmeasured: Callable[[], str] = lambda: ""
        """Says why writes are not measured any more, and nothing while they are."""

    def stops(self, from_s: float, until_s: float) -> dict[str, int]:
        """Return for how long at most what was sent in a time was not answered, by the names of figures, µs."""
        return {
            "write_stop_us": longest_gap_us(self.writes, from_s, until_s),
            "write_stop_at_us": gap_at_us(self.writes, from_s, until_s),
            "user_write_stop_us": longest_gap_us(self.user_writes, from_s, until_s),
            "read_stop_us": longest_gap_us(self.reads, from_s, until_s),
            "stale_read_stop_us": longest_gap_us(self.stale_reads, from_s, until_s),
        }

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Send probes until the end of the block; those that wait for an answer then are given up. NotMeasured."""
        assert self._writer is not None
        turns = itertools.cycle(self._replicas)
        async with self._user() as user, self._writer(self._drill, self._take) as self.unmeasured:
            self.answered_s = self._clock.monotonic_s()
            tasks = [
                asyncio.create_task(self._send(self.reads, self._read)),
                asyncio.create_task(self._send(self.stale_reads, self._stale_read, lambda: (next(turns),))),
                asyncio.create_task(self._use(user)),
            ]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def _take(self, report: Report) -> None:
        self.writes.append(Probe(report.sent_s, report.answered_s, report.command_id, report.revision))
        self.late_s = max(self.late_s, report.late_s)
        self.refusal = self.refusal or report.refusal
        if report.answered_s is not None:
            self.answered_s = max(self.answered_s, report.answered_s)

    async def _use(self, client: Client) -> None:
        """Write as a user's program does, one after the other."""
        while True:
            probe = Probe(self._clock.monotonic_s(), command_id=client.new_command_id())
            self.user_writes.append(probe)
            request = Command(command_id=probe.command_id)
            with contextlib.suppress(ApiError):
                answer = await client.call(ops.PROBE_DRILL, request, drill=self._drill, deadline_s=USER_S)
                probe.answered_s, probe.revision = self._clock.monotonic_s(), answer.revision
            await asyncio.sleep(PROBE_EVERY_S)

    async def _send(
        self,
        probes: list[Probe],
        ask: Callable[[Address], Awaitable[int | None]],
        choose: Callable[[], tuple[str, ...]] | None = None,
    ) -> None:
        under_way, waits = set[asyncio.Task[None]](), Counter[str]()
        leads, last_s = "", self._clock.monotonic_s()

        async def one(probe: Probe, name: str) -> None:
            nonlocal leads, last_s
            waits[name] += 1
            try:
                revision = await ask(self._replicas[name])
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
                probe = Probe(self._clock.monotonic_s())
                probes.append(probe)
                silent = not leads or probe.sent_s - last_s > SILENT_S
                names = choose() if choose is not None else (tuple(self._replicas) if silent else (leads,))
                for name in names:
                    if waits[name] < UNDER_WAY_MAX:
                        task = asyncio.create_task(one(probe, name))
                        under_way.add(task)
                        task.add_done_callback(under_way.discard)
                due_s = max(due_s + READ_EVERY_S, self._clock.monotonic_s() + READ_EVERY_S / 2)
                await asyncio.sleep(due_s - self._clock.monotonic_s())
        finally:
            for task in list(under_way):
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)

    async def _read(self, replica: Address) -> int | None:
        return await self._read_as(replica)

    async def _stale_read(self, replica: Address) -> int | None:
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
