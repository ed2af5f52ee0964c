"""A scheduling pass over an agenda: the events of `scheduling.events_of_pass`, at the cost of what it does.

The queues are merged by (-priority, id), and one is left as soon as nothing further back in it can get anything. What
the pass gives to nodes is put into the agenda on trial, and noted, so that it can be taken back afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heapreplace, merge
from typing import TYPE_CHECKING

from replica import events as e
from replica.due import due_events
from replica.jobs import Job
from replica.limits import CANDIDATES_BEHIND_MAX, EVENTS_PER_PASS_MAX
from replica.line import Head, expected_end, release_at, start_of
from replica.pools import free_bytes
from replica.sorted_keys import SortedKeys
from replica.units import Instant

if TYPE_CHECKING:
    from replica.agenda import Agenda

Key = tuple[int, int, int]
"""-priority, job, and what is asked for: bytes of a pool or CPUs."""

Queue = tuple[str, str, int]
"""What is waited for: ("space", pool, CPUs), ("node", name, 0) or ("any", "", CPUs)."""

NodeUse = tuple[int, int, int]
"""CPUs of a node that is up, how many of them are free, and how many jobs are on it."""


class AgendaPass:
    """One pass over an agenda. See `scheduling._Pass`, which is the same with a walk over all jobs."""

    def __init__(self, agenda: Agenda, at: Instant, nodes: dict[str, NodeUse]) -> None:
        """`nodes` takes down what the nodes were that the pass gives something to."""
        self.agenda = agenda
        self.state = agenda.state
        self.at = at
        self.events: list[e.Event] = []
        self.nodes = nodes
        self.done: set[int] = set()
        """Jobs that something was due for: what follows is for the next pass."""
        self.staging = agenda.staging
        self.held: dict[str, int] = {}
        """Pool -> bytes that this pass gave away."""
        self.heads: dict[str, Head] = {}
        self.waiting_nodes: set[str] = set()
        self.waiting_anywhere = False
        self.cpus_max = max(agenda.by_jobs, default=0)

    def run(self) -> list[e.Event]:
        """Return the events of the pass."""
        lines = self._due()
        streams: list[tuple[Key, int, Queue, Iterator[Key]]] = []
        for queue, keys in self._open_queues(lines):
            iterator = iter(keys)
            streams.append((next(iterator), len(streams), queue, iterator))
        heapify(streams)
        while streams and len(self.events) < EVENTS_PER_PASS_MAX:
            key, number, queue, iterator = streams[0]
            goes_on = True
            if key[1] not in self.done:
                if queue[0] == "space":
                    goes_on = self._reserve(key, queue)
                elif queue[0] == "node":
                    goes_on = self._run_where_its_data_is(key, queue[1])
                else:
                    goes_on = self._run_anywhere(key)
            following = next(iterator, None) if goes_on else None
            if following is None:
                heappop(streams)
            else:
                heapreplace(streams, (following, number, queue, iterator))
        self._purge()
        return self.events

    def _due(self) -> set[str]:
        """Do what is due by time alone; return the nodes whose lines have changed by that."""
        state, lines = self.state, set()
        for instant, job_id in self.agenda.timers:
            if instant > self.at or len(self.events) >= EVENTS_PER_PASS_MAX:
                break
            job = state.jobs[job_id]
            self.events.extend(due_events(state, job, state.buffers.get(job_id), self.at))
            self.done.add(job_id)
            lines.add(job.node)
        return lines

    def _open_queues(self, lines: set[str]) -> Iterator[tuple[Queue, SortedKeys[Key]]]:
        queues, up = self.agenda.queues, self.agenda.up
        for queue, keys in queues.items():
            if queue[0] != "node" and queue[2] <= self.cpus_max:
                yield queue, keys
        for name in self.agenda.ready | lines:
            keys_of_node = queues.get(("node", name, 0))
            if keys_of_node is not None and name in up:
                yield ("node", name, 0), keys_of_node

    # Space -----------------------------------------------------------------------------------------------------------

    def _reserve(self, key: Key, queue: Queue) -> bool:
        """Give the candidate its space if it may have it; return whether any behind it could."""
        state, pool_name, size_bytes = self.state, queue[1], key[2]
        if self.staging >= state.policy.operations_per_stage_max:
            return False
        pool = state.pools.get(pool_name)
        held = state.held_bytes.get(pool_name, 0) + self.held.get(pool_name, 0)
        free = 0 if pool is None else free_bytes(pool, held)
        head = self.heads.get(pool_name)
        if head is not None:
            if free < self.agenda.sizes[pool_name].first or head.behind >= CANDIDATES_BEHIND_MAX:
                return False
            head.behind += 1
        if size_bytes > free:
            if head is None:
                self.heads[pool_name] = self._head(state.jobs[key[1]], pool_name, size_bytes, free)
            return True
        job = state.jobs[key[1]]
        counted = False
        if head is not None:
            until = expected_end(job, self.at)
            if not head.may_be_passed(size_bytes, until, self.at, state.policy.max_passes):
                return True
            counted = not head.harmless
            head.passed += counted
        node = self._node_with_fewest_jobs(job.spec.cpus)
        cpus, cpus_free, jobs = self.agenda.up[node]
        self._give(node, (cpus, cpus_free, jobs + 1))
        self.held[pool_name] = self.held.get(pool_name, 0) + size_bytes
        self.staging += 1
        if head is None:
            self.events.append(e.BufferAllocated(job.id, node, job.attempt + 1))
        else:
            self.events.append(e.BufferAllocated(job.id, node, job.attempt + 1, head.job, counted, head.start_at))
        return True

    def _node_with_fewest_jobs(self, cpus: int) -> str:
        by_jobs = self.agenda.by_jobs
        return min(keys.first for has, keys in by_jobs.items() if has >= cpus)[1]

    def _give(self, node: str, after: NodeUse) -> None:
        self.nodes.setdefault(node, self.agenda.up[node])
        self.agenda.put_node(node, after)

    def _head(self, job: Job, pool: str, size_bytes: int, free: int) -> Head:
        state, at = self.state, self.at
        given = [event.job for event in self.events if isinstance(event, e.BufferAllocated)]

        def estimate() -> tuple[Instant, int]:
            new = [
                (expected_end(state.jobs[other], at), state.buffers[other].granted_bytes)
                for other in given
                if state.buffers[other].pool == pool
            ]
            return start_of(merge(self._releases(pool), sorted(new)), free, size_bytes)

        return Head(job, estimate)

    def _releases(self, pool: str) -> Iterator[tuple[int, int]]:
        """Yield when the holders of a pool should give back how much, in ascending order."""
        overdue: list[int] | None = []
        for until, size_bytes, _ in self.agenda.holds.get(pool, ()):
            if overdue is not None:
                if until <= self.at:
                    overdue.append(size_bytes)
                    continue
                yield from ((release_at(0, self.at), size) for size in sorted(overdue))
                overdue = None
            yield release_at(until, self.at), size_bytes
        if overdue is not None:
            yield from ((release_at(0, self.at), size) for size in sorted(overdue))

    # CPUs ------------------------------------------------------------------------------------------------------------

    def _run_where_its_data_is(self, key: Key, node: str) -> bool:
        """Run the candidate if it may run; return whether any behind it could."""
        if self.waiting_anywhere:
            return False
        if not self._run(key, node):
            self.waiting_nodes.add(node)
            return False
        return True

    def _run_anywhere(self, key: Key) -> bool:
        if self.waiting_anywhere:
            return False
        for free, name in self.agenda.by_free:
            if -free < key[2]:
                break
            if not self._is_waited_for(name, key):
                return self._run(key, name)
        self.waiting_anywhere = True
        return False

    def _is_waited_for(self, node: str, key: Key) -> bool:
        """Whether a candidate before `key` waits for CPUs of the node."""
        if node in self.waiting_nodes:
            return True
        if node in self.agenda.ready:
            return False
        keys = self.agenda.queues.get(("node", node, 0))
        return keys is not None and keys.first < key and keys.first[1] not in self.done

    def _run(self, key: Key, node: str) -> bool:
        cpus, free, jobs = self.agenda.up[node]
        if free < key[2]:
            return False
        self._give(node, (cpus, free - key[2], jobs))
        job = self.state.jobs[key[1]]
        self.events.append(e.RunOrdered(job.id, node, job.attempt + 1))
        return True

    # -----------------------------------------------------------------------------------------------------------------

    def _purge(self) -> None:
        room = EVENTS_PER_PASS_MAX - len(self.events)
        surplus = min(room, len(self.state.finished) - self.state.policy.finished_jobs_kept)
        if surplus <= 0:
            return
        for _, job_id in zip(range(surplus), self.agenda.purgeable, strict=False):
            self.events.append(e.JobPurged(job_id))
