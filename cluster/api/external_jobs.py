"""Handlers of external jobs: commands of another scheduler, and queries about its jobs."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from forebay.cluster.api import request_decoding
from forebay.cluster.api.service import ApiCall, CommandBody, Reply, encode_view, handles
from forebay.cluster.api.web import Problem, bad_request, too_many
from forebay.cluster.schemas import Command
from forebay.cluster.schemas import external_jobs as v
from forebay.cluster.schemas import operations as ops
from forebay.cluster.system import format_instant
from forebay.cluster.system.eventloop import iterate_paced
from forebay.replica.decide import find_persistent_job
from forebay.replica.messages import commands as c
from forebay.replica.model import Access, BufferState, CreatePersistent, Hold, external_job_name
from forebay.replica.operations import (
    ExternalJobLookup,
    ExternalJobPhase,
    find_external_job,
    lingers_until,
    persistent_wait_message,
)
from forebay.replica.state import State
from forebay.replica.views import buffer_path, persistent_paths

EXTERNAL_JOBS_LISTED_MAX = 100_000
"""External jobs in one list, count: the limit of unfinished jobs."""

PARTS_PER_EXTERNAL_JOB = 12
"""Slice parts for rendering one external job: about twenty microseconds."""

POLL_AGAIN_S = 1
"""Retry-After if too many queries wait, seconds."""

_PHASES = frozenset(phase.value for phase in ExternalJobPhase)


@handles(ops.REGISTER_SCHEDULER)
async def register_scheduler(call: ApiCall[v.RegisterSchedulerRequest]) -> Reply[v.SchedulersAnswer]:
    command = c.RegisterScheduler(call.body.cluster, call.body.address)
    state = (await call.service.settle(call, command)).state
    return Reply(state.revision, _schedulers(state, call.identity.name))


@handles(ops.LIST_SCHEDULERS)
async def list_schedulers(call: ApiCall[None]) -> Reply[v.SchedulersAnswer]:
    state = await call.state()
    return Reply(state.revision, _schedulers(state))


@handles(ops.RELEASE_SCHEDULER)
async def release_scheduler(call: ApiCall[Command]) -> Reply[v.SchedulersAnswer]:
    state = (await call.service.settle(call, c.ReleaseScheduler(call.params["name"]))).state
    return Reply(state.revision, _schedulers(state))


def _schedulers(state: State, only: str = "") -> v.SchedulersAnswer:
    rows = tuple(
        v.SchedulerView(
            scheduler=known.name, cluster=known.cluster, address=known.address, since=format_instant(known.at)
        )
        for name, known in sorted(state.schedulers.items())
        if only in ("", name)
    )
    return v.SchedulersAnswer(revision=state.revision, schedulers=rows)


@handles(ops.SHOW_SCHEDULER_SITE)
async def show_scheduler_site(call: ApiCall[None]) -> Reply[v.SchedulerSiteAnswer]:
    state = await call.state()
    shared = [name for name, pool in sorted(state.pools.items()) if pool.filesystem]
    free = await call.service.verdicts.space_for_setups(state, shared, call.work)
    pools = tuple(
        v.ExternalJobPoolView(
            name=name,
            unit=pool.unit.word,
            quantity=pool.usable_bytes,
            granularity=pool.granularity_bytes,
            free=free[name],
            default=pool.is_default,
        )
        for name, pool in ((name, state.pools[name]) for name in shared)
    )
    site = state.site
    answer = v.SchedulerSiteAnswer(
        revision=state.revision,
        pools=pools,
        directive=site.directive,
        provider=site.provider,
        allow_users=site.allow_users,
        deny_users=site.deny_users,
        setup_wait_s=site.external_job_setup_wait_s,
        linger_s=site.external_job_linger_s,
        path_variables=site.path_variables,
    )
    return Reply(state.revision, answer)


@handles(ops.LIST_EXTERNAL_JOBS)
async def list_external_jobs(call: ApiCall[None]) -> Reply[v.ExternalJobsAnswer]:
    state, work = await call.state(), call.work
    own = f"{call.identity.name}:"
    names = [name async for name in iterate_paced(state.external_jobs, work, parts=1) if name.startswith(own)]
    live, rows, truncated = call.query.get("live") == "yes", list[Any](), False
    for name in await work.sort(names):
        await work.take(0, parts=PARTS_PER_EXTERNAL_JOB)
        found = find_external_job(state, name)
        if live and found.phase in (ExternalJobPhase.NONE, ExternalJobPhase.OVER):
            continue
        if len(rows) >= EXTERNAL_JOBS_LISTED_MAX:
            truncated = True
            break
        rows.append(encode_view(v.ExternalJobView(**_fields(state, found))))
    return Reply(
        state.revision, v.ExternalJobsAnswer(revision=state.revision, external_jobs=tuple(rows), truncated=truncated)
    )


@handles(ops.SHOW_EXTERNAL_JOB)
async def show_external_job(call: ApiCall[None]) -> Reply[v.ExternalJobAnswer]:
    awaited, wait_s = _phase_wait(call)
    state, found = await _in_another_phase(call, awaited, wait_s)
    return Reply(state.revision, _answer(state, found))


def _phase_wait(call: ApiCall[Any]) -> tuple[frozenset[str], int]:
    """Return the phases to wait in and the longest wait, seconds."""
    awaited = frozenset(word for word in call.query.get("while", "").split(",") if word)
    unknown = sorted(awaited - _PHASES)
    if unknown:
        raise bad_request(
            f"the phase {unknown[0][:32]!r} is unknown", f"use {', '.join(ExternalJobPhase)}", "query while"
        )
    return awaited, call.integer("wait_s", 0, least=0, most=ops.EXTERNAL_JOB_WAIT_S_MAX)


async def _in_another_phase(
    call: ApiCall[Any], awaited: frozenset[str], wait_s: float
) -> tuple[State, ExternalJobLookup]:
    """Return an external job once it leaves these phases or the wait ends."""
    scheduler, loop = call.identity.name, asyncio.get_running_loop()
    name, until_s = external_job_name(scheduler, call.params["job"]), loop.time() + wait_s
    while True:
        # Confirm the leadership each time, because a deposed leader would wait for an event that has happened.
        state = await call.service.current()
        found, left_s = find_external_job(state, name), until_s - loop.time()
        if found.phase.value not in awaited or left_s <= 0 or call.service.stopping.is_set():
            return state, found
        watch = call.service.controller.external_jobs
        if not watch.has_room(scheduler):
            raise too_many("too many requests already wait for external jobs", "try again later", POLL_AGAIN_S)
        await watch.wait(scheduler, name, left_s)


@handles(ops.SET_UP_EXTERNAL_JOB)
async def set_up_external_job(call: ApiCall[v.SetUpExternalJobRequest]) -> Reply[v.ExternalJobAnswer]:
    # Check the leadership first, because only the leader's state decides which requests are valid.
    await call.service.lead()
    job, site = call.params["job"], call.service.controller.state.site
    command, warnings = await call.service.reading(call.body, request_decoding.external_job_setup, job, call.body, site)
    return await _settle_and_show(call, command, warnings)


@handles(ops.STAGE_IN_EXTERNAL_JOB)
async def stage_in_external_job(call: ApiCall[v.ExternalJobCommand]) -> Reply[v.ExternalJobAnswer]:
    return await _settle_and_show(call, c.StageInExternalJob(call.body.cluster, call.params["job"], call.body.epoch))


@handles(ops.BEGIN_EXTERNAL_JOB_RUN)
async def begin_external_job_run(call: ApiCall[v.ExternalJobCommand]) -> Reply[v.ExternalJobAnswer]:
    return await _settle_and_show(call, c.BeginExternalJobRun(call.body.cluster, call.params["job"], call.body.epoch))


@handles(ops.END_EXTERNAL_JOB_RUN)
async def end_external_job_run(call: ApiCall[v.ExternalJobCommand]) -> Reply[v.ExternalJobAnswer]:
    return await _settle_and_show(call, c.EndExternalJobRun(call.body.cluster, call.params["job"], call.body.epoch))


@handles(ops.STAGE_OUT_EXTERNAL_JOB)
async def stage_out_external_job(call: ApiCall[v.ExternalJobCommand]) -> Reply[v.ExternalJobAnswer]:
    return await _settle_and_show(call, c.StageOutExternalJob(call.body.cluster, call.params["job"], call.body.epoch))


@handles(ops.TEAR_DOWN_EXTERNAL_JOB)
async def tear_down_external_job(call: ApiCall[v.TearDownExternalJobRequest]) -> Reply[v.ExternalJobAnswer]:
    body = call.body
    return await _settle_and_show(
        call, c.TearDownExternalJob(body.cluster, call.params["job"], body.hurry, body.epoch, body.reason)
    )


@handles(ops.MISS_EXTERNAL_JOB)
async def miss_external_job(call: ApiCall[v.MissExternalJobRequest]) -> Reply[v.ExternalJobAnswer]:
    return await _settle_and_show(
        call, c.ReportMissingExternalJob(call.body.cluster, call.params["job"], call.body.state)
    )


# ---- persistent buffers


@handles(ops.LIST_PERSISTENT)
async def list_persistent(call: ApiCall[None]) -> Reply[v.PersistentsAnswer]:
    state, work, rows = await call.state(), call.work, list[Any]()
    for name in await work.sort(state.persistent):
        await work.take(0, parts=PARTS_PER_EXTERNAL_JOB)
        if state.persistent[name].filesystem:
            rows.append(encode_view(v.PersistentView(**_persistent(state, name))))
    return Reply(state.revision, v.PersistentsAnswer(revision=state.revision, buffers=tuple(rows)))


@handles(ops.MAKE_PERSISTENT)
async def make_persistent(call: ApiCall[v.MakePersistentRequest]) -> Reply[v.PersistentAnswer]:
    body, name = call.body, call.params["name"]
    create = CreatePersistent(name, body.size, body.pool, (Access.STRIPED,), "scratch", "capacity", "bare")
    state = (
        await call.service.settle(call, c.MakePersistent(body.cluster, body.user, body.uid, body.gid, create))
    ).state
    return Reply(state.revision, _persistent_answer(state, name, body.user))


@handles(ops.REMOVE_PERSISTENT)
async def remove_persistent(call: ApiCall[v.RemovePersistentRequest]) -> Reply[v.PersistentAnswer]:
    body, name = call.body, call.params["name"]
    command = c.RemovePersistent(body.cluster, body.user, body.uid, body.gid, name, body.hurry)
    state = (await call.service.settle(call, command)).state
    return Reply(state.revision, _persistent_answer(state, name, body.user))


def _persistent(state: State, name: str) -> dict[str, Any]:
    """Return the fields of PersistentView."""
    known = state.persistent.get(name)
    if known is None:
        return {"name": name, "state": "none"}
    filesystem = state.filesystems.get(known.filesystem)
    return {
        "name": name,
        "state": known.state.word,
        "user": known.user,
        "pool": known.pool,
        "size": known.granted_bytes,
        "path": None if filesystem is None else f"{filesystem.path}/{known.directory}",
        "number": known.job,
        "create_time": format_instant(known.created_at),
    }


def _persistent_answer(state: State, name: str, user: str) -> v.PersistentAnswer:
    fields, job = _persistent(state, name), find_persistent_job(state, user, name)
    if job is None:
        return v.PersistentAnswer(revision=state.revision, **fields)
    buffer, asked = state.buffers.get(job.id), job.request.buffer
    failed = job.stuck or job.hold is not Hold.NONE
    message = _without_provider(job.message)
    if not failed and asked is not None and buffer is not None and buffer.state is BufferState.PENDING:
        message = persistent_wait_message(state, asked)
    return v.PersistentAnswer(
        revision=state.revision,
        under_way="make" if asked is not None and asked.creates else "remove",
        failed=failed,
        message=message,
        **fields,
    )


async def _settle_and_show(
    call: ApiCall[CommandBody], command: c.Command, warnings: tuple[str, ...] = ()
) -> Reply[v.ExternalJobAnswer]:
    """Settle a command about an external job, and respond with the job once it leaves the given phases or the caller's
    wait ends.
    """
    awaited, wait_s = _phase_wait(call)
    state = (await call.service.settle(call, command)).state
    found = find_external_job(state, external_job_name(call.identity.name, call.params["job"]))
    if wait_s and found.phase.value in awaited:
        # The command is settled regardless of leader changes or waiting queries; the caller can poll.
        with contextlib.suppress(Problem):
            state, found = await _in_another_phase(call, awaited, wait_s)
    return Reply(state.revision, _answer(state, found, warnings))


def _answer(state: State, found: ExternalJobLookup, warnings: tuple[str, ...] = ()) -> v.ExternalJobAnswer:
    return v.ExternalJobAnswer(revision=state.revision, warnings=warnings, **_fields(state, found))


def _fields(state: State, found: ExternalJobLookup) -> dict[str, Any]:
    """Return the fields of ExternalJobView."""
    scheduler, _, number = found.name.partition(":")
    fields: dict[str, Any] = {
        "scheduler": scheduler,
        "job": number,
        "epoch": found.epoch,
        "phase": found.phase.value,
    }
    job, buffer = found.job, found.buffer
    if job is None or buffer is None:
        return fields
    fields |= {name: getattr(buffer, name) for name in _OF_BUFFERS}
    return fields | {
        "job_id": job.id,
        "user": job.request.user,
        "uid": 0 if job.external_job is None else job.external_job.uid,
        "pool": buffer.pool,
        "size": buffer.granted_bytes,
        "message": _without_provider(job.message),
        "path": buffer_path(state, job.id),
        "persistent": persistent_paths(state, job.id),
        "mover": job.mover or None,
        "submit_time": format_instant(job.submitted_at),
        "kept_until": format_instant(lingers_until(state, job)),
    }


_OF_BUFFERS = ("staged_in_files", "staged_in_bytes", "staged_out_files", "staged_out_bytes")


def _without_provider(message: str) -> str:
    """Strip a prefix such as `burst_buffer/native: slurm_bb_data_in: `, since the caller adds its own."""
    parts = message.split(": ", 2)
    return parts[2] if len(parts) == 3 and parts[0].startswith("burst_buffer/") else message
