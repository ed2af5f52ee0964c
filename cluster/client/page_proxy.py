"""Loopback proxy that shows a browser the status page as the account that runs it.

A browser has neither the account's certificate nor access to a gateway's socket. The proxy listens on 127.0.0.1 and
forwards reads of the page. Other accounts of the machine cannot use it: the kernel reports the account of each
connection, and the one-time link is exchanged for a cookie.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from aiohttp import web

from forebay.cluster.client.attempt import ATTEMPT_HEADER, AttemptError
from forebay.cluster.client.calls import REDIRECT_STATUSES, REDIRECTS_MAX, Endpoints, redirection
from forebay.cluster.client.relay import Relay
from forebay.cluster.system import Address

HOST: Final = "127.0.0.1"

CONNECT_S: Final = 3.0
"""Time to connect to a replica including TLS, seconds."""

ANSWER_S: Final = 10.0
"""Time for a replica to begin its response, seconds; then the next one is asked."""

SHUTDOWN_S: Final = 1.0
"""Time for pending requests to end at shutdown, seconds."""

TOKEN_BYTES: Final = 32

_CONNECTIONS: Final = Path("/proc/net/tcp")
"""Kernel's table of TCP connections, with the UID of each."""

_ESTABLISHED: Final = "01"

_EVENTS: Final = "/v1/events"
_PAGE: Final = "/page"

_PASSED_ON: Final = ("Accept", "Last-Event-ID")
_PASSED_BACK: Final = (
    "Allow", "Cache-Control", "Content-Security-Policy", "Content-Type", "Cross-Origin-Resource-Policy",
    "Forebay-Revision", "Location", "Referrer-Policy", "X-Content-Type-Options",
)  # fmt: skip


