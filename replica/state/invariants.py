"""Invariants of every State, checked when a snapshot is loaded, in tests, and on demand."""

from __future__ import annotations

from forebay.replica.model import BEFORE_RUN, ENDED, PERSISTENT_STATES, BufferState, JobState
from forebay.replica.state.derived import derive, held_bytes
from forebay.replica.state.state import TABLES, State
from forebay.replica.values import SESSION_WINDOW_MAX, decode_reply_key

_WHILE: dict[JobState, frozenset[BufferState]] = {
    JobState.PENDING: BEFORE_RUN | {BufferState.ALLOC_REVOKE, BufferState.TEARDOWN, BufferState.TEARDOWN_FAIL},
    JobState.CONFIGURING: frozenset({BufferState.PRE_RUN}),
    JobState.RUNNING: frozenset({BufferState.RUNNING}),
    JobState.SUSPENDED: frozenset({BufferState.SUSPENDED}),
    JobState.STAGE_OUT: frozenset({BufferState.POST_RUN, BufferState.STAGING_OUT}),
}
_OVER = frozenset({BufferState.TEARDOWN, BufferState.TEARDOWN_FAIL, BufferState.COMPLETE})


def find_violations(state: State) -> list[str]:
    """Return one sentence for each invariant that does not hold."""
    faults: list[str] = []
    derived = derive(state)
    if dict(derived.held_bytes) != {pool: held for pool, held in state.held_bytes.items() if held}:
        faults.append(f"the capacity held is {dict(state.held_bytes)}, but its holders add up to {held_bytes(state)}")
    if derived.using != state.using:
        faults.append("the index of users of persistent buffers does not match the buffers")
    if set(derived.unfinished) != set(state.unfinished) or set(derived.finished) != set(state.finished):
        faults.append("the indexes of finished and unfinished jobs do not match the jobs")
    if derived.on_node != state.on_node or derived.holders != state.holders:
        faults.append("the indexes of jobs by node and by pool do not match the jobs")
    if derived.destinations != state.destinations:
        faults.append("the index of jobs by stage-out destination does not match the jobs")
    if derived.use != state.use:
        faults.append("the index of usage under limits does not match the jobs")
    if derived.moving != state.moving:
        faults.append("the index of transfers under way does not match the jobs")
    if derived.operations != state.operations or derived.arrays != state.arrays or derived.named != state.named:
        faults.append("the indexes of operations, of arrays or of names do not match the jobs")
    if derived.kept != state.kept:
        faults.append("the counts of cached replies do not match the replies")
    faults.extend(_session_faults(state))
    for pool in sorted(held_bytes(state)):
        if pool not in state.pools:
            faults.append(f"space of an unknown pool {pool!r} is held")
    for job in state.jobs.values():
        faults.extend(_job_faults(state, job.id))
    for table in TABLES:
        faults.extend(table.find_misplaced(state))
    for known in state.pools.values():
        if known.filesystem and known.filesystem not in state.filesystems:
            faults.append(f"pool {known.name!r} has its buffers in unknown shared filesystem {known.filesystem!r}")
    for sink, revision in state.sink_marks.items():
        if not 0 <= revision <= state.revision:
            faults.append(f"the mark of event sink {sink!r} is revision {revision}, and the last is {state.revision}")
    if sum(one.is_default for one in state.partitions.values()) > 1:
        faults.append("there are several default partitions")
    for name, buffer in state.persistent.items():
        if buffer.state not in PERSISTENT_STATES:
            faults.append(f"the persistent buffer {name!r} is {buffer.state.word}")
        if buffer.filesystem and buffer.filesystem not in state.filesystems:
            faults.append(f"persistent buffer {name!r} lies in unknown shared filesystem {buffer.filesystem!r}")
        if bool(buffer.filesystem) != bool(buffer.directory) or (buffer.filesystem and buffer.node):
            faults.append(f"the location of the persistent buffer {name!r} is missing or ambiguous")
    directories = {(buffer.filesystem, buffer.directory) for buffer in state.persistent.values() if buffer.filesystem}
    if len(directories) != sum(bool(buffer.filesystem) for buffer in state.persistent.values()):
        faults.append("two persistent buffers lie in the same directory")
    return faults


def _session_faults(state: State) -> list[str]:
    kept: dict[int, int] = {}
    faults: list[str] = []
    for key, receipt in state.answers.items():
        number, sequence = decode_reply_key(key)
        session = state.sessions.get(number)
        if session is None or receipt.actor != session.actor:
            faults.append(f"the cached reply {key.hex()} belongs to no session")
        elif not session.acknowledged < sequence <= session.newest:
            known = session.acknowledged
            faults.append(f"the reply {sequence} of session {number} is cached, and replies up to {known} acknowledged")
        kept[number] = kept.get(number, 0) + 1
    for number, session in state.sessions.items():
        if session.newest - session.acknowledged > SESSION_WINDOW_MAX:
            faults.append(
                f"session {number} has acknowledged {session.acknowledged} and settled {session.newest}, which are too "
                "far apart"
            )
        if session.answers != kept.get(number, 0):
            faults.append(f"session {number} has {kept.get(number, 0)} cached replies, but counts {session.answers}")
    firsts = [first for _, first in state.receipt_seconds]
    seconds = [second for second, _ in state.receipt_seconds]
    if firsts != sorted(set(firsts)) or seconds != sorted(seconds):
        faults.append("the seconds in which commands were settled are out of order")
    return faults


def _job_faults(state: State, job_id: int) -> list[str]:
    job, buffer = state.jobs[job_id], state.buffers.get(job_id)
    faults: list[str] = []
    if job_id != job.id or not 0 < job_id < state.next_job:
        faults.append(f"job {job_id} has the ID {job.id}; the next ID is {state.next_job}")
    if (job.request.buffer is None) != (buffer is None):
        faults.append(f"job {job_id} and its buffer disagree on whether it has one")
    if buffer is None:
        return faults
    if buffer.node and buffer.node != job.node:
        faults.append(f"job {job_id} is on node {job.node!r}, its buffer on {buffer.node!r}")
    if job.mover and buffer.node:
        faults.append(f"job {job_id} has the mover {job.mover!r}, and its buffer is on {buffer.node!r}")
    if job.mover and job.mover == job.node:
        faults.append(f"job {job_id} runs on its mover {job.mover!r}")
    allowed = _OVER if job.state in ENDED else _WHILE[job.state]
    if buffer.state not in allowed:
        faults.append(f"job {job_id} is {job.state.name} while its buffer is {buffer.state.word}")
    return faults
