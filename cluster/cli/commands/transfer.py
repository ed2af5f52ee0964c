"""Commands `forebay transfer list`, `show` and `receipt`: transfers, their progress and receipts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Final

import click

from forebay.cluster.cli.commands.options import JOB_ID, WATCH_PERIOD_S
from forebay.cluster.cli.exits import ExitCode, Failure, bad_input
from forebay.cluster.cli.global_options import JSON_OPTION
from forebay.cluster.cli.session import session
from forebay.cluster.cli.text import (
    draw_transfers,
    is_terminal,
    job_transfers_text,
    note,
    present,
    receipt_text,
    show,
    show_json,
    stdout_console,
    transfers_table,
)
from forebay.cluster.schemas import operations as ops

if TYPE_CHECKING:
    from forebay.cluster.client import Client
    from forebay.cluster.schemas import TransferView

STAGES: Final = ("stage_in", "stage_out")

_WATCH = click.option("--watch", is_flag=True, help="Repeat every second, until nothing moves or you press Ctrl-C.")


@click.command("list")
@click.option("--user", "owner", metavar="NAME", help="Only transfers of this user.")
@_WATCH
@JSON_OPTION
def list_transfers(owner: str | None, watch: bool, as_json: bool) -> None:
    """List active, queued and failed transfers.

    The figures are from the agents' last reports.
    """

    async def ask(client: Client) -> list[TransferView]:
        return [row for row in (await client.call(ops.LIST_TRANSFERS)).transfers if owner is None or row.user == owner]

    current = session()
    if watch:
        _check_watch(as_json)
        current.ask(lambda client: _draw(lambda: ask(client)), on_a_loop=True)
    elif as_json:
        show_json(current.ask(lambda client: client.call(ops.LIST_TRANSFERS)) if owner is None else current.ask(ask))
    else:
        show(transfers_table(current.ask(ask)))


@click.command("show")
@click.argument("job_id", metavar="JOB", type=JOB_ID)
@_WATCH
@JSON_OPTION
def show_transfer(job_id: str, watch: bool, as_json: bool) -> None:
    """Show a job's transfers, and its pending stage-out."""

    async def ask(client: Client) -> list[TransferView]:
        row = (await client.call(ops.SHOW_JOB_TRANSFERS, id=job_id)).transfer
        return [] if row is None else [row]

    current = session()
    if watch:
        _check_watch(as_json)
        current.ask(lambda client: _draw(lambda: ask(client)), on_a_loop=True)
        return
    answer = current.ask(lambda client: client.call(ops.SHOW_JOB_TRANSFERS, id=job_id))
    present(answer, as_json, lambda: job_transfers_text(answer))


@click.command("receipt")
@click.argument("job_id", metavar="JOB", type=JOB_ID)
@click.option("--stage", type=click.Choice(STAGES), help="Only receipts of this stage.")
@click.option("--attempt", type=click.IntRange(min=1), metavar="N", help="Only receipts of this attempt.")
@JSON_OPTION
def receipt(job_id: str, stage: str | None, attempt: int | None, as_json: bool) -> None:
    """Print a job's transfer receipts from the ledger.

    Receipts of purged jobs are included.
    """
    answer = session().read(ops.LIST_RECEIPTS, id=job_id, stage=stage, attempt=attempt)
    if not answer.receipts:
        what = f" of {stage}" if stage else ""
        number = f" of attempt {attempt}" if attempt else ""
        where = (
            ""
            if answer.complete
            else "; the replica that answered lacks the beginning of the job's history: try another one"
        )
        raise Failure(
            ExitCode.NOT_FOUND,
            f"job {job_id} has no receipt{what}{number}{where}",
            f"see `forebay transfer show {job_id}`",
        )
    if as_json:
        show_json(answer)
        return
    click.echo("\n\n".join(receipt_text(row) for row in answer.receipts))
    if not answer.complete:
        note("Earlier receipts may be missing: the replica that answered lacks the beginning of the job's history.")


def _check_watch(as_json: bool) -> None:
    if as_json:
        raise bad_input("--watch and --json exclude each other", "in a program, repeat the command without --watch")
    if not is_terminal():
        raise bad_input("--watch needs a terminal", "in a program, repeat the command without --watch")


async def _draw(ask: Callable[[], Awaitable[Iterable[TransferView]]]) -> None:
    """Draw transfers until none is active; those that failed for good wait for an operator and do not count."""
    import asyncio

    from rich.live import Live

    with Live(console=stdout_console(), auto_refresh=False) as live:
        while True:
            rows = list(await ask())
            live.update(draw_transfers(rows), refresh=True)
            if not any(row.state != "failed" for row in rows):
                return
            await asyncio.sleep(WATCH_PERIOD_S)
