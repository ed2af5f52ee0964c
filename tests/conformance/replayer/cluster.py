"""A real Forebay for one transcript: a replica and agents as processes, mutual TLS on loopback, user certificates."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, Final, NamedTuple

from forebay.cluster.client import Client
from forebay.cluster.config.config import Config
from tests.account import OWN
from tests.conformance.replayer.mirror import Mirror
from tests.ports import free_ports

FOREBAY: Final = Path(sys.executable).with_name("forebay")
START_S: Final = 60.0
"""Seconds that a cluster may take until it leads and its nodes are up, on a machine that does other things."""


class ConformanceFailed(Exception):
    """The run itself cannot go on; the message says what, and where to look."""


class Answer(NamedTuple):
    """How a command ended, and what it said."""

    code: int
    out: str
    err: str


END_S = 10.0
"""Time that a process has to end when it is asked to, seconds."""


class Pool(NamedTuple):
    """A pool as the transcript's first listing has it; without bytes it counts units."""

    name: str
    quantity: str
    granularity: str
    default: bool
    counts: bool


class Typist:
    """Types commands: one helper process for one cluster."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._process: asyncio.subprocess.Process | None = None
        self._waiting: dict[int, asyncio.Future[int]] = {}
        self._reader: asyncio.Task[None] | None = None
        self._count = 0

    async def start(self, environment: dict[str, str]) -> None:
        """Start the helper."""
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.conformance.replayer.typist",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=environment,
        )  # fmt: skip
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        while line := await self._process.stdout.readline():
            answer = json.loads(line)
            self._waiting.pop(answer["id"]).set_result(answer["code"])
        for future in self._waiting.values():
            future.set_exception(ConformanceFailed("the process that types commands has ended"))

    async def type(self, words: list[str], *, directory: Path, text: str = "") -> Answer:
        """Run `forebay` with these words to its end."""
        assert self._process is not None and self._process.stdin is not None
        self._count += 1
        number = self._count
        files = {name: self._directory / f"{number}.{name}" for name in ("stdin", "stdout", "stderr")}
        files["stdin"].write_text(text)
        request: dict[str, Any] = {"id": number, "words": words, "directory": str(directory)}
        request |= {name: str(path) for name, path in files.items()}
        self._waiting[number] = asyncio.get_running_loop().create_future()
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        code = await asyncio.wait_for(self._waiting[number], START_S)
        return Answer(code, files["stdout"].read_text(errors="replace"), files["stderr"].read_text(errors="replace"))

    async def stop(self) -> None:
        """End the helper."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            await _ended(self._process)
        if self._reader is not None:
            await self._reader


async def _ended(process: asyncio.subprocess.Process, within_s: float = END_S) -> None:
    """Wait until a process that was asked to end has ended; kill one that takes too long."""
    try:
        await asyncio.wait_for(process.wait(), within_s)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


