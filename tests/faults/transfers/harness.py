"""Node for attacks on the data mover, controlled by orders as from an agent, and checked by the resulting files.

The mover is reached through cluster.agent.operation alone, so an attack does not know how it works inside. Where an
attack needs a mover that it must be able to catch, reference.py stands in for the worker.
"""

import asyncio
import contextlib
import hashlib
import os
import shlex
import shutil
import stat
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from forebay.cluster.agent.operation import AgentSettings, WorkerOperation
from forebay.cluster.agent.processes.environment import Mode
from forebay.cluster.agent.runtime.state_directory import StateDirectory
from forebay.cluster.agent.transfer.progress import Counters
from forebay.cluster.agent.worker.task import Outcome
from forebay.replica.messages.commands import OperationDone, OperationFailed
from forebay.replica.model.buffers import Transfer, TransferKind
from forebay.replica.model.orders import Order
from forebay.replica.model.transfers import TransferRules
from tests.faults.tracing import Tracer

REFERENCE = Path(__file__).with_name("reference.py")
JOB = 7
TIMEOUT_S = 600
"""Seconds that an order gives the mover: a bound against hanging, not a measure of speed."""

STAGES = ("stage_in", "stage_out")


class Broken(Exception):
    """A promise was broken; the sentence says which, and where."""


class Inconclusive(Exception):
    """The attack itself went wrong: nothing is known of the mover."""


class Seen(NamedTuple):
    """What one name in a tree is."""

    kind: str
    """file, directory, or what else the kernel says."""
    size_bytes: int
    digest: str
    mode: int
    modified_ns: int


def poll(directory: Path) -> dict[str, Seen]:
    """Return everything below a directory by its relative name (bytes that are not UTF-8 escaped)."""
    found: dict[str, Seen] = {}

    def walk(descriptor: int, prefix: str) -> None:
        for name in os.listdir(descriptor):
            status = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
            digest, kind = "", "other"
            if stat.S_ISREG(status.st_mode):
                kind = "file"
                with open(os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=descriptor), "rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()[:32]
            elif stat.S_ISDIR(status.st_mode):
                kind = "directory"
                inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=descriptor)
                try:
                    walk(inner, f"{prefix}{name}/")
                finally:
                    os.close(inner)
            elif stat.S_ISLNK(status.st_mode):
                kind, digest = "link", os.readlink(name, dir_fd=descriptor)
            found[prefix + name] = Seen(
                kind, status.st_size if kind == "file" else 0, digest, stat.S_IMODE(status.st_mode), status.st_mtime_ns
            )

    if not directory.is_dir():
        return found
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        walk(descriptor, "")
    finally:
        os.close(descriptor)
    return found


class Story(NamedTuple):
    """A transfer of one tree, what was at its destination before, and which way it goes."""

    stage: str
    source: dict[str, Seen]
    old: dict[str, Seen]


