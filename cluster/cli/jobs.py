"""`forebay job …`: what there is, where it stands, what happened, why it waits; cancel, hold, release."""

import asyncio
import difflib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Final

import click
import msgspec
from rich.live import Live

from cluster.cli.exits import ExitCode, Failure, bad_input
from cluster.cli.group import exit_with, report
from cluster.cli.job_block import job_block
from cluster.cli.job_text import timeline, why_text
from cluster.cli.output import note, show, show_json, stdout_console
from cluster.cli.session import exit_code_of, failure_of, session
from cluster.cli.tables import jobs_table
from cluster.client import ApiError, Client, error_of_view
from cluster.schemas import (
    BULK_COMMANDS_MAX,
    NO_DETAILS,
    BulkCommand,
    CancelCommand,
    HoldCommand,
    JobsAnswer,
    JobView,
    ReleaseCommand,
)
from replica.decide import parse_reference, shown_reference
from replica.model import ENDED, ArrayFault, JobState
from replica.values import plain

LIMIT: Final = 1_000
"""Jobs that are listed when nobody says otherwise, count."""

LIMIT_MAX: Final = 1_000_000
"""Jobs that one listing may have, count: a hundred pages, and about a gigabyte of memory."""

BULK_BYTES_MAX: Final = 4 * 1024 * 1024
"""Bytes of one request with many commands: half of what a replica takes."""

PAGE_JOBS: Final = 10_000
"""Jobs asked for in one request, count: what the API answers at most."""

JOB_ID_MAX: Final = 2**63 - 1
REVISION_MAX: Final = 2**63 - 1

WATCH_PERIOD_S: Final = 1.0
"""Seconds between two listings of --watch: fast enough to follow by eye, no load for a leader."""

UNFINISHED: Final = tuple(state.name for state in JobState if state not in ENDED)
_BY_CODE: Final = {state.code: state.name for state in JobState}

JSON_OPTION = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout and nothing else.")


class JobReference(click.ParamType):  # type: ignore[type-arg]
    """`12`, `12_3` for a task of an array, `12_[1-4,7]` for several."""

    name = "job"

    def convert(self, value: str, parameter: click.Parameter | None, context: click.Context | None) -> str:
        """Return the reference without leading zeros."""
        try:
            job_id, tasks = parse_reference(value)
        except ArrayFault as fault:
            self.fail(str(fault), parameter, context)
        if not 1 <= job_id <= JOB_ID_MAX:
            self.fail(f"{value!r} names no job; numbers of jobs begin at 1", parameter, context)
        return shown_reference(job_id, tasks)


JOB_ID = JobReference()


@click.group("job")
def job_group() -> None:
    """List, explain and steer jobs."""


