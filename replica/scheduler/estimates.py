"""Estimate when a pending job starts, and explain the delay, from the queue, time limits and measured transfers.

Every job that holds space or CPUs is assumed to release them at its time limit. Transfers take as long as the pool's
average, and jobs ahead in the queue go first. The estimate is an upper bound unless another job overtakes, since
scripts mostly end before their limit. Unknown times are reported as unknown, not as a large number as in Slurm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush, merge
from itertools import islice, takewhile

import msgspec

from forebay.replica.model import ENDED, Buffer, BufferState, Hold, Job, JobState, is_node_in, rates_of, takes_cpus
from forebay.replica.scheduler.admission import nodes_of, queue_position_of
from forebay.replica.scheduler.backfill import (
    UNKNOWN_END,
    ReservedTimeline,
    TooManySteps,
    drain_us,
    release_at,
    run_until,
)
from forebay.replica.scheduler.gates import early_gate
from forebay.replica.scheduler.index import SchedulingIndex
from forebay.replica.scheduler.index_row import Key
from forebay.replica.state import State
from forebay.replica.values import NEVER, Instant, Reason, format_size, seconds

AHEAD_MAX = 2_000
"""Maximum number of jobs ahead that an estimate considers, count; with more, the start is unknown."""

NODE_QUERIES_MAX = 100_000
"""Limit on the queries of node timelines in one estimate, count: about 50 ms, during which the replica does nothing
else.
"""

JobsAhead = Callable[[tuple[int, int], str | None], list[int] | None]
"""(position, pool) -> candidates for the pool's space before the position, in order; pool None: candidates for CPUs.

