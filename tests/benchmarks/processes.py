"""The servers under measurement: started, watched, their processor time read, and ended by their own ids."""

import os
import subprocess
from pathlib import Path
from typing import IO

from tests.repo.tree import ROOT

LOG_TAIL_CHARACTERS = 1500
"""Characters of a server's output shown when it ended by itself."""


class ServerFailed(Exception):
    """A server could not be started or ended by itself; the message holds the end of its output."""


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
        """Return the processor time that all of them have used so far, seconds."""
        ticks = 0
        for _, process, _, _ in self._running:
            try:
                fields = Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            except FileNotFoundError:
                continue
            ticks += int(fields[11]) + int(fields[12])  # utime and stime, counted after the name in parentheses
        return ticks / os.sysconf("SC_CLK_TCK")

    def run_s(self) -> float:
        """Return the time that the threads of all of them have run so far, seconds, to the nanosecond.

        `cpu_s` counts in hundredths of a second, which is too coarse for servers that do next to nothing.
        """
        total_ns = 0
        for _, process, _, _ in self._running:
            for task in Path(f"/proc/{process.pid}/task").iterdir():
                total_ns += int((task / "schedstat").read_text(encoding="ascii").split()[0])
        return total_ns / 1e9

    def bytes_written(self) -> int:
        """Return what all of them have had written to disks so far, bytes."""
        total = 0
        for _, process, _, _ in self._running:
            for line in Path(f"/proc/{process.pid}/io").read_text(encoding="ascii").splitlines():
                key, _, value = line.partition(":")
                if key == "write_bytes":
                    total += int(value)
        return total

    def stop(self) -> None:
        """End all of them and wait until they are gone.

        By SIGKILL: their data is thrown away next, and an etcd leader asked politely looks for a successor for seconds.
        """
        for _, process, _, _ in self._running:
            process.kill()
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
        """Return the processor time of the three so far, seconds."""
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

    def bytes_written(self) -> int:
        """Return what the three have written to disks so far, bytes."""
        return self._processes.bytes_written()

    def check(self) -> None:
        """Raise ServerFailed if a member has ended by itself."""
        self._processes.check()
