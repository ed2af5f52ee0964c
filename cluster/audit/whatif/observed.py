"""Observation of a world during a window: the same figures for the record and for replays."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from heapq import nsmallest
from typing import Final

import msgspec

from forebay.cluster.audit.report import PendingJobs, PoolColumns, PoolUsage, Window
from forebay.cluster.audit.whatif.figures import Figures, PoolFigures, Waits
from forebay.cluster.audit.whatif.services import touched_by
from forebay.replica.messages import Event
from forebay.replica.messages import events as e
from forebay.replica.model import ENDED, Job, JobState
from forebay.replica.scheduler import SchedulingIndex, verdicts_of
from forebay.replica.state import State
from forebay.replica.values import Instant

SAMPLES: Final = 200
"""Number of samples of pending jobs' reasons in a window: each costs a scheduling cycle."""

EVERYTHING: Final = "all"

REASONS_MAX: Final = 100
"""Number of listed waiting reasons; reasons of failed operations vary with the failure's text."""


class ObservedJob(msgspec.Struct, gc=False):
    """Observed job; the times of events outside the window are 0."""

    name: str
    user: str
    submitted_us: int
    started_us: int = 0
    ended_us: int = 0
    result: int = 0


class _Pool:
    """Usage of one pool, summed over time."""

    def __init__(self, unit: str) -> None:
        self.steps = PoolColumns(unit)
        self.held = self.in_service = 0
        self.held_us = self.served_us = self.since_us = 0
        self.peak = 0
        self.peak_share = 0.0


