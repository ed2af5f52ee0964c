"""Handlers of history: events of one job or of the cluster, and past states, from the ledger."""

from __future__ import annotations

import difflib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import msgspec

from forebay.cluster.api.history_service import (
    NO_JOB,
    REJECTED,
    REVERSED,
    CommandEvents,
    EventFilter,
    EventPageQuery,
    HistoryServiceBusy,
    HistoryServiceTimeout,
    JobRecord,
    LeaderTerm,
    LedgerRecords,
    PastReply,
    QueryFailure,
    RecordsQuery,
    RecordsReply,
    WhyReply,
)
from forebay.cluster.api.privacy import RecordedJob, check_may_see, check_may_see_of, only_user
from forebay.cluster.api.render import (
    actor_words,
    as_json,
    event_name,
    sentence_of,
    task_words,
    why_view,
)
from forebay.cluster.api.service import ApiCall, Reply, encode_view, handles
from forebay.cluster.api.web import Problem, bad_request, permission_denied, too_busy, too_many, unknown_job
from forebay.cluster.schemas import (
    ArchivedView,
    DiffAnswer,
    ErrorView,
    HistoryAnswer,
    HistoryRow,
    LeadersAnswer,
    LeaderTermView,
    StoryAnswer,
    StoryRow,
    WhyView,
    kind_name,
    made_of,
)
from forebay.cluster.schemas import operations as ops
from forebay.cluster.security import Role
from forebay.cluster.system import format_instant, parse_instant
from forebay.cluster.system.eventloop import SlicedWork, iterate_paced
from forebay.replica.messages import EVENTS, Batch, Entry, Event, JobSubmitted, job_of
from forebay.replica.messages.events import ExternalJobSetUp
from forebay.replica.model import has_private_data
from forebay.replica.state import State
from forebay.replica.values import NEVER, Instant
from forebay.wal import decode_batch

Live = Callable[[], Awaitable[bytes]]
"""Returns encoded values of the replica that its state does not contain (`LiveValues`)."""

ROWS_MAX = 10_000
"""Events of one job in a response, count; a job that is retried forever has more, and the oldest are shown."""

REVISION_MAX = 2**63 - 1

OF_DRILLS = frozenset({"stage_retried", "job_requeued", "run_requeued", "node_went_down"}) | {
    name for name in map(kind_name, EVENTS) if name.startswith("drill")
}
"""Events visible to the role drill: effects a drill should not have, and drills."""

_BEGINNINGS = ("job_submitted", "external_job_set_up")
"""First events of a job."""


@handles(ops.SHOW_JOB_HISTORY)
async def show_job_history(call: ApiCall[None]) -> Reply[HistoryAnswer]:
    last = call.integer("last", ROWS_MAX, least=1, most=ROWS_MAX)
    state = await call.state()
    recorded = recorded_job(call, state)
    found, work = records_of(call, recorded), call.work
    rows: list[HistoryRow] = []
    async for record, batch in decode_records(recorded, found, work):
        (entry,) = batch.entries
        for event in entry.events:
            await work.take()
            rows.append(_row(record, entry, event, batch.at, names=recorded.names, provider=state.site.provider))
        if len(rows) >= ROWS_MAX:
            break
    recorded.check()
    archived = None if found.archived is None else made_of(found.archived, ArchivedView, commands=found.archived.count)
    complete = found.whole and bool(rows) and rows[0].event in _BEGINNINGS and len(rows) < ROWS_MAX
    answer = HistoryAnswer(
        revision=state.revision,
        job_id=recorded.job_id,
        task=task_words(state, recorded.job_id),
        rows=tuple([encode_view(row) async for row in iterate_paced(rows[:ROWS_MAX][-last:], work)]),
        complete=complete,
        left_out=max(0, len(rows[:ROWS_MAX]) - last),
        archived=archived,
    )
    return Reply(state.revision, answer)


async def read_past(call: ApiCall[None]) -> Reply[None]:
    """Respond to a read from the past state named in its query."""
    state = await call.state()
    revision, at = _moment(call, state, "at")
    query = {name: text for name, text in call.query.items() if name not in ("at", "stale")}
    try:
        found = await call.service.past.read_past(
            call.identity, call.operation.name, call.params, query,
            revision=revision, at=at, is_private=has_private_data(state.site),
        )  # fmt: skip
    except (HistoryServiceBusy, HistoryServiceTimeout) as error:
        raise history_busy(error) from error
    if isinstance(found, QueryFailure):
        raise _not_held(call, found, at, "at")
    return _reply_of(found, f" at revision {found.revision}" if found.status == 404 else "")


