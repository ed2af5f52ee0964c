"""What replicas say to each other: one frame of each kind, every field set; `format-1-frames.json` was made of it."""

from typing import Any

from forebay.cluster.consensus.frames import (
    RESUME,
    AppendReply,
    AppendRequest,
    Heartbeat,
    RemovalNotice,
    SnapshotChunk,
    SnapshotReply,
    TimeoutNow,
    VoteReply,
    VoteRequest,
    encode_frame,
)

CLUSTER, SENDER = "0123456789abcdef" * 2, "r2#6"

MESSAGES: tuple[Any, ...] = (
    AppendRequest(3, 70_000, 11, 2, 10, True, [(2, b"\x00"), (3, b"\x01\x01\x93\x00\x00\x90")]),
    Heartbeat(3, 70_001, 12, False),
    AppendReply(3, 70_002, 11, True, 9, 2),
    VoteRequest(4, 1, 13, 3, True, True, 12, bytes(range(32))),
    VoteReply(4, 1, True, False),
    SnapshotChunk(4, 2, 300, 3, 1 << 33, 1 << 20, b"FORE"),
    SnapshotReply(4, 2, 300, 3, RESUME, 1 << 20, 200),
    RemovalNotice(4, 3, 7),
    TimeoutNow(4, 4),
)


def frames() -> dict[str, str]:
    """Return the bytes of each frame as hexadecimal digits, by the kind of its message."""
    return {type(message).__name__: encode_frame(CLUSTER, SENDER, message).hex() for message in MESSAGES}
