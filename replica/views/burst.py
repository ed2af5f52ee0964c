"""Data for `scontrol show burst` at one State: pools, settings, buffers, and usage by user.

Source: the guide (Status Commands) and the transcripts of Slurm 22.05.8. Pure: works for current and past states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from forebay.replica.model import (
    HOLDING,
    Buffer,
    BufferState,
    Pool,
    PoolUnit,
    format_flags,
    free_bytes,
    get_sys_state_of,
    get_sys_status_of,
    pool_unit,
    provider_facts,
)
from forebay.replica.state import State
from forebay.replica.values import Instant, round_up

RECORD_STATES = {
    BufferState.STAGING_IN: "allocated",
    BufferState.STAGED_IN: "staged-in",
    BufferState.PRE_RUN: "staged-in",
    BufferState.RUNNING: "staged-in",
    BufferState.SUSPENDED: "staged-in",
    BufferState.POST_RUN: "staged-in",
    BufferState.STAGING_OUT: "staged-in",
}
"""Job state -> state of the buffer's record as Slurm's datawarp plugin shows it: `allocated` until the data is there,
then `staged-in` until teardown. States that are missing here are shown unchanged.
"""


class BurstPool(msgspec.Struct, frozen=True):
    """A pool. Amounts count `unit`; `missing` is the amount in use beyond the pool's current size."""

    name: str
    unit: PoolUnit
    granularity: int
    total: int
    free: int
    used: int
    out_of_service: int
    missing: int
    is_default: bool


class BurstBuffer(msgspec.Struct, frozen=True):
    """A buffer that holds space: of a job, of an array task (`array_job` not 0), or persistent (`name`)."""

    job: int
    array_job: int
    array_task: int
    name: str
    pool: str
    unit: PoolUnit
    size: int
    state: str
    """As the record of Slurm's plugin shows it."""
    buffer_state: str
    """The state of the buffer, one of the sixteen."""
    created_at: Instant
    """When the space was reserved."""
    user: str


class BurstUse(msgspec.Struct, frozen=True):
    """Usage of one user in the pools of one unit."""

    user: str
    unit: PoolUnit
    used: int


class Burst(msgspec.Struct, frozen=True):
    """Complete output of `scontrol show burst`. Timeouts are whole seconds; unconfigured texts are empty."""

    provider: str
    granularity: int
    """Granularity of a request without a pool if no pool is the default."""
    pools: tuple[BurstPool, ...]
    flags: str
    poll_interval_s: int
    stage_in_timeout_s: int
    stage_out_timeout_s: int
    validate_timeout_s: int
    other_timeout_s: int
    allow_users: tuple[str, ...]
    deny_users: tuple[str, ...]
    create_buffer: str
    destroy_buffer: str
    get_sys_state: str
    get_sys_status: str
    start_stage_in: str
    start_stage_out: str
    stop_stage_in: str
    stop_stage_out: str
    buffers: tuple[BurstBuffer, ...]
    """Buffers, most recent reservation first."""
    uses: tuple[BurstUse, ...]


def burst_of(state: State, *, only_user: str | None = None, buffers: Sequence[BurstBuffer] | None = None) -> Burst:
    """Return the data to show; with `only_user`, only that user's buffers and usage (PrivateData).

    `buffers` is the result of `burst_buffers` sorted by `burst_place` in reverse; computed if omitted.
    """
    site = state.site
    if buffers is None:
        buffers = sorted(burst_buffers(state, only_user), key=burst_place, reverse=True)
    return Burst(
        provider=site.provider,
        granularity=site.granularity,
        pools=tuple(_pool(state, state.pools[name]) for name in sorted(state.pools)),
        flags=format_flags(site),
        poll_interval_s=site.poll_interval_s,
        stage_in_timeout_s=site.stage_in_timeout_s,
        stage_out_timeout_s=site.stage_out_timeout_s,
        validate_timeout_s=site.validate_timeout_s,
        other_timeout_s=site.other_timeout_s,
        allow_users=site.allow_users,
        deny_users=site.deny_users,
        create_buffer=site.create_buffer,
        destroy_buffer=site.destroy_buffer,
        get_sys_state=get_sys_state_of(site),
        get_sys_status=get_sys_status_of(site),
        start_stage_in=site.start_stage_in,
        start_stage_out=site.start_stage_out,
        stop_stage_in=site.stop_stage_in,
        stop_stage_out=site.stop_stage_out,
        buffers=tuple(buffers),
        uses=_uses(buffers),
    )


def _pool(state: State, pool: Pool) -> BurstPool:
    used = state.held_bytes.get(pool.name, 0)
    return BurstPool(
        name=pool.name,
        unit=pool.unit,
        granularity=pool.granularity_bytes,
        total=pool.quantity_bytes,
        free=free_bytes(pool, used),
        used=used,
        out_of_service=pool.out_of_service_bytes,
        missing=max(0, used - pool.usable_bytes),
        is_default=pool.is_default,
    )


