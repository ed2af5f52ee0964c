"""What has happened: the facts in the ledger.

Tags are wire numbers: explicit, append-only, never reused (law 12). A new field goes at the end of its record with a
default. An unknown tag stops the replica (law 10). Fields named `job` are job ids; times are Instants.
"""

from __future__ import annotations

from enum import IntEnum

import msgspec

from replica.buffers import BufferRequest
from replica.jobs import Hold, JobSpec, JobState
from replica.policy import Policy
from replica.pools import Pool
from replica.units import NEVER, Instant


class Stage(IntEnum):
    """An operation that an agent performs for a buffer; the numbers are wire numbers."""

    STAGE_IN = 1
    RUN = 2
    POST_RUN = 3
    STAGE_OUT = 4
    TEARDOWN = 5

    @property
    def word(self) -> str:
        """As in orders and reports, for example `stage_in`."""
        return self.name.lower()


class ClusterFounded(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=1):
    """The first event of every ledger."""

    cluster_id: str
    name: str
    policy: Policy
    pools: tuple[Pool, ...]
    feature_level: int = 1


class PoolSet(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=2):
    """A pool was made or changed; `pool` is all of it as it is now."""

    pool: Pool


class PolicySet(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=3):
    """The site policy was changed."""

    policy: Policy


class NodeRegistered(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=4):
    """An agent started, or came back with another instance."""

    node: str
    cpus: int
    instance: str
    storage_id: str


class NodeDrained(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=5):
    """An operator keeps new work from the node."""

    node: str
    reason: str


class NodeResumed(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=6):
    """The node may have new work again."""

    node: str


class NodeWentDown(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=7):
    """The leader has not heard of the node's agent for its liveness time."""

    node: str
    reason: str


class NodeCameBack(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=8):
    """The agent of a node that was down was heard of again. The operations of `jobs` have their time from now on:
    their clocks
    stood still meanwhile."""

    node: str
    jobs: tuple[int, ...] = ()


class JobSubmitted(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=9):
    """A job exists, PENDING. `request` is None where it asked for no buffer."""

    job: int
    spec: JobSpec
    request: BufferRequest | None
    pool: str
    granted_bytes: int
    hold: Hold = Hold.NONE


class JobHeld(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=10):
    """A pending job is held back."""

    job: int
    hold: Hold


class JobReleased(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=11):
    """The hold is over; an operation that had failed for good is ordered again by StageRetried."""

    job: int


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


class StagedIn(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=13):
    """All of the job's data is on the buffer."""

    job: int
    files: int
    size_bytes: int
    digest: str = ""
    """Digest over the per-file digests, as the agent reported it."""


class StageFailed(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=14):
    """An operation failed. `retry_at` NEVER: no retry is planned, somebody must release or cancel the job."""

    job: int
    stage: Stage
    attempt: int
    message: str
    retry_at: Instant


class StageRetried(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=15):
    """The operation is ordered again as `attempt`; reports of earlier attempts no longer count."""

    job: int
    stage: Stage
    attempt: int
    reason: str


class RunOrdered(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=16):
    """CPUs of the node are taken, and its agent has the script to run as `attempt`."""

    job: int
    node: str
    attempt: int


class RunStarted(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=17):
    """The agent has started the script."""

    job: int


class RunEnded(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=18):
    """The script has ended; `result` is what the job will be. With a buffer, post-run is ordered as `attempt`."""

    job: int
    result: JobState
    exit_code: int
    signal: int
    attempt: int
    message: str = ""


class StageOutStarted(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=19):
    """Post-run is over and the node's CPUs are free; stage-out is ordered as `attempt`."""

    job: int
    attempt: int


class StagedOut(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=20):
    """All results are where the job wanted them."""

    job: int
    files: int
    size_bytes: int
    digest: str = ""


class TeardownStarted(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=21):
    """The buffer is to be removed as `attempt`; the job has its final `result`."""

    job: int
    attempt: int
    result: JobState
    hurry: bool
    reason: str = ""


class TornDown(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=22):
    """The buffer is gone and its space is free."""

    job: int


class CancelRequested(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=23):
    """The script of a started job is to be ended, or with `hurry` stage-out be skipped."""

    job: int
    hurry: bool


class JobCancelled(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=24):
    """A job that held nothing is over: CANCELLED."""

    job: int


class JobPurged(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=25):
    """A finished job left the state; its history stays in the ledger."""

    job: int


class AllocationRevoked(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=26):
    """A buffer is taken back before its job ran; the job stays PENDING and will stage again after the teardown."""

    job: int
    attempt: int
    reason: str


class JobRequeued(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=27):
    """The job's old buffer is gone; it waits for a new one."""

    job: int


class JobBecameEligible(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=28):
    """The begin time of a pending job has come."""

    job: int


class DeadlineMissed(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=29):
    """A pending job could no longer end before its deadline, and will not be started."""

    job: int


class FeatureLevelRaised(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=30):
    """All members know `level`, and what came with it may be written from here on. `release` is the first that knows
    it: so a replica of an earlier one, which stops here, can say what it needs. These two fields never change.
    """

    level: int
    release: str


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
)


def job_of(event: Event) -> int | None:
    """Return the job an event is about, or None."""
    return getattr(event, "job", None)
