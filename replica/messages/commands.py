"""Commands to the controller, in the imperative, each settled by one entry of a batch.

The ledger contains their events and rejections, not the commands themselves, so commands have no wire numbers.
`kind_of` returns the name that the ledger records for audits.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from enum import IntEnum
from typing import get_args

import msgspec

from replica.grammar import Setting
from replica.model import (
    NO_CHANGE,
    Account,
    AfterTask,
    BufferRequest,
    CreatePersistent,
    DrillVerdict,
    Hold,
    JobChange,
    JobRequest,
    JobState,
    License,
    Partition,
    Pool,
    PoolUnit,
    Qos,
    Reservation,
    SchedulingRules,
    SeenFilesystem,
    SharedFilesystem,
    Site,
    Stage,
    TransferCheckpoint,
    TransferReceipt,
)
from replica.values import NEVER, Instant


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
    """Make the first event; refused when there is one."""

    cluster_id: str
    name: str
    site: Site
    pools: tuple[Pool, ...]
    nodes: tuple[str, ...] = ()
    """Nodes whose agents may register without separate admission."""
    filesystems: tuple[SharedFilesystem, ...] = ()
    disclosure_key: bytes = b""
    """A secret of DISCLOSURE_KEY_BYTES that the leader drew, or empty: proofs of the ledger are salted with it."""


class RecoverCluster(msgspec.Struct, frozen=True):
    """Begin a new incarnation of the cluster from one surviving replica (operator, on its machine).

    It is never sent over the network: `cluster.server.recovery` appends it to the surviving ledger. Fields as in
    `replica.model.Recovery`.
    """

    mark: str
    replica: str
    members: tuple[str, ...]
    kept_index: int
    known_index: int
    is_snapshot: bool = False


class SetPool(msgspec.Struct, frozen=True):
    """Make or change a pool (operator)."""

    pool: Pool


class ChangePool(msgspec.Struct, frozen=True):
    """Add a pool (`exists` false), or change what is not None of one (operator). Numbers count units of the pool."""

    pool: str
    exists: bool = True
    quantity: int | None = None
    granularity: int | None = None
    out_of_service: int | None = None
    is_default: bool | None = None
    unit: PoolUnit | None = None
    drain_all: bool = False
    """Take all that it has now out of service, instead of `out_of_service`."""
    is_reported: bool = False
    """Mark it as one of the provider's (leader)."""
    filesystem: str | None = None
    """Have its buffers lie in this shared filesystem from now on; empty: in the directories of agents."""


class RemovePool(msgspec.Struct, frozen=True):
    """Remove a pool that is not in use (operator)."""

    pool: str


class AddFilesystem(msgspec.Struct, frozen=True):
    """Make a shared filesystem of a file system that all nodes mount at `path` (operator)."""

    filesystem: str
    path: str


class RemoveFilesystem(msgspec.Struct, frozen=True):
    """Remove a shared filesystem that no pool names (operator); what lies there stays."""

    filesystem: str


class ConfigureSite(msgspec.Struct, frozen=True):
    """Change the configuration, all in one entry (operator).

    `partial`: what is not named stays as it is. `expected_revision`: refused if the configuration was changed later.
    """

    settings: tuple[Setting, ...]
    partial: bool = False
    expected_revision: int | None = None


class RegisterNode(msgspec.Struct, frozen=True):
    """An agent announces itself; a new instance restarts its unfinished staging as new attempts."""

    node: str
    cpus: int
    instance: str
    storage_id: str
    buffers: str = ""
    process_control: str = ""
    """Mechanism by which the agent ends a job's processes (PROCESS_CONTROLS)."""
    capacity_control: str = ""
    """Mechanism that limits buffers to their capacity (CAPACITY_CONTROLS)."""
    filesystems: tuple[SeenFilesystem, ...] = ()
    """The shared filesystems that it stages for, as it has found them: then it is a mover, has no CPUs and runs no
    scripts.
    """


class AdmitNode(msgspec.Struct, frozen=True):
    """Let an agent register under a name that the cluster was not founded with (operator)."""

    node: str


class DrainNode(msgspec.Struct, frozen=True):
    """Keep new work from a node (operator)."""

    node: str
    reason: str


class ResumeNode(msgspec.Struct, frozen=True):
    """Give a drained node new work again (operator)."""

    node: str


class LoseNode(msgspec.Struct, frozen=True):
    """Declare a node that is down lost (operator): its jobs end or wait again, and their space there is free."""

    node: str
    reason: str


class MarkNodeDown(msgspec.Struct, frozen=True):
    """The leader has not heard of a node's agent (controller)."""

    node: str
    reason: str


