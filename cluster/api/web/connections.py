"""What a connection may cost: how many there are, how long one may be idle, how slowly a request may begin.

aiohttp parses and answers; this guards what it leaves open. A connection that has begun a request must finish its head
in time, and a slow one cannot stay by sending a byte now and then.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any, cast

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import (
    BadHttpMethod,
    BadStatusLine,
    ContentLengthError,
    HttpProcessingError,
    InvalidHeader,
    InvalidURLError,
    LineTooLong,
)
from aiohttp.web_protocol import RequestHandler

from cluster.api.web.problems import Problem
from cluster.security import Identity, NotIdentified, PeerCertificate, Peers, Role

LOGGER = logging.getLogger(__name__)

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
"""Those of one address, count: whoever comes with MUNGE is nobody until his first request is there."""

STRANGER_S_MAX = 10.0
"""How long one may stay nobody, seconds."""

USERS = (f"{Role.USER} ", f"{Role.GATEWAY} ")
"""How the names begin under which users are counted, and those who speak for them."""

IDLE_S_MAX = 75.0
"""How long a connection may do nothing, seconds: longer than clients keep theirs, so that they close first."""

HEADERS_S_MAX = 10.0
"""How long the head of a request may take to arrive, seconds."""

SWEEP_PERIOD_S = 2.0
"""How often idle and slow connections are looked for, seconds."""

LINE_CHARACTERS_MAX = 8190
HEADERS_MAX = 64
"""The request line and each header field, characters; header fields, count."""


FIXED_HEADERS: Mapping[str, str] = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Server": "forebay",
}
"""Headers of every answer."""

_KINDS: Mapping[type[HttpProcessingError], str] = {
    BadHttpMethod: "its method is none",
    BadStatusLine: "its first line cannot be read",
    InvalidURLError: "its target cannot be read",
    InvalidHeader: "a header field cannot be read",
    ContentLengthError: "its Content-Length is no length",
}


class Connection(RequestHandler):
    """One connection: aiohttp's, with the time at which it last came to rest, and at which its present head began."""

    __slots__ = (
        "busy",
        "certificate",
        "gone",
        "head_since_s",
        "holder",
        "is_spoken_on",
        "made_s",
        "rest_since_s",
        "stranger",
    )

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.busy = 0
        self.certificate: PeerCertificate | None = None
        """Who is at the other end, and by which certificate."""
        self.stranger: NotIdentified | None = None
        """Why it is not known who is."""
        self.holder: str | None = None
        """Whom it is counted for while it is open."""
        self.head_since_s: float | None = None
        self.rest_since_s = 0.0
        self.made_s = 0.0
        self.is_spoken_on = False
        """Whether it is watched as an account's that another vouches for, while a request of his lasts."""
        self.gone = asyncio.Event()
        """Set once the connection is over: who only writes now and then would learn it late."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection, or refuse it where there are too many."""
        self.made_s = self.rest_since_s = asyncio.get_running_loop().time()
        manager = self._manager
        super().connection_made(transport)
        if not isinstance(manager, GuardedServer):
            return
        transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        try:
            manager.peers.admit(transport)
            self.certificate = manager.peers.shown(transport)
        except NotIdentified as error:
            self.stranger = error
        if self.certificate is not None:
            fits = manager.count(self, str(self.certificate.identity))
        else:
            host = (transport.get_extra_info("peername") or ("",))[0]
            fits = manager.count(self, f"{NOBODY} at {host}")
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

    def data_received(self, data: bytes) -> None:
        """Note when a head begins, and let aiohttp parse."""
        if not self.busy and self.head_since_s is None:
            self.head_since_s = asyncio.get_running_loop().time()
        super().data_received(data)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what never became a request, in the same form as every other problem, and close the connection.

        Whoever sends nonsense can do so for ever, so it is not worth a line of the log each time.
        """
        if not isinstance(exc, HttpProcessingError):
            LOGGER.error("a request failed outside of its handler", exc_info=exc)
            problem = Problem(status, "internal_error", "the request failed because of a fault in this release")
        else:
            LOGGER.debug("%s sent what is no request: %s", request.remote, type(exc).__name__)
            problem = _malformed(exc)
        if request.writer.output_size > 0:
            raise ConnectionError("part of another answer has been sent already")
        response = web.Response(
            status=problem.status,
            body=msgspec.json.encode(problem.body),
            headers={**FIXED_HEADERS, "Content-Type": "application/json"},
        )
        response.force_close()
        return response

    @property
    def shows_nothing(self) -> bool:
        """Whether the other end has shown no certificate at all: one that is not good is not made good otherwise."""
        transport = self.transport
        return transport is not None and not transport.get_extra_info("peercert")

    def become(self, identity: Identity) -> bool:
        """Count it for somebody who was nobody before; return whether he may have it."""
        manager = self._manager
        return not isinstance(manager, GuardedServer) or manager.count(self, str(identity))

    def begin(self) -> None:
        """A request's head is complete and its handler runs."""
        self.busy += 1
        self.head_since_s = None

    def end(self) -> None:
        """The handler has answered."""
        self.busy -= 1
        self.rest_since_s = asyncio.get_running_loop().time()

    def overdue(self, now_s: float) -> bool:
        """Whether the connection has idled, or been sending a head, for too long."""
        if self.busy:
            return False
        if self.holder is not None and self.holder.startswith(NOBODY) and now_s - self.made_s > STRANGER_S_MAX:
            return True
        if self.head_since_s is not None and now_s - self.head_since_s > HEADERS_S_MAX:
            return True
        return now_s - self.rest_since_s > IDLE_S_MAX


