"""The servers under measurement: started, watched, their processor time read, and ended by their own ids."""

import os
import socket
import subprocess
from pathlib import Path
from typing import IO

LOG_TAIL_CHARACTERS = 1500
"""Characters of a server's output shown when it ended by itself."""


class ServerFailed(Exception):
    """A server could not be started or ended by itself; the message holds the end of its output."""


class Processes:
    """The processes of one cluster."""

    def __init__(self) -> None:
        self._running: list[tuple[str, subprocess.Popen[bytes], Path, IO[bytes]]] = []

    def start(self, name: str, command: list[str], log: Path) -> None:
        """Start one server with its output in `log`."""
        output = log.open("wb")
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        self._running.append((name, process, log, output))

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

    def stop(self) -> None:
        """End all of them and wait until they are gone.

        By SIGKILL: their data is thrown away next, and an etcd leader asked politely looks for a successor for seconds.
        """
        for _, process, _, _ in self._running:
            process.kill()
        for _, process, _, output in self._running:
            process.wait()
            output.close()
        self._running.clear()


def free_ports(count: int) -> list[int]:
    """Return `count` ports of loopback, in one row, that nobody listens on just now."""
    for _ in range(100):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            base = int(probe.getsockname()[1])
        ports = list(range(base, base + count))
        if ports[-1] < 65536 and all(_is_free(port) for port in ports):
            return ports
    raise ServerFailed(f"no {count} free ports in a row on loopback")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
