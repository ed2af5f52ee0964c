"""The HTTP server: from a connection to a handler and back, with every way to fail turned into an answer."""

from __future__ import annotations

import asyncio
import functools
import logging
import ssl
from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import web

from cluster.api.routes import check_query, find_route
from cluster.api.service import Call, Reply, Route, Service
from cluster.api.web import (
    FIXED_HEADERS,
    HEADERS_MAX,
    IDLE_S_MAX,
    LINE_CHARACTERS_MAX,
    QUERY_CHARACTERS_MAX,
    SWEEP_PERIOD_S,
    BodyBudget,
    Connection,
    GuardedServer,
    Problem,
    Redirect,
    decode,
    document,
    not_identified,
    permit,
    read_body,
    unforeseen,
)
from cluster.eventloop import BYTES_PER_SLICE, Acceptor
from cluster.security import Identity, NotIdentified
from cluster.system import Address
from wal import BrokenInvariant, StorageFailed

LOGGER = logging.getLogger(__name__)

ANSWER_WRITE_S_MAX = 30.0
"""How long a client may take to read its answer, seconds; then the connection is cut."""

ANSWER_SMALL_BYTES = 16 * 1024
"""An answer that an empty connection buffer (64 KiB) takes with its head, bytes."""

LINGER_S = 2.0
"""How long the rest of a body that is not wanted is read, seconds, so that its sender finds the answer."""

SHUTDOWN_S = 3.0
"""How long requests under way may take to end when the replica stops, seconds."""


