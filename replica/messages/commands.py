"""Commands to the controller. Each command is settled by one entry of a batch.

The ledger contains the events or the rejection of a command and its name (`kind_of`), not the command itself. Commands
therefore have no wire numbers.

Words in parentheses at the end of a docstring are the roles that may send the command.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from enum import IntEnum
from typing import get_args

import msgspec

from forebay.replica.grammar import ConfSetting
from forebay.replica.model import (
    NO_CHANGE,
    Account,
    AfterTask,
    BufferRequest,
    CreatePersistent,
    DrillVerdict,
    FilesystemLayout,
    Hold,
    JobChange,
    JobRequest,
    JobState,
    License,
    ObservedFilesystem,
    Partition,
    Pool,
    PoolUnit,
    Qos,
    Reservation,
    SharedFilesystem,
    Site,
    Stage,
    TransferCheckpoint,
    TransferReceipt,
)
from forebay.replica.values import NEVER, Instant


class ActorRole(IntEnum):
    """Roles of senders; the numbers are wire numbers (law 12)."""

    CONTROLLER = 1
    OPERATOR = 2
    USER = 3
    AGENT = 4
    SCHEDULER = 5
    """Another scheduler, for its own external jobs: those under its name."""
    DRILL = 6
    """A program that may run drills and nothing else."""


class Actor(msgspec.Struct, frozen=True, array_like=True, gc=False, cache_hash=True):
    """The identity that a request was authenticated as."""

    role: ActorRole
    name: str

    def __str__(self) -> str:
        return f"{self.role.name.lower()}:{self.name}"


CONTROLLER = Actor(ActorRole.CONTROLLER, "leader")


class FoundCluster(msgspec.Struct, frozen=True):
    """Found the cluster; rejected if it has already been founded (controller)."""

    cluster_id: str
    name: str
    site: Site
    pools: tuple[Pool, ...]
    nodes: tuple[str, ...] = ()
    """Nodes whose agents may register without separate admission."""
    filesystems: tuple[SharedFilesystem, ...] = ()
    disclosure_key: bytes = b""
    """Random secret that salts the proofs of the ledger, DISCLOSURE_KEY_BYTES long; empty: no salt."""


class RecoverCluster(msgspec.Struct, frozen=True):
    """Start a new incarnation of the cluster from one surviving replica (operator).

    The command is never sent over the network: `cluster.server.recovery` appends it to the surviving ledger. The fields
    are those of `replica.model.Recovery`.
    """

    mark: str
    replica: str
    members: tuple[str, ...]
    kept_index: int
    known_index: int
    is_snapshot: bool = False


class SetPool(msgspec.Struct, frozen=True):
    """Create or replace a pool (operator)."""

    pool: Pool


class ChangePool(msgspec.Struct, frozen=True):
    """Create a pool if `exists` is false, else change the fields that are not None (operator, controller).

    Amounts are in the pool's unit.
    """

    pool: str
    exists: bool = True
    quantity: int | None = None
    granularity: int | None = None
    out_of_service: int | None = None
    is_default: bool | None = None
    unit: PoolUnit | None = None
    drain_all: bool = False
    """Take the whole current quantity out of service; `out_of_service` is ignored."""
    is_reported: bool = False
    """The provider reported the pool."""
    filesystem: str | None = None
    """Shared filesystem of the pool's buffers; empty: buffers are in the directories of agents."""


class RemovePool(msgspec.Struct, frozen=True):
    """Remove an unused pool (operator)."""

    pool: str


class AddFilesystem(msgspec.Struct, frozen=True):
    """Add a shared filesystem, which all nodes mount at `path`, or change the adapters of one at this path (operator).

    None keeps an adapter, or uses the default for a new filesystem.
    """

    filesystem: str
    path: str
    quota: str | None = None
    layout: FilesystemLayout | None = None


class RemoveFilesystem(msgspec.Struct, frozen=True):
    """Remove a shared filesystem that no pool uses (operator). Its files are kept."""

    filesystem: str


