"""The scheduler's agenda: what a pass needs to know of a State, kept up to date instead of being gathered each time.

Theory of operation
===================

`scheduling.events_of_pass` says what a pass does, and walks over all jobs to find out. An agenda is an index of one
State that gives the very same events by looking only at the jobs that may get something: the cost of a pass follows
what it does, not how many jobs wait. It is no part of the State: only the leader decides, so only the leader has one.
It is built from a State, a portion at a time if need be, advanced by the events that lead to the next one, and thrown
away with the lead.

For each job that is not over, `_Part` is what the job puts into the index. An event names jobs and nodes; their parts
are computed anew from the new State, and the difference goes into the index. Two things reach further than the jobs
that an event names: a node that changes touches the jobs on it, and a job that passes a milestone touches those that
wait for it.

Candidates stand in queues by (-priority, id): for space per pool, for CPUs per node where their data is, or for the
CPUs of any node. Those for a pool or for any node stand in one queue per number of CPUs, so that jobs which no node
that is up could hold are passed over together. A pass merges the queues, and leaves one as soon as nothing further back
can get anything.

Laws (tests/replica/test_agenda.py): the advanced index equals one built afresh, and its events and its next instant
are those of `scheduling`.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from replica import events as e
from replica.agenda_pass import AgendaPass, Key, NodeUse, Queue
from replica.buffers import HOLDING, Buffer, BufferState
from replica.due import due_at
from replica.jobs import ENDED, DependencyKind, Job, JobState
from replica.line import run_until
from replica.pending import early_gate
from replica.scheduling import REPLAN_S, takes_cpus, waits_for_space
from replica.sorted_keys import SortedKeys
from replica.state import State
from replica.state_index import is_finished
from replica.units import NEVER, Instant, seconds

NODE_EVENTS = (e.NodeRegistered, e.NodeDrained, e.NodeResumed, e.NodeWentDown, e.NodeCameBack)
EVENTS_ABOUT_ALL = (e.ClusterFounded, e.PolicySet)
EVENTS_ABOUT_NONE = (e.PoolSet, e.FeatureLevelRaised)
"""Events that are not about one job: about a node, about every job, or about nothing that is kept here."""


class _Part(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one job that is not over puts into the index."""

    queue: Queue | None
    key: Key | None
    node: str
    cpus: int
    """CPUs of `node` that it takes now."""
    staging: bool
    due_at: int
    pool: str
    """The pool that it holds a part of, if `hold` is not None."""
    hold: Key | None
    """Until when, how much, and the job."""
    milestone: int


class _Milestone:
    """How far a job has come, as far as others wait for it."""

    STARTED = 1
    RESULT = 2
    ENDED = 3
    FINISHED = 4
    GONE = 5


def _milestone(job: Job, finished: bool) -> int:
    if finished:
        return _Milestone.FINISHED
    if job.state in ENDED:
        return _Milestone.ENDED
    if job.result in ENDED:
        return _Milestone.RESULT
    return 0 if job.state in (JobState.PENDING, JobState.CONFIGURING) else _Milestone.STARTED


def _awaited(kind: DependencyKind, waiter: Job) -> int:
    """Return the milestone at which a dependency may change."""
    if kind is DependencyKind.AFTER:
        return _Milestone.STARTED
    if kind is DependencyKind.AFTER_BURST_BUFFER:
        return _Milestone.FINISHED
    return _Milestone.ENDED if waiter.has_buffer else _Milestone.RESULT


