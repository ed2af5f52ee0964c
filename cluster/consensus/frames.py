"""Messages between replicas: bounded MessagePack frames with the cluster's ID, sender and term.

A frame is four bytes of length (big endian) and an array `[version, cluster id, sender, message]`; a message is an
array that begins with its kind. Kinds are permanent: append-only, never reused (law 12).
"""

import struct
from collections.abc import Iterator
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from forebay.wal import ENTRY_MAX_BYTES, SEAL_MAX_BYTES, Incarnation, parse_lineage

FRAME_VERSION: Final = 1

MAX_ENTRY_BYTES: Final = ENTRY_MAX_BYTES
"""Maximum size of a journal entry: larger ones delay heartbeats behind them and fill every replica's memory."""

APPEND_BYTES: Final = 1 << 20
"""Size of entries at which an append request is full; one more entry may exceed it."""

APPEND_ENTRIES: Final = 512
"""Maximum number of entries in one append request: bounds the work of a frame of tiny entries."""

CHUNK_BYTES: Final = 256 << 10
"""Size of a snapshot chunk: about 2 ms of a 1 Gbit/s link, so that heartbeats never wait long behind it."""

NEWS_MAX_BYTES: Final = 128 << 10
"""Maximum size of a follower machine's news in one frame: reading it takes a leader a few milliseconds."""

FRAME_OVERHEAD_BYTES: Final = (64 << 10) + APPEND_ENTRIES * SEAL_MAX_BYTES
"""Space in a frame beside entry data: seals, APPEND_ENTRIES headers of at most 16 bytes, names, numbers."""

MAX_FRAME_BYTES: Final = APPEND_BYTES + MAX_ENTRY_BYTES + FRAME_OVERHEAD_BYTES
"""Maximum size of a frame; a longer one is rejected before any of it is kept."""

LEDGER_DIGEST_BYTES: Final = 32
"""Size of a ledger's digest, SHA-256."""

_LENGTH: Final = struct.Struct(">I")

# Terms, indices and sequences stay far below 2^63, so that adding to one never overflows a signed word.
Number = Annotated[int, Meta(ge=0, le=1 << 62)]
Name = Annotated[str, Meta(min_length=1, max_length=96)]
"""ID of a cluster or member: a name of at most 64 characters, '#' and a number."""
EntryData = Annotated[bytes, Meta(min_length=1, max_length=MAX_ENTRY_BYTES)]
EntrySeal = Annotated[bytes, Meta(max_length=SEAL_MAX_BYTES)]
PublicKey = Annotated[bytes, Meta(max_length=32)]


class FrameRefused(Exception):
    """Data from a peer that is not a frame of this cluster; its connection is closed. The message gives the reason."""


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
    """AppendEntries: entries after (prev_index, prev_term); without entries it only probes where the logs agree."""

    prev_index: Number
    prev_term: Number
    commit_index: Number
    ready: bool
    entries: Annotated[list[tuple[Number, EntryData]], Meta(max_length=APPEND_ENTRIES)]
    seals: Annotated[list[EntrySeal], Meta(max_length=APPEND_ENTRIES)] = []
    """One seal for each entry, or none at all."""


class Heartbeat(Message, frozen=True, array_like=True, forbid_unknown_fields=True, tag=2):
    """Heartbeat. It makes no claim about the log, so the receiver commits only entries it has checked."""

    commit_index: Number
    ready: bool


class AppendReply(Message, frozen=True, array_like=True, forbid_unknown_fields=True, tag=3):
    """Reply to a leader: all entries up to `match_index` agree with its own and are durable.

    Replies are cumulative: a later one replaces earlier ones. A rejection suggests in `hint_index` and `hint_term`
    where the leader should probe next.
    """

    match_index: Number
    rejected: bool = False
    hint_index: Number = 0
    hint_term: Number = 0
    key: PublicKey = b""
    """The sender's public key, while the configuration lacks it."""


class VoteRequest(Message, frozen=True, array_like=True, forbid_unknown_fields=True, tag=4):
    """RequestVote; a pre-vote only asks about the term after `term`, and changes nothing."""

    last_index: Number
    last_term: Number
    pre: bool
    transfer: bool = False
    """Whether the leader requested it: a live leader is then no reason to reject it (thesis 3.10)."""
    ledger_index: Number = 0
    """Last entry the candidate has applied."""
    ledger_digest: Annotated[bytes, Meta(max_length=LEDGER_DIGEST_BYTES)] = b""
    """Digest of its ledger up to that entry; empty if it has none."""


class VoteReply(Message, frozen=True, array_like=True, forbid_unknown_fields=True, tag=5):
    """Reply to a vote or pre-vote request."""

    granted: bool
    pre: bool
    key: PublicKey = b""
    """The sender's public key, for the first configuration of a new cluster."""
    signature: Annotated[bytes, Meta(max_length=64)] = b""
    """Signature of a granted vote; the leader's entries show it (`seals`)."""


class SnapshotChunk(Message, frozen=True, array_like=True, forbid_unknown_fields=True, tag=6):
    """InstallSnapshot: bytes of a snapshot at `offset`; without bytes it asks how much of it has arrived."""

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
    """Reply to a chunk. CONTINUE: stored. RESUME: send from `offset`. DONE: nothing more needed. REFUSED: unsound."""

    index: Number
    snapshot_term: Number
    outcome: Annotated[int, Meta(ge=CONTINUE, le=REFUSED)]
    offset: Number
    match_index: Number


class RemovalNotice(Message, frozen=True, array_like=True, forbid_unknown_fields=True, tag=8):
    """Notice to a non-member: version `version` of the configuration is committed without it."""

    version: Number


class TimeoutNow(Message, frozen=True, array_like=True, forbid_unknown_fields=True, tag=9):
    """Leader's request to campaign at once: it transfers leadership to the up-to-date receiver (thesis 3.10)."""


class StateLost(Message, frozen=True, array_like=True, forbid_unknown_fields=True, tag=10):
    """Leader's notice: `member` acknowledged everything up to `match_index` in this term, and now lacks it.

    A frame names its sender but not its addressee: a successor at the same address must ignore the notice.
    """

    member: Name
    match_index: Number


class ClockRequest(Message, frozen=True, array_like=True, forbid_unknown_fields=True, tag=11):
    """Request for the receiver's wall clock. It belongs to no term and has term 0, as has its reply."""


class ClockReply(Message, frozen=True, array_like=True, forbid_unknown_fields=True, tag=12):
    """Reply with the sender's wall clock, microseconds since the epoch."""

    wall_us: Number


class ReadRequest(Message, frozen=True, array_like=True, forbid_unknown_fields=True, tag=13):
    """Follower's request for the index it must have applied before a linearizable read of its own (thesis 6.4).

    `news` is a message of the follower's machine to the leader's; consensus does not interpret it.
    """

    news: Annotated[bytes, Meta(max_length=NEWS_MAX_BYTES)] = b""


class ReadReply(Message, frozen=True, array_like=True, forbid_unknown_fields=True, tag=14):
    """Index that the follower must have applied, from a leader that a majority has confirmed since the request."""

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
"""Messages that others rely on: none is sent before the sync that makes it true (H2)."""


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
        FrameRefused: It is malformed or of another cluster.
        OtherIncarnation: It is of another incarnation of the same cluster.
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
    """Splits a stream of bytes into frames; holds at most one unfinished frame."""

    def __init__(self, cluster_id: str) -> None:
        self._cluster_id = cluster_id
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield each frame completed by `data`.

        Raises:
            FrameRefused: A frame is malformed; those before it were yielded.
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
