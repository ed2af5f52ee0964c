"""Thousands of nodes: simulated agents that poll over connections of their own, at rest, at work, and without a leader.

Each agent has a certificate and a TLS connection of its own and chooses its replica as real ones do (`ReplicaChoice`);
what it is ordered it reports as done at once, to the leader. Measured are the processor time of each replica while
nothing happens, how long an order takes from the answer to a submit until its agent has it, and, after a SIGKILL of the
leader, when every agent has a connection again, and how many elections that took.
"""

import asyncio
import contextlib
import functools
import itertools
import multiprocessing
import multiprocessing.connection
import os
import random
import resource
import shutil
import signal
import ssl
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import uvloop

from forebay.cluster.agent.replica_choice import ReplicaChoice
from forebay.cluster.client import ApiError, Client
from forebay.cluster.config.config import Config
from forebay.cluster.schemas import SubmitRequest, new_command_id, operations
from forebay.cluster.schemas.agents import OperationReport, PollRequest, RegisterRequest, ReportsRequest
from forebay.cluster.schemas.jobs import PollAnswer, ReportsAnswer
from forebay.cluster.security import Role
from forebay.cluster.security.pki import issue, load_authority
from forebay.cluster.security.tls import TlsFiles, client_context
from forebay.cluster.system.address import Address
from forebay.cluster.system.clock import SystemClock
from forebay.replica.messages.commands import OperationDone, ScriptEnded, ScriptStarted
from forebay.replica.model.job_states import JobState
from forebay.replica.model.orders import Order
from tests.benchmarks.forebay import ForebayCluster
from tests.benchmarks.load import percentile_ms
from tests.benchmarks.processes import ServerFailed, pss_bytes
from tests.benchmarks.users.rows import Found, Row, Say

PROCESSES = 2
"""Processes that the agents live in."""

ARRIVALS_PER_S = 60
"""Agents that register in a second, count, all together: a cluster that is switched on."""

ARRIVED_S_MAX = 600.0
"""Seconds after which all agents must poll."""

SETTLED_S = 30.0
"""Seconds after the last registration before it counts: every poll has waited for its whole time once."""

REST_S = 40.0
"""Seconds at rest that are measured: two polls of each agent."""

JOBS_PER_MINUTE = 100
WORK_S = 60.0
"""Jobs that are submitted in a minute, count, and for how long, seconds."""

LOST_S = 30.0
"""Seconds after the leader's death for which is looked who is back."""

CALL_S = 40.0
"""Seconds that one answer may take: a poll's wait, and more."""

FILES_SOFT = 1 << 16


class Answered(msgspec.Struct):
    """Status, where to go instead, and body of an answer."""

    status: int
    location: str
    body: bytes


