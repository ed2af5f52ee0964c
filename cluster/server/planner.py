"""The leader's scheduling index (`replica.scheduler`), kept in step with the speculative state: what makes a pass
cheap.

It follows each batch as it is decided, so it is always the index of the newest speculative state. What it was built on
is dropped with the batches in flight: then it is built anew, a portion a turn, since 100,000 jobs take most of a
second.
"""

from __future__ import annotations

from replica.fold import SpeculativeState
from replica.messages import Event
from replica.scheduler import SchedulingIndex, events_of_pass
from replica.state import State
from replica.values import Instant

JOBS_PER_TURN = 128
"""Jobs that are indexed in one turn of the loop beside one for each command of the batch, count: some four
milliseconds, after which heartbeats and commands have theirs. A leader under load keeps up with what its batches touch.
"""


class Planner:
    """A scheduling index and how far it has followed the batch under construction."""

    def __init__(self) -> None:
        self._index: SchedulingIndex | None = None
        self._noted = 0
        """Entries of the batch under construction that the index knows."""

    def prepare(self, batch: SpeculativeState) -> bool:
        """Follow the batch; return whether a pass over it is cheap now. Where it is not, ask again in another turn."""
        return self._follow(batch).prepare(JOBS_PER_TURN + len(batch.entries))

    def events_of_pass(self, batch: SpeculativeState) -> tuple[Event, ...]:
        """Return the events of a scheduling pass over the batch under construction."""
        return events_of_pass(self._follow(batch), batch.at)

    def closed(self, batch: SpeculativeState) -> None:
        """Follow the batch to its end: the next one begins on the state after it."""
        if self._index is not None:
            self._follow(batch)
        self._noted = 0

    def next_due(self, state: State, after: Instant) -> Instant | None:
        """Return the earliest instant after `after` at which a pass over `state` could do something by time alone.

        Where that takes long to find out, it is `after` itself: the pass that is run then prepares the index.
        """
        if self._index is None or self._index.state is not state:
            self._index, self._noted = SchedulingIndex(state), 0
        return self._index.next_due(after) if self._index.prepare(JOBS_PER_TURN) else after

    def forget(self) -> None:
        """Drop what was built on batches that nobody knows the outcome of, or for a lead that is over."""
        self._index, self._noted = None, 0

    def _follow(self, batch: SpeculativeState) -> SchedulingIndex:
        state, index = batch.state(), self._index
        if index is None or (not self._noted and index.state is not batch.base):
            index = self._index = SchedulingIndex(state)
        else:
            index.advance(state, (event for entry in batch.entries[self._noted :] for event in entry.events))
        self._noted = len(batch.entries)
        return index
