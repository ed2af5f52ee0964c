"""External jobs: their phases, as the scheduler sees them, and transitions by time alone.

A phase is a function of the job and its buffer. Repeats of a scheduler's command are therefore recognised by the
external job's own state. The table is in `replica.decide.external_jobs`.
"""

from __future__ import annotations

from enum import StrEnum
from heapq import nlargest
from itertools import islice
from typing import NamedTuple

from forebay.replica.messages import events as e
from forebay.replica.model import (
    Buffer,
    BufferRequest,
    BufferState,
    ExternalJobStep,
    Job,
    JobState,
    Pool,
    destinations_of,
    format_amount,
    free_bytes,
)
from forebay.replica.state import Facts
from forebay.replica.values import NEVER, Instant, seconds


class ExternalJobPhase(StrEnum):
    """Phases of an external job, spelled as in the API."""

    NONE = "none"
    """No external job has that name, or that epoch."""
    WAITING = "waiting"
    """Its setup waits for space."""
    SET_UP = "set-up"
    """Space is held; the buffer is empty, or has the data of a lingering epoch."""
    STAGING_IN = "staging-in"
    STAGE_IN_FAILED = "stage-in-failed"
    """Until its scheduler requests it again."""
    STAGED_IN = "staged-in"
    RUNNING = "running"
    POST_RUN = "post-run"
    """The run has ended, and stage-out has not been requested."""
    STAGING_OUT = "staging-out"
    STAGE_OUT_FAILED = "stage-out-failed"
    LINGERING = "lingering"
    RETAINED = "retained"
    """Torn down with results that are not exported yet."""
    TEARDOWN = "teardown"
    TEARDOWN_FAILED = "teardown-failed"
    OVER = "over"


_PHASES = {
    BufferState.PENDING: ExternalJobPhase.WAITING,
    BufferState.STAGING_IN: ExternalJobPhase.STAGING_IN,
    BufferState.STAGED_IN: ExternalJobPhase.STAGED_IN,
    BufferState.PRE_RUN: ExternalJobPhase.RUNNING,
    BufferState.RUNNING: ExternalJobPhase.RUNNING,
    BufferState.POST_RUN: ExternalJobPhase.POST_RUN,
    BufferState.STAGING_OUT: ExternalJobPhase.STAGING_OUT,
    BufferState.TEARDOWN: ExternalJobPhase.TEARDOWN,
    BufferState.TEARDOWN_FAIL: ExternalJobPhase.TEARDOWN_FAILED,
    BufferState.COMPLETE: ExternalJobPhase.OVER,
}

_STEPS = {
    (BufferState.STAGING_IN, ExternalJobStep.SET_UP): ExternalJobPhase.SET_UP,
    (BufferState.STAGING_IN, ExternalJobStep.LINGERING): ExternalJobPhase.LINGERING,
    (BufferState.STAGED_IN, ExternalJobStep.LINGERING): ExternalJobPhase.LINGERING,
    (BufferState.POST_RUN, ExternalJobStep.RETAINED): ExternalJobPhase.RETAINED,
    (BufferState.STAGING_OUT, ExternalJobStep.RETAINED): ExternalJobPhase.RETAINED,
}

_FAILED = {
    ExternalJobPhase.STAGING_IN: ExternalJobPhase.STAGE_IN_FAILED,
    ExternalJobPhase.STAGING_OUT: ExternalJobPhase.STAGE_OUT_FAILED,
}


def external_job_phase(job: Job, buffer: Buffer) -> ExternalJobPhase:
    """Return the phase of an external job."""
    external_job = job.external_job
    assert external_job is not None
    phase = _STEPS.get((buffer.state, external_job.step)) or _PHASES[buffer.state]
    return _FAILED.get(phase, phase) if job.stuck else phase


class ExternalJobLookup(NamedTuple):
    """Result of a lookup by name: the last epoch of an external job, with its phase."""

    name: str
    phase: ExternalJobPhase
    job: Job | None
    buffer: Buffer | None
    epoch: int
    """The last epoch, 0 for none."""


def find_external_job(state: Facts, name: str, epoch: int = 0) -> ExternalJobLookup:
    """Return the last epoch of an external job; the phase is NONE if there is none or `epoch` differs."""
    known = state.external_jobs.get(name)
    if known is None:
        return ExternalJobLookup(name, ExternalJobPhase.NONE, None, None, 0)
    job, buffer = state.jobs.get(known.job), state.buffers.get(known.job)
    if job is None or buffer is None or (epoch and epoch != known.epoch):
        return ExternalJobLookup(name, ExternalJobPhase.NONE, None, None, known.epoch)
    return ExternalJobLookup(name, external_job_phase(job, buffer), job, buffer, known.epoch)


def has_results(job: Job) -> bool:
    """Return whether the job requested a stage-out."""
    asked = job.request.buffer
    return asked is not None and bool(destinations_of(job.request) or asked.stage_out_command)


