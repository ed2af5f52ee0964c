"""The gateway service: identifies clients by their socket's UID and forwards their requests unchanged.

A client names the target replica in `Host`, so retries and outcomes remain the client's decision. The gateway forwards
only the target, the body and three headers, and sets the account itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import stat
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, ClassVar, Final, cast

import msgspec
from aiohttp import web

from forebay.cluster.client.attempt import ATTEMPT_HEADER, AttemptError, AttemptView
from forebay.cluster.client.calls import ENDPOINTS_MAX, REDIRECT_STATUSES, redirection
from forebay.cluster.client.relay import Relay
from forebay.cluster.config import AccessConfig
from forebay.cluster.schemas import BODY_BYTES_MAX, USER_HEADER, ErrorAnswer, ErrorView
from forebay.cluster.security import NAME_RULE, TlsFiles, is_name
from forebay.cluster.system import OVERFLOW_UID, Address, Clock, account_of, peer_account, short_path
from forebay.cluster.system.eventloop import HttpConnection, HttpServer, MalformedRequest, NameService, NotKnownNow

LOGGER = logging.getLogger(__name__)

CONNECTIONS_MAX: Final = 1_000
"""Maximum number of open connections. Each may have one request at a replica, whose limit for a gateway is double."""

CONNECTIONS_PER_ACCOUNT_MAX: Final = 64
"""Maximum number of open connections of one account, so that no account excludes the others."""

REFUSED_PER_ACCOUNT_MAX: Final = 64
"""Number of excess connections of an account that get an error response; further ones are closed."""

SILENT_S_MAX: Final = 75.0
"""Longest idle time of a connection, and longest time to receive a request body, seconds."""

SWEEP_PERIOD_S: Final = 2.0
"""Interval of checks for idle and slow connections, seconds."""

CONNECT_S: Final = 3.0
"""Time to connect to a replica including TLS, seconds."""

WRITE_S_MAX: Final = 30.0
"""Time for a client to read one chunk of its response, seconds."""

SHUTDOWN_S: Final = 3.0
"""Time for pending requests to end at shutdown, seconds."""

BACKLOG: Final = 256
MODE: Final = 0o666
"""Mode of the socket: all accounts may connect."""

_PASSED_ON: Final = ("Accept", "Content-Type", "Last-Event-ID")
_PASSED_BACK: Final = (
    "Allow", "Cache-Control", "Content-Security-Policy", "Content-Type", "Cross-Origin-Resource-Policy",
    "Forebay-Revision", "Location", "Referrer-Policy", "Retry-After", "X-Content-Type-Options",
)  # fmt: skip


class GatewayError(Exception):
    """The gateway cannot serve; the message is a sentence with the remedy."""


class _Rejection(Exception):
    """Error response created by the gateway."""

    def __init__(self, status: int, code: str, sentence: str, remedy: str) -> None:
        super().__init__(sentence)
        self.status = status
        self.view = ErrorView(code=code, sentence=sentence, remedy=remedy)


class _Connection(HttpConnection):
    """Client connection with the UID reported by the kernel."""

    __slots__ = ("full", "uid")

    rest_s_max: ClassVar[float] = SILENT_S_MAX

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.uid: int | None = None
        self.full = ""
        """Reason why requests of this connection are rejected; empty if they are not."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accept the connection and record its account."""
        super().connection_made(transport)
        server = cast(_Server, self._manager)
        try:
            self.uid = peer_account(transport.get_extra_info("socket")).uid
        except OSError as error:
            LOGGER.error("the account of a client cannot be determined: %s", error)
            cast(asyncio.Transport, transport).abort()
            return
        server.held[self.uid] += 1
        mine, everybodys = server.held[self.uid], server.held.total()
        if mine > CONNECTIONS_PER_ACCOUNT_MAX:
            self.full = f"the account with uid {self.uid} has {CONNECTIONS_PER_ACCOUNT_MAX} connections open already"
        elif everybodys > CONNECTIONS_MAX:
            self.full = f"this gateway has {CONNECTIONS_MAX} connections open"
        if mine > CONNECTIONS_PER_ACCOUNT_MAX + REFUSED_PER_ACCOUNT_MAX or everybodys > 2 * CONNECTIONS_MAX:
            cast(asyncio.Transport, transport).abort()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Remove the connection from the account's count."""
        server, uid = cast("_Server | None", self._manager), self.uid
        if server is not None and uid is not None:
            self.uid = None
            server.held[uid] -= 1
            if not server.held[uid]:
                del server.held[uid]
        super().connection_lost(exc)

    def peer(self) -> str:
        """Return the client's name for the log."""
        return f"uid {self.uid}" if self.uid is not None else "a disconnected client"

    def problem_response(self, malformed: MalformedRequest) -> web.Response:
        """Return the response to a malformed request in a replica's format."""
        codes = {431: "limit_exceeded", 500: "internal_error"}
        code = codes.get(malformed.status, "malformed_request")
        view = ErrorView(code=code, sentence=malformed.sentence, remedy=malformed.remedy)
        body = msgspec.json.encode(ErrorAnswer(error=view))
        return web.Response(status=malformed.status, body=body, content_type="application/json")