async def read_present(call: ApiCall[None], live: Live) -> Reply[None]:
    """Respond to a read of the state in the history service's process.

    Raises:
        HistoryServiceLost: It cannot answer now; this process can.
    """
    return await _read(call, call.service.past.read_present, live)


async def read_records(call: ApiCall[None], live: Live) -> Reply[None]:
    """Respond to a read of the ledger's records in the history service's process."""
    return await _read(call, call.service.past.read_records, live)


async def _read(call: ApiCall[None], read: Callable[..., Awaitable[PastReply]], live: Live) -> Reply[None]:
    if "stale" in call.operation.query:  # else the response is about this replica, however old its state is
        await call.state()
    query = {name: text for name, text in call.query.items() if name != "stale"}
    try:
        found = await read(call.identity, call.operation.name, call.params, query, live=live)
    except (HistoryServiceBusy, HistoryServiceTimeout) as error:
        raise history_busy(error) from error
    return _reply_of(found)


def _reply_of(found: PastReply, when: str = "") -> Reply[None]:
    """Return the history service's response; `when` is added to the sentence of an error.

    Raises:
        Problem: The response is an error.
    """
    if found.status >= 400:
        view = msgspec.json.decode(found.content, type=ErrorView)
        raise Problem(found.status, view.code, view.sentence + when, view.remedy, view.place)
    return Reply(found.revision, content=found.content, content_type=found.content_type)


def _not_held(call: ApiCall[None], found: QueryFailure, at: Instant, name: str) -> Problem:
    when = f"revision {found.revision}" if found.revision else format_instant(at)
    return Problem(
        410,
        "history_not_held",
        f"{call.service.controller.name} cannot reconstruct the state at {when}: {found.sentence}",
        "ask another replica with stale=ok",
        f"query {name}",
    )


@handles(ops.SHOW_HISTORY)
async def show_history(call: ApiCall[None]) -> Reply[StoryAnswer]:
    state = await call.state()
    sought = _event_filter(call, state)
    since = _moment(call, state, "from") if "from" in call.query else (0, NEVER)
    until = _moment(call, state, "to") if "to" in call.query else (0, NEVER)
    if "after" in call.query:
        after, since_at = call.integer("after", 0, least=0, most=REVISION_MAX), NEVER
    else:
        after, since_at = max(0, since[0] - 1), since[1]
    limit = call.integer("limit", ops.HISTORY_LIMIT, least=1, most=ops.HISTORY_LIMIT_MAX)
    asked = EventPageQuery(after, since_at, until[0], until[1], sought, limit)
    found = _ledger_records(call).event_page(asked)
    if isinstance(found, QueryFailure):
        raise _not_held(call, found, since_at, "from")
    rows: list[StoryRow] = []
    for happened in found.happened:
        await call.work.take(size_bytes=len(happened.batch))
        rows += [encode_view(row) for row in _event_rows(call, happened, state.site.provider)]
    answer = StoryAnswer(
        revision=state.revision,
        rows=tuple(rows),
        read=found.read,
        read_at=format_instant(found.at),
        last=found.last,
    )
    return Reply(state.revision, answer)


def _event_filter(call: ApiCall[None], state: State) -> EventFilter:
    """Return the query's filter, limited to the events the caller may see.

    Raises:
        Problem: 400, if the query is invalid or names events that the caller may not see.
    """
    query, is_user = call.query, call.identity.role is Role.USER
    kinds = tuple(kind for kind in query.get("kind", "").split(",") if kind)
    known = {kind_name(kind) for kind in EVENTS} | {REJECTED}
    for kind in kinds:
        if kind not in known:
            near = difflib.get_close_matches(kind, known, n=3) or sorted(known)
            raise bad_request(f"no event is named {kind[:64]!r}", f"use one or more of {', '.join(near)}", "query kind")
    if call.identity.role is Role.DRILL:
        beyond = sorted(set(kinds) - OF_DRILLS)
        if beyond:
            raise permission_denied(
                f"{call.identity} may not see {beyond[0]}", f"use one or more of {', '.join(sorted(OF_DRILLS))}"
            )
        kinds = kinds or tuple(sorted(OF_DRILLS))
    of, name = query.get("of", ""), query.get("name", "")
    if of not in ("", *ops.HISTORY_OF):
        raise bad_request(f"of is {of[:64]!r}", f"use one of {', '.join(ops.HISTORY_OF)}", "query of")
    if name and not of:
        raise bad_request("name is given without of", f"add of, one of {', '.join(ops.HISTORY_OF)}", "query name")
    job = call.integer("job", 0, least=1, most=REVISION_MAX) if "job" in query else 0
    if job and of:
        raise bad_request(f"job and {of} exclude each other", "give one of them", "query of")
    return EventFilter(
        job=job,
        user=query.get("user", ""),
        account=query.get("account", ""),
        actor=query.get("actor", ""),
        kinds=kinds,
        of=of,
        name=name,
        only=only_user(call, state) or "",
        own=call.identity.name if is_user else "",
    )


