"""Folding: what each event does to the state. It decides nothing, and it cannot fail for an event of a ledger (law
2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from msgspec.structs import replace

from replica import events as e
from replica import features
from replica.buffers import Buffer, BufferInput, BufferState, IllegalTransition, step
from replica.commit import Receipt
from replica.failures import LedgerViolation as LedgerViolation
from replica.jobs import ENDED, Hold, Job, JobState
from replica.nodes import Node
from replica.policy import Policy
from replica.state import State
from replica.state_index import is_finished
from replica.units import NEVER, Instant, Revision


class Draft:
    """A State being changed: mutations of its maps, folded on in place, finished into the next State in O(changes)."""

    def __init__(self, state: State) -> None:
        self._base = state
        self.cluster_id = state.cluster_id
        self.name = state.name
        self.feature_level = state.feature_level
        self.revision: int = state.revision
        self.at: int = state.at
        self.policy: Policy = state.policy
        self.next_job = state.next_job
        self.oldest_receipt = state.oldest_receipt
        self.receipts_horizon_ms = state.receipts_horizon_ms
        # Few and seldom changed: persistent maps, which can be walked while a batch is decided.
        self.pools = state.pools
        self.nodes = state.nodes
        self.jobs = state.jobs.mutate()
        self.buffers = state.buffers.mutate()
        self.receipts = state.receipts.mutate()
        self._receipts_max: int | None = None
        self.held_bytes = state.held_bytes.mutate()
        self.unfinished = state.unfinished.mutate()
        self.finished = state.finished.mutate()

    def finish(self) -> State:
        """Return the next State; the draft must not be used afterwards."""
        self._drop_receipts()
        return State(
            cluster_id=self.cluster_id,
            name=self.name,
            feature_level=self.feature_level,
            revision=Revision(self.revision),
            at=Instant(self.at),
            policy=self.policy,
            next_job=self.next_job,
            oldest_receipt=self.oldest_receipt,
            receipts_horizon_ms=self.receipts_horizon_ms,
            pools=self.pools,
            nodes=self.nodes,
            jobs=self.jobs.finish(),
            buffers=self.buffers.finish(),
            receipts=self.receipts.finish(),
            held_bytes=self.held_bytes.finish(),
            unfinished=self.unfinished.finish(),
            finished=self.finished.finish(),
        )

    def job(self, job_id: int) -> Job:
        """Return a job that an event names."""
        try:
            return self.jobs[job_id]
        except KeyError:
            raise LedgerViolation(f"an event names job {job_id}, which does not exist") from None

    def node(self, name: str) -> Node:
        """Return a node that an event names."""
        try:
            return self.nodes[name]
        except KeyError:
            raise LedgerViolation(f"an event names node {name!r}, which does not exist") from None

    def put(self, job: Job, buffer: Buffer | None) -> None:
        """Store a job and its buffer, and keep the derived maps true."""
        self.jobs[job.id] = job
        if buffer is not None and buffer is not (before := self.buffers.get(job.id)):
            difference = buffer.held_bytes - (0 if before is None else before.held_bytes)
            if difference:
                held = self.held_bytes.get(buffer.pool, 0) + difference
                if held < 0:
                    raise LedgerViolation(f"pool {buffer.pool!r} would hold {held} bytes")
                if held:
                    self.held_bytes[buffer.pool] = held
                else:
                    del self.held_bytes[buffer.pool]
            self.buffers[job.id] = buffer
        into, out_of = (
            (self.finished, self.unfinished) if is_finished(job, buffer) else (self.unfinished, self.finished)
        )
        if job.id not in into:
            into[job.id] = True
            if job.id in out_of:
                del out_of[job.id]

    def change(self, job_id: int, happening: BufferInput | None, **changes: Any) -> None:
        """Change fields of a job; with `happening`, take its buffer through the transition table."""
        job = replace(self.job(job_id), **changes)
        if happening is None and "state" not in changes:
            self.jobs[job_id] = job  # nothing derived depends on it
            return
        buffer = self.buffers.get(job_id)
        if happening is not None and buffer is not None:
            buffer = self.moved(buffer, happening)
        self.put(job, buffer)

    def moved(self, buffer: Buffer, happening: BufferInput) -> Buffer:
        """Return the buffer after `happening`."""
        try:
            return replace(buffer, state=step(buffer.state, happening), changed_at=Instant(self.at))
        except IllegalTransition as error:
            raise LedgerViolation(f"job {buffer.job}: {error}") from None

    def settle(self, command_id: bytes, receipt: Receipt, receipts_max: int) -> None:
        """Keep the first answer to a command id; at the end, the oldest beyond `receipts_max` are dropped (law 6)."""
        self.receipts.add(command_id, receipt)
        self._receipts_max = receipts_max

    def _drop_receipts(self) -> None:
        dropped = None if self._receipts_max is None else self.receipts.drop_beyond(self._receipts_max)
        if dropped is not None:
            self.oldest_receipt = dropped.revision + 1
            self.receipts_horizon_ms = max(self.receipts_horizon_ms, int.from_bytes(dropped.greatest_id[:6], "big"))


def fold(state: State, events: Iterable[e.Event], at: Instant) -> State:
    """Return the state after `events`, which happened at `at`. Raises LedgerViolation for what no ledger can hold."""
    draft = Draft(state)
    draft.at = at
    fold_into(draft, events)
    return draft.finish()


def fold_into(draft: Draft, events: Iterable[e.Event]) -> None:
    """Fold `events` onto a draft."""
    for event in events:
        _FOLDS[type(event)](draft, event)


def _cluster_founded(draft: Draft, event: e.ClusterFounded) -> None:
    draft.cluster_id = event.cluster_id
    draft.name = event.name
    draft.policy = event.policy
    features.check_level(event.feature_level, "", revision=draft.revision)
    draft.feature_level = event.feature_level
    for pool in event.pools:
        draft.pools = draft.pools.set(pool.name, pool)


def _pool_set(draft: Draft, event: e.PoolSet) -> None:
    draft.pools = draft.pools.set(event.pool.name, event.pool)


def _policy_set(draft: Draft, event: e.PolicySet) -> None:
    draft.policy = event.policy


def _node_registered(draft: Draft, event: e.NodeRegistered) -> None:
    known = draft.nodes.get(event.node)
    node = Node(
        name=event.node,
        cpus=event.cpus,
        instance=event.instance,
        storage_id=event.storage_id,
        registered_at=Instant(draft.at),
        drained=known is not None and known.drained,
        reason=known.reason if known is not None and known.drained else "",
    )
    draft.nodes = draft.nodes.set(event.node, node)


def _node_drained(draft: Draft, event: e.NodeDrained) -> None:
    draft.nodes = draft.nodes.set(event.node, replace(draft.node(event.node), drained=True, reason=event.reason))


def _node_resumed(draft: Draft, event: e.NodeResumed) -> None:
    draft.nodes = draft.nodes.set(event.node, replace(draft.node(event.node), drained=False, reason=""))


def _node_went_down(draft: Draft, event: e.NodeWentDown) -> None:
    node = draft.node(event.node)
    reason = node.reason if node.drained else event.reason
    draft.nodes = draft.nodes.set(event.node, replace(node, down=True, reason=reason))


def _node_came_back(draft: Draft, event: e.NodeCameBack) -> None:
    node = draft.node(event.node)
    reason = node.reason if node.drained else ""
    draft.nodes = draft.nodes.set(event.node, replace(node, down=False, reason=reason))
    for job_id in event.jobs:
        draft.change(job_id, None, order_at=Instant(draft.at))


def _job_submitted(draft: Draft, event: e.JobSubmitted) -> None:
    if event.job != draft.next_job:
        raise LedgerViolation(f"job {event.job} was submitted while {draft.next_job} was next")
    draft.next_job = event.job + 1
    at = Instant(draft.at)
    job = Job(
        id=event.job,
        spec=event.spec,
        state=JobState.PENDING,
        priority=event.spec.priority,
        has_buffer=event.request is not None,
        hold=event.hold,
        submitted_at=at,
        eligible_at=at if event.spec.begin_at <= at else NEVER,
        held_at=at if event.hold else NEVER,
    )
    buffer = None
    if event.request is not None:
        buffer = Buffer(
            job=event.job,
            user=event.spec.user,
            state=BufferState.PENDING,
            request=event.request,
            pool=event.pool,
            granted_bytes=event.granted_bytes,
            created_at=at,
            changed_at=at,
        )
    draft.put(job, buffer)


def _job_held(draft: Draft, event: e.JobHeld) -> None:
    draft.change(event.job, None, hold=event.hold, held_at=Instant(draft.at))


def _job_released(draft: Draft, event: e.JobReleased) -> None:
    draft.change(event.job, None, hold=Hold.NONE, held_at=NEVER, message="", failures=0)


def _buffer_allocated(draft: Draft, event: e.BufferAllocated) -> None:
    if event.passed:
        first = draft.job(event.passed)
        promised_at = event.promised_at if first.promised_at == NEVER else first.promised_at
        draft.change(first.id, None, passed=first.passed + event.counted, promised_at=promised_at)
    job, buffer = draft.job(event.job), draft.buffers.get(event.job)
    if buffer is None:
        raise LedgerViolation(f"job {event.job} has no buffer to allocate")
    draft.put(
        replace(job, node=event.node, attempt=event.attempt, order_at=Instant(draft.at), failures=0, message=""),
        replace(draft.moved(buffer, BufferInput.ALLOCATED), node=event.node),
    )


def _staged_in(draft: Draft, event: e.StagedIn) -> None:
    buffer = draft.moved(draft.buffers[event.job], BufferInput.STAGED_IN)
    draft.put(
        replace(draft.job(event.job), failures=0, message="", order_at=NEVER),
        replace(buffer, staged_in_bytes=event.size_bytes, staged_in_files=event.files),
    )


def _stage_failed(draft: Draft, event: e.StageFailed) -> None:
    happening = BufferInput.TEARDOWN_FAILED if event.stage is e.Stage.TEARDOWN else BufferInput.STAGE_FAILED
    draft.change(
        event.job,
        happening,
        failures=draft.job(event.job).failures + 1,
        message=event.message,
        comment=event.message,
        retry_at=event.retry_at,
        stuck=event.retry_at == NEVER,
    )


def _stage_retried(draft: Draft, event: e.StageRetried) -> None:
    draft.change(
        event.job,
        BufferInput.STAGE_RETRIED,
        attempt=event.attempt,
        retry_at=NEVER,
        stuck=False,
        order_at=Instant(draft.at),
    )


def _run_ordered(draft: Draft, event: e.RunOrdered) -> None:
    draft.change(
        event.job,
        BufferInput.RUN_ORDERED,
        state=JobState.CONFIGURING,
        node=event.node,
        attempt=event.attempt,
        order_at=Instant(draft.at),
        message="",
    )


def _run_started(draft: Draft, event: e.RunStarted) -> None:
    draft.change(event.job, BufferInput.RUN_STARTED, state=JobState.RUNNING, started_at=Instant(draft.at))


def _run_ended(draft: Draft, event: e.RunEnded) -> None:
    job = draft.job(event.job)
    draft.change(
        event.job,
        BufferInput.RUN_ENDED,
        state=JobState.STAGE_OUT if job.has_buffer else event.result,
        result=event.result,
        exit_code=event.exit_code,
        signal=event.signal,
        attempt=event.attempt,
        order_at=Instant(draft.at) if job.has_buffer else NEVER,
        ended_at=Instant(draft.at),
        message=event.message,
        comment=event.message or job.comment,
    )


def _stage_out_started(draft: Draft, event: e.StageOutStarted) -> None:
    draft.change(
        event.job,
        BufferInput.STAGE_OUT_STARTED,
        attempt=event.attempt,
        order_at=Instant(draft.at),
        failures=0,
        retry_at=NEVER,
        stuck=False,
        message="",
    )


def _staged_out(draft: Draft, event: e.StagedOut) -> None:
    buffer = draft.buffers[event.job]
    draft.put(draft.job(event.job), replace(buffer, staged_out_bytes=event.size_bytes, staged_out_files=event.files))


def _teardown_started(draft: Draft, event: e.TeardownStarted) -> None:
    job = draft.job(event.job)
    over = event.result in ENDED
    buffer = draft.moved(draft.buffers[event.job], BufferInput.TEARDOWN_STARTED)
    draft.put(
        replace(
            job,
            state=event.result,
            attempt=event.attempt,
            order_at=Instant(draft.at),
            failures=0,
            retry_at=NEVER,
            stuck=False,
            message="",
            ended_at=Instant(draft.at) if over and job.ended_at == NEVER else job.ended_at,
        ),
        replace(buffer, hurry=event.hurry),
    )


def _torn_down(draft: Draft, event: e.TornDown) -> None:
    draft.change(event.job, BufferInput.TORN_DOWN, failures=0, retry_at=NEVER, stuck=False, order_at=NEVER, message="")


def _cancel_requested(draft: Draft, event: e.CancelRequested) -> None:
    job = draft.job(event.job)
    draft.change(event.job, None, cancelled=True, hurry=job.hurry or event.hurry)


def _job_cancelled(draft: Draft, event: e.JobCancelled) -> None:
    draft.change(
        event.job,
        BufferInput.ABANDONED,
        state=JobState.CANCELLED,
        result=JobState.CANCELLED,
        cancelled=True,
        ended_at=Instant(draft.at),
        message="",
    )


def _job_purged(draft: Draft, event: e.JobPurged) -> None:
    if event.job not in draft.finished:
        raise LedgerViolation(f"job {event.job} was purged though it is not over")
    del draft.jobs[event.job]
    del draft.finished[event.job]
    if event.job in draft.buffers:
        del draft.buffers[event.job]


def _allocation_revoked(draft: Draft, event: e.AllocationRevoked) -> None:
    draft.change(event.job, BufferInput.ALLOCATION_REVOKED)


def _job_requeued(draft: Draft, event: e.JobRequeued) -> None:
    job = draft.job(event.job)
    buffer = draft.moved(draft.buffers[event.job], BufferInput.REQUEUED)
    draft.put(
        replace(job, node="", failures=0, order_at=NEVER),
        replace(buffer, node="", hurry=False, staged_in_bytes=0, staged_in_files=0),
    )


def _job_became_eligible(draft: Draft, event: e.JobBecameEligible) -> None:
    draft.change(event.job, None, eligible_at=Instant(draft.at))


def _deadline_missed(draft: Draft, event: e.DeadlineMissed) -> None:
    draft.change(event.job, None, late=True)


_FOLDS: dict[type, Callable[[Draft, Any], None]] = {
    e.ClusterFounded: _cluster_founded,
    e.PoolSet: _pool_set,
    e.PolicySet: _policy_set,
    e.NodeRegistered: _node_registered,
    e.NodeDrained: _node_drained,
    e.NodeResumed: _node_resumed,
    e.NodeWentDown: _node_went_down,
    e.NodeCameBack: _node_came_back,
    e.JobSubmitted: _job_submitted,
    e.JobHeld: _job_held,
    e.JobReleased: _job_released,
    e.BufferAllocated: _buffer_allocated,
    e.StagedIn: _staged_in,
    e.StageFailed: _stage_failed,
    e.StageRetried: _stage_retried,
    e.RunOrdered: _run_ordered,
    e.RunStarted: _run_started,
    e.RunEnded: _run_ended,
    e.StageOutStarted: _stage_out_started,
    e.StagedOut: _staged_out,
    e.TeardownStarted: _teardown_started,
    e.TornDown: _torn_down,
    e.CancelRequested: _cancel_requested,
    e.JobCancelled: _job_cancelled,
    e.JobPurged: _job_purged,
    e.AllocationRevoked: _allocation_revoked,
    e.JobRequeued: _job_requeued,
    e.JobBecameEligible: _job_became_eligible,
    e.DeadlineMissed: _deadline_missed,
    e.FeatureLevelRaised: features.fold_raised,
}
_FOLDS |= {kind: features.since(level, _FOLDS[kind]) for kind, level in features.EVENT_LEVELS.items()}
