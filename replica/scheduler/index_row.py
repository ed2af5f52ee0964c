"""Index rows: the entries of a job in the scheduling index, derived from the State.

Each component index is updated by `apply(job, before, after)` with the old and the new row of a job. `NO_ROW` stands
for a job without a row, `FINISHED_ROW` for a finished one, and `GONE_ROW` for a purged one.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from forebay.replica.model import (
    ENDED,
    HOLDING,
    Buffer,
    BufferState,
    DependencyKind,
    Job,
    JobState,
    SchedulingClass,
    awaited_slot,
    has_array_limits,
    is_active,
    is_staged_ahead,
    queue_position,
    scheduling_class_of,
    takes_cpus,
    waits_for_array,
)
from forebay.replica.operations import due_at, is_lingering
from forebay.replica.scheduler.admission import nodes_of, queue_position_of, runs_anywhere, usable_bytes
from forebay.replica.scheduler.backfill import run_until
from forebay.replica.scheduler.gates import early_gate, reservation_of, waits_for_space
from forebay.replica.scheduler.persistent import persistent_request
from forebay.replica.scheduler.preemption import PreemptionCandidate, preemption_candidate
from forebay.replica.state import State, is_finished
from forebay.replica.values import NEVER, Instant, SortedKeys

Key = tuple[int, int, int]
"""(-priority, job ID, requested amount: bytes of a pool or CPUs)."""

Queue = tuple[str, str, int, SchedulingClass | None]
"""Queue of candidates: the awaited resource, and the scheduling class, on which the gates depend.

Resources are ("space", pool, CPUs), ("node", name, 0), ("any", partition, CPUs) and ("persistent", "", 0) for jobs with
persistent buffers. ("large", pool, 0) contains requests that exceed the pool, which no cycle checks.
"""

Group = tuple[str, str]
"""Queues for the same resource: ("space", pool), ("node", name) or ("any", partition)."""


class Milestone:
    """Progress of a job on which other jobs can depend."""

    STARTED = 1
    RESULT = 2
    ENDED = 3
    FINISHED = 4
    GONE = 5


class RareFields(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Fields of an index row that few jobs have. All other jobs share `NO_RARE`, so that their rows are small."""

    waits_for: tuple[tuple[int, int], ...] = ()
    """Awaited jobs, and arrays as negated IDs, each with the milestone at which the dependency may be met.

    An array reaches a milestone when all of its tasks have.
    """
    singleton: tuple[str, str] | None = None
    """User and job name, if the job waits for earlier jobs of that name."""
    reservation: tuple[str, int] | None = None
    """Reservation of the job, and job ID."""
    array: int = 0
    """Array of a candidate for space or CPUs whose queued tasks are limited."""
    active_of: int = 0
    """Array whose throttle an active task counts toward."""
    ahead: bool = False
    """The active task has not started."""
    slot: tuple[tuple[int, str], tuple[Instant, int]] | None = None
    """(stage, user), and the job's position among those that wait for an operation slot."""
    preemptible: tuple[str, PreemptionCandidate] | None = None
    """Pool, and the job as a candidate for preemption of its buffer."""
    external_job: tuple[str, int] | None = None
    """Pool whose space the setup of an external job waits for, and job ID."""
    lingering: tuple[str, tuple[Instant, int]] | None = None
    """Pool of a lingering external job, and (start of lingering, job ID)."""
    pass_limit_reached: tuple[str, int] | None = None
    """Pool of a job that waits for space and has been passed as often as allowed, and job ID."""


NO_RARE = RareFields()


class IndexRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A job's entries in the scheduling index."""

    queue: Queue | None = None
    """Queue in which the job is a candidate, if any."""
    key: Key | None = None
    node: str = ""
    cpus: int = 0
    """CPUs of `node` that the job uses."""
    due_at: int = NEVER
    """Time of the job's next timed action."""
    holding: tuple[str, Key] | None = None
    """Pool whose space the job holds, and (expected end of the run, bytes, job ID)."""
    milestone: int = 0
    rare: RareFields = NO_RARE


NO_ROW = IndexRow()
FINISHED_ROW = IndexRow(milestone=Milestone.FINISHED)
GONE_ROW = IndexRow(milestone=Milestone.GONE)


def index_row(state: State, job: Job, buffer: Buffer | None, queue_names: dict[Queue, Queue]) -> IndexRow:
    """Return the row of an unfinished job. `queue_names` interns queue names, so that rows share them."""
    request = job.request
    queue: Queue | None = None
    key: Key | None = None
    if job.external_job is None and job.state is JobState.PENDING and early_gate(state, job) is None:
        position, scheduling_class = queue_position_of(state, job), scheduling_class_of(request)
        if buffer is None or (buffer.state is BufferState.STAGED_IN and runs_anywhere(job, buffer)):
            queue, key = ("any", nodes_of(state, job.id), request.cpus, scheduling_class), (*position, request.cpus)
        elif buffer.state is BufferState.STAGED_IN:
            queue, key = ("node", job.node, 0, scheduling_class), (*position, request.cpus)
        elif waits_for_space(job, buffer):
            size_bytes = buffer.granted_bytes
            pool = buffer.pool if size_bytes else ""
            queue, key = ("space", pool, request.cpus, scheduling_class), (*position, size_bytes)
            if size_bytes > usable_bytes(state, pool):
                # The request exceeds the pool, so no cycle checks it until the pool has grown.
                queue = ("large", pool, 0, None)
            if persistent_request(job) is not None:
                queue, key = ("persistent", "", 0, None), (*position, 0)
    if queue is not None:
        queue = queue_names.setdefault(queue, queue)
    holds = buffer is not None and buffer.state in HOLDING and buffer.granted_bytes > 0
    return IndexRow(
        queue,
        key,
        job.node,
        request.cpus if takes_cpus(job, buffer) else 0,
        due_at(state, job, buffer),
        (buffer.pool, (run_until(job, buffer), buffer.granted_bytes, job.id)) if holds and buffer is not None else None,
        milestone_of(job, is_finished(job, buffer)),
        _rare_fields(state, job, buffer, queued=queue is not None)
        if job.external_job is None
        else _external_job_fields(job, buffer),
    )


