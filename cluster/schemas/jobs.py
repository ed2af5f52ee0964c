"""Responses of `/v1`: JSON schemas shared by the server and its clients.

Times are ISO 8601 in UTC with microseconds, null for events that have not happened; sizes are bytes. Older clients
ignore fields that a newer server adds. `revision` is the revision at which a response was true.
"""

from typing import Literal

import msgspec

from forebay.cluster.schemas.base import Answer, Json, View
from forebay.cluster.schemas.job_fields import JobDetailsView
from forebay.cluster.schemas.transfers import JobTransfersView
from forebay.replica.model import Order

# Errors


class OtherError(View, frozen=True, kw_only=True):
    """A further error found in the same request."""

    sentence: str
    remedy: str = ""
    place: str = ""


class ErrorView(View, frozen=True, kw_only=True):
    """Reason of a rejection or failure: a sentence for users, a code for programs.

    `outcome` is `rejected` if nothing changed, and `unknown` if the client must resend the same command ID to find out.
    """

    code: str
    sentence: str
    remedy: str = ""
    place: str = ""
    outcome: Literal["rejected", "unknown"] = "rejected"
    others: tuple[OtherError, ...] | msgspec.UnsetType = msgspec.UNSET
    """Further errors of the request; omitted if there are none."""


class ErrorAnswer(View, frozen=True, kw_only=True):
    """Body of every response with a status of 400 or above."""

    error: ErrorView


# Jobs


class JobView(View, frozen=True, kw_only=True):
    """Job. `state` and `reason` are spelled exactly as in Slurm."""

    job_id: int
    name: str
    user: str
    state: str
    """PENDING CONFIGURING RUNNING SUSPENDED STAGE_OUT COMPLETED FAILED CANCELLED TIMEOUT NODE_FAIL."""
    reason: str
    """`None` (the word) if nothing holds the job back."""
    burst_buffer: str | None
    """Request as text, in the form of `BurstBuffer=`; null for a job without a buffer."""
    burst_buffer_state: str | None
    """pending, staging-in, staged-in, …; null for a job without a buffer."""
    pool: str | None
    capacity_bytes: int
    """Capacity of the buffer: the request rounded up to the pool's granularity; 0 if nothing is reserved."""
    node: str | None
    priority: int
    attempt: int
    cpus: int
    time_limit_s: int
    submit_time: str | None
    eligible_time: str | None
    start_time: str | None
    end_time: str | None
    exit_code: int
    signal: int
    hold: Literal["user", "admin", "system"] | None
    system_comment: str
    """Message of the last failed operation."""
    workdir: str
    output: str
    dependencies: tuple[str, ...] = ()
    cancelled: bool = False
    warnings: tuple[str, ...] = ()
    """Response to a submit only: directive options that were kept but not understood."""
    uid: int | None = None
    """Response about a single job only: the user's UID on the responding replica."""
    mover: str | None = None
    """Agent that stages for it, if its buffer is on a shared filesystem."""
    external_job: str | None = None
    """Its name at the external scheduler, for example `slurm:42`; null for Forebay's own jobs."""
    epoch: int | None = None
    """External jobs: number of setups of this ID, from 1."""
    phase: str | None = None
    """External jobs: current phase, for example `lingering`."""
    tres: str = ""
    """Resources that count against limits, in Slurm's format: `cpu=1,node=1,bb/datawarp=200G`."""
    details: JobDetailsView | None = None
    """Non-default options; null for most jobs."""
    transfers: JobTransfersView | None = None
    """Response about a single job only: current and past transfers and unexported files; null for none."""
    expected_start: str | None = None
    """Expected start of a waiting job, in a response about that job or on request; null if it cannot be predicted."""
    expected_after: tuple[str, ...] = ()
    """Conditions it waits for until then, in order; GET /v1/jobs/{id}/estimate explains each."""
    burst_buffer_path: str | None = None
    """Response about a single job only, for users who may see its files: directory of its buffer on the node."""
    stage_out_shared: tuple[str, ...] = ()
    """Response about a single job only: stage-out destinations shared with other jobs, and those jobs."""
    revision: int


