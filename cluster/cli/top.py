"""Command `forebay top`: a full-screen view of the cluster that refreshes itself."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import click

from forebay.cluster.cli.commands.options import WATCH_PERIOD_S
from forebay.cluster.cli.exits import bad_input
from forebay.cluster.cli.session import session
from forebay.cluster.cli.text import (
    STATE_STYLES,
    bar,
    format_time,
    is_terminal,
    meter,
    state_words,
    stdout_console,
    unit_in,
)
from forebay.cluster.client import ApiError
from forebay.cluster.schemas import operations as ops
from forebay.cluster.system import readable_size
from forebay.replica.model import format_amount
from forebay.replica.values import plain

if TYPE_CHECKING:
    from forebay.cluster.client import Client
    from forebay.cluster.schemas import OverviewAnswer, PoolsAnswer, PoolView, TransfersAnswer, TransferView

ANSWER_S: Final = 2.0
"""Time limit for an answer before the view is marked as old, seconds."""

TRANSFERS_READ: Final = 200
"""Number of transfers requested: more than fit on a screen."""

NEEDS_MAX: Final = 5
POOLS_MAX: Final = 8
"""Largest number of lines for each part; transfers get the rest."""

QUIT: Final = b"qQ"


class Answers(NamedTuple):
    """Last answers of the cluster."""

    overview: OverviewAnswer
    pools: PoolsAnswer
    transfers: TransfersAnswer


class StyledLine(NamedTuple):
    """Line of the view with its style."""

    text: str
    style: str = ""


@click.command("top")
@click.option(
    "--every",
    "every_s",
    type=click.FloatRange(0.2, 3600),
    default=2 * WATCH_PERIOD_S,
    metavar="SECONDS",
    show_default=True,
    help="Set the refresh interval.",
)
def top(every_s: float) -> None:
    """Watch the cluster full-screen; q quits.

    Shows replicas, jobs, items that need attention, pools and transfers. If the cluster does not answer, the last view
    stays with its age. In a program, use `forebay status --json`.
    """
    if not (is_terminal() and sys.stdin.isatty()):
        raise bad_input("top needs a terminal", "use `forebay status`, in a program with --json")
    session().ask(lambda client: _draw(client, every_s), on_a_loop=True)


async def _draw(client: Client, every_s: float) -> None:
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    loop, console = asyncio.get_running_loop(), stdout_console()
    seen, seen_s = await _ask_all(client), loop.time()
    trouble = ""
    async with _keys() as quitting:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                old_s = loop.time() - seen_s if trouble else None
                width, height = console.size
                lines = render_view(seen, height, trouble, old_s)
                texts = (Text(line.text[:width], style=line.style, no_wrap=True) for line in lines)
                live.update(Group(*texts), refresh=True)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(quitting.wait(), every_s)
                    return
                try:
                    seen, seen_s, trouble = await _ask_all(client), loop.time(), ""
                except ApiError as error:
                    trouble = error.sentence


async def _ask_all(client: Client) -> Answers:
    """Send all three requests concurrently and return the answers.

    Raises:
        ApiError: if the cluster did not answer.
    """
    return Answers(
        *await asyncio.gather(
            client.call(ops.SHOW_OVERVIEW, deadline_s=ANSWER_S),
            client.call(ops.LIST_POOLS, deadline_s=ANSWER_S),
            client.call(ops.LIST_TRANSFERS, limit=TRANSFERS_READ, deadline_s=ANSWER_S),
        )
    )


@contextlib.asynccontextmanager
async def _keys() -> AsyncIterator[asyncio.Event]:
    """Yield an event that the key q sets; read keys unbuffered, and restore the terminal at the end."""
    import os
    import termios
    import tty

    loop, quitting, terminal = asyncio.get_running_loop(), asyncio.Event(), sys.stdin.fileno()
    before = termios.tcgetattr(terminal)

    def pressed() -> None:
        keys = os.read(terminal, 64)
        # No keys: the terminal was closed.
        if not keys or any(key in QUIT for key in keys):
            quitting.set()

    tty.setcbreak(terminal)
    loop.add_reader(terminal, pressed)
    try:
        yield quitting
    finally:
        loop.remove_reader(terminal)
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def render_view(seen: Answers, height: int, trouble: str = "", old_s: float | None = None) -> list[StyledLine]:
    """Return the lines of the view, at most `height`; `trouble` is the error of the last `old_s` seconds."""
    overview = seen.overview
    title = f"forebay {plain(overview.cluster)}   leader {plain(overview.leader or 'none')}   term {overview.term}"
    lines = [StyledLine(f"{title}   revision {overview.revision}   {format_time(overview.at)}", "bold")]
    if old_s is not None:
        lines.append(StyledLine(f"NO ANSWER for {old_s:.0f} s: {plain(trouble)}", "bold red"))
    lines += [
        StyledLine(f"Jobs       {_counts(overview.jobs)}"),
        StyledLine(f"Waiting    {_counts(overview.waiting)}"),
        StyledLine(f"Nodes      {_counts(overview.nodes)}"),
        StyledLine(f"Transfers  {_moving(overview)}"),
        StyledLine(""),
        *_replicas(overview),
        StyledLine(""),
        *_shorten_list(list(_attention(overview)), NEEDS_MAX, overview.needs_count, "items that need attention"),
        StyledLine(""),
        *_shorten_list([_pool(row) for row in seen.pools.pools], POOLS_MAX, len(seen.pools.pools), "pools"),
        StyledLine(""),
    ]
    moved = overview.transfers
    rows = sorted(seen.transfers.transfers, key=lambda row: (_ORDER.get(row.state, 0), -row.rate_bytes_s, row.job_id))
    # The two answers are of different times.
    count = max(len(rows), moved.moving + moved.queued + moved.retrying + moved.failed)
    below = [_transfer(row) for row in rows] if count else [StyledLine("No transfers.", "dim")]
    return [*lines, *_shorten_list(below, height - len(lines), count, "transfers")][:height]


_ORDER: Final = {"failed": 0, "retrying": 1, "moving": 2, "queued": 3}
"""Order of transfers by state."""


def _counts(counts: dict[str, int]) -> str:
    return "   ".join(f"{count} {plain(name)}" for name, count in counts.items()) or "none"


def _moving(overview: OverviewAnswer) -> str:
    moved = overview.transfers
    named = {"moving": moved.moving, "queued": moved.queued, "retrying": moved.retrying, "failed": moved.failed}
    return f"{_counts({name: count for name, count in named.items() if count})}   {readable_size(moved.rate_bytes_s)}/s"


def _replicas(overview: OverviewAnswer) -> Iterator[StyledLine]:
    for row in overview.members:
        said = f"{plain(row.name):<12} {plain(row.role):<10} term {row.term if row.term is not None else '-'}"
        said += "" if row.lag_entries is None else f"   {row.lag_entries} entries behind"
        yield StyledLine(said if row.reachable else f"{said}   SILENT", "" if row.reachable else "bold red")


def _attention(overview: OverviewAnswer) -> Iterator[StyledLine]:
    if not overview.needs:
        yield StyledLine("No action needed.", "green")
    for row in overview.needs:
        remedy = f"   -> {plain(row.remedy)}" if row.remedy else ""
        yield StyledLine(f"! {plain(row.subject)}: {plain(row.sentence)}{remedy}", "yellow")


def _pool(row: PoolView) -> StyledLine:
    held, total = (format_amount(amount, unit_in(row)) for amount in (row.held_bytes, row.quantity_bytes))
    text = f"{plain(row.name):<16} {meter(row.held_bytes, row.quantity_bytes)}   {held} of {total}"
    return StyledLine(f"{text}   {row.buffers} buffers", "red" if row.overcommitted_bytes else "")


def _transfer(row: TransferView) -> StyledLine:
    text = f"{plain(row.task or str(row.job_id)):>8} {plain(row.stage):<9} {plain(row.node):<10} {state_words(row):<10}"
    return StyledLine(f"{text} {bar(row)}   {readable_size(row.rate_bytes_s)}/s", STATE_STYLES.get(row.state, ""))


def _shorten_list(lines: Sequence[StyledLine], room: int, count: int, what: str) -> Iterable[StyledLine]:
    """Return the lines that fit; if some do not, the last line has their number."""
    if count <= len(lines) <= room:
        return lines
    shown = lines[: max(0, room - 1)]
    return [*shown, StyledLine(f"and {count - len(shown)} {what} more", "dim")]