class Connection:
    """One connection to one replica: requests one after the other."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, replica: Address) -> None:
        self._reader, self._writer, self._replica = reader, writer, replica

    @classmethod
    async def open(cls, replica: Address, tls: ssl.SSLContext) -> "Connection":
        """Connect; OSError or TimeoutError."""
        async with asyncio.timeout(CALL_S):
            return cls(*await asyncio.open_connection(replica.host, replica.port, ssl=tls, limit=1 << 22), replica)

    def write(self, target: str, body: bytes) -> None:
        """Send a request."""
        head = f"POST {target} HTTP/1.1\r\nHost: {self._replica}\r\nContent-Type: application/json\r\n"
        self._writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)

    async def read(self) -> Answered:
        """Return the answer to the oldest request that has none; OSError, EOFError or TimeoutError."""
        async with asyncio.timeout(CALL_S):
            head = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            fields = {name.lower(): text.strip() for name, _, text in (line.partition(":") for line in head[1:])}
            body = await self._reader.readexactly(int(fields.get("content-length", "0")))
        return Answered(int(head[0].split(" ")[1]), fields.get("location", ""), body)

    def close(self) -> None:
        """Be gone."""
        self._writer.transport.abort()


FAILURES = (OSError, EOFError, TimeoutError, asyncio.IncompleteReadError, ValueError, IndexError)


class Swarm:
    """The agents of one process."""

    def __init__(self, nodes: list[str], certificates: Path, endpoints: list[Address]) -> None:
        self.nodes = nodes
        self.certificates = certificates
        self.endpoints = endpoints
        self.clock = SystemClock()
        self.registered = 0
        self.polls_on: dict[str, Address] = {}
        """Where each agent has a poll under way."""
        self.ordered: dict[tuple[int, str], float] = {}
        """Job and stage -> when its agent had the order first, in monotonic seconds."""
        self.troubles: dict[str, int] = {}
        self.leader = endpoints[0]

    async def live(self, node: str, wait_s: float) -> None:
        """Be one agent."""
        await asyncio.sleep(wait_s)
        files = TlsFiles(
            self.certificates / "ca.pem", self.certificates / f"{node}.pem", self.certificates / f"{node}.key"
        )
        tls = client_context(files)
        instance = os.urandom(8).hex()
        registration = functools.partial(
            RegisterRequest,
            instance=instance,
            storage_id=node,
            cpus=4,
            buffers="/proc/nowhere",
            process_control="cgroup",
            capacity_control="project_quota",
        )
        await self.tell(node, tls, f"/v1/agents/{node}/register", registration)
        self.registered += 1
        choice = ReplicaChoice(node, self.endpoints, self.clock)
        seen = 0
        known: set[tuple[int, int, str]] = set()
        poll_s = 10.0
        connection: Connection | None = None
        on: Address | None = None
        tasks: set[asyncio.Task[None]] = set()
        while True:
            replica = choice.order[0]
            try:
                if connection is None or on != replica:
                    if connection is not None:
                        connection.close()
                    connection, on = await Connection.open(replica, tls), replica
                request = PollRequest(instance=instance, seen_revision=seen, wait_s=poll_s)
                connection.write(f"/v1/agents/{node}/poll", msgspec.json.encode(request))
                self.polls_on[node] = replica
                answer = await connection.read()
                if answer.status != 200:
                    raise OSError(f"{answer.status} {answer.body[:120]!r}")
            except FAILURES as error:
                self.trouble(error)
                self.polls_on.pop(node, None)
                if connection is not None:
                    connection.close()
                    connection = None
                await asyncio.sleep(choice.note_failure(replica) + random.uniform(0.1, 0.2))
                continue
            now_s = time.monotonic()
            found = msgspec.json.decode(answer.body, type=PollAnswer)
            choice.note_answer(replica, found.spread_s)
            seen, poll_s = found.revision, min(found.wait_s or 10.0, 20.0)
            for order in found.orders:
                key = (order.job, order.attempt, order.stage)
                if key not in known:
                    known.add(key)
                    self.ordered.setdefault((order.job, order.stage), now_s)
                    task = asyncio.get_running_loop().create_task(self.report(node, tls, order))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)

    async def report(self, node: str, tls: ssl.SSLContext, order: Order) -> None:
        """Say that all of it is done."""
        results = [OperationDone(0, 0)] if order.stage != "run" else [ScriptStarted(), ScriptEnded(JobState.COMPLETED)]

        def request(command_id: str) -> ReportsRequest:
            made = (
                OperationReport(
                    command_id=new_command_id(self.clock),
                    job=order.job,
                    attempt=order.attempt,
                    stage=order.stage,  # type: ignore[arg-type]  # an order's stages are those of a report
                    result=result,
                )
                for result in results
            )
            return ReportsRequest(reports=tuple(made))

        body = await self.tell(node, tls, f"/v1/agents/{node}/reports", request)
        for result in msgspec.json.decode(body, type=ReportsAnswer).results:
            if result.outcome != "accepted":
                self.trouble(ValueError(result.sentence))

    async def tell(self, node: str, tls: ssl.SSLContext, target: str, request: Any) -> bytes:
        """Send something to whoever leads until it is taken."""
        where = self.leader
        while True:
            connection = None
            try:
                connection = await Connection.open(where, tls)
                connection.write(target, msgspec.json.encode(request(command_id=new_command_id(self.clock))))
                answer = await connection.read()
                if answer.status == 200:
                    self.leader = where
                    return answer.body
                if answer.status == 307:
                    where = Address.parse(answer.location.removeprefix("https://").partition("/")[0])
                    continue
                raise OSError(f"{answer.status} {answer.body[:120]!r}")
            except FAILURES as error:
                self.trouble(error)
                where = random.choice(self.endpoints)
                await asyncio.sleep(random.uniform(0.1, 0.5))
            finally:
                if connection is not None:
                    connection.close()

    def trouble(self, error: BaseException) -> None:
        """Count what went wrong, by what it was."""
        text = f"{type(error).__name__}: {error}"[:160]
        if text in self.troubles or len(self.troubles) < 50:
            self.troubles[text] = self.troubles.get(text, 0) + 1


async def _swarm(swarm: Swarm, said: "multiprocessing.connection.Connection[Any, Any]", arrivals_per_s: float) -> None:
    loop = asyncio.get_running_loop()
    lives = [loop.create_task(swarm.live(node, number / arrivals_per_s)) for number, node in enumerate(swarm.nodes)]
    while True:
        for life in lives:
            if life.done():
                life.result()
        if said.poll():
            said.recv()
            said.send((swarm.registered, {n: str(a) for n, a in swarm.polls_on.items()}, swarm.ordered, swarm.troubles))
        await asyncio.sleep(0.05)


def swarm_process(
    nodes: list[str],
    certificates: Path,
    endpoints: list[Address],
    said: "multiprocessing.connection.Connection[Any, Any]",
    arrivals_per_s: float,
) -> None:
    """Be some of the agents until killed."""
    raise_files()
    uvloop.run(_swarm(Swarm(nodes, certificates, endpoints), said, arrivals_per_s))


def raise_files() -> None:
    """Have as many descriptors as may be."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(FILES_SOFT, hard), hard))


