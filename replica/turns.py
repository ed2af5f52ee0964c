"""Turns: at most so many operations of a stage at once (`operations_per_stage_max`), the others in the order they came.

Stage-in, stage-out and teardown each have as many turns; so has pre-run (the time from the order to run to the start of
the script), which only a scheduling pass begins. An operation that begins while all turns of its stage are taken is
queued: its job has no `order_at`, its agent has no order, and its time does not run. A pass gives turns in order.

A turn is kept while a failed operation waits for its retry, and lost when somebody has to release the job: else those
that nobody looks at would in the end keep all others back.
"""

from __future__ import annotations

from collections.abc import Iterable

from replica import events as e
from replica.buffers import Buffer, BufferState
from replica.features import BURST_BUFFERS_WHOLE
from replica.jobs import Job
from replica.state import Facts
from replica.units import NEVER, Instant

_STAGE_OF = {
    BufferState.STAGING_IN: e.Stage.STAGE_IN,
    BufferState.PRE_RUN: e.Stage.RUN,
    BufferState.STAGING_OUT: e.Stage.STAGE_OUT,
    BufferState.TEARDOWN: e.Stage.TEARDOWN,
    BufferState.TEARDOWN_FAIL: e.Stage.TEARDOWN,
}

QUEUED_STAGES = (e.Stage.TEARDOWN, e.Stage.STAGE_OUT, e.Stage.STAGE_IN)
"""Stages whose operations may be queued, in the order in which a pass gives turns: what gives space back goes first."""


def takes_turn(job: Job, buffer: Buffer | None) -> e.Stage | None:
    """Return the stage that the job takes a turn of, or None. Pre-run counts as RUN."""
    if buffer is None or job.stuck or job.order_at == NEVER:
        return None
    return _STAGE_OF.get(buffer.state)


def waits_for_turn(job: Job, buffer: Buffer | None) -> e.Stage | None:
    """Return the stage that the job waits for a turn of, or None."""
    if buffer is None or job.stuck or job.order_at != NEVER or job.retry_at != NEVER:
        return None
    stage = _STAGE_OF.get(buffer.state)
    return stage if stage in QUEUED_STAGES else None


def queue_place(job: Job, buffer: Buffer) -> tuple[Instant, int]:
    """Return where the job stands among those that wait for a turn of the same stage: who came first."""
    return buffer.changed_at, job.id


def with_turns(state: Facts, turns: dict[int, int], events: Iterable[e.Event]) -> tuple[e.Event, ...]:
    """Return `events` with an OperationQueued for each operation in them that has to wait for its turn.

    `turns` says how many turns of each stage are taken, and counts those that are taken here. Below the feature level
    that brought turns every operation begins at once.
    """
    found: list[e.Event] = []
    for event in events:
        found.append(event)
        stage = _begins(state, event)
        if stage is None:
            continue
        full = turns.get(stage, 0) >= state.policy.operations_per_stage_max
        if full and state.feature_level >= BURST_BUFFERS_WHOLE:
            found.append(e.OperationQueued(event.job, stage))  # type: ignore[union-attr]
        else:
            turns[stage] = turns.get(stage, 0) + 1
    return tuple(found)


BEGINNINGS = frozenset({e.StageOutStarted, e.TeardownStarted, e.StageRetried})
"""Kinds of events that may begin an operation which needs a turn."""


def _begins(state: Facts, event: e.Event) -> e.Stage | None:
    """Return the stage that the event begins an operation of, None for an event that does not, or keeps its turn."""
    if isinstance(event, e.StageOutStarted):
        return e.Stage.STAGE_OUT
    if isinstance(event, e.TeardownStarted):
        return e.Stage.TEARDOWN
    if isinstance(event, e.StageRetried) and event.stage in QUEUED_STAGES:
        job = state.jobs.get(event.job)
        return event.stage if job is not None and job.stuck else None
    return None
