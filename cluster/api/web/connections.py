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

from cluster.api.web.problems import Problem
from cluster.security import Identity, IdentityError, PeerCertificate, Peers, Role
from cluster.system.eventloop import HttpConnection, HttpServer, MalformedRequest

CONNECTIONS_MAX = 12_288
"""Open connections, count: the polls of 10,000 nodes on two replicas, as many connections again of agents that report
to this one, and a benchmark's largest crowd. One with a poll that waits takes some 66 KiB, TLS included."""

CONNECTIONS_PER_IDENTITY_MAX = 2048
"""Open connections of one certificate's holder, count: the benchmark's largest crowd twice over, and never so many that
nobody else gets in."""

CONNECTIONS_OF_USERS_MAX = 3072
"""Open connections of all users together, count: the others are for operators, agents and replicas."""

NOBODY = "nobody"
"""Under this name, and their address, all are counted who have not said yet who they are."""

CONNECTIONS_OF_NOBODY_MAX = 1024
"""Open connections of all of them together, count."""

CONNECTIONS_OF_A_STRANGER_MAX = 128
"""Those of one address, count: a user with MUNGE is nobody until the first request is there."""

STRANGER_S_MAX = 10.0
"""How long one may stay nobody, seconds."""

USERS = (f"{Role.USER} ", f"{Role.GATEWAY} ")
"""How the names begin under which users are counted, and those who speak for them."""

SWEEP_PERIOD_S = 2.0
"""How often idle and slow connections are looked for, seconds."""

FIXED_HEADERS: Mapping[str, str] = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Server": "forebay",
}
"""Headers of every answer."""


class ApiConnection(HttpConnection):
    """One connection, counted for who is at the other end."""

    __slots__ = ("certificate", "gone", "holder", "is_spoken_on", "made_s", "stranger")

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.certificate: PeerCertificate | None = None
        """Who is at the other end, and by which certificate."""
        self.stranger: IdentityError | None = None
        """Why it is not known who is."""
        self.holder: str | None = None
        """Whom it is counted for while it is open."""
        self.made_s = 0.0
        self.is_spoken_on = False
        """Whether it is watched as an account's that another vouches for, while a request of his lasts."""
        self.gone = asyncio.Event()
        """Set once the connection is over: who only writes now and then would learn it late."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection, or refuse it where there are too many."""
        self.made_s = asyncio.get_running_loop().time()
        manager = self._manager
        super().connection_made(transport)
        if not isinstance(manager, GuardedServer):
            return
        transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
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
        """Count it no more."""
        self.gone.set()
        manager, holder = self._manager, self.holder
        if isinstance(manager, GuardedServer) and holder is not None:
            manager.peers.forget(self.transport)
            manager.count(self, None)
        super().connection_lost(exc)

    def problem_response(self, malformed: MalformedRequest) -> web.Response:
        """Return the answer to a malformed request, in the same form as every other problem."""
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
        """Whether the other end has shown no certificate at all: one that is not good is not made good otherwise."""
        transport = self.transport
        return transport is not None and not transport.get_extra_info("peercert")

    def become(self, identity: Identity) -> bool:
        """Count it for somebody who was nobody before; return whether he may have it."""
        manager = self._manager
        return not isinstance(manager, GuardedServer) or manager.count(self, str(identity))

    def overdue(self, now_s: float) -> bool:
        """Return whether it has idled, been sending a head, or been without a name for too long."""
        is_stranger = self.holder is not None and self.holder.startswith(NOBODY)
        return super().overdue(now_s) or (not self.busy and is_stranger and now_s - self.made_s > STRANGER_S_MAX)


def network_of(host: str) -> str:
    """Return what counts as one address: an IPv4 address, or the 64 bits of an IPv6 address that a site is given."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return host
    return host if address.version == 4 else str(ip_network((address, 64), strict=False))


class GuardedServer(HttpServer):
    """HTTP server that counts connections by who is at the other end."""

    connection_type: ClassVar[type[HttpConnection]] = ApiConnection

    def __init__(
        self,
        peers: Peers,
        handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
        logger: logging.Logger,
        **options: Any,
    ) -> None:
        """`peers` watches the connections."""
        super().__init__(handler, logger, **options)
        self.peers = peers
        self.held: Counter[str] = Counter()
        """Open connections by who is at the other end."""
        self.users = 0
        """Those of users among them."""
        self.strangers: dict[str, dict[ApiConnection, None]] = {}
        """Connections of peers that are not identified yet, by address, oldest first."""

    def count(self, connection: ApiConnection, holder: str | None) -> bool:
        """Count an open connection for whom it is, and no more for whom it was; return whether he may have it."""
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
        """Cut strangers for the newest one of `holder` where there are too many; return whether it may stay.

        The one that was silent for longest is cut, so that silent clients keep no other of their address out.
        """
        crowded = holder if len(self.strangers[holder]) > CONNECTIONS_OF_A_STRANGER_MAX else ""
        if not crowded and sum(map(len, self.strangers.values())) > CONNECTIONS_OF_NOBODY_MAX:
            crowded = max(self.strangers, key=lambda one: len(self.strangers[one]))
        if not crowded:
            return True
        silent = next((one for one in self.strangers[crowded] if not one.busy), None)
        if silent is None:
            return False
        # The newest is silent too, and goes where all others are being answered.
        if silent is next(reversed(self.strangers[holder])):
            return False
        self.count(silent, None)
        silent.cut()
        return True