class ConfigureSite(msgspec.Struct, frozen=True):
    """Change the configuration with all settings in one entry (operator)."""

    settings: tuple[ConfSetting, ...]
    partial: bool = False
    """Keep the settings that are not listed; else Slurm's own settings among them get their defaults."""
    expected_revision: int | None = None
    """Reject the command if the configuration was changed after this revision."""


class RegisterNode(msgspec.Struct, frozen=True):
    """Register an agent (agent). A new instance restarts the node's unfinished staging as new attempts."""

    node: str
    cpus: int
    instance: str
    storage_id: str
    buffers: str = ""
    process_control: str = ""
    """Mechanism by which the agent ends a job's processes (PROCESS_CONTROLS)."""
    capacity_control: str = ""
    """Mechanism that limits buffers to their capacity (CAPACITY_CONTROLS)."""
    filesystems: tuple[ObservedFilesystem, ...] = ()
    """Shared filesystems that the agent found mounted and stages for. If not empty, the agent is a mover, which has no
    CPUs and runs no scripts.
    """


class AdmitNode(msgspec.Struct, frozen=True):
    """Allow the agent of a node to register (operator). Nodes of the founding command need no admission."""

    node: str


class DrainNode(msgspec.Struct, frozen=True):
    """Stop assigning new work to a node (operator)."""

    node: str
    reason: str


class ResumeNode(msgspec.Struct, frozen=True):
    """Assign new work to a drained node again (operator)."""

    node: str


class LoseNode(msgspec.Struct, frozen=True):
    """Declare a node that is down lost (operator). Its jobs end or are requeued, and their space on it is released."""

    node: str
    reason: str


class MarkNodeDown(msgspec.Struct, frozen=True):
    """Mark a node down because its agent is silent (controller)."""

    node: str
    reason: str


class MarkNodeBack(msgspec.Struct, frozen=True):
    """Mark a node up because its agent responds again (controller)."""

    node: str


class SubmitJob(msgspec.Struct, frozen=True):
    """Submit a job or a job array (user, operator)."""

    request: JobRequest
    """Request of the job; for an array, of each task, without its `array`."""
    hold: Hold = Hold.NONE
    tasks: tuple[int, ...] = ()
    """Task numbers of an array, ascending; empty: one job."""
    throttle: int = 0
    """Maximum number of active tasks; 0: no limit."""
    after_tasks: tuple[AfterTask, ...] = ()
    ignored: tuple[str, ...] = ()
    """Unsupported sbatch options in the request; rejected if `UnknownSbatchOptions=reject`."""
    if_defined: tuple[str, ...] = ()
    """Fields among account, qos, licenses and reservation that are dropped if the site has not defined their value and
    `UnknownSbatchOptions=warn`.
    """


class CancelJob(msgspec.Struct, frozen=True):
    """Cancel a job (user, operator). `hurry` skips stage-out."""

    job: int
    hurry: bool = False
    tasks: tuple[int, ...] | None = None
    """Task numbers of the array `job`; None: the whole array, or the job if it is not an array."""


class HoldJob(msgspec.Struct, frozen=True):
    """Hold a pending job (user, operator)."""

    job: int
    tasks: tuple[int, ...] | None = None


class ReleaseJob(msgspec.Struct, frozen=True):
    """Release a hold, and retry an operation that has failed permanently (user, operator)."""

    job: int
    tasks: tuple[int, ...] | None = None
    partial: bool = False
    """Retry a stage-out without its missing files."""


class SuspendJob(msgspec.Struct, frozen=True):
    """Stop the script of a running job (user, operator)."""

    job: int
    tasks: tuple[int, ...] | None = None


class ResumeJob(msgspec.Struct, frozen=True):
    """Continue the script of a suspended job (user, operator)."""

    job: int
    tasks: tuple[int, ...] | None = None


