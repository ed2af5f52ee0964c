"""`forebay pool|buffer|node …`: where data can go, where it is, who does the work."""

import click

from cluster.cli.exits import ExitCode, Failure, bad_input
from cluster.cli.jobs import JSON_OPTION
from cluster.cli.output import note, show, show_json, size
from cluster.cli.session import session
from cluster.cli.tables import buffers_table, nodes_table, pools_table
from cluster.client import Client
from cluster.schemas import PoolRequest, PoolView
from replica.values import SizeError, parse_size, plain


@click.group("pool")
def pool_group() -> None:
    """List and change pools."""


@pool_group.command("list")
@JSON_OPTION
def list_pools(as_json: bool) -> None:
    """List pools with total, used and free capacity."""
    current = session()
    answer = current.ask(lambda client: client.pools(stale=current.stale))
    if as_json:
        show_json(answer)
    else:
        show(pools_table(answer.pools))


@pool_group.command("set")
@click.argument("name")
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
    for option, text in (
        ("--quantity", quantity),
        ("--granularity", granularity),
        ("--out-of-service", out_of_service),
    ):
        if text is not None and not (option == "--out-of-service" and text == "0"):
            _check_size(option, text)

    async def change(client: Client) -> PoolView:
        known = next((pool for pool in (await client.pools()).pools if pool.name == name), None)
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
        return await client.set_pool(name, request)

    pool = session().ask(change)
    rest_bytes = pool.quantity_bytes % pool.granularity_bytes
    if rest_bytes:
        note(
            f"forebay: warning: {size(pool.quantity_bytes)} is no multiple of {size(pool.granularity_bytes)}: "
            f"the last {size(rest_bytes)} cannot be given to anybody"
        )
    if as_json:
        show_json(pool)
    else:
        click.echo(
            f"Pool {plain(pool.name)}: total {size(pool.quantity_bytes)}, free {size(pool.free_bytes)}, "
            f"granularity {size(pool.granularity_bytes)}" + (", default" if pool.is_default else "")
        )


def _check_size(option: str, text: str) -> None:
    try:
        parse_size(text)
    except SizeError as error:
        place = f"{option}, character {error.offset + 1}"
        raise bad_input(error.sentence, error.remedy, place=place) from None


def _chosen(given: str | None, present_bytes: int) -> str:
    return given if given is not None else str(present_bytes)


@click.group("buffer")
def buffer_group() -> None:
    """List buffers."""


@buffer_group.command("list")
@click.option("--all", "everything", is_flag=True, help="Also buffers that are gone.")
@JSON_OPTION
def list_buffers(everything: bool, as_json: bool) -> None:
    """List buffers, persistent ones first, their state, and what they hold; by default those that are not gone."""
    current = session()
    answer = current.ask(lambda client: client.buffers(live=not everything, stale=current.stale))
    if as_json:
        show_json(answer)
    else:
        show(buffers_table(answer.buffers))


@click.group("node")
def node_group() -> None:
    """List, drain and resume nodes."""


@node_group.command("list")
@JSON_OPTION
def list_nodes(as_json: bool) -> None:
    """List nodes, their state and what they run."""
    current = session()
    answer = current.ask(lambda client: client.nodes(stale=current.stale))
    if as_json:
        show_json(answer)
    else:
        show(nodes_table(answer.nodes))


@node_group.command("drain")
@click.argument("name")
@click.option("--reason", required=True, metavar="TEXT", help="Why, for whoever looks next.")
def drain(name: str, reason: str) -> None:
    """Keep new work away from a node (operators); what it has goes on."""
    if not reason.strip():
        raise bad_input("the reason is empty", 'say why, for example --reason "new disks"', place="--reason")
    node = session().ask(lambda client: client.drain(name, reason=reason))
    click.echo(f"NodeName={plain(node.name)} State={plain(node.state)} Reason={plain(node.reason)}")


@node_group.command("resume")
@click.argument("name")
def resume(name: str) -> None:
    """Give a drained node new work again (operators)."""
    node = session().ask(lambda client: client.resume(name))
    click.echo(f"NodeName={plain(node.name)} State={plain(node.state)}")
