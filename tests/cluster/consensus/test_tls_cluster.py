"""Real replicas on loopback with TLS, sockets and LMDB: in one process, and as processes that are killed."""

import asyncio
import contextlib
import os
import sys
from pathlib import Path

import pytest

from forebay.cluster.consensus import NotLeader
from tests.cluster.consensus.tls_cluster import (
    PATIENCE_S,
    Node,
    certify,
    make_authority,
    make_members,
    until_leader,
    with_nodes,
)


def test_three_replicas_commit_and_apply_the_same_in_order(tmp_path: Path) -> None:
    async def work(nodes: list[Node]) -> None:
        leader = await until_leader(nodes)
        wanted = [b"\x01%d" % number for number in range(200)]
        await asyncio.gather(*(leader.commit(data) for data in wanted))
        last = leader.consensus.last_index
        for node in nodes:
            await node.until(lambda c=node.consensus: c.applied_index >= last)  # type: ignore[misc]
            assert [data for data in node.machine.applied if data[:1] != b"\0"] == wanted
        assert await leader.consensus.confirm_leadership() >= last
        follower = next(node for node in nodes if node is not leader)
        with pytest.raises(NotLeader) as rejection:
            follower.consensus.propose(b"\x01x")
        assert rejection.value.leader == leader.name
        assert {peer.name for peer in leader.consensus.peers()} == {n.name for n in nodes if n is not leader}
        assert all(peer.connected and peer.match_index == last for peer in leader.consensus.peers())

    asyncio.run(with_nodes(tmp_path, 3, work))


def test_stopped_leader_is_replaced_and_catches_up_on_return(tmp_path: Path) -> None:
    async def work(nodes: list[Node]) -> None:
        old = await until_leader(nodes)
        await old.commit(b"\x01before")
        await old.stop()
        rest = [node for node in nodes if node is not old]
        new = await until_leader(rest)
        await new.commit(b"\x01after")
        assert [data for data in new.machine.applied if data[:1] != b"\0"] == [b"\x01before", b"\x01after"]
        with contextlib.suppress(ValueError):
            nodes.remove(old)

    asyncio.run(with_nodes(tmp_path, 3, work))


def test_replica_that_needs_compacted_entries_gets_a_snapshot_and_later_entries(tmp_path: Path) -> None:
    async def work(nodes: list[Node]) -> None:
        leader = await until_leader(nodes)
        behind = next(node for node in nodes if node is not leader)
        await behind.consensus.stop()
        big = b"\x01" + b"x" * 100_000
        for _ in range(30):
            await leader.commit(big)
        leader.consensus.compact_to(leader.machine.take_snapshot())
        await leader.commit(b"\x01after")
        behind.environment.close()
        returned = nodes[nodes.index(behind)] = behind.again()
        await returned.consensus.start()
        last = leader.consensus.last_index
        await returned.until(lambda: returned.consensus.applied_index >= last)
        assert returned.machine.installs == 1
        assert returned.machine.applied == leader.machine.applied
        assert returned.journal.applied_digest == leader.journal.applied_digest
        await leader.commit(b"\x01more")

    asyncio.run(with_nodes(tmp_path, 3, work))


def test_single_replica_leads_and_commits(tmp_path: Path) -> None:
    async def work(nodes: list[Node]) -> None:
        leader = await until_leader(nodes)
        await leader.commit(b"\x01alone")
        assert await leader.consensus.confirm_leadership() == leader.consensus.commit_index

    asyncio.run(with_nodes(tmp_path, 1, work))


class Process:
    """Replica in a separate process."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self._process = process
        assert process.stdin is not None and process.stdout is not None
        self._in, self._out = process.stdin, process.stdout
        self.status: list[str] = []
        self._answers: asyncio.Queue[list[str]] = asyncio.Queue()
        self.changed = asyncio.Event()
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, directory: Path, name: str, members: dict[str, str]) -> "Process":
        pairs = [f"{key}={value}" for key, value in members.items()]
        command = [sys.executable, "-m", "tests.cluster.consensus.tls_cluster", str(directory), name, *pairs]
        pipe = asyncio.subprocess.PIPE
        root = Path(__file__).parents[3]
        environment = {**os.environ, "PYTHONPATH": str(root)}
        return cls(
            name,
            await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, cwd=root, env=environment),
        )

    async def _read(self) -> None:
        while line := (await self._out.readline()).decode().split():
            if line[0] == "status":
                self.status = line[1:]
            else:
                self._answers.put_nowait(line)
            self.changed.set()
        self.status = []
        self._answers.put_nowait(["gone"])
        self.changed.set()

    @property
    def leads(self) -> bool:
        return self.status[:1] == ["leader"] and self.status[2] == "True"

    async def ask(self, line: str) -> list[str]:
        with contextlib.suppress(OSError):
            self._in.write(line.encode() + b"\n")
            await self._in.drain()
        return await self._answers.get()

    async def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()
        await self._reading


async def until_one_leads(processes: list[Process]) -> Process:
    async with asyncio.timeout(PATIENCE_S):
        while not (leaders := [process for process in processes if process.leads]):
            for process in processes:
                process.changed.clear()
            waits = [asyncio.create_task(process.changed.wait()) for process in processes]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
    return leaders[0]


async def kill_leaders(directory: Path, rounds: int) -> tuple[list[str], list[list[str]], list[float]]:
    members = make_members(["r1", "r2", "r3"])
    authority = make_authority(directory / "tls")
    for name in members:
        certify(authority, directory / "tls", name)
    processes = {name: await Process.start(directory, name, members) for name in members}
    acknowledged, failovers, loop = [], [], asyncio.get_running_loop()
    try:
        for number in range(rounds):
            leader = await until_one_leads(list(processes.values()))
            for word in range(20):
                async with asyncio.timeout(PATIENCE_S):
                    answer = await leader.ask(f"commit {number}-{word}")
                if answer[0] == "acknowledged":
                    acknowledged.append(answer[1])
            began_s = loop.time()
            await leader.kill()
            await until_one_leads([process for process in processes.values() if process is not leader])
            failovers.append(loop.time() - began_s)
            processes[leader.name] = await Process.start(directory, leader.name, members)
            async with asyncio.timeout(PATIENCE_S):
                assert (await processes[leader.name].ask(f"list {20 * (number + 1)}"))[0] == "applied"
        leader = await until_one_leads(list(processes.values()))
        async with asyncio.timeout(PATIENCE_S):
            assert (await leader.ask("commit last"))[0] == "acknowledged"
            _, index = await leader.ask("index")
            applied = [(await process.ask(f"list {index}"))[1:] for process in processes.values()]
    finally:
        for process in processes.values():
            await process.kill()
    return acknowledged, applied, failovers


def test_leaders_killed_with_sigkill_are_replaced_without_loss(tmp_path: Path) -> None:
    acknowledged, applied, _ = asyncio.run(kill_leaders(tmp_path, rounds=3))
    assert len(acknowledged) >= 40
    assert applied[0] == applied[1] == applied[2]
    assert all(applied[0].count(word) == 1 for word in acknowledged)
