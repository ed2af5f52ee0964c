"""Messages between replicas: MessagePack frames, each bounded, each with the cluster's id, sender and term.

On the wire a frame is four bytes of length (big endian) and an array `[version, cluster id, sender, message]`; a
message is an array that begins with its kind. Kinds are for ever: append-only, never reused (law 12).
"""

import struct
from collections.abc import Iterator
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from wal import ENTRY_MAX_BYTES, SEAL_MAX_BYTES, Incarnation, parse_lineage

FRAME_VERSION: Final = 1

MAX_ENTRY_BYTES: Final = ENTRY_MAX_BYTES
"""Bytes of one journal entry: larger ones hold up the heartbeats behind them and every replica's memory."""

APPEND_BYTES: Final = 1 << 20
"""Bytes of entries after which one append request is full; one entry more may exceed it."""

APPEND_ENTRIES: Final = 512
"""Entries in one append request: bounds the work of one frame when entries are tiny."""

CHUNK_BYTES: Final = 256 << 10
"""Bytes of a snapshot in one frame: about 2 ms of a 1 Gbit/s link, so that a heartbeat never waits long behind it."""

NEWS_MAX_BYTES: Final = 128 << 10
"""Bytes of what a follower's machine says in one frame: reading it takes a leader a few milliseconds."""

FRAME_OVERHEAD_BYTES: Final = (64 << 10) + APPEND_ENTRIES * SEAL_MAX_BYTES
"""Space in a frame for all but entry data: seals, APPEND_ENTRIES headers of at most 16 bytes, names, numbers."""

MAX_FRAME_BYTES: Final = APPEND_BYTES + MAX_ENTRY_BYTES + FRAME_OVERHEAD_BYTES
"""Bytes of one frame; a longer one is refused before a byte of it is kept."""

LEDGER_DIGEST_BYTES: Final = 32
"""Bytes of a ledger's digest, SHA-256."""

_LENGTH: Final = struct.Struct(">I")

# Terms, indexes and sequences stay far below 2^63, so that adding to one never overflows a signed word anywhere.
Number = Annotated[int, Meta(ge=0, le=1 << 62)]
Name = Annotated[str, Meta(min_length=1, max_length=96)]
"""A cluster's id, or a member's: a name of at most 64 characters, '#' and a number."""
EntryData = Annotated[bytes, Meta(min_length=1, max_length=MAX_ENTRY_BYTES)]
EntrySeal = Annotated[bytes, Meta(max_length=SEAL_MAX_BYTES)]
PublicKey = Annotated[bytes, Meta(max_length=32)]


class FrameRefused(Exception):
    """A peer sent what is not a frame of this cluster; its connection is closed. The message says what was wrong."""


class OtherIncarnation(FrameRefused):
    """A frame of another incarnation of the same cluster."""

    def __init__(self, sender: str, mine: Incarnation, theirs: Incarnation) -> None:
        super().__init__(f"{sender} is of incarnation {theirs} of the cluster; here it is {mine}")
        self.sender = sender
        self.mine = mine
        self.theirs = theirs


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Every message has the sender's term, and a sequence: a request's own, in a reply that of its request."""

    term: Number
    seq: Number


class AppendRequest(Message, frozen=True, array_like=True, forbid_unknown_fields=True, tag=1):
    """AppendEntries: entries after (prev_index, prev_term); without entries it only probes where the logs agree."""

    prev_index: Number
    prev_term: Number
    commit_index: Number
    ready: bool
    entries: Annotated[list[tuple[Number, EntryData]], Meta(max_length=APPEND_ENTRIES)]
    seals: Annotated[list[EntrySeal], Meta(max_length=APPEND_ENTRIES)] = []
    """One for each entry, or none at all."""


class Heartbeat(Message, frozen=True, array_like=True, forbid_unknown_fields=True, tag=2):
    """Heartbeat: no claim about the log, so the receiver moves its commit index over checked entries only."""

    commit_index: Number
    ready: bool


class AppendReply(Message, frozen=True, array_like=True, forbid_unknown_fields=True, tag=3):
    """Answer to a leader: all entries up to `match_index` agree with its own and are durable.

    Cumulative, so a later one replaces it. That to a rejected request names in `hint_index` and `hint_term` where the
    leader should look next.
    """

    match_index: Number
    rejected: bool = False
    hint_index: Number = 0
    hint_term: Number = 0
    key: PublicKey = b""
    """The sender's public key, while the configuration does not have it."""


class VoteRequest(Message, frozen=True, array_like=True, forbid_unknown_fields=True, tag=4):
    """RequestVote; a pre-vote only asks for the term after `term`, and changes nothing."""

    last_index: Number
    last_term: Number
    pre: bool
    transfer: bool = False
    """The leader wants it: it does not count that a leader lives (thesis 3.10)."""
    ledger_index: Number = 0
    """The last entry that the candidate has applied."""
    ledger_digest: Annotated[bytes, Meta(max_length=LEDGER_DIGEST_BYTES)] = b""
    """Digest of its ledger up to there; empty where it has none."""


class VoteReply(Message, frozen=True, array_like=True, forbid_unknown_fields=True, tag=5):
    """Answer to a vote or pre-vote request."""

    granted: bool
    pre: bool
    key: PublicKey = b""
    """The sender's public key: who founds the cluster puts it into the first configuration."""
    signature: Annotated[bytes, Meta(max_length=64)] = b""
    """Of a vote that is granted: the leader's entries show it (`seals`)."""


