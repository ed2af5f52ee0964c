"""Requests one at a time, on a socket of the standard library: what a command that is typed needs, and no more.

An event loop, and a client for it, take longer to import than a command may last, and so do `http.client` and the
mail parser that it brings. So what an answer of HTTP/1.1 may be is read here, strictly and within bounds: a status, two
headers, and a body that its length, its chunks or the end of the connection delimits (RFC 9112, 6 and 7).

`send` is a coroutine that never waits for a loop: `finish` runs it, and whatever awaits nothing else, to its end.
"""

import socket
import ssl
import threading
from collections.abc import Coroutine
from typing import Any, Final, NamedTuple, TypeVar

from cluster.client.attempt import (
    ANSWER_BYTES_MAX,
    CHUNK_BYTES,
    CONNECT_SHARE_MAX,
    IDLE_CONNECTION_S,
    Answer,
    broken,
    client_refused,
    is_alert,
    no_answer,
    no_handshake,
    server_refused,
    too_large,
    unreachable,
)
from cluster.security import TlsFiles, context_of, valid_until
from cluster.system import Address, Clock

HEAD_BYTES_MAX: Final = 64 * 1024
"""Status line and headers of an answer, or one line of its chunks, bytes: a replica's have some two hundred."""

_T = TypeVar("_T")


def finish(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine that waits for nothing but a BlockingExchange to its end; RuntimeError for one that does."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: _T = end.value
        return result
    coroutine.close()
    raise RuntimeError("a call that is to finish without an event loop waits for one")


class _Connection(NamedTuple):
    socket: ssl.SSLSocket
    used_s: float
    """When it was used last, on the monotonic clock."""


class _Malformed(Exception):
    """An answer that is not HTTP."""


class BlockingExchange:
    """Connections to the replicas with one identity, each for one request after the other."""

    def __init__(self, tls: TlsFiles, clock: Clock) -> None:
        """Read certificate and key; TlsRefused if they cannot be used. Nothing is connected yet."""
        self._tls = tls
        self._clock = clock
        self._context = context_of(tls, clock.now())
        self._connections: dict[Address, _Connection] = {}

    async def send(
        self, address: Address, method: str, target: str, body: bytes | None, *, timeout_s: float, connect_s: float
    ) -> Answer:
        """Send one request and return the answer, whatever its status; AttemptFailed if there is none in time.

        `connect_s`: how long a new connection may take, TLS handshake included; an answer may take until `timeout_s`.
        """
        until_s = self._clock.monotonic_s() + timeout_s
        connection = self._kept(address)
        if connection is None:
            connection = self._connected(address, min(connect_s, CONNECT_SHARE_MAX * timeout_s))
        lines = [f"{method} {target} HTTP/1.1", f"Host: {address}", "Accept: application/json"]
        if body is not None:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        request = "\r\n".join(lines).encode("ascii") + b"\r\n\r\n" + (body or b"")
        reader = _Reader(connection, self._clock, until_s)
        try:
            reader.send(request)
            answer, is_open = _read_answer(reader, address)
            if is_open:
                self._connections[address] = _Connection(connection, self._clock.monotonic_s())
                connection = None
            return answer
        except TimeoutError as error:
            raise no_answer(address, timeout_s) from error
        except (OSError, _Malformed) as error:
            if isinstance(error, ssl.SSLError) and is_alert(error):
                raise client_refused(address, error, self._tls) from error
            raise broken(address, error, self._tls) from error
        finally:
            if connection is not None:
                connection.close()

    async def close(self) -> None:
        """Close all connections."""
        for connection in self._connections.values():
            connection.socket.close()
        self._connections.clear()

    def _kept(self, address: Address) -> ssl.SSLSocket | None:
        """Return a connection that an earlier request has left, unless it or its peer's certificate is too old."""
        kept = self._connections.pop(address, None)
        if kept is None:
            return None
        rested_s = self._clock.monotonic_s() - kept.used_s
        if rested_s < IDLE_CONNECTION_S and self._clock.now() <= valid_until(kept.socket.getpeercert() or {}):
            return kept.socket
        kept.socket.close()
        return None

    def _connected(self, address: Address, connect_s: float) -> ssl.SSLSocket:
        until_s = self._clock.monotonic_s() + connect_s
        # As bytes, since hosts are ASCII here (`Address`): text would go through a codec that is slow to import.
        host = address.host.encode("ascii")
        trouble: OSError = OSError("it has no address")
        try:
            found = _addresses(host, address.port, connect_s)
            for number, (family, kind, protocol, _, place) in enumerate(found, start=1):
                # Each address of a name has its share of the time: one that swallows everything hides no other.
                share_s = (until_s - self._clock.monotonic_s()) / (len(found) - number + 1)
                if share_s <= 0:
                    raise TimeoutError
                plain = socket.socket(family, kind, protocol)
                try:
                    plain.settimeout(share_s)
                    plain.connect(place)
                    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    return self._context.wrap_socket(plain, server_hostname=host, suppress_ragged_eofs=False)
                except ssl.SSLError:
                    plain.close()
                    raise
                except OSError as error:
                    plain.close()
                    trouble = error
        except TimeoutError as error:
            raise no_handshake(address, connect_s) from error
        except ssl.SSLCertVerificationError as error:
            raise server_refused(address, error, self._tls) from error
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:
            raise unreachable(address, error) from error
        except ssl.SSLError as error:
            raise client_refused(address, error, self._tls) from error
        except OSError as error:
            raise unreachable(address, error) from error
        if isinstance(trouble, TimeoutError):
            raise no_handshake(address, connect_s) from trouble
        raise unreachable(address, trouble) from trouble


def _addresses(host: bytes, port: int, wait_s: float) -> list[tuple[Any, ...]]:
    """Return what a host is called in sockets; OSError, and TimeoutError where the name service does not answer."""
    try:
        return list(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST))
    except socket.gaierror:
        pass
    answers: list[list[tuple[Any, ...]] | OSError] = []

    def look() -> None:
        try:
            answers.append(list(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)))
        except OSError as error:
            answers.append(error)

    # The resolver knows no deadline of ours.
    asking = threading.Thread(target=look, daemon=True)
    asking.start()
    asking.join(wait_s)
    if not answers:
        raise TimeoutError
    if isinstance(answers[0], OSError):
        raise answers[0]
    return answers[0]