def burst_buffers(state: State, only_user: str | None) -> Iterator[BurstBuffer]:
    """Yield the buffers that hold space, in no order; with `only_user` those of that user."""
    wanted: Callable[[str], bool] = (lambda user: True) if only_user is None else (lambda user: user == only_user)
    default = next((name for name in sorted(state.pools) if state.pools[name].is_default), "")
    for job_id in _near(state):
        buffer = state.buffers.get(job_id)
        if buffer is not None and buffer.state in HOLDING and wanted(state.jobs[job_id].request.user):
            yield _of_job(state, buffer, default)
    for name in state.persistent:
        kept = state.persistent[name]
        if wanted(kept.user):
            yield BurstBuffer(
                job=0,
                array_job=0,
                array_task=0,
                name=name,
                pool=kept.pool,
                unit=pool_unit(state.pools, kept.pool),
                size=kept.granted_bytes,
                state=kept.state.word,
                buffer_state=kept.state.word,
                created_at=kept.created_at,
                user=kept.user,
            )


def _near(state: State) -> set[int]:
    """Return the jobs that hold part of a pool or have data on a node; no other job can have a buffer."""
    found: set[int] = set()
    for jobs in (*state.holders.values(), *state.on_node.values()):
        found.update(jobs)
    return found


def _of_job(state: State, buffer: Buffer, default: str) -> BurstBuffer:
    request = state.jobs[buffer.job].request
    array = request.array
    pool = buffer.pool or default
    shown = RECORD_STATES.get(buffer.state, buffer.state.word)
    # Slurm's lua plugin has such records from the reservation to the end, also for buffers that reserve nothing.
    reserves_nothing = not buffer.granted_bytes and buffer.state in RECORD_STATES
    if reserves_nothing or provider_facts(state.site.provider).shows_allocated:
        shown = "allocated"
    return BurstBuffer(
        job=buffer.job,
        array_job=0 if array is None else array.job,
        array_task=0 if array is None else array.task,
        name="",
        pool=pool,
        unit=pool_unit(state.pools, pool),
        size=buffer.granted_bytes,
        state=shown,
        buffer_state=buffer.state.word,
        created_at=buffer.created_at,
        user=request.user,
    )


def burst_place(buffer: BurstBuffer) -> tuple[int, int, int, str]:
    """Return the sort key of a buffer: time of allocation, then job and task IDs, then name."""
    return buffer.created_at, buffer.array_job or buffer.job, buffer.array_task, buffer.name


def _uses(buffers: Sequence[BurstBuffer]) -> tuple[BurstUse, ...]:
    """Return the usage of each user by name, separately for each unit."""
    found: dict[tuple[str, bool], int] = {}
    for buffer in buffers:
        key = buffer.user, buffer.unit is PoolUnit.NODES
        found[key] = found.get(key, 0) + buffer.size
    return tuple(
        BurstUse(user, PoolUnit.NODES if nodes else PoolUnit.BYTES, used)
        for (user, nodes), used in sorted(found.items())
        if used
    )


MEGABYTE = 1024**2
"""The unit in which Slurm counts burst buffers as a trackable resource (TRES), bytes."""


def tres_count(state: State, job_id: int) -> int:
    """Return the burst-buffer TRES of a job in whole MB, rounded up: its own buffer and the persistent buffers it
    creates.
    """
    buffer, asked = state.buffers.get(job_id), state.jobs[job_id].request.buffer
    total = 0
    if buffer is not None and pool_unit(state.pools, buffer.pool) is PoolUnit.BYTES:
        total = buffer.granted_bytes
    for create in () if asked is None else asked.creates:
        pool = pool_named(state, create.pool)
        if pool is not None and pool.unit is PoolUnit.BYTES:
            total += round_up(create.capacity_bytes, pool.granularity_bytes)
    return megabytes(total)


def job_tres(state: State, job_id: int) -> str:
    """Format a job's resources as Slurm does after `TRES=`: `cpu=1,node=1,bb/lua=3G,license/matlab=2`."""
    request = state.jobs[job_id].request
    options = request.effective_options
    parts = [f"cpu={request.cpus}", f"node={options.nodes}"] if options.nodes else []
    count = tres_count(state, job_id)
    if count:
        parts.append(f"bb/{state.site.provider}={tres_size(count * MEGABYTE)}")
    parts.extend(f"license/{name}={number}" for name, number in options.licenses)
    return ",".join(parts)


def megabytes(size_bytes: int) -> int:
    """Convert a size to whole MB, rounded up, so that held space never counts as zero."""
    return round_up(size_bytes, MEGABYTE) // MEGABYTE


def tres_size(size_bytes: int) -> str:
    """Format a size as Slurm formats a TRES amount: whole MB with the largest exact suffix, for example `3G`."""
    amount, letters = megabytes(size_bytes), "MGTP"
    for letter in letters[:-1]:
        if amount % 1024 or not amount:
            return f"{amount}{letter}"
        amount //= 1024
    return f"{amount}{letters[-1]}"


def pool_named(state: State, name: str) -> Pool | None:
    if name:
        return state.pools.get(name)
    return next((state.pools[one] for one in sorted(state.pools) if state.pools[one].is_default), None)
