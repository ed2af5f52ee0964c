"""`forebay burst`: what `scontrol show burst` prints, from the cluster's own State."""

import click
import msgspec

from cluster.cli.jobs import JSON_OPTION
from cluster.cli.output import show_json
from cluster.cli.session import session
from cluster.eventloop import uid_of
from cluster.schemas import BurstAnswer, burst_text


@click.command("burst")
@click.option("-o", "--oneliner", "one_line", is_flag=True, help="Print all of it on one line, as `scontrol -o` does.")
@JSON_OPTION
def burst(one_line: bool, as_json: bool) -> None:
    """Show pools, settings, allocated buffers and their users, as `scontrol show burst` does.

    Times are local. A user's number is the one that the answering replica knows, else the one that this machine knows.
    """
    current = session()
    answer = with_numbers(current.ask(lambda client: client.burst(stale=current.stale)))
    if as_json:
        show_json(answer)
    else:
        click.echo(burst_text(answer, one_line=one_line))


def with_numbers(answer: BurstAnswer) -> BurstAnswer:
    """Return the answer with the uids that the replica did not know and this machine does."""
    missing = {buffer.user for buffer in answer.buffers if buffer.uid is None}
    missing |= {use.user for use in answer.uses if use.uid is None}
    known = {user: uid_of(user) for user in missing}
    replace = msgspec.structs.replace
    return replace(
        answer,
        buffers=tuple(replace(row, uid=row.uid if row.uid is not None else known[row.user]) for row in answer.buffers),
        uses=tuple(replace(row, uid=row.uid if row.uid is not None else known[row.user]) for row in answer.uses),
    )
