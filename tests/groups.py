"""The tests in two groups that run at once: what mostly waits for processes, and what mostly computes.

On two cores a test that waits for an election or a mount leaves one of them idle, so `scripts/test` runs
`python -m tests.groups`, which starts pytest once for each group, with the same options, and shows both. Each test file
is in exactly one group, by its path alone. As a plugin (`-p tests.groups --group NAME`) this module leaves the files of
the other group out, and writes down which files had tests that ended, so that none can be forgotten in silence.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path, PurePath
from types import FrameType
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent


class Group(StrEnum):
    """A part of the tests that one process runs."""

    WORKING = "working"
    WAITING = "waiting"


WAITING = (
    "tests/cluster/agent",
    "tests/cluster/audit",
    "tests/cluster/providers",
    "tests/cluster/server/test_membership.py",
    "tests/cluster/test_serve.py",
    "tests/conformance",
    "tests/e2e",
    "tests/golden",
)
"""Directories and files whose tests start processes and wait for them; all others compute."""

LOOK_AGAIN_S = 0.1
"""Seconds between two looks at what a process in the background has said, seconds: a person should not notice."""

NOTHING_TO_DO = pytest.ExitCode.NO_TESTS_COLLECTED
"""What pytest says when the options left nothing of a group: no failure, if the other group had something."""


def group_of(path: PurePath) -> Group:
    """Return the one group of a test file; `path` is relative to the root of the repository."""
    waits = any(path.is_relative_to(place) for place in WAITING)
    return Group.WAITING if waits else Group.WORKING


def files_of_tests(under: Path = ROOT / "tests") -> set[str]:
    """Return every test file at or below a path, relative to the root of the repository."""
    found = under.rglob("test_*.py") if under.is_dir() else [under]
    return {str(path.relative_to(ROOT)) for path in found}


# ---- the plugin: one process, one group


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that `main` gives to each of its two processes."""
    ours = parser.getgroup("groups")
    ours.addoption("--group", choices=[*Group], help="run the tests of this group only")
    ours.addoption("--group-notes", metavar="FILE", help="write which files had tests that ended, as JSON")


def is_left_out(path: Path, config: pytest.Config) -> bool:
    """Say whether a test file is another group's."""
    wanted = config.getoption("group")
    return bool(wanted) and path.is_relative_to(ROOT) and group_of(path.relative_to(ROOT)) != wanted


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import the files of the other group."""
    return True if collection_path.suffix == ".py" and is_left_out(collection_path, config) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the other group's files that were named on the command line: those are never ignored above."""
    other = [item for item in items if is_left_out(item.path, config)]
    if other:
        config.hook.pytest_deselected(items=other)
        items[:] = [item for item in items if not is_left_out(item.path, config)]


def pytest_configure(config: pytest.Config) -> None:
    """Write down which files had tests, as their tests end."""
    if config.getoption("group_notes"):
        config.pluginmanager.register(Note(Path(config.getoption("group_notes"))), "note of a group")


class Note:
    """Which files had tests that ended, how many, and how long all of them took."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._began_s = time.monotonic()
        self._tests: dict[str, int] = {}

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """A test has ended, whatever came of it."""
        name = nodeid.partition("::")[0]
        self._tests[name] = self._tests.get(name, 0) + 1

    def pytest_sessionfinish(self) -> None:
        """Write all of it for `main`."""
        self._place.write_text(json.dumps({"tests": self._tests, "took_s": time.monotonic() - self._began_s}))


# ---- both processes


class Ended(NamedTuple):
    """How the tests of a group ended: pytest's exit code, how many tests of which files, how long they took."""

    group: Group
    code: int
    tests: dict[str, int]
    took_s: float

    @property
    def failed(self) -> bool:
        """Whether pytest found something wrong."""
        return self.code not in (pytest.ExitCode.OK, NOTHING_TO_DO)


class Running:
    """pytest at work on one group."""

    def __init__(self, group: Group, options: Sequence[str], directory: Path, *, in_front: bool) -> None:
        self.group = group
        self._note = directory / f"{group}.json"
        self._said = directory / f"{group}.said"
        cache = f"cache_dir=.pytest_cache/{group}"  # what --lf and --ff go by, of each group
        line = [sys.executable, "-m", "pytest", "-q", "-p", "tests.groups", "-o", cache]
        line += ["--group", group, "--group-notes", str(self._note), *options]
        if in_front:
            self.process = subprocess.Popen(line, cwd=ROOT)
        else:
            with self._said.open("wb") as said:
                self.process = subprocess.Popen(
                    line, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT
                )

    def show(self) -> None:
        """Print what it has said in the background, and what it says until its end."""
        with self._said.open("rb") as said:
            alive = True
            while alive:
                alive = self.process.poll() is None
                sys.stdout.buffer.write(said.read())
                sys.stdout.flush()
                if alive:
                    time.sleep(LOOK_AGAIN_S)

    def ended(self) -> Ended:
        """Wait for its end and return how it ended."""
        code = self.process.wait()
        note = json.loads(self._note.read_text()) if self._note.exists() else {"tests": {}, "took_s": 0.0}
        return Ended(self.group, code, note["tests"], note["took_s"])


def groups_for(options: Sequence[str]) -> list[Group]:
    """Return the groups that hold what the options name; all if they name no place below tests/."""
    named = [Path(os.path.abspath(option.partition("::")[0])) for option in options if not option.startswith("-")]
    named = [path for path in named if path.is_relative_to(ROOT / "tests") and path.exists()]
    wanted = {group_of(PurePath(name)) for path in named for name in files_of_tests(path)}
    return [group for group in Group if not wanted or group in wanted]


def judged(ended: Sequence[Ended], expected: set[str]) -> tuple[int, list[str]]:
    """Return the exit code for all groups together, and a line about each and about every file that none has run."""
    lines = []
    for one in ended:
        word = "FAILED" if one.failed else "ok"
        code = f"exit {one.code}, " if one.failed else ""
        counted = f"{sum(one.tests.values())} tests of {len(one.tests)} files"
        lines.append(f"{word:7} pytest, {one.group} group: {counted} ({code}{one.took_s:.0f} s)")
    codes = [one.code for one in ended if one.failed]
    if not codes and all(one.code == NOTHING_TO_DO for one in ended):
        codes = [NOTHING_TO_DO]
    runs = [name for one in ended for name in one.tests]
    wrong = [f"{name} was run by no group" for name in sorted(expected - set(runs))]
    wrong += [f"{name} was run by {runs.count(name)} groups" for name in sorted(set(runs)) if runs.count(name) > 1]
    if codes:
        # Whoever was stopped has not come to all of its files: its end says more.
        return max(codes), lines
    return int(pytest.ExitCode.TESTS_FAILED if wrong else pytest.ExitCode.OK), lines + wrong


def main(options: Sequence[str]) -> int:
    """Run the groups at once, with these options of pytest, and return pytest's exit code for both.

    Without options every test file must have been run, by one group: then, and only then, it is known what is expected.
    """
    with tempfile.TemporaryDirectory(prefix="forebay-tests-") as place:
        groups = groups_for(options)
        running = [Running(group, options, Path(place), in_front=group is groups[0]) for group in groups]

        def stop(number: int, frame: FrameType | None) -> None:
            for one in running:
                one.process.send_signal(signal.SIGINT)  # at which pytest ends what its tests have started

        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches both as well, and they say what they were at
        running[0].process.wait()
        for one in running[1:]:
            print(f"\n== pytest, {one.group} group", flush=True)
            one.show()
        code, lines = judged([one.ended() for one in running], set() if options else files_of_tests())
    print("\n" + "\n".join(lines))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
