"""What a replica answers: the JSON shapes of `/v1`, shared by the server that fills them and the clients.

Times are ISO 8601 in UTC with microseconds, null where something has not happened; sizes are bytes. Fields that a newer
server adds are ignored by an older client. `revision` says at which moment of the cluster's history an answer was true.
"""

from typing import Literal

import msgspec

from cluster.schemas.base import Answer, Json, View
from cluster.schemas.job_fields import JobDetailsView
from cluster.schemas.transfers import JobTransfersView
from replica.model import Order

# Errors


class OtherError(View, frozen=True, kw_only=True):
    """Another thing that is wrong with a request, found at the same time."""

    sentence: str
    remedy: str = ""
    place: str = ""


class ErrorView(View, frozen=True, kw_only=True):
    """Why a request was refused or what went wrong: a sentence for a person, a code for a program.

    `outcome` is `refused` where nothing has changed, `unknown` where the same command id must be sent again to learn.
    """

    code: str
    sentence: str
    remedy: str = ""
    place: str = ""
    outcome: Literal["refused", "unknown"] = "refused"
    others: tuple[OtherError, ...] | msgspec.UnsetType = msgspec.UNSET
    """What else is wrong with the request; left out where that is nothing."""


class ErrorAnswer(View, frozen=True, kw_only=True):
    """Body of every answer with a status of 400 and above."""

    error: ErrorView


# Jobs


class JobView(View, frozen=True, kw_only=True):
    """One job. `state` and `reason` are Slurm's words, byte for byte."""

    job_id: int
    name: str
    user: str
    state: str
    """PENDING CONFIGURING RUNNING SUSPENDED STAGE_OUT COMPLETED FAILED CANCELLED TIMEOUT NODE_FAIL."""
    reason: str
    """`None` (the word) where nothing holds the job back."""
    burst_buffer: str | None
    """The request as text, as `BurstBuffer=` shows it; null for a job without a buffer."""
    burst_buffer_state: str | None
    """pending, staging-in, staged-in, …; null for a job without a buffer."""
    pool: str | None
    capacity_bytes: int
    """What the buffer gets: the request rounded up to the pool's granularity; 0 where nothing is reserved."""
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
    """What the last failed operation said."""
    workdir: str
    output: str
    dependencies: tuple[str, ...] = ()
    cancelled: bool = False
    warnings: tuple[str, ...] = ()
    """Only in the answer to a submit: directive options that were kept but not understood."""
    uid: int | None = None
    """Only in the answer about one job: the user's number as the replica that answers knows it."""
    mover: str | None = None
    """The agent that stages for it where its buffer lies in a place."""
    external_job: str | None = None
    """What people call it at the scheduler that it belongs to, such as `slurm:42`; null: it is Forebay's own."""
    epoch: int | None = None
    """Of an external job: how often that number has been set up, from 1."""
    phase: str | None = None
    """Of an external job: where it stands, such as `lingering` or `parked`."""
    tres: str = ""
    """What counts for it, as Slurm writes it: `cpu=1,node=1,bb/datawarp=200G`."""
    details: JobDetailsView | None = None
    """What it asked for beyond the ordinary; null for most jobs."""
    transfers: JobTransfersView | None = None
    """Only in the answer about one job: what is moved for it, what was, and what was not exported; null for nothing."""
    expected_start: str | None = None
    """Of one that waits, in the answer about it alone or where it is asked for: when it should start; null where nobody
    knows."""
    expected_after: tuple[str, ...] = ()
    """What it waits for until then, in this order; GET /v1/jobs/{id}/estimate explains each."""
    burst_buffer_path: str | None = None
    """Only in the answer about one job, to who may see its files: the directory on its node that its buffer is."""
    stage_out_shared: tuple[str, ...] = ()
    """Only in the answer about one job: destinations that other jobs stage out to as well, and which."""
    revision: int


class JobsAnswer(Answer, frozen=True, kw_only=True):
    """Answer of GET /v1/jobs. `truncated`: more match than `limit` allows; with `after`, go on after the last id."""

    jobs: tuple[JobView, ...]
    truncated: bool = False
    at: str | None = None
    """When it was so; None for now."""


class HistoryRow(View, frozen=True, kw_only=True):
    """One event of a job's history, and where the job stood after it."""

    revision: int
    at: str
    actor: str
    """Who sent the command: `operator admin`, `user alice`, `agent n1`, `scheduler`; `operator` for the operator."""
    command: str
    event: str
    sentence: str
    state: str
    reason: str
    burst_buffer_state: str | None = None
    attempt: int = 0
    detail: Json = {}


