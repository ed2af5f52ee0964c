"""The leader's agenda (`replica.scheduler.index`), kept in step with the tentative state: what makes a scheduling pass
cheap.

It follows each batch as it is decided, so it is always the index of the newest tentative state. What it was built on is
dropped with the batches in flight: then it is built anew, a portion a turn, since 100,000 jobs take most of a second.
"""

from __future__ import annotations

from replica.fold import Tentative
from replica.messages import Event
from replica.scheduler import SchedulingIndex, events_of_pass
from replica.state import State
from replica.values import Instant

JOBS_PER_TURN = 2_000
"""Jobs that are indexed in one turn of the loop, count: some 20 ms, after which heartbeats and commands have theirs."""


class Planner:
    """An agenda and how far it has followed the batch under construction."""

    def __init__(self) -> None:
        self._agenda: SchedulingIndex | None = None
        self._noted = 0
        """Entries of the batch under construction that the agenda knows."""

    def prepare(self, batch: Tentative) -> bool:
        """Follow the batch; return whether a pass over it is cheap now. Where it is not, ask again in another turn."""
        return self._follow(batch).prepare(JOBS_PER_TURN)

    def events_of_pass(self, batch: Tentative) -> tuple[Event, ...]:
        """Return the events of a scheduling pass over the batch under construction."""
        return events_of_pass(self._follow(batch), batch.at)

    def closed(self, batch: Tentative) -> None:
        """Follow the batch to its end: the next one begins on the state after it."""
        if self._agenda is not None:
            self._follow(batch)
        self._noted = 0

    def next_due(self, state: State, after: Instant) -> Instant | None:
        """Return the earliest instant after `after` at which a pass over `state` could do something by time alone.

        Where that takes long to find out, it is `after` itself: the pass that is run then prepares the agenda.
        """
        if self._agenda is None or self._agenda.state is not state:
            self._agenda, self._noted = SchedulingIndex(state), 0
        return self._agenda.next_due(after) if self._agenda.prepare(JOBS_PER_TURN) else after

    def forget(self) -> None:
        """Drop what was built on batches that nobody knows the outcome of, or for a lead that is over."""
        self._agenda, self._noted = None, 0

    def _follow(self, batch: Tentative) -> SchedulingIndex:
        state, agenda = batch.state(), self._agenda
        if agenda is None or (not self._noted and agenda.state is not batch.base):
            agenda = self._agenda = SchedulingIndex(state)
        else:
            agenda.advance(state, (event for entry in batch.entries[self._noted :] for event in entry.events))
        self._noted = len(batch.entries)
        return agenda
