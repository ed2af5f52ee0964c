"""Requests without a certificate, one at a time and without an event loop, through a gateway or with MUNGE."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec

from forebay.cluster.client.access_methods import GatewayAccess, connect_gateway
from forebay.cluster.client.attempt import (
    ATTEMPT_HEADER,
    IDLE_CONNECTION_S,
    AttemptError,
    AttemptView,
    HttpResponse,
)
from forebay.cluster.client.http_responses import (
    EVENT_STREAM,
    SocketReader,
    begin_stream,
    read_response,
    request_failures,
    request_of,
)
from forebay.cluster.system import Address, Clock

if TYPE_CHECKING:
    from forebay.cluster.client.access_methods import MungeAccess
    from forebay.cluster.client.attempt import Streaming


class GatewayExchange:
    """Requests through this machine's gateway, without TLS because they do not leave the machine."""

    def __init__(self, way: GatewayAccess, clock: Clock) -> None:
        """Prepare without connecting."""
        self._way = way
        self._clock = clock
        self._kept: tuple[socket.socket, float] | None = None

    async def send(
        self, address: Address, method: str, target: str, body: bytes | None, *, timeout_s: float, connect_s: float
    ) -> HttpResponse:
        """Send one request and return the response with any status."""
        until_s = self._clock.monotonic_s() + timeout_s
        connection, kept = self._connection(min(connect_s, timeout_s)), None
        try:
            with request_failures(address, timeout_s, None):
                reader = SocketReader(connection, self._clock, until_s)
                reader.send(request_of(address, method, target, body))
                answer, headers, is_open = await read_response(reader, address)
                if is_open:
                    kept = (connection, self._clock.monotonic_s())
                answer = check_gateway(answer, headers)
            return answer
        finally:
            if kept is None:
                connection.close()
            self._kept = kept

    @asynccontextmanager
    async def stream(
        self, address: Address, target: str, *, connect_s: float, idle_s: float
    ) -> AsyncIterator[tuple[HttpResponse, AsyncIterator[bytes]]]:
        """Open a GET with an endless response: yield (response without body, chunks)."""
        with self._connect(connect_s) as connection, request_failures(address, idle_s, None):
            reader = SocketReader(connection, self._clock, self._clock.monotonic_s() + idle_s, idle_s)
            reader.send(request_of(address, "GET", target, None, accept=EVENT_STREAM))
            yield await begin_stream(reader, address, check_gateway)

    async def close(self) -> None:
        """Close the connection."""
        if self._kept is not None:
            self._kept[0].close()
            self._kept = None

    def _connection(self, connect_s: float) -> socket.socket:
        if self._kept is not None:
            (connection, used_s), self._kept = self._kept, None
            if self._clock.monotonic_s() - used_s < IDLE_CONNECTION_S:
                return connection
            connection.close()
        return self._connect(connect_s)

    def _connect(self, connect_s: float) -> socket.socket:
        try:
            return connect_gateway(self._way, connect_s)
        except OSError as error:
            raise gateway_unreachable(self._way, error) from error


def gateway_unreachable(way: GatewayAccess, error: OSError) -> AttemptError:
    """Return the error of a failed connection to a gateway."""
    words = f"the gateway at {way.path} cannot be reached ({error.strerror or error})"
    return AttemptError(words, may_have_arrived=False)


def check_gateway(answer: HttpResponse, headers: Mapping[str, str]) -> HttpResponse:
    """Return a replica's response.

    Raises:
        AttemptError: The gateway could not reach the replica.
        msgspec.MsgspecError: The gateway's response is malformed.
    """
    if ATTEMPT_HEADER.lower() in headers:
        raise msgspec.json.decode(answer.body, type=AttemptView).failure()
    return answer


class Credential:
    """Creates MUNGE credentials of this process's account, each valid for one request only."""

    def __init__(self, way: MungeAccess) -> None:
        """Load libmunge.

        Raises:
            MungeUnavailable: The library cannot be loaded.
        """
        from forebay.cluster.security import Munge

        self._munge = Munge(way.socket)
        self._cluster_id = way.cluster_id

    def header(self, address: Address, method: str, target: str, body: bytes | None) -> str:
        """Return the Authorization header of one request to the replica at `address`."""
        from forebay.cluster.security import SCHEME, MungeUnavailable, purpose_of

        try:
            payload = purpose_of(self._cluster_id, str(address), method, target, body or b"")
            return f"{SCHEME} {self._munge.encode(payload)}"
        except MungeUnavailable as error:
            raise AttemptError(str(error), may_have_arrived=False, remedy="start munged on this machine") from error


def by_munge(way: MungeAccess, clock: Clock) -> Streaming:
    """Return an exchange that adds a MUNGE credential to each request.

    Raises:
        TlsError, MungeUnavailable: The authority or libmunge cannot be used.
    """
    from forebay.cluster.client.blocking import BlockingExchange
    from forebay.cluster.security import authority_context

    credential = Credential(way)

    class MungeExchange(BlockingExchange):
        def _more_headers(self, address: Address, method: str, target: str, body: bytes | None) -> tuple[str, ...]:
            return (f"Authorization: {credential.header(address, method, target, body)}",)

    return MungeExchange(way.files, clock, authority_context(way.files.authority))
