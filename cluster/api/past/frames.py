"""What a replica and its historian say to each other: MessagePack frames with a length before each, over a Unix socket.

Both are of one release, since a replica starts its historian itself. A number is the replica's own, and names a
question until it is answered; what each question waits for is that the historian has read up to entry `through`.
"""

from __future__ import annotations

import msgspec

from cluster.schemas import LENGTH, WhyView
from replica.values import Instant

FRAME_BYTES_MAX = 256 * 1024 * 1024
"""Bytes of one frame: the records of a job with the largest submit and as many events as one answer shows."""


class _Frame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    number: int


class AskRecords(_Frame, frozen=True, tag=1):
    """What concerned a job, oldest first: `limit` records at most, with `newest` the first and the newest ones."""

    through: int
    job: int
    limit: int
    newest: bool


class AskWhy(_Frame, frozen=True, tag=2):
    """Why a job waited after a revision, or, where that is 0, at an instant."""

    through: int
    revision: int
    at: Instant
    job: int
    tasks: tuple[int, ...] | None
    """Which tasks of `job` as an array; None where that is the job itself."""
    guest: str
    """The guest, by its name, instead of `job`; or empty."""


class AskThen(_Frame, frozen=True, tag=20):
    """What an operation would have been answered after a revision, or, where that is 0, at an instant."""

    through: int
    revision: int
    at: Instant
    operation: str
    params: dict[str, str]
    query: dict[str, str]
    role: str
    name: str
    """Who asks."""
    is_private: bool
    """Whether what is others' is private now, whatever was so then."""


class Record(msgspec.Struct, frozen=True, array_like=True):
    """One command that concerned a job, and where the job stood after it."""

    revision: int
    batch: bytes
    """A batch of that command alone (`wal.codec`), of its events those that concern the job."""
    state: str
    """Empty for a job that was gone."""
    burst_buffer_state: str | None
    attempt: int
    reason: str


class Records(_Frame, frozen=True, tag=3):
    """Answer of AskRecords. `whole`: nothing is missing after the first of them."""

    records: tuple[Record, ...]
    whole: bool


class Explained(_Frame, frozen=True, tag=4):
    """Answer of AskWhy. `user`: whose job it was; `scheduler`: whose guest, if it was one."""

    view: WhyView
    user: str
    scheduler: str


class Then(_Frame, frozen=True, tag=21):
    """Answer of AskThen: the body with its type, or, from status 400 on, what was wrong with the question."""

    revision: int
    status: int
    content: bytes
    content_type: str


class Unanswered(_Frame, frozen=True, tag=5):
    """There is no answer; of AskWhy and AskThen `revision` is the one that was asked about, or the instant's."""

    kind: str
    """NO_JOB, or NOT_HELD."""
    revision: int
    sentence: str


class Progress(_Frame, frozen=True, tag=6):
    """How far the index by job has come, as whoever shows metrics wants to know; `number` says nothing."""

    index: int
    revision: int
    size_bytes: int
    tree_size: int = 0
    """Entries in the tree of the ledger."""
    tree_made_again: int = 0
    """Files of the tree that were missing or damaged, and derived anew, count."""


class AskRoot(_Frame, frozen=True, tag=7):
    """The root over the first `size` leaves of the ledger's tree, once it has as many."""

    size: int


class AskTile(_Frame, frozen=True, tag=8):
    """A tile or bundle of the ledger's tree, as it is named (`cluster.proofs.parse_path`)."""

    path: str


class AskProof(_Frame, frozen=True, tag=9):
    """The records of a job that lie in the first `size` entries, with their proofs (`cluster.server.tlog`)."""

    size: int
    job: int


class Found(_Frame, frozen=True, tag=10):
    """Answer of AskRoot, AskTile and AskProof."""

    data: bytes


NO_JOB = "no_job"
NOT_HELD = "not_held"

Ask = AskRecords | AskWhy | AskThen | AskRoot | AskTile | AskProof
Said = Records | Explained | Then | Unanswered | Progress | Found

_ask_decoder: msgspec.msgpack.Decoder[Ask] = msgspec.msgpack.Decoder(Ask)
_said_decoder: msgspec.msgpack.Decoder[Said] = msgspec.msgpack.Decoder(Said)
_encoder = msgspec.msgpack.Encoder()


def encode(frame: Ask | Said) -> bytes:
    """Return the bytes of a frame, with its length."""
    body = _encoder.encode(frame)
    return LENGTH.pack(len(body)) + body


def decode_ask(body: bytes | memoryview) -> Ask:
    """Return the question in a body; msgspec.MsgspecError."""
    return _ask_decoder.decode(body)


def decode_said(body: bytes | memoryview) -> Said:
    """Return what a historian said in a body; msgspec.MsgspecError."""
    return _said_decoder.decode(body)
