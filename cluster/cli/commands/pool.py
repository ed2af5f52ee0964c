"""`forebay pool|place …`: where data can go, pools while they are in use."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import msgspec

from cluster.cli.commands.options import AT_OPTION, NAME
from cluster.cli.confirming import destroys
from cluster.cli.exits import ExitCode, Failure, bad_input
from cluster.cli.global_options import JSON_OPTION, CommandGroup
from cluster.cli.session import session
from cluster.cli.text import Listing, moment, note, pools_table, present, size, table, unit_in
from cluster.client import Client
from cluster.schemas import PlacesAnswer, PoolRequest, PoolStepView, PoolUseView, PoolView, UnitWord
from cluster.schemas import operations as ops
from replica.model import UNIT_WORDS, PoolUnit, format_amount, parse_amount, unit_of
from replica.values import SizeError, parse_size, plain

pool_group = CommandGroup("pool", help="List and change pools.")


@pool_group.command("list")
@AT_OPTION
@JSON_OPTION
def list_pools(at: str | None, as_json: bool) -> None:
    """List pools with total, used and free capacity."""
    answer = session().read(ops.LIST_POOLS, at=at)
    present(answer, as_json, lambda: pools_table(answer.pools))


@pool_group.command("history")
@click.argument("name", required=False)
@JSON_OPTION
def show_pool_use(name: str | None, as_json: bool) -> None:
    """Show how full pools were in the last day, or one of them: as far as the replica that is asked has followed."""
    answer = session().read(ops.LIST_POOL_USE, name=name)
    if name is not None and not answer.pools:
        sentence = f"nothing is known of a pool {name!r} in the last day"
        raise Failure(ExitCode.NOT_FOUND, sentence, "correct the name")
    if answer.truncated:
        note(f"There are more than these {len(answer.pools)} pools: name one.")
    present(answer, as_json, lambda: _use_table(answer.pools))


def _use_table(pools: tuple[PoolUseView, ...]) -> Listing:
    rows = [
        (pool.name, moment(step.at), *(format_amount(number, unit) for number in _figures(step)))
        for pool in pools
        for unit in (unit_of(pool.unit) or PoolUnit.BYTES,)
        for step in pool.steps
    ]
    figures = ("USED", "IN-SERVICE", "TOTAL")
    return table(("POOL", "FROM", *figures), rows, right=frozenset(figures))


def _figures(step: PoolStepView) -> tuple[int, int, int]:
    return step.held_bytes, step.served_bytes, step.quantity_bytes


@pool_group.command("set")
@NAME
@click.option("--quantity", metavar="SIZE", help="What it has in all, e.g. 96GiB.  [default: unchanged]")
@click.option("--granularity", metavar="SIZE", help="Requests are rounded up to this.  [default: unchanged]")
@click.option("--out-of-service", metavar="SIZE", help="Taken away for now; 0 for nothing.  [default: unchanged]")
@click.option("--default/--no-default", "is_default", default=None, help="Whether it is the pool of unnamed requests.")
@JSON_OPTION
def set_pool(
    name: str, quantity: str | None, granularity: str | None, out_of_service: str | None, is_default: bool | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Make a pool, or change what is named of one (operators).

    A pool may shrink below what is in use: then nothing of it is free, and nothing is taken from who holds it.
    """
    _check("--quantity", quantity, parse_size)
    _check("--granularity", granularity, parse_size)
    _check("--out-of-service", out_of_service, parse_size, zero=True)

    async def change(client: Client) -> PoolView:
        known = next((pool for pool in (await client.call(ops.LIST_POOLS)).pools if pool.name == name), None)
        if known is None and (quantity is None or granularity is None):
            raise Failure(
                ExitCode.NOT_FOUND,
                f"there is no pool {name!r} yet",
                "correct the name, or make it with --quantity and --granularity",
            )
        request = PoolRequest(
            command_id=client.new_command_id(),
            quantity=_chosen(quantity, known.quantity_bytes if known else 0),
            granularity=_chosen(granularity, known.granularity_bytes if known else 0),
            default=(known is not None and known.is_default) if is_default is None else is_default,
            out_of_service=_chosen(out_of_service, known.out_of_service_bytes if known else 0),
        )
        return await client.call(ops.SET_POOL, request, name=name)

    pool = session().ask(change)
    rest_bytes = pool.quantity_bytes % pool.granularity_bytes
    if rest_bytes:
        note(
            f"forebay: warning: {size(pool.quantity_bytes)} is no multiple of {size(pool.granularity_bytes)}: "
            f"the last {size(rest_bytes)} cannot be given to anybody"
        )
    line = (
        f"Pool {plain(pool.name)}: total {size(pool.quantity_bytes)}, free {size(pool.free_bytes)}, "
        f"granularity {size(pool.granularity_bytes)}" + (", default" if pool.is_default else "")
    )
    present(pool, as_json, lambda: line)


