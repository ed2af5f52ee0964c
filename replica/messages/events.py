"""Events: the facts recorded in the ledger.

Tags are wire numbers: explicit, append-only, never reused (law 12). They are grouped by subject with gaps, and below
128 they take one byte. A new field goes at the end of its record and has a default. An unknown tag stops the replica
(law 10). Fields named `job` are job IDs; times are Instants.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Union

import msgspec

from replica.messages.commands import Actor
from replica.model import (
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
    Partition,
    Pool,
    Qos,
    Recovery,
    Reservation,
    Revocation,
    Scheduler,
    SchedulingRules,
    SeenFilesystem,
    SharedFilesystem,
    Site,
    Stage,
    Transfer,
    TransferCheckpoint,
    TransferReceipt,
    TransferRules,
)
from replica.values import NEVER, Instant


class EventRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base class of events: a tagged record, written from a feature level on."""

    since_level: ClassVar[int] = 1
    """The feature level that the event came with (`replica.messages.features`): no ledger has it below."""


class SubmittedTasks(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The tasks of an array that is submitted, and in what they differ."""

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
    """All members support `level`, and records introduced with it may follow.

    `release` is the first that supports it, so that a replica of an earlier release, which stops here, can name the
    release it needs. These two fields never change.
    """

    level: int
    release: str


class SiteConfigured(EventRecord, frozen=True, tag=3):
    """The site's configuration was changed; `site` is all of it as it is now, but for its revision."""

    site: Site


class TransferRulesSet(EventRecord, frozen=True, tag=4):
    """The site moves data by these rules from now on."""

    rules: TransferRules


class SchedulingRulesSet(EventRecord, frozen=True, tag=5):
    """The site's rules of scheduling were changed."""

    rules: SchedulingRules


class ClusterRecovered(EventRecord, frozen=True, tag=6):
    """The cluster goes on as a new incarnation from what one member had left: a majority of the others is lost, and
    with them what they had acknowledged after that. `recovery.at` is set where it is folded.
    """

    recovery: Recovery
    forgotten: int = 0
    """An earlier recovery that makes room for it in the state; 0: none."""


# ---- pools


class PoolSet(EventRecord, frozen=True, tag=10):
    """A pool was made or changed; `pool` is all of it as it is now."""

    pool: Pool


class PoolRemoved(EventRecord, frozen=True, tag=11):
    """An unused pool was removed."""

    pool: str


# ---- shared filesystems


class FilesystemSet(EventRecord, frozen=True, tag=12):
    """A shared filesystem was made; `filesystem` is all of it as it is now."""

    filesystem: SharedFilesystem


class FilesystemRemoved(EventRecord, frozen=True, tag=13):
    """A shared filesystem that no pool has its buffers in is no more."""

    filesystem: str


# ---- nodes


class NodeRegistered(EventRecord, frozen=True, tag=15):
    """An agent started, or came back with another instance."""

    node: str
    cpus: int
    instance: str
    storage_id: str
    buffers: str = ""
    process_control: str = ""
    capacity_control: str = ""
    filesystems: tuple[SeenFilesystem, ...] = ()
    """The shared filesystems that it is a mover of from now on, as it has found them."""


class NodeDrained(EventRecord, frozen=True, tag=16):
    """An operator keeps new work from the node."""

    node: str
    reason: str


class NodeResumed(EventRecord, frozen=True, tag=17):
    """The node may have new work again."""

    node: str


class NodeWentDown(EventRecord, frozen=True, tag=18):
    """The leader has not heard of the node's agent for its liveness time."""

    node: str
    reason: str


class NodeCameBack(EventRecord, frozen=True, tag=19):
    """The agent of a node that was down was heard of again. The operations of `jobs` have their time from now
    on: their clocks stood still meanwhile.
    """

    node: str
    jobs: tuple[int, ...] = ()


class NodeLost(EventRecord, frozen=True, tag=20):
    """An operator declared a node lost that is down: its jobs end or wait again, and their space there is free."""

    node: str
    reason: str


# ---- partitions


class PartitionSet(EventRecord, frozen=True, tag=24):
    """A partition was made or changed; `partition` is all of it as it is now."""

    partition: Partition


class PartitionDeleted(EventRecord, frozen=True, tag=25):
    """A partition is no more; its jobs wait with that reason."""

    partition: str


# ---- accounts, QOS, licences, and what was used


class AccountSet(EventRecord, frozen=True, tag=28):
    """An account was made or changed; `account` is all of it as it is now."""

    account: Account


class AccountDeleted(EventRecord, frozen=True, tag=29):
    """An account without accounts below it is no more."""

    account: str


class QosSet(EventRecord, frozen=True, tag=30):
    """A QOS was made or changed."""

    qos: Qos


class QosDeleted(EventRecord, frozen=True, tag=31):
    """A QOS is no more."""

    qos: str


class LicenseSet(EventRecord, frozen=True, tag=32):
    """There are so many of a licence from here on."""

    license: License


class LicenseDeleted(EventRecord, frozen=True, tag=33):
    """A licence is no more."""

    license: str


class UsageReset(EventRecord, frozen=True, tag=34):
    """The burst-buffer usage of an account (`whose` a) or a QOS (q) was reset to zero."""

    whose: str
    name: str


# ---- reservations


class ReservationSet(EventRecord, frozen=True, tag=38):
    """A reservation was made or changed."""

    reservation: Reservation


class ReservationDeleted(EventRecord, frozen=True, tag=39):
    """An operator took a reservation away; its jobs wait with that reason."""

    reservation: str


class ReservationStarted(EventRecord, frozen=True, tag=40):
    """The start of a reservation has come."""

    reservation: str


class ReservationEnded(EventRecord, frozen=True, tag=41):
    """The end of a reservation has come; it is no more."""

    reservation: str


# ---- jobs, but for what is done for them on nodes


class JobSubmitted(EventRecord, frozen=True, tag=46):
    """A job exists, PENDING, or an array of jobs: then task number n is job `job` + n."""

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
    """A pending job is held back: by whom, and where the system does it, why: `reason` is what is shown, `comment` the
    SystemComment. What an operator holds stays held by an operator.
    """

    job: int
    hold: Hold
    reason: str = ""
    comment: str = ""


class JobReleased(EventRecord, frozen=True, tag=54):
    """The hold is over; an operation that had failed for good is ordered again by StageRetried."""

    job: int


class JobBecameEligible(EventRecord, frozen=True, tag=55):
    """The begin time of a pending job has come."""

    job: int


class DeadlineMissed(EventRecord, frozen=True, tag=56):
    """A pending job could no longer end before its deadline, and will not be started."""

    job: int


class CancelRequested(EventRecord, frozen=True, tag=57):
    """The script of a started job is to be ended, or with `hurry` stage-out be skipped."""

    job: int
    hurry: bool


class JobCancelled(EventRecord, frozen=True, tag=58):
    """A job that held nothing is over: CANCELLED."""

    job: int


class RequeueRequested(EventRecord, frozen=True, tag=59):
    """The present run of the job is to end; then its results are staged out, its buffer torn down, and it waits."""

    job: int
    reason: str


class JobRequeued(EventRecord, frozen=True, tag=60):
    """The job's old buffer is gone; it waits for a new one."""

    job: int


class JobPurged(EventRecord, frozen=True, tag=61):
    """A finished job left the state; its history stays in the ledger."""

    job: int


# ---- buffers of jobs, and their operations


class BufferAllocated(EventRecord, frozen=True, tag=66):
    """Space is held from now on, and the node's agent has stage-in to do as `attempt`.

    `passed` is the job that was first in line for the pool and let this one past, 0 for none; `counted` whether that
    counts against it; `promised_at` when the passed job was expected to get its space. Where the buffer lies in a
    shared filesystem, `mover` has stage-in to do, and `node` is empty: the job may run on any.
    """

    job: int
    node: str
    attempt: int
    passed: int = 0
    counted: bool = False
    promised_at: Instant = NEVER
    mover: str = ""
    filesystems: tuple[str, ...] = ()
    """Shared filesystems that the job's operations need if it uses persistent buffers there.

    That of its own buffer is first.
    """


class AllocationRevoked(EventRecord, frozen=True, tag=67):
    """A buffer is taken back before its job ran; the job stays PENDING and will stage again after the teardown.

    `beneficiary` is the job that may start sooner for that, 0 for none: it counts against how often that may happen.
    """

    job: int
    attempt: int
    reason: str
    beneficiary: int = 0


class StagedIn(EventRecord, frozen=True, tag=69):
    """Stage-in completed: the buffer has the job's data."""

    job: int
    files: int
    size_bytes: int
    digest: str = ""
    """Digest over the per-file digests, as the agent reported it."""


class StageFailed(EventRecord, frozen=True, tag=70):
    """An operation of a stage failed, for example `setup` of stage-in. `reason` is shown to users, `comment` is the
    SystemComment. With `retry_at` NEVER no retry is planned: the job must be released or cancelled.
    """

    job: int
    stage: Stage
    attempt: int
    reason: str
    retry_at: Instant
    operation: str = ""
    comment: str = ""


class StageRetried(EventRecord, frozen=True, tag=71):
    """The operation is ordered again as `attempt`; reports of earlier attempts no longer count.

    `partial`: from now on a stage-out gives up results that are not there, and has the others out.
    """

    job: int
    stage: Stage
    attempt: int
    reason: str
    partial: bool = False


class OperationQueued(EventRecord, frozen=True, tag=72):
    """The operation that has just begun waits for its turn: as many of its stage as may be are under way."""

    job: int
    stage: Stage


class OperationOrdered(EventRecord, frozen=True, tag=73):
    """It is the turn of an operation that was queued; its time begins."""

    job: int
    stage: Stage


class OperationsRestarted(EventRecord, frozen=True, tag=74):
    """The operation of the job begins again as `attempt`, staging-out from post-run on, because the leader changed
    (restart-policy slurm).
    """

    job: int
    attempt: int


class StageOutStarted(EventRecord, frozen=True, tag=75):
    """Post-run is over and the node's CPUs are free; stage-out is ordered as `attempt`, of `mover` where the buffer
    lies in a shared filesystem.
    """

    job: int
    attempt: int
    mover: str = ""


class StagedOut(EventRecord, frozen=True, tag=76):
    """Stage-out completed: the results are at their destinations."""

    job: int
    files: int
    size_bytes: int
    digest: str = ""


class TeardownStarted(EventRecord, frozen=True, tag=77):
    """The buffer is to be removed as `attempt`; the job has its final `result`."""

    job: int
    attempt: int
    result: JobState
    hurry: bool
    reason: str = ""


class TornDown(EventRecord, frozen=True, tag=78):
    """The buffer is gone and its space is free."""

    job: int


class BufferCleared(EventRecord, frozen=True, tag=79):
    """An operator took a buffer that could not be removed out of the list: its space is free."""

    job: int
    reason: str


class MoverChanged(EventRecord, frozen=True, tag=80):
    """Another mover of the shared filesystem has the operation of the job to do, as `attempt`; reports of the one that
    had it no longer count.
    """

    job: int
    mover: str
    attempt: int
    reason: str


class BufferAbandoned(EventRecord, frozen=True, tag=81):
    """A buffer that was to be torn down is given up, since its node does not answer: its space is free. What is left of
    it, and of the `persistent` buffers that the job was creating or destroying there, the node's agent removes when it
    returns.
    """

    job: int
    node: str
    persistent: tuple[str, ...] = ()


class AbandonedBufferRemoved(EventRecord, frozen=True, tag=82):
    """The agent of a node that returned has removed the buffer of a job that was given up there."""

    job: int
    node: str
    attempt: int


# ---- persistent buffers


class PersistentReserved(EventRecord, frozen=True, tag=84):
    """Space is held for a persistent buffer from now on (allocating); the stage-in of `job` creates it on `node`."""

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
    filesystem: str = ""
    """The shared filesystem that it lies in, below its path at `directory`; then a mover creates it, and `node` is
    empty.
    """
    directory: str = ""


class PersistentCreated(EventRecord, frozen=True, tag=85):
    """The persistent buffer is there (allocated): jobs may use it."""

    name: str
    job: int


class PersistentDeletionStarted(EventRecord, frozen=True, tag=86):
    """The persistent buffer is being removed (deleting) by the operation of `job`."""

    name: str
    job: int
    hurry: bool = False


class PersistentDeleted(EventRecord, frozen=True, tag=87):
    """The persistent buffer is gone (deleted), and its space is free. `reason` where an operator said so."""

    name: str
    job: int
    reason: str = ""


# ---- runs of scripts


class RunOrdered(EventRecord, frozen=True, tag=92):
    """CPUs of the node are taken, and its agent has the script to run as `attempt`."""

    job: int
    node: str
    attempt: int


class RunStarted(EventRecord, frozen=True, tag=93):
    """The agent has started the script."""

    job: int


class RunEnded(EventRecord, frozen=True, tag=94):
    """The script has ended; `result` is what the job will be. With a buffer, post-run is ordered as `attempt`."""

    job: int
    result: JobState
    exit_code: int
    signal: int
    attempt: int
    message: str = ""


class PreRunFailed(EventRecord, frozen=True, tag=95):
    """The operation before the script failed: the job gives back its node and waits again, its buffer torn down."""

    job: int
    reason: str
    comment: str


class JobSuspended(EventRecord, frozen=True, tag=96):
    """The script is stopped; its time limit stands still."""

    job: int


class JobResumed(EventRecord, frozen=True, tag=97):
    """The script goes on."""

    job: int


class RunRequeued(EventRecord, frozen=True, tag=98):
    """The run that was requeued is over and nothing of it is left: the job waits as if it had never run."""

    job: int


# ---- transfers


class TransferRecorded(EventRecord, frozen=True, gc=True, tag=104):
    """A transfer of the job has ended, well or not; what follows from that stands in the same entry."""

    job: int
    node: str
    receipt: TransferReceipt


class TransferCheckpointed(EventRecord, frozen=True, gc=True, tag=105):
    """So much of the transfer under way is durable."""

    job: int
    node: str
    checkpoint: TransferCheckpoint


# ---- external jobs: buffers whose jobs belong to another scheduler


class ExternalJobSetUp(EventRecord, frozen=True, tag=112):
    """A job exists for an external job, and asks for space; what its scheduler asks for is in `request`."""

    job: int
    request: JobRequest
    pool: str
    granted_bytes: int
    external_job: ExternalJob


class ExternalJobSpaceAllocated(EventRecord, frozen=True, tag=113):
    """Space is held for the external job from now on; nothing is staged before its scheduler says so.

    `passed`: the job that was first in line for the pool and let the external job past, 0 for none; it counts against
    it. `filesystems`: of one that works with persistent buffers, all shared filesystems that its operations need
    (`Buffer.filesystems`).
    """

    job: int
    passed: int = 0
    filesystems: tuple[str, ...] = ()


class ExternalJobSetupFailed(EventRecord, frozen=True, tag=114):
    """The external job did not get its space in time; its epoch is over. `reason` says who has the space."""

    job: int
    reason: str


class ExternalJobStageInOrdered(EventRecord, frozen=True, tag=115):
    """The scheduler of the external job has asked for its stage-in, which `mover` does as `attempt`."""

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
    """The scheduler of an external job that lingered has set it up again: it has its space as before, in its next
    epoch.
    """

    job: int
    epoch: int


class ExternalJobRetained(EventRecord, frozen=True, tag=118):
    """The external job was torn down with unexported results. They are retained, and its space still counts as used."""

    job: int
    reason: str


class SchedulerBound(EventRecord, frozen=True, tag=119):
    """External jobs under the scheduler's name are of the cluster in the record from now on."""

    scheduler: Scheduler


class ExternalJobRunBegan(EventRecord, frozen=True, tag=124):
    """The scheduler of the external job has begun its job, which has the buffer from now on."""

    job: int
    attempt: int


class ExternalJobRunEnded(EventRecord, frozen=True, tag=125):
    """The external job's run has ended. Stage-out starts only when its scheduler or a user requests it."""

    job: int
    attempt: int


class SchedulerReleased(EventRecord, frozen=True, tag=123):
    """An operator lets another cluster have external jobs under the name."""

    scheduler: str


class ExternalJobMissing(EventRecord, frozen=True, tag=126):
    """The scheduler believes that `external_job` has a buffer here, in its own `state`, and there is none. Changes
    nothing.
    """

    external_job: str
    state: str


# ---- drills


class DrillStarted(EventRecord, frozen=True, tag=140):
    """An operator begins a drill: what happens to the target until it ends was meant to happen."""

    drill: int
    scenario: str
    target: str
    lasts_s: int
    by: str
    forced: tuple[str, ...] = ()
    """The preconditions that did not hold and were overridden."""
    forgotten: int = 0
    """An earlier drill that makes room for it in the state; 0: none."""
    plan: str = ""
    """Id of the plan that was confirmed."""
    lease_s: int = 0
    """After so many seconds without a word of who carries it out it is over; 0: only after its time."""


class DrillRenewed(EventRecord, frozen=True, tag=146):
    """The program that runs a drill renewed its lease."""

    drill: int


class DrillConfirmed(EventRecord, frozen=True, tag=145):
    """Another operator agrees to a drill."""

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
    """An operator wants no drills."""

    by: str
    reason: str


class DrillsUnlocked(EventRecord, frozen=True, tag=144):
    """The word of the operator `by` that there shall be no drill was taken back."""

    by: str


# ---- mails


class MailSent(EventRecord, frozen=True, tag=110):
    """The mail that a job had asked for was taken by the mailer. The job may be purged."""

    job: int
    mail: str


class MailDropped(EventRecord, frozen=True, tag=111):
    """The mail that a job had asked for is given up: `reason` says why. The job may be purged."""

    job: int
    mail: str
    reason: str


# ---- certificates


class NodeAdmitted(EventRecord, frozen=True, tag=122):
    """The agent of a node may register."""

    node: str
    by: str


class CertificateRevoked(EventRecord, frozen=True, tag=120):
    """A certificate, or all of one holder, is refused from now on."""

    revocation: Revocation


class CertificatesUnrevoked(EventRecord, frozen=True, tag=121):
    """These are off the list of revoked certificates: an operator took one off it, or they have expired."""

    certificates: tuple[str, ...]


# ---- answers that are kept, and sessions of programs


class CachedRepliesDropped(EventRecord, frozen=True, tag=132):
    """The answers to single commands that were settled up to this revision are forgotten."""

    through: int


class SessionOpened(EventRecord, frozen=True, tag=130):
    """A program may number its commands. The session's number is the revision of this event."""

    session: int
    actor: Actor


class SessionsEnded(EventRecord, frozen=True, tag=131):
    """These sessions are over, and their answers forgotten: `reason` is `closed` or `expired`."""

    sessions: tuple[int, ...]
    reason: str


# ---- the clock


class ClockSet(EventRecord, frozen=True, tag=170):
    """The time is set back to `at` by an operator: the only way in which it goes back. Nothing follows it in its batch.

    Of `jobs`, those that are not over and were touched later by the clock, what it had measured, and what it had set
    itself to do, counts from `at` on at the latest (`replica.model.operations.set_back`). What people wrote (begin
    times, deadlines, reservations) and what has been (submits, ends) stays.
    """

    at: Instant
    jobs: tuple[int, ...] = ()


# ---- what the ledger says of itself


class StateDigested(EventRecord, frozen=True, tag=180):
    """The state after `revision`, which precedes this event, has the digest `state` (`replica.state.state_digest`).

    A majority of the members reported it. The event changes nothing; readers that fold the ledger compare the digest.
    """

    revision: int
    state: bytes


class HistoriesCounted(EventRecord, frozen=True, tag=182):
    """In the first `index` entries there are records of jobs up to number `jobs`, and `root` is that of the tree over
    how many there are of each (`cluster.security.proofs.HistoryCounts`), 32 bytes.

    A majority of the members counted the same. It changes nothing: who is shown the records of a job, and its count
    under this root, knows that they are all of them.
    """

    index: int
    jobs: int
    root: bytes


class DisclosureKeyDrawn(EventRecord, frozen=True, tag=181):
    """A secret was drawn from which the salts of this ledger's proofs are derived.

    The salt prevents a reader of one record from guessing another one and confirming the guess in the tree. The
    replicas keep the secret; no API returns it.
    """

    disclosure_key: bytes

    def __repr__(self) -> str:
        return "DisclosureKeyDrawn(...)"


EVENTS: tuple[type[EventRecord], ...] = tuple(EventRecord.__subclasses__())
"""Every event."""

if TYPE_CHECKING:
    Event = EventRecord
else:
    Event = Union[EVENTS]  # noqa: UP007
"""Any event: for msgspec, the union of all of them, told apart by their tags."""


def job_of(event: Event) -> int | None:
    """Return the job an event is about, or None; of an array the first one."""
    return getattr(event, "job", None)


def jobs_of(event: Event) -> Sequence[int]:
    """Return the jobs an event is about."""
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
    }
)
"""Routine events, which change no setting."""

_OF_ALL = frozenset({PersistentReserved, PersistentCreated, PersistentDeletionStarted, PersistentDeleted})
"""Events of a job whose effect outlives the job."""


def concerns_cluster(kind: type[Event]) -> bool:
    """Return whether events of a kind concern the cluster and not a job: pools, nodes, accounts, settings, members."""
    return kind in _OF_ALL or ("job" not in kind.__struct_fields__ and kind not in _ROUTINE)
