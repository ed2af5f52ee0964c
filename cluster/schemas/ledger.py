"""What a replica answers about its ledger, its snapshots and the stream of events: a part of `cluster.schemas.jobs`."""

from typing import Annotated, Any

import msgspec

from cluster.schemas.base import NUMBER_MAX, Answer, Json, Request, View

NOTE_CHARACTERS_MAX = 64 * 1024
"""A checkpoint with its signatures, characters: three lines, and one for each replica and witness."""


class LedgerEntryView(View, frozen=True, kw_only=True):
    """One entry of the ledger. `records` are its commands with their answers and events; a no-op has none."""

    index: int
    term: int
    kind: str
    """no-op or batch."""
    digest: str
    base_revision: int | None = None
    revision: int | None = None
    """Revision after this entry."""
    at: str | None = None
    size_bytes: int = 0
    records: tuple[Json, ...] = ()


class LedgerAnswer(Answer, frozen=True, kw_only=True):
    """Answer of GET /v1/ledger; ask again from the index after the last one."""

    first_index: int
    applied_index: int
    entries: tuple[LedgerEntryView, ...]


class HandedView(View, frozen=True, kw_only=True):
    """One entry of the ledger as it is stored: what a replica needs that was sent a snapshot instead of it."""

    index: int
    term: int
    data: bytes
    """The entry's bytes, base64."""
    digest_before: str
    """Digest of the ledger before it, hexadecimal."""
    revision_before: int
    seal: bytes = b""
    """Signature of the leader that accepted it, base64."""


class HandedAnswer(Answer, frozen=True, kw_only=True):
    """Answer of GET /v1/ledger/history: entries that end with the one that was asked for, the newest first."""

    entries: tuple[HandedView, ...]


class SnapshotPoolView(View, frozen=True, kw_only=True):
    """A pool in a snapshot with its derived free capacity."""

    name: str
    quantity_bytes: int
    free_bytes: int


class SnapshotView(View, frozen=True, kw_only=True):
    """One finalized snapshot file."""

    path: str
    index: int
    term: int
    revision: int
    at: str | None
    size_bytes: int
    ledger_digest: str
    """Digest of the ledger's chain at `index`, hexadecimal."""
    jobs: int = 0
    buffers: int = 0
    pools: tuple[SnapshotPoolView, ...] = ()


class StoredSnapshotView(View, frozen=True, kw_only=True):
    """One snapshot that a replica may hand out."""

    name: str
    index: int
    term: int
    size_bytes: int


class SnapshotsAnswer(Answer, frozen=True, kw_only=True):
    """Answer of GET /v1/snapshots."""

    replica: str
    snapshots: tuple[StoredSnapshotView, ...]


class EventView(View, frozen=True, kw_only=True):
    """One event of GET /v1/events. Events of one command share its revision and come in order (`sequence` from 0)."""

    revision: int
    sequence: int = 0
    at: str
    actor: str
    command: str
    event: str
    job_id: int | None = None
    detail: Json = {}


class StoryRow(View, frozen=True, kw_only=True):
    """Something that happened, or a command that was refused. Those of one command share its revision, in order: the
    same `revision` and `sequence` as in GET /v1/events, whatever was asked for.
    """

    revision: int
    sequence: int = 0
    at: str
    actor: str
    """Who sent the command: `operator admin`, `user alice`, `agent n1`, `scheduler`, `leader`."""
    command: str
    event: str
    """Name of the event, or `refused`."""
    job_id: int | None = None
    user: str | None = None
    """Whose job it is; null for none, and where that is not known."""
    sentence: str
    remedy: str | None = None
    """Of what was refused: what would be right."""
    detail: Json = {}


class StoryAnswer(Answer, frozen=True, kw_only=True):
    """Answer of GET /v1/history: a stretch of it, oldest first. Where `read` is less than `last` there is more: ask
    again after `read`.
    """

    rows: tuple[StoryRow, ...]
    read: int
    """The revision up to which was looked; everything that was asked for up to there is in `rows`."""
    read_at: str | None
    """When that was."""
    last: int
    """The last revision that was asked for."""


class MomentView(View, frozen=True, kw_only=True):
    """A moment of the ledger: the last revision then, and its time."""

    revision: int
    at: str | None


class ChangeView(View, frozen=True, kw_only=True):
    """One thing that is not what it was. Who did that is null where nobody asked for it, as where jobs took space."""

    kind: str
    """job, pool, node, account, site, ..."""
    name: str
    """A job's number, or a name; empty for what there is one of."""
    change: str
    """new, changed or gone."""
    fields: dict[str, tuple[Any, Any]]
    """What each field was, and is; null for what was not there. Fields of records in it as `request.user`."""
    revision: int | None
    """The last one that changed it."""
    at: str | None
    actor: str | None
    command: str | None


