"""Time to a whole page with many jobs and nodes: `python -m tests.benchmarks.page`; the last line is JSON.

A replica alone, which serves by itself, is asked by a process of its own over HTTPS, one page after the other, while it
is watched how long its loop is away at the most, and what processor time a page takes of it.
"""

import argparse
import asyncio
import http.client
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import uvloop

from forebay.cluster.config.config import Config
from forebay.cluster.security.tls import client_context
from forebay.replica.messages import Actor, ActorRole, Request
from forebay.replica.messages import commands as c
from tests.cluster.harness import PLAIN, SCRIPT, Harness, make_cluster, placed

PAGES = ("/page", "/page/jobs", "/page/jobs/1", "/page/transfers", "/page/nodes", "/v1/overview")
ASKED = 20
BULK = 500
LOOK_S = 0.001


def ask(config: Config) -> None:
    """Ask for each page on one connection, and print how long each took, milliseconds."""
    context = client_context(config.tls_files("operator"))
    connection = http.client.HTTPSConnection("127.0.0.1", config.replica("r1").api.port, context=context)
    for page in PAGES:
        times_ms, size_bytes = [], 0
        for _ in range(ASKED):
            began_s = time.perf_counter()
            connection.request("GET", page)
            answer = connection.getresponse()
            body = answer.read()
            times_ms.append((time.perf_counter() - began_s) * 1e3)
            assert answer.status == 200, (page, body[:200])
            size_bytes = len(body)
        found = {
            "page": page, "first_ms": round(times_ms[0], 1), "median_ms": round(statistics.median(times_ms), 1),
            "most_ms": round(max(times_ms[1:]), 1), "bytes": size_bytes,
        }  # fmt: skip
        print(json.dumps(found), flush=True)


async def fill(harness: Harness, jobs: int, nodes: int) -> None:
    """Have so many jobs, two of three with a buffer, and so many nodes."""
    for number in range(nodes):
        name = f"m{number:04d}"
        for actor, command in (
            (Actor(ActorRole.OPERATOR, "operator"), c.AdmitNode(name)),
            (Actor(ActorRole.AGENT, name), c.RegisterNode(name, 8, "i", f"s-{name}")),
        ):
            await harness.controller.submit(Request(b"", actor, command))
    for first in range(0, jobs, BULK):
        bodies = [
            harness.job(type="submit_job", script=SCRIPT if (first + n) % 3 else PLAIN, hold=not (first + n) % 5)
            for n in range(min(BULK, jobs - first))
        ]
        answer = await harness.ask("POST", "/v1/commands", {"commands": bodies}, who="alice")
        assert all(one["status"] == 201 for one in answer.body["results"]), answer.body["results"][0]


async def run(directory: Path, jobs: int, nodes: int) -> dict[str, Any]:
    config = placed(make_cluster(directory / "site"), directory / "data")
    async with Harness(config) as harness:
        await fill(harness, jobs, nodes)
        (directory / "ports").write_text(json.dumps([str(config.file), config.replica("r1").api.port]))
        longest_s, loop = 0.0, asyncio.get_running_loop()

        async def watch() -> None:
            nonlocal longest_s
            while True:
                before_s = loop.time()
                await asyncio.sleep(LOOK_S)
                longest_s = max(longest_s, loop.time() - before_s - LOOK_S)

        watching = loop.create_task(watch())
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.benchmarks.page", "--ask", str(directory / "ports"),
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert child.stdout is not None
        pages, before_s = [], time.process_time()
        while line := await child.stdout.readline():
            now_s = time.process_time()
            pages.append({**json.loads(line), "cpu_ms": round((now_s - before_s) * 1e3 / ASKED, 1)})
            before_s = now_s
        assert await child.wait() == 0
        watching.cancel()
        state = harness.controller.state
        return {
            "jobs": len(state.unfinished), "nodes": len(state.nodes), "pages": pages,
            "loop_away_most_ms": round(longest_s * 1e3, 1),
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--nodes", type=int, default=1_000)
    parser.add_argument("--ask", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ask is not None:
        file, port = json.loads(options.ask.read_text())
        config = Config.load(Path(file))
        replica = config.replica("r1")
        address = type(replica.api)("127.0.0.1", port)
        import msgspec

        ask(msgspec.structs.replace(config, replicas=(msgspec.structs.replace(replica, api=address),)))
        return
    with tempfile.TemporaryDirectory(prefix="forebay-page-") as directory:
        print(json.dumps(uvloop.run(run(Path(directory), options.jobs, options.nodes))))


if __name__ == "__main__":
    main()