def _event_rows(call: ApiCall[None], happened: CommandEvents, provider: str) -> Iterator[StoryRow]:
    """Yield the rows of a command's events, or of its rejection."""
    batch = decode_batch(happened.batch)
    (entry,) = batch.entries
    head: dict[str, Any] = {
        "revision": happened.revision,
        "at": format_instant(batch.at) or "",
        "actor": actor_words(entry.actor, entry.command),
        "command": entry.command,
    }
    if entry.rejection is not None:
        words, remedy = entry.rejection.sentence, entry.rejection.remedy
        yield StoryRow(**head, event=REJECTED, sentence=words, remedy=remedy)
    of_drills = call.identity.role is Role.DRILL
    for sequence, event, user in zip(happened.places, entry.events, happened.users, strict=False):
        names = not of_drills and (call.identity.role is not Role.USER or user == call.identity.name)
        detail = {} if isinstance(event, JobSubmitted) else as_json(event, private=False, names=names)
        sentence = sentence_of(event, names=names, provider=provider)
        if of_drills:
            # Failure details are private to the user; a drill needs only the node.
            user, detail = "", {name: value for name, value in detail.items() if name == "node"}
            sentence = sentence if job_of(event) is None else event_name(event).replace("_", " ")
        yield StoryRow(
            **head,
            sequence=sequence,
            event=event_name(event),
            job_id=job_of(event),
            user=user or None,
            sentence=sentence,
            detail=detail,
        )


@handles(ops.SHOW_DIFF)
async def show_diff(call: ApiCall[None]) -> Reply[DiffAnswer]:
    state = await call.state()
    if "from" not in call.query:
        raise bad_request("the start of the period is missing", "give its first revision or time", "query from")
    since = _moment(call, state, "from")
    until = _moment(call, state, "to") if "to" in call.query else (int(state.revision), NEVER)
    limit = call.integer("limit", ops.DIFF_LIMIT, least=1, most=ops.DIFF_LIMIT_MAX)
    is_operator = call.identity.role is Role.OPERATOR
    try:
        found = await call.service.past.changes(
            call.identity, since, until, _event_filter(call, state), is_operator=is_operator, limit=limit
        )
    except (HistoryServiceBusy, HistoryServiceTimeout) as error:
        raise history_busy(error) from error
    if isinstance(found, QueryFailure):
        if found.kind == REVERSED:
            raise bad_request(found.sentence, "exchange start and end", "query from")
        raise _not_held(call, found, since[1], "from")
    return Reply(state.revision, content=found)


@handles(ops.LIST_LEADERS)
async def list_leaders(call: ApiCall[None]) -> Reply[LeadersAnswer]:
    state = await call.state()
    limit = call.integer("limit", ops.LEADERS_LIMIT, least=1, most=ops.LEADERS_LIMIT_MAX)
    try:
        found = await call.service.past.terms(call.identity, limit)
    except (HistoryServiceBusy, HistoryServiceTimeout) as error:
        raise history_busy(error) from error
    return Reply(state.revision, LeadersAnswer(revision=state.revision, terms=tuple(map(_term_view, found.terms))))


def _term_view(term: LeaderTerm) -> LeaderTermView:
    is_known = term.began != NEVER and term.last_before != NEVER
    return LeaderTermView(
        term=term.term,
        leader=term.leader or None,
        first_index=term.first_index,
        last_index=term.last_index,
        from_at=format_instant(term.began),
        to_at=format_instant(term.ended),
        silent_s=(term.began - term.last_before) / 1e6 if is_known else None,
    )


@handles(ops.EXPLAIN_JOB)
async def explain_job(call: ApiCall[None]) -> Reply[WhyView]:
    state = await call.state()
    if "at" in call.query:
        view = (await _explain_at(call, state)).view
        return Reply(view.revision, view)
    job_id = call.job_in(state)
    if job_id not in state.jobs:
        raise unknown_job(f"job {job_id} did not exist at revision {state.revision}", "see the job's history")
    check_may_see(call, state, job_id)
    verdict = (await call.service.verdicts.verdicts_of(state, [job_id], call.work)).of(job_id)
    return Reply(state.revision, why_view(state, job_id, verdict))


