"""`forebay config …`: the site's configuration, which is replicated state: show, compare, apply."""

from pathlib import Path

import click

from cluster.cli.config_file import read_settings, settings_of
from cluster.cli.exits import bad_input
from cluster.cli.jobs import JSON_OPTION
from cluster.cli.output import note, show_json
from cluster.cli.session import session
from cluster.client import Client
from cluster.schemas import CompareAnswer
from replica.grammar import Setting
from replica.messages import BURST_BUFFERS_WHOLE
from replica.values import plain

NOTHING = "(nothing)"

_FILE = click.argument("file", type=click.Path(path_type=Path))
_PARTIAL = click.option("--partial", is_flag=True, help="Leave keys as they are that the file does not have.")
_EXPECT = click.option(
    "--expect-revision",
    type=click.IntRange(min=0),
    metavar="N",
    help="Refuse it if the configuration was changed after revision N.  [default: what is compared just before]",
)


@click.group("config")
def config_group() -> None:
    """Show, compare and change the site's configuration (operators)."""


@config_group.command("show")
@click.option(
    "--as",
    "form",
    type=click.Choice(["burst_buffer.conf"]),
    help="Print it as a file for Slurm, without what only Forebay knows.",
)
@JSON_OPTION
def show_configuration(form: str | None, as_json: bool) -> None:
    """Show the configuration, as a file that can be applied again."""
    if form is not None and as_json:
        raise bad_input("--as and --json exclude each other", "choose one of them")
    current = session()
    answer = current.ask(lambda client: client.configuration(stale=current.stale))
    if as_json:
        show_json(answer)
        return
    text = answer.burst_buffer_conf if form else answer.text
    click.echo(text, nl=False)
    note(f"revision {answer.revision}, last changed at revision {answer.changed_revision}")


@config_group.command("diff")
@_FILE
@_PARTIAL
@JSON_OPTION
def diff(file: Path, partial: bool, as_json: bool) -> None:
    """Show what applying FILE would change; nothing is changed."""
    settings = read_settings(file)
    answer = session().ask(lambda client: client.compare_configuration(settings, partial=partial))
    if as_json:
        show_json(answer)
    else:
        _print(answer)


@config_group.command("apply")
@_FILE
@click.option("--dry-run", is_flag=True, help="Show what would change, and change nothing.")
@_PARTIAL
@_EXPECT
@JSON_OPTION
def apply(file: Path, dry_run: bool, partial: bool, expect_revision: int | None, as_json: bool) -> None:
    """Apply a burst_buffer.conf as it is, with Forebay's own keys if it has any: all of it in one entry, or nothing.

    A key of burst_buffer.conf that FILE does not have gets Slurm's default; one of Forebay's own stays as it is.
    """
    _change(read_settings(file), partial, expect_revision, dry_run=dry_run, as_json=as_json)


@config_group.command("set")
@click.argument("settings", nargs=-1, required=True, metavar="KEY=VALUE...")
@click.option("--dry-run", is_flag=True, help="Show what would change, and change nothing.")
@_EXPECT
@JSON_OPTION
def set_keys(settings: tuple[str, ...], dry_run: bool, expect_revision: int | None, as_json: bool) -> None:
    """Change the keys that are named, in one entry, and leave all others as they are; KEY= alone sets its default."""
    _change(settings_of(settings), True, expect_revision, dry_run=dry_run, as_json=as_json)


def _change(
    settings: tuple[Setting, ...], partial: bool, expected: int | None, *, dry_run: bool, as_json: bool
) -> None:
    async def change(client: Client) -> CompareAnswer:
        compared = await client.compare_configuration(settings, partial=partial, expect_revision=expected)
        if not dry_run:
            # What is printed is what happens: a change of somebody else in between refuses this one.
            has_revision = compared.feature_level >= BURST_BUFFERS_WHOLE
            known = compared.revision if expected is None and has_revision else expected
            await client.configure(settings, partial=partial, expect_revision=known)
        return compared

    answer = session().ask(change)
    if as_json:
        show_json(answer)
        return
    _print(answer)
    if dry_run:
        note("nothing was changed: this was a dry run")
    elif answer.differences:
        note("changed, all of it in one entry")


def _print(answer: CompareAnswer) -> None:
    for row in answer.differences:
        click.echo(f"{row.key}: {plain(row.before) or NOTHING} -> {plain(row.after) or NOTHING}")
    if not answer.differences:
        note("no difference")
    note(f"compared at revision {answer.revision}; last changed at revision {answer.changed_revision}")
