"""Worker that repeats an operation in one process during an attack.

Between two rounds it looks for what the attack wants: a secret in the buffer, or anything new where nothing may be
written. Run in the place of cluster.agent.worker.worker by links.py.
"""

import contextlib
import faulthandler
import gc
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import msgspec

from forebay.cluster.agent.worker import worker
from forebay.cluster.agent.worker.task import Outcome, WorkerTask
from forebay.cluster.system.descriptors import write_all
from forebay.replica.messages.commands import OperationDone, OperationFailed
from tests.faults.tracing import Tracer
from tests.faults.transfers.harness import Inconclusive, forget
from tests.faults.transfers.reference import perform as perform_unprotected

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

ROUND_S = 60
"""Seconds that one small transfer may take: a bound against hanging, not a measure of speed."""

IDLE_MAX = 200
"""Rounds in which nothing is swapped, one after the other, count: the swapper has lost its names."""

SECRET = b"SECRET"
"""What the files begin with that no job may have."""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What the loop is told beside its work."""

    plan: str
    """The swapper's plan."""
    swaps: int
    """It ends after so many."""
    watched: tuple[str, ...]
    """Directories in which nothing may change."""
    looked_at: str
    """Where a secret must not come."""
    emptied: str
    """A directory whose files are removed after each round, so that the next one has to make them; empty: none."""
    relinked: tuple[str, str, str]
    """The two names that are swapped, and where the link leads that one of them is. A file that is moved there replaces
    it, and then it is made again."""
    report: str
    reference: bool


class Tally(msgspec.Struct, kw_only=True):
    """What became of it."""

    swaps: int = 0
    rounds: int = 0
    done: int = 0
    refused: int = 0
    escapes: int = 0
    swaps_until_escape: int = 0
    first: str = ""
    reasons: list[str] = []


def has_secret(directory: int, shown: str = "") -> str:
    """Return the first file below an open directory that holds the secret, or nothing. Never through a link."""
    for name in os.listdir(directory):
        path = f"{shown}/{name}"
        with contextlib.suppress(OSError):
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
            if stat.S_ISREG(status.st_mode):
                with open(os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=directory), "rb") as file:
                    if file.read(len(SECRET)) == SECRET:
                        return path
            elif stat.S_ISDIR(status.st_mode):
                inner = os.open(name, DIRECTORY, dir_fd=directory)
                try:
                    if found := has_secret(inner, path):
                        return found
                finally:
                    os.close(inner)
    return ""


def secret_in(directory: str) -> str:
    """Return the first file below a directory that holds the secret, or nothing, also if there is no directory."""
    with contextlib.suppress(FileNotFoundError):
        descriptor = os.open(directory, DIRECTORY)
        try:
            return has_secret(descriptor)
        finally:
            os.close(descriptor)
    return ""


def contents(directories: tuple[str, ...]) -> list[tuple[str, str, bytes]]:
    """Return names and contents of what nobody may change."""
    found = []
    for directory in directories:
        for name in sorted(os.listdir(directory)):
            path = os.path.join(directory, name)
            content = b""
            if os.path.isfile(path):
                with open(path, "rb") as file:
                    content = file.read(1 << 16)
            found.append((directory, name, content))
    return found


def empty(directory: int) -> None:
    """Remove the files below an open directory, never through a link; closes it."""
    try:
        for name in os.listdir(directory):
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
            if stat.S_ISREG(status.st_mode):
                os.unlink(name, dir_fd=directory)
            elif stat.S_ISDIR(status.st_mode):
                empty(os.open(name, DIRECTORY, dir_fd=directory))
    finally:
        os.close(directory)


def relink(one: str, other: str, target: str) -> None:
    """Make the link again if neither of the two names is one any more."""
    # They are swapped between one look and the next.
    if any(os.path.islink(name) for name in (one, other) * 30):
        return
    fresh = f"{other}.new"
    with contextlib.suppress(OSError):
        os.unlink(fresh)
    with contextlib.suppress(OSError):
        os.symlink(target, fresh)
        os.rename(fresh, other)


def main() -> int:
    """Go round until there were enough swaps or an escape."""
    task = msgspec.json.decode(sys.argv[1].encode(), type=Task)
    work = msgspec.json.decode(sys.stdin.buffer.read(), type=WorkerTask)
    os.umask(0o022)
    perform: Callable[[WorkerTask], Outcome] = perform_unprotected if task.reference else worker.perform
    swapper = Tracer(Path("/"), Path(task.plan), fresh=False)
    guarded = contents(task.watched)
    tally = Tally()
    idle = 0
    stage_in = work.order.stage == "stage_in"
    opened = set(os.listdir("/proc/self/fd"))
    while tally.swaps < task.swaps and not tally.escapes:
        before = swapper.counted
        tally.rounds += 1
        # A round that hangs says where, and ends everything.
        faulthandler.dump_traceback_later(ROUND_S, exit=True)
        round_ = msgspec.structs.replace(work.order, attempt=work.order.attempt + tally.rounds)
        again = msgspec.structs.replace(work, order=round_)
        outcome = perform(again)
        faulthandler.cancel_dump_traceback_later()
        tally.swaps += swapper.counted - before
        idle = idle + 1 if swapper.counted == before else 0
        if idle > IDLE_MAX:
            raise Inconclusive(f"nothing is swapped any more: {tally}")
        match outcome:
            case OperationDone():
                tally.done += 1
            case OperationFailed():
                tally.refused += 1
                reason = outcome.message.rpartition(": ")[2]
                if reason not in tally.reasons and len(tally.reasons) < 8:
                    tally.reasons.append(reason)
        # What failed is still referred to, and closes its descriptors when it goes: not those that are opened next.
        gc.collect()
        for descriptor in set(os.listdir("/proc/self/fd")) - opened:
            with contextlib.suppress(OSError):
                os.close(int(descriptor))
        found = secret_in(task.looked_at)
        if found or contents(task.watched) != guarded:
            tally.escapes += 1
            tally.swaps_until_escape = tally.swaps
            tally.first = found or "something was written outside"
        # What a round did is undone while the swapper goes on.
        forget(Path(work.home), work.order.job, but=("operations",) if stage_in else ("operations", "buffers"))
        relink(*task.relinked)
        if task.emptied:
            with contextlib.suppress(OSError):
                empty(os.open(task.emptied, DIRECTORY))
    with open(task.report, "wb") as file:
        file.write(msgspec.json.encode(tally))
    write_all(sys.stdout.fileno(), msgspec.json.encode(OperationDone()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
