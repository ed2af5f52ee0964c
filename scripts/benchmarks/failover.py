"""How long writes stop when the leader is lost: Forebay and etcd, killed or hung, seen from a client outside both.

The client keeps warm connections to all three members. At the moment of the fault it begins to send writes to both
survivors, one every few milliseconds to each, without waiting for earlier ones, until the first is acknowledged: so
neither a member that holds a request until it knows a leader nor one that refuses it at once is at an advantage.
"""

import asyncio
import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from benchmarks.etcd import EtcdCluster
from benchmarks.forebay import ForebayCluster
from benchmarks.load import REDIRECT, percentile_ms

PROBE_EVERY_S = 0.01
"""Between two writes to one survivor, seconds: the resolution of the figure."""

PROBE_TIMEOUT_S = 2.0
"""After which one write is given up, seconds; others are under way meanwhile."""

FAILOVER_S_MAX = 30.0
"""Without an acknowledged write after this the measurement has failed, seconds."""

SETTLE_S = 1.0
"""Between the return of the member that was lost and the next fault, seconds."""

TIMINGS: dict[str, tuple[int, int, int]] = {"0.15-0.3": (150, 300, 30), "1-2": (1000, 2000, 100)}
"""Name -> shortest and longest election timeout and heartbeat, milliseconds. etcd draws from one to two times its
election timeout, and 1,000 and 100 are its defaults; both systems get the same."""

FAULTS: dict[str, signal.Signals] = {"kill": signal.SIGKILL, "hang": signal.SIGSTOP}
"""A killed process closes its sockets, so that its peers notice at once if they look; a hung one, as a lost machine,
is only silent."""


class Failovers(msgspec.Struct, frozen=True):
    """What one system did with one timing and one kind of fault."""

    system: str
    timing_s: str
    fault: str
    count: int
    p50_ms: float
    p99_ms: float
    max_ms: float


def cluster_of(system: str, timing: str, directory: Path) -> "ForebayCluster | EtcdCluster":
    """Return a cluster with the election settings of TIMINGS."""
    least, most, heartbeat = TIMINGS[timing]
    if system == "forebay":
        forebay = ForebayCluster(directory)
        forebay.timing = {"election_min_ms": least, "election_max_ms": most, "heartbeat_ms": heartbeat}
        return forebay
    etcd = EtcdCluster(directory)
    etcd.timing = (f"--election-timeout={least}", f"--heartbeat-interval={heartbeat}")
    return etcd


async def measure(system: str, timing: str, fault: str, count: int, directory: Path) -> tuple[Failovers, list[float]]:
    """Lose the leader `count` times; return the summary and each time in seconds."""
    cluster = cluster_of(system, timing, directory)
    taken_s: list[float] = []
    try:
        await cluster.start()
        for number in range(count):
            taken_s.append(await _lose_leader(cluster, FAULTS[fault], number))
    finally:
        cluster.stop()
    ordered = sorted(taken_s)
    return (
        Failovers(
            system,
            timing,
            fault,
            count,
            percentile_ms(ordered, 0.5),
            percentile_ms(ordered, 0.99),
            percentile_ms(ordered, 1.0),
        ),
        taken_s,
    )


async def _lose_leader(cluster: "ForebayCluster | EtcdCluster", fault: signal.Signals, number: int) -> float:
    timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
    connector = aiohttp.TCPConnector(ssl=cluster.tls(), limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        leader = await cluster.leader(session)
        bases = cluster.bases()
        lost = next(name for name, base in bases.items() if base == leader)
        survivors = [base for name, base in bases.items() if name != lost]
        first = asyncio.Event()
        sequence = iter(range(number * 1_000_000, (number + 1) * 1_000_000))

        async def write(base: str) -> bool:
            path, body = cluster.request(0, next(sequence))
            if isinstance(cluster, ForebayCluster):
                path, body = cluster.submission(next(sequence))
            return await _acknowledged(cluster, session, base, path, body)

        # Connections, TLS and whatever else the first request costs are not the failover's.
        await asyncio.gather(*(write(base) for base in [leader, *survivors]))
        os.kill(cluster.pid(lost), fault)
        began = time.perf_counter()
        ended = 0.0
        tasks: set[asyncio.Task[None]] = set()

        async def probe(base: str) -> None:
            nonlocal ended
            if await write(base) and not first.is_set():
                ended = time.perf_counter()
                first.set()

        while not first.is_set():
            for base in survivors:
                task = asyncio.create_task(probe(base))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            try:
                await asyncio.wait_for(first.wait(), PROBE_EVERY_S)
            except TimeoutError:
                if time.perf_counter() - began > FAILOVER_S_MAX:
                    raise RuntimeError(f"no write was acknowledged for {FAILOVER_S_MAX:g} s") from None
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    cluster.revive(lost)
    await cluster.wait_ready()
    await asyncio.sleep(SETTLE_S)
    return ended - began


async def _acknowledged(
    cluster: "ForebayCluster | EtcdCluster",
    session: aiohttp.ClientSession,
    base: str,
    path: str,
    body: Mapping[str, Any],
) -> bool:
    """Send one write, follow one redirect, and say whether it is acknowledged as durable."""
    data = json.dumps(body).encode()
    try:
        for _ in range(2):
            async with session.post(
                base + path, data=data, headers={"Content-Type": "application/json"}, allow_redirects=False
            ) as response:
                text = await response.read()
            if response.status == REDIRECT:
                base = response.headers["Location"].removesuffix(path)
                continue
            return response.status < 300 and ("revision" in json.loads(text) or "header" in json.loads(text))
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
        pass
    return False
