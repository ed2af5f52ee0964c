"""Derived maps of a State: computed from scratch here, updated by `fold`, compared by `invariants`."""

from __future__ import annotations

from itertools import chain

import immutables
import msgspec

from forebay.replica.messages import Actor
from forebay.replica.model import (
    ENDED,
    HOLDING,
    TRANSFERS,
    Buffer,
    BufferState,
    Job,
    MovingKey,
    NamedJobs,
    NameGroup,
    UsageKey,
    destinations_of,
    moving_keys,
    occupied_slot,
    usage_of,
)
from forebay.replica.state.state import State


def is_finished(job: Job, buffer: Buffer | None) -> bool:
    """Return whether the job has finished and its buffer holds nothing."""
    return job.state in ENDED and (buffer is None or buffer.state is BufferState.COMPLETE)


def held_bytes(state: State) -> dict[str, int]:
    """Return pool -> bytes held by job buffers and persistent buffers; pools without held space are left out."""
    held: dict[str, int] = {}
    for buffer in state.buffers.values():
        if buffer.held_bytes:
            held[buffer.pool] = held.get(buffer.pool, 0) + buffer.held_bytes
    for persistent in state.persistent.values():
        if persistent.held_bytes:
            held[persistent.pool] = held.get(persistent.pool, 0) + persistent.held_bytes
    return held


def _group(jobs: dict[int, bool]) -> NameGroup:
    first = min(jobs)
    return first if len(jobs) == 1 else NamedJobs(first, immutables.Map(jobs))


def move_between_groups(
    groups: immutables.MapMutation[str, immutables.Map[int, bool]], job_id: int, before: str, after: str
) -> None:
    """Move a job from one name to another in a derived map from names to jobs.

    "" stands for no name; names without jobs have no entry.
    """
    if before == after:
        return
    if before:
        left = groups[before].delete(job_id)
        if left:
            groups[before] = left
        else:
            del groups[before]
    if after:
        groups[after] = groups.get(after, _NOBODY).set(job_id, True)


_NOBODY: immutables.Map[int, bool] = immutables.Map()


def _map_of_maps(groups: dict[str, dict[int, bool]]) -> immutables.Map[str, immutables.Map[int, bool]]:
    return immutables.Map({name: immutables.Map(jobs) for name, jobs in groups.items()})


def derive(state: State) -> State:
    """Return the state with its derived maps computed from scratch."""
    unfinished: dict[int, bool] = {}
    finished: dict[int, bool] = {}
    for job in state.jobs.values():
        (finished if is_finished(job, state.buffers.get(job.id)) else unfinished)[job.id] = True
    on_node: dict[str, dict[int, bool]] = {}
    for job_id in unfinished:
        job = state.jobs[job_id]
        for node in (job.node, job.mover):
            if node:
                on_node.setdefault(node, {})[job_id] = True
    holders: dict[str, dict[int, bool]] = {}
    for job_id, buffer in state.buffers.items():
        if buffer.held_bytes:
            holders.setdefault(buffer.pool, {})[job_id] = True
    operations: dict[int, int] = {}
    moving: dict[MovingKey, int] = {}
    destinations: dict[str, dict[int, bool]] = {}
    named: dict[str, dict[str, dict[int, bool]]] = {}
    for job_id in unfinished:
        job = state.jobs[job_id]
        for path in destinations_of(job.request):
            destinations.setdefault(path, {})[job_id] = True
        stage = occupied_slot(job, state.buffers.get(job_id))
        if stage is not None:
            operations[int(stage)] = operations.get(int(stage), 0) + 1
        if stage in TRANSFERS:
            for counted in moving_keys(job.request.user, job.staged_by):
                moving[counted] = moving.get(counted, 0) + 1
        if job.state not in ENDED:
            named.setdefault(job.request.user, {}).setdefault(job.request.name, {})[job_id] = True
    arrays: dict[int, dict[int, int]] = {}
    use: dict[UsageKey, int] = {}
    using: dict[str, dict[int, bool]] = {}
    for job_id, job in state.jobs.items():
        request, own = job.request, state.buffers.get(job_id)
        if request.array is not None:
            arrays.setdefault(request.array.job, {})[request.array.task] = job_id
        for key, amount in usage_of(job, own).items():
            use[key] = use.get(key, 0) + amount
        if request.buffer is not None and own is not None and own.state in HOLDING:
            for name in request.buffer.uses:
                using.setdefault(name, {})[job_id] = True
    kept: dict[Actor, int] = {}
    for receipt in chain((single for _, single in state.receipts.items()), state.answers.values()):
        kept[receipt.actor] = kept.get(receipt.actor, 0) + 1
    return msgspec.structs.replace(
        state,
        kept=immutables.Map(kept),
        using=_map_of_maps(using),
        use=immutables.Map(use),
        operations=immutables.Map(operations),
        moving=immutables.Map(moving),
        arrays=immutables.Map({array: immutables.Map(tasks) for array, tasks in arrays.items()}),
        named=immutables.Map(
            {
                user: immutables.Map({name: _group(jobs) for name, jobs in names.items()})
                for user, names in named.items()
            }
        ),
        on_node=_map_of_maps(on_node),
        destinations=_map_of_maps(destinations),
        holders=_map_of_maps(holders),
        held_bytes=immutables.Map(held_bytes(state)),
        unfinished=immutables.Map(unfinished),
        finished=immutables.Map(finished),
    )
