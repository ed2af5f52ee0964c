"""The state at any revision, and the walk through a job's history: replay from the nearest state that is at hand.

Because a State is persistent, keeping old ones costs only what has changed since. A bounded number is kept, thinned
out evenly; between two of them the ledger is folded. Replays run in slices on the loop (`cluster.eventloop.slices`), a
few at a time, so that commits and heartbeats go on beside them.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import Counter
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from typing import NamedTuple

import msgspec

from cluster.eventloop import Work
from cluster.server.applied_log import Applied, AppliedLog
from replica.fold import apply_batch
from replica.messages import Batch
from replica.state import EMPTY, State
from replica.values import LedgerViolation, Revision
from snapshots import SnapshotRefused, SnapshotStore, load_snapshot

POINTS_MAX = 64
"""States kept, count: with the default snapshot period a question about yesterday folds a few thousand entries."""

POINT_ENTRIES = 256
"""Entries between two states that are kept at first; doubled each time that they are thinned out."""

REPLAYS_MAX = 2
"""Replays at once, count: each takes turns with everything else on the loop."""

REPLAYS_WAITING_MAX = 16
"""Questions about the past that may wait for their turn, count; more are refused."""

REPLAYS_PER_ASKER_MAX = 4
"""Questions about the past of one asker that are answered or wait, count: a quarter of all, so that he waits alone."""

FOLDED_AT_ONCE = 64
"""Commands of a batch that are folded in one slice, count: a millisecond; a command that makes an array is one too."""

PARTS_PER_EVENT = 8
"""What folding an event takes of a slice (`cluster.eventloop.slices.PARTS_PER_RECORD`): some ten microseconds."""


class TimeTravelBusy(Exception):
    """Too many questions about the past wait already; ask again later."""

    def __init__(self, sentence: str, *, own: bool = False) -> None:
        super().__init__(sentence)
        self.own = own
        """Whether they are the asker's own."""


class RevisionNotHeld(LookupError):
    """This replica does not hold what is needed to go back that far; the sentence says from where on it does."""


class Step(NamedTuple):
    """One applied entry with the states before and after it."""

    applied: Applied
    before: State
    after: State


class _Point(msgspec.Struct, frozen=True):
    index: int
    state: State


