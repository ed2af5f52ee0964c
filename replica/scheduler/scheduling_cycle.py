"""Scheduling cycle: allocate space and CPUs to the candidates of a scheduling index.

The queues are merged by (-priority, job ID), and a queue is left as soon as no later candidate in it can get anything.
The cycle applies its allocations of nodes to the index temporarily, and undoes them at its end.

A job with new space is staged on the node with the fewest jobs (`node_index`), or by a mover if its pool is in a shared
filesystem (`operations.movers`). `persistent` chooses for jobs with persistent buffers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum, auto
from heapq import heapify, heappop, heappush, heapreplace, merge
from itertools import takewhile

from forebay.replica.messages import events as e
from forebay.replica.model import QUEUED_STAGES, Job, NodeSetWaiters, SchedulingClass, Stage, free_bytes, node_set_name
from forebay.replica.operations import (
    OperationSlots,
    assign_slots,
    choose_mover,
    due_events,
    filesystem_of_pool,
    give_up_events,
    grant_slots,
    reservations_due,
)
from forebay.replica.scheduler.admission import (
    QueuePosition,
    SpaceDecision,
    SpaceRequest,
    available_bytes,
    nodes_of,
    note_decision,
    place_verdict,
    queue_position_of,
    release_time,
    releases_of_cycle,
    run_verdict,
    space_decision,
    space_request_of,
    space_verdict,
)
from forebay.replica.scheduler.backfill import (
    DRAINING,
    UNKNOWN_END,
    ReservationHead,
    drain_us,
    expected_start,
    release_at,
)
from forebay.replica.scheduler.external_jobs import (
    choose_lingering,
    count_overtaking,
    counts_for,
    explain_setup_failures,
    grant_external_jobs,
    needed_by_reason,
    space_event,
    space_for_setup,
    waiting_verdict,
)
from forebay.replica.scheduler.gates import current_verdict, reservation_of, waits_for_space
from forebay.replica.scheduler.index import SchedulingIndex
from forebay.replica.scheduler.index_row import Group, Key, Queue
from forebay.replica.scheduler.node_index import NodeUse
from forebay.replica.scheduler.persistent import persistent_decision, persistent_request, serve_persistent
from forebay.replica.scheduler.preemption import choose_preempted, preemption_events
from forebay.replica.scheduler.quotas import QuotaCheck
from forebay.replica.values import CANDIDATES_BEHIND_MAX, EVENTS_PER_CYCLE_MAX, NEVER, Instant, Verdict


class _Follows(Enum):
    """Candidates that the cycle checks after a candidate."""

    NEXT = auto()
    NOT_THIS_QUEUE = auto()
    """No later candidate in the same queue can get anything."""
    NONE = auto()
    """No later candidate in the same group of queues can get anything."""


def run_cycle(index: SchedulingIndex, at: Instant) -> tuple[e.Event, ...]:
    """Return the events of a scheduling cycle over the index's State at `at`."""
    index.catch_up()
    return tuple(SchedulingCycle(index, at).run())


def verdicts_of(index: SchedulingIndex, job_ids: Iterable[int], at: Instant) -> dict[int, Verdict]:
    """Return the verdicts on unfinished jobs at `at`, at the cost of one cycle."""
    index.catch_up()
    found: dict[int, Verdict] = {}
    asked: list[int] = []
    if reservations_due(index.state, at):
        # Such a cycle does nothing else.
        jobs, buffers = index.state.jobs, index.state.buffers
        return {job_id: current_verdict(index.state, jobs[job_id], buffers.get(job_id)) for job_id in job_ids}
    for job_id in job_ids:
        due = index.due_at(job_id)
        verdict = None if due != NEVER and due <= at else index.gate_verdict(job_id)
        if verdict is None:
            asked.append(job_id)
        else:
            found[job_id] = verdict
    if asked:
        explaining = SchedulingCycle(index, at)
        explaining.run(asked)
        found |= explaining.verdicts
    return found


def space_for_setups(index: SchedulingIndex, pools: Iterable[str], at: Instant) -> dict[str, int]:
    """Return, for each pool, the most that another setup of an external job would get at `at`, units of the pool."""
    index.catch_up()
    looking = SchedulingCycle(index, at)
    return {pool: looking.space_for_setup(pool) for pool in pools}


