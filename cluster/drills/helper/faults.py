"""Faults of drills and their reversal, which is idempotent and also succeeds if the fault never happened.

The target process is never found by its name. It is the process that holds the lock on the directory of a replica or an
agent. It is identified by PID, start time and boot ID, and signalled through a pidfd.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import threading
from pathlib import Path
from typing import Final, Protocol

import msgspec

from forebay.cluster.drills.helper.messages import HelperRefused
from forebay.cluster.system import all_pids, boot_id, closing, free_bytes, send, start_time

RESTART_WAIT_S: Final = 2.0
"""Seconds in which a service manager may restart a killed process."""

LOOK_S: Final = 0.25
"""Seconds between two checks for the restarted process: each reads the open files of all processes."""

COMMAND_S: Final = 30.0
"""Timeout of nft, or of the command that restarts a process, seconds."""

FILL_BYTES_MAX: Final = 64 * 1024**3
"""Limit of a file that fills a filesystem, bytes."""

IO_MAX: Final = "io.max"
"""Cgroup file with the I/O limits of its processes."""

FDINFO_BYTES_MAX: Final = 64 * 1024
"""Limit of the information read about one descriptor of a process, bytes."""


class TargetProcess(msgspec.Struct, frozen=True):
    """Process with an identity that a reused PID does not match."""

    pid: int
    start: int
    """Clock ticks since boot."""
    boot: str


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """SIGSTOP to the process of a directory; undone by SIGCONT."""

    directory: str


class Kill(msgspec.Struct, frozen=True, tag="kill"):
    """SIGKILL to the process of a directory; undone by a restart, unless a service manager restarts the process."""

    directory: str
    name: str
    start: tuple[str, ...] = ()


class Cut(msgspec.Struct, frozen=True, tag="cut"):
    """Table of nft that belongs to the drill; undone by its deletion."""

    table: str
    rules: str


class Fill(msgspec.Struct, frozen=True, tag="fill"):
    """File that takes the free space; undone by deleting the file and restarting the target if it has ended."""

    file: str
    directory: str
    name: str
    start: tuple[str, ...] = ()


class Throttle(msgspec.Struct, frozen=True, tag="throttle"):
    """Limit on the disk writes of a cgroup; undone by the previous limit."""

    group: str
    """Directory of the cgroup."""
    bound: str
    before: str
    """Previous lines of its `io.max`."""


Fault = Stop | Kill | Cut | Fill | Throttle


class Undo(msgspec.Struct, frozen=True):
    """Record written before a fault is caused."""

    drill: int
    target: str
    fault: Fault
    process: TargetProcess | None = None


class Machine(Protocol):
    """Operations on a machine that faults need."""

    @property
    def waits_for_others(self) -> bool:
        """Return whether a service manager may restart a killed process."""
        ...

    def holder(self, directory: str) -> TargetProcess | None:
        """Return the process that holds the lock of a directory, None if there is none."""
        ...

    def signal(self, process: TargetProcess, number: signal.Signals) -> bool:
        """Signal exactly this process; return False if it has ended."""
        ...

    def cut(self, rules: str) -> None:
        """Load a table of nft rules.

        Raises:
            HelperRefused: nft fails.
        """
        ...

    def mend(self, table: str) -> None:
        """Delete a table if it exists.

        Raises:
            HelperRefused: nft fails.
        """
        ...

    def fill(self, file: str) -> None:
        """Create a file that takes the free space.

        Raises:
            OSError: The file cannot be written.
        """
        ...

    def empty(self, file: str) -> None:
        """Delete the file if it exists.

        Raises:
            OSError: The file cannot be deleted.
        """
        ...

    def throttle(self, group: str, bound: str) -> None:
        """Limit a cgroup by a line of `io.max`; do nothing if the cgroup no longer exists.

        Raises:
            OSError: The kernel rejects the limit.
        """
        ...

    def start(self, name: str, command: tuple[str, ...]) -> None:
        """Restart a process, if this machine has a command for it."""
        ...

    def rest(self, length_s: float) -> None:
        """Wait."""
        ...


def of_target(drill: int, target: str, fault: Fault, machine: Machine) -> Undo:
    """Return the record for a fault, before it is caused.

    Raises:
        HelperRefused: The target's process is not running.
    """
    if isinstance(fault, Cut | Throttle):
        return Undo(drill, target, fault)
    return Undo(drill, target, fault, running(target, fault.directory, machine))


def running(target: str, directory: str, machine: Machine) -> TargetProcess:
    """Return the process of a target's directory.

    Raises:
        HelperRefused: The process is not running.
    """
    process = machine.holder(directory)
    if process is None:
        raise HelperRefused(f"{target} is not running: no process holds the lock of {directory}", "start it first")
    return process


def do(undo: Undo, machine: Machine) -> None:
    """Cause the fault. After an exception, `undo_fault` undoes the completed part.

    Raises:
        HelperRefused: The process has ended, or nft rejects the rules.
        OSError: A system call fails.
    """
    match undo.fault:
        case Stop() | Kill():
            assert undo.process is not None
            number = signal.SIGSTOP if isinstance(undo.fault, Stop) else signal.SIGKILL
            if not machine.signal(undo.process, number):
                raise HelperRefused(
                    f"{undo.target} has exited since the drill was planned", "find out why, then plan the drill again"
                )
        case Cut():
            machine.cut(undo.fault.rules)
        case Fill():
            machine.fill(undo.fault.file)
        case Throttle():
            machine.throttle(undo.fault.group, undo.fault.bound)


def undo_fault(undo: Undo, machine: Machine) -> None:
    """Undo the fault, even if it was caused only in part.

    Raises:
        HelperRefused: A command of the machine fails.
        OSError: A system call fails.
    """
    match undo.fault:
        case Stop():
            assert undo.process is not None
            machine.signal(undo.process, signal.SIGCONT)
        case Kill():
            _running_again(undo.fault, machine)
        case Cut():
            machine.mend(undo.fault.table)
        case Fill():
            machine.empty(undo.fault.file)
            _running_again(undo.fault, machine)
        case Throttle():
            machine.throttle(undo.fault.group, undo.fault.before)


def _running_again(fault: Kill | Fill, machine: Machine) -> None:
    left = round(RESTART_WAIT_S / LOOK_S) if machine.waits_for_others else 0
    while machine.holder(fault.directory) is None:
        if left == 0:
            machine.start(fault.name, fault.start)
            return
        left -= 1
        machine.rest(LOOK_S)


class ThisMachine:
    """Faults on the real machine. `up` is the descriptor to which the names of processes to restart are written."""

    def __init__(self, up: int | None = None) -> None:
        self._up = up

    @property
    def waits_for_others(self) -> bool:
        """Return whether a service manager may restart a process: `forebay cluster up` does so only on request."""
        return self._up is None

    def holder(self, directory: str) -> TargetProcess | None:
        """Return the process that holds the lock of a directory, None if there is none."""
        try:
            place = os.stat(directory)
        except OSError:
            return None
        for pid in all_pids():
            start = start_time(pid)
            if start is not None and _locks(pid, (place.st_dev, place.st_ino)):
                return TargetProcess(pid, start, boot_id()) if start_time(pid) == start else None
        return None

    def signal(self, process: TargetProcess, number: signal.Signals) -> bool:
        """Signal exactly this process; return False if it has ended."""
        if process.boot != boot_id():
            return False
        return send(process.pid, number, still=lambda: start_time(process.pid) == process.start)

    def cut(self, rules: str) -> None:
        """Load a table of nft rules."""
        _nft("-f", "-", rules=rules)

    def mend(self, table: str) -> None:
        """Delete a table if it exists."""
        # Declare the table first, so that the deletion succeeds even if it did not exist.
        _nft("-f", "-", rules=f"table inet {table}\ndelete table inet {table}\n")

    def fill(self, file: str) -> None:
        """Create a file that takes the free space, at most FILL_BYTES_MAX."""
        with closing(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)) as descriptor:
            step, size = FILL_BYTES_MAX, 0
            # Halve the step until nothing fits: a filesystem rejects too large a size, and its free space is not exact.
            while step >= _page():
                if size + step > FILL_BYTES_MAX:
                    step //= 2
                    continue
                try:
                    os.posix_fallocate(descriptor, size, step)
                    size += step
                except OSError as error:
                    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                        raise
                    step //= 2

    def empty(self, file: str) -> None:
        """Delete the file if it exists."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(file)

    def throttle(self, group: str, bound: str) -> None:
        """Limit a cgroup by a line of `io.max`; do nothing if the cgroup no longer exists."""
        # Open without O_CREAT: a cgroup that was deleted with its last process has no limit to restore.
        with contextlib.suppress(FileNotFoundError):
            with closing(os.open(os.path.join(group, IO_MAX), os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)) as file:
                os.write(file, bound.encode())

    def start(self, name: str, command: tuple[str, ...]) -> None:
        """Have `forebay cluster up` or the machine's configured command restart the process.

        Raises:
            HelperRefused: The command fails.
        """
        if self._up is not None:
            with contextlib.suppress(OSError):  # `up` and its processes have ended
                os.write(self._up, f"{name}\n".encode())
            return
        if command:
            _run([word.replace("{name}", name) for word in command], "", f"{name} cannot be started again")

    def rest(self, length_s: float) -> None:
        """Wait."""
        threading.Event().wait(length_s)


