"""Reasons of waiting jobs, from a scheduling index that follows the applied state instead of a pass over all jobs.

The leader decides with its own index, which is ahead of the committed state. This index is created on demand, follows
the ledger from query to query, and is dropped when idle. Long work runs in slices (`cluster.system.eventloop.slices`):
a site's whole queue is indexed in about a second.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from itertools import islice
from typing import TYPE_CHECKING, Protocol

from forebay.replica.messages import Event
from forebay.replica.model import Job, JobState
from forebay.replica.scheduler import (
    Estimate,
    SchedulingIndex,
    early_gate,
    estimate,
    jobs_ahead_in,
    later_reason,
    persistent_request,
    space_for_setups,
    verdicts_of,
    waits_for_space,
)
from forebay.replica.state import State
from forebay.replica.values import Instant, Verdict
from forebay.replica.views import verdict_of

if TYPE_CHECKING:
    from forebay.cluster.server import AppliedEntry
    from forebay.cluster.system.eventloop import SlicedWork

FOLLOWED_MAX = 2_000
"""Commands an index follows between queries, count; beyond that a new one is hardly slower."""

INDEXED_AT_ONCE = 64
"""Jobs indexed in one slice, count: about two milliseconds."""

ASKED_AT_ONCE = 256
"""Jobs whose verdicts one pass over the index computes, count."""

KEPT_S = 60.0
"""Lifetime of an idle index, seconds; it keeps its last state in memory."""


class RecentEntries(Protocol):
    """Entries that were applied last, as in `cluster.server.AppliedLog`."""

    def index_of(self, revision: int) -> int:
        """Return the entry that settled `revision`; LookupError if it is not held."""
        ...

    def recent(self, first: int) -> list[AppliedEntry] | None:
        """Return the entries from index `first` on if all are in memory, otherwise None."""
        ...


class JobVerdicts:
    """Verdicts of the queried jobs of one state."""

    def __init__(self, state: State, found: Mapping[int, Verdict] | None = None) -> None:
        """`found`: precomputed verdicts; any other job requires a slow pass over all jobs."""
        self.state = state
        self._found = found or {}

    def of(self, job_id: int) -> Verdict:
        """Return the result of `replica.views.verdict_of`.

        Raises:
            KeyError: The job is not in the state.
        """
        if job_id in self._found:
            return self._found[job_id]
        job = self.state.jobs[job_id]
        if job.state is not JobState.PENDING or job.external_job is not None:
            return later_reason(self.state, job, self.state.buffers.get(job_id))
        return verdict_of(self.state, job_id)

    def reason(self, job_id: int) -> str:
        """Return the reason of a job, spelled exactly as in Slurm."""
        return _reason_alone(self.state, self.state.jobs[job_id]) or str(self.of(job_id).reason)


def _reason_alone(state: State, job: Job) -> str:
    """Return the reason of a waiting job if it does not depend on other jobs; else an empty string."""
    if job.state is not JobState.PENDING or job.external_job is not None:
        return ""
    gate = early_gate(state, job)
    if gate is not None:
        return str(gate.reason)
    simple = job.request.options is None and job.request.array is None and persistent_request(job) is None
    return "BurstBufferResources" if simple and waits_for_space(job, state.buffers.get(job.id)) else ""


async def prepare(index: SchedulingIndex, work: SlicedWork) -> None:
    """Prepare an index for a query, in slices."""
    while True:
        await work.take(INDEXED_AT_ONCE)
        if index.prepare(INDEXED_AT_ONCE):
            return


class Verdicts:
    """Reasons that hold back jobs."""

    def __init__(self, applied_log: RecentEntries | None = None) -> None:
        """`applied_log`: source of new events; without it each state gets a new index."""
        self._applied_log = applied_log
        self._index: SchedulingIndex | None = None
        self._in_use = asyncio.Lock()
        self._dropping: asyncio.TimerHandle | None = None

    async def verdicts_of(
        self, state: State, job_ids: Iterable[int], work: SlicedWork, *, reasons: bool = False
    ) -> JobVerdicts:
        """Return the verdicts of these jobs; `reasons`: only as far as needed for their reasons."""
        wanted: list[int] = []
        for job_id in job_ids:
            job = state.jobs.get(job_id)
            if job is not None and job.state is JobState.PENDING and not (reasons and _reason_alone(state, job)):
                wanted.append(job_id)
            await work.take(0, parts=4)
        found: dict[int, Verdict] = {}
        if wanted:
            rest = iter(wanted)
            async with self.index(state, work) as index:
                while asked := list(islice(rest, ASKED_AT_ONCE)):
                    await work.of(self).take(INDEXED_AT_ONCE)
                    found.update(verdicts_of(index, asked, state.at))
        return JobVerdicts(state, found)

    async def estimate(self, state: State, job_id: int, at: Instant, work: SlicedWork) -> Estimate:
        """Return the expected start of a job as of `at`.

        Raises:
            KeyError: The job is not in the state.
        """
        async with self.index(state, work) as index:
            await work.of(self).take(INDEXED_AT_ONCE)
            return estimate(state, job_id, at, jobs_ahead_in(index))

    async def space_for_setups(self, state: State, pools: Iterable[str], work: SlicedWork) -> dict[str, int]:
        """Return for each pool the most space one more setup of an external job would get, units of the pool."""
        async with self.index(state, work) as index:
            await work.of(self).take(INDEXED_AT_ONCE)
            return space_for_setups(index, pools, state.at)

    @asynccontextmanager
    async def index(self, state: State, work: SlicedWork) -> AsyncIterator[SchedulingIndex]:
        """Lock and yield a prepared index of `state`."""
        async with self._in_use:
            index = self._follow(state)
            self._drop_later()
            # Other queries wait for it, so it does not share turns with the caller's other work.
            await prepare(index, work.of(self))
            yield index

    def _follow(self, state: State) -> SchedulingIndex:
        """Return an index of `state`: the existing one, unless the state is older."""
        index = self._index
        if index is not None and index.state is state:
            return index
        if index is not None and state.revision < index.state.revision:
            return SchedulingIndex(state)
        events = None if index is None else self._between(index.state.revision, state.revision)
        if index is None or events is None:
            index = self._index = SchedulingIndex(state)
        else:
            index.advance(state, events)
        return index

    def _between(self, first: int, last: int) -> list[Event] | None:
        """Return the events of the commands after `first` up to `last`.

        None if there are too many or they are not held.
        """
        if self._applied_log is None or last - first > FOLLOWED_MAX:
            return None
        try:
            entries = self._applied_log.recent(self._applied_log.index_of(first + 1)) if last > first else []
        except LookupError:
            return None
        events: list[Event] = []
        for applied in entries or ():
            if first == last:
                break
            if applied.base != first:
                return None
            if applied.batch is not None and not applied.void:
                events.extend(event for entry in applied.batch.entries for event in entry.events)
            first = applied.revision
        return events if first == last else None

    def _drop_later(self) -> None:
        if self._dropping is not None:
            self._dropping.cancel()
        self._dropping = asyncio.get_running_loop().call_later(KEPT_S, self.drop)

    def drop(self) -> None:
        """Drop the index."""
        self._index = None