class DiffAnswer(Answer, frozen=True, kw_only=True):
    """Answer of GET /v1/diff: what differs between two moments; `more`: the limit cut it off."""

    since: MomentView
    until: MomentView
    changes: tuple[ChangeView, ...]
    more: bool


class LeaderTermView(View, frozen=True, kw_only=True):
    """One leader's term, as the ledger has it."""

    term: int
    leader: str | None
    """Name of the replica; null where the ledger does not say."""
    first_index: int
    last_index: int
    from_at: str | None
    """When the first command of the term was settled; null where none was."""
    to_at: str | None
    silent_s: float | None
    """Between the last command before it and its first one, seconds: never less than for how long nobody led."""


class LeadersAnswer(Answer, frozen=True, kw_only=True):
    """Answer of GET /v1/history/leaders, oldest first."""

    terms: tuple[LeaderTermView, ...]


# ---- the answers about the feature level, beside those of `cluster.schemas.jobs`


class MemberLevelView(View, frozen=True, kw_only=True):
    """One replica in the answer about the feature level."""

    name: str
    id: str
    votes: bool = True
    known: int | None
    """The highest feature level that it knows; null if it did not answer."""
    version: str = ""


class ClockAnswer(Answer, frozen=True, kw_only=True):
    """Answer of GET and POST /v1/clock: the cluster's time, and what the wall clocks of a majority say."""

    at: str
    """The time that a command would have now."""
    earliest: str | None = None
    """What a majority's wall clocks have passed; null where no majority can be read."""
    latest: str | None = None
    """What a majority's wall clocks have not reached."""
    ahead_s: float = 0.0
    """How far the cluster's time is ahead of that, seconds; it goes at half its speed meanwhile."""
    off: tuple[str, ...] = ()
    """Replicas whose wall clocks are off from a majority's: none of them is to lead."""


class FeatureLevelAnswer(Answer, frozen=True, kw_only=True):
    """Answer of GET and POST /v1/feature-level: where the cluster is, and who knows what."""

    feature_level: int
    release: str
    """The first release that knows the cluster's level; an earlier one stops."""
    next_level: int | None = None
    """What it may be raised to, as far as the replica that answers knows; null: nothing further."""
    next_release: str = ""
    next_brings: str = ""
    """What it then allows, in words."""
    may_be_raised: bool = False
    """Whether every member knows the next level."""
    members: tuple[MemberLevelView, ...] = ()


class SignRequest(Request, frozen=True, kw_only=True):
    """Body of POST /v1/tlog/sign: the size of the tree, in entries, and the root (hexadecimal) that the leader has."""

    size: Annotated[int, msgspec.Meta(ge=1, le=NUMBER_MAX)]
    root: Annotated[str, msgspec.Meta(min_length=64, max_length=64)]
    histories: bool = False
    """Whether the records of jobs are to be counted in it, too."""


class HistoriesView(View, frozen=True, kw_only=True):
    """How many records of each job there are in so many entries: up to which job, and the root over the counts."""

    jobs: int
    root: str
    """Hexadecimal."""


class SignedAnswer(Answer, frozen=True, kw_only=True):
    """Answer of POST /v1/tlog/sign: what this replica's own ledger comes to, signed where it is what was asked for."""

    replica: str
    key: str
    """As verifiers are given it: `name+key id+key`."""
    root: str
    """Of its own tree at that size, hexadecimal."""
    note: str | None
    """The checkpoint with its signature; none where its root is another one."""
    histories: HistoriesView | None = None
    """What was counted, if that was asked for and could be."""


class CheckpointRequest(Request, frozen=True, kw_only=True):
    """Body of POST /v1/tlog/checkpoint: a signed note."""

    note: Annotated[str, msgspec.Meta(max_length=NOTE_CHARACTERS_MAX)]


class CheckpointAnswer(Answer, frozen=True, kw_only=True):
    """Answer of POST /v1/tlog/checkpoint: how many entries are under the last checkpoint that this replica has."""

    size: int


class LogKeyView(View, frozen=True, kw_only=True):
    """The key that a replica signs checkpoints with."""

    replica: str
    key: str
    """As verifiers are given it: `name+key id+key`."""


class WitnessKeyView(View, frozen=True, kw_only=True):
    """The key that a witness cosigns checkpoints with, as the replica that answers has it configured."""

    witness: str
    key: str
    """As verifiers are given it: `name+key id+key`."""


class LogKeysAnswer(Answer, frozen=True, kw_only=True):
    """Answer of GET /v1/tlog/keys."""

    origin: str
    """What checkpoints of this ledger begin with."""
    replica: str
    """Who answers."""
    keys: tuple[LogKeyView, ...]
    """Those of all members that could be asked."""
    witnesses: tuple[WitnessKeyView, ...] = ()
    witnesses_needed: int = 0
    """How many of them must have cosigned a checkpoint that is called witnessed."""
