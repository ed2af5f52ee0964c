"""Jobs: submit, list, show, cancel, hold, release; and many commands in one request."""

from __future__ import annotations

import asyncio

from cluster.api import wire
from cluster.api.problems import Problem, Redirect, bad, no_leader
from cluster.api.render import holders, job_view, node_jobs, node_view, pool_view
from cluster.api.service import Call, Reply
from cluster.client import requests as r
from cluster.client.views import BulkAnswer, CommandResult, ErrorView, JobsAnswer, JobView
from cluster.proposer import Answer, Settled
from replica import commands as c
from replica.jobs import JobState
from replica.state import State

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
    settled = await call.service.settle(call, wire.submit_job(call.body, call.identity))
    return Reply(settled.state.revision, _job(call, settled.state, settled.job), status=201)


async def list_jobs(call: Call) -> Reply:
    """List jobs by id, the newest where there are more than `limit`; with `after` the next ones after that id."""
    limit = call.integer("limit", JOBS_LISTED, least=1, most=JOBS_LISTED_MAX)
    wanted = frozenset(word.upper() for word in call.query.get("state", "").split(",") if word)
    unknown = sorted(wanted - _WORDS)
    if unknown:
        raise bad(f"the job state {unknown[0]!r} is unknown", f"use {', '.join(sorted(_WORDS))}", "query state")
    user = call.query.get("user")
    after = call.integer("after", 0, least=0, most=JOB_ID_MAX) if "after" in call.query else None
    state = await call.state()
    found: list[int] = []
    truncated = False
    if after is None:
        candidates = sorted(state.jobs, reverse=True)
    else:
        candidates = sorted(job_id for job_id in state.jobs if job_id > after)
    for seen, job_id in enumerate(candidates):
        job = state.jobs[job_id]
        if (not wanted or job.state.name in wanted) and (user is None or job.spec.user == user):
            if len(found) == limit:
                truncated = True
                break
            found.append(job_id)
        if seen % (LIST_SLICE * 16) == 0:
            await asyncio.sleep(0)
    rows: list[JobView] = []
    for job_id in sorted(found):
        rows.append(job_view(state, job_id, call.service.verdicts))
        if len(rows) % LIST_SLICE == 0:
            await asyncio.sleep(0)
    return Reply(state.revision, JobsAnswer(revision=state.revision, jobs=tuple(rows), truncated=truncated))


async def show(call: Call) -> Reply:
    """Show one job."""
    job_id = call.job_id()
    state = await call.state()
    return Reply(state.revision, _job(call, state, job_id))


async def cancel(call: Call) -> Reply:
    """Cancel a job; with `hurry` nothing more is staged out."""
    return await _change(call, c.CancelJob(call.job_id(), call.body.hurry))


async def hold(call: Call) -> Reply:
    """Hold a pending job back."""
    return await _change(call, c.HoldJob(call.job_id()))


async def release(call: Call) -> Reply:
    """Release a held job, or order again what had failed for good."""
    return await _change(call, c.ReleaseJob(call.job_id()))


async def _change(call: Call, command: c.CancelJob | c.HoldJob | c.ReleaseJob) -> Reply:
    settled = await call.service.settle(call, command)
    return Reply(settled.state.revision, _job(call, settled.state, command.job))


def _job(call: Call, state: State, job_id: int) -> JobView:
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
    return job_view(state, job_id, call.service.verdicts)


async def bulk(call: Call) -> Reply:
    """Carry out many commands, in order; a refusal of one stops none of the others."""
    service = call.service
    await service.lead()
    begun: list[tuple[r.BulkCommand, c.Command | None, Answer | Problem]] = []
    for request in call.body.commands:
        command: c.Command | None = None
        outcome: Answer | Problem
        try:
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
    return _succeeded(call, request.command_id, command, settled)


def _failed(command_id: str, problem: Problem) -> CommandResult:
    view: ErrorView = problem.view
    return CommandResult(command_id=command_id, status=problem.status, error=view)


def _succeeded(call: Call, command_id: str, command: c.Command, settled: Settled) -> CommandResult:
    state, status, revision = settled.state, 200, settled.revision
    match command:
        case c.SubmitJob():
            job, status = settled.job, 201
        case c.CancelJob() | c.HoldJob() | c.ReleaseJob():
            job = command.job
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
    found = job_view(state, job, call.service.verdicts) if job in state.jobs else None
    return CommandResult(command_id=command_id, status=status, revision=revision, job=found)