class MarkNodeBack(msgspec.Struct, frozen=True):
    """The leader hears a node's agent again (controller)."""

    node: str


class SubmitJob(msgspec.Struct, frozen=True):
    """Make a job, or a job array."""

    request: JobRequest
    """Request of the job; for an array, of each task, without its `array`."""
    hold: Hold = Hold.NONE
    tasks: tuple[int, ...] = ()
    """The tasks of an array, ascending; empty: one job."""
    throttle: int = 0
    """Maximum number of active tasks; 0: no limit."""
    after_tasks: tuple[AfterTask, ...] = ()
    ignored: tuple[str, ...] = ()
    """Options of sbatch in the submit that Forebay does not carry out: rejected if the site says so."""
    if_defined: tuple[str, ...] = ()
    """Some of account, qos, licenses and reservation: what the site has not defined is left out, unless it rejects
    options without effect.
    """


class CancelJob(msgspec.Struct, frozen=True):
    """End a job; `hurry` skips stage-out."""

    job: int
    hurry: bool = False
    tasks: tuple[int, ...] | None = None
    """Tasks of the array `job`; None: all of them, or the job where it is no array."""


class HoldJob(msgspec.Struct, frozen=True):
    """Hold a pending job back."""

    job: int
    tasks: tuple[int, ...] | None = None


class ReleaseJob(msgspec.Struct, frozen=True):
    """End a hold, and order an operation again that had failed for good.

    `partial`: of a stage-out, which then gives up results that are not there, and has the others out.
    """

    job: int
    tasks: tuple[int, ...] | None = None
    partial: bool = False


class SuspendJob(msgspec.Struct, frozen=True):
    """Stop the script of a running job where it is."""

    job: int
    tasks: tuple[int, ...] | None = None


class ResumeJob(msgspec.Struct, frozen=True):
    """Let the script of a suspended job go on."""

    job: int
    tasks: tuple[int, ...] | None = None


class RequeueJob(msgspec.Struct, frozen=True):
    """End the present run of a job, or take back its buffer, and let it wait and stage in again."""

    job: int
    tasks: tuple[int, ...] | None = None


class ClearBuffer(msgspec.Struct, frozen=True):
    """Forget a buffer that could not be removed (operator): that of `job`, or the persistent one called `name`.

    With `discard`, do so even if it holds the only copy of data.
    """

    job: int = 0
    name: str = ""
    discard: bool = False


class RestartOperations(msgspec.Struct, frozen=True):
    """Start the operations of some jobs again, as Slurm does when its controller starts (controller)."""

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
    """The job's script is running."""


class ScriptEnded(msgspec.Struct, frozen=True, tag="ended"):
    """The job's script has ended: its exit code, or the signal that ended it; `result` COMPLETED, FAILED, TIMEOUT,
    CANCELLED or NODE_FAIL.
    """

    result: JobState
    exit_code: int = 0
    signal: int = 0
    message: str = ""


class TransferProgressed(msgspec.Struct, frozen=True, tag="progressed"):
    """A transfer goes on, and so much of it is durable; said once a minute at most. Ignored below feature level 4."""

    checkpoint: TransferCheckpoint


class PersistentChanged(msgspec.Struct, frozen=True, tag="persistent"):
    """A persistent buffer that the order creates is there, or one that it destroys is gone; the order goes on."""

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
    """Allow what came with the next feature level (operator; controller for a cluster that is new).

    `known` are the facts it is decided by: each member of the cluster with the highest level that it says it knows, 0
    for one that did not say. They are no part of what the operator asks for, so a retry may bring others.
    """

    level: int
    known: tuple[tuple[str, int], ...]


class SettleMails(msgspec.Struct, frozen=True):
    """Say of mails that are owed that they were `sent`, or `dropped` and why (controller); by their keys."""

    sent: tuple[str, ...]
    dropped: tuple[tuple[str, str], ...] = ()


class SetAccount(msgspec.Struct, frozen=True):
    """Make or change an account (operator)."""

    account: Account


class DeleteAccount(msgspec.Struct, frozen=True):
    """Take an account away; its jobs wait with `InvalidAccount` (operator)."""

    account: str


class SetQos(msgspec.Struct, frozen=True):
    """Make or change a QOS (operator)."""

    qos: Qos


class DeleteQos(msgspec.Struct, frozen=True):
    """Take a QOS away; its jobs wait with `InvalidQOS` (operator)."""

    qos: str


class SetLicense(msgspec.Struct, frozen=True):
    """Say how many of a licence there are (operator)."""

    license: License


class DeleteLicense(msgspec.Struct, frozen=True):
    """Take a licence away (operator)."""

    license: str


