"""The scheduler's agenda: what a pass needs to know of a State, kept up to date instead of being gathered each time.

Theory of operation
===================

A walk over all jobs would say what a pass does (the reference of the tests does so). An agenda is an index of one State
that gives the very same events by looking only at the jobs that may get something: the cost of a pass follows what it
does, not how many jobs wait. It is no part of the State: the leader keeps one in step with its State, whoever else asks
builds one. It is built from a State, a portion at a time if need be, and advanced by the events that lead to the next.

For each job that is not over, `Part` is what the job puts into the index. An event names jobs and nodes; their parts
are computed anew from the new State, and the difference goes into the index. Two things reach further than the jobs
that an event names: a node that changes touches the jobs on it, and a job that passes a milestone touches those that
wait for it.

Candidates stand in queues by (-priority, id): for space per pool, for CPUs per node where their data is, or for the
CPUs of any node. Those for a pool or for any node stand in one queue per number of CPUs, so that jobs which no node
that is up could hold are passed over together. A pass merges the queues, and leaves one as soon as nothing further back
can get anything.

Of an array only as many tasks stand in queues as have room in it (`replica.model.arrays`), the first ones of its own
line, so that throttled ones cost nothing. Operations that wait for a turn (`replica.operations.slots`) stand in a queue
per stage.

Why a job waits is a pass that stops at the job's turn (`agenda_pass.verdicts_of`): what it leaves out changes nothing.

Laws (tests/replica/test_agenda.py): the advanced index equals one built afresh, and its events and its next instant
are those of the reference.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from replica.messages import events as e
from replica.model import ArrayUse, JobState
from replica.operations import reservation_instants
from replica.scheduler.admission import usable_in
from replica.scheduler.dependency_index import Waiters
from replica.scheduler.gates import REPLAN_S, buffer_gate, early_gate, later_reason, waits_for_space
from replica.scheduler.index_rows import Group, Key, Milestone, More, Part, Queue, keep, keep_in_set, part_of
from replica.scheduler.node_index import AgendaNodes
from replica.scheduler.preemption import Victim
from replica.state import State
from replica.values import NEVER, Instant, SortedKeys, Verdict, seconds


class Agenda:
    """An index of one State for scheduling passes; `advance` takes it to the next."""

    def __init__(self, state: State) -> None:
        """Begin the index of `state`; `prepare` or the first question looks at every job once."""
        self.state = state
        self._touched: set[int] = set(state.unfinished)
        self._changed: set[int] = set()
        """Those of them that may depend on others than before."""
        self._touched_nodes: set[str] = set(state.nodes)
        self._parts: dict[int, Part] = {}
        self.queues: dict[Queue, SortedKeys[Key]] = {}
        self.fronts: dict[Group, SortedKeys[tuple[Key, Queue]]] = {}
        """Group of queues -> the first candidate of each, with its queue."""
        self.victims: dict[str, SortedKeys[Victim]] = {}
        """Pool -> jobs whose staged buffer may be taken back, the last ones in the order of candidates first."""
        self._jobs_of: dict[str, set[int]] = {}
        """Reservation -> its jobs that are not over."""
        self._reservation_of: dict[int, str] = {}
        self._queue_names: dict[Queue, Queue] = {}
        """The names of the queues, so that all jobs in a queue share one."""
        self.sizes: dict[str, SortedKeys[int]] = {}
        """Pool -> the sizes that are waited for, bytes, each once."""
        self._size_counts: dict[tuple[str, int], int] = {}
        self.timers: SortedKeys[tuple[int, int]] = SortedKeys()
        self.holds: dict[str, SortedKeys[Key]] = {}
        self.queued: dict[int, dict[str, SortedKeys[tuple[Instant, int]]]] = {}
        """Stage -> user -> who waits for a turn of it, first come first."""
        self._space_parts = 0
        """Candidates for space, those that their arrays keep back included."""
        self._lines: dict[int, SortedKeys[Key]] = {}
        """Array -> its tasks that need room in it. The first of them, as many as have room, are in `queues`."""
        self._shown: dict[int, dict[Key, Queue]] = {}
        """Array -> those that are in `queues`."""
        self._array_use: dict[int, ArrayUse] = {}
        self._changed_arrays: set[int] = set()
        self._jobs_on: dict[str, set[int]] = {}
        self._cpus_taken: dict[str, int] = {}
        self._waiters = Waiters()
        self.purgeable: SortedKeys[int] = SortedKeys(sorted(state.finished))
        """Finished jobs that nobody depends on."""
        self.nodes = AgendaNodes()
        self.ready: set[str] = set()
        """Nodes that are up and whose first job in line could run."""
        self._changed_nodes: set[str] = set()

    # From one State to the next --------------------------------------------------------------------------------------

    def advance(self, state: State, events: Iterable[e.Event]) -> None:
        """Become the index of `state`, which is what `events` made of the present one."""
        former, self.state = self.state, state
        for event in events:
            if type(event) not in EVENTS_OF_THEIR_OWN:
                # What it does to other jobs, such as being passed, is not kept here but looked up.
                self._touched.add(event.job)  # type: ignore[union-attr]  # all others have one (test_agenda)
            elif isinstance(event, e.JobSubmitted):
                self._touched.update(e.jobs_of(event))
            elif isinstance(event, NODE_EVENTS):
                self._touched_nodes.add(event.node)
                if isinstance(event, e.NodeCameBack):
                    self._touched.update(event.jobs)
            elif isinstance(event, e.ReservationSet):
                self._touched |= self._jobs_of.get(event.reservation.name, set())
            elif isinstance(event, RESERVATION_EVENTS):
                self._touched |= self._jobs_of.get(event.reservation, set())
            elif isinstance(event, EVENTS_ABOUT_ALL):
                self._touched_nodes.update(state.nodes)
                self._touched.update(state.unfinished)
                self._changed_arrays.update(self._lines)
            elif isinstance(event, e.JobUpdated):
                self._touched.add(event.job)
                self._changed.add(event.job)
                if event.change.name is not None:
                    self._touched |= self._waiters.renamed(former, state, event.job)
            elif isinstance(event, POOL_EVENTS):
                pool = event.pool.name if isinstance(event, e.PoolSet) else event.pool
                self._touched |= self._between(pool, *sorted((usable_in(former, pool), usable_in(state, pool))))

    def _between(self, pool: str, low: int, high: int) -> set[int]:
        """Return who waits for more than `low` and at most `high` bytes of a pool."""
        if low == high:
            return set()
        names = [queue for queue in self.queues if queue[:2] in (("space", pool), ("large", pool))]
        found = {key[1] for queue in names for key in self.queues[queue] if low < key[2] <= high}
        # Tasks that their arrays keep back stand in no queue.
        return found | {key[1] for line in self._lines.values() for key in line if low < key[2] <= high}

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
        if self._changed_arrays:
            self._index_arrays()
        self.nodes.follow(self.state.partitions)
        if self._changed_nodes:
            self._index_nodes()
        return True

    def catch_up(self) -> None:
        """Make the index true for every job that was touched, however many there are."""
        while not self.prepare(len(self._touched)):
            pass

    def _index(self, job_id: int) -> set[int]:
        """Make the index true for one job; return those who wait for something that has changed about it."""
        state = self.state
        before = self._parts.get(job_id)
        job = state.jobs.get(job_id)
        if job is not None and job_id in state.unfinished:
            after = part_of(state, job, state.buffers.get(job_id), self._queue_names)
            if job_id in self._changed:
                self._forget(job_id)
            if before is None or job_id in self._changed:
                for other in self._waiters.depend(state, job):
                    self.purgeable.discard(other)
                self._note_reservation(job_id, True)
            self._parts[job_id] = after
            milestone = after.milestone
        else:
            after = None
            if before is not None:
                del self._parts[job_id]
                self._forget(job_id)
            milestone = Milestone.GONE if job is None else Milestone.FINISHED
            # It may have come and gone since the last look, or be here already.
            self.purgeable.discard(job_id)
            if job is not None and not self._waiters.is_awaited(job_id):
                self.purgeable.add(job_id)
        self._changed.discard(job_id)
        self._replace(job_id, before, after)
        reached = 0 if before is None else before.milestone
        follows = self._waiters.wait_for_name(state, job_id, job if after is not None else None)
        return follows | self._waiters.reached(job_id, reached, milestone)

    def _forget(self, job_id: int) -> None:
        """Forget whom the job depends on, and which reservation it is of."""
        for other in self._waiters.depend_no_longer(job_id):
            if other in self.state.finished:
                self.purgeable.discard(other)
                self.purgeable.add(other)
        self._note_reservation(job_id, False)

    def _note_reservation(self, job_id: int, enters: bool) -> None:
        if not enters:
            name = self._reservation_of.pop(job_id, "")
        else:
            options = self.state.jobs[job_id].request.options
            name = "" if options is None else options.reservation
            if name:
                self._reservation_of[job_id] = name
        if name:
            keep_in_set(self._jobs_of, name, job_id, enters)

    def _replace(self, job_id: int, before: Part | None, after: Part | None) -> None:
        """Take out of the index what the job had put into it, and put in what it is now."""
        if before == after:
            return
        for part, enters in ((before, False), (after, True)):
            if part is None:
                continue
            sign = 1 if enters else -1
            if part.queue is not None and part.key is not None:
                self._space_parts += sign * (part.queue[0] in ("space", "large", "named"))
                if part.more is not None and part.more.array:
                    keep(self._lines, part.more.array, part.key, enters)
                    self._changed_arrays.add(part.more.array)
                else:
                    self._queue(part.queue, part.key, enters)
            if part.more is not None:
                self._replace_more(part.more, sign)
            if part.due_at != NEVER:
                (self.timers.add if enters else self.timers.discard)((part.due_at, job_id))
            if part.hold is not None:
                keep(self.holds, part.pool, part.hold, enters)
            if part.node:
                keep_in_set(self._jobs_on, part.node, job_id, enters)
                self._cpus_taken[part.node] = self._cpus_taken.get(part.node, 0) + sign * part.cpus
                self._changed_nodes.add(part.node)

    def _replace_more(self, more: More, sign: int) -> None:
        if more.active_of:
            use = self._array_use.setdefault(more.active_of, ArrayUse())
            use.active += sign
            use.ahead += sign * more.ahead
            self._changed_arrays.add(more.active_of)
        if more.victim is not None:
            keep(self.victims, more.victim_in, more.victim, sign > 0)
        if more.turn is not None:
            waiting = self.queued.setdefault(more.turn_of, {})
            keep(waiting, more.turn_user, more.turn, sign > 0)
            if not waiting:
                del self.queued[more.turn_of]

    def _queue(self, queue: Queue, key: Key, enters: bool) -> None:
        group, keys = queue[:2], self.queues.get(queue)
        before = None if keys is None else keys.first
        keep(self.queues, queue, key, enters)
        keys = self.queues.get(queue)
        after = None if keys is None else keys.first
        if before != after:
            if before is not None:
                keep(self.fronts, group, (before, queue), False)
            if after is not None:
                keep(self.fronts, group, (after, queue), True)
        if queue[0] == "node":
            self._changed_nodes.add(queue[1])
        elif queue[0] == "space":
            self._count_size(queue[1], key[2], 1 if enters else -1)
        if queue not in self.queues:
            self._queue_names.pop(queue, None)

    def _index_arrays(self) -> None:
        """Have in the queues, of each array that has changed, its first tasks: as many as have room in it."""
        for array in self._changed_arrays:
            line = self._lines.get(array)
            shown: dict[Key, Queue] = {}
            if line is not None:
                job = self.state.jobs[line.first[1]]
                room = self.array_use(array).room(job.request, self.state.site.array_stage_count)
                for key in islice(line, room):
                    queue = self._parts[key[1]].queue
                    assert queue is not None
                    shown[key] = queue
            former = self._shown.get(array, {})
            for key, queue in former.items():
                if shown.get(key) != queue:
                    self._queue(queue, key, False)
            for key, queue in shown.items():
                if former.get(key) != queue:
                    self._queue(self._queue_names.setdefault(queue, queue), key, True)
            if shown:
                self._shown[array] = shown
            else:
                self._shown.pop(array, None)
            use = self._array_use.get(array)
            if use is not None and not use.active:
                del self._array_use[array]
        self._changed_arrays = set()

    def array_use(self, array: int) -> ArrayUse:
        """Return how many tasks of an array are active."""
        return self._array_use.get(array) or ArrayUse()

    def _count_size(self, pool: str, size_bytes: int, sign: int) -> None:
        count = self._size_counts.get((pool, size_bytes), 0)
        if not count or not count + sign:
            keep(self.sizes, pool, size_bytes, sign > 0)
        self._size_counts[pool, size_bytes] = count + sign
        if not count + sign:
            del self._size_counts[pool, size_bytes]

    def _index_nodes(self) -> None:
        for name in self._changed_nodes:
            node = self.state.nodes.get(name)
            up = node is not None and not node.down and not node.drained
            self.nodes.put(
                name,
                (node.cpus, node.cpus - self._cpus_taken.get(name, 0), len(self._jobs_on.get(name, ())))
                if up and node is not None
                else None,
            )
            front = self.fronts.get(("node", name))
            # One of this standing may be kept back by a limit: then those behind it have their turn.
            standing = front.first[1][3] if front else None
            limited = standing is not None and standing.limits_runs
            if up and front and (front.first[0][2] <= self.nodes.up[name][1] or limited):
                self.ready.add(name)
            else:
                self.ready.discard(name)
        self._changed_nodes = set()

    # What it is asked ------------------------------------------------------------------------------------------------

    def due_at(self, job_id: int) -> Instant:
        """Return when something is due for a job that is not over, by time alone; NEVER for nothing."""
        return Instant(self._parts[job_id].due_at)

    def gate_verdict(self, job_id: int) -> Verdict | None:
        """Return what is said of a job that is not over, without a pass; None for a candidate for space or CPUs."""
        state = self.state
        job, buffer = state.jobs[job_id], state.buffers.get(job_id)
        if job.state is not JobState.PENDING:
            return later_reason(job, buffer, state.site.provider)
        verdict = early_gate(state, job) or self._array_verdict(job_id)
        if verdict is not None or waits_for_space(job, buffer):
            return verdict
        return buffer_gate(buffer, job)

    def _array_verdict(self, job_id: int) -> Verdict | None:
        part = self._parts[job_id]
        if part.more is None or not part.more.array or part.key is None:
            return None
        array, job = part.more.array, self.state.jobs[job_id]
        before = self._lines[array].rank(part.key)
        return self.array_use(array).verdict(job.request, self.state.site.array_stage_count, before)

    def next_due(self, after: Instant) -> Instant | None:
        """Return the earliest instant after `after` at which a pass could do something by time alone, or None."""
        self.catch_up()
        first = self.timers.first_after((after + 1, 0))
        due = [] if first is None else [first[0]]
        due.extend(instant for instant in reservation_instants(self.state) if instant > after)
        if self._space_parts:
            due.append(after + seconds(REPLAN_S))
        return Instant(min(due)) if due else None

    def contents(self) -> dict[str, object]:
        """Return the whole index in a form that can be compared: for the tests' laws."""
        self.catch_up()
        return (
            self._waiters.contents()
            | self.nodes.contents()
            | {
                "parts": dict(self._parts),
                "queues": {queue: list(keys) for queue, keys in self.queues.items()},
                "fronts": {group: list(fronts) for group, fronts in self.fronts.items()},
                "jobs_of": dict(self._jobs_of),
                "victims": {pool: list(victims) for pool, victims in self.victims.items()},
                "sizes": {pool: list(sizes) for pool, sizes in self.sizes.items()},
                "size_counts": dict(self._size_counts),
                "timers": list(self.timers),
                "holds": {pool: list(keys) for pool, keys in self.holds.items()},
                "queued": {
                    (stage, user): list(places)
                    for stage, lines in self.queued.items()
                    for user, places in lines.items()
                },
                "lines": {array: list(keys) for array, keys in self._lines.items()},
                "shown": dict(self._shown),
                "array_use": {array: (use.active, use.ahead) for array, use in self._array_use.items()},
                "space_parts": self._space_parts,
                "jobs_on": dict(self._jobs_on),
                "cpus_taken": {node: cpus for node, cpus in self._cpus_taken.items() if cpus},
                "purgeable": list(self.purgeable),
                "ready": set(self.ready),
            }
        )


