"""Results and durations of jobs and transfers, counted from applied events.

Events from before the start of the process are not counted: a starting replica folds a part of the ledger again, and
Prometheus would see hours of work in one scrape. Times are ledger times, so all running replicas count the same.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, Final

from forebay.cluster.server.applied_log import Transition
from forebay.replica.messages import TransferRecorded, events, job_of
from forebay.replica.model import ENDED, BufferState, Job, Stage
from forebay.replica.state import State
from forebay.replica.values import MICROSECONDS_PER_SECOND, NEVER, POOLS_MAX, Instant

BOUNDS_S: Final = (0.1, 0.3, 1, 3, 10, 30, 60, 180, 600, 1_800, 3_600, 10_800, 43_200, 86_400)
"""Upper bounds of the buckets, seconds: from immediate to a day."""

PRE_RUN: Final = "pre_run"
"""Operation before a script; it is not a stage."""

_IN_STATE: Final = {
    Stage.STAGE_IN: BufferState.STAGING_IN,
    Stage.STAGE_OUT: BufferState.STAGING_OUT,
    Stage.TEARDOWN: BufferState.TEARDOWN,
}
"""State of a buffer during each timed stage."""


class Durations:
    """Histogram of durations; cheap to update while committing."""

    __slots__ = ("_bounds_s", "_counts", "sum_s")

    def __init__(self, bounds_s: Sequence[float] = BOUNDS_S) -> None:
        """Start empty; `bounds_s`: upper bounds of the buckets, seconds."""
        self._bounds_s = bounds_s
        self._counts = [0] * (len(bounds_s) + 1)
        self.sum_s = 0.0

    def add(self, duration_us: int) -> None:
        """Count one duration, microseconds; a negative one, after a clock was set back, counts as 0."""
        self.add_s(max(0, duration_us) / MICROSECONDS_PER_SECOND)

    def add_s(self, duration_s: float) -> None:
        """Count one duration, seconds."""
        self._counts[bisect_left(self._bounds_s, duration_s)] += 1
        self.sum_s += duration_s

    @property
    def count(self) -> int:
        """Number of durations."""
        return sum(self._counts)

    def buckets(self) -> Iterator[tuple[str, int]]:
        """Yield each bound in Prometheus' form, with the number of durations up to it."""
        return zip((*(str(float(bound)) for bound in self._bounds_s), "+Inf"), accumulate(self._counts), strict=True)


