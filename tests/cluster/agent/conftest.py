"""A configured node: certificates, directories, a free port, and agents as real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import msgspec
import pytest

from forebay.cluster.agent.operation import AgentSettings
from forebay.cluster.agent.replica_choice import AgentClient, ReplicaChoice
from forebay.cluster.agent.runtime.state_directory import StateDirectory
from forebay.cluster.agent.service import Agent
from forebay.cluster.client import Client
from forebay.cluster.config.config import Config
from forebay.cluster.security.identity import Role
from forebay.cluster.security.pki import create_authority, issue
from forebay.cluster.system.clock import SystemClock
from forebay.cluster.system.processes import descendants
from forebay.replica.model.orders import Order
from tests.account import OWN
from tests.cluster.agent.adapters.fakes import FakePrograms
from tests.cluster.agent.double import ControllerDouble
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[3]


class Site:
    """What a test has: a configuration, places to stage from and to, and agents."""

    def __init__(self, directory: Path, tls: Path) -> None:
        self.directory = directory
        self.sources = directory / "sources"
        self.destinations = directory / "destinations"
        self.sources.mkdir()
        self.destinations.mkdir()
        self.home = directory / "n1"
        self.file = directory / "forebay.toml"
        self._tls = tls
        self._processes: list[subprocess.Popen[bytes]] = []
        self._port = free_port()
        self.configure()

    def configure(self, *, more: str = "", accounts: str = OWN, directory: str = "n1") -> Config:
        """Write the configuration again, with more lines for the agent."""
        self.file.write_text(
            f"""
            cluster.name = "test"
            cluster.id = "{"0123456789abcdef" * 2}"
            replica = [{{ name = "r1", peer = "127.0.0.1:{1 + self._port % 60000}", api = "127.0.0.1:{self._port}" }}]
            tls.certificates = "{self._tls}"
            [[agent]]
            name = "n1"
            directory = "{directory}"
            cpus = 2
            accounts = "{accounts}"
            kill_wait_s = 1
            {more}
            """
        )
        self.config = Config.load(self.file)
        return self.config

    def start_agent(self, before: str = "", *more: str) -> subprocess.Popen[bytes]:
        """Start the agent n1 as a process; `before`: Python that its process runs before it becomes the agent."""
        words = [sys.executable, "-m", "forebay.cluster.agent", "--config", str(self.file), "--name", "n1", *more]
        if before:
            words = [sys.executable, "-c", f"import os\n{before}\nos.execv({words[0]!r}, {words!r})"]
        log = (self.directory / "agent.log").open("ab")
        with log:
            process = subprocess.Popen(
                words,
                cwd=ROOT,
                stderr=log,
                stdout=log,
            )
        self._processes.append(process)
        return process

    async def ended(self, process: subprocess.Popen[bytes]) -> int:
        """Wait for a process to end and return its code."""
        return await asyncio.get_running_loop().run_in_executor(None, process.wait, 30)

    def unsynced(self) -> list[Path]:
        """Return the reports that a power cut may damage."""
        return [path for path in (self.home / "outbox").iterdir() if path.suffix == ".unsynced"]

    async def kill_agent(self, process: subprocess.Popen[bytes]) -> None:
        """SIGKILL the agent."""
        process.kill()
        await self.ended(process)

    def order(self, job: int, attempt: int, stage: str, **fields: object) -> Order:
        """Return an order with the roots and directories of this site."""
        standard: dict[str, object] = {
            "user": "alice",
            "name": f"job{job}",
            "workdir": str(self.destinations),
            # As a controller has it: a script begins where its buffer was made.
            "has_buffer": stage != "run" or "filesystem" in fields or (self.home / "buffers" / str(job)).exists(),
            "access": ("striped",),
            "capacity_bytes": 1 << 30,
            "roots": (str(self.sources if stage == "stage_in" else self.destinations),),
            "timeout_s": 60,
            "time_limit_s": 60 if stage == "run" else 0,
        }
        return msgspec.convert(
            standard
            | {"job": job, "attempt": attempt, "stage": stage}
            | {k: msgspec.to_builtins(v) for k, v in fields.items()},
            type=Order,
        )

    def supervisors(self) -> list[int]:
        """Return the ids of the supervisors of this site that live."""
        found = []
        for name in os.listdir("/proc"):
            if name.isdecimal():
                try:
                    command = Path(f"/proc/{name}/cmdline").read_bytes()
                except OSError:
                    continue
                if b"cluster.agent.scripts.supervisor" in command and str(self.home).encode() in command:
                    found.append(int(name))
        # A child that has not executed its own program yet still shows its parent's command line.
        children = {child for pid in found for child in descendants(pid)}
        return [pid for pid in found if pid not in children]

    def clean_up(self) -> None:
        """End everything that was started here."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        for pid in self.supervisors():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    @asynccontextmanager
    async def running(self, before: str = "") -> AsyncIterator[tuple[ControllerDouble, subprocess.Popen[bytes]]]:
        """Give a controller and an agent that has registered with it."""
        controller = ControllerDouble(self.config)
        await controller.start()
        try:
            agent = self.start_agent(before)
            await controller.wait(lambda: bool(controller.registrations))
            yield controller, agent
        finally:
            await controller.stop()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[ControllerDouble]:
        """Give a controller and a registered agent in the test's own loop: for what no agent's end has a part in."""
        own, clock, stop = self.config.agent("n1"), SystemClock(), asyncio.Event()
        settings = AgentSettings(
            node="n1",
            accounts=own.mode,
            copy_rate_bytes_s=own.copy_rate_bytes_s,
            kill_wait_s=own.kill_wait_s,
            local=self.config.provider_here(),
            cluster=self.config.cluster.id,
        )
        controller = ControllerDouble(self.config)
        await controller.start()
        with closing(StateDirectory(self.home, own.mode, clock, images=own.buffer_image != "none")) as home:
            home.fork_server.start()
            home.fork_server.await_ready()
            async with Client.from_config(self.config, "n1", deadline_s=5) as client:
                controlled = AgentClient(client, ReplicaChoice("n1", self.config.endpoints, clock), clock)
                agent = asyncio.create_task(Agent(home, settings, own.cpus, controlled, clock).run(stop))
                try:
                    await controller.wait(lambda: bool(controller.registrations))
                    yield controller
                finally:
                    stop.set()
                    await agent
                    await controller.stop()


@pytest.fixture(scope="session")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates of a replica and an agent, made once."""
    directory = tmp_path_factory.mktemp("tls")
    now = SystemClock().now()
    authority = create_authority(directory, cluster_name="test", cluster_id="0123456789abcdef" * 2, at=now)
    issue(authority, directory, role=Role.REPLICA, name="r1", at=now, addresses=["127.0.0.1"])
    issue(authority, directory, role=Role.AGENT, name="n1", at=now)
    return directory


@pytest.fixture
def site(tmp_path: Path, tls: Path, request: pytest.FixtureRequest) -> Iterator[Site]:
    """A configured node; its log is shown when the test fails."""
    place = Site(tmp_path, tls)
    yield place
    place.clean_up()
    log = tmp_path / "agent.log"
    if log.exists():
        print(log.read_text())


@pytest.fixture
def programs(tmp_path: Path) -> FakePrograms:
    """A directory for programs that answer as the tools of filesystems do."""
    return FakePrograms(tmp_path / "bin")
