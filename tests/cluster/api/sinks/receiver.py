"""A receiver of events, as a site would write it: it checks signatures, and it can be killed, slow, broken or wrong."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from forebay.cluster.config.sinks import SinkConfig
from tests.ports import free_port

SECRET = b"0123456789abcdef0123456789abcdef"


def verify(secret: bytes, header: str, body: bytes) -> bool:
    """What docs/operate/event-sinks.md tells receivers to do."""
    parts = dict(part.split("=", 1) for part in header.split(","))
    expected = hmac.new(secret, parts["t"].encode() + b"." + body, hashlib.sha256).hexdigest()
    return hmac.compare_digest(expected, parts["v1"])


class Receiver:
    """Keeps the events of accepted requests."""

    def __init__(self, directory: Path, port: int = 0) -> None:
        self.port = port or free_port()
        self.secret_file = directory / "sink.secret"
        self.secret_file.write_bytes(SECRET + b"\n")
        self.secret_file.chmod(0o600)
        self.answer: Callable[[web.Request], Awaitable[web.StreamResponse]] | int = 200
        self.headers: dict[str, str] = {}
        self.requests: list[dict[str, str]] = []
        self.bodies: list[list[dict[str, Any]]] = []
        self.arrived: dict[str, dict[str, Any]] = {}
        """Events by ID, in the order of their first arrivals."""
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_route("*", "/{path:.*}", self._take)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()

    async def kill(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def __aenter__(self) -> Receiver:
        await self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.kill()

    def sink(self, name: str = "audit", **more: Any) -> SinkConfig:
        return SinkConfig(name, f"http://127.0.0.1:{self.port}/events", self.secret_file, **more)

    @property
    def revisions(self) -> list[int]:
        """Revisions of the arrived events, by first arrival."""
        return [event["data"]["revision"] for event in self.arrived.values() if "revision" in event["data"]]

    async def _take(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.requests.append({**request.headers, "path": request.path})
        if callable(self.answer):
            return await self.answer(request)
        if not 200 <= self.answer < 300:
            return web.Response(status=self.answer, headers=self.headers)
        if not verify(SECRET, request.headers["Forebay-Signature"], body):
            return web.Response(status=401)
        events = json.loads(body)
        self.bodies.append(events)
        for event in events:
            self.arrived.setdefault(event["id"], event)
        return web.Response(status=self.answer)


async def hang(request: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def hang_up(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def say_garbage(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.write(b"\x00\xff\x00HTTP?\r\n\r\n" * 20)
    request.transport.close()
    return web.Response()
