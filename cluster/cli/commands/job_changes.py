"""Commands that change jobs: cancel, hold, release, suspend, resume, requeue, update."""

import os
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from forebay.cluster.cli.commands.options import JOB_ID, PAGE_JOBS, job_options, split_into_requests
from forebay.cluster.cli.exits import ExitCode, Failure, bad_input
from forebay.cluster.cli.global_options import JSON_OPTION
from forebay.cluster.cli.group import exit_with, report
from forebay.cluster.cli.session import exit_code_of, failure_of, session
from forebay.cluster.cli.submission import Context, path_variables, read_change, typed_settings
from forebay.cluster.cli.text import job_label, show_json
from forebay.cluster.client import ApiError, Client, error_of_view
from forebay.cluster.schemas import (
    JOB_FIELDS,
    NO_DETAILS,
    ApiOperation,
    BulkCommand,
    CancelCommand,
    ContinueCommand,
    HoldCommand,
    JobView,
    ReleaseCommand,
    RequeueCommand,
    SuspendCommand,
    UpdateCommand,
)
from forebay.cluster.schemas import operations as ops
from forebay.replica.model import ENDED, format_reference, parse_reference
from forebay.replica.values import Reason, plain


class ChangedJobs(msgspec.Struct, frozen=True, kw_only=True):
    """Output of a command that changes jobs, with --json: every changed job, arrays with all tasks."""

    jobs: tuple[JobView, ...]


JOBS = click.argument("job_ids", metavar="JOB…", type=JOB_ID, nargs=-1, required=True)


def _change(
    name: str, help_text: str, operation: ApiOperation[Any, JobView], bulk_command: Callable[..., BulkCommand]
) -> click.Command:
    """Return a command that sends `operation` for one job, or `bulk_command` in shared requests for several jobs."""

    @click.command(name, help=help_text)
    @JOBS
    @JSON_OPTION
    def change(job_ids: tuple[str, ...], as_json: bool) -> None:
        change_each(job_ids, operation, bulk_command, as_json=as_json)

    return change


hold = _change("hold", "Hold pending jobs until they are released.", ops.HOLD_JOB, HoldCommand)
suspend = _change("suspend", "Suspend running jobs; their time limits stop counting.", ops.SUSPEND_JOB, SuspendCommand)
resume = _change("resume", "Resume suspended jobs.", ops.RESUME_JOB, ContinueCommand)
requeue = _change(
    "requeue",
    "Stop jobs and queue them again; they stage in again.",
    ops.REQUEUE_JOB,
    RequeueCommand,
)


@click.command("cancel")
@JOBS
@click.option("--hurry", is_flag=True, help="Skip stage-out; unexported results are LOST.")
@JSON_OPTION
def cancel(job_ids: tuple[str, ...], hurry: bool, as_json: bool) -> None:
    """Cancel jobs.

    Results of a running job are still staged out, unless --hurry is given.
    """
    change_each(job_ids, ops.CANCEL_JOB, CancelCommand, as_json=as_json, hurry=hurry)


@click.command("release")
@JOBS
@click.option(
    "--partial", is_flag=True, help="Give up results that are missing after a failed stage-out, and export the rest."
)
@JSON_OPTION
def release(job_ids: tuple[str, ...], partial: bool, as_json: bool) -> None:
    """Release held jobs, and retry their failed operations."""
    change_each(job_ids, ops.RELEASE_JOB, ReleaseCommand, as_json=as_json, partial=partial)


@click.command("update")
@JOBS
@job_options(change=True)
@JSON_OPTION
def update(job_ids: tuple[str, ...], as_json: bool, **given: Any) -> None:
    """Change options of pending jobs.

    The burst-buffer request can be changed until the job has its space.
    """
    settings, context = typed_settings(given), Context(Path.cwd(), session().clock.now())
    if not settings:
        raise bad_input("no change is given", "use an option, for example --time-limit 2:00:00")
    fields: dict[str, Any] = {}
    for row in JOB_FIELDS:
        if row.field in settings:
            fields |= read_change(row, settings[row.field], context)
    fields |= _path_variables(fields)
    change_each(job_ids, ops.UPDATE_JOB, UpdateCommand, as_json=as_json, **fields)


