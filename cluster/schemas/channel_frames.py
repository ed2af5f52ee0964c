"""What programs and replicas say on the channel: MessagePack frames with a length before each, as between replicas.

A frame is four bytes of length (big endian) and an array that begins with its kind. Kinds are for ever: append-only,
never reused (law 12). The first frame of each side is its greeting, with the version and the cluster's id; after that
a program sends commands, as many as it likes before the first answer, and a replica answers each with the program's own
number, in whatever order they are settled.
"""

import struct
from collections.abc import Iterator
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

CHANNEL_VERSION: Final = 1

FRAME_BYTES_MAX: Final = 512 * 1024
"""Bytes of one frame: one command with a script and an environment of the largest size."""

ANSWER_BYTES_MAX: Final = 64 * 1024
"""Bytes of one answer: numbers, or a sentence with its remedy."""

OUTSTANDING_MAX: Final = 1024
"""Commands of one connection that wait for their answers, count: a whole batch. A replica reads no further meanwhile,
so whoever sends more waits in its own socket."""

LENGTH: Final = struct.Struct(">I")

NOT_LEADER: Final = "not_leader"
"""The code of an answer that says where to send the command instead."""

Number = Annotated[int, Meta(ge=0, le=1 << 53)]


class ChannelProtocolError(Exception):
    """The other side sent what is not a frame of this cluster; the connection is closed. The message says why."""


class HelloFrame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=1):
    """The first frame of either side."""

    version: int
    cluster: Annotated[str, Meta(max_length=64)]


class CommandFrame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=2):
    """A command: one of `cluster.schemas.requests.BulkCommand`, as in POST /v1/commands."""

    number: Number
    command: msgspec.Raw


class SuccessFrame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=3):
    """The command was carried out and is durable. `job`: the one it made or concerned, 0 for none."""

    number: Number
    revision: int
    job: int


class FailureFrame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=4):
    """The command was not carried out, or nobody here knows: the same words as the API's errors.

    `status` is the API's; 307 says that another replica leads, `leader` where its channel is, if that is known.
    """

    number: Number
    status: int
    code: str
    sentence: str
    remedy: str
    place: str
    outcome: Literal["refused", "unknown"]
    leader: str = ""


_encoder: Final = msgspec.msgpack.Encoder()
encode_body: Final = _encoder.encode
decode_from_client: Final = msgspec.msgpack.Decoder(HelloFrame | CommandFrame).decode
decode_from_replica: Final = msgspec.msgpack.Decoder(HelloFrame | SuccessFrame | FailureFrame).decode


def encode_frame(message: HelloFrame | CommandFrame | SuccessFrame | FailureFrame) -> bytes:
    """Return the message with its length before it; ValueError for one that no other side would take."""
    body = _encoder.encode(message)
    if len(body) > FRAME_BYTES_MAX:
        raise ValueError(f"the frame has {len(body)} bytes; at most {FRAME_BYTES_MAX} are sent")
    return LENGTH.pack(len(body)) + body


def check_hello(hello: HelloFrame, cluster_id: str) -> None:
    """Refuse a greeting of another version or cluster; ChannelProtocolError."""
    if hello.version != CHANNEL_VERSION:
        raise ChannelProtocolError(
            f"the other side speaks version {hello.version}; this release speaks {CHANNEL_VERSION}"
        )
    if hello.cluster != cluster_id:
        raise ChannelProtocolError(f"the other side is of cluster {hello.cluster!r}; this is cluster {cluster_id!r}")


class FrameSplitter:
    """Cuts a stream of bytes into the bodies of frames, and holds at most one unfinished frame and one read."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._parts: list[bytes] = []
        """What has come of the frame that is not complete."""
        self._size = 0
        self._needed = 0
        """Bytes without which nothing more is complete: those of its length, or all of it."""

    @property
    def is_between(self) -> bool:
        """Whether no frame has begun that is not complete."""
        return not self._size

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the body of each frame that is complete with `data`; ChannelProtocolError for one that is too long."""
        self._parts.append(data)
        self._size += len(data)
        if self._size < self._needed:
            return
        buffer = data if len(self._parts) == 1 else b"".join(self._parts)
        start, size = 0, len(buffer)
        self._needed = LENGTH.size
        while size - start >= LENGTH.size:
            (length,) = LENGTH.unpack_from(buffer, start)
            if length > self._bytes_max:
                raise ChannelProtocolError(f"a frame of {length} bytes is announced; the bound is {self._bytes_max}")
            end = start + LENGTH.size + length
            if end > size:
                self._needed = end - start
                break
            yield buffer[start + LENGTH.size : end]
            start = end
        self._parts = [buffer[start:]] if start < size else []
        self._size = size - start
