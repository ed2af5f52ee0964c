"""Guests: where one stands, as its scheduler sees it, and what ends it by itself.

A phase is a function of the job and its buffer, so that each command of a scheduler is a repeat or a no-op by the
guest's own state, however often it comes and whoever sends it. `replica.decide.guests` has the table.
"""

from __future__ import annotations

from enum import StrEnum
from heapq import nlargest
from itertools import islice
from typing import NamedTuple

from replica.messages import events as e
from replica.model import (
    Buffer,
    BufferRequest,
    BufferState,
    GuestStep,
    Job,
    JobState,
    Pool,
    destinations_of,
    format_amount,
    free_bytes,
)
from replica.state import Facts
from replica.values import NEVER, Instant, seconds


class GuestPhase(StrEnum):
    """Where a guest stands: the words of the API."""

    NONE = "none"
    """There is no guest of that name, or not of that epoch."""
    WAITING = "waiting"
    """Its setup waits for space."""
    SET_UP = "set-up"
    """It has its space; nothing is there, or only what lingered."""
    STAGING_IN = "staging-in"
    STAGE_IN_FAILED = "stage-in-failed"
    """Until its scheduler asks for it again."""
    STAGED_IN = "staged-in"
    RUNNING = "running"
    POST_RUN = "post-run"
    """Its run has ended, and its stage-out was not asked for."""
    STAGING_OUT = "staging-out"
    STAGE_OUT_FAILED = "stage-out-failed"
    LINGERING = "lingering"
    PARKED = "parked"
    """Torn down with results that are not exported, or are being exported."""
    TEARDOWN = "teardown"
    TEARDOWN_FAILED = "teardown-failed"
    OVER = "over"


_PHASES = {
    BufferState.PENDING: GuestPhase.WAITING,
    BufferState.STAGING_IN: GuestPhase.STAGING_IN,
    BufferState.STAGED_IN: GuestPhase.STAGED_IN,
    BufferState.PRE_RUN: GuestPhase.RUNNING,
    BufferState.RUNNING: GuestPhase.RUNNING,
    BufferState.POST_RUN: GuestPhase.POST_RUN,
    BufferState.STAGING_OUT: GuestPhase.STAGING_OUT,
    BufferState.TEARDOWN: GuestPhase.TEARDOWN,
    BufferState.TEARDOWN_FAIL: GuestPhase.TEARDOWN_FAILED,
    BufferState.COMPLETE: GuestPhase.OVER,
}

_STEPS = {
    (BufferState.STAGING_IN, GuestStep.SET_UP): GuestPhase.SET_UP,
    (BufferState.STAGING_IN, GuestStep.LINGERING): GuestPhase.LINGERING,
    (BufferState.STAGED_IN, GuestStep.LINGERING): GuestPhase.LINGERING,
    (BufferState.POST_RUN, GuestStep.PARKED): GuestPhase.PARKED,
    (BufferState.STAGING_OUT, GuestStep.PARKED): GuestPhase.PARKED,
}

_FAILED = {
    GuestPhase.STAGING_IN: GuestPhase.STAGE_IN_FAILED,
    GuestPhase.STAGING_OUT: GuestPhase.STAGE_OUT_FAILED,
}


def guest_phase(job: Job, buffer: Buffer) -> GuestPhase:
    """Return where a guest stands."""
    guest = job.guest
    assert guest is not None
    phase = _STEPS.get((buffer.state, guest.step)) or _PHASES[buffer.state]
    return _FAILED.get(phase, phase) if job.stuck else phase


class FoundGuest(NamedTuple):
    """A guest by its name: its last epoch, and where that stands."""

    name: str
    phase: GuestPhase
    job: Job | None
    buffer: Buffer | None
    epoch: int
    """The last epoch that there was, 0 for none."""


def find_guest(state: Facts, name: str, epoch: int = 0) -> FoundGuest:
    """Return the last epoch of a guest; the phase is NONE where there is none, or another `epoch` is meant."""
    known = state.guests.get(name)
    if known is None:
        return FoundGuest(name, GuestPhase.NONE, None, None, 0)
    job, buffer = state.jobs.get(known.job), state.buffers.get(known.job)
    if job is None or buffer is None or (epoch and epoch != known.epoch):
        return FoundGuest(name, GuestPhase.NONE, None, None, known.epoch)
    return FoundGuest(name, guest_phase(job, buffer), job, buffer, known.epoch)


def has_results(job: Job) -> bool:
    """Whether the job said that something is to be staged out."""
    asked = job.request.buffer
    return asked is not None and bool(destinations_of(job.request) or asked.stage_out_command)


def is_lingering(job: Job, buffer: Buffer) -> bool:
    """Whether a guest lingers: its space is anybody's."""
    return job.guest is not None and guest_phase(job, buffer) is GuestPhase.LINGERING