class PageProxy:
    """Proxy of the status page; an asynchronous context manager that listens while it is open."""

    def __init__(self, relay: Relay, endpoints: Endpoints, port: int = 0) -> None:
        """Create it. `relay` has the account's access to the replicas at `endpoints`; port 0: a free one."""
        self._relay = relay
        self._endpoints = endpoints
        self._port = port
        self._token = secrets.token_urlsafe(TOKEN_BYTES)
        self._is_used = False
        """True if the link was opened: it works once."""
        self._cookie = secrets.token_urlsafe(TOKEN_BYTES)
        self._server: web.Server | None = None
        self._listening: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        """Listen.

        Raises:
            OSError: The port cannot be used.
        """
        self._server = web.Server(self._handle, access_log=None, handler_cancellation=True)
        self._listening = await asyncio.get_running_loop().create_server(self._server, HOST, self._port)
        self._port = self._listening.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None and self._listening is not None
        self._listening.close()
        self._server.pre_shutdown()
        await self._server.shutdown(SHUTDOWN_S)

    @property
    def port(self) -> int:
        """Listening port."""
        return self._port

    @property
    def url(self) -> str:
        """Link that opens the page once."""
        return f"http://{HOST}:{self._port}/{self._token}"

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        path = request.raw_path.partition("?")[0]
        if request.method != "GET":
            return _rejection(HTTPStatus.METHOD_NOT_ALLOWED, "the page is read-only")
        if request.headers.get("Host") not in (f"{HOST}:{self._port}", f"localhost:{self._port}"):
            return _rejection(HTTPStatus.FORBIDDEN, "the request names another host")
        if not _is_own(request, self._port):
            return _rejection(HTTPStatus.FORBIDDEN, "the connection belongs to another account")
        is_link = hmac.compare_digest(path.encode(), f"/{self._token}".encode())
        if is_link and not self._is_used:
            return self._exchange_token()
        if not hmac.compare_digest(request.cookies.get(self._cookie_name, "").encode(), self._cookie.encode()):
            return _rejection(HTTPStatus.FORBIDDEN, "the link was used already; run `forebay page` for a new one")
        if is_link:  # opened again in the same browser
            return web.Response(status=HTTPStatus.SEE_OTHER, headers={"Location": _PAGE})
        if not _is_from_here(request):
            return _rejection(HTTPStatus.FORBIDDEN, "the request comes from a page of another site")
        if path not in ("/", _PAGE, _EVENTS) and not path.startswith(f"{_PAGE}/"):
            return _rejection(HTTPStatus.NOT_FOUND, f"only {_PAGE} is available here")
        return await self._forward(request)

    def _exchange_token(self) -> web.Response:
        self._is_used = True
        response = web.Response(
            status=HTTPStatus.SEE_OTHER, headers={"Location": _PAGE, "Referrer-Policy": "no-referrer"}
        )
        # Lax: the link may be opened from another site's page, such as a terminal in a browser.
        response.set_cookie(self._cookie_name, self._cookie, httponly=True, samesite="Lax", path="/")
        return response

    @property
    def _cookie_name(self) -> str:
        # Cookies of one host are shared by its ports.
        return f"forebay-page-{self._port}"

    async def _forward(self, request: web.BaseRequest) -> web.StreamResponse:
        """Return the response of the leader, or of the first replica that has one."""
        tried: set[Address] = set()
        redirects, trouble = 0, "no replica is configured"
        address = self._endpoints.next_after(tried)
        while address is not None:
            tried.add(address)
            found = await self._ask(request, address)
            if isinstance(found, web.StreamResponse):
                return found
            if isinstance(found, Address) and redirects < REDIRECTS_MAX:
                redirects += 1
                address = found
                continue
            trouble = str(found)
            self._endpoints.demote(address)
            address = self._endpoints.next_after(tried)
        return _rejection(HTTPStatus.BAD_GATEWAY, f"no replica is reachable: {trouble}")

    async def _ask(self, request: web.BaseRequest, address: Address) -> web.StreamResponse | Address | str:
        """Return a replica's response, a redirect's target, or the reason there is neither."""
        headers = {name: value for name in _PASSED_ON if (value := request.headers.get(name)) is not None}
        begun: web.StreamResponse | None = None
        try:
            async with asyncio.timeout(ANSWER_S) as limit:
                async with self._relay.relay(
                    address, "GET", request.raw_path, headers, None, connect_s=CONNECT_S
                ) as found:
                    limit.reschedule(None)
                    if ATTEMPT_HEADER in found.headers:
                        return f"the gateway cannot reach {address}"
                    if found.status in REDIRECT_STATUSES:
                        return redirection(address, found.headers.get("Location"))
                    begun = web.StreamResponse(
                        status=found.status,
                        headers={
                            name: value for name in _PASSED_BACK if (value := found.headers.get(name)) is not None
                        },
                    )
                    if found.content_length is not None:
                        begun.content_length = found.content_length
                    await begun.prepare(request)
                    async for part in found.content.iter_any():
                        await begun.write(part)
                    await begun.write_eof()
                    return begun
        except (AttemptError, TimeoutError, ValueError, ConnectionError) as error:
            if begun is None:
                return str(error) or f"{address} did not answer within {ANSWER_S:g} s"
            # The browser sees the response end early, and asks again.
            begun.force_close()
            if request.transport is not None:
                request.transport.abort()
            return begun


def _rejection(status: HTTPStatus, sentence: str) -> web.Response:
    headers = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
    return web.Response(status=status, text=f"{sentence}\n", headers=headers)


def _is_from_here(request: web.BaseRequest) -> bool:
    """Return False for a request that a page of another site makes; such a page may still link to this one."""
    headers = request.headers
    is_link = (headers.get("Sec-Fetch-Mode"), headers.get("Sec-Fetch-Dest")) == ("navigate", "document")
    return headers.get("Sec-Fetch-Site", "none") in ("same-origin", "none") or is_link


def _is_own(request: web.BaseRequest, port: int) -> bool:
    """Return True if a process of this account, or of root, has the other end of the connection.

    Where the kernel has no table of connections, the link's secret alone decides.
    """
    peer = None if request.transport is None else request.transport.get_extra_info("peername")
    if peer is None:
        return False
    try:
        rows = _CONNECTIONS.read_text().splitlines()[1:]
    except OSError:
        return True
    ours, theirs = _in_kernel(HOST, port), _in_kernel(peer[0], peer[1])
    for row in rows:
        local, remote, state, uid = (fields := row.split())[1], fields[2], fields[3], fields[7]
        if (local, remote, state) == (theirs, ours, _ESTABLISHED):
            return int(uid) in (0, os.geteuid())
    return False


def _in_kernel(host: str, port: int) -> str:
    """Format an IPv4 address as in the kernel's table."""
    # The address is printed as a number in the machine's byte order, which is little-endian on all supported machines.
    return f"{bytes(reversed([int(part) for part in host.split('.')])).hex().upper()}:{port:04X}"
