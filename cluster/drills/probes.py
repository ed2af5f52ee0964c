"""Clients of a drill: measured writes, reads, and the writes of a user's program.

A separate process (`prober`) sends and measures the writes. This module sends two kinds of reads every few
milliseconds, without retries or redirects. It also sends writes as a user's program does: sequentially, with retries
and redirects.
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

from forebay.cluster.client import ApiError, Client
from forebay.cluster.drills.figures import Probe, gap_at_us, longest_gap_us
from forebay.cluster.drills.prober import LINE_BYTES_MAX, PROBE_EVERY_S, PROBE_S, Assignment, Report
from forebay.cluster.schemas import Command
from forebay.cluster.schemas import operations as ops
from forebay.cluster.system import Address, Clock
from forebay.cluster.system.eventloop import end_within

READ_EVERY_S: Final = 0.02
"""Seconds between two reads of a kind."""

SILENT_S: Final = 0.03
"""Seconds without an answer after which all replicas are asked."""

UNDER_WAY_MAX: Final = 24
"""Maximum number of outstanding probes of a kind for one replica, which may hang."""

USER_S: Final = 30.0
"""Deadline of one write of a user's program, seconds."""

READY_S: Final = 20.0
"""Time limit for the measuring process to start, seconds."""

ENDS_S: Final = 5.0
"""Time limit for the measuring process to end, seconds."""

Writer = Callable[[int, Callable[[Report], None]], AbstractAsyncContextManager[Callable[[], str]]]
"""Context manager that sends and reports the writes of a drill; raises MeasurementFailed if it cannot start.

It yields a function that returns why the measurement has ended, or an empty string.
"""


class MeasurementFailed(Exception):
    """Measuring process that has ended or did not start."""


def prober_starter(config: Path, identity: str, replicas: dict[str, Address]) -> Writer:
    """Return a function that starts the measuring process for the replicas of a configuration."""

    @contextlib.asynccontextmanager
    async def writing(drill: int, take: Callable[[Report], None]) -> AsyncIterator[Callable[[], str]]:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "forebay.cluster.drills.prober"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # Ctrl-C must reach the coordinator only, which measures until the drill has ended.
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
                raise MeasurementFailed("the measuring process did not start")
            read = reading
            yield lambda: "the measuring process has ended" if read.done() else ""
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
    """Probes sent during one drill, with their results."""

    def __init__(
        self,
        client: Client,
        clock: Clock,
        replicas: dict[str, Address],
        drill: int,
        writer: Writer | None = None,
        user: Callable[[], AbstractAsyncContextManager[Client]] | None = None,
    ) -> None:
        """Create the probes; nothing is sent yet.

        `user` creates the client of the user's program, `client` by default. A separate client measures better: a
        client prefers the replica that answered last, so the drill's own requests would affect a shared client.
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
        """Writes of the user's program."""
        self.rejection = ""
        """Error of the first rejected write."""
        self.abort = ""
        """Reason of an operator's request to abort the drill, or an empty string."""
        self.late_s = 0.0
        """Largest delay in sending a write, seconds: the error of the figures."""
        self.answered_s = clock.monotonic_s()
        """Time of the last acknowledged write."""
        self.unmeasured: Callable[[], str] = lambda: ""
        """Function that returns why writes are no longer measured, or an empty string."""

    def stops(self, from_s: float, until_s: float) -> dict[str, int]:
        """Return the longest gaps without answers in a period, µs, by name of the figure."""
        return {
            "write_stop_us": longest_gap_us(self.writes, from_s, until_s),
            "write_stop_at_us": gap_at_us(self.writes, from_s, until_s),
            "user_write_stop_us": longest_gap_us(self.user_writes, from_s, until_s),
            "read_stop_us": longest_gap_us(self.reads, from_s, until_s),
            "stale_read_stop_us": longest_gap_us(self.stale_reads, from_s, until_s),
        }

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Send probes until the end of the block, then cancel outstanding probes.

        Raises:
            MeasurementFailed: if the measuring process did not start.
        """
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
        self.rejection = self.rejection or report.rejection
        if report.answered_s is not None:
            self.answered_s = max(self.answered_s, report.answered_s)

    async def _use(self, client: Client) -> None:
        """Send writes one at a time, as a user's program does."""
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
            return None  # a replica that lags does not know the drill yet
        if drill is None:
            return None
        self.abort = self.abort or drill.abort
        return drill.revision