def setup_fails_at(state: Facts, job: Job, buffer: Buffer) -> Instant:
    """Return when the setup of a guest that waits for space has waited for long enough; NEVER for any other."""
    if job.guest is None or buffer.state is not BufferState.PENDING:
        return NEVER
    return Instant(job.guest.since + seconds(state.site.guest_setup_wait_s))


def lingers_until(state: Facts, job: Job) -> Instant:
    """Return until when the data of a guest is kept that lingers; NEVER for any other."""
    if job.guest is None or job.guest.step is not GuestStep.LINGERING or job.state is not JobState.PENDING:
        return NEVER
    return Instant(job.guest.since + seconds(state.site.guest_linger_s))


def guest_due_at(state: Facts, job: Job, buffer: Buffer) -> Instant:
    """Return when something happens to a guest by time alone, beside what happens to every operation; NEVER."""
    return setup_fails_at(state, job, buffer) or lingers_until(state, job)


def guest_due_events(state: Facts, job: Job, buffer: Buffer, at: Instant) -> tuple[e.Event, ...]:
    """Return what happens to a guest at `at` by time alone."""
    fails_at, until = setup_fails_at(state, job, buffer), lingers_until(state, job)
    if fails_at != NEVER and fails_at <= at:
        return (e.GuestSetupFailed(job.id, no_space(state, buffer)),)
    if until != NEVER and until <= at:
        return given_up(job, f"nobody has set it up again for {state.site.guest_linger_s} s")
    return ()


def given_up(job: Job, reason: str) -> tuple[e.TeardownStarted]:
    """Return what removes a guest that lingers."""
    return (e.TeardownStarted(job.id, job.attempt + 1, JobState.CANCELLED, True, reason),)


HOLDERS_LOOKED_AT_MAX = 1_000
"""Holders of a pool among which the largest are looked for to be named, count: less than a millisecond."""

_HOLDERS_NAMED = 3


def waits_for_names(state: Facts, job: Job) -> str:
    """Return which persistent buffer keeps a guest back, in words; empty if none does."""
    asked = job.request.buffer
    for name in () if asked is None else asked.uses:
        known = state.persistent.get(name)
        if known is None:
            return f"there is no persistent buffer {name}"
        if known.state is not BufferState.ALLOCATED:
            return f"the persistent buffer {name} is {known.state.word}"
        if not known.place:
            return f"the persistent buffer {name} is on node {known.node}, and not in a place that all nodes see"
    return ""


def no_space(state: Facts, buffer: Buffer) -> str:
    """Return the sentence on a guest that got no space: who has it, or which persistent buffer kept it back."""
    missing = waits_for_names(state, state.jobs[buffer.job])
    if missing:
        return missing
    pool = state.pools.get(buffer.pool)
    if pool is None:
        return f"there is no pool {buffer.pool} any more"
    return f"no space for {state.site.guest_setup_wait_s} s: {_who_has_it(state, pool, buffer.granted_bytes)}"


def made_later(state: Facts, asked: BufferRequest) -> str:
    """Return the sentence on what makes or removes a persistent buffer and waits: who has the space, or who uses it."""
    for create in asked.creates:
        pool = state.pools.get(create.pool)
        if pool is None:
            return f"there is no pool {create.pool} any more"
        if create.capacity_bytes > free_bytes(pool, state.held_bytes.get(pool.name, 0)):
            return f"no space yet: {_who_has_it(state, pool, create.capacity_bytes)}"
    for destroy in asked.destroys:
        users = len(state.using.get(destroy.name, ()))
        if users:
            return f"{users} jobs use the persistent buffer {destroy.name}"
    return "it waits for its turn, or for a mover that is up"


def _who_has_it(state: Facts, pool: Pool, wanted: int) -> str:
    name, unit = pool.name, pool.unit
    held = state.held_bytes.get(name, 0)
    holders = state.holders.get(name, ())
    looked_at = islice(holders, HOLDERS_LOOKED_AT_MAX)
    largest = nlargest(_HOLDERS_NAMED, ((state.buffers[job_id].held_bytes, -job_id) for job_id in looked_at))
    named = ", ".join(f"{_named(state.jobs[-number])} {format_amount(size, unit)}" for size, number in largest)
    more = "" if len(holders) <= len(largest) else f" and {len(holders) - len(largest)} more"
    free = format_amount(free_bytes(pool, held), unit)
    kept = f"; of it, {named}{more}" if named else ""
    total = format_amount(pool.usable_bytes, unit)
    return f"{format_amount(wanted, unit)} of pool {name} were asked for, and {free} are free of {total}{kept}"


def _named(job: Job) -> str:
    return f"job {job.id}" if job.guest is None else job.guest.name
