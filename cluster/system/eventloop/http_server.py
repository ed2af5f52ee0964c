"""HTTP server of every listener: connections are bounded in time, and malformed requests cost little.

aiohttp parses requests and sends answers; this module adds the limits that aiohttp lacks. A connection must finish the
head of a request in time, so that a slow client cannot hold the connection by sending a byte now and then. Malformed
requests are answered, and logged at most once a minute; aiohttp would log a traceback of kilobytes for each.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, Final, NamedTuple, cast

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

from forebay.cluster.system.log_rate_limiter import LogRateLimiter

_KINDS: Final = {
    BadHttpMethod: "its method is not valid",
    BadStatusLine: "its first line is not valid",
    InvalidURLError: "its target is not valid",
    InvalidHeader: "a header field is not valid",
    ContentLengthError: "its Content-Length is not valid",
}


class MalformedRequest(NamedTuple):
    """Reason why a request is malformed, and the status of the answer."""

    status: int
    sentence: str
    remedy: str


class HttpConnection(RequestHandler):
    """Connection of aiohttp that records the start of its idle time and the arrival of a request's head."""

    __slots__ = ("busy", "head_since_s", "rest_since_s")

    rest_s_max: ClassVar[float] = 75.0
    """Idle time before a connection is closed, seconds: long enough that clients close first."""
    head_s_max: ClassVar[float] = 10.0
    """Maximum time for the head of a request to arrive, seconds."""
    line_bytes_max: ClassVar[int] = 8190
    """Maximum length of the request line and of each header field, bytes."""
    headers_max: ClassVar[int] = 64
    """Maximum number of header fields of a request."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.busy = 0
        """Number of unanswered requests with a complete head."""
        self.head_since_s: float | None = None
        self.rest_since_s = asyncio.get_running_loop().time()

    def data_received(self, data: bytes) -> None:
        """Record when a request's head starts to arrive, and pass the data to aiohttp's parser."""
        if not self.busy and self.head_since_s is None:
            self.head_since_s = asyncio.get_running_loop().time()
        super().data_received(data)

    def begin(self) -> None:
        """Record that the head of a request is complete and its handler runs."""
        self.busy += 1
        self.head_since_s = None

    def end(self) -> None:
        """Record that a request is answered."""
        self.busy -= 1
        self.rest_since_s = asyncio.get_running_loop().time()

    def overdue(self, now_s: float) -> bool:
        """Return whether the connection has been idle, or has been sending a head, for too long."""
        if self.busy:
            return False
        is_slow = self.head_since_s is not None and now_s - self.head_since_s > self.head_s_max
        return is_slow or now_s - self.rest_since_s > self.rest_s_max

    def cut(self) -> None:
        """Abort the connection."""
        transport = self.transport
        self.force_close()
        if transport is not None:
            transport.abort()

    def peer(self) -> str:
        """Return the peer's address for log messages."""
        found = self.transport.get_extra_info("peername") if self.transport is not None else None
        return str(found[0]) if found else "a disconnected client"

    def problem_response(self, malformed: MalformedRequest) -> web.Response:
        """Return the answer to a malformed request: plain text unless a listener overrides it."""
        return web.Response(status=malformed.status, text=f"{malformed.sentence}; {malformed.remedy}\n")

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer a malformed request, and close the connection.

        Raises:
            ConnectionError: Part of another answer was already sent.
        """
        server = cast(HttpServer, self._manager)
        if isinstance(exc, HttpProcessingError):
            malformed = self._malformed(exc)
            server.log(logging.WARNING, f"a request of {self.peer()} is rejected: {malformed.sentence}", "malformed")
        else:
            server.log(logging.ERROR, f"a request of {self.peer()} failed outside of its handler", "fault", exc)
            malformed = MalformedRequest(
                status, "the request failed because of a fault in this release", "report it with this service's log"
            )
        if request.writer.output_size > 0:
            raise ConnectionError("part of another answer was already sent")
        response = self.problem_response(malformed)
        response.force_close()
        return response

    def log_exception(self, *arguments: Any, **options: Any) -> None:
        """Log a fault that aiohttp found while serving the connection."""
        server = cast("HttpServer | None", self._manager)
        if server is not None:
            server.log(logging.ERROR, f"a connection of {self.peer()} failed", "fault", options.get("exc_info"))

    def _malformed(self, error: HttpProcessingError) -> MalformedRequest:
        if isinstance(error, LineTooLong):
            sentence = f"the request line or a header field has more than {self.line_bytes_max} bytes"
            return MalformedRequest(431, sentence, "shorten the request, or put long values into the body")
        kind = _KINDS.get(type(error), "its header is not valid")
        return MalformedRequest(400, f"this is not an HTTP/1.1 request ({kind})", "use an HTTP client")


class HttpServer(web.Server):
    """Low-level server of aiohttp with connections of a subclass of HttpConnection."""

    connection_type: ClassVar[type[HttpConnection]] = HttpConnection

    def __init__(
        self,
        handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
        logger: logging.Logger,
        **options: Any,
    ) -> None:
        """Serve requests by `handler`; `options` are aiohttp's, in addition to the connection's limits."""
        kind = self.connection_type
        super().__init__(
            handler,
            access_log=None,
            keepalive_timeout=kind.rest_s_max,
            max_line_size=kind.line_bytes_max,
            max_field_size=kind.line_bytes_max,
            max_headers=kind.headers_max,
            # A body is passed on unchanged, so that its length equals the announced length.
            auto_decompress=False,
            logger=logger,
            **options,
        )
        self._logger = logger
        self._limiter = LogRateLimiter(asyncio.get_running_loop().time)

    def __call__(self) -> RequestHandler:
        """Create the protocol of a new connection."""
        return self.connection_type(self, loop=self._loop, **self._kwargs)

    def log(self, level: int, sentence: str, kind: str, fault: BaseException | None = None) -> None:
        """Log a message that clients can cause at will, at most one of its kind a minute."""
        self._limiter.log(self._logger, level, sentence, kind, fault)

    def sweep(self) -> int:
        """Abort overdue connections; return their number."""
        now_s = asyncio.get_running_loop().time()
        overdue = [one for one in self.connections if isinstance(one, HttpConnection) and one.overdue(now_s)]
        for one in overdue:
            one.cut()
        return len(overdue)
