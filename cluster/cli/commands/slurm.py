"""`forebay slurm …`: Forebay as the burst buffer of an unmodified Slurm, on the hosts of its slurmctld."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import msgspec

from cluster.cli.commands.local_cluster import become, module_command
from cluster.cli.commands.options import LOG_FORMAT_OPTION
from cluster.cli.exits import ExitCode, Failure, bad_input
from cluster.cli.global_options import JSON_OPTION, CommandGroup
from cluster.cli.session import session
from cluster.cli.text import note, present, show_json
from cluster.slurm import RUN
from cluster.system import hold_termination
from replica.model import DEFAULT_SITE
from replica.values import plain

if TYPE_CHECKING:
    from cluster.slurm.checks import SlurmSettings
    from cluster.slurm.install import Layout

# Who may not read one hears it of what is done with it.
_DIRECTORY: Final = click.Path(path_type=Path, file_okay=False, readable=False)


class InstallAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What `slurm install --json` prints: paths, and sentences."""

    written: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    """What was changed since Forebay wrote it."""
    to_do: tuple[str, ...] = ()
    """What is left to be done, or wrong."""


@click.group("slurm", cls=CommandGroup)
def slurm_group() -> None:
    """Be the burst buffer of a Slurm: its bridge, and what is written on its hosts."""


@slurm_group.command("bridge")
@LOG_FORMAT_OPTION
@click.option("--name", required=True, help="The scheduler, as its certificate (role scheduler) names it.")
@click.option("--state", type=_DIRECTORY, required=True, help="StateSaveLocation of slurm.conf.")
@click.option("--run", type=_DIRECTORY, default=RUN, show_default=True, help="Where files and socket are.")
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
    help="What becomes of jobs with a buffer that are submitted while no bridge runs.",
)
def bridge(name: str, state: Path, run: Path, metrics: Path | None, when_away: str) -> None:
    """Run the bridge between a slurmctld and the cluster in the foreground, as a service manager would.

    One on each host of a slurmctld, as SlurmUser. It ends with 78 where starting it again does not help: the
    configuration or the certificate is refused, or another cluster has external jobs under this name. 1: it cannot
    write.
    """
    words = ["--name", name, "--state", str(state), "--run", str(run), "--when-away", when_away]
    if metrics is not None:
        words += ["--metrics", str(metrics)]
    hold_termination()
    # What is wrong with the configuration is said there: one exit code for all that a restart does not mend.
    become(module_command("cluster.slurm", "--config", str(session().config_file()), *words))


