"""Engine on the asyncio loop: failures stop the replica, and waiters are notified (H6, H7, H17, H23)."""

import asyncio
from pathlib import Path

import pytest

from forebay.cluster.consensus import ChangeRefused, Consensus, EntryTooLarge, NotLeader, Role, leadership_transfer
from forebay.cluster.system.clock import SystemClock
from forebay.wal import StorageFailed
from tests.cluster.consensus.tls_cluster import CLUSTER, FAST, PATIENCE_S, Node, until_leader, with_nodes


def test_h23_failed_sync_ends_the_replica_and_the_others_continue(tmp_path: Path) -> None:
    async def work(nodes: list[Node]) -> None:
        leader = await until_leader(nodes)
        await leader.commit(b"\x01before")

        def fail_commit(transaction: object) -> None:
            raise OSError(5, "Input/output error")

        leader.environment.commit = fail_commit
        leader.consensus.propose(b"\x01lost")
        await leader.until(lambda: bool(leader.failures))
        assert isinstance(leader.failures[0], StorageFailed)
        with pytest.raises(NotLeader):
            leader.consensus.propose(b"\x01more")
        rest = [node for node in nodes if node is not leader]
        new = await until_leader(rest)
        await new.commit(b"\x01after")
        assert len(leader.failures) == 1

    asyncio.run(with_nodes(tmp_path, 3, work))


@pytest.mark.parametrize("failure", [ValueError("poison"), NotLeader(None)], ids=["ValueError", "NotLeader"])
def test_h06_any_exception_of_the_machine_ends_the_replica(tmp_path: Path, failure: Exception) -> None:
    async def work(nodes: list[Node]) -> None:
        leader = await until_leader(nodes)

        def poison(index: int, term: int, data: bytes) -> None:
            raise failure

        leader.machine.apply = poison  # type: ignore[method-assign]
        leader.consensus.propose(b"\x01poison")
        await leader.until(lambda: bool(leader.failures))
        assert leader.failures == [failure]
        assert leader.journal.applied_index == 1

    asyncio.run(with_nodes(tmp_path, 1, work))


def test_h23_journal_failure_at_a_proposal_ends_the_replica(tmp_path: Path) -> None:
    async def work(nodes: list[Node]) -> None:
        leader = await until_leader(nodes)
        failure = StorageFailed("EIO")

        def fail_append(entries: object) -> None:
            raise failure

        leader.journal.append = fail_append  # type: ignore[method-assign]
        with pytest.raises(SystemError):
            leader.consensus.propose(b"\x01a")
        assert leader.failures == [failure]

    asyncio.run(with_nodes(tmp_path, 1, work))


def test_h07_cancelled_waiter_does_no_harm(tmp_path: Path) -> None:
    async def work(nodes: list[Node]) -> None:
        leader = await until_leader(nodes)
        reads = [asyncio.create_task(leader.consensus.confirm_leadership()) for _ in range(3)]
        await asyncio.sleep(0)
        reads[1].cancel()
        assert await reads[0] == await reads[2] == leader.consensus.commit_index
        await leader.commit(b"\x01a")
        assert leader.failures == []

    asyncio.run(with_nodes(tmp_path, 3, work))


def test_h17_read_of_a_leader_that_loses_its_majority_gets_not_leader(tmp_path: Path) -> None:
    async def work(nodes: list[Node]) -> None:
        leader = await until_leader(nodes)
        for node in nodes:
            if node is not leader:
                await node.consensus.stop()
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(NotLeader):
                await leader.consensus.confirm_leadership()
        assert leader.consensus.role is not Role.LEADER

    asyncio.run(with_nodes(tmp_path, 3, work))


