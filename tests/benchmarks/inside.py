"""Clients inside the leader's process: what consensus and the state machine take, without a network to the client.

`python -m tests.benchmarks.inside --config forebay.toml --name r1` is a whole replica, as `forebay run replica` runs
it, that also takes orders on standard input: one JSON line each, answered with one JSON line. The leader runs the load.
"""

import argparse
import asyncio
import itertools
import os
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from forebay.cluster.client.session_ids import SessionIds
from forebay.cluster.config.config import Config
from forebay.cluster.schemas.command_ids import new_command_id
from forebay.cluster.serve import Replica
from forebay.cluster.server.pending import NotLeading, OutcomeUnknown, QueueFull
from forebay.cluster.system.clock import SystemClock
from forebay.replica.grammar.directives import parse_request
from forebay.replica.messages import commands as c
from forebay.replica.model.jobs import Hold
from forebay.replica.model.requests import JobRequest
from tests.benchmarks.forebay import ForebayCluster
from tests.benchmarks.load import Measurement, measurement, verify_settled
from tests.benchmarks.processes import ServerFailed

USER = c.Actor(c.ActorRole.USER, "bench")
"""The user whose jobs they are."""

SCRIPT = "#!/bin/sh\n#SBATCH --job-name=bench\ntrue\n"

ERROR_PAUSE_S = 0.05
"""Seconds a client waits after an error."""

LINE_BYTES_MAX = 4096
"""Bytes of one order."""


class Order(msgspec.Struct, forbid_unknown_fields=True):
    """What the measuring process asks: `status`, or `load` with its numbers. The clients count as the leader's own."""

    what: str
    clients: int = 0
    warm_up_s: float = 0.0
    seconds: float = 0.0
    workdir: str = "/"


class _Load:
    """Clients that submit one held job each and then release and hold it in turn, one command outstanding each."""

    def __init__(self, replica: Replica, order: Order) -> None:
        self._controller = replica.controller
        self._order = order
        self._clock = SystemClock()
        self._ids = SessionIds(self._open_session, self._clock)
        self.latencies_s: list[float] = []
        self.accepted = 0
        self.errors: list[str] = []

    async def _open_session(self) -> int:
        single = bytes.fromhex(new_command_id(self._clock))
        return (await self._controller.submit(c.Request(single, USER, c.OpenSession()))).revision

    async def client(self, number: int, start: float, end: float) -> None:
        """Send one command after another until `end`; what is answered from `start` on counts."""
        asked = JobRequest(
            name=f"bench-{number:04d}",
            user=USER.name,
            script=SCRIPT,
            workdir=self._order.workdir,
            time_limit_s=60,
            buffer=parse_request(SCRIPT, "pool=fast capacity=1MiB"),
        )
        command: c.Command = c.SubmitJob(asked, Hold.USER)
        job = 0
        following: itertools.cycle[c.Command] = itertools.cycle(())
        submit, ids = self._controller.submit, self._ids
        while (sent := time.perf_counter()) < end:
            command_id = await ids.next_id()
            try:
                settled = await submit(c.Request(bytes.fromhex(command_id), USER, command))
            except (QueueFull, NotLeading, OutcomeUnknown) as error:
                self.errors.append(f"{type(error).__name__}: {error}")
                await asyncio.sleep(ERROR_PAUSE_S)
                continue
            ids.acknowledge(command_id)
            if settled.rejection is not None:
                self.errors.append(settled.rejection.sentence)
                await asyncio.sleep(ERROR_PAUSE_S)
                continue
            if not job:
                job = settled.job
                following = itertools.cycle((c.ReleaseJob(job), c.HoldJob(job)))
            command = next(following)
            self.accepted += 1
            answered = time.perf_counter()
            if start <= answered < end:
                self.latencies_s.append(answered - sent)


async def _run_load(replica: Replica, order: Order) -> dict[str, Any]:
    load = _Load(replica, order)
    before = replica.controller.state.revision
    start = time.perf_counter() + order.warm_up_s
    end = start + order.seconds
    clients = [asyncio.create_task(load.client(number, start, end)) for number in range(order.clients)]
    await asyncio.sleep(max(0.0, start - time.perf_counter()))
    cpu_s = sum(os.times()[:2])
    await asyncio.sleep(max(0.0, end - time.perf_counter()))
    cpu_s = sum(os.times()[:2]) - cpu_s
    await asyncio.gather(*clients)
    counts = replica.controller.proposer.counts
    return {
        "latencies_s": load.latencies_s,
        "accepted": load.accepted,
        "settled": replica.controller.state.revision - before,
        "errors": len(load.errors),
        "examples": sorted(set(load.errors))[:3],
        "cpu_s": cpu_s,
        "batches": counts.batches,
        "commands": counts.commands,
    }


class InsideCluster(ForebayCluster):
    """Three replicas that take orders on their standard input; the leader runs the clients itself."""

    name = "inside"
    operation = "submit_job once, then release_job and hold_job in turn, by clients in the leader's process"

    def _launch(self, name: str, configuration: Path, kind: str = "replica") -> None:
        serve = [sys.executable, "-m", "tests.benchmarks.inside", "--config", str(configuration), "--name", name]
        self._processes.start(name, serve, self._directory / f"{name}.output", pipes=True)

    def _ask(self, name: str, order: Order) -> dict[str, Any]:
        process = self._processes.process(name)
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(msgspec.json.encode(order) + b"\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            process.wait()
            self.check()
            raise ServerFailed(f"{name} gave no answer")
        answer: dict[str, Any] = msgspec.json.decode(line)
        return answer

    async def measure(self, clients: int, *, warm_up_s: float, seconds: float) -> Measurement:
        """Have the leader run the load."""
        leader = next((name for name in self._api if self._ask(name, Order("status"))["leads"]), None)
        if leader is None:
            raise ServerFailed("no replica leads")
        order = Order("load", clients, warm_up_s, seconds, str(self._results))
        before_s = self.cpu_s()
        answer = self._ask(leader, order)
        server_cpu_s = (self.cpu_s() - before_s) * seconds / (warm_up_s + seconds)
        verify_settled(self.name, accepted=answer["accepted"], settled=answer["settled"])
        return measurement(
            self.name,
            clients,
            seconds,
            answer["latencies_s"],
            errors=answer["errors"],
            examples=answer["examples"],
            client_cpu_s=0.0,
            server_cpu_s=server_cpu_s,
        )


async def _serve(config: Config, name: str) -> None:
    loop = asyncio.get_running_loop()
    orders = asyncio.StreamReader(limit=LINE_BYTES_MAX)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin.buffer)
    replica = Replica(config, name, clock=SystemClock())
    await replica.start()

    while line := await orders.readline():
        order = msgspec.json.decode(line, type=Order)
        controller = replica.controller
        answer: dict[str, Any] = {"leads": controller.leads and controller.state.revision > 0}
        if order.what == "load":
            answer.update(await _run_load(replica, order))
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()
    await replica.stop()


def main() -> int:
    """Run until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--name", required=True)
    options = parser.parse_args()
    os.umask(0o077)
    uvloop.run(_serve(Config.load(options.config), options.name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
