"""Queries about jobs, pools and destinations of a State, for the API and for past states alike."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

import msgspec

from forebay.replica.model import (
    ENDED,
    HOLDING,
    NATIVE,
    PERSISTENT_PREFIX,
    Buffer,
    BufferRequest,
    BufferState,
    Hold,
    Job,
    JobState,
    JobTransfers,
    Pool,
    Stage,
    awaited_slot,
    destinations_of,
    free_bytes,
)
from forebay.replica.operations import directory_in_filesystem, filesystems_of
from forebay.replica.scheduler import SchedulingIndex, later_reason, verdicts_of
from forebay.replica.state import Facts, State
from forebay.replica.values import NEVER, Verdict


class PoolUse(msgspec.Struct, frozen=True):
    """A pool and its derived figures, bytes."""

    pool: Pool
    held_bytes: int
    free_bytes: int


def pool_use(state: State, name: str) -> PoolUse:
    """Return a pool with its derived free capacity: total - held - out of service.

    Raises:
        KeyError: The pool does not exist.
    """
    pool = state.pools[name]
    held = state.held_bytes.get(name, 0)
    return PoolUse(pool, held, free_bytes(pool, held))


def verdicts(state: State) -> Mapping[int, Verdict]:
    """Return the reason each unfinished job waits for at `state.at`, from one scheduling cycle over the state."""
    return verdicts_of(SchedulingIndex(state), state.unfinished, state.at)


def verdict_of(state: State, job_id: int) -> Verdict:
    """Return the reason one job waits for at `state.at`.

    Raises:
        KeyError: The job is not in the state.
    """
    if job_id in state.unfinished:
        return verdicts_of(SchedulingIndex(state), (job_id,), state.at)[job_id]
    return later_reason(state, state.jobs[job_id], state.buffers.get(job_id))


def buffer_word(state: Facts, job_id: int) -> str | None:
    """Return the displayed buffer state of a job (`BurstBufferState=`), or None if it requested no buffer.

    A job that is held after a failed operation, with its buffer torn down, shows `complete` until it is released: only
    then does it wait for another buffer (SEMANTICS, When something fails).

    Raises:
        KeyError: The job is not in the state.
    """
    job, buffer = state.jobs[job_id], state.buffers.get(job_id)
    if buffer is None:
        return None
    gone = buffer.state is BufferState.PENDING and job.state is JobState.PENDING and job.hold is not Hold.NONE
    if gone and job.attempt and job.effective_interruptions.held_because:
        return BufferState.COMPLETE.word
    return buffer.state.word


def reason_of(state: State, job_id: int) -> str:
    """Return the reason of one job, byte for byte as Slurm spells it."""
    return str(verdict_of(state, job_id).reason)


# ---- location of a job's buffer, and other jobs that stage out to the same destination


SHARING_NAMED_MAX = 8
"""Number of other jobs named for each shared destination."""


class Shared(msgspec.Struct, frozen=True):
    """A stage-out destination that other unfinished jobs use too."""

    path: str
    jobs: tuple[int, ...]
    """At most SHARING_NAMED_MAX of the other jobs."""


def persistent_notes(state: State, job_id: int) -> tuple[str, ...]:
    """Return notes for the submitter about the persistent buffers that a new job names, one sentence each."""
    asked = state.jobs[job_id].request.buffer
    if asked is None:
        return ()
    created = {record.name for record in asked.creates}
    missing = [record.name for record in asked.destroys if record.name not in state.persistent]
    notes = [f"persistent buffer {name} does not exist; destroying it has no effect" for name in missing]
    absent = [name for name in asked.uses if name not in state.persistent and name not in created]
    notes += [f"persistent buffer {name} does not exist; the job waits until it is created" for name in absent]
    return tuple(notes)


def shared_destinations(state: State, job_id: int) -> tuple[Shared, ...]:
    """Return the destinations that a job shares with others; empty for a finished job."""
    if job_id not in state.unfinished:
        return ()
    found = []
    for path in destinations_of(state.jobs[job_id].request):
        # A destination may be shared by as many jobs as exist. Take one more than are named, since one may be the job
        # itself.
        among = islice(state.destinations.get(path, ()), SHARING_NAMED_MAX + 1)
        others = [other for other in among if other != job_id][:SHARING_NAMED_MAX]
        if others:
            found.append(Shared(path, tuple(sorted(others))))
    return tuple(found)


def buffer_path(state: State, job_id: int) -> str | None:
    """Return the directory of a job's own buffer; None while there is none or its location is unknown."""
    job, buffer = state.jobs[job_id], state.buffers.get(job_id)
    if buffer is not None and job.mover and buffer.state in HOLDING:
        filesystems = filesystems_of(state, buffer)
        return f"{filesystems[0].path}/{directory_in_filesystem(state, buffer)}" if filesystems else None
    node = state.nodes.get(job.node)
    if buffer is None or buffer.state not in HOLDING or node is None or not node.buffers:
        return None
    return f"{node.buffers}/{job_id}" if state.site.provider == NATIVE else None


