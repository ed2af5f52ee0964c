"""Copy of a cluster: real replicas on loopback, with their own certificates, addresses and incarnation.

The copy and the cluster cannot communicate: the copy has its own certificate authority, whose key is deleted
afterwards, and its configuration names no agent, mail, provider program, witness, helper or event sink. The copy's
processes die with this one.
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

from forebay.cluster.client import ApiError, Client
from forebay.cluster.config import Config, replica_hosts
from forebay.cluster.drills.copies.resources import COPIES
from forebay.cluster.schemas import MembersAnswer, StatusView
from forebay.cluster.schemas import operations as ops
from forebay.cluster.schemas.requests import AddMemberRequest
from forebay.cluster.security import AUTHORITY_NAME, Role, create_authority, issue
from forebay.cluster.system import (
    Address,
    Clock,
    closing,
    die_with_parent,
    open_private_file,
    python_of,
    replace_private,
)
from forebay.replica.values import format_size, plain

NAMES: Final = tuple(f"copy{number}" for number in range(1, COPIES + 1))
"""Names of the copy's replicas, which differ from the default names of a cluster."""

NICENESS: Final = 5
"""Nice value of the copy's processes: a replica of the cluster may run on this machine."""

LOOK_S: Final = 0.02
"""Seconds between two checks of a condition."""

STATUS_S: Final = 2.0
"""Time limit for a status request, seconds."""

READY_S: Final = 300.0
"""Time limit for a replica to become ready, seconds: it loads a state and joins."""

STOPS_S: Final = 60.0
"""Time limit for a replica to stop, seconds."""

WORDS_BYTES: Final = 4096
"""Bytes read from the end of a replica's log."""

SILENT_S: Final = 86_400
"""`node_down_s` of the copy, seconds: it has no agents."""

_KEPT_BACK: Final = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID")
"""Environment variables of a service manager that child processes must not inherit."""

_T = TypeVar("_T")


CHANGE_UNDER_WAY: Final = "change_under_way"
"""Rejection code of a membership change while an earlier change is not committed."""


class CopyFailed(Exception):
    """Misbehaviour of the copy; its text is the drill's result."""


