"""Mutation campaign: plant one-place faults in a package, and see which the nearest tests notice.

Each fault is planted in a private copy of the tree, one copy for each worker, never in the tree itself. The tests run
there, first the nearest few, then, if they notice nothing, the rest of the nearest. What they do not notice has
survived. A fault that changes no behaviour is listed in `equivalent.txt` with the reason, and is not counted.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Final, NamedTuple

import msgspec

from tests.mutants.nearest import nearest_tests
from tests.mutants.operators import OPERATORS, Fault, faults_of, is_applicable

TREE: Final = Path(__file__).resolve().parents[2]

PACKAGES: Final = (
    *("replica", "wal", "snapshots", "cluster/agent", "cluster/api", "cluster/audit", "cluster/cli", "cluster/client"),
    *("cluster/config", "cluster/consensus", "cluster/drills", "cluster/gateway", "cluster/ipc", "cluster/providers"),
    *("cluster/schemas", "cluster/security", "cluster/server", "cluster/slurm", "cluster/system", "cluster/witness"),
)
"""What `all` stands for: the faults are spread evenly over these."""

EQUIVALENT: Final = Path(__file__).with_name("equivalent.txt")

NEAR_FILES: Final = 6
"""Test files that run first: most faults are noticed by one of them, within seconds."""

FILES_MAX: Final = 30
"""Test files that run for one fault at most, count."""

OUTCOMES: Final = ("killed", "timeout", "survived", "untested", "slow", "equivalent")
"""By a test that failed; by tests that end without the fault and not with it; not noticed; no test file is near; the
tests take longer than the limit without the fault, too, so nothing is known; and listed in `equivalent.txt`."""

_FAILED: Final = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
_NO_TESTS: Final = 5
"""Exit code of pytest where it collected nothing."""


class Planted(NamedTuple):
    """Fault in a module of the tree."""

    package: str
    module: Path
    fault: Fault


class Result(msgspec.Struct, frozen=True):
    """Row of a campaign's table."""

    package: str
    operator: str
    place: str
    """file:line"""
    old: str
    new: str
    outcome: str
    """One of `OUTCOMES`."""
    test: str = ""
    """The first test that noticed it."""
    seconds: float = 0.0


class Limits(NamedTuple):
    """Bounds of a campaign."""

    workers: int = 1
    near_s: float = 120.0
    """For the first few test files of one fault."""
    all_s: float = 240.0
    """For the rest of them."""


def draw(tree: Path, packages: Sequence[str], count: int, seed: int) -> list[Planted]:
    """Return `count` faults, as many of each package as of the others: of a random operator, module and place."""
    chance = random.Random(seed)
    pools = {package: _by_operator(tree, package) for package in packages}
    found: list[Planted] = []
    turns = [package for package in packages if pools[package]]
    chance.shuffle(turns)
    while turns and len(found) < count:
        package = turns.pop(0)
        operators = pools[package]
        operator = chance.choice(sorted(operators, key=OPERATORS.index))
        modules = operators[operator]
        module = chance.choice(sorted(modules))
        faults = modules[module]
        fault = faults.pop(chance.randrange(len(faults)))
        applies = is_applicable(fault, (tree / module).read_bytes())
        if applies:
            found.append(Planted(package, module, fault))
        if not faults:
            del modules[module]
        if not modules:
            del operators[operator]
        if operators:
            turns.insert(len(turns) if applies else 0, package)
    return found


def _by_operator(tree: Path, package: str) -> dict[str, dict[Path, list[Fault]]]:
    found: dict[str, dict[Path, list[Fault]]] = {}
    root = tree / package
    for path in sorted(root.rglob("*.py")) if root.is_dir() else [root.with_suffix(".py")]:
        for fault in faults_of(path.read_bytes()):
            found.setdefault(fault.operator, {}).setdefault(path.relative_to(tree), []).append(fault)
    return found


# Running.


def run(
    tree: Path,
    planted: Sequence[Planted],
    limits: Limits,
    tell: Callable[[Result], None],
    equivalent: Path = EQUIVALENT,
) -> list[Result]:
    """Plant each fault, run the tests near it, and return the results in the order of the faults; `tell` is given each
    as soon as it is known.
    """
    known = equivalents(equivalent)
    lock = threading.Lock()
    with contextlib.ExitStack() as open_copies:
        copies: Queue[Path] = Queue()
        for _ in range(max(1, min(limits.workers, len(planted)))):
            copies.put(open_copies.enter_context(private_copy(tree)))

        def one(fault: Planted) -> Result:
            copy = copies.get()
            try:
                result = _tried(tree, copy, fault, limits, known)
            finally:
                copies.put(copy)
            with lock:
                tell(result)
            return result

        with ThreadPoolExecutor(copies.qsize()) as threads:
            return list(threads.map(one, planted))