class Harness:
    """An agent's home and places outside, in a directory of their own."""

    def __init__(
        self,
        directory: Path,
        *,
        tracer: Tracer | None = None,
        reference: bool = False,
        accounts: Mode = "own",
        user: str = "root",
        source: Path | None = None,
        destination: Path | None = None,
    ) -> None:
        """Make it. `tracer` sees every worker; `source` and `destination` are elsewhere if they are named."""
        self.directory = directory
        self.reference = reference
        self.user = user
        directory.mkdir(parents=True, exist_ok=True)
        directory.chmod(0o755)
        self.accounts: Mode = accounts
        self.home = StateDirectory(directory / "node", self.accounts)
        self.source = directory / "source" if source is None else source
        self.destination = directory / "destination" if destination is None else destination
        self.outside = directory / "outside"
        for path in (self.source, self.destination, self.outside):
            path.mkdir(exist_ok=True)
        self._python = directory / "python"
        self._tracer = tracer
        self.run_instead([str(REFERENCE)] if reference else [])
        self.backend = ""
        """Who moves the data instead of the agent itself."""
        self.counters = Counters()
        self.attempt = 0

    def run_instead(self, program: Sequence[str]) -> None:
        """Let workers be another program of Python, with its arguments; none: the real one."""
        words = ["exec"]
        if self._tracer is not None:
            words += [str(self._tracer.program), str(self._tracer.file), "--"]
        words += [sys.executable, *(("-P", *program) if program else ())]
        self._python.write_text("#!/bin/sh\n" + shlex.join(words) + ("\n" if program else ' "$@"\n'))
        self._python.chmod(0o755)

    @property
    def buffer(self) -> Path:
        """Where the job's buffer is."""
        return self.directory / "node" / "buffers" / str(JOB) / "striped"

    def transfers(self, stage: str, *, kind: TransferKind = TransferKind.DIRECTORY, name: str = "") -> list[Transfer]:
        """Return the one transfer that moves the whole tree, or the one file `name`."""
        outside, tail = self.source if stage == "stage_in" else self.destination, f"/{name}" if name else ""
        return [Transfer(kind, f"{outside}{tail}", f"$DW_JOB_STRIPED/data{tail}")]

    def order(self, stage: str, transfers: Sequence[Transfer] | None = None, **fields: Any) -> Order:
        """Return the next order for the job: a new attempt."""
        self.attempt += 1
        standard = {
            "job": JOB, "attempt": self.attempt, "stage": stage, "user": self.user, "name": "x",
            "workdir": str(self.directory), "has_buffer": True, "access": ("striped",), "timeout_s": TIMEOUT_S,
            "capacity_bytes": 1 << 40,
            "roots": (str(self.source), str(self.destination)),
            "transfers": tuple(self.transfers(stage) if transfers is None else transfers),
        }  # fmt: skip
        if self.backend:
            rules = fields.get("rules") or TransferRules()
            fields = {**fields, "rules": msgspec.structs.replace(rules, backends=(self.backend,))}
        return Order(**{**standard, **fields})

    async def run_transfer(
        self,
        order: Order,
        *,
        end_after_s: float = 0.0,
        beside: Callable[[WorkerOperation], Awaitable[None]] | None = None,
    ) -> Outcome | None:
        """Have an order carried out, and end it after a time if one is named; None if it was ended. What is done
        `beside` it is cancelled when it is over."""
        operation = WorkerOperation(self.home, order, AgentSettings(node="n1", accounts=self.accounts))
        with self._worker():
            running = asyncio.ensure_future(operation.run())
            if beside is not None:
                doing = asyncio.ensure_future(beside(operation))
                await asyncio.wait({running})
                doing.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await doing
            if end_after_s:
                done, _ = await asyncio.wait({running}, timeout=end_after_s)
                if not done:
                    operation.end()
            outcome = await running
        self.counters = operation.counters()
        return outcome

    def operate(self, stage: str, transfers: Sequence[Transfer] | None = None, **fields: Any) -> Outcome:
        """Do the next order of the job to its end."""
        outcome = asyncio.run(self.run_transfer(self.order(stage, transfers, **fields)))
        assert outcome is not None
        return outcome

    @contextlib.contextmanager
    def _worker(self) -> Iterator[None]:
        usual = sys.executable
        sys.executable = str(self._python)
        try:
            yield
        finally:
            sys.executable = usual

    def places(self, stage: str) -> tuple[Path, Path]:
        """Return where a stage reads and where it writes."""
        data = self.buffer / "data"
        return (self.source, data) if stage == "stage_in" else (data, self.destination)

    def written(self, stage: str) -> Path:
        """Return the directory below which a stage writes anything of the job's, parts too."""
        return self.buffer.parent if stage == "stage_in" else self.destination

    def clear(self) -> None:
        """Forget the job: its buffer, and what was written outside."""
        for path in (self.buffer.parent, self.destination):
            shutil.rmtree(path, ignore_errors=True)
        forget(self.directory / "node", JOB, but=("buffers",))
        self.destination.mkdir(exist_ok=True)

    def close(self) -> None:
        """Give the home up; the files stay."""
        self.home.close()