class Copy:
    """Copy of a cluster in a private directory; the copy's processes hold the directory's lock."""

    def __init__(self, directory: Path, lock: int, original: Config, identity: str, clock: Clock) -> None:
        """Write the copy's configuration; `original` is the cluster's, `identity` the name of the copy's operator."""
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
        """API address of each replica, by name."""
        return {replica.name: replica.api for replica in self.config.replicas}

    def replica_directory(self, name: str) -> Path:
        """Return the directory of a replica."""
        return self.config.storage.directory / name

    def _write_config(self) -> Config:
        """Write and load the copy's configuration, and issue its certificates."""
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
        # Without the key no further certificate can be issued.
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

    # ---- processes

    async def audit(self, *words: str) -> dict[str, Any]:
        """Run a `forebay` command that reads a replica's directory, and return its JSON output.

        Raises:
            CopyFailed: if the command fails.
        """
        command = ("forebay.cluster.cli", "--config", str(self.config.file), *words, "--json")
        process = await self._spawn(command, None, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE)
        try:
            out, err = await process.communicate()
        finally:
            await _kill(process)
        if process.returncode:
            said = " / ".join(err.decode(errors="replace").split("\n")).strip(" /")
            raise CopyFailed(
                f"`forebay {' '.join(words[:2])}` failed with exit code {process.returncode}: {plain(said)}"
            )
        found: dict[str, Any] = msgspec.json.decode(out)
        return found

    async def start(self, name: str, *words: str, release: Path | None = None) -> None:
        """Start a replica, with another release if `release` is given."""
        command = ("forebay.cluster.serve", "--config", str(self.config.file), "--name", name, *words)
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
            # Ctrl-C must reach the coordinator only.
            start_new_session=True,
            preexec_fn=in_child,
        )

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a running replica."""
        with contextlib.suppress(ProcessLookupError):
            self._running[name].send_signal(number)

    async def kill(self, *names: str) -> None:
        """Send SIGKILL to all named replicas, then wait until they have ended."""
        for name in names:
            self.signal(name, signal.SIGKILL)
        for name in names:
            await self._running.pop(name).wait()

    def remove_data(self, name: str) -> None:
        """Remove the directory of a killed replica."""
        lost = self.replica_directory(name).with_suffix(".lost")
        # Retry: the replica's history service may still write there while it ends.
        self.replica_directory(name).rename(lost)
        shutil.rmtree(lost, ignore_errors=True)

    async def stop(self, name: str) -> None:
        """Stop a replica with SIGTERM.

        Raises:
            CopyFailed: if it does not end in time, or ends with an error.
        """
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
            raise CopyFailed(f"{name} stopped with exit code {code}: {self._last_log_line(name)}")

    def check(self) -> None:
        """Check that all started replicas run.

        Raises:
            CopyFailed: if one has ended by itself.
        """
        for name, process in self._running.items():
            if process.returncode is not None:
                raise CopyFailed(f"{name} ended with exit code {process.returncode}: {self._last_log_line(name)}")

    def _last_log_line(self, name: str) -> str:
        with (self._directory / "logs" / name).open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - WORDS_BYTES))
            lines = log.read().decode("utf-8", "replace").strip().splitlines()
        return plain(lines[-1]) if lines else "its log is empty"

    async def close(self) -> None:
        """Kill all processes and close the client."""
        await self.kill(*tuple(self._running))
        await self.client.close()

    # ---- requests

    async def wait_for(self, ask: Callable[[], Awaitable[_T | None]], what: str) -> _T:
        """Call `ask` until it returns a result.

        Raises:
            CopyFailed: if there is no result within READY_S, or a replica has ended.
        """
        until_s = self._clock.monotonic_s() + READY_S
        while self._clock.monotonic_s() < until_s:
            self.check()
            with contextlib.suppress(ApiError):
                found = await ask()
                if found is not None:
                    return found
            await asyncio.sleep(LOOK_S)
        raise CopyFailed(f"{what} did not happen within {READY_S:g} s")

    async def wait_ready(self, name: str) -> StatusView:
        """Wait until a replica is ready, and return its status.

        Raises:
            CopyFailed: if it is not ready in time.
        """

        async def ask() -> StatusView | None:
            at = self.replicas[name]
            found = await self.client.ask_once(ops.SHOW_STATUS, replica=at, timeout_s=STATUS_S)
            return found if found is not None and found.ready else None

        return await self.wait_for(ask, f"the readiness of replica {name}")

    async def join_replicas(self, names: tuple[str, ...]) -> None:
        """Add replicas without data, and wait until all members vote.

        Raises:
            CopyFailed: if one does not vote in time.
            ApiError: if an addition is rejected.
        """
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
        """Add a member, and return the answer, the final rejection, or None for a retry.

        The cluster rejects the change until the previous member's vote is committed.
        """
        try:
            return await self.client.call(ops.ADD_MEMBER, request, deadline_s=READY_S)
        except ApiError as error:
            return None if error.code == CHANGE_UNDER_WAY else error

    async def _voting(self, name: str) -> MembersAnswer | None:
        answer = await self.client.call(ops.LIST_MEMBERS, deadline_s=STATUS_S)
        return answer if any(one.name == name and one.votes for one in answer.members) else None

    async def wait_for_leader(self) -> str:
        """Wait for a leader and return its name.

        Raises:
            CopyFailed: if there is none in time.
        """

        async def ask() -> str | None:
            return (await self.client.call(ops.LIST_MEMBERS, deadline_s=STATUS_S)).leader

        return await self.wait_for(ask, "a leader")


@contextlib.asynccontextmanager
async def open_copy(directory: Path, lock: int, original: Config, identity: str, clock: Clock) -> AsyncIterator[Copy]:
    """Yield a copy without running replicas; at the end kill those that run."""
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
    """Return free loopback ports.

    If another process takes a port meanwhile, the replica fails to start and logs the error.
    """
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
