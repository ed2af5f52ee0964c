"""Faults that a drill does to a machine, each with how it is undone; undoing one twice, or one that was never done, is
nothing.

A process is never found by a broad name: it is the holder of the lock of the directory that a replica or an agent works
in, known by its id, its start and the boot, and held by a descriptor while it is signalled.
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

from cluster.drill.messages import HelperRefused
from cluster.system import all_pids, boot_id, closing, free_bytes, send, start_time

RESTART_WAIT_S: Final = 2.0
"""How long somebody else, such as a service manager, has to start again what was killed, seconds."""

LOOK_S: Final = 0.25
"""Seconds between two looks whether it is there again: each reads what all processes have open."""

COMMAND_S: Final = 30.0
"""How long nft, or the command that starts a process again, may take, seconds."""

FILL_BYTES_MAX: Final = 64 * 1024**3
"""What a file that fills a file system may take, bytes."""

IO_MAX: Final = "io.max"
"""File of a cgroup that bounds what its processes may do to disks."""

FDINFO_BYTES_MAX: Final = 64 * 1024
"""What is read about one descriptor of a process, bytes."""


class TargetProcess(msgspec.Struct, frozen=True):
    """One process, so that another with its id is never taken for it."""

    pid: int
    start: int
    """Clock ticks since boot."""
    boot: str


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """SIGSTOP of the process that works in a directory; SIGCONT."""

    directory: str


class Kill(msgspec.Struct, frozen=True, tag="kill"):
    """SIGKILL of it; it is started again unless somebody else does."""

    directory: str
    name: str
    start: tuple[str, ...] = ()


class Cut(msgspec.Struct, frozen=True, tag="cut"):
    """A table of nft of the drill's own; it is deleted."""

    table: str
    rules: str


class Fill(msgspec.Struct, frozen=True, tag="fill"):
    """A file that takes what is free; it is removed, and what ended meanwhile is started again."""

    file: str
    directory: str
    name: str
    start: tuple[str, ...] = ()


class Throttle(msgspec.Struct, frozen=True, tag="throttle"):
    """A bound on how often a disk is written by one cgroup; what was in its place is put back."""

    group: str
    """Directory of the cgroup."""
    bound: str
    before: str
    """Lines of its `io.max`."""


Fault = Stop | Kill | Cut | Fill | Throttle


class Undo(msgspec.Struct, frozen=True):
    """What is written down before a fault is done."""

    drill: int
    target: str
    fault: Fault
    process: TargetProcess | None = None


class Machine(Protocol):
    """What faults are done with."""

    @property
    def waits_for_others(self) -> bool:
        """Whether somebody else may start a process again, and is given the time for it."""
        ...

    def holder(self, directory: str) -> TargetProcess | None:
        """Return the process that holds the lock of a directory, None if nobody does."""
        ...

    def signal(self, process: TargetProcess, number: signal.Signals) -> bool:
        """Signal exactly this process; False if it is gone."""
        ...

    def cut(self, rules: str) -> None:
        """Load a table of rules; HelperRefused."""
        ...

    def mend(self, table: str) -> None:
        """Delete a table if it is there; HelperRefused."""
        ...

    def fill(self, file: str) -> None:
        """Make a file that takes what is free; OSError."""
        ...

    def empty(self, file: str) -> None:
        """Remove it if it is there; OSError."""
        ...

    def throttle(self, group: str, bound: str) -> None:
        """Have a cgroup keep to a line of `io.max`; nothing where the cgroup is gone. OSError."""
        ...

    def start(self, name: str, command: tuple[str, ...]) -> None:
        """Start a process again, if anything here can."""
        ...

    def rest(self, length_s: float) -> None:
        """Wait."""
        ...


def of_target(drill: int, target: str, fault: Fault, machine: Machine) -> Undo:
    """Return what is to be written down before the fault is done; HelperRefused where its process is not there."""
    if isinstance(fault, Cut | Throttle):
        return Undo(drill, target, fault)
    return Undo(drill, target, fault, running(target, fault.directory, machine))