class Cluster:
    """One replica (or three) and its agents; every process is ours, and only ours are ever ended."""

    def __init__(self, directory: Path, *, nodes: int, cpus: int, users: tuple[str, ...], replicas: int = 1) -> None:
        self.directory = directory
        self.home = directory / "cluster"
        self.work = directory / "work"
        self.run = directory / "run"
        self.file = self.home / "forebay.toml"
        self.asked = self.run / "asked"
        self.nodes = tuple(f"n{number}" for number in range(1, nodes + 1))
        self.replicas = tuple(f"r{number}" for number in range(1, replicas + 1))
        self.cpus = cpus
        self.users = users
        self.typist = Typist(directory / "typed")
        self.mirror = Mirror(Path("/nonexistent"))
        self.client: Client | None = None
        self.processes: dict[str, asyncio.subprocess.Process] = {}
        self.environment = dict(os.environ)
        for path in (
            self.work,
            self.asked,
            self.run / "log",
            self.run / "dwctl",
            directory / "typed",
            directory / "logs",
        ):
            path.mkdir(parents=True, exist_ok=True)

    async def found(self, pools: tuple[Pool, ...], environment: dict[str, str]) -> None:
        """Write configuration and certificates as `forebay cluster init` does, and start everything."""
        self.environment |= {"PYTHONPATH": str(Path(__file__).resolve().parents[3])}
        await self.typist.start(self.environment)
        words = ["cluster", "init", str(self.home), "--cluster-name=conformance", f"--replicas={len(self.replicas)}"]
        words += [f"--agents={len(self.nodes)}", f"--cpus={self.cpus}", f"--base-port={free_ports(11)[0]}"]
        words += [f"--user={user}" for user in self.users]
        words += [f"--accounts={OWN}"]  # the users of transcripts have no accounts here
        words += [f"--source-root={self.work}", f"--destination-root={self.work}"]
        words += [f"--pool={p.name}={p.quantity}/{p.granularity}{',default' if p.default else ''}" for p in pools]
        answer = await self.typist.type(words, directory=self.directory)
        if answer.code:
            raise ConformanceFailed(f"`forebay cluster init` exited {answer.code}: {answer.err.strip()}")
        if not any(pool.default for pool in pools):
            # `init` makes the first pool the default one; Slurm's lua plugin has none.
            self.file.write_text(self.file.read_text().replace("default = true\n", ""))
        with self.file.open("a") as file:
            programs = [str(path) for path in (self.run / "burst_buffer.lua", *sorted((self.run / "bin").glob("*")))]
            file.write(f"\n[provider]\nallowed_programs = {json.dumps(programs)}\n\n[provider.environment]\n")
            file.writelines(f"{name} = {json.dumps(value)}\n" for name, value in environment.items())
        await self.start()

    async def start(self) -> None:
        """Start the replicas and the agents, and wait until all nodes are up."""
        for name in (*self.replicas, *self.nodes):
            await self._start(name)
        config = Config.load(self.file)
        self.mirror = Mirror(config.wal_directory(self.replicas[0]))
        self.client = Client.from_config(config, "operator", deadline_s=START_S)
        deadline = asyncio.get_running_loop().time() + START_S
        while len(self.mirror.state.nodes) < len(self.nodes):
            self.mirror.poll()
            await asyncio.sleep(0.05)
            self.check()
            if asyncio.get_running_loop().time() > deadline:
                raise ConformanceFailed(f"the cluster is not up after {START_S:g} s; see {self.directory}/logs")

    async def _start(self, name: str) -> None:
        kind = "replica" if name in self.replicas else "agent"
        with (self.directory / "logs" / f"{name}.log").open("ab") as log:
            self.processes[name] = await asyncio.create_subprocess_exec(
                str(FOREBAY), "--config", str(self.file), "run", kind, "--name", name,
                stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
                env=self.environment, start_new_session=True,
            )  # fmt: skip

    async def end_replicas(self, signal_number: int) -> None:
        """End every replica with a signal: nobody answers until they are started again."""
        ended = [self.processes.pop(name) for name in self.replicas if name in self.processes]
        for process in ended:
            if process.returncode is None:
                process.send_signal(signal_number)
        for process in ended:
            await _ended(process, START_S)

    async def start_replicas(self) -> None:
        """Start the replicas again, those that run first being ended, and wait until one leads."""
        await self.end_replicas(signal.SIGTERM)
        for name in self.replicas:
            await self._start(name)
        deadline = asyncio.get_running_loop().time() + START_S
        while (await self.forebay("queue")).code:
            self.check()
            if asyncio.get_running_loop().time() > deadline:
                raise ConformanceFailed(f"nobody leads {START_S:g} s after the controller was started again")

    def check(self) -> None:
        """Raise ConformanceFailed if a process ended by itself."""
        for name, process in self.processes.items():
            if process.returncode is not None:
                lines = (self.directory / "logs" / f"{name}.log").read_text(errors="replace").splitlines()
                raise ConformanceFailed(f"{name} exited {process.returncode}: {' / '.join(lines[-3:])}")

    async def forebay(self, *words: str, user: str = "operator", text: str = "") -> Answer:
        """Type one `forebay` command as `user` in the work directory."""
        line = ["--config", str(self.file), "--identity", user, "--deadline", "30", *words]
        return await self.typist.type(line, directory=self.work, text=text)

    async def answer_scripts(self) -> None:
        """Answer what scripts of jobs ask with `scontrol show burst`, until cancelled."""
        while True:
            for path in self.asked.iterdir():
                if path.suffix or path.with_suffix(".out").exists():
                    continue
                answer = await self.forebay("slurm", "burst")
                path.with_suffix(".part").write_text(answer.out)
                path.with_suffix(".part").rename(path.with_suffix(".out"))
            await asyncio.sleep(0.03)

    async def stop(self) -> None:
        """End every process that was started, agents before replicas, and the jobs' steps that outlive agents."""
        if self.client is not None:
            await self.client.close()
        for name in (*self.nodes, *self.replicas):
            process = self.processes.get(name)
            if process is None:
                continue
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await _ended(process)
        for pid in self._left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await self.typist.stop()
        self.mirror.close()

    def _left(self) -> list[int]:
        """Return the processes that name this run's own directory: what our agents started and left."""
        directory = str(self.directory).encode()
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            with contextlib.suppress(OSError):
                if directory in (entry / "cmdline").read_bytes() or directory in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
        return found