class JobTotals:
    """Counters and histograms of jobs, by state, stage, pool or node, but never by user or job."""

    def __init__(self, since: Instant) -> None:
        """Count events from `since` on."""
        self._since = since
        self.submitted = 0
        """Submitted jobs, including each task of an array, and external jobs."""
        self.ended: Counter[str] = Counter(dict.fromkeys(sorted(state.name for state in ENDED), 0))
        """Jobs by result; a requeued job may end again."""
        self.space_waits: defaultdict[str, Durations] = defaultdict(Durations)
        """Waiting times of eligible buffers for space, by pool."""
        self.start_waits = Durations()
        """Waiting times of eligible jobs for their first start, without external jobs."""
        self.runs = Durations()
        """Durations of scripts from start to end, without suspended time."""
        self.stages: dict[str, Durations] = {stage.word: Durations() for stage in _IN_STATE}
        """Durations of successful operations from order to end; only the last attempt of a retried operation."""
        self.failed: Counter[tuple[str, str]] = Counter()
        """Failed operations, by stage and node."""
        self.retried: Counter[str] = Counter()
        """Retried operations, by stage."""
        self.requeued = 0
        self.revoked = 0
        """Buffers withdrawn before their job ran."""

    def applied(self, transition: Transition) -> None:
        """Count the events of an entry that was just applied."""
        before, after, batch = transition.before, transition.after, transition.batch
        if batch is None or batch.at < self._since:
            return
        concerned: set[int] = set()
        for entry in batch.entries:
            for event in entry.events:
                count = _COUNTED.get(type(event))
                if count is not None:
                    count(self, before, event, batch.at)
                concerned.add(job_of(event) or 0)  # 0 belongs to no job
        for job_id in concerned:
            now = after.jobs.get(job_id)
            if now is not None and now.state in ENDED:
                was = before.jobs.get(job_id)
                if was is None or was.state not in ENDED:
                    self.ended[now.state.name] += 1
        if len(self.space_waits) > POOLS_MAX:
            for pool in self.space_waits.keys() - after.pools.keys():
                del self.space_waits[pool]

    # Counting of each kind of event

    def _submitted(self, before: State, event: events.JobSubmitted, at: Instant) -> None:
        self.submitted += 1 if event.array is None else len(event.array.tasks)

    def _set_up(self, before: State, event: events.ExternalJobSetUp, at: Instant) -> None:
        self.submitted += 1

    def _got_space(
        self, before: State, event: events.BufferAllocated | events.ExternalJobSpaceAllocated, at: Instant
    ) -> None:
        job, buffer = before.jobs.get(event.job), before.buffers.get(event.job)
        if job is None or buffer is None:  # submitted in the same batch: no wait
            return
        # For a requeued job, count only the wait for its present buffer.
        self.space_waits[buffer.pool].add(at - max(_eligible(job, at), buffer.changed_at))

    def _started(self, before: State, event: events.RunStarted, at: Instant) -> None:
        job = before.jobs.get(event.job)
        if job is not None and not job.effective_interruptions.requeues:
            self.start_waits.add(at - _eligible(job, at))

    def _run_ended(self, before: State, event: events.RunEnded, at: Instant) -> None:
        job = before.jobs.get(event.job)
        if job is None or job.started_at == NEVER:
            return
        interrupted = job.effective_interruptions
        suspended_us = interrupted.suspended_us
        if interrupted.suspended_at != NEVER:
            suspended_us += at - interrupted.suspended_at
        self.runs.add(at - job.started_at - suspended_us)

    def _stage_ended(self, stage: Stage, before: State, job_id: int, at: Instant) -> None:
        job, buffer = before.jobs.get(job_id), before.buffers.get(job_id)
        if job is None or buffer is None or buffer.state is not _IN_STATE[stage]:
            self.stages[stage.word].add(0)  # ordered in the same batch
            return
        # An external job may hold space for any time before its scheduler orders the stage-in.
        since = job.order_at if job.external_job is not None and job.order_at != NEVER else buffer.changed_at
        self.stages[stage.word].add(at - since)

    def _staged_in(self, before: State, event: events.StagedIn, at: Instant) -> None:
        self._stage_ended(Stage.STAGE_IN, before, event.job, at)

    def _staged_out(self, before: State, event: events.StagedOut, at: Instant) -> None:
        self._stage_ended(Stage.STAGE_OUT, before, event.job, at)

    def _torn_down(self, before: State, event: events.TornDown, at: Instant) -> None:
        self._stage_ended(Stage.TEARDOWN, before, event.job, at)

    def _stage_failed(self, before: State, event: events.StageFailed, at: Instant) -> None:
        self._failed(before, event.job, event.stage.word)

    def _pre_run_failed(self, before: State, event: events.PreRunFailed, at: Instant) -> None:
        self._failed(before, event.job, PRE_RUN)

    def _failed(self, before: State, job_id: int, stage: str) -> None:
        job = before.jobs.get(job_id)
        self.failed[stage, "" if job is None else job.node if stage == PRE_RUN else job.staged_by] += 1

    def _stage_retried(self, before: State, event: events.StageRetried, at: Instant) -> None:
        self.retried[event.stage.word] += 1

    def _requeued(self, before: State, event: events.RunRequeued, at: Instant) -> None:
        self.requeued += 1

    def _revoked(self, before: State, event: events.AllocationRevoked, at: Instant) -> None:
        self.revoked += 1


def _eligible(job: Job, at: Instant) -> Instant:
    return at if job.eligible_at == NEVER else job.eligible_at


_COUNTED: Final[dict[type, Callable[[JobTotals, State, Any, Instant], None]]] = {
    events.JobSubmitted: JobTotals._submitted,
    events.ExternalJobSetUp: JobTotals._set_up,
    events.BufferAllocated: JobTotals._got_space,
    events.ExternalJobSpaceAllocated: JobTotals._got_space,
    events.RunStarted: JobTotals._started,
    events.RunEnded: JobTotals._run_ended,
    events.StagedIn: JobTotals._staged_in,
    events.StagedOut: JobTotals._staged_out,
    events.TornDown: JobTotals._torn_down,
    events.StageFailed: JobTotals._stage_failed,
    events.PreRunFailed: JobTotals._pre_run_failed,
    events.StageRetried: JobTotals._stage_retried,
    events.RunRequeued: JobTotals._requeued,
    events.AllocationRevoked: JobTotals._revoked,
}
"""Counting function of each event; other events are not counted."""


class TransferTotals:
    """Sums over transfer receipts by (stage, outcome); every replica counts those it applies."""

    def __init__(self) -> None:
        """Start at zero."""
        self.ended: Counter[tuple[str, str]] = Counter()
        """Ended transfers; outcome: complete or failed."""
        self.files: Counter[str] = Counter()
        self.size_bytes: Counter[str] = Counter()
        self.resumed_bytes: Counter[str] = Counter()
        self.retries: Counter[str] = Counter()
        self.left_out: Counter[str] = Counter()

    def applied(self, transition: Transition) -> None:
        """Count the receipts of an entry that was just applied."""
        if transition.batch is None or transition.before.transfers is transition.after.transfers:
            return
        for entry in transition.batch.entries:
            for event in entry.events:
                if type(event) is TransferRecorded:
                    receipt, stage = event.receipt, event.receipt.stage.word
                    self.ended[stage, "complete" if receipt.complete else "failed"] += 1
                    self.files[stage] += receipt.files
                    self.size_bytes[stage] += receipt.size_bytes
                    self.resumed_bytes[stage] += receipt.resumed_bytes
                    self.retries[stage] += receipt.retries
                    self.left_out[stage] += receipt.left_out