class CollapsedTasksView(View, frozen=True, kw_only=True):
    """Tasks of an array that share a row of a list."""

    reference: str
    """The tasks, for example `17_[3-9,12]`."""
    count: int
    reasons: dict[str, int]
    """Reason -> tasks, the most frequent ones."""


class JobsAnswer(Answer, frozen=True, kw_only=True):
    """Response of GET /v1/jobs.

    `truncated`: more rows match than `limit`; continue with `after` (or `before`) set to the last ID.
    """

    jobs: tuple[JobView, ...]
    truncated: bool = False
    at: str | None = None
    """Time of the state shown; None for the current state."""
    matching: int | None = None
    """Rows that match, listed or not."""
    matching_jobs: int | None = None
    """Jobs that match; more than rows if arrays are collapsed."""
    skipped: int = 0
    """Matching rows before the first listed one."""
    collapsed: dict[str, CollapsedTasksView] = {}
    """ID of a listed job -> the tasks of its array that the row stands for, if there are several."""


class HistoryRow(View, frozen=True, kw_only=True):
    """Event of a job's history, and the job's state after it."""

    revision: int
    at: str
    actor: str
    """Sender of the command: `operator admin`, `user alice`, `agent n1`, `scheduler`; `operator` for the operator."""
    command: str
    event: str
    sentence: str
    state: str
    reason: str
    burst_buffer_state: str | None = None
    attempt: int = 0
    detail: Json = {}


class ArchivedView(View, frozen=True, kw_only=True):
    """Pruned part of a job's history: number of commands, and the archive segments that contain them."""

    commands: int
    first_revision: int
    last_revision: int
    segments: tuple[str, ...]


class HistoryAnswer(Answer, frozen=True, kw_only=True):
    """Response of GET /v1/jobs/{id}/history, oldest first.

    `complete` is false if this replica lacks the beginning; `archived` says where pruned records are.
    """

    job_id: int
    task: str | None = None
    """Display name of an array task, for example `10_3`."""
    rows: tuple[HistoryRow, ...]
    complete: bool = True
    archived: ArchivedView | None = None
    left_out: int = 0
    """Earlier rows that were not requested, count."""


class WhyView(View, frozen=True, kw_only=True):
    """Response of GET /v1/jobs/{id}/why: explanation of the reason that `job show` gives at that revision."""

    revision: int
    """Revision the response describes."""
    at: str
    job_id: int
    name: str = ""
    """Display name: `13`, or `10_3` for task 3 of array 10."""
    state: str
    reason: str
    burst_buffer_state: str | None = None
    sentence: str
    """Condition that holds the job back, with figures."""
    remedy: str = ""
    blockers: tuple[int, ...] = ()
    """Jobs that hold the resources this job waits for."""
    blocking: tuple[str, ...] = ()
    """Display names of the same jobs."""


# Capacity


class BufferView(View, frozen=True, kw_only=True):
    """Buffer: of a job (`job_id`), or persistent (`name`)."""

    job_id: int | None
    task: str | None = None
    """Display name of an array task, for example `10_3`."""
    name: str | None = None
    user: str
    state: str
    pool: str | None
    capacity_bytes: int
    """Granted capacity: the request rounded up to the pool's granularity."""
    requested_bytes: int
    held_bytes: int
    """Space it takes from the pool in its current state."""
    node: str | None
    access: tuple[str, ...] = ()
    type: str = "scratch"
    create_time: str | None = None
    change_time: str | None = None
    staged_in_bytes: int = 0
    staged_in_files: int = 0
    staged_out_bytes: int = 0
    staged_out_files: int = 0
    request: str = ""
    hurry: bool = False
    unit: str = "bytes"
    """Unit of its numbers, as for its pool: bytes, nodes or count."""
    external_job: str | None = None
    """External jobs: display name, for example `slurm:42`."""
    phase: str | None = None
    """External jobs: current phase, for example `lingering`."""
    made_by: int | None = None
    """Persistent buffers: job that creates or deletes it."""
    path: str | None = None
    """Path on the shared filesystem, or on `node`. For a job's buffer, shown to its user and to operators only."""
    revision: int