Returns None if there are more than AHEAD_MAX.
"""


class Step(msgspec.Struct, frozen=True):
    """A condition that a job waits for, and its expected end (NEVER: unknown)."""

    what: str
    """dependency, begin_time, reservation, hold, limits, space, stage_in or cpus."""
    until: Instant
    sentence: str


class Estimate(msgspec.Struct, frozen=True):
    """Expected start of a job, and the conditions that it waits for."""

    start_at: Instant
    """NEVER if unknown."""
    steps: tuple[Step, ...]
    """Conditions in the order in which the job waits for them."""

    @property
    def is_known(self) -> bool:
        """The start is known."""
        return self.start_at != NEVER


def estimate(state: State, job_id: int, at: Instant, ahead: JobsAhead) -> Estimate:
    """Return the expected start of a job, as of `at`.

    `ahead` returns the jobs ahead in the queues (`jobs_ahead_in`); it is called for pending jobs only.

    Raises:
        KeyError: The job is not in the state.
    """
    job, buffer = state.jobs[job_id], state.buffers.get(job_id)
    if job.state is not JobState.PENDING:
        return Estimate(job.started_at or (at if job.state is JobState.CONFIGURING else NEVER), ())
    steps: list[Step] = []
    ready_at: int = at
    for step in _early_steps(state, job, at):
        steps.append(step)
        if step.until == NEVER:
            return Estimate(NEVER, tuple(steps))
        ready_at = max(ready_at, step.until)
    if buffer is not None and buffer.state is not BufferState.STAGED_IN:
        space = _space_step(state, job, buffer, at, ready_at, ahead)
        if space is not None:
            steps.append(space)
            if space.until == NEVER:
                return Estimate(NEVER, tuple(steps))
            ready_at = max(ready_at, space.until)
        staged = _stage_in_time(state, job, buffer)
        if staged is not None:
            takes_us, sentence = staged
            began_at = buffer.changed_at if buffer.state is BufferState.STAGING_IN else ready_at
            ready_at = max(ready_at, began_at + takes_us)
            steps.append(Step("stage_in", Instant(ready_at), sentence))
    cpus = _cpus_step(state, job, Instant(ready_at), ahead)
    steps.append(cpus)
    return Estimate(cpus.until, tuple(steps))


def _early_steps(state: State, job: Job, at: Instant) -> list[Step]:
    """Return the conditions that a job waits for before it is a candidate for space or CPUs."""
    if job.hold is not Hold.NONE:
        return [Step("hold", NEVER, "the job is held until it is released")]
    if job.late:
        return [Step("limits", NEVER, "the job can no longer end before its deadline")]
    steps: list[Step] = []
    if job.request.begin_at > at:
        steps.append(Step("begin_time", job.request.begin_at, "the begin time of the job"))
    waits = _dependency_steps(state, job, at)
    if any(step.until == NEVER for step in waits):
        return [*steps, next(step for step in waits if step.until == NEVER)]
    steps += waits
    options = job.request.options
    reservation = None if options is None else state.reservations.get(options.reservation)
    if reservation is not None and not reservation.active:
        steps.append(Step("reservation", reservation.start_at, f"reservation {reservation.name} starts"))
    gate = early_gate(state, job)
    known = (Reason.BEGIN_TIME, Reason.DEPENDENCY, Reason.RESERVATION)
    if gate is not None and (gate.reason not in known or not steps):
        return [*steps, Step("limits", NEVER, f"{gate.reason}: {gate.sentence}")]
    return steps


def _dependency_steps(state: State, job: Job, at: Instant) -> list[Step]:
    """Return the unmet dependencies of a job, or with `any_of` the one that is met first."""
    found: list[Step] = []
    for dependency in job.request.dependencies:
        other = state.jobs.get(dependency.job)
        if other is None or other.state in ENDED:
            continue
        if other.started_at == NEVER:
            found.append(Step("dependency", NEVER, f"the job waits for job {other.id}, which has not started"))
            continue
        pool = state.buffers[other.id].pool if other.id in state.buffers else ""
        over_at = release_at(other.started_at + seconds(other.request.time_limit_s), at, drain_us(state, pool))
        found.append(Step("dependency", Instant(over_at), f"job {other.id} finishes at its time limit"))
    if not job.request.effective_options.any_of:
        return found
    known = [step for step in found if step.until != NEVER]
    return [min(known, key=lambda step: step.until)] if known else found[:1]


def _space_step(state: State, job: Job, buffer: Buffer, at: Instant, asked_at: int, ahead_of: JobsAhead) -> Step | None:
    """Return the wait for space requested at `asked_at`; None if the job has its space or needs none."""
    if buffer.state is BufferState.STAGING_IN or not buffer.granted_bytes:
        return None
    if buffer.state is not BufferState.PENDING:
        return Step(
            "space", Instant(at + drain_us(state, buffer.pool)), "the previous buffer of the job is being removed"
        )
    pool, size_bytes = state.pools.get(buffer.pool), buffer.granted_bytes
    if pool is None or size_bytes > pool.usable_bytes:
        return Step("space", NEVER, f"pool {buffer.pool} never has {format_size(size_bytes)}")
    ahead = ahead_of(queue_position_of(state, job), buffer.pool)
    if ahead is None:
        return Step("space", NEVER, f"more than {AHEAD_MAX} jobs are ahead in the queue of pool {pool.name}")
    drains_us, stages_us = drain_us(state, pool.name), rates_of(state.rates.get(pool.name), pool.name).stage_in.mean_us
    before = f"; {len(ahead)} jobs are ahead" if ahead else ""
    if any(reservation.size_in(pool.name) for reservation in state.reservations.values()):
        return _reserved_space_step(state, job, buffer, at, asked_at, ahead, stages_us + drains_us, before)
    # Negative for an overcommitted pool, which needs releases before any space is free.
    free = pool.usable_bytes - state.held_bytes.get(pool.name, 0)
    releases = [
        (release_at(until, at, drains_us), state.buffers[other].held_bytes)
        for other in state.holders.get(pool.name, ())
        if (until := run_until(state.jobs[other], state.buffers[other])) != UNKNOWN_END
    ]
    heapify(releases)
    now: int = at
    for other in (*ahead, job.id):
        wanted = state.buffers[other].granted_bytes
        while free < wanted:
            if not releases:
                return Step("space", NEVER, f"job {other} waits for space that is never released")
            instant, given = heappop(releases)
            now, free = max(now, instant), free + given
        free -= wanted
        heappush(releases, (now + stages_us + seconds(state.jobs[other].request.time_limit_s) + drains_us, wanted))
    return Step("space", Instant(now), f"{format_size(size_bytes)} of pool {pool.name} become free{before}")


def _reserved_space_step(
    state: State, job: Job, buffer: Buffer, at: Instant, asked_at: int, ahead: list[int], moves_us: int, before: str
) -> Step:
    """Return the wait for space of a pool that has reservations."""
    pool, size = buffer.pool, format_size(buffer.granted_bytes)
    timeline = ReservedTimeline(state, pool, at)
    until: int | None = None
    try:
        for other in (*ahead, job.id):
            takes_us = moves_us + seconds(state.jobs[other].request.time_limit_s)
            wanted = state.buffers[other].granted_bytes
            until = timeline.place(other, wanted, takes_us, asked_at if other == job.id else at)
    except TooManySteps:
        return Step(
            "space", NEVER, f"{len(ahead)} jobs are ahead in the queue of pool {pool}, too many for an estimate"
        )
    if until is None:
        return Step("space", NEVER, f"{size} of pool {pool} never become free beside its reservations")
    return Step("space", Instant(until), f"{size} of pool {pool} become free beside its reservations{before}")


def _stage_in_time(state: State, job: Job, buffer: Buffer) -> tuple[int, str] | None:
    """Return the expected duration of the stage-in, µs, and its basis; None if nothing is staged in."""
    if job.request.buffer is None or not job.request.buffer.stage_in:
        return None
    measured = rates_of(state.rates.get(buffer.pool), buffer.pool).stage_in
    if not measured.count:
        return 0, "the stage-in is not counted, because none was measured in its pool yet"
    takes_us = measured.expected_us(buffer.granted_bytes)
    rate = f"{format_size(measured.bytes_per_s)}/s" if measured.bytes_per_s else "no data"
    return takes_us, f"stage-ins of the pool move {rate} ({measured.count} measured)"


def _cpus_step(state: State, job: Job, ready_at: Instant, ahead_of: JobsAhead) -> Step:
    """Return the wait for CPUs of a job that is ready to run at `ready_at`."""
    ahead = ahead_of(queue_position_of(state, job), None)
    if ahead is None:
        return Step("cpus", NEVER, f"more than {AHEAD_MAX} jobs are ahead in the queue for CPUs")
    nodes = {name: _NodeTimeline(state, name) for name, node in state.nodes.items() if node.is_up and not node.is_mover}
    if len(ahead) * len(nodes) > NODE_QUERIES_MAX:
        sentence = f"{len(ahead)} jobs are ahead in the queue for CPUs of {len(nodes)} nodes, too many for an estimate"
        return Step("cpus", NEVER, sentence)
    for other in (*(state.jobs[other_id] for other_id in ahead), job):
        buffer = state.buffers.get(other.id)
        bound = other.node if buffer is not None and other.node else ""
        asked_at = ready_at if other is job else state.at
        partition = nodes_of(state, other.id)
        starts = [
            (start_at, name)
            for name, timeline in nodes.items()
            if (name == bound if bound else is_node_in(state.partitions, partition, name))
            and (start_at := timeline.start_of(other.request.cpus, asked_at)) is not None
        ]
        if not starts:
            if other is not job:
                continue
            return Step("cpus", NEVER, f"no usable node has {job.request.cpus} CPUs")
        start_at, name = min(starts)
        if other is job:
            before = f"; {len(ahead)} jobs are ahead" if ahead else ""
            return Step("cpus", Instant(start_at), f"{job.request.cpus} CPUs of node {name} become free{before}")
        nodes[name].take(other.request.cpus, start_at, start_at + seconds(other.request.time_limit_s))
    raise AssertionError("the job itself is the last one")


class _NodeTimeline:
    """Future free CPUs of one node. Jobs take them in the order of the queue."""

    def __init__(self, state: State, name: str) -> None:
        node = state.nodes[name]
        self.cpus = node.cpus
        self.free = node.cpus
        self.now = 0
        self.ends: list[tuple[int, int]] = []
        for other in state.on_node.get(name, ()):
            job, buffer = state.jobs[other], state.buffers.get(other)
            if job.node == name and takes_cpus(job, buffer):
                since = job.started_at if job.started_at != NEVER else state.at
                self.free -= job.request.cpus
                self.ends.append((max(state.at, since + seconds(job.request.time_limit_s)), job.request.cpus))
        self.ends.sort()

    def start_of(self, cpus: int, asked_at: int) -> int | None:
        """Return when `cpus` CPUs are free, `asked_at` at the earliest; None if the node has fewer."""
        if cpus > self.cpus:
            return None
        free, now = self.free, max(self.now, asked_at)
        for end_at, given in self.ends:
            if free >= cpus and now < end_at:
                break
            free, now = free + given, now if free >= cpus else max(now, end_at)
        return now if free >= cpus else None

    def take(self, cpus: int, start_at: int, end_at: int) -> None:
        """Reserve CPUs from `start_at` to `end_at` for a job; no later job in the queue starts sooner."""
        self.now = start_at
        while self.ends and self.ends[0][0] <= start_at:
            self.free += self.ends.pop(0)[1]
        self.free -= cpus
        self.ends.append((end_at, cpus))
        self.ends.sort()


# ---- jobs ahead in the queues of a scheduling index


def jobs_ahead_in(index: SchedulingIndex) -> JobsAhead:
    """Return a `JobsAhead` over the queues of `index`, which must be prepared and must not change meanwhile."""

    def ahead(position: tuple[int, int], pool: str | None) -> list[int] | None:
        queues = (takewhile(lambda key: key[:2] < position, keys) for keys in _queues_for(index, pool))
        found = [job_id for _, job_id, _ in islice(merge(*queues), AHEAD_MAX + 1)]
        return None if len(found) > AHEAD_MAX else found

    return ahead


def _queues_for(index: SchedulingIndex, pool: str | None) -> Iterator[Iterator[Key]]:
    for (kind, name, _, _), keys in index.queues.queues.items():
        if (kind in ("any", "node")) if pool is None else (kind == "space" and name == pool):
            yield iter(keys)
        elif pool is not None and kind == "persistent":
            yield (key for key in keys if _needs_space_of(index, key[1], pool))


def _needs_space_of(index: SchedulingIndex, job_id: int, pool: str) -> bool:
    buffer = index.state.buffers.get(job_id)
    return buffer is not None and buffer.pool == pool and buffer.granted_bytes > 0
