"""What Slurm asks a burst-buffer plugin, as questions to a State: with its words, and with its answers.

Source: the Burst Buffer Plugin Programmer Guide. The functions that change something are operations of the API,
and the ones that are events here; docs/reference/plugin-api.md names the counterpart of each.
"""

from __future__ import annotations

from forebay.replica.grammar.directives import read_request
from forebay.replica.model.buffers import PERSISTENT_STATES, BufferState
from forebay.replica.model.jobs import Job
from forebay.replica.model.pools import PoolUnit, pool_unit
from forebay.replica.state.state import State
from forebay.replica.values.units import NEVER, round_up
from forebay.replica.views.burst import MEGABYTE, megabytes, pool_named, tres_size

UNDER_WAY = 0
COMPLETE = 1
BROKEN = -1
"""What the three test functions answer: BROKEN is also "not started"."""

_BEFORE_SPACE = frozenset({BufferState.PENDING})
_AFTER_POST_RUN = frozenset(
    {BufferState.STAGING_OUT, BufferState.TEARDOWN, BufferState.TEARDOWN_FAIL, BufferState.COMPLETE}
)
_AFTER_STAGE_OUT = _AFTER_POST_RUN - {BufferState.STAGING_OUT}


def get_system_size(state: State, name: str | None = None) -> int:
    """Return the space of all pools that count bytes, whole MB (1024 * 1024); 0 for another provider's `name`."""
    if name is not None and name != state.site.provider:
        return 0
    sizes = (pool.quantity_bytes for pool in state.pools.values() if pool.unit is PoolUnit.BYTES)
    return sum(sizes) // MEGABYTE


def job_test_stage_in(state: State, job_id: int) -> int:
    """Return whether stage-in is UNDER_WAY, COMPLETE (without a buffer: too), or BROKEN: not started, or failed."""
    job, buffer = state.jobs[job_id], state.buffers.get(job_id)
    if buffer is None or buffer.state is BufferState.STAGED_IN:
        return COMPLETE
    if buffer.state is BufferState.STAGING_IN and not _has_failed(job):
        return UNDER_WAY
    return BROKEN


def job_test_post_run(state: State, job_id: int) -> int:
    """Return whether post-run is UNDER_WAY, COMPLETE, or BROKEN: failed for good, or not the job's turn yet."""
    return _test(state, job_id, under_way=frozenset({BufferState.POST_RUN}), over=_AFTER_POST_RUN)


def job_test_stage_out(state: State, job_id: int) -> int:
    """Return whether stage-out, post-run included, is UNDER_WAY, COMPLETE (nothing was staged in: too), or BROKEN."""
    buffer = state.buffers.get(job_id)
    if buffer is not None and buffer.state in _BEFORE_SPACE:
        return COMPLETE
    under_way = frozenset({BufferState.POST_RUN, BufferState.STAGING_OUT})
    return _test(state, job_id, under_way=under_way, over=_AFTER_STAGE_OUT)


def _test(state: State, job_id: int, *, under_way: frozenset[BufferState], over: frozenset[BufferState]) -> int:
    job, buffer = state.jobs[job_id], state.buffers.get(job_id)
    if buffer is None or buffer.state in over:
        return COMPLETE
    return UNDER_WAY if buffer.state in under_way and not job.stuck else BROKEN


def _has_failed(job: Job) -> bool:
    """Whether stage-in failed and nothing is under way: it waits for a release."""
    return job.stuck and job.retry_at == NEVER


def persistent_count(state: State) -> int:
    """Return how much persistent buffers hold, whole MB, rounded up: what no job counts for."""
    kept = (one for one in state.persistent.values() if one.state in PERSISTENT_STATES)
    return megabytes(sum(one.granted_bytes for one in kept if pool_unit(state.pools, one.pool) is PoolUnit.BYTES))


def xlate_bb_2_tres_str(state: State, burst_buffer: str) -> str:
    """Return the TRES of a request as it was written, `bb/datawarp=200G`; empty where it asks for no space.

    DirectiveRejected for what is no request.
    """
    site = state.site
    # As it is kept it is lines of a script; as it is typed it may be the short form of `--bb`.
    script, short = (burst_buffer, "") if burst_buffer.lstrip().startswith("#") else ("", burst_buffer)
    reading = read_request(script, short, provider=site.provider, directive=site.directive)
    total = 0
    asked = [] if reading.request is None else [(reading.request.pool, reading.request.capacity_bytes)]
    if reading.request is not None:
        asked += [(create.pool, create.capacity_bytes) for create in reading.request.creates]
    for name, size in asked:
        pool = pool_named(state, name)
        if pool is not None and pool.unit is PoolUnit.BYTES:
            total += round_up(size, pool.granularity_bytes)
    return f"bb/{site.provider}={tres_size(total)}" if total else ""
