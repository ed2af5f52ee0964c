"""Messages between replicas: bounded MessagePack frames with the cluster's ID and the sender.

A frame is four bytes of length (big endian) and an array `[version, cluster id, sender, message]`. A message is an
array that begins with its kind, and includes its term. Kinds are permanent: append-only, never reused (law 12).
"""

import struct
from collections.abc import Iterator
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from forebay.wal import ENTRY_MAX_BYTES, SEAL_MAX_BYTES, Incarnation, parse_lineage

FRAME_VERSION: Final = 1

MAX_ENTRY_BYTES: Final = ENTRY_MAX_BYTES
"""Maximum size of a journal entry: larger entries would delay heartbeats and fill every replica's memory."""

APPEND_BYTES: Final = 1 << 20
"""Size of entries at which an append request is full; the last entry may exceed it."""

APPEND_ENTRIES: Final = 512
"""Maximum number of entries in one append request: bounds the work of a frame of tiny entries."""

CHUNK_BYTES: Final = 256 << 10
"""Size of a snapshot chunk: about 2 ms of a 1 Gbit/s link, so that heartbeats never wait long behind it."""

NEWS_MAX_BYTES: Final = 128 << 10
"""Maximum size of a follower machine's news in one frame: the leader reads it in a few milliseconds."""

FRAME_OVERHEAD_BYTES: Final = (64 << 10) + APPEND_ENTRIES * SEAL_MAX_BYTES
"""Maximum size of a frame without its entry data: seals, APPEND_ENTRIES headers of at most 16 bytes, names, numbers."""

MAX_FRAME_BYTES: Final = APPEND_BYTES + MAX_ENTRY_BYTES + FRAME_OVERHEAD_BYTES
"""Maximum size of a frame; a longer frame is rejected before any of it is stored."""

LEDGER_DIGEST_BYTES: Final = 32
"""Size of a ledger's digest, SHA-256."""

_LENGTH: Final = struct.Struct(">I")

# Terms, indices and sequences stay far below 2^63, so that adding 1 never overflows a signed 64-bit number.
Number = Annotated[int, Meta(ge=0, le=1 << 62)]
Name = Annotated[str, Meta(min_length=1, max_length=96)]
"""ID of a cluster or member: a name of at most 64 characters, '#' and a number."""
EntryData = Annotated[bytes, Meta(min_length=1, max_length=MAX_ENTRY_BYTES)]
EntrySeal = Annotated[bytes, Meta(max_length=SEAL_MAX_BYTES)]
PublicKey = Annotated[bytes, Meta(max_length=32)]


class FrameRefused(Exception):
    """Data from a peer that is not a frame of this cluster. The connection is closed; the message gives the reason."""


class OtherIncarnation(FrameRefused):
    """Frame of another incarnation of the same cluster."""

    def __init__(self, sender: str, mine: Incarnation, theirs: Incarnation) -> None:
        super().__init__(f"{sender} has incarnation {theirs} of the cluster; this replica has {mine}")
        self.sender = sender
        self.mine = mine
        self.theirs = theirs


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of all messages: the sender's term, and a sequence number; a reply repeats its request's number."""

    term: Number
    seq: Number


class AppendRequest(Message, frozen=True, array_like=True, forbid_unknown_fields=True, tag=1):
    """AppendEntries: entries after (prev_index, prev_term). Without entries, it probes where the logs agree."""

    prev_index: Number
    prev_term: Number
    commit_index: Number
    ready: bool
    entries: Annotated[list[tuple[Number, EntryData]], Meta(max_length=APPEND_ENTRIES)]
    seals: Annotated[list[EntrySeal], Meta(max_length=APPEND_ENTRIES)] = []
    """One seal for each entry, or none at all."""


class Heartbeat(Message, frozen=True, array_like=True, forbid_unknown_fields=True, tag=2):
    """Heartbeat. It does not describe the leader's log, so the receiver commits only entries that it has checked."""

    commit_index: Number
    ready: bool


class AppendReply(Message, frozen=True, array_like=True, forbid_unknown_fields=True, tag=3):
    """Reply to a leader: all entries up to `match_index` equal the leader's and are durable.

    Replies are cumulative: a later reply replaces earlier ones. A rejection suggests the next entry to probe in
    `hint_index` and `hint_term`.
    """

    match_index: Number
    rejected: bool = False
    hint_index: Number = 0
    hint_term: Number = 0
    key: PublicKey = b""
    """The sender's public key, while the configuration lacks it."""


class VoteRequest(Message, frozen=True, array_like=True, forbid_unknown_fields=True, tag=4):
    """RequestVote. A pre-vote only asks for a vote in the term after `term`, and changes no state."""

    last_index: Number
    last_term: Number
    pre: bool
    transfer: bool = False
    """True if the leader requested the election: then its being alive is no reason to reject (thesis 3.10)."""
    ledger_index: Number = 0
    """Last entry the candidate has applied."""
    ledger_digest: Annotated[bytes, Meta(max_length=LEDGER_DIGEST_BYTES)] = b""
    """Digest of the candidate's ledger up to `ledger_index`; empty if unknown."""


class VoteReply(Message, frozen=True, array_like=True, forbid_unknown_fields=True, tag=5):
    """Reply to a vote or pre-vote request."""

    granted: bool
    pre: bool
    key: PublicKey = b""
    """The sender's public key, for the first configuration of a new cluster."""
    signature: Annotated[bytes, Meta(max_length=64)] = b""
    """Signature of a granted vote; the new leader's first entry contains it (`seals`)."""


