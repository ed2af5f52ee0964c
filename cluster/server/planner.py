"""Leader's scheduling index (`replica.scheduler`), kept up to date with the speculative state to make cycles cheap.

The index follows each batch while it is decided, so it always describes the newest speculative state. When batches in
flight are dropped, the index is dropped too. It is rebuilt in portions, one a turn, because 100,000 jobs take most of a
second.
"""

from __future__ import annotations

from forebay.replica.fold import SpeculativeState
from forebay.replica.messages import Event
from forebay.replica.scheduler import SchedulingIndex, run_cycle
from forebay.replica.state import State
from forebay.replica.values import Instant

JOBS_PER_TURN = 128
"""Number of jobs indexed in one turn of the loop, beside one job for each command of the batch: about four
milliseconds, after which heartbeats and commands proceed. A leader under load keeps up with the jobs that its batches
touch.
"""


class Planner:
    """Scheduling index, and the part of the batch under construction that it includes."""

    def __init__(self) -> None:
        self._index: SchedulingIndex | None = None
        self._noted = 0
        """Number of entries of the batch under construction that the index includes."""

    def prepare(self, batch: SpeculativeState) -> bool:
        """Update the index with the batch; return whether it is complete. If not, call again in another turn."""
        return self._follow(batch).prepare(JOBS_PER_TURN + len(batch.entries))

    def run_cycle(self, batch: SpeculativeState) -> tuple[Event, ...]:
        """Return the events of a scheduling cycle over the batch under construction."""
        return run_cycle(self._follow(batch), batch.at)

    def closed(self, batch: SpeculativeState) -> None:
        """Update the index to the end of the batch. The next batch starts on the state after it."""
        if self._index is not None:
            self._follow(batch)
        self._noted = 0

    def next_due(self, state: State, after: Instant) -> Instant | None:
        """Return the earliest time after `after` at which a cycle over `state` could do something by time alone.

        Returns `after` if computing the time takes long; the resulting cycle then prepares the index.
        """
        if self._index is None or self._index.state is not state:
            self._index, self._noted = SchedulingIndex(state), 0
        return self._index.next_due(after) if self._index.prepare(JOBS_PER_TURN) else after

    def forget(self) -> None:
        """Drop the index, because batches in it have an unknown outcome, or the term has ended."""
        self._index, self._noted = None, 0

    def _follow(self, batch: SpeculativeState) -> SchedulingIndex:
        state, index = batch.state(), self._index
        if index is None or (not self._noted and index.state is not batch.base):
            index = self._index = SchedulingIndex(state)
        else:
            index.advance(state, (event for entry in batch.entries[self._noted :] for event in entry.events))
        self._noted = len(batch.entries)
        return index
