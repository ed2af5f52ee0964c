"""Jobs on unresponsive nodes: lost by an operator's declaration, or down for too long.

A node that is down may still be running. A started job is therefore given up only when an operator declares the node
lost; a job that has not started leaves the node after NodeDownRestageTime. Each call returns the next step of one job:
end its run or revoke its staging, give up its results, abandon its buffer. An abandoned buffer releases its space at
once, and is recorded (`State.abandoned`) until the agent returns and removes it. Attempt numbers fence obsolete orders
as always.

Source: SEMANTICS.md, "When something fails".
"""

from __future__ import annotations

from enum import StrEnum

from forebay.replica.messages import events as e
from forebay.replica.model import NATIVE, Buffer, BufferState, Job, JobState, Stage, agent_of
from forebay.replica.operations.external_jobs import has_results
from forebay.replica.operations.outcomes import (
    failure_events,
    final_state,
    own_persistent,
    removal_events,
    revocation_events,
    script_end_events,
    success_events,
)
from forebay.replica.state import Facts
from forebay.replica.values import NEVER, Instant, seconds

_AT_ONCE = Instant(1)
_STAGED = (BufferState.STAGING_IN, BufferState.STAGED_IN)
_WITH_A_SCRIPT = (BufferState.PRE_RUN, BufferState.RUNNING, BufferState.SUSPENDED)
_RAN = (BufferState.POST_RUN, BufferState.STAGING_OUT)


class Loss(StrEnum):
    """Fate of a job of a lost node, spelled as in the API."""

    STAGED_AGAIN = "staged_again"
    """It has not run, waits, and is staged on another node."""
    REQUEUED = "requeued"
    """Its run ends, and it waits for another one."""
    ENDED = "ended"
    """Its run ends: NODE_FAIL, or CANCELLED on request."""
    RESULTS_LOST = "results_lost"
    """Its run had ended, and its results were not exported."""
    REMOVED = "removed"
    """Only the removal of its buffer was left."""


def lost_at(state: Facts, job: Job, buffer: Buffer | None) -> Instant:
    """Return the time from which a job's data on its node is given up; NEVER if it is not."""
    node = state.nodes.get(job.node)
    if node is None or not node.down or agent_of(job, buffer) != job.node or job.external_job is not None:
        return NEVER
    if buffer is not None and job.mover and buffer.state is BufferState.STAGED_IN:
        return NEVER
    provided = state.site.provider != NATIVE
    if node.lost:
        # Data that a site's program could not remove needs an operator.
        left = buffer is not None and buffer.state is BufferState.TEARDOWN_FAIL and provided
        return NEVER if left else _AT_ONCE
    limit_s = state.site.node_down_restage_s
    if not limit_s or job.stuck or buffer is None or job.state is not JobState.PENDING or provided:
        return NEVER
    return Instant(node.down_at + seconds(limit_s))


def lost_events(state: Facts, job: Job, buffer: Buffer | None) -> tuple[e.Event, ...]:
    """Return the events of the next step of giving up a job's data on its node, after `lost_at`."""
    node = state.nodes[job.node]
    reason = f"node {node.name} was lost" if node.lost else f"node {node.name} was down for too long"
    if buffer is None or buffer.state in _WITH_A_SCRIPT:
        return script_end_events(state, job, buffer, JobState.NODE_FAIL, 0, 0, reason)
    if buffer.state in _STAGED:
        return revocation_events(state, job, reason)
    if buffer.state in _RAN:
        if job.mover:
            # The results lie in a shared filesystem, so a mover exports them.
            return success_events(state, job, buffer, Stage.POST_RUN, 0, 0, "")
        result, why = final_state(job), reason
        if loses_results(job, buffer):
            why = f"{reason} with results that were not exported"
            result = JobState.NODE_FAIL if result is JobState.COMPLETED else result
        return (e.TeardownStarted(job.id, job.attempt + 1, result, True, why),)
    if state.site.provider != NATIVE:
        why = f"{reason}, so the teardown of its provider did not run: remove its leftovers, and clear the buffer"
        return failure_events(state, job, Stage.TEARDOWN, why, Instant(state.at), final=True)
    return (
        e.BufferAbandoned(job.id, node.name, tuple(own_persistent(state, job, BufferState.DELETING))),
        *removal_events(state, job),
    )


def loss_of(state: Facts, job: Job, buffer: Buffer | None) -> Loss:
    """Return the expected fate of a job if its node is declared lost."""
    if buffer is not None and buffer.state in _STAGED:
        return Loss.STAGED_AGAIN
    if buffer is None or buffer.state in _WITH_A_SCRIPT:
        first = script_end_events(state, job, buffer, JobState.NODE_FAIL, 0, 0, "")
        return Loss.REQUEUED if _waits_again(first) else Loss.ENDED
    return Loss.RESULTS_LOST if loses_results(job, buffer) else Loss.REMOVED


def _waits_again(events: tuple[e.Event, ...]) -> bool:
    return any(
        isinstance(event, e.TeardownStarted | e.RunEnded) and event.result is JobState.PENDING for event in events
    )


def loses_results(job: Job, buffer: Buffer | None) -> bool:
    """Return whether unexported results of a job exist only on its node."""
    ran = buffer is not None and buffer.state in (*_RAN, *_WITH_A_SCRIPT)
    return ran and has_results(job) and not job.mover and not job.hurry
