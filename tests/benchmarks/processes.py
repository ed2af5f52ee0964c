"""The servers under measurement: started, watched, their processor time read, and ended by their own ids."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import IO, NamedTuple

from tests.repo.tree import ROOT

LOG_TAIL_CHARACTERS = 1500
"""Characters of a server's output shown when it ended by itself."""


class ServerFailed(Exception):
    """A server could not be started or ended by itself; the message holds the end of its output."""


class Stat(NamedTuple):
    """What the kernel says of one process."""

    parent: int
    zombie: bool
    cpu_s: float
    """Processor time of the process and of all children that it has waited for, and of theirs, seconds."""


def parse_stat(text: str) -> Stat:
    """Return what a line of /proc/PID/stat says; the name in it may hold spaces and parentheses."""
    fields = text.rpartition(")")[2].split()
    ticks = sum(int(field) for field in fields[11:15])  # utime, stime, cutime, cstime
    return Stat(int(fields[1]), fields[0] == "Z", ticks / os.sysconf("SC_CLK_TCK"))


def tree(roots: Iterable[int]) -> dict[int, Stat]:
    """Return the processes of `roots` and all their descendants that are there now."""
    everything: dict[int, Stat] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                everything[int(entry.name)] = parse_stat((entry / "stat").read_text(encoding="utf-8", errors="replace"))
    children: dict[int, list[int]] = {}
    for pid, stat in everything.items():
        children.setdefault(stat.parent, []).append(pid)
    found: dict[int, Stat] = {}
    waiting = [pid for pid in roots if pid in everything]
    while waiting:
        pid = waiting.pop()
        found[pid] = everything[pid]
        waiting += children.get(pid, [])
    return found


def tree_cpu_s(roots: Iterable[int]) -> float:
    """Return the processor time of all below `roots`, also of what has ended, seconds.

    Whose parent ended before it is lost to its roots, unless one of them adopts it (benchmarks/users/reaper.py).
    """
    return sum(stat.cpu_s for stat in tree(roots).values())


def pss_bytes(pid: int) -> int:
    """Return the memory of one process, each shared page divided by how many share it, bytes; 0 if it is gone."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
            key, _, value = line.partition(":")
            if key == "Pss":
                return int(value.split()[0]) * 1024
    return 0


def end_trees(roots: Iterable[int]) -> None:
    """Kill all below `roots`, roots last, each stopped first so that it starts nothing meanwhile."""
    roots = list(roots)
    stopped: set[int] = set()
    while below := set(tree(roots)) - stopped:
        for pid in below:
            _signal(pid, signal.SIGSTOP)
        stopped |= below
    for pid in [*(stopped - set(roots)), *roots]:
        _signal(pid, signal.SIGKILL)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


class Processes:
    """The processes of one cluster."""

    def __init__(self) -> None:
        self._running: list[tuple[str, subprocess.Popen[bytes], Path, IO[bytes]]] = []
        self._commands: dict[str, tuple[list[str], Path]] = {}

    def start(self, name: str, command: list[str], log: Path, *, pipes: bool = False) -> None:
        """Start one server with its output in `log`; with `pipes` only its errors, and orders come through `pipe`."""
        output = log.open("ab")
        self._commands[name] = command, log
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
            stdout=subprocess.PIPE if pipes else output,
            stderr=output,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        self._running.append((name, process, log, output))

    def process(self, name: str) -> "subprocess.Popen[bytes]":
        """Return the server of that name."""
        return next(process for known, process, _, _ in self._running if known == name)

    def end(self, name: str) -> None:
        """Kill one server, also a stopped one, and wait until it is gone."""
        for known in [known for known in self._running if known[0] == name]:
            known[1].kill()
            known[1].wait()
            known[3].close()
            self._running.remove(known)

    def again(self, name: str) -> None:
        """Start a server that was ended on the same data."""
        command, log = self._commands[name]
        self.start(name, command, log)

    def check(self) -> None:
        """Raise ServerFailed if one has ended by itself."""
        for name, process, log, _ in self._running:
            if process.poll() is not None:
                tail = log.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL_CHARACTERS:]
                raise ServerFailed(f"{name} ended with status {process.returncode}; its last words:\n{tail}")

    def cpu_s(self) -> float:
        """Return the processor time that all of them and what they started have used so far, seconds."""
        return tree_cpu_s(self._pids())

    def pss_bytes(self, name: str) -> int:
        """Return the memory of one of them and of all that it started, each shared page by its share, bytes."""
        return sum(pss_bytes(pid) for pid in tree([self.process(name).pid]))

    def _pids(self) -> list[int]:
        return [process.pid for _, process, _, _ in self._running]

    def run_s(self) -> float:
        """Return the time that the threads of all of them have run so far, seconds, to the nanosecond.

        `cpu_s` counts in hundredths of a second, which is too coarse for servers that do next to nothing.
        """
        total_ns = 0
        for pid in tree(self._pids()):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                for task in Path(f"/proc/{pid}/task").iterdir():
                    total_ns += int((task / "schedstat").read_text(encoding="ascii").split()[0])
        return total_ns / 1e9

    def bytes_written(self) -> int:
        """Return what all of them have had written to disks so far, bytes."""
        total = 0
        for pid in tree(self._pids()):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                for line in Path(f"/proc/{pid}/io").read_text(encoding="ascii").splitlines():
                    key, _, value = line.partition(":")
                    if key == "write_bytes":
                        total += int(value)
        return total

    def stop(self) -> None:
        """End all of them, with what they started, and wait until they are gone.

        By SIGKILL: their data is thrown away next, and an etcd leader asked politely looks for a successor for seconds.
        """
        end_trees(self._pids())
        for _, process, _, output in self._running:
            process.wait()
            output.close()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        self._running.clear()


class Members:
    """A cluster of processes under measurement: what is asked of them whatever they run."""

    def __init__(self) -> None:
        self._processes = Processes()

    def cpu_s(self) -> float:
        """Return the processor time of all of them so far, seconds."""
        return self._processes.cpu_s()

    def pid(self, name: str) -> int:
        """Return the process id of a member."""
        return self._processes.process(name).pid

    def revive(self, name: str) -> None:
        """End a member, if it has not ended, and start it again on its data."""
        self._processes.end(name)
        self._processes.again(name)

    def run_s(self) -> float:
        """Return the time that the three have run so far, seconds."""
        return self._processes.run_s()

    def pss_bytes(self, name: str) -> int:
        """Return the memory of a member and all that it started, bytes."""
        return self._processes.pss_bytes(name)

    def bytes_written(self) -> int:
        """Return what the three have written to disks so far, bytes."""
        return self._processes.bytes_written()

    def check(self) -> None:
        """Raise ServerFailed if a member has ended by itself."""
        self._processes.check()
