"""Commands `forebay pool …` and `forebay pool filesystem …`."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from forebay.cluster.cli.commands.options import AT_OPTION, NAME
from forebay.cluster.cli.confirmation import confirm_first
from forebay.cluster.cli.exits import ExitCode, Failure, bad_input
from forebay.cluster.cli.global_options import JSON_OPTION
from forebay.cluster.cli.session import session
from forebay.cluster.cli.text import Listing, format_time, note, pools_table, present, show, show_json, table, unit_in
from forebay.cluster.schemas import FilesystemsAnswer, FilesystemView, PoolStepView, PoolUseView, PoolView, UnitWord
from forebay.cluster.schemas import operations as ops
from forebay.replica.model import (
    LAYOUTS,
    NO_LAYOUT,
    QUOTA_AUTO,
    QUOTAS,
    UNIT_WORDS,
    FilesystemLayout,
    PoolUnit,
    format_amount,
    parse_amount,
    parse_unit,
)
from forebay.replica.values import SizeError, format_size, parse_size, plain

if TYPE_CHECKING:
    from forebay.cluster.agent.filesystem_check import CheckTarget


@click.command("list")
@AT_OPTION
@JSON_OPTION
def list_pools(at: str | None, as_json: bool) -> None:
    """List pools and their capacity."""
    answer = session().read(ops.LIST_POOLS, at=at)
    present(answer, as_json, lambda: pools_table(answer.pools))


@click.command("history")
@click.argument("name", required=False)
@JSON_OPTION
def show_pool_use(name: str | None, as_json: bool) -> None:
    """Show the usage of pools in the last day.

    The history is shorter if the replica that answers was started less than a day ago.
    """
    answer = session().read(ops.LIST_POOL_USE, name=name)
    if name is not None and not answer.pools:
        sentence = f"pool {name!r} did not exist in the last day"
        raise Failure(ExitCode.NOT_FOUND, sentence, "`forebay pool list` shows the pools")
    if answer.truncated:
        note(f"Only {len(answer.pools)} pools are shown: give the name of a pool.")
    present(answer, as_json, lambda: _use_table(answer.pools))


def _use_table(pools: tuple[PoolUseView, ...]) -> Listing:
    rows = [
        (pool.name, format_time(step.at), *(format_amount(number, unit) for number in _figures(step)))
        for pool in pools
        for unit in (parse_unit(pool.unit) or PoolUnit.BYTES,)
        for step in pool.steps
    ]
    figures = ("USED", "IN-SERVICE", "TOTAL")
    return table(("POOL", "FROM", *figures), rows, right=frozenset(figures))


def _figures(step: PoolStepView) -> tuple[int, int, int]:
    return step.held_bytes, step.served_bytes, step.quantity_bytes


ALL = "all"

_DEFAULT = click.option("--default", "is_default", is_flag=True, help="Use it for requests that name no pool.")


def pool_line(pool: PoolView) -> str:
    """Format a pool as one line, in its unit."""
    unit = unit_in(pool)
    parts = [
        f"total {format_amount(pool.quantity_bytes, unit)}",
        f"free {format_amount(pool.free_bytes, unit)}",
        f"held {format_amount(pool.held_bytes, unit)} by {pool.buffers} buffer{'' if pool.buffers == 1 else 's'}",
        f"out of service {format_amount(pool.out_of_service_bytes, unit)}",
        f"granularity {format_amount(pool.granularity_bytes, unit)}",
    ]
    if pool.filesystem:
        parts.append(f"in shared filesystem {plain(pool.filesystem)}")
    return f"Pool {plain(pool.name)}: {', '.join(parts)}" + (", default" if pool.is_default else "")


def remarks(pool: PoolView) -> list[str]:
    """Return warnings about a pool: overcommitted space, and space that is no multiple of its granularity."""
    unit = unit_in(pool)
    found: list[str] = []
    if pool.overcommitted_bytes:
        over = format_amount(pool.overcommitted_bytes, unit)
        found.append(f"{over} more is in use than in service: no space is free until jobs release this amount")
    rest = pool.quantity_bytes % pool.granularity_bytes
    if rest:
        found.append(
            f"{format_amount(pool.quantity_bytes, unit)} is not a multiple of the granularity "
            f"{format_amount(pool.granularity_bytes, unit)}: the last {format_amount(rest, unit)} cannot be used"
        )
    return found


@click.command("show")
@NAME
@AT_OPTION
@JSON_OPTION
def show_pool(name: str, at: str | None, as_json: bool) -> None:
    """Show a pool in full."""
    pool = next((row for row in session().read(ops.LIST_POOLS, at=at).pools if row.name == name), None)
    if pool is None:
        raise Failure(ExitCode.NOT_FOUND, f"pool {name!r} does not exist", "`forebay pool list` shows the pools")
    _show(pool, as_json)


@click.command("create")
@NAME
@click.option(
    "--quantity", required=True, metavar="SIZE", help="Set the total capacity, for example 96GiB, or 40N for nodes."
)
@click.option("--granularity", metavar="SIZE", help="Round requests up to this.  [default: Granularity]")
@click.option(
    "--unit",
    type=click.Choice(UNIT_WORDS),
    default="bytes",
    show_default=True,
    help="Set the unit of the pool's quantities.",
)
@_DEFAULT
@click.option("--filesystem", metavar="NAME", help="Keep buffers on this shared filesystem, which all nodes mount.")
@JSON_OPTION
def create_pool(
    name: str, quantity: str, granularity: str | None, unit: UnitWord, is_default: bool, filesystem: str | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Create a pool (operators)."""
    counted = partial(parse_amount, unit=parse_unit(unit) or PoolUnit.BYTES)
    _check("--quantity", quantity, counted, zero=True)
    _check("--granularity", granularity, counted)
    fields = {
        "quantity": quantity,
        "granularity": granularity,
        "unit": unit,
        "default": is_default or None,
        "filesystem": filesystem,
    }
    _show(session().write(ops.ADD_POOL, name=name, **fields), as_json)