class BuffersAnswer(Answer, frozen=True, kw_only=True):
    """Response of GET /v1/buffers."""

    buffers: tuple[BufferView, ...]


class PoolView(View, frozen=True, kw_only=True):
    """Pool; `free_bytes` is derived: total - held - out of service, never below 0."""

    name: str
    quantity_bytes: int
    granularity_bytes: int
    held_bytes: int
    free_bytes: int
    out_of_service_bytes: int = 0
    is_default: bool = False
    buffers: int = 0
    """Buffers that hold space in it, count."""
    unit: str = "bytes"
    """Unit of its numbers: bytes, nodes or count."""
    overcommitted_bytes: int = 0
    """Excess of held space over capacity in service after the pool shrank; nothing is free until it is released."""
    capacity_control: tuple[str, ...] = ()
    """Methods that limit its buffers to their capacity while jobs write, as reported by the nodes.

    Empty for a pool that does not count bytes or belongs to a site's own provider.
    """
    filesystem: str = ""
    """Shared filesystem that contains its buffers; empty: each buffer is on one node."""
    revision: int


class PoolsAnswer(Answer, frozen=True, kw_only=True):
    """Response of GET /v1/pools."""

    pools: tuple[PoolView, ...]


# Shared filesystems


class FilesystemView(View, frozen=True, kw_only=True):
    """Shared filesystem: a file system that all nodes mount."""

    name: str
    path: str
    identity: str
    """Content of its identity file as read by the movers; empty before the first mover registers."""
    movers: tuple[str, ...] = ()
    """Nodes whose agents stage for it."""
    movers_up: tuple[str, ...] = ()
    """Movers that accept new work."""
    pools: tuple[str, ...] = ()
    """Pools with buffers on it."""
    quota: str = "auto"
    """Adapter that limits buffers to their capacity."""
    layout: str = "none"
    """Adapter that places new files; none: the filesystem's own layout."""
    stripe_count: int = 0
    stripe_bytes: int = 0
    stripe_pool: str = ""
    revision: int


class FilesystemsAnswer(Answer, frozen=True, kw_only=True):
    """Response of GET /v1/filesystems and of its changes."""

    filesystems: tuple[FilesystemView, ...]


# Nodes


class NodeView(View, frozen=True, kw_only=True):
    """Node. `last_contact_s` is the time since the leader's last contact, seconds; null before the first."""

    name: str
    state: str
    """UP, DOWN, DRAINED, or DRAINING: drained, and still busy with `jobs`."""
    reason: str
    cpus: int
    cpus_in_use: int
    instance: str
    storage_id: str
    registered_time: str | None
    drained: bool = False
    jobs: tuple[int, ...] = ()
    tasks: dict[int, str] = {}
    """Names, such as `10_3`, of those of `jobs` that are array tasks."""
    last_contact_s: float | None = None
    process_control: str = ""
    """Its agent's method of ending all processes of a job: cgroup, or listing, which can miss fast forks."""
    capacity_control: str = ""
    """Method of limiting its buffers to their capacity while jobs write: project_quota, subvolume_quota, image, or
    watch, which ends the job.
    """
    filesystems: tuple[str, ...] = ()
    """Shared filesystems it stages for. A node with any is a mover and runs no scripts."""
    lost: bool = False
    """True if an operator declared it lost."""
    abandoned: tuple[int, ...] = ()
    """Jobs whose buffers here were given up while it was down and that its agent has not removed yet."""
    revision: int


class AdmittedAnswer(Answer, frozen=True, kw_only=True):
    """Response of POST /v1/nodes/{name}/admit: the node's agent may register."""

    node: str


