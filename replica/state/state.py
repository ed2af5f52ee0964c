"""The state machine's state: a frozen record of persistent maps.

Any older State stays valid while a newer one exists, so a snapshot, a linearizable read and a time-travel query are
all just "hold a State" (DESIGN.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Annotated, Any

import immutables
import msgspec

from forebay.replica.messages import Actor, CachedReply, Session
from forebay.replica.model import (
    DEFAULT_SCHEDULING_RULES,
    DEFAULT_SITE,
    DEFAULT_TRANSFER_RULES,
    AbandonedBuffers,
    Account,
    AdmittedNode,
    Buffer,
    Consumed,
    Drill,
    DrillLock,
    ExternalJobEpochs,
    Job,
    JobTransfers,
    License,
    Mail,
    NameGroup,
    Node,
    Partition,
    PersistentBuffer,
    Pool,
    Qos,
    Rates,
    Recovery,
    Reservation,
    Revocation,
    Scheduler,
    SchedulingRules,
    SharedFilesystem,
    Site,
    TransferRules,
    UsageKey,
)
from forebay.replica.state.session_replies import SessionReplies
from forebay.replica.state.single_replies import SingleReplies
from forebay.replica.values import (
    ACCOUNTS_MAX,
    CONSUMED_MAX,
    DRILL_LOCKS_MAX,
    DRILLS_KEPT,
    FILESYSTEMS_MAX,
    JOBS_IN_STATE_MAX,
    LICENSES_MAX,
    MAILS_OWED_MAX,
    NEVER,
    NODES_MAX,
    PARTITIONS_MAX,
    PERSISTENT_BUFFERS_MAX,
    POOLS_MAX,
    QOS_MAX,
    RECEIPTS_STORED_MAX,
    RECOVERIES_KEPT,
    RESERVATIONS_MAX,
    REVOCATIONS_MAX,
    SCHEDULERS_MAX,
    SESSIONS_MAX,
    SINK_MARKS_MAX,
    Instant,
    Revision,
)


class State(msgspec.Struct, frozen=True, kw_only=True):
    """The replicated state at one revision. Each map that is not derived has a row in TABLES.

    The maps from `kept` on are derived from the others: updated by `fold`, left out of snapshots and digests, computed
    again on loading, and compared by `replica.state.invariants`.
    """

    cluster_id: str = ""
    name: str = ""
    feature_level: int = 0
    revision: Revision = Revision(0)
    at: Instant = NEVER
    site: Site = DEFAULT_SITE
    """Site configuration (`replica.model.configuration`)."""
    scheduling_rules: SchedulingRules = DEFAULT_SCHEDULING_RULES
    """Scheduling rules of the site."""
    transfer_rules: TransferRules = DEFAULT_TRANSFER_RULES
    """Transfer settings."""
    next_job: int = 1
    pools: immutables.Map[str, Pool] = immutables.Map()
    filesystems: immutables.Map[str, SharedFilesystem] = immutables.Map()
    """Shared filesystems by name."""
    nodes: immutables.Map[str, Node] = immutables.Map()
    jobs: immutables.Map[int, Job] = immutables.Map()
    buffers: immutables.Map[int, Buffer] = immutables.Map()
    receipts: SingleReplies = SingleReplies()
    """Cached replies to single commands."""
    receipt_seconds: tuple[tuple[int, Revision], ...] = ()
    """Seconds since 1970 in which single commands were settled, each with the revision of the first of them."""
    oldest_receipt: int = 1
    """Lower bound of the revisions in `receipts`."""
    sessions: immutables.Map[int, Session] = immutables.Map()
    """Sessions of programs by number."""
    answers: SessionReplies = SessionReplies()
    """Cached replies to the commands of sessions, by `replica.values.reply_key`."""
    clock_set_back: int = 0
    """Revision at which an operator first set the clock back; 0: never."""
    receipts_horizon_ms: int = 0
    """Latest client time among the deleted receipts; an unknown ID that is not newer may be one of them."""

    persistent: immutables.Map[str, PersistentBuffer] = immutables.Map()
    """Persistent buffers by name, from allocating to deleted."""
    accounts: immutables.Map[str, Account] = immutables.Map()
    qos: immutables.Map[str, Qos] = immutables.Map()
    licenses: immutables.Map[str, License] = immutables.Map()
    reservations: immutables.Map[str, Reservation] = immutables.Map()
    """Reservations that have not ended."""
    rates: immutables.Map[str, Rates] = immutables.Map()
    """Pool -> statistics of its operations."""
    mails: immutables.Map[str, Mail] = immutables.Map()
    """Unsent mail by key (`replica.model.mail`)."""
    sink_marks: immutables.Map[str, int] = immutables.Map()
    """Event sink -> revision up to which its receiver has accepted all events."""
    partitions: immutables.Map[str, Partition] = immutables.Map()
    consumed: Consumed = immutables.Map()
    """Burst-buffer usage of accounts, their users, and QOS (`replica.model.usage`)."""
    transfers: immutables.Map[int, JobTransfers] = immutables.Map()
    """Job -> its transfer receipts and newest checkpoint, for jobs that have any."""
    revocations: immutables.Map[str, Revocation] = immutables.Map()
    """Revoked certificates and holders."""
    admitted: immutables.Map[str, AdmittedNode] = immutables.Map()
    """Names under which agents may register."""
    abandoned: immutables.Map[str, AbandonedBuffers] = immutables.Map()
    """Node -> buffers abandoned there, until its agent has removed them."""
    external_jobs: immutables.Map[str, ExternalJobEpochs] = immutables.Map()
    """External jobs by name (`slurm:42`) -> their jobs here."""
    schedulers: immutables.Map[str, Scheduler] = immutables.Map()
    """Other schedulers by name."""
    drills: immutables.Map[int, Drill] = immutables.Map()
    """Recent drills by ID."""
    drill_locks: immutables.Map[str, DrillLock] = immutables.Map()
    """Operators who ban drills, by name."""
    recoveries: immutables.Map[int, Recovery] = immutables.Map()
    """Recent incarnations of the cluster except the first, by number."""

    kept: immutables.Map[Actor, int] = immutables.Map()
    """Derived: actor -> number of its cached replies, in sessions or not."""
    using: immutables.Map[str, immutables.Map[int, bool]] = immutables.Map()
    """Derived: persistent buffer -> jobs that use it, from stage-in to the end of teardown."""
    held_bytes: immutables.Map[str, int] = immutables.Map()
    """Derived: pool -> bytes held by buffers."""
    unfinished: immutables.Map[int, bool] = immutables.Map()
    """Derived: jobs that have not finished or whose buffer is not complete."""
    finished: immutables.Map[int, bool] = immutables.Map()
    """Derived: all other jobs."""
    on_node: immutables.Map[str, immutables.Map[int, bool]] = immutables.Map()
    """Derived: node -> jobs of `unfinished` that are on it or whose mover it is."""
    holders: immutables.Map[str, immutables.Map[int, bool]] = immutables.Map()
    """Derived: pool -> jobs whose buffers hold space of it."""
    operations: immutables.Map[int, int] = immutables.Map()
    """Derived: stage -> number of occupied slots (`replica.operations.slots`); RUN: pre-runs."""
    arrays: immutables.Map[int, immutables.Map[int, int]] = immutables.Map()
    """Derived: array -> task -> job, for tasks in `jobs`."""
    named: immutables.Map[str, immutables.Map[str, NameGroup]] = immutables.Map()
    """Derived: user -> job name -> jobs without a result (`singleton`)."""
    use: immutables.Map[UsageKey, int] = immutables.Map()
    """Derived: usage that counts towards limits, licences and reservations (`replica.model.usage`)."""
    destinations: immutables.Map[str, immutables.Map[int, bool]] = immutables.Map()
    """Derived: outside path -> jobs of `unfinished` that stage out to it."""
    moving: immutables.Map[tuple[str, str], int] = immutables.Map()
    """Derived: (user, node) -> active transfers (`replica.operations.transfer_limits`); an empty part stands
    for all.
    """

    @property
    def replies_kept(self) -> int:
        """Return the number of cached replies to single commands and in sessions."""
        return len(self.receipts) + len(self.answers)

    def session_reply(self, session: int, sequence: int) -> CachedReply | None:
        """Return the cached reply to a command of a session, or None."""
        return self.answers.find(session, sequence)


EMPTY = State()


# ---- table of the maps of a State, used by digest, snapshot and invariants


CommandId = Annotated[bytes, msgspec.Meta(min_length=1, max_length=64)]


class Table(msgspec.Struct, frozen=True):
    """Properties of a map of the State. `section` is its number in snapshots: append only, never reused (law 12)."""

    field: str
    section: int
    key: Any
    record: type
    records_max: int
    own_key: str = ""
    """Attribute of a record that is its key; such records are written alone, others as pairs of key and record."""
    of_job: bool = False
    """True if the keys are IDs of jobs, which must exist in the state."""

    def pair(self, written: Any) -> tuple[Any, Any]:
        """Return the key and record of a written row."""
        if self.own_key:
            return getattr(written, self.own_key), written
        key, record = written
        return key, record

    def rows(self, state: State) -> Iterator[Any]:
        """Yield the rows to write, in the order of keys; receipts in the order of their revisions."""
        records = getattr(state, self.field)
        pairs = records.items() if self.field == "receipts" else ((key, records[key]) for key in sorted(records))
        return (record for _, record in pairs) if self.own_key else iter(pairs)

    def find_misplaced(self, state: State) -> Iterator[str]:
        """Yield a sentence for each record under a wrong key, or of a job that does not exist."""
        records = getattr(state, self.field)
        if self.own_key:
            own_key = attrgetter(self.own_key)
            for key, record in records.items():
                if own_key(record) != key:
                    yield f"{self.field}: the record under {key!r} has the key {own_key(record)!r}"
        if self.of_job:
            for job_id in records:
                if job_id not in state.jobs:
                    yield f"{self.field}: there is a record of job {job_id}, which does not exist"


TABLES: tuple[Table, ...] = (
    Table("jobs", 10, int, Job, JOBS_IN_STATE_MAX, "id"),
    Table("buffers", 20, int, Buffer, JOBS_IN_STATE_MAX, "job", of_job=True),
    Table("persistent", 24, str, PersistentBuffer, PERSISTENT_BUFFERS_MAX, "name"),
    Table("transfers", 28, int, JobTransfers, JOBS_IN_STATE_MAX, of_job=True),
    Table("external_jobs", 30, str, ExternalJobEpochs, JOBS_IN_STATE_MAX, "name"),
    Table("schedulers", 32, str, Scheduler, SCHEDULERS_MAX, "name"),
    Table("pools", 40, str, Pool, POOLS_MAX, "name"),
    Table("filesystems", 42, str, SharedFilesystem, FILESYSTEMS_MAX, "name"),
    Table("rates", 44, str, Rates, POOLS_MAX + 1),
    Table("nodes", 50, str, Node, NODES_MAX, "name"),
    Table("abandoned", 52, str, AbandonedBuffers, NODES_MAX, "node"),
    Table("partitions", 54, str, Partition, PARTITIONS_MAX, "name"),
    Table("accounts", 60, str, Account, ACCOUNTS_MAX, "name"),
    Table("qos", 62, str, Qos, QOS_MAX, "name"),
    Table("licenses", 64, str, License, LICENSES_MAX, "name"),
    Table("reservations", 66, str, Reservation, RESERVATIONS_MAX, "name"),
    Table("consumed", 68, str, int, CONSUMED_MAX),
    Table("mails", 80, str, Mail, MAILS_OWED_MAX, "key"),
    Table("sink_marks", 82, str, int, SINK_MARKS_MAX),
    Table("receipts", 90, CommandId, CachedReply, RECEIPTS_STORED_MAX),
    Table("sessions", 94, int, Session, 16 * SESSIONS_MAX, "number"),
    Table("answers", 95, CommandId, CachedReply, RECEIPTS_STORED_MAX),
    Table("revocations", 92, str, Revocation, REVOCATIONS_MAX, "certificate"),
    Table("drills", 96, int, Drill, DRILLS_KEPT, "id"),
    Table("drill_locks", 98, str, DrillLock, DRILL_LOCKS_MAX, "by"),
    Table("recoveries", 91, int, Recovery, RECOVERIES_KEPT, "incarnation"),
    Table("admitted", 93, str, AdmittedNode, NODES_MAX, "name"),
)
"""All maps that are not derived, in the order of digests and snapshots; numbers are never reused.

A new map takes a field in State, a row here, and an annotation in StateBuilder. It is empty below the feature level of
its events, and then leaves no trace in digests and snapshots.
"""
