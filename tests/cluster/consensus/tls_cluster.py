"""Replicas with real TLS, sockets and LMDB on loopback: in this process, or each in its own process."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NoReturn

import msgspec

from forebay.cluster.consensus import Consensus, NotLeader, PeerTls, Role, SnapshotRef, SnapshotSink, Timing
from forebay.cluster.security.credentials import Credentials
from forebay.cluster.security.identity import Role as Holder
from forebay.cluster.security.pki import Authority, create_authority, issue
from forebay.cluster.system.clock import SystemClock
from forebay.wal import Entry, Environment, Journal
from tests.ports import free_ports

CLUSTER = "6f1c0000000000000000000000000000"
FAST = Timing(election_min_s=0.15, election_max_s=0.3, heartbeat_s=0.04)
PATIENCE_S = 60.0
"""Time limit for steps that normally take milliseconds, for a busy machine."""


def make_members(names: list[str]) -> dict[str, str]:
    return {name: f"127.0.0.1:{port}" for name, port in zip(names, free_ports(len(names)), strict=True)}


def make_authority(directory: Path, cluster_id: str = CLUSTER) -> Authority:
    return create_authority(directory, cluster_name="test", cluster_id=cluster_id, at=SystemClock().now())


def certify(authority: Authority, directory: Path, name: str, role: Holder = Holder.REPLICA) -> PeerTls:
    addresses = ["127.0.0.1"] if role is Holder.REPLICA else []
    return issue(authority, directory, role=role, name=name, at=SystemClock().now(), addresses=addresses)


class Image(msgspec.Struct):
    """Snapshot of a ListMachine."""

    applied: list[bytes]
    digest: bytes
    revision: int


class ListMachine:
    """Trivial machine: a list of applied data."""

    def __init__(self, journal: Journal, directory: Path) -> None:
        self.journal = journal
        self.directory = directory
        self.snapshot: SnapshotRef | None = None
        self.installs = 0
        self.applied: list[bytes] = []
        self.waiting: dict[tuple[int, int], asyncio.Future[None]] = {}
        self.changed = asyncio.Event()

    def apply(self, index: int, term: int, data: bytes) -> None:
        self.journal.record_applied(Entry(index, term, data), index)
        self.applied.append(data)
        waiter = self.waiting.pop((index, term), None)
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
        self.changed.set()

    def take_snapshot(self) -> int:
        journal = self.journal
        index, term = journal.applied_index, journal.term_of(journal.applied_index)
        assert term is not None
        path = self.directory / "snapshot"
        path.write_bytes(msgspec.msgpack.encode(Image(self.applied, journal.applied_digest, journal.applied_revision)))
        self.snapshot = SnapshotRef(path, index, term, path.stat().st_size)
        return index

    def newest_snapshot(self) -> SnapshotRef | None:
        return self.snapshot

    def snapshot_refused(self, index: int) -> None:
        pass

    def begin_install(self, index: int, term: int) -> SnapshotSink:
        return ListSink(self, index, term)


class ListSink:
    """Receives a snapshot of another ListMachine."""

    def __init__(self, machine: ListMachine, index: int, term: int) -> None:
        self._machine, self._index, self._term = machine, index, term
        self._data = bytearray()

    def write(self, offset: int, data: bytes) -> None:
        assert offset == len(self._data)
        self._data += data

    @property
    def received_bytes(self) -> int:
        return len(self._data)

    def verify(self, done: Callable[[], None]) -> None:
        done()

    def finish(self) -> None:
        image = msgspec.msgpack.decode(self._data, type=Image)
        self._machine.journal.reset_to(self._index, self._term, image.digest, image.revision)
        self._machine.applied = image.applied
        self._machine.installs += 1
        self._machine.changed.set()

    def abort(self) -> None:
        self._data.clear()

    def suspend(self) -> None:
        self._data.clear()


class Node:
    """One replica with real lower layers."""

    def __init__(
        self,
        directory: Path,
        name: str,
        members: dict[str, str],
        tls: PeerTls,
        *,
        timing: Timing = FAST,
    ) -> None:
        self.name = name
        self._given, self._timing = (directory, name, members, tls), timing
        self.failures: list[BaseException] = []
        self.environment = Environment.open(
            directory / name, cluster_id=CLUSTER, replica=name, create=True, map_size_bytes=256 << 20
        )
        self.journal = Journal(self.environment)
        self.machine = ListMachine(self.journal, directory / name)
        # The ledger up to the applied mark is the state that a controller would have rebuilt.
        self.machine.applied = [self.journal.entry(i).data for i in range(1, self.journal.applied_index + 1)]
        self.consensus = Consensus(
            me=name,
            members=members,
            cluster_id=CLUSTER,
            journal=self.journal,
            machine=self.machine,
            timing=timing,
            tls=Credentials(tls, serves=True),
            clock=SystemClock(),
            on_change=self.machine.changed.set,
            fail=self._fail,
        )

    def again(self) -> "Node":
        """Restart the same replica on its disk."""
        return Node(*self._given, timing=self._timing)

    def _fail(self, error: BaseException) -> NoReturn:
        self.failures.append(error)
        self.machine.changed.set()
        raise SystemError("the replica would have ended here") from error

    async def stop(self) -> None:
        await self.consensus.stop()
        self.environment.close()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for events of this replica until `condition()`."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self.machine.changed.clear()
                if not condition():
                    await self.machine.changed.wait()

    async def commit(self, data: bytes) -> tuple[int, int]:
        place = self.consensus.propose(data)
        waiter = self.machine.waiting[place] = asyncio.get_running_loop().create_future()
        await waiter
        return place


async def until_leader(nodes: list[Node]) -> Node:
    """Wait until one of the replicas is a ready leader."""
    tasks = [
        asyncio.create_task(node.until(lambda c=node.consensus: c.role is Role.LEADER and c.ready)) for node in nodes
    ]  # type: ignore[misc]
    done, rest = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)
    for task in done:
        task.result()
    return next(node for node in nodes if node.consensus.role is Role.LEADER)


async def with_nodes(directory: Path, count: int, work: Callable[[list[Node]], Awaitable[None]]) -> None:
    """Run `work` with a started cluster in this process, then stop the cluster."""
    names = [f"r{number}" for number in range(1, count + 1)]
    members = make_members(names)
    authority = make_authority(directory / "tls")
    nodes = [Node(directory, name, members, certify(authority, directory / "tls", name)) for name in names]
    try:
        for node in nodes:
            await node.consensus.start()
        await work(nodes)
    finally:
        for node in nodes:
            await node.stop()


async def serve(directory: Path, name: str, members: dict[str, str]) -> None:
    """Run a replica as a process: commands on stdin (a line is an entry to commit), answers on stdout."""
    tls = directory / "tls"
    files = PeerTls(authority=tls / "ca.pem", certificate=tls / f"{name}.pem", key=tls / f"{name}.key")
    node = Node(directory, name, members, files)
    await node.consensus.start()

    async def tell() -> None:
        shown = None
        while True:
            node.machine.changed.clear()
            status = (node.consensus.role.value, node.consensus.term, node.consensus.ready)
            if status != shown:
                shown = status
                print("status", *status, flush=True)
            await node.machine.changed.wait()

    telling = asyncio.create_task(tell())
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := (await reader.readline()).strip():
        verb, _, word = line.partition(b" ")
        if verb == b"commit":
            try:
                await node.commit(b"\x01" + word)
            except NotLeader:
                print("rejected", word.decode(), flush=True)
            else:
                print("acknowledged", word.decode(), flush=True)
        elif verb == b"list":
            await node.until(lambda wanted=int(word): node.consensus.applied_index >= wanted)  # type: ignore[misc]
            print("applied", *(data[1:].decode() for data in node.machine.applied if data[:1] != b"\0"), flush=True)
        elif verb == b"index":
            print("index", node.consensus.applied_index, flush=True)
    telling.cancel()
    await node.stop()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), sys.argv[2], dict(pair.split("=") for pair in sys.argv[3:])))
