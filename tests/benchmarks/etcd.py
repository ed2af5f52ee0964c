"""Three etcd members from Debian's package, with certificates of the same kind and on the same disk as Forebay's."""

import asyncio
import base64
import shutil
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp

from forebay.cluster.security.identity import Role
from forebay.cluster.security.pki import create_authority, issue
from forebay.cluster.security.tls import TlsFiles, client_context
from forebay.cluster.system.clock import SystemClock
from tests.benchmarks.processes import Members, ServerFailed
from tests.ports import free_ports

PACKAGES = {"etcd": "etcd-server", "etcdctl": "etcd-client"}
"""Executable -> Debian's package of it."""

MEMBERS = ("e1", "e2", "e3")
START_WAIT_S = 30.0
"""Seconds until three new members must have elected a leader."""

VALUE_BYTES = 256
"""Bytes of a value: about an event of Forebay."""


def program(name: str = "etcd") -> Path:
    """Return an executable of etcd's: the installed one, or Debian's package fetched and unpacked into .venv.

    Unpacked, not installed: installing it would start an etcd service on the machine. ServerFailed says what to run.
    """
    if (found := shutil.which(name)) is not None:
        return Path(found)
    package = PACKAGES[name]
    unpacked = Path(sys.prefix) / "etcd" / "usr" / "bin" / name
    if not unpacked.exists():
        with tempfile.TemporaryDirectory(prefix="forebay-etcd-") as directory:
            download = ["apt-get", "download", "-q", package]
            if not _succeeds(download, directory):
                # A new machine has no package lists yet; only root may fetch them.
                _succeeds(["apt-get", "update", "-q"], directory)
                if not _succeeds(download, directory):
                    raise ServerFailed(f"{name} is not installed; as root: apt-get update && apt-get install {package}")
            [archive] = Path(directory).glob(f"{package}_*.deb")
            if not _succeeds(["dpkg-deb", "-x", str(archive), str(Path(sys.prefix) / "etcd")], directory):
                raise ServerFailed(f"{archive.name} cannot be unpacked; as root: apt-get install {package}")
    return unpacked


