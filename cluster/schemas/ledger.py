"""Responses about the ledger, snapshots and the event stream: a part of `cluster.schemas.jobs`."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import msgspec

from forebay.cluster.schemas.base import NUMBER_MAX, Answer, Json, Request, View

NOTE_CHARACTERS_MAX = 64 * 1024
"""Length of a checkpoint with its signatures, characters: three lines, and one for each replica and witness."""


class LedgerEntryView(View, frozen=True, kw_only=True):
    """Ledger entry. `records` are its commands with their replies and events; a no-op has none."""

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
    """Response of GET /v1/ledger; continue from the index after the last one."""

    first_index: int
    applied_index: int
    entries: tuple[LedgerEntryView, ...]


class HandedView(View, frozen=True, kw_only=True):
    """Ledger entry as stored, for a replica that received a snapshot in its place."""

    index: int
    term: int
    data: bytes
    """The entry's bytes, base64."""
    digest_before: str
    """Digest of the preceding ledger, hexadecimal."""
    revision_before: int
    seal: bytes = b""
    """Signature of the leader that accepted it, base64."""


class HandedAnswer(Answer, frozen=True, kw_only=True):
    """Response of GET /v1/ledger/history: entries that end with the requested one, newest first."""

    entries: tuple[HandedView, ...]


class SnapshotPoolView(View, frozen=True, kw_only=True):
    """A pool in a snapshot with its derived free capacity."""

    name: str
    quantity_bytes: int
    free_bytes: int


class SnapshotView(View, frozen=True, kw_only=True):
    """Finalized snapshot file."""

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
    """Snapshot that a replica offers for download."""

    name: str
    index: int
    term: int
    size_bytes: int


class SnapshotsAnswer(Answer, frozen=True, kw_only=True):
    """Response of GET /v1/snapshots."""

    replica: str
    snapshots: tuple[StoredSnapshotView, ...]


class EventView(View, frozen=True, kw_only=True):
    """Event of GET /v1/events. Events of one command share its revision and are ordered by `sequence`, from 0."""

    revision: int
    sequence: int = 0
    at: str
    actor: str
    command: str
    event: str
    job_id: int | None = None
    detail: Json = {}


class StoryRow(View, frozen=True, kw_only=True):
    """Event, or one rejected command. Rows of a command share its revision, in order: `revision` and `sequence` are
    those of GET /v1/events, whatever the filter.
    """

    revision: int
    sequence: int = 0
    at: str
    actor: str
    """Sender of the command: `operator admin`, `user alice`, `agent n1`, `scheduler`, `leader`."""
    command: str
    event: str
    """Name of the event, or `rejected`."""
    job_id: int | None = None
    user: str | None = None
    """Owner of the job; null for no job or an unknown owner."""
    sentence: str
    remedy: str | None = None
    """Remedy of a rejection."""
    detail: Json = {}


class StoryAnswer(Answer, frozen=True, kw_only=True):
    """Response of GET /v1/history: one page, oldest first. If `read` is less than `last`, request the next page after
    `read`.
    """

    rows: tuple[StoryRow, ...]
    read: int
    """Last revision searched; `rows` has every match up to it."""
    read_at: str | None
    """Time of that revision."""
    last: int
    """Last requested revision."""


class MomentView(View, frozen=True, kw_only=True):
    """A point in the ledger: the last revision and its time."""

    revision: int
    at: str | None


class ChangeView(View, frozen=True, kw_only=True):
    """Changed record. The actor is null for changes without a command of their own, such as allocations."""

    kind: str
    """job, pool, node, account, site, ..."""
    name: str
    """Job ID or name; empty for a singleton."""
    change: str
    """new, changed or gone."""
    fields: dict[str, tuple[Any, Any]]
    """Old and new value of each field; null if it did not exist. Nested fields are written `request.user`."""
    revision: int | None
    """Last revision that changed it."""
    at: str | None
    actor: str | None
    command: str | None


class DiffAnswer(Answer, frozen=True, kw_only=True):
    """Response of GET /v1/diff: differences between two revisions. `more`: the limit cut them off."""

    since: MomentView
    until: MomentView
    changes: tuple[ChangeView, ...]
    more: bool


class LeaderTermView(View, frozen=True, kw_only=True):
    """Leader's term in the ledger."""

    term: int
    leader: str | None
    """Name of the replica; null if the ledger does not say."""
    first_index: int
    last_index: int
    from_at: str | None
    """Settlement time of the term's first command; null for none."""
    to_at: str | None
    silent_s: float | None
    """Time between the previous term's last command and this term's first, seconds: an upper bound of the time without
    a leader.
    """


