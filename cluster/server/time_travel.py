"""The state at any revision, and the walk through a job's history: replay from the nearest state that is at hand.

Because a State is persistent, keeping old ones costs only what has changed since. A bounded number is kept, thinned
out evenly; between two of them the ledger is folded. Replays run in slices on the loop, a few at a time, so that
commits and heartbeats go on beside them.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import msgspec

from cluster.server.applied_log import READ_ENTRIES, Applied, AppliedLog
from replica.fold import apply_batch, apply_entry
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

SLICE_ENTRIES = 16
"""Entries folded before the loop gets its turn: a few milliseconds of full batches."""


class TimeTravelBusy(Exception):
    """Too many questions about the past wait already; ask again later."""


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

    async def state_at(self, revision: int) -> State:
        """Return the state at `revision`; LookupError if it is not settled, or not held by this replica."""
        if revision == 0:
            return EMPTY
        index = self._applied_log.index_of(revision)
        async with self._turn():
            start = await self._start(index, revision)
            state = start.state
            if state.revision == revision:
                return state
            async for step in self._walk(start, index):
                if step.after.revision >= revision:
                    state = _within(step, revision)
                    if step.after.revision == revision:
                        self._keep(_Point(step.applied.index, state))
                    return state
        raise RevisionNotHeld(f"revision {revision} was not found in the entries up to {index}")

    async def history(self, from_revision: int) -> AsyncIterator[Step]:
        """Walk from the entry that settled `from_revision` to the last one that is applied when the walk begins."""
        last_index = self._applied_log.last_index
        index = self._applied_log.index_of(max(1, from_revision))
        async with self._turn():
            start = await self._start(index - 1, from_revision - 1)
            async for step in self._walk(start, last_index):
                if step.applied.index >= index:
                    yield step

    async def entries(self, from_revision: int) -> AsyncIterator[Applied]:
        """Walk over the applied entries from the one that settled `from_revision` on, without states: to the last one
        that is applied when the walk begins. LookupError where they are not held, TimeTravelBusy as for
        other questions.
        """
        last_index = self._applied_log.last_index
        index = self._applied_log.index_of(max(1, from_revision))
        async with self._turn():
            while index <= last_index:
                chunk = list(self._applied_log.read(index, limit=min(SLICE_ENTRIES, last_index - index + 1)))
                if not chunk:
                    return
                for applied in chunk:
                    yield applied
                index = chunk[-1].index + 1
                await asyncio.sleep(0)

    async def _walk(self, start: _Point, last_index: int) -> AsyncIterator[Step]:
        index, state = start.index, start.state
        done = 0
        while index < last_index:
            chunk = list(self._applied_log.read(index + 1, limit=min(READ_ENTRIES, last_index - index)))
            if not chunk:
                raise RevisionNotHeld(f"the ledger here ends at entry {index}")
            for applied in chunk:
                if applied.index != index + 1:
                    raise RevisionNotHeld(f"entries {index + 1} to {applied.index - 1} are not held by this replica")
                before = state
                if applied.batch is not None and not applied.void:
                    following = apply_batch(state, applied.batch)
                    if following is None:
                        raise LedgerViolation(f"entry {applied.index} was settled once and is void now")
                    state = following
                index = applied.index
                yield Step(applied, before, state)
                done += 1
                if done % SLICE_ENTRIES == 0:
                    await asyncio.sleep(0)

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
    async def _turn(self) -> AsyncIterator[None]:
        if self._waiting >= REPLAYS_WAITING_MAX:
            raise TimeTravelBusy(f"{self._waiting} questions about the past wait already")
        self._waiting += 1
        try:
            await self._turns.acquire()
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            self._turns.release()


def _within(step: Step, revision: int) -> State:
    """Return the state at a revision within the batch of `step`."""
    state, batch = step.before, step.applied.batch
    if batch is None:
        return step.after
    for entry in batch.entries:
        if state.revision >= revision:
            break
        state = apply_entry(state, entry, batch.at)
    return state


def settled_at(applied: Applied, position: int) -> Revision:
    """Return the revision that the command at `position` (from 0) of an applied batch settled."""
    return Revision(applied.base + position + 1)
