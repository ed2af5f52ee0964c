"""The listener of a witness: HTTP, to anybody who reaches it, within bounds of connections, sizes and times.

Nobody is asked who he is: what counts are the signatures of a checkpoint. So it has no certificate to ask for, unlike
every listener of a replica, and gives away nothing but cosignatures and the size that was cosigned last.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from typing import Any, Final, cast

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from cluster.security.proofs import MAX_REQUEST_BYTES
from cluster.security.witness.witness import Answer, Witness
from cluster.system import Address
from cluster.system.eventloop import Acceptor, listen

LOGGER = logging.getLogger(__name__)

PATH: Final = "/add-checkpoint"

CONNECTIONS_MAX: Final = 64
"""Open connections, count: a cluster has one, of its leader. For a further one that goes which has had no answer for
longest, so that nobody shuts others out by saying nothing, or slowly."""

REST_S_MAX: Final = 60.0
"""How long a connection may ask nothing, seconds: six checkpoints come in that time."""

REQUEST_S_MAX: Final = 10.0
"""How long a request may take to arrive, head and body, seconds."""

SWEEP_PERIOD_S: Final = 2.0

LINE_CHARACTERS_MAX: Final = 4096
HEADERS_MAX: Final = 32
"""The request line and each header field, characters; header fields, count."""

SHUTDOWN_S: Final = 3.0
"""How long requests under way may take to end, seconds."""

HEADERS: Final = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "Server": "forebay-witness"}


class _Connection(RequestHandler):
    """One connection: aiohttp's, with the time since which it rests, and since which a request comes in."""

    __slots__ = ("busy", "head_since_s", "is_decided_about", "rest_since_s")

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.busy = False
        self.is_decided_about = False
        """Whether its request is here and the answer on its way: it is not closed for others then."""
        self.head_since_s: float | None = None
        self.rest_since_s = asyncio.get_running_loop().time()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection; where there are too many, another one is closed for it."""
        manager = self._manager
        super().connection_made(transport)
        if isinstance(manager, _Guarded):
            manager.make_room(self)

    def data_received(self, data: bytes) -> None:
        """Note when a request begins, and let aiohttp parse."""
        if not self.busy and self.head_since_s is None:
            self.head_since_s = asyncio.get_running_loop().time()
        super().data_received(data)

    def begin(self) -> None:
        """The head of a request is here."""
        self.busy, self.head_since_s = True, None

    def end(self) -> None:
        """The request is answered."""
        self.busy, self.rest_since_s = False, asyncio.get_running_loop().time()

    def overdue(self, now_s: float) -> bool:
        """Whether it has rested, or been sending a head, for too long."""
        if self.busy:
            return False
        is_slow = self.head_since_s is not None and now_s - self.head_since_s > REQUEST_S_MAX
        return is_slow or now_s - self.rest_since_s > REST_S_MAX

    def cut(self) -> None:
        """End it at once."""
        transport = self.transport
        self.force_close()
        if transport is not None:
            transport.abort()


class _Guarded(web.Server):
    """aiohttp's low-level server with such connections."""

    def __call__(self) -> RequestHandler:
        """Make the protocol of a new connection."""
        return _Connection(self, loop=self._loop, **self._kwargs)

    def make_room(self, newcomer: _Connection) -> None:
        """Close a connection for a new one, where there are more than CONNECTIONS_MAX."""
        held = [one for one in self.connections if isinstance(one, _Connection)]
        if len(held) > CONNECTIONS_MAX:
            others = [one for one in held if one is not newcomer and not one.is_decided_about]
            min(others, key=lambda one: one.rest_since_s, default=newcomer).cut()

    def sweep(self, now_s: float) -> None:
        """Close those that are overdue."""
        for one in list(self.connections):
            if isinstance(one, _Connection) and one.overdue(now_s):
                one.cut()


class WitnessServer:
    """Listens, and has the witness decide in a thread."""

    def __init__(self, witness: Witness, address: Address, tls: Callable[[], ssl.SSLContext] | None) -> None:
        """`tls` returns the context of the next handshake; None: plain HTTP, for a proxy on the same machine."""
        self._witness = witness
        self._address = address
        self._tls = tls
        self._guarded: _Guarded | None = None
        self._acceptor: Acceptor | None = None
        self._plain: asyncio.Server | None = None
        self._sweeper: asyncio.TimerHandle | None = None

    @property
    def connections(self) -> int:
        """Open connections, count."""
        return 0 if self._guarded is None else len(self._guarded.connections)

    async def start(self) -> None:
        """Listen; OSError if the address cannot be used."""
        self._guarded = _Guarded(
            self._handle,
            access_log=None,
            keepalive_timeout=REST_S_MAX,
            lingering_time=1.0,
            max_line_size=LINE_CHARACTERS_MAX,
            max_field_size=LINE_CHARACTERS_MAX,
            max_headers=HEADERS_MAX,
            auto_decompress=False,
            logger=LOGGER,
        )
        if self._tls is None:
            listening = await listen(self._address)
            self._plain = await asyncio.get_running_loop().create_server(self._guarded, sock=listening)
        else:
            self._acceptor = Acceptor(self._guarded, self._address, self._tls)
            await self._acceptor.start()
        self._sweep()

    async def stop(self) -> None:
        """Stop listening, let what is under way end for SHUTDOWN_S, and close."""
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
        loop = asyncio.get_running_loop()
        self._sweeper = loop.call_later(SWEEP_PERIOD_S, self._sweep)
        if self._guarded is not None:
            self._guarded.sweep(loop.time())

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

    async def _answer(self, request: web.BaseRequest, connection: _Connection) -> Answer:
        if request.path != PATH:
            return Answer(404, f"there is nothing here but {PATH}\n")
        if request.method != "POST":
            return Answer(405, f"{PATH} is asked with POST\n")
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            return Answer(415, "send it as it is, not compressed\n")
        announced = request.content_length
        if announced is None and request.body_exists:
            return Answer(411, "say how long the body is\n")
        if (announced or 0) > MAX_REQUEST_BYTES:
            return Answer(413, f"at most {MAX_REQUEST_BYTES} bytes are read\n")
        try:
            async with asyncio.timeout(REQUEST_S_MAX):
                # Never more than was announced, which is bounded.
                body = await request.content.read(-1)
        except TimeoutError:
            return Answer(408, f"the body did not arrive within {REQUEST_S_MAX:g} s\n")
        connection.is_decided_about = True
        try:
            return await asyncio.to_thread(self._witness.add_checkpoint, body)
        finally:
            connection.is_decided_about = False
