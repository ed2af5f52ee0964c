"""Commands `forebay queue` and `forebay job show`, `history`, `why` and `estimate`."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from forebay.cluster.cli import text
from forebay.cluster.cli.commands.options import AT_OPTION, JOB_ID, PAGE_JOBS, WATCH_PERIOD_S
from forebay.cluster.cli.exits import bad_input
from forebay.cluster.cli.global_options import JSON_OPTION
from forebay.cluster.cli.session import session
from forebay.cluster.schemas import operations as ops
from forebay.replica.model import ENDED, JobState
from forebay.replica.values import plain

if TYPE_CHECKING:
    from forebay.cluster.cli.text.squeue import Column, Field
    from forebay.cluster.client import Client
    from forebay.cluster.schemas import JobsAnswer, JobView, WhyView
    from forebay.replica.values import Instant

STANDARD_COLUMNS: Final = "squeue"
"""Value of `queue -o` that selects squeue's standard columns."""

LIMIT: Final = 1_000
"""Default of `queue --limit`."""

LIMIT_MAX: Final = 1_000_000
"""Largest `queue --limit`: a hundred pages, and about a gigabyte of memory."""


_FOLLOWING: Final = "in a program, use `forebay audit history --follow --json`"


UNFINISHED: Final = tuple(state.name for state in JobState if state not in ENDED)
_BY_CODE: Final = {state.code: state.name for state in JobState}


def parse_states(value: str | None, place: str = "--state") -> tuple[str, ...]:
    """Return job states from comma-separated names or squeue codes.

    Raises:
        Failure: bad input at `place`, if a word is no job state.
    """
    found = []
    for part in [] if value is None else value.split(","):
        word = part.strip().upper()
        word = _BY_CODE.get(word, word)
        if word not in JobState.__members__:
            import difflib

            near = difflib.get_close_matches(word, JobState.__members__, n=1)
            remedy = f"did you mean {near[0]}? " if near else ""
            known = ", ".join(f"{state.name} ({state.code})" for state in JobState)
            raise bad_input(f"{part!r} is not a job state", f"{remedy}the states are {known}", place=place)
        found.append(word)
    return tuple(dict.fromkeys(found))


@click.command("queue")
@click.option(
    "-t", "--states", "--state", "wanted", metavar="STATE,…", help="Only these states, for example PENDING or PD,R."
)
@click.option("--all", "everything", is_flag=True, help="Include jobs that have ended.")
@click.option("-u", "--user", "owner", metavar="NAME", help="Only jobs of this user.")
@click.option("-j", "--jobs", "numbers", metavar="JOB,…", help="Only these jobs, for example 12,10_3.")
@click.option(
    "-o",
    "--format",
    "layout",
    metavar="FORMAT",
    help=f"Print columns of squeue, for example '%i %T %R', or {STANDARD_COLUMNS} for its default.",
)
@click.option("--noheader", is_flag=True, help="Print no heading.")
@click.option(
    "--start", "expected", is_flag=True, help="Show expected start times of pending jobs, the oldest 100 at most."
)
@click.option(
    "--limit",
    type=click.IntRange(1, LIMIT_MAX),
    default=LIMIT,
    show_default=True,
    help="Show at most the newest N jobs.",
)
@click.option("--watch", is_flag=True, help="Repeat every second, until Ctrl-C.")
@AT_OPTION
@JSON_OPTION
def queue(
    wanted: str | None, everything: bool, owner: str | None, numbers: str | None, layout: str | None, noheader: bool,
    expected: bool, limit: int, watch: bool, at: str | None, as_json: bool,
) -> None:  # fmt: skip
    """List jobs, by default those that have not ended.

    Failed jobs are first. Pending tasks of an array with the same reason share a line. With -o the columns are
    squeue's, with one line for each task.
    """
    if everything and wanted is not None:
        raise bad_input("--all and --state exclude each other", "use one of them")
    everything = everything or (wanted or "").strip().lower() == "all"
    _check_watch(watch, as_json, at)
    columns = _columns(layout, expected=expected)
    current = session()
    if expected:
        states: tuple[str, ...] = ("PENDING",)
    elif everything:
        states = ()
    else:
        states = UNFINISHED if wanted is None else parse_states(wanted)

    async def ask(client: Client) -> JobsAnswer:
        if expected:
            most = min(limit, ops.EXPECTED_LISTED_MAX)
            pending: dict[str, Any] = {"state": "PENDING", "user": owner, "limit": most, "after": 0, "expected": True}
            return await client.call(ops.LIST_JOBS, stale=current.stale, at=at, **pending)
        return await list_jobs(client, states, owner, limit, stale=current.stale, at=at)

    if watch:
        current.ask(lambda client: _watch(lambda: ask(client)), on_a_loop=True)
        return
    answer = current.ask(ask)
    if numbers is not None:
        chosen = frozenset(part.strip() for part in numbers.split(","))
        answer = msgspec.structs.replace(answer, jobs=tuple(job for job in answer.jobs if _is_chosen(job, chosen)))
    if as_json:
        text.show_json(answer)
        return
    now = answer_time(answer, current.clock.now())
    if columns is not None:
        for line in squeue_lines(columns, answer.jobs, now, heading=not noheader):
            click.echo(line)
    else:
        text.show(text.jobs_table(text.failures_first(answer.jobs), now))
        if not answer.jobs and not everything and text.is_terminal():
            text.note("No unfinished jobs; --all includes jobs that have ended.")
    if answer.truncated:
        text.note(f"Only the newest {len(answer.jobs)} jobs are shown: use --limit, --state or --user.")