class GuardedServer(web.Server):
    """aiohttp's low-level server with guarded connections."""

    def __init__(self, peers: Peers, *arguments: Any, **options: Any) -> None:
        """`peers` watches the connections; the rest is aiohttp's."""
        super().__init__(*arguments, **options)
        self.peers = peers
        self.held: Counter[str] = Counter()
        """Open connections by who is at the other end."""
        self.users = 0
        """Those of users among them."""
        self.strangers = 0
        """Those of nobody known."""

    def __call__(self) -> RequestHandler:
        """Make the protocol of a new connection."""
        return Connection(self, loop=self._loop, **self._kwargs)

    def count(self, connection: Connection, holder: str | None) -> bool:
        """Count an open connection for whom it is, and no more for whom it was; return whether he may have it."""
        for name, change in ((connection.holder, -1), (holder, 1)):
            if name is not None:
                self.held[name] += change
                self.users += change * name.startswith(USERS)
                self.strangers += change * name.startswith(NOBODY)
                if not self.held[name]:
                    del self.held[name]
        connection.holder = holder
        if holder is None:
            return True
        if holder.startswith(NOBODY):
            return self.held[holder] <= CONNECTIONS_OF_A_STRANGER_MAX and self.strangers <= CONNECTIONS_OF_NOBODY_MAX
        of_users = holder.startswith(USERS)
        return self.held[holder] <= CONNECTIONS_PER_IDENTITY_MAX and not (
            of_users and self.users > CONNECTIONS_OF_USERS_MAX
        )

    def sweep(self) -> int:
        """End the connections that are overdue; return how many."""
        now_s = asyncio.get_running_loop().time()
        overdue = [connection for connection in self.connections if _is_overdue(connection, now_s)]
        for connection in overdue:
            transport = connection.transport
            connection.force_close()
            if transport is not None:
                transport.abort()
        return len(overdue)


def _malformed(error: HttpProcessingError) -> Problem:
    if isinstance(error, LineTooLong):
        return Problem(
            431,
            "limit_exceeded",
            f"the request line or a header field has more than {LINE_CHARACTERS_MAX} bytes",
            "ask for less, and put what is long into the body",
            "head",
        )
    return Problem(
        400,
        "malformed_request",
        f"this is not a request of HTTP/1.1 ({_KINDS.get(type(error), 'its head cannot be read')})",
        "use an HTTP client, and see /v1/openapi.json for what can be asked",
        "head",
    )


def _is_overdue(connection: RequestHandler, now_s: float) -> bool:
    return isinstance(connection, Connection) and connection.overdue(now_s)
