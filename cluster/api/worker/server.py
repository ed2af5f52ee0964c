"""HTTP server of an API worker: connection to backend and back, with a response for every failure."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import msgspec
from aiohttp import web

from forebay.cluster.api import request_decoding
from forebay.cluster.api.page import PAGES_PATH, Ask, Pages, find_page, is_page, page_headers
from forebay.cluster.api.web import (
    FIXED_HEADERS,
    QUERY_CHARACTERS_MAX,
    SWEEP_PERIOD_S,
    ApiConnection,
    ApiRequest,
    Backend,
    BodyBudget,
    GuardedServer,
    Problem,
    Redirect,
    Stream,
    Voucher,
    bad_request,
    check_query,
    decode,
    find_operation,
    internal_error,
    not_identified,
    permission_denied,
    permit,
    read_body,
    too_many,
    unidentified_client,
)
from forebay.cluster.schemas import PEOPLE, USER_HEADER, ApiOperation
from forebay.cluster.security import IdentityError, PeerCertificate, Role
from forebay.cluster.system import Address, about
from forebay.cluster.system.eventloop import BYTES_PER_SLICE, Acceptor

LOGGER = logging.getLogger(__name__)

ANSWER_WRITE_S_MAX = 30.0
"""Time for a client to read its response, seconds; then the connection is closed."""

ANSWER_SMALL_BYTES = 16 * 1024
"""Response size that fits an empty connection buffer (64 KiB) with its head, bytes."""

LINGER_S = 2.0
"""Time to read the rest of a rejected body, seconds, so that its sender sees the response."""

SHUTDOWN_S = 3.0
"""Time for pending requests to end at shutdown, seconds."""

PART_WRITE_S_MAX = 10.0
"""Time a stream's connection buffer may stay full, seconds; then its reader is disconnected."""

STREAM_BUFFER_BYTES_MAX = 256 * 1024
"""Buffered bytes of a stream in addition to the chunk being written."""


_OWN_SITES = ("same-origin", "none")
"""`Sec-Fetch-Site` of this listener's own pages, and of a typed address."""

_FROM_BROWSERS = ("Origin", "Sec-Fetch-Site")
"""Headers that browsers always send with requests that can change something."""


