"""The command line `forebay`: the global options, and which commands there are."""

import importlib.metadata
from pathlib import Path
from typing import Final

import click
from click.shell_completion import get_completion_class

from cluster.cli.exits import bad_input
from cluster.cli.group import SETTINGS, ForebayGroup, LazyCommands
from cluster.cli.session import CONFIG_VARIABLE, DEADLINE_S, DEADLINE_S_MAX, Session
from cluster.config import OPERATOR_NAME

COMPLETE_VARIABLE = "_FOREBAY_COMPLETE"
"""Environment variable through which a shell asks for completions."""

_MODULES: Final = {
    "account": "account_group qos_group license_group reservation_group scheduling_group usage_group",
    "buffer": "buffer_group burst bbstat",
    "certificate": "certificate_group",
    "cluster": "cluster_group session_group",
    "config": "config_group",
    "job": "job_group",
    "local": "init up serve agent ledger_group snapshot_group",
    "member": "member_group",
    "node": "node_group partition_group",
    "pool": "pool_group",
    "squeue": "queue",
    "submit": "submit",
    "transfer": "transfer_group",
}
"""Module of `cluster.cli.commands` -> the commands and groups of it that the outermost group has."""

COMMANDS: Final = {
    name.removesuffix("_group"): f"cluster.cli.commands.{module}:{name}"
    for module, names in _MODULES.items()
    for name in names.split()
}
"""Name of a command -> where it is: imported when it is used, since most of a start is imports."""


def _version() -> str:
    try:
        return importlib.metadata.version("forebay")
    except importlib.metadata.PackageNotFoundError:
        return "of a source tree"


@click.group(cls=ForebayGroup, commands=LazyCommands(COMMANDS), context_settings=SETTINGS)
@click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    envvar=CONFIG_VARIABLE,
    metavar="FILE",
    help="The cluster's configuration.  [default: $FOREBAY_CONFIG or ./forebay.toml]",
)
@click.option(
    "--identity",
    "--user",
    "identity",
    default=OPERATOR_NAME,
    envvar="FOREBAY_IDENTITY",
    metavar="NAME",
    help="Whose certificate of the tls directory to use.  [default: $FOREBAY_IDENTITY or operator]",
)
@click.option("--stale", is_flag=True, help="Let any replica answer reads at once, perhaps not with the latest.")
@click.option(
    "--deadline",
    "deadline_s",
    type=click.FloatRange(0, DEADLINE_S_MAX, min_open=True),
    default=DEADLINE_S,
    metavar="SECONDS",
    show_default=True,
    help="How long to wait for an answer, retries included.",
)
@click.version_option(_version(), prog_name="forebay")
@click.pass_context
def cli(context: click.Context, config_path: Path | None, identity: str, stale: bool, deadline_s: float) -> None:
    """Forebay, a highly available burst-buffer controller.

    Start with `forebay init DIRECTORY` and `forebay --config DIRECTORY/forebay.toml up`. Results go to stdout, remarks
    and errors to stderr; --json prints one JSON object on stdout and nothing else.
    """
    if context.obj is None:
        context.obj = Session(config_path=config_path, identity=identity, stale=stale, deadline_s=deadline_s)


@cli.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print a completion script: eval "$(forebay completion bash)"."""
    found = get_completion_class(shell)
    if found is None:
        raise bad_input(f"there is no completion for {shell!r}", "use bash, zsh or fish")
    # The class's own source() would run the shell to look at its version; the template is all that is wanted here.
    source = found(cli, {}, "forebay", COMPLETE_VARIABLE)
    click.echo(source.source_template % source.source_vars())


def main() -> None:
    """Run the command line; never returns."""
    cli(prog_name="forebay", complete_var=COMPLETE_VARIABLE)
