"""Frames between a replica and its history service.

A query's number is chosen by the replica and identifies
the query until it is answered. A query waits until the history service has read entry `through`.
"""

from __future__ import annotations

from typing import Final, Protocol

import msgspec

from forebay.cluster.ipc import FrameCodec
from forebay.cluster.schemas import WhyView
from forebay.replica.values import Instant

FRAME_BYTES_MAX = 256 * 1024 * 1024
"""Size of one frame, bytes: the records of a job with the largest submit and the most events of a response."""

PART_BYTES_MAX = 256 * 1024
"""Body of a response in one frame, bytes: a fraction of a millisecond for the replica's loop."""

COST_LEAST_S = 0.001
"""Processor time of a query from which on it is reported, seconds."""

NO_ROOM = 73
"""Exit code for a full disk (sysexits.h: a file that cannot be created)."""


class _Frame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    number: int


class WhyQuery(_Frame, frozen=True, tag=2):
    """Reason a job waited after a revision or, if that is 0, at an instant."""

    through: int
    revision: int
    at: Instant
    job: int
    tasks: tuple[int, ...] | None
    """Tasks of the array `job`; None for the job itself."""
    external_job: str
    """Name of an external job, in place of `job`; or empty."""


class PastQuery(_Frame, frozen=True, tag=20):
    """Read to answer from the state after a revision or, if that is 0, at an instant."""

    through: int
    revision: int
    at: Instant
    operation: str
    params: dict[str, str]
    query: dict[str, str]
    role: str
    name: str
    """Name of the caller."""
    is_private: bool
    """True if other users' data is private now, regardless of the past."""


class EntriesApplied(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=31):
    """Consecutive entries that the replica has applied since the last frame."""

    first_index: int
    entries: tuple[bytes, ...]


class PresentQuery(_Frame, frozen=True, tag=32):
    """Read to answer from the state after entry `through` or a later one; `indexed`: once the index has it, too."""

    through: int
    now: Instant
    """Agreed time of the query."""
    operation: str
    params: dict[str, str]
    query: dict[str, str]
    role: str
    name: str
    """Name of the caller."""
    indexed: bool
    live: bytes
    """Encoded values that the state does not contain, for the reader (`LiveValues`)."""


class JobRecord(msgspec.Struct, frozen=True, array_like=True):
    """Command about a job, and the job's state after it."""

    revision: int
    batch: bytes
    """A batch of only this command (`wal.codec`), with only its events about the job."""
    state: str
    """Empty for a deleted job."""
    burst_buffer_state: str | None
    attempt: int
    reason: str


class ArchivedRecords(msgspec.Struct, frozen=True, array_like=True):
    """Pruned records of a job: number, first and last revision, and the archive segments with them."""

    count: int
    first_revision: int
    last_revision: int
    segments: tuple[str, ...]


class WhyReply(_Frame, frozen=True, tag=4):
    """Reply to WhyQuery. `user`: owner of the job; `scheduler`: scheduler of an external job."""

    view: WhyView
    user: str
    scheduler: str


class PastReply(_Frame, frozen=True, tag=21):
    """Reply to PastQuery or PresentQuery: body and type, or an error from status 400 on."""

    revision: int
    status: int
    content: bytes
    """Sent in parts; its last one."""
    content_type: str


class ReplyPart(_Frame, frozen=True, tag=34):
    """Part of a body, which the parts of later frames and the PastReply continue."""

    content: bytes


class QueryFailure(_Frame, frozen=True, tag=5):
    """A query that cannot be answered; `revision` is the requested one, or that of the instant."""

    kind: str
    """NO_JOB, NOT_HELD or REVERSED."""
    revision: int
    sentence: str


class QueryCost(_Frame, frozen=True, tag=33):
    """Processor time that a query took, seconds; sent before its reply, if it is at least COST_LEAST_S."""

    used_s: float


class IndexProgress(_Frame, frozen=True, tag=6):
    """Progress of the per-job index, for metrics; `number` is unused."""

    index: int
    revision: int
    size_bytes: int
    tree_size: int = 0
    """Entries in the ledger's Merkle tree."""
    tree_made_again: int = 0
    """Missing or damaged tree files that were rebuilt, count."""
    present: int = 0
    """Last entry in the state for present reads."""


class EventFilter(msgspec.Struct, frozen=True, array_like=True):
    """Event filter; empty or 0 fields match everything."""

    job: int = 0
    user: str = ""
    """Owner of the jobs, or sender of the commands."""
    account: str = ""
    """Account the jobs were submitted with."""
    actor: str = ""
    """Sender: a name, or role and name."""
    kinds: tuple[str, ...] = ()
    """Event names, or REJECTED."""
    of: str = ""
    """Kind of a record that belongs to no job, such as `pool` ..."""
    name: str = ""
    """... and its name."""
    only: str = ""
    """Only user whose jobs may be shown."""
    own: str = ""
    """Only user whose rejections may be shown."""


REJECTED = "rejected"


class CommandEvents(msgspec.Struct, frozen=True, array_like=True):
    """Command of a page."""

    revision: int
    batch: bytes
    """A batch of only this command, with its matching events."""
    users: tuple[str, ...]
    """Owner of the job of each event; empty if unknown or without a job."""
    places: tuple[int, ...] = ()
    """Position of each event in its command, from 0."""


class RecordsQuery(msgspec.Struct, frozen=True):
    """Records of a job, oldest first: at most `limit`; with `newest`, the first and the newest ones."""

    job: int
    limit: int
    newest: bool


