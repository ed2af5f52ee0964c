"""Handlers of jobs and their buffers, and of bulk requests."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, NamedTuple

import msgspec

from forebay.cluster.api import request_decoding
from forebay.cluster.api.privacy import may_see, owns, redact_job, visible_reason
from forebay.cluster.api.render import JobVerdicts, capacity_controls, holders, job_view, left_out, node_view, pool_view
from forebay.cluster.api.service import ApiCall, ApiService, CommandBody, Reply, Route, encode_view, handles, is_long
from forebay.cluster.api.transfers import with_transfers
from forebay.cluster.api.web import Problem, Redirect, bad_request, no_leader, rejection_problem, unknown_job
from forebay.cluster.providers import CALLS_MAX
from forebay.cluster.schemas import (
    ApiOperation,
    BulkAnswer,
    CollapsedTasksView,
    Command,
    CommandResult,
    JobsAnswer,
    JobView,
    PersistentClearedAnswer,
    SubmitRequest,
    UpdateRequest,
)
from forebay.cluster.schemas import operations as ops
from forebay.cluster.schemas import requests as r
from forebay.cluster.server import Answer, Settlement
from forebay.cluster.system import format_instant
from forebay.cluster.system.eventloop import RECORDS_PER_SLICE, SlicedWork, iterate_paced
from forebay.replica.decide import job_of_task, jobs_of_tasks
from forebay.replica.messages import commands as c
from forebay.replica.model import Job, JobState, Tasks, format_reference
from forebay.replica.state import State
from forebay.replica.values import NEVER, Instant, Rejection
from forebay.replica.views import buffer_path, persistent_notes, shared_destinations

JOB_ID_MAX = 2**63 - 1

PARTS_PER_COMMAND = 128
"""Slice parts for reading and queueing one bulk command: about two hundred microseconds with its script."""

CHARACTERS_PER_PART = 4
"""Characters of a script full of directives that cost one slice part."""

REASONS_OF_ROW_MAX = 5
"""Most frequent reasons listed for the tasks of one row, count."""

_WORDS = frozenset(state.name for state in JobState)

Change = (
    c.CancelJob
    | c.HoldJob
    | c.ReleaseJob
    | c.SuspendJob
    | c.ResumeJob
    | c.RequeueJob
    | c.ClearBuffer
    | c.ExportBuffer
    | c.UpdateJob
)
"""Commands about one job, an array or some of its tasks."""


@handles(ops.SUBMIT_JOB)
async def submit_job(call: ApiCall[SubmitRequest]) -> Reply[JobView]:
    # Check the leadership first, because only the leader's state decides which requests are valid.
    await call.service.lead()
    command, warnings = await call.submission()
    await call.service.validate(call.identity, call.command_id, command)
    settled = await call.service.settle(call, command)
    is_listed = settled.job in settled.state.jobs
    shared = _shared_destinations(call, settled.state, settled.job) if is_listed else ()
    warned = tuple(
        f"other jobs stage out to the same destination, so only the last copy stays: {one}" for one in shared
    )
    warned += _notes(settled.state, settled.job, command) if is_listed else ()
    view = await _job_after(call, settled, settled.job, (*warnings, *warned))
    return Reply(settled.state.revision, view)


def _notes(state: State, job_id: int, command: c.SubmitJob) -> tuple[str, ...]:
    """Return warnings for the submitter of an accepted job."""
    return left_out(command, state.jobs[job_id].request) + persistent_notes(state, job_id)


def _shared_destinations(call: ApiCall[Any], state: State, job_id: int) -> tuple[str, ...]:
    """Describe the stage-out destinations a job shares with other jobs visible to the caller."""
    found = []
    for path, others in ((one.path, one.jobs) for one in shared_destinations(state, job_id)):
        seen = [str(other) for other in others if may_see(call, state, other)]
        if seen:
            found.append(f"{path} (job{'s' if len(seen) > 1 else ''} {', '.join(seen)})")
    return tuple(found)


class _JobFilter(NamedTuple):
    """Filter of a job list, over fields that private data leaves visible."""

    states: frozenset[str]
    """Names of job states; empty: any."""
    user: str | None
    name: str
    """Part of the name in lower case; empty: any."""
    only_external_jobs: bool

    @classmethod
    def of(cls, call: ApiCall[None]) -> _JobFilter:
        """Return the filter of a query.

        Raises:
            Problem: 400, for an unknown state.
        """
        query = call.query
        states = frozenset(word.upper() for word in query.get("state", "").split(",") if word)
        unknown = sorted(states - _WORDS)
        if unknown:
            raise bad_request(
                f"the job state {unknown[0]!r} is unknown", f"use {', '.join(sorted(_WORDS))}", "query state"
            )
        only_external_jobs = query.get("external_jobs") == "yes"
        return cls(states, query.get("user"), query.get("name", "").casefold(), only_external_jobs)

    def matches(self, job: Job) -> bool:
        """Return True if the job is to be listed."""
        return (
            (not self.states or job.state.name in self.states)
            and (self.user is None or job.request.user == self.user)
            and (not self.name or self.name in job.request.name.casefold())
            and (job.external_job is not None or not self.only_external_jobs)
        )


class _JobRows:
    """Matching jobs as rows: one a job, or with `collapse` one for all tasks of an array in one state."""

    def __init__(self, *, collapse: bool) -> None:
        self._collapse = collapse
        self._groups: dict[tuple[int, JobState], list[int]] = {}
        self.count = 0
        """Jobs of all rows, count."""
        self.ids: list[int] = []
        """Job ID of each row, for an array its smallest one; complete after `merge`."""
        self.tasks: dict[int, list[int]] = {}
        """Job ID of a row -> its jobs, for rows with more than one."""

    def add(self, job: Job) -> None:
        """Add a job."""
        self.count += 1
        array = job.request.array if self._collapse else None
        if array is None:
            self.ids.append(job.id)
        else:
            self._groups.setdefault((array.job, job.state), []).append(job.id)

    async def merge(self, work: SlicedWork) -> None:
        """Add the rows of the arrays."""
        for group in self._groups.values():
            await work.take(0, parts=len(group))
            group.sort()
            self.ids.append(group[0])
            if len(group) > 1:
                self.tasks[group[0]] = group


@handles(ops.LIST_JOBS)
async def list_jobs(call: ApiCall[None]) -> Reply[JobsAnswer]:
    expected = call.query.get("expected") == "yes"
    most = ops.EXPECTED_LISTED_MAX if expected else ops.JOBS_LISTED_MAX
    limit = call.integer("limit", min(most, ops.JOBS_LISTED), least=1, most=most)
    wanted = _JobFilter.of(call)
    after = call.integer("after", 0, least=0, most=JOB_ID_MAX) if "after" in call.query else None
    before = call.integer("before", 0, least=0, most=JOB_ID_MAX) if "before" in call.query else None
    if after is not None and before is not None:
        raise bad_request("after and before exclude each other", "give one of them", "query before")
    named = request_decoding.job_reference(call.query["job"], "query job") if "job" in call.query else None
    state, work = await call.state(), call.work
    listed: Iterable[int] = state.jobs if named is None else _named_jobs(state, *named)
    matching = _JobRows(collapse=call.query.get("collapse") == "yes")
    async for job_id in iterate_paced(listed, work, parts=2):
        job = state.jobs[job_id]
        if wanted.matches(job):
            matching.add(job)
    await matching.merge(work)
    rest = [
        job_id
        async for job_id in iterate_paced(matching.ids, work, parts=1)
        if (after is None or job_id > after) and (before is None or job_id < before)
    ]
    shown_ids = list(islice(await work.sort(rest, reverse=after is None), limit))
    skipped = len(matching.ids) - len(rest)
    if after is None and before is None:
        shown_ids.reverse()
        skipped = len(rest) - len(shown_ids)
    tasks = [task for job_id in shown_ids for task in matching.tasks.get(job_id, (job_id,))]
    known = await call.service.verdicts.verdicts_of(state, tasks, work, reasons=True)
    rows: list[JobView] = []
    async for job_id in iterate_paced(shown_ids, work):
        view = redact_job(call, state, job_view(state, job_id, known))
        job = state.jobs[job_id]
        if expected and job.state is JobState.PENDING and job.external_job is None and may_see(call, state, job_id):
            view = await _with_expected_start(call, state, view)
        rows.append(encode_view(view))
    answer = JobsAnswer(
        revision=state.revision,
        jobs=tuple(rows),
        truncated=len(rest) > limit,
        at=format_instant(call.service.then or NEVER),
        matching=len(matching.ids),
        matching_jobs=matching.count,
        skipped=skipped,
        collapsed={
            str(job_id): await _collapsed_view(call, state, matching.tasks[job_id], known)
            for job_id in shown_ids
            if job_id in matching.tasks
        },
    )
    return Reply(state.revision, answer)


async def _collapsed_view(
    call: ApiCall[None], state: State, tasks: list[int], known: JobVerdicts
) -> CollapsedTasksView:
    """Return the row of several tasks of an array."""
    numbers: list[int] = []
    reasons: Counter[str] = Counter()
    array_id = 0
    async for job_id in iterate_paced(tasks, call.work, parts=8):
        array = state.jobs[job_id].request.array
        assert array is not None  # only tasks of an array share a row
        array_id = array.job
        numbers.append(array.task)
        reasons[visible_reason(call, state, job_id, known.reason(job_id))] += 1
    return CollapsedTasksView(
        reference=format_reference(array_id, tuple(sorted(numbers))),
        count=len(tasks),
        reasons=dict(reasons.most_common(REASONS_OF_ROW_MAX)),
    )


def _named_jobs(state: State, job: int, tasks: Tasks) -> tuple[int, ...]:
    """Return the referenced job or array tasks.

    Raises:
        Problem: 404, if one of them does not exist.
    """
    found = jobs_of_tasks(state, job, tasks)
    if isinstance(found, Rejection):
        raise rejection_problem(found)
    if found is None and job not in state.jobs:
        raise unknown_job(f"job {job} does not exist", place="query job")
    return (job,) if found is None else found


@handles(ops.SHOW_JOB)
async def show_job(call: ApiCall[None]) -> Reply[JobView]:
    state, work = await call.state(), call.work
    job_id = call.job_in(state)
    view = await _job(call, state, job_id)
    job = state.jobs[job_id]
    if job.state is JobState.PENDING and job.external_job is None and may_see(call, state, job_id):
        view = await _with_expected_start(call, state, view)
    if job_id in state.buffers and may_see(call, state, job_id):
        await work.take(RECORDS_PER_SLICE)
        view = with_transfers(call, state, view)
        view = msgspec.structs.replace(view, stage_out_shared=_shared_destinations(call, state, job_id))
        if owns(call, state, job_id):
            view = msgspec.structs.replace(view, burst_buffer_path=buffer_path(state, job_id))
    uids = await call.service.identities.uids([view.user])
    return Reply(state.revision, msgspec.structs.replace(view, uid=uids[view.user]))


async def _with_expected_start(call: ApiCall[Any], state: State, view: JobView) -> JobView:
    """Add the expected start to the view of a waiting job."""
    at = Instant(max(state.at, call.service.clock.now()))
    found = await call.service.verdicts.estimate(state, view.job_id, at, call.work)
    steps = tuple(step.what for step in found.steps)
    return msgspec.structs.replace(view, expected_start=format_instant(found.start_at), expected_after=steps)


@handles(ops.CANCEL_JOB)
async def cancel_job(call: ApiCall[r.CancelRequest]) -> Reply[JobView]:
    job_id, tasks = call.job_reference()
    return await _change(call, c.CancelJob(job_id, call.body.hurry, tasks))


@handles(ops.RELEASE_JOB)
async def release_job(call: ApiCall[r.ReleaseRequest]) -> Reply[JobView]:
    job_id, tasks = call.job_reference()
    return await _change(call, c.ReleaseJob(job_id, tasks, call.body.partial))


async def _change(call: ApiCall[CommandBody], command: Change) -> Reply[JobView]:
    """Settle a command about jobs, and respond with the resulting job, for an array with its first."""
    settled = await call.service.settle(call, command)
    return Reply(settled.state.revision, await _job_after(call, settled, _first_of(settled.state, command)))


def _first_of(state: State, command: Change) -> int:
    """Return the first job a command was about."""
    tasks = None if isinstance(command, c.ClearBuffer | c.ExportBuffer) else command.tasks
    found = job_of_task(state, command.job, tasks[:1] if tasks is not None else None)
    return command.job if found is None else found


def _change_route(operation: ApiOperation[Command, JobView], command: Callable[[int, Tasks], Change]) -> Route:
    """Return the route of a command whose only parameter is the job."""

    async def changed(call: ApiCall[Command]) -> Reply[JobView]:
        return await _change(call, command(*call.job_reference()))

    return handles(operation)(changed)


hold_job = _change_route(ops.HOLD_JOB, c.HoldJob)
suspend_job = _change_route(ops.SUSPEND_JOB, c.SuspendJob)
resume_job = _change_route(ops.RESUME_JOB, c.ResumeJob)
requeue_job = _change_route(ops.REQUEUE_JOB, c.RequeueJob)


async def _job_after(call: ApiCall[Any], settled: Settlement, job_id: int, warnings: tuple[str, ...] = ()) -> JobView:
    """Return the job after a command.

    Raises:
        Problem: 404, if the job was deleted meanwhile; the error says that the command was executed.
    """
    if job_id in settled.state.jobs:
        return await _job(call, settled.state, job_id, warnings)
    raise Problem(
        404,
        "unknown_job",
        f"the command was carried out at revision {settled.revision}, and job {job_id} has left the list of finished "
        "jobs since",
        f"see /v1/jobs/{job_id}/history",
        "job id",
        # A client would retry after a 404 that looks like a rejection.
        outcome="unknown",
    )


async def _job(call: ApiCall[Any], state: State, job_id: int, warnings: tuple[str, ...] = ()) -> JobView:
    if job_id not in state.jobs:
        if 0 < job_id < state.next_job:
            words = f"job {job_id} has finished and left the list of finished jobs"
            raise unknown_job(words, f"see /v1/jobs/{job_id}/history")
        raise unknown_job(f"job {job_id} does not exist")
    known = await call.service.verdicts.verdicts_of(state, [job_id], call.work, reasons=True)
    return redact_job(call, state, job_view(state, job_id, known, warnings=warnings))


@handles(ops.SEND_COMMANDS)
async def send_commands(call: ApiCall[r.BulkRequest]) -> Reply[BulkAnswer]:
    service = call.service
    await service.lead()
    prepared, work = await _prepare_submits(call), call.work
    begun: list[tuple[r.BulkCommand, tuple[c.Command, Answer] | Problem | Redirect]] = []
    for request in call.body.commands:
        await work.take(0, parts=_parts_of(request))
        begun.append((request, _begin(call, request, prepared.get(request.command_id))))
    deadline = service.deadline()
    results = []
    for request, outcome in begun:
        await work.take(1, parts=_parts_of(request))
        results.append(encode_view(await _result(service, request, outcome, deadline, work)))
    state = service.controller.state
    return Reply(state.revision, BulkAnswer(revision=state.revision, results=tuple(results)))


def _parts_of(request: r.BulkCommand) -> int:
    """Return the slice parts for reading one bulk command; long ones are read in a thread."""
    return PARTS_PER_COMMAND + (
        0 if is_long(request) else request_decoding.text_characters(request) // CHARACTERS_PER_PART
    )


def _begin(
    call: ApiCall[r.BulkRequest], request: r.BulkCommand, prepared: c.Command | Problem | None
) -> tuple[c.Command, Answer] | Problem | Redirect:
    """Queue one bulk command; return it with its future result, or the rejection."""
    if isinstance(prepared, Problem):
        return prepared
    answer: Answer = asyncio.get_running_loop().create_future()
    # Only their total size is known.
    share = call.asked.size_bytes // len(call.body.commands)
    try:
        return call.service.admit(call.identity, request, answer, size_bytes=share, prepared=prepared), answer
    except (Problem, Redirect) as error:
        return error


async def _prepare_submits(call: ApiCall[r.BulkRequest]) -> dict[str, c.Command | Problem]:
    """Decode long bulk commands, and have the site's provider validate submits.

    An invalid command maps to its Problem.
    """
    service = call.service
    found: dict[str, c.Command | Problem] = {}

    async def prepare(request: r.BulkCommand) -> None:
        try:
            command = await service.prepare(call.identity, request)
        except Problem as problem:
            found[request.command_id] = problem
        else:
            if command is not None:
                found[request.command_id] = command

    requests = call.body.commands
    if not service.providing.is_needed(service.controller.state):
        requests = tuple(filter(is_long, requests))
    for first in range(0, len(requests), CALLS_MAX):
        await asyncio.gather(*(prepare(request) for request in requests[first : first + CALLS_MAX]))
    return found


async def _result(
    service: ApiService,
    request: r.BulkCommand,
    begun: tuple[c.Command, Answer] | Problem | Redirect,
    deadline: float,
    work: SlicedWork,
) -> CommandResult:
    try:
        if isinstance(begun, Problem | Redirect):
            raise begun
        command, answer = begun
        return await _bulk_success(service, request, command, await service.finish(answer, deadline), work)
    except Problem as error:
        problem = error
    except Redirect:
        problem = no_leader("this replica stopped leading")
    return CommandResult(command_id=request.command_id, status=problem.status, error=problem.view)


async def _bulk_success(
    service: ApiService, request: r.BulkCommand, command: c.Command, settled: Settlement, work: SlicedWork
) -> CommandResult:
    state = settled.state
    warnings: tuple[str, ...] = ()
    result = CommandResult(command_id=request.command_id, status=200, revision=settled.revision)
    replace = msgspec.structs.replace
    match command:
        case c.SubmitJob():
            job, result = settled.job, replace(result, status=201)
            if isinstance(request, r.SubmitCommand):
                warnings = await service.reading(request, request_decoding.warnings_of, request, state.site)
                warnings += _notes(state, job, command) if job in state.jobs else ()
        case c.OpenSession():
            return result
        case c.ClearBuffer() if command.name:
            return result
        case c.SetPool():
            name = command.pool.name
            return replace(result, pool=pool_view(state, name, holders(state).get(name, 0), capacity_controls(state)))
        case c.DrainNode() | c.ResumeNode():
            return replace(result, node=node_view(state, command.node, service.controller.liveness))
        case _:
            if not isinstance(command, Change):
                raise AssertionError(f"{c.kind_of(command)} cannot be sent in bulk")
            job = _first_of(state, command)
    known = await service.verdicts.verdicts_of(state, [job], work, reasons=True)
    found = job_view(state, job, known, warnings=warnings) if job in state.jobs else None
    return replace(result, job=found)


@handles(ops.UPDATE_JOB)
async def update_job(call: ApiCall[UpdateRequest]) -> Reply[JobView]:
    site = call.service.controller.state.site
    named = call.job_reference()
    return await _change(
        call, await call.service.reading(call.body, request_decoding.update_job, *named, call.body, site)
    )


@handles(ops.CLEAR_BUFFER)
async def clear_buffer(call: ApiCall[r.ClearRequest]) -> Reply[JobView]:
    job_id, tasks = call.job_reference()
    if tasks is not None:
        raise bad_request(
            "the buffers of array tasks are cleared one by one", "name the task's own job number", "job id"
        )
    return await _change(call, c.ClearBuffer(job=job_id, discard=call.body.discard))


@handles(ops.EXPORT_BUFFER)
async def export_buffer(call: ApiCall[r.ReleaseRequest]) -> Reply[JobView]:
    job_id, tasks = call.job_reference()
    if tasks is not None:
        raise bad_request(
            "the buffers of array tasks are exported one by one", "name the task's own job number", "job id"
        )
    return await _change(call, c.ExportBuffer(job_id, call.body.partial))


@handles(ops.CLEAR_PERSISTENT_BUFFER)
async def clear_persistent_buffer(call: ApiCall[r.ClearRequest]) -> Reply[PersistentClearedAnswer]:
    name = call.params["name"]
    settled = await call.service.settle(call, c.ClearBuffer(name=name, discard=call.body.discard))
    return Reply(settled.state.revision, PersistentClearedAnswer(revision=settled.state.revision, name=name))
