"""Strict, bounded parser of HTTP/1.1 responses, for connections with and without an event loop.

Importing `http.client` and its mail parser would take longer than a command. This module reads a status, headers, and a
body delimited by its length, chunks or the end of the connection (RFC 9112, 6 and 7).

Its functions are coroutines, and wait only in `ResponseReader.receive`. Over a blocking socket they never wait for a
loop.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import msgspec

from forebay.cluster.client.attempt import (
    ANSWER_BYTES_MAX,
    CHUNK_BYTES,
    HttpResponse,
    broken,
    client_refused,
    is_alert,
    no_answer,
    too_large,
)
from forebay.cluster.system import Address, Clock

if TYPE_CHECKING:
    import socket

    from forebay.cluster.security import TlsFiles

HEAD_BYTES_MAX: Final = 64 * 1024
"""Size of the status line and headers, or of one chunk line, bytes; a replica's have some two hundred."""


EVENT_STREAM: Final = "text/event-stream"


class MalformedResponse(Exception):
    """The response is not valid HTTP."""


@contextmanager
def request_failures(address: Address, timeout_s: float, tls: TlsFiles | None) -> Iterator[None]:
    """Convert every failure of a request on an open connection into an AttemptError; `tls` is None without TLS."""
    try:
        yield
    except TimeoutError as error:
        raise no_answer(address, timeout_s) from error
    except (OSError, MalformedResponse, msgspec.MsgspecError) as error:
        if tls is not None:
            import ssl

            if isinstance(error, ssl.SSLError) and is_alert(error):
                raise client_refused(address, error, tls) from error
        raise broken(address, error, tls) from error


class ResponseReader:
    """Buffered input of a connection; each transport implements `receive`."""

    def __init__(self) -> None:
        self._rest = b""

    async def receive(self) -> bytes:
        """Return the next bytes of the connection, or nothing at its end.

        Raises:
            TimeoutError: None arrived in time.
        """
        raise NotImplementedError

    async def line(self) -> bytes:
        """Return the next line without its end.

        Raises:
            MalformedResponse: The line exceeds HEAD_BYTES_MAX, or never ends.
        """
        while b"\n" not in self._rest:
            if len(self._rest) > HEAD_BYTES_MAX or not await self._more():
                raise MalformedResponse("the answer is not HTTP")
        line, _, self._rest = self._rest.partition(b"\n")
        return line.rstrip(b"\r")

    async def read_some(self) -> bytes:
        """Return at least one byte, or nothing at the end of the connection."""
        if not self._rest:
            await self._more()
        data, self._rest = self._rest, b""
        return data

    def put_back(self, data: bytes) -> None:
        """Push data back for the next read."""
        self._rest = data + self._rest

    async def _more(self) -> bool:
        data = await self.receive()
        self._rest += data
        return bool(data)


class SocketReader(ResponseReader):
    """Input of a blocking socket. Reads and writes raise TimeoutError after `until_s`.

    With `idle_s`, each read has that many seconds instead.
    """

    def __init__(self, connection: socket.socket, clock: Clock, until_s: float, idle_s: float | None = None) -> None:
        super().__init__()
        self._connection = connection
        self._clock = clock
        self._until_s = until_s
        self._idle_s = idle_s

    def send(self, data: bytes) -> None:
        """Send all data."""
        self._limit()
        self._connection.sendall(data)

    async def receive(self) -> bytes:
        """Return the next bytes of the socket."""
        if self._idle_s is not None:
            self._until_s = self._clock.monotonic_s() + self._idle_s
        self._limit()
        return self._connection.recv(CHUNK_BYTES)

    def _limit(self) -> None:
        left_s = self._until_s - self._clock.monotonic_s()
        if left_s <= 0:
            raise TimeoutError
        self._connection.settimeout(left_s)


def request_of(
    address: Address,
    method: str,
    target: str,
    body: bytes | None,
    more: tuple[str, ...] = (),
    accept: str = "application/json",
) -> bytes:
    """Return a request to the replica at `address`; `more` are additional header lines."""
    lines = [f"{method} {target} HTTP/1.1", f"Host: {address}", f"Accept: {accept}", *more]
    if body is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join(lines).encode("ascii") + b"\r\n\r\n" + (body or b"")


async def read_response(reader: ResponseReader, address: Address) -> tuple[HttpResponse, dict[str, str], bool]:
    """Return a response, its headers, and whether its connection can be reused."""
    status, headers = await _read_last_head(reader)
    body, delimited = await _read_body(reader, status, headers, address)
    is_open = delimited and headers.get("connection", "").lower() != "close"
    return _response(status, headers, body), headers, is_open


async def begin_stream(
    reader: ResponseReader,
    address: Address,
    check: Callable[[HttpResponse, Mapping[str, str]], HttpResponse] = lambda answer, _: answer,
) -> tuple[HttpResponse, AsyncIterator[bytes]]:
    """Return an endless response without its body, and its parts as they arrive.

    A status other than 200 has a body and no parts. `check` may raise or replace the response.
    """
    status, headers = await _read_last_head(reader)
    body = b"" if status == 200 else (await _read_body(reader, status, headers, address))[0]
    return check(_response(status, headers, body), headers), _read_stream(reader, headers)