class _Server(HttpServer):
    """HTTP server that counts connections per account."""

    connection_type: ClassVar[type[HttpConnection]] = _Connection

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.held: Counter[int] = Counter()


class Gateway:
    """Listens on a local socket and forwards requests to the replicas."""

    def __init__(self, config: AccessConfig, files: TlsFiles, path: Path, clock: Clock) -> None:
        """Initialize. `files` has the gateway's own certificate.

        Raises:
            TlsError: The files cannot be used.
        """
        self._path = path
        self._replicas = list(config.endpoints)
        self._relay = Relay(files)
        self._accounts = NameService(account_of, clock)
        self._server: _Server | None = None
        self._listening: asyncio.AbstractServer | None = None
        self._sweeper: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Start listening.

        Raises:
            GatewayError, OSError: The path cannot be used.
        """
        self._server = _Server(self._handle, LOGGER, handler_cancellation=True)
        self._listening = await asyncio.get_running_loop().create_unix_server(
            self._server, sock=listen_at(self._path), backlog=BACKLOG
        )
        self._sweep()

    async def stop(self) -> None:
        """Stop listening, finish pending requests, and close."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        if self._listening is not None:
            self._listening.close()
            with contextlib.suppress(OSError):
                self._path.unlink()
        if self._server is not None:
            self._server.pre_shutdown()
            await self._server.shutdown(SHUTDOWN_S)
        await self._relay.close()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = cast(_Connection, request.protocol)
        connection.begin()
        try:
            return await self._answer(request, connection)
        except _Rejection as rejection:
            body = msgspec.json.encode(ErrorAnswer(error=rejection.view))
            headers = {"Retry-After": "1"} if rejection.status in (429, 503) else {}
            response = web.Response(
                status=rejection.status, body=body, content_type="application/json", headers=headers
            )
            if request.body_exists and not request.content.is_eof():
                response.force_close()
            return response
        finally:
            connection.end()

    def _sweep(self) -> None:
        self._sweeper = asyncio.get_running_loop().call_later(SWEEP_PERIOD_S, self._sweep)
        if self._server is not None:
            self._server.sweep()

    async def _answer(self, request: web.BaseRequest, connection: _Connection) -> web.StreamResponse:
        if connection.full or connection.uid is None:
            raise _Rejection(
                429, "too_many_requests", connection.full or "the connection has ended", "close some of them"
            )
        account, address, body = await self._account(connection.uid), self._replica(request), _body_of(request)
        headers = {name: value for name in _PASSED_ON if (value := request.headers.get(name)) is not None}
        headers[USER_HEADER] = account
        if body is not None:
            headers["Content-Length"] = str(request.content_length)
        begun: web.StreamResponse | None = None
        try:
            async with self._relay.relay(
                address, request.method, request.raw_path, headers, body, connect_s=CONNECT_S
            ) as found:
                location = found.headers.get("Location")
                if found.status in REDIRECT_STATUSES and location is not None:
                    self._learn(address, location)
                begun = web.StreamResponse(
                    status=found.status,
                    headers={name: value for name in _PASSED_BACK if (value := found.headers.get(name)) is not None},
                )
                if found.content_length is not None:
                    begun.content_length = found.content_length
                await begun.prepare(request)
                async for part in found.content.iter_any():
                    async with asyncio.timeout(WRITE_S_MAX):
                        await begun.write(part)
                await begun.write_eof()
                return begun
        except AttemptError as failure:
            if begun is None:
                view = msgspec.json.encode(AttemptView.of(failure))
                response = web.Response(status=502, body=view, headers={ATTEMPT_HEADER: "failed"})
                response.force_close()
                return response
            LOGGER.info("an answer of %s was cut off: %s", address, failure)
        except (ConnectionError, TimeoutError) as error:
            LOGGER.debug("a client disconnected, or does not read: %s", error)
        connection.cut()
        return begun or web.Response(status=502)

    async def _account(self, uid: int) -> str:
        if uid == OVERFLOW_UID:
            words = (
                "your account is unknown on this machine: it is the overflow account, or belongs to a user namespace"
            )
            raise _Rejection(403, "permission_denied", words, "use an account of your own, outside of the container")
        try:
            account = await self._accounts.ask(uid)
        except NotKnownNow as error:
            raise _Rejection(503, "too_busy", str(error), "try again in a moment") from error
        if account is None:
            raise _Rejection(403, "permission_denied", f"this machine has no account with uid {uid}", "add the account")
        if not is_name(account):
            words = f"the account {account!r:.120} cannot name a user: {NAME_RULE}"
            raise _Rejection(403, "permission_denied", words, "give the account another name")
        return account

    def _replica(self, request: web.BaseRequest) -> Address:
        """Return the target of a request: a configured replica, or a replica named in a redirection."""
        wanted = request.headers.get("Host", "")
        path = request.raw_path.partition("?")[0]
        is_page = request.method == "GET" and (path in ("/", "/page") or path.startswith("/page/"))
        if not request.raw_path.startswith("/v1/") and not is_page:
            raise _Rejection(404, "unknown_route", "this path does not exist", "see /v1/openapi.json")
        for address in self._replicas:
            if str(address) == wanted:
                return address
        known = ", ".join(map(str, self._replicas))
        raise _Rejection(
            421, "unknown_replica", f"{wanted!r:.80} is not a replica of this cluster", f"use one of: {known}"
        )

    def _learn(self, address: Address, location: str) -> None:
        with contextlib.suppress(ValueError):
            found = redirection(address, location)
            if found not in self._replicas and len(self._replicas) < ENDPOINTS_MAX:
                self._replicas.append(found)