async def _explain_at(call: ApiCall[None], state: State) -> WhyReply:
    """Return the reason the job waited at the requested time.

    Raises:
        Problem: 404, if the job did not exist then; 403 or 410 as for other past reads.
    """
    revision, at = _moment(call, state, "at")
    (job, tasks), external_job = call.one_reference()
    try:
        found = await call.service.past.why(
            job, call.identity, revision=revision, at=at, tasks=tasks, external_job=external_job
        )
    except (HistoryServiceBusy, HistoryServiceTimeout) as error:
        raise history_busy(error) from error
    if not isinstance(found, WhyReply):
        if found.kind == NO_JOB:
            raise unknown_job(found.sentence, "see the job's history")
        raise _not_held(call, found, at, "at")
    if call.identity.role is Role.SCHEDULER and found.scheduler != call.identity.name:
        raise permission_denied(
            f"{call.identity} may read only its own external jobs", f"name the job {call.identity.name}:JOB"
        )
    check_may_see_of(call, state, found.view.job_id, found.user)
    return found


def _moment(call: ApiCall[None], state: State, name: str) -> tuple[int, Instant]:
    """Return the revision named by a query parameter, or 0 and the instant.

    Raises:
        Problem: 400, or 404 for a future revision or time.
    """
    text = call.query[name]
    if text.isascii() and text.isdigit():
        revision = call.integer(name, 0, least=1, most=REVISION_MAX)
        if revision > state.revision:
            raise _not_yet(f"revision {revision} has not happened yet; the last one is {state.revision}", name)
        return revision, NEVER
    try:
        at = parse_instant(text)
    except ValueError as error:
        remedy = f"use a revision, a number from 1 to {REVISION_MAX}, or a time such as 2026-01-31T12:00:00Z"
        raise bad_request(f"{name} is {text[:64]!r}", remedy, f"query {name}") from error
    now = call.service.clock.now()
    if at > now:
        raise _not_yet(f"{format_instant(at)} is in the future; the time is {format_instant(now)}", name)
    return 0, at


def _not_yet(sentence: str, name: str) -> Problem:
    return Problem(404, "unknown_revision", sentence, "use an earlier one", f"query {name}")


def records_of(call: ApiCall[None], recorded: RecordedJob, *, newest: bool = False) -> RecordsReply:
    """Return at most ROWS_MAX records of a job: the oldest, or with `newest` the first and then the newest ones."""
    return _ledger_records(call).records(RecordsQuery(recorded.job_id, ROWS_MAX, newest))


def _ledger_records(call: ApiCall[None]) -> LedgerRecords:
    records = call.service.records
    assert records is not None, call.operation.name  # it is answered in the history service's process
    return records


async def decode_records(
    recorded: RecordedJob, found: RecordsReply, work: SlicedWork
) -> AsyncIterator[tuple[JobRecord, Batch]]:
    """Yield each record with its command, and note the job's owner on the way.

    Raises:
        Problem: 403, if the job is hidden from the caller.
    """
    for record in found.records:
        await work.take(size_bytes=len(record.batch))
        batch = decode_batch(record.batch)
        for event in batch.entries[0].events:
            if isinstance(event, JobSubmitted | ExternalJobSetUp):
                recorded.submitted_by(event.request.user)
        yield record, batch


def _row(record: JobRecord, entry: Entry, event: Event, at: Instant, *, names: bool, provider: str) -> HistoryRow:
    return HistoryRow(
        revision=record.revision,
        at=format_instant(at) or "",
        actor=actor_words(entry.actor, entry.command),
        command=entry.command,
        event=event_name(event),
        sentence=sentence_of(event, names=names, provider=provider),
        state=record.state,
        reason=record.reason,
        burst_buffer_state=record.burst_buffer_state,
        attempt=record.attempt,
        detail={} if isinstance(event, JobSubmitted) else as_json(event, private=False, names=names),
    )


def history_busy(error: HistoryServiceBusy | HistoryServiceTimeout) -> Problem:
    """Return the error of a query that cannot be answered now."""
    if isinstance(error, HistoryServiceBusy) and error.own:
        remedy = "wait for the replies to your other queries, and ask for fewer rows"
        return too_many(str(error), remedy, error.after_s)
    return too_busy(str(error))


def recorded_job(call: ApiCall[None], state: State) -> RecordedJob:
    """Return the job named in the path, from the state or the ledger.

    Raises:
        Problem: 404, if the job never existed; 403, if it is hidden from the caller.
    """
    job_id = call.job_in(state)
    if not 0 < job_id < state.next_job:
        raise unknown_job(f"job {job_id} does not exist")
    return RecordedJob(call, state, job_id)
