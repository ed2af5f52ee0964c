"""Responses of the cluster in memory, with the views, checks and errors of a replica's API."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final, NamedTuple, cast
from urllib.parse import parse_qsl

import msgspec

from forebay.cluster.api import request_decoding
from forebay.cluster.api.privacy import may_see, only_user, owns, redact_job
from forebay.cluster.api.render import (
    JobVerdicts,
    actor_words,
    as_json,
    buffer_view,
    capacity_controls,
    event_name,
    event_view,
    holders,
    job_view,
    left_out,
    persistent_view,
    pool_view,
    sentence_of,
    task_words,
)
from forebay.cluster.api.transfers import is_transfer, transfer_view, transfers_of, with_transfers
from forebay.cluster.api.web.authentication import actor_of, permit
from forebay.cluster.api.web.problems import Problem, bad_request, rejection_problem, unknown_job
from forebay.cluster.api.web.routing import check_query, find_operation
from forebay.cluster.schemas import (
    ApiOperation,
    BuffersAnswer,
    Command,
    EventView,
    HistoryAnswer,
    HistoryRow,
    JobsAnswer,
    JobTransfersView,
    JobView,
    PoolsAnswer,
    StatusView,
    TransfersAnswer,
    bytes_of,
)
from forebay.cluster.schemas import operations as ops
from forebay.cluster.security import Identity
from forebay.cluster.system import format_instant, parse_instant
from forebay.cluster.testing.simulation import CLUSTER_ID, CLUSTER_NAME, Simulation
from forebay.replica.decide import job_of_task, jobs_of_tasks
from forebay.replica.messages import JobSubmitted, job_of
from forebay.replica.messages import commands as c
from forebay.replica.state import State
from forebay.replica.values import NEVER, Rejection
from forebay.replica.views import buffer_word, persistent_notes

REPLICA: Final = "memory"
"""Name of the only replica."""


class SimulatedCall(NamedTuple):
    """Request, and the parts of `cluster.api.service.ApiCall` that rules of privacy need."""

    simulation: Simulation
    identity: Identity
    params: dict[str, str]
    query: dict[str, str]
    body: Any

    @property
    def service(self) -> Any:
        """Service without private data, and without progress reports of agents."""
        return SimpleNamespace(is_private=False, controller=SimpleNamespace(leads=False))

    @property
    def state(self) -> State:
        """Current state."""
        return self.simulation.state

    def settle(self, command: c.Command) -> int:
        """Settle the command of the request; return its job."""
        body = cast("Command", self.body)
        return self.simulation.settle(command, actor_of(self.identity), bytes_of(body.command_id)).job

    def job(self) -> int:
        """Return the single job in the path.

        Raises:
            Problem: 404, if it does not exist.
        """
        job_id, tasks = request_decoding.job_reference(self.params["id"], "job id")
        found = job_of_task(self.state, job_id, tasks)
        return job_id if found is None else found

    def job_in_state(self) -> int:
        """Return the single job in the path, which must be in the state."""
        job_id = self.job()
        if job_id not in self.state.jobs:
            raise unknown_job(f"job {job_id} does not exist, or has left the list of finished jobs")
        return job_id

    def view(self, job_id: int, warnings: tuple[str, ...] = (), state: State | None = None) -> JobView:
        """Return a job as the caller sees it."""
        at = self.state if state is None else state
        call: Any = self
        return redact_job(call, at, job_view(at, job_id, JobVerdicts(at), warnings=warnings))


def respond(
    simulation: Simulation, identity: Identity, method: str, target: str, body: bytes | None
) -> tuple[int, Any]:
    """Return the status and view of a response.

    Raises:
        Problem: The request is rejected.
    """
    path, _, query_text = target.partition("?")
    operation, params = find_operation(method, path)
    permit(identity, operation.roles, f"call {operation.name}")
    handler = _HANDLERS.get(operation.name)
    if handler is None:
        raise Problem(
            501, "not_simulated", f"{operation.name} is not available in memory", "test it with a real cluster"
        )
    given = parse_qsl(query_text, keep_blank_values=True)
    query = dict(given)
    check_query(operation, query, [key for key, _ in given])
    call = SimulatedCall(simulation, identity, params, query, _decode(operation, body))
    return operation.status, handler(call)


def events_after(simulation: Simulation, identity: Identity, revision: int) -> list[tuple[EventView, bool]]:
    """Return the events after a revision, each with whether it is the last one of its revision."""
    call: Any = SimulatedCall(simulation, identity, {}, {}, None)
    found = []
    for number, settled in enumerate(simulation.settled[revision:], start=revision + 1):
        count = len(settled.entry.events)
        for sequence in range(count):
            view = event_view(settled.batch, settled.entry, cast("Any", number), sequence)
            if view.job_id is not None and not may_see(call, simulation.state, view.job_id):
                view = msgspec.structs.replace(view, detail={})
            found.append((view, sequence == count - 1))
    return found


def _decode(operation: ApiOperation[Any, Any], body: bytes | None) -> Any:
    if not operation.has_body:
        return None
    try:
        return msgspec.json.decode(body or b"", type=operation.request)
    except msgspec.MsgspecError as error:
        raise bad_request(f"the request is not valid: {error}", "see /v1/openapi.json", "body") from error


def _submit(call: SimulatedCall) -> JobView:
    command, warnings = request_decoding.submission(call.body, call.identity, call.state.site)
    job_id = call.settle(command)
    if job_id not in call.state.jobs:
        raise unknown_job(f"job {job_id} has left the list of finished jobs")
    notes = left_out(command, call.state.jobs[job_id].request) + persistent_notes(call.state, job_id)
    return call.view(job_id, (*warnings, *notes))


def _cancel(call: SimulatedCall) -> JobView:
    job_id, tasks = request_decoding.job_reference(call.params["id"], "job id")
    call.settle(c.CancelJob(job_id, call.body.hurry, tasks))
    found = job_of_task(call.state, job_id, tasks[:1] if tasks is not None else None)
    return call.view(job_id if found is None else found)


def _show_job(call: SimulatedCall) -> JobView:
    job_id = call.job_in_state()
    view, state = call.view(job_id), call.state
    duck: Any = call
    return with_transfers(duck, state, view) if job_id in state.buffers and may_see(duck, state, job_id) else view


def _list_jobs(call: SimulatedCall) -> JobsAnswer:
    query, state = call.query, _state_at(call)
    states = frozenset(word.upper() for word in query.get("state", "").split(",") if word)
    user, name = query.get("user"), query.get("name", "").casefold()
    listed: tuple[int, ...] = tuple(sorted(state.jobs))
    if "job" in query:
        job_id, tasks = request_decoding.job_reference(query["job"], "query job")
        found = jobs_of_tasks(state, job_id, tasks)
        if isinstance(found, Rejection):
            raise rejection_problem(found)
        if found is None and job_id not in state.jobs:
            raise unknown_job(f"job {job_id} does not exist", place="query job")
        listed = (job_id,) if found is None else found
    matching = [
        job_id
        for job_id in listed
        if (not states or state.jobs[job_id].state.name in states)
        and user in (None, state.jobs[job_id].request.user)
        and name in state.jobs[job_id].request.name.casefold()
    ]
    limit = int(query.get("limit", ops.JOBS_LISTED))
    rest = [job_id for job_id in matching if job_id > int(query.get("after", 0))]
    shown = rest[:limit] if "after" in query else rest[-limit:]
    return JobsAnswer(
        revision=state.revision,
        jobs=tuple(call.view(job_id, state=state) for job_id in shown),
        truncated=len(rest) > limit,
        at=None if state is call.state else format_instant(state.at),
        matching=len(matching),
        matching_jobs=len(matching),
    )


def _state_at(call: SimulatedCall) -> State:
    """Return the state at the revision or time of the query; by default the current one."""
    text = call.query.get("at")
    if text is None:
        return call.state
    settled = call.simulation.settled
    if text.isdigit():
        if not 0 < int(text) <= len(settled):
            raise bad_request(f"revision {text} does not exist", f"use 1 to {len(settled)}", "query at")
        return settled[int(text) - 1].state
    try:
        at = parse_instant(text)
    except ValueError as error:
        raise bad_request(str(error), "write it as 2026-01-31T12:00:00Z", "query at") from error
    return next((one.state for one in reversed(settled) if one.state.at <= at), settled[0].state)


def _history(call: SimulatedCall) -> HistoryAnswer:
    job_id, state = call.job(), call.state
    if not 0 < job_id < state.next_job:
        raise unknown_job(f"job {job_id} does not exist")
    duck: Any = call
    if not may_see(duck, state, job_id):
        raise Problem(403, "permission_denied", f"job {job_id} is private to its user", "ask its user", "job id")
    names, rows = owns(duck, state, job_id), []
    for revision, (batch, after) in enumerate(call.simulation.settled, start=1):
        entry = batch.entries[0]
        for event in entry.events:
            of_array = isinstance(event, JobSubmitted) and event.array is not None
            array = None if not of_array or job_id not in after.jobs else after.jobs[job_id].request.array
            if job_of(event) != job_id and (array is None or array.job != job_of(event)):
                continue
            known = job_id in after.jobs
            rows.append(
                HistoryRow(
                    revision=revision,
                    at=format_instant(batch.at) or "",
                    actor=actor_words(entry.actor, entry.command),
                    command=entry.command,
                    event=event_name(event),
                    sentence=sentence_of(event, names=names, provider=after.site.provider),
                    state=after.jobs[job_id].state.name if known else "",
                    reason=JobVerdicts(after).reason(job_id) if known else "",
                    burst_buffer_state=buffer_word(after, job_id) if known else None,
                    attempt=after.jobs[job_id].attempt if known else 0,
                    detail={} if isinstance(event, JobSubmitted) else as_json(event, private=False, names=names),
                )
            )
    last = int(call.query.get("last", len(rows) or 1))
    return HistoryAnswer(
        revision=state.revision,
        job_id=job_id,
        task=task_words(state, job_id),
        rows=tuple(rows[-last:]),
        left_out=max(0, len(rows) - last),
    )


def _list_transfers(call: SimulatedCall) -> TransfersAnswer:
    state, duck = call.state, cast("Any", call)
    moving = {job for jobs in state.on_node.values() for job in jobs if is_transfer(state, job)}
    visible = sorted(job for job in moving if may_see(duck, state, job) and job > int(call.query.get("after", 0)))
    rows = tuple(transfer_view(duck, state, job, None) for job in visible)
    return TransfersAnswer(revision=state.revision, transfers=rows, matching=len(rows))


def _job_transfers(call: SimulatedCall) -> JobTransfersView:
    job_id, duck = call.job_in_state(), cast("Any", call)
    if not may_see(duck, call.state, job_id):
        raise Problem(403, "permission_denied", f"job {job_id} is private to its user", "ask its user", "job id")
    return transfers_of(duck, call.state, job_id)


def _list_buffers(call: SimulatedCall) -> BuffersAnswer:
    state, duck = call.state, cast("Any", call)
    only = only_user(duck, state)
    persistent = [
        persistent_view(state, name) for name in sorted(state.persistent) if only in (None, state.persistent[name].user)
    ]
    jobs = [
        buffer_view(state, job_id, path=owns(duck, state, job_id))
        for job_id in sorted(state.buffers)
        if only in (None, state.jobs[job_id].request.user)
    ]
    return BuffersAnswer(revision=state.revision, buffers=tuple(itertools.chain(persistent, jobs)))


def _list_pools(call: SimulatedCall) -> PoolsAnswer:
    state, held = call.state, holders(call.state)
    controls = capacity_controls(state)
    pools = tuple(pool_view(state, name, held.get(name, 0), controls) for name in sorted(state.pools))
    return PoolsAnswer(revision=state.revision, pools=pools)


def _status(call: SimulatedCall) -> StatusView:
    state, index = call.state, len(call.simulation.settled)
    return StatusView(
        cluster=CLUSTER_NAME,
        cluster_id=CLUSTER_ID,
        replica=REPLICA,
        role="leader",
        term=1,
        leader=REPLICA,
        ready=True,
        commit_index=index,
        applied_index=index,
        last_index=index,
        revision=state.revision,
        at=None if state.at == NEVER else format_instant(state.at),
        feature_level=state.feature_level,
        feature_level_known=state.feature_level,
    )


_HANDLERS: Final[dict[str, Callable[[SimulatedCall], Any]]] = {
    ops.SUBMIT_JOB.name: _submit,
    ops.CANCEL_JOB.name: _cancel,
    ops.SHOW_JOB.name: _show_job,
    ops.LIST_JOBS.name: _list_jobs,
    ops.SHOW_JOB_HISTORY.name: _history,
    ops.LIST_TRANSFERS.name: _list_transfers,
    ops.SHOW_JOB_TRANSFERS.name: _job_transfers,
    ops.LIST_BUFFERS.name: _list_buffers,
    ops.LIST_POOLS.name: _list_pools,
    ops.SHOW_STATUS.name: _status,
}
"""Operations of the Python API, by name."""