def _page() -> int:
    return os.sysconf("SC_PAGE_SIZE")


def _locks(pid: int, place: tuple[int, int]) -> bool:
    """Return whether a process itself holds a lock (flock) on the file with this device and inode."""
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fdinfo"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/fdinfo/{name}", "rb") as file:
                for line in file.read(FDINFO_BYTES_MAX).splitlines():
                    words = line.split()
                    # lock: 1: FLOCK ADVISORY WRITE PID DEVICE:INODE 0 EOF
                    if len(words) > 5 and words[0] == b"lock:" and words[2] == b"FLOCK" and int(words[5]) == pid:
                        found = os.stat(f"/proc/{pid}/fd/{name}")
                        if (found.st_dev, found.st_ino) == place:
                            return True
    return False


def nft_fault() -> str:
    """Return why nft rules cannot be loaded on this machine, or an empty string."""
    if shutil.which("nft") is None:
        return "this machine has no nft (nftables)"
    return "" if os.geteuid() == 0 else "the helper does not run as root, and cannot load nft rules"


def disk_fault(directory: Path) -> str:
    """Return why a directory's filesystem must not be filled, or an empty string.

    Only a small filesystem that other programs do not need may be filled.
    """
    here = os.stat(directory)
    if here.st_dev == os.stat("/").st_dev:
        return f"{directory} is on the root filesystem, which other programs need"
    if free_bytes(directory) > FILL_BYTES_MAX:
        return f"{directory} has more than {FILL_BYTES_MAX // 1024**3} GiB of free space"
    return ""


def _nft(*words: str, rules: str) -> None:
    fault = nft_fault()
    if fault:
        raise HelperRefused(fault, "install nftables, or run the helper as root")
    _run([shutil.which("nft") or "nft", *words], rules, "nft rejected the rules")


def _run(command: list[str], text: str, what: str) -> None:
    try:
        done = subprocess.run(
            command,
            input=text.encode(),
            capture_output=True,
            check=False,
            timeout=COMMAND_S,
            cwd="/",
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HelperRefused(f"{what} ({error})", "see [drill] in forebay.toml of that machine") from error
    if done.returncode != 0:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise HelperRefused(f"{what}: {said[-1] if said else f'exit code {done.returncode}'}", "see its output")