def milestone_of(job: Job, finished: bool) -> int:
    """Return the latest milestone of a job that is not purged; 0 for none."""
    if finished:
        return Milestone.FINISHED
    if job.state in ENDED:
        return Milestone.ENDED
    if job.result in ENDED:
        return Milestone.RESULT
    return 0 if job.state in (JobState.PENDING, JobState.CONFIGURING) else Milestone.STARTED


def _rare_fields(state: State, job: Job, buffer: Buffer | None, *, queued: bool) -> RareFields:
    request = job.request
    options, task = request.options, request.array
    pass_limit_reached = queued and job.passed >= state.site.max_passes and waits_for_space(job, buffer)
    plain = options is None and task is None and not request.dependencies and not pass_limit_reached
    if plain and (buffer is None or buffer.state is BufferState.PENDING):
        return NO_RARE  # no array, no operation, no buffer to preempt
    array = 0
    if queued and task is not None and has_array_limits(request) and waits_for_array(job, buffer):
        array = task.job
    stage, reservation = awaited_slot(job, buffer), reservation_of(state, job.id)
    active_of = task.job if task is not None and is_active(job, buffer) else 0
    singleton = options is not None and options.singleton and job.state is JobState.PENDING
    candidate = preemption_candidate(state, job, buffer)
    found = RareFields(
        _awaited_jobs(state, job) if request.dependencies else (),
        (request.user, request.name) if singleton else None,
        (reservation, job.id) if reservation else None,
        array,
        active_of,
        active_of > 0 and is_staged_ahead(job, buffer),
        None if stage is None or buffer is None else ((int(stage), request.user), queue_position(job, buffer)),
        None if candidate is None or buffer is None else (buffer.pool, candidate),
        pass_limit_reached=(buffer.pool, job.id)
        if pass_limit_reached and buffer is not None and buffer.granted_bytes
        else None,
    )
    return NO_RARE if found == NO_RARE else found


def _external_job_fields(job: Job, buffer: Buffer | None) -> RareFields:
    if buffer is None or job.external_job is None:
        return NO_RARE
    stage = awaited_slot(job, buffer)
    found = RareFields(
        slot=None if stage is None else ((int(stage), job.request.user), queue_position(job, buffer)),
        external_job=(buffer.pool, job.id) if buffer.state is BufferState.PENDING else None,
        lingering=(buffer.pool, (job.external_job.since, job.id)) if is_lingering(job, buffer) else None,
    )
    return NO_RARE if found == NO_RARE else found


def _awaited_jobs(state: State, job: Job) -> tuple[tuple[int, int], ...]:
    awaited = set()
    for dependency in job.request.dependencies:
        if not dependency.kind.is_for_array:
            awaited.add((dependency.job, _awaited_milestone(dependency.kind.for_job, job)))
        elif dependency.job in state.arrays:
            awaited.add((-dependency.job, _awaited_milestone(dependency.kind.for_job, job)))
    return tuple(sorted(awaited))


def _awaited_milestone(kind: DependencyKind, waiter: Job) -> int:
    """Return the milestone at which a dependency may change."""
    if kind is DependencyKind.AFTER:
        return Milestone.STARTED
    if kind is DependencyKind.AFTER_BURST_BUFFER:
        return Milestone.FINISHED
    return Milestone.ENDED if waiter.request.buffer is not None else Milestone.RESULT


class SmallIndex(Protocol):
    """Protocol of the component indexes whose contents depend on rows alone."""

    def apply(self, job_id: int, before: IndexRow, after: IndexRow) -> None:
        """Replace the entries of the job's row `before` by those of `after`."""


# ---- sorted keys and sets by name, the contents of the component indexes


def update_keys(kept: dict, name: object, key: object, enters: bool) -> None:  # type: ignore[type-arg]
    """Add a key to those of a name, or remove it; a name without keys is deleted."""
    keys = kept.get(name)
    if enters:
        if keys is None:
            keys = kept[name] = SortedKeys()
        keys.add(key)
    elif keys is not None:
        keys.discard(key)
        if not keys:
            del kept[name]


def update_set(kept: dict, name: object, key: int, enters: bool) -> None:  # type: ignore[type-arg]
    """Add a member to the set of a name, or remove it; otherwise as `update_keys`."""
    if enters:
        kept.setdefault(name, set()).add(key)
    else:
        kept[name].discard(key)
        if not kept[name]:
            del kept[name]