def _columns(layout: str | None, *, expected: bool) -> tuple[Column, ...] | None:
    """Return squeue's columns to print, or None for Forebay's own table."""
    if layout is None or layout == STANDARD_COLUMNS:
        if expected:
            return text.read_format(text.STARTS)
        return None if layout is None else text.read_format(text.STANDARD)
    return text.read_format(layout)


def _check_watch(watch: bool, as_json: bool, at: str | None) -> None:
    if watch and as_json:
        raise bad_input("--watch and --json exclude each other", _FOLLOWING)
    if watch and at is not None:
        raise bad_input("--watch and --at exclude each other", "remove --watch: the past does not change")


def squeue_lines(
    columns: tuple[Column, ...], jobs: tuple[JobView, ...], now: Instant, *, heading: bool
) -> Iterator[str]:
    """Yield the lines of squeue's listing, in its order."""
    if heading:
        yield text.format_line(columns, lambda field: field.heading)
    for job in text.sort_jobs(jobs):
        yield text.format_line(columns, partial(_cell, job, now))


def _cell(job: JobView, now: Instant, field: Field) -> str:
    return field.shows(job, now)


def _is_chosen(job: JobView, chosen: frozenset[str]) -> bool:
    array = text.details_of(job).array_job_id
    return bool(chosen & {text.job_label(job), str(job.job_id), str(array)})


async def list_jobs(
    client: Client,
    states: tuple[str, ...],
    owner: str | None,
    limit: int,
    *,
    stale: bool,
    external_jobs: bool = False,
    at: str | None = None,
) -> JobsAnswer:
    """Return the newest jobs of a user, at most `limit`, as they were at the revision or time `at`.

    Without `states` or `owner` there is no such restriction.
    """
    asked: dict[str, Any] = {"state": ",".join(states) or None, "user": owner, "limit": min(limit, PAGE_JOBS)}
    asked |= {"stale": stale, "external_jobs": external_jobs, "at": at}
    return await (client.call(ops.LIST_JOBS, **asked) if limit <= PAGE_JOBS else _newest(client, limit, asked))


def answer_time(answer: JobsAnswer | WhyView | None, now: Instant) -> Instant:
    """Return the time of an answer about the past, or `now`."""
    from forebay.cluster.system import parse_instant

    return now if answer is None or answer.at is None else parse_instant(answer.at)


async def _newest(client: Client, limit: int, asked: Mapping[str, Any]) -> JobsAnswer:
    """Read all jobs page by page and return the newest; jobs submitted meanwhile may be missing."""
    from forebay.cluster.schemas import JobsAnswer

    kept: deque[JobView] = deque(maxlen=limit)
    seen = last = 0
    while True:
        page = await client.call(ops.LIST_JOBS, **asked, after=last)
        kept.extend(page.jobs)
        seen += len(page.jobs)
        if not page.truncated or not page.jobs:
            return JobsAnswer(revision=page.revision, jobs=tuple(kept), truncated=seen > limit, at=page.at)
        last = page.jobs[-1].job_id


async def _watch(ask: Callable[[], Awaitable[JobsAnswer]]) -> None:
    import asyncio

    console = text.stdout_console()
    if not console.is_terminal:
        raise bad_input("--watch needs a terminal", f"remove it; {_FOLLOWING}")
    clock = session().clock
    from rich.live import Live

    with Live(console=console, auto_refresh=False, screen=True) as live:
        while True:
            answer = await ask()
            live.update(text.jobs_table(answer.jobs, clock.now()), refresh=True)
            await asyncio.sleep(WATCH_PERIOD_S)


@click.command("show")
@click.argument("job_id", metavar="JOB", type=JOB_ID)
@AT_OPTION
@JSON_OPTION
def show_job(job_id: str, at: str | None, as_json: bool) -> None:
    """Show a job in full, in the format of `scontrol show job`."""
    current = session()
    job = current.read(ops.SHOW_JOB, id=job_id, at=at)

    def block() -> str:
        # An answer about a past job does not contain the past time, which the run time is computed from.
        then = None if at is None else current.read(ops.EXPLAIN_JOB, id=job_id, at=at)
        return text.job_block(job, answer_time(then, current.clock.now()))

    text.present(job, as_json, block)


@click.command("history")
@click.argument("job_id", metavar="JOB", type=JOB_ID)
@JSON_OPTION
def history(job_id: str, as_json: bool) -> None:
    """Show a job's timeline, and its time in each state."""
    current = session()
    answer = current.read(ops.SHOW_JOB_HISTORY, id=job_id)
    text.present(answer, as_json, lambda: text.timeline(answer, current.clock.now()))


@click.command("why")
@click.argument("job_id", metavar="JOB", type=JOB_ID)
@AT_OPTION
@JSON_OPTION
def why(job_id: str, at: str | None, as_json: bool) -> None:
    """Explain why a job waits, or waited at a past time."""
    view = session().read(ops.EXPLAIN_JOB, id=job_id, at=at)
    text.present(view, as_json, lambda: text.why_text(view))


@click.command("estimate")
@click.argument("job_id", metavar="JOB", type=JOB_ID)
@JSON_OPTION
def estimate(job_id: int, as_json: bool) -> None:
    """Estimate the start of a pending job, with the steps before it."""
    answer = session().read(ops.ESTIMATE_JOB, id=job_id)
    lines = [
        f"JobId={answer.job_id} JobState={plain(answer.state)} Priority={answer.priority} "
        f"StartTime={plain(answer.start or 'Unknown')}",
        *(plain(f"   {step.what}: until {step.until or 'unknown'}: {step.sentence}") for step in answer.steps),
    ]
    text.present(answer, as_json, lambda: "\n".join(lines))