class RequeueJob(msgspec.Struct, frozen=True):
    """End a job's run or revoke its buffer, and return the job to the queue (user, operator)."""

    job: int
    tasks: tuple[int, ...] | None = None


class ClearBuffer(msgspec.Struct, frozen=True):
    """Delete the record of a buffer that could not be removed (operator)."""

    job: int = 0
    """Job whose buffer is cleared; 0 if `name` is given."""
    name: str = ""
    """Name of a persistent buffer."""
    discard: bool = False
    """Clear the buffer even if it holds the only copy of data."""


class RestartOperations(msgspec.Struct, frozen=True):
    """Restart the operations of jobs, as slurmctld does when it starts (controller)."""

    jobs: tuple[int, ...]


class OperationDone(msgspec.Struct, frozen=True, tag="done"):
    """A stage-in, post-run, stage-out or teardown succeeded."""

    files: int = 0
    size_bytes: int = 0
    digest: str = ""
    receipt: TransferReceipt | None = None
    """Transfer receipt; its attempt and stage are those of the report. Recorded from feature level 4 on."""


class OperationFailed(msgspec.Struct, frozen=True, tag="failed"):
    """A stage-in, post-run, stage-out or teardown failed; `message` states the cause.

    `final`: the cause does not go away by itself, for example a missing source, so the operation is not retried until
    the job is released. `operation`: the failed part of the stage, for example `setup` of a stage-in; empty: the whole
    stage.
    """

    message: str
    final: bool = False
    operation: str = ""
    receipt: TransferReceipt | None = None
    """Receipt of the data moved before the failure."""


class ScriptStarted(msgspec.Struct, frozen=True, tag="started"):
    """The job's script has started."""


class ScriptEnded(msgspec.Struct, frozen=True, tag="ended"):
    """The job's script has ended."""

    result: JobState
    """COMPLETED, FAILED, TIMEOUT, CANCELLED or NODE_FAIL."""
    exit_code: int = 0
    signal: int = 0
    """Signal that ended the script; 0 if it exited."""
    message: str = ""


class TransferProgressed(msgspec.Struct, frozen=True, tag="progressed"):
    """A running transfer reached a durable checkpoint. Agents report at most one per minute."""

    checkpoint: TransferCheckpoint


class PersistentChanged(msgspec.Struct, frozen=True, tag="persistent"):
    """The order created or destroyed one of its persistent buffers, and continues."""

    name: str


OperationResult = OperationDone | OperationFailed | ScriptStarted | ScriptEnded | TransferProgressed | PersistentChanged


class ReportOperation(msgspec.Struct, frozen=True):
    """Report the progress or result of an order (agent)."""

    node: str
    job: int
    attempt: int
    stage: Stage
    result: OperationResult


class RaiseFeatureLevel(msgspec.Struct, frozen=True):
    """Raise the cluster's feature level (operator; controller in a new cluster)."""

    level: int
    known: tuple[tuple[str, int], ...]
    """Each member and the highest level that it supports, 0 if it did not answer.

    The leader adds these facts. They are not part of the operator's command, so a retry may have others.
    """


class SettleMails(msgspec.Struct, frozen=True):
    """Record pending mails as sent or dropped (controller)."""

    sent: tuple[str, ...]
    """Keys of mails."""
    dropped: tuple[tuple[str, str], ...] = ()
    """Keys of mails, each with the reason why it was not sent."""


class AdvanceSinks(msgspec.Struct, frozen=True):
    """Record how far events were delivered to event sinks (controller)."""

    marks: tuple[tuple[str, int], ...]
    """Sinks, each with the revision up to which its receiver has accepted all events."""
    removed: tuple[str, ...] = ()
    """Sinks that are no longer configured."""


class SetAccount(msgspec.Struct, frozen=True):
    """Create or replace an account (operator)."""

    account: Account
    if_match: str | None = None
    """Tag that the present record must have (`etag_of`); None: any."""


class DeleteAccount(msgspec.Struct, frozen=True):
    """Delete an account (operator). Its jobs wait with reason `InvalidAccount`."""

    account: str