class Agenda:
    """An index of one State for scheduling passes; `advance` takes it to the next."""

    def __init__(self, state: State) -> None:
        """Begin the index of `state`; `prepare` or the first question looks at every job once."""
        self.state = state
        self._touched: set[int] = set(state.unfinished)
        self._touched_nodes: set[str] = set(state.nodes)
        self._parts: dict[int, _Part] = {}
        self.queues: dict[Queue, SortedKeys[Key]] = {}
        self._queue_names: dict[Queue, Queue] = {}
        """The names of the queues, so that all jobs in a queue share one."""
        self.sizes: dict[str, SortedKeys[int]] = {}
        """Pool -> the sizes that are waited for, bytes, each once."""
        self._size_counts: dict[tuple[str, int], int] = {}
        self.timers: SortedKeys[tuple[int, int]] = SortedKeys()
        self.holds: dict[str, SortedKeys[Key]] = {}
        self.staging = 0
        self._jobs_on: dict[str, set[int]] = {}
        self._cpus_taken: dict[str, int] = {}
        self._waiters: dict[int, int] = {}
        """Job -> how many that are not over depend on it."""
        self._awaiting: dict[tuple[int, int], set[int]] = {}
        """(job, milestone) -> who depends on it."""
        self._awaits: dict[int, set[tuple[int, int]]] = {}
        """Job -> what it depends on, if on anything."""
        self.purgeable: SortedKeys[int] = SortedKeys(sorted(state.finished))
        """Finished jobs that nobody depends on."""
        self.up: dict[str, NodeUse] = {}
        """Node that is up -> its CPUs, how many of them are free, and how many jobs are on it."""
        self.by_free: SortedKeys[tuple[int, str]] = SortedKeys()
        """(-free CPUs, node) of the nodes that are up."""
        self.by_jobs: dict[int, SortedKeys[tuple[int, str]]] = {}
        """CPUs of a node -> (jobs on it, node) of those that are up."""
        self.ready: set[str] = set()
        """Nodes that are up and whose first job in line could run."""
        self._changed_nodes: set[str] = set()

    # From one State to the next --------------------------------------------------------------------------------------

    def advance(self, state: State, events: Iterable[e.Event]) -> None:
        """Become the index of `state`, which is what `events` made of the present one."""
        self.state = state
        for event in events:
            if isinstance(event, NODE_EVENTS):
                self._touched_nodes.add(event.node)
                if isinstance(event, e.NodeCameBack):
                    self._touched.update(event.jobs)
            elif isinstance(event, EVENTS_ABOUT_ALL):
                self._touched_nodes.update(state.nodes)
                self._touched.update(state.unfinished)
            elif not isinstance(event, EVENTS_ABOUT_NONE):
                # What it does to other jobs, such as being passed, is not kept here but looked up.
                self._touched.add(event.job)

    def prepare(self, jobs_max: int) -> bool:
        """Look at up to so many jobs that were touched; return whether none is left, so that a pass is cheap now."""
        # Not as soon as they are touched: the next batch may touch them again.
        touched = self._touched
        if self._touched_nodes:
            for name in self._touched_nodes:
                touched |= self._jobs_on.get(name, set())
            self._changed_nodes |= self._touched_nodes
            self._touched_nodes = set()
        for _ in range(min(jobs_max, len(touched))):
            touched |= self._index(touched.pop())
        if touched:
            return False
        if self._changed_nodes:
            self._index_nodes()
        return True

    def _catch_up(self) -> None:
        while not self.prepare(len(self._touched)):
            pass

    def _index(self, job_id: int) -> set[int]:
        """Make the index true for one job; return those who wait for something that has changed about it."""
        state = self.state
        before = self._parts.get(job_id)
        job = state.jobs.get(job_id)
        if job is not None and job_id in state.unfinished:
            after = self._part(job, state.buffers.get(job_id))
            if before is None:
                self._depend(job)
            self._parts[job_id] = after
            milestone = after.milestone
        else:
            after = None
            if before is not None:
                del self._parts[job_id]
                self._depend_no_longer(job_id)
            milestone = _Milestone.GONE if job is None else _Milestone.FINISHED
            # It may have come and gone since the last look, or be here already.
            self.purgeable.discard(job_id)
            if job is not None and job_id not in self._waiters:
                self.purgeable.add(job_id)
        self._replace(job_id, before, after)
        if job_id not in self._waiters:
            return set()
        reached = 0 if before is None else before.milestone
        low, high = sorted((reached, milestone))
        awaiting = self._awaiting
        return set().union(*(awaiting.get((job_id, number), ()) for number in range(low + 1, high + 1)))

    def _part(self, job: Job, buffer: Buffer | None) -> _Part:
        state, spec = self.state, job.spec
        queue: Queue | None = None
        key: Key | None = None
        if job.state is JobState.PENDING and early_gate(state, job) is None:
            if buffer is None:
                queue, key = ("any", "", spec.cpus), (-job.priority, job.id, spec.cpus)
            elif buffer.state is BufferState.STAGED_IN:
                queue, key = ("node", job.node, 0), (-job.priority, job.id, spec.cpus)
            elif waits_for_space(job, buffer):
                size_bytes = buffer.granted_bytes
                pool = buffer.pool if size_bytes else ""
                queue, key = ("space", pool, spec.cpus), (-job.priority, job.id, size_bytes)
        if queue is not None:
            queue = self._queue_names.setdefault(queue, queue)
        holds = buffer is not None and buffer.state in HOLDING and buffer.granted_bytes > 0
        return _Part(
            queue=queue,
            key=key,
            node=job.node,
            cpus=spec.cpus if takes_cpus(job, buffer) else 0,
            staging=buffer is not None and buffer.state is BufferState.STAGING_IN,
            due_at=due_at(state, job, buffer),
            pool=buffer.pool if holds and buffer is not None else "",
            hold=(run_until(job, buffer), buffer.granted_bytes, job.id) if holds and buffer is not None else None,
            milestone=_milestone(job, is_finished(job, buffer)),
        )

    def _replace(self, job_id: int, before: _Part | None, after: _Part | None) -> None:
        """Take out of the index what the job had put into it, and put in what it is now."""
        if before == after:
            return
        for part, enters in ((before, False), (after, True)):
            if part is None:
                continue
            sign = 1 if enters else -1
            self.staging += sign * part.staging
            if part.queue is not None:
                _keep(self.queues, part.queue, part.key, enters)
                if part.queue[0] == "node":
                    self._changed_nodes.add(part.queue[1])
                elif part.queue[0] == "space" and part.key is not None:
                    self._count_size(part.queue[1], part.key[2], sign)
            if part.due_at != NEVER:
                (self.timers.add if enters else self.timers.discard)((part.due_at, job_id))
            if part.hold is not None:
                _keep(self.holds, part.pool, part.hold, enters)
            if part.node:
                _keep_in_set(self._jobs_on, part.node, job_id, enters)
                self._cpus_taken[part.node] = self._cpus_taken.get(part.node, 0) + sign * part.cpus
                self._changed_nodes.add(part.node)
        if before is not None and before.queue is not None and before.queue not in self.queues:
            del self._queue_names[before.queue]

    def _count_size(self, pool: str, size_bytes: int, sign: int) -> None:
        count = self._size_counts.get((pool, size_bytes), 0)
        if not count or not count + sign:
            _keep(self.sizes, pool, size_bytes, sign > 0)
        self._size_counts[pool, size_bytes] = count + sign
        if not count + sign:
            del self._size_counts[pool, size_bytes]

    def _depend(self, job: Job) -> None:
        awaits = {(dependency.job, _awaited(dependency.kind, job)) for dependency in job.spec.dependencies}
        if not awaits:
            return
        self._awaits[job.id] = awaits
        for awaited in awaits:
            _keep_in_set(self._awaiting, awaited, job.id, True)
        for other in {other for other, _ in awaits}:
            self._waiters[other] = self._waiters.get(other, 0) + 1
            self.purgeable.discard(other)

    def _depend_no_longer(self, job_id: int) -> None:
        awaits = self._awaits.pop(job_id, set())
        for awaited in awaits:
            _keep_in_set(self._awaiting, awaited, job_id, False)
        for other in {other for other, _ in awaits}:
            self._waiters[other] -= 1
            if not self._waiters[other]:
                del self._waiters[other]
                if other in self.state.finished:
                    self.purgeable.discard(other)
                    self.purgeable.add(other)

    def _index_nodes(self) -> None:
        for name in self._changed_nodes:
            node = self.state.nodes.get(name)
            up = node is not None and not node.down and not node.drained
            self.put_node(
                name,
                (node.cpus, node.cpus - self._cpus_taken.get(name, 0), len(self._jobs_on.get(name, ())))
                if up and node is not None
                else None,
            )
            queue = self.queues.get(("node", name, 0))
            if up and queue is not None and queue.first[2] <= self.up[name][1]:
                self.ready.add(name)
            else:
                self.ready.discard(name)
        self._changed_nodes = set()

    def put_node(self, name: str, after: NodeUse | None) -> None:
        """Have the index say of a node what `after` says; None: it is not up."""
        before = self.up.get(name)
        if before == after:
            return
        if before is not None:
            cpus, free, jobs = before
            del self.up[name]
            self.by_free.discard((-free, name))
            _keep(self.by_jobs, cpus, (jobs, name), False)
        if after is not None:
            cpus, free, jobs = after
            self.up[name] = after
            self.by_free.add((-free, name))
            _keep(self.by_jobs, cpus, (jobs, name), True)

    # What it is asked ------------------------------------------------------------------------------------------------

    def events_of_pass(self, at: Instant) -> tuple[e.Event, ...]:
        """Return `scheduling.events_of_pass` of the present State at `at`."""
        self._catch_up()
        nodes: dict[str, NodeUse] = {}
        try:
            return tuple(AgendaPass(self, at, nodes).run())
        finally:
            # What was given to nodes on trial. The events, once they are settled, take it for good.
            for name, before in nodes.items():
                self.put_node(name, before)

    def next_due(self, after: Instant) -> Instant | None:
        """Return `scheduling.next_due` of the present State."""
        self._catch_up()
        first = self.timers.first_after((after + 1, 0))
        due = [] if first is None else [first[0]]
        if any(queue[0] == "space" for queue in self.queues):
            due.append(after + seconds(REPLAN_S))
        return Instant(min(due)) if due else None

    def contents(self) -> dict[str, object]:
        """Return the whole index in a form that can be compared: for the tests' laws."""
        self._catch_up()
        return {
            "parts": dict(self._parts),
            "queues": {queue: list(keys) for queue, keys in self.queues.items()},
            "sizes": {pool: list(sizes) for pool, sizes in self.sizes.items()},
            "size_counts": dict(self._size_counts),
            "queue_names": set(self._queue_names),
            "timers": list(self.timers),
            "holds": {pool: list(keys) for pool, keys in self.holds.items()},
            "staging": self.staging,
            "jobs_on": dict(self._jobs_on),
            "cpus_taken": {node: cpus for node, cpus in self._cpus_taken.items() if cpus},
            "waiters": dict(self._waiters),
            "awaits": dict(self._awaits),
            "awaiting": dict(self._awaiting),
            "purgeable": list(self.purgeable),
            "up": dict(self.up),
            "by_free": list(self.by_free),
            "by_jobs": {cpus: list(keys) for cpus, keys in self.by_jobs.items()},
            "ready": set(self.ready),
        }


def _keep(kept: dict, name: object, key: object, enters: bool) -> None:  # type: ignore[type-arg]
    keys = kept.get(name)
    if enters:
        if keys is None:
            keys = kept[name] = SortedKeys()
        keys.add(key)
    elif keys is not None:
        keys.discard(key)
        if not keys:
            del kept[name]


def _keep_in_set(kept: dict, name: object, key: int, enters: bool) -> None:  # type: ignore[type-arg]
    if enters:
        kept.setdefault(name, set()).add(key)
    else:
        kept[name].discard(key)
        if not kept[name]:
            del kept[name]
