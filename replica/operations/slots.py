"""Operation slots: limit concurrent operations of a stage (`operations_per_stage_max`) and queue the others.

Stage-in, stage-out and teardown each have this many slots. So has pre-run, the time from the run order to the start of
the script, which only a scheduling cycle begins. An operation that finds all slots of its stage taken is queued: its
job has no `order_at`, its agent has no order, and its timeout does not run. A scheduling cycle assigns slots in order
of arrival.

Transfers also count against the limits of `TransferRules`: per user, per node and in total. Their slots are assigned
fairly: to the user with the fewest running transfers, and never to a user who has more of them than slots are left.

A slot is kept while a failed operation waits for its retry, and released when the job waits for a user's or operator's
release: otherwise unattended jobs would eventually block all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from heapq import heapify, heappop, heapreplace

from forebay.replica.messages import events as e
from forebay.replica.model import QUEUED_STAGES, TRANSFERS, MovingKey, Stage, moving_keys
from forebay.replica.operations.transfer_limits import load_of, may_begin
from forebay.replica.state import Facts
from forebay.replica.values import SKIPPED_MAX, Instant, Steps, run_to_end


class OperationSlots(dict[int, int]):
    """Stage -> number of occupied slots. `begun` counts the transfers that began in this cycle or decision."""

    def __init__(self, taken: Mapping[int, int] | None = None) -> None:
        super().__init__(taken or {})
        self.begun: dict[MovingKey, int] = {}

    def free(self, state: Facts, stage: Stage) -> int:
        """Return the number of free slots of a stage."""
        return state.site.operations_per_stage_max - self.get(stage, 0)

    def take(self, stage: Stage, user: str, node: str) -> None:
        """Count one more occupied slot."""
        self[stage] = self.get(stage, 0) + 1
        if stage in TRANSFERS:
            for key in moving_keys(user, node):
                self.begun[key] = self.begun.get(key, 0) + 1


def assign_slots(state: Facts, slots: OperationSlots, events: Iterable[e.Event]) -> tuple[e.Event, ...]:
    """Return `events` with an OperationQueued after each operation that has to wait for its slot.

    `slots` has the occupied slots of each stage, and is updated. A stage-in begins with its space, which is allocated
    only while its stage has a free slot; it is queued if a limit on concurrent transfers is reached.
    """
    return run_to_end(assign_slots_in_steps(state, slots, events))


def assign_slots_in_steps(state: Facts, slots: OperationSlots, events: Iterable[e.Event]) -> Steps[tuple[e.Event, ...]]:
    """Run `assign_slots` with a step for each operation."""
    found: list[e.Event] = []
    for event in events:
        found.append(event)
        stage = _started_stage(state, event)
        if stage is None:
            continue
        job = state.jobs[event.job]  # type: ignore[attr-defined]
        allocated, node = isinstance(event, e.BufferAllocated), job.staged_by
        if isinstance(event, e.BufferAllocated):
            node = event.mover or event.node
        elif isinstance(event, e.ExternalJobStageInOrdered):
            node = event.mover
        elif isinstance(event, e.StageOutStarted):
            node = event.mover or job.node
        free = slots.free(state, stage)
        full = not allocated and free <= 0
        full = full or (stage in TRANSFERS and not may_begin(state, slots.begun, free, job.request.user, node))
        if full:
            found.append(e.OperationQueued(job.id, stage))
        else:
            slots.take(stage, job.request.user, node)
        yield 1
    return tuple(found)


def grant_slots(
    state: Facts,
    slots: OperationSlots,
    stage: Stage,
    waiting: Mapping[str, Iterable[tuple[Instant, int]]],
    may: Callable[[int], bool],
    room: int,
) -> Iterator[e.OperationOrdered]:
    """Yield the orders of jobs that receive slots of a stage, at most `room`; `waiting` maps users to their queues.

    Transfers go to the user with the fewest running ones, then by arrival; other operations go by arrival. `may` tests
    whether a job can receive a slot in this scheduling cycle.
    """
    moves = stage in TRANSFERS
    queues: list[tuple[int, tuple[Instant, int], str, Iterator[tuple[Instant, int]]]] = []
    for user, places in waiting.items():
        queue = iter(places)
        first = next(queue, None)
        if first is not None:
            queues.append((load_of(state, slots.begun, user) if moves else 0, first, user, queue))
    # Queue positions are unique, so later fields are never compared.
    heapify(queues)
    skipped: dict[str, int] = {}
    while queues and room > 0 and (free := slots.free(state, stage)) > 0:
        _, (_, job_id), user, queue = queues[0]
        node = state.jobs[job_id].staged_by
        if moves and not may_begin(state, slots.begun, free, user, node):
            # Another transfer of the user may be on a node with a free slot, unless a user or cluster limit is reached.
            skipped[user] = skipped.get(user, 0) + 1
            following = next(queue, None) if skipped[user] < SKIPPED_MAX else None
        else:
            if may(job_id):
                yield e.OperationOrdered(job_id, stage)
                slots.take(stage, user, node)
                room -= 1
            following = next(queue, None)
        if following is None:
            heappop(queues)
        else:
            heapreplace(queues, (load_of(state, slots.begun, user) if moves else 0, following, user, queue))


SLOT_EVENTS = frozenset(
    {e.BufferAllocated, e.ExternalJobStageInOrdered, e.StageOutStarted, e.TeardownStarted, e.StageRetried}
)
"""Events that may begin an operation which needs a slot."""


def _started_stage(state: Facts, event: e.Event) -> Stage | None:
    """Return the stage whose operation the event begins; None if it begins none, or if the operation keeps its slot."""
    if isinstance(event, e.BufferAllocated | e.ExternalJobStageInOrdered):
        return Stage.STAGE_IN
    if isinstance(event, e.StageOutStarted):
        return Stage.STAGE_OUT
    if isinstance(event, e.TeardownStarted):
        return Stage.TEARDOWN
    if isinstance(event, e.StageRetried) and event.stage in QUEUED_STAGES:
        job = state.jobs.get(event.job)
        return event.stage if job is not None and job.stuck else None
    return None
