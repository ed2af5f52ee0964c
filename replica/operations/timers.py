"""Timers of jobs: begin times, deadlines, retries, timeouts, and revocation of staged buffers."""

from __future__ import annotations

from collections.abc import Iterator

from forebay.replica.messages import events as e
from forebay.replica.model import Buffer, BufferState, Hold, Job, JobState, agent_of, is_node_in, node_set_name
from forebay.replica.operations.external_jobs import external_job_due_at, external_job_due_events
from forebay.replica.operations.lost_nodes import lost_at, lost_events
from forebay.replica.operations.movers import takeover_event
from forebay.replica.operations.outcomes import (
    active_stage,
    failure_events,
    revocation_events,
    timeout_at,
    timeout_message,
    waiting_stage,
)
from forebay.replica.state import Facts
from forebay.replica.values import NEVER, Instant, seconds


def reservations_due(state: Facts, at: Instant) -> tuple[e.Event, ...]:
    """Return the events of reservations that end or begin by `at`, by name."""
    found: list[e.Event] = []
    for name in sorted(state.reservations):
        reservation = state.reservations[name]
        if reservation.end_at <= at:
            found.append(e.ReservationEnded(name))
        elif reservation.start_at <= at and not reservation.active:
            found.append(e.ReservationStarted(name))
    return tuple(found)


def reservation_instants(state: Facts) -> Iterator[Instant]:
    """Yield the next time at which each reservation begins or ends."""
    for reservation in state.reservations.values():
        yield reservation.end_at if reservation.active else reservation.start_at


_AT_ONCE = Instant(1)
_REVOCABLE = (BufferState.STAGING_IN, BufferState.STAGED_IN)


def due_at(state: Facts, job: Job, buffer: Buffer | None) -> Instant:
    """Return the earliest time at which `due_events` returns events, if nothing else changes; NEVER for none."""
    due: list[int] = []
    if job.state is JobState.PENDING:
        if job.eligible_at == NEVER:
            due.append(job.request.begin_at)
        if job.request.deadline != NEVER and not job.late:
            due.append(job.request.deadline - seconds(job.request.time_limit_s) + 1)
    if buffer is not None and job.mover and takeover_event(state, job, buffer) is not None:
        due.append(_AT_ONCE)
    if (lost := lost_at(state, job, buffer)) != NEVER:
        due.append(lost)
    if buffer is not None and not _is_down(state, job, buffer):
        for instant in (
            job.retry_at,
            timeout_at(state, job, buffer),
            _revocation_due(state, job, buffer)[0],
            NEVER if job.external_job is None else external_job_due_at(state, job, buffer),
        ):
            if instant != NEVER:
                due.append(instant)
    return Instant(max(_AT_ONCE, min(due))) if due else NEVER


def due_events(state: Facts, job: Job, buffer: Buffer | None, at: Instant) -> tuple[e.Event, ...]:
    """Return the events of the job's first timer that is due at `at`, or none."""
    if job.state is JobState.PENDING:
        if job.eligible_at == NEVER and job.request.begin_at <= at:
            return (e.JobBecameEligible(job.id),)
        deadline = job.request.deadline
        if deadline != NEVER and not job.late and at + seconds(job.request.time_limit_s) > deadline:
            return (e.DeadlineMissed(job.id),)
    lost = lost_at(state, job, buffer)
    if lost != NEVER and lost <= at:
        return lost_events(state, job, buffer)
    if buffer is None:
        return ()
    if job.mover and (taken := takeover_event(state, job, buffer)) is not None:
        return (taken,)
    if _is_down(state, job, buffer):
        return ()
    if job.external_job is not None and (ended := external_job_due_events(state, job, buffer, at)):
        return ended
    site = state.site
    if job.retry_at != NEVER and job.retry_at <= at:
        stage = waiting_stage(job, buffer)
        assert stage is not None
        return (e.StageRetried(job.id, stage, job.attempt + 1, f"retry {job.failures} of {site.stage_retries}"),)
    late_at = timeout_at(state, job, buffer)
    if late_at != NEVER and late_at <= at:
        stage = active_stage(job, buffer)
        assert stage is not None
        return failure_events(state, job, stage, timeout_message(state, stage), at)
    revoked_at, reason = _revocation_due(state, job, buffer)
    if revoked_at != NEVER and revoked_at <= at:
        return revocation_events(state, job, reason)
    return ()


def _is_down(state: Facts, job: Job, buffer: Buffer) -> bool:
    """Return whether the agent of the job's operation is down, which stops the operation's clocks."""
    performs = agent_of(job, buffer)
    node = state.nodes.get(performs) if performs else None
    return node is not None and node.down


def _revocation_due(state: Facts, job: Job, buffer: Buffer) -> tuple[Instant, str]:
    """Return the time from which a pending job's buffer is to be revoked, with the reason; NEVER if it is not."""
    # The scheduler of an external job releases its buffer.
    if job.state is not JobState.PENDING or buffer.state not in _REVOCABLE or job.external_job is not None:
        return NEVER, ""
    node = state.nodes.get(job.node)
    if node is not None and node.drained:
        return _AT_ONCE, f"node {job.node} is drained"
    if node is not None and node.cpus < job.request.cpus:
        return _AT_ONCE, f"node {job.node} now has only {node.cpus} CPUs"
    options = job.request.options if state.partitions else None
    if options is not None and job.node:
        nodes = node_set_name(state.partitions, options.partition)
        # The nodes of a deleted partition are unknown: staged data stays until the job has another partition.
        if nodes in state.partitions and not is_node_in(state.partitions, nodes, job.node):
            return _AT_ONCE, f"node {job.node} is not in partition {options.partition}"
    limit_s = state.site.staged_hold_time_s
    if limit_s and job.hold is not Hold.NONE:
        return Instant(job.held_at + seconds(limit_s)), f"held for longer than StagedHoldTime, {limit_s} s"
    return NEVER, ""