class SnapshotChunk(Message, frozen=True, array_like=True, forbid_unknown_fields=True, tag=6):
    """InstallSnapshot: bytes of a snapshot at `offset`. Without bytes, it asks how much was received."""

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
    """Reply to a chunk. CONTINUE: stored. RESUME: send from `offset`. DONE: no more needed. REFUSED: invalid."""

    index: Number
    snapshot_term: Number
    outcome: Annotated[int, Meta(ge=CONTINUE, le=REFUSED)]
    offset: Number
    match_index: Number


class RemovalNotice(Message, frozen=True, array_like=True, forbid_unknown_fields=True, tag=8):
    """Notice to a non-member: version `version` of the configuration is committed without it."""

    version: Number


class TimeoutNow(Message, frozen=True, array_like=True, forbid_unknown_fields=True, tag=9):
    """Request of a leader that transfers leadership: the up-to-date receiver must campaign at once (thesis 3.10)."""


class StateLost(Message, frozen=True, array_like=True, forbid_unknown_fields=True, tag=10):
    """Leader's notice: `member` acknowledged all entries up to `match_index` in this term, but lacks some of them now.

    A frame names its sender but not its addressee, so a successor at the same address must ignore the notice.
    """

    member: Name
    match_index: Number


class ClockRequest(Message, frozen=True, array_like=True, forbid_unknown_fields=True, tag=11):
    """Request for the receiver's wall clock. Request and reply belong to no term: their term is 0."""


class ClockReply(Message, frozen=True, array_like=True, forbid_unknown_fields=True, tag=12):
    """Reply with the sender's wall clock, microseconds since the epoch."""

    wall_us: Number


class ReadRequest(Message, frozen=True, array_like=True, forbid_unknown_fields=True, tag=13):
    """Follower's request for the index that it must apply before a linearizable read of its own (thesis 6.4).

    `news` is a message of the follower's machine to the leader's; consensus does not interpret it.
    """

    news: Annotated[bytes, Meta(max_length=NEWS_MAX_BYTES)] = b""


class ReadReply(Message, frozen=True, array_like=True, forbid_unknown_fields=True, tag=14):
    """Index that the follower must apply. A majority has confirmed the leader since the request."""

    index: Number


AnyMessage = (
    AppendRequest
    | Heartbeat
    | AppendReply
    | VoteRequest
    | VoteReply
    | SnapshotChunk
    | SnapshotReply
    | RemovalNotice
    | TimeoutNow
    | StateLost
    | ClockRequest
    | ClockReply
    | ReadRequest
    | ReadReply
)

PROMISES: Final = (AppendReply, VoteRequest, VoteReply, SnapshotReply)
"""Messages that other replicas rely on. Each is sent only after the sync that it confirms (H2)."""


class _Envelope(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    version: int
    cluster: Name
    sender: Name
    message: AnyMessage


class Frame(msgspec.Struct, frozen=True):
    """Decoded frame: the claimed sender and the message."""

    sender: str
    message: AnyMessage


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(_Envelope)


def encode_frame(cluster_id: str, sender: str, message: AnyMessage) -> bytes:
    """Encode a frame with its length in front.

    `cluster_id`: includes the incarnation from the second one on (`wal.lineage_of`).

    Raises:
        FrameRefused: The frame is too large.
    """
    body = _encoder.encode(_Envelope(FRAME_VERSION, cluster_id, sender, message))
    if len(body) > MAX_FRAME_BYTES:
        raise FrameRefused(f"a {type(message).__name__} of {len(body)} bytes exceeds the maximum of {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


def decode_body(cluster_id: str, body: bytes | bytearray | memoryview) -> Frame:
    """Decode the frame in `body` (without the length).

    Raises:
        FrameRefused: The frame is malformed or belongs to another cluster.
        OtherIncarnation: The frame belongs to another incarnation of the same cluster.
    """
    try:
        envelope = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # msgspec lets UnicodeDecodeError through
        raise FrameRefused(f"not a frame of version {FRAME_VERSION}: {error}") from error
    if envelope.version != FRAME_VERSION:
        raise FrameRefused(f"a frame of version {envelope.version}; this release uses version {FRAME_VERSION}")
    if envelope.cluster != cluster_id:
        ours, other = parse_lineage(cluster_id), parse_lineage(envelope.cluster)
        if ours is not None and other is not None and ours[0] == other[0]:
            raise OtherIncarnation(envelope.sender, ours[1], other[1])
        raise FrameRefused(f"a frame of cluster {envelope.cluster!r}; this is cluster {cluster_id!r}")
    return Frame(envelope.sender, envelope.message)


class FrameReader:
    """Splits a stream of bytes into frames; buffers at most one unfinished frame."""

    def __init__(self, cluster_id: str) -> None:
        self._cluster_id = cluster_id
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield each frame completed by `data`.

        Raises:
            FrameRefused: A frame is malformed; earlier frames were yielded.
        """
        buffer = self._buffer
        buffer += data
        start = 0
        try:
            while len(buffer) - start >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(buffer, start)
                if length > MAX_FRAME_BYTES:
                    raise FrameRefused(f"a frame of {length} bytes is announced; the maximum is {MAX_FRAME_BYTES}")
                end = start + _LENGTH.size + length
                if end > len(buffer):
                    break
                body = bytes(memoryview(buffer)[start + _LENGTH.size : end])
                start = end
                yield decode_body(self._cluster_id, body)
        finally:
            del buffer[:start]
