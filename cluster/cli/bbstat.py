"""`forebay bbstat ARGS…`: what the site's burst-buffer provider says of itself, as `scontrol show bbstat` prints it."""

import click

from cluster.cli.jobs import JSON_OPTION
from cluster.cli.output import show_json
from cluster.cli.session import session


@click.command("bbstat", context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@JSON_OPTION
def bbstat(arguments: tuple[str, ...], as_json: bool) -> None:
    """Pass ARGUMENTS to the site's provider and print what it says.

    With the lua provider they go to slurm_bb_get_status, with datawarp to dwstat. Words that begin with a dash and are
    no option of this command are passed on too; after `--` all are.
    """
    answer = session().ask(lambda client: client.bbstat(arguments))
    if as_json:
        show_json(answer)
    else:
        click.echo(answer.text, nl=not answer.text.endswith("\n"))