def forget(home: Path, job: int, *, but: Sequence[str] = ()) -> None:
    """Remove everything that an agent's home has of a job, `but` what lies in these of its directories."""
    for entry in home.glob(f"*/{job}*"):
        if entry.parent.name in but or not (entry.name == str(job) or entry.name.startswith(f"{job}.")):
            continue
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def is_temporary(name: str) -> bool:
    """Say whether a name is one of those that the mover may leave when it is killed, or lies in one."""
    return any(part.startswith(".forebay-") for part in name.split("/"))


def judge(before: Story, source: Path, destination: Path, *, complete: bool, alone: bool = True) -> None:
    """Check what a transfer left: each file absent, old or whole; all of them whole, and nothing else, if `complete`.

    Broken names the first that is not. `alone`: it made the directories, and nobody else did."""
    now = poll(source)
    if {name: seen._replace(modified_ns=0) for name, seen in now.items()} != {
        name: seen._replace(modified_ns=0) for name, seen in before.source.items()
    }:
        raise Broken(f"{before.stage} changed its source: {difference(before.source, now)}")
    found = poll(destination)
    for name, seen in found.items():
        if is_temporary(name):
            if complete:
                raise Broken(f"{before.stage} has ended and left {name!r}")
            continue
        wanted, old = before.source.get(name), before.old.get(name)
        if old is not None and (seen.kind, seen.digest) == (old.kind, old.digest) and not complete:
            continue
        if wanted is None:
            if old is None:
                raise Broken(f"{before.stage} made {name!r}, which the source does not have")
            if seen != old and seen.kind != "directory":
                raise Broken(f"{before.stage} changed {name!r}, which the source does not have")
            continue
        if seen.kind != wanted.kind:
            raise Broken(f"{before.stage} made {name!r} a {seen.kind}")
        if wanted.kind == "link" and (seen.digest, seen.modified_ns) != (wanted.digest, wanted.modified_ns):
            raise Broken(f"{before.stage} left {name!r} as {seen}, not {wanted}")
        if wanted.kind == "directory" and complete and alone and old is None and now.get(name) == wanted:
            # Only what the transfer made: what was there before keeps what it had.
            if (seen.mode, seen.modified_ns) != (wanted.mode & 0o3777 | 0o700, wanted.modified_ns):
                raise Broken(f"{before.stage} left {name!r} with another mode or time: {seen}, not {wanted}")
        if wanted.kind != "file":
            continue
        if (seen.size_bytes, seen.digest) != (wanted.size_bytes, wanted.digest):
            raise Broken(
                f"{before.stage} left {name!r} with {seen.size_bytes} of {wanted.size_bytes} bytes: "
                "neither absent, nor old, nor complete"
            )
        if seen.mode != wanted.mode & 0o777 or seen.modified_ns != wanted.modified_ns:
            raise Broken(f"{before.stage} left {name!r} with another mode or time: {seen}, not {wanted}")
    if complete and (missing := sorted(set(before.source) - set(found))):
        raise Broken(f"{before.stage} says it is done, and {missing[:3]!r} are missing")


def judge_top(source: Path, destination: Path) -> None:
    """Check that the top of a tree that a transfer made has its source's mode and time."""
    wanted, found = source.stat(), destination.stat()
    if (found.st_mode, found.st_mtime_ns) != (wanted.st_mode, wanted.st_mtime_ns):
        raise Broken(f"the top {destination} has mode {found.st_mode:o} and time {found.st_mtime_ns}, not its source's")


def difference(one: dict[str, Seen], other: dict[str, Seen]) -> str:
    """Return the first names in which two trees differ."""
    return repr(sorted(name for name in {*one, *other} if one.get(name) != other.get(name))[:5])


def said(outcome: Outcome | None) -> str:
    """Return what an outcome says, for a message."""
    match outcome:
        case OperationFailed():
            return f"failed: {outcome.message}"
        case OperationDone():
            return "done"
    return "was ended"