def is_lingering(job: Job, buffer: Buffer) -> bool:
    """Return whether an external job lingers, so that any other job may take its space."""
    return job.external_job is not None and external_job_phase(job, buffer) is ExternalJobPhase.LINGERING


def setup_fails_at(state: Facts, job: Job, buffer: Buffer) -> Instant:
    """Return the time at which the setup of a waiting external job fails; NEVER for all other jobs."""
    if job.external_job is None or buffer.state is not BufferState.PENDING:
        return NEVER
    return Instant(job.external_job.since + seconds(state.site.external_job_setup_wait_s))


def lingers_until(state: Facts, job: Job) -> Instant:
    """Return the end of the retention of a lingering external job; NEVER for all other jobs."""
    if (
        job.external_job is None
        or job.external_job.step is not ExternalJobStep.LINGERING
        or job.state is not JobState.PENDING
    ):
        return NEVER
    return Instant(job.external_job.since + seconds(state.site.external_job_linger_s))


def external_job_due_at(state: Facts, job: Job, buffer: Buffer) -> Instant:
    """Return the time of the next timer of an external job, besides those of all operations; NEVER for none."""
    return setup_fails_at(state, job, buffer) or lingers_until(state, job)


def external_job_due_events(state: Facts, job: Job, buffer: Buffer, at: Instant) -> tuple[e.Event, ...]:
    """Return the events of an external job's timers that are due at `at`."""
    fails_at, until = setup_fails_at(state, job, buffer), lingers_until(state, job)
    if fails_at != NEVER and fails_at <= at:
        return (e.ExternalJobSetupFailed(job.id, no_space_message(state, buffer)),)
    if until != NEVER and until <= at:
        return give_up_events(job, f"its scheduler has not set it up again for {state.site.external_job_linger_s} s")
    return ()


def give_up_events(job: Job, reason: str) -> tuple[e.TeardownStarted]:
    """Return the events that remove a lingering external job."""
    return (e.TeardownStarted(job.id, job.attempt + 1, JobState.CANCELLED, True, reason),)


HOLDERS_LOOKED_AT_MAX = 1_000
"""Holders of a pool examined to name the largest, count: less than a millisecond."""

_HOLDERS_NAMED = 3


def persistent_obstacle(state: Facts, job: Job) -> str:
    """Return a message on the persistent buffer that blocks an external job; empty if none does."""
    asked = job.request.buffer
    for name in () if asked is None else asked.uses:
        known = state.persistent.get(name)
        if known is None:
            return f"persistent buffer {name} does not exist"
        if known.state is not BufferState.ALLOCATED:
            return f"persistent buffer {name} is {known.state.word}"
        if not known.filesystem:
            return f"persistent buffer {name} is on node {known.node}, not in a shared filesystem"
    return ""


def no_space_message(state: Facts, buffer: Buffer) -> str:
    """Return the message on an external job that got no space: the pool's usage, or the blocking persistent buffer."""
    missing = persistent_obstacle(state, state.jobs[buffer.job])
    if missing:
        return missing
    pool = state.pools.get(buffer.pool)
    if pool is None:
        return f"pool {buffer.pool} no longer exists"
    usage = _space_usage_message(state, pool, buffer.granted_bytes)
    return f"no space became free within {state.site.external_job_setup_wait_s} s: {usage}"


def persistent_wait_message(state: Facts, asked: BufferRequest) -> str:
    """Return the message on a pending creation or deletion of persistent buffers: the pool's usage, or the users."""
    for create in asked.creates:
        pool = state.pools.get(create.pool)
        if pool is None:
            return f"pool {create.pool} no longer exists"
        if create.capacity_bytes > free_bytes(pool, state.held_bytes.get(pool.name, 0)):
            return f"no space yet: {_space_usage_message(state, pool, create.capacity_bytes)}"
    for destroy in asked.destroys:
        users = len(state.using.get(destroy.name, ()))
        if users:
            return f"{users} {'job uses' if users == 1 else 'jobs use'} persistent buffer {destroy.name}"
    return "it waits for earlier requests, or for a mover that is up"


def _space_usage_message(state: Facts, pool: Pool, wanted: int) -> str:
    name, unit = pool.name, pool.unit
    held = state.held_bytes.get(name, 0)
    holders = state.holders.get(name, ())
    looked_at = islice(holders, HOLDERS_LOOKED_AT_MAX)
    largest = nlargest(_HOLDERS_NAMED, ((state.buffers[job_id].held_bytes, -job_id) for job_id in looked_at))
    named = ", ".join(f"{_job_label(state.jobs[-number])} {format_amount(size, unit)}" for size, number in largest)
    more = "" if len(holders) <= len(largest) else f" and {len(holders) - len(largest)} more"
    free = format_amount(free_bytes(pool, held), unit)
    kept = f"; of it, {named}{more}" if named else ""
    total = format_amount(pool.usable_bytes, unit)
    return f"{format_amount(wanted, unit)} of pool {name} were requested, and {free} of {total} are free{kept}"


def _job_label(job: Job) -> str:
    return f"job {job.id}" if job.external_job is None else job.external_job.name
