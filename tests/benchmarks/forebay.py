"""Three Forebay replicas as an operator would start them: `forebay cluster init`, then `forebay run replica` for
each.
"""

import asyncio
import shutil
import ssl
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from forebay.cluster.schemas.command_ids import new_command_id
from forebay.cluster.security.tls import TlsFiles, client_context
from forebay.cluster.system.clock import SystemClock
from tests.account import OWN
from tests.benchmarks.processes import Members, ServerFailed
from tests.ports import free_ports

REPLICAS = ("r1", "r2", "r3")
START_WAIT_S = 30.0
"""Seconds until three new replicas must be ready."""

PORTS = 32
"""Free ports in a row asked for: `forebay cluster init` lays out peers and APIs from one base."""

INIT_WAIT_S = 60.0
"""Seconds for `forebay cluster init`."""

CHANNEL_PORT_OFFSET = 24
"""From the first peer's port to the first channel's: beyond what `forebay cluster init` lays out."""

USER = "bench"
"""The user whose certificate submits the jobs."""

SCRIPT = "#!/bin/sh\n#SBATCH --job-name=bench\ntrue\n"


class ForebayCluster(Members):
    """A fresh cluster of three replicas with one pool; no agent runs, so no job starts.

    Each client submits one held job and then releases and holds it in turn: every request is a command that is decided,
    replicated and folded, and the state stays as large as the number of clients, as etcd's does that puts to one key a
    client. What a submit costs beside a growing queue is another question than what a commit costs.
    """

    name = "forebay"
    operation = "POST /v1/jobs once, then /v1/jobs/ID/release and /hold in turn (HTTPS)"

    channels = False
    """Whether the replicas offer their channels too."""

    api_workers: int | None = None
    """Processes that serve clients in front of each replica; None: what is standard."""

    user = USER
    """Who submits the jobs."""

    parent: Sequence[str] = ()
    """Command that each server is run by."""

    agents: Sequence[str] = ()
    """Nodes whose agents run too."""

    agent_keys: Sequence[str] = ()
    """Lines of each [[agent]] beside what `forebay cluster init` writes."""

    cpus = 2
    """CPUs of each node."""

    accounts = OWN
    """As whom agents run jobs."""

    timing: Mapping[str, int] = {}
    """Keys of [timing] that differ from the standard, milliseconds."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._results = directory.absolute() / "results"  # jobs may write beneath a destination root only
        super().__init__()
        self._command = [sys.executable, "-m", "forebay.cluster.cli"]  # what the command `forebay` runs
        self._api: dict[str, str] = {}
        self._clock = SystemClock()
        self._files: TlsFiles | None = None
        self._jobs: dict[int, tuple[int, bool]] = {}
        """Client -> its job and whether that is held."""

    async def start(self) -> None:
        """Make a cluster's files, start three replicas and return when all of them are ready."""
        base_port = free_ports(PORTS)[0]
        init = [*self._command, "cluster", "init", str(self._directory), "--replicas", "3", "--cpus", str(self.cpus)]
        init += ["--base-port", str(base_port), "--pool", "fast=1TiB/1MiB,default", "--user", self.user]
        init += ["--accounts", self.accounts, "--agents", str(max(1, len(self.agents)))]
        init += ["--destination-root", str(self._results), "--source-root", str(self._results)]
        made = await asyncio.to_thread(
            subprocess.run, init, capture_output=True, text=True, check=False, timeout=INIT_WAIT_S
        )
        if made.returncode != 0:
            raise ServerFailed(
                f"forebay cluster init failed with status {made.returncode}:\n{made.stdout}{made.stderr}"
            )
        # Imported late: `scripts/bench --only etcd` does not need the configuration.
        from forebay.cluster.config.config import Config

        configuration = self._directory / "forebay.toml"
        self._adapt(configuration, base_port)
        config = self.config = Config.load(configuration)
        self._api = {replica.name: f"https://{replica.api}" for replica in config.replicas}
        self._files = config.tls_files(self.user)
        for name in self._api:
            self._launch(name, configuration)
        await self.wait_ready()
        for name in self.agents:
            self._launch(name, configuration, "agent")

    def _launch(self, name: str, configuration: Path, kind: str = "replica") -> None:
        serve = [*self.parent, *self._command, "--config", str(configuration), "run", kind, "--name", name]
        self._processes.start(name, serve, self._directory / f"{name}.output")

    def _adapt(self, configuration: Path, base_port: int) -> None:
        """Add to the configuration that `forebay cluster init` wrote what this measurement needs."""
        lines, number = [], 0
        for line in configuration.read_text(encoding="utf-8").splitlines():
            key = line.partition("=")[0].strip()
            if key not in self.timing:
                lines.append(line)
            if self.channels and key == "api":
                lines.append(f'channel = "127.0.0.1:{base_port + CHANNEL_PORT_OFFSET + number}"')
                number += 1
            if self.api_workers is not None and key == "api":
                lines.append(f"api_workers = {self.api_workers}")
            if key == "cpus":
                lines += self.agent_keys
            if line.strip() == "[timing]":
                lines += [f"{name} = {value}" for name, value in self.timing.items()]
        # One user does what a whole site's users do.
        lines += ["[limits]", "commands_per_minute = 10000000", 'command_bytes_per_minute = "1TiB"', "jobs = 100000"]
        configuration.write_text("\n".join(lines) + "\n", encoding="utf-8")

    async def wait_ready(self) -> None:
        """Return when all replicas are ready."""
        deadline = time.monotonic() + START_WAIT_S
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=self.tls())) as session:
            for base in self._api.values():
                while not await self._ready(session, base):
                    self.check()
                    if time.monotonic() > deadline:
                        raise ServerFailed(f"{base} is not ready after {START_WAIT_S:g} s")
                    await asyncio.sleep(0.1)

    def tls(self) -> ssl.SSLContext:
        """Return the client's side of mutual TLS."""
        if self._files is None:
            raise ServerFailed("the cluster has not been started")
        return client_context(self._files)

    async def leader(self, session: aiohttp.ClientSession) -> str:
        """Return the API address of the replica that leads."""
        answers = []
        for base in self._api.values():
            async with session.get(base + "/v1/status") as response:
                answer = await response.json()
                answers.append(answer)
                if response.status == 200 and answer.get("role") == "leader":
                    return base
        raise ServerFailed(f"no replica says that it leads: {answers}")

    def request(self, client: int, number: int) -> tuple[str, Mapping[str, Any]]:
        """Return the submission of a held job, and afterwards its release or hold."""
        if client in self._jobs:
            job, held = self._jobs[client]
            verb = "release" if held else "hold"
            return f"/v1/jobs/{job}/{verb}", {"command_id": new_command_id(self._clock)}
        return "/v1/jobs", {
            "command_id": new_command_id(self._clock),
            "script": SCRIPT,
            "name": f"bench-{client:04d}-{number:08d}",
            "bb": "pool=fast capacity=1MiB",
            "cpus": 1,
            "time_limit_s": 60,
            "workdir": str(self._results),
            "hold": True,
        }

    def accepted(self, status: int, answer: Mapping[str, Any]) -> bool:
        """A command is answered with 200 or 201 after it was committed and applied."""
        if status not in (200, 201):
            return False
        self._jobs[int(answer["name"].split("-")[1])] = int(answer["job_id"]), answer["hold"] is not None
        return "revision" in answer

    async def committed(self, session: aiohttp.ClientSession, base: str) -> int:
        """Return the leader's revision: how many commands have been settled."""
        async with session.get(base + "/v1/status") as response:
            return int((await response.json())["revision"])

    def bases(self) -> dict[str, str]:
        """Return the address of each member's API."""
        return dict(self._api)

    def submission(self, number: int) -> tuple[str, Mapping[str, Any]]:
        """Return the submission of a job that no other call makes, whatever became of earlier ones."""
        self._jobs.pop(0, None)
        return self.request(0, number)

    def stop(self) -> None:
        """End the replicas and remove their data."""
        self._processes.stop()
        shutil.rmtree(self._directory, ignore_errors=True)

    async def _ready(self, session: aiohttp.ClientSession, base: str) -> bool:
        try:
            async with session.get(base + "/readyz") as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False
