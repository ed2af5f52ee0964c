"""Jobs: submit, list, show, cancel, hold, release; and many commands in one request."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import msgspec

from cluster.api import wire
from cluster.api.privacy import may_see, shown
from cluster.api.render import holders, job_view, node_jobs, node_view, pool_view
from cluster.api.service import Call, Reply
from cluster.api.transfers import with_transfers
from cluster.api.web import Problem, Redirect, bad, no_leader, refused
from cluster.providers import CALLS_MAX
from cluster.schemas import BulkAnswer, CommandResult, ErrorView, JobsAnswer, JobView, PersistentCleared
from cluster.schemas import requests as r
from cluster.server import Answer, Settled
from cluster.system import format_instant
from replica.decide import Tasks, job_of_task, members
from replica.messages import commands as c
from replica.model import JobState
from replica.state import State
from replica.values import Instant, Refusal

JOBS_LISTED = 1_000
"""Jobs in a list when nobody says otherwise, count."""

JOBS_LISTED_MAX = 10_000
"""Jobs in one list, count: about ten megabytes of JSON; ask by state or user for fewer."""

JOB_ID_MAX = 2**63 - 1

LIST_SLICE = 256
"""Jobs rendered before the loop gets its turn, count: a few milliseconds."""

_WORDS = frozenset(state.name for state in JobState)


async def submit(call: Call) -> Reply:
    """Submit a job."""
    # First of all: what a request may say is for the leader's state to tell, not for one that lags behind.
    await call.service.lead()
    command, warnings = wire.submission(call.body, call.identity, call.service.controller.state.site)
    await call.service.validate(call.identity, call.body.command_id, command)
    settled = await call.service.settle(call, command)
    view = _job_after(call, settled, settled.job, warnings)
    return Reply(settled.state.revision, view, status=201)


async def list_jobs(call: Call) -> Reply:
    """List jobs by id, the newest where there are more than `limit`; with `after` the next ones after that id."""
    limit = call.integer("limit", JOBS_LISTED, least=1, most=JOBS_LISTED_MAX)
    wanted = frozenset(word.upper() for word in call.query.get("state", "").split(",") if word)
    unknown = sorted(wanted - _WORDS)
    if unknown:
        raise bad(f"the job state {unknown[0]!r} is unknown", f"use {', '.join(sorted(_WORDS))}", "query state")
    user = call.query.get("user")
    after = call.integer("after", 0, least=0, most=JOB_ID_MAX) if "after" in call.query else None
    named = wire.job_reference(call.query["job"], "query job") if "job" in call.query else None
    state = await call.state()
    found: list[int] = []
    truncated = False
    listed: Iterable[int] = state.jobs if named is None else _named(state, *named)
    if after is None:
        candidates = sorted(listed, reverse=True)
    else:
        candidates = sorted(job_id for job_id in listed if job_id > after)
    for seen, job_id in enumerate(candidates):
        job = state.jobs[job_id]
        if (not wanted or job.state.name in wanted) and (user is None or job.request.user == user):
            if len(found) == limit:
                truncated = True
                break
            found.append(job_id)
        if seen % (LIST_SLICE * 16) == 0:
            await asyncio.sleep(0)
    rows: list[JobView] = []
    await call.service.verdicts.ready(state, found)
    for job_id in sorted(found):
        rows.append(shown(call, state, job_view(state, job_id, call.service.verdicts)))
        if len(rows) % LIST_SLICE == 0:
            await asyncio.sleep(0)
    return Reply(state.revision, JobsAnswer(revision=state.revision, jobs=tuple(rows), truncated=truncated))


def _named(state: State, job: int, tasks: Tasks) -> tuple[int, ...]:
    """Return the jobs that are named: one, or tasks of an array; Problem 404 where one is not there."""
    found = members(state, job, tasks)
    if isinstance(found, Refusal):
        raise refused(found)
    if found is None and job not in state.jobs:
        raise Problem(404, "unknown_job", f"there is no job {job} in the state", "see /v1/jobs", "query job")
    return (job,) if found is None else found


async def show(call: Call) -> Reply:
    """Show one job."""
    state = await call.state()
    await call.service.verdicts.ready(state)
    job_id = call.job_in(state)
    view = _job(call, state, job_id)
    if state.jobs[job_id].state is JobState.PENDING and may_see(call, state, job_id):
        view = _expected(call, state, view)
    if job_id in state.buffers and may_see(call, state, job_id):
        view = with_transfers(call, state, view)
    uids = await call.service.identities.uids([view.user])
    return Reply(state.revision, msgspec.structs.replace(view, uid=uids[view.user]))


def _expected(call: Call, state: State, view: JobView) -> JobView:
    """Return a job that waits with when it should start."""
    found = call.service.verdicts.estimate(state, view.job_id, Instant(max(state.at, call.service.clock.now())))
    if found is None:
        return view
    steps = tuple(step.what for step in found.steps)
    return msgspec.structs.replace(view, expected_start=format_instant(found.start_at), expected_after=steps)


async def cancel(call: Call) -> Reply:
    """Cancel a job; with `hurry` nothing more is staged out."""
    job_id, tasks = call.job_reference()
    return await change(call, c.CancelJob(job_id, call.body.hurry, tasks))


async def hold(call: Call) -> Reply:
    """Hold a pending job back."""
    return await change(call, c.HoldJob(*call.job_reference()))


async def release(call: Call) -> Reply:
    """Release a held job, or order again what had failed for good."""
    return await change(call, c.ReleaseJob(*call.job_reference()))


Change = (
    c.CancelJob | c.HoldJob | c.ReleaseJob | c.SuspendJob | c.ResumeJob | c.RequeueJob | c.ClearBuffer | c.UpdateJob
)
"""Commands about one job, an array or some of its tasks."""


async def change(call: Call, command: Change) -> Reply:
    """Have a command about jobs settled; answer with the job as it is afterwards, for an array its first."""
    settled = await call.service.settle(call, command)
    state = settled.state
    tasks = None if isinstance(command, c.ClearBuffer) else command.tasks
    found = job_of_task(state, command.job, tasks[:1] if tasks is not None else None)
    return Reply(state.revision, _job_after(call, settled, command.job if found is None else found))


def _job_after(call: Call, settled: Settled, job_id: int, warnings: tuple[str, ...] = ()) -> JobView:
    """Return the job as a command left it; Problem 404 that says that the command was carried out, where it is gone."""
    if job_id in settled.state.jobs:
        return _job(call, settled.state, job_id, warnings)
    raise Problem(
        404,
        "unknown_job",
        f"the command was carried out at revision {settled.revision}, and job {job_id} has left the list of finished "
        "jobs since",
        f"see /v1/jobs/{job_id}/history",
        "job id",
        # Whoever takes a 404 for a refusal would do it once more.
        outcome="unknown",
    )


def _job(call: Call, state: State, job_id: int, warnings: tuple[str, ...] = ()) -> JobView:
    if job_id not in state.jobs:
        if 0 < job_id < state.next_job:
            raise Problem(
                404,
                "unknown_job",
                f"job {job_id} is over and has left the list of finished jobs",
                f"see /v1/jobs/{job_id}/history",
                "job id",
            )
        raise Problem(404, "unknown_job", f"there is no job {job_id}", "see /v1/jobs", "job id")
    return shown(call, state, job_view(state, job_id, call.service.verdicts, warnings=warnings))


async def bulk(call: Call) -> Reply:
    """Carry out many commands, in order; a refusal of one stops none of the others."""
    service = call.service
    await service.lead()
    begun: list[tuple[r.BulkCommand, c.Command | None, Answer | Problem]] = []
    invalid = await _validated(call)
    for request in call.body.commands:
        command: c.Command | None = None
        outcome: Answer | Problem
        try:
            if request.command_id in invalid:
                raise invalid[request.command_id]
            answer: Answer = asyncio.get_running_loop().create_future()
            command, outcome = service.admit(call.identity, request, answer), answer
        except Problem as problem:
            outcome = problem
        except Redirect:
            outcome = no_leader("this replica stopped leading")
        begun.append((request, command, outcome))
    results = []
    deadline = service.deadline()
    for request, command, outcome in begun:
        results.append(await _result(call, request, command, outcome, deadline))
    state = service.controller.state
    return Reply(state.revision, BulkAnswer(revision=state.revision, results=tuple(results)))


async def _validated(call: Call) -> dict[str, Problem]:
    """Have the site's provider validate the submits among many commands, if there is one; return what is invalid."""
    service, invalid = call.service, {}
    if not service.providing.wanted(service.controller.state):
        return {}

    async def validate(request: r.BulkCommand) -> None:
        try:
            await service.validate_bulk(call.identity, request)
        except Problem as problem:
            invalid[request.command_id] = problem

    requests = call.body.commands
    for first in range(0, len(requests), CALLS_MAX):
        await asyncio.gather(*(validate(request) for request in requests[first : first + CALLS_MAX]))
    return invalid


