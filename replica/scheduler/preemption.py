"""Preemption: revoke staged buffers of jobs that do not start, for a job that could start sooner.

The reservation head of a pool may preempt buffers of jobs behind it, if it could run at once, and if those jobs have
been ready for a while without starting, or cannot start. To guarantee termination, a job is preempted only for a
strictly higher priority, and its buffer is revoked a limited number of times in total. Buffers are revoked only if
enough space results, and if the space that is being released already is not enough. Source: SEMANTICS.md, Scheduling.
"""

from __future__ import annotations

from collections.abc import Iterable

from forebay.replica.messages import events as e
from forebay.replica.model import Buffer, BufferState, Hold, Job, JobState, SchedulingRules, node_set_name
from forebay.replica.scheduler.admission import (
    CycleState,
    QueuePosition,
    SpaceRequest,
    available_bytes,
    queue_position_of,
)
from forebay.replica.scheduler.gates import early_gate
from forebay.replica.state import State
from forebay.replica.values import REVOKED_PER_CYCLE_MAX, Instant, seconds

EVENTS_PER_PREEMPTION = 3

PreemptionCandidate = tuple[int, int, int]
"""(negated sort key, negated job ID, bytes) of a job whose buffer may be preempted.

The last job in the scheduling order comes first.
"""


def preemption_candidate(state: State, job: Job, buffer: Buffer | None) -> PreemptionCandidate | None:
    """Return the job as a preemption candidate, or None if its buffer may not be preempted."""
    if buffer is None or job.state is not JobState.PENDING or not buffer.granted_bytes or job.external_job is not None:
        return None
    if job.stuck or job.retry_at or job.hold is Hold.SYSTEM:
        return None
    if job.effective_interruptions.revocations >= state.scheduling_rules.revocations_max:
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
    """Return the jobs whose buffers are preempted for a new reservation head; none if that would not free enough.

    `coming_bytes` are being released already, `room` is the maximum number of events, and `done` are jobs that the
    cycle has changed.
    """
    state, rules = current.state, current.state.scheduling_rules
    position = queue_position_of(state, request.job)
    wanted = request.size_bytes - available_bytes(current, request) - coming_bytes
    if wanted <= 0 or not rules.revocations_max:
        return ()
    nodes = node_set_name(state.partitions, request.partition)
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
    """Return the events that revoke the buffer of a job for the job `beneficiary`."""
    job = state.jobs[job_id]
    reason = f"preempted for job {beneficiary}"
    return (
        e.AllocationRevoked(job_id, job.attempt, reason, beneficiary),
        e.TeardownStarted(job_id, job.attempt + 1, JobState.PENDING, True, reason),
    )
