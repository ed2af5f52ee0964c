"""Events of the ledger from a position on, as the batches that a sink is sent.

Reading is bounded in events, bytes and entries, and in slices, as for the event stream: it never blocks the loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

from forebay.cluster.api.sinks.cloud_events import event_of
from forebay.cluster.server import AppliedEntry, AppliedLog, settled_at
from forebay.cluster.system.eventloop import SlicedWork
from forebay.replica.messages import Event, is_routine
from forebay.replica.state import State
from forebay.replica.values import NEVER, Instant, Revision
from forebay.wal import Gap, Ledger

BATCH_BYTES_MAX: Final = 256 * 1024
"""Size of the events in one request, bytes, without the last one: signed and sent in a millisecond."""

ENTRIES_READ_MAX: Final = 1_024
"""Entries searched for one batch, count: a filter that matches little still advances."""

EVENTS_PER_PART: Final = 2
"""Events whose class is compared with the filter in one small step of a slice, count."""

WAIT_S: Final = 15.0
"""Longest wait for new entries, seconds, before the search continues from the present position."""


class Position(NamedTuple):
    """Events sent so far: all of `revision`, and the first `sequence` ones of the next revision."""

    revision: int
    sequence: int = 0


class EventBatch(NamedTuple):
    """Events to send, and the position after them."""

    events: tuple[bytes, ...]
    after: Position
    notable: int = 0
    """Events that are not routine, count: only they are worth recording a new mark."""
    at: Instant = NEVER
    """Time of the first event."""


class HistoryGap(Exception):
    """Revisions after the position that this replica does not hold.

    `is_pruned`: they are in an archive only. Otherwise its peers may still supply them.
    """

    def __init__(self, last_revision: int, reason: str, *, is_pruned: bool) -> None:
        super().__init__(reason)
        self.last_revision = last_revision
        self.is_pruned = is_pruned


class EventSource(Protocol):
    """Source of a sink's events."""

    async def read(self, position: Position, kinds: frozenset[type[Event]], limit: int) -> EventBatch | None:
        """Return up to `limit` events of these classes after a position; None if nothing follows it.

        Raises:
            HistoryGap: The next revision is not held here.
            LedgerBroken: The next entry is damaged.
        """

    async def wait(self, position: Position) -> None:
        """Wait for entries after a position, for some time at most."""


class LedgerSource:
    """Events of a replica's ledger."""

    def __init__(
        self, state: Callable[[], State], applied_log: AppliedLog, ledger: Ledger, work: Callable[[], SlicedWork]
    ) -> None:
        """`work` returns new sliced work."""
        self._state = state
        self._log = applied_log
        self._ledger = ledger
        self._work = work

    async def read(self, position: Position, kinds: frozenset[type[Event]], limit: int) -> EventBatch | None:
        """Return the next events, as `EventSource.read` does."""
        if position.revision >= self._state().revision:
            return None
        try:
            index = self._log.index_of(position.revision + 1)
        except LookupError as error:
            raise self._gap_after(position.revision) from error
        work, taken = self._work(), _Taken(position, limit)
        async for applied in self._log.walk(index, index + ENTRIES_READ_MAX - 1, work):
            if applied.base > taken.position.revision:
                if not taken.events and taken.position == position:
                    raise self._gap_after(position.revision)
                break  # entries were pruned meanwhile; the next read reports it
            if await self._take(taken, applied, kinds, work):
                break
        return EventBatch(tuple(taken.events), taken.position, taken.notable, taken.at)

    async def wait(self, position: Position) -> None:
        """Wait for entries after a position, as `EventSource.wait` does."""
        if position.revision >= self._state().revision:
            await self._log.more(self._log.last_index, WAIT_S)

    async def _take(
        self, taken: _Taken, applied: AppliedEntry, kinds: frozenset[type[Event]], work: SlicedWork
    ) -> bool:
        """Add the matching events of an entry; return whether the batch is full."""
        batch = applied.batch
        if batch is not None and not applied.void:
            for place, entry in enumerate(batch.entries):
                revision = settled_at(applied, place)
                done = taken.position
                if revision <= done.revision:
                    continue
                await work.take(0, parts=1 + len(entry.events) // EVENTS_PER_PART)
                for sequence, event in enumerate(entry.events):
                    if sequence < done.sequence or type(event) not in kinds:
                        continue
                    await work.take()
                    is_last = sequence == len(entry.events) - 1
                    after = Position(revision) if is_last else Position(revision - 1, sequence + 1)
                    if taken.add(event_of(self._state(), applied, place, sequence), event, batch.at, after):
                        return True
                taken.position = Position(revision)
        taken.position = Position(max(applied.revision, taken.position.revision))
        return False

    def _gap_after(self, revision: int) -> HistoryGap:
        gap = self._missing_at(Revision(revision + 1))
        if gap is None:
            return HistoryGap(revision, f"revision {revision + 1} cannot be found", is_pruned=False)
        pruned = self._ledger.pruned_range()
        if pruned is not None and gap.last_index < pruned.below:
            where = self._ledger.describe_location(revision + 1)
            return HistoryGap(gap.revision_after, f"its entries were pruned: {where}", is_pruned=True)
        sentence = f"entries {gap.first_index} to {gap.last_index} are not held here yet; they are fetched from peers"
        return HistoryGap(gap.revision_after, sentence, is_pruned=False)

    def _missing_at(self, revision: Revision) -> Gap | None:
        return next((gap for gap in self._ledger.gaps() if gap.revision_before < revision <= gap.revision_after), None)


class _Taken:
    """A batch while it is read."""

    def __init__(self, position: Position, limit: int) -> None:
        self.position = position
        self.events: list[bytes] = []
        self.notable = 0
        self.at = NEVER
        self._limit = limit
        self._bytes = 0

    def add(self, content: bytes, event: Event, at: Instant, after: Position) -> bool:
        """Add an event; return whether the batch is full."""
        if not self.events:
            self.at = at
        self.events.append(content)
        self._bytes += len(content)
        self.notable += not is_routine(type(event))
        self.position = after
        return len(self.events) >= self._limit or self._bytes >= BATCH_BYTES_MAX