class WindowFigures:
    """Observation of a world from the start of a window."""

    def __init__(
        self, state: State, window: Window, index: SchedulingIndex | None = None, *, samples: bool = True
    ) -> None:
        """Start the observation.

        `index`: index that the world keeps up to date; None to maintain an own index. `samples`: whether to sample the
        reasons of pending jobs.
        """
        self.window = window
        self.jobs: dict[int, ObservedJob] = {}
        """Job ID in this world -> observed job."""
        self.submitted = 0
        self.refused = 0
        self._state = state
        self._now_us = window.from_us
        self._keeps_index = index is None
        self._index = SchedulingIndex(state) if index is None else index
        self._pools: dict[str, _Pool] = {}
        self._waiting: list[PendingJobs] = []
        self._next_sample = 0 if samples else SAMPLES
        self._sampled: tuple[int, Mapping[int, str]] = (window.from_us, {})
        self._waits: defaultdict[str, dict[int, int]] = defaultdict(dict)
        self._ran = set[int]()
        """Jobs that had started before the window, whose next starts do not count."""
        for job_id in sorted(state.unfinished):
            job = state.jobs[job_id]
            self.jobs[job_id] = ObservedJob(job.request.name, job.request.user, job.submitted_at)
            if job.started_at:
                self._ran.add(job_id)
        self._note_pools(state)

    def saw(self, at_us: int, events: Sequence[Event], state: State) -> None:
        """Record events and the state after them; call `sample` before."""
        # After an operator set the clock back, keep the time constant until the clock catches up.
        now_us = self._now_us = max(int(at_us), self._now_us)
        before, self._state = self._state, state
        for event in events:
            self._note(event, now_us)
        for job_id in touched_by(events):
            if job_id in before.unfinished and job_id not in state.unfinished:
                self._ended(before.jobs[job_id], state, now_us)
        if self._keeps_index:
            self._index.advance(state, events)
        if state.held_bytes is not before.held_bytes or state.pools is not before.pools:
            self._note_pools(state)

    def _note(self, event: Event, now_us: int) -> None:
        match event:
            case e.JobSubmitted() | e.ExternalJobSetUp():
                for job_id in e.jobs_of(event):
                    self.submitted += 1
                    self.jobs[job_id] = ObservedJob(event.request.name, event.request.user, now_us)
            case e.RunStarted() | e.ExternalJobRunBegan():
                known = self.jobs.get(event.job)
                if known is not None and not known.started_us and event.job not in self._ran:
                    known.started_us = now_us
            case _:
                pass

    def _ended(self, before: Job, state: State, now_us: int) -> None:
        known, job = self.jobs.get(before.id), state.jobs.get(before.id)
        if known is None or known.ended_us:
            return
        known.ended_us = now_us
        if job is not None:
            known.result = int(job.state)
        else:  # the job is already purged; without a recorded result it was cancelled
            known.result = int(before.result if before.result in ENDED else JobState.CANCELLED)

    def _note_pools(self, state: State) -> None:
        now_us = self._now_us
        for name in {*state.pools, *self._pools}:
            pool = state.pools.get(name)
            noted = self._pools.get(name)
            if noted is None:
                assert pool is not None  # recorded pools are never removed
                noted = self._pools[name] = _Pool(pool.unit.word)
                noted.since_us = now_us
            self._sum(noted, now_us)
            total = 0 if pool is None else pool.quantity_bytes
            noted.held = state.held_bytes.get(name, 0)
            noted.in_service = 0 if pool is None else pool.usable_bytes
            noted.peak = max(noted.peak, noted.held)
            if noted.in_service:
                noted.peak_share = max(noted.peak_share, noted.held / noted.in_service)
            noted.steps.add(self.window.column(now_us), now_us, (noted.held, noted.in_service, total))

    def _sum(self, noted: _Pool, now_us: int) -> None:
        noted.held_us += noted.held * (now_us - noted.since_us)
        noted.served_us += noted.in_service * (now_us - noted.since_us)
        noted.since_us = now_us

    def sample(self, until_us: int) -> None:
        """Sample the reasons of pending jobs at each sampling time before `until_us`."""
        span_us = max(1, self.window.to_us - self.window.from_us)
        last = min(SAMPLES - 1, (until_us - self.window.from_us) * SAMPLES // span_us)
        if last < self._next_sample:
            return
        state = self._state
        pending = [job for job in state.unfinished if state.jobs[job].state is JobState.PENDING]
        for place in range(self._next_sample, last + 1):
            at_us = self.window.from_us + place * span_us // SAMPLES
            verdicts = verdicts_of(self._index, pending, Instant(max(at_us, state.at)))
            reasons = {job: str(verdict.reason) for job, verdict in verdicts.items()}
            self._count_waits(at_us)
            self._sampled = at_us, reasons
            self._waiting.append(PendingJobs(at_us, dict(sorted(Counter(reasons.values()).items()))))
        self._next_sample = last + 1

    def _count_waits(self, now_us: int) -> None:
        """Count each waiting job's time since the last sample under its reason at that sample."""
        since_us, reasons = self._sampled
        for job_id, reason in reasons.items():
            known = self.jobs.get(job_id)
            if known is None:
                continue
            until_us = min(
                (moment for moment in (known.started_us, known.ended_us) if moment > since_us), default=now_us
            )
            waits = self._waits[reason]
            waits[job_id] = waits.get(job_id, 0) + min(until_us, now_us) - since_us

    def figures(self, to_us: int) -> Figures:
        """Return the figures, at the end of the window."""
        self._now_us = max(self._now_us, to_us)
        self.sample(self._now_us)
        self._count_waits(self._now_us)
        self._sampled = self._now_us, {}
        ended = Counter(JobState(known.result).name for known in self.jobs.values() if known.ended_us)
        waited = [known.started_us - known.submitted_us for known in self.jobs.values() if known.started_us]
        last_us = max((known.ended_us for known in self.jobs.values()), default=0)
        by_reason = [_waits(reason, jobs.values()) for reason, jobs in self._waits.items()]
        unfinished = [job for job in self._state.unfinished if job in self.jobs]
        return Figures(
            submitted=self.submitted,
            started=len(waited),
            ended=dict(sorted(ended.items())),
            unfinished=len(unfinished),
            unstarted=sum(not self.jobs[job].started_us and job not in self._ran for job in unfinished),
            refused=self.refused,
            wait=_waits(EVERYTHING, waited),
            waits=tuple(nsmallest(REASONS_MAX, by_reason, key=lambda waits: (-waits.p95_us, waits.reason))),
            waits_left_out=max(0, len(by_reason) - REASONS_MAX),
            pools=tuple(self._pool(name) for name in sorted(self._pools)),
            makespan_us=max(0, last_us - self.window.from_us),
            waiting=tuple(self._waiting),
        )

    def _pool(self, name: str) -> PoolFigures:
        noted = self._pools[name]
        self._sum(noted, self._now_us)
        span_us = max(1, self._now_us - self.window.from_us)
        return PoolFigures(
            name=name,
            unit=noted.steps.unit,
            mean=noted.held_us / span_us,
            peak=noted.peak,
            mean_share=noted.held_us / noted.served_us if noted.served_us else 0.0,
            peak_share=noted.peak_share,
            use=PoolUsage(name, noted.steps.unit, noted.steps.steps()),
        )


def _waits(reason: str, waited: Iterable[int]) -> Waits:
    ordered = sorted(waited)
    return Waits(reason, len(ordered), percentile(ordered, 50), percentile(ordered, 95))


def percentile(ordered: Sequence[int], percent: int) -> int:
    """Return the smallest value not exceeded by `percent` percent of the values; 0 without values."""
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)] if ordered else 0
