"""Cluster on simulated hosts: each has a network namespace, and each replica has its own filesystem."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

from forebay.cluster.drills.helper.faults import ThisMachine
from tests.faults import kernel, network
from tests.faults.local_cluster import FOREBAY, LocalCluster
from tests.faults.network import Network

CLIENTS = "clients"
"""Host of whoever submits, and of us."""

POOLS = {"fast": "40MiB/8MiB,default", "bulk": "80MB/10MB"}
COPY_RATE = "2MiB"
NODE_DOWN_S = 12

JOBS = ("sum", "sort", "words", "digest")
"""What is submitted: each fits into a pool and is over in seconds."""

ROOM = "256M"
"""Size of a replica's own file system, if nobody says otherwise."""

VERBS = {"r": ("run", "replica"), "n": ("run", "agent"), "h": ("run", "helper")}
"""What runs under a name, by its first letter."""


def enter(members: tuple[str, ...], *, prefix: str = network.PREFIX, bits: int = 24) -> Network:
    """Give this process mounts and networks of its own, and return the network of these hosts; kernel.Unable."""
    kernel.require_root("make network namespaces")
    kernel.require_tools(network.TOOLS)
    kernel.enter_private_mounts()
    kernel.enter_private_networks()
    return Network(members, prefix=prefix, bits=bits)


class Hosts(LocalCluster):
    """Replicas, agents and helpers, each on a host; `places` says of each name which."""

    def __init__(self, directory: Path, net: Network, places: Mapping[str, str]) -> None:
        super().__init__(directory)
        self.net = net
        self.places = dict(places)
        self.groups: dict[str, Path] = {}
        """Cgroups of those that have one of their own."""

    def file_of(self, name: str) -> Path:
        """Return the configuration that a process reads."""
        return self.file

    def program(self, name: str) -> Path:
        """Return the command that runs under a name."""
        return FOREBAY

    def surroundings(self, name: str) -> Mapping[str, str]:
        """Return the variables that a process gets besides ours."""
        return {}

    def of_kind(self, letter: str) -> list[str]:
        """Return the names that begin so."""
        return [name for name in self.places if name[0] == letter]

    def mount(self, home: Path) -> None:
        """Give a replica's directory a file system of its own."""
        home.mkdir(parents=True, exist_ok=True)
        kernel.tool("mount", "-t", "tmpfs", "-o", f"size={ROOM},mode=0700", "forebay", str(home))

    def joining(self, name: str) -> tuple[str, ...]:
        """Return the words before a command that put it where what runs under a name belongs."""
        group = self.groups.get(name)
        return () if group is None else ("/bin/sh", "-c", 'echo $$ >"$0" && exec "$@"', str(group / "cgroup.procs"))

    def start(self, name: str, *words: str) -> None:
        """Start one on its host."""
        line = [
            *Network.inside(self.places[name]),
            *self.joining(name),
            str(self.program(name)),
            "--config",
            str(self.file_of(name)),
        ]
        line += [*VERBS[name[0]], "--name", name, *words]
        logs = self.directory / "logs"
        logs.mkdir(exist_ok=True)
        with (logs / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                line,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, **self.surroundings(name)},
            )

    def start_everybody(self) -> None:
        """Start all."""
        for name in self.places:
            self.start(name)

    def home(self, name: str) -> Path:
        """Return the directory of a replica's or an agent's data."""
        assert self.config is not None
        return self.config.wal_directory(name).parent if name[0] == "r" else self.config.agent(name).directory

    def pid(self, name: str) -> int | None:
        """Return the process that runs under a name, whoever has started it: the one with the directory's lock."""
        found = ThisMachine().holder(str(self.home(name) / "wal" if name[0] == "r" else self.home(name)))
        return None if found is None else found.pid

    def stop_everybody(self) -> None:
        """End every process, those that others have started too; helpers first, since they undo what they did."""
        for name in self.of_kind("h"):
            process = self.processes.get(name)
            if process is not None and process.poll() is None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(30)
        for name in (*self.of_kind("n"), *self.of_kind("r")):
            pid = self.pid(name) if self.config is not None else None
            if pid is not None:
                for number in (signal.SIGCONT, signal.SIGKILL):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
        self.stop_all()
        for name in self.of_kind("r"):
            if self.config is not None:
                with contextlib.suppress(OSError):
                    kernel.tool("umount", "-l", str(self.home(name)))