async def _result(
    call: Call, request: r.BulkCommand, command: c.Command | None, outcome: Answer | Problem, deadline: float
) -> CommandResult:
    if command is None or isinstance(outcome, Problem):
        if not isinstance(outcome, Problem):
            raise AssertionError("a command without a problem has an answer")
        return _failed(request.command_id, outcome)
    try:
        settled = await call.service.finish(outcome, deadline)
    except Problem as problem:
        return _failed(request.command_id, problem)
    except Redirect:
        return _failed(request.command_id, no_leader("this replica stopped leading"))
    return _succeeded(call, request, command, settled)


def _failed(command_id: str, problem: Problem) -> CommandResult:
    view: ErrorView = problem.view
    return CommandResult(command_id=command_id, status=problem.status, error=view)


def _succeeded(call: Call, request: r.BulkCommand, command: c.Command, settled: Settled) -> CommandResult:
    state, status, revision, command_id = settled.state, 200, settled.revision, request.command_id
    warnings: tuple[str, ...] = ()
    match command:
        case c.SubmitJob():
            job, status = settled.job, 201
            if isinstance(request, r.SubmitCommand):
                warnings = wire.warnings_of(request, state.site)
        case c.ClearBuffer() if command.name:
            return CommandResult(command_id=command_id, status=status, revision=revision)
        case c.ClearBuffer():
            job = command.job
        case (
            c.CancelJob()
            | c.HoldJob()
            | c.ReleaseJob()
            | c.SuspendJob()
            | c.ResumeJob()
            | c.RequeueJob()
            | c.UpdateJob()
        ):
            tasks = None if command.tasks is None else command.tasks[:1]
            job = job_of_task(state, command.job, tasks) or command.job
        case c.SetPool():
            name = command.pool.name
            view = pool_view(state, name, holders(state).get(name, 0))
            return CommandResult(command_id=command_id, status=status, revision=revision, pool=view)
        case c.DrainNode() | c.ResumeNode():
            liveness = call.service.controller.liveness
            node = node_view(state, command.node, node_jobs(state)[command.node], liveness)
            return CommandResult(command_id=command_id, status=status, revision=revision, node=node)
        case _:
            raise AssertionError(f"{c.kind_of(command)} cannot come in bulk")
    found = job_view(state, job, call.service.verdicts, warnings=warnings) if job in state.jobs else None
    return CommandResult(command_id=command_id, status=status, revision=revision, job=found)


