"""Leader's scheduling index (`replica.scheduler`), kept in step with the speculative state to make cycles cheap.

It follows each batch as it is decided, so it always describes the newest speculative state. When batches in flight are
dropped, so is the index: it is rebuilt in portions, one a turn, because 100,000 jobs take most of a second.
"""

from __future__ import annotations

from forebay.replica.fold import SpeculativeState
from forebay.replica.messages import Event
from forebay.replica.scheduler import SchedulingIndex, run_cycle
from forebay.replica.state import State
from forebay.replica.values import Instant

JOBS_PER_TURN = 128
"""Jobs indexed in one turn of the loop in addition to one for each command of the batch, count: about four
milliseconds, after which heartbeats and commands proceed. A leader under load keeps up with the jobs its batches touch.
"""


class Planner:
    """Scheduling index, and its progress through the batch under construction."""

    def __init__(self) -> None:
        self._index: SchedulingIndex | None = None
        self._noted = 0
        """Entries of the batch under construction known to the index."""

    def prepare(self, batch: SpeculativeState) -> bool:
        """Follow the batch; return whether a cycle over it is cheap now. If not, call again in another turn."""
        return self._follow(batch).prepare(JOBS_PER_TURN + len(batch.entries))

    def run_cycle(self, batch: SpeculativeState) -> tuple[Event, ...]:
        """Return the events of a scheduling cycle over the batch under construction."""
        return run_cycle(self._follow(batch), batch.at)

    def closed(self, batch: SpeculativeState) -> None:
        """Follow the batch to its end: the next one starts on the state after it."""
        if self._index is not None:
            self._follow(batch)
        self._noted = 0

    def next_due(self, state: State, after: Instant) -> Instant | None:
        """Return the earliest time after `after` at which a cycle over `state` could do something by time alone.

        If that takes long to compute, it is `after` itself: the resulting cycle then prepares the index.
        """
        if self._index is None or self._index.state is not state:
            self._index, self._noted = SchedulingIndex(state), 0
        return self._index.next_due(after) if self._index.prepare(JOBS_PER_TURN) else after

    def forget(self) -> None:
        """Drop an index built on batches of unknown outcome, or in an earlier term."""
        self._index, self._noted = None, 0

    def _follow(self, batch: SpeculativeState) -> SchedulingIndex:
        state, index = batch.state(), self._index
        if index is None or (not self._noted and index.state is not batch.base):
            index = self._index = SchedulingIndex(state)
        else:
            index.advance(state, (event for entry in batch.entries[self._noted :] for event in entry.events))
        self._noted = len(batch.entries)
        return index
