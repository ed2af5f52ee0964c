"""What has happened: the facts in the ledger. This is their public face; they are written down by subject.

Tags are wire numbers: explicit, append-only, never reused (law 12). A new field goes at the end of its record with a
default. An unknown tag stops the replica (law 10). Fields named `job` are job ids; times are Instants.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from replica.model import (
    NO_CHANGE,
    Access,
    Account,
    BufferRequest,
    Hold,
    JobChange,
    JobRequest,
    JobState,
    License,
    Partition,
    Policy,
    Pool,
    PoolUnit,
    Qos,
    Reservation,
    SchedulingRules,
    Site,
    Stage,
    Transfer,
    TransferCheckpoint,
    TransferReceipt,
    TransferRules,
)
from replica.values import NEVER, Instant


class JobCancelled(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=24):
    """A job that held nothing is over: CANCELLED."""

    job: int


class MailSent(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=89):
    """The mail that a job had asked for was taken by the mailer. The job may be purged."""

    job: int
    mail: str


class TornDown(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=22):
    """The buffer is gone and its space is free."""

    job: int


class JobPurged(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=25):
    """A finished job left the state; its history stays in the ledger."""

    job: int


class ReservationDeleted(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=67):
    """An operator took a reservation away; its jobs wait with that reason."""

    reservation: str


class JobBecameEligible(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=28):
    """The begin time of a pending job has come."""

    job: int


class LicenseSet(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=64):
    """There are so many of a licence from here on."""

    license: License


class TeardownStarted(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=21):
    """The buffer is to be removed as `attempt`; the job has its final `result`."""

    job: int
    attempt: int
    result: JobState
    hurry: bool
    reason: str = ""


class NodeRegistered(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=4):
    """An agent started, or came back with another instance."""

    node: str
    cpus: int
    instance: str
    storage_id: str


class QosDeleted(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=63):
    """A QOS is no more."""

    qos: str


class PoolUnitSet(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=77):
    """What the numbers of a pool count from here on."""

    pool: str
    unit: PoolUnit


class FeatureLevelRaised(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=30):
    """All members know `level`, and what came with it may be written from here on. `release` is the first that knows
    it: so a replica of an earlier one, which stops here, can say what it needs. These two fields never change.
    """

    level: int
    release: str


class PoolRemoved(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=76):
    """A pool that nobody held or waited for is no more."""

    pool: str


class StageOutStarted(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=19):
    """Post-run is over and the node's CPUs are free; stage-out is ordered as `attempt`."""

    job: int
    attempt: int


class SchedulingRulesSet(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=70):
    """The site's rules of scheduling were changed."""

    rules: SchedulingRules


class TransferRecorded(msgspec.Struct, frozen=True, array_like=True, tag=96):
    """A transfer of the job has ended, well or not; what follows from that stands in the same entry."""

    job: int
    node: str
    receipt: TransferReceipt


class OperationsRestarted(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=43):
    """The operation of the job begins again as `attempt`, staging-out from post-run on, because the leader changed
    (restart-policy slurm).
    """

    job: int
    attempt: int


# ---- facts about what is set aside for whom: accounts, QOS, licences, reservations, the rules of scheduling


class AccountSet(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=60):
    """An account was made or changed; `account` is all of it as it is now."""

    account: Account


# ---- facts about what is done for a job on nodes: its buffer's operations, its runs, and persistent buffers


class BufferAllocated(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=12):
    """Space is held from now on, and the node's agent has stage-in to do as `attempt`.

    `passed` is the job that was first in line for the pool and let this one past, 0 for none; `counted` whether that
    counts against it; `promised_at` when the passed job was expected to get its space.
    """

    job: int
    node: str
    attempt: int
    passed: int = 0
    counted: bool = False
    promised_at: Instant = NEVER


class PoolSet(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=2):
    """A pool was made or changed; `pool` is all of it as it is now."""

    pool: Pool


class PersistentCreated(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=33):
    """The persistent buffer is there (allocated): jobs may use it."""

    name: str
    job: int


class ReservationStarted(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=68):
    """The start of a reservation has come."""

    reservation: str


class PersistentDeleted(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=35):
    """The persistent buffer is gone (deleted), and its space is free. `reason` where an operator said so."""

    name: str
    job: int
    reason: str = ""


class PersistentReserved(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=32):
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


class ReservationEnded(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=69):
    """The end of a reservation has come; it is no more."""

    reservation: str


class StagedIn(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=13):
    """All of the job's data is on the buffer."""

    job: int
    files: int
    size_bytes: int
    digest: str = ""
    """Digest over the per-file digests, as the agent reported it."""