class LostJobView(View, frozen=True, kw_only=True):
    """Job of a lost node, and its outcome."""

    job_id: int
    task: str | None = None
    """Name of an array task, such as `10_3`."""
    user: str
    name: str
    state: str
    """State before the loss."""
    burst_buffer_state: str | None
    loss: str
    """staged_again, requeued, ended, results_lost or removed."""
    results: tuple[str, ...] = ()
    """Destinations of results that were to be exported from the node. They are lost unless its disk can be read."""


class NodeLostAnswer(Answer, frozen=True, kw_only=True):
    """Response of POST /v1/nodes/{name}/lost."""

    node: str
    dry_run: bool
    jobs: tuple[LostJobView, ...]
    """Affected jobs, by ID."""
    persistent: tuple[str, ...] = ()
    """Persistent buffers on the node. They remain listed until cleared."""


class NodesAnswer(Answer, frozen=True, kw_only=True):
    """Response of GET /v1/nodes. `truncated`: more than `limit` exist; continue after the last name."""

    nodes: tuple[NodeView, ...]
    truncated: bool = False
    matching: int | None = None
    """Nodes that match, listed or not."""
    skipped: int = 0
    """Matching nodes before the first listed one."""


# Replicas


class MemberView(View, frozen=True, kw_only=True):
    """Replica as seen by the responding one; unknown values are null."""

    name: str
    peer: str
    api: str
    role: str
    """leader, follower, candidate, learner, refused or unknown."""
    reachable: bool
    id: str = ""
    """Unique ID: the name of a founding member, `name#VERSION` of a later one."""
    votes: bool = True
    """True if it counts in majorities. A new member does after it has caught up."""
    term: int | None = None
    commit_index: int | None = None
    applied_index: int | None = None
    revision: int | None = None
    lag_entries: int | None = None
    last_contact_s: float | None = None
    sending_snapshot: bool = False
    forgot: bool = False
    """True if it lost entries that it had acknowledged to this leader. It is rejected until it is replaced."""
    clock_offset_s: float | None = None
    """Lead of its wall clock over that of the responding replica, seconds; null without a recent reading."""
    clock_off: bool = False
    """True if its wall clock differs too much from a majority's; it then does not campaign."""
    addresses_differ: str = ""
    """Difference between the agreed addresses and the responding replica's configuration file, with the remedy."""
    room_bytes: int | None = None
    """Free space of its ledger's file system. This and the following fields are reported by the replica itself."""
    journal_fill: float | None = None
    """Used share of its journal, from 0 to 1."""
    sync_s: float | None = None
    """Fastest of its last few fsyncs, seconds."""
    certificate_until: str | None = None
    """Expiry of its certificate."""
    authority_until: str | None = None
    """Expiry of the authority that issued its certificate. All replicas need a newer one by then."""


class MembersAnswer(Answer, frozen=True, kw_only=True):
    """Response of GET /v1/members; `replica` is the responding one."""

    replica: str
    leader: str | None
    term: int
    version: int = 0
    """Number of agreed membership changes; 0 before the cluster is founded."""
    incarnation: str = "1"
    """Incarnation of the cluster: `1`, or `2-…` after a recovery from a lost majority."""
    members: tuple[MemberView, ...]


class TransferAnswer(Answer, frozen=True, kw_only=True):
    """Response of POST /v1/members/transfer: the leader and its term, as far as known."""

    leader: str | None
    term: int