class RecordsReply(msgspec.Struct, frozen=True):
    """Reply to RecordsQuery. `whole`: complete after the first record; `archived`: pruned records."""

    records: tuple[JobRecord, ...]
    whole: bool
    archived: ArchivedRecords | None = None


class EventPageQuery(msgspec.Struct, frozen=True):
    """Events after a revision, or from an instant if that is 0, up to a revision or an instant."""

    after: int
    since: Instant
    until: int
    """0: up to `before`, or to the last revision."""
    before: Instant
    sought: EventFilter
    limit: int
    """Largest number of commands."""


class EventPageReply(msgspec.Struct, frozen=True):
    """Reply to EventPageQuery: matches up to revision `read`, settled at `at`; the client continues until that is
    `last`.
    """

    happened: tuple[CommandEvents, ...]
    read: int
    at: Instant
    last: int


class LedgerRecords(Protocol):
    """Records of the ledger, for handlers."""

    def records(self, asked: RecordsQuery) -> RecordsReply:
        """Return the records of a job."""
        ...

    def event_page(self, asked: EventPageQuery) -> EventPageReply | QueryFailure:
        """Return a page of events."""
        ...


class ChangesQuery(_Frame, frozen=True, tag=24):
    """Differences between two states, each after a revision or, if that is 0, at an instant."""

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
    """True to compare records that only operators may list."""
    limit: int


class ChangesReply(_Frame, frozen=True, tag=25):
    """Reply to ChangesQuery: JSON of a `cluster.schemas.DiffAnswer`."""

    content: bytes


class TermsQuery(_Frame, frozen=True, tag=26):
    """The last `limit` leader terms that ended after a revision."""

    through: int
    limit: int


class LeaderTerm(msgspec.Struct, frozen=True, array_like=True):
    """Term of the ledger."""

    term: int
    leader: str
    """Name of the leader; empty if the ledger does not say."""
    first_index: int
    last_index: int
    began: Instant
    ended: Instant
    """Clock of its first and of its last batch; NEVER without one."""
    last_before: Instant
    """Clock of the last batch before the term."""


class TermsReply(_Frame, frozen=True, tag=27):
    """Reply to TermsQuery, oldest first."""

    terms: tuple[LeaderTerm, ...]


class PoolUseQuery(_Frame, frozen=True, tag=28):
    """Pool use as far as the ledger was followed; answered at once."""

    name: str = ""
    """Only this pool; empty: all."""


class PoolUseSteps(msgspec.Struct, frozen=True, array_like=True):
    """Pool over time: unit, and steps of held, served and total capacity."""

    name: str
    unit: int
    """A PoolUnit; 0 for a pool that never existed in this period."""
    steps: tuple[tuple[Instant, int, int, int], ...]


class PoolUseReply(_Frame, frozen=True, tag=29):
    """Reply to PoolUseQuery: from `since` to `until`, in steps of at least `step_s`."""

    since: Instant
    until: Instant
    step_s: float
    pools: tuple[PoolUseSteps, ...]
    truncated: bool


class RootQuery(_Frame, frozen=True, tag=7):
    """Root over the first `size` leaves of the ledger's tree, once it has as many."""

    size: int


class ConsistencyQuery(_Frame, frozen=True, tag=11):
    """Proof that the tree of `old_size` leaves is a prefix of that of `size`, once it has as many."""

    size: int
    old_size: int


class TileQuery(_Frame, frozen=True, tag=8):
    """A tile or bundle of the ledger's tree by its path (`cluster.security.proofs.parse_path`)."""

    path: str


class ProofQuery(_Frame, frozen=True, tag=9):
    """Records of a job in the first `size` entries, with proofs (`cluster.server.tlog`)."""

    size: int
    job: int


class CountsQuery(_Frame, frozen=True, tag=12):
    """Record counts of all jobs in the first `size` entries."""

    size: int


class TreeReply(_Frame, frozen=True, tag=10):
    """Reply to RootQuery, ConsistencyQuery, TileQuery and ProofQuery; hashes are concatenated."""

    data: bytes
    more: bytes = b""
    """For ProofQuery: proof that the records are complete, if available."""


class CountsReply(_Frame, frozen=True, tag=13):
    """Reply to CountsQuery: highest job, root over the counts, and the last root the ledger recorded."""

    jobs: int
    root: bytes
    recorded: bytes


NO_JOB = "no_job"
NOT_HELD = "not_held"
REVERSED = "turned"
"""For ChangesQuery: the first state is the later one."""

TreeQuery = RootQuery | ConsistencyQuery | TileQuery | ProofQuery | CountsQuery
"""Queries about the ledger's Merkle tree."""


class CancelQuery(_Frame, frozen=True, tag=30):
    """Cancels the query with this number."""


HistoryQuery = WhyQuery | PastQuery | PresentQuery | ChangesQuery | TermsQuery | PoolUseQuery | TreeQuery
HistoryReply = (
    WhyReply
    | PastReply
    | ReplyPart
    | ChangesReply
    | TermsReply
    | PoolUseReply
    | QueryFailure
    | QueryCost
    | IndexProgress
    | TreeReply
    | CountsReply
)

FromReplica = HistoryQuery | CancelQuery | EntriesApplied

REPLICA_CODEC: Final = FrameCodec[FromReplica, HistoryReply](HistoryReply, bytes_max=FRAME_BYTES_MAX)
"""The replica's end."""

SERVICE_CODEC: Final = FrameCodec[HistoryReply, FromReplica](FromReplica, bytes_max=FRAME_BYTES_MAX)
"""The history service's end."""
