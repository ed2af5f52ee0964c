"""Doors in processes of their own: each dies alone, costs the core nothing, and is believed no more than it must be."""

import asyncio
import contextlib
import os
import signal
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from forebay.cluster.api.worker import frames as f
from forebay.cluster.api.workers import ApiWorkers, WorkerLink
from forebay.cluster.client import Client
from forebay.cluster.client.channel import ChannelConnection
from forebay.cluster.config.config import Config
from forebay.cluster.schemas.channel_frames import LENGTH
from forebay.cluster.security.identity import Role
from forebay.cluster.security.tls import client_context
from forebay.cluster.system.address import Address
from forebay.cluster.system.processes import descendants, start_time
from tests.cluster.channel.test_channel import submission
from tests.cluster.harness import Harness, story, until
from tests.cluster.test_serve import make, ready, running
from tests.ports import free_port

encode, decode = f.WORKER_CODEC.encode, f.WORKER_CODEC.decode


class Doored(Harness):
    """A replica behind one door, with a channel."""

    api_workers = 1

    def __init__(self, config: Config, **options: Any) -> None:
        (replica,) = config.replicas
        moved = msgspec.structs.replace(replica, channel=Address("127.0.0.1", free_port()))
        super().__init__(msgspec.structs.replace(config, replicas=(moved,)), **options)

    @property
    def front(self) -> ApiWorkers:
        assert isinstance(self.server, ApiWorkers)
        return self.server

    @property
    def pid(self) -> int:
        (pid,) = self.front.pids
        return pid

    async def served(self) -> WorkerLink:
        """Return the core's end of the socket, once the door is there."""
        await until(lambda: any(link.greeted for link in self.front.links))
        (link,) = self.front.links
        return link

    async def connect(self, who: str = "alice") -> ChannelConnection:
        address = self.config.replica("r1").channel
        assert address is not None
        return await ChannelConnection.open(address, client_context(self.config.tls_files(who)), self.config.cluster.id)


async def metrics(harness: Harness) -> str:
    body = (await harness.ask("GET", "/metrics", who="alice")).body
    return body.decode() if isinstance(body, bytes) else str(body)


def metric(text: str, name: str) -> float:
    return float(next(line.rpartition(" ")[2] for line in text.splitlines() if line.startswith(f"{name} ")))


@story
async def test_a_door_that_is_killed_is_started_again_and_each_command_is_carried_out_once(config: Config) -> None:
    async with Doored(config) as harness:
        commands = [submission(harness) for _ in range(200)]
        await harness.served()
        connection = await harness.connect()
        asked = [connection.ask(command) for command in commands]
        await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        first = harness.pid
        os.kill(first, signal.SIGKILL)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        told = {n: answer.job for n, answer in enumerate(answers) if not isinstance(answer, BaseException)}
        await until(lambda: bool(harness.front.pids) and harness.pid != first)
        await harness.served()
        again = await harness.connect()
        jobs = [answer.job for answer in await asyncio.gather(*map(again.ask, commands))]
        assert {n: jobs[n] for n in told} == told
        assert sorted(jobs) == list(range(1, 201)) == sorted(harness.controller.state.jobs)
        text = await metrics(harness)
        assert metric(text, "forebay_api_workers_started_total") == 2
        again.close()


@story
async def test_a_door_ends_with_its_core(config: Config) -> None:
    async with Doored(config) as harness:
        link = await harness.served()
        first = harness.pid
        link.abort()  # what a door sees of a core that has died
        await until(lambda: first not in harness.front.pids)


@story
async def test_what_is_no_frame_costs_its_door_and_nothing_else(config: Config) -> None:
    async with Doored(config) as harness:
        await harness.served()
        greeting = encode(f.Greeting(f.WORKER_VERSION))
        wrong = [
            b"\xff" * 8,
            LENGTH.pack(3) + b"abc",
            encode(f.Greeting(99)),
            encode(f.RequestAbandoned(1)),
            greeting + encode(f.CommandReceived(1, 7, b"", None)),
            greeting + encode(f.RequestReceived(1, "no_such", Role.USER, "alice", "1", {}, {}, b"", None, None)),
            greeting + encode(f.ResponsesObserved((("no_such", 200, 0.1, ""),))),
        ]
        for data in wrong:
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            await asyncio.get_running_loop().create_unix_connection(lambda: WorkerLink(harness.front), sock=ours)
            reader, writer = await asyncio.open_connection(sock=theirs)
            writer.write(data)
            with contextlib.suppress(ConnectionError):
                await reader.read()  # until its end
            await until(lambda: len(harness.front.links) == 1)
            writer.close()
        assert (await harness.submit()).status == 201


@story
async def test_a_door_cannot_ask_what_the_role_of_its_client_may_not(config: Config) -> None:
    async with Doored(config) as harness:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda: WorkerLink(harness.front), sock=ours)
        reader, writer = await asyncio.open_connection(sock=theirs)
        writer.write(encode(f.Greeting(f.WORKER_VERSION)))
        writer.write(encode(f.RequestReceived(1, "save_snapshot", Role.USER, "alice", "1", {}, {}, b"{}", None, None)))
        while not isinstance(answer := await frame_of(reader), f.FailureResponse | f.ResponseStart):
            pass
        assert isinstance(answer, f.FailureResponse) and answer.status == 403
        writer.close()