def persistent_paths(state: State, job_id: int) -> dict[str, str]:
    """Return the paths of the persistent buffers a job uses that lie in shared filesystems, by buffer name."""
    asked = state.jobs[job_id].request.buffer
    known = {name: state.persistent.get(name) for name in (() if asked is None else asked.uses)}
    return {
        name: f"{state.filesystems[one.filesystem].path}/{one.directory}"
        for name, one in known.items()
        if one is not None and one.filesystem in state.filesystems
    }


# ---- unexported files of a job: reported as long as the job is known, so that no user takes the results for safe


NO_TRANSFERS = JobTransfers()


class NotExported(msgspec.Struct, frozen=True):
    """A requested stage-out result that is not at its destination, as far as the replicas know."""

    path: str
    why: str
    lost: bool = False
    """The buffer that held it is deleted or being deleted."""


def not_exported(state: State, job_id: int) -> tuple[NotExported, ...]:
    """Return the job's pending stage-outs and the files its receipts left out; empty until its script has started.

    Raises:
        KeyError: The job is not in the state.
    """
    job, buffer = state.jobs[job_id], state.buffers.get(job_id)
    if buffer is None or job.started_at == NEVER:
        return ()
    wanted = _destinations(job.request.buffer)
    if job.state in ENDED:
        if buffer.hurry:
            why = "the buffer was removed without stage-out"
            return tuple(NotExported(path, why, lost=True) for path in wanted)
        return _left_out(state, job_id)
    if buffer.state not in (BufferState.POST_RUN, BufferState.STAGING_OUT):
        return ()
    why = _why_not_yet(job, buffer)
    return tuple(NotExported(path, why) for path in wanted)


def of_persistent(path: str) -> bool:
    """Return whether a path such as `$DW_PERSISTENT_STRIPED_lake/a` is in a persistent buffer."""
    return path.removeprefix("$").removeprefix("{").startswith(PERSISTENT_PREFIX)


def _destinations(asked: BufferRequest | None) -> tuple[str, ...]:
    if asked is None:
        return ()
    listed = tuple(one.destination for one in asked.lists if one.outgoing)
    commands = tuple(f"stage_out:{command}" for command in asked.stage_out_command.splitlines())
    return (*(transfer.outside for transfer in asked.stage_out), *listed, *commands)


def _left_out(state: State, job_id: int) -> tuple[NotExported, ...]:
    """Return the files that the last complete stage-out left out, as far as its receipt names them."""
    receipts = state.transfers.get(job_id, NO_TRANSFERS).receipts
    last = next((one for one in reversed(receipts) if one.stage is Stage.STAGE_OUT and one.complete), None)
    if last is None:
        return ()
    # A persistent buffer still holds the files that were left out.
    asked = state.jobs[job_id].request.buffer
    lost = asked is not None and any(not of_persistent(transfer.inside) for transfer in asked.stage_out)
    named = tuple(
        NotExported(one.path, one.reason, lost=lost and not one.reason.endswith(_NOT_THERE))
        for one in last.left_out_first
    )
    more = last.left_out - len(named)
    return (*named, NotExported(f"{more} more", "see the receipt on its node", lost=lost)) if more > 0 else named


_NOT_THERE = "does not exist"
"""Suffix of an agent's reason for a file that never existed, so that nothing of it is lost."""


def _why_not_yet(job: Job, buffer: Buffer) -> str:
    if job.stuck:
        ways = "released (with --partial, without missing files), cancelled with --hurry, or cleared"
        return f"{job.message}; the buffer is kept until the job is {ways}"
    if job.retry_at != NEVER:
        return f"{job.message}; it will be retried"
    if buffer.state is BufferState.POST_RUN:
        return "stage-out has not begun"
    return "stage-out waits for a slot" if awaited_slot(job, buffer) is not None else "it is being staged out"
