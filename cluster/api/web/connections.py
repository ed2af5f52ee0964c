"""Limits on connections to a replica: their number by peer, and how long one may be idle."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from ipaddress import ip_address, ip_network
from typing import Any, ClassVar, cast

import msgspec
from aiohttp import web

from forebay.cluster.api.web.problems import Problem
from forebay.cluster.security import Identity, IdentityError, PeerCertificate, Peers, Role
from forebay.cluster.system.eventloop import HttpConnection, HttpServer, MalformedRequest

CONNECTIONS_MAX = 12_288
"""Open connections, count: the polls of 10,000 nodes on two replicas, as many again for reports to this one, and the
largest benchmark. A waiting poll takes about 66 KiB, TLS included.
"""

CONNECTIONS_PER_IDENTITY_MAX = 2048
"""Open connections of one identity, count: twice the largest benchmark, but never all."""

CONNECTIONS_OF_USERS_MAX = 3072
"""Open connections of all users together, count; the rest is for operators, agents and replicas."""

NOBODY = "nobody"
"""Name under which, with their address, unidentified clients are counted."""

CONNECTIONS_OF_NOBODY_MAX = 1024
"""Open connections of all unidentified clients, count."""

CONNECTIONS_OF_A_STRANGER_MAX = 128
"""Open unidentified connections of one address, count; a MUNGE user is unidentified until the first request."""

STRANGER_S_MAX = 10.0
"""Time for a client to identify itself, seconds."""

USERS = (f"{Role.USER} ", f"{Role.GATEWAY} ")
"""Prefixes of names counted as users, including their gateways."""

SWEEP_PERIOD_S = 2.0
"""Interval of checks for idle and slow connections, seconds."""

FIXED_HEADERS: Mapping[str, str] = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Server": "forebay",
}
"""Headers of every response."""


class ApiConnection(HttpConnection):
    """Connection, counted for its peer."""

    __slots__ = ("certificate", "gone", "holder", "is_spoken_on", "made_s", "stranger")

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.certificate: PeerCertificate | None = None
        """Identity and certificate of the peer."""
        self.stranger: IdentityError | None = None
        """Reason the peer is unidentified."""
        self.holder: str | None = None
        """Name it is counted under while open."""
        self.made_s = 0.0
        self.is_spoken_on = False
        """True if it is watched as the account of the current request."""
        self.gone = asyncio.Event()
        """Set when the connection closes, which a rare writer would notice late."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accept the connection, or reject it if there are too many."""
        self.made_s = asyncio.get_running_loop().time()
        manager = self._manager
        super().connection_made(transport)
        if not isinstance(manager, GuardedServer):
            return
        transport = cast(asyncio.Transport, transport)  # uvloop's transport does not inherit from asyncio.Transport
        try:
            manager.peers.admit(transport)
            self.certificate = manager.peers.certificate_of(transport)
        except IdentityError as error:
            self.stranger = error
        if self.certificate is not None:
            fits = manager.count(self, str(self.certificate.identity))
        else:
            fits = manager.count(self, f"{NOBODY} at {network_of((transport.get_extra_info('peername') or ('',))[0])}")
        if not fits or len(manager.connections) > CONNECTIONS_MAX:
            transport.abort()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Remove it from the counts."""
        self.gone.set()
        manager, holder = self._manager, self.holder
        if isinstance(manager, GuardedServer) and holder is not None:
            manager.peers.forget(self.transport)
            manager.count(self, None)
        super().connection_lost(exc)

    def problem_response(self, malformed: MalformedRequest) -> web.Response:
        """Return the response to a malformed request, in the form of all errors."""
        sentence, remedy = malformed.sentence, malformed.remedy
        if malformed.status >= 500:
            problem = Problem(500, "internal_error", sentence)
        elif malformed.status == 431:
            problem = Problem(431, "limit_exceeded", sentence, remedy, "head")
        else:
            problem = Problem(400, "malformed_request", sentence, remedy, "head")
        return web.Response(
            status=problem.status,
            body=msgspec.json.encode(problem.body),
            headers={**FIXED_HEADERS, "Content-Type": "application/json"},
        )

    @property
    def shows_nothing(self) -> bool:
        """Return whether the peer showed no certificate; an invalid one excludes other authentication."""
        transport = self.transport
        return transport is not None and not transport.get_extra_info("peercert")

    def become(self, identity: Identity) -> bool:
        """Count an unidentified connection as one of `identity`; return False if this identity has too many."""
        manager = self._manager
        return not isinstance(manager, GuardedServer) or manager.count(self, str(identity))

    def overdue(self, now_s: float) -> bool:
        """Return True if it has been idle, sending a head, or unidentified for too long."""
        is_stranger = self.holder is not None and self.holder.startswith(NOBODY)
        return super().overdue(now_s) or (not self.busy and is_stranger and now_s - self.made_s > STRANGER_S_MAX)


def network_of(host: str) -> str:
    """Return the unit counted as one address: an IPv4 address, or a site's 64-bit IPv6 prefix."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return host
    return host if address.version == 4 else str(ip_network((address, 64), strict=False))


class GuardedServer(HttpServer):
    """HTTP server that counts connections by peer."""

    connection_type: ClassVar[type[HttpConnection]] = ApiConnection

    def __init__(
        self,
        peers: Peers,
        handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
        logger: logging.Logger,
        **options: Any,
    ) -> None:
        """Track open connections with `peers`."""
        super().__init__(handler, logger, **options)
        self.peers = peers
        self.held: Counter[str] = Counter()
        """Open connections by name."""
        self.users = 0
        """Open connections of users."""
        self.strangers: dict[str, dict[ApiConnection, None]] = {}
        """Unidentified connections by address, oldest first."""

    def count(self, connection: ApiConnection, holder: str | None) -> bool:
        """Count a connection under a new name instead of its old one; return False if that has too many."""
        for name, change in ((connection.holder, -1), (holder, 1)):
            if name is not None:
                self.held[name] += change
                self.users += change * name.startswith(USERS)
                if not self.held[name]:
                    del self.held[name]
        self._forget_stranger(connection)
        connection.holder = holder
        if holder is None:
            return True
        if holder.startswith(NOBODY):
            self.strangers.setdefault(holder, {})[connection] = None
            return self._make_room(holder)
        of_users = holder.startswith(USERS)
        return self.held[holder] <= CONNECTIONS_PER_IDENTITY_MAX and not (
            of_users and self.users > CONNECTIONS_OF_USERS_MAX
        )

    def _forget_stranger(self, connection: ApiConnection) -> None:
        where = connection.holder or ""
        self.strangers.get(where, {}).pop(connection, None)
        if where in self.strangers and not self.strangers[where]:
            del self.strangers[where]

    def _make_room(self, holder: str) -> bool:
        """Close an unidentified connection of `holder` if there are too many; return True if the newest may stay.

        The longest silent one is closed, so that silent clients do not block others of their address.
        """
        crowded = holder if len(self.strangers[holder]) > CONNECTIONS_OF_A_STRANGER_MAX else ""
        if not crowded and sum(map(len, self.strangers.values())) > CONNECTIONS_OF_NOBODY_MAX:
            crowded = max(self.strangers, key=lambda one: len(self.strangers[one]))
        if not crowded:
            return True
        silent = next((one for one in self.strangers[crowded] if not one.busy), None)
        if silent is None:
            return False
        # The newest is silent too, and all others are being answered.
        if silent is next(reversed(self.strangers[holder])):
            return False
        self.count(silent, None)
        silent.cut()
        return True
