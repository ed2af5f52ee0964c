"""Latency of submits while another user lists 10,000 jobs, a job's history and metrics all the time.

`python -m tests.benchmarks.users.listings CONFIG BASE SECONDS` is that user, in a separate process.
"""

import asyncio
import http.client
import json
import statistics
import sys
import threading
import time
import urllib.parse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop

from forebay.cluster.client.channel import ChannelConnection
from forebay.cluster.config.config import Config
from forebay.cluster.schemas.command_ids import new_command_id
from forebay.cluster.schemas.requests import SubmitCommand
from forebay.cluster.security.tls import client_context
from forebay.cluster.system.clock import SystemClock
from tests.benchmarks.forebay import SCRIPT
from tests.benchmarks.pipelined import ChannelCluster
from tests.benchmarks.users.rows import Found, Row, Say, median

JOBS = 10_000
"""Jobs in the queue."""

CLIENTS = 16
"""Clients of the channel, each with one write outstanding, on one connection."""

SETTLE_S = 6.0
"""Seconds after the jobs are submitted in which the history service follows them."""

READER = "operator"
"""Certificate of the user who lists."""

TARGETS = ("/v1/jobs?limit=10000", "/v1/jobs/1/history", "/metrics", "/v1/overview")
"""Requests of that user, each in a thread that repeats it as soon as it is answered."""

NOT_ANSWERED = "not answered"
"""In place of a target: requests that were rejected, as with 429 and its Retry-After, which the user obeys."""


def ask(file: Path, base: str, seconds: float) -> dict[str, list[float]]:
    """Ask for all targets until the end, and return the milliseconds of each answer."""
    tls = client_context(Config.load(file).tls_files(READER))
    host, port = urllib.parse.urlsplit(base).netloc.rsplit(":", 1)
    found: dict[str, list[float]] = {target: [] for target in (*TARGETS, NOT_ANSWERED)}
    end = time.perf_counter() + seconds

    def repeat(target: str) -> None:
        connection = http.client.HTTPSConnection(host, int(port), context=tls, timeout=60)
        while (began := time.perf_counter()) < end:
            connection.request("GET", target)
            answer = connection.getresponse()
            answer.read()
            found[target if answer.status == 200 else NOT_ANSWERED].append((time.perf_counter() - began) * 1000)
            time.sleep(min(int(answer.headers.get("Retry-After", 0)), max(0.0, end - time.perf_counter())))

    threads = [threading.Thread(target=repeat, args=(target,)) for target in TARGETS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


async def fill(connection: ChannelConnection, workdir: Path) -> None:
    """Submit the jobs of the queue."""
    clock = SystemClock()
    for first in range(0, JOBS, 500):
        await asyncio.gather(
            *(
                connection.ask(
                    SubmitCommand(
                        command_id=new_command_id(clock), script=SCRIPT, name=f"queue-{number}", hold=True,
                        bb="pool=fast capacity=1MiB", time_limit_s=60, workdir=str(workdir),
                    )
                )
                for number in range(first, first + 500)
            )
        )  # fmt: skip


async def measure(directory: Path, seconds: float, rounds: int, say: Say) -> dict[str, Any]:
    """Return the submits' figures alone and beside the reader, in alternation, and the reader's own."""
    cluster = ChannelCluster(directory)
    figures: dict[str, list[float]] = {"alone p50": [], "alone p99": [], "beside p50": [], "beside p99": []}
    commits: dict[str, list[float]] = {"alone": [], "beside": []}
    read: dict[str, list[float]] = {target: [] for target in (*TARGETS, NOT_ANSWERED)}
    try:
        await cluster.start()
        _, address = await cluster.leader_addresses()
        connection = await ChannelConnection.open(address, cluster.tls(), cluster.config.cluster.id)
        await fill(connection, directory)
        connection.close()
        await asyncio.sleep(SETTLE_S)
        for _ in range(rounds):
            for way in ("alone", "beside"):
                reader = None
                if way == "beside":
                    base, _ = await cluster.leader_addresses()
                    words = [str(cluster.config.file), base, str(seconds + 2)]
                    reader = await asyncio.create_subprocess_exec(
                        *(sys.executable, "-m", "tests.benchmarks.users.listings", *words),
                        stdout=asyncio.subprocess.PIPE,
                    )
                    await asyncio.sleep(1)
                one = await cluster.measure(CLIENTS, warm_up_s=1.0, seconds=seconds, connections_max=1)
                figures[f"{way} p50"].append(one.p50_ms)
                figures[f"{way} p99"].append(one.p99_ms)
                commits[way].append(one.commits_per_s)
                if reader is not None:
                    out, _ = await reader.communicate()
                    for target, times in json.loads(out).items():
                        read[target] += times
                say(
                    f"  {way}: {one.commits_per_s:.0f}/s, p50 {one.p50_ms} ms, p99 {one.p99_ms} ms, {one.errors} errors"
                )
    finally:
        cluster.stop()
    return {
        **{name: median(values, 1) for name, values in figures.items()},
        **{f"{way} commits": median(values, 0) for way, values in commits.items()},
        "read": {
            target: {"count": len(times), "p50 ms": round(statistics.median(times), 1) if times else None}
            for target, times in read.items()
        },
    }


def report(directory: Path, seconds: float, rounds: int, say: Say) -> Found:
    """Measure, and return the rows."""
    found = uvloop.run(measure(directory / "listings", seconds, rounds, say))
    for target, figures in found["read"].items():
        say(f"  {target}: {figures['count']} answers, p50 {figures['p50 ms']} ms")
    rows = [
        Row(
            "submit (16 channel clients, p99) while another user lists 10,000 jobs, a history and metrics",
            f"{found['beside p99']} ms",
            f"{found['alone p99']} ms alone",
        )
    ]
    return Found(rows, found)


def main(words: Sequence[str]) -> None:
    """Run as the user who lists."""
    file, base, seconds = words
    print(json.dumps(ask(Path(file), base, float(seconds))))


if __name__ == "__main__":
    main(sys.argv[1:])
