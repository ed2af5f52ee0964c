"""A storm of new HTTPS connections while other processes want the cores: is the leader kept, and who notices."""

import asyncio
import contextlib
import multiprocessing
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

from forebay.cluster.security.tls import TlsFiles, client_context
from tests.benchmarks.load import Window, percentile_ms
from tests.benchmarks.pipelined import ChannelCluster, EtcdGrpcCluster, Tally
from tests.benchmarks.processes import ServerFailed
from tests.benchmarks.users.rows import Found, Row, Say, median

SPREAD_S = 1.0
"""Seconds in which the connections of one storm begin."""

CONNECTION_S = 30.0
"""Seconds until a connection without its answer is an error."""

STORM_PROCESSES = 2
"""Processes that the connections come from: one alone cannot begin a thousand a second."""

BUSY = 2
"""Processes that compute without end meanwhile."""

CLIENTS = 16
"""Clients of the channel (of etcd's gRPC), each with one write outstanding all the time, on one connection."""

CALM_S = 2.0
"""Seconds between two storms."""

HELD_S = 1.0
"""Seconds after the last answer in which a change of leader is still the storm's."""


def request_bytes(system: str, port: int) -> bytes:
    """Return a small question to a member's HTTP door, as the whole of a connection."""
    body = "" if system == "channel" else "{}"
    line = "GET /v1/status" if system == "channel" else "POST /v3/maintenance/status"
    head = [f"{line} HTTP/1.1", f"Host: 127.0.0.1:{port}", "Connection: close", f"Content-Length: {len(body)}"]
    return ("\r\n".join([*head, "", ""]) + body).encode()


def is_answered(answer: bytes) -> bool:
    """Say whether an HTTP answer begins with status 200 and is whole as far as its end of the connection says."""
    head, separator, _ = answer.partition(b"\r\n\r\n")
    words = head.split(b" ", 2)
    return bool(separator) and words[0].startswith(b"HTTP/1.") and len(words) > 1 and words[1] == b"200"


async def _connection(port: int, tls: ssl.SSLContext, question: bytes, wait_s: float) -> str:
    await asyncio.sleep(wait_s)
    try:
        async with asyncio.timeout(CONNECTION_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls)
            try:
                writer.write(question)
                answer = await reader.read(-1)
            finally:
                writer.transport.abort()
    except (OSError, TimeoutError, EOFError) as error:
        return f"{type(error).__name__}: {error}"
    return "" if is_answered(answer) else f"answered {answer[:80]!r}"


async def _connections(port: int, files: TlsFiles, question: bytes, count: int) -> list[str]:
    tls = client_context(files)
    waits = (SPREAD_S * number / count for number in range(count))
    return await asyncio.gather(*(_connection(port, tls, question, wait_s) for wait_s in waits))


def storm(port: int, files: TlsFiles, question: bytes, count: int) -> list[str]:
    """Begin `count` connections within SPREAD_S; return for each what was wrong, empty where it was answered."""
    return asyncio.run(_connections(port, files, question, count))


