"""Requests on an event loop over asyncio's own streams, for agents, programs and event streams."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Mapping
from typing import Final, NamedTuple

from forebay.cluster.client.attempt import (
    CHUNK_BYTES,
    CONNECT_SHARE_MAX,
    IDLE_CONNECTION_S,
    HttpResponse,
    connect_failures,
)
from forebay.cluster.client.http_responses import (
    EVENT_STREAM,
    ResponseReader,
    begin_stream,
    read_response,
    request_failures,
    request_of,
)
from forebay.cluster.security import Credentials, TlsFiles, context_of
from forebay.cluster.system import Address, Clock

CONNECTIONS_MAX: Final = 1024
"""Connections of one client, count: the benchmark's largest number of clients."""

CONNECT_S: Final = 1.0
"""Time to connect to a local socket, seconds; the kernel connects at once unless hundreds wait."""

SHUTDOWN_S: Final = 1.0
"""Time for a replica to answer the end of a TLS connection, seconds; nothing depends on its answer."""


class Connection(NamedTuple):
    """Open connection to a replica, or to a gateway."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @property
    def is_open(self) -> bool:
        """Return whether neither side has ended it."""
        return not (self.writer.is_closing() or self.reader.at_eof())


class _StreamInput(ResponseReader):
    """Input of a connection; `idle_s` bounds the wait for the next bytes, seconds, None: unbounded."""

    def __init__(self, reader: asyncio.StreamReader, idle_s: float | None = None) -> None:
        super().__init__()
        self._reader = reader
        self._idle_s = idle_s

    async def receive(self) -> bytes:
        async with asyncio.timeout(self._idle_s):
            return await self._reader.read(CHUNK_BYTES)


class Exchange:
    """Connections to the replicas under one identity."""

    def __init__(self, tls: TlsFiles, clock: Clock) -> None:
        """Read certificate and key without connecting.

        Raises:
            TlsError: The files cannot be used.
        """
        self._tls = tls
        self._credentials = (
            None if tls.shows_nothing else Credentials(tls, load=lambda files: context_of(files, clock.now()))
        )
        self._idle: dict[Address, list[tuple[Connection, float]]] = {}
        self._slots = asyncio.Semaphore(CONNECTIONS_MAX)

    async def send(
        self, address: Address, method: str, target: str, body: bytes | None, *, timeout_s: float, connect_s: float
    ) -> HttpResponse:
        """Send one request and return the response with any status.

        `connect_s` limits a new connection including the TLS handshake; `timeout_s` limits the whole request.
        """
        until_s = asyncio.get_running_loop().time() + timeout_s
        connect_s = min(connect_s, CONNECT_SHARE_MAX * timeout_s)
        async with self._connection(address, connect_s, timeout_s) as (connection, keep):
            request = request_of(address, method, target, body, self._more_headers(address, method, target, body))
            async with asyncio.timeout_at(until_s):
                connection.writer.write(request)
                await connection.writer.drain()
                answer, headers, is_open = await read_response(_StreamInput(connection.reader), address)
            if is_open:
                keep()
            return self._check_server(answer, headers)

    @contextlib.asynccontextmanager
    async def stream(
        self, address: Address, target: str, *, connect_s: float, idle_s: float
    ) -> AsyncIterator[tuple[HttpResponse, AsyncIterator[bytes]]]:
        """Open a GET with an endless response: yield (response without body, chunks).

        A status other than 200 has a body and no chunks. The stream fails if it breaks or is silent for `idle_s`.
        """
        async with self._connection(address, connect_s, idle_s) as (connection, _):
            headers_sent = self._more_headers(address, "GET", target, None)
            connection.writer.write(request_of(address, "GET", target, None, headers_sent, EVENT_STREAM))
            await connection.writer.drain()
            yield await begin_stream(_StreamInput(connection.reader, idle_s), address, self._check_server)

    async def close(self) -> None:
        """Close all connections; later requests open new ones."""
        connections = [connection for kept in self._idle.values() for connection, _ in kept]
        self._idle.clear()
        for connection in connections:
            connection.writer.close()
        for connection in connections:
            with contextlib.suppress(OSError, TimeoutError):
                await connection.writer.wait_closed()

    @contextlib.asynccontextmanager
    async def _connection(
        self, address: Address, connect_s: float, timeout_s: float
    ) -> AsyncIterator[tuple[Connection, _Keep]]:
        """Yield a connection and the function that keeps it for later; convert every failure into an AttemptError."""
        loop = asyncio.get_running_loop()
        kept = _Keep()
        async with self._slots:
            connection = self._take_idle(address) or await self._connect(address, connect_s)
            try:
                with request_failures(address, timeout_s, self._tls):
                    yield connection, kept
            finally:
                if kept.is_set and connection.is_open:
                    self._idle.setdefault(address, []).append((connection, loop.time()))
                else:
                    connection.writer.transport.abort()

    def _take_idle(self, address: Address) -> Connection | None:
        """Return a connection left by an earlier request, the last used one first; close those too old."""
        kept = self._idle.get(address, [])
        oldest_s = asyncio.get_running_loop().time() - IDLE_CONNECTION_S
        found = None
        while kept and found is None:
            connection, used_s = kept.pop()
            if used_s >= oldest_s and connection.is_open:
                found = connection
            else:
                connection.writer.transport.abort()
        while kept and kept[0][1] < oldest_s:
            kept.pop(0)[0].writer.transport.abort()
        return found

    async def _connect(self, address: Address, connect_s: float) -> Connection:
        with connect_failures(address, connect_s, self._tls):
            async with asyncio.timeout(connect_s):
                connection = await self._open(address)
        return connection

    async def _open(self, address: Address) -> Connection:
        """Open a connection; the caller bounds the time."""
        return Connection(
            *await asyncio.open_connection(
                address.host,
                address.port,
                ssl=self._context(),
                server_hostname=address.host,
                ssl_shutdown_timeout=SHUTDOWN_S,
            )
        )

    def _context(self) -> ssl.SSLContext:
        assert self._credentials is not None
        self._credentials.refresh()
        return self._credentials.client_context()

    def _more_headers(self, address: Address, method: str, target: str, body: bytes | None) -> tuple[str, ...]:
        """Return additional header lines."""
        return ()

    def _check_server(self, answer: HttpResponse, headers: Mapping[str, str]) -> HttpResponse:
        """Return the response after checking that a replica sent it."""
        return answer


class _Keep:
    """Marks a connection as reusable when called."""

    is_set = False

    def __call__(self) -> None:
        self.is_set = True