class LeadersAnswer(Answer, frozen=True, kw_only=True):
    """Response of GET /v1/history/leaders, oldest first."""

    terms: tuple[LeaderTermView, ...]


# ---- responses about the feature level


class MemberLevelView(View, frozen=True, kw_only=True):
    """Feature level of one replica."""

    name: str
    id: str
    votes: bool = True
    known: int | None
    """Highest feature level it supports; null without a response."""
    version: str = ""


class ClockAnswer(Answer, frozen=True, kw_only=True):
    """Response of GET and POST /v1/clock: the cluster's time and the wall clocks of a majority."""

    at: str
    """Time a command would get now."""
    earliest: str | None = None
    """Lower bound from a majority's wall clocks; null if no majority can be read."""
    latest: str | None = None
    """Upper bound from a majority's wall clocks."""
    ahead_s: float = 0.0
    """Lead of the cluster's time over those clocks, seconds; it runs at half speed until they agree."""
    off: tuple[str, ...] = ()
    """Replicas whose wall clocks differ too much from a majority's; they do not campaign."""


class FeatureLevelAnswer(Answer, frozen=True, kw_only=True):
    """Response of GET and POST /v1/feature-level: the cluster's level and each replica's highest."""

    feature_level: int
    release: str
    """First release that supports the cluster's level; earlier releases stop."""
    next_level: int | None = None
    """Next level the responding replica supports; null: none."""
    next_release: str = ""
    next_brings: str = ""
    """Description of what the next level allows."""
    may_be_raised: bool = False
    """True if every member supports the next level."""
    members: tuple[MemberLevelView, ...] = ()


class SignRequest(Request, frozen=True, kw_only=True):
    """Body of POST /v1/tlog/sign: the leader's tree size, in entries, and its root (hexadecimal)."""

    size: Annotated[int, msgspec.Meta(ge=1, le=NUMBER_MAX)]
    root: Annotated[str, msgspec.Meta(min_length=64, max_length=64)]
    histories: bool = False
    """True to count the job records as well."""


class HistoriesView(View, frozen=True, kw_only=True):
    """Record counts of all jobs in the first entries: the highest job ID, and the root over the counts."""

    jobs: int
    root: str
    """Hexadecimal."""


class SignedAnswer(Answer, frozen=True, kw_only=True):
    """Response of POST /v1/tlog/sign: the replica's own tree, signed if it matches the request."""

    replica: str
    key: str
    """Public key in verifier form: `name+key id+key`."""
    root: str
    """Root of its own tree at that size, hexadecimal."""
    note: str | None
    """Checkpoint with its signature; null if the roots differ."""
    histories: HistoriesView | None = None
    """Record counts, if requested and available."""


class CheckpointRequest(Request, frozen=True, kw_only=True):
    """Body of POST /v1/tlog/checkpoint: a signed note."""

    note: Annotated[str, msgspec.Meta(max_length=NOTE_CHARACTERS_MAX)]


class CheckpointAnswer(Answer, frozen=True, kw_only=True):
    """Response of POST /v1/tlog/checkpoint: entries covered by this replica's last checkpoint."""

    size: int


class LogKeyView(View, frozen=True, kw_only=True):
    """Key with which a replica signs checkpoints."""

    replica: str
    key: str
    """Public key in verifier form: `name+key id+key`."""


class WitnessKeyView(View, frozen=True, kw_only=True):
    """Key with which a witness cosigns checkpoints, from the responding replica's configuration."""

    witness: str
    key: str
    """Public key in verifier form: `name+key id+key`."""


class LogKeysAnswer(Answer, frozen=True, kw_only=True):
    """Response of GET /v1/tlog/keys."""

    origin: str
    """First line of this ledger's checkpoints."""
    replica: str
    """Responding replica."""
    keys: tuple[LogKeyView, ...]
    """Keys of all reachable members."""
    witnesses: tuple[WitnessKeyView, ...] = ()
    witnesses_needed: int = 0
    """Cosignatures that make a checkpoint witnessed, count."""


def group_by_point(digests: Iterable[tuple[str, Mapping[int, str]]]) -> dict[int, dict[str, str]]:
    """Return {point: {replica: digest}} from (replica, {point: digest}) pairs; a point is a revision or an entry."""
    found = defaultdict[int, dict[str, str]](dict)
    for name, given in digests:
        for point, digest in given.items():
            found[point][name] = digest
    return found
