"""Many clients over a few connections with many requests under way on each: Forebay's channel and etcd's native gRPC.

Both clients are asyncio code of the same shape in one process: a request is encoded, what one turn of the loop has made
leaves in one TLS record, and an answer resolves a future. Each client has one request outstanding.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import aiohttp

from forebay.cluster.client.channel import ChannelConnection, ChannelError
from forebay.cluster.client.errors import ApiError
from forebay.cluster.client.session_ids import SessionIds
from forebay.cluster.schemas.command_ids import new_command_id
from forebay.cluster.schemas.requests import BulkCommand, HoldCommand, OpenSessionCommand, ReleaseCommand, SubmitCommand
from forebay.cluster.system.address import Address
from forebay.cluster.system.clock import SystemClock
from tests.benchmarks.etcd import VALUE_BYTES, EtcdCluster
from tests.benchmarks.forebay import SCRIPT, ForebayCluster
from tests.benchmarks.http2 import CallFailed, GrpcConnection, put_request
from tests.benchmarks.load import (
    ERROR_PAUSE_S,
    MAX_ERRORS_SHOWN,
    Measurement,
    Window,
    cpu_within,
    measurement,
    verify_settled,
)

Send = Callable[[int, int], Awaitable[None]]
"""Sends one write of (client, number) and returns when it is durable; an exception otherwise."""


class Tally:
    """What the clients of one measurement saw."""

    def __init__(self, clients: int) -> None:
        self.latencies_s: list[float] = []
        self.answers = [0] * clients
        self.ended = False
        """Set to end the clients before their time."""
        self.accepted = 0
        self.errors = 0
        self.examples: list[str] = []

    async def client(self, send: Send, client: int, window: Window) -> None:
        """Send one write after another until the end of the window; what is answered within it counts."""
        number = 0
        while (sent := time.perf_counter()) < window.end and not self.ended:
            number += 1
            try:
                await send(client, number)
            except (ApiError, CallFailed, OSError, TimeoutError) as error:
                window.answered(client)
                self.errors += 1
                text = f"{type(error).__name__}: {error}"[:300]
                if text not in self.examples and len(self.examples) < MAX_ERRORS_SHOWN:
                    self.examples.append(text)
                await asyncio.sleep(ERROR_PAUSE_S)
                continue
            window.answered(client)
            self.accepted += 1
            answered = time.perf_counter()
            if window.start <= answered < window.end:
                self.latencies_s.append(answered - sent)
                self.answers[client] += 1


async def drive(
    system: "ChannelCluster | EtcdGrpcCluster", send: Send, clients: int, warm_up_s: float, seconds: float
) -> Measurement:
    """Run the clients, and check that the cluster has settled what it acknowledged."""
    tally = Tally(clients)
    before = await system.settled()
    window = Window(clients, warm_up_s, seconds)
    cpu = asyncio.create_task(cpu_within(system, window))
    await asyncio.gather(*(tally.client(send, client, window) for client in range(clients)))
    client_cpu_s, server_cpu_s = await cpu
    system.check()
    settled = await system.settled() - before
    verify_settled(system.name, accepted=tally.accepted, settled=settled)
    return measurement(
        system.name,
        clients,
        seconds,
        tally.latencies_s,
        errors=tally.errors,
        examples=tally.examples,
        client_cpu_s=client_cpu_s,
        server_cpu_s=server_cpu_s,
        answers=tally.answers,
    )


class ChannelCluster(ForebayCluster):
    """Three replicas with channels; the clients submit one held job each, and release and hold it in turn."""

    name = "channel"
    operation = "submit_job once, then release_job and hold_job in turn, over the MessagePack channel (TLS 1.3)"
    channels = True

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._base = ""
        self._job_of: dict[int, int] = {}

    async def settled(self) -> int:
        """Return the leader's revision."""
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=self.tls())) as session:
            return await self.committed(session, self._base)

    async def measure(self, clients: int, *, warm_up_s: float, seconds: float, connections_max: int) -> Measurement:
        """Drive the leader's channel, all clients over `connections_max` connections."""
        async with self.sender(min(clients, connections_max)) as send:
            return await drive(self, send, clients, warm_up_s, seconds)

    def command(self, client: int, number: int, command_id: str) -> BulkCommand:
        """Return what a client asks next: its held job, then its release and hold in turn."""
        job = self._job_of.get(client)
        if job is None:
            return SubmitCommand(
                command_id=command_id,
                script=SCRIPT,
                name=f"bench-{client:04d}",
                bb="pool=fast capacity=1MiB",
                time_limit_s=60,
                workdir=str(self._results),
                hold=True,
            )
        kind = HoldCommand if number % 2 else ReleaseCommand
        return kind(command_id=command_id, job_id=job)

    async def leader_addresses(self) -> tuple[str, Address]:
        """Return the base URL of the leader's API, and the address of its channel."""
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=self.tls())) as session:
            self._base = await self.leader(session)
        name = next(name for name, base in self._api.items() if base == self._base)
        address = self.config.replica(name).channel
        assert isinstance(address, Address)
        return self._base, address

    @contextlib.asynccontextmanager
    async def sender(self, count: int) -> AsyncIterator[Send]:
        """Open `count` connections to the leader's channel; what sends each client's next command over them."""
        _, address = await self.leader_addresses()
        config, tls, clock = self.config, self.tls(), SystemClock()
        connections = [await ChannelConnection.open(address, tls, config.cluster.id) for _ in range(count)]

        async def open_session() -> int:
            return (await connections[0].ask(OpenSessionCommand(command_id=new_command_id(clock)))).revision

        ids = SessionIds(open_session, clock)

        async def send(client: int, number: int) -> None:
            place = client % len(connections)
            command_id = await ids.next_id()
            command = self.command(client, number, command_id)
            try:
                done = await connections[place].ask(command)
            except ChannelError as error:
                # Leadership moved: followed, as any client would, and counted as an error, because clients notice.
                if error.leader and error.leader != str(connections[place].address):
                    old, moved = connections[place], Address.parse(error.leader)
                    new = await ChannelConnection.open(moved, tls, config.cluster.id)
                    if connections[place] is old:
                        connections[place] = new
                    else:
                        new.close()  # another client has done it
                raise
            if isinstance(command, SubmitCommand):
                self._job_of[client] = done.job
            ids.acknowledge(command_id)

        try:
            yield send
        finally:
            for connection in connections:
                connection.close()