class RevokeCertificate(msgspec.Struct, frozen=True):
    """Refuse a certificate, or all of one holder, from now on (operator); words as in `Revocation`."""

    certificate: str
    reason: str
    until: Instant = NEVER
    """When it expires anyway."""


class UnrevokeCertificate(msgspec.Struct, frozen=True):
    """Take a certificate or a holder off the list of those that are refused (operator)."""

    certificate: str


class SetReservation(msgspec.Struct, frozen=True):
    """Make or change a reservation of burst-buffer space (operator); `active` is not looked at."""

    reservation: Reservation


class DeleteReservation(msgspec.Struct, frozen=True):
    """Take a reservation away; its jobs wait with `ReservationDeleted` (operator)."""

    reservation: str


class SetSchedulingRules(msgspec.Struct, frozen=True):
    """Change the site's rules of scheduling (operator)."""

    rules: SchedulingRules


class RunSchedulingCycle(msgspec.Struct, frozen=True):
    """Run a scheduling cycle: assign space and CPUs, and perform timed actions that are due (controller)."""


# ---- what can be asked about partitions, about consumption, and of a job that waits: part of
# `replica.messages.commands`


class SetPartition(msgspec.Struct, frozen=True):
    """Make or change a partition (operator). One that is the default takes that from any other."""

    partition: Partition


class UpdateJob(msgspec.Struct, frozen=True):
    """Change a job that waits, or all that wait of an array or of some of its tasks.

    `buffer`: what is asked of burst buffers instead of what was; None: that stays as it is. `after_tasks` belong to the
    dependencies in `change`.
    """

    job: int
    change: JobChange = NO_CHANGE
    buffer: BufferRequest | None = None
    after_tasks: tuple[AfterTask, ...] = ()
    tasks: tuple[int, ...] | None = None


class DeletePartition(msgspec.Struct, frozen=True):
    """Take a partition away; its jobs wait with `PartitionConfig` (operator)."""

    partition: str


class ResetUsage(msgspec.Struct, frozen=True):
    """Have what an account (`whose` a), or a QOS (q), has used of burst buffers count as nothing (operator)."""

    whose: str
    name: str


class SetClock(msgspec.Struct, frozen=True):
    """Set the time back to `at`, which must be before it (operator): for a cluster that is ahead of the truth."""

    at: Instant


class OpenSession(msgspec.Struct, frozen=True):
    """Open a session for a program that will send many commands (any role that may send commands)."""


class CloseSession(msgspec.Struct, frozen=True):
    """End a session: its answers are forgotten. Its own actor, or an operator."""

    session: int


class ExpireCachedReplies(msgspec.Struct, frozen=True):
    """End the sessions in which nothing came for long, and drop the answers that are due (leader)."""


class RecordStateDigest(msgspec.Struct, frozen=True):
    """Record the digest of the state after an earlier revision, 32 bytes, as most members have it (leader)."""

    revision: int
    state: bytes


class RecordHistories(msgspec.Struct, frozen=True):
    """Record how many records of each job there are in the first entries, as most members counted them (leader)."""

    index: int
    jobs: int
    root: bytes


# ---- what another scheduler asks for its external jobs: whose they are, its own name says. `cluster` is what its
# instances have in common, `job` its number there; `epoch` 0: whichever is the last one


class RegisterScheduler(msgspec.Struct, frozen=True):
    """Have external jobs under one's own name (scheduler); refused where another cluster has them."""

    cluster: str
    address: str
    """Address of the sender, shown when another cluster is rejected."""


class ReleaseScheduler(msgspec.Struct, frozen=True):
    """Let another cluster have external jobs under a name (operator)."""

    scheduler: str


class StartDrill(msgspec.Struct, frozen=True):
    """Say that a drill begins (operator, drill)."""

    scenario: str
    target: str
    lasts_s: int
    """After so many seconds it is over, whatever is heard of it."""
    forced: tuple[str, ...] = ()
    """The preconditions that do not hold and are overridden."""
    plan: str = ""
    """Id of the plan that was confirmed; helpers on the hosts do nothing for another one."""
    lease_s: int = 0
    """After so many seconds without a probe of who carries it out it is over; 0: only after `lasts_s`."""


class ConfirmDrill(msgspec.Struct, frozen=True):
    """Agree, as another operator, to a drill that has begun (operator)."""

    drill: int


class AbortDrill(msgspec.Struct, frozen=True):
    """Have a drill end before its time (operator, drill)."""

    drill: int
    reason: str


class EndDrill(msgspec.Struct, frozen=True):
    """Say how a drill ended (operator, drill)."""

    drill: int
    verdict: DrillVerdict
    sentence: str
    figures: tuple[tuple[str, int], ...] = ()