def certify(authority: Path, target: Path, names: list[str]) -> None:
    """Issue the certificates of these nodes into `target`."""
    known, now = load_authority(authority), SystemClock().now()
    for name in names:
        issue(known, target, role=Role.AGENT, name=name, at=now)


class NodesCluster(ForebayCluster):
    """Three replicas of a cluster with many nodes, whose agents are simulated."""

    def __init__(self, directory: Path, nodes: int) -> None:
        super().__init__(directory)
        self.nodes = [f"s{number}" for number in range(nodes)]

    def _adapt(self, configuration: Path, base_port: int) -> None:
        super()._adapt(configuration, base_port)
        tables = (f'[[agent]]\nname = "{node}"\ndirectory = "{node}"\ncpus = 4\n' for node in self.nodes)
        with configuration.open("a", encoding="utf-8") as file:
            file.writelines(tables)

    def pids(self) -> dict[str, int]:
        """Return the process of each replica."""
        return {name: self._processes.process(name).pid for name in self._api}


class Agents:
    """All processes of simulated agents."""

    def __init__(self, cluster: NodesCluster, certificates: Path) -> None:
        self._cluster = cluster
        self._certificates = certificates
        self._running: list[tuple[Any, Any]] = []

    def start(self) -> None:
        """Let them all arrive, one after the other."""
        context = multiprocessing.get_context("spawn")
        endpoints = [replica.api for replica in self._cluster.config.replicas]
        for number in range(PROCESSES):
            mine, theirs = context.Pipe()
            nodes = self._cluster.nodes[number::PROCESSES]
            arguments = (nodes, self._certificates, endpoints, theirs, ARRIVALS_PER_S / PROCESSES)
            process = context.Process(target=swarm_process, args=arguments, daemon=True)
            process.start()
            self._running.append((process, mine))

    async def look(self) -> tuple[int, dict[str, str], dict[tuple[int, str], float], dict[str, int]]:
        """Return how many are registered, where each polls, when which order came, and what went wrong."""
        registered, polls, ordered, troubles = 0, {}, {}, {}
        for process, pipe in self._running:
            pipe.send(None)
            while not pipe.poll():
                if not process.is_alive():
                    raise ServerFailed("a process of simulated agents ended")
                await asyncio.sleep(0.02)
            count, on, orders, wrong = pipe.recv()
            registered += count
            polls.update(on)
            ordered.update(orders)
            for text, times in wrong.items():
                troubles[text] = troubles.get(text, 0) + times
        return registered, polls, ordered, troubles

    def stop(self) -> None:
        """End them."""
        for process, _ in self._running:
            process.kill()
            process.join()


