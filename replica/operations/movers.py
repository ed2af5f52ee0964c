"""Movers: choose the agent that stages for a job whose buffer lies in a shared filesystem, and take over from a failed
one.

Any mover of a shared filesystem can continue the work of another, because both the data and the records of its
transfers lie there. Concurrent writes are not excluded here: the filesystem fences an earlier attempt from a later one
(`cluster.agent.transfer.fence`), so a mover may be replaced without proof that it has stopped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from replica.messages import events as e
from replica.model import (
    NATIVE,
    Buffer,
    BufferState,
    Job,
    MovingKey,
    SharedFilesystem,
    pool_filesystem,
)
from replica.state import Facts, State

_NONE_BEGUN: Mapping[MovingKey, int] = {}
_STAGED_BY_MOVERS = (BufferState.STAGING_IN, BufferState.STAGING_OUT, BufferState.TEARDOWN, BufferState.TEARDOWN_FAIL)


def filesystem_of_pool(state: Facts, pool: str) -> SharedFilesystem | None:
    """Return the shared filesystem that buffers of a pool lie in; None: each is on one node, or the site's own
    programs make it.
    """
    return pool_filesystem(state.pools, state.filesystems, pool) if state.site.provider == NATIVE else None


def directory_in_filesystem(state: Facts, buffer: Buffer) -> str:
    """Return where a buffer lies below the path of its shared filesystem: `CLUSTER/JOB.EPOCH`."""
    return f"{state.name}/{buffer.job}.{buffer.epoch}"


def persistent_directory(state: Facts, name: str, job: int, attempt: int) -> str:
    """Return where a persistent buffer lies below the path of its shared filesystem: `CLUSTER/NAME.JOB.EPOCH`.

    No name begins with a digit, so it is never the buffer of a job; what follows the name is a job and an attempt of
    it, so it is never another persistent buffer either, nor an earlier one of this name.
    """
    return f"{state.name}/{name}.{job}.{attempt}"


def filesystems_of(state: Facts, buffer: Buffer) -> tuple[SharedFilesystem, ...]:
    """Return the shared filesystems that the operations of a job need, first the one that its own buffer lies in; empty
    where they are done on its node, or one of them is no more.
    """
    if buffer.filesystems:
        found = tuple(state.filesystems[name] for name in buffer.filesystems if name in state.filesystems)
        return found if len(found) == len(buffer.filesystems) else ()
    filesystem = filesystem_of_pool(state, buffer.pool)
    return () if filesystem is None else (filesystem,)


def choose_mover(
    state: Facts,
    filesystem: SharedFilesystem,
    begun: Mapping[MovingKey, int] = _NONE_BEGUN,
    also: Sequence[SharedFilesystem] = (),
) -> str:
    """Return the mover of a shared filesystem, and of all shared filesystems in `also`, that is up and has the fewest
    transfers, by name where several have; empty if none is up. `begun` counts transfers that began and that the State
    does not count yet.
    """
    best: tuple[int, str] | None = None
    for name in filesystem.movers:
        node = state.nodes.get(name)
        if node is not None and node.is_up and all(name in other.movers for other in also):
            key = ("", name)
            one = state.moving.get(key, 0) + begun.get(key, 0), name
            best = one if best is None or one < best else best
    return "" if best is None else best[1]


def choose_external_job_mover(state: Facts, job: Job, filesystems: Sequence[SharedFilesystem]) -> str:
    """Return the mover that is to stage for an external job: the one that did so before while it is up, else as
    `choose_mover`.

    Where none is up, one that another takes over from as soon as it is; empty: no mover stages for all of the shared
    filesystems.
    """
    node = state.nodes.get(job.mover)
    if node is not None and node.is_up and all(job.mover in filesystem.movers for filesystem in filesystems):
        return job.mover
    first, *also = filesystems
    all_of = (name for name in first.movers if all(name in other.movers for other in also))
    return choose_mover(state, first, also=also) or next(all_of, "")


def stage_out_event(state: Facts, job: Job, buffer: Buffer, attempt: int) -> e.StageOutStarted:
    """Return that the results of a job are staged out from now on, by whichever mover has the fewest transfers."""
    filesystems = filesystems_of(state, buffer) if job.mover else ()
    return e.StageOutStarted(
        job.id, attempt, choose_mover(state, filesystems[0], also=filesystems[1:]) or job.mover if filesystems else ""
    )


def takeover_event(state: Facts, job: Job, buffer: Buffer) -> e.MoverChanged | None:
    """Return that another mover has the job's operation from now on, where its own is not up and another is."""
    if not job.mover or job.stuck or buffer.state not in _STAGED_BY_MOVERS:
        return None
    node, filesystems = state.nodes.get(job.mover), filesystems_of(state, buffer)
    left = next((filesystem for filesystem in filesystems if job.mover not in filesystem.movers), None)
    if not filesystems or (node is not None and node.is_up and left is None):
        return None
    other = choose_mover(state, filesystems[0], also=filesystems[1:])
    if not other:
        return None
    if node is None or left is not None:
        why = f"mover {job.mover} no longer stages for shared filesystem {(left or filesystems[0]).name}"
    else:
        why = f"mover {job.mover} is {'down' if node.down else 'drained'}"
    return e.MoverChanged(job.id, other, job.attempt + 1, why)


def jobs_of_peer_movers(state: State, node: str) -> Iterator[int]:
    """Yield the jobs of all movers of the shared filesystems that a node is a mover of: it may take over from them, or
    they from it.
    """
    for filesystem in state.filesystems.values():
        if node in filesystem.movers:
            for mover in filesystem.movers:
                yield from state.on_node.get(mover, ())