@click.command("set")
@NAME
@click.option(
    "--quantity", metavar="SIZE", help="Set the total capacity, for example 96GiB; it may be less than what is in use."
)
@click.option("--granularity", metavar="SIZE", help="Round new requests up to a multiple of this size.")
@click.option("--out-of-service", metavar="SIZE", help="Withhold this capacity from new buffers; 0 for none.")
@click.option("--default/--no-default", "is_default", default=None, help="Use it for requests that name no pool.")
@click.option(
    "--unit", type=click.Choice(UNIT_WORDS), help="Set the unit of the pool's quantities; the pool must be unused."
)
@click.option(
    "--filesystem",
    metavar="NAME",
    help='Keep buffers on this shared filesystem; "" keeps them on nodes. The pool must be unused.',
)
@JSON_OPTION
def set_pool(
    name: str, quantity: str | None, granularity: str | None, out_of_service: str | None, is_default: bool | None,
    unit: UnitWord | None, filesystem: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Change a pool's capacity and properties (operators).

    Other properties do not change. Buffers keep their space even if the pool becomes smaller than what is in use.
    """
    given = {
        "quantity": quantity, "granularity": granularity, "out_of_service": out_of_service, "default": is_default,
        "unit": unit, "filesystem": filesystem,
    }  # fmt: skip
    changes = {field: value for field, value in given.items() if value is not None}
    if not changes:
        raise bad_input("no change is given", "use an option, for example --quantity 2TiB")
    _change(name, as_json, **changes)


@click.command("drain")
@NAME
@click.argument("size", default=ALL)
@JSON_OPTION
def drain_pool(name: str, size: str, as_json: bool) -> None:
    """Withhold SIZE of a pool, or all, from new buffers (operators).

    Existing buffers keep their space.
    """
    _change(name, as_json, out_of_service=size)


@click.command("resume")
@NAME
@JSON_OPTION
def resume_pool(name: str, as_json: bool) -> None:
    """Return a pool's withheld capacity to service (operators)."""
    _change(name, as_json, out_of_service="0")


@click.command("delete")
@NAME
@JSON_OPTION
@confirm_first("Delete pool {name}?")
def delete_pool(name: str, as_json: bool) -> None:
    """Delete a pool that is not in use (operators)."""
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


# Shared filesystems: file systems that all nodes mount


class MarkedFilesystem(msgspec.Struct, frozen=True, kw_only=True):
    """Output of `pool filesystem mark --json`."""

    path: str
    identity: str
    """Identity by which machines recognise the filesystem."""


def _adapter_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options for quota and layout to a command."""
    for option in (
        click.option("--stripe-pool", metavar="POOL", help="Store files in this pool of the filesystem."),
        click.option("--stripe-size", metavar="SIZE", help="Write this much to one target before the next."),
        click.option("--stripe-count", type=int, metavar="N", help="Distribute each file over N targets; -1: all."),
        click.option("--layout", type=click.Choice(LAYOUTS), help="Place new files with this adapter."),
        click.option("--quota", type=click.Choice(QUOTAS), help="Limit new buffers with this adapter."),
    ):
        command = option(command)
    return command


@click.command("list")
@JSON_OPTION
def list_filesystems(as_json: bool) -> None:
    """List shared filesystems with their movers and pools."""
    _show_filesystems(session().read(ops.LIST_FILESYSTEMS), as_json)


@click.command("add")
@NAME
@click.argument("path")
@_adapter_options
@JSON_OPTION
def add_filesystem(name: str, path: str, as_json: bool, **adapters: Any) -> None:
    """Add the shared filesystem mounted at PATH (operators)."""
    _show_filesystems(session().write(ops.ADD_FILESYSTEM, name=name, path=path, **_adapter_fields(adapters)), as_json)


@click.command("set")
@NAME
@_adapter_options
@JSON_OPTION
def set_filesystem(name: str, as_json: bool, **adapters: Any) -> None:
    """Change quota or layout of a shared filesystem (operators).

    Existing buffers keep their limits and layouts. Remove the buffers of a GPFS filesystem before you change its quota
    adapter.
    """
    fields = _adapter_fields(adapters)
    if not fields:
        raise bad_input("no change was given", "give --quota or --layout")
    answer = session().read(ops.LIST_FILESYSTEMS)
    known = {one.name: one.path for one in answer.filesystems}
    if name not in known:
        raise Failure(
            ExitCode.NOT_FOUND, f"there is no shared filesystem {name!r}", "`forebay pool filesystem list` shows them"
        )
    _show_filesystems(session().write(ops.ADD_FILESYSTEM, name=name, path=known[name], **fields), as_json)


def _adapter_fields(adapters: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a request for the adapter options that were given.

    Raises:
        Failure: Stripes were given without a layout.
    """
    given = {name: value for name, value in adapters.items() if value is not None}
    stripes = {name: given[name] for name in ("stripe_count", "stripe_size", "stripe_pool") if name in given}
    if stripes and "layout" not in given:
        raise bad_input("stripes need a layout", "add --layout")
    fields: dict[str, Any] = {"quota": given["quota"]} if "quota" in given else {}
    if "layout" in given:
        fields["layout"] = {
            "adapter": given["layout"],
            "stripe_count": stripes.get("stripe_count", 0),
            "stripe_bytes": _stripe_bytes(stripes.get("stripe_size", "0")),
            "pool": stripes.get("stripe_pool", ""),
        }
    return fields


def _stripe_bytes(text: str) -> int:
    try:
        return 0 if text == "0" else parse_size(text)
    except SizeError as error:
        raise bad_input(f"--stripe-size: {error.sentence}", error.remedy) from error


@click.command("delete")
@NAME
@JSON_OPTION
@confirm_first("Delete shared filesystem {name}?")
def delete_filesystem(name: str, as_json: bool) -> None:
    """Delete a shared filesystem that no pool uses (operators).

    The files on it stay.
    """
    _show_filesystems(session().write(ops.REMOVE_FILESYSTEM, name=name), as_json)


@click.command("mark")
@click.argument("path", type=click.Path(path_type=Path))
@JSON_OPTION
def mark_filesystem(path: Path, as_json: bool) -> None:
    """Mark the shared filesystem mounted at PATH.

    Do this once, on a machine that mounts it. Agents write nothing on a machine where they do not find the mark,
    because the filesystem is not mounted there.
    """
    from forebay.cluster.agent.files import FilesystemRefused, filesystems

    try:
        marked = MarkedFilesystem(path=str(path), identity=filesystems.mark(str(path)))
    except FilesystemRefused as error:
        raise Failure(ExitCode.REFUSED, str(error), "correct the fault, then mark the filesystem again") from error
    except OSError as error:
        raise Failure(
            ExitCode.REFUSED, f"{path} cannot be marked: {error.strerror}", "run this as its owner"
        ) from error
    present(marked, as_json, lambda: f"{plain(marked.path)} is shared filesystem {marked.identity}")


def _layout(one: FilesystemView) -> str:
    """Return a layout with its stripes, for example `lustre 4x1MiB@flash`."""
    text = one.layout
    if one.stripe_count or one.stripe_bytes:
        count = "all" if one.stripe_count < 0 else str(one.stripe_count or "")
        text += f" {count}{f'x{format_size(one.stripe_bytes)}' if one.stripe_bytes else ''}"
    return text + (f"@{one.stripe_pool}" if one.stripe_pool else "")


def _show_filesystems(answer: FilesystemsAnswer, as_json: bool) -> None:
    columns = ("FILESYSTEM", "PATH", "QUOTA", "LAYOUT", "MOVERS", "UP", "POOLS")
    rows = (
        (one.name, one.path, one.quota, _layout(one), ",".join(one.movers), len(one.movers_up), ",".join(one.pools))
        for one in answer.filesystems
    )
    present(answer, as_json, lambda: table(columns, rows, right=frozenset({"UP"})))


@click.command("check")
@click.argument("name", required=False)
@click.option(
    "--path",
    type=click.Path(path_type=Path, file_okay=False),
    help="Check this directory, which need not be part of a cluster, instead of NAME.",
)
@click.option("--quota", type=click.Choice(QUOTAS), help="Use this adapter.  [default: that of NAME, or auto]")
@click.option("--layout", type=click.Choice(LAYOUTS), help="Use this adapter.  [default: that of NAME, or none]")
@click.option("--agent", metavar="AGENT", help="Use the tool settings of this agent.  [default: the only one]")
@JSON_OPTION
def check_shared_filesystem(
    name: str | None, path: Path | None, quota: str | None, layout: str | None, agent: str | None, as_json: bool
) -> None:
    """Try what movers need of a shared filesystem (operators).

    It tries the filesystem NAME of the cluster, or any directory with --path. Run it on a machine that mounts the
    filesystem, as the agent's account. It works in a private directory there, takes
    less than a minute, and removes everything. The exit code is 1 if something that movers need does not work.
    """
    from forebay.cluster.agent.adapters import Tools, tools_of
    from forebay.cluster.agent.files import FilesystemRefused, RemovalFailed
    from forebay.cluster.agent.filesystem_check import CheckTarget, check_filesystem
    from forebay.cluster.system import SystemClock

    if (name is None) == (path is None):
        raise bad_input("give either NAME or --path", "`forebay pool filesystem list` shows the names")
    tools = Tools()
    if name is not None or agent is not None:
        agents = session().config().agents
        chosen = [one for one in agents if agent in (None, one.name)]
        if agent is not None and not chosen:
            raise bad_input(f"there is no agent {agent!r}", f"use one of: {', '.join(one.name for one in agents)}")
        if len({tools_of(one) for one in chosen}) > 1:
            raise bad_input("the agents of the configuration have different tools", "choose one with --agent")
        tools = tools_of(chosen[0]) if chosen else tools
    if path is None:
        target = _target(name or "")
    else:
        target = CheckTarget(os.path.abspath(path), "", QUOTA_AUTO, NO_LAYOUT)
    target = target._replace(
        quota=quota or target.quota,
        layout=target.layout if layout in (None, target.layout.adapter) else FilesystemLayout(layout or ""),
    )
    try:
        report = check_filesystem(target, tools, SystemClock())
    except (FilesystemRefused, RemovalFailed) as error:
        raise Failure(ExitCode.REFUSED, str(error), "correct the fault, then check again") from error
    except OSError as error:
        sentence = f"{target.path} cannot be checked: {error.strerror}"
        raise Failure(ExitCode.REFUSED, sentence, "mount it, and run this as the agent's account") from error
    if as_json:
        show_json(report)
    else:
        seen = ((one, "; ".join(filter(None, (one.found, one.consequence)))) for one in report.checks)
        cells = ((one.name, one.status, "yes" if one.needed else "", plain(text)) for one, text in seen)
        show(table(("CHECK", "RESULT", "NEEDED", "CONSEQUENCE"), cells, flexible=frozenset({"CONSEQUENCE"})))
        note(f"{report.path} was checked in {report.took_ms / 1000:.1f} s")
    if not report.usable:
        broken = ", ".join(one.name for one in report.checks if one.needed and one.status != "ok")
        raise Failure(
            ExitCode.REFUSED, f"movers cannot use {target.path}: {broken}", "correct this before a pool uses it"
        )


def _target(name: str) -> CheckTarget:
    from forebay.cluster.agent.filesystem_check import CheckTarget

    for one in session().read(ops.LIST_FILESYSTEMS).filesystems:
        if one.name == name:
            layout = FilesystemLayout(one.layout, one.stripe_count, one.stripe_bytes, one.stripe_pool)
            return CheckTarget(one.path, one.identity, one.quota, layout)
    raise Failure(
        ExitCode.NOT_FOUND, f"there is no shared filesystem {name!r}", "`forebay pool filesystem list` shows them"
    )
