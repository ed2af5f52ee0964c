"""Results of the campaign: how each exercise ended with each release of Slurm and each plugin, and their table.

`scripts/slurm exercise NAME --release RELEASE --record` writes the file; nothing else does.
"""

from __future__ import annotations

import fcntl
import os
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from tests.repo.tree import ROOT
from tests.slurm.exercises import EXERCISES, ROWS
from tests.slurm.roots import RELEASES

FILE: Final = ROOT / "tests" / "slurm" / "results.json"
PLUGINS: Final = ("lua", "datawarp")
PASSED: Final = "passed"
FAILED: Final = "failed"

FEATURES: Final = (*(name for name in EXERCISES if name != "refusals"), *(f"refusals {row}" for row in ROWS))
"""Rows of the table: exercises, and the parts of `refusals`."""


class Result(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one row ended last; `size` is the number of its rounds or jobs, `user` SlurmUser, `cause` of a failure."""

    row: str
    release: str
    plugin: str
    version: str
    date: str
    outcome: str
    size: int
    user: str = "root"
    cause: str = ""

    @property
    def key(self) -> tuple[int, int, int]:
        """Its place in the file: one result for each row, release and plugin."""
        return FEATURES.index(self.row), list(RELEASES).index(self.release), PLUGINS.index(self.plugin)


def load(file: Path = FILE) -> list[Result]:
    """Return the results of a file; none where it does not exist."""
    return msgspec.json.decode(file.read_bytes(), type=list[Result]) if file.exists() else []


def record(new: Iterable[Result], file: Path = FILE) -> None:
    """Write results into a file, each in place of an older one of its row, release and plugin."""
    lock = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        results = {result.key: result for result in (*load(file), *new)}
        text = msgspec.json.format(msgspec.json.encode([results[key] for key in sorted(results)]), indent=1)
        beside = file.with_name(f".{file.name}.new")
        beside.write_bytes(text + b"\n")
        beside.rename(file)
    finally:
        os.close(lock)


def table(results: Iterable[Result] | None = None) -> str:
    """Return the table of docs/slurm/versions.md: a row for each exercise, with the day of its last run."""
    known = {result.key: result for result in (load() if results is None else results)}
    columns = [(release, plugin) for release in RELEASES for plugin in PLUGINS]
    lines = [
        "| exercise | " + " | ".join(f"{release} {plugin}" for release, plugin in columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for feature in FEATURES:
        keys = [(FEATURES.index(feature), list(RELEASES).index(r), PLUGINS.index(p)) for r, p in columns]
        if any(key in known for key in keys):
            only = EXERCISES[feature].only if feature in EXERCISES else ""
            cells = [
                "n/a" if only not in ("", plugin) else _cell(known.get(key))
                for (_, plugin), key in zip(columns, keys, strict=True)
            ]
            lines.append(f"| {feature} | " + " | ".join(cells) + " |")
    versions = []
    for release in RELEASES:
        mine = [result for result in known.values() if result.release == release]
        if mine:
            found, users = (", ".join(sorted(some)) for some in ({r.version for r in mine}, {r.user for r in mine}))
            versions.append(f"{release}: {found} (Debian {RELEASES[release].suite}, SlurmUser {users})")
    failures = [
        _filled(f"- {result.row}, {result.release} {result.plugin}: `{' '.join(result.cause.split())}`", "  ")
        for _, result in sorted(known.items())
        if result.outcome != PASSED
    ]
    text = "\n".join(lines) + "\n\nVersions:\n\n" + "\n".join(f"- {version}" for version in versions) + "\n"
    return text + ("\nFailures:\n\n" + "\n".join(failures) + "\n" if failures else "")


def _filled(text: str, indent: str) -> str:
    return textwrap.fill(text, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _cell(result: Result | None) -> str:
    if result is None:
        return "not run"
    size = f" ({result.size})" if EXERCISES.get(result.row, EXERCISES["refusals"]).size != 1 else ""
    return f"{result.date}{size}" if result.outcome == PASSED else f"{result.outcome}, {result.date}{size}"
