"""Strict, bounded parser of HTTP/1.1 responses for requests without an event loop.

Importing `http.client` and its mail parser would take longer than a command. This module reads a status, headers, and a
body delimited by its length, chunks or the end of the connection (RFC 9112, 6 and 7).
"""

from __future__ import annotations

import socket
from typing import Final

from forebay.cluster.client.attempt import ANSWER_BYTES_MAX, CHUNK_BYTES, HttpResponse, too_large
from forebay.cluster.system import Address, Clock

HEAD_BYTES_MAX: Final = 64 * 1024
"""Size of the status line and headers, or of one chunk line, bytes; a replica's have some two hundred."""


class MalformedResponse(Exception):
    """The response is not valid HTTP."""


class ResponseReader:
    """Buffered input of a connection. Reads raise TimeoutError after `until_s`."""

    def __init__(self, connection: socket.socket, clock: Clock, until_s: float) -> None:
        self._connection = connection
        self._clock = clock
        self._until_s = until_s
        self._rest = b""

    def send(self, data: bytes) -> None:
        """Send all data."""
        self._limit()
        self._connection.sendall(data)

    def line(self) -> bytes:
        """Return the next line without its end.

        Raises:
            MalformedResponse: The line exceeds HEAD_BYTES_MAX, or never ends.
        """
        while b"\n" not in self._rest:
            if len(self._rest) > HEAD_BYTES_MAX or not self._more():
                raise MalformedResponse("the answer is not HTTP")
        line, _, self._rest = self._rest.partition(b"\n")
        return line.rstrip(b"\r")

    def read_some(self) -> bytes:
        """Return at least one byte, or nothing at the end of the connection."""
        if not self._rest:
            self._more()
        data, self._rest = self._rest, b""
        return data

    def put_back(self, data: bytes) -> None:
        """Push data back for the next read."""
        self._rest = data + self._rest

    def _more(self) -> bool:
        self._limit()
        data = self._connection.recv(CHUNK_BYTES)
        self._rest += data
        return bool(data)

    def _limit(self) -> None:
        left_s = self._until_s - self._clock.monotonic_s()
        if left_s <= 0:
            raise TimeoutError
        self._connection.settimeout(left_s)


def request_of(address: Address, method: str, target: str, body: bytes | None, more: tuple[str, ...] = ()) -> bytes:
    """Return a request to the replica at `address`; `more` are additional header lines."""
    lines = [f"{method} {target} HTTP/1.1", f"Host: {address}", "Accept: application/json", *more]
    if body is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join(lines).encode("ascii") + b"\r\n\r\n" + (body or b"")


def read_response(reader: ResponseReader, address: Address) -> tuple[HttpResponse, dict[str, str], bool]:
    """Return a response, its headers, and whether its connection can be reused."""
    status = 100
    headers: dict[str, str] = {}
    while 100 <= status < 200:
        status, headers = _read_head(reader)
    if status in (204, 304):
        body, delimited = b"", True
    elif "transfer-encoding" in headers:
        if headers["transfer-encoding"].lower() != "chunked":
            raise MalformedResponse("the answer has an encoding that was not requested")
        body, delimited = _read_chunks(reader, address), True
    elif "content-length" in headers:
        length = headers["content-length"]
        if not length.isascii() or not length.isdigit() or len(length) > 18:
            raise MalformedResponse("the length of the answer is not a number")
        body, delimited = _read_exactly(reader, int(length), address), True
    else:
        body, delimited = _read_to_end(reader, address), False
    answer = HttpResponse(status, body, headers.get("location"), headers.get("retry-after"))
    return answer, headers, delimited and headers.get("connection", "").lower() != "close"


def _read_head(reader: ResponseReader) -> tuple[int, dict[str, str]]:
    version, _, rest = reader.line().partition(b" ")
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
    while line := reader.line():
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


def _read_exactly(reader: ResponseReader, size_bytes: int, address: Address) -> bytes:
    if size_bytes > ANSWER_BYTES_MAX:
        raise too_large(address, ANSWER_BYTES_MAX)
    parts: list[bytes] = []
    left = size_bytes
    while left:
        data = reader.read_some()
        if not data:
            raise MalformedResponse("the answer ends before its length")
        parts.append(data[:left])
        reader.put_back(data[left:])
        left -= len(parts[-1])
    return b"".join(parts)


def _read_chunks(reader: ResponseReader, address: Address) -> bytes:
    parts: list[bytes] = []
    total = 0
    while True:
        digits = reader.line().partition(b";")[0].strip()
        try:
            size_bytes = int(digits, 16) if digits.isalnum() and len(digits) <= 16 else -1
        except ValueError:
            size_bytes = -1
        if size_bytes < 0:
            raise MalformedResponse("the answer has a chunk without a length")
        if not size_bytes:
            break
        total += size_bytes
        if total > ANSWER_BYTES_MAX:
            raise too_large(address, ANSWER_BYTES_MAX)
        parts.append(_read_exactly(reader, size_bytes, address))
        if reader.line():
            raise MalformedResponse("a chunk is longer than its stated length")
    for _ in range(HEAD_BYTES_MAX):
        if not reader.line():
            return b"".join(parts)
    raise MalformedResponse("the answer has too many headers")


def _read_to_end(reader: ResponseReader, address: Address) -> bytes:
    parts: list[bytes] = []
    size_bytes = 0
    while data := reader.read_some():
        size_bytes += len(data)
        if size_bytes > ANSWER_BYTES_MAX:
            raise too_large(address, ANSWER_BYTES_MAX)
        parts.append(data)
    return b"".join(parts)
