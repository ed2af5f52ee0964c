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

NO_ROOM = 73
"""Exit code of a historian that found no room on its disk (sysexits.h: a file that cannot be made)."""


class _Frame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    number: int


class RecordsQuery(_Frame, frozen=True, tag=1):
    """What concerned a job, oldest first: `limit` records at most, with `newest` the first and the newest ones."""

    through: int
    job: int
    limit: int
    newest: bool


class WhyQuery(_Frame, frozen=True, tag=2):
    """Why a job waited after a revision, or, where that is 0, at an instant."""

    through: int
    revision: int
    at: Instant
    job: int
    tasks: tuple[int, ...] | None
    """Which tasks of `job` as an array; None where that is the job itself."""
    external_job: str
    """The external job, by its name, instead of `job`; or empty."""


class PastQuery(_Frame, frozen=True, tag=20):
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


class JobRecord(msgspec.Struct, frozen=True, array_like=True):
    """One command that concerned a job, and where the job stood after it."""

    revision: int
    batch: bytes
    """A batch of that command alone (`wal.codec`), of its events those that concern the job."""
    state: str
    """Empty for a job that was gone."""
    burst_buffer_state: str | None
    attempt: int
    reason: str


class ArchivedRecords(msgspec.Struct, frozen=True, array_like=True):
    """Records of a job that are held no more: how many, the revisions of the first and of the last, and in which
    segments of the archive they are.
    """

    count: int
    first_revision: int
    last_revision: int
    segments: tuple[str, ...]


class RecordsReply(_Frame, frozen=True, tag=3):
    """Answer of RecordsQuery. `whole`: nothing is missing after the first of them; `archived`: what was pruned."""

    records: tuple[JobRecord, ...]
    whole: bool
    archived: ArchivedRecords | None = None


class WhyReply(_Frame, frozen=True, tag=4):
    """Answer of WhyQuery. `user`: whose job it was; `scheduler`: whose external job, if it was one."""

    view: WhyView
    user: str
    scheduler: str


class PastReply(_Frame, frozen=True, tag=21):
    """Answer of PastQuery: the body with its type, or, from status 400 on, what was wrong with the question."""

    revision: int
    status: int
    content: bytes
    content_type: str


class QueryFailure(_Frame, frozen=True, tag=5):
    """There is no answer; of what is asked of a moment `revision` is the one that was asked about, or the instant's."""

    kind: str
    """NO_JOB, NOT_HELD or REVERSED."""
    revision: int
    sentence: str


class IndexProgress(_Frame, frozen=True, tag=6):
    """How far the index by job has come, as whoever shows metrics wants to know; `number` says nothing."""

    index: int
    revision: int
    size_bytes: int
    tree_size: int = 0
    """Entries in the tree of the ledger."""
    tree_made_again: int = 0
    """Files of the tree that were missing or damaged, and derived anew, count."""


class EventFilter(msgspec.Struct, frozen=True, array_like=True):
    """What of the ledger is asked for; what is empty or 0 asks for nothing in particular."""

    job: int = 0
    user: str = ""
    """Whose jobs, and what he asked for himself."""
    account: str = ""
    """Whose jobs: as they were submitted."""
    actor: str = ""
    """Who asked for it: a name, or role and name."""
    kinds: tuple[str, ...] = ()
    """Names of events, or REFUSED."""
    of: str = ""
    """A kind of thing that is nobody's job, such as `pool`: what was changed of it ..."""
    name: str = ""
    """... or of the one with this name."""
    only: str = ""
    """The one user whose jobs may be seen."""
    own: str = ""
    """The one user whose refusals may be seen."""


REJECTED = "refused"


class EventPageQuery(_Frame, frozen=True, tag=22):
    """What happened after a revision, or from an instant on where that is 0, and up to a revision or an instant."""

    through: int
    after: int
    since: Instant
    until: int
    """0: up to `before`, or to the last one."""
    before: Instant
    sought: EventFilter
    limit: int
    """Commands at most."""


class CommandEvents(msgspec.Struct, frozen=True, array_like=True):
    """One command of a story."""

    revision: int
    batch: bytes
    """A batch of that command alone, of its events those that were asked for."""
    users: tuple[str, ...]
    """Whose jobs its events are about, one for each; empty where it is nobody's or not known."""
    places: tuple[int, ...] = ()
    """Which of its events they are, from 0, one for each."""


class EventPageReply(_Frame, frozen=True, tag=23):
    """Answer of EventPageQuery: what was found up to revision `read`, which happened at `at`; asked again from there on
    until that is `last`.
    """

    happened: tuple[CommandEvents, ...]
    read: int
    at: Instant
    last: int


class ChangesQuery(_Frame, frozen=True, tag=24):
    """What differs between two moments, each a revision or, where that is 0, an instant."""

    through: int
    revision: int
    at: Instant
    to_revision: int
    to_at: Instant
    job: int
    of: str
    name: str
    """As in EventFilter."""
    only: str
    is_operator: bool
    """Whether what only operators list is compared, too."""
    limit: int