def _chosen(given: str | None, present_bytes: int) -> str:
    return given if given is not None else str(present_bytes)


ALL = "all"

_DEFAULT = click.option("--default", "is_default", is_flag=True, help="Make it the pool of requests that name none.")


def pool_line(pool: PoolView) -> str:
    """Return one pool in one line, in its units."""
    unit = unit_in(pool)
    parts = [
        f"total {format_amount(pool.quantity_bytes, unit)}",
        f"free {format_amount(pool.free_bytes, unit)}",
        f"held {format_amount(pool.held_bytes, unit)} by {pool.buffers} buffer{'' if pool.buffers == 1 else 's'}",
        f"out of service {format_amount(pool.out_of_service_bytes, unit)}",
        f"granularity {format_amount(pool.granularity_bytes, unit)}",
    ]
    if pool.place:
        parts.append(f"in place {plain(pool.place)}")
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


@pool_group.command("show")
@NAME
@AT_OPTION
@JSON_OPTION
def show_pool(name: str, at: str | None, as_json: bool) -> None:
    """Show one pool."""
    pool = next((row for row in session().read(ops.LIST_POOLS, at=at).pools if row.name == name), None)
    if pool is None:
        raise Failure(ExitCode.NOT_FOUND, f"there is no pool {name!r}", "`forebay pool list` shows the pools")
    _show(pool, as_json)


