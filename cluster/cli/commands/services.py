"""Commands `forebay run …`: start one process of a cluster, for units of a service manager."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click

from forebay.cluster.cli.commands.local_cluster import become, module_command
from forebay.cluster.cli.commands.options import LOG_FORMAT_OPTION
from forebay.cluster.cli.session import session
from forebay.cluster.slurm import RUN
from forebay.cluster.system import hold_termination

# An unreadable directory is reported by the process that uses it.
_DIRECTORY: Final = click.Path(path_type=Path, file_okay=False, readable=False)


@click.command("replica")
@click.option("--name", required=True, help="Run this replica.")
@click.option("--first-start", is_flag=True, help="Start without data: the replica has never run before.")
@click.option("--join", is_flag=True, help="Join as an added or replaced member; no effect on a replica with data.")
@click.option(
    "--found-without",
    multiple=True,
    metavar="NAME",
    help="Create the cluster without this replica, which has never run; repeatable.",
)
@LOG_FORMAT_OPTION
def replica(name: str, first_start: bool, join: bool, found_without: tuple[str, ...]) -> None:
    """Run a replica.

    A replica without data starts only if `forebay cluster init` created its directory, or with --first-start. Never use
    it for a replica that lost its data, because the other replicas rely on the lost votes and entries (see `forebay
    cluster replace`). A new cluster starts once every founding replica has confirmed that it has no history.
    """
    config = session().config()
    for one in (name, *found_without):
        config.replica(one)  # reject an unknown name before another program starts
    words = [*(["--first-start"] if first_start else []), *(["--join"] if join else [])]
    words += [word for one in found_without for word in ("--found-without", one)]
    hold_termination()
    become(module_command("forebay.cluster.serve", "--config", str(config.file), "--name", name, *words))


@click.command("agent")
@click.option("--name", required=True, metavar="NODE", help="Run the agent of this node.")
@click.option("--mover", is_flag=True, help="Only move data for shared filesystems mounted here; run no scripts.")
@LOG_FORMAT_OPTION
def agent(name: str, mover: bool) -> None:
    """Run a node's agent."""
    config = session().config()
    config.agent(name)  # reject an unknown name before another program starts
    hold_termination()
    words = ("--mover",) if mover else ()
    become(module_command("forebay.cluster.agent", "--config", str(config.file), "--name", name, *words))


@click.command("gateway")
@click.option("--name", required=True, help="Use this certificate, which has the role gateway.")
@LOG_FORMAT_OPTION
def gateway(name: str) -> None:
    """Run a login node's gateway.

    With a gateway, users of the machine need no certificate. It listens on the [access] socket, gets each caller's
    account from the kernel, and forwards requests in that user's name.
    """
    current = session()
    file = current.config_file()
    current.config().tls_files(name)  # reject missing files before another program starts
    hold_termination()
    become(module_command("forebay.cluster.gateway", "--config", str(file), "--name", name))


@click.command("bridge")
@LOG_FORMAT_OPTION
@click.option("--name", required=True, help="Use this certificate; it must have the role scheduler.")
@click.option("--state", type=_DIRECTORY, required=True, help="Read slurmctld's StateSaveLocation here.")
@click.option("--run", type=_DIRECTORY, default=RUN, show_default=True, help="Keep files and the socket here.")
@click.option(
    "--metrics",
    type=click.Path(path_type=Path),
    metavar="FILE.prom",
    help="Write counters for Prometheus to this file.",
)
@click.option(
    "--when-away",
    type=click.Choice(["refuse", "accept"]),
    default="refuse",
    show_default=True,
    help="Refuse or accept jobs that request a buffer while the bridge is down.",
)
def bridge(name: str, state: Path, run: Path, metrics: Path | None, when_away: str) -> None:
    """Run the bridge between a slurmctld and the cluster.

    Run it on each host of a slurmctld, as SlurmUser. Exit code 78 means that a restart does not help: the configuration
    or certificate is invalid, or the name belongs to another Slurm cluster. Exit code 1 means that the bridge cannot
    write its files.
    """
    words = ["--name", name, "--state", str(state), "--run", str(run), "--when-away", when_away]
    if metrics is not None:
        words += ["--metrics", str(metrics)]
    hold_termination()
    # The bridge itself reports configuration errors, with its exit code for errors that a restart cannot fix.
    become(module_command("forebay.cluster.slurm", "--config", str(session().config_file()), *words))


@click.command("helper")
@click.option("--name", required=True, help="Run the helper of this [[helper]] table.")
@LOG_FORMAT_OPTION
def helper(name: str) -> None:
    """Run this machine's helper for drills.

    The helper injects the faults that [drill] allows into replicas and agents of its machine, and undoes them when the
    drill ends or its coordinator disappears. Between drills it only waits for connections.
    """
    config = session().config()
    config.helper(name)  # reject an unknown name before another program starts
    hold_termination()
    become(module_command("forebay.cluster.drills.helper", "--config", str(config.file), "--name", name))