class SchedulingCycle:
    """A scheduling cycle over a prepared index, which it leaves unchanged."""

    def __init__(self, index: SchedulingIndex, at: Instant) -> None:
        self.index = index
        self.state = index.state
        self.at = at
        self.events: list[e.Event] = []
        self._nodes_before: dict[str, NodeUse] = {}
        """Node that the cycle has changed -> its use before the cycle."""
        self.done: set[int] = set()
        """Jobs that this cycle has changed and that are no candidates until the next cycle."""
        self.slots = OperationSlots(index.state.operations)
        self.held: dict[str, int] = {}
        """Pool -> bytes that this cycle has allocated."""
        self.reservation_heads: dict[str, ReservationHead] = {}
        self.waiting_nodes: dict[str, int] = {}
        self.any_node = NodeSetWaiters(index.state.partitions)
        self.quotas = QuotaCheck(index.state, at)
        self.skipped: dict[tuple[str, int, SchedulingClass | None], int] = {}
        self._to_open: set[str] = set()
        """Nodes whose first candidate may have changed."""
        self._closed: set[Queue] = set()
        """Queues in which no later candidate can get anything."""
        self._free_later: dict[tuple[str, int], int] = {}
        """(pool, time) -> bytes that the current holders release until then."""
        self.asked: list[tuple[QueuePosition, int]] = []
        """Candidates whose verdicts are requested, the next one last."""
        self.verdicts: dict[int, Verdict] = {}
        self.persistent_checked = 0
        self._external_jobs: dict[int, str] = {}
        """Position in `events` of a space allocation to an external job -> pool."""

    def run(self, asked: Iterable[int] = ()) -> list[e.Event]:
        """Return the events of the cycle; afterwards, `verdicts` has those on the jobs in `asked`."""
        try:
            return self._run(asked)
        finally:
            # Undo the allocations of nodes: the index gets them with the events.
            for name, before in self._nodes_before.items():
                self.index.nodes.put(name, before)

    def _run(self, asked: Iterable[int]) -> list[e.Event]:
        begin_or_end = reservations_due(self.state, self.at)
        if begin_or_end:
            return list(begin_or_end)
        jobs = self.state.jobs
        asked = set(asked)
        external_jobs = [job_id for job_id in asked if jobs[job_id].external_job is not None]
        asked.difference_update(external_jobs)
        self.asked = sorted(((queue_position_of(self.state, jobs[job_id]), job_id) for job_id in asked), reverse=True)
        nodes = self._perform_due()
        self._give_slots()
        self._serve_external_jobs()
        for job_id in external_jobs:
            waits = job_id not in self.done
            self.verdicts[job_id] = waiting_verdict(self, job_id) if waits else self._current_verdict(job_id)
        streams: list[tuple[Key, Queue, Iterator[tuple[Key, Queue]]]] = []
        opened: set[Group] = set()
        for group in self._open_groups(nodes):
            opened.add(group)
            iterator = self._merge_queues(group)
            first = next(iterator, None)
            if first is not None:
                streams.append((*first, iterator))
        # No two keys are equal, so the other elements of the tuples are never compared.
        heapify(streams)
        while streams and (self.asked or not self.is_full):
            key, queue, iterator = streams[0]
            follows = _Follows.NEXT
            self._explain(key[:2])
            if key[1] not in self.done:
                if queue[0] == "space":
                    follows = self._reserve(key, queue)
                elif queue[0] == "persistent":
                    follows = self._reserve_persistent(key[1])
                elif queue[0] == "node":
                    follows = self._run_on_data_node(key, queue)
                else:
                    follows = self._run_anywhere(key, queue)
            if follows is _Follows.NOT_THIS_QUEUE:
                self._closed.add(queue)
            following = None if follows is _Follows.NONE else next(iterator, None)
            if following is None:
                heappop(streams)
            else:
                heapreplace(streams, (*following, iterator))
            while self._to_open:
                group = "node", self._to_open.pop()
                if group not in opened and group[1] in self.index.nodes.up and group in self.index.queues.heads:
                    opened.add(group)
                    iterator = self._merge_queues(group)
                    heappush(streams, (*next(iterator), iterator))
        self._explain(None)
        count_overtaking(self, self.events, self._external_jobs)
        self._purge()
        return self.events

    def _explain(self, reached: QueuePosition | None) -> None:
        """Store the verdicts on requested candidates up to the position `reached`, or on all if it is None.

        Candidates that the cycle skips would change nothing, so a scan of all jobs would give the same verdicts.
        """
        while self.asked and (reached is None or self.asked[-1][0] <= reached):
            _, job_id = self.asked.pop()
            job, buffer = self.state.jobs[job_id], self.state.buffers.get(job_id)
            if job_id in self.done:
                self.verdicts[job_id] = self._current_verdict(job_id)
                continue
            verdict = self.index.gate_verdict(job_id)
            if verdict is None:
                asked = persistent_request(job)
                waits = buffer is not None and waits_for_space(job, buffer)
                if asked is not None and waits and buffer is not None:
                    self.verdicts[job_id] = persistent_decision(self, job, buffer, asked).verdict
                    continue
                verdict = space_verdict(self, job, buffer) if waits and buffer else place_verdict(self, job, buffer)
            self.verdicts[job_id] = verdict

    def _current_verdict(self, job_id: int) -> Verdict:
        return current_verdict(self.state, self.state.jobs[job_id], self.state.buffers.get(job_id))

    def _perform_due(self) -> set[str]:
        """Perform the timed actions that are due; return the nodes whose queues may have changed."""
        state, nodes = self.state, set()
        for instant, job_id in self.index.timers.timers:
            if instant > self.at or self.is_full:
                break
            job = state.jobs[job_id]
            events = explain_setup_failures(self, due_events(state, job, state.buffers.get(job_id), self.at))
            self.events.extend(assign_slots(state, self.slots, events))
            self.done.add(job_id)
            nodes.add(job.node)
        return nodes

    def _give_slots(self) -> None:
        for stage in QUEUED_STAGES:
            waiting = self.index.waiting_for_slot(stage)
            if waiting:
                room = EVENTS_PER_CYCLE_MAX - len(self.events)
                given = grant_slots(self.state, self.slots, stage, waiting, lambda job: job not in self.done, room)
                self.events.extend(given)

    def _open_groups(self, changed: set[str]) -> Iterator[Group]:
        heads, up = self.index.queues.heads, self.index.nodes.up
        for group in heads:
            if group[0] not in ("node", "large"):
                yield group
        for name in self.index.nodes.ready | changed:
            if name in up and ("node", name) in heads:
                yield "node", name

    def _merge_queues(self, group: Group) -> Iterator[tuple[Key, Queue]]:
        """Yield the candidates of a group of queues in order.

        A queue is opened when its first candidate is reached, and left when it is closed. The cost therefore depends on
        the candidates that are checked, not on the number of queues.
        """
        queues = self.index.queues.queues
        heads = iter(self.index.queues.heads[group])
        head = next(heads, None)
        opened: list[tuple[Key, Queue, Iterator[Key]]] = []
        while True:
            while head is not None and (not opened or head[0] < opened[0][0]):
                first, queue = head
                if queue[2] <= self._cpus_max_of(queue):
                    iterator = iter(queues[queue])
                    heappush(opened, (next(iterator), queue, iterator))
                head = next(heads, None)
            if not opened:
                return
            first, queue, iterator = opened[0]
            yield first, queue
            following = None if queue in self._closed else next(iterator, None)
            if following is None:
                heappop(opened)
            else:
                heapreplace(opened, (following, queue, iterator))

    # CycleState ------------------------------------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        return len(self.events) >= EVENTS_PER_CYCLE_MAX

    def free_in(self, pool: str) -> int:
        known = self.state.pools.get(pool)
        held = self.state.held_bytes.get(pool, 0) + self.held.get(pool, 0)
        return 0 if known is None else free_bytes(known, held)

    def node_use(self, node: str) -> tuple[int, int] | None:
        use = self.index.nodes.up.get(node)
        return None if use is None else use[:2]

    def waits_for_node(self, node: str, position: QueuePosition) -> int:
        waiting = self.waiting_nodes.get(node, 0)
        if waiting or node in self.index.nodes.ready:
            return waiting
        # The node's first candidate could not run when the cycle began, so its queue was not opened.
        head = self.index.queues.heads.get(("node", node))
        first = None if head is None else head.first[0]
        if first is None or first[:2] >= position or first[1] in self.done:
            return 0
        return int(first[1])

    def cpus_max_in(self, partition: str) -> int:
        return self.index.nodes.of(partition).cpus_max

    def _cpus_max_of(self, queue: Queue) -> int:
        """Return the CPUs of the largest node on which candidates of a queue may run."""
        partition = "" if queue[3] is None else queue[3].partition
        return self.cpus_max_in(node_set_name(self.state.partitions, partition)) if queue[2] else 0

    def has_node_for(self, cpus: int, position: QueuePosition, partition: str) -> bool:
        return self._node_for(cpus, position, partition) is not None

    def _node_for(self, cpus: int, position: QueuePosition, partition: str) -> str | None:
        for free, name in self.index.nodes.of(partition).by_free:
            if -free < cpus:
                break
            if not self.waits_for_node(name, position) and not self.any_node.first_for(name):
                return str(name)
        return None

    def free_cpus(self) -> Iterable[tuple[str, int]]:
        up = self.index.nodes.up
        return ((name, up[name][1]) for name in sorted(up))

    # Space -----------------------------------------------------------------------------------------------------------

    def _reserve(self, key: Key, queue: Queue) -> _Follows:
        """Allocate space to a candidate if it may have it; return the candidates to check next."""
        _, pool, cpus, scheduling_class = queue
        size_bytes, job_id = key[2], key[1]
        job = self.state.jobs[job_id]
        request = SpaceRequest(job, pool, size_bytes, scheduling_class)
        # Jobs of a reservation come first and have their own space, so a full pool closes only their own queue.
        over = _Follows.NOT_THIS_QUEUE if request.reservation else _Follows.NONE
        smallest = self.index.queues.sizes[pool].first
        if pool in self.reservation_heads and available_bytes(self, request) < smallest:
            return over
        if run_verdict(self, scheduling_class, cpus) is not None:
            return _Follows.NOT_THIS_QUEUE
        decision = space_decision(self, request)
        if decision is SpaceDecision.STAGES_FULL:
            return _Follows.NONE
        if decision is SpaceDecision.NO_MOVER:
            return _Follows.NONE
        if decision is SpaceDecision.TOO_FAR_BEHIND:
            return over
        if decision is SpaceDecision.SKIPPED:
            return _Follows.NOT_THIS_QUEUE
        head = note_decision(self, request, decision)
        if decision is SpaceDecision.NOT_ENOUGH and self.reservation_heads[pool].job == job_id:
            self._preempt_for(request)
        if decision is SpaceDecision.GIVEN:
            counted = head is not None and head.backfill(size_bytes, release_time(self, request), self.at)
            node, filesystem = "", filesystem_of_pool(self.state, pool)
            if filesystem is None:
                node = self.fewest_jobs(job.request.cpus, nodes_of(self.state, job_id))
                cpus, cpus_free, jobs = self.index.nodes.up[node]
                self._give(node, (cpus, cpus_free, jobs + 1))
            mover = "" if filesystem is None else choose_mover(self.state, filesystem, self.slots.begun)
            self.held[pool] = self.held.get(pool, 0) + size_bytes
            allocated = e.BufferAllocated(job_id, node, job.attempt + 1, mover=mover)
            if head is not None:
                allocated = e.BufferAllocated(
                    job_id, node, job.attempt + 1, head.job, counted, head.start_at, mover=mover
                )
            self.events.extend(assign_slots(self.state, self.slots, (allocated,)))
        return _Follows.NEXT

    def _serve_external_jobs(self) -> None:
        """Allocate space to external jobs, which are in no queue."""
        index, state = self.index, self.state
        for pool in sorted(index.external_jobs.keys):
            room = EVENTS_PER_CYCLE_MAX - len(self.events)
            served = grant_external_jobs(self, pool, self._external_jobs_of(pool), self._jobs_at_pass_limit(pool), room)
            for job_id in served.given:
                self._external_jobs[len(self.events)] = pool
                self.events.append(space_event(state, job_id))
                self.held[pool] = self.held.get(pool, 0) + state.buffers[job_id].granted_bytes
            if served.first:
                self._give_up_lingering(space_request_of(state, state.jobs[served.first], state.buffers[served.first]))

    def space_for_setup(self, pool: str) -> int:
        """Return the most that another setup would get of a pool; to be called on a cycle that has not run."""
        lingering = (job_id for _, job_id in self.index.lingering.keys.get(pool, ()))
        return space_for_setup(self, pool, self._external_jobs_of(pool), self._jobs_at_pass_limit(pool), lingering)

    def _external_jobs_of(self, pool: str) -> Iterator[int]:
        return (job_id for job_id in self.index.external_jobs.keys.get(pool, ()) if job_id not in self.done)

    def _jobs_at_pass_limit(self, pool: str) -> Iterator[int]:
        """Yield the native jobs that wait for space of a pool and have been passed as often as allowed."""
        pass_limit_reached = self.index.pass_limit_reached.keys.get(pool, ())
        return (job_id for job_id in pass_limit_reached if self.index.arrays.verdict(self.state, job_id) is None)

    def _coming_bytes(self, request: SpaceRequest) -> int:
        """Return the bytes being released already that come soon enough for a request."""
        draining = takewhile(lambda hold: hold[0] == DRAINING, self.index.holders.keys.get(request.pool, ()))
        buffers = self.state.buffers
        return sum(size_bytes for _, size_bytes, job_id in draining if counts_for(request, buffers[job_id]))

    def _give_up_lingering(self, request: SpaceRequest) -> bool:
        """Remove lingering data for a request that does not fit; return whether this freed enough space."""
        lingering = self.index.lingering.keys.get(request.pool)
        if lingering is None:
            return False
        kept = (job_id for _, job_id in lingering if job_id not in self.done)
        room, coming = EVENTS_PER_CYCLE_MAX - len(self.events), self._coming_bytes(request)
        gives_way = choose_lingering(self, request, kept, coming, room)
        for job_id in gives_way:
            events = give_up_events(self.state.jobs[job_id], needed_by_reason(request.job))
            self.events.extend(assign_slots(self.state, self.slots, events))
            self.done.add(job_id)
        return bool(gives_way)

    def _preempt_for(self, request: SpaceRequest) -> None:
        """Preempt buffers for the reservation head if its space can be freed that way."""
        state, room = self.state, EVENTS_PER_CYCLE_MAX - len(self.events)
        candidates = self.index.preemptible.keys.get(request.pool)
        if self._give_up_lingering(request) or candidates is None:
            return
        coming = self._coming_bytes(request)
        for job_id in choose_preempted(self, request, candidates, coming, room, self.done):
            self.events.extend(assign_slots(state, self.slots, preemption_events(state, job_id, request.job.id)))
            self.done.add(job_id)
            # The preempted job may have been the first candidate for CPUs of its node.
            self._to_open.add(state.jobs[job_id].node)

    def _reserve_persistent(self, job_id: int) -> _Follows:
        """Allocate space as `_reserve` does, to a job that creates, destroys or uses persistent buffers."""
        job, buffer = self.state.jobs[job_id], self.state.buffers[job_id]
        asked = persistent_request(job)
        assert asked is not None
        decision = serve_persistent(self, job, buffer, asked)
        if decision.node:
            cpus, cpus_free, jobs = self.index.nodes.up[decision.node]
            self._give(decision.node, (cpus, cpus_free, jobs + 1))
        return _Follows.NEXT if self.persistent_checked < CANDIDATES_BEHIND_MAX else _Follows.NONE

    def fewest_jobs(self, cpus: int, partition: str) -> str:
        return self.index.nodes.of(partition).fewest_jobs(cpus)

    def _give(self, node: str, after: NodeUse) -> None:
        self._nodes_before.setdefault(node, self.index.nodes.up[node])
        self.index.nodes.put(node, after)

    def head_of(self, job: Job, pool: str, size_bytes: int, free: int) -> ReservationHead:
        """Return the job as reservation head of a pool, with its estimated start."""
        new = releases_of_cycle(self, self.events, pool)
        ends = self.quotas.reserved_releases(pool, reservation_of(self.state, job.id))
        return ReservationHead(
            job, lambda: expected_start(merge(self._expected_releases(pool), new, ends), free, size_bytes)
        )

    def free_at(self, pool: str, instant: Instant) -> int:
        later = self._free_later.get((pool, instant))
        if later is None:
            by_then = takewhile(lambda release: release[0] <= instant, self._expected_releases(pool))
            later = self._free_later[pool, instant] = sum(size_bytes for _, size_bytes in by_then)
        new = releases_of_cycle(self, self.events, pool)
        return self.free_in(pool) + later + sum(size_bytes for end_at, size_bytes in new if end_at <= instant)

    def _expected_releases(self, pool: str) -> Iterator[tuple[int, int]]:
        """Yield (expected release time, bytes) of the holders of a pool, in ascending order."""
        drains_us = drain_us(self.state, pool)
        overdue: list[int] | None = []
        for until, size_bytes, _ in self.index.holders.keys.get(pool, ()):
            if until == UNKNOWN_END:
                break
            if overdue is not None:
                if until <= self.at:
                    overdue.append(size_bytes)
                    continue
                yield from ((release_at(0, self.at, drains_us), size) for size in sorted(overdue))
                overdue = None
            yield release_at(until, self.at, drains_us), size_bytes
        if overdue is not None:
            yield from ((release_at(0, self.at, drains_us), size) for size in sorted(overdue))

    # CPUs ------------------------------------------------------------------------------------------------------------

    def _run_on_data_node(self, key: Key, queue: Queue) -> _Follows:
        """Run a candidate on the node of its data if it may run; return the candidates to check next."""
        _, node, _, scheduling_class = queue
        if self.any_node.first_for(node):
            return _Follows.NONE
        if run_verdict(self, scheduling_class, key[2]) is not None:
            # The queue stays open, because a node's queue has jobs with different numbers of CPUs.
            return _Follows.NEXT
        use = self.index.nodes.up[node]
        if use[0] < key[2]:
            return _Follows.NEXT
        pre_runs = self.slots.get(Stage.RUN, 0)
        if use[1] < key[2] or pre_runs >= self.state.site.operations_per_stage_max:
            self.waiting_nodes[node] = key[1]
            return _Follows.NONE
        if not self.is_full:
            self._order_run(key, node, scheduling_class)
            self.slots[Stage.RUN] = pre_runs + 1
        return _Follows.NEXT

    def _run_anywhere(self, key: Key, queue: Queue) -> _Follows:
        partition = queue[1]
        if self.any_node.first_in(partition):
            return _Follows.NONE
        if run_verdict(self, queue[3], key[2]) is not None:
            return _Follows.NOT_THIS_QUEUE
        node = self._node_for(key[2], key[:2], partition)
        pre_runs = self.slots.get(Stage.RUN, 0)
        has_pre_run = key[1] in self.state.buffers
        if node is None or (has_pre_run and pre_runs >= self.state.site.operations_per_stage_max):
            self.any_node.wait(partition, key[1])
            return _Follows.NONE
        if not self.is_full:
            self._order_run(key, node, queue[3])
            if has_pre_run:
                self.slots[Stage.RUN] = pre_runs + 1
        return _Follows.NEXT

    def _order_run(self, key: Key, node: str, scheduling_class: SchedulingClass | None) -> None:
        cpus, free, jobs = self.index.nodes.up[node]
        self._give(node, (cpus, free - key[2], jobs))
        self.quotas.give_run(scheduling_class, key[2])
        job = self.state.jobs[key[1]]
        self.events.append(e.RunOrdered(job.id, node, job.attempt + 1))

    # -----------------------------------------------------------------------------------------------------------------

    def _purge(self) -> None:
        room = EVENTS_PER_CYCLE_MAX - len(self.events)
        surplus = min(room, len(self.state.finished) - self.state.site.finished_jobs_kept)
        if surplus <= 0:
            return
        for _, job_id in zip(range(surplus), self.index.dependencies.purgeable, strict=False):
            self.events.append(e.JobPurged(job_id))
