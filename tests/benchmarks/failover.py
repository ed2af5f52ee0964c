"""How long writes stop when the leader is lost: Forebay and etcd, killed or hung, seen from a client outside both.

Both clusters run for a whole row, and their leaders are lost in turn, so that whatever else the machine does meets
both; while one is measured the other only idles. From the moment of the fault the client sends writes to both
survivors of the cluster, one every few milliseconds to each, without waiting for earlier ones, until the first is
acknowledged. So neither a member that holds a request until it knows a leader (etcd) nor one that refuses it at once
(Forebay) is at an advantage beyond that interval, which counts against the latter. Redirects are not followed: the
next leader is among the members that are asked, and the lost one should not be. Connections are made before the fault.

Both get the same election timeout and heartbeat. What they make of them differs, and is part of what is measured:
etcd counts in heartbeats, of which it rounds the timeout down to whole ones, and the first of which is cut short by
chance, so that at 150 and 30 ms its members stand after 120 to 270 ms of silence; Forebay's wait for 150 ms at least,
and draw so that they do not stand at the same time (`cluster.consensus.leader_election`). etcd does not ask before it
stands (pre-vote is not its default), Forebay does.
"""

import asyncio
import json
import math
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from tests.benchmarks.etcd import EtcdCluster
from tests.benchmarks.forebay import ForebayCluster
from tests.benchmarks.load import percentile_ms
from tests.benchmarks.processes import ServerFailed

PROBE_EVERY_S = 0.01
"""Between two writes to one survivor, seconds: the resolution of the figure."""

PROBE_TIMEOUT_S = 4.0
"""After which one write is given up, seconds; others are under way meanwhile."""

CONNECTIONS_MAX = 64
"""Connections to each survivor that are made before the fault: writes that a member holds need one each."""

FAILOVER_S_MAX = 30.0
"""Without an acknowledged write after this the measurement has failed, seconds."""

SETTLE_S = 0.5
"""Between the return of the member that was lost and the next fault, seconds."""

AGREE_WAIT_S = 20.0
"""Until all members of a cluster must know the same leader, seconds."""

TIMINGS: dict[str, tuple[int, int, int]] = {"0.15-0.3": (150, 300, 30), "1-2": (1000, 2000, 100)}
"""Name -> shortest and longest election timeout and heartbeat, milliseconds. etcd draws from one to two times its
election timeout, and 1,000 and 100 are its defaults; both systems get the same."""

FAULTS: dict[str, signal.Signals] = {"kill": signal.SIGKILL, "hang": signal.SIGSTOP}
"""A killed process closes its sockets, so that its peers notice at once if they look; a hung one, as a lost machine,
is only silent. The killed one is started again after the measurement, the hung one goes on."""

Cluster = ForebayCluster | EtcdCluster


class Failovers(msgspec.Struct, frozen=True):
    """What one system did with one timing and one kind of fault."""

    system: str
    timing_s: str
    fault: str
    count: int
    p50_ms: float
    p99_ms: float
    max_ms: float
    taken_ms: list[float]


def cluster_of(system: str, timing: str, directory: Path) -> Cluster:
    """Return a cluster with the election settings of TIMINGS."""
    least, most, heartbeat = TIMINGS[timing]
    if system == "forebay":
        forebay = ForebayCluster(directory)
        forebay.timing = {"election_min_ms": least, "election_max_ms": most, "heartbeat_ms": heartbeat}
        return forebay
    etcd = EtcdCluster(directory)
    etcd.timing = (f"--election-timeout={least}", f"--heartbeat-interval={heartbeat}")
    return etcd


async def measure(
    systems: Sequence[str], timing: str, fault: str, count: int, directory: Path, progress: Callable[[int], None]
) -> list[Failovers]:
    """Lose the leader of each system `count` times, in turn; call `progress` with how often it was done so far."""
    clusters = {system: cluster_of(system, timing, directory / system) for system in systems}
    taken_s: dict[str, list[float]] = {system: [] for system in systems}
    directory.mkdir(mode=0o700)
    try:
        for cluster in clusters.values():
            await cluster.start()
        for number in range(count):
            for system in systems if number % 2 == 0 else systems[::-1]:
                taken_s[system].append(await _lose_leader(clusters[system], timing, fault, number))
            progress(number + 1)
    finally:
        for cluster in clusters.values():
            cluster.stop()
    rows = []
    for system, taken in taken_s.items():
        ordered = sorted(taken)
        p50_ms, p99_ms, max_ms = (percentile_ms(ordered, share) for share in (0.5, 0.99, 1.0))
        each_ms = [round(one * 1000, 1) for one in taken]
        rows.append(Failovers(system, timing, fault, count, p50_ms, p99_ms, max_ms, each_ms))
    return rows


