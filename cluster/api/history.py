"""What happened to a job, and why it waited at a moment in the past: from the ledger, by the same functions as now."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from itertools import islice
from typing import Any

from cluster.api.privacy import Recorded, check_sight
from cluster.api.render import (
    Known,
    actor_words,
    as_json,
    event_name,
    job_words,
    prepare,
    sentence_of,
    task_words,
    verdict_words,
)
from cluster.api.service import Call, Reply, encoded, handles
from cluster.api.web import Problem, too_busy, too_many, unknown_job
from cluster.eventloop import RECORDS_PER_SLICE, Work, paced
from cluster.schemas import HistoryAnswer, HistoryRow, WhyView
from cluster.schemas import operations as ops
from cluster.server import Step, TimeTravelBusy, fold_slowly, settled_at
from cluster.system import format_instant
from replica.messages import Batch, Entry, Event, JobSubmitted, jobs_of
from replica.model import Dependency, JobState
from replica.scheduler import SchedulingIndex, depended_on, dependency_met, verdicts_of
from replica.state import State
from replica.values import NEVER, Instant, Reason, Revision, Verdict
from replica.views import buffer_word

ROWS_MAX = 10_000
"""Events of one job in one answer, count: a job that is retried for ever has more; the oldest are shown."""

REVISION_MAX = 2**63 - 1

_BEGINNINGS = ("job_submitted", "guest_set_up")
"""Events that a job begins with."""

BLOCKERS_MAX = 100
"""Jobs named as holding what another waits for, count: more do not help a person."""


@handles(ops.SHOW_JOB_HISTORY)
async def show_job_history(call: Call[None]) -> Reply[HistoryAnswer]:
    state = await call.state()
    recorded = recorded_job(call, state)
    job_id = recorded.job_id
    past, work = call.service.controller.time_travel, call.work
    rows: list[HistoryRow] = []
    reasons = _Reasons(job_id, work)
    try:
        async for step in past.history(await first_revision_of(call, state, job_id), work):
            if job_id in step.after.jobs:
                recorded.submitted_by(step.after.jobs[job_id].request.user)
            rows.extend([row async for row in _rows(step, job_id, reasons, work, names=recorded.names)])
            if len(rows) >= ROWS_MAX or step.after.revision >= state.revision:
                break
    except TimeTravelBusy as error:
        raise busy(error) from error
    except LookupError:
        # What this replica holds no longer begins early enough to fold anything.
        rows = []
    recorded.check()
    complete = bool(rows) and rows[0].event in _BEGINNINGS and len(rows) < ROWS_MAX
    answer = HistoryAnswer(
        revision=state.revision,
        job_id=job_id,
        task=task_words(state, job_id),
        rows=tuple([encoded(row) async for row in paced(rows[:ROWS_MAX], work)]),
        complete=complete,
    )
    return Reply(state.revision, answer)


@handles(ops.EXPLAIN_JOB)
async def explain_job(call: Call[None]) -> Reply[WhyView]:
    state = await call.state()
    if "at" in call.query:
        revision = call.integer("at", 0, least=1, most=REVISION_MAX)
        if revision > state.revision:
            raise Problem(
                404,
                "unknown_revision",
                f"revision {revision} has not happened yet; the last one is {state.revision}",
                "ask about an earlier one",
                "query at",
            )
        try:
            state = await call.service.controller.time_travel.state_at(revision, call.work)
        except TimeTravelBusy as error:
            raise busy(error) from error
        except LookupError as error:
            raise Problem(
                410,
                "history_not_held",
                f"{call.service.controller.name} cannot go back to revision {revision}: {error}",
                "ask another replica with stale=ok",
                "query at",
            ) from error
    job_id = call.job_in(state)
    if job_id not in state.jobs:
        raise unknown_job(f"there was no job {job_id} at revision {state.revision}", "see its history")
    check_sight(call, state, job_id)
    job = state.jobs[job_id]
    verdict = (await call.service.verdicts.known(state, [job_id], call.work)).of(job_id)
    blockers = _blockers(state, job_id, verdict)
    view = WhyView(
        revision=state.revision,
        at=format_instant(state.at) or "",
        job_id=job_id,
        name=job_words(state, job_id),
        state=job.state.name,
        reason=str(verdict.reason),
        burst_buffer_state=buffer_word(state, job_id),
        sentence=verdict_words(verdict),
        blockers=blockers,
        blocking=tuple(job_words(state, other) for other in blockers),
    )
    return Reply(state.revision, view)


class _Reasons:
    """Why one job waited at each moment of a walk through its history: by one index, which follows the walk."""

    def __init__(self, job_id: int, work: Work) -> None:
        self._job_id = job_id
        self._work = work
        self._index: SchedulingIndex | None = None

    async def follow(self, state: State, entries: Sequence[Entry]) -> None:
        """Become true for `state`, which is what these entries made of the state before."""
        if self._index is not None:
            await self._work.take(0, parts=sum(len(entry.events) for entry in entries))
            self._index.advance(state, (event for entry in entries for event in entry.events))

    async def at(self, state: State) -> str:
        """Return the reason at the state that was followed to, `None` for a job that is gone."""
        job = state.jobs.get(self._job_id)
        if job is None:
            return "None"
        if job.state is not JobState.PENDING:
            return Known(state).reason(self._job_id)
        if self._index is None:
            self._index = SchedulingIndex(state)
        await prepare(self._index, self._work)
        await self._work.take(RECORDS_PER_SLICE)
        return str(verdicts_of(self._index, (self._job_id,), state.at)[self._job_id].reason)


async def _rows(step: Step, job_id: int, reasons: _Reasons, work: Work, *, names: bool) -> AsyncIterator[HistoryRow]:
    """Yield what an entry of the ledger says of a job, and how the job was after each command in it."""
    batch = step.applied.batch
    if batch is None or step.applied.void:
        return
    await work.take(0, parts=sum(len(entry.events) for entry in batch.entries))
    concerned = [
        position
        for position, entry in enumerate(batch.entries)
        if any(job_id in jobs_of(event) for event in entry.events)
    ]
    state, done = step.before, 0
    for position in concerned:
        passed = batch.entries[done : position + 1]
        state = await fold_slowly(state, Batch(state.revision, batch.at, passed), work)
        done = position + 1
        await reasons.follow(state, passed)
        reason = await reasons.at(state)
        entry, revision = batch.entries[position], settled_at(step.applied, position)
        for event in entry.events:
            if job_id in jobs_of(event):
                await work.take()
                yield _row(state, entry, event, revision, job_id, batch.at, reason, names=names)
    await reasons.follow(step.after, batch.entries[done:])


def _row(
    state: State, entry: Entry, event: Event, revision: Revision, job_id: int, at: Instant, reason: str, *, names: bool
) -> HistoryRow:
    job = state.jobs.get(job_id)
    return HistoryRow(
        revision=revision,
        at=format_instant(at) or "",
        actor=actor_words(entry.actor, entry.command),
        command=entry.command,
        event=event_name(event),
        sentence=sentence_of(event, names=names, provider=state.site.provider),
        state="" if job is None else job.state.name,
        reason=reason,
        burst_buffer_state=None if job is None else buffer_word(state, job_id),
        attempt=0 if job is None else job.attempt,
        detail={} if isinstance(event, JobSubmitted) else as_json(event, private=False, names=names),
    )


def busy(error: TimeTravelBusy) -> Problem:
    """Return the answer where a question about the past has to wait for others."""
    return too_many(str(error), "wait for their answers") if error.own else too_busy(str(error))


def recorded_job(call: Call[None], state: State) -> Recorded:
    """Return the job that the path names, whether it is in the state or only in the ledger; Problem 403 or 404."""
    job_id = call.job_in(state)
    if not 0 < job_id < state.next_job:
        raise unknown_job(f"there is no job {job_id}")
    return Recorded(call, state, job_id)


async def first_revision_of(call: Call[Any], state: State, job_id: int) -> int:
    """Return a revision before which the ledger has nothing of a job."""
    submitted_at = state.jobs[job_id].submitted_at if job_id in state.jobs else NEVER
    return await call.service.controller.applied_log.first_revision_at(submitted_at, state.clock_set_back)


def _blockers(state: State, job_id: int, verdict: Verdict) -> tuple[int, ...]:
    """Return the jobs that hold what this one waits for: space of its pool, or their own end."""
    if verdict.reason == Reason.BURST_BUFFER_RESOURCES:
        pool = state.buffers[job_id].pool
        found = iter(sorted(job for job in state.holders.get(pool, ()) if job != job_id))
    elif verdict.reason == Reason.DEPENDENCY:
        request = state.jobs[job_id].request
        found = (
            other
            for dependency in request.dependencies
            for other in sorted(depended_on(state, dependency))
            if not dependency_met(state, Dependency(dependency.kind.of_one, other), request.buffer is not None)
        )
    else:
        return ()
    return tuple(islice(found, BLOCKERS_MAX))