def cpu_s(pid: int) -> float:
    """Return the processor time of one process, seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def statuses(cluster: NodesCluster) -> dict[str, Any]:
    """Return the status of each replica that answers."""
    found = {}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=cluster.tls())) as session:
        for name, base in cluster.bases().items():
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with session.get(base + "/v1/status", timeout=aiohttp.ClientTimeout(5)) as response:
                    found[name] = await response.json()
    return found


async def work(cluster: NodesCluster, seconds: float) -> dict[int, float]:
    """Submit jobs evenly; return for each when its submit was answered, in monotonic seconds."""
    answered: dict[int, float] = {}
    async with Client.from_config(cluster.config, cluster.user) as client:
        begin_s = time.monotonic()
        for number in itertools.count():
            await asyncio.sleep(max(0.0, begin_s + number * 60 / JOBS_PER_MINUTE - time.monotonic()))
            if time.monotonic() > begin_s + seconds:
                return answered
            request = SubmitRequest(
                command_id=client.new_command_id(),
                script="#!/bin/sh\ntrue\n",
                bb="pool=fast capacity=1MiB",
                time_limit_s=60,
                workdir=str(cluster._results),
            )
            with contextlib.suppress(ApiError):
                job = (await client.call(operations.SUBMIT_JOB, request)).job_id
                answered[job] = time.monotonic()
    raise AssertionError


async def measure(cluster: NodesCluster, certificates: Path, say: Say) -> dict[str, Any]:
    """Start the cluster and its agents, and measure."""
    agents = Agents(cluster, certificates)
    found: dict[str, Any] = {"nodes": len(cluster.nodes)}
    try:
        await cluster.start()
        config: Config = cluster.config
        loop = asyncio.get_running_loop()
        with ProcessPoolExecutor(PROCESSES, mp_context=multiprocessing.get_context("spawn")) as pool:
            shutil.copy(config.tls.certificates / "ca.pem", certificates / "ca.pem")
            parts = [cluster.nodes[number::PROCESSES] for number in range(PROCESSES)]
            authority = config.tls.certificates
            await asyncio.gather(
                *(loop.run_in_executor(pool, certify, authority, certificates, part) for part in parts)
            )
        before = {name: pss_bytes(pid) for name, pid in cluster.pids().items()}
        began_s = time.monotonic()
        agents.start()
        while True:
            await asyncio.sleep(1.0)
            registered, polls, _, troubles = await agents.look()
            if len(polls) == len(cluster.nodes):
                break
            if time.monotonic() - began_s > ARRIVED_S_MAX:
                raise ServerFailed(f"{registered} registered, {len(polls)} poll: {troubles}")
            cluster.check()
        found["registered_s"] = round(time.monotonic() - began_s, 1)
        say(f"  all {registered:,} registered and polling after {found['registered_s']} s")
        await asyncio.sleep(SETTLED_S)
        pids = cluster.pids()
        terms = await statuses(cluster)
        leader = next(name for name, one in terms.items() if one["role"] == "leader")
        spent, begin_s = {name: cpu_s(pid) for name, pid in pids.items()}, time.monotonic()
        await asyncio.sleep(REST_S)
        passed_s = time.monotonic() - begin_s
        found["rest_core_percent"] = {
            ("leader" if name == leader else name): round(100 * (cpu_s(pid) - spent[name]) / passed_s, 1)
            for name, pid in sorted(pids.items(), key=lambda one: one[0] != leader)
        }
        _, polls, _, troubles = await agents.look()
        shares = {str(replica.api): replica.name for replica in config.replicas}
        found["agents_of"] = {
            shares[place]: sum(one == place for one in polls.values()) for place in sorted(set(polls.values()))
        }
        found["memory_kib_per_agent"] = {
            name: round((pss_bytes(pid) - before[name]) / 1024 / max(1, found["agents_of"].get(name, 0)), 1)
            for name, pid in pids.items()
        }
        found["troubles_at_rest"] = troubles
        say(f"  at rest, % of a core: {found['rest_core_percent']}; agents: {found['agents_of']}")
        say(f"  KiB an agent: {found['memory_kib_per_agent']}")
        answered = await work(cluster, WORK_S)
        await asyncio.sleep(5.0)
        _, _, ordered, _ = await agents.look()
        latencies = sorted(
            max(0.0, ordered[job, "stage_in"] - at_s) for job, at_s in answered.items() if (job, "stage_in") in ordered
        )
        found["orders"] = {
            "submitted": len(answered),
            "arrived": len(latencies),
            "p50_ms": percentile_ms(latencies, 0.5),
            "p99_ms": percentile_ms(latencies, 0.99),
            "max_ms": percentile_ms(latencies, 1.0),
            "torn_down": sum(stage == "teardown" for _, stage in ordered),
        }
        say(f"  orders: {found['orders']}")
        terms = await statuses(cluster)
        term = max(one["term"] for one in terms.values())
        leader = next(name for name, one in terms.items() if one["role"] == "leader")
        place = str(config.replica(leader).api)
        _, polls, _, _ = await agents.look()
        lost = sum(one == place for one in polls.values())
        os.kill(pids[leader], signal.SIGKILL)
        killed_s = time.monotonic()
        back_s = None
        while time.monotonic() - killed_s < LOST_S:
            await asyncio.sleep(0.25)
            _, polls, _, troubles = await agents.look()
            if back_s is None and sum(one != place for one in polls.values()) == len(cluster.nodes):
                back_s = round(time.monotonic() - killed_s, 2)
        after = await statuses(cluster)
        found["killed"] = {
            "agents_lost": lost,
            "all_back_s": back_s,
            "elections": max(one["term"] for one in after.values()) - term,
            "agents_of": {shares[one]: sum(p == one for p in polls.values()) for one in sorted(set(polls.values()))},
            "troubles": troubles,
        }
        say(f"  leader killed: {found['killed']}")
        return found
    finally:
        agents.stop()
        cluster.stop()


def report(directory: Path, nodes: int, say: Say) -> Found:
    """Measure; return the rows."""
    say(f"\nNodes: {nodes:,} simulated agents over three replicas, {JOBS_PER_MINUTE} jobs a minute, the leader killed")
    raise_files()
    with tempfile.TemporaryDirectory(prefix="forebay-bench-agents-") as made:
        found = uvloop.run(measure(NodesCluster(directory / "nodes", nodes), Path(made), say))
    rest, orders, killed = found["rest_core_percent"], found["orders"], found["killed"]
    rows = [
        Row(f"{nodes:,} agents at rest, of a core: leader, followers", ", ".join(f"{one} %" for one in rest.values())),
        Row("an order reaches its agent: p50, p99", f"{orders['p50_ms']:.0f} ms, {orders['p99_ms']:.0f} ms"),
        Row("leader killed: all agents back, elections", f"{killed['all_back_s']} s, {killed['elections']}"),
    ]
    return Found(rows, found, killed["all_back_s"] is not None and orders["arrived"] == orders["submitted"])
