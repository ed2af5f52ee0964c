"""Turns: at most so many operations of a stage at once (`operations_per_stage_max`), the others in the order they came.

Stage-in, stage-out and teardown each have as many turns; so has pre-run (the time from the order to run to the start of
the script), which only a scheduling pass begins. An operation that begins while all turns of its stage are taken is
queued: its job has no `order_at`, its agent has no order, and its time does not run. A pass gives turns in order.

From feature level 4 on transfers also count against `TransferRules`: so many at once of a user, on a node, in all.
Their turns are given fairly: to the user who has the fewest under way.

A turn is kept while a failed operation waits for its retry, and lost when somebody has to release the job: else those
that nobody looks at would in the end keep all others back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from heapq import heapify, heappop, heapreplace

from replica.messages import BURST_BUFFERS_WHOLE
from replica.messages import events as e
from replica.model import QUEUED_STAGES, TRANSFERS, MovingKey, Stage, counted_under
from replica.operations.transfer_limits import load_of, may_begin
from replica.state import Facts
from replica.values import TURNED_AWAY_MAX, Instant


class Turns(dict[int, int]):
    """Stage -> how many turns of it are taken. `begun` counts the transfers that began in this pass or decision."""

    def __init__(self, taken: Mapping[int, int] | None = None) -> None:
        super().__init__(taken or {})
        self.begun: dict[MovingKey, int] = {}

    def take(self, stage: Stage, user: str, node: str) -> None:
        """Count one more that has its turn."""
        self[stage] = self.get(stage, 0) + 1
        if stage in TRANSFERS:
            for key in counted_under(user, node):
                self.begun[key] = self.begun.get(key, 0) + 1


def with_turns(state: Facts, turns: Turns, events: Iterable[e.Event]) -> tuple[e.Event, ...]:
    """Return `events` with an OperationQueued for each operation in them that has to wait for its turn.

    `turns` says how many turns of each stage are taken, and counts those that are taken here. Below the feature level
    that brought turns every operation begins at once. A stage-in begins with its space, which is given only while its
    stage has a turn left; it is queued where a limit on transfers at once is reached.
    """
    found: list[e.Event] = []
    for event in events:
        found.append(event)
        stage = _begins(state, event)
        if stage is None:
            continue
        job = state.jobs[event.job]  # type: ignore[union-attr]
        allocated = isinstance(event, e.BufferAllocated)
        node = event.node if isinstance(event, e.BufferAllocated) else job.node
        full = not allocated and turns.get(stage, 0) >= state.policy.operations_per_stage_max
        full = full or (stage in TRANSFERS and not may_begin(state, turns.begun, job.request.user, node))
        if full and state.feature_level >= BURST_BUFFERS_WHOLE:
            found.append(e.OperationQueued(job.id, stage))
        else:
            turns.take(stage, job.request.user, node)
    return tuple(found)


def turns_given(
    state: Facts,
    turns: Turns,
    stage: Stage,
    waiting: Mapping[str, Iterable[tuple[Instant, int]]],
    may: Callable[[int], bool],
    room: int,
) -> Iterator[e.OperationOrdered]:
    """Yield whose turn of a stage it is, at most `room` of them; `waiting`: user -> those who wait, in order.

    A transfer goes to the user who has the fewest under way, and of those to whoever came first; any other operation
    to whoever came first. `may` says whether a job can have its turn in this pass at all.
    """
    moves = stage in TRANSFERS
    lines: list[tuple[int, tuple[Instant, int], str, Iterator[tuple[Instant, int]]]] = []
    for user, places in waiting.items():
        line = iter(places)
        first = next(line, None)
        if first is not None:
            lines.append((load_of(state, turns.begun, user) if moves else 0, first, user, line))
    # No two places are equal, so nothing after them is ever compared.
    heapify(lines)
    turned_away: dict[str, int] = {}
    while lines and room > 0 and turns.get(stage, 0) < state.policy.operations_per_stage_max:
        _, (_, job_id), user, line = lines[0]
        node = state.jobs[job_id].node
        if moves and not may_begin(state, turns.begun, user, node):
            # Another one of this user may be on a node that has room; with a limit on users or on all there is none.
            turned_away[user] = turned_away.get(user, 0) + 1
            following = next(line, None) if turned_away[user] < TURNED_AWAY_MAX else None
        else:
            if may(job_id):
                yield e.OperationOrdered(job_id, stage)
                turns.take(stage, user, node)
                room -= 1
            following = next(line, None)
        if following is None:
            heappop(lines)
        else:
            heapreplace(lines, (load_of(state, turns.begun, user) if moves else 0, following, user, line))


BEGINNINGS = frozenset({e.BufferAllocated, e.StageOutStarted, e.TeardownStarted, e.StageRetried})
"""Kinds of events that may begin an operation which needs a turn."""


def _begins(state: Facts, event: e.Event) -> Stage | None:
    """Return the stage that the event begins an operation of, None for an event that does not, or keeps its turn."""
    if isinstance(event, e.BufferAllocated):
        return Stage.STAGE_IN
    if isinstance(event, e.StageOutStarted):
        return Stage.STAGE_OUT
    if isinstance(event, e.TeardownStarted):
        return Stage.TEARDOWN
    if isinstance(event, e.StageRetried) and event.stage in QUEUED_STAGES:
        job = state.jobs.get(event.job)
        return event.stage if job is not None and job.stuck else None
    return None
