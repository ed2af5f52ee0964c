"""Indexes of candidates by awaited resource, and of the tasks of arrays.

Candidates are in queues, sorted by (-priority, job ID): for space of a pool, for CPUs of the node of their data, or for
CPUs of any node. Queues for a pool or for any node are separate for each number of CPUs, so that a cycle can skip all
jobs that no node can hold at once. Of each array, only as many tasks are queued as its throttle and the site's limit
permit.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

from forebay.replica.model import ArrayUse
from forebay.replica.scheduler.index_row import Group, IndexRow, Key, Queue, update_keys
from forebay.replica.state import State
from forebay.replica.values import SortedKeys, Verdict


class QueueIndex:
    """Queues of candidates, their heads, and the requested sizes. `ArrayIndex` adds tasks of arrays."""

    def __init__(self) -> None:
        self.queues: dict[Queue, SortedKeys[Key]] = {}
        self.heads: dict[Group, SortedKeys[tuple[Key, Queue]]] = {}
        """Group -> first candidate of each of its queues, with the queue."""
        self.sizes: dict[str, SortedKeys[int]] = {}
        """Pool -> distinct requested sizes, bytes."""
        self.space_requests = 0
        """Number of candidates for space, including tasks blocked by their arrays."""
        self.names: dict[Queue, Queue] = {}
        """Interned names of the queues."""
        self._size_counts: dict[tuple[str, int], int] = {}

    def apply(self, job_id: int, before: IndexRow, after: IndexRow) -> None:
        """Move the job to the queue of its new row."""
        if before.queue is after.queue and before.key == after.key and before.rare.array == after.rare.array:
            return
        for row, sign in ((before, -1), (after, 1)):
            if row.queue is not None and row.key is not None:
                self.space_requests += sign * (row.queue[0] in ("space", "large", "persistent"))
                if not row.rare.array:
                    self.put(row.queue, row.key, sign > 0)

    def put(self, queue: Queue, key: Key, enters: bool) -> None:
        """Add a candidate to a queue, or remove it."""
        group, keys = queue[:2], self.queues.get(queue)
        before = None if keys is None else keys.first
        update_keys(self.queues, queue, key, enters)
        keys = self.queues.get(queue)
        after = None if keys is None else keys.first
        if before != after:
            if before is not None:
                update_keys(self.heads, group, (before, queue), False)
            if after is not None:
                update_keys(self.heads, group, (after, queue), True)
        if queue[0] == "space":
            self._count_size(queue[1], key[2], 1 if enters else -1)
        if queue not in self.queues:
            self.names.pop(queue, None)

    def _count_size(self, pool: str, size_bytes: int, sign: int) -> None:
        count = self._size_counts.get((pool, size_bytes), 0)
        if not count or not count + sign:
            update_keys(self.sizes, pool, size_bytes, sign > 0)
        self._size_counts[pool, size_bytes] = count + sign
        if not count + sign:
            del self._size_counts[pool, size_bytes]

    def between(self, pool: str, low: int, high: int) -> set[int]:
        """Return the queued jobs that request more than `low` and at most `high` bytes of a pool."""
        names = [queue for queue in self.queues if queue[:2] in (("space", pool), ("large", pool))]
        return {key[1] for queue in names for key in self.queues[queue] if low < key[2] <= high}


class ArrayIndex:
    """Waiting tasks and number of active tasks of each array; the first waiting tasks are queued."""

    def __init__(self, queues: QueueIndex, rows: Mapping[int, IndexRow]) -> None:
        """Create an empty index; `rows` are the current rows of all jobs, kept up to date by the caller."""
        self._queues = queues
        self._rows = rows
        self._waiting: dict[int, SortedKeys[Key]] = {}
        """Array -> its waiting tasks."""
        self._queued: dict[int, dict[Key, Queue]] = {}
        """Array -> its queued tasks."""
        self._use: dict[int, ArrayUse] = {}
        self._changed: set[int] = set()

    def apply(self, job_id: int, before: IndexRow, after: IndexRow) -> None:
        """Count the task of a row; `refresh` then queues the first tasks of the array."""
        for row, sign in ((before, -1), (after, 1)):
            array, active_of = row.rare.array, row.rare.active_of
            if array:
                update_keys(self._waiting, array, row.key, sign > 0)
                self._changed.add(array)
            if active_of:
                use = self._use.setdefault(active_of, ArrayUse())
                use.active += sign
                use.ahead += sign * row.rare.ahead
                self._changed.add(active_of)

    def change_all(self) -> None:
        """Mark all arrays for `refresh`, because their limits may have changed."""
        self._changed.update(self._waiting)

    def refresh(self, state: State) -> None:
        """Queue the first tasks of each changed array, as many as its limits permit."""
        if not self._changed:
            return
        for array in self._changed:
            waiting = self._waiting.get(array)
            queued: dict[Key, Queue] = {}
            if waiting is not None:
                job = state.jobs[waiting.first[1]]
                room = self.usage_of(array).free_slots(job.request, state.site.array_stage_count)
                for key in islice(waiting, room):
                    queue = self._rows[key[1]].queue
                    assert queue is not None
                    queued[key] = queue
            former = self._queued.get(array, {})
            for key, queue in former.items():
                if queued.get(key) != queue:
                    self._queues.put(queue, key, False)
            for key, queue in queued.items():
                if former.get(key) != queue:
                    self._queues.put(self._queues.names.setdefault(queue, queue), key, True)
            if queued:
                self._queued[array] = queued
            else:
                self._queued.pop(array, None)
            use = self._use.get(array)
            if use is not None and not use.active:
                del self._use[array]
        self._changed = set()

    def usage_of(self, array: int) -> ArrayUse:
        """Return the numbers of active tasks of an array."""
        return self._use.get(array) or ArrayUse()

    def verdict(self, state: State, job_id: int) -> Verdict | None:
        """Return the verdict on a task that its array blocks, or None. No early gate may block the task."""
        row = self._rows[job_id]
        if not row.rare.array or row.key is None:
            return None
        before = self._waiting[row.rare.array].rank(row.key)
        request, stage_count = state.jobs[job_id].request, state.site.array_stage_count
        return self.usage_of(row.rare.array).verdict(request, stage_count, before)

    def between(self, low: int, high: int) -> set[int]:
        """Return the waiting tasks that request more than `low` and at most `high`, of whatever resource."""
        return {key[1] for keys in self._waiting.values() for key in keys if low < key[2] <= high}