# ---- changing a job that waits, as `scontrol update` does


async def update(call: Call) -> Reply:
    """Change a job that waits, or those that wait of an array or of some of its tasks."""
    site = call.service.controller.state.site
    return await change(call, wire.update_job(*call.job_reference(), call.body, site))


# ---- what is done to jobs that run, and to buffers that are stuck: suspend, resume, requeue, clear


async def suspend(call: Call) -> Reply:
    """Stop the script of a running job where it is; its time limit stands still."""
    return await change(call, c.SuspendJob(*call.job_reference()))


async def resume(call: Call) -> Reply:
    """Let the script of a suspended job go on."""
    return await change(call, c.ResumeJob(*call.job_reference()))


async def requeue(call: Call) -> Reply:
    """End the present run of a job, or take back its buffer, and let it wait and stage in again."""
    return await change(call, c.RequeueJob(*call.job_reference()))


async def clear(call: Call) -> Reply:
    """Forget the buffer of a job that could not be removed; with `discard` also results that were not staged out."""
    job_id, tasks = call.job_reference()
    if tasks is not None:
        raise bad("the buffers of array tasks are cleared one by one", "name the task's own job number", "job id")
    return await change(call, c.ClearBuffer(job=job_id, discard=call.body.discard))


async def clear_persistent(call: Call) -> Reply:
    """Forget a persistent buffer that cannot be removed; with `discard` also one that is whole."""
    name = call.params["name"]
    settled = await call.service.settle(call, c.ClearBuffer(name=name, discard=call.body.discard))
    return Reply(settled.state.revision, PersistentCleared(revision=settled.state.revision, name=name))
