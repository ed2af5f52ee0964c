"""Exercises with several releases of Slurm and both plugins, each in the root directory of its release."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.slurm.results import FAILED, PASSED, PLUGINS, Result, record
from tests.slurm.roots import RELEASES, TREE, Root, RootError, environment, unable

UNABLE: Final = 77
"""Exit code where this machine cannot run an exercise; the sentence says what it lacks."""

OTHER_USER: Final = {"24.11": "slurm"}
"""SlurmUser by release where it is not root, unless the command line names one."""


class Run(NamedTuple):
    """Exercises, with their options, that are run at one site with a release and a plugin."""

    release: str
    plugin: str
    words: tuple[str, ...]


def chosen_runs(release: str, plugin: str, lines: list[list[str]], turn: int | None) -> list[Run]:
    """Return each of `lines` with each release and plugin as a run; `turn`: one line with one release, all in turn."""
    releases = list(RELEASES) if release == "all" else [release]
    plugins = PLUGINS if plugin == "both" else (plugin,)
    pairs = [(one, line) for one in releases for line in lines]
    if turn is not None:
        pairs = [pairs[turn % len(pairs)]]
    return [Run(one, other, tuple(line)) for one, line in pairs for other in plugins]


def exercise(chosen: argparse.Namespace, runs: list[Run]) -> int:
    """Run exercises, each run in the root of its release; return the exit code, 77 if no run was possible."""
    if reason := unable():
        print(f"scripts/slurm: --release: {reason}", file=sys.stderr)
        return UNABLE
    roots, moved = {}, {}
    for release in dict.fromkeys(run.release for run in runs):
        root = Root(release)
        try:
            root.build()
            root.set_up()
        except RootError as error:
            print(f"scripts/slurm: skipped: {error}", file=sys.stderr)
            continue
        roots[release] = root
        if newer := root.moved():
            moved[release] = newer
            print(
                f"scripts/slurm: Debian {root.suite} has moved on to Slurm {newer}; this runs {root.version}. "
                f"`scripts/slurm root --renew {release}` builds the root anew",
                file=sys.stderr,
            )
    possible = [run for run in runs if run.release in roots]
    if not possible:
        return UNABLE
    began_s = time.monotonic()
    with ThreadPoolExecutor(chosen.parallel) as pool:
        rows = list(pool.map(lambda run: _run(roots[run.release], run, chosen), possible))
    seconds = round(time.monotonic() - began_s, 1)
    skipped = [f"{run.release} {run.plugin}" for run in runs if run not in possible]
    failed = sum(row["failed"] for row in rows)
    print(json.dumps({"runs": rows, "skipped": skipped, "moved": moved, "seconds": seconds, "failed": failed}))
    return int(failed > 0)


def _run(root: Root, run: Run, chosen: argparse.Namespace) -> dict[str, Any]:
    """Run exercises in a root with a plugin; print its lines with release and plugin in front."""
    user = chosen.slurm_user or OTHER_USER.get(root.release, "root")
    plugin, words = run.plugin, ("exercise", *run.words, "--seed", str(chosen.seed))
    command = [f"{TREE}/.venv/bin/python", "-m", "tests.slurm", *words, "--plugin", plugin, "--slurm-user", user]
    said, last, title = [], "", f"{root.release} {plugin}"
    with root.scratch() as scratch:
        line = root.words(["env", "-C", TREE, *command], scratch)
        with subprocess.Popen(
            line,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process:
            assert process.stdout is not None
            for text in process.stdout:
                last = text.rstrip()
                said.append(last)
                print(f"[{title}] {last}", flush=True)
        left = [str(path) for path in scratch.iterdir()]
    try:
        figures = json.loads(last)
    except ValueError:
        figures = {"failed": 1, "outcomes": [], "said": said[-3:]}
    if chosen.record:
        _record(root, plugin, user, figures.get("outcomes", []), figures.get("sizes", {}), chosen.record)
    kept = {"left": left} if left else {}
    return {"release": root.release, "version": root.version, "plugin": plugin, "user": user, **figures, **kept}


def _record(root: Root, plugin: str, user: str, outcomes: list[list[str]], sizes: dict[str, int], file: Path) -> None:
    today = time.strftime("%Y-%m-%d", time.gmtime())
    record(
        (
            Result(
                row=row,
                release=root.release,
                plugin=plugin,
                version=root.version,
                date=today,
                outcome=FAILED if cause else PASSED,
                size=sizes.get(row, 1),
                user=user,
                cause=cause,
            )
            for row, cause in outcomes
            if sizes.get(row) != 0  # the short form of `ci` is no result of the exercise
        ),
        file,
    )


def root_command(chosen: argparse.Namespace) -> int:
    """Build the root of a release, and run a command in it; return its exit code."""
    if reason := unable():
        print(f"scripts/slurm: root: {reason}", file=sys.stderr)
        return UNABLE
    root = Root(chosen.release)
    try:
        root.build(renew=chosen.renew)
        root.set_up()
    except RootError as error:
        print(f"scripts/slurm: {error}", file=sys.stderr)
        return UNABLE
    if not chosen.command:
        newer = root.moved()
        print(f"{root.directory}: Slurm {root.version}" + (f"; Debian {root.suite} has {newer}" if newer else ""))
        return 0
    with root.scratch() as scratch:
        line = root.words(["env", "-C", TREE, *chosen.command], scratch, network=chosen.network)
        return subprocess.run(line, env=environment(), check=False).returncode
