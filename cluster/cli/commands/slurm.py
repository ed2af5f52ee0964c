"""Commands `forebay slurm …`: set up Forebay as the burst buffer of an unmodified Slurm, and list its jobs."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import msgspec

from forebay.cluster.cli.commands.job import LIMIT, LIMIT_MAX, UNFINISHED, answer_time, list_jobs
from forebay.cluster.cli.commands.options import AT_OPTION
from forebay.cluster.cli.confirmation import confirm_first
from forebay.cluster.cli.exits import ExitCode, Failure, bad_input
from forebay.cluster.cli.global_options import JSON_OPTION
from forebay.cluster.cli.session import session
from forebay.cluster.cli.text import external_jobs_table, format_time, note, present, show, show_json, table
from forebay.cluster.schemas import operations as ops
from forebay.cluster.slurm import RUN
from forebay.replica.model import DEFAULT_SITE
from forebay.replica.values import plain

if TYPE_CHECKING:
    from forebay.cluster.slurm.checks import SlurmSettings
    from forebay.cluster.slurm.install import Layout

# An unreadable directory is reported by the operation that uses it.
_DIRECTORY: Final = click.Path(path_type=Path, file_okay=False, readable=False)


class InstallAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Output of `slurm install --json`: paths of files, and next steps."""

    written: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    """Files that were edited after Forebay wrote them."""
    to_do: tuple[str, ...] = ()
    """Remaining steps and faults."""


@click.command("install")
@click.option(
    "--plugin", type=click.Choice(["lua", "datawarp"]), default="lua", show_default=True, help="Use this Slurm plugin."
)
@click.option(
    "--conf-dir",
    "conf",
    type=_DIRECTORY,
    required=True,
    metavar="DIR",
    help="Use the slurm.conf in this directory, for example /etc/slurm.",
)
@click.option("--check", is_flag=True, help="Only list faults of the installation; exit with 1 if there are any.")
@click.option("--remove", "removes", is_flag=True, help="Remove the files that were installed.")
@click.option("--name", help="Use this scheduler certificate.  [default: ClusterName of slurm.conf]")
@click.option(
    "--program-dir", "programs", type=_DIRECTORY, default=Path("/usr/libexec/forebay"), show_default=True,
    metavar="DIR", help="Install the programs that Slurm calls here.",
)  # fmt: skip
@click.option(
    "--unit-dir", "units", type=_DIRECTORY, default=Path("/etc/systemd/system"), show_default=True, metavar="DIR",
    help="Install the bridge's unit file here.",
)  # fmt: skip
@click.option("--run", type=_DIRECTORY, default=RUN, show_default=True, help="Keep the bridge's files and socket here.")
@click.option(
    "--setup-wait", "setup_wait_s", type=click.IntRange(0), default=DEFAULT_SITE.external_job_setup_wait_s,
    show_default=True, metavar="SECONDS", help="Use this value as the site's ExternalJobSetupWait.",
)  # fmt: skip
@JSON_OPTION
def install(
    plugin: str, conf: Path, check: bool, removes: bool, name: str | None, programs: Path, units: Path, run: Path,
    setup_wait_s: int, as_json: bool,
) -> None:  # fmt: skip
    """Write the script, configuration and unit for slurmctld.

    Existing files of the site are not changed; the command prints the lines to add to them, and the commands that
    restart Slurm and the bridge.
    """
    from forebay.cluster.slurm.checks import NoSlurm, read_slurm_conf
    from forebay.cluster.slurm.install import InstallRefused, Layout, known_plugin
    from forebay.cluster.slurm.install import install as write

    if check and removes:
        raise bad_input("--check and --remove exclude each other", "use one of them")
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
            lines = lines or [f"No faults found: slurmctld uses Forebay through burst_buffer/{plugin}."]
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
        remedy = "correct this and run the command again; it left no partial files"
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
    from forebay.cluster.slurm.install import UNIT

    return UNIT.removesuffix(".service")


