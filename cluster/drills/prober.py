"""Process that measures for how long a drill stops writes.

It sends a write every few milliseconds over connections opened before the fault, to the replica that answered last, or
to all replicas if that replica is silent. It follows no redirects and never waits before a retry, so it measures when
the cluster acknowledges writes, not when a client retries. A separate process is not delayed by other work.

    stdin   assignment, one line of JSON; end of file ends the measurement
    stdout  one line of JSON for each write that was answered or timed out; the first line reports the start
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Final

import msgspec

from forebay.cluster.client import ApiError, Client
from forebay.cluster.config import read_access
from forebay.cluster.schemas import Command
from forebay.cluster.schemas import operations as ops
from forebay.cluster.security import TlsError
from forebay.cluster.system import Address, Clock, SystemClock

PROBE_EVERY_S: Final = 0.01
"""Seconds between two probes of a kind: the resolution of the figures."""

SILENT_S: Final = 0.02
"""Seconds without an acknowledgement after which a write goes to all replicas."""

PROBE_S: Final = 5.0
"""Timeout of a probe, seconds."""

CONNECTIONS: Final = 12
"""Maximum number of outstanding writes for one replica, each on its own connection.

Only a hung replica reaches it, because followers answer at once that they do not lead.
"""

OPENED_S: Final = 1.0
"""Time limit for opening the connections before the measurement starts, seconds."""

PRIORITY: Final = 1
"""Real-time priority, if the account may have one: other programs must not delay the measurement. Not used on a
single processor, where the measured replicas would wait for this process."""

NICENESS: Final = -10
"""Nice value without a real-time priority, if the account may set it."""

LINE_BYTES_MAX: Final = 64 * 1024
"""Largest assignment or report, bytes."""

EXIT_FAILED: Final = 1


class Assignment(msgspec.Struct, frozen=True):
    """Assignment of one measuring process."""

    config: str
    """Path of the configuration."""
    identity: str
    drill: int
    replicas: dict[str, tuple[str, int]]
    """API host and port by replica."""


class Report(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """Result of one write. Times are seconds of the monotonic clock, which all processes of a machine share."""

    sent_s: float
    command_id: str = ""
    """Empty in the first report, which only announces the start."""
    answered_s: float | None = None
    """None if no replica acknowledged the write."""
    revision: int = 0
    late_s: float = 0.0
    """Delay of this process in sending the write."""
    rejection: str = ""
    """Error with which a replica rejected the write."""


Ask = Callable[[str, str], Awaitable[int | None]]
"""Sends a write to a replica (name, command ID) and returns the answer's revision, None without an acknowledgement.
Raises ApiError for a rejection."""


async def send_writes(
    names: Iterable[str], ask: Ask, new_id: Callable[[], str], clock: Clock, tell: Callable[[Report], None]
) -> None:
    """Send a write every PROBE_EVERY_S until cancelled, and report each write; cancel outstanding writes at the end."""
    replicas, waits, open_writes = tuple(names), Counter[str](), dict[str, tuple[float, float]]()
    under_way, leads, last_s = set[asyncio.Task[None]](), "", 0.0

    async def one(command_id: str, name: str) -> int | None:
        nonlocal leads, last_s
        waits[name] += 1
        try:
            revision = await ask(name, command_id)
        finally:
            waits[name] -= 1
        if revision is not None:
            leads, last_s = name, clock.monotonic_s()
        elif leads == name:
            leads = ""
        return revision

    async def write(sent_s: float, late_s: float, chosen: tuple[str, ...]) -> None:
        command_id, rejection = new_id(), ""
        open_writes[command_id] = (sent_s, late_s)
        tries = [asyncio.ensure_future(one(command_id, name)) for name in chosen]
        try:
            for first in asyncio.as_completed(tries):
                try:
                    revision = await first
                except ApiError as error:
                    rejection = str(error)
                    continue
                if revision is not None and open_writes.pop(command_id, False):
                    tell(Report(sent_s, command_id, clock.monotonic_s(), revision, late_s))
        finally:
            for task in tries:
                task.cancel()
        if open_writes.pop(command_id, False):
            tell(Report(sent_s, command_id, None, 0, late_s, rejection))

    def begin(late_s: float) -> None:
        is_silent = not leads or clock.monotonic_s() - last_s > SILENT_S
        asked = replicas if is_silent else (leads,)
        chosen = tuple(name for name in asked if waits[name] < CONNECTIONS)
        task = asyncio.create_task(write(clock.monotonic_s(), late_s, chosen))
        under_way.add(task)
        task.add_done_callback(under_way.discard)

    try:
        # Open all connections before the measurement: a handshake costs more than a write.
        for _ in range(CONNECTIONS):
            begin(0.0)
        await asyncio.wait(set(under_way), timeout=OPENED_S)
        due_s = clock.monotonic_s()
        tell(Report(due_s))
        while True:
            begin(max(0.0, clock.monotonic_s() - due_s))
            # Schedule by the clock, so that the time for sending does not lower the rate. Missed probes are skipped,
            # since sending them would delay the next ones.
            due_s = max(due_s + PROBE_EVERY_S, clock.monotonic_s() + PROBE_EVERY_S / 2)
            await asyncio.sleep(due_s - clock.monotonic_s())
    finally:
        for task in list(under_way):
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
        for command_id, (sent_s, late_s) in open_writes.items():
            tell(Report(sent_s, command_id, None, 0, late_s))


def make_sender(client: Client, replicas: dict[str, Address], drill: int) -> Ask:
    """Return a function that sends one write of a drill to one replica, without retries."""

    async def ask(name: str, command_id: str) -> int | None:
        try:
            answer = await client.ask_once(
                ops.PROBE_DRILL, Command(command_id=command_id), replica=replicas[name], timeout_s=PROBE_S, drill=drill
            )
        except msgspec.MsgspecError:
            return None
        return None if answer is None else answer.revision

    return ask


async def _measure(assignment: Assignment, stdin: asyncio.StreamReader) -> None:
    replicas = {name: Address(host, port) for name, (host, port) in assignment.replicas.items()}
    encoder = msgspec.json.Encoder()

    def tell(report: Report) -> None:
        os.write(sys.stdout.fileno(), encoder.encode(report) + b"\n")

    async with Client.from_config(read_access(Path(assignment.config)), assignment.identity) as client:
        ask = make_sender(client, replicas, assignment.drill)
        sending = asyncio.create_task(send_writes(replicas, ask, client.new_command_id, SystemClock(), tell))
        ending = asyncio.create_task(stdin.read())
        await asyncio.wait((sending, ending), return_when=asyncio.FIRST_COMPLETED)
        ending.cancel()
        sending.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sending


async def _serve() -> None:
    stdin = asyncio.StreamReader(limit=LINE_BYTES_MAX)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin)
    assignment = msgspec.json.decode(await stdin.readline(), type=Assignment)
    # A garbage collection would delay an answer, and the process ends before much garbage accumulates.
    gc.disable()
    _raise_priority()
    await _measure(assignment, stdin)


def _raise_priority() -> None:
    """Raise this process's scheduling priority as far as the account allows."""
    if len(os.sched_getaffinity(0)) > 1:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(PRIORITY))
            return
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
        Path("/proc/self/autogroup").write_text(str(NICENESS))


def run() -> int:
    """Run the assignment until standard input ends, and return the exit code."""
    try:
        asyncio.run(_serve())
    except (OSError, ValueError, TlsError, msgspec.MsgspecError) as error:
        # The reader of the reports has ended, or the assignment is invalid.
        print(f"forebay drill: {error}", file=sys.stderr)
        return EXIT_FAILED
    return 0


if __name__ == "__main__":
    sys.exit(run())
