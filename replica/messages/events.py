"""Events: the facts recorded in the ledger.

Tags are wire numbers: explicit, append-only, never reused (law 12). They are grouped by subject with gaps, and below
128 they take one byte. A new field goes at the end of its record and has a default. An unknown tag stops the replica
(law 10). Fields named `job` are job IDs; times are Instants.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Union

import msgspec

from forebay.replica.messages.commands import Actor
from forebay.replica.model import (
    NO_CHANGE,
    Access,
    Account,
    BufferRequest,
    DrillVerdict,
    ExternalJob,
    Hold,
    JobChange,
    JobRequest,
    JobState,
    License,
    ObservedFilesystem,
    Partition,
    Pool,
    Qos,
    Recovery,
    Reservation,
    Revocation,
    Scheduler,
    SchedulingRules,
    SharedFilesystem,
    Site,
    Stage,
    Transfer,
    TransferCheckpoint,
    TransferReceipt,
    TransferRules,
)
from forebay.replica.values import NEVER, Instant


class EventRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base class of events: a tagged record, written from a feature level on."""

    since_level: ClassVar[int] = 1
    """First feature level at which the event may be recorded (`replica.messages.features`)."""


class SubmittedTasks(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tasks of a submitted array, and the fields in which they differ."""

    tasks: tuple[int, ...]
    """Ascending."""
    throttle: int = 0
    """Maximum number of active tasks; 0: no limit."""
    outputs: tuple[str, ...] = ()
    """Output path of each task; empty: all tasks use the request's path."""
    transfers: tuple[tuple[tuple[Transfer, ...], tuple[Transfer, ...]], ...] = ()
    """Stage-in and stage-out transfers of each task; empty: all tasks use those of the request."""


# ---- the cluster and its configuration


class ClusterFounded(EventRecord, frozen=True, tag=1):
    """The first event of every ledger."""

    cluster_id: str
    name: str
    site: Site
    pools: tuple[Pool, ...]
    feature_level: int = 1
    nodes: tuple[str, ...] = ()
    """Nodes whose agents may register."""
    filesystems: tuple[SharedFilesystem, ...] = ()


class FeatureLevelRaised(EventRecord, frozen=True, tag=2):
    """The feature level was raised to `level`, and records of this level may follow. All members support it.

    `release` is the first that supports it, so that a replica of an earlier release, which stops here, can name the
    release it needs. These two fields never change.
    """

    level: int
    release: str


class SiteConfigured(EventRecord, frozen=True, tag=3):
    """The site's configuration was changed. `site` is the complete new configuration, except its revision."""

    site: Site


class TransferRulesSet(EventRecord, frozen=True, tag=4):
    """The site's transfer rules were changed."""

    rules: TransferRules


class SchedulingRulesSet(EventRecord, frozen=True, tag=5):
    """The site's scheduling rules were changed."""

    rules: SchedulingRules


class ClusterRecovered(EventRecord, frozen=True, tag=6):
    """The cluster continues as a new incarnation from the data of one member.

    The majority was lost, with everything it acknowledged after that member's last entry. The fold sets `recovery.at`.
    """

    recovery: Recovery
    forgotten: int = 0
    """Incarnation of the earlier recovery that is dropped from the state to make space; 0: none."""


# ---- pools


class PoolSet(EventRecord, frozen=True, tag=10):
    """A pool was created or changed. `pool` is its complete new record."""

    pool: Pool


class PoolRemoved(EventRecord, frozen=True, tag=11):
    """An unused pool was removed."""

    pool: str


# ---- shared filesystems


class FilesystemSet(EventRecord, frozen=True, tag=12):
    """A shared filesystem was added, or its adapters changed. `filesystem` is its complete record."""

    filesystem: SharedFilesystem


class FilesystemRemoved(EventRecord, frozen=True, tag=13):
    """An unused shared filesystem was removed."""

    filesystem: str


# ---- nodes


class NodeRegistered(EventRecord, frozen=True, tag=15):
    """An agent registered, for the first time or as a new instance."""

    node: str
    cpus: int
    instance: str
    storage_id: str
    buffers: str = ""
    process_control: str = ""
    capacity_control: str = ""
    filesystems: tuple[ObservedFilesystem, ...] = ()
    """Shared filesystems that the agent found mounted; it is a mover of exactly these."""


class NodeDrained(EventRecord, frozen=True, tag=16):
    """An operator drained the node: it gets no new work."""

    node: str
    reason: str


class NodeResumed(EventRecord, frozen=True, tag=17):
    """An operator resumed the drained node: it gets new work again."""

    node: str


class NodeWentDown(EventRecord, frozen=True, tag=18):
    """The node's agent was silent for longer than its liveness time."""

    node: str
    reason: str


class NodeCameBack(EventRecord, frozen=True, tag=19):
    """The agent of a node that was down responds again."""

    node: str
    jobs: tuple[int, ...] = ()
    """Jobs whose operations start their time limits anew, because the limits did not count while the node was down."""


class NodeLost(EventRecord, frozen=True, tag=20):
    """An operator declared a node lost that is down: its jobs end or are requeued, and their space is released."""

    node: str
    reason: str


# ---- partitions


class PartitionSet(EventRecord, frozen=True, tag=24):
    """A partition was created or changed. `partition` is its complete new record."""

    partition: Partition


class PartitionDeleted(EventRecord, frozen=True, tag=25):
    """A partition was deleted. Its jobs wait with reason `PartitionConfig`."""

    partition: str


# ---- accounts, QOS, licences, usage


class AccountSet(EventRecord, frozen=True, tag=28):
    """An account was created or changed. `account` is its complete new record."""

    account: Account


class AccountDeleted(EventRecord, frozen=True, tag=29):
    """An account without subaccounts was deleted."""

    account: str


class QosSet(EventRecord, frozen=True, tag=30):
    """A QOS was created or changed."""

    qos: Qos


class QosDeleted(EventRecord, frozen=True, tag=31):
    """A QOS was deleted."""

    qos: str


class LicenseSet(EventRecord, frozen=True, tag=32):
    """A licence was created, or its total number changed."""

    license: License


class LicenseDeleted(EventRecord, frozen=True, tag=33):
    """A licence was deleted."""

    license: str


class UsageReset(EventRecord, frozen=True, tag=34):
    """The burst-buffer usage of an account or a QOS was reset to zero."""

    whose: str
    """Kind of `name`: a (account) or q (QOS)."""
    name: str


# ---- reservations


class ReservationSet(EventRecord, frozen=True, tag=38):
    """A reservation was created or changed."""

    reservation: Reservation


class ReservationDeleted(EventRecord, frozen=True, tag=39):
    """An operator deleted a reservation. Its jobs wait with reason `ReservationDeleted`."""

    reservation: str


class ReservationStarted(EventRecord, frozen=True, tag=40):
    """A reservation became active at its start time."""

    reservation: str


class ReservationEnded(EventRecord, frozen=True, tag=41):
    """A reservation was deleted at its end time."""

    reservation: str


# ---- jobs


class JobSubmitted(EventRecord, frozen=True, tag=46):
    """A job or an array of jobs was submitted and is PENDING. The n-th task of an array, from 0, is job `job` + n."""

    job: int
    request: JobRequest
    """Request of the job; for an array, of each task, without its `array`."""
    pool: str = ""
    granted_bytes: int = 0
    hold: Hold = Hold.NONE
    array: SubmittedTasks | None = None
    """None: one job."""


class JobUpdated(EventRecord, frozen=True, tag=50):
    """A pending job was changed. `buffer` is its new buffer request with pool and granted size, or None if unchanged.

    The job has no space yet, and may have had no buffer before.
    """

    job: int
    change: JobChange = NO_CHANGE
    buffer: BufferRequest | None = None
    pool: str = ""
    granted_bytes: int = 0


class JobHeld(EventRecord, frozen=True, tag=52):
    """A pending job was held. A hold by an operator is never replaced by another hold."""

    job: int
    hold: Hold
    reason: str = ""
    """Reason shown for a hold by the system."""
    comment: str = ""
    """SystemComment for a hold by the system."""


class JobReleased(EventRecord, frozen=True, tag=54):
    """A job's hold was released. An operation that had failed permanently is retried by StageRetried."""

    job: int


class JobBecameEligible(EventRecord, frozen=True, tag=55):
    """A pending job reached its begin time."""

    job: int


class DeadlineMissed(EventRecord, frozen=True, tag=56):
    """A pending job can no longer end before its deadline, and will not be started."""

    job: int


class CancelRequested(EventRecord, frozen=True, tag=57):
    """A started job was cancelled: its script must end, and with `hurry` its stage-out is skipped."""

    job: int
    hurry: bool


class JobCancelled(EventRecord, frozen=True, tag=58):
    """A job without space or CPUs was cancelled, and has finished as CANCELLED."""

    job: int


class RequeueRequested(EventRecord, frozen=True, tag=59):
    """A started job was requeued: its run must end. Then its results are staged out and its buffer is torn down."""

    job: int
    reason: str


class JobRequeued(EventRecord, frozen=True, tag=60):
    """The job's previous buffer was deleted, and the job waits for a new one."""

    job: int


class JobPurged(EventRecord, frozen=True, tag=61):
    """A finished job was removed from the state. Its history stays in the ledger."""

    job: int


# ---- buffers of jobs, and their operations


class BufferAllocated(EventRecord, frozen=True, tag=66):
    """A job got space, and its stage-in was ordered as `attempt`."""

    job: int
    node: str
    """Node of the buffer and of the run; empty if the buffer is in a shared filesystem, so that any node may run it."""
    attempt: int
    passed: int = 0
    """Job at the head of the pool's queue that this job was backfilled past; 0: none."""
    counted: bool = False
    """This counts toward the limit on how often `passed` may be backfilled past."""
    promised_at: Instant = NEVER
    """Expected start of `passed`."""
    mover: str = ""
    """Mover that does the stage-in, if the buffer is in a shared filesystem."""
    filesystems: tuple[str, ...] = ()
    """Shared filesystems that the job's operations need if it uses persistent buffers there.

    That of its own buffer is first.
    """


class AllocationRevoked(EventRecord, frozen=True, tag=67):
    """A buffer was revoked before its job ran. The job stays PENDING, and is staged in again after the teardown."""

    job: int
    attempt: int
    reason: str
    beneficiary: int = 0
    """Job that needs the space, 0 for none; if set, the revocation counts toward the job's limit of revocations."""


class StagedIn(EventRecord, frozen=True, tag=69):
    """Stage-in completed: the buffer contains the job's data."""

    job: int
    files: int
    size_bytes: int
    digest: str = ""
    """Digest over the per-file digests, as the agent reported it."""


class StageFailed(EventRecord, frozen=True, tag=70):
    """An operation of a stage failed."""

    job: int
    stage: Stage
    attempt: int
    reason: str
    """Reason shown to users."""
    retry_at: Instant
    """Time of the next attempt; NEVER: none until the job is released."""
    operation: str = ""
    """Failed part of the stage, for example `setup` of stage-in; empty: the whole stage."""
    comment: str = ""
    """SystemComment."""


class StageRetried(EventRecord, frozen=True, tag=71):
    """The operation was ordered again as `attempt`. Reports of earlier attempts no longer count."""

    job: int
    stage: Stage
    attempt: int
    reason: str
    partial: bool = False
    """Stage-outs of the job omit missing files from now on."""


class OperationQueued(EventRecord, frozen=True, tag=72):
    """The operation waits for a slot, because the maximum number of operations of its stage is under way."""

    job: int
    stage: Stage


class OperationOrdered(EventRecord, frozen=True, tag=73):
    """A queued operation got a slot and was ordered. Its time limit starts."""

    job: int
    stage: Stage


class OperationsRestarted(EventRecord, frozen=True, tag=74):
    """The job's operation was restarted as `attempt` because the leader changed (RestartPolicy slurm).

    A stage-out restarts with post-run.
    """

    job: int
    attempt: int


class StageOutStarted(EventRecord, frozen=True, tag=75):
    """Post-run completed, the node's CPUs are free, and stage-out was ordered as `attempt`."""

    job: int
    attempt: int
    mover: str = ""
    """Mover that does the stage-out, if the buffer is in a shared filesystem."""


class StagedOut(EventRecord, frozen=True, tag=76):
    """Stage-out completed: the results are at their destinations."""

    job: int
    files: int
    size_bytes: int
    digest: str = ""


class TeardownStarted(EventRecord, frozen=True, tag=77):
    """The teardown of the buffer was ordered as `attempt`. The job has its final `result`, or PENDING if requeued."""

    job: int
    attempt: int
    result: JobState
    hurry: bool
    reason: str = ""


class TornDown(EventRecord, frozen=True, tag=78):
    """The buffer was deleted, and its space released."""

    job: int


class BufferCleared(EventRecord, frozen=True, tag=79):
    """An operator cleared a buffer that could not be removed. Its space was released."""

    job: int
    reason: str


class MoverChanged(EventRecord, frozen=True, tag=80):
    """The job's operation was moved to another mover as `attempt`. Reports of the previous mover no longer count."""

    job: int
    mover: str
    attempt: int
    reason: str


class BufferAbandoned(EventRecord, frozen=True, tag=81):
    """A buffer was abandoned during its teardown because its node is lost. Its space was released.

    The node's agent removes its files when it returns.
    """

    job: int
    node: str
    persistent: tuple[str, ...] = ()
    """Persistent buffers that the job was creating or destroying on the node; their files are removed, too."""


class AbandonedBufferRemoved(EventRecord, frozen=True, tag=82):
    """The agent of a node that returned removed an abandoned buffer."""

    job: int
    node: str
    attempt: int


# ---- persistent buffers


class PersistentReserved(EventRecord, frozen=True, tag=84):
    """A persistent buffer got space (allocating). The stage-in of `job` creates it."""

    name: str
    job: int
    user: str
    gid: int
    pool: str
    granted_bytes: int
    access: tuple[Access, ...]
    kind: str
    """Scratch or cache."""
    node: str
    """Node whose agent creates the buffer; empty if a mover does."""
    filesystem: str = ""
    """Shared filesystem of the buffer, if any; then a mover creates it."""
    directory: str = ""
    """Directory of the buffer, relative to the path of `filesystem`."""


class PersistentCreated(EventRecord, frozen=True, tag=85):
    """The persistent buffer was created (allocated): jobs may use it."""

    name: str
    job: int


class PersistentDeletionStarted(EventRecord, frozen=True, tag=86):
    """The persistent buffer is being removed (deleting) by the operation of `job`."""

    name: str
    job: int
    hurry: bool = False


class PersistentDeleted(EventRecord, frozen=True, tag=87):
    """The persistent buffer was deleted, and its space released."""

    name: str
    job: int
    reason: str = ""
    """Reason, if an operator cleared the buffer."""


# ---- runs of scripts


class RunOrdered(EventRecord, frozen=True, tag=92):
    """The job got CPUs of the node, and its script was ordered to run as `attempt`."""

    job: int
    node: str
    attempt: int


class RunStarted(EventRecord, frozen=True, tag=93):
    """The agent has started the script."""

    job: int


class RunEnded(EventRecord, frozen=True, tag=94):
    """The script has ended. If the job has a buffer, post-run was ordered as `attempt`."""

    job: int
    result: JobState
    """Final state of the job, which a job with a buffer reaches after its stage-out."""
    exit_code: int
    signal: int
    attempt: int
    message: str = ""


class PreRunFailed(EventRecord, frozen=True, tag=95):
    """Pre-run failed: the job releases its node, its buffer is torn down, and it waits again."""

    job: int
    reason: str
    comment: str


class JobSuspended(EventRecord, frozen=True, tag=96):
    """The script was stopped. Its time limit does not count meanwhile."""

    job: int


class JobResumed(EventRecord, frozen=True, tag=97):
    """The script continues."""

    job: int


class RunRequeued(EventRecord, frozen=True, tag=98):
    """A requeued run was undone completely: the job waits as if it had never run."""

    job: int


# ---- transfers


class TransferRecorded(EventRecord, frozen=True, gc=True, tag=104):
    """A transfer of the job succeeded or failed. The events that follow from that are in the same entry."""

    job: int
    node: str
    receipt: TransferReceipt


class TransferCheckpointed(EventRecord, frozen=True, gc=True, tag=105):
    """A running transfer of the job reached a durable checkpoint."""

    job: int
    node: str
    checkpoint: TransferCheckpoint


# ---- external jobs


class ExternalJobSetUp(EventRecord, frozen=True, tag=112):
    """A scheduler set up an external job, which waits for space. `request` is the scheduler's request."""

    job: int
    request: JobRequest
    pool: str
    granted_bytes: int
    external_job: ExternalJob


class ExternalJobSpaceAllocated(EventRecord, frozen=True, tag=113):
    """An external job got its space. Nothing is staged until its scheduler requests it."""

    job: int
    passed: int = 0
    """Job at the head of the pool's queue that the external job overtook, 0 for none; this counts toward its limit."""
    filesystems: tuple[str, ...] = ()
    """Shared filesystems that its operations need (`Buffer.filesystems`), if it uses persistent buffers."""


class ExternalJobSetupFailed(EventRecord, frozen=True, tag=114):
    """An external job did not get its space in time, and its epoch has ended. `reason` names the cause."""

    job: int
    reason: str


class ExternalJobStageInOrdered(EventRecord, frozen=True, tag=115):
    """The scheduler requested the stage-in of an external job, which `mover` does as `attempt`."""

    job: int
    mover: str
    attempt: int


class ExternalJobLingered(EventRecord, frozen=True, tag=116):
    """The external job was torn down before it ran.

    Its data is kept for a while, and its space may be taken for other jobs. Reports of attempts earlier than `attempt`
    no longer count.
    """

    job: int
    attempt: int


class ExternalJobReactivated(EventRecord, frozen=True, tag=117):
    """A lingering external job was set up again by its scheduler. It keeps its space, and `epoch` begins."""

    job: int
    epoch: int


class ExternalJobRetained(EventRecord, frozen=True, tag=118):
    """The external job was torn down with unexported results. They are retained, and its space still counts as used."""

    job: int
    reason: str


class SchedulerBound(EventRecord, frozen=True, tag=119):
    """A scheduler's name was bound to a cluster, or its address changed."""

    scheduler: Scheduler


class ExternalJobRunBegan(EventRecord, frozen=True, tag=124):
    """The external job's run has started, and uses the buffer."""

    job: int
    attempt: int


class ExternalJobRunEnded(EventRecord, frozen=True, tag=125):
    """The external job's run has ended. Stage-out starts only when its scheduler or a user requests it."""

    job: int
    attempt: int


class SchedulerReleased(EventRecord, frozen=True, tag=123):
    """An operator released a scheduler's name for use by another cluster."""

    scheduler: str


class ExternalJobMissing(EventRecord, frozen=True, tag=126):
    """A scheduler expected the buffer of `external_job`, which does not exist. The event changes nothing."""

    external_job: str
    state: str
    """State of the job in the scheduler's own terms."""


# ---- drills


class DrillStarted(EventRecord, frozen=True, tag=140):
    """A drill started. Failures of the target until its end are intended."""

    drill: int
    scenario: str
    target: str
    lasts_s: int
    """Time limit, seconds."""
    by: str
    forced: tuple[str, ...] = ()
    """Failed preconditions that were overridden."""
    forgotten: int = 0
    """Earlier drill that is dropped from the state to make space; 0: none."""
    plan: str = ""
    """ID of the confirmed plan."""
    lease_s: int = 0
    """Time without a renewal after which the drill ends, seconds; 0: only `lasts_s` applies."""


class DrillRenewed(EventRecord, frozen=True, tag=146):
    """The program that runs a drill renewed its lease."""

    drill: int


class DrillConfirmed(EventRecord, frozen=True, tag=145):
    """A second operator confirmed a drill."""

    drill: int
    by: str


class DrillAbortRequested(EventRecord, frozen=True, tag=141):
    """An operator requested the early end of a drill."""

    drill: int
    reason: str


class DrillEnded(EventRecord, frozen=True, tag=142):
    """A drill ended, or its lease expired."""

    drill: int
    verdict: DrillVerdict
    sentence: str
    figures: tuple[tuple[str, int], ...] = ()


class DrillsLocked(EventRecord, frozen=True, tag=143):
    """An operator locked drills."""

    by: str
    reason: str


class DrillsUnlocked(EventRecord, frozen=True, tag=144):
    """The drill lock of the operator `by` was removed."""

    by: str


# ---- mails


class MailSent(EventRecord, frozen=True, tag=110):
    """The mailer accepted a mail of the job. The job may have been purged."""

    job: int
    mail: str


class MailDropped(EventRecord, frozen=True, tag=111):
    """A mail of the job was not sent, for `reason`. The job may have been purged."""

    job: int
    mail: str
    reason: str


# ---- event sinks


class SinkAdvanced(EventRecord, frozen=True, tag=160):
    """The receiver of an event sink has accepted all its events up to a revision, or the sink begins there."""

    sink: str
    revision: int


class SinkRemoved(EventRecord, frozen=True, tag=161):
    """An event sink is no longer configured, and its mark was deleted."""

    sink: str


# ---- certificates


class NodeAdmitted(EventRecord, frozen=True, tag=122):
    """An operator admitted a node: its agent may register."""

    node: str
    by: str


class CertificateRevoked(EventRecord, frozen=True, tag=120):
    """A certificate, or all certificates of a holder, were revoked."""

    revocation: Revocation


class CertificatesUnrevoked(EventRecord, frozen=True, tag=121):
    """Certificates were removed from the revocation list, by an operator or because they expired."""

    certificates: tuple[str, ...]


# ---- cached replies and sessions


class CachedRepliesDropped(EventRecord, frozen=True, tag=132):
    """Cached replies to commands outside sessions, settled up to revision `through`, were dropped."""

    through: int


class SessionOpened(EventRecord, frozen=True, tag=130):
    """A session was opened. Its number is the revision of this event."""

    session: int
    actor: Actor


class SessionsEnded(EventRecord, frozen=True, tag=131):
    """Sessions ended, and their cached replies were dropped."""

    sessions: tuple[int, ...]
    reason: str
    """closed or expired."""


# ---- the clock


class ClockSet(EventRecord, frozen=True, tag=170):
    """An operator set the clock back to `at`. Only this event sets it back, and no entry follows it in its batch.

    Times that users or operators specified (begin times, deadlines, reservations) and times of past events (submits,
    ends) do not change.
    """

    at: Instant
    jobs: tuple[int, ...] = ()
    """Unfinished jobs whose timers and measurements are later than `at`, and are moved back to it
    (`replica.model.stages.clamp_times`).
    """


# ---- records about the ledger itself


class StateDigested(EventRecord, frozen=True, tag=180):
    """The state after `revision`, which precedes this event, has the digest `state` (`replica.state.state_digest`).

    A majority of the members reported it. The event changes nothing; readers that fold the ledger compare the digest.
    """

    revision: int
    state: bytes


class HistoriesCounted(EventRecord, frozen=True, tag=182):
    """The number of ledger records of each job, up to an entry, was recorded as the root of a tree.

    A majority of the members reported the same root. The event changes nothing: it lets a verifier check that it was
    given all records of a job.
    """

    index: int
    """Number of entries counted."""
    jobs: int
    """Highest job ID counted."""
    root: bytes
    """Root of the tree over the counts (`cluster.security.proofs.HistoryCounts`), 32 bytes."""


class DisclosureKeyDrawn(EventRecord, frozen=True, tag=181):
    """The leader drew the secret from which the salts of this ledger's proofs are derived.

    The salt prevents a reader of one record from guessing another one and confirming the guess in the tree. Only the
    replicas know the secret; no API returns it.
    """

    disclosure_key: bytes

    def __repr__(self) -> str:
        return "DisclosureKeyDrawn(...)"


EVENTS: tuple[type[EventRecord], ...] = tuple(EventRecord.__subclasses__())
"""Every event class."""

if TYPE_CHECKING:
    Event = EventRecord
else:
    Event = Union[EVENTS]  # noqa: UP007
"""Any event. For msgspec, the union of all event classes, distinguished by their tags."""


def job_of(event: Event) -> int | None:
    """Return the job that an event concerns, the first one of an array; None if it concerns none."""
    return getattr(event, "job", None)


def jobs_of(event: Event) -> Sequence[int]:
    """Return the jobs that an event concerns."""
    if type(event) is JobSubmitted and event.array is not None:
        return range(event.job, event.job + len(event.array.tasks))
    job = job_of(event)
    return () if job is None else (job,)


_ROUTINE = frozenset(
    {
        StateDigested,
        HistoriesCounted,
        DisclosureKeyDrawn,
        DrillRenewed,
        SessionOpened,
        SessionsEnded,
        CachedRepliesDropped,
        MailSent,
        MailDropped,
        SinkAdvanced,
        SinkRemoved,
    }
)
"""Routine events, which change no setting."""


def is_routine(kind: type[Event]) -> bool:
    """Return whether events of this class are the ledger's own bookkeeping, which is shown only on request."""
    return kind in _ROUTINE and "job" not in kind.__struct_fields__


_OF_ALL = frozenset({PersistentReserved, PersistentCreated, PersistentDeletionStarted, PersistentDeleted})
"""Events of a job whose effect outlives the job."""


def concerns_cluster(kind: type[Event]) -> bool:
    """Return whether events of this class concern the cluster instead of a job: pools, nodes, accounts, settings."""
    return kind in _OF_ALL or ("job" not in kind.__struct_fields__ and kind not in _ROUTINE)
