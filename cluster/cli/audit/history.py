"""Commands `forebay audit history`, `leaders` and `diff`: events, leaders' terms, changes between two revisions."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import click

from forebay.cluster.cli.commands.options import WATCH_PERIOD_S, parse_past_time
from forebay.cluster.cli.exits import bad_input
from forebay.cluster.cli.global_options import JSON_OPTION
from forebay.cluster.cli.session import session
from forebay.cluster.cli.text import changes_text, event_line, is_terminal, json_line, note, present, terms_table
from forebay.cluster.schemas import operations as ops

if TYPE_CHECKING:
    from forebay.cluster.cli.session import Session
    from forebay.cluster.client import Client
    from forebay.cluster.schemas import StoryAnswer

PROGRESS_S = 2.0
"""Interval between progress lines while nothing matches, seconds."""

_POINT_FORMS = "a revision or time, such as 1207, 10:03 or 2026-01-31T10:03:00"

_OF = (
    click.option("--job", type=click.IntRange(min=1), metavar="JOB", help="Only events of this job."),
    click.option("--pool", metavar="NAME", help="Only changes of this pool, as --of pool=NAME."),
    click.option("--node", metavar="NAME", help="Only changes of this node."),
    click.option(
        "--of",
        metavar="KIND[=NAME]",
        help=f"Only changes of this kind ({', '.join(ops.HISTORY_OF)}) or object.",
    ),
)


def _subject_options(command: Any) -> Any:
    for option in reversed(_OF):
        command = option(command)
    return command


def _subject(pool: str | None, node: str | None, of: str | None) -> dict[str, str | None]:
    """Return the kind and name given by --pool, --node or --of.

    Raises:
        Failure: bad input, if more than one of them is given.
    """
    given = [("pool", pool), ("node", node)] if of is None else [("pool", pool), ("node", node), ("of", of)]
    named = [(option, value) for option, value in given if value is not None]
    if len(named) > 1:
        raise bad_input(f"--{named[0][0]} and --{named[1][0]} exclude each other", "use one of them")
    if not named:
        return {}
    option, value = named[0]
    kind, _, name = value.partition("=") if option == "of" else (option, "", value)
    return {"of": kind, "name": name or None}


@click.command("history")
@click.option(
    "--from", "since", callback=parse_past_time, metavar="REVISION|TIME", help=f"Start of the period: {_POINT_FORMS}."
)
@click.option(
    "--to", "until", callback=parse_past_time, metavar="REVISION|TIME", help="End of the period.  [default: now]"
)
@_subject_options
@click.option("--user", metavar="NAME", help="Only this user's jobs and commands.")
@click.option("--account", metavar="NAME", help="Only jobs of this account.")
@click.option("--actor", metavar="NAME", help="Only commands of this caller, such as admin or 'operator admin'.")
@click.option(
    "--kind", metavar="EVENT[,EVENT...]", help="Only events of these kinds; `rejected` selects rejected commands."
)
@click.option("--follow", is_flag=True, help="Wait for further events, until Ctrl-C.")
@JSON_OPTION
def history(
    since: str | None,
    until: str | None,
    job: int | None,
    pool: str | None,
    node: str | None,
    of: str | None,
    user: str | None,
    account: str | None,
    actor: str | None,
    kind: str | None,
    follow: bool,
    as_json: bool,
) -> None:
    """Show events and rejected commands, optionally filtered.

    Queries with --job, --of, --pool, --node or `--kind rejected` use an index; other queries scan the ledger, starting
    at --from. With --follow and --json, each event is a JSON object on its own line.
    """
    if follow and until is not None:
        raise bad_input("--follow and --to exclude each other", "use one of them")
    asked = {
        "job": job, "user": user, "account": account, "actor": actor, "kind": kind, "to": until,
        **_subject(pool, node, of),
    }  # fmt: skip
    current = session()
    is_listed = as_json and not follow
    printer = _JsonPrinter() if is_listed else _LinePrinter(as_json=as_json)

    async def print_pages(client: Client) -> None:
        async for page in _event_pages(client, {**asked, "from": since}, current, follow=follow):
            printer.add(page)

    current.ask(print_pages, on_a_loop=follow)
    printer.end()


async def _event_pages(
    client: Client, asked: dict[str, Any], current: Session, *, follow: bool
) -> AsyncIterator[StoryAnswer]:
    """Yield event pages; print the search progress on a terminal while nothing matches."""
    from forebay.cluster.client import read_event_pages

    clock, after = current.clock, None
    printed_s = clock.monotonic_s()
    while True:
        async for answer in read_event_pages(client, after, stale=current.stale, **asked):
            yield answer
            after, now_s = answer.read, clock.monotonic_s()
            if answer.rows or answer.read >= answer.last:
                printed_s = now_s
            elif now_s - printed_s > PROGRESS_S and is_terminal():
                note(f"read up to revision {answer.read} of {answer.last}, {answer.read_at or ''}")
                printed_s = now_s
        if not follow:
            return
        import asyncio

        await asyncio.sleep(WATCH_PERIOD_S)


class _LinePrinter:
    """Printer of one line for each event."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json

    def add(self, page: StoryAnswer) -> None:
        for row in page.rows:
            click.echo(json_line(row) if self._as_json else event_line(row))

    def end(self) -> None:
        """Do nothing: this format has no closing text."""


class _JsonPrinter:
    """Printer of one JSON object with all events.

    It prints each page on arrival, because the whole object may not fit in memory.
    """

    def __init__(self) -> None:
        self._before = '{"rows": [\n'
        self._last: StoryAnswer | None = None

    def add(self, page: StoryAnswer) -> None:
        for row in page.rows:
            click.echo(self._before + json_line(row), nl=False)
            self._before = ",\n"
        self._last = page

    def end(self) -> None:
        """Close the list of events, and print the remaining fields of the object."""
        last = self._last
        assert last is not None
        head = self._before if self._before.startswith("{") else ""
        rest = {"revision": last.revision, "read": last.read, "read_at": last.read_at}
        click.echo(f"{head}], {json.dumps(rest)[1:]}")


@click.command("leaders")
@click.option(
    "--limit", type=click.IntRange(1, ops.LEADERS_LIMIT_MAX), metavar="N", help="Show at most the last N terms."
)
@JSON_OPTION
def leaders(limit: int | None, as_json: bool) -> None:
    """List the terms of leaders and the time without one before each."""
    answer = session().read(ops.LIST_LEADERS, limit=limit)
    present(answer, as_json, lambda: terms_table(answer))


@click.command("diff")
@click.argument("since", metavar="A", callback=parse_past_time)
@click.argument("until", metavar="[B]", required=False, callback=parse_past_time)
@_subject_options
@click.option("--limit", type=click.IntRange(1, ops.DIFF_LIMIT_MAX), metavar="N", help="Show at most N changes.")
@JSON_OPTION
def diff(
    since: str,
    until: str | None,
    job: int | None,
    pool: str | None,
    node: str | None,
    of: str | None,
    limit: int | None,
    as_json: bool,
) -> None:
    """Show the changes between two revisions or times.

    A and B are revisions or times (1207, 10:03, 2026-01-31T10:03:00); B defaults to now.
    """
    named = _subject(pool, node, of)
    answer = session().read(ops.SHOW_DIFF, **{"from": since}, to=until, job=job, limit=limit, **named)
    present(answer, as_json, lambda: changes_text(answer))
