"""The command line `forebay`: the global options, and which commands there are."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import sys
import threading
from typing import TYPE_CHECKING, Any, Final, NoReturn

import click

from cluster.cli.exits import bad_input
from cluster.cli.global_options import JSON_ANYWHERE, GlobalOption
from cluster.cli.group import SETTINGS, ForebayGroup, LazyCommands
from cluster.cli.session import CONFIG_VARIABLE, DEADLINE_S, DEADLINE_S_MAX, Session

if TYPE_CHECKING:
    from pathlib import Path

GARBAGE_THRESHOLD: Final = 100_000
"""Objects made and not freed before garbage is looked for, count: more than most commands make."""

COMPLETE_VARIABLE = "_FOREBAY_COMPLETE"
"""Environment variable through which a shell asks for completions."""

_MODULES: Final = {
    "commands.account": "account_group qos_group license_group reservation_group scheduling_group usage_group",
    "commands.buffer": "buffer_group burst bbstat",
    "commands.certificate": "certificate_group",
    "commands.cluster": "cluster_group overview session_group scheduler_group",
    "commands.config": "config_group",
    "drills.commands": "drill_group",
    "commands.history": "history_group diff",
    "commands.job": "job_group",
    "commands.local": "init up serve agent gateway recover ledger_group report_group snapshot_group whatif",
    "commands.member": "member_group",
    "commands.node": "node_group partition_group",
    "commands.pool": "place_group pool_group",
    "commands.slurm": "slurm_group",
    "commands.squeue": "queue",
    "commands.submit": "submit",
    "commands.transfer": "transfer_group",
    "witness_commands": "witness_group",
    "check": "check",
    "debug": "debug",
    "top": "top",
}
"""Module of `cluster.cli` -> the commands and groups of it that the outermost group has."""

COMMANDS: Final = {
    name.removesuffix("_group"): f"cluster.cli.{module}:{name}"
    for module, names in _MODULES.items()
    for name in names.split()
}
"""Name of a command -> where it is: imported when it is used, since most of a start is imports."""


SUMMARIES: Final = {
    "account": "Show and change accounts, their users, and limits.",
    "agent": "Run one node's agent in the foreground, as a service manager would: that needs --name.",
    "bbstat": "Pass ARGUMENTS to the site's provider and print what it says.",
    "buffer": "List buffers, and see to what is left in them.",
    "burst": "Show pools, settings, allocated buffers and their users, as `scontrol show burst` does.",
    "certificate": "Issue certificates and look at those there are.",
    "check": "Say whether this machine is ready for its replicas and agents, before they start.",
    "cluster": "Look at the cluster's feature level and time, and set them right.",
    "config": "Show, compare and change the site's configuration (operators).",
    "debug": "Write a file for whoever helps: cluster, replicas and this machine as they are now, without secrets.",
    "diff": "Show what is not what it was between two moments, and whose command changed each thing last.",
    "drill": "Exercise a take-over of the running cluster, or of a copy (operators).",
    "gateway": "Run a login node's gateway in the foreground: people there need no certificate.",
    "history": "Tell what happened, and what was refused: everything, or what is asked for, oldest first.",
    "init": "Write a new cluster's forebay.toml and certificates into DIRECTORY.",
    "job": "List, explain and steer jobs.",
    "ledger": "Verify, replay, decide again, print and prove what the ledger has.",
    "license": "Show and change licences, which jobs have while they run.",
    "member": "Look at the replicas, and change who they are: one at a time.",
    "node": "List, show, admit, drain and resume nodes, and declare them lost.",
    "overview": "Show the cluster at a glance: replicas, jobs, nodes, transfers, and what needs somebody.",
    "partition": "Show and change partitions: which nodes jobs may run on, for whom, and for how long.",
    "place": "List and change places: file systems that all nodes mount.",
    "pool": "List and change pools.",
    "qos": "Show and change qualities of service: priority and limits.",
    "queue": "List jobs as squeue does, by default those that have not ended.",
    "recover": "Make a cluster of what one replica has left, after a majority was lost for good.",
    "report": "Draw what happened, offline, from a replica's ledger.",
    "reservation": "Show and change reservations of burst-buffer space.",
    "scheduling": "Show and change the site's rules of scheduling.",
    "serve": "Run one replica in the foreground, as a service manager would.",
    "scheduler": "Show other schedulers that have external jobs here: buffers whose jobs are theirs.",
    "session": "Show and close sessions of programs: the answers to their commands are kept until they have arrived.",
    "slurm": "Be the burst buffer of a Slurm: its bridge, and what is written on its hosts.",
    "snapshot": "Save, fetch, inspect and restore snapshots.",
    "submit": "Submit batch scripts, or - for standard input.",
    "top": "Draw the cluster on the whole terminal, again and again, until q.",
    "transfer": "Show what is moved, how far it is, and the receipts of what was moved.",
    "up": "Run a whole cluster of this machine in the foreground; Ctrl-C ends it.",
    "usage": "List and reset what accounts and QOS have used of burst buffers, which GrpBBMinutes limits.",
    "whatif": "Go through a window of the ledger again with something changed, and say what would have been.",
    "witness": "Cosign what the ledgers of others grow to, in the foreground: needs --key, --listen and --keys.",
}
"""What the help says of each command: its own first sentence, said here as well because the help of all of them would
import all of them."""


class _PathType(click.Path):
    """A path as a `pathlib.Path`, which is imported where one is given."""

    def coerce_path_result(self, value: Any) -> Path:
        """Return the path."""
        from pathlib import Path

        return Path(value)


def _show_version(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value and not context.resilient_parsing:
        click.echo(f"forebay, version {_version()}")
        context.exit()


def _version() -> str:
    import importlib.metadata

    try:
        return importlib.metadata.version("forebay")
    except importlib.metadata.PackageNotFoundError:
        return "of a source tree"


@click.group(cls=ForebayGroup, commands=LazyCommands(COMMANDS, SUMMARIES), context_settings=SETTINGS)
@click.option(
    "--config",
    "config_path",
    cls=GlobalOption,
    type=_PathType(),
    envvar=CONFIG_VARIABLE,
    metavar="FILE",
    help="The cluster's configuration.  [default: $FOREBAY_CONFIG, or forebay.toml here, in ~/.config/forebay or in "
    "/etc/forebay]",
)
@click.option(
    "--identity",
    "--user",
    "identity",
    cls=GlobalOption,
    envvar="FOREBAY_IDENTITY",
    metavar="NAME",
    help="Whose certificate of the tls directory to use.  [default: $FOREBAY_IDENTITY, or none: you come as your own "
    "account, by this machine's gateway, by MUNGE, or with the certificate of its name]",
)
@click.option(
    "--stale", cls=GlobalOption, is_flag=True, help="Let any replica answer reads at once, perhaps not with the latest."
)
@click.option(
    "--deadline",
    "deadline_s",
    cls=GlobalOption,
    type=click.FloatRange(0, DEADLINE_S_MAX, min_open=True),
    default=DEADLINE_S,
    metavar="SECONDS",
    show_default=True,
    help="How long to wait for an answer, retries included.",
)
@JSON_ANYWHERE
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_show_version,
    help="Show the version and exit.",
)
@click.pass_context
def cli(context: click.Context, config_path: Path | None, identity: str | None, stale: bool, deadline_s: float) -> None:
    """Forebay, a highly available burst-buffer controller.

    Start with `forebay init DIRECTORY` and `forebay --config DIRECTORY/forebay.toml up`. Results go to stdout, remarks
    and errors to stderr. These options may stand anywhere on the command line; of a command that has one of the same
    name, what stands after its name is its own.
    """
    if context.obj is None:
        context.obj = Session(config_path=config_path, identity=identity, stale=stale, deadline_s=deadline_s)


@cli.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print a completion script: eval "$(forebay completion bash)"."""
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    if found is None:
        raise bad_input(f"there is no completion for {shell!r}", "use bash, zsh or fish")
    # The class's own source() would run the shell to look at its version; the template is all that is wanted here.
    source = found(cli, {}, "forebay", COMPLETE_VARIABLE)
    click.echo(source.source_template % source.source_vars())


def main() -> None:
    """Run the command line; never returns."""
    # What a command makes mostly lives as long as it does: looking for garbage finds none, again and again.
    gc.set_threshold(GARBAGE_THRESHOLD)
    try:
        cli(prog_name="forebay", complete_var=COMPLETE_VARIABLE)
    except SystemExit as end:
        if isinstance(end.code, int) and threading.active_count() == 1:
            _leave(end.code)
        raise


def _leave(code: int) -> NoReturn:
    """End the process after its exit handlers: taking the interpreter apart would be a tenth of a short command."""
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