async def _lose_leader(cluster: Cluster, timing: str, fault: str, number: int) -> float:
    """Lose the leader once, bring it back, and return how long no write was acknowledged, seconds."""
    timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
    connector = aiohttp.TCPConnector(ssl=cluster.tls(), limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        lost = await _leading(cluster, session)
        survivors = [base for name, base in cluster.bases().items() if name != lost]
        # Connections, TLS and whatever else the first request costs are not the failover's.
        wanted = min(CONNECTIONS_MAX, math.ceil(TIMINGS[timing][1] / 1000 / PROBE_EVERY_S))
        await asyncio.gather(*(_look(cluster, session, base) for base in survivors for _ in range(wanted)))
        sequence = iter(range(number * 1_000_000, (number + 1) * 1_000_000))

        async def write(base: str) -> bool:
            if isinstance(cluster, ForebayCluster):
                path, body = cluster.submission(next(sequence))
            else:
                path, body = cluster.request(0, next(sequence))
            return await _acknowledged(session, base, path, body)

        await asyncio.gather(*(write(base) for base in cluster.bases().values()))
        taken_s = await _until_acknowledged(write, survivors, lambda: os.kill(cluster.pid(lost), FAULTS[fault]))
    if fault == "hang":
        os.kill(cluster.pid(lost), signal.SIGCONT)
    else:
        cluster.revive(lost)
    await cluster.wait_ready()
    await asyncio.sleep(SETTLE_S)
    return taken_s


async def _until_acknowledged(write: Callable[[str], Any], survivors: Sequence[str], fail: Callable[[], None]) -> float:
    """Cause the fault, send writes until one is acknowledged, and return the seconds between the two."""
    first = asyncio.Event()
    ended_s = 0.0
    tasks: set[asyncio.Task[None]] = set()

    async def probe(base: str) -> None:
        nonlocal ended_s
        if await write(base) and not first.is_set():
            ended_s = time.perf_counter()
            first.set()

    fail()
    began_s = time.perf_counter()
    sent = 0
    while not first.is_set():
        for base in survivors:
            task = asyncio.create_task(probe(base))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        sent += 1
        try:
            # By the clock, not one interval after the last: what sending costs must not thin the writes out.
            wait_s = max(0.0, began_s + sent * PROBE_EVERY_S - time.perf_counter())
            await asyncio.wait_for(first.wait(), wait_s)
        except TimeoutError:
            if time.perf_counter() - began_s > FAILOVER_S_MAX:
                raise RuntimeError(f"no write was acknowledged for {FAILOVER_S_MAX:g} s") from None
            await asyncio.sleep(0)
    for task in list(tasks):
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return ended_s - began_s


async def _leading(cluster: Cluster, session: aiohttp.ClientSession) -> str:
    """Return the name of the leader, once the cluster knows one: who led before a fault may still believe it."""
    deadline_s = time.monotonic() + AGREE_WAIT_S
    while True:
        try:
            first = await cluster.leader(session)
            await asyncio.sleep(PROBE_EVERY_S)
            if first == await cluster.leader(session):
                return next(name for name, base in cluster.bases().items() if base == first)
        except (aiohttp.ClientError, ServerFailed, TimeoutError, OSError, ValueError, KeyError) as error:
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"the members of {cluster.name} agree on no leader: {error}") from error
        await asyncio.sleep(0.1)


async def _look(cluster: Cluster, session: aiohttp.ClientSession, base: str) -> None:
    """Ask one member for something that it answers itself."""
    if isinstance(cluster, ForebayCluster):
        request = session.get(base + "/v1/status")
    else:
        request = session.post(base + "/v3/maintenance/status", json={})
    async with request as response:
        await response.read()


async def _acknowledged(session: aiohttp.ClientSession, base: str, path: str, body: Mapping[str, Any]) -> bool:
    """Send one write to one member and say whether it is acknowledged as durable."""
    try:
        async with session.post(
            base + path,
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
            allow_redirects=False,
        ) as response:
            text = await response.read()
        answer = json.loads(text) if response.status < 300 else {}
        return "revision" in answer or "header" in answer
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
        return False