class TimeTravel:
    """Answers what was true at a revision that this replica has applied."""

    def __init__(self, applied_log: AppliedLog, *, base: State, base_index: int, snapshots: SnapshotStore) -> None:
        """Begin with the state at hand, `base` after the entry `base_index`."""
        self._applied_log = applied_log
        self._snapshots = snapshots
        self._points = [_Point(base_index, base)]
        self._stride = POINT_ENTRIES
        self._turns = asyncio.Semaphore(REPLAYS_MAX)
        self._waiting = 0
        self._asked: Counter[Hashable] = Counter()
        """Questions that are answered or wait, by who asks them."""

    @property
    def points(self) -> int:
        """States that are kept."""
        return len(self._points)

    def applied(self, index: int, state: State) -> None:
        """Note the state after an entry that was just applied."""
        if index - self._points[-1].index >= self._stride:
            self._keep(_Point(index, state))

    def installed(self, index: int, state: State) -> None:
        """Continue from an installed snapshot; what was kept before stays true."""
        self._keep(_Point(index, state))

    async def state_at(self, revision: int, work: Work) -> State:
        """Return the state at `revision`; LookupError if it is not settled, or not held by this replica.

        TimeTravelBusy where too many ask already, as for all questions.
        """
        if revision == 0:
            return EMPTY
        index = self._applied_log.index_of(revision)
        async with self._turn(work.who):
            start = await self._start(index, revision)
            state = start.state
            if state.revision == revision:
                return state
            async for step in self._walk(start, index, work):
                if step.after.revision >= revision:
                    state = await _within(step, revision, work)
                    if step.after.revision == revision:
                        self._keep(_Point(step.applied.index, state))
                    return state
        raise RevisionNotHeld(f"revision {revision} was not found in the entries up to {index}")

    async def history(self, from_revision: int, work: Work) -> AsyncIterator[Step]:
        """Walk from the entry that settled `from_revision` to the last one that is applied when the walk begins."""
        last_index = self._applied_log.last_index
        index = self._applied_log.index_of(max(1, from_revision))
        async with self._turn(work.who):
            start = await self._start(index - 1, from_revision - 1)
            async for step in self._walk(start, last_index, work):
                if step.applied.index >= index:
                    yield step

    async def entries(self, from_revision: int, work: Work) -> AsyncIterator[Applied]:
        """Walk over the applied entries from the one that settled `from_revision` on, without states: to the last one
        that is applied when the walk begins. LookupError where they are not held, TimeTravelBusy as for
        other questions.
        """
        last_index = self._applied_log.last_index
        index = self._applied_log.index_of(max(1, from_revision))
        async with self._turn(work.who):
            async for applied in self._applied_log.walk(index, last_index, work):
                yield applied

    async def _walk(self, start: _Point, last_index: int, work: Work) -> AsyncIterator[Step]:
        index, state = start.index, start.state
        async for applied in self._applied_log.walk(index + 1, last_index, work):
            if applied.index != index + 1:
                raise RevisionNotHeld(f"entries {index + 1} to {applied.index - 1} are not held by this replica")
            before = state
            if applied.batch is not None and not applied.void:
                state = await fold_slowly(state, applied.batch, work)
            index = applied.index
            yield Step(applied, before, state)
        if index < last_index:
            raise RevisionNotHeld(f"the ledger here ends at entry {index}")

    async def _start(self, index: int, revision: int) -> _Point:
        """Return the nearest state at or before the entry `index` whose revision is not beyond `revision`."""
        best: _Point | None = None
        position = bisect_right(self._points, index, key=lambda point: point.index)
        while position:
            position -= 1
            if self._points[position].state.revision <= revision:
                best = self._points[position]
                break
        stored = await self._from_snapshot(index, revision, 0 if best is None else best.index)
        if stored is not None:
            return stored
        if best is not None:
            return best
        first_index = self._applied_log.first_index
        if first_index > 1:
            raise RevisionNotHeld(
                f"this replica holds the ledger from entry {first_index} on, and no snapshot before it"
            )
        return _Point(0, EMPTY)

    async def _from_snapshot(self, index: int, revision: int, better_than: int) -> _Point | None:
        for name in self._snapshots.names():
            if not better_than < name.index <= index:
                continue
            try:
                image = await asyncio.to_thread(load_snapshot, self._snapshots.directory / str(name))
            except SnapshotRefused:
                continue
            if image.state.revision <= revision and image.chain_digest == self._applied_log.digest_at(image.index):
                point = _Point(image.index, image.state)
                self._keep(point)
                return point
        return None

    def _keep(self, point: _Point) -> None:
        position = bisect_right(self._points, point.index, key=lambda kept: kept.index)
        if position and self._points[position - 1].index == point.index:
            return
        self._points.insert(position, point)
        if len(self._points) > POINTS_MAX:
            # Every second one goes: what is left stays evenly spread over the whole history.
            last = self._points[-1]
            self._points = self._points[::2]
            if self._points[-1] is not last:
                self._points.append(last)
            self._stride *= 2

    @asynccontextmanager
    async def _turn(self, who: Hashable) -> AsyncIterator[None]:
        if self._asked[who] >= REPLAYS_PER_ASKER_MAX:
            raise TimeTravelBusy(f"{who} asks {self._asked[who]} questions about the past already", own=True)
        if self._waiting >= REPLAYS_WAITING_MAX:
            raise TimeTravelBusy(f"{self._waiting} questions about the past wait already")
        self._asked[who] += 1
        try:
            self._waiting += 1
            try:
                await self._turns.acquire()
            finally:
                self._waiting -= 1
            try:
                yield
            finally:
                self._turns.release()
        finally:
            self._asked[who] -= 1
            if not self._asked[who]:
                del self._asked[who]


async def fold_slowly(state: State, batch: Batch, work: Work) -> State:
    """Return the state after a batch that was applied once, folded in slices; LedgerViolation if it does not fit."""
    if batch.base != state.revision:
        raise LedgerViolation(f"a batch on revision {batch.base} was settled once and is void now")
    for first in range(0, len(batch.entries), FOLDED_AT_ONCE):
        part = batch.entries[first : first + FOLDED_AT_ONCE]
        await work.take(0, parts=PARTS_PER_EVENT * sum(len(entry.events) + 1 for entry in part))
        following = apply_batch(state, Batch(state.revision, batch.at, part))
        assert following is not None  # it is on its own base
        state = following
    return state


async def _within(step: Step, revision: int, work: Work) -> State:
    """Return the state at a revision within the batch of `step`."""
    batch = step.applied.batch
    if batch is None:
        return step.after
    wanted = batch.entries[: max(0, revision - step.before.revision)]
    return await fold_slowly(step.before, Batch(batch.base, batch.at, wanted), work)


def settled_at(applied: Applied, position: int) -> Revision:
    """Return the revision that the command at `position` (from 0) of an applied batch settled."""
    return Revision(applied.base + position + 1)
