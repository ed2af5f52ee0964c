"""The HTTP front door: from a connection to the core and back, with every way to fail turned into an answer."""

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

from cluster.api import request_decoding
from cluster.api.page import PAGES_PATH, Ask, Pages, find_page, is_page, page_headers
from cluster.api.web import (
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
from cluster.schemas import PEOPLE, USER_HEADER, ApiOperation
from cluster.security import IdentityError, PeerCertificate, Role
from cluster.system import Address, about
from cluster.system.eventloop import BYTES_PER_SLICE, Acceptor

LOGGER = logging.getLogger(__name__)

ANSWER_WRITE_S_MAX = 30.0
"""How long a client may take to read its answer, seconds; then the connection is cut."""

ANSWER_SMALL_BYTES = 16 * 1024
"""An answer that an empty connection buffer (64 KiB) takes with its head, bytes."""

LINGER_S = 2.0
"""How long the rest of a body that is not wanted is read, seconds, so that its sender finds the answer."""

SHUTDOWN_S = 3.0
"""How long requests under way may take to end when the replica stops, seconds."""

PART_WRITE_S_MAX = 10.0
"""How long the buffer of a stream's connection may stay full, seconds; then its reader is too slow and is cut."""

STREAM_BUFFER_BYTES_MAX = 256 * 1024
"""What is held for the reader of a stream, bytes, besides the part that is being written."""


_OWN_SITES = ("same-origin", "none")
"""What `Sec-Fetch-Site` says of a page of this very listener, and of an address that a person has typed."""

_FROM_BROWSERS = ("Origin", "Sec-Fetch-Site")
"""Headers that browsers send with whatever may change something, and that no page can leave out."""


class Server:
    """Listens on a replica's api address and answers."""

    def __init__(
        self,
        core: Backend,
        *,
        address: Address,
        tls: Callable[[], ssl.SSLContext],
        listening: socket.socket | None = None,
    ) -> None:
        """`tls` returns a context that asks for client certificates of the cluster's authority; `listening`: the socket
        to accept from, where another process has it too."""
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
        """The port that it listens on."""
        if self._acceptor is None:
            raise RuntimeError("the server does not listen")
        return self._acceptor.port

    @property
    def connections(self) -> int:
        """Open connections, count."""
        return 0 if self._guarded is None else len(self._guarded.connections)

    async def start(self) -> None:
        """Listen; OSError if the address cannot be used."""
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
        """Stop accepting, let what is under way end for SHUTDOWN_S, and close."""
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
        assert isinstance(connection, ApiConnection)  # the server makes no other
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
                        # The ledger says whose a command is; by whom he came, with the command's id, this line.
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
                fault = internal_error(remedy, "unknown" if request.method != "GET" else "refused")
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
        """Return who asks: whose certificate it is, or the account that a gateway names, or munged vouches for."""
        certificate, vouching = connection.certificate, self._core.vouching
        named = request.headers.getall(USER_HEADER, [])
        authorization = request.headers.getall("Authorization", [])
        if certificate is None:
            if named or len(authorization) != 1 or not vouching.takes_munge or not connection.shows_nothing:
                raise not_identified(connection.stranger or IdentityError("the connection has ended"))
            voucher = await vouching.by_munge(authorization[0])
        elif authorization:
            raise bad_request("there is a certificate and an Authorization", "use one of both", "head")
        elif certificate.identity.role is not Role.GATEWAY:
            if named:
                raise permission_denied(
                    f"{certificate.identity} may not speak for a user", "leave it to a gateway", USER_HEADER
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
            raise too_many(f"{voucher.shown.identity} has as many connections as one user may have", "close some")
        return voucher

    def _operation(self, request: web.BaseRequest) -> tuple[ApiOperation[Any, Any], dict[str, str]]:
        self._check_target(request)
        return find_operation(request.method, request.raw_path.partition("?")[0])

    @staticmethod
    def _check_target(request: web.BaseRequest) -> None:
        if len(request.raw_path) > QUERY_CHARACTERS_MAX:
            raise Problem(
                414, "limit_exceeded", f"the target has more than {QUERY_CHARACTERS_MAX} characters", "ask for less"
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
        """Return a page of what the caller may see, or a file that pages load; Problem, Redirect."""
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
        """Return what asks the core what the API is asked, for the caller."""

        async def ask(operation: ApiOperation[Any, Any], params: dict[str, str], query: dict[str, str]) -> Any:
            permit(certificate.identity, operation.roles, f"{operation.method} {operation.path}")
            check_query(operation, query, list(query))
            asked = ApiRequest(operation, certificate, params, query, None, b"", None, None, connection.gone)
            outcome = await self._core.respond(asked)
            assert not isinstance(outcome, Stream)  # no page asks for one
            return msgspec.json.decode(outcome.content, type=operation.answer)

        return ask

    async def _reject(self, request: web.BaseRequest, path: str, problem: Problem) -> web.Response:
        """Return what is wrong, to a person as a page."""
        if not is_page(path):
            return self._problem(problem)
        content = await self._pages.problem(problem, self._core.slices.work(request.protocol))
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
        """Write an answer in slices: a large one takes longer to encrypt than others should wait."""
        if isinstance(response, web.Response) and isinstance(body := response.body, bytes):
            # `web.Response` writes its body in one go, so that of a plain response comes in its place.
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

    async def _stream(self, request: web.BaseRequest, connection: ApiConnection, stream: Stream) -> web.StreamResponse:
        """Write a stream until it ends, its client goes, or does not read."""
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
    """Refuse what a page of another site has a browser ask, and whatever changes something; Problem 403.

    A browser shows its certificate for any page that is open in it, whoever wrote that: a page of our own may look, and
    no more. A link of another site may lead to what is `navigable`: its author does not see what the browser shows.
    """
    site = request.headers.get("Sec-Fetch-Site", "none")
    is_link = (request.headers.get("Sec-Fetch-Mode"), request.headers.get("Sec-Fetch-Dest")) == ("navigate", "document")
    if site not in _OWN_SITES and not (navigable and is_link and request.method == "GET"):
        words = "a page of another site may not ask for anything"
        raise Problem(403, "from_a_browser", words, "open the page of this cluster itself, or use the command line")
    if request.method != "GET" and any(name in request.headers for name in _FROM_BROWSERS):
        words = "a page in a browser may change nothing"
        raise Problem(403, "from_a_browser", words, "use the command line, or a program that sends no Origin")


def _id_of(asked: ApiRequest) -> str:
    """Return the ids of the commands of a request."""
    if asked.prepared is not None:
        return asked.prepared.command_id
    commands = getattr(asked.body, "commands", (asked.body,))
    return " ".join(str(getattr(one, "command_id", "")) for one in commands)


def _cut(request: web.BaseRequest, comment: bytes) -> None:
    """End a connection whose reader is too slow: the comment is the last thing it finds, if it ever reads on."""
    transport = request.transport
    if transport is not None:
        # The response is chunked: the comment and the end are written as its last chunks.
        transport.write(f"{len(comment):x}\r\n".encode() + comment + b"\r\n0\r\n\r\n")
        transport.close()
        # Closing waits for the buffer, which waits for a reader that may never come.
        asyncio.get_running_loop().call_later(PART_WRITE_S_MAX, transport.abort)