class SetQos(msgspec.Struct, frozen=True):
    """Create or replace a QOS (operator)."""

    qos: Qos
    if_match: str | None = None
    """Tag that the present record must have (`etag_of`); None: any."""


class DeleteQos(msgspec.Struct, frozen=True):
    """Delete a QOS (operator). Its jobs wait with reason `InvalidQOS`."""

    qos: str


class SetLicense(msgspec.Struct, frozen=True):
    """Set the total number of a licence (operator)."""

    license: License
    if_match: str | None = None
    """Tag that the present record must have (`etag_of`); None: any."""


class DeleteLicense(msgspec.Struct, frozen=True):
    """Delete a licence (operator)."""

    license: str


class RevokeCertificate(msgspec.Struct, frozen=True):
    """Revoke one certificate or all certificates of a holder (operator)."""

    certificate: str
    """Certificate or holder, written as in `Revocation`."""
    reason: str
    until: Instant = NEVER
    """Expiry of the certificate, after which the revocation is not needed."""


class UnrevokeCertificate(msgspec.Struct, frozen=True):
    """Remove a certificate or a holder from the revocation list (operator)."""

    certificate: str


class SetReservation(msgspec.Struct, frozen=True):
    """Create or replace a reservation of burst-buffer space (operator). Its field `active` is ignored."""

    reservation: Reservation
    if_match: str | None = None
    """Tag that the present record must have (`etag_of`); None: any."""


class DeleteReservation(msgspec.Struct, frozen=True):
    """Delete a reservation (operator). Its jobs wait with reason `ReservationDeleted`."""

    reservation: str


class RunSchedulingCycle(msgspec.Struct, frozen=True):
    """Run a scheduling cycle: assign space and CPUs, and perform timed actions that are due (controller)."""


# ---- partitions, usage, job updates


class SetPartition(msgspec.Struct, frozen=True):
    """Create or replace a partition (operator). A new default partition replaces the current one."""

    partition: Partition
    if_match: str | None = None
    """Tag that the present record must have (`etag_of`); None: any."""


class UpdateJob(msgspec.Struct, frozen=True):
    """Change a pending job, or the pending tasks of an array (user, operator)."""

    job: int
    change: JobChange = NO_CHANGE
    buffer: BufferRequest | None = None
    """New buffer request; None: unchanged."""
    after_tasks: tuple[AfterTask, ...] = ()
    """Dependencies on array tasks, in addition to those in `change`."""
    tasks: tuple[int, ...] | None = None


class DeletePartition(msgspec.Struct, frozen=True):
    """Delete a partition (operator). Its jobs wait with reason `PartitionConfig`."""

    partition: str


class ResetUsage(msgspec.Struct, frozen=True):
    """Reset the burst-buffer usage of an account or a QOS to zero (operator)."""

    whose: str
    """Kind of `name`: a (account) or q (QOS)."""
    name: str


class SetClock(msgspec.Struct, frozen=True):
    """Set the cluster's clock back to `at` (operator), if it runs ahead of the true time."""

    at: Instant


class OpenSession(msgspec.Struct, frozen=True):
    """Open a session for a program that sends many commands (user, operator)."""


class CloseSession(msgspec.Struct, frozen=True):
    """Close a session and drop its cached replies (the session's actor, operator)."""

    session: int


class ExpireCachedReplies(msgspec.Struct, frozen=True):
    """Close idle sessions, and drop cached replies that have expired (controller)."""


class RecordStateDigest(msgspec.Struct, frozen=True):
    """Record the state digest of an earlier revision that a majority of the members reported (controller)."""

    revision: int
    state: bytes
    """Digest, 32 bytes."""


class RecordHistories(msgspec.Struct, frozen=True):
    """Record the number of ledger records per job that a majority of the members counted (controller)."""

    index: int
    """Number of entries counted."""
    jobs: int
    """Highest job ID counted."""
    root: bytes
    """Root of the tree over the counts (`cluster.security.proofs.HistoryCounts`), 32 bytes."""


