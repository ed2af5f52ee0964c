"""Movers: choice of the agent that stages for a job in a shared filesystem, and takeover from failed ones.

Any mover of a shared filesystem can continue the work of another, because both the data and the records of its
transfers lie there. Concurrent writes are not excluded here: the filesystem fences earlier attempts from later ones
(`cluster.agent.transfer.fence`), so a mover may be replaced without proof that it has stopped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from forebay.replica.messages import events as e
from forebay.replica.model import (
    NATIVE,
    Buffer,
    BufferState,
    Job,
    MovingKey,
    SharedFilesystem,
    pool_filesystem,
)
from forebay.replica.state import Facts, State

_NONE_BEGUN: Mapping[MovingKey, int] = {}
_STAGED_BY_MOVERS = (BufferState.STAGING_IN, BufferState.STAGING_OUT, BufferState.TEARDOWN, BufferState.TEARDOWN_FAIL)


def filesystem_of_pool(state: Facts, pool: str) -> SharedFilesystem | None:
    """Return the shared filesystem of a pool's buffers; None: each is on one node, or the site's programs create it."""
    return pool_filesystem(state.pools, state.filesystems, pool) if state.site.provider == NATIVE else None


def directory_in_filesystem(state: Facts, buffer: Buffer) -> str:
    """Return the directory of a buffer below the path of its shared filesystem: `CLUSTER/JOB.EPOCH`."""
    return f"{state.name}/{buffer.job}.{buffer.epoch}"


def persistent_directory(state: Facts, name: str, job: int, attempt: int) -> str:
    """Return the directory of a persistent buffer below its shared filesystem: `CLUSTER/NAME.JOB.EPOCH`.

    Names never begin with a digit, so it differs from all job buffers. JOB and EPOCH (an attempt) distinguish it from
    all other persistent buffers, including earlier ones of this name.
    """
    return f"{state.name}/{name}.{job}.{attempt}"


def filesystems_of(state: Facts, buffer: Buffer) -> tuple[SharedFilesystem, ...]:
    """Return the shared filesystems that a job's operations need, that of its own buffer first.

    Empty if the operations are done on its node, or if one of the filesystems no longer exists.
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
    """Return the mover of a shared filesystem that is up and has the fewest transfers, the first by name among equals.

    It must also be a mover of all in `also`. Empty if none is up. `begun` counts transfers that the State does not
    count yet.
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
    """Return the mover for an external job: its previous one if that is up, else as `choose_mover`.

    If none is up, one of them is returned anyway, and another takes over once it is up. Empty: no mover serves all of
    the shared filesystems.
    """
    node = state.nodes.get(job.mover)
    if node is not None and node.is_up and all(job.mover in filesystem.movers for filesystem in filesystems):
        return job.mover
    first, *also = filesystems
    all_of = (name for name in first.movers if all(name in other.movers for other in also))
    return choose_mover(state, first, also=also) or next(all_of, "")


def stage_out_event(state: Facts, job: Job, buffer: Buffer, attempt: int) -> e.StageOutStarted:
    """Return the event that starts stage-out, by the mover with the fewest transfers."""
    filesystems = filesystems_of(state, buffer) if job.mover else ()
    return e.StageOutStarted(
        job.id, attempt, choose_mover(state, filesystems[0], also=filesystems[1:]) or job.mover if filesystems else ""
    )


def takeover_event(state: Facts, job: Job, buffer: Buffer) -> e.MoverChanged | None:
    """Return the event that gives a job's operation to another mover, or None.

    A takeover needs a mover that is not up or no longer serves the filesystem, and another that can.
    """
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
    """Yield the jobs of all movers of a node's shared filesystems, among which takeovers are possible."""
    for filesystem in state.filesystems.values():
        if node in filesystem.movers:
            for mover in filesystem.movers:
                yield from state.on_node.get(mover, ())