@slurm_group.command("install")
@click.option("--plugin", type=click.Choice(["lua", "datawarp"]), default="lua", show_default=True, help="For which.")
@click.option(
    "--conf-dir", "conf", type=_DIRECTORY, required=True, metavar="DIR", help="Where slurm.conf is, e.g. /etc/slurm."
)
@click.option("--check", is_flag=True, help="Change nothing; print what is wrong, a line each, and exit with 1.")
@click.option("--remove", "removes", is_flag=True, help="Remove what was written, and nothing else.")
@click.option("--name", help="The scheduler, as its certificate names it.  [default: ClusterName of slurm.conf]")
@click.option(
    "--program-dir", "programs", type=_DIRECTORY, default=Path("/usr/libexec/forebay"), show_default=True,
    metavar="DIR", help="Where the programs are put that Slurm calls.",
)  # fmt: skip
@click.option(
    "--unit-dir", "units", type=_DIRECTORY, default=Path("/etc/systemd/system"), show_default=True, metavar="DIR",
    help="Where the bridge's unit file is put.",
)  # fmt: skip
@click.option("--run", type=_DIRECTORY, default=RUN, show_default=True, help="Where the bridge has files and socket.")
@click.option(
    "--setup-wait", "setup_wait_s", type=click.IntRange(0), default=DEFAULT_SITE.external_job_setup_wait_s,
    show_default=True, metavar="SECONDS", help="ExternalJobSetupWait of the site's configuration, if it was changed.",
)  # fmt: skip
@JSON_OPTION
def install(
    plugin: str, conf: Path, check: bool, removes: bool, name: str | None, programs: Path, units: Path, run: Path,
    setup_wait_s: int, as_json: bool,
) -> None:  # fmt: skip
    """Write what a host of slurmctld needs beside Forebay: script, fragments of configuration, unit file.

    What somebody else wrote is never changed: the lines to add to it are printed. Slurm and the bridge are never
    started or stopped: what to type is printed.
    """
    from cluster.slurm.checks import NoSlurm, read_slurm_conf
    from cluster.slurm.install import InstallRefused, Layout, known_plugin
    from cluster.slurm.install import install as write

    if check and removes:
        raise bad_input("--check and --remove are two things", "give one of them")
    conf = Path(os.path.abspath(conf))
    try:
        slurm = read_slurm_conf(conf)
        if removes:
            _remove(conf, slurm, as_json)
            return
        layout = Layout(
            plugin=plugin,
            conf=conf,
            programs=Path(os.path.abspath(programs)),
            units=Path(os.path.abspath(units)),
            run=Path(os.path.abspath(run)),
            config=Path(os.path.abspath(session().config_file())),
            scheduler=name or slurm.cluster,
            forebay=_forebay(),
        )
        if check:
            found = _findings(layout, slurm, setup_wait_s)
            lines = [plain(line) for line in found]
            lines = lines or [f"All is well: slurmctld uses Forebay by burst_buffer/{plugin}."]
            present(InstallAnswer(to_do=tuple(found)), as_json, lambda: "\n".join(lines))
            if found:
                sys.exit(int(ExitCode.REFUSED))
            return
        again = known_plugin(conf) == plugin
        changed = write(layout, slurm)
    except (NoSlurm, InstallRefused) as error:
        *first, last = str(error).splitlines()
        for line in first:
            note(f"forebay: {plain(line)}")
        sentence, _, remedy = last.rpartition("; ")
        raise Failure(ExitCode.REFUSED, plain(sentence or remedy), plain(remedy) if sentence else "") from error
    except OSError as error:
        what = f"{error.filename}: " if error.filename else ""
        remedy = "see to that, and do it again; nothing is half done"
        raise Failure(ExitCode.REFUSED, f"{what}{error.strerror or error}", remedy) from error
    left = _findings(layout, slurm, setup_wait_s)
    if as_json:
        show_json(InstallAnswer(written=tuple(map(str, changed)), to_do=tuple(left)))
        return
    for path in changed:
        click.echo(f"Wrote {path}")
    for line in left:
        note(f"forebay: to do: {plain(line)}")
    note("Next, on this host:")
    start = f"systemctl restart {_unit()}" if again else f"systemctl enable --now {_unit()}"
    for line in ("systemctl daemon-reload", start, "systemctl restart slurmctld"):
        note(f"  {line}")


def _unit() -> str:
    from cluster.slurm.install import UNIT

    return UNIT.removesuffix(".service")


def _remove(conf: Path, slurm: SlurmSettings, as_json: bool) -> None:
    from cluster.slurm.install import remove
    from cluster.slurm.slurmctld import buffers_in_use

    removed = remove(conf, slurm, buffers_in_use(conf))
    if as_json:
        show_json(InstallAnswer(removed=tuple(map(str, removed.gone)), kept=tuple(map(str, removed.kept))))
        return
    for path in removed.gone:
        click.echo(f"Removed {path}")
    for path in removed.kept:
        note(f"forebay: kept {path}: it was changed since Forebay wrote it; remove it by hand if nobody wants it")
    if not removed.gone and not removed.kept:
        click.echo("There is nothing to remove.")
        return
    note("Next, on this host:")
    note(f"  systemctl disable --now {_unit()}; systemctl daemon-reload")


def _findings(layout: Layout, slurm: SlurmSettings, setup_wait_s: int) -> list[str]:
    """Return all that is wrong, a line each."""
    from cluster.agent.files import PlaceRefused, places
    from cluster.config import Config, ConfigError, read_access
    from cluster.security import TlsRefused
    from cluster.slurm.checks import certificate_fault, reach_faults
    from cluster.slurm.install import obstacles, remaining

    found = obstacles(layout, slurm)
    found += remaining(layout, slurm, setup_wait_s)
    try:
        access = read_access(layout.config)
        fault = certificate_fault(access, layout.scheduler, session().clock.now())
        found += [fault] if fault else reach_faults(access, layout.scheduler, slurm, layout.forebay)
        for place in Config.load(layout.config).places:
            try:
                places.identity_at(place.path)
            except PlaceRefused as error:
                found.append(f"{place.path}: place {place.name}: {error}")
    except (ConfigError, TlsRefused) as error:
        found.append(str(error))
    return list(dict.fromkeys(line.replace("\n", " ") for line in found))


def _forebay() -> tuple[Path, ...]:
    """Return the command `forebay` of this installation, and what else of it is run."""
    import cluster

    command = Path(sys.executable).with_name("forebay")
    if not command.exists():
        raise bad_input(f"there is no {command}", "install Forebay as a package: pip install forebay")
    return (command, Path(sys.executable), Path(cluster.__path__[0]))