class Server:
    """Listens on a replica's api address and answers."""

    def __init__(self, service: Service, *, address: Address, tls: Callable[[], ssl.SSLContext]) -> None:
        """`tls` returns a context that asks for client certificates of the cluster's authority."""
        self._service = service
        self._address = address
        self._tls = tls
        self._budget = BodyBudget()
        self._guarded: GuardedServer | None = None
        self._acceptor: Acceptor | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        service.document = functools.lru_cache(maxsize=1)(self._document)

    @property
    def port(self) -> int:
        """The port that it listens on."""
        if self._acceptor is None:
            raise RuntimeError("the server does not listen")
        return self._acceptor.port

    async def start(self) -> None:
        """Listen; OSError if the address cannot be used."""
        self._service.document()  # made now, since it takes longer than others should wait
        self._guarded = GuardedServer(
            self._service.peers,
            self._handle,
            access_log=None,
            keepalive_timeout=IDLE_S_MAX,
            lingering_time=LINGER_S,
            max_line_size=LINE_CHARACTERS_MAX,
            max_field_size=LINE_CHARACTERS_MAX,
            max_headers=HEADERS_MAX,
            auto_decompress=False,
            logger=LOGGER,
        )
        self._acceptor = Acceptor(self._guarded, self._address, self._tls)
        await self._acceptor.start()
        self._sweep()

    async def stop(self) -> None:
        """Stop accepting, let what is under way end for SHUTDOWN_S, and close."""
        self._service.stopping.set()
        self._service.controller.orders.wake_all()
        if self._sweeper is not None:
            self._sweeper.cancel()
        if self._acceptor is not None:
            await self._acceptor.stop()
        if self._guarded is not None:
            self._guarded.pre_shutdown()
            await self._guarded.shutdown(SHUTDOWN_S)

    def _sweep(self) -> None:
        self._sweeper = asyncio.get_running_loop().call_later(SWEEP_PERIOD_S, self._sweep)
        if self._guarded is not None:
            self._guarded.sweep()

    def _document(self) -> bytes:
        return msgspec.json.encode(document(self._service.version))

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = request.protocol
        if isinstance(connection, Connection):
            connection.begin()
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        name = "none"
        try:
            route: Route | None = None
            try:
                route, call = await self._call(request)
                name = route.operation.name
                outcome = await route.handler(call)
                response = outcome if isinstance(outcome, web.StreamResponse) else self._response(route, outcome)
            except Redirect as redirect:
                response = self._redirect(request, redirect)
            except Problem as problem:
                response = self._problem(problem)
            except (StorageFailed, BrokenInvariant) as error:
                self._service.fail(error)
            except Exception:
                LOGGER.exception("%s %s failed", request.method, name)
                remedy = "report it with the replica's log; if it was a write, send it again with the same command_id"
                response = self._problem(unforeseen(remedy, "unknown" if request.method != "GET" else "refused"))
            await self._send(request, response)
            self._service.metrics.requests.labels(name, f"{response.status // 100}xx").observe(loop.time() - started_s)
            return response
        finally:
            if isinstance(connection, Connection):
                connection.end()

    async def _call(self, request: web.BaseRequest) -> tuple[Route, Call[Any]]:
        identity = self._identity(request)
        if len(request.raw_path) > QUERY_CHARACTERS_MAX:
            raise Problem(
                414, "limit_exceeded", f"the target has more than {QUERY_CHARACTERS_MAX} characters", "ask for less"
            )
        route, params = find_route(request.method, request.raw_path.partition("?")[0])
        operation = route.operation
        permit(identity, operation.roles, f"{operation.method} {operation.path}")
        query = request.query
        check_query(operation, dict(query), [name for name, _ in query.items()])
        body = None
        if operation.has_body:
            if request.content_type not in ("application/json", "application/octet-stream"):
                raise Problem(415, "unsupported_type", f"the body is {request.content_type}", "send application/json")
            body = decode(await read_body(request, self._budget, identity), operation.request)
        elif request.can_read_body:
            await read_body(request, self._budget, identity, bytes_max=0)
        return route, Call(self._service, operation, request, identity, params, dict(query), body)

    def _identity(self, request: web.BaseRequest) -> Identity:
        connection = request.protocol
        assert isinstance(connection, Connection)  # the server makes no other
        if connection.identity is None:
            raise not_identified(connection.stranger or NotIdentified("the connection has ended"))
        return connection.identity

    def _response(self, route: Route, reply: Reply[Any]) -> web.Response:
        content = reply.content if reply.content is not None else msgspec.json.encode(reply.view)
        return self._answer(route.operation.status, content, reply.content_type, reply.revision, {})

    def _problem(self, problem: Problem) -> web.Response:
        self._service.metrics.problems.labels(problem.view.code).inc()
        content = msgspec.json.encode(problem.body)
        return self._answer(problem.status, content, "application/json", self._revision, problem.headers)

    def _redirect(self, request: web.BaseRequest, redirect: Redirect) -> web.Response:
        headers = {"Location": redirect.base + request.raw_path}
        return self._answer(307, b"", "application/json", self._revision, headers)

    @property
    def _revision(self) -> int:
        return self._service.controller.state.revision

    def _answer(
        self, status: int, content: bytes, content_type: str, revision: int, headers: dict[str, str]
    ) -> web.Response:
        return web.Response(
            status=status,
            body=content,
            headers={
                "Content-Type": content_type,
                **FIXED_HEADERS,
                "Forebay-Revision": str(revision),
                **headers,
            },
        )

    async def _write(self, request: web.BaseRequest, response: web.StreamResponse) -> None:
        """Write an answer in slices: a large one takes longer to encrypt than others should wait."""
        if isinstance(response, web.Response) and isinstance(body := response.body, bytes):
            # `web.Response` writes its body in one go, so that of a plain response comes in its place.
            parts = web.StreamResponse(status=response.status, headers=response.headers)
            parts.content_length = len(body)
            await parts.prepare(request)
            work = self._service.slices.work(request.protocol)
            for first in range(0, len(body), BYTES_PER_SLICE):
                await work.take(0, size_bytes=BYTES_PER_SLICE)
                await parts.write(body[first : first + BYTES_PER_SLICE])
            response = parts
        else:
            await response.prepare(request)
        await response.write_eof()

    async def _send(self, request: web.BaseRequest, response: web.StreamResponse) -> None:
        """Write the answer within a bound of time; a client that does not read it is cut."""
        transport = request.transport
        fits = isinstance(response, web.Response) and (response.content_length or 0) < ANSWER_SMALL_BYTES
        try:
            if fits and transport is not None and transport.get_write_buffer_size() == 0:
                # It goes into the connection's buffer whole: nothing to wait for.
                await response.prepare(request)
                await response.write_eof()
                return
            async with asyncio.timeout(ANSWER_WRITE_S_MAX):
                await self._write(request, response)
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
        except ConnectionError:
            pass
