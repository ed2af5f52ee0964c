"""The load: N clients, each with one connection and one request outstanding, the same code for whatever is measured.

Both systems are driven with plain HTTPS and JSON through aiohttp, without Forebay's own client library, so that what
the client costs is the same on both sides. Only requests answered within the measured time count.
"""

import asyncio
import json
import math
import os
import ssl
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import aiohttp
import msgspec

REQUEST_TIMEOUT_S = 10.0
"""Seconds until a request counts as an error: far beyond any healthy commit."""

REDIRECT = 307
"""HTTP status of a replica that does not lead; Location names the same path at the leader."""

FIRST_ANSWERS_S = 30.0
"""Seconds after the warm-up until all clients must have had an answer, or are measured without it."""

MAX_ERRORS_SHOWN = 3
"""Different error texts kept for the report, count."""

ERROR_PAUSE_S = 0.05
"""Seconds a client waits after an error, so that a failing server is not asked in a tight loop."""


class Target(Protocol):
    """One system under measurement."""

    name: str
    operation: str

    async def start(self) -> None:
        """Start a fresh cluster and return when it can commit."""

    def tls(self) -> ssl.SSLContext:
        """Return the client's side of mutual TLS."""

    async def leader(self, session: aiohttp.ClientSession) -> str:
        """Return the base URL of the leader: each side gets its best case."""

    def request(self, client: int, number: int) -> tuple[str, Mapping[str, Any]]:
        """Return path and JSON body of one write that no other call repeats."""

    def accepted(self, status: int, answer: Mapping[str, Any]) -> bool:
        """Say whether the answer is the promise that the write is durable."""

    async def committed(self, session: aiohttp.ClientSession, base: str) -> int:
        """Return how many writes the cluster itself says it has settled."""

    def cpu_s(self) -> float:
        """Return the processor time of all server processes so far, seconds."""

    def check(self) -> None:
        """Raise if a server has ended by itself."""

    def stop(self) -> None:
        """End the cluster and remove its data."""


class HasProcesses(Protocol):
    """What has servers whose processor time can be read."""

    def cpu_s(self) -> float:
        """Return the processor time of all server processes so far, seconds."""


class Measurement(msgspec.Struct, frozen=True):
    """What one system did for one number of clients in one round."""

    system: str
    clients: int
    commits: int
    seconds: float
    commits_per_s: float
    p50_ms: float
    p99_ms: float
    max_ms: float
    errors: int
    error_examples: tuple[str, ...]
    client_cores: float
    """Processor cores used by the measuring client, mean over the measured time."""
    server_cores: float
    """Processor cores used by the three server processes together, mean over the measured time."""
    slowest_share: float | None = None
    """Answers of the client that got fewest, of the mean of all clients: near 0 where one starves; None: not known."""


class Window:
    """The measured time: it begins when all clients have had an answer, and the warm-up is over.

    A connection takes a handshake, of which a machine may do fewer in the warm-up than there are clients; what that
    costs is measured for itself (`storm`). One client that nobody answers does not keep the others from being measured.
    """

    def __init__(self, clients: int, warm_up_s: float, seconds: float) -> None:
        self._waited_for = set(range(clients))
        self._earliest = time.perf_counter() + warm_up_s
        self._seconds = seconds
        self._begun = asyncio.Event()
        self.start = self.end = math.inf

    @classmethod
    def unbounded(cls) -> "Window":
        """Return one in which everything is measured."""
        window = cls(0, 0.0, math.inf)
        window._begin(0.0)
        return window

    def answered(self, client: int) -> None:
        """Note that a client has had an answer."""
        self._waited_for.discard(client)
        self._begin_if_due()

    async def wait_begun(self) -> None:
        """Return when the measured time has begun."""
        while (left_s := self._earliest - time.perf_counter()) > 0:
            await asyncio.sleep(left_s)
        self._begin_if_due()
        try:
            async with asyncio.timeout(FIRST_ANSWERS_S):
                await self._begun.wait()
        except TimeoutError:
            self._begin(time.perf_counter())

    def _begin_if_due(self) -> None:
        now = time.perf_counter()
        if not (self._waited_for or self._begun.is_set()) and now >= self._earliest:
            self._begin(now)

    def _begin(self, now: float) -> None:
        self.start, self.end = now, now + self._seconds
        self._begun.set()


class _Tally:
    def __init__(self, clients: int) -> None:
        self.latencies_s: list[float] = []
        self.answers = [0] * clients
        self.accepted = 0
        self.errors = 0
        self.examples: list[str] = []
        self.base = ""
        """The leader's URL: shared by all clients, so that one redirect moves them all."""

    def error(self, text: str) -> None:
        self.errors += 1
        if text not in self.examples and len(self.examples) < MAX_ERRORS_SHOWN:
            self.examples.append(text[:300])


class VerificationFailed(Exception):
    """The cluster says it settled fewer writes than it acknowledged."""