@contextlib.contextmanager
def busy_cores(count: int) -> Iterator[None]:
    """Keep as many cores busy as there are processes."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


async def term(cluster: ChannelCluster | EtcdGrpcCluster) -> int:
    """Return the highest term that a member is in; ServerFailed where none says."""
    found = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=cluster.tls())) as session:
        for base in cluster.bases().values():
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                if isinstance(cluster, ChannelCluster):
                    asked = session.get(base + "/v1/status")
                else:
                    asked = session.post(base + "/v3/maintenance/status", json={})
                async with asked as response:
                    answer = await response.json(content_type=None)
                    found.append(int(answer["term"] if "term" in answer else answer["raftTerm"]))
    if not found:
        raise ServerFailed(f"no member of {cluster.name} says its term")
    return max(found)


async def storms(
    cluster: ChannelCluster | EtcdGrpcCluster, connections: int, times: int, say: Say
) -> list[dict[str, Any]]:
    """Start a cluster, and send storms at its leader's HTTP door; return what each did."""
    found = []
    loop = asyncio.get_running_loop()
    context = multiprocessing.get_context("spawn")
    try:
        await cluster.start()
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=cluster.tls())) as session:
            port = int((await cluster.leader(session)).rsplit(":", 1)[1])
        question = request_bytes(cluster.name, port)
        assert cluster._files is not None
        with ProcessPoolExecutor(STORM_PROCESSES, mp_context=context) as pool:
            await asyncio.gather(*(loop.run_in_executor(pool, abs, 1) for _ in range(STORM_PROCESSES)))
            for number in range(times):
                await asyncio.sleep(CALM_S)
                async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=cluster.tls())) as session:
                    port = int((await cluster.leader(session)).rsplit(":", 1)[1])
                before = await term(cluster)
                async with cluster.sender(1) as send:
                    with busy_cores(BUSY):
                        tally = Tally(CLIENTS)
                        clients = [
                            asyncio.create_task(tally.client(send, client, Window.unbounded()))
                            for client in range(CLIENTS)
                        ]
                        started = time.perf_counter()
                        shares = [connections // STORM_PROCESSES] * STORM_PROCESSES
                        shares[0] += connections % STORM_PROCESSES
                        storming = (
                            loop.run_in_executor(pool, storm, port, cluster._files, question, share) for share in shares
                        )
                        wrong = [text for part in await asyncio.gather(*storming) for text in part if text]
                        seconds = time.perf_counter() - started
                        tally.ended = True
                        await asyncio.gather(*clients)
                    await asyncio.sleep(HELD_S)
                cluster.check()
                latencies = sorted(tally.latencies_s)
                found.append(
                    {
                        "system": cluster.name,
                        "seconds": round(seconds, 2),
                        "terms": await term(cluster) - before,
                        "connection_errors": len(wrong),
                        "client_errors": tally.errors,
                        "p50_ms": percentile_ms(latencies, 0.5),
                        "p99_ms": percentile_ms(latencies, 0.99),
                        "max_ms": percentile_ms(latencies, 1.0),
                        "writes": len(latencies),
                        "examples": [*sorted(set(wrong))[:3], *tally.examples],
                    }
                )
                say(_line(number + 1, found[-1]))
                for example in found[-1]["examples"]:
                    say(f"      {example[:200]}")
        return found
    finally:
        cluster.stop()


def _line(number: int, one: dict[str, Any]) -> str:
    return (
        f"{number:>5} {one['system']:<10} {one['seconds']:>6.2f} {one['terms']:>7} {one['connection_errors']:>10} "
        f"{one['client_errors']:>7} {one['p50_ms']:>8.1f} {one['p99_ms']:>8.1f} {one['max_ms']:>8.1f}"
    )


def report(directory: Path, connections: int, times: int, say: Say, *, only_forebay: bool = False) -> Found:
    """Send the storms at Forebay, then at etcd; return the rows."""
    say(f"\nStorm: {connections:,} new HTTPS connections in {SPREAD_S:g} s, {BUSY} busy processes, {CLIENTS} clients")
    say(
        f"{'storm':>5} {'system':<10} {'took s':>6} {'leaders':>7} {'unanswered':>10} {'errors':>7} {'p50 ms':>8} "
        f"{'p99 ms':>8} {'max ms':>8}"
    )
    kinds: list[type[ChannelCluster] | type[EtcdGrpcCluster]] = [ChannelCluster]
    if not only_forebay:
        kinds.append(EtcdGrpcCluster)
    found = {
        kind.name: uvloop.run(storms(kind(directory / f"storm-{kind.name}"), connections, times, say)) for kind in kinds
    }

    def of(system: str, text: Any) -> str:
        return text(found[system]) if system in found else ""

    def row(what: str, text: Any) -> Row:
        other = of("etcd-grpc", text)
        return Row(what, of("channel", text), f"{other} (etcd)" if other else "")

    name = f"{connections:,} new HTTPS connections in a second, {BUSY} busy processes, {times} times"
    rows = [
        row(f"{name}: elections", lambda ones: str(sum(one["terms"] for one in ones))),
        row("errors of connections, of clients meanwhile", lambda ones: _errors(ones)),
        row(
            "until the last of them was answered, median",
            lambda ones: f"{median([one['seconds'] for one in ones], 1)} s",
        ),
        row(f"p99 of {CLIENTS} clients on the channel (gRPC) meanwhile: median, worst storm", lambda ones: _p99(ones)),
    ]
    whole = all(not one["connection_errors"] for one in found["channel"])
    return Found(rows, {"storms": found}, whole)


def _errors(ones: list[dict[str, Any]]) -> str:
    return f"{sum(one['connection_errors'] for one in ones):,}, {sum(one['client_errors'] for one in ones):,}"


def _p99(ones: list[dict[str, Any]]) -> str:
    return f"{median([one['p99_ms'] for one in ones]):.0f} ms, {max(one['p99_ms'] for one in ones):.0f} ms"
