"""Requests forwarded without a certificate, through a gateway or with MUNGE."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
from aiohttp import client_proto

from forebay.cluster.client.access_methods import AccessMethod, GatewayAccess, MungeAccess, connect_gateway
from forebay.cluster.client.attempt import IDLE_CONNECTION_S
from forebay.cluster.client.own_account import Credential, gateway_unreachable
from forebay.cluster.client.relay import CONNECTIONS_MAX, Relay
from forebay.cluster.security import NO_CERTIFICATE, TlsFiles, authority_context
from forebay.cluster.system import Address


def relay_of(way: AccessMethod) -> Relay:
    """Return a relay with the access of `way`."""
    if isinstance(way, GatewayAccess):
        return GatewayRelay(way)
    return MungeRelay(way) if isinstance(way, MungeAccess) else Relay(way)


class _Connector(aiohttp.BaseConnector):
    """Connections to one gateway, each with a check of its owner."""

    allowed_protocol_schema_set = frozenset({"http"})

    def __init__(self, way: GatewayAccess, **options: Any) -> None:
        super().__init__(**options)
        self._way = way

    async def _create_connection(
        self, req: aiohttp.ClientRequest, traces: Any, timeout: aiohttp.ClientTimeout
    ) -> client_proto.ResponseHandler:
        loop = asyncio.get_running_loop()
        try:
            connection: socket.socket = connect_gateway(self._way, timeout.sock_connect or 1.0)
            connection.setblocking(False)
            _, protocol = await loop.create_unix_connection(
                lambda: client_proto.ResponseHandler(loop=loop), sock=connection
            )
        except OSError as error:
            raise gateway_unreachable(self._way, error) from error
        return protocol


class GatewayRelay(Relay):
    """Requests through this machine's gateway."""

    def __init__(self, way: GatewayAccess) -> None:
        """Prepare without connecting."""
        super().__init__(TlsFiles(NO_CERTIFICATE, NO_CERTIFICATE, NO_CERTIFICATE))
        self._way = way

    def _connector(self) -> aiohttp.BaseConnector:
        return _Connector(self._way, limit=CONNECTIONS_MAX, keepalive_timeout=IDLE_CONNECTION_S)

    def _base(self, address: Address) -> str:
        return f"http://{address}"

    def _context(self) -> ssl.SSLContext | bool:
        return True


class MungeRelay(Relay):
    """Requests to the replicas, each with a MUNGE credential."""

    def __init__(self, way: MungeAccess) -> None:
        """Read the authority and load libmunge.

        Raises:
            TlsError, MungeUnavailable: The authority or libmunge cannot be used.
        """
        super().__init__(way.files)
        self._credential = Credential(way)
        self._authority = authority_context(way.files.authority)

    def _context(self) -> ssl.SSLContext | bool:
        return self._authority

    def _more_headers(
        self, address: Address, method: str, target: str, body: bytes | AsyncIterator[bytes] | None
    ) -> Mapping[str, str]:
        assert body is None or isinstance(body, bytes)
        return {"Authorization": self._credential.header(address, method, target, body)}
