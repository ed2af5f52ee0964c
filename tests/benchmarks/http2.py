"""As much of HTTP/2 and gRPC as unary calls to etcd need, so that its client costs no more than Forebay's channel.

Requests of one turn of the loop leave in one TLS record, header fields that
repeat are sent as references to HPACK's table, and an answer is taken for a success if it carries a message: gRPC sends
none with an error.
"""

import asyncio
import ssl
import struct
from collections import deque
from typing import Final, cast

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, END_HEADERS, ACK = 1, 4, 1

WINDOW_BYTES: Final = (1 << 31) - 1
"""What the server may send without asking again, bytes: more than all answers of the longest run together."""

WINDOW_BYTES_DEFAULT: Final = 65_535
"""What a side may send before it has heard of another window (RFC 9113, 6.9.2)."""

_HEAD: Final = struct.Struct(">IBI")
"""Length and type in one word of 24 + 8 bits, flags, stream."""


class CallFailed(Exception):
    """A call ended without a message, or its connection did."""


class GrpcConnection(asyncio.Protocol):
    """One connection, over which any number of unary calls to one method are under way at once."""

    def __init__(self, authority: str, method: str) -> None:
        self._authority = authority
        self._method = method
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._out: list[bytes] = []
        self._waiting: deque[bytes] = deque()
        self._answers: dict[int, asyncio.Future[bytes]] = {}
        self._messages: dict[int, bytes] = {}
        self._stream = 1
        self._window = WINDOW_BYTES_DEFAULT
        self._flush_soon = False
        self._repeated = b""

    @classmethod
    async def open(cls, host: str, port: int, tls: ssl.SSLContext, method: str) -> "GrpcConnection":
        """Connect; `method` is such as `/etcdserverpb.KV/Put`."""
        tls.set_alpn_protocols(["h2"])
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: cls(f"{host}:{port}", method), host, port, ssl=tls, server_hostname=host
        )
        return connection

    def close(self) -> None:
        """End the connection."""
        if self._transport is not None:
            self._transport.abort()

    def call(self, message: bytes) -> asyncio.Future[bytes]:
        """Send one message and return the future of the answer's; CallFailed if there is none."""
        stream, self._stream = self._stream, self._stream + 2
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._answers[stream] = answer
        if self._transport is None or self._transport.is_closing():
            answer.set_exception(CallFailed("the connection is closed"))
            return answer
        block = self._repeated or self._first_block()
        body = b"\0" + len(message).to_bytes(4, "big") + message
        frames = (
            _HEAD.pack(len(block) << 8 | HEADERS, END_HEADERS, stream)
            + block
            + _HEAD.pack(len(body) << 8 | DATA, END_STREAM, stream)
            + body
        )
        if self._waiting or len(body) > self._window:
            # Header blocks and streams must leave in order.
            self._waiting.append(frames)
        else:
            self._window -= len(body)
            self._send(frames)
        return answer

    def _first_block(self) -> bytes:
        """Return the header fields, of which HPACK's table keeps the last four, and remember how to refer to them."""
        fields = ((4, self._method), (1, self._authority), (31, "application/grpc"))
        block = b"\x83\x87" + b"".join(
            # A literal with incremental indexing whose name is in the static table (RFC 7541, 6.2.1).
            bytes([0x40 | index]) + bytes([len(text)]) + text.encode()
            for index, text in fields
        )
        block += b"\x40\x02te\x08trailers"
        self._repeated = b"\x83\x87\xc1\xc0\xbf\xbe"
        return block

    def _send(self, data: bytes) -> None:
        self._out.append(data)
        if not self._flush_soon:
            self._flush_soon = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_soon = False
        out, self._out = self._out, []
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(out))

    # What asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Greet."""
        self._transport = transport = cast(asyncio.Transport, transport)
        settings = struct.pack(">HI", 4, WINDOW_BYTES)  # SETTINGS_INITIAL_WINDOW_SIZE
        more = (WINDOW_BYTES - WINDOW_BYTES_DEFAULT).to_bytes(4, "big")
        transport.write(
            PREFACE
            + _HEAD.pack(len(settings) << 8 | SETTINGS, 0, 0)
            + settings
            + _HEAD.pack(4 << 8 | WINDOW_UPDATE, 0, 0)
            + more
        )

    def data_received(self, data: bytes) -> None:
        """Take the frames that are complete."""
        buffer = self._buffer
        buffer += data
        start, size = 0, len(buffer)
        while size - start >= 9:
            word, flags, stream = _HEAD.unpack_from(buffer, start)
            end = start + 9 + (word >> 8)
            if end > size:
                break
            kind = word & 0xFF
            if kind == DATA:
                self._messages[stream] = self._messages.get(stream, b"") + bytes(buffer[start + 9 : end])
            elif kind == HEADERS:
                pass
            else:
                self._control(kind, flags, stream, bytes(buffer[start + 9 : end]))
            if kind in (DATA, HEADERS) and flags & END_STREAM:
                self._end(stream)
            start = end
        del buffer[:start]

    def _end(self, stream: int) -> None:
        answer, message = self._answers.pop(stream, None), self._messages.pop(stream, b"")
        if answer is None or answer.done():
            return
        if len(message) > 5:
            answer.set_result(message[5:])
        else:
            answer.set_exception(CallFailed("the call was answered with an error"))

    def _control(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == SETTINGS and not flags & ACK:
            self._send(_HEAD.pack(SETTINGS, ACK, 0))
        elif kind == PING and not flags & ACK:
            self._send(_HEAD.pack(8 << 8 | PING, ACK, 0) + payload)
        elif kind == WINDOW_UPDATE and stream == 0:
            self._window += int.from_bytes(payload, "big")
            while self._waiting and self._window >= len(self._waiting[0]):
                frames = self._waiting.popleft()
                self._window -= len(frames)
                self._send(frames)
        elif kind == RST_STREAM:
            self._messages.pop(stream, None)
            self._end(stream)
        elif kind == GOAWAY and self._transport is not None:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail what is under way."""
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(CallFailed(f"the connection was lost: {exc}"))
        self._answers.clear()


def put_request(key: bytes, value: bytes) -> bytes:
    """Return etcd's PutRequest as Protocol Buffers write it."""
    return b"\x0a" + _varint(len(key)) + key + b"\x12" + _varint(len(value)) + value


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)
