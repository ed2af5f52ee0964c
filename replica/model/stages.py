"""Stages: the operations that agents perform for buffers, and the slots they occupy."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from msgspec.structs import replace

from forebay.replica.model.buffers import Buffer, BufferState
from forebay.replica.model.job_states import JobState
from forebay.replica.model.jobs import ExternalJobStep, Job
from forebay.replica.values import NEVER, Instant


class Stage(IntEnum):
    """An operation of an agent on a buffer. The numbers are wire numbers."""

    STAGE_IN = 1
    RUN = 2
    POST_RUN = 3
    STAGE_OUT = 4
    TEARDOWN = 5

    @property
    def word(self) -> str:
        """Return the stage as in orders and reports, for example `stage_in`."""
        return self.name.lower()


_TURN_OF = {
    BufferState.STAGING_IN: Stage.STAGE_IN,
    BufferState.PRE_RUN: Stage.RUN,
    BufferState.STAGING_OUT: Stage.STAGE_OUT,
    BufferState.TEARDOWN: Stage.TEARDOWN,
    BufferState.TEARDOWN_FAIL: Stage.TEARDOWN,
}

QUEUED_STAGES = (Stage.TEARDOWN, Stage.STAGE_OUT, Stage.STAGE_IN)
"""Stages whose operations may be queued, in the order in which a scheduling cycle assigns slots: those that release
space go first.
"""


_NOTHING_ORDERED = (ExternalJobStep.SET_UP, ExternalJobStep.LINGERING)
"""Steps of an external job in which only its removal is ordered."""


def is_ordered(job: Job, buffer: Buffer) -> bool:
    """Return whether an agent performs the operation of the buffer's state.

    The scheduler of an external job runs it, and orders its stage-in independently of its space.
    """
    external_job = job.external_job
    if external_job is None:
        return True  # most jobs: callers check this first
    if buffer.state in (BufferState.STAGING_IN, BufferState.STAGED_IN):
        return external_job.step not in _NOTHING_ORDERED
    return buffer.state in (BufferState.STAGING_OUT, BufferState.TEARDOWN, BufferState.TEARDOWN_FAIL)


def occupied_slot(job: Job, buffer: Buffer | None) -> Stage | None:
    """Return the stage whose slot the job occupies, or None. Pre-run counts as RUN."""
    if buffer is None or job.stuck or job.order_at == NEVER:
        return None
    return _TURN_OF.get(buffer.state) if job.external_job is None or is_ordered(job, buffer) else None


def awaited_slot(job: Job, buffer: Buffer | None) -> Stage | None:
    """Return the stage for whose slot the job waits, or None."""
    if buffer is None or job.stuck or job.order_at != NEVER or job.retry_at != NEVER:
        return None
    stage = _TURN_OF.get(buffer.state) if job.external_job is None or is_ordered(job, buffer) else None
    return stage if stage in QUEUED_STAGES else None


def queue_position(job: Job, buffer: Buffer) -> tuple[Instant, int]:
    """Return the key that sorts jobs waiting for a slot of one stage by arrival."""
    return buffer.changed_at, job.id


_MEASURED = ("eligible_at", "held_at", "started_at", "order_at", "retry_at", "promised_at")
"""Job fields that timers and measurements start from. Times set by users or in the past are not among them."""


def clamp_times(job: Job, buffer: Buffer | None, at: Instant) -> tuple[Job, Buffer | None]:
    """Return an unfinished job and its buffer with all timers and measurements starting at `at` or earlier.

    Unchanged objects are returned as they are.
    """
    changes: dict[str, Any] = {name: at for name in _MEASURED if getattr(job, name) > at}
    if job.interruptions is not None and job.interruptions.suspended_at > at:
        changes["interruptions"] = replace(job.interruptions, suspended_at=at)
    if job.external_job is not None and job.external_job.since > at:
        changes["external_job"] = replace(job.external_job, since=at)
    if changes:
        job = replace(job, **changes)
    if buffer is not None and max(buffer.created_at, buffer.changed_at) > at:
        buffer = replace(buffer, created_at=min(buffer.created_at, at), changed_at=min(buffer.changed_at, at))
    return job, buffer


_STAGE_OF = {
    BufferState.STAGING_IN: Stage.STAGE_IN,
    BufferState.PRE_RUN: Stage.RUN,
    BufferState.RUNNING: Stage.RUN,
    BufferState.SUSPENDED: Stage.RUN,
    BufferState.POST_RUN: Stage.POST_RUN,
    BufferState.STAGING_OUT: Stage.STAGE_OUT,
    BufferState.TEARDOWN: Stage.TEARDOWN,
}


_ON_A_NODE = (JobState.CONFIGURING, JobState.RUNNING, JobState.SUSPENDED)


def stage_of(job: Job, buffer: Buffer | None) -> Stage | None:
    """Return the operation that the job's agent performs now, or None."""
    if buffer is None:
        return Stage.RUN if job.state in _ON_A_NODE else None
    return _STAGE_OF.get(buffer.state) if job.external_job is None or is_ordered(job, buffer) else None


_ON_THE_NODE = (
    BufferState.STAGED_IN,
    BufferState.PRE_RUN,
    BufferState.RUNNING,
    BufferState.SUSPENDED,
    BufferState.POST_RUN,
)


def agent_of(job: Job, buffer: Buffer | None) -> str:
    """Return the node whose agent performs and reports the job's present operation; empty if there is none."""
    if not job.mover or buffer is None or buffer.state in _ON_THE_NODE:
        return job.node
    return job.mover


TRANSFERS = (Stage.STAGE_IN, Stage.STAGE_OUT)
"""Stages that move data."""

MovingKey = tuple[str, str]
"""(user, node) under which transfers are counted; an empty part stands for all."""


def moving_keys(user: str, node: str) -> tuple[MovingKey, ...]:
    """Return the keys under which a transfer is counted."""
    return (user, node), (user, ""), ("", node), ("", "")
