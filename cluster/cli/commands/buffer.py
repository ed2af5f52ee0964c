"""Commands `forebay buffer …`, `forebay slurm burst` and `forebay slurm bbstat`."""

import click
import msgspec

from forebay.cluster.cli.commands.job_changes import change_each
from forebay.cluster.cli.commands.options import AT_OPTION, JOB_ID
from forebay.cluster.cli.confirmation import YES_OPTION, confirm
from forebay.cluster.cli.exits import bad_input
from forebay.cluster.cli.global_options import JSON_OPTION
from forebay.cluster.cli.session import session
from forebay.cluster.cli.text import buffers_table, present
from forebay.cluster.schemas import BurstAnswer, burst_text
from forebay.cluster.schemas import operations as ops
from forebay.cluster.system import uid_of
from forebay.replica.values import plain


@click.command("list")
@click.option("--all", "everything", is_flag=True, help="Include deleted buffers.")
@click.option(
    "--retained", is_flag=True, help="Only buffers of external jobs that are retained until their results are exported."
)
@AT_OPTION
@JSON_OPTION
def list_buffers(everything: bool, retained: bool, at: str | None, as_json: bool) -> None:
    """List buffers, persistent ones first."""
    answer = session().read(ops.LIST_BUFFERS, live=not everything, retained=retained, at=at)
    present(answer, as_json, lambda: buffers_table(answer.buffers))


@click.command("export")
@click.argument("job_ids", metavar="JOB…", type=JOB_ID, nargs=-1, required=True)
@click.option("--partial", is_flag=True, help="Give up missing results, and export the rest.")
@JSON_OPTION
def export(job_ids: tuple[str, ...], partial: bool, as_json: bool) -> None:
    """Stage out the results of jobs again.

    Use it for results that are retained or whose stage-out failed. The buffer is removed afterwards.
    """
    change_each(job_ids, ops.EXPORT_BUFFER, as_json=as_json, partial=partial)


@click.command("clear")
@click.argument("job_ids", metavar="[JOB…]", type=JOB_ID, nargs=-1)
@click.option("--name", metavar="NAME", help="Clear the persistent buffer of this name.")
@click.option("--discard", is_flag=True, help="Clear the buffer even if the only copy of its data is LOST.")
@YES_OPTION
@JSON_OPTION
def clear(job_ids: tuple[str, ...], name: str | None, discard: bool, yes: bool, as_json: bool) -> None:
    """Forget buffers that cannot be removed (operators).

    Their space becomes free, but no files are deleted: remove the remaining files from the storage by hand.
    """
    if bool(job_ids) == (name is not None):
        raise bad_input("no buffer is given", "give jobs, or a persistent buffer with --name")
    what = ", ".join(job_ids) if name is None else f"persistent buffer {name}"
    subject = f"the buffer of {what}" if name is None else what
    confirm(f"Clear {subject}, and {'LOSE its unexported data' if discard else 'free its space'}?", yes=yes)
    if name is None:
        change_each(job_ids, ops.CLEAR_BUFFER, as_json=as_json, discard=discard)
        return
    answer = session().write(ops.CLEAR_PERSISTENT_BUFFER, name=name, discard=discard)
    present(answer, as_json, lambda: f"Cleared persistent buffer {plain(answer.name)}.")


@click.command("burst")
@click.option("-o", "--oneliner", "one_line", is_flag=True, help="Print one line, as `scontrol -o` does.")
@AT_OPTION
@JSON_OPTION
def burst(one_line: bool, at: str | None, as_json: bool) -> None:
    """Print pools and buffers as `scontrol show burst` does.

    Times are local. User IDs unknown to the replica are looked up on this machine.
    """
    answer = fill_uids(session().read(ops.SHOW_BURST, at=at))
    present(answer, as_json, lambda: burst_text(answer, one_line=one_line))


def fill_uids(answer: BurstAnswer) -> BurstAnswer:
    """Return the answer with missing uids looked up on this machine."""
    missing = {buffer.user for buffer in answer.buffers if buffer.uid is None}
    missing |= {use.user for use in answer.uses if use.uid is None}
    known = {user: uid_of(user) for user in missing}
    replace = msgspec.structs.replace
    return replace(
        answer,
        buffers=tuple(replace(row, uid=row.uid if row.uid is not None else known[row.user]) for row in answer.buffers),
        uses=tuple(replace(row, uid=row.uid if row.uid is not None else known[row.user]) for row in answer.uses),
    )


@click.command("bbstat", context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@JSON_OPTION
def bbstat(arguments: tuple[str, ...], as_json: bool) -> None:
    """Print the status of the site's provider.

    ARGUMENTS are passed to slurm_bb_get_status (lua provider) or dwstat (datawarp), including unknown options, and all
    words after `--`.
    """
    asked = msgspec.json.encode(arguments).decode()
    answer = session().ask(lambda client: client.call(ops.SHOW_PROVIDER_STATUS, arguments=asked))
    present(answer, as_json, lambda: answer.text.removesuffix("\n"))