class _Reader:
    """What has arrived on a connection and was not read yet; TimeoutError once `until_s` is over."""

    def __init__(self, connection: ssl.SSLSocket, clock: Clock, until_s: float) -> None:
        self._connection = connection
        self._clock = clock
        self._until_s = until_s
        self._rest = b""

    def send(self, data: bytes) -> None:
        """Send all of it."""
        self._limit()
        self._connection.sendall(data)

    def line(self) -> bytes:
        """Return the next line without its end; _Malformed where there is none within HEAD_BYTES_MAX."""
        while b"\n" not in self._rest:
            if len(self._rest) > HEAD_BYTES_MAX or not self._more():
                raise _Malformed("the answer is not HTTP")
        line, _, self._rest = self._rest.partition(b"\n")
        return line.rstrip(b"\r")

    def some(self) -> bytes:
        """Return what comes next, at least a byte; nothing at the end of the connection."""
        if not self._rest:
            self._more()
        data, self._rest = self._rest, b""
        return data

    def put_back(self, data: bytes) -> None:
        """Have it read again."""
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


def _read_answer(reader: _Reader, address: Address) -> tuple[Answer, bool]:
    """Return an answer, and whether another request may follow on its connection."""
    status = 100
    headers: dict[str, str] = {}
    while 100 <= status < 200:
        status, headers = _read_head(reader)
    if status in (204, 304):
        body, delimited = b"", True
    elif "transfer-encoding" in headers:
        if headers["transfer-encoding"].lower() != "chunked":
            raise _Malformed("the answer has an encoding that nobody asked for")
        body, delimited = _read_chunks(reader, address), True
    elif "content-length" in headers:
        length = headers["content-length"]
        if not length.isascii() or not length.isdigit() or len(length) > 18:
            raise _Malformed("the answer has a length that is no number")
        body, delimited = _read_exactly(reader, int(length), address), True
    else:
        body, delimited = _read_to_end(reader, address), False
    answer = Answer(status, body, headers.get("location"), headers.get("retry-after"))
    return answer, delimited and headers.get("connection", "").lower() != "close"


def _read_head(reader: _Reader) -> tuple[int, dict[str, str]]:
    version, _, rest = reader.line().partition(b" ")
    code = rest[:3]
    if (
        version not in (b"HTTP/1.0", b"HTTP/1.1")
        or not code.isdigit()
        or len(code) != 3
        or rest[3:4] not in (b"", b" ")
    ):
        raise _Malformed("the answer is not HTTP")
    headers: dict[str, str] = {"connection": "close"} if version == b"HTTP/1.0" else {}
    size_bytes = 0
    while line := reader.line():
        size_bytes += len(line)
        if size_bytes > HEAD_BYTES_MAX:
            raise _Malformed("the answer has too many headers")
        name, colon, value = line.partition(b":")
        if not colon or name != name.strip():
            raise _Malformed("the answer is not HTTP")
        key = name.decode("latin-1").lower()
        text = value.strip().decode("latin-1")
        if key in ("content-length", "transfer-encoding") and headers.get(key, text) != text:
            raise _Malformed("the answer says twice how long it is")
        headers[key] = text
    return int(code), headers


def _read_exactly(reader: _Reader, size_bytes: int, address: Address) -> bytes:
    if size_bytes > ANSWER_BYTES_MAX:
        raise too_large(address, ANSWER_BYTES_MAX)
    parts: list[bytes] = []
    left = size_bytes
    while left:
        data = reader.some()
        if not data:
            raise _Malformed("the answer ends before its length")
        parts.append(data[:left])
        reader.put_back(data[left:])
        left -= len(parts[-1])
    return b"".join(parts)


def _read_chunks(reader: _Reader, address: Address) -> bytes:
    parts: list[bytes] = []
    total = 0
    while True:
        digits = reader.line().partition(b";")[0].strip()
        try:
            size_bytes = int(digits, 16) if digits.isalnum() and len(digits) <= 16 else -1
        except ValueError:
            size_bytes = -1
        if size_bytes < 0:
            raise _Malformed("the answer has a chunk without a length")
        if not size_bytes:
            break
        total += size_bytes
        if total > ANSWER_BYTES_MAX:
            raise too_large(address, ANSWER_BYTES_MAX)
        parts.append(_read_exactly(reader, size_bytes, address))
        if reader.line():
            raise _Malformed("a chunk is longer than it says")
    for _ in range(HEAD_BYTES_MAX):
        if not reader.line():
            return b"".join(parts)
    raise _Malformed("the answer has too many headers")


def _read_to_end(reader: _Reader, address: Address) -> bytes:
    parts: list[bytes] = []
    size_bytes = 0
    while data := reader.some():
        size_bytes += len(data)
        if size_bytes > ANSWER_BYTES_MAX:
            raise too_large(address, ANSWER_BYTES_MAX)
        parts.append(data)
    return b"".join(parts)
