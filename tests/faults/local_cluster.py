"""Cluster of separate processes on loopback, created and started with a user's commands."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from forebay.cluster.client import Client
from forebay.cluster.config.config import Config
from tests.account import OWN
from tests.ports import free_ports

FOREBAY = Path(sys.executable).with_name("forebay")
USER = "demo"
"""Who submits the jobs; he has no account: everything runs as that of whoever runs it."""

REPLICAS = ("r1", "r2", "r3")
AGENTS = ("n1", "n2")

PORTS = 13
"""What `forebay cluster init` uses from a base port on: peers from the first, API ten above."""


START_S = 180.0
"""How long a client repeats a call by default, seconds: replicas of a slow machine take half a minute to start."""


class RunFailed(Exception):
    """Something did not hold; the message says what, and where to look."""


class LocalCluster:
    """Three replicas and two agents; every process is ours, and only ours are ever killed."""

    def __init__(self, directory: Path, *, user: str = USER) -> None:
        self.directory = directory
        self.user = user
        self.file = directory / "forebay.toml"
        self.work = directory / "work"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.config: Config | None = None

    def found(
        self, pools: dict[str, str], copy_rate: str, *, cpus: int = 2, accounts: str | None = OWN, replicas: int = 3
    ) -> None:
        """Write configuration and certificates with `forebay cluster init`, then say in the file how fast agents may
        copy.

        `accounts` None: jobs run as whom it says where it is told nothing.
        """
        self.work.mkdir(parents=True)
        options = [f"--pool={name}={sizes}" for name, sizes in pools.items()]
        options += [f"--source-root={self.work}/input", f"--destination-root={self.work}"]
        options += [
            f"--base-port={free_ports(PORTS)[0]}",
            f"--user={self.user}",
            *([f"--accounts={accounts}"] if accounts else []),
            f"--cpus={cpus}",
            f"--replicas={replicas}",
            "--cluster-name=faults",
        ]
        self.forebay("cluster", "init", str(self.directory), *options, config=False)
        text = self.file.read_text()
        self.file.write_text(text.replace(f"cpus = {cpus}\n", f'cpus = {cpus}\ncopy_rate = "{copy_rate}"\n'))
        self.config = Config.load(self.file)

    def client(self, identity: str = "operator", *, deadline_s: float = START_S) -> Client:
        """Return a client of the cluster; `deadline_s`: how long a call is repeated, seconds."""
        assert self.config is not None
        return Client.from_config(self.config, identity, deadline_s=deadline_s)

    def command(self, *words: str, identity: str = "operator") -> list[str]:
        """Return the command line of `forebay` for this cluster."""
        return [str(FOREBAY), "--config", str(self.file), "--identity", identity, *words]

    def forebay(self, *words: str, config: bool = True, environment: dict[str, str] | None = None) -> str:
        """Run one `forebay` command to its end and return what it printed; RunFailed if it failed."""
        line = self.command(*words) if config else [str(FOREBAY), *words]
        done = subprocess.run(line, capture_output=True, text=True, env={**os.environ, **(environment or {})})
        if done.returncode != 0:
            raise RunFailed(f"`forebay {' '.join(words)}` exited {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def start(self, name: str) -> None:
        """Start a replica or an agent; its output goes to logs/<name>.log."""
        kind = "replica" if name in REPLICAS else "agent"
        logs = self.directory / "logs"
        logs.mkdir(exist_ok=True)
        with (logs / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                self.command("run", kind, "--name", name),
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def start_all(self) -> None:
        """Start every replica and every agent."""
        for name in (*REPLICAS, *AGENTS):
            self.start(name)

    def kill(self, name: str) -> None:
        """SIGKILL a replica or an agent, and nothing else."""
        process = self.processes[name]
        process.send_signal(signal.SIGKILL)
        process.wait()

    def ended(self) -> list[str]:
        """Return the processes that ended though nobody killed them, with what they said last."""
        found = []
        for name, process in self.processes.items():
            if process.poll() is not None and process.returncode != -signal.SIGKILL:
                lines = (self.directory / "logs" / f"{name}.log").read_text(errors="replace").splitlines()
                found.append(f"{name} exited {process.returncode}: {' / '.join(lines[-3:])}")
        return found

    def stop_all(self) -> None:
        """End every process: politely, then not; then the steps that outlive agents."""
        for process in self.processes.values():
            if process.poll() is None:
                process.terminate()
        for process in self.processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for pid in self.descendants():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def descendants(self, marker: str = "") -> list[int]:
        """Return the pids of child processes with `marker` in their command line, never replicas and agents themselves.

        They are children of ours, or name this cluster's directory, or carry its jobs' environment.
        """
        own = {process.pid for process in self.processes.values()} | {os.getpid()}
        directory = str(self.directory).encode()
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) in own:
                continue
            with contextlib.suppress(OSError):
                line = (entry / "cmdline").read_bytes()
                environment = (entry / "environ").read_bytes()
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                is_child = b"cluster.agent" in line or b"cluster.api" in line
                names_it = (is_child and (directory in line or parent in own)) or (
                    b"FOREBAY_JOB_DIR=" + directory
                ) in environment
                if names_it and marker.encode() in line:
                    found.append(int(entry.name))
        return found
