"""Parser of server-sent events as in the HTML standard, with bounds on every size.

Source: the HTML living standard, 9.2.6 "Interpreting an event stream". Pure: no input or output here.
"""

from typing import Final

import msgspec

LINE_BYTES_MAX: Final = 2 * 1024 * 1024
"""Longest line, bytes: a batch is under 1 MiB, and JSON may double it."""

EVENT_BYTES_MAX: Final = 4 * 1024 * 1024
"""Largest event, bytes: all its lines together."""

_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"


class StreamBroken(Exception):
    """The stream is invalid or exceeds a bound; the message gives the reason."""


class ServerSentEvent(msgspec.Struct, frozen=True):
    """Event. `id` is the last ID of the stream, even if this event had none."""

    event: str
    data: str
    id: str


class SseParser:
    """Turns chunks into events; a chunk may end anywhere, even within a character or between CR and LF."""

    def __init__(self) -> None:
        self._pending = bytearray()
        self._at_start = True
        self._skip_line_feed = False
        self._event = ""
        self._data: list[str] = []
        self._size_bytes = 0
        self._id = ""
        self.retry_ms: int | None = None
        """Last reconnection delay requested by the stream, milliseconds."""

    def feed(self, chunk: bytes) -> list[ServerSentEvent]:
        """Return the events completed by this chunk.

        Raises:
            StreamBroken: A bound is exceeded, or the data is not UTF-8.
        """
        self._pending += chunk
        if self._at_start:
            if len(self._pending) < len(_BYTE_ORDER_MARK) and _BYTE_ORDER_MARK.startswith(self._pending):
                return []
            if self._pending.startswith(_BYTE_ORDER_MARK):
                del self._pending[: len(_BYTE_ORDER_MARK)]
            self._at_start = False
        events: list[ServerSentEvent] = []
        start = 0
        data = bytes(self._pending)
        while start < len(data):
            if self._skip_line_feed:
                # The LF of a CR LF; the line ended at the CR.
                self._skip_line_feed = False
                if data[start : start + 1] == b"\n":
                    start += 1
                    continue
            end = _line_end(data, start)
            if end < 0:
                break
            self._skip_line_feed = data[end : end + 1] == b"\r"
            event = self._line(data[start:end])
            if event is not None:
                events.append(event)
            start = end + 1
        self._pending = bytearray(data[start:])
        if len(self._pending) > LINE_BYTES_MAX:
            raise StreamBroken(f"a line of the event stream has more than {LINE_BYTES_MAX} bytes")
        return events

    def _line(self, line: bytes) -> ServerSentEvent | None:
        if not line:
            return self._dispatch()
        if len(line) > LINE_BYTES_MAX:
            raise StreamBroken(f"a line of the event stream has more than {LINE_BYTES_MAX} bytes")
        self._size_bytes += len(line)
        if self._size_bytes > EVENT_BYTES_MAX:
            raise StreamBroken(f"an event of the stream has more than {EVENT_BYTES_MAX} bytes")
        if line.startswith(b":"):
            self._size_bytes -= len(line)
            return None
        try:
            field, _, value = line.decode("utf-8").partition(":")
        except UnicodeDecodeError as error:
            raise StreamBroken("the event stream is not UTF-8") from error
        value = value.removeprefix(" ")
        if field == "event":
            self._event = value
        elif field == "data":
            self._data.append(value)
        elif field == "id" and "\x00" not in value:
            self._id = value
        elif field == "retry" and value.isascii() and value.isdigit() and len(value) <= 9:
            self.retry_ms = int(value)
        return None

    def _dispatch(self) -> ServerSentEvent | None:
        event = ServerSentEvent(self._event or "message", "\n".join(self._data), self._id) if self._data else None
        self._event, self._data, self._size_bytes = "", [], 0
        return event


def _line_end(data: bytes, start: int) -> int:
    line_feed, carriage_return = data.find(b"\n", start), data.find(b"\r", start)
    if line_feed < 0 or carriage_return < 0:
        return max(line_feed, carriage_return)
    return min(line_feed, carriage_return)
