"""Why jobs wait, for those who ask: a scheduling index that follows the applied state instead of a walk over all jobs.

The leader decides with an index of its own, which is ahead of what is agreed. This one is made when somebody asks,
follows the ledger from question to question, and is dropped when nobody has asked for a while.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from functools import cache
from itertools import islice

from cluster.server import AppliedLog
from replica.messages import Event
from replica.model import JobState
from replica.scheduler import (
    Ahead,
    Estimate,
    SchedulingIndex,
    ahead_in,
    early_gate,
    estimate,
    later_reason,
    persistent_request,
    verdicts_of,
    waits_for_space,
)
from replica.state import State
from replica.values import Instant, Verdict
from replica.views import verdicts

STATES_KEPT = 4
"""States whose verdicts are kept, count: many ask about the same."""

FOLLOWED_MAX = 5_000
"""Commands that an index follows from one question to the next, count: beyond, making a new one is hardly slower."""

ENTRIES_READ = 64
"""Entries of the ledger read at a time, count."""

JOBS_PER_TURN = 2_000
"""Jobs that are indexed in one turn of the loop, count: some 20 ms, after which heartbeats and commands have theirs."""

KEPT_S = 60.0
"""How long an index is kept that nobody asks, seconds: it holds on to the state that it was last asked about."""


class Verdicts:
    """What holds back each job."""

    def __init__(self, applied_log: AppliedLog | None = None) -> None:
        """`applied_log`: where the ledger is read; without it every state is new."""
        self._applied_log = applied_log
        self._index: SchedulingIndex | None = None
        self._kept: list[tuple[State, dict[int, Verdict]]] = []
        self._walked: list[tuple[State, Mapping[int, Verdict]]] = []
        self._dropping: asyncio.TimerHandle | None = None

    async def ready(self, state: State, job_ids: Iterable[int] = ()) -> None:
        """Prepare for questions about `state` without keeping others from their turn, and answer those about
        `job_ids` in one go.
        """
        index = self._follow(state)
        while index is not None and index.state is state and not index.prepare(JOBS_PER_TURN):
            await asyncio.sleep(0)
        wanted = [job_id for job_id in job_ids if job_id in state.unfinished]
        if wanted and index is not None and index.state is state:
            self._known(state).update(verdicts_of(index, wanted, state.at))

    def reason(self, state: State, job_id: int) -> str:
        """Return what `replica.views.jobs.reason_of` returns; without looking at others where the gates alone say
        it."""
        job, buffer = state.jobs[job_id], state.buffers.get(job_id)
        if job.state is JobState.PENDING:
            gate = early_gate(state, job)
            if gate is not None:
                return str(gate.reason)
        simple = job.request.options is None and job.request.array is None and persistent_request(job) is None
        if not simple or job.state is not JobState.PENDING or not waits_for_space(job, buffer):
            return str(self.of(state, job_id).reason)
        return "BurstBufferResources"

    def of(self, state: State, job_id: int) -> Verdict:
        """Return what `replica.views.jobs.verdict_of` returns; KeyError for a job that is not in the state."""
        job = state.jobs[job_id]
        if job.state is not JobState.PENDING:
            return later_reason(state, job, state.buffers.get(job_id))
        known = self._known(state)
        if job_id not in known:
            index = self._follow(state)
            if index is None:
                return self._walk(state)[job_id]
            known.update(verdicts_of(index, (job_id,), state.at))
        return known[job_id]

    def estimate(self, state: State, job_id: int, at: Instant) -> Estimate | None:
        """Return when a job should start, as of `at`; None for a state that is older than what was asked about last.

        KeyError for a job that is not in the state. It is quick after `ready`.
        """
        index = self._follow(state)
        if index is None:
            return None
        while not index.prepare(JOBS_PER_TURN):
            pass
        return estimate(state, job_id, at, ahead_in(index))

    def estimate_at_any(self, state: State, job_id: int, at: Instant) -> Estimate:
        """As `estimate`, with an index of its own for a state that is older than what was asked about last."""

        @cache
        def ahead() -> Ahead:
            index = self._follow(state) or SchedulingIndex(state)
            index.catch_up()
            return ahead_in(index)

        return estimate(state, job_id, at, lambda place, pool: ahead()(place, pool))

    def _known(self, state: State) -> dict[int, Verdict]:
        for kept, found in self._kept:
            if kept is state:
                return found
        self._kept.append((state, {}))
        del self._kept[:-STATES_KEPT]
        return self._kept[-1][1]

    def _walk(self, state: State) -> Mapping[int, Verdict]:
        """Return what is said of all jobs of a state that is not the newest: of the past, mostly."""
        for kept, found in self._walked:
            if kept is state:
                return found
        self._walked.append((state, verdicts(state)))
        del self._walked[:-STATES_KEPT]
        return self._walked[-1][1]

    def _follow(self, state: State) -> SchedulingIndex | None:
        """Return the index of `state`; None for one that is older than what was asked about last."""
        index = self._index
        if index is None or index.state is not state:
            if index is not None and state.revision < index.state.revision:
                return None
            events = None if index is None else self._between(index.state.revision, state.revision)
            if index is None or events is None:
                index = self._index = SchedulingIndex(state)
            else:
                index.advance(state, events)
        self._drop_later()
        return index

    def _between(self, first: int, last: int) -> list[Event] | None:
        """Return the events of the commands after `first` up to `last`; None where that is too many, or not held."""
        if self._applied_log is None or last - first > FOLLOWED_MAX:
            return None
        events: list[Event] = []
        try:
            index = self._applied_log.index_of(first + 1) if last > first else 0
            while first < last:
                chunk = list(islice(self._applied_log.read(index, limit=ENTRIES_READ), ENTRIES_READ))
                for applied in chunk:
                    if first == last:
                        break
                    if applied.base != first or applied.index != index:
                        return None
                    if applied.batch is not None and not applied.void:
                        events.extend(event for entry in applied.batch.entries for event in entry.events)
                    first, index = applied.revision, applied.index + 1
                if not chunk:
                    return None
        except LookupError:
            return None
        return events if first == last else None

    def _drop_later(self) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return  # a test or a tool without a loop keeps what it has
        if self._dropping is not None:
            self._dropping.cancel()
        self._dropping = loop.call_later(KEPT_S, self.drop)

    def drop(self) -> None:
        """Forget everything that was worked out."""
        self._index = None
        self._kept.clear()
        self._walked.clear()
