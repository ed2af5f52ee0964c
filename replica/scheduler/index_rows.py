"""What one job puts into the scheduler's agenda, and how far it has come as far as others wait for it."""

from __future__ import annotations

import msgspec

from replica.model import (
    ENDED,
    HOLDING,
    Buffer,
    BufferState,
    DependencyKind,
    Job,
    JobState,
    Standing,
    is_active,
    is_ahead,
    is_gated,
    is_waiting,
    queue_place,
    standing_of,
    takes_cpus,
    waits_for_turn,
)
from replica.operations import due_at
from replica.scheduler.admission import nodes_of, place_of, usable_in
from replica.scheduler.backfill import run_until
from replica.scheduler.gates import early_gate, waits_for_space
from replica.scheduler.persistent import names_of
from replica.scheduler.preemption import Victim, victim_of
from replica.state import State, is_finished
from replica.values import Instant, SortedKeys

Key = tuple[int, int, int]
"""-priority, job, and what is asked for: bytes of a pool or CPUs."""

Queue = tuple[str, str, int, Standing | None]
"""What is waited for, and on whose behalf: ("space", pool, CPUs), ("node", name, 0) or ("any", partition, CPUs), and
the standing, which limits, licences, reservations and partitions go by. ("named", "", 0): persistent buffers. In
("large", pool, 0) are those who ask for more than the pool has in service: no pass looks at them.
"""

Group = tuple[str, str]
"""The queues for the same thing: ("space", pool), ("node", name) or ("any", partition)."""

NodeUse = tuple[int, int, int]
"""CPUs of a node that is up, how many of them are free, and how many jobs are on it."""


class More(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What few jobs put into the index besides."""

    array: int = 0
    """The array whose room it needs, if it stands in a queue."""
    turn: tuple[Instant, int] | None = None
    """Its place among those that wait for a turn of `turn_of`."""
    turn_of: int = 0
    turn_user: str = ""
    active_of: int = 0
    """The array against whose throttle it counts."""
    ahead: bool = False
    """Whether it also counts among those that have not started."""
    victim: Victim | None = None
    """Its place among those whose buffer in the pool `victim_in` may be taken back for another one."""
    victim_in: str = ""


NO_MORE = More()


class Part(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one job that is not over puts into the index."""

    queue: Queue | None
    key: Key | None
    node: str
    cpus: int
    """CPUs of `node` that it takes now."""
    due_at: int
    pool: str
    """The pool that it holds a part of, if `hold` is not None."""
    hold: Key | None
    """Until when, how much, and the job."""
    milestone: int
    more: More | None = None


class Milestone:
    """How far a job has come, as far as others wait for it."""

    STARTED = 1
    RESULT = 2
    ENDED = 3
    FINISHED = 4
    GONE = 5


def milestone_of(job: Job, finished: bool) -> int:
    if finished:
        return Milestone.FINISHED
    if job.state in ENDED:
        return Milestone.ENDED
    if job.result in ENDED:
        return Milestone.RESULT
    return 0 if job.state in (JobState.PENDING, JobState.CONFIGURING) else Milestone.STARTED


def part_of(state: State, job: Job, buffer: Buffer | None, queue_names: dict[Queue, Queue]) -> Part:
    """Return what a job that is not over puts into the index; `queue_names` has the one name of each queue."""
    request = job.request
    queue: Queue | None = None
    key: Key | None = None
    if job.state is JobState.PENDING and early_gate(state, job) is None:
        place, standing = place_of(state, job), standing_of(request)
        if buffer is None:
            queue, key = ("any", nodes_of(state, job.id), request.cpus, standing), (*place, request.cpus)
        elif buffer.state is BufferState.STAGED_IN:
            queue, key = ("node", job.node, 0, standing), (*place, request.cpus)
        elif waits_for_space(job, buffer):
            size_bytes = buffer.granted_bytes
            pool = buffer.pool if size_bytes else ""
            queue, key = ("space", pool, request.cpus, standing), (*place, size_bytes)
            if size_bytes > usable_in(state, pool):
                # Nobody gives it so much, so no pass looks at it until its pool has grown.
                queue = ("large", pool, 0, None)
            if names_of(job) is not None:
                queue, key = ("named", "", 0, None), (*place, 0)
    if queue is not None:
        queue = queue_names.setdefault(queue, queue)
    more = _more_of(state, job, buffer, queued=queue is not None)
    holds = buffer is not None and buffer.state in HOLDING and buffer.granted_bytes > 0
    return Part(
        queue=queue,
        key=key,
        node=job.node,
        cpus=request.cpus if takes_cpus(job, buffer) else 0,
        due_at=due_at(state, job, buffer),
        pool=buffer.pool if holds and buffer is not None else "",
        hold=(run_until(job, buffer), buffer.granted_bytes, job.id) if holds and buffer is not None else None,
        milestone=milestone_of(job, is_finished(job, buffer)),
        more=None if more is NO_MORE or more == NO_MORE else more,
    )


def _more_of(state: State, job: Job, buffer: Buffer | None, *, queued: bool) -> More:
    """Return what most jobs have nothing of."""
    task = job.request.array
    if task is None and (buffer is None or buffer.state is BufferState.PENDING):
        return NO_MORE  # no array, no operation, nothing that could be taken from it
    array = 0
    if queued and task is not None and is_gated(job.request) and is_waiting(job, buffer):
        array = task.job
    turn_of = waits_for_turn(job, buffer)
    active_of = task.job if task is not None and is_active(job, buffer) else 0
    victim = victim_of(state, job, buffer)
    return More(
        array=array,
        turn=None if turn_of is None or buffer is None else queue_place(job, buffer),
        turn_of=0 if turn_of is None else int(turn_of),
        turn_user="" if turn_of is None else job.request.user,
        active_of=active_of,
        ahead=active_of > 0 and is_ahead(job, buffer),
        victim=victim,
        victim_in=buffer.pool if victim is not None and buffer is not None else "",
    )


def awaited(kind: DependencyKind, waiter: Job) -> int:
    """Return the milestone at which a dependency may change."""
    if kind is DependencyKind.AFTER:
        return Milestone.STARTED
    if kind is DependencyKind.AFTER_BURST_BUFFER:
        return Milestone.FINISHED
    return Milestone.ENDED if waiter.request.buffer is not None else Milestone.RESULT


def keep(kept: dict, name: object, key: object, enters: bool) -> None:  # type: ignore[type-arg]
    keys = kept.get(name)
    if enters:
        if keys is None:
            keys = kept[name] = SortedKeys()
        keys.add(key)
    elif keys is not None:
        keys.discard(key)
        if not keys:
            del kept[name]


def keep_in_set(kept: dict, name: object, key: int, enters: bool) -> None:  # type: ignore[type-arg]
    if enters:
        kept.setdefault(name, set()).add(key)
    else:
        kept[name].discard(key)
        if not kept[name]:
            del kept[name]