@pool_group.command("add")
@NAME
@click.option("--quantity", required=True, metavar="SIZE", help="What it has in all, e.g. 96GiB, or 40N of nodes.")
@click.option("--granularity", metavar="SIZE", help="Requests are rounded up to this.  [default: Granularity]")
@click.option(
    "--unit", type=click.Choice(UNIT_WORDS), default="bytes", show_default=True, help="What its numbers count."
)
@_DEFAULT
@click.option("--place", metavar="PLACE", help="Have its buffers lie there, where all nodes see them.")
@JSON_OPTION
def add_pool(
    name: str, quantity: str, granularity: str | None, unit: UnitWord, is_default: bool, place: str | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Make a pool that is not there (operators)."""
    counted = partial(parse_amount, unit=unit_of(unit) or PoolUnit.BYTES)
    _check("--quantity", quantity, counted, zero=True)
    _check("--granularity", granularity, counted)
    fields = {
        "quantity": quantity,
        "granularity": granularity,
        "unit": unit,
        "default": is_default or None,
        "place": place,
    }
    _show(session().write(ops.ADD_POOL, name=name, **fields), as_json)


@pool_group.command("resize")
@NAME
@click.argument("size")
@JSON_OPTION
def resize_pool(name: str, size: str, as_json: bool) -> None:
    """Change what a pool has in all to SIZE (operators).

    It may shrink below what is in use: then nothing of it is free, and nothing is taken from who holds it.
    """
    _change(name, as_json, quantity=size)


@pool_group.command("drain")
@NAME
@click.argument("size", default=ALL)
@JSON_OPTION
def drain_pool(name: str, size: str, as_json: bool) -> None:
    """Take SIZE of a pool out of service, or all of it (operators); who holds a part keeps it."""
    _change(name, as_json, out_of_service=size)


@pool_group.command("resume")
@NAME
@JSON_OPTION
def resume_pool(name: str, as_json: bool) -> None:
    """Put all of a pool back into service (operators)."""
    _change(name, as_json, out_of_service="0")


@pool_group.command("granularity")
@NAME
@click.argument("size")
@JSON_OPTION
def set_granularity(name: str, size: str, as_json: bool) -> None:
    """Change to what requests are rounded up from now on (operators); what was granted keeps its size."""
    _change(name, as_json, granularity=size)


@pool_group.command("default")
@NAME
@click.option("--off", is_flag=True, help="Let it no longer be the default pool.")
@JSON_OPTION
def set_default(name: str, off: bool, as_json: bool) -> None:
    """Make a pool the one of requests that name none (operators)."""
    _change(name, as_json, default=not off)


@pool_group.command("unit")
@NAME
@click.argument("unit", type=click.Choice(UNIT_WORDS))
@JSON_OPTION
def set_unit(name: str, unit: UnitWord, as_json: bool) -> None:
    """Change what the numbers of a pool count (operators); only while nobody uses it."""
    _change(name, as_json, unit=unit)


@pool_group.command("place")
@NAME
@click.argument("place", default="")
@JSON_OPTION
def set_pool_place(name: str, place: str, as_json: bool) -> None:
    """Have the buffers of a pool lie in PLACE, or on single nodes (operators); only while nobody uses the pool."""
    _change(name, as_json, place=place)


@pool_group.command("delete")
@NAME
@JSON_OPTION
@destroys("Delete the pool {name}?")
def delete_pool(name: str, as_json: bool) -> None:
    """Take a pool away that nobody holds a part of or waits for (operators); else refused with who does."""
    answer = session().write(ops.REMOVE_POOL, name=name)
    columns = ("POOL", "TOTAL", "FREE")
    rows = (_row(pool) for pool in answer.pools)
    present(answer, as_json, lambda: table(columns, rows, right=frozenset({"TOTAL", "FREE"})))


def _row(pool: PoolView) -> tuple[str, str, str]:
    unit = unit_in(pool)
    return (pool.name, format_amount(pool.quantity_bytes, unit), format_amount(pool.free_bytes, unit))


def _change(name: str, as_json: bool, **changes: Any) -> None:
    _show(session().write(ops.CHANGE_POOL, name=name, **changes), as_json)


def _check(option: str, text: str | None, read: Callable[[str], int], *, zero: bool = False) -> None:
    if text is None or (zero and text == "0"):
        return
    try:
        read(text)
    except SizeError as error:
        raise bad_input(error.sentence, error.remedy, place=f"{option}, character {error.offset + 1}") from None


def _show(pool: PoolView, as_json: bool) -> None:
    for remark in remarks(pool):
        note(f"forebay: warning: {remark}")
    present(pool, as_json, lambda: pool_line(pool))


# Places: file systems that all nodes mount


class MarkedPlace(msgspec.Struct, frozen=True, kw_only=True):
    """What `place mark --json` prints."""

    path: str
    identity: str
    """By which machines know it."""


place_group = CommandGroup("place", help="List and change places: file systems that all nodes mount.")


@place_group.command("list")
@JSON_OPTION
def list_places(as_json: bool) -> None:
    """List places with their movers, and the pools that have their buffers there."""
    _show_places(session().read(ops.LIST_PLACES), as_json)


@place_group.command("add")
@NAME
@click.argument("path")
@JSON_OPTION
def add_place(name: str, path: str, as_json: bool) -> None:
    """Make a place of the file system that all nodes mount at PATH (operators)."""
    _show_places(session().write(ops.ADD_PLACE, name=name, path=path), as_json)


@place_group.command("delete")
@NAME
@JSON_OPTION
@destroys("Delete the place {name}?")
def delete_place(name: str, as_json: bool) -> None:
    """Take a place away that no pool has its buffers in (operators); what lies there stays."""
    _show_places(session().write(ops.REMOVE_PLACE, name=name), as_json)


@place_group.command("mark")
@click.argument("path", type=click.Path(path_type=Path))
@JSON_OPTION
def mark_place(path: Path, as_json: bool) -> None:
    """Make the file at PATH by which machines know the place, once, on one that has it mounted.

    Where that file is not found nothing is written: the file system is not mounted there.
    """
    from cluster.agent.files import PlaceRefused, places

    try:
        marked = MarkedPlace(path=str(path), identity=places.mark(str(path)))
    except PlaceRefused as error:
        raise Failure(ExitCode.REFUSED, str(error), "then mark it again") from error
    except OSError as error:
        raise Failure(ExitCode.REFUSED, f"{path} cannot be marked: {error.strerror}", "mark it as its owner") from error
    present(marked, as_json, lambda: f"{plain(marked.path)} is place {marked.identity}")


def _show_places(answer: PlacesAnswer, as_json: bool) -> None:
    columns = ("PLACE", "PATH", "MOVERS", "UP", "POOLS")
    rows = (
        (one.name, one.path, ",".join(one.movers), len(one.movers_up), ",".join(one.pools)) for one in answer.places
    )
    present(answer, as_json, lambda: table(columns, rows, right=frozenset({"UP"})))
