"""The copy: real replicas on loopback, with certificates, addresses and an incarnation of their own.

Nobody of the cluster that it is a copy of can reach it or be reached by it: its authority vouches for nobody else and
is forgotten once its certificates are made, its members are its own, and its configuration names no agent, no mail, no
program of the site, no witness and no helper. Its processes die with this one, whatever ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import shutil
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from cluster.cli.drills.copies.resources import COPIES
from cluster.client import ApiError, Client
from cluster.config import Config, replica_hosts
from cluster.schemas import MembersAnswer, StatusView
from cluster.schemas import operations as ops
from cluster.schemas.requests import AddMemberRequest
from cluster.security import AUTHORITY_NAME, Role, create_authority, issue
from cluster.system import Address, Clock, closing, die_with_parent, open_private_file, python_of, replace_private
from replica.values import format_size, plain

NAMES: Final = tuple(f"copy{number}" for number in range(1, COPIES + 1))
"""Its replicas; none of a cluster that a site founds is called so by itself."""

NICENESS: Final = 5
"""What its processes leave to others where all want the processor: a replica of the cluster may be on this machine."""

LOOK_S: Final = 0.02
"""Seconds between two looks at what is waited for."""

STATUS_S: Final = 2.0
"""Seconds in which a replica of it says how it stands."""

READY_S: Final = 300.0
"""Seconds in which a replica of it has to be ready: it loads a state and joins."""

STOPS_S: Final = 60.0
"""Seconds in which one that is asked to has to stop."""

WORDS_BYTES: Final = 4096
"""Of what a replica said last, bytes."""

SILENT_S: Final = 86_400
"""For how long agents may be silent before a node is DOWN, seconds: there are none."""

_KEPT_BACK: Final = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID")
"""Of the environment: what a service manager says to this process alone."""

_T = TypeVar("_T")


CHANGE_UNDER_WAY: Final = "change_under_way"
"""Code of the rejection of a change of the members while an earlier one is not committed."""


class CopyFailed(Exception):
    """The copy did not do what a cluster has to, in a sentence: that is what a drill is to find."""


class Copy:
    """Copy, in a private directory whose lock its processes hold."""

    def __init__(self, directory: Path, lock: int, original: Config, identity: str, clock: Clock) -> None:
        """`original`: of the cluster; `identity`: who is the copy's operator."""
        self._directory = directory
        self._lock = lock
        self._original = original
        self._identity = identity
        self._clock = clock
        self._running: dict[str, asyncio.subprocess.Process] = {}
        self.config = self._write_config()
        self.client = Client.from_config(self.config, identity, clock=clock)

    @property
    def replicas(self) -> dict[str, Address]:
        """Where each is asked."""
        return {replica.name: replica.api for replica in self.config.replicas}

    def replica_directory(self, name: str) -> Path:
        """Return the directory of a replica."""
        return self.config.storage.directory / name

    def _write_config(self) -> Config:
        """Write its configuration and certificates."""
        original, file = self._original, self._directory / "forebay.toml"
        cluster, timing, storage = original.cluster, original.timing, original.storage
        tls, at = self._directory / "tls", self._clock.now()
        authority = create_authority(tls, cluster_name=cluster.name, cluster_id=cluster.id, at=at)
        lines = [f'[cluster]\nname = "{cluster.name}"\nid = "{cluster.id}"']
        ports = _free_ports(2 * len(NAMES))
        for name, peer_port, api_port in zip(NAMES, ports[::2], ports[1::2], strict=True):
            peer, api = Address("127.0.0.1", peer_port), Address("127.0.0.1", api_port)
            lines.append(f'[[replica]]\nname = "{name}"\npeer = "{peer}"\napi = "{api}"')
            issue(authority, tls, role=Role.REPLICA, name=name, addresses=replica_hosts(peer, api), at=at)
        issue(authority, tls, role=Role.OPERATOR, name=self._identity, at=at)
        # Nobody else is ever vouched for.
        (tls / f"{AUTHORITY_NAME}.key").unlink()
        (self._directory / "data").mkdir(mode=0o700)
        (self._directory / "logs").mkdir(mode=0o700)
        lines.append(
            f'[storage]\ndirectory = "data"\nmap_size = "{format_size(storage.map_size_bytes)}"\n'
            f"snapshot_every_entries = {storage.snapshot_every_entries}\nsnapshots_kept = {storage.snapshots_kept}"
        )
        lines.append(
            f"[timing]\nelection_min_ms = {timing.election_min_ms}\nelection_max_ms = {timing.election_max_ms}\n"
            f"heartbeat_ms = {timing.heartbeat_ms}\nnode_down_s = {SILENT_S}"
        )
        replace_private(file, "\n".join((*lines, "")).encode(), durable=False)
        return Config.load(file)

    # ---- its processes

    async def audit(self, *words: str) -> dict[str, Any]:
        """Run a command that reads a replica's directory, to its end, and return what it printed as JSON. CopyFailed.

        `words` are of `forebay`.
        """
        command = ("cluster.cli", "--config", str(self.config.file), *words, "--json")
        process = await self._spawn(command, None, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE)
        try:
            out, err = await process.communicate()
        finally:
            await _kill(process)
        if process.returncode:
            said = " / ".join(err.decode(errors="replace").split("\n")).strip(" /")
            raise CopyFailed(f"`forebay {' '.join(words[:2])}` ended with {process.returncode}: {plain(said)}")
        found: dict[str, Any] = msgspec.json.decode(out)
        return found

    async def start(self, name: str, *words: str, release: Path | None = None) -> None:
        """Start a replica, of another release where one is given."""
        command = ("cluster.serve", "--config", str(self.config.file), "--name", name, *words)
        with closing(open_private_file(self._directory / "logs" / name, os.O_WRONLY | os.O_APPEND)) as log:
            self._running[name] = await self._spawn(command, release, stdout=log, stderr=log)

    async def _spawn(self, command: tuple[str, ...], release: Path | None, **more: Any) -> asyncio.subprocess.Process:
        environment: Mapping[str, str] = os.environ
        python = sys.executable
        if release is not None:
            python, environment = python_of(release)
        given = {name: value for name, value in environment.items() if name not in _KEPT_BACK}
        parent = os.getpid()

        def in_child() -> None:
            die_with_parent(parent)
            os.nice(NICENESS)

        return await asyncio.create_subprocess_exec(
            *(python, "-P", "-m", *command),
            stdin=asyncio.subprocess.DEVNULL,
            **more,
            env=given,
            pass_fds=(self._lock,),
            # The keyboard ends a drill through who carries it out.
            start_new_session=True,
            preexec_fn=in_child,
        )

    def signal(self, name: str, number: signal.Signals) -> None:
        """Signal a replica that runs."""
        with contextlib.suppress(ProcessLookupError):
            self._running[name].send_signal(number)

    async def kill(self, *names: str) -> None:
        """SIGKILL replicas, all at once; wait until they have ended."""
        for name in names:
            self.signal(name, signal.SIGKILL)
        for name in names:
            await self._running.pop(name).wait()

    def remove_data(self, name: str) -> None:
        """Remove the directory of a replica that was killed."""
        lost = self.replica_directory(name).with_suffix(".lost")
        # Its historian may be about to end, and write there.
        self.replica_directory(name).rename(lost)
        shutil.rmtree(lost, ignore_errors=True)

    async def stop(self, name: str) -> None:
        """Ask a replica to stop; CopyFailed where it does not end as it should."""
        process = self._running.pop(name)
        try:
            process.terminate()
            async with asyncio.timeout(STOPS_S):
                code = await process.wait()
        except TimeoutError:
            raise CopyFailed(f"{name} did not stop within {STOPS_S:g} s") from None
        finally:
            await _kill(process)
        if code:
            raise CopyFailed(f"{name} was asked to stop and ended with {code}: {self._last_log_line(name)}")

    def check(self) -> None:
        """Raise CopyFailed where one has ended that nobody ended."""
        for name, process in self._running.items():
            if process.returncode is not None:
                raise CopyFailed(f"{name} ended with {process.returncode}: {self._last_log_line(name)}")

    def _last_log_line(self, name: str) -> str:
        with (self._directory / "logs" / name).open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - WORDS_BYTES))
            lines = log.read().decode("utf-8", "replace").strip().splitlines()
        return plain(lines[-1]) if lines else "it said nothing"

    async def close(self) -> None:
        """End all that runs; nothing of it is worth being written."""
        await self.kill(*tuple(self._running))
        await self.client.close()

    # ---- what it is asked

    async def wait_for(self, ask: Callable[[], Awaitable[_T | None]], what: str) -> _T:
        """Ask until there is an answer; CopyFailed where there is none in time, or a replica has ended."""
        until_s = self._clock.monotonic_s() + READY_S
        while self._clock.monotonic_s() < until_s:
            self.check()
            with contextlib.suppress(ApiError):
                found = await ask()
                if found is not None:
                    return found
            await asyncio.sleep(LOOK_S)
        raise CopyFailed(f"{what} did not come to be within {READY_S:g} s")

    async def wait_ready(self, name: str) -> StatusView:
        """Wait until a replica is ready; CopyFailed."""

        async def ask() -> StatusView | None:
            at = self.replicas[name]
            found = await self.client.ask_once(ops.SHOW_STATUS, replica=at, timeout_s=STATUS_S)
            return found if found is not None and found.ready else None

        return await self.wait_for(ask, f"{name} as a replica that is ready")

    async def join_replicas(self, names: tuple[str, ...]) -> None:
        """Have replicas without data join, and wait until all members vote; CopyFailed, ApiError."""
        for name in names:
            replica = self.config.replica(name)
            request = AddMemberRequest(
                command_id=self.client.new_command_id(), name=name, peer=str(replica.peer), api=str(replica.api)
            )
            added = await self.wait_for(functools.partial(self._add, request), f"the addition of {name}")
            if isinstance(added, ApiError):
                raise added
            await self.start(name, "--join")
            await self.wait_for(functools.partial(self._voting, name), f"the vote of {name}")

    async def _add(self, request: AddMemberRequest) -> MembersAnswer | ApiError | None:
        """Add a member, and return the rejection if it is final.

        None while the vote of the member before is in force, and not committed: `_votes` shows it that early.
        """
        try:
            return await self.client.call(ops.ADD_MEMBER, request, deadline_s=READY_S)
        except ApiError as error:
            return None if error.code == CHANGE_UNDER_WAY else error

    async def _voting(self, name: str) -> MembersAnswer | None:
        answer = await self.client.call(ops.LIST_MEMBERS, deadline_s=STATUS_S)
        return answer if any(one.name == name and one.votes for one in answer.members) else None

    async def wait_for_leader(self) -> str:
        """Return who leads; CopyFailed."""

        async def ask() -> str | None:
            return (await self.client.call(ops.LIST_MEMBERS, deadline_s=STATUS_S)).leader

        return await self.wait_for(ask, "a leader")


@contextlib.asynccontextmanager
async def open_copy(directory: Path, lock: int, original: Config, identity: str, clock: Clock) -> AsyncIterator[Copy]:
    """Make a copy without replicas yet; at the end none is left."""
    copy = Copy(directory, lock, original, identity, clock)
    try:
        yield copy
    finally:
        await asyncio.shield(asyncio.ensure_future(copy.close()))


async def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _free_ports(count: int) -> list[int]:
    """Return ports of loopback that are free; who takes one meanwhile keeps a replica from starting, and it says so."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