def _remove(conf: Path, slurm: SlurmSettings, as_json: bool) -> None:
    from forebay.cluster.slurm.install import remove
    from forebay.cluster.slurm.slurmctld import buffers_in_use

    removed = remove(conf, slurm, buffers_in_use(conf))
    if as_json:
        show_json(InstallAnswer(removed=tuple(map(str, removed.gone)), kept=tuple(map(str, removed.kept))))
        return
    for path in removed.gone:
        click.echo(f"Removed {path}")
    for path in removed.kept:
        note(f"forebay: kept {path}, which was changed after Forebay wrote it; remove it by hand if it is not needed")
    if not removed.gone and not removed.kept:
        click.echo("There is nothing to remove.")
        return
    note("Next, on this host:")
    note(f"  systemctl disable --now {_unit()}; systemctl daemon-reload")


def _findings(layout: Layout, slurm: SlurmSettings, setup_wait_s: int) -> list[str]:
    """Return all faults of the installation, one line each."""
    from forebay.cluster.agent.files import FilesystemRefused, filesystems
    from forebay.cluster.config import Config, ConfigError, read_access
    from forebay.cluster.security import TlsError
    from forebay.cluster.slurm.checks import certificate_fault, reach_faults
    from forebay.cluster.slurm.install import obstacles, remaining

    found = obstacles(layout, slurm)
    found += remaining(layout, slurm, setup_wait_s)
    try:
        access = read_access(layout.config)
        fault = certificate_fault(access, layout.scheduler, session().clock.now())
        found += [fault] if fault else reach_faults(access, layout.scheduler, slurm, layout.forebay)
        for filesystem in Config.load(layout.config).filesystems:
            try:
                filesystems.identity_at(filesystem.path)
            except FilesystemRefused as error:
                found.append(f"{filesystem.path}: shared filesystem {filesystem.name}: {error}")
    except (ConfigError, TlsError) as error:
        found.append(str(error))
    return list(dict.fromkeys(line.replace("\n", " ") for line in found))


def _forebay() -> tuple[Path, ...]:
    """Return the files of this installation that Slurm must be able to run: the command, Python, the package."""
    import forebay.cluster

    command = Path(sys.executable).with_name("forebay")
    if not command.exists():
        raise bad_input(f"{command} does not exist", "install Forebay as a package: pip install forebay")
    return (command, Path(sys.executable), Path(forebay.cluster.__path__[0]))


@click.command("jobs")
@click.option("--all", "everything", is_flag=True, help="Include jobs that have ended.")
@click.option("--user", "owner", metavar="NAME", help="Only jobs of this user.")
@click.option(
    "--limit",
    type=click.IntRange(1, LIMIT_MAX),
    default=LIMIT,
    show_default=True,
    help="Show at most the newest N jobs.",
)
@AT_OPTION
@JSON_OPTION
def jobs(everything: bool, owner: str | None, limit: int, at: str | None, as_json: bool) -> None:
    """List external jobs (jobs that Slurm schedules)."""
    current = session()
    states = () if everything else UNFINISHED
    answer = current.ask(
        lambda client: list_jobs(client, states, owner, limit, stale=current.stale, external_jobs=True, at=at)
    )
    present(answer, as_json, lambda: external_jobs_table(answer.jobs, answer_time(answer, current.clock.now())))
    if answer.truncated:
        note(f"Only the newest {len(answer.jobs)} jobs are shown: use --limit or --user.")


@click.command("schedulers")
@JSON_OPTION
def list_schedulers(as_json: bool) -> None:
    """List external schedulers and their last addresses."""
    answer = session().read(ops.LIST_SCHEDULERS)
    if as_json:
        show_json(answer)
        return
    rows = [(row.scheduler, row.cluster, row.address, format_time(row.since)) for row in answer.schedulers]
    show(table(("SCHEDULER", "CLUSTER", "FROM", "SINCE"), rows))


@click.command("release")
@click.argument("name")
@JSON_OPTION
@confirm_first("Let another Slurm cluster take the scheduler name {name}?")
def release_scheduler(name: str, as_json: bool) -> None:
    """Let another cluster use a scheduler's name (operators).

    Use it after the Slurm cluster with this name was removed or renamed.
    """
    answer = session().write(ops.RELEASE_SCHEDULER, name=name)
    present(answer, as_json, lambda: f"Released {plain(name)}: the next Slurm cluster may take the name.")