def running(target: str, directory: str, machine: Machine) -> TargetProcess:
    """Return the process of a target, which works in a directory; HelperRefused where it is not there."""
    process = machine.holder(directory)
    if process is None:
        raise HelperRefused(f"{target} does not run: nobody holds the lock of {directory}", "start it first")
    return process


def do(undo: Undo, machine: Machine) -> None:
    """Do the fault; HelperRefused, OSError. What a part of it has done, `undo_fault` undoes."""
    match undo.fault:
        case Stop() | Kill():
            assert undo.process is not None
            number = signal.SIGSTOP if isinstance(undo.fault, Stop) else signal.SIGKILL
            if not machine.signal(undo.process, number):
                raise HelperRefused(f"{undo.target} has ended meanwhile", "look why, then plan the drill again")
        case Cut():
            machine.cut(undo.fault.rules)
        case Fill():
            machine.fill(undo.fault.file)
        case Throttle():
            machine.throttle(undo.fault.group, undo.fault.bound)


def undo_fault(undo: Undo, machine: Machine) -> None:
    """Undo the fault, however much of it was done; HelperRefused, OSError where the machine does not do that."""
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
    """Faults done for real. `up`: where the names of processes are written that `forebay cluster up` is to start
    again.
    """

    def __init__(self, up: int | None = None) -> None:
        self._up = up

    @property
    def waits_for_others(self) -> bool:
        """Whether a service manager may start a process again: `forebay cluster up` does so only when it is asked."""
        return self._up is None

    def holder(self, directory: str) -> TargetProcess | None:
        """Return the process that holds the lock of a directory, None if nobody does."""
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
        """Signal exactly this process; False if it is gone."""
        if process.boot != boot_id():
            return False
        return send(process.pid, number, still=lambda: start_time(process.pid) == process.start)

    def cut(self, rules: str) -> None:
        """Load a table of rules; HelperRefused."""
        _nft("-f", "-", rules=rules)

    def mend(self, table: str) -> None:
        """Delete a table if it is there; HelperRefused."""
        # A table that is declared is there; then it is deleted: no question whether there was one.
        _nft("-f", "-", rules=f"table inet {table}\ndelete table inet {table}\n")

    def fill(self, file: str) -> None:
        """Make a file that takes what is free, at most FILL_BYTES_MAX; OSError."""
        with closing(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)) as descriptor:
            step, size = FILL_BYTES_MAX, 0
            # Halved until nothing fits: a file system says no to what is too much, and how much fits nobody knows.
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
        """Remove it if it is there; OSError."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(file)

    def throttle(self, group: str, bound: str) -> None:
        """Have a cgroup keep to a line of `io.max`; nothing where the cgroup is gone. OSError."""
        # Without O_CREAT: a cgroup that went with its last process takes its bound along.
        with contextlib.suppress(FileNotFoundError):
            with closing(os.open(os.path.join(group, IO_MAX), os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)) as file:
                os.write(file, bound.encode())

    def start(self, name: str, command: tuple[str, ...]) -> None:
        """Have `forebay cluster up` or the machine's own command start it; HelperRefused."""
        if self._up is not None:
            with contextlib.suppress(OSError):  # `up` has ended, and everything with it
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
    """Whether a process itself holds a lock (flock) of the file or directory with this device and inode."""
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
    """Return why rules of nft cannot be loaded here, empty if they can."""
    if shutil.which("nft") is None:
        return "this machine has no nft (nftables)"
    return "" if os.geteuid() == 0 else "the helper does not run as root, and cannot load rules of nft"


def disk_fault(directory: Path) -> str:
    """Return why the file system of a directory may not be filled, empty if it may: it must hold nothing else."""
    here = os.stat(directory)
    if here.st_dev == os.stat("/").st_dev:
        return f"{directory} is on the file system of /, which others need"
    if free_bytes(directory) > FILL_BYTES_MAX:
        return f"more than {FILL_BYTES_MAX // 1024**3} GiB are free in {directory}"
    return ""


def _nft(*words: str, rules: str) -> None:
    fault = nft_fault()
    if fault:
        raise HelperRefused(fault, "install nftables, or run the helper as root")
    _run([shutil.which("nft") or "nft", *words], rules, "nft does not take the rules")


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