def _response(status: int, headers: Mapping[str, str], body: bytes) -> HttpResponse:
    return HttpResponse(status, body, headers.get("location"), headers.get("retry-after"))


async def _read_last_head(reader: ResponseReader) -> tuple[int, dict[str, str]]:
    """Return the status and headers of a response; interim responses are skipped."""
    status = 100
    headers: dict[str, str] = {}
    while 100 <= status < 200:
        status, headers = await _read_head(reader)
    return status, headers


async def _read_body(
    reader: ResponseReader, status: int, headers: Mapping[str, str], address: Address
) -> tuple[bytes, bool]:
    """Return a body, and whether the connection can carry another response after it."""
    if status in (204, 304):
        return b"", True
    if "transfer-encoding" in headers:
        _check_encoding(headers)
        return await _read_chunks(reader, address), True
    if "content-length" in headers:
        length = headers["content-length"]
        if not length.isascii() or not length.isdigit() or len(length) > 18:
            raise MalformedResponse("the length of the answer is not a number")
        return await _read_exactly(reader, int(length), address), True
    return await _read_to_end(reader, address), False


async def _read_stream(reader: ResponseReader, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
    """Yield the parts of a body of any length as they arrive."""
    if "transfer-encoding" not in headers:
        while data := await reader.read_some():
            yield data
        return
    _check_encoding(headers)
    while left := await _chunk_size(reader):
        while left:
            data = await _read_part(reader, left)
            left -= len(data)
            yield data
        await _end_chunk(reader)


def _check_encoding(headers: Mapping[str, str]) -> None:
    if headers["transfer-encoding"].lower() != "chunked":
        raise MalformedResponse("the answer has an encoding that was not requested")


async def _read_head(reader: ResponseReader) -> tuple[int, dict[str, str]]:
    version, _, rest = (await reader.line()).partition(b" ")
    code = rest[:3]
    if (
        version not in (b"HTTP/1.0", b"HTTP/1.1")
        or not code.isdigit()
        or len(code) != 3
        or rest[3:4] not in (b"", b" ")
    ):
        raise MalformedResponse("the answer is not HTTP")
    headers: dict[str, str] = {"connection": "close"} if version == b"HTTP/1.0" else {}
    size_bytes = 0
    while line := await reader.line():
        size_bytes += len(line)
        if size_bytes > HEAD_BYTES_MAX:
            raise MalformedResponse("the answer has too many headers")
        name, colon, value = line.partition(b":")
        if not colon or name != name.strip():
            raise MalformedResponse("the answer is not HTTP")
        key = name.decode("latin-1").lower()
        text = value.strip().decode("latin-1")
        if key in ("content-length", "transfer-encoding") and headers.get(key, text) != text:
            raise MalformedResponse("the answer gives its length twice")
        headers[key] = text
    return int(code), headers


async def _read_exactly(reader: ResponseReader, size_bytes: int, address: Address) -> bytes:
    if size_bytes > ANSWER_BYTES_MAX:
        raise too_large(address, ANSWER_BYTES_MAX)
    parts: list[bytes] = []
    left = size_bytes
    while left:
        parts.append(await _read_part(reader, left))
        left -= len(parts[-1])
    return b"".join(parts)


async def _read_part(reader: ResponseReader, bytes_max: int) -> bytes:
    data = await reader.read_some()
    if not data:
        raise MalformedResponse("the answer ends before its length")
    if len(data) > bytes_max:
        reader.put_back(data[bytes_max:])
    return data[:bytes_max]


async def _chunk_size(reader: ResponseReader) -> int:
    digits = (await reader.line()).partition(b";")[0].strip()
    try:
        size_bytes = int(digits, 16) if digits.isalnum() and len(digits) <= 16 else -1
    except ValueError:
        size_bytes = -1
    if size_bytes < 0:
        raise MalformedResponse("the answer has a chunk without a length")
    return size_bytes


async def _end_chunk(reader: ResponseReader) -> None:
    if await reader.line():
        raise MalformedResponse("a chunk is longer than its stated length")


async def _read_chunks(reader: ResponseReader, address: Address) -> bytes:
    parts: list[bytes] = []
    total = 0
    while size_bytes := await _chunk_size(reader):
        total += size_bytes
        if total > ANSWER_BYTES_MAX:
            raise too_large(address, ANSWER_BYTES_MAX)
        parts.append(await _read_exactly(reader, size_bytes, address))
        await _end_chunk(reader)
    for _ in range(HEAD_BYTES_MAX):
        if not await reader.line():
            return b"".join(parts)
    raise MalformedResponse("the answer has too many headers")


async def _read_to_end(reader: ResponseReader, address: Address) -> bytes:
    parts: list[bytes] = []
    size_bytes = 0
    while data := await reader.read_some():
        size_bytes += len(data)
        if size_bytes > ANSWER_BYTES_MAX:
            raise too_large(address, ANSWER_BYTES_MAX)
        parts.append(data)
    return b"".join(parts)