class ChangesReply(_Frame, frozen=True, tag=25):
    """Answer of ChangesQuery: JSON of a `cluster.schemas.DiffAnswer`."""

    content: bytes


class TermsQuery(_Frame, frozen=True, tag=26):
    """The last terms of leaders, `limit` at most, that ended after a revision."""

    through: int
    limit: int


class LeaderTerm(msgspec.Struct, frozen=True, array_like=True):
    """One term of the ledger."""

    term: int
    leader: str
    """Its name; empty where the ledger does not say."""
    first_index: int
    last_index: int
    began: Instant
    ended: Instant
    """The clock of its first and of its last batch; NEVER where it has none."""
    last_before: Instant
    """The clock of the last batch before it."""


class TermsReply(_Frame, frozen=True, tag=27):
    """Answer of TermsQuery, oldest first."""

    terms: tuple[LeaderTerm, ...]


class PoolUseQuery(_Frame, frozen=True, tag=28):
    """How full the pools were, as far as the ledger was followed: answered at once."""

    name: str = ""
    """Of this one only."""


class PoolUseSteps(msgspec.Struct, frozen=True, array_like=True):
    """One pool over time: its unit, and from when on it had so much held, in service and in all."""

    name: str
    unit: int
    """A PoolUnit; 0 for a pool that there never was in this time."""
    steps: tuple[tuple[Instant, int, int, int], ...]


class PoolUseReply(_Frame, frozen=True, tag=29):
    """Answer of PoolUseQuery: from `since`, up to `until`, in steps of `step_s` at least."""

    since: Instant
    until: Instant
    step_s: float
    pools: tuple[PoolUseSteps, ...]
    truncated: bool


class RootQuery(_Frame, frozen=True, tag=7):
    """The root over the first `size` leaves of the ledger's tree, once it has as many."""

    size: int


class ConsistencyQuery(_Frame, frozen=True, tag=11):
    """The proof that the tree of the first `old_size` leaves begins that of `size`, once it has as many."""

    size: int
    old_size: int


class TileQuery(_Frame, frozen=True, tag=8):
    """A tile or bundle of the ledger's tree, as it is named (`cluster.security.proofs.parse_path`)."""

    path: str


class ProofQuery(_Frame, frozen=True, tag=9):
    """The records of a job that lie in the first `size` entries, with their proofs (`cluster.server.tlog`)."""

    size: int
    job: int


class CountsQuery(_Frame, frozen=True, tag=12):
    """How many records of each job there are in the first `size` entries."""

    size: int


class TreeReply(_Frame, frozen=True, tag=10):
    """Answer of RootQuery, ConsistencyQuery, TileQuery and ProofQuery; hashes one behind the other."""

    data: bytes
    more: bytes = b""
    """Of ProofQuery: what shows that these are all records of the job, if that is to be had."""


class CountsReply(_Frame, frozen=True, tag=13):
    """Answer of CountsQuery: up to which job, the root over the counts, and the one that the ledger recorded last."""

    jobs: int
    root: bytes
    recorded: bytes


NO_JOB = "no_job"
NOT_HELD = "not_held"
REVERSED = "turned"
"""Of ChangesQuery: the first moment is the later one."""

TreeQuery = RootQuery | ConsistencyQuery | TileQuery | ProofQuery | CountsQuery
"""What is asked of the tree over the ledger, and of what goes with it."""


class CancelQuery(_Frame, frozen=True, tag=30):
    """Nobody waits for the answer of that question any more."""


HistoryQuery = (
    RecordsQuery | WhyQuery | PastQuery | EventPageQuery | ChangesQuery | TermsQuery | PoolUseQuery | TreeQuery
)
HistoryReply = (
    RecordsReply
    | WhyReply
    | PastReply
    | EventPageReply
    | ChangesReply
    | TermsReply
    | PoolUseReply
    | QueryFailure
    | IndexProgress
    | TreeReply
    | CountsReply
)

_ask_decoder: msgspec.msgpack.Decoder[HistoryQuery | CancelQuery] = msgspec.msgpack.Decoder(HistoryQuery | CancelQuery)
_said_decoder: msgspec.msgpack.Decoder[HistoryReply] = msgspec.msgpack.Decoder(HistoryReply)
_encoder = msgspec.msgpack.Encoder()


def encode(frame: HistoryQuery | CancelQuery | HistoryReply) -> bytes:
    """Return the bytes of a frame, with its length."""
    body = _encoder.encode(frame)
    return LENGTH.pack(len(body)) + body


def decode_query(body: bytes | memoryview) -> HistoryQuery | CancelQuery:
    """Return the question in a body, or that one is given up; msgspec.MsgspecError."""
    return _ask_decoder.decode(body)


def decode_reply(body: bytes | memoryview) -> HistoryReply:
    """Return what a historian said in a body; msgspec.MsgspecError."""
    return _said_decoder.decode(body)