class ReservationSet(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=66):
    """A reservation was made or changed."""

    reservation: Reservation


class UsageReset(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=115):
    """What an account (`whose` a), or a QOS (q), has used of burst buffers counts as nothing from here on."""

    whose: str
    name: str


class NodeResumed(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=6):
    """The node may have new work again."""

    node: str


class JobUpdated(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=113):
    """Somebody changed a job that waits. `buffer`: what it asks of burst buffers from here on, with the pool and what
    it is to hold there; None: that stays as it is. It has no space yet, and may have had no buffer before.
    """

    job: int
    change: JobChange = NO_CHANGE
    buffer: BufferRequest | None = None
    pool: str = ""
    granted_bytes: int = 0


class RunOrdered(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=16):
    """CPUs of the node are taken, and its agent has the script to run as `attempt`."""

    job: int
    node: str
    attempt: int


class PolicySet(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=3):
    """The site policy was changed."""

    policy: Policy


class BufferCleared(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=44):
    """An operator took a buffer that could not be removed out of the list: its space is free."""

    job: int
    reason: str


class CancelRequested(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=23):
    """The script of a started job is to be ended, or with `hurry` stage-out be skipped."""

    job: int
    hurry: bool


class JobResumed(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=40):
    """The script goes on."""

    job: int


class LicenseDeleted(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=65):
    """A licence is no more."""

    license: str


class MailDropped(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=88):
    """The mail that a job had asked for is given up: `reason` says why. The job may be purged."""

    job: int
    mail: str
    reason: str


class JobHeld(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=10):
    """A pending job is held back: by whom, and where the system does it, why: `reason` is what is shown, `comment` the
    SystemComment. What an operator holds stays held by an operator.
    """

    job: int
    hold: Hold
    reason: str = ""
    comment: str = ""


class PersistentDeletionStarted(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=34):
    """The persistent buffer is being removed (deleting) by the operation of `job`."""

    name: str
    job: int
    hurry: bool = False


class OperationOrdered(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=52):
    """It is the turn of an operation that was queued; its time begins."""

    job: int
    stage: Stage


# ---- facts about the cluster itself, its pools and its nodes


class ClusterFounded(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=1):
    """The first event of every ledger."""

    cluster_id: str
    name: str
    policy: Policy
    pools: tuple[Pool, ...]
    feature_level: int = 1


class StageFailed(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=14):
    """An operation of a stage failed, for example `setup` of stage-in: `reason` is what is shown, `comment` the
    SystemComment. `retry_at` NEVER: no retry is planned, somebody must release or cancel the job.
    """

    job: int
    stage: Stage
    attempt: int
    reason: str
    retry_at: Instant
    operation: str = ""
    comment: str = ""


class PreRunFailed(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=38):
    """The operation before the script failed: the job gives back its node and waits again, its buffer torn down."""

    job: int
    reason: str
    comment: str


# ---- facts about partitions, what was used of burst buffers, and jobs that changed while they waited: feature level 4


class PartitionSet(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=110):
    """A partition was made or changed; `partition` is all of it as it is now."""

    partition: Partition


class TransferCheckpointed(msgspec.Struct, frozen=True, array_like=True, tag=97):
    """So much of the transfer under way is durable."""

    job: int
    node: str
    checkpoint: TransferCheckpoint


# ---- facts about jobs from submit to purge, but for what is done for them on nodes (`replica.messages.events`)


