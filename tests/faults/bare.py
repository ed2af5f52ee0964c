"""Three replicas without agents; the test determines processes, addresses, directories and environment.

Every process is ours and dies with us; only ours are ever stopped or killed, each by its process id.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from forebay.cluster.client import ApiError, Client
from forebay.cluster.config.config import Config
from forebay.cluster.config.new_site import Founding, PoolSpec, create_site
from forebay.cluster.schemas import operations as ops
from forebay.cluster.schemas.job_fields import SubmitRequest
from forebay.cluster.schemas.jobs import StatusView
from forebay.cluster.security.identity import Role
from forebay.cluster.security.pki import issue, load_authority
from forebay.cluster.system.address import Address
from forebay.cluster.system.clock import SystemClock
from forebay.wal import Environment
from forebay.wal.ledger import Ledger, LedgerBroken
from tests.faults.kernel import die_with_parent
from tests.faults.local_cluster import PORTS, REPLICAS, USER, RunFailed
from tests.ports import free_ports

READY_S = 120.0
"""How long replicas may take from a start, or from the end of a fault, until they commit, seconds."""

LOOK_S = 2.0
"""How long one look for a leader may take before the processes are looked at again, seconds."""

WORK = Path("/nonexistent")
"""Where the jobs would work if one ever ran; nothing looks there."""

LOG_LINES = 3
"""Last lines of a log that a message repeats, count."""


class BareCluster:
    """A cluster of replicas in `directory`; storage is in `<directory>/<replica>` unless something is mounted there."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.file = directory / "forebay.toml"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.prefixes: dict[str, Sequence[str]] = {}
        """Words before a replica's command: `ip netns exec …`."""
        self.environments: dict[str, Mapping[str, str]] = {}
        """Variables that a replica gets besides ours."""

    def found(self, *, hosts: Mapping[str, str] | None = None, pools: Sequence[str] = (), settings: str = "") -> None:
        """Write configuration and certificates. `hosts` gives replicas addresses of their own, at the same ports;
        `settings` are lines `key = value` that replace the file's."""
        specs = tuple(PoolSpec.parse(pool) for pool in pools) or Founding().pools
        # Names of namespaces need no free ports; on loopback they do.
        base_port = 7401 if hosts else free_ports(PORTS)[0]
        founding = Founding(
            name="faults",
            agents=0,
            pools=specs,
            users=(USER,),
            base_port=base_port,
            source_roots=(WORK,),
            destination_roots=(WORK,),
        )
        config = create_site(self.directory, founding, clock=SystemClock())
        text = self.file.read_text()
        for line in settings.splitlines():
            key = line.partition("=")[0].strip()
            text = "\n".join(line if old.startswith(f"{key} = ") else old for old in text.split("\n"))
        if hosts:
            authority = load_authority(self.directory / "tls")
            for replica in config.replicas:
                host = hosts[replica.name]
                for address in (replica.peer, replica.api):
                    text = text.replace(f'"{address}"', f'"{Address(host, address.port)}"')
                issue(
                    authority, self.directory / "tls", role=Role.REPLICA, name=replica.name, at=SystemClock().now(),
                    addresses=(host,), replace=True,
                )  # fmt: skip
        self.file.write_text(text)
        self.config = Config.load(self.file)

    def client(self, identity: str = USER, *, deadline_s: float = 30.0) -> Client:
        """Return a client of the cluster."""
        return Client.from_config(self.config, identity, deadline_s=deadline_s)

    def log(self, name: str) -> Path:
        """Return where a replica's output goes."""
        return self.directory / "logs" / f"{name}.log"

    def start(self, name: str) -> None:
        """Start a replica."""
        self.log(name).parent.mkdir(exist_ok=True)
        line = [sys.executable, "-P", "-m", "forebay.cluster.serve", "--config", str(self.file), "--name", name]
        with self.log(name).open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [*self.prefixes.get(name, ()), *line],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, **self.environments.get(name, {})},
                preexec_fn=die_with_parent(),
            )

    def start_all(self) -> None:
        """Start every replica that does not run."""
        for name in REPLICAS:
            if name not in self.processes or self.processes[name].poll() is not None:
                self.start(name)

    def running(self) -> list[str]:
        """Return the replicas whose process has not ended."""
        return [name for name, process in self.processes.items() if process.poll() is None]

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a replica that runs."""
        process = self.processes[name]
        if process.poll() is None:
            process.send_signal(number)

    def kill(self, *names: str) -> None:
        """SIGKILL replicas and wait until they are gone."""
        for name in names:
            self.signal(name, signal.SIGKILL)
        for name in names:
            self.processes[name].wait()

    def stop_all(self) -> None:
        """End every process; nothing is left of them."""
        self.kill(*self.processes)

    async def ended(self, name: str, timeout_s: float) -> int:
        """Wait until a replica ends by itself and return its exit code; RunFailed if it does not in time."""
        until = time.monotonic() + timeout_s
        while (code := self.processes[name].poll()) is None:
            if time.monotonic() > until:
                raise RunFailed(f"{name} goes on for {timeout_s:g} s; its log ends: {self.last_words(name)}")
            await asyncio.sleep(0.01)
        return code

    def last_words(self, name: str) -> str:
        """Return the end of a replica's log."""
        lines = self.log(name).read_text(errors="replace").splitlines() if self.log(name).exists() else []
        return " / ".join(lines[-LOG_LINES:])

    def check_running(self) -> None:
        """RunFailed if a replica ended though nobody killed it."""
        for name, process in self.processes.items():
            if process.poll() is not None and process.returncode != -signal.SIGKILL:
                raise RunFailed(f"{name} exited {process.returncode}: {self.last_words(name)}")

    async def leader(self, client: Client, *, deadline_s: float = READY_S) -> str:
        """Return who leads, from a leader that has confirmed it; RunFailed if nobody does in time."""
        until = time.monotonic() + deadline_s
        while True:
            trouble: object = "no leader"
            try:
                answer = await client.call(ops.LIST_MEMBERS, deadline_s=LOOK_S)
                if answer.leader is not None and answer.revision > 0:
                    return answer.leader
            except ApiError as error:
                trouble = error
            self.check_running()
            if time.monotonic() > until:
                raise RunFailed(f"nobody leads a founded cluster after {deadline_s:g} s: {trouble}")
            await asyncio.sleep(0.02)

    async def agreed(self, client: Client, *, timeout_s: float = READY_S) -> StatusView:
        """Wait until all replicas are at one revision and return its status; RunFailed if digests differ."""
        until = time.monotonic() + timeout_s
        while True:
            self.check_running()
            try:
                statuses = [
                    await client.call(ops.SHOW_STATUS, replica=replica.api, digest=True, deadline_s=5)
                    for replica in self.config.replicas
                ]
            except ApiError as error:
                if time.monotonic() > until:
                    raise RunFailed(f"a replica does not answer after {timeout_s:g} s: {error}") from error
                continue
            if len({status.revision for status in statuses}) == 1:
                digests = {status.replica: status.state_digest for status in statuses}
                if len(set(digests.values())) != 1:
                    raise RunFailed(f"at revision {statuses[0].revision} the digests differ: {digests}")
                return statuses[0]
            if time.monotonic() > until:
                places = {status.replica: status.revision for status in statuses}
                raise RunFailed(f"after {timeout_s:g} s the replicas are at different revisions: {places}")
            await asyncio.sleep(0.02)

    def verify_ledgers(self) -> int:
        """Check checksums and chain of every replica's ledger, and that they are one history; return its length."""
        digests: dict[int, tuple[str, bytes]] = {}
        shortest = None
        for name in REPLICAS:
            with Environment.open_readonly(self.config.wal_directory(name)) as environment:
                ledger = Ledger(environment)
                try:
                    entries = ledger.verify().last_index
                    shortest = entries if shortest is None else min(shortest, entries)
                    for entry in ledger.read(1, limit=entries):
                        other, digest = digests.setdefault(entry.index, (name, entry.digest))
                        if digest != entry.digest:
                            raise RunFailed(f"entry {entry.index} is not the same on {other} and {name}")
                except LedgerBroken as error:
                    raise RunFailed(f"{name}: {error}") from error
        return shortest or 0


def refused(error: ApiError) -> bool:
    """Say whether a replica refused a command for good; that nobody could answer it is what faults do."""
    return error.outcome == "rejected" and error.status >= 400 and not is_passing(error.status)


def is_passing(status: int) -> bool:
    """Say whether that status tells to try again: nobody led, or the queue was full."""
    return status in (429, 503)


def held_job(client: Client, name: str, **more: object) -> SubmitRequest:
    """Return the request for a job that stays pending: it is held, and there is no agent anyway."""
    options = {"hold": True, **more}
    return SubmitRequest(
        command_id=client.new_command_id(),
        script="#!/bin/sh\ntrue\n",
        time_limit_s=60,
        workdir=str(WORK),
        name=name,
        **options,  # type: ignore[arg-type]
    )