class ProbeDrill(msgspec.Struct, frozen=True):
    """See whether commands are settled, during a drill (operator, drill): nothing changes but that it was answered, and
    now and then that who carries it out is still there.
    """

    drill: int


class LockDrills(msgspec.Struct, frozen=True):
    """Have no drill begin, and one that is under way end (operator)."""

    reason: str


class UnlockDrills(msgspec.Struct, frozen=True):
    """Take back an operator's word that there shall be no drill (operator)."""

    by: str


class SetUpExternalJob(msgspec.Struct, frozen=True):
    """Ask for the space of an external job (scheduler); take one up again that lingers."""

    cluster: str
    job: str
    uid: int
    request: JobRequest
    """Its user, working directory, gid, and what it asks of burst buffers; the rest is not looked at."""
    epoch: int = 0


class StageInExternalJob(msgspec.Struct, frozen=True):
    """Have the data of an external job staged in (scheduler)."""

    cluster: str
    job: str
    epoch: int = 0


class BeginExternalJobRun(msgspec.Struct, frozen=True):
    """Say that the job of an external job begins (scheduler)."""

    cluster: str
    job: str
    epoch: int = 0


class EndExternalJobRun(msgspec.Struct, frozen=True):
    """Say that the job of an external job has ended (scheduler)."""

    cluster: str
    job: str
    epoch: int = 0


class StageOutExternalJob(msgspec.Struct, frozen=True):
    """Have the results of an external job exported (scheduler); then it is torn down."""

    cluster: str
    job: str
    epoch: int = 0


class TearDownExternalJob(msgspec.Struct, frozen=True):
    """Be done with an external job (scheduler); `hurry`: also where results are lost by that.

    `reason`: why, where its scheduler knows nothing of it any more; then nothing of it lingers.
    """

    cluster: str
    job: str
    hurry: bool = False
    epoch: int = 0
    reason: str = ""


class ReportMissingExternalJob(msgspec.Struct, frozen=True):
    """Say that there should be an external job, and is none (scheduler); `state`: how its scheduler calls where it
    stands.
    """

    cluster: str
    job: str
    state: str


class MakePersistent(msgspec.Struct, frozen=True):
    """Have a persistent buffer made for a user (scheduler)."""

    cluster: str
    user: str
    uid: int
    gid: int
    create: CreatePersistent


class RemovePersistent(msgspec.Struct, frozen=True):
    """Have a persistent buffer of a user removed (scheduler); `hurry`: without its stage-out."""

    cluster: str
    user: str
    uid: int
    gid: int
    name: str
    hurry: bool = False


class ExportBuffer(msgspec.Struct, frozen=True):
    """Export the results of an external job that is parked, or whose stage-out failed (its user, operator).

    `partial`: without what is not there.
    """

    job: int
    partial: bool = False


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
    | SetSchedulingRules
    | RunSchedulingCycle
    | ChangePool
    | RemovePool
    | AddFilesystem
    | RemoveFilesystem
    | ConfigureSite
    | SettleMails
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
    """A command, its client-made id (16 bytes, `replica.values.command_ids`), and the actor it was authenticated as."""

    id: bytes
    actor: Actor
    command: Command


_WORD = re.compile(r"(?<=[a-z])(?=[A-Z])")


def kind_of(command: Command) -> str:
    """Return the command's name as the ledger keeps it, for example `submit_job`."""
    return _WORDS[type(command)]


DIGEST_BYTES = 8
"""Size of a command's digest, bytes. It distinguishes a retry from accidental reuse of an ID; a forged collision gains
nothing.
"""

_ENCODER = msgspec.msgpack.Encoder()


def command_digest(request: Request) -> bytes:
    """Return the digest of who asks for what: the same for a retry, another for another command with the same id."""
    command = request.command
    if type(command) is RaiseFeatureLevel:
        command = RaiseFeatureLevel(command.level, ())
    elif type(command) is SubmitJob and (command.ignored or command.if_defined):
        # The ledger does not contain these fields; without them, a command rebuilt from its events has the same digest.
        command = msgspec.structs.replace(command, ignored=(), if_defined=())
    encoded = _ENCODER.encode((request.actor, kind_of(command), command))
    return hashlib.blake2b(encoded, digest_size=DIGEST_BYTES).digest()


_WORDS: Mapping[type, str] = {kind: _WORD.sub("_", kind.__name__).lower() for kind in get_args(Command)}

KINDS: Mapping[str, type[Command]] = {word: kind for kind, word in _WORDS.items()}
"""Command name in the ledger -> command class."""