# ---- external jobs. The scheduler is the sender. `cluster` is the name of the scheduler's cluster, `job` the job's ID
# there, and `epoch` the epoch of the external job, 0 for the latest one.


class RegisterScheduler(msgspec.Struct, frozen=True):
    """Bind the sender's name to its cluster (scheduler). Rejected if another cluster uses the name."""

    cluster: str
    address: str
    """Address of the sender, shown when another cluster is rejected."""


class ReleaseScheduler(msgspec.Struct, frozen=True):
    """Allow another cluster to use a scheduler's name (operator)."""

    scheduler: str


class StartDrill(msgspec.Struct, frozen=True):
    """Record the start of a drill (operator, drill)."""

    scenario: str
    target: str
    lasts_s: int
    """Time limit, seconds."""
    forced: tuple[str, ...] = ()
    """Failed preconditions that were overridden."""
    plan: str = ""
    """ID of the confirmed plan. Helpers on the hosts act only for this plan."""
    lease_s: int = 0
    """Time without a probe after which the drill ends, seconds; 0: only `lasts_s` applies."""


class ConfirmDrill(msgspec.Struct, frozen=True):
    """Confirm a drill as a second operator (operator)."""

    drill: int


class AbortDrill(msgspec.Struct, frozen=True):
    """Request the early end of a drill (operator, drill)."""

    drill: int
    reason: str


class EndDrill(msgspec.Struct, frozen=True):
    """Record the end of a drill and its verdict (operator, drill)."""

    drill: int
    verdict: DrillVerdict
    sentence: str
    figures: tuple[tuple[str, int], ...] = ()


class ProbeDrill(msgspec.Struct, frozen=True):
    """Test whether the cluster settles commands during a drill (operator, drill).

    From time to time a probe also renews the drill's lease. It changes nothing else.
    """

    drill: int


class LockDrills(msgspec.Struct, frozen=True):
    """Lock drills: no drill starts, and a running one ends (operator)."""

    reason: str


class UnlockDrills(msgspec.Struct, frozen=True):
    """Remove the drill lock of the operator `by` (operator)."""

    by: str


class SetUpExternalJob(msgspec.Struct, frozen=True):
    """Request space for an external job, or reactivate a lingering one (scheduler)."""

    cluster: str
    job: str
    uid: int
    request: JobRequest
    """User, working directory, gid and buffer request of the job; other fields are ignored."""
    epoch: int = 0


class StageInExternalJob(msgspec.Struct, frozen=True):
    """Stage in the data of an external job (scheduler)."""

    cluster: str
    job: str
    epoch: int = 0


class BeginExternalJobRun(msgspec.Struct, frozen=True):
    """Record the start of an external job's run (scheduler)."""

    cluster: str
    job: str
    epoch: int = 0


class EndExternalJobRun(msgspec.Struct, frozen=True):
    """Record the end of an external job's run (scheduler)."""

    cluster: str
    job: str
    epoch: int = 0


class StageOutExternalJob(msgspec.Struct, frozen=True):
    """Stage out the results of an external job, then tear its buffer down (scheduler)."""

    cluster: str
    job: str
    epoch: int = 0


class TearDownExternalJob(msgspec.Struct, frozen=True):
    """Tear down an external job (scheduler)."""

    cluster: str
    job: str
    hurry: bool = False
    """Delete results that were not exported."""
    epoch: int = 0
    reason: str = ""
    """Reason, if the scheduler no longer knows the job; then its data does not linger."""


class ReportMissingExternalJob(msgspec.Struct, frozen=True):
    """Report that an external job the scheduler expects does not exist (scheduler)."""

    cluster: str
    job: str
    state: str
    """State of the job in the scheduler's own terms."""


class MakePersistent(msgspec.Struct, frozen=True):
    """Create a persistent buffer for a user (scheduler)."""

    cluster: str
    user: str
    uid: int
    gid: int
    create: CreatePersistent


