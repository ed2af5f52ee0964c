"""Facts about partitions, what was used of burst buffers, and jobs that changed while they waited: feature level 4."""

from __future__ import annotations

import msgspec

from replica.model.buffers import BufferRequest
from replica.model.job_options import BufferOptions, JobChange, JobTerms
from replica.model.partitions import Partition


class PartitionSet(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=110):
    """A partition was made or changed; `partition` is all of it as it is now."""

    partition: Partition


class PartitionDeleted(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=111):
    """A partition is no more; its jobs wait with that reason."""

    partition: str


class JobTermsGiven(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=112):
    """How a job's conditions are to be read, said in the same entry that makes the job, or `tasks` jobs from it on."""

    job: int
    terms: JobTerms
    tasks: int = 1


class JobUpdated(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=113):
    """Somebody changed a job that waits."""

    job: int
    change: JobChange


class BufferRequestChanged(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=114):
    """A job that has no space yet asks for this from here on; it may not have asked for a buffer before."""

    job: int
    request: BufferRequest
    pool: str
    granted_bytes: int
    options: BufferOptions | None = None


class UsageReset(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=115):
    """What an account (`whose` a), or a QOS (q), has used of burst buffers counts as nothing from here on."""

    whose: str
    name: str