@contextlib.contextmanager
def private_copy(tree: Path) -> Iterator[Path]:
    """Give a copy of the tree's own files, with the interpreter of the tree. It is removed afterwards."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=tree, capture_output=True, check=True
    ).stdout.split(b"\0")
    with tempfile.TemporaryDirectory(prefix="forebay-mutants-") as directory:
        copy = Path(directory).resolve()
        for name in map(os.fsdecode, filter(None, listed)):
            if os.path.lexists(tree / name):
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(tree / name, copy / name, follow_symlinks=False)
        if (tree / ".venv").exists():
            (copy / ".venv").symlink_to(tree / ".venv")
        yield copy


def _tried(tree: Path, copy: Path, planted: Planted, limits: Limits, known: frozenset[tuple[str, str, str]]) -> Result:
    path, fault = copy / planted.module, planted.fault
    sound = path.read_bytes()
    old, new = _lines(sound, fault)
    begun_s = time.monotonic()

    def result(outcome: str, test: str = "") -> Result:
        took_s = round(time.monotonic() - begun_s, 1)
        place = f"{planted.module}:{fault.line}"
        return Result(planted.package, fault.operator, place, old, new, outcome, test, took_s)

    if (str(planted.module), old, new) in known:
        return result("equivalent")
    files = nearest_tests(tree, planted.module)[:FILES_MAX]
    if not files:
        return result("untested")
    for some, limit_s in ((files[:NEAR_FILES], limits.near_s), (files[NEAR_FILES:], limits.all_s)):
        if not some:
            break
        try:
            _write(path, fault.applied_to(sound))
            outcome, test = _noticed(copy, some, limit_s)
        finally:
            _write(path, sound)
        if outcome == "timeout" and _noticed(copy, some, limit_s)[0] == "timeout":
            return result("slow")
        if outcome != "survived":
            return result(outcome, test)
    return result("survived")


def _write(path: Path, source: bytes) -> None:
    """Put a source in its place, and have nothing that was compiled from another believed."""
    path.write_bytes(source)
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


def _noticed(copy: Path, files: Sequence[Path], limit_s: float) -> tuple[str, str]:
    """Run test files in a copy; return the outcome, and the first test that failed."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--tb=no", "--no-header"]
    with contextlib.suppress(ImportError):
        import hypothesis  # noqa: F401

        command.append("--hypothesis-seed=0")
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONHASHSEED": "0", "FOREBAY_TEST_DAY": "every"}
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [*command, *map(str, files)],
            cwd=copy,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return "timeout", ""
        finally:
            # Also what the tests started and a fault kept them from ending.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            shutil.rmtree(copy / ".hypothesis", ignore_errors=True)
        output.seek(0)
        text = output.read().decode(errors="replace")
    if code in (0, _NO_TESTS):
        return "survived", ""
    failed = _FAILED.search(text)
    return "killed", failed.group(1) if failed else f"pytest exited with {code}"


# What is said of it.


def _lines(source: bytes, fault: Fault) -> tuple[str, str]:
    """Return the lines that a fault changes, before and after, without indentation."""
    begin = source.rfind(b"\n", 0, fault.begin) + 1
    end = source.find(b"\n", fault.end)
    end = len(source) if end < 0 else end
    changed = source[begin : fault.begin] + fault.new + source[fault.end : end]
    return _flat(source[begin:end]), _flat(changed)


def _flat(text: bytes) -> str:
    return " ".join(text.decode().split())


def equivalents(path: Path) -> frozenset[tuple[str, str, str]]:
    """Return the faults that change no behaviour: file, old line and new line of each. ValueError for a bad entry.

    An entry has four lines and a blank one: the file, `- old`, `+ new`, and `# the reason`.
    """
    found = set[tuple[str, str, str]]()
    for number, entry in enumerate(path.read_text().split("\n\n") if path.exists() else [], start=1):
        lines = [line for line in entry.splitlines() if line]
        if not lines or all(line.startswith("#") for line in lines):
            continue
        marks = [line[:2] for line in lines[1:]]
        if marks != ["- ", "+ ", "# "]:
            raise ValueError(f"{path}: entry {number} is malformed; write the file, `- old`, `+ new`, and `# reason`")
        found.add((lines[0], lines[1][2:], lines[2][2:]))
    return frozenset(found)


def row_of(result: Result) -> str:
    """Return a row of the table."""
    row = f"{result.outcome:10} {result.package:17} {result.operator:15} {result.place:48} {result.seconds:6.1f} s"
    return f"{row}  {result.test}" if result.outcome == "killed" else f"{row}\n    - {result.old}\n    + {result.new}"


def summary(results: Sequence[Result]) -> str:
    """Return how many faults had which outcome, by package and in all, and the share that the tests noticed."""
    lines = [" ".join((f"{'package':17}", *(f"{outcome:>10}" for outcome in OUTCOMES), f"{'noticed':>8}"))]
    for package in (*dict.fromkeys(result.package for result in results), "all"):
        chosen = [result.outcome for result in results if package in (result.package, "all")]
        killed, timeout, survived, untested, *_ = counts = [chosen.count(outcome) for outcome in OUTCOMES]
        counted = killed + timeout + survived + untested
        share = f"{(killed + timeout) / counted:.0%}" if counted else "-"
        lines.append(" ".join((f"{package:17}", *(f"{count:10}" for count in counts), f"{share:>8}")))
    return "\n".join(lines)
