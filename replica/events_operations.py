"""Facts about what is done for a job on nodes: its buffer's operations, its runs, and persistent buffers."""

from __future__ import annotations

import msgspec

from replica.model.buffers import Access
from replica.model.jobs import JobState
from replica.model.operations import Stage as Stage
from replica.values.units import NEVER, Instant


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


class StageOperationFailed(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=37):
    """The `operation` of a stage failed, for example `setup` of stage-in. `retry_at` as in StageFailed."""

    job: int
    stage: Stage
    operation: str
    attempt: int
    reason: str
    comment: str
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


class PreRunFailed(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=38):
    """The operation before the script failed: the job gives back its node and waits again, its buffer torn down."""

    job: int
    reason: str
    comment: str


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


class AllocationRevoked(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=26):
    """A buffer is taken back before its job ran; the job stays PENDING and will stage again after the teardown."""

    job: int
    attempt: int
    reason: str


class RevokedFor(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=71):
    """The buffer of `job` is taken back so that `beneficiary` may start sooner: it counts against how often that may
    happen to a job. AllocationRevoked and TeardownStarted follow in the same entry.
    """

    job: int
    beneficiary: int


class JobRequeued(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=27):
    """The job's old buffer is gone; it waits for a new one."""

    job: int


class OperationQueued(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=51):
    """The operation that has just begun waits for its turn: as many of its stage as may be are under way."""

    job: int
    stage: Stage


class OperationOrdered(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=52):
    """It is the turn of an operation that was queued; its time begins."""

    job: int
    stage: Stage


class OperationsRestarted(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=43):
    """The operation of the job begins again as `attempt`, staging-out from post-run on, because the leader changed
    (restart-policy slurm).
    """

    job: int
    attempt: int


class BufferCleared(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=44):
    """An operator took a buffer that could not be removed out of the list: its space is free."""

    job: int
    reason: str


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


class PersistentCreated(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=33):
    """The persistent buffer is there (allocated): jobs may use it."""

    name: str
    job: int


class PersistentDeletionStarted(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=34):
    """The persistent buffer is being removed (deleting) by the operation of `job`."""

    name: str
    job: int
    hurry: bool = False


class PersistentDeleted(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=35):
    """The persistent buffer is gone (deleted), and its space is free. `reason` where an operator said so."""

    name: str
    job: int
    reason: str = ""