class Server:
    """Listens on a replica's API address and responds."""

    def __init__(
        self,
        core: Backend,
        *,
        address: Address,
        tls: Callable[[], ssl.SSLContext],
        listening: socket.socket | None = None,
    ) -> None:
        """`tls` returns a context that requests client certificates of the cluster's authority.

        `listening`: a listening socket shared with other processes.
        """
        self._core = core
        self._address = address
        self._tls = tls
        self._listening = listening
        self._budget = BodyBudget()
        self._reader = request_decoding.SubmitDecoder()
        self._pages = Pages()
        self._guarded: GuardedServer | None = None
        self._acceptor: Acceptor | None = None
        self._sweeper: asyncio.TimerHandle | None = None

    @property
    def port(self) -> int:
        """Listening port."""
        if self._acceptor is None:
            raise RuntimeError("the server does not listen")
        return self._acceptor.port

    @property
    def connections(self) -> int:
        """Open connections, count."""
        return 0 if self._guarded is None else len(self._guarded.connections)

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: The address cannot be used.
        """
        self._guarded = GuardedServer(
            self._core.peers,
            self._handle,
            LOGGER,
            lingering_time=LINGER_S,
        )
        self._acceptor = Acceptor(self._guarded, self._address, self._tls)
        await self._acceptor.start(self._listening)
        self._sweep()

    async def stop(self) -> None:
        """Stop accepting, give pending requests SHUTDOWN_S, and close."""
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

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = request.protocol
        assert isinstance(connection, ApiConnection)  # the server creates no other class
        connection.begin()
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        name, code, path = "none", "", request.raw_path.partition("?")[0]
        try:
            try:
                voucher = await self._voucher(request, connection)
                _refuse_browsers(request, navigable=is_page(path))
                if is_page(path):
                    name = "page"
                    response = await self._page(request, connection, voucher, path)
                else:
                    operation, params = self._operation(request)
                    name = operation.name
                    asked = await self._receive_request(request, connection, voucher, operation, params)
                    outcome = await self._core.respond(asked)
                    if asked.certificate.through and operation.method != "GET":
                        # The ledger records the command's identity; this log line adds its authenticator and command
                        # ID.
                        who, words = asked.identity, (asked.certificate.through, name, _id_of(asked))
                        LOGGER.info("%s, by %s: %s %s", who, *words, extra=about(job=params.get("id", "")))
                    if isinstance(outcome, Stream):
                        streamed = await self._stream(request, connection, outcome)
                        self._core.observe(name, streamed.status, loop.time() - started_s, "")
                        return streamed
                    response = self._answer(outcome.status, outcome.content, outcome.content_type, outcome.revision, {})
            except Redirect as redirect:
                headers = {"Location": redirect.base + request.raw_path}
                response = self._answer(307, b"", "application/json", self._core.revision, headers)
            except Problem as problem:
                code = problem.view.code
                response = await self._reject(request, path, problem)
            except Exception:
                LOGGER.exception("%s %s failed", request.method, name)
                remedy = "report it with the replica's log; if it was a write, send it again with the same command_id"
                fault = internal_error(remedy, "unknown" if request.method != "GET" else "rejected")
                code, response = fault.view.code, await self._reject(request, path, fault)
            await self._send(request, response)
            self._core.observe(name, response.status, loop.time() - started_s, code)
            return response
        finally:
            if connection.is_spoken_on and not connection.gone.is_set():
                connection.is_spoken_on = False
                self._core.peers.speak(connection.transport, connection.certificate)
            connection.end()

    async def _voucher(self, request: web.BaseRequest, connection: ApiConnection) -> Voucher:
        """Return the caller's identity: from a certificate, a gateway's assertion, or a MUNGE credential."""
        certificate, vouching = connection.certificate, self._core.vouching
        named = request.headers.getall(USER_HEADER, [])
        authorization = request.headers.getall("Authorization", [])
        if certificate is None:
            if named or len(authorization) != 1 or not vouching.takes_munge or not connection.shows_nothing:
                raise not_identified(connection.stranger or IdentityError("the connection has ended"))
            voucher = await vouching.by_munge(authorization[0])
        elif authorization:
            raise bad_request(
                "the request has both a certificate and an Authorization header", "use one of them", "head"
            )
        elif certificate.identity.role is not Role.GATEWAY:
            if named:
                raise permission_denied(
                    f"{certificate.identity} may not act for a user", "send the request through a gateway", USER_HEADER
                )
            return Voucher(certificate)
        elif len(named) != 1:
            raise not_identified(unidentified_client())
        else:
            voucher = await vouching.through_gateway(certificate, named[0])
        try:
            self._core.peers.speak(connection.transport, voucher.shown)
            connection.is_spoken_on = True
        except IdentityError as error:
            raise not_identified(error) from error
        if certificate is None and not connection.become(voucher.shown.identity):
            raise too_many(
                f"{voucher.shown.identity} has the maximum number of connections for one user", "close some of them"
            )
        return voucher

    def _operation(self, request: web.BaseRequest) -> tuple[ApiOperation[Any, Any], dict[str, str]]:
        self._check_target(request)
        return find_operation(request.method, request.raw_path.partition("?")[0])

    @staticmethod
    def _check_target(request: web.BaseRequest) -> None:
        if len(request.raw_path) > QUERY_CHARACTERS_MAX:
            raise Problem(
                414,
                "limit_exceeded",
                f"the target has more than {QUERY_CHARACTERS_MAX} characters",
                "shorten the path or query",
            )

    async def _receive_request(
        self,
        request: web.BaseRequest,
        connection: ApiConnection,
        voucher: Voucher,
        operation: ApiOperation[Any, Any],
        params: dict[str, str],
    ) -> ApiRequest:
        certificate, identity = voucher.shown, voucher.shown.identity
        permit(identity, operation.roles, f"{operation.method} {operation.path}")
        query = request.query
        check_query(operation, dict(query), [name for name, _ in query.items()])
        body, content, prepared = None, b"", None
        if operation.has_body:
            if request.content_type not in ("application/json", "application/octet-stream"):
                raise Problem(415, "unsupported_type", f"the body is {request.content_type}", "send application/json")
            content = await read_body(request, self._budget, identity)
            voucher.check(lambda: self._purpose(request, content))
            body = decode(content, operation.request)
            prepared = await self._reader.read(body, identity, self._core.site)
        elif request.can_read_body:
            await read_body(request, self._budget, identity, bytes_max=0)
        if not operation.has_body:
            voucher.check(lambda: self._purpose(request, b""))
        last = request.headers.get("Last-Event-ID")
        return ApiRequest(operation, certificate, params, dict(query), body, content, prepared, last, connection.gone)

    async def _page(
        self, request: web.BaseRequest, connection: ApiConnection, voucher: Voucher, path: str
    ) -> web.Response:
        """Return a status page for the caller, or a static file.

        Raises:
            Problem: The page cannot be shown.
            Redirect: Another replica leads.
        """
        certificate = voucher.shown
        permit(certificate.identity, PEOPLE, f"see {PAGES_PATH}")
        self._check_target(request)
        found = find_page(request.method, path)
        if request.can_read_body:
            await read_body(request, self._budget, certificate.identity, bytes_max=0)
        voucher.check(lambda: self._purpose(request, b""))
        if found.elsewhere:
            return self._answer(303, b"", "text/plain", self._core.revision, {"Location": found.elsewhere})
        if found.file:
            shown = self._pages.file(found.file)
        else:
            query, names = dict(request.query), [name for name, _ in request.query.items()]
            ask, work = self._asking(connection, certificate), self._core.slices.work(certificate.identity)
            shown = await self._pages.page(found, query, names, ask, work)
        revision = shown.revision or self._core.revision
        return self._answer(shown.status, shown.content, shown.content_type, revision, page_headers())

    def _asking(self, connection: ApiConnection, certificate: PeerCertificate) -> Ask:
        """Return a function that queries the API as the caller."""

        async def ask(operation: ApiOperation[Any, Any], params: dict[str, str], query: dict[str, str]) -> Any:
            permit(certificate.identity, operation.roles, f"{operation.method} {operation.path}")
            check_query(operation, query, list(query))
            asked = ApiRequest(operation, certificate, params, query, None, b"", None, None, connection.gone)
            outcome = await self._core.respond(asked)
            assert not isinstance(outcome, Stream)  # pages request no streams
            return msgspec.json.decode(outcome.content, type=operation.answer)

        return ask

    async def _reject(self, request: web.BaseRequest, path: str, problem: Problem) -> web.Response:
        """Return an error, for browsers as a page."""
        if not is_page(path):
            return self._problem(problem)
        content = await self._pages.problem(problem, path, self._core.slices.work(request.protocol))
        headers = {**page_headers(), **problem.headers}
        return self._answer(problem.status, content, "text/html; charset=utf-8", self._core.revision, headers)

    def _purpose(self, request: web.BaseRequest, content: bytes) -> bytes:
        return self._core.vouching.purpose(str(self._address), request.method, request.raw_path, content)

    def _problem(self, problem: Problem) -> web.Response:
        content = msgspec.json.encode(problem.body)
        return self._answer(problem.status, content, "application/json", self._core.revision, problem.headers)

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
        """Write a response in slices, because encrypting a large one would block the loop."""
        if isinstance(response, web.Response) and isinstance(body := response.body, bytes):
            # A plain StreamResponse, because `web.Response` writes its body in one call.
            parts = web.StreamResponse(status=response.status, headers=response.headers)
            parts.content_length = len(body)
            await parts.prepare(request)
            work = self._core.slices.work(request.protocol)
            for first in range(0, len(body), BYTES_PER_SLICE):
                await work.take(0, size_bytes=BYTES_PER_SLICE)
                await parts.write(body[first : first + BYTES_PER_SLICE])
            response = parts
        else:
            await response.prepare(request)
        await response.write_eof()

    async def _send(self, request: web.BaseRequest, response: web.StreamResponse) -> None:
        """Write the response within a time limit; a client that does not read is disconnected."""
        transport = request.transport
        fits = isinstance(response, web.Response) and (response.content_length or 0) < ANSWER_SMALL_BYTES
        try:
            if fits and transport is not None and transport.get_write_buffer_size() == 0:
                # It fits the connection's buffer, so there is no need to wait.
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

    async def _stream(self, request: web.BaseRequest, connection: ApiConnection, stream: Stream) -> web.StreamResponse:
        """Write a stream until it ends, its client disconnects, or does not read."""
        response = web.StreamResponse(
            headers={
                "Content-Type": stream.content_type,
                "Cache-Control": "no-store",
                "Forebay-Revision": str(stream.revision),
            }
        )
        try:
            async with aclosing(stream.parts) as parts:
                await response.prepare(request)
                if request.transport is not None:
                    request.transport.set_write_buffer_limits(high=STREAM_BUFFER_BYTES_MAX)
                async for part in parts:
                    try:
                        async with asyncio.timeout(PART_WRITE_S_MAX):
                            await response.write(part.payload)
                    except TimeoutError:
                        _cut(request, part.farewell)
                        return response
                await response.write_eof()
        except ConnectionError:
            pass
        finally:
            stream.release()
        return response


def _refuse_browsers(request: web.BaseRequest, *, navigable: bool) -> None:
    """Reject browser requests from other sites, and all browser requests that change something.

    A browser shows its certificate on behalf of any open page. The status page may only read. Links of other sites may
    lead to `navigable` pages, whose content they cannot see.

    Raises:
        Problem: 403, for such a request.
    """
    site = request.headers.get("Sec-Fetch-Site", "none")
    is_link = (request.headers.get("Sec-Fetch-Mode"), request.headers.get("Sec-Fetch-Dest")) == ("navigate", "document")
    if site not in _OWN_SITES and not (navigable and is_link and request.method == "GET"):
        words = "a page of another site may not send requests"
        raise Problem(403, "from_a_browser", words, "open the page of this cluster itself, or use the command line")
    if request.method != "GET" and any(name in request.headers for name in _FROM_BROWSERS):
        words = "a page in a browser may not change anything"
        raise Problem(403, "from_a_browser", words, "use the command line, or a program that sends no Origin")


def _id_of(asked: ApiRequest) -> str:
    """Return the command IDs of a request."""
    if asked.prepared is not None:
        return asked.prepared.command_id
    commands = getattr(asked.body, "commands", (asked.body,))
    return " ".join(str(getattr(one, "command_id", "")) for one in commands)


def _cut(request: web.BaseRequest, comment: bytes) -> None:
    """Close a connection whose reader is too slow, with a final comment."""
    transport = request.transport
    if transport is not None:
        # The response is chunked, so the comment and the end are its last chunks.
        transport.write(f"{len(comment):x}\r\n".encode() + comment + b"\r\n0\r\n\r\n")
        transport.close()
        # A plain close would wait for a reader that may never return.
        asyncio.get_running_loop().call_later(PART_WRITE_S_MAX, transport.abort)