# ---- which events an agenda looks at how: by job, as nearly all of a busy cluster are, or each in its own way


NODE_EVENTS = (e.NodeRegistered, e.NodeDrained, e.NodeResumed, e.NodeWentDown, e.NodeCameBack)
RESERVATION_EVENTS = (e.ReservationSet, e.ReservationDeleted, e.ReservationStarted, e.ReservationEnded)
EVENTS_ABOUT_ALL = (
    e.ClusterFounded,
    e.PolicySet,
    e.SiteConfigured,
    e.AccountSet,
    e.AccountDeleted,
    e.QosSet,
    e.QosDeleted,
    e.SchedulingRulesSet,
    e.PartitionSet,
    e.PartitionDeleted,
    e.TransferRulesSet,
    e.FeatureLevelRaised,
)
POOL_EVENTS = (e.PoolSet, e.PoolRemoved)
EVENTS_ABOUT_NONE = (
    e.PoolUnitSet,
    e.MailSent,
    e.MailDropped,
    e.LicenseSet,
    e.LicenseDeleted,
    e.UsageReset,
)
"""Events that are not about one job: about a node, a pool, every job, or about nothing that is kept here."""

EVENTS_OF_THEIR_OWN = frozenset(
    (
        *NODE_EVENTS,
        *RESERVATION_EVENTS,
        *POOL_EVENTS,
        *EVENTS_ABOUT_ALL,
        *EVENTS_ABOUT_NONE,
        e.JobSubmitted,
        e.JobUpdated,
    )
)
"""All events that are not simply about one job, which nearly every event of a busy cluster is: found at one look."""
