"""`forebay pool add|resize|drain|resume|set-granularity|set-default|remove|show`: pools while they are in use."""

import click

from cluster.cli.exits import ExitCode, Failure
from cluster.cli.jobs import JSON_OPTION
from cluster.cli.output import note, show, show_json, table
from cluster.cli.session import session
from cluster.cli.tables import unit_in
from cluster.client import Client
from cluster.schemas import PoolAddRequest, PoolChangeRequest, PoolView, UnitWord
from replica.model import UNIT_WORDS, PoolUnit, format_amount, parse_amount, unit_of
from replica.values import SizeError, plain

ALL = "all"

_NAME = click.argument("name")
_DEFAULT = click.option("--default", "is_default", is_flag=True, help="Make it the pool of requests that name none.")


def pool_line(pool: PoolView) -> str:
    """Return one pool in one line, in its units."""
    unit = unit_in(pool)
    parts = [
        f"total {format_amount(pool.quantity_bytes, unit)}",
        f"free {format_amount(pool.free_bytes, unit)}",
        f"held {format_amount(pool.held_bytes, unit)} by {pool.buffers}",
        f"out of service {format_amount(pool.out_of_service_bytes, unit)}",
        f"granularity {format_amount(pool.granularity_bytes, unit)}",
    ]
    return f"Pool {plain(pool.name)}: {', '.join(parts)}" + (", default" if pool.is_default else "")


def remarks(pool: PoolView) -> list[str]:
    """Return what a person should know of a pool beyond its figures."""
    unit = unit_in(pool)
    found: list[str] = []
    if pool.overcommitted_bytes:
        over = format_amount(pool.overcommitted_bytes, unit)
        found.append(f"{over} more is held than is in service: nothing is free before that is given back")
    rest = pool.quantity_bytes % pool.granularity_bytes
    if rest:
        found.append(
            f"{format_amount(pool.quantity_bytes, unit)} is no multiple of "
            f"{format_amount(pool.granularity_bytes, unit)}: the last {format_amount(rest, unit)} cannot be given to "
            "anybody"
        )
    return found


@click.command("show")
@_NAME
@JSON_OPTION
def show_pool(name: str, as_json: bool) -> None:
    """Show one pool."""
    current = session()
    answer = current.ask(lambda client: client.pools(stale=current.stale))
    pool = next((row for row in answer.pools if row.name == name), None)
    if pool is None:
        raise _unknown(name)
    _show(pool, as_json)


@click.command("add")
@_NAME
@click.option("--quantity", required=True, metavar="SIZE", help="What it has in all, e.g. 96GiB, or 40N of nodes.")
@click.option("--granularity", metavar="SIZE", help="Requests are rounded up to this.  [default: Granularity]")
@click.option(
    "--unit", type=click.Choice(UNIT_WORDS), default="bytes", show_default=True, help="What its numbers count."
)
@_DEFAULT
@JSON_OPTION
def add_pool(
    name: str, quantity: str, granularity: str | None, unit: UnitWord, is_default: bool, as_json: bool
) -> None:
    """Make a pool that is not there (operators)."""
    counted = unit_of(unit) or PoolUnit.BYTES
    _check("--quantity", quantity, counted, zero=True)
    _check("--granularity", granularity, counted)

    async def add(client: Client) -> PoolView:
        request = PoolAddRequest(
            command_id=client.new_command_id(),
            quantity=quantity,
            granularity=granularity,
            unit=unit,
            default=is_default or None,
        )
        return await client.add_pool(name, request)

    _show(session().ask(add), as_json)


@click.command("resize")
@_NAME
@click.argument("size")
@JSON_OPTION
def resize_pool(name: str, size: str, as_json: bool) -> None:
    """Change what a pool has in all to SIZE (operators).

    It may shrink below what is in use: then nothing of it is free, and nothing is taken from who holds it.
    """
    _change(name, as_json, quantity=size)


@click.command("drain")
@_NAME
@click.argument("size", default=ALL)
@JSON_OPTION
def drain_pool(name: str, size: str, as_json: bool) -> None:
    """Take SIZE of a pool out of service, or all of it (operators); who holds a part keeps it."""
    _change(name, as_json, out_of_service=size)


@click.command("resume")
@_NAME
@JSON_OPTION
def resume_pool(name: str, as_json: bool) -> None:
    """Put all of a pool back into service (operators)."""
    _change(name, as_json, out_of_service="0")


@click.command("granularity")
@_NAME
@click.argument("size")
@JSON_OPTION
def set_granularity(name: str, size: str, as_json: bool) -> None:
    """Change to what requests are rounded up from now on (operators); what was granted keeps its size."""
    _change(name, as_json, granularity=size)


@click.command("default")
@_NAME
@click.option("--off", is_flag=True, help="Let it no longer be the default pool.")
@JSON_OPTION
def set_default(name: str, off: bool, as_json: bool) -> None:
    """Make a pool the one of requests that name none (operators)."""
    _change(name, as_json, default=not off)


@click.command("unit")
@_NAME
@click.argument("unit", type=click.Choice(UNIT_WORDS))
@JSON_OPTION
def set_unit(name: str, unit: UnitWord, as_json: bool) -> None:
    """Change what the numbers of a pool count (operators); only while nobody uses it."""
    _change(name, as_json, unit=unit)


@click.command("remove")
@_NAME
@JSON_OPTION
def remove_pool(name: str, as_json: bool) -> None:
    """Remove a pool that nobody holds a part of or waits for (operators); else refused with who does."""
    answer = session().ask(lambda client: client.remove_pool(name))
    if as_json:
        show_json(answer)
        return
    show(table(("POOL", "TOTAL", "FREE"), (_row(pool) for pool in answer.pools), right=frozenset({"TOTAL", "FREE"})))


def _row(pool: PoolView) -> tuple[str, str, str]:
    unit = unit_in(pool)
    return (pool.name, format_amount(pool.quantity_bytes, unit), format_amount(pool.free_bytes, unit))


def _change(
    name: str,
    as_json: bool,
    *,
    quantity: str | None = None,
    granularity: str | None = None,
    out_of_service: str | None = None,
    unit: UnitWord | None = None,
    default: bool | None = None,
) -> None:
    async def change(client: Client) -> PoolView:
        request = PoolChangeRequest(
            command_id=client.new_command_id(),
            quantity=quantity,
            granularity=granularity,
            out_of_service=out_of_service,
            unit=unit,
            default=default,
        )
        return await client.change_pool(name, request)

    _show(session().ask(change), as_json)


def _check(option: str, text: str | None, unit: PoolUnit, *, zero: bool = False) -> None:
    if text is None or (zero and text == "0"):
        return
    try:
        parse_amount(text, unit)
    except SizeError as error:
        place = f"{option}, character {error.offset + 1}"
        raise Failure(ExitCode.BAD_INPUT, error.sentence, error.remedy, place=place) from None


def _show(pool: PoolView, as_json: bool) -> None:
    for remark in remarks(pool):
        note(f"forebay: warning: {remark}")
    if as_json:
        show_json(pool)
    else:
        click.echo(pool_line(pool))


def _unknown(name: str) -> Failure:
    return Failure(ExitCode.NOT_FOUND, f"there is no pool {name!r}", "`forebay pool list` shows the pools")


POOL_COMMANDS = (
    show_pool,
    add_pool,
    resize_pool,
    drain_pool,
    resume_pool,
    set_granularity,
    set_default,
    set_unit,
    remove_pool,
)
"""What is added to `forebay pool`."""