class StatusView(View, frozen=True, kw_only=True):
    """Response of GET /v1/status: current status of the responding replica."""

    cluster: str
    cluster_id: str
    incarnation: str = "1"
    """Incarnation of the cluster, as in GET /v1/members."""
    replica: str
    role: str
    term: int
    leader: str | None
    leader_api: str | None = None
    ready: bool
    """True if it can commit, or forward to a replica that can."""
    not_ready: str = ""
    """Reason it is not ready."""
    commit_index: int
    applied_index: int
    last_index: int
    first_index: int = 1
    revision: int
    at: str | None = None
    """Leader's clock in the last applied batch."""
    state_digest: str | None = None
    """Only with ?digest=yes; hexadecimal, valid at `revision`."""
    ledger_digest: str | None = None
    """Digest of the chain at `applied_index`, hexadecimal."""
    snapshot_index: int | None = None
    queued_commands: int = 0
    version: str = ""
    feature_level: int = 1
    """Feature level of the cluster at `revision`."""
    feature_level_known: int = 1
    """Highest feature level this replica supports; a release that does not report it supports level 1."""
    clock_off: bool = False
    """True if this replica's wall clock differs too much from a majority's; it then does not campaign."""
    clock_ahead_s: float = 0.0
    """Lead of the cluster's time over the wall clocks of a majority, seconds."""
    damaged_entries: int = 0
    """Damaged entries in this replica's ledger that no peer has supplied yet."""
    unwitnessed_s: float | None = None
    """Time since checkpoints last had enough witness cosignatures, seconds; null: none are required."""
    witness_disputes: dict[str, str] = {}
    """Witness -> checkpoint it has seen that this ledger does not contain, as reported to the leader: the cluster was
    reset, or its history altered.
    """
    witness_errors: dict[str, str] = {}
    """Witness -> reason of its last rejection to cosign."""
    room_bytes: int | None = None
    """Free space of its ledger's file system, bytes; null if unknown."""
    journal_fill: float = 0.0
    """Used share of the journal, from 0 to 1."""
    sync_s: float | None = None
    """Fastest of its last few fsyncs, seconds; null before enough were measured."""
    certificate_until: str | None = None
    """Expiry of its certificate."""
    authority_until: str | None = None
    """Expiry of the authority that issued its certificate."""


class DigestsAnswer(Answer, frozen=True, kw_only=True):
    """Response of GET /v1/digests: digests of recent states and of the ledger, for comparing replicas."""

    replica: str
    digests: dict[int, str]
    """Entry index -> digest of the state after that entry, hexadecimal."""
    ledgers: dict[int, str] = {}
    """Entry index -> digest of the ledger up to that entry, hexadecimal: for the same entries, the requested one, or
    the last applied one.
    """
    verdict: str
    """Result of the last comparison with the peers: agrees, undecided, disputed or odd."""


class StateDigestAnswer(Answer, frozen=True, kw_only=True):
    """Response of GET /v1/state-digest; `revision` is that of the state."""

    state_digest: str
    """Hexadecimal; equal states have equal digests on every replica."""


# Responses to commands


class CommandResult(View, frozen=True, kw_only=True):
    """Result of one command of a bulk request; `status` is the status it would have had alone."""

    command_id: str
    status: int
    revision: int | None = None
    job: JobView | None = None
    pool: PoolView | None = None
    node: NodeView | None = None
    error: ErrorView | None = None


class BulkAnswer(Answer, frozen=True, kw_only=True):
    """Response of POST /v1/commands: one result per command, in request order."""

    results: tuple[CommandResult, ...]


class RegisterAnswer(Answer, frozen=True, kw_only=True):
    """Response of POST /v1/agents/{node}/register."""


class PollAnswer(Answer, frozen=True, kw_only=True):
    """Response of POST /v1/agents/{node}/poll: all orders of the node at `revision`, not only new ones."""

    orders: tuple[Order, ...]
    wait_s: float = 0.0
    """Longest poll the replica currently allows, seconds; it grows with the number of agents. 0: not reported."""
    spread_s: float = 0.0
    """Interval over which agents spread their search for another replica, seconds."""


class ReportResult(View, frozen=True, kw_only=True):
    """Result of one report. A rejection acknowledges it too: the agent removes it from its outbox."""

    command_id: str
    outcome: Literal["accepted", "rejected"]
    code: str | None = None
    sentence: str | None = None


class ReportsAnswer(Answer, frozen=True, kw_only=True):
    """Response of POST /v1/agents/{node}/reports, in request order."""

    results: tuple[ReportResult, ...]
