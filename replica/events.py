"""What has happened: the facts in the ledger. This is their public face; they are written down by subject.

Tags are wire numbers: explicit, append-only, never reused (law 12). A new field goes at the end of its record with a
default. An unknown tag stops the replica (law 10). Fields named `job` are job ids; times are Instants.
"""

from __future__ import annotations

from collections.abc import Sequence

from replica.events_changes import (
    BufferRequestChanged,
    JobTermsGiven,
    JobUpdated,
    PartitionDeleted,
    PartitionSet,
    UsageReset,
)
from replica.events_cluster import (
    ClusterFounded,
    FeatureLevelRaised,
    NodeCameBack,
    NodeDrained,
    NodeRegistered,
    NodeResumed,
    NodeWentDown,
    PolicySet,
    PoolRemoved,
    PoolSet,
    PoolUnitSet,
    SiteConfigured,
)
from replica.events_jobs import (
    ArraySubmitted,
    CancelRequested,
    DeadlineMissed,
    HeldBecause,
    JobBecameEligible,
    JobCancelled,
    JobHeld,
    JobOptionsGiven,
    JobPurged,
    JobReleased,
    JobResumed,
    JobSubmitted,
    JobSuspended,
    MailDropped,
    MailSent,
    RequeueRequested,
    RunRequeued,
)
from replica.events_operations import (
    AllocationRevoked,
    BufferAllocated,
    BufferCleared,
    JobRequeued,
    OperationOrdered,
    OperationQueued,
    OperationsRestarted,
    PersistentCreated,
    PersistentDeleted,
    PersistentDeletionStarted,
    PersistentReserved,
    PreRunFailed,
    RevokedFor,
    RunEnded,
    RunOrdered,
    RunStarted,
    StagedIn,
    StagedOut,
    StageFailed,
    StageOperationFailed,
    StageOutStarted,
    StageRetried,
    TeardownStarted,
    TornDown,
)
from replica.events_scheduling import (
    AccountDeleted,
    AccountSet,
    LicenseDeleted,
    LicenseSet,
    QosDeleted,
    QosSet,
    ReservationDeleted,
    ReservationEnded,
    ReservationSet,
    ReservationStarted,
    SchedulingRulesSet,
)
from replica.events_transfers import TransferCheckpointed, TransferRecorded, TransferRulesSet
from replica.model.operations import Stage

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
    | JobOptionsGiven
    | PersistentReserved
    | PersistentCreated
    | PersistentDeletionStarted
    | PersistentDeleted
    | HeldBecause
    | StageOperationFailed
    | PreRunFailed
    | JobSuspended
    | JobResumed
    | RequeueRequested
    | RunRequeued
    | OperationsRestarted
    | BufferCleared
    | ArraySubmitted
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
    | RevokedFor
    | MailDropped
    | MailSent
    | PartitionSet
    | PartitionDeleted
    | UsageReset
    | JobTermsGiven
    | JobUpdated
    | BufferRequestChanged
    | TransferRulesSet
    | TransferRecorded
    | TransferCheckpointed
)


def job_of(event: Event) -> int | None:
    """Return the job an event is about, or None; of an array the first one."""
    return getattr(event, "job", None)


def jobs_of(event: Event) -> Sequence[int]:
    """Return the jobs an event is about."""
    if type(event) is ArraySubmitted:
        return range(event.job, event.job + len(event.tasks))
    if type(event) is JobTermsGiven:
        return range(event.job, event.job + event.tasks)
    job = job_of(event)
    return () if job is None else (job,)


__all__ = [
    "AccountDeleted",
    "AccountSet",
    "AllocationRevoked",
    "ArraySubmitted",
    "BufferAllocated",
    "BufferCleared",
    "BufferRequestChanged",
    "CancelRequested",
    "ClusterFounded",
    "DeadlineMissed",
    "Event",
    "FeatureLevelRaised",
    "HeldBecause",
    "JobBecameEligible",
    "JobCancelled",
    "JobHeld",
    "JobOptionsGiven",
    "JobPurged",
    "JobReleased",
    "JobRequeued",
    "JobResumed",
    "JobSubmitted",
    "JobSuspended",
    "JobTermsGiven",
    "JobUpdated",
    "LicenseDeleted",
    "LicenseSet",
    "MailDropped",
    "MailSent",
    "NodeCameBack",
    "NodeDrained",
    "NodeRegistered",
    "NodeResumed",
    "NodeWentDown",
    "OperationOrdered",
    "OperationQueued",
    "OperationsRestarted",
    "PartitionDeleted",
    "PartitionSet",
    "PersistentCreated",
    "PersistentDeleted",
    "PersistentDeletionStarted",
    "PersistentReserved",
    "PolicySet",
    "PoolRemoved",
    "PoolSet",
    "PoolUnitSet",
    "PreRunFailed",
    "QosDeleted",
    "QosSet",
    "RequeueRequested",
    "ReservationDeleted",
    "ReservationEnded",
    "ReservationSet",
    "ReservationStarted",
    "RevokedFor",
    "RunEnded",
    "RunOrdered",
    "RunRequeued",
    "RunStarted",
    "SchedulingRulesSet",
    "SiteConfigured",
    "Stage",
    "StageFailed",
    "StageOperationFailed",
    "StageOutStarted",
    "StageRetried",
    "StagedIn",
    "StagedOut",
    "TeardownStarted",
    "TornDown",
    "TransferCheckpointed",
    "TransferRecorded",
    "TransferRulesSet",
    "UsageReset",
    "job_of",
    "jobs_of",
]
