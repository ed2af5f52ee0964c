"""Commands `forebay run …`: start one process of a cluster, for units of a service manager."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click

from cluster.cli.commands.local_cluster import become, module_command
from cluster.cli.commands.options import LOG_FORMAT_OPTION
from cluster.cli.session import session
from cluster.slurm import RUN
from cluster.system import hold_termination

# An unreadable directory is reported by the process that uses it.
_DIRECTORY: Final = click.Path(path_type=Path, file_okay=False, readable=False)


@click.command("replica")
@click.option("--name", required=True, help="Replica to run.")
@click.option(
    "--first-start", is_flag=True, help="Start empty: the replica has never run, and `cluster init` was not run here."
)
@click.option("--join", is_flag=True, help="Join as an added or replaced member; no effect on a replica with data.")
@click.option(
    "--found-without",
    multiple=True,
    metavar="NAME",
    help="Found the cluster without this replica, which never ran; repeatable.",
)
@LOG_FORMAT_OPTION
def replica(name: str, first_start: bool, join: bool, found_without: tuple[str, ...]) -> None:
    """Run a replica.

    A replica without data is refused, unless `forebay cluster init` made its directory or --first-start says that it
    has never run: one that lost its data has forgotten votes and entries that the others count on. Where another
    founder has a history it is refused too, and to found the cluster takes the word of every founder that it is new.
    """
    config = session().config()
    for one in (name, *found_without):
        config.replica(one)  # reject an unknown name before another program starts
    words = [*(["--first-start"] if first_start else []), *(["--join"] if join else [])]
    words += [word for one in found_without for word in ("--found-without", one)]
    hold_termination()
    become(module_command("cluster.serve", "--config", str(config.file), "--name", name, *words))


@click.command("agent")
@click.option("--name", required=True, metavar="NODE", help="Run the agent of this node of the configuration.")
@click.option("--mover", is_flag=True, help="Only move data for the shared filesystems mounted here; run no scripts.")
@LOG_FORMAT_OPTION
def agent(name: str, mover: bool) -> None:
    """Run a node's agent."""
    config = session().config()
    config.agent(name)  # reject an unknown name before another program starts
    hold_termination()
    words = ("--mover",) if mover else ()
    become(module_command("cluster.agent", "--config", str(config.file), "--name", name, *words))


@click.command("gateway")
@click.option("--name", required=True, help="Name of its certificate, of the role gateway.")
@LOG_FORMAT_OPTION
def gateway(name: str) -> None:
    """Run a login node's gateway.

    Users on that machine need no certificate.

    It listens at [access] socket, takes each caller for the account that the kernel says it is, and speaks to the
    replicas in its name.
    """
    current = session()
    file = current.config_file()
    current.config().tls_files(name)  # reject missing files before another program starts
    hold_termination()
    become(module_command("cluster.client.gateway", "--config", str(file), "--name", name))


@click.command("bridge")
@LOG_FORMAT_OPTION
@click.option("--name", required=True, help="Name of its certificate, of the role scheduler.")
@click.option("--state", type=_DIRECTORY, required=True, help="StateSaveLocation of slurm.conf.")
@click.option("--run", type=_DIRECTORY, default=RUN, show_default=True, help="Directory for its files and socket.")
@click.option(
    "--metrics",
    type=click.Path(path_type=Path),
    metavar="FILE.prom",
    help="Write counters for Prometheus there.",
)
@click.option(
    "--when-away",
    type=click.Choice(["refuse", "accept"]),
    default="refuse",
    show_default=True,
    help="Refuse or accept jobs with a buffer while no bridge runs.",
)
def bridge(name: str, state: Path, run: Path, metrics: Path | None, when_away: str) -> None:
    """Run the bridge between a slurmctld and the cluster.

    One on each host of a slurmctld, as SlurmUser. It ends with 78 where starting it again does not help: the
    configuration or the certificate is refused, or another cluster has external jobs under this name. 1: it cannot
    write.
    """
    words = ["--name", name, "--state", str(state), "--run", str(run), "--when-away", when_away]
    if metrics is not None:
        words += ["--metrics", str(metrics)]
    hold_termination()
    # The bridge itself reports configuration errors, with its exit code for errors that a restart cannot fix.
    become(module_command("cluster.slurm", "--config", str(session().config_file()), *words))


@click.command("helper")
@click.option("--name", required=True, help="Helper to run.")
@LOG_FORMAT_OPTION
def helper(name: str) -> None:
    """Run this machine's helper for drills.

    It does to the replicas and agents of its machine what [drill] allows, for as long as who carries a drill out is
    there, and undoes it. Between drills it waits for a connection, and does nothing.
    """
    config = session().config()
    config.helper(name)  # reject an unknown name before another program starts
    hold_termination()
    become(module_command("cluster.drill", "--config", str(config.file), "--name", name))