def _path_variables(fields: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return the field with the values of the variables in a new burst-buffer request, if it has any."""
    found = path_variables(fields, os.environ)
    return {"variables": found} if found else {}


def change_each(
    job_ids: tuple[str, ...],
    operation: ApiOperation[Any, JobView],
    bulk_command: Callable[..., BulkCommand] | None = None,
    *,
    as_json: bool,
    **fields: Any,
) -> None:
    """Change each job and print its state; continue after a rejection, and exit with the code of the first rejection.

    `bulk_command`, if given, is the command's form for bulk requests; several jobs then share a request. `fields` are
    further fields of the request. Tasks of an array in the same state share a line.
    """
    wanted = tuple(dict.fromkeys(job_ids))
    changed: list[JobView] = []

    async def change_all(client: Client) -> list[Failure]:
        failures = []
        if bulk_command is None or len(wanted) == 1:
            outcomes = _change_one_by_one(client, wanted, operation, fields)
        else:
            outcomes = _change_in_bulk(client, wanted, bulk_command, fields)
        async for job_id, outcome in outcomes:
            if isinstance(outcome, JobView):
                jobs = await _list_changed(client, job_id, outcome)
                changed.extend(jobs)
                for line in () if as_json else _state_lines(jobs):
                    click.echo(line)
                for job in jobs if operation in _ON_NODES else ():
                    if job.reason == Reason.NODE_DOWN and job.state not in _OVER:
                        failures.append(_node_down_failure(job))
                        report(failures[-1], as_json=as_json)
            else:
                failures.append(failure_of(outcome))
                report(failures[-1], as_json=as_json)
        return failures

    failures = session().ask(change_all)
    if as_json:
        show_json(ChangedJobs(jobs=tuple(changed)))
    if failures:
        exit_with(failures[0].code)


_ON_NODES: Final = (ops.CANCEL_JOB, ops.REQUEUE_JOB, ops.SUSPEND_JOB, ops.RESUME_JOB)
"""Changes that need the agent of the job's node."""

_OVER: Final = frozenset(state.name for state in ENDED)


def _node_down_failure(job: JobView) -> Failure:
    return Failure(
        ExitCode.REFUSED,
        f"job {job_label(job)} is on node {job.node}, which is DOWN: the change is recorded but not in effect yet",
        f"wait until the node returns, or have an operator declare it lost: forebay node lost {job.node}",
    )


async def _change_one_by_one(
    client: Client, job_ids: tuple[str, ...], operation: ApiOperation[Any, JobView], fields: Mapping[str, Any]
) -> AsyncIterator[tuple[str, JobView | ApiError]]:
    """Change the jobs one by one; stop when no replica answers."""
    for job_id in job_ids:
        request = operation.request(command_id=client.new_command_id(), **fields)
        try:
            yield job_id, await client.call(operation, request, id=job_id)
        except ApiError as error:
            yield job_id, error
            if exit_code_of(error) in (ExitCode.UNREACHABLE, ExitCode.OUTCOME_UNKNOWN):
                return


async def _change_in_bulk(
    client: Client, job_ids: tuple[str, ...], bulk_command: Callable[..., BulkCommand], fields: Mapping[str, Any]
) -> AsyncIterator[tuple[str, JobView | ApiError]]:
    """Change the jobs with as few requests as possible; stop at a request that fails."""
    commands = [bulk_command(command_id=client.new_command_id(), job_id=job_id, **fields) for job_id in job_ids]
    answered = 0
    for part in split_into_requests(commands):
        try:
            answer = await client.commands(part)
        except ApiError as error:
            yield job_ids[answered], error
            return
        for job_id, result in zip(job_ids[answered:], answer.results, strict=False):
            if result.error is not None:
                yield job_id, error_of_view(result.status, result.error, result.command_id)
            elif result.job is not None:
                yield job_id, result.job
        answered += len(part)


async def _list_changed(client: Client, job_id: str, first: JobView) -> tuple[JobView, ...]:
    """Return all jobs that a change affected; `first` is the first of them."""
    if ":" in job_id:
        return (first,)
    array, tasks = parse_reference(job_id)
    is_task = first.details is not None and first.details.array_job_id == array
    if not is_task or (tasks is not None and len(tasks) == 1):
        return (first,)
    found: list[JobView] = []
    more = True
    while more:
        last = found[-1].job_id if found else 0
        try:
            page = await client.call(ops.LIST_JOBS, job=job_id, limit=PAGE_JOBS, after=last)
        except ApiError:
            # The change was made, although the states of the other tasks are unknown.
            return (first,)
        found.extend(page.jobs)
        more = page.truncated and bool(page.jobs)
    return tuple(found) or (first,)


def _state_lines(jobs: Iterable[JobView]) -> list[str]:
    """Return a line with the state of each job; tasks of an array in the same state share a line."""
    lines: dict[tuple[int, str], list[int]] = {}
    for job in jobs:
        buffer = "" if job.burst_buffer_state is None else f" BurstBufferState={plain(job.burst_buffer_state)}"
        words = f"JobState={plain(job.state)} Reason={plain(job.reason)}{buffer}"
        more = job.details or NO_DETAILS
        alone = more.array_job_id is None or more.array_task_id is None
        key = (job.job_id if more.array_job_id is None else more.array_job_id, words)
        lines.setdefault(key, []).extend([] if alone else [more.array_task_id or 0])
    return [
        f"JobId={format_reference(job_id, tuple(sorted(tasks)) or None)} {words}"
        for (job_id, words), tasks in lines.items()
    ]
