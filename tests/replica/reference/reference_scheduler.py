"""The scheduling pass: who may have space and CPUs now, and what is due by time alone.

One function, `plan`, both decides (its events) and explains (its verdicts), over a State and an instant. Candidates go
by priority, then by number. Per pool, the first request that does not fit reserves: smaller ones may pass it if they
will have given back before its expected start, if they fit beside it even then, or a configured number of times
(SPUR.md, 3). Per node, a staged job that waits for CPUs keeps later ones off that node.

It walks over all jobs that are not over. The leader decides with an index, which gives the same events without that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from heapq import nsmallest

import msgspec

from forebay.replica.messages import events as e
from forebay.replica.model.arrays import ArrayUse, has_array_limits, waits_for_array
from forebay.replica.model.buffers import Buffer, BufferState
from forebay.replica.model.job_states import JobState
from forebay.replica.model.jobs import Job
from forebay.replica.model.partitions import NodeSetWaiters, is_node_in
from forebay.replica.model.pools import free_bytes
from forebay.replica.model.requests import BufferRequest
from forebay.replica.model.stages import QUEUED_STAGES, Stage, awaited_slot, occupied_slot, queue_position
from forebay.replica.model.usage import SchedulingClass, scheduling_class_of, takes_cpus
from forebay.replica.operations.external_jobs import give_up_events, is_lingering
from forebay.replica.operations.slots import OperationSlots, assign_slots, grant_slots
from forebay.replica.operations.timers import due_at, due_events, reservation_instants, reservations_due
from forebay.replica.scheduler import estimates
from forebay.replica.scheduler.admission import (
    KEEPS_CPUS,
    PlaceDecision,
    QueuePosition,
    SpaceDecision,
    SpaceRequest,
    nodes_of,
    note_decision,
    place_decision,
    place_verdict,
    queue_position_of,
    release_time,
    releases_of_cycle,
    space_decision,
    space_request_of,
    space_verdict,
    usable_bytes,
)
from forebay.replica.scheduler.backfill import (
    DRAINING,
    UNKNOWN_END,
    ReservationHead,
    drain_us,
    expected_start,
    release_at,
    run_until,
)
from forebay.replica.scheduler.estimates import JobsAhead
from forebay.replica.scheduler.external_jobs import (
    choose_lingering,
    count_overtaking,
    counts_for,
    explain_setup_failures,
    grant_external_jobs,
    needed_by_reason,
    space_event,
    waiting_verdict,
)
from forebay.replica.scheduler.gates import (
    REPLAN_S,
    buffer_gate,
    current_verdict,
    dependency_jobs,
    early_gate,
    external_job_verdict,
    later_reason,
    reservation_of,
    waits_for_space,
)
from forebay.replica.scheduler.persistent import persistent_request, serve_persistent
from forebay.replica.scheduler.preemption import choose_preempted, preemption_candidate, preemption_events
from forebay.replica.scheduler.quotas import QuotaCheck
from forebay.replica.state.state import State
from forebay.replica.values.limits import EVENTS_PER_CYCLE_MAX
from forebay.replica.values.units import NEVER, Instant, seconds
from forebay.replica.values.verdicts import Reason, Verdict


class Plan(msgspec.Struct, frozen=True):
    """What a pass would do at once, and what it says of every job that is not over."""

    events: tuple[e.Event, ...]
    verdicts: Mapping[int, Verdict]


def plan(state: State, at: Instant) -> Plan:
    """Return the pass over `state` at `at`. Pure: the same arguments give the same plan."""
    return _Pass(state, at, explain=True).run()


def run_cycle(state: State, at: Instant) -> tuple[e.Event, ...]:
    """Return the events of `plan` alone; figures that only people read are not computed."""
    return _Pass(state, at, explain=False).run().events


def next_due(state: State, after: Instant) -> Instant | None:
    """Return the earliest instant after `after` at which a pass could do something by time alone, or None."""
    due: list[int] = []
    for job_id in state.unfinished:
        job, buffer = state.jobs[job_id], state.buffers.get(job_id)
        due.append(due_at(state, job, buffer))
        if waits_for_space(job, buffer) and early_gate(state, job) is None:
            due.append(after + seconds(REPLAN_S))
    due.extend(reservation_instants(state))
    return Instant(min(later)) if (later := [instant for instant in due if instant > after]) else None


class _Pass:
    def __init__(self, state: State, at: Instant, *, explain: bool) -> None:
        self.state = state
        self.at = at
        self.explain = explain
        self.events: list[e.Event] = []
        self.verdicts: dict[int, Verdict] = {}
        self.held = dict(state.held_bytes)
        self.cpus_free = {name: node.cpus for name, node in state.nodes.items() if node.is_up and not node.filesystems}
        self._cpus_max: dict[str, int] = {}
        self.assigned = dict.fromkeys(self.cpus_free, 0)
        self.reservation_heads: dict[str, ReservationHead] = {}
        self.waiting_nodes: dict[str, int] = {}
        self.any_node = NodeSetWaiters(state.partitions)
        self.quotas = QuotaCheck(state, at)
        self.skipped: dict[tuple[str, int, SchedulingClass | None], int] = {}
        self.slots = OperationSlots()
        self.arrays: dict[int, ArrayUse] = {}
        self.array_tasks_before: dict[int, int] = {}
        """Array -> its waiting tasks that this pass has reached."""
        self.persistent_checked = 0
        self.external_jobs: dict[int, str] = {}
        self.taken: set[int] = set()
        """Jobs that something happened to before candidates were looked at, and external jobs that gave way."""

    def run(self) -> Plan:
        state = self.state
        begin_or_end = reservations_due(state, self.at)
        if begin_or_end:
            # Everything is checked again by the next pass, with them begun or ended.
            said = {
                job_id: current_verdict(state, state.jobs[job_id], state.buffers.get(job_id))
                for job_id in state.unfinished
            }
            return Plan(begin_or_end, said)
        due: list[tuple[int, int]] = []
        queued: dict[Stage, dict[str, list[tuple[Instant, int]]]] = {stage: {} for stage in QUEUED_STAGES}
        for job_id in sorted(state.unfinished):
            job, buffer = state.jobs[job_id], state.buffers.get(job_id)
            self._account(job, buffer)
            waits_for = awaited_slot(job, buffer)
            if waits_for is not None and buffer is not None:
                queued[waits_for].setdefault(job.request.user, []).append(queue_position(job, buffer))
            instant = due_at(state, job, buffer)
            if instant != NEVER and instant <= self.at:
                due.append((instant, job_id))
        for _, job_id in sorted(due):
            if self.is_full:
                break
            job, buffer = state.jobs[job_id], state.buffers.get(job_id)
            # The operation is ordered again or has failed in this very pass: what follows is for the next one.
            ended = explain_setup_failures(self, due_events(state, job, buffer, self.at))
            self.events.extend(assign_slots(state, self.slots, ended))
            self.verdicts[job_id] = current_verdict(state, job, buffer)
        for stage, waiting in queued.items():
            queues = {user: sorted(positions) for user, positions in waiting.items()}
            room = EVENTS_PER_CYCLE_MAX - len(self.events)
            self.events.extend(
                grant_slots(state, self.slots, stage, queues, lambda job: job not in self.verdicts, room)
            )
        self.taken |= set(self.verdicts)
        self._serve_external_jobs()
        candidates: list[Job] = []
        for job_id in state.unfinished:
            job = state.jobs[job_id]
            if job.external_job is not None:
                buffer = state.buffers[job_id]
                waits = buffer.state is BufferState.PENDING
                said = waiting_verdict(self, job_id) if waits else external_job_verdict(state, job, buffer)
                self.verdicts.setdefault(job_id, said)
            elif job.state is JobState.PENDING:
                candidates.append(job)
            elif job_id not in self.verdicts:
                self.verdicts[job_id] = later_reason(state, job, state.buffers.get(job_id))
        candidates.sort(key=lambda job: queue_position_of(state, job))
        for job in candidates:
            verdict = self._judge(job, state.buffers.get(job.id))
            if verdict is not None:
                self.verdicts[job.id] = verdict
        count_overtaking(self, self.events, self.external_jobs)
        self._purge()
        return Plan(tuple(self.events), self.verdicts)

    # External jobs ----------------------------------------------------------------------------------------------------

    def _serve_external_jobs(self) -> None:
        state = self.state
        mine = [
            (state.jobs[job_id], state.buffers[job_id])
            for job_id in sorted(state.unfinished)
            if job_id in state.buffers
        ]
        waiting: dict[str, list[int]] = {}
        for job, buffer in mine:
            if job.external_job is not None and buffer.state is BufferState.PENDING:
                waiting.setdefault(buffer.pool, []).append(job.id)
        for pool, jobs in sorted(waiting.items()):
            left = [job_id for job_id in jobs if job_id not in self.taken]
            pass_limit_reached = [
                job.id
                for job, buffer in mine
                if buffer.pool == pool
                and buffer.granted_bytes
                and waits_for_space(job, buffer)
                and job.passed >= state.site.max_passes
                and early_gate(state, job) is None
                and self._array_keeps_back(job, buffer) is None
            ]
            served = grant_external_jobs(self, pool, left, pass_limit_reached, EVENTS_PER_CYCLE_MAX - len(self.events))
            for job_id in served.given:
                self.external_jobs[len(self.events)] = pool
                self.events.append(space_event(state, job_id))
                self.held[pool] = self.held.get(pool, 0) + state.buffers[job_id].granted_bytes
            if served.first:
                request = space_request_of(state, state.jobs[served.first], state.buffers[served.first])
                self._give_up_lingering(request)

    def _array_keeps_back(self, job: Job, buffer: Buffer) -> Verdict | None:
        """Return the verdict of a job's array before any candidate was looked at."""
        array = job.request.array
        if array is None or not has_array_limits(job.request) or not waits_for_array(job, buffer):
            return None
        positions = [
            queue_position_of(self.state, other)
            for other in (self.state.jobs[task] for task in self.state.arrays[array.job].values())
            if other.id in self.state.unfinished
            and waits_for_array(other, self.state.buffers.get(other.id))
            and early_gate(self.state, other) is None
        ]
        before = sum(position < queue_position_of(self.state, job) for position in positions)
        return self.arrays[array.job].verdict(job.request, self.state.site.array_stage_count, before)

    def _give_up_lingering(self, request: SpaceRequest) -> bool:
        state = self.state
        holders = [(state.jobs[job_id], state.buffers[job_id]) for job_id in state.holders.get(request.pool, ())]
        lingering = sorted(
            (job.external_job.since, job.id)
            for job, buffer in holders
            if job.external_job is not None and is_lingering(job, buffer) and job.id not in self.taken
        )
        coming = sum(
            buffer.held_bytes
            for job, buffer in holders
            if run_until(job, buffer) == DRAINING and counts_for(request, buffer)
        )
        room = EVENTS_PER_CYCLE_MAX - len(self.events)
        gives_way = choose_lingering(self, request, (job_id for _, job_id in lingering), coming, room)
        for job_id in gives_way:
            events = give_up_events(state.jobs[job_id], needed_by_reason(request.job))
            self.events.extend(assign_slots(state, self.slots, events))
            self.taken.add(job_id)
        return bool(gives_way)

    def _account(self, job: Job, buffer: Buffer | None) -> None:
        if job.node in self.assigned:
            self.assigned[job.node] += 1
        stage = occupied_slot(job, buffer)
        if stage is not None:
            self.slots[stage] = self.slots.get(stage, 0) + 1
        if job.node in self.cpus_free and takes_cpus(job, buffer):
            self.cpus_free[job.node] -= job.request.cpus
        if job.request.array is not None:
            self.arrays.setdefault(job.request.array.job, ArrayUse()).count(job, buffer)

    def _judge(self, job: Job, buffer: Buffer | None) -> Verdict | None:
        """Judge a candidate; None for one that something was due for: what follows is for the next pass."""
        verdict = early_gate(self.state, job) or self._array_gate(job, buffer)
        if job.id in self.verdicts:
            return None
        if verdict is not None:
            return verdict
        if buffer is not None and waits_for_space(job, buffer):
            options = persistent_request(job)
            return self._reserve(job, buffer) if options is None else self._reserve_persistent(job, buffer, options)
        return buffer_gate(self.state, job, buffer) or self._place(job, buffer)

    # The CycleState -------------------------------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        return len(self.events) >= EVENTS_PER_CYCLE_MAX

    def free_in(self, pool: str) -> int:
        known = self.state.pools.get(pool)
        return 0 if known is None else free_bytes(known, self.held.get(pool, 0))

    def node_use(self, node: str) -> tuple[int, int] | None:
        return (self.state.nodes[node].cpus, self.cpus_free[node]) if node in self.cpus_free else None

    def waits_for_node(self, node: str, position: QueuePosition) -> int:
        return self.waiting_nodes.get(node, 0)

    def cpus_max_in(self, partition: str) -> int:
        if partition not in self._cpus_max:
            nodes = (self.state.nodes[name].cpus for name in self._nodes_in(partition))
            self._cpus_max[partition] = max(nodes, default=0)
        return self._cpus_max[partition]

    def _nodes_in(self, partition: str) -> list[str]:
        return [name for name in self.cpus_free if is_node_in(self.state.partitions, partition, name)]

    def _free_for(self, cpus: int, partition: str) -> list[str]:
        """Return the nodes of the partition that nobody waits for and that have so many free CPUs."""
        return [
            name
            for name in self._nodes_in(partition)
            if self.cpus_free[name] >= cpus and name not in self.waiting_nodes and not self.any_node.first_for(name)
        ]

    def has_node_for(self, cpus: int, position: QueuePosition, partition: str) -> bool:
        return bool(self._free_for(cpus, partition))

    def free_cpus(self) -> Iterable[tuple[str, int]]:
        return sorted(self.cpus_free.items())

    # Space -----------------------------------------------------------------------------------------------------

    def _reserve(self, job: Job, buffer: Buffer) -> Verdict:
        request = space_request_of(self.state, job, buffer)
        size_bytes, pool = request.size_bytes, request.pool
        decision = space_decision(self, request)
        verdict = space_verdict(self, job, buffer) if self.explain else Verdict(Reason.BURST_BUFFER_RESOURCES, "")
        head = note_decision(self, request, decision)
        if decision is SpaceDecision.NOT_ENOUGH and self.reservation_heads[pool].job == job.id:
            self._preempt_for(request)
        if decision is SpaceDecision.GIVEN:
            counted = head is not None and head.backfill(size_bytes, release_time(self, request), self.at)
            self.held[pool] = self.held.get(pool, 0) + size_bytes
            node, mover = "", self._mover(pool)
            if not mover:
                node = self.fewest_jobs(job.request.cpus, nodes_of(self.state, job.id))
                self.assigned[node] += 1
            allocated = e.BufferAllocated(job.id, node, job.attempt + 1, mover=mover)
            if head is not None:
                allocated = e.BufferAllocated(
                    job.id, node, job.attempt + 1, head.job, counted, head.start_at, mover=mover
                )
            self.events.extend(assign_slots(self.state, self.slots, (allocated,)))
        return verdict

    def _mover(self, pool: str) -> str:
        """Return the mover with the fewest transfers, by a walk over all nodes; empty for a pool of no shared
        filesystem.
        """
        named = self.state.pools[pool].filesystem if pool else ""
        if not named or self.state.site.provider != "native":
            return ""
        begun, moving = self.slots.begun, self.state.moving
        up = [node.name for node in self.state.nodes.values() if named in node.filesystems and node.is_up]
        return min(up, key=lambda name: (moving.get(("", name), 0) + begun.get(("", name), 0), name))

    def _preempt_for(self, request: SpaceRequest) -> None:
        """Take back buffers for the reservation head, if that is called for."""
        if self._give_up_lingering(request):
            return
        state, room = self.state, EVENTS_PER_CYCLE_MAX - len(self.events)
        holders = [(state.jobs[job_id], state.buffers[job_id]) for job_id in state.holders.get(request.pool, ())]
        coming = sum(buffer.held_bytes for job, buffer in holders if run_until(job, buffer) == DRAINING)
        candidates = sorted(
            candidate for job, buffer in holders if (candidate := preemption_candidate(state, job, buffer)) is not None
        )
        for job_id in choose_preempted(self, request, candidates, coming, room, self.verdicts):
            self.events.extend(assign_slots(state, self.slots, preemption_events(state, job_id, request.job.id)))
            self.verdicts[job_id] = current_verdict(state, state.jobs[job_id], state.buffers[job_id])

    def _reserve_persistent(self, job: Job, buffer: Buffer, options: BufferRequest) -> Verdict:
        decision = serve_persistent(self, job, buffer, options)
        if decision.node:
            self.assigned[decision.node] += 1
        return decision.verdict

    def fewest_jobs(self, cpus: int, partition: str) -> str:
        """Return the node of the partition with the fewest jobs that has so many CPUs; there must be one."""
        fitting = [name for name in self._nodes_in(partition) if self.state.nodes[name].cpus >= cpus]
        return min(fitting, key=lambda name: (self.assigned[name], name))

    def head_of(self, job: Job, pool: str, size_bytes: int, free: int) -> ReservationHead:
        """Return the reservation head of a pool, with when it should get its space if every holder uses its time."""
        new = releases_of_cycle(self, self.events, pool)
        ends = self.quotas.reserved_releases(pool, reservation_of(self.state, job.id))
        return ReservationHead(job, lambda: expected_start(sorted(self._releases(pool) + new + ends), free, size_bytes))

    def _releases(self, pool: str) -> list[tuple[int, int]]:
        """Return when those who held a part of the pool before the pass should give back how much."""
        state, drains_us = self.state, drain_us(self.state, pool)
        return [
            (release_at(until, self.at, drains_us), size_bytes)
            for other in state.holders.get(pool, ())
            if (size_bytes := state.buffers[other].held_bytes)
            and (until := run_until(state.jobs[other], state.buffers[other])) != UNKNOWN_END
        ]

    def free_at(self, pool: str, instant: Instant) -> int:
        releases = self._releases(pool) + releases_of_cycle(self, self.events, pool)
        return self.free_in(pool) + sum(size_bytes for end_at, size_bytes in releases if end_at <= instant)

    # Arrays ----------------------------------------------------------------------------------------------------

    def _array_gate(self, job: Job, buffer: Buffer | None) -> Verdict | None:
        array = job.request.array
        if array is None or not has_array_limits(job.request) or not waits_for_array(job, buffer):
            return None
        before = self.array_tasks_before.get(array.job, 0)
        self.array_tasks_before[array.job] = before + 1
        return self.arrays[array.job].verdict(job.request, self.state.site.array_stage_count, before)

    # CPUs ------------------------------------------------------------------------------------------------------

    def _place(self, job: Job, buffer: Buffer | None) -> Verdict:
        decision = place_decision(self, job, buffer)
        verdict = place_verdict(self, job, buffer) if self.explain else Verdict(Reason.NONE, "")
        if decision is PlaceDecision.RUNS:
            node = job.node if buffer is not None and not job.mover else self._node_with_most_free(job)
            self.cpus_free[node] -= job.request.cpus
            self.quotas.give_run(scheduling_class_of(job.request), job.request.cpus)
            self.events.append(e.RunOrdered(job.id, node, job.attempt + 1))
            if buffer is not None:
                self.slots[Stage.RUN] = self.slots.get(Stage.RUN, 0) + 1
        elif decision in KEEPS_CPUS:
            if buffer is None or job.mover:
                self.any_node.wait(nodes_of(self.state, job.id), job.id)
            else:
                self.waiting_nodes[job.node] = job.id
        return verdict

    def _node_with_most_free(self, job: Job) -> str:
        fitting = self._free_for(job.request.cpus, nodes_of(self.state, job.id))
        return min(fitting, key=lambda name: (-self.cpus_free[name], name))

    # ---------------------------------------------------------------------------------------------------------------

    def _purge(self) -> None:
        surplus = len(self.state.finished) - self.state.site.finished_jobs_kept
        if surplus <= 0:
            return
        waited_for = {
            other
            for job_id in self.state.unfinished
            for dependency in self.state.jobs[job_id].request.dependencies
            for other in dependency_jobs(self.state, dependency)
        }
        oldest = [job_id for job_id in sorted(self.state.finished) if job_id not in waited_for]
        for job_id in oldest[: max(0, min(surplus, EVENTS_PER_CYCLE_MAX - len(self.events)))]:
            self.events.append(e.JobPurged(job_id))


def ahead_by_walk(state: State) -> JobsAhead:
    """Return who says which candidates are before a job, by a walk over all jobs. It knows of no room in arrays."""

    def ahead(position: tuple[int, int], pool: str | None) -> list[int] | None:
        found: list[tuple[int, int]] = []
        for other_id in state.unfinished:
            other, buffer = state.jobs[other_id], state.buffers.get(other_id)
            if other.state is not JobState.PENDING:
                continue
            if pool is None:
                if buffer is not None and buffer.state is not BufferState.STAGED_IN:
                    continue
            elif not waits_for_space(other, buffer) or buffer is None or not buffer.granted_bytes:
                continue
            elif buffer.pool != pool or buffer.granted_bytes > usable_bytes(state, pool):
                continue
            stands = queue_position_of(state, other)
            if stands < position and early_gate(state, other) is None:
                found.append(stands)
        return None if len(found) > estimates.AHEAD_MAX else [job_id for _, job_id in nsmallest(len(found), found)]

    return ahead
