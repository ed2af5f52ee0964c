"""Frames of the channel between programs and replicas: length-prefixed MessagePack, as between replicas.

A frame is four bytes of length (big endian) and an array that begins with its kind. Kinds are append-only and never
reused (law 12). Each side first sends a greeting with the version and the cluster ID. The program then sends commands
without waiting for responses; the replica answers each under the program's number, in the order of settlement.
"""

import struct
from collections.abc import Iterator
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

CHANNEL_VERSION: Final = 1

FRAME_BYTES_MAX: Final = 512 * 1024
"""Size of one frame, bytes: one command with a script and an environment of the largest size."""

ANSWER_BYTES_MAX: Final = 64 * 1024
"""Size of one response, bytes: numbers, or an error sentence with its remedy."""

OUTSTANDING_MAX: Final = 1024
"""Unanswered commands of one connection, count: one batch. At the limit a replica stops reading, so the program blocks
on its own socket.
"""

LENGTH: Final = struct.Struct(">I")

NOT_LEADER: Final = "not_leader"
"""Error code of a response that names the leader's address."""

Number = Annotated[int, Meta(ge=0, le=1 << 53)]


class ChannelProtocolError(Exception):
    """The peer sent an invalid frame or belongs to another cluster; the connection is closed.

    The message gives the reason.
    """


class HelloFrame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=1):
    """First frame of either side."""

    version: int
    cluster: Annotated[str, Meta(max_length=64)]


class CommandFrame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=2):
    """Command: one of `cluster.schemas.requests.BulkCommand`, as in POST /v1/commands."""

    number: Number
    command: msgspec.Raw


class SuccessFrame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=3):
    """The command is durable. `job` is the job it created or changed, 0 for none."""

    number: Number
    revision: int
    job: int


class FailureFrame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=4):
    """The command failed, or its outcome is unknown; same fields as the API's errors.

    `status` is the HTTP status. With 307, `leader` is the address of the leader's channel, if known.
    """

    number: Number
    status: int
    code: str
    sentence: str
    remedy: str
    place: str
    outcome: Literal["rejected", "unknown"]
    leader: str = ""


_encoder: Final = msgspec.msgpack.Encoder()
encode_body: Final = _encoder.encode
decode_from_client: Final = msgspec.msgpack.Decoder(HelloFrame | CommandFrame).decode
decode_from_replica: Final = msgspec.msgpack.Decoder(HelloFrame | SuccessFrame | FailureFrame).decode


def encode_frame(message: HelloFrame | CommandFrame | SuccessFrame | FailureFrame) -> bytes:
    """Encode the message with its length prefix.

    Raises:
        ValueError: The frame exceeds the peer's limit.
    """
    body = _encoder.encode(message)
    if len(body) > FRAME_BYTES_MAX:
        raise ValueError(f"the frame has {len(body)} bytes; at most {FRAME_BYTES_MAX} are sent")
    return LENGTH.pack(len(body)) + body


def check_hello(hello: HelloFrame, cluster_id: str) -> None:
    """Check the version and cluster ID of a greeting.

    Raises:
        ChannelProtocolError: The greeting is of another version or cluster.
    """
    if hello.version != CHANNEL_VERSION:
        raise ChannelProtocolError(f"the other side uses version {hello.version}; this release uses {CHANNEL_VERSION}")
    if hello.cluster != cluster_id:
        raise ChannelProtocolError(
            f"the other side belongs to cluster {hello.cluster!r}; this is cluster {cluster_id!r}"
        )


class FrameSplitter:
    """Splits a byte stream into frame bodies. It buffers at most one unfinished frame and one read."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._parts: list[bytes] = []
        """Received parts of the unfinished frame."""
        self._size = 0
        self._needed = 0
        """Bytes required before anything can be completed: the length prefix, or the whole frame."""

    @property
    def is_between(self) -> bool:
        """Return True if no frame is unfinished."""
        return not self._size

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the body of each frame that `data` completes.

        Raises:
            ChannelProtocolError: A frame is too long.
        """
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
                raise ChannelProtocolError(f"a frame of {length} bytes is announced; the maximum is {self._bytes_max}")
            end = start + LENGTH.size + length
            if end > size:
                self._needed = end - start
                break
            yield buffer[start + LENGTH.size : end]
            start = end
        self._parts = [buffer[start:]] if start < size else []
        self._size = size - start
