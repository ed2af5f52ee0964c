"""Requests without a certificate on an event loop, through a gateway or with MUNGE."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping

from forebay.cluster.client.access_methods import GatewayAccess, MungeAccess, connect_gateway
from forebay.cluster.client.attempt import HttpResponse
from forebay.cluster.client.exchange import CONNECT_S, Connection, Exchange
from forebay.cluster.client.own_account import Credential, check_gateway, gateway_unreachable
from forebay.cluster.security import NO_CERTIFICATE, TlsFiles, authority_context
from forebay.cluster.system import Address, Clock


class GatewayLoopExchange(Exchange):
    """Requests through this machine's gateway."""

    def __init__(self, way: GatewayAccess, clock: Clock) -> None:
        """Prepare without connecting."""
        super().__init__(TlsFiles(NO_CERTIFICATE, NO_CERTIFICATE, NO_CERTIFICATE), clock)
        self._way = way

    async def _open(self, address: Address) -> Connection:
        # The kernel connects a local socket at once, so this does not hold up the loop.
        try:
            connection = connect_gateway(self._way, CONNECT_S)
        except OSError as error:
            raise gateway_unreachable(self._way, error) from error
        connection.setblocking(False)
        return Connection(*await asyncio.open_unix_connection(sock=connection))

    def _check_server(self, answer: HttpResponse, headers: Mapping[str, str]) -> HttpResponse:
        return check_gateway(answer, headers)


class MungeLoopExchange(Exchange):
    """Requests to the replicas, each with a MUNGE credential."""

    def __init__(self, way: MungeAccess, clock: Clock) -> None:
        """Read the authority and load libmunge.

        Raises:
            TlsError, MungeUnavailable: The authority or libmunge cannot be used.
        """
        super().__init__(way.files, clock)
        self._credential = Credential(way)
        self._authority = authority_context(way.files.authority)

    def _context(self) -> ssl.SSLContext:
        return self._authority

    def _more_headers(self, address: Address, method: str, target: str, body: bytes | None) -> tuple[str, ...]:
        return (f"Authorization: {self._credential.header(address, method, target, body)}",)
