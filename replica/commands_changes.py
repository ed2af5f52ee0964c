"""What can be asked about partitions, about consumption, and of a job that waits: part of `replica.commands`."""

from __future__ import annotations

import msgspec

from replica.model.buffers import BufferRequest
from replica.model.job_options import NO_CHANGE, AfterTask, BufferOptions, JobChange
from replica.model.partitions import Partition


class SetPartition(msgspec.Struct, frozen=True):
    """Make or change a partition (operator). One that is the default takes that from any other."""

    partition: Partition


class DeletePartition(msgspec.Struct, frozen=True):
    """Take a partition away; its jobs wait with `PartitionConfig` (operator)."""

    partition: str


class ResetUsage(msgspec.Struct, frozen=True):
    """Have what an account (`whose` a), or a QOS (q), has used of burst buffers count as nothing (operator)."""

    whose: str
    name: str


class UpdateJob(msgspec.Struct, frozen=True):
    """Change a job that waits, or all that wait of an array or of some of its tasks.

    `request` and `buffer`: what is asked of burst buffers instead of what was; None: that stays as it is. `after_tasks`
    belong to the dependencies in `change`.
    """

    job: int
    change: JobChange = NO_CHANGE
    request: BufferRequest | None = None
    buffer: BufferOptions | None = None
    after_tasks: tuple[AfterTask, ...] = ()
    tasks: tuple[int, ...] | None = None