async def frame_of(reader: asyncio.StreamReader) -> f.FromController:
    (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    return decode(await reader.readexactly(size))


@story
async def test_what_is_revoked_is_refused_by_the_core_whatever_its_door_believes(config: Config) -> None:
    async with Doored(config) as harness:
        body = {"command_id": harness.new_id(), "reason": "x"}
        answer = await harness.ask("PUT", "/v1/revocations/user:alice", body, who="operator")
        assert answer.status == 200, answer
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda: WorkerLink(harness.front), sock=ours)
        reader, writer = await asyncio.open_connection(sock=theirs)
        writer.write(encode(f.Greeting(f.WORKER_VERSION)))
        writer.write(encode(f.RequestReceived(1, "list_jobs", Role.USER, "alice", "1", {}, {}, b"", None, None)))
        writer.write(encode(f.ProgramConnected(2, Role.USER, "alice", "1")))
        content = msgspec.msgpack.encode(submission(harness))
        writer.write(encode(f.CommandReceived(3, 2, content, None)))
        found = {}
        while len(found) < 2:
            frame = await frame_of(reader)
            if isinstance(frame, f.FailureResponse | f.ResponseStart | f.CommandSettled):
                found[frame.number] = frame
        assert {one.status for one in found.values() if isinstance(one, f.FailureResponse)} == {401}
        assert len(found) == 2 and not harness.controller.state.jobs
        writer.close()


@story
async def test_handshakes_slow_clients_and_large_bodies_run_nothing_in_the_core(config: Config) -> None:
    async with Doored(config) as harness:
        link = await harness.served()
        await harness.submit()
        frames: list[object] = []
        take = link.receive
        link.receive = lambda frame: (frames.append(frame), take(frame))[1]  # type: ignore[method-assign]
        address = harness.config.replica("r1").api
        context = client_context(harness.config.tls_files("alice"))

        async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            return await asyncio.open_connection(address.host, address.port, ssl=context, server_hostname=address.host)

        storm = await asyncio.gather(*(connect() for _ in range(100)))
        for _, writer in storm[:50]:
            writer.write(b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")  # no end
        reader, writer = storm[99]
        body = b'{"script": "' + b"x" * (4 * 1024 * 1024) + b'"'
        head = f"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        writer.write(head.encode() + b"\r\n\r\n" + body)
        await writer.drain()
        assert b" 400 " in await reader.readline()
        assert [one for one in frames if not isinstance(one, f.ResponsesObserved)] == []
        for _, writer in storm:
            writer.transport.abort()


@story
async def test_a_stopped_replica_answers_what_waits_and_ends_its_workers(config: Config) -> None:
    harness = Doored(config)
    await harness.open()
    await harness.served()
    pid = harness.pid
    body = {"command_id": harness.new_id(), "instance": "i", "storage_id": "s", "cpus": 4}
    assert (await harness.ask("POST", "/v1/agents/n1/register", body, who="n1")).status == 200
    revision = harness.controller.state.revision
    poll = asyncio.ensure_future(
        harness.ask("POST", "/v1/agents/n1/poll", {"instance": "i", "wait_s": 20, "seen_revision": revision}, who="n1")
    )
    await until(lambda: harness.controller.orders.waiting == 1)
    harness.service.wake()
    assert (await poll).status == 200
    await harness.close()
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("count", [0, 1, 2])
@story
async def test_every_answer_is_counted_with_any_number_of_workers(
    config: Config, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr(Doored, "api_workers", count)
    async with Doored(config) as harness:
        for _ in range(3):
            assert (await harness.ask("GET", "/v1/jobs/7")).status == 404
        wanted = 'forebay_api_problems_total{code="unknown_job"}'
        async with asyncio.timeout(30):
            while True:
                text = await metrics(harness)
                if wanted in text and metric(text, wanted) == 3:
                    break


@story
async def test_a_killed_core_takes_its_workers_along(tmp_path: Path) -> None:
    config = make(tmp_path, 1)
    text = config.file.read_text(encoding="utf-8")
    config.file.write_text(text.replace("[[replica]]", "[[replica]]\napi_workers = 2"), encoding="utf-8")
    async with running(config, "r1") as processes:
        pid = processes["r1"].pid
        async with Client(config.endpoints, config.tls_files("alice")) as client:
            await ready(client)
        workers = descendants(pid)
        assert len(workers) >= 2
        processes["r1"].kill()
        await until(lambda: all(start_time(worker) is None for worker in workers))


@story
@pytest.mark.parametrize("closing", [True, False])
async def test_what_arrives_from_a_worker_that_was_closed_is_not_read(
    closing: bool, caplog: pytest.LogCaptureFixture
) -> None:
    elsewhere, aborted = list[None](), list[None]()
    core: Any = SimpleNamespace(service=None, elsewhere=lambda: elsewhere.append(None))
    link = WorkerLink(SimpleNamespace(core=core))  # type: ignore[arg-type]
    no_frame = LENGTH.pack(2) + b"no"
    link.data_received(no_frame)
    assert elsewhere == []
    transport: Any = SimpleNamespace(is_closing=lambda: closing, abort=lambda: aborted.append(None))
    link._transport = transport
    link.data_received(no_frame)
    assert len(elsewhere) == len(aborted) == (not closing)
    assert bool(caplog.records) is not closing
