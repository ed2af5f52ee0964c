"""The command line of scripts/slurm."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.benchmarks.processes import ServerFailed
from tests.faults.ending import perform
from tests.slurm.exercises import EXERCISES, ROWS
from tests.slurm.releases import UNABLE, chosen_runs, exercise, root_command
from tests.slurm.results import FILE, PLUGINS
from tests.slurm.roots import RELEASES
from tests.slurm.site import RunFailed, Site, missing

PREFIX = "forebay-slurm."
PID, USE, STAYED_LOG = "pid", "use", "stay.log"
"""Files of a started site: its process, how to use it, and the output of the process."""

CI = "ci"
CI_SIZES = {"lifecycle": 0, "arrays": 1, "refusals": 1}
CI_ROWS = ("requests", "users", "transfers", "quota")
"""Exercises, sizes and rows of `refusals` that the exercise `ci` stands for."""


def main(arguments: list[str]) -> int:
    """Return the exit code: 0 if all checks passed, 1 if one failed, 77 if this machine cannot run them."""
    parser = argparse.ArgumentParser(prog="scripts/slurm", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    start = verbs.add_parser("start", help="start a site in the background, and say how to use it")
    stop = verbs.add_parser("stop", help="end such a site, and remove it")
    stop.add_argument("directory", type=Path, help="what `start` printed")
    does = verbs.add_parser("exercise", help="found a site, do exercises on it, and remove it; the last line is JSON")
    does.add_argument("names", choices=(*EXERCISES, CI), nargs="+", metavar="NAME")
    start.add_argument("--plugin", choices=PLUGINS, default="lua")
    does.add_argument("--plugin", choices=(*PLUGINS, "both"), help="default: lua; with --release both")
    does.add_argument("--slurm-user", metavar="ACCOUNT", help="SlurmUser; default: root, with --release 24.11 slurm")
    does.add_argument(
        "--release", choices=(*RELEASES, "all"), help="run in a root directory with this release of Slurm"
    )
    does.add_argument(
        "--turn", type=int, metavar="N", help="with --release: one exercise with one release, another with each N"
    )
    does.add_argument("--parallel", type=_positive, default=1, metavar="N", help="with --release: N runs at a time")
    does.add_argument(
        "--record", type=Path, nargs="?", const=FILE, help="with --release: write outcomes into this file"
    )
    root = verbs.add_parser("root", help="build the root directory of a release of Slurm, and run a command in it")
    root.add_argument("release", choices=RELEASES)
    root.add_argument("--renew", action="store_true", help="build it anew, with the version that the suite has now")
    root.add_argument("--network", action="store_true", help="run the command with the network of this machine")
    root.add_argument("command", nargs="*", help="command, after `--`; without one, print the directory")
    start.add_argument("--backup", action="store_true", help="slurmctld has a backup")
    start.add_argument("--stay", type=Path, help=argparse.SUPPRESS)
    does.add_argument("--rounds", "--jobs", type=int, dest="rounds", help="how often, or how many jobs")
    does.add_argument("--rows", default="", help="which rows of `refusals`, separated by commas; all unless told")
    does.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args(arguments)
    if chosen.verb == "root":
        return root_command(chosen)
    sizes: dict[str, int] = {}
    rows: list[str] = []
    if chosen.verb == "exercise":
        if chosen.release is None and (chosen.turn is not None or chosen.record or chosen.plugin == "both"):
            parser.error("--turn, --record and --plugin both need --release")
        sizes, rows = _sizes_and_rows(chosen, parser)
        if chosen.release is not None:
            lines = _lines(chosen, sizes, rows)
            runs = chosen_runs(chosen.release, chosen.plugin or "both", lines, chosen.turn)
            signal.signal(signal.SIGTERM, _interrupt)
            return exercise(chosen, runs)
    reason = missing()
    if reason:
        print(f"scripts/slurm: {reason}", file=sys.stderr)
        return UNABLE
    if chosen.verb == "stop":
        return _stop(chosen.directory)
    if chosen.verb == "start":
        if chosen.stay:
            return _stay(Site(chosen.stay, plugin=chosen.plugin, backup=chosen.backup))
        return _start(arguments)
    options = _site_options(sizes, parser)
    directory = Path(tempfile.mkdtemp(prefix=PREFIX))
    site = Site(directory, plugin=chosen.plugin or "lua", rows=rows, user=chosen.slurm_user or "root", **options)
    return _exercise(sizes, site, directory, chosen.seed)


def _sizes_and_rows(chosen: argparse.Namespace, parser: argparse.ArgumentParser) -> tuple[dict[str, int], list[str]]:
    """Return the exercises of a command line with their sizes, and the rows of `refusals`; `ci` gives both."""
    rows = [row for row in chosen.rows.split(",") if row]
    if unknown := set(rows) - set(ROWS):
        parser.error(f"--rows: there is no {', '.join(sorted(unknown))}; rows are {', '.join(ROWS)}")
    if chosen.names == [CI]:
        if chosen.rounds is not None or rows:
            parser.error("ci has its own sizes and rows: leave out --rounds and --rows")
        return CI_SIZES, list(CI_ROWS)
    if CI in chosen.names:
        parser.error("ci is run alone: leave out the other exercises")
    sizes = {name: EXERCISES[name].size if chosen.rounds is None else chosen.rounds for name in chosen.names}
    _site_options(sizes, parser)
    return sizes, rows


def _lines(chosen: argparse.Namespace, sizes: dict[str, int], rows: list[str]) -> list[list[str]]:
    """Return what a run in a root can be: the whole command line or, with `--turn`, one exercise or a half of `ci`."""
    rounds = [] if chosen.rounds is None else ["--rounds", str(chosen.rounds)]
    more = rounds + (["--rows", chosen.rows] if chosen.rows else [])
    if chosen.turn is None:
        return [[*chosen.names, *more]]
    if chosen.names == [CI]:
        short = [name for name in sizes if name != "refusals"]
        return [[*short, "--rounds", "0"], ["refusals", "--rows", ",".join(rows)]]
    return [[name, *more] for name in chosen.names]


def _site_options(sizes: dict[str, int], parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Return the options of the site at which exercises are run; all need the same."""
    options, *others = [EXERCISES[name].site(size) for name, size in sizes.items()]
    if any(other != options for other in others):
        parser.error(f"{' and '.join(sizes)} need different sites: run them one by one")
    return options