class SnapshotChunk(Message, frozen=True, array_like=True, forbid_unknown_fields=True, tag=6):
    """InstallSnapshot: bytes of a snapshot at `offset`; without bytes it asks how much of it is already there."""

    index: Number
    snapshot_term: Number
    size_bytes: Number
    offset: Number
    data: Annotated[bytes, Meta(max_length=CHUNK_BYTES)]


CONTINUE: Final = 0
RESUME: Final = 1
DONE: Final = 2
REFUSED: Final = 3


class SnapshotReply(Message, frozen=True, array_like=True, forbid_unknown_fields=True, tag=7):
    """Answer to a chunk. CONTINUE: kept. RESUME: send from `offset`. DONE: nothing more needed. REFUSED: bad."""

    index: Number
    snapshot_term: Number
    outcome: Annotated[int, Meta(ge=CONTINUE, le=REFUSED)]
    offset: Number
    match_index: Number


class Removed(Message, frozen=True, array_like=True, forbid_unknown_fields=True, tag=8):
    """Notice to who is no member: version `version` of the configuration is committed and does not have it."""

    version: Number


class TimeoutNow(Message, frozen=True, array_like=True, forbid_unknown_fields=True, tag=9):
    """Request of a leader to stand at once: it hands over to the receiver, which has all it has (thesis 3.10)."""


class StateLost(Message, frozen=True, array_like=True, forbid_unknown_fields=True, tag=10):
    """Notice of a leader: `member` acknowledged everything up to `match_index` in this term, and now lacks it.

    A frame says who speaks, not to whom: a successor at the same address is not meant.
    """

    member: Name
    match_index: Number


class ClockRequest(Message, frozen=True, array_like=True, forbid_unknown_fields=True, tag=11):
    """Question what the receiver's wall clock says. It is about no term, and has 0 for one, as its answer has."""


class ClockReply(Message, frozen=True, array_like=True, forbid_unknown_fields=True, tag=12):
    """Answer: the sender's wall clock, microseconds since the epoch."""

    wall_us: Number


class ReadRequest(Message, frozen=True, array_like=True, forbid_unknown_fields=True, tag=13):
    """Question of a follower: up to where has it to apply before a read of its own is linearizable (thesis 6.4)?

    `news` is what the follower's machine has to tell the leader's; consensus does not look into it.
    """

    news: Annotated[bytes, Meta(max_length=NEWS_MAX_BYTES)] = b""


class ReadReply(Message, frozen=True, array_like=True, forbid_unknown_fields=True, tag=14):
    """Answer of a leader that a majority has confirmed since it was asked: up to `index`."""

    index: Number


AnyMessage = (
    AppendRequest
    | Heartbeat
    | AppendReply
    | VoteRequest
    | VoteReply
    | SnapshotChunk
    | SnapshotReply
    | Removed
    | TimeoutNow
    | StateLost
    | ClockRequest
    | ClockReply
    | ReadRequest
    | ReadReply
)

PROMISES: Final = (AppendReply, VoteRequest, VoteReply, SnapshotReply)
"""Messages that somebody counts on: none leaves before the sync that makes it true (H2)."""


class _Envelope(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    version: int
    cluster: Name
    sender: Name
    message: AnyMessage


class Frame(msgspec.Struct, frozen=True):
    """A decoded frame: who says that it sends it, and what."""

    sender: str
    message: AnyMessage


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(_Envelope)


def encode_frame(cluster_id: str, sender: str, message: AnyMessage) -> bytes:
    """Return the bytes of a frame with its length in front; FrameRefused if it is over the bound.

    `cluster_id`: from the second incarnation of a cluster on with that (`wal.lineage_of`).
    """
    body = _encoder.encode(_Envelope(FRAME_VERSION, cluster_id, sender, message))
    if len(body) > MAX_FRAME_BYTES:
        raise FrameRefused(f"a {type(message).__name__} of {len(body)} bytes is over the bound of {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


def decode_body(cluster_id: str, body: bytes | bytearray | memoryview) -> Frame:
    """Return the frame in `body` (without the length); FrameRefused if it is malformed or of another cluster.

    OtherIncarnation if it is of the same cluster, begun again since or before.
    """
    try:
        envelope = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # msgspec lets the latter through
        raise FrameRefused(f"not a frame of version {FRAME_VERSION}: {error}") from error
    if envelope.version != FRAME_VERSION:
        raise FrameRefused(f"a frame of version {envelope.version}; this release speaks version {FRAME_VERSION}")
    if envelope.cluster != cluster_id:
        ours, other = parse_lineage(cluster_id), parse_lineage(envelope.cluster)
        if ours is not None and other is not None and ours[0] == other[0]:
            raise OtherIncarnation(envelope.sender, ours[1], other[1])
        raise FrameRefused(f"a frame of cluster {envelope.cluster!r}; this is cluster {cluster_id!r}")
    return Frame(envelope.sender, envelope.message)


class FrameReader:
    """Cuts a stream of bytes into frames and holds at most one unfinished frame."""

    def __init__(self, cluster_id: str) -> None:
        self._cluster_id = cluster_id
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield each frame that is complete with `data`; FrameRefused at the first that is wrong."""
        buffer = self._buffer
        buffer += data
        start = 0
        try:
            while len(buffer) - start >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(buffer, start)
                if length > MAX_FRAME_BYTES:
                    raise FrameRefused(f"a frame of {length} bytes is announced; the bound is {MAX_FRAME_BYTES}")
                end = start + _LENGTH.size + length
                if end > len(buffer):
                    break
                body = bytes(memoryview(buffer)[start + _LENGTH.size : end])
                start = end
                yield decode_body(self._cluster_id, body)
        finally:
            del buffer[:start]
