"""What agents must do: a query over the state, pulled and level-triggered (law 7).

An order stands in the answer for as long as it is to be done or going on; when it is gone, the agent ends the
operation. (job, attempt) names an order for ever.
"""

from __future__ import annotations

import msgspec

from replica.buffers import Access, Buffer, BufferState, Transfer
from replica.events import Stage
from replica.jobs import Job, JobState
from replica.state import State

_STAGE_OF = {
    BufferState.STAGING_IN: Stage.STAGE_IN,
    BufferState.PRE_RUN: Stage.RUN,
    BufferState.RUNNING: Stage.RUN,
    BufferState.POST_RUN: Stage.POST_RUN,
    BufferState.STAGING_OUT: Stage.STAGE_OUT,
    BufferState.TEARDOWN: Stage.TEARDOWN,
}


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to do, as agents read it (JSON object). Durations are seconds, sizes bytes."""

    job: int
    attempt: int
    stage: str
    """stage_in, run, post_run, stage_out or teardown."""
    user: str
    name: str
    workdir: str
    capacity_bytes: int = 0
    """What the buffer may hold; 0: no capacity was asked for."""
    has_buffer: bool = False
    access: tuple[str, ...] = ()
    """striped, private, ldbalance: which DW_JOB_* variables the job has."""
    transfers: tuple[Transfer, ...] = ()
    """For stage_in and stage_out: (kind, outside path, inside path such as $DW_JOB_STRIPED/data)."""
    roots: tuple[str, ...] = ()
    """Directories that the outside paths must lie beneath, already expanded for the user."""
    timeout_s: int = 0
    """stage_in, post_run, stage_out, teardown: how long the operation may take."""
    script: str = ""
    output: str = ""
    """run: the file for standard output and error, absolute."""
    environment: tuple[tuple[str, str], ...] = ()
    time_limit_s: int = 0
    cpus: int = 1
    cancel: bool = False
    """run: the script is to be ended, result CANCELLED."""
    started: bool = False
    """run: the controller knows that the script was started; an agent with no record of it must report NODE_FAIL,
    never start it.
    """
    hurry: bool = False


def stage_of(job: Job, buffer: Buffer | None) -> Stage | None:
    """Return the operation that the job's agent has to do now, or None."""
    if buffer is None:
        return Stage.RUN if job.state in (JobState.CONFIGURING, JobState.RUNNING) else None
    return _STAGE_OF.get(buffer.state)


def expand_roots(roots: tuple[str, ...], user: str) -> tuple[str, ...]:
    """Return the policy's roots with `%u` replaced."""
    return tuple(root.replace("%u", user) for root in roots)


def orders_for(state: State, node: str) -> tuple[Order, ...]:
    """Return what the node's agent has to do at this state, by job id."""
    orders = []
    for job_id in sorted(state.unfinished):
        job = state.jobs[job_id]
        if job.node != node or job.stuck or job.retry_at:
            continue
        buffer = state.buffers.get(job_id)
        stage = stage_of(job, buffer)
        if stage is not None:
            orders.append(_order(state, job, buffer, stage))
    return tuple(orders)


def _order(state: State, job: Job, buffer: Buffer | None, stage: Stage) -> Order:
    policy, spec = state.policy, job.spec
    transfers: tuple[Transfer, ...] = ()
    roots: tuple[str, ...] = ()
    timeout_s = policy.other_timeout_s
    access: tuple[Access, ...] = ()
    if buffer is not None:
        access = buffer.request.access
        if stage is Stage.STAGE_IN:
            transfers, timeout_s = buffer.request.stage_in, policy.stage_in_timeout_s
            roots = expand_roots(policy.sources, spec.user)
        elif stage is Stage.STAGE_OUT:
            transfers, timeout_s = buffer.request.stage_out, policy.stage_out_timeout_s
            roots = expand_roots(policy.destinations, spec.user)
    running = stage is Stage.RUN
    return Order(
        job=job.id,
        attempt=job.attempt,
        stage=stage.word,
        user=spec.user,
        name=spec.name,
        workdir=spec.workdir,
        capacity_bytes=0 if buffer is None else buffer.granted_bytes,
        has_buffer=buffer is not None,
        access=tuple(way.name.lower() for way in access),
        transfers=transfers,
        roots=expand_roots(policy.destinations, spec.user) if running else roots,
        timeout_s=0 if running else timeout_s,
        script=spec.script if running else "",
        output=spec.output if running else "",
        environment=spec.environment if running else (),
        time_limit_s=spec.time_limit_s if running else 0,
        cpus=spec.cpus,
        cancel=running and job.cancelled,
        started=running and job.state is JobState.RUNNING,
        hurry=job.hurry,
    )
