"""Connection between two processes of a replica, for an event loop."""

from __future__ import annotations

import asyncio
import logging
from typing import Final, Generic, TypeVar, cast

from forebay.cluster.ipc.frames import INVALID, FrameCodec
from forebay.cluster.schemas import ChannelProtocolError
from forebay.cluster.system.eventloop import ReadingProtocol, read_buffer

Sent = TypeVar("Sent")
Received = TypeVar("Received")

LOGGER = logging.getLogger(__name__)

UNSENT_BYTES_MAX: Final = 64 * 1024 * 1024
"""Maximum size of unsent frames, bytes. A process that reads too slowly is disconnected."""


class FrameConnection(ReadingProtocol, Generic[Sent, Received]):
    """Sends and receives frames. An invalid frame, or a peer that does not read, ends the connection."""

    def __init__(self, codec: FrameCodec[Sent, Received], peer: str) -> None:
        """`peer`: the other process, in log messages."""
        super().__init__(read_buffer())
        self._codec: Final = codec
        self._peer: Final = peer
        self._splitter: Final = codec.splitter()
        self._transport: asyncio.Transport | None = None
        self.room: Final = asyncio.Event()
        """Set while the send buffer is small, and after the end of the connection."""
        self.room.set()
        self.ended: Final = asyncio.Event()
        """Set when the connection has ended."""

    def connected(self) -> None:
        """Handle the beginning of the connection."""

    def receive(self, frame: Received) -> None:
        """Process a frame. Raise ChannelProtocolError for a frame that may not occur here."""
        raise NotImplementedError

    def disconnected(self) -> None:
        """Handle the end of the connection."""

    @property
    def is_open(self) -> bool:
        """Return whether frames can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    def send(self, frame: Sent) -> None:
        """Send a frame; frames of one turn of the loop are written in one call. No effect after the end.

        Raises:
            ValueError: The frame is too large.
        """
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        transport.write(self._codec.encode(frame))
        if transport.get_write_buffer_size() > UNSENT_BYTES_MAX:
            LOGGER.error("disconnecting %s, which does not read", self._peer)
            transport.abort()

    def close(self) -> None:
        """Close the connection once all frames are sent."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    # asyncio callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.connected()

    def data_received(self, data: bytes) -> None:
        if not self.is_open:
            return
        try:
            for body in self._splitter.feed(data):
                self.receive(self._codec.decode(body))
        except (ChannelProtocolError, *INVALID) as error:
            LOGGER.error("disconnecting %s, which sent an invalid frame: %s", self._peer, error)
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.room.set()
        self.ended.set()
        self.disconnected()

    def pause_writing(self) -> None:
        self.room.clear()

    def resume_writing(self) -> None:
        self.room.set()
