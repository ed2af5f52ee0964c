"""HTTP listener of a witness, open to all clients, with bounds on connections, sizes and times.

Clients are not authenticated, because only a checkpoint's signatures count. Unlike a replica's listener, this one
requests no certificate. It reveals only cosignatures and the last cosigned size.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from typing import Any, ClassVar, Final, cast

from aiohttp import web

from forebay.cluster.security.proofs import MAX_REQUEST_BYTES
from forebay.cluster.system import Address
from forebay.cluster.system.eventloop import Acceptor, HttpConnection, HttpServer, MalformedRequest, listen
from forebay.cluster.witness.witness import CheckpointWitness, WitnessResponse

LOGGER = logging.getLogger(__name__)

PATH: Final = "/add-checkpoint"

CONNECTIONS_MAX: Final = 64
"""Maximum number of open connections; a cluster needs one, from its leader. One more replaces the connection that has
waited longest without a response, so that silent or slow clients cannot exclude others.
"""

REST_S_MAX: Final = 60.0
"""Longest idle time of a connection, seconds: six checkpoint intervals."""

REQUEST_S_MAX: Final = 10.0
"""Time to receive a request, head and body, seconds."""

SWEEP_PERIOD_S: Final = 2.0

LINE_CHARACTERS_MAX: Final = 4096
HEADERS_MAX: Final = 32
"""Length of the request line and of each header field, characters; header fields, count."""

SHUTDOWN_S: Final = 3.0
"""Time for pending requests to end at shutdown, seconds."""

HEADERS: Final = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "Server": "forebay-witness"}


class _Connection(HttpConnection):
    """Connection that can be replaced until its request is complete."""

    __slots__ = ("is_decided_about",)

    rest_s_max: ClassVar[float] = REST_S_MAX
    head_s_max: ClassVar[float] = REQUEST_S_MAX
    line_bytes_max: ClassVar[int] = LINE_CHARACTERS_MAX
    headers_max: ClassVar[int] = HEADERS_MAX

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.is_decided_about = False
        """True if the request is complete and being answered; the connection is then not replaced."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accept the connection; close another one if there are too many."""
        manager = self._manager
        super().connection_made(transport)
        if isinstance(manager, _GuardedServer):
            manager.make_room(self)

    def problem_response(self, malformed: MalformedRequest) -> web.Response:
        """Return the response to a malformed request."""
        response = super().problem_response(malformed)
        response.headers.update(HEADERS)
        return response


class _GuardedServer(HttpServer):
    """HTTP server that replaces the longest-waiting connection when full."""

    connection_type: ClassVar[type[HttpConnection]] = _Connection

    def make_room(self, newcomer: _Connection) -> None:
        """Close a connection for a new one if there are more than CONNECTIONS_MAX."""
        held = [one for one in self.connections if isinstance(one, _Connection)]
        if len(held) > CONNECTIONS_MAX:
            others = [one for one in held if one is not newcomer and not one.is_decided_about]
            min(others, key=lambda one: one.rest_since_s, default=newcomer).cut()


class WitnessServer:
    """Accepts requests, and lets the witness decide in a thread."""

    def __init__(self, witness: CheckpointWitness, address: Address, tls: Callable[[], ssl.SSLContext] | None) -> None:
        """Initialize. `tls` returns the context of the next handshake; None for plain HTTP behind a local proxy."""
        self._witness = witness
        self._address = address
        self._tls = tls
        self._guarded: _GuardedServer | None = None
        self._acceptor: Acceptor | None = None
        self._plain: asyncio.Server | None = None
        self._sweeper: asyncio.TimerHandle | None = None

    @property
    def connections(self) -> int:
        """Return the number of open connections."""
        return 0 if self._guarded is None else len(self._guarded.connections)

    async def start(self) -> None:
        """Start listening.

        Raises:
            OSError: The address cannot be used.
        """
        self._guarded = _GuardedServer(self._handle, LOGGER, lingering_time=1.0)
        if self._tls is None:
            listening = await listen(self._address)
            self._plain = await asyncio.get_running_loop().create_server(self._guarded, sock=listening)
        else:
            self._acceptor = Acceptor(self._guarded, self._address, self._tls)
            await self._acceptor.start()
        self._sweep()

    async def stop(self) -> None:
        """Stop listening, give pending requests SHUTDOWN_S, and close."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        if self._plain is not None:
            self._plain.close()
        if self._acceptor is not None:
            await self._acceptor.stop()
        if self._guarded is not None:
            self._guarded.pre_shutdown()
            await self._guarded.shutdown(SHUTDOWN_S)

    def _sweep(self) -> None:
        self._sweeper = asyncio.get_running_loop().call_later(SWEEP_PERIOD_S, self._sweep)
        if self._guarded is not None:
            self._guarded.sweep()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = cast(_Connection, request.protocol)
        connection.begin()
        try:
            answer = await self._answer(request, connection)
        finally:
            connection.end()
        headers = {**HEADERS, "Content-Type": answer.content_type}
        if answer.status == 405:
            headers["Allow"] = "POST"
        response = web.Response(status=answer.status, body=answer.body.encode(), headers=headers)
        if answer.status in (408, 411, 413):
            response.force_close()
        return response

    async def _answer(self, request: web.BaseRequest, connection: _Connection) -> WitnessResponse:
        if request.path != PATH:
            return WitnessResponse(404, f"the only path here is {PATH}\n")
        if request.method != "POST":
            return WitnessResponse(405, f"{PATH} requires POST\n")
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            return WitnessResponse(415, "send the request uncompressed\n")
        announced = request.content_length
        if announced is None and request.body_exists:
            return WitnessResponse(411, "send Content-Length\n")
        if (announced or 0) > MAX_REQUEST_BYTES:
            return WitnessResponse(413, f"a request may have at most {MAX_REQUEST_BYTES} bytes\n")
        try:
            async with asyncio.timeout(REQUEST_S_MAX):
                # Bounded, because a body cannot exceed its declared length.
                body = await request.content.read(-1)
        except TimeoutError:
            return WitnessResponse(408, f"the body did not arrive within {REQUEST_S_MAX:g} s\n")
        connection.is_decided_about = True
        try:
            return await asyncio.to_thread(self._witness.add_checkpoint, body)
        finally:
            connection.is_decided_about = False
