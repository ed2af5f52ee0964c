"""Requests one at a time on a standard socket, for the CLI.

Importing an event loop and its HTTP client would take longer than a command. `cluster.client.http_responses` parses
the responses.

`send` is a coroutine that never waits on a loop; `calls.finish` runs it, and its callers, to completion.
"""

import socket
import ssl
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from forebay.cluster.client.attempt import (
    CONNECT_SHARE_MAX,
    IDLE_CONNECTION_S,
    HttpResponse,
    connect_failures,
    no_handshake,
    unreachable,
)
from forebay.cluster.client.http_responses import (
    EVENT_STREAM,
    SocketReader,
    begin_stream,
    read_response,
    request_failures,
    request_of,
)
from forebay.cluster.security import TlsFiles, context_of, valid_until
from forebay.cluster.system import Address, Clock


class _Connection(NamedTuple):
    socket: ssl.SSLSocket
    used_s: float
    """Monotonic time of its last use."""


class BlockingExchange:
    """Connections to the replicas under one identity, each used for one request at a time."""

    def __init__(self, tls: TlsFiles, clock: Clock, context: ssl.SSLContext | None = None) -> None:
        """Read certificate and key without connecting.

        `context`: TLS context to use if the files contain no certificate.

        Raises:
            TlsError: The files cannot be used.
        """
        self._tls = tls
        self._clock = clock
        self._context = context or context_of(tls, clock.now())
        self._connections: dict[Address, _Connection] = {}

    async def send(
        self, address: Address, method: str, target: str, body: bytes | None, *, timeout_s: float, connect_s: float
    ) -> HttpResponse:
        """Send one request and return the response with any status.

        `connect_s` limits a new connection including the TLS handshake; `timeout_s` limits the whole request.
        """
        until_s = self._clock.monotonic_s() + timeout_s
        connection = self._idle_connection(address)
        if connection is None:
            connection = self._connect(address, min(connect_s, CONNECT_SHARE_MAX * timeout_s))
        reader = SocketReader(connection, self._clock, until_s)
        try:
            with request_failures(address, timeout_s, self._tls):
                more = self._more_headers(address, method, target, body)
                reader.send(request_of(address, method, target, body, more))
                answer, _, is_open = await read_response(reader, address)
            if is_open:
                self._connections[address] = _Connection(connection, self._clock.monotonic_s())
                connection = None
            return answer
        finally:
            if connection is not None:
                connection.close()

    @asynccontextmanager
    async def stream(
        self, address: Address, target: str, *, connect_s: float, idle_s: float
    ) -> AsyncIterator[tuple[HttpResponse, AsyncIterator[bytes]]]:
        """Open a GET with an endless response: yield (response without body, chunks)."""
        with self._connect(address, connect_s) as connection, request_failures(address, idle_s, self._tls):
            until_s = self._clock.monotonic_s() + idle_s
            reader = SocketReader(connection, self._clock, until_s, idle_s)
            more = self._more_headers(address, "GET", target, None)
            reader.send(request_of(address, "GET", target, None, more, EVENT_STREAM))
            yield await begin_stream(reader, address)

    def _more_headers(self, address: Address, method: str, target: str, body: bytes | None) -> tuple[str, ...]:
        """Return additional header lines."""
        return ()

    async def close(self) -> None:
        """Close all connections."""
        for connection in self._connections.values():
            connection.socket.close()
        self._connections.clear()

    def _idle_connection(self, address: Address) -> ssl.SSLSocket | None:
        """Return a connection left by an earlier request, unless it or its peer's certificate is too old."""
        kept = self._connections.pop(address, None)
        if kept is None:
            return None
        rested_s = self._clock.monotonic_s() - kept.used_s
        if rested_s < IDLE_CONNECTION_S and self._clock.now() <= valid_until(kept.socket.getpeercert() or {}):
            return kept.socket
        kept.socket.close()
        return None

    def _connect(self, address: Address, connect_s: float) -> ssl.SSLSocket:
        until_s = self._clock.monotonic_s() + connect_s
        # Hosts are ASCII here (`Address`), and bytes avoid a codec that is slow to import.
        host = address.host.encode("ascii")
        trouble: OSError = OSError("the replica has no address")
        with connect_failures(address, connect_s, self._tls):
            found = _addresses(host, address.port, connect_s)
            for number, (family, kind, protocol, _, place) in enumerate(found, start=1):
                # Addresses share the time equally, so that one without an answer does not starve the others.
                share_s = (until_s - self._clock.monotonic_s()) / (len(found) - number + 1)
                if share_s <= 0:
                    raise TimeoutError
                plain = socket.socket(family, kind, protocol)
                try:
                    plain.settimeout(share_s)
                    plain.connect(place)
                    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    return self._context.wrap_socket(plain, server_hostname=host, suppress_ragged_eofs=False)
                except ssl.SSLError:
                    plain.close()
                    raise
                except OSError as error:
                    plain.close()
                    trouble = error
        if isinstance(trouble, TimeoutError):
            raise no_handshake(address, connect_s) from trouble
        raise unreachable(address, trouble) from trouble


def _addresses(host: bytes, port: int, wait_s: float) -> list[tuple[Any, ...]]:
    """Resolve a host.

    Raises:
        OSError: The name is unknown, or (TimeoutError) the name service does not answer.
    """
    try:
        return list(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST))
    except socket.gaierror:
        pass
    answers: list[list[tuple[Any, ...]] | OSError] = []

    def look() -> None:
        try:
            answers.append(list(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)))
        except OSError as error:
            answers.append(error)

    # The resolver has no timeout.
    asking = threading.Thread(target=look, daemon=True)
    asking.start()
    asking.join(wait_s)
    if not answers:
        raise TimeoutError
    if isinstance(answers[0], OSError):
        raise answers[0]
    return answers[0]