class ArchivedView(View, frozen=True, kw_only=True):
    """What of a job's history this replica has pruned: how many commands, and which segments have them."""

    commands: int
    first_revision: int
    last_revision: int
    segments: tuple[str, ...]


class HistoryAnswer(Answer, frozen=True, kw_only=True):
    """Answer of GET /v1/jobs/{id}/history, oldest first.

    `complete` is false where this replica does not hold the beginning; `archived` says where what was pruned is.
    """

    job_id: int
    task: str | None = None
    """What people call the job if it is a task of an array, such as `10_3`."""
    rows: tuple[HistoryRow, ...]
    complete: bool = True
    archived: ArchivedView | None = None
    left_out: int = 0
    """Rows before these that were not asked for."""


class WhyView(View, frozen=True, kw_only=True):
    """Answer of GET /v1/jobs/{id}/why: the reason that `job show` gives at that moment, explained."""

    revision: int
    """The moment that the answer is about."""
    at: str
    job_id: int
    name: str = ""
    """What people call it: `13`, or `10_3` for task 3 of array 10."""
    state: str
    reason: str
    burst_buffer_state: str | None = None
    sentence: str
    """What holds the job back, in words and figures."""
    remedy: str = ""
    blockers: tuple[int, ...] = ()
    """Jobs that hold what this one waits for."""
    blocking: tuple[str, ...] = ()
    """The same jobs, as people call them."""


# Capacity


class BufferView(View, frozen=True, kw_only=True):
    """One buffer: of a job (`job_id`), or persistent (`name`)."""

    job_id: int | None
    task: str | None = None
    """What people call the job if it is a task of an array, such as `10_3`."""
    name: str | None = None
    user: str
    state: str
    pool: str | None
    capacity_bytes: int
    """Granted: the request rounded up to the pool's granularity."""
    requested_bytes: int
    held_bytes: int
    """What it takes from the pool in its present state."""
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
    """What its numbers count: bytes, nodes or count, as those of its pool."""
    external_job: str | None = None
    """Of an external job: what people call it, such as `slurm:42`."""
    phase: str | None = None
    """Of an external job: where it stands, such as `lingering` or `parked`."""
    made_by: int | None = None
    """Of a persistent buffer: the job that made it, makes it, or has it deleted."""
    path: str | None = None
    """Where it lies: in a place on every node, else on `node`. Of a job's, for its user and operators."""
    revision: int


class BuffersAnswer(Answer, frozen=True, kw_only=True):
    """Answer of GET /v1/buffers."""

    buffers: tuple[BufferView, ...]


class PoolView(View, frozen=True, kw_only=True):
    """One pool; `free_bytes` is derived: total - held - out of service, never below 0."""

    name: str
    quantity_bytes: int
    granularity_bytes: int
    held_bytes: int
    free_bytes: int
    out_of_service_bytes: int = 0
    is_default: bool = False
    buffers: int = 0
    """How many buffers hold something of it."""
    unit: str = "bytes"
    """What its numbers count: bytes, nodes or count."""
    overcommitted_bytes: int = 0
    """How much more is held than it has in service, since it shrank: nothing is free before this is given back."""
    capacity_control: tuple[str, ...] = ()
    """What holds its buffers to their capacity while a job writes, wherever they are: words of the nodes; none where
    it does not count bytes, or a provider of the site's has them."""
    place: str = ""
    """The place that its buffers lie in, which all nodes see; empty: each is on one node."""
    revision: int


class PoolsAnswer(Answer, frozen=True, kw_only=True):
    """Answer of GET /v1/pools."""

    pools: tuple[PoolView, ...]


# Places


class PlaceView(View, frozen=True, kw_only=True):
    """One place: a file system that all nodes mount."""

    name: str
    path: str
    identity: str
    """What its own file says as the movers have read it; empty: no mover has come yet."""
    movers: tuple[str, ...] = ()
    """Nodes whose agents stage for it."""
    movers_up: tuple[str, ...] = ()
    """Those of them that get new work."""
    pools: tuple[str, ...] = ()
    """Pools that have their buffers there."""
    revision: int


class PlacesAnswer(Answer, frozen=True, kw_only=True):
    """Answer of GET /v1/places, and of a change of them."""

    places: tuple[PlaceView, ...]


# Nodes