def listen_at(path: Path) -> socket.socket:
    """Return a socket that listens at `path` and accepts all accounts.

    Raises:
        GatewayError, OSError: The path cannot be used.
    """
    with contextlib.suppress(FileExistsError):
        path.parent.mkdir(mode=0o755)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with short_path(path) as short:
            _clear(path, short)
            # Set the mode by umask: a later chmod could change another account's link of the same name.
            before = os.umask(0o777 & ~MODE)
            try:
                listening.bind(short)
            finally:
                os.umask(before)
        listening.listen(BACKLOG)
        listening.setblocking(False)
    except BaseException:
        listening.close()
        raise
    return listening


def _clear(path: Path, short: str) -> None:
    """Remove the socket of an earlier gateway.

    Raises:
        GatewayError: The file is not a socket, or a gateway listens there.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise GatewayError(f"{path} exists and is not a socket; remove it, or name another path in [access] socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trying:
        try:
            trying.connect(short)
        except ConnectionRefusedError:
            path.unlink()
            return
    raise GatewayError(f"another gateway already listens at {path}; stop it first")


def _body_of(request: web.BaseRequest) -> AsyncIterator[bytes] | None:
    size_bytes = request.content_length
    if size_bytes is None and request.body_exists:
        raise _Rejection(
            411, "length_required", "the request does not give the length of its body", "send Content-Length"
        )
    if not size_bytes:
        return None
    if size_bytes > BODY_BYTES_MAX:
        words = f"the body has {size_bytes} bytes; at most {BODY_BYTES_MAX} are read"
        raise _Rejection(413, "limit_exceeded", words, "send a smaller request")
    return _parts_of(request)


async def _parts_of(request: web.BaseRequest) -> AsyncIterator[bytes]:
    async with asyncio.timeout(SILENT_S_MAX):
        async for part in request.content.iter_any():
            yield part
