"""Three machines with the bundles of `forebay cluster init`, a fourth machine, and an operator's directory.

A machine is a network namespace, a directory that is its /etc/forebay, and what runs there. It has its own forebay.toml
and its own keys: what an operator changes is copied, as the documents say.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import struct
import sysconfig
import venv
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import click

from forebay.cluster.cli.app import cli
from forebay.cluster.client import ApiError, Client
from forebay.cluster.config.config import Config
from forebay.cluster.schemas import operations as ops
from forebay.cluster.schemas.jobs import MembersAnswer
from forebay.cluster.server.storage import allow_first_start
from forebay.cluster.system import SystemClock
from tests.account import OWN
from tests.faults import faults, kernel
from tests.faults.hosts import COPY_RATE, NODE_DOWN_S, POOLS, Hosts
from tests.faults.local_cluster import AGENTS, FOREBAY, REPLICAS, USER, RunFailed
from tests.faults.network import Network
from tests.repo.tree import copy_packages

FOURTH: Final = "r4"
"""The machine, and its replica, that is there to be added."""

PREFIX: Final = "10.0.0"
"""Addresses as the documents have them, in namespaces of our own."""

BITS: Final = 8
"""Of a network in which all that the documents name is reached without a router."""

PLACES: Final = {"r1": "r1", "r2": "r2", "r3": "r3", "n1": "r1", "n2": "r2"}
"""What runs on which machine; a machine is called as its replica."""

MAP_SIZE: Final = "64MiB"
"""Of journals: one that a minute of writes fills."""

SNAPSHOT_EVERY: Final = 500
"""Entries between two snapshots: what is older can be pruned, once a digest is recorded behind one. That is done about
once a minute, so snapshots are not to come much more often."""

PATIENCE_S: Final = 120.0
"""How long anything may take that takes seconds on an idle machine."""

ANSWER_S: Final = 60.0
"""How long an answer may take, seconds."""

LOOK_S: Final = 0.1
"""Time between two looks, seconds."""

EXIT_UNREACHABLE: Final = 4
"""No replica answered, or none could lead, within the deadline."""

TYPED_S: Final = 300.0
"""How long a command may take at most, seconds: `audit retain` waits until a replica has pruned."""

WALL_CLOCK: Final = Path(faults.__file__).with_name("wallclock.c")


def answer_to(words: Iterable[str]) -> list[str]:
    """Return what somebody says who is asked at a terminal whether a command is to destroy what it destroys."""
    command: click.Command = cli
    for word in words:
        if isinstance(command, click.Group) and word in command.commands:
            command = command.commands[word]
    options = {option for one in command.params for option in one.opts}
    # What shows a plan is answered with its id.
    return ["--yes"] if "--yes" in options and "--confirm" not in options else []


class Typed:
    """A command that was typed: what it printed, and its exit code."""

    def __init__(self, words: list[str], code: int, out: str, err: str) -> None:
        self.words, self.code, self.out, self.err = words, code, out, err

    def json(self) -> dict[str, Any]:
        """Return what it printed as JSON."""
        found: dict[str, Any] = json.loads(self.out)
        return found


async def until(
    holds: Callable[[], Awaitable[object]], what: str, *, patience_s: float = PATIENCE_S, every_s: float = LOOK_S
) -> None:
    """Wait until something holds; RunFailed says what does not. Who does not answer has not said that it holds."""
    clock = SystemClock()
    until_s, trouble = clock.monotonic_s() + patience_s, ""
    while True:
        try:
            if await holds():
                return
            trouble = ""
        except ApiError as error:
            trouble = f" ({error})"
        if clock.monotonic_s() > until_s:
            raise RunFailed(f"not within {patience_s:g} s: {what}{trouble}")
        await asyncio.sleep(every_s)


class Site(Hosts):
    """The machines, and what an operator does with them."""

    def __init__(self, directory: Path, net: Network) -> None:
        """Prepare the machines; kernel.Unable where there is no compiler."""
        super().__init__(directory, net, PLACES)
        self.operators = directory / "site"
        self.file = self.operators / "forebay.toml"
        self.releases: dict[str, Path] = {}
        """Where the release is that a process runs, where that is not this tree."""
        self.members = list(REPLICAS)
        """Who is a member, as far as the operator knows."""
        self._library = faults.build(directory / "shim", WALL_CLOCK)

    # ---- machines

    def machine(self, host: str) -> Path:
        """Return the /etc/forebay of a machine."""
        return self.directory / "machines" / host

    def file_of(self, name: str) -> Path:
        """Return the forebay.toml that a process reads: its machine's."""
        return self.machine(self.places[name]) / "forebay.toml"

    def home(self, name: str) -> Path:
        """Return the directory of a process's data, on its machine."""
        return self.machine(self.places[name]) / name

    def hosts(self) -> list[str]:
        """Return the machines that there are."""
        return sorted({*self.places.values()})

    def on(self, host: str) -> list[str]:
        """Return what runs on a machine."""
        return [name for name, place in self.places.items() if place == host]

    def surroundings(self, name: str) -> Mapping[str, str]:
        """Return what has a process read the wall clock that this run sets."""
        return {"LD_PRELOAD": str(self._library), "FOREBAY_WALLCLOCK": str(self._wall_clock(name))}

    def install(self, tree: Path) -> None:
        """Install this release once more, with an interpreter of its own; what it depends on is what we have."""
        copy_packages(tree)
        environment = tree / ".venv"
        venv.create(environment)
        [packages] = environment.glob("lib/python*/site-packages")
        (packages / "release.pth").write_text(f"{tree}\n{sysconfig.get_path('purelib')}\n")
        command = environment / "bin" / FOREBAY.name
        command.write_text(f"#!{environment / 'bin' / 'python'}\nfrom forebay.cluster.cli.app import main\n\nmain()\n")
        command.chmod(0o755)

    def program(self, name: str) -> Path:
        """Return the command that runs under a name."""
        return self.releases[name] / ".venv" / "bin" / FOREBAY.name if name in self.releases else FOREBAY

    def interpreter(self, name: str) -> str:
        """Return the interpreter of the process that runs under a name."""
        pid = self.pid(name)
        return "" if pid is None else Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0].decode()

    def set_wall_clock(self, name: str, off_s: int) -> None:
        """Let the wall clock of a process be so far off, from now on."""
        with self._wall_clock(name).open("r+b") as file:
            file.write(struct.pack("<q", off_s))

    def _wall_clock(self, name: str) -> Path:
        file = self.directory / "clocks" / name
        if not file.exists():
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(struct.pack("<q", 0))
        return file

    async def found_machines(self) -> None:
        """Found the cluster as "Three machines, step by step" has it, and start what runs on each machine."""
        self.work.mkdir(parents=True)
        where = self.net.addresses
        options = [f"--pool={name}={sizes}" for name, sizes in POOLS.items()]
        options += [f"--source-root={self.work}/input", f"--destination-root={self.work}", f"--user={USER}"]
        options += [f"--accounts={OWN}", "--cpus=4", "--cluster-name=day2"]
        options += ["--host", ",".join(f"{name}={where[name]}" for name in REPLICAS)]
        options += ["--node", ",".join(f"{name}={where[PLACES[name]]}" for name in AGENTS)]
        self.forebay("cluster", "init", str(self.operators), *options, config=False)
        for host in self.hosts():
            bundle = self.operators / "hosts" / where[host]
            shutil.copytree(bundle, self.machine(host), ignore=shutil.ignore_patterns(host))
            self.mount(self.home(host))
        self.edit(
            ("cpus = 4\n", f'cpus = 4\ncopy_rate = "{COPY_RATE}"\n'),
            ('map_size = "16GiB"', f'map_size = "{MAP_SIZE}"'),
            ("snapshot_every_entries = 10000", f"snapshot_every_entries = {SNAPSHOT_EVERY}"),
            ("[timing]\n", f"[timing]\nnode_down_s = {NODE_DOWN_S}\n"),
        )
        for name in REPLICAS:
            allow_first_start(Config.load(self.file_of(name)), name)
        self.start_everybody()
        await self.whole("the cluster is founded")

    def edit(self, *changes: tuple[str, str]) -> None:
        """Change what stands in the forebay.toml of every machine and of the operator."""
        for file in (self.file, *(self.machine(host) / "forebay.toml" for host in self.hosts())):
            text = file.read_text()
            for old, new in changes:
                if old not in text:
                    raise RunFailed(f"{file} does not say {old!r}")
                text = text.replace(old, new)
            file.write_text(text)
        self.config = Config.load(self.file)

    def copy(self, host: str, *names: str) -> None:
        """Copy certificates to a machine: keys first, each under another name and then renamed."""
        target = self.machine(host) / "tls"
        target.mkdir(parents=True, exist_ok=True)
        for name in names:
            temporary = target / f"{name}.new"
            shutil.copy2(self.operators / "tls" / name, temporary)
            temporary.rename(target / name)

    def copy_pair(self, name: str) -> None:
        """Copy a process's key and certificate to its machine."""
        self.copy(self.places[name], f"{name}.key", f"{name}.pem")

    def lose_disk(self, name: str) -> None:
        """Put an empty file system in the place of a replica's."""
        kernel.tool("umount", "-l", str(self.home(name)))
        self.mount(self.home(name))

    # ---- the fourth machine

    async def prepare_fourth(self) -> None:
        """Make the machine of a replica that is to be added: its certificate, and its copy of forebay.toml."""
        host = self.net.addresses[FOURTH]
        with self.file.open("a") as file:
            file.write(f'\n[[replica]]\nname = "{FOURTH}"\npeer = "{host}:7401"\napi = "{host}:7411"\njoins = true\n')
        self.machine(FOURTH).mkdir(parents=True)
        shutil.copy2(self.file, self.machine(FOURTH) / "forebay.toml")
        self.config = Config.load(self.file)
        self.places[FOURTH] = FOURTH
        self.copy(FOURTH, "ca.pem")
        await self.certify_fourth(host)
        self.mount(self.home(FOURTH))

    async def certify_fourth(self, host: str) -> None:
        """Issue its certificate for a host, and copy it there."""
        await self.typed(["cert", "issue", FOURTH, "--role", "replica", "--host", host, "--replace"])
        self.copy_pair(FOURTH)

    async def retire_fourth(self) -> None:
        """Put the machine of a replica that was removed away."""
        kernel.tool("umount", "-l", str(self.home(FOURTH)))
        shutil.rmtree(self.machine(FOURTH))
        self.members = [*REPLICAS]
        del self.places[FOURTH]
        self.processes.pop(FOURTH, None)
        self.file.write_text(self.file.read_text().partition(f'\n[[replica]]\nname = "{FOURTH}"')[0])
        self.config = Config.load(self.file)

    # ---- processes

    async def kill_now(self, *names: str) -> None:
        """SIGKILL processes and wait until they are gone."""
        await self.stop(*names, number=signal.SIGKILL)

    async def stop(self, *names: str, number: signal.Signals = signal.SIGTERM) -> None:
        """End processes and wait until they are gone."""
        for name in names:
            self.processes[name].send_signal(number)
        for name in names:
            await self.ended_with(name)

    async def ended_with(self, name: str) -> int:
        """Return the exit code of a process that ends by itself, or was told to; RunFailed if it goes on."""
        process = self.processes[name]

        async def over() -> bool:
            return process.poll() is not None

        await until(over, f"{name} has ended")
        return process.returncode

    def hang_up(self, names: Iterable[str]) -> None:
        """Have processes read their files again."""
        for name in names:
            self.processes[name].send_signal(signal.SIGHUP)

    def last_words(self, name: str) -> str:
        """Return the end of a log."""
        return " / ".join((self.directory / "logs" / f"{name}.log").read_text(errors="replace").splitlines()[-3:])

    # ---- what is typed

    async def typed(self, words: list[str], *, at: str | None = None, code: int | None = 0) -> Typed:
        """Type a command, as an operator where he works, or on a machine; RunFailed unless it ends with `code`.

        It is typed again where nobody answered in time and nothing was changed: all of it shares one machine.
        """
        words = [*words, *answer_to(words)]
        until_s = SystemClock().monotonic_s() + PATIENCE_S
        while (found := await self._typed(words, at)).code == EXIT_UNREACHABLE != code:
            if SystemClock().monotonic_s() > until_s:
                break
        if code is not None and found.code != code:
            raise RunFailed(f"`forebay {' '.join(words)}` exited {found.code}, not {code}: {found.err.strip()[-600:]}")
        return found

    async def _typed(self, words: list[str], at: str | None) -> Typed:
        file = self.file if at is None else self.machine(at) / "forebay.toml"
        environment = {**os.environ, "FOREBAY_CONFIG": str(file)}
        if at is None:
            environment["FOREBAY_IDENTITY"] = "operator"
        process = await asyncio.create_subprocess_exec(
            *(() if at is None else Network.inside(at)), self.command()[0], *words,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=environment, cwd=file.parent,
        )  # fmt: skip
        async with asyncio.timeout(TYPED_S):
            out, err = await process.communicate()
        return Typed(words, process.returncode or 0, out.decode(), err.decode())

    # ---- how the cluster stands

    def client(self, identity: str = "operator", **options: float) -> Client:
        """Return a client of the cluster, patient with a machine that all of it shares."""
        return super().client(identity, **{"deadline_s": ANSWER_S, **options})

    async def listed(self) -> MembersAnswer:
        """Return the members, as the leader has them."""
        async with self.client() as client:
            return await client.call(ops.LIST_MEMBERS, deadline_s=5)

    async def leader(self) -> str:
        """Return who leads."""
        found: list[str] = []

        async def leads() -> bool:
            leader = (await self.listed()).leader
            found[:] = [leader] if leader is not None else []
            return bool(found)

        await until(leads, "somebody leads")
        return found[0]

    async def whole(self, what: str) -> None:
        """Wait until all members vote, are reached, are not behind and ready, and both nodes are up."""

        async def stands() -> bool:
            answer = await self.listed()
            names = sorted(member.name for member in answer.members)
            sound = all(
                member.votes and member.reachable and not member.lag_entries and not member.clock_off
                for member in answer.members
            )
            if names != sorted(self.members) or not sound or answer.leader is None:
                return False
            assert self.config is not None
            async with self.client() as client:
                for name in self.members:
                    api = self.config.replica(name).api
                    if not (await client.call(ops.SHOW_STATUS, replica=api, deadline_s=5)).ready:
                        return False
                nodes = (await client.call(ops.LIST_NODES, deadline_s=5)).nodes
            return [node.name for node in nodes if node.state == "UP"] == [*AGENTS]

        try:
            await until(stands, f"{what}, and the cluster is whole")
        except RunFailed as error:
            raise RunFailed("; ".join([str(error), *self.ended()])) from error

    async def ready(self, name: str) -> None:
        """Wait until `forebay cluster probe` says that a replica is ready."""

        async def answers() -> bool:
            [one] = (await self.typed(["cluster", "probe", name, "--json"], code=None)).json()["replicas"]
            return bool(one["reachable"] and one["status"]["ready"])

        await until(answers, f"{name} is ready")

    async def add(self, name: str) -> str:
        """Add a replica at its machine's address, and let it join."""
        host = self.net.addresses[name]
        await self.typed(["cluster", "add", name, "--peer", f"{host}:7401", "--api", f"{host}:7411"])
        return await self.join(name)

    async def join(self, name: str) -> str:
        """Start a replica that was added, wait until it votes, and return the id that it has now."""
        self.start(name, "--join")
        if name not in self.members:
            self.members.append(name)
        ids: list[str] = []

        async def votes() -> bool:
            ids[:] = [one.id for one in (await self.listed()).members if one.name == name and one.votes]
            return bool(ids)

        await until(votes, f"{name} votes")
        return ids[0]