class SubmittedTasks(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The tasks of an array that is submitted, and in what they differ."""

    tasks: tuple[int, ...]
    """Ascending."""
    throttle: int = 0
    """How many may be active at once; 0: all."""
    outputs: tuple[str, ...] = ()
    """Where the output of each task goes; empty: all of them where the request says."""
    transfers: tuple[tuple[tuple[Transfer, ...], tuple[Transfer, ...]], ...] = ()
    """What each task stages in and out; empty: all of them what the request says."""


class JobSubmitted(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=9):
    """A job exists, PENDING, or an array of jobs: then task number n is job `job` + n."""

    job: int
    request: JobRequest
    """What was asked; of an array, what is asked of each task, without its `array`."""
    pool: str = ""
    granted_bytes: int = 0
    hold: Hold = Hold.NONE
    array: SubmittedTasks | None = None
    """None: one job."""


class RunEnded(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=18):
    """The script has ended; `result` is what the job will be. With a buffer, post-run is ordered as `attempt`."""

    job: int
    result: JobState
    exit_code: int
    signal: int
    attempt: int
    message: str = ""


# ---- facts about moving data: by which rules, what was moved, and how far a transfer under way is


class TransferRulesSet(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=95):
    """The site moves data by these rules from now on."""

    rules: TransferRules


class NodeWentDown(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=7):
    """The leader has not heard of the node's agent for its liveness time."""

    node: str
    reason: str


class QosSet(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=62):
    """A QOS was made or changed."""

    qos: Qos


class DeadlineMissed(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=29):
    """A pending job could no longer end before its deadline, and will not be started."""

    job: int


class AccountDeleted(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=61):
    """An account without accounts below it is no more."""

    account: str


class JobRequeued(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=27):
    """The job's old buffer is gone; it waits for a new one."""

    job: int


class SiteConfigured(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=75):
    """The site's configuration was changed; `site` is all of it as it is now, but for its revision."""

    site: Site


class OperationQueued(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=51):
    """The operation that has just begun waits for its turn: as many of its stage as may be are under way."""

    job: int
    stage: Stage


class StageRetried(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=15):
    """The operation is ordered again as `attempt`; reports of earlier attempts no longer count."""

    job: int
    stage: Stage
    attempt: int
    reason: str


class AllocationRevoked(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=26):
    """A buffer is taken back before its job ran; the job stays PENDING and will stage again after the teardown.

    `beneficiary` is the job that may start sooner for that, 0 for none: it counts against how often that may happen.
    """

    job: int
    attempt: int
    reason: str
    beneficiary: int = 0


class NodeDrained(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=5):
    """An operator keeps new work from the node."""

    node: str
    reason: str


class RunStarted(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=17):
    """The agent has started the script."""

    job: int


class PartitionDeleted(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=111):
    """A partition is no more; its jobs wait with that reason."""

    partition: str


class NodeCameBack(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=8):
    """The agent of a node that was down was heard of again. The operations of `jobs` have their time from now
    on: their clocks stood still meanwhile.
    """

    node: str
    jobs: tuple[int, ...] = ()


class StagedOut(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=20):
    """All results are where the job wanted them."""

    job: int
    files: int
    size_bytes: int
    digest: str = ""


class RequeueRequested(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=41):
    """The present run of the job is to end; then its results are staged out, its buffer torn down, and it waits."""

    job: int
    reason: str


class RunRequeued(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=42):
    """The run that was requeued is over and nothing of it is left: the job waits as if it had never run."""

    job: int


class JobReleased(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=11):
    """The hold is over; an operation that had failed for good is ordered again by StageRetried."""

    job: int


class JobSuspended(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=39):
    """The script is stopped; its time limit stands still."""

    job: int


Event = (
    ClusterFounded
    | PoolSet
    | PolicySet
    | NodeRegistered
    | NodeDrained
    | NodeResumed
    | NodeWentDown
    | NodeCameBack
    | JobSubmitted
    | JobHeld
    | JobReleased
    | BufferAllocated
    | StagedIn
    | StageFailed
    | StageRetried
    | RunOrdered
    | RunStarted
    | RunEnded
    | StageOutStarted
    | StagedOut
    | TeardownStarted
    | TornDown
    | CancelRequested
    | JobCancelled
    | JobPurged
    | AllocationRevoked
    | JobRequeued
    | JobBecameEligible
    | DeadlineMissed
    | FeatureLevelRaised
    | PersistentReserved
    | PersistentCreated
    | PersistentDeletionStarted
    | PersistentDeleted
    | PreRunFailed
    | JobSuspended
    | JobResumed
    | RequeueRequested
    | RunRequeued
    | OperationsRestarted
    | BufferCleared
    | OperationQueued
    | OperationOrdered
    | SiteConfigured
    | PoolRemoved
    | PoolUnitSet
    | AccountSet
    | AccountDeleted
    | QosSet
    | QosDeleted
    | LicenseSet
    | LicenseDeleted
    | ReservationSet
    | ReservationDeleted
    | ReservationStarted
    | ReservationEnded
    | SchedulingRulesSet
    | MailDropped
    | MailSent
    | PartitionSet
    | PartitionDeleted
    | UsageReset
    | JobUpdated
    | TransferRulesSet
    | TransferRecorded
    | TransferCheckpointed
)


def job_of(event: Event) -> int | None:
    """Return the job an event is about, or None; of an array the first one."""
    return getattr(event, "job", None)


def jobs_of(event: Event) -> Sequence[int]:
    """Return the jobs an event is about."""
    if type(event) is JobSubmitted and event.array is not None:
        return range(event.job, event.job + len(event.array.tasks))
    job = job_of(event)
    return () if job is None else (job,)
