"""What happened to a job, and why it waited at a moment in the past: from the ledger, by the same functions as now."""

from __future__ import annotations

from itertools import islice
from typing import Any

from cluster.api.privacy import Recorded, check_sight
from cluster.api.render import actor_words, as_json, event_name, job_words, sentence_of, task_words, verdict_words
from cluster.api.service import Call, Reply, handles
from cluster.api.web import Problem, too_busy, unknown_job
from cluster.schemas import HistoryAnswer, HistoryRow, WhyView
from cluster.schemas import operations as ops
from cluster.server import AppliedLog, Step, TimeTravelBusy, settled_at
from cluster.system import format_instant
from replica.fold import apply_entry
from replica.messages import Entry, JobSubmitted, jobs_of
from replica.model import Dependency
from replica.scheduler import depended_on, dependency_met
from replica.state import State
from replica.values import NEVER, Instant, Reason, Revision, Verdict
from replica.views import buffer_word, verdict_of

ROWS_MAX = 10_000
"""Events of one job in one answer, count: a job that is retried for ever has more; the oldest are shown."""

REVISION_MAX = 2**63 - 1

BLOCKERS_MAX = 100
"""Jobs named as holding what another waits for, count: more do not help a person."""


@handles(ops.SHOW_JOB_HISTORY)
async def show_job_history(call: Call[None]) -> Reply[HistoryAnswer]:
    state = await call.state()
    recorded = recorded_job(call, state)
    job_id = recorded.job_id
    past = call.service.controller.time_travel
    rows: list[HistoryRow] = []
    try:
        async for step in past.history(first_revision_of(call, state, job_id)):
            if job_id in step.after.jobs:
                recorded.submitted_by(step.after.jobs[job_id].request.user)
            rows.extend(_rows(step, job_id, names=recorded.names))
            if len(rows) >= ROWS_MAX or step.after.revision >= state.revision:
                break
    except TimeTravelBusy as error:
        raise too_busy(str(error)) from error
    except LookupError:
        # What this replica holds no longer begins early enough to fold anything.
        rows = []
    recorded.check()
    complete = bool(rows) and rows[0].event == "job_submitted" and len(rows) < ROWS_MAX
    answer = HistoryAnswer(
        revision=state.revision,
        job_id=job_id,
        task=task_words(state, job_id),
        rows=tuple(rows[:ROWS_MAX]),
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
            state = await call.service.controller.time_travel.state_at(revision)
        except TimeTravelBusy as error:
            raise too_busy(str(error)) from error
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
    if state is call.service.controller.state:
        await call.service.verdicts.ready(state)
    verdict = call.service.verdicts.of(state, job_id)
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


def _rows(step: Step, job_id: int, *, names: bool) -> list[HistoryRow]:
    batch = step.applied.batch
    if batch is None or step.applied.void:
        return []
    if not any(job_id in jobs_of(event) for entry in batch.entries for event in entry.events):
        return []
    rows: list[HistoryRow] = []
    state = step.before
    for position, entry in enumerate(batch.entries):
        state = apply_entry(state, entry, batch.at)
        rows.extend(_entry_rows(state, entry, settled_at(step.applied, position), job_id, batch.at, names=names))
    return rows


def _entry_rows(
    state: State, entry: Entry, revision: Revision, job_id: int, at: Instant, *, names: bool
) -> list[HistoryRow]:
    mine = [event for event in entry.events if job_id in jobs_of(event)]
    if not mine:
        return []
    job = state.jobs.get(job_id)
    reason = "None" if job is None else str(verdict_of(state, job_id).reason)
    return [
        HistoryRow(
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
        for event in mine
    ]


def recorded_job(call: Call[None], state: State) -> Recorded:
    """Return the job that the path names, whether it is in the state or only in the ledger; Problem 403 or 404."""
    job_id = call.job_in(state)
    if not 0 < job_id < state.next_job:
        raise unknown_job(f"there is no job {job_id}")
    return Recorded(call, state, job_id)


def first_revision_of(call: Call[Any], state: State, job_id: int) -> int:
    """Return a revision before which the ledger has nothing of a job."""
    submitted_at = state.jobs[job_id].submitted_at if job_id in state.jobs else NEVER
    return first_revision_at(call.service.controller.applied_log, state.revision, submitted_at)


def first_revision_at(applied_log: AppliedLog, last: Revision, at: Instant) -> int:
    """Return the first revision of a batch that is not older than `at`, by bisection; the first one held for NEVER."""
    low, high = 1, int(last)
    while low < high:
        middle = (low + high) // 2
        found = _at(applied_log, middle)
        if found is None or found < at:
            low = middle + 1
        else:
            high = middle
    return low


def _at(applied_log: AppliedLog, revision: int) -> Instant | None:
    """Return when a revision was settled; None where this replica does not hold it."""
    try:
        for applied in applied_log.read(applied_log.index_of(revision), limit=1):
            return None if applied.batch is None else applied.batch.at
    except LookupError:
        pass
    return None


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
