"""Persistent buffers: space with a name that outlives the jobs that make, use and remove it.

It holds its space from allocating to deleted (law 8), whatever jobs do. Names are unique in the cluster, as in Slurm.
"""

from __future__ import annotations

import msgspec

from replica.model.buffers import HOLDING, Access, BufferState
from replica.model.requests import BufferRequest
from replica.values import NEVER, Instant

PERSISTENT_STATES = frozenset({BufferState.ALLOCATING, BufferState.ALLOCATED, BufferState.DELETING})
"""The states of a persistent buffer that is there; a deleted one has no record any more."""


def named_by(request: BufferRequest | None) -> frozenset[str]:
    """Return the names of the persistent buffers that a job creates, destroys or uses."""
    if request is None:
        return frozenset()
    return frozenset(
        (*(one.name for one in request.creates), *(one.name for one in request.destroys), *request.uses)
    )  # fmt: skip


class PersistentBuffer(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One persistent buffer. Times are Instants, sizes bytes (units of the pool where it counts those)."""

    name: str
    user: str
    """Who owns it: the user of the job that made it."""
    gid: int
    pool: str
    granted_bytes: int
    access: tuple[Access, ...]
    type: str
    state: BufferState
    """ALLOCATING, ALLOCATED or DELETING; a deleted one has no record any more."""
    node: str
    """Whose storage holds it; empty where it lies in a place."""
    job: int
    """The job that creates it, or has it deleted, while that is under way; afterwards the one that made it."""
    created_at: Instant = NEVER
    changed_at: Instant = NEVER
    hurry: bool = False
    place: str = ""
    """The place that it lies in; then it has no `node`, and the jobs that use it may run on any."""
    directory: str = ""
    """Where it lies below the path of its place: `CLUSTER/NAME.JOB.EPOCH`, of the job that made it and the attempt that
    its space was given as. One that is made again under its name never lies where an earlier one did."""

    @property
    def held_bytes(self) -> int:
        """What it takes from its pool now, bytes."""
        return self.granted_bytes if self.state in HOLDING else 0
