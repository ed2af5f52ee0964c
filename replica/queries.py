"""What people and programs ask of a State: pure answers, for the API and for time travel alike."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from replica.model.buffers import BufferState
from replica.model.jobs import NO_EXTRA, Hold, JobState
from replica.model.pools import Pool, free_bytes
from replica.scheduler.gates import later_reason
from replica.scheduler.index import Agenda
from replica.scheduler.scheduling_pass import verdicts_of
from replica.state.state import State
from replica.values.verdicts import Verdict


class PoolUse(msgspec.Struct, frozen=True):
    """A pool and its derived figures, bytes."""

    pool: Pool
    held_bytes: int
    free_bytes: int


def pool_use(state: State, name: str) -> PoolUse:
    """Return a pool with its derived free capacity: total - held - out of service. Raises KeyError for an unknown
    pool.
    """
    pool = state.pools[name]
    held = state.held_bytes.get(name, 0)
    return PoolUse(pool, held, free_bytes(pool, held))


def verdicts(state: State) -> Mapping[int, Verdict]:
    """Return what holds back each job that is not over, as of `state.at`: one scheduling pass over the state."""
    return verdicts_of(Agenda(state), state.unfinished, state.at)


def verdict_of(state: State, job_id: int) -> Verdict:
    """Return what holds back one job as of `state.at`. Raises KeyError for a job that is not in the state."""
    if job_id in state.unfinished:
        return verdicts_of(Agenda(state), (job_id,), state.at)[job_id]
    return later_reason(state.jobs[job_id], state.buffers.get(job_id), state.site.provider)


def buffer_word(state: State, job_id: int) -> str | None:
    """Return the buffer state of a job as people see it (`BurstBufferState=`), or None if it asked for no buffer.

    A job that was held because of what failed, and whose buffer was torn down for that, shows `complete` until it is
    released (SEMANTICS, When something fails): only then does it wait for another one. KeyError for an unknown job.
    """
    job, buffer = state.jobs[job_id], state.buffers.get(job_id)
    if buffer is None:
        return None
    gone = buffer.state is BufferState.PENDING and job.state is JobState.PENDING and job.hold is not Hold.NONE
    if gone and job.attempt and state.extras.get(job_id, NO_EXTRA).held_because:
        return BufferState.COMPLETE.word
    return buffer.state.word


def reason_of(state: State, job_id: int) -> str:
    """Return the reason of one job, byte for byte as Slurm spells it."""
    return str(verdict_of(state, job_id).reason)