def _positive(text: str) -> int:
    """Return a number above 0."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return int(text)


def _exercise(sizes: dict[str, int], site: Site, directory: Path, seed: int) -> int:
    signal.signal(signal.SIGTERM, _interrupt)
    figures: dict[str, object] = {}

    async def run() -> None:
        await site.start()
        async with site.client(deadline_s=30) as client:
            for name, size in sizes.items():
                with site.recorded(name):
                    figures.update(await EXERCISES[name].told(site, client, size, seed))
        site.check()

    async def run_or_fail() -> None:
        try:
            await run()
        except ServerFailed as error:
            raise RunFailed(str(error)) from error

    names = " ".join(sizes)
    title = f"slurm exercise {names} --plugin {site.plugin}"
    ended = perform(title, run_or_fail(), release=site.stop, directory=directory, seed=seed)
    row = {"exercise": names, "plugin": site.plugin, "seed": seed, "seconds": round(ended.took_s, 1)}
    row |= {"sizes": sizes, "outcomes": site.outcomes}
    print(json.dumps({**row, "failed": int(not ended.succeeded), **figures}))
    return 0 if ended.succeeded else 1


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _start(arguments: list[str]) -> int:
    """Start the process of a site, and print its output once the site is ready."""
    directory = Path(tempfile.mkdtemp(prefix=PREFIX))
    command = [sys.executable, "-m", "tests.slurm", *arguments, "--stay", str(directory)]
    with (directory / STAYED_LOG).open("wb") as log:
        staying = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    try:
        while not (directory / USE).exists():
            if staying.poll() is not None:
                said = (directory / STAYED_LOG).read_text(errors="replace") if directory.exists() else ""
                print(f"scripts/slurm: the site did not start\n{said}", file=sys.stderr)
                return 1
            time.sleep(0.1)
    except KeyboardInterrupt:
        staying.terminate()
        staying.wait()
        return 130
    print((directory / USE).read_text(), end="")
    return 0


def _stop(directory: Path) -> int:
    """End the process of a site, and wait until the site is removed."""
    try:
        pid = int((directory / PID).read_text())
        descriptor = os.pidfd_open(pid)
    except (OSError, ValueError):
        print(f"scripts/slurm: no site runs in {directory}; name the directory that `start` printed", file=sys.stderr)
        return 1
    signal.pidfd_send_signal(descriptor, signal.SIGTERM)
    select.select([descriptor], [], [])
    return 0


def _stay(site: Site) -> int:
    async def run() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        (site.directory / PID).write_text(f"{os.getpid()}\n")
        starting = asyncio.create_task(site.start())
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            beside = site.directory / f".{USE}"
            beside.write_text(
                f"export SLURM_CONF={site.slurm.environment['SLURM_CONF']} PATH=$PATH:/usr/sbin\n"
                f"export FOREBAY_CONFIG={site.cluster.file}\n"
                f"# inputs: {site.input}; results: {site.results}; shared filesystem: {site.filesystem}\n"
                f"# when done: scripts/slurm stop {site.directory}\n"
            )
            beside.rename(site.directory / USE)
            await stopping
        starting.cancel()

    try:
        asyncio.run(run())
    finally:
        site.stop()
        site.remove()
    return 0


if __name__ == "__main__":
    os.umask(0o022)
    sys.exit(main(sys.argv[1:]))