def _succeeds(command: list[str], directory: str) -> bool:
    try:
        return subprocess.run(command, cwd=directory, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def version() -> str:
    """Return the first line of `etcd --version`."""
    output = subprocess.run([program(), "--version"], capture_output=True, text=True, check=True).stdout
    return output.splitlines()[0].strip()


class EtcdCluster(Members):
    """A fresh cluster of three; etcd's defaults in everything but addresses, certificates and directories."""

    name = "etcd"
    operation = f"POST /v3/kv/put of {VALUE_BYTES} bytes (v3 JSON gateway, HTTPS)"

    timing: tuple[str, ...] = ()
    """Flags for other times than etcd's defaults."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        super().__init__()
        self._api: dict[str, int] = {}
        self._base = ""
        self._files: TlsFiles | None = None
        self._value = base64.b64encode(bytes(range(256)) * (VALUE_BYTES // 256)).decode()

    async def start(self) -> None:
        """Start three members and return when one of them leads and all know it."""
        self._directory.mkdir(mode=0o700)
        tls, at = self._directory / "tls", SystemClock().now()
        authority = create_authority(tls, cluster_name="bench", cluster_id="bench", at=at)
        ports = free_ports(2 * len(MEMBERS))
        self._api = dict(zip(MEMBERS, ports, strict=False))
        peers = dict(zip(MEMBERS, ports[len(MEMBERS) :], strict=True))
        initial = ",".join(f"{member}=https://127.0.0.1:{port}" for member, port in peers.items())
        # One role for both kinds: only a replica's certificate may serve, and etcd's gateway dials itself with it.
        for member in MEMBERS:
            files = issue(authority, tls, role=Role.REPLICA, name=member, at=at, addresses=["127.0.0.1"])
            self._processes.start(
                member,
                [
                    str(program()),
                    f"--name={member}",
                    f"--data-dir={self._directory / member}",
                    f"--listen-client-urls=https://127.0.0.1:{self._api[member]}",
                    f"--advertise-client-urls=https://127.0.0.1:{self._api[member]}",
                    f"--listen-peer-urls=https://127.0.0.1:{peers[member]}",
                    f"--initial-advertise-peer-urls=https://127.0.0.1:{peers[member]}",
                    f"--initial-cluster={initial}",
                    "--initial-cluster-state=new",
                    "--client-cert-auth",
                    f"--trusted-ca-file={files.authority}",
                    f"--cert-file={files.certificate}",
                    f"--key-file={files.key}",
                    "--peer-client-cert-auth",
                    f"--peer-trusted-ca-file={files.authority}",
                    f"--peer-cert-file={files.certificate}",
                    f"--peer-key-file={files.key}",
                    *self.timing,
                    "--logger=zap",
                    "--log-level=error",
                ],
                self._directory / f"{member}.output",
            )
        self._files = issue(authority, tls, role=Role.OPERATOR, name="bench", at=at)
        await self.wait_ready()

    async def wait_ready(self) -> None:
        """Return when all members know the same leader."""
        deadline = time.monotonic() + START_WAIT_S
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=self.tls())) as session:
            while True:
                self.check()
                try:
                    await self.leader(session)
                    return
                except (aiohttp.ClientError, ServerFailed, ValueError) as error:
                    if time.monotonic() > deadline:
                        raise ServerFailed(f"etcd has no leader after {START_WAIT_S:g} s: {error}") from error
                await asyncio.sleep(0.1)

    def tls(self) -> ssl.SSLContext:
        """Return the client's side of mutual TLS."""
        if self._files is None:
            raise ServerFailed("the cluster has not been started")
        return client_context(self._files)

    def control(self, *words: str) -> list[str]:
        """Return the command line of etcdctl at one member, with TLS, as an operator has it in his environment."""
        if self._files is None:
            raise ServerFailed("the cluster has not been started")
        files = self._files
        tls = [f"--cacert={files.authority}", f"--cert={files.certificate}", f"--key={files.key}"]
        return [str(program("etcdctl")), f"--endpoints={next(iter(self.bases().values()))}", *tls, *words]

    async def leader(self, session: aiohttp.ClientSession) -> str:
        """Return the URL of the member that leads and that every member knows as leader."""
        leaders: dict[str, str] = {}
        known = set()
        for port in self._api.values():
            base = f"https://127.0.0.1:{port}"
            status = await self._post(session, base, "/v3/maintenance/status", {})
            leader = str(status.get("leader", "0"))
            known.add(leader)
            leaders[str(status["header"]["member_id"])] = base
        if len(known) != 1 or (only := known.pop()) not in leaders:
            raise ServerFailed("etcd's members do not agree on a leader yet")
        return leaders[only]

    def request(self, client: int, number: int) -> tuple[str, Mapping[str, Any]]:
        """Return a put of a new key."""
        key = base64.b64encode(f"bench/{client:04d}/{number:08d}".encode()).decode()
        return "/v3/kv/put", {"key": key, "value": self._value}

    def accepted(self, status: int, answer: Mapping[str, Any]) -> bool:
        """A put is answered after it was applied."""
        return status == 200 and "revision" in answer.get("header", {})

    async def committed(self, session: aiohttp.ClientSession, base: str) -> int:
        """Return how many keys there are, read linearizably."""
        everything = {"key": "AA==", "range_end": "AA==", "count_only": True}
        return int((await self._post(session, base, "/v3/kv/range", everything)).get("count", 0))

    def bases(self) -> dict[str, str]:
        """Return the address of each member's API."""
        return {name: f"https://127.0.0.1:{port}" for name, port in self._api.items()}

    def stop(self) -> None:
        """End the members and remove their data."""
        self._processes.stop()
        shutil.rmtree(self._directory, ignore_errors=True)

    async def _post(
        self, session: aiohttp.ClientSession, base: str, path: str, body: Mapping[str, Any]
    ) -> dict[str, Any]:
        async with session.post(base + path, json=body) as response:
            answer: dict[str, Any] = await response.json(content_type=None)
            if response.status != 200:
                raise ServerFailed(f"etcd answered {path} with {response.status}: {answer}")
            return answer
