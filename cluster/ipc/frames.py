"""Frames between a replica's processes: MessagePack with a length prefix.

Both ends are of one release, because a process starts its children from its own tree. A kind of frame is a msgspec
struct with a tag.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

import msgspec

from forebay.cluster.schemas import LENGTH, FrameSplitter

Sent = TypeVar("Sent", contravariant=True)
Received = TypeVar("Received", covariant=True)

INVALID: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Errors of decoding a frame."""

_encoder: Final = msgspec.msgpack.Encoder()


class FrameCodec(Generic[Sent, Received]):
    """Codec of one end: encodes frames to send, and decodes received frames."""

    def __init__(self, received: Any, *, bytes_max: int) -> None:
        """`received`: union of the frame kinds that arrive; `bytes_max`: largest frame, bytes."""
        self.bytes_max: Final = bytes_max
        self.decode: Final[Callable[[bytes], Received]] = msgspec.msgpack.Decoder(received).decode

    def encode(self, frame: Sent) -> bytes:
        """Encode a frame with its length prefix.

        Raises:
            ValueError: The frame is larger than the other end accepts.
        """
        body: bytes = _encoder.encode(frame)
        if len(body) > self.bytes_max:
            raise ValueError(f"the frame has {len(body)} bytes; at most {self.bytes_max} are sent")
        return bytes(LENGTH.pack(len(body)) + body)

    def splitter(self) -> FrameSplitter:
        """Return a splitter of arriving bytes into frame bodies."""
        return FrameSplitter(self.bytes_max)
