"""Preemption: staged buffers of jobs whose start has moved away are taken back for a job that should start sooner.

The reservation head of a pool may have the buffers of jobs behind it taken back, if it could run at once, and they have
been ready for a while and did not start, or cannot start at all. So that it comes to an end: a job gives way only to a
strictly higher priority, its buffer is taken back only so often in its whole life, and only if enough space comes of it
and not enough is on its way already. Source: SEMANTICS.md, Scheduling.
"""

from __future__ import annotations

from collections.abc import Iterable

from replica.messages import events as e
from replica.model import Buffer, BufferState, Hold, Job, JobState, SchedulingRules, place_name
from replica.scheduler.admission import CycleState, QueuePosition, SpaceRequest, available_bytes, queue_position_of
from replica.scheduler.gates import early_gate
from replica.state import State
from replica.values import REVOKED_PER_CYCLE_MAX, Instant, seconds

EVENTS_PER_PREEMPTION = 3

PreemptionCandidate = tuple[int, int, int]
"""Job whose buffer may be taken back: what it is sorted by, negated, its number, negated, and its size, bytes: the
last ones in the order of candidates come first.
"""


def preemption_candidate(state: State, job: Job, buffer: Buffer | None) -> PreemptionCandidate | None:
    """Return the job as one whose buffer may be taken back when its time has come, None if it may not."""
    if buffer is None or job.state is not JobState.PENDING or not buffer.granted_bytes or job.external_job is not None:
        return None
    if job.stuck or job.retry_at or job.hold is Hold.SYSTEM:
        return None
    if job.interrupted.revocations >= state.scheduling_rules.revocations_max:
        return None
    asked = job.request.buffer
    if asked is not None and (asked.creates or asked.destroys):
        return None
    if buffer.state is not BufferState.STAGED_IN and (
        buffer.state is not BufferState.STAGING_IN or early_gate(state, job) is None
    ):
        return None
    order, job_id = queue_position_of(state, job)
    return -order, -job_id, buffer.granted_bytes


def choose_preempted(
    current: CycleState,
    request: SpaceRequest,
    candidates: Iterable[PreemptionCandidate],
    coming_bytes: int,
    room: int,
    done: Iterable[int],
) -> tuple[int, ...]:
    """Return the jobs whose buffers are taken back for a job that has just become the reservation head; none if it
    would be in vain. `coming_bytes` is what is being given back to the pool already, `room` how many events there may
    be.
    """
    state, rules = current.state, current.state.scheduling_rules
    position = queue_position_of(state, request.job)
    wanted = request.size_bytes - available_bytes(current, request) - coming_bytes
    if wanted <= 0 or not rules.revocations_max:
        return ()
    nodes = place_name(state.partitions, request.partition)
    if current.any_node.first_in(nodes) or not current.has_node_for(request.job.request.cpus, position, nodes):
        return ()
    found = _choose_enough(current.state, rules, current.at, position, candidates, wanted, frozenset(done))
    return found if len(found) * EVENTS_PER_PREEMPTION <= room else ()


def _choose_enough(
    state: State,
    rules: SchedulingRules,
    at: Instant,
    position: QueuePosition,
    candidates: Iterable[PreemptionCandidate],
    wanted: int,
    done: frozenset[int],
) -> tuple[int, ...]:
    chosen: list[tuple[int, int]] = []
    got = 0
    for order, number, size_bytes in candidates:
        if -order <= position[0] or len(chosen) == REVOKED_PER_CYCLE_MAX:
            break
        if -number in done or state.buffers[-number].changed_at + seconds(rules.revoke_after_s) > at:
            continue
        chosen.append((-number, size_bytes))
        got += size_bytes
        if got >= wanted:
            break
    if got < wanted:
        return ()
    kept: list[int] = []
    for job_id, size_bytes in chosen:
        if got - size_bytes >= wanted:
            got -= size_bytes
        else:
            kept.append(job_id)
    return tuple(kept)


def preemption_events(state: State, job_id: int, beneficiary: int) -> tuple[e.Event, ...]:
    """Return what happens when the buffer of a job is taken back for another one."""
    job = state.jobs[job_id]
    reason = f"job {beneficiary} should start sooner, and this one did not start"
    return (
        e.AllocationRevoked(job_id, job.attempt, reason, beneficiary),
        e.TeardownStarted(job_id, job.attempt + 1, JobState.PENDING, True, reason),
    )