def _states(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[str, ...]:
    return states_of(value)


def states_of(value: str | None, place: str = "--state") -> tuple[str, ...]:
    """Return job states from words or squeue's letters, separated by commas; Failure for what is none."""
    found = []
    for text in [] if value is None else value.split(","):
        word = text.strip().upper()
        word = _BY_CODE.get(word, word)
        if word not in JobState.__members__:
            near = difflib.get_close_matches(word, JobState.__members__, n=1)
            remedy = f"did you mean {near[0]}? " if near else ""
            known = ", ".join(f"{state.name} ({state.code})" for state in JobState)
            raise bad_input(f"{text!r} is not a job state", f"{remedy}known are {known}", place=place)
        found.append(word)
    return tuple(dict.fromkeys(found))


@job_group.command("list")
@click.option("--state", "states", callback=_states, metavar="STATE,…", help="Only these states, e.g. PENDING or PD,R.")
@click.option("--all", "everything", is_flag=True, help="Also jobs that have ended.")
@click.option("--user", "owner", metavar="NAME", help="Only the jobs of one user.")
@click.option(
    "--limit",
    type=click.IntRange(1, LIMIT_MAX),
    default=LIMIT,
    show_default=True,
    help="At most so many, the newest ones.",
)
@click.option("--watch", is_flag=True, help="Show it again every second, until Ctrl-C.")
@JSON_OPTION
def list_jobs(
    states: tuple[str, ...], everything: bool, owner: str | None, limit: int, watch: bool, as_json: bool
) -> None:
    """List jobs, by default those that have not ended; columns as in squeue."""
    if everything and states:
        raise bad_input("--all and --state contradict each other", "give one of them")
    if watch and as_json:
        raise bad_input("--watch and --json contradict each other", "use GET /v1/events to follow with a program")
    wanted = states or (() if everything else UNFINISHED)
    current = session()

    async def ask(client: Client) -> JobsAnswer:
        return await listed(client, wanted, owner, limit, stale=current.stale)

    if watch:
        current.ask(lambda client: _watch(lambda: ask(client)))
        return
    answer = current.ask(ask)
    if as_json:
        show_json(answer)
        return
    show(jobs_table(answer.jobs, current.clock.now()))
    if not answer.jobs and not everything and stdout_console().is_terminal:
        note("No unfinished jobs; --all shows those that have ended too.")
    if answer.truncated:
        note(f"There are more than these {len(answer.jobs)} jobs: name a larger --limit, a --state or a --user.")


async def listed(client: Client, states: tuple[str, ...], owner: str | None, limit: int, *, stale: bool) -> JobsAnswer:
    """Return the newest jobs in these states (all: in none) and of this user, at most `limit`."""
    if limit <= PAGE_JOBS:
        return await client.jobs(states=states, user=owner, limit=limit, stale=stale)
    return await _newest(client, states, owner, limit, stale=stale)


async def _newest(client: Client, states: tuple[str, ...], owner: str | None, limit: int, *, stale: bool) -> JobsAnswer:
    """Read all jobs page by page and keep the newest. What is submitted meanwhile may or may not be among them."""
    kept: deque[JobView] = deque(maxlen=limit)
    seen = last = 0
    while True:
        page = await client.jobs(states=states, user=owner, limit=PAGE_JOBS, after=last, stale=stale)
        kept.extend(page.jobs)
        seen += len(page.jobs)
        if not page.truncated or not page.jobs:
            return JobsAnswer(revision=page.revision, jobs=tuple(kept), truncated=seen > limit)
        last = page.jobs[-1].job_id


async def _watch(ask: Callable[[], Awaitable[JobsAnswer]]) -> None:
    console = stdout_console()
    if not console.is_terminal:
        raise bad_input("--watch needs a terminal", "leave it out, or use GET /v1/events to follow with a program")
    clock = session().clock
    with Live(console=console, auto_refresh=False, screen=True) as live:
        while True:
            answer = await ask()
            live.update(jobs_table(answer.jobs, clock.now()), refresh=True)
            await asyncio.sleep(WATCH_PERIOD_S)


@job_group.command("show")
@click.argument("job_id", metavar="JOB", type=JOB_ID)
@JSON_OPTION
def show_job(job_id: str, as_json: bool) -> None:
    """Show one job as Key=Value, as `scontrol show job` does."""
    current = session()
    job = current.ask(lambda client: client.job(job_id, stale=current.stale))
    if as_json:
        show_json(job)
    else:
        click.echo(job_block(job, current.clock.now()))


@job_group.command("history")
@click.argument("job_id", metavar="JOB", type=JOB_ID)
@JSON_OPTION
def history(job_id: str, as_json: bool) -> None:
    """Draw what happened to a job as a timeline, and where its time went."""
    current = session()
    answer = current.ask(lambda client: client.history(job_id, stale=current.stale))
    if as_json:
        show_json(answer)
    else:
        show(timeline(answer, current.clock.now()))


@job_group.command("why")
@click.argument("job_id", metavar="JOB", type=JOB_ID)
@click.option("--at", type=click.IntRange(0, REVISION_MAX), metavar="REVISION", help="Ask about a moment in the past.")
@JSON_OPTION
def why(job_id: str, at: int | None, as_json: bool) -> None:
    """Explain with figures why a job waits, now or at a revision."""
    current = session()
    view = current.ask(lambda client: client.why(job_id, at=at, stale=current.stale))
    if as_json:
        show_json(view)
    else:
        click.echo(why_text(view))


@job_group.command("cancel")
@click.argument("job_ids", metavar="JOB…", type=JOB_ID, nargs=-1, required=True)
@click.option("--hurry", is_flag=True, help="Skip stage-out: results that were not exported are LOST.")
def cancel(job_ids: tuple[str, ...], hurry: bool) -> None:
    """Cancel jobs. A running job's results are still staged out, unless --hurry."""
    each(
        job_ids,
        lambda client, job_id: client.cancel(job_id, hurry=hurry),
        lambda command_id, job_id: CancelCommand(command_id=command_id, job_id=job_id, hurry=hurry),
    )


@job_group.command("hold")
@click.argument("job_ids", metavar="JOB…", type=JOB_ID, nargs=-1, required=True)
def hold(job_ids: tuple[str, ...]) -> None:
    """Hold pending jobs back until they are released."""
    each(
        job_ids,
        lambda client, job_id: client.hold(job_id),
        lambda command_id, job_id: HoldCommand(command_id=command_id, job_id=job_id),
    )


@job_group.command("release")
@click.argument("job_ids", metavar="JOB…", type=JOB_ID, nargs=-1, required=True)
def release(job_ids: tuple[str, ...]) -> None:
    """Release held jobs; an operation that had failed for good is tried again."""
    each(
        job_ids,
        lambda client, job_id: client.release(job_id),
        lambda command_id, job_id: ReleaseCommand(command_id=command_id, job_id=job_id),
    )


def each(
    job_ids: tuple[str, ...],
    change: Callable[[Client, str], Awaitable[JobView]],
    among: Callable[[str, str], BulkCommand] | None = None,
) -> None:
    """Change each job, say how it stands; go on after a refusal, and exit with the code of the first one.

    Several jobs go in one request where `among` makes the command out of its id and the job. Of several tasks of an
    array those that stand alike share a line.
    """
    wanted = tuple(dict.fromkeys(job_ids))

    async def change_all(client: Client) -> list[Failure]:
        failures = []
        outcomes = _alone(client, wanted, change) if among is None or len(wanted) == 1 else _bulk(client, wanted, among)
        async for job_id, outcome in outcomes:
            if isinstance(outcome, JobView):
                for line in _standings(await _changed(client, job_id, outcome)):
                    click.echo(line)
            else:
                failures.append(failure_of(outcome))
                report(failures[-1])
        return failures

    failures = session().ask(change_all)
    if failures:
        exit_with(failures[0].code)


async def _alone(
    client: Client, job_ids: tuple[str, ...], change: Callable[[Client, str], Awaitable[JobView]]
) -> AsyncIterator[tuple[str, JobView | ApiError]]:
    """Change one job after the other, until nobody answers."""
    for job_id in job_ids:
        try:
            yield job_id, await change(client, job_id)
        except ApiError as error:
            yield job_id, error
            if exit_code_of(error) in (ExitCode.UNREACHABLE, ExitCode.OUTCOME_UNKNOWN):
                return


async def _bulk(
    client: Client, job_ids: tuple[str, ...], among: Callable[[str, str], BulkCommand]
) -> AsyncIterator[tuple[str, JobView | ApiError]]:
    """Change all jobs with as few requests as it takes, until nobody answers one of them."""
    commands = [among(client.new_command_id(), job_id) for job_id in job_ids]
    for first in range(0, len(commands), per_request := _per_request(commands)):
        try:
            answer = await client.commands(commands[first : first + per_request])
        except ApiError as error:
            yield job_ids[first], error
            return
        for job_id, result in zip(job_ids[first:], answer.results, strict=False):
            if result.error is not None:
                yield job_id, error_of_view(result.status, result.error, result.command_id)
            elif result.job is not None:
                yield job_id, result.job


def _per_request(commands: Sequence[BulkCommand]) -> int:
    """Return how many of these commands fit into one request; they differ by their jobs only."""
    longest = max(len(msgspec.json.encode(command)) for command in commands)
    return max(1, min(BULK_COMMANDS_MAX, BULK_BYTES_MAX // longest))


async def _changed(client: Client, job_id: str, first: JobView) -> tuple[JobView, ...]:
    """Return all jobs that a change was about, of which `first` is the first."""
    array, tasks = parse_reference(job_id)
    is_task = first.details is not None and first.details.array_job_id == array
    if not is_task or (tasks is not None and len(tasks) == 1):
        return (first,)
    found: list[JobView] = []
    more = True
    while more:
        last = found[-1].job_id if found else 0
        try:
            page = await client.jobs(job=job_id, limit=PAGE_JOBS, after=last)
        except ApiError:
            # What was asked for has happened: only how the others stand is not known.
            return (first,)
        found.extend(page.jobs)
        more = page.truncated and bool(page.jobs)
    return tuple(found) or (first,)


def _standings(jobs: Iterable[JobView]) -> list[str]:
    """Return how jobs stand: a line for each, but one for all tasks of an array that stand alike."""
    lines: dict[tuple[int, str], list[int]] = {}
    for job in jobs:
        buffer = "" if job.burst_buffer_state is None else f" BurstBufferState={plain(job.burst_buffer_state)}"
        words = f"JobState={plain(job.state)} Reason={plain(job.reason)}{buffer}"
        more = job.details or NO_DETAILS
        alone = more.array_job_id is None or more.array_task_id is None
        key = (job.job_id if more.array_job_id is None else more.array_job_id, words)
        lines.setdefault(key, []).extend([] if alone else [more.array_task_id or 0])
    return [
        f"JobId={shown_reference(job_id, tuple(sorted(tasks)) or None)} {words}"
        for (job_id, words), tasks in lines.items()
    ]
