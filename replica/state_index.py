"""The derived maps of a State: computed here from nothing, kept up to date by `fold`, compared by `invariants`."""

from __future__ import annotations

import immutables
import msgspec

from replica.buffers import Buffer, BufferState
from replica.jobs import ENDED, Job
from replica.state import State


def is_finished(job: Job, buffer: Buffer | None) -> bool:
    """Return whether the job is over and holds nothing."""
    return job.state in ENDED and (buffer is None or buffer.state is BufferState.COMPLETE)


def held_bytes(state: State) -> dict[str, int]:
    """Return pool -> bytes held, summed over all buffers; pools that hold nothing are left out."""
    held: dict[str, int] = {}
    for buffer in state.buffers.values():
        if buffer.held_bytes:
            held[buffer.pool] = held.get(buffer.pool, 0) + buffer.held_bytes
    return held


def derive(state: State) -> State:
    """Return the state with its derived maps computed from nothing."""
    unfinished: dict[int, bool] = {}
    finished: dict[int, bool] = {}
    for job in state.jobs.values():
        (finished if is_finished(job, state.buffers.get(job.id)) else unfinished)[job.id] = True
    return msgspec.structs.replace(
        state,
        held_bytes=immutables.Map(held_bytes(state)),
        unfinished=immutables.Map(unfinished),
        finished=immutables.Map(finished),
    )