class RemovePersistent(msgspec.Struct, frozen=True):
    """Destroy a user's persistent buffer (scheduler). `hurry` skips its stage-out."""

    cluster: str
    user: str
    uid: int
    gid: int
    name: str
    hurry: bool = False


class ExportBuffer(msgspec.Struct, frozen=True):
    """Export retained results of an external job, or retry a failed stage-out (user, operator)."""

    job: int
    partial: bool = False
    """Export without the missing files."""


Command = (
    FoundCluster
    | RecoverCluster
    | SetPool
    | RegisterNode
    | DrainNode
    | LoseNode
    | AdmitNode
    | ResumeNode
    | MarkNodeDown
    | MarkNodeBack
    | SubmitJob
    | CancelJob
    | HoldJob
    | ReleaseJob
    | ReportOperation
    | RaiseFeatureLevel
    | SuspendJob
    | ResumeJob
    | RequeueJob
    | ClearBuffer
    | RestartOperations
    | SetAccount
    | DeleteAccount
    | SetQos
    | DeleteQos
    | SetLicense
    | DeleteLicense
    | RevokeCertificate
    | UnrevokeCertificate
    | SetReservation
    | DeleteReservation
    | RunSchedulingCycle
    | ChangePool
    | RemovePool
    | AddFilesystem
    | RemoveFilesystem
    | ConfigureSite
    | SettleMails
    | AdvanceSinks
    | SetPartition
    | DeletePartition
    | ResetUsage
    | UpdateJob
    | SetClock
    | OpenSession
    | CloseSession
    | ExpireCachedReplies
    | RecordStateDigest
    | RecordHistories
    | RegisterScheduler
    | ReleaseScheduler
    | StartDrill
    | ConfirmDrill
    | AbortDrill
    | EndDrill
    | ProbeDrill
    | LockDrills
    | UnlockDrills
    | SetUpExternalJob
    | StageInExternalJob
    | BeginExternalJobRun
    | EndExternalJobRun
    | StageOutExternalJob
    | TearDownExternalJob
    | ReportMissingExternalJob
    | MakePersistent
    | RemovePersistent
    | ExportBuffer
)


class Request(msgspec.Struct, frozen=True):
    """A command with its client-made ID (16 bytes, `replica.values.command_ids`) and its authenticated sender."""

    id: bytes
    actor: Actor
    command: Command


_WORD = re.compile(r"(?<=[a-z])(?=[A-Z])")


def kind_of(command: Command) -> str:
    """Return the command's name in the ledger, for example `submit_job`."""
    return _WORDS[type(command)]


DIGEST_BYTES = 8
"""Size of a command's digest, bytes. It distinguishes a retry from accidental reuse of an ID; a forged collision gains
nothing.
"""

_ENCODER = msgspec.msgpack.Encoder()


def command_digest(request: Request) -> bytes:
    """Return the digest of a command and its sender. A retry has the same digest."""
    command = request.command
    if type(command) is RaiseFeatureLevel:
        command = RaiseFeatureLevel(command.level, ())
    elif type(command) is SubmitJob and (command.ignored or command.if_defined):
        # The ledger does not contain these fields; without them, a command rebuilt from its events has the same digest.
        command = msgspec.structs.replace(command, ignored=(), if_defined=())
    elif isinstance(command, SetAccount | SetQos | SetLicense | SetReservation | SetPartition):
        command = msgspec.structs.replace(command, if_match=None)
    encoded = _ENCODER.encode((request.actor, kind_of(command), command))
    return hashlib.blake2b(encoded, digest_size=DIGEST_BYTES).digest()


_WORDS: Mapping[type, str] = {kind: _WORD.sub("_", kind.__name__).lower() for kind in get_args(Command)}

KINDS: Mapping[str, type[Command]] = {word: kind for kind, word in _WORDS.items()}
"""Command name in the ledger -> command class."""