class EtcdGrpcCluster(EtcdCluster):
    """Three etcd members, asked through their native gRPC."""

    name = "etcd-grpc"
    operation = f"etcdserverpb.KV/Put of {VALUE_BYTES} bytes (native gRPC over HTTP/2, TLS 1.3)"

    async def settled(self) -> int:
        """Return how many keys there are."""
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=self.tls())) as session:
            return await self.committed(session, self._base)

    async def measure(self, clients: int, *, warm_up_s: float, seconds: float, connections_max: int) -> Measurement:
        """Drive the leader, all clients over `connections_max` connections."""
        async with self.sender(min(clients, connections_max)) as send:
            return await drive(self, send, clients, warm_up_s, seconds)

    @contextlib.asynccontextmanager
    async def sender(self, count: int) -> AsyncIterator[Send]:
        """Open `count` connections to the leader; what puts each client's next key over them."""
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=self.tls())) as session:
            self._base = await self.leader(session)
        port = int(self._base.rsplit(":", 1)[1])
        connections = [
            await GrpcConnection.open("127.0.0.1", port, self.tls(), "/etcdserverpb.KV/Put") for _ in range(count)
        ]
        value = bytes(range(256)) * (VALUE_BYTES // 256)

        async def send(client: int, number: int) -> None:
            key = b"bench/%04d/%08d" % (client, number)
            await connections[client % len(connections)].call(put_request(key, value))

        try:
            yield send
        finally:
            for connection in connections:
                connection.close()
