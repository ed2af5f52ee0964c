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

from replica.messages import Actor, CachedReply, Session
from replica.model import (
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
from replica.state.session_replies import SessionReplies
from replica.state.single_replies import SingleReplies
from replica.values import (
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
    Instant,
    Revision,
)


class State(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the replicas agree on at one revision. Each map that is not derived has a row in
    TABLES.

    The maps from `kept` on are derived from the others: kept up to date by `fold`, left out of snapshots and digests,
    computed again on loading, and compared by `replica.state.invariants`.
    """

    cluster_id: str = ""
    name: str = ""
    feature_level: int = 0
    revision: Revision = Revision(0)
    at: Instant = NEVER
    site: Site = DEFAULT_SITE
    """Site configuration (`replica.model.configuration`)."""
    scheduling_rules: SchedulingRules = DEFAULT_SCHEDULING_RULES
    """The site's rules of scheduling."""
    transfer_rules: TransferRules = DEFAULT_TRANSFER_RULES
    """Transfer settings."""
    next_job: int = 1
    pools: immutables.Map[str, Pool] = immutables.Map()
    filesystems: immutables.Map[str, SharedFilesystem] = immutables.Map()
    """File systems that all nodes mount."""
    nodes: immutables.Map[str, Node] = immutables.Map()
    jobs: immutables.Map[int, Job] = immutables.Map()
    buffers: immutables.Map[int, Buffer] = immutables.Map()
    receipts: SingleReplies = SingleReplies()
    """Answers to single commands."""
    receipt_seconds: tuple[tuple[int, Revision], ...] = ()
    """Seconds since 1970 in which single commands were settled, each with the revision of the first of them."""
    oldest_receipt: int = 1
    """No receipt has a smaller revision."""
    sessions: immutables.Map[int, Session] = immutables.Map()
    """Sessions of programs by number."""
    answers: SessionReplies = SessionReplies()
    """Answers to the commands of sessions, by `replica.values.reply_key`."""
    clock_set_back: int = 0
    """Revision at which an operator set the clock back for the first time; 0: the time only grew so far."""
    receipts_horizon_ms: int = 0
    """The latest client time among the dropped receipts: an unknown id that is not newer may be one of them."""

    persistent: immutables.Map[str, PersistentBuffer] = immutables.Map()
    """Persistent buffers by name, from allocating to deleted."""
    accounts: immutables.Map[str, Account] = immutables.Map()
    qos: immutables.Map[str, Qos] = immutables.Map()
    licenses: immutables.Map[str, License] = immutables.Map()
    reservations: immutables.Map[str, Reservation] = immutables.Map()
    """Reservations that have not ended."""
    rates: immutables.Map[str, Rates] = immutables.Map()
    """Pool -> what was measured of its transfers."""
    mails: immutables.Map[str, Mail] = immutables.Map()
    """Mails that are owed (`replica.model.mail`), by their key."""
    partitions: immutables.Map[str, Partition] = immutables.Map()
    consumed: Consumed = immutables.Map()
    """Burst-buffer usage of accounts, their users, and QOS (`replica.model.usage`)."""
    transfers: immutables.Map[int, JobTransfers] = immutables.Map()
    """Receipts and the newest checkpoint of the jobs that have any."""
    revocations: immutables.Map[str, Revocation] = immutables.Map()
    """Certificates and holders that are refused."""
    admitted: immutables.Map[str, AdmittedNode] = immutables.Map()
    """Names under which agents may register."""
    abandoned: immutables.Map[str, AbandonedBuffers] = immutables.Map()
    """Node -> buffers that were given up there, until its agent has removed them."""
    external_jobs: immutables.Map[str, ExternalJobEpochs] = immutables.Map()
    """Jobs of other schedulers by name (`slurm:42`) -> the jobs here that are theirs."""
    schedulers: immutables.Map[str, Scheduler] = immutables.Map()
    """Other schedulers by name."""
    drills: immutables.Map[int, Drill] = immutables.Map()
    """Drills by number, the last ones."""
    drill_locks: immutables.Map[str, DrillLock] = immutables.Map()
    """Operators who want no drills, by name."""
    recoveries: immutables.Map[int, Recovery] = immutables.Map()
    """The last incarnations of the cluster but the first, by number."""

    kept: immutables.Map[Actor, int] = immutables.Map()
    """Derived: actor -> how many answers are kept for it, in sessions or not."""
    using: immutables.Map[str, immutables.Map[int, bool]] = immutables.Map()
    """Derived: name of a persistent buffer -> the jobs that work with it now, from stage-in to the end of teardown."""
    held_bytes: immutables.Map[str, int] = immutables.Map()
    """Derived: pool -> bytes held by buffers."""
    unfinished: immutables.Map[int, bool] = immutables.Map()
    """Derived: jobs that are not over or whose buffer is not complete."""
    finished: immutables.Map[int, bool] = immutables.Map()
    """Derived: the other jobs."""
    on_node: immutables.Map[str, immutables.Map[int, bool]] = immutables.Map()
    """Derived: node -> the jobs of `unfinished` that have something there, or whose mover it is."""
    holders: immutables.Map[str, immutables.Map[int, bool]] = immutables.Map()
    """Derived: pool -> the jobs whose buffer holds a part of it."""
    operations: immutables.Map[int, int] = immutables.Map()
    """Derived: stage -> how many slots of it are taken (`replica.operations.slots`); RUN: pre-runs."""
    arrays: immutables.Map[int, immutables.Map[int, int]] = immutables.Map()
    """Derived: array -> task -> job, of the tasks that are in `jobs`."""
    named: immutables.Map[str, immutables.Map[str, NameGroup]] = immutables.Map()
    """Derived: user -> job name -> the jobs of `unfinished` that are not over (`singleton`)."""
    use: immutables.Map[UsageKey, int] = immutables.Map()
    """Derived: what counts against limits, licences and reservations (`replica.model.usage`)."""
    destinations: immutables.Map[str, immutables.Map[int, bool]] = immutables.Map()
    """Derived: path outside -> the jobs of `unfinished` that stage out to it."""
    moving: immutables.Map[tuple[str, str], int] = immutables.Map()
    """Derived: (user, node) -> transfers under way (`replica.operations.transfer_limits`); an empty part stands for
    all."""

    @property
    def replies_kept(self) -> int:
        """Answers that are kept of single commands and in sessions, count."""
        return len(self.receipts) + len(self.answers)

    def session_reply(self, session: int, sequence: int) -> CachedReply | None:
        """Return the answer to a command of a session, if it is kept."""
        return self.answers.find(session, sequence)


EMPTY = State()


# ---- the maps of a State, each in one row: digest, snapshot and invariants go through them


CommandId = Annotated[bytes, msgspec.Meta(min_length=1, max_length=64)]


class Table(msgspec.Struct, frozen=True):
    """Metadata of a map of the State. `section` is its number in snapshots: append only, never reused (law 12)."""

    field: str
    section: int
    key: Any
    record: type
    records_max: int
    own_key: str = ""
    """The attribute of a record that is its key: the record then stands alone, else a pair of key and record."""
    of_job: bool = False
    """The keys are IDs of jobs, which must exist in the state."""

    def pair(self, written: Any) -> tuple[Any, Any]:
        """Return key and record of what stands in a section."""
        if self.own_key:
            return getattr(written, self.own_key), written
        key, record = written
        return key, record

    def rows(self, state: State) -> Iterator[Any]:
        """Yield what stands in a section, in the order of keys; receipts in the order of their revisions."""
        records = getattr(state, self.field)
        pairs = records.items() if self.field == "receipts" else ((key, records[key]) for key in sorted(records))
        return (record for _, record in pairs) if self.own_key else iter(pairs)

    def find_misplaced(self, state: State) -> Iterator[str]:
        """Yield a sentence for each record under a key that is not its own, or of a job that does not exist."""
        records = getattr(state, self.field)
        if self.own_key:
            own_key = attrgetter(self.own_key)
            for key, record in records.items():
                if own_key(record) != key:
                    yield f"{self.field}: the record under {key!r} says that it is {own_key(record)!r}"
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
    Table("receipts", 90, CommandId, CachedReply, RECEIPTS_STORED_MAX),
    Table("sessions", 94, int, Session, 16 * SESSIONS_MAX, "number"),
    Table("answers", 95, CommandId, CachedReply, RECEIPTS_STORED_MAX),
    Table("revocations", 92, str, Revocation, REVOCATIONS_MAX, "certificate"),
    Table("drills", 96, int, Drill, DRILLS_KEPT, "id"),
    Table("drill_locks", 98, str, DrillLock, DRILL_LOCKS_MAX, "by"),
    Table("recoveries", 91, int, Recovery, RECOVERIES_KEPT, "incarnation"),
    Table("admitted", 93, str, AdmittedNode, NODES_MAX, "name"),
)
"""Every map that is not derived, in the order in which they stand in digests and snapshots; numbers are never reused.

To add one: its field in State with its row here, and its annotation in StateBuilder. It is empty below the feature
level that its events came with, and then leaves no trace in digests and snapshots.
"""