class NodeView(View, frozen=True, kw_only=True):
    """One node. `last_contact_s` is what the leader has seen, seconds ago; null where it has not heard of it yet."""

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
    last_contact_s: float | None = None
    process_control: str = ""
    """How its agent ends all processes of a job: cgroup, or listing, which may miss what forks fast."""
    capacity_control: str = ""
    """What holds its buffers to their capacity while a job writes: project_quota, subvolume_quota, image, or watch,
    which ends the job."""
    places: tuple[str, ...] = ()
    """The places that it stages for: then it is a mover, and runs no scripts."""
    lost: bool = False
    """Whether an operator declared it lost while it was down."""
    abandoned: tuple[int, ...] = ()
    """Jobs whose buffers were given up here while it was down, and that its agent has not removed yet."""
    revision: int


class AdmittedAnswer(Answer, frozen=True, kw_only=True):
    """Answer of POST /v1/nodes/{name}/admit: the agent of this node may register."""

    node: str


class LostJobView(View, frozen=True, kw_only=True):
    """One job of a node that is lost, and what becomes of it."""

    job_id: int
    user: str
    name: str
    state: str
    """As it was before."""
    burst_buffer_state: str | None
    loss: str
    """staged_again, requeued, ended, results_lost or removed."""
    results: tuple[str, ...] = ()
    """Destinations that the job's results were to be exported to from the node: they are lost, unless they are saved
    from its disk.
    """


class NodeLostAnswer(Answer, frozen=True, kw_only=True):
    """Answer of POST /v1/nodes/{name}/lost."""

    node: str
    dry_run: bool
    jobs: tuple[LostJobView, ...]
    """By job."""
    persistent: tuple[str, ...] = ()
    """Persistent buffers that lie on the node. They stay in the list until they are cleared."""


class NodesAnswer(Answer, frozen=True, kw_only=True):
    """Answer of GET /v1/nodes. `truncated`: there are more than `limit`; go on after the last name."""

    nodes: tuple[NodeView, ...]
    truncated: bool = False


# The cluster itself


class MemberView(View, frozen=True, kw_only=True):
    """One replica as the one that answers sees it; null where it cannot know."""

    name: str
    peer: str
    api: str
    role: str
    """leader, follower, candidate, learner, refused or unknown."""
    reachable: bool
    id: str = ""
    """What nobody else ever is called: the name for a founder, `name#VERSION` for whoever was added since."""
    votes: bool = True
    """Whether it counts in majorities; who was added does once it has caught up."""
    term: int | None = None
    commit_index: int | None = None
    applied_index: int | None = None
    revision: int | None = None
    lag_entries: int | None = None
    last_contact_s: float | None = None
    sending_snapshot: bool = False
    forgot: bool = False
    """Whether it lacks entries that it acknowledged to this leader: it is refused until it is replaced."""
    clock_offset_s: float | None = None
    """How far its wall clock is ahead of that of the replica that answers, seconds; null if it was not read lately."""
    clock_off: bool = False
    """Whether its wall clock is off from those of a majority: it leaves leading to others."""
    addresses_differ: str = ""
    """What the cluster has agreed on and what the file of the replica that answers says, where that is not the same,
    and what would be right."""
    room_bytes: int | None = None
    """What is free where it stores its ledger. This and what follows is what it says of itself."""
    journal_fill: float | None = None
    """How much of its journal's room is used, from 0 to 1."""
    sync_s: float | None = None
    """What its disk takes for a sync, seconds: the quickest of the last few."""
    certificate_until: str | None = None
    """When the certificate that it shows expires."""
    authority_until: str | None = None
    """When the authority expires that issued it: all have to come from a later one by then."""


class MembersAnswer(Answer, frozen=True, kw_only=True):
    """Answer of GET /v1/members; `replica` is who answers."""

    replica: str
    leader: str | None
    term: int
    version: int = 0
    """How often who is a member has been agreed on; 0 before the cluster is founded."""
    incarnation: str = "1"
    """Of the cluster: the first one, or `2-…` from a recovery after a lost majority on."""
    members: tuple[MemberView, ...]


class TransferAnswer(Answer, frozen=True, kw_only=True):
    """Answer of POST /v1/members/transfer: who leads now, as far as is known, and in which term."""

    leader: str | None
    term: int


