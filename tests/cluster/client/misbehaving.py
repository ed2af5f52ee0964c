"""A real TLS server on loopback that misbehaves as it is told to, and certificates of two clusters."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from forebay.cluster.security.identity import Identity, Role, identify
from forebay.cluster.security.pki import create_authority, issue
from forebay.cluster.security.tls import TlsFiles, server_context
from forebay.cluster.system.address import Address
from forebay.cluster.system.clock import SystemClock
from tests.clocks import ManualClock

Behaviour = Callable[["Misbehaving", web.Request, bytes], Awaitable[web.StreamResponse]]


class Pki:
    """One cluster's authority and a few identities."""

    def __init__(self, directory: Path, name: str) -> None:
        clock = SystemClock()
        authority = create_authority(directory, cluster_name=name, cluster_id=name * 4, at=clock.now())
        self.replica = issue(
            authority, directory, role=Role.REPLICA, name="r1", addresses=["127.0.0.1"], at=clock.now()
        )
        self.elsewhere = issue(
            authority, directory, role=Role.REPLICA, name="r9", addresses=["10.9.9.9"], at=clock.now()
        )
        self.operator = issue(authority, directory, role=Role.OPERATOR, name="operator", at=clock.now())
        self.agent = issue(authority, directory, role=Role.AGENT, name="n1", at=clock.now())


REQUEST_S = 7.0
"""How long a request takes on the clock of `Misbehaving`, seconds: the deadlines of these tests are 20 s."""


class Misbehaving:
    """A replica's API that answers each request with the next behaviour, and the last one for ever."""

    def __init__(self) -> None:
        self.behaviours: list[Behaviour] = []
        self.requests: list[tuple[str, str, bytes]] = []
        self.identities: list[Identity] = []
        self.address = Address("127.0.0.1", 0)
        self.arrived = asyncio.Event()
        self.clock = ManualClock(SystemClock().now())
        """A clock for clients, on which each request takes REQUEST_S: their deadlines pass at the same request on a
        slow machine as on a fast one."""
        self._runner: web.AppRunner | None = None

    @property
    def command_ids(self) -> list[str]:
        return [json.loads(body)["command_id"] for _, _, body in self.requests]

    async def start(self, tls: TlsFiles) -> None:
        application = web.Application(client_max_size=2**20)
        application.router.add_route("*", "/{tail:.*}", self._handle)
        self._runner = web.AppRunner(application, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=server_context(tls))
        await site.start()
        self.address = Address("127.0.0.1", int(self._runner.addresses[0][1]))

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.requests.append((request.method, request.raw_path, body))
        self.clock.advance(REQUEST_S)
        self.arrived.set()
        assert request.transport is not None
        self.identities.append(identify(request.transport.get_extra_info("peercert")))
        behaviour = self.behaviours.pop(0) if len(self.behaviours) > 1 else self.behaviours[0]
        return await behaviour(self, request, body)


@contextlib.asynccontextmanager
async def serving(tls: TlsFiles, *behaviours: Behaviour) -> AsyncIterator[Misbehaving]:
    server = Misbehaving()
    server.behaviours = list(behaviours)
    await server.start(tls)
    try:
        yield server
    finally:
        await server.stop()


def answering(payload: Any, status: int = 200, headers: dict[str, str] | None = None) -> Behaviour:
    async def behave(server: Misbehaving, request: web.Request, body: bytes) -> web.StreamResponse:
        return web.json_response(payload, status=status, headers=headers)

    return behave


def failing(status: int, code: str, outcome: str = "rejected", headers: dict[str, str] | None = None) -> Behaviour:
    error = {"code": code, "sentence": f"it is {code}", "remedy": "mend it", "place": "field x", "outcome": outcome}
    return answering({"error": error}, status, headers)


def redirecting(to: Callable[[Misbehaving], str]) -> Behaviour:
    async def behave(server: Misbehaving, request: web.Request, body: bytes) -> web.StreamResponse:
        return web.Response(status=307, headers={"Location": to(server)})

    return behave


def dropping() -> Behaviour:
    """Carry the request out, as it were, and cut the connection before the answer."""

    async def behave(server: Misbehaving, request: web.Request, body: bytes) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    return behave


def hanging() -> Behaviour:
    async def behave(server: Misbehaving, request: web.Request, body: bytes) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    return behave


def streaming(*chunks: bytes, then: str = "end") -> Behaviour:
    """Stream chunks, then `end` the stream, `abort` the connection, or `hang`."""

    async def behave(server: Misbehaving, request: web.Request, body: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for chunk in chunks:
            await response.write(chunk)
        if then == "abort":
            assert request.transport is not None
            request.transport.abort()
        elif then == "hang":
            await asyncio.Event().wait()
        return response

    return behave


def job(job_id: int = 7) -> dict[str, Any]:
    """A JobView as JSON."""
    return {
        "job_id": job_id,
        "name": "a",
        "user": "alice",
        "state": "PENDING",
        "reason": "None",
        "burst_buffer": None,
        "burst_buffer_state": None,
        "pool": None,
        "capacity_bytes": 0,
        "node": None,
        "priority": 1,
        "attempt": 0,
        "cpus": 1,
        "time_limit_s": 60,
        "submit_time": "2026-01-31T12:00:00.000000Z",
        "eligible_time": None,
        "start_time": None,
        "end_time": None,
        "exit_code": 0,
        "signal": 0,
        "hold": None,
        "system_comment": "",
        "workdir": "/",
        "output": "",
        "revision": 12,
    }
