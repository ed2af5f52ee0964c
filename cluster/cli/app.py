"""The command line `forebay`: the global options, and which commands there are."""

import importlib.metadata
from pathlib import Path
from typing import Any

import click
from click.shell_completion import get_completion_class

from cluster.cli.accounting import (
    account_group,
    estimate,
    license_group,
    qos_group,
    reservation_group,
    scheduling_group,
)
from cluster.cli.audit_commands import audit_commands, words_of
from cluster.cli.bbstat import bbstat
from cluster.cli.burst import burst
from cluster.cli.capacity import buffer_group, node_group, pool_group
from cluster.cli.certificates import certificate_group
from cluster.cli.configuration import config_group
from cluster.cli.exits import bad_input
from cluster.cli.group import SETTINGS, ForebayGroup
from cluster.cli.jobs import job_group
from cluster.cli.levels import cluster_group
from cluster.cli.local import agent, init, serve, start_audit, up
from cluster.cli.members import member_group, save_snapshot
from cluster.cli.partitions import GROUPS
from cluster.cli.pools import POOL_COMMANDS
from cluster.cli.runs import BUFFER_COMMANDS, JOB_COMMANDS
from cluster.cli.session import CONFIG_VARIABLE, DEADLINE_S, DEADLINE_S_MAX, Session, session
from cluster.cli.squeue import queue
from cluster.cli.submit import submit
from cluster.cli.transfers import transfer_group
from cluster.cli.updates import update
from cluster.config import OPERATOR_NAME

COMPLETE_VARIABLE = "_FOREBAY_COMPLETE"
"""Environment variable through which a shell asks for completions."""


def _version() -> str:
    try:
        return importlib.metadata.version("forebay")
    except importlib.metadata.PackageNotFoundError:
        return "of a source tree"


@click.group(cls=ForebayGroup, context_settings=SETTINGS)
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


@cli.group("ledger")
def ledger_group() -> None:
    """Verify, replay and print a replica's ledger, offline."""


@cli.group("snapshot")
def snapshot_group() -> None:
    """Save and inspect snapshots."""


def _perform_audit(words: tuple[str, ...], options: dict[str, Any]) -> None:
    command = click.get_current_context().command
    start_audit(session(), [*words, *words_of(command, options)])


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


_ledger_commands, _inspect = audit_commands(_perform_audit)
for _command in _ledger_commands:
    ledger_group.add_command(_command)
snapshot_group.add_command(save_snapshot)
snapshot_group.add_command(_inspect)
for _command in (init, up, serve, agent, submit, burst, bbstat, queue):
    cli.add_command(_command)
for _command in (*JOB_COMMANDS, estimate, update):
    job_group.add_command(_command)
for _command in BUFFER_COMMANDS:
    buffer_group.add_command(_command)
for _command in POOL_COMMANDS:
    pool_group.add_command(_command)
for _group in (
    job_group,
    pool_group,
    buffer_group,
    transfer_group,
    node_group,
    member_group,
    cluster_group,
    config_group,
    certificate_group,
    account_group,
    qos_group,
    license_group,
    reservation_group,
    scheduling_group,
    *GROUPS,
):
    cli.add_command(_group)


def main() -> None:
    """Run the command line; never returns."""
    cli(prog_name="forebay", complete_var=COMPLETE_VARIABLE)
