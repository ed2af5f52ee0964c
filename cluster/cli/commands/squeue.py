"""`forebay queue`: the jobs as squeue lists them."""

from functools import partial

import click
import msgspec

from cluster.cli.commands.job import LIMIT, LIMIT_MAX, UNFINISHED, listed, moment_of, states_of
from cluster.cli.commands.options import AT_OPTION
from cluster.cli.global_options import JSON_OPTION
from cluster.cli.session import session
from cluster.cli.text import (
    STANDARD,
    STARTS,
    Field,
    details_of,
    in_order,
    job_number,
    line,
    note,
    read_format,
    show_json,
)
from cluster.schemas import JobView
from cluster.schemas import operations as ops
from replica.values import Instant


@click.command("queue")
@click.option("-t", "--states", metavar="STATE,…", help="Only these states, e.g. PENDING or PD,R; all: every state.")
@click.option("-u", "--user", "owner", metavar="NAME", help="Only the jobs of one user.")
@click.option("-j", "--jobs", "numbers", metavar="JOB,…", help="Only these jobs, by number, e.g. 12,10_3.")
@click.option("-o", "--format", "layout", help=f"Columns, as for squeue.  [default: {STANDARD}]")
@click.option("--noheader", is_flag=True, help="Without the heading.")
@click.option(
    "--limit", type=click.IntRange(1, LIMIT_MAX), default=LIMIT, show_default=True, help="At most so many, the newest."
)
@click.option(
    "--start", "expected", is_flag=True, help="Pending jobs with when they should start, the oldest; at most 100."
)
@AT_OPTION
@JSON_OPTION
def queue(
    states: str | None,
    owner: str | None,
    numbers: str | None,
    layout: str | None,
    noheader: bool,
    limit: int,
    expected: bool,
    at: str | None,
    as_json: bool,
) -> None:
    """List jobs as squeue does, by default those that have not ended.

    Columns are squeue's, cut to their width; `forebay job list` shows buffers, pools and sizes as well.
    """
    columns = read_format(layout or (STARTS if expected else STANDARD))
    wanted = ("PENDING",) if expected else UNFINISHED
    if states is not None and not expected:
        wanted = () if states.strip().lower() == "all" else states_of(states, "--states")
    current = session()
    if expected:
        most = min(limit, ops.EXPECTED_LISTED_MAX)
        answer = current.read(ops.LIST_JOBS, state="PENDING", user=owner, limit=most, after=0, expected=True, at=at)
    else:
        answer = current.ask(lambda client: listed(client, wanted, owner, limit, stale=current.stale, at=at))
    chosen = None if numbers is None else frozenset(part.strip() for part in numbers.split(","))
    jobs = tuple(job for job in answer.jobs if chosen is None or _is_chosen(job, chosen))
    if as_json:
        show_json(msgspec.structs.replace(answer, jobs=jobs))
        return
    now = moment_of(answer, current.clock.now())
    lines = [] if noheader else [line(columns, lambda field: field.heading)]
    lines += [line(columns, partial(_cell, job, now)) for job in in_order(jobs)]
    for text in lines:
        click.echo(text)
    if answer.truncated:
        note(f"There are more than these {len(answer.jobs)} jobs: name a larger --limit, --states or a --user.")


def _cell(job: JobView, now: Instant, field: Field) -> str:
    return field.shows(job, now)


def _is_chosen(job: JobView, chosen: frozenset[str]) -> bool:
    array = details_of(job).array_job_id
    return bool(chosen & {job_number(job), str(job.job_id), str(array)})