def test_rejected_proposal_does_no_harm(tmp_path: Path) -> None:
    async def work(nodes: list[Node]) -> None:
        leader = await until_leader(nodes)
        with pytest.raises(EntryTooLarge):
            leader.consensus.propose(b"x" * (2 << 20))
        with pytest.raises(ValueError, match="empty"):
            leader.consensus.propose(b"")
        await leader.commit(b"\x01a")

    asyncio.run(with_nodes(tmp_path, 1, work))


def test_replica_missing_from_the_member_list_is_rejected(tmp_path: Path) -> None:
    async def work(nodes: list[Node]) -> None:
        (node,) = nodes
        with pytest.raises(ValueError, match="'r7' is not among the members r1"):
            Consensus(
                me="r7",
                members={"r1": "127.0.0.1:1"},
                cluster_id=CLUSTER,
                journal=node.journal,
                machine=node.machine,
                timing=FAST,
                tls=None,  # type: ignore[arg-type]
                clock=SystemClock(),
                on_change=lambda: None,
                fail=node._fail,
            )

    asyncio.run(with_nodes(tmp_path, 1, work))


def test_replica_restarts_at_the_first_index_after_compaction(tmp_path: Path) -> None:
    async def work(nodes: list[Node]) -> None:
        leader = await until_leader(nodes)
        for number in range(5):
            await leader.commit(b"\x01%d" % number)
        leader.consensus.compact_to(4)
        assert leader.journal.first_index == 5
        await leader.commit(b"\x01after")
        assert leader.consensus.applied_index == leader.consensus.last_index == leader.consensus.commit_index

    asyncio.run(with_nodes(tmp_path, 1, work))


@pytest.mark.parametrize("what", ["propose", "confirm_leadership"])
def test_h19_requests_to_the_driver_are_handled_without_a_timer(tmp_path: Path, what: str) -> None:
    async def work(nodes: list[Node]) -> None:
        leader = await until_leader(nodes)
        await leader.commit(b"\x01before")
        consensus = leader.consensus
        while consensus._soon:
            await asyncio.sleep(0)
        if consensus._timer is not None:
            consensus._timer.cancel()
        consensus._set_timer = lambda: None  # type: ignore[method-assign]
        async with asyncio.timeout(PATIENCE_S):
            if what == "propose":
                await leader.commit(b"\x01after")
            else:
                assert await consensus.confirm_leadership() == consensus.commit_index

    asyncio.run(with_nodes(tmp_path, 1, work))


def test_transfer_that_ends_in_the_first_tick_after_a_pause_is_answered(tmp_path: Path) -> None:
    async def work(nodes: list[Node]) -> None:
        leader = await until_leader(nodes)
        await leader.commit(b"\x01before")
        transfer = asyncio.create_task(leader.consensus.transfer())
        await asyncio.sleep(0)
        engine = leader.consensus._engine
        assert engine.hands_over and not transfer.done()
        engine.raft.transfer_deadline_s = 0.0  # as after a pause of the process
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(ChangeRefused, match="has not taken over leadership yet, and may still do so"):
                await transfer
        assert leader.consensus.ready

    asyncio.run(with_nodes(tmp_path, 3, work))


@pytest.mark.parametrize("ends", ["stop", "failure"])
def test_replica_that_stops_during_a_transfer_releases_its_waiters(
    tmp_path: Path, ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(nodes: list[Node]) -> None:
        leader = await until_leader(nodes)
        await leader.commit(b"\x01before")
        consensus = leader.consensus
        monkeypatch.setattr(leadership_transfer, "hand_over", lambda raft, now_s: None)  # no TimeoutNow
        transfer = asyncio.create_task(consensus.transfer())
        await asyncio.sleep(0)
        waiting = set(consensus._watching)
        assert waiting
        if ends == "stop":
            await consensus.stop()
        else:
            with pytest.raises(SystemError):
                consensus._stop_for(StorageFailed("EIO"))
        assert all(future.done() for future in waiting)
        with pytest.raises(NotLeader, match="stopped while it transferred"):
            await transfer

    asyncio.run(with_nodes(tmp_path, 3, work))