class StatusView(View, frozen=True, kw_only=True):
    """Answer of GET /v1/status: the replica that was asked, as it is now."""

    cluster: str
    cluster_id: str
    incarnation: str = "1"
    """Of the cluster, as in the answer of GET /v1/members."""
    replica: str
    role: str
    term: int
    leader: str | None
    leader_api: str | None = None
    ready: bool
    """Whether it can commit, or forwards to one that can."""
    not_ready: str = ""
    """Why not, as a sentence."""
    commit_index: int
    applied_index: int
    last_index: int
    first_index: int = 1
    revision: int
    at: str | None = None
    """The leader's clock in the last batch that was applied."""
    state_digest: str | None = None
    """Only with ?digest=yes; hexadecimal, true at `revision`."""
    ledger_digest: str | None = None
    """Digest of the chain at `applied_index`, hexadecimal."""
    snapshot_index: int | None = None
    queued_commands: int = 0
    version: str = ""
    feature_level: int = 1
    """Of the cluster, as of `revision`."""
    feature_level_known: int = 1
    """The highest that this replica could carry out; a release that says nothing of it knows level 1."""
    clock_off: bool = False
    """Whether this replica's wall clock is off from those of a majority: it leaves leading to others."""
    clock_ahead_s: float = 0.0
    """How far the cluster's time, as this replica has it, is ahead of what a majority's wall clocks say, seconds."""
    damaged_entries: int = 0
    """Entries that are damaged in this replica's ledger, and that no peer has given yet."""
    unwitnessed_s: float | None = None
    """For how long checkpoints have lacked the cosignatures of witnesses that are needed, seconds; null: none are."""
    witness_disputes: dict[str, str] = {}
    """Witness -> what it has seen that is not in this ledger, as the leader was told: the cluster was set back, or its
    history altered."""
    witness_errors: dict[str, str] = {}
    """Witness -> why it did not cosign when the leader asked it last."""
    room_bytes: int | None = None
    """What is free where it stores its ledger, bytes; null where the file system does not say."""
    journal_fill: float = 0.0
    """How much of the journal's room is used, from 0 to 1."""
    sync_s: float | None = None
    """What its disk takes for a sync, seconds: the quickest of the last few; null before there were as many."""
    certificate_until: str | None = None
    """When the certificate expires that it shows."""
    authority_until: str | None = None
    """When the authority expires that issued it."""


class DigestsAnswer(Answer, frozen=True, kw_only=True):
    """Answer of GET /v1/digests: the states that were digested last, and the ledger, for comparing replicas."""

    replica: str
    digests: dict[int, str]
    """Entry index -> digest of the state after that entry, hexadecimal."""
    ledgers: dict[int, str] = {}
    """Entry index -> digest of the ledger up to that entry, hexadecimal: of the same entries, of the one that was
    asked for, or of the last that is applied."""
    verdict: str
    """agrees, undecided, disputed or odd: what the last comparison with the peers said."""


class StateDigestAnswer(Answer, frozen=True, kw_only=True):
    """Answer of GET /v1/state-digest: `revision` is that of the state."""

    state_digest: str
    """Hexadecimal: the same for the same state, whoever has it."""


# Answers to commands


class CommandResult(View, frozen=True, kw_only=True):
    """What became of one command of a bulk request: `status` is what it would have got alone."""

    command_id: str
    status: int
    revision: int | None = None
    job: JobView | None = None
    pool: PoolView | None = None
    node: NodeView | None = None
    error: ErrorView | None = None


class BulkAnswer(Answer, frozen=True, kw_only=True):
    """Answer of POST /v1/commands: one result per command, in the order they were sent."""

    results: tuple[CommandResult, ...]


class RegisterAnswer(Answer, frozen=True, kw_only=True):
    """Answer of POST /v1/agents/{node}/register."""


class PollAnswer(Answer, frozen=True, kw_only=True):
    """Answer of POST /v1/agents/{node}/poll: all that the node has to do at `revision`, not what is new."""

    orders: tuple[Order, ...]
    wait_s: float = 0.0
    """How long the replica lets a poll wait now, seconds: the longer, the more agents ask it. 0: it does not say."""
    spread_s: float = 0.0
    """Within how long agents look for another replica when this one is away, each at a moment of its own, seconds."""


class ReportResult(View, frozen=True, kw_only=True):
    """What became of one report. Refused is acknowledged too: the agent drops it from its outbox."""

    command_id: str
    outcome: Literal["accepted", "refused"]
    code: str | None = None
    sentence: str | None = None


class ReportsAnswer(Answer, frozen=True, kw_only=True):
    """Answer of POST /v1/agents/{node}/reports, in the order they were sent."""

    results: tuple[ReportResult, ...]