async def measure(target: Target, clients: int, *, warm_up_s: float, seconds: float) -> Measurement:
    """Drive `target` with `clients` concurrent clients; return what was answered in `seconds` after `warm_up_s`."""
    connector = aiohttp.TCPConnector(limit=clients + 1, ssl=target.tls(), keepalive_timeout=60)
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        tally = _Tally(clients)
        tally.base = await target.leader(session)
        before = await target.committed(session, tally.base)
        window = Window(clients, warm_up_s, seconds)
        loops = [_client(target, session, number, window, tally) for number in range(clients)]
        cpu = asyncio.create_task(cpu_within(target, window))
        await asyncio.gather(*loops)
        client_cpu_s, server_cpu_s = await cpu
        target.check()
        settled = await target.committed(session, tally.base) - before
    verify_settled(target.name, accepted=tally.accepted, settled=settled)
    return measurement(
        target.name,
        clients,
        seconds,
        tally.latencies_s,
        errors=tally.errors,
        examples=tally.examples,
        client_cpu_s=client_cpu_s,
        server_cpu_s=server_cpu_s,
        answers=tally.answers,
    )


def verify_settled(system: str, *, accepted: int, settled: int) -> None:
    """Raise VerificationFailed unless all that was acknowledged is there.

    This is no benchmark of promises. More may be there: requests that ended as errors.
    """
    if settled < accepted:
        raise VerificationFailed(f"{system} acknowledged {accepted} writes and has settled only {settled}")


def measurement(
    system: str,
    clients: int,
    seconds: float,
    latencies_s: Iterable[float],
    *,
    errors: int,
    examples: Iterable[str],
    client_cpu_s: float,
    server_cpu_s: float,
    answers: Sequence[int] = (),
) -> Measurement:
    """Return the figures of what was answered, and of the processor time it took, in `seconds`.

    `answers`: how many each client got.
    """
    ordered = sorted(latencies_s)
    return Measurement(
        system=system,
        clients=clients,
        commits=len(ordered),
        seconds=seconds,
        commits_per_s=round(len(ordered) / seconds, 1),
        p50_ms=percentile_ms(ordered, 0.50),
        p99_ms=percentile_ms(ordered, 0.99),
        max_ms=percentile_ms(ordered, 1.0),
        errors=errors,
        error_examples=tuple(examples),
        client_cores=round(client_cpu_s / seconds, 2),
        server_cores=round(server_cpu_s / seconds, 2),
        slowest_share=slowest_share(answers),
    )


def slowest_share(answers: Sequence[int]) -> float | None:
    """Return the fewest answers of a client, divided by the mean of all clients; None where there were none."""
    return round(min(answers) * len(answers) / sum(answers), 3) if sum(answers) else None


async def _client(target: Target, session: aiohttp.ClientSession, client: int, window: Window, tally: _Tally) -> None:
    number = 0
    while (sent := time.perf_counter()) < window.end:
        path, body = target.request(client, number)
        number += 1
        try:
            # The body is made here, not by the session: the same bytes, headers and cost whatever is measured.
            async with session.post(
                tally.base + path,
                data=json.dumps(body).encode(),
                headers={"Content-Type": "application/json"},
                allow_redirects=False,
            ) as response:
                text = await response.read()
            window.answered(client)
            ok = response.status < REDIRECT and target.accepted(response.status, json.loads(text))
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            tally.error(f"{type(error).__name__}: {error}")
            await asyncio.sleep(ERROR_PAUSE_S)
            continue
        if not ok:
            # Leadership moved meanwhile: followed, as any client would, and counted, because clients notice.
            location = response.headers.get("Location", "")
            tally.error(f"HTTP {response.status} {location} {text.decode(errors='replace')}".strip())
            if response.status == REDIRECT and location.endswith(path):
                tally.base = location.removesuffix(path)
            await asyncio.sleep(ERROR_PAUSE_S)
            continue
        tally.accepted += 1
        answered = time.perf_counter()
        if window.start <= answered < window.end:
            tally.latencies_s.append(answered - sent)
            tally.answers[client] += 1


async def cpu_within(target: HasProcesses, window: Window) -> tuple[float, float]:
    """Return the processor time of client and servers within the measured time, seconds."""
    await window.wait_begun()
    client_s, server_s = _own_cpu_s(), target.cpu_s()
    await asyncio.sleep(max(0.0, window.end - time.perf_counter()))
    return _own_cpu_s() - client_s, target.cpu_s() - server_s


def _own_cpu_s() -> float:
    times = os.times()
    return times.user + times.system


def percentile_ms(ordered_s: list[float], share: float) -> float:
    """Return the nearest-rank percentile of sorted seconds, in milliseconds; NaN-free: 0.0 when there are none."""
    if not ordered_s:
        return 0.0
    return round(ordered_s[max(0, math.ceil(share * len(ordered_s)) - 1)] * 1000, 3)
