"""Idle cluster: minimal work to keep its leader; and the choice of a candidate after silence."""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path

import pytest
import uvloop

from forebay.cluster.consensus.frames import AppendReply, AppendRequest, Heartbeat, VoteReply, VoteRequest
from forebay.cluster.consensus.interface import Role, Timing
from forebay.cluster.consensus.leader_election import FIRST_SHARE, election_range_s
from tests.cluster.consensus.harness import TIMING, Harness
from tests.cluster.consensus.simulator import Simulation
from tests.cluster.consensus.tls_cluster import Node, certify, make_authority, make_members

PATIENT = Timing(election_min_s=60.0, election_max_s=120.0, heartbeat_s=10.0)


def counting(node: Node) -> list[int]:
    """Return a list of the terms of this replica's ticks from now on."""
    ticks = []
    tick = node.consensus._engine.tick

    def counted() -> None:
        ticks.append(node.consensus.term)
        tick()

    node.consensus._engine.tick = counted  # type: ignore[method-assign]
    return ticks


def alone(tmp_path: Path) -> Node:
    """Return the first of three replicas; the other two are absent."""
    authority = make_authority(tmp_path / "tls")
    tls = certify(authority, tmp_path / "tls", "r1")
    return Node(tmp_path, "r1", make_members(["r1", "r2", "r3"]), tls, timing=PATIENT)


def count_ticks(sim: Simulation) -> Counter[str]:
    ticks: Counter[str] = Counter()
    for name, replica in sim.replicas.items():
        engine = replica.engine
        assert engine is not None

        def tick(name: str = name, tick: object = engine.tick) -> None:
            ticks[name] += 1
            tick()  # type: ignore[operator]

        engine.tick = tick  # type: ignore[method-assign]
    return ticks


@pytest.mark.parametrize("replicas", [3, 5])
def test_idle_leader_ticks_once_a_heartbeat_and_followers_never(replicas: int) -> None:
    with Simulation(1, replicas=replicas) as sim:
        leader = sim.elect()
        sim.run(5 * TIMING.idle_flush_s)
        term = sim.engine(leader.name).term
        ticks, sim.sent = count_ticks(sim), []
        beats = 40
        sim.run((beats + 0.5) * TIMING.heartbeat_s)
        assert set(ticks) == {leader.name}
        assert beats <= ticks[leader.name] <= beats + 1
        sent = Counter((sender, receiver, type(message)) for sender, receiver, message in sim.sent)
        others = [other.name for other in sim.others(leader)]
        assert set(sent) == {(leader.name, other, Heartbeat) for other in others} | {
            (other, leader.name, AppendReply) for other in others
        }
        assert {sent[leader.name, other, Heartbeat] for other in others} == {ticks[leader.name]}
        assert max(sent.values()) <= ticks[leader.name] + 1  # plus a reply to an earlier heartbeat
        assert sim.engine(leader.name).term == term


def test_heartbeat_replies_keep_a_leader_and_release_reads_without_a_tick() -> None:
    with Simulation(2) as sim:
        leader = sim.elect()
        engine = sim.engine(leader.name)
        term = engine.term
        sim.run(20 * TIMING.election_max_s)
        assert (engine.role, engine.term) == (Role.LEADER, term)
        told: list[int | None] = []
        engine.read(told.append)
        sim.schedule_tick(leader)
        assert sim.run(8 * sim.latency_s, until=lambda: bool(told))
        assert told == [engine.commit_index]
        # The leader also notices missing replies.
        sim.black = {(other.name, leader.name) for other in sim.others(leader)}
        assert sim.run(2 * TIMING.election_max_s, until=lambda: engine.role is not Role.LEADER)


def test_reply_leaves_at_once_if_the_journal_is_clean_otherwise_after_the_sync() -> None:
    harness = Harness()
    harness.follow([(1, b"\x00")], commit=1)
    harness.take(AppendReply)
    assert harness.engine.receive("r2", Heartbeat(1, 2, 1, True)) is False
    assert harness.take(AppendReply) == [AppendReply(1, 2, 1)]
    assert harness.engine.receive("r2", AppendRequest(1, 3, 1, 1, 1, True, [(1, b"\x01a")])) is True
    assert harness.engine.receive("r2", Heartbeat(1, 4, 1, True)) is True
    assert harness.take(AppendReply) == []
    harness.engine.tick()
    assert [reply.seq for reply in harness.take(AppendReply)] == [3, 4]


def test_heartbeat_that_commits_requests_a_tick() -> None:
    harness = Harness()
    harness.follow([(1, b"\x00"), (1, b"\x01a")], commit=1)
    assert harness.engine.receive("r2", Heartbeat(1, 2, 2, True)) is True
    harness.engine.tick()
    assert harness.engine.applied_index == 2


def proposing() -> tuple[Harness, int, dict[str, AppendRequest]]:
    """Return a leader that has sent an entry, the entry's index, and the requests with it, by peer."""
    harness = Harness()
    harness.lead()
    index, _ = harness.engine.propose(b"\x01a")
    harness.engine.tick()
    return harness, index, {peer: message for peer, message in harness.out if isinstance(message, AppendRequest)}


def test_reply_that_advances_a_peer_requests_a_tick() -> None:
    harness, index, requests = proposing()
    assert harness.engine.receive("r2", AppendReply(harness.engine.term, requests["r2"].seq, index)) is True
    harness.engine.tick()
    assert harness.engine.commit_index == index


def test_proposal_during_a_postponed_sync_is_due_at_once() -> None:
    harness, index, requests = proposing()
    for peer, request in requests.items():
        harness.engine.receive(peer, AppendReply(harness.engine.term, request.seq, index))
    harness.engine.tick()
    assert harness.journal.dirty
    assert harness.engine.next_due_s() > harness.clock.now_s
    harness.engine.propose(b"\x01b")
    assert harness.engine.next_due_s() < harness.clock.now_s
    harness.engine.tick()
    harness.settle()
    assert not harness.journal.dirty


def acknowledged(*, handing_over: bool) -> bool:
    """Let one follower commit an entry; return whether the other's reply requests a tick."""
    harness, index, requests = proposing()
    harness.give("r2", AppendReply(harness.engine.term, requests["r2"].seq, index))
    harness.settle()
    assert harness.engine.commit_index == index
    if handing_over:
        harness.engine.transfer("r3")
        harness.settle()
    return harness.engine.receive("r3", AppendReply(harness.engine.term, requests["r3"].seq, index))


def test_reply_about_committed_entries_requests_a_tick_only_during_a_transfer() -> None:
    assert acknowledged(handing_over=False) is False
    assert acknowledged(handing_over=True) is True


def test_driver_ticks_only_for_frames_that_request_it(tmp_path: Path) -> None:
    async def work() -> None:
        node = alone(tmp_path)
        engine = node.consensus._engine
        ticks = counting(node)
        await node.consensus.start()

        async def give(message: AppendRequest | Heartbeat) -> int:
            del ticks[:]
            node.consensus.on_frame("r2", message)
            for _ in range(5):
                await asyncio.sleep(0)
            return len(ticks)

        try:
            assert await give(AppendRequest(1, 1, 0, 0, 1, True, [(1, b"\x00")])) > 0
            assert engine.applied_index == 1
            assert [await give(Heartbeat(1, seq, 1, True)) for seq in range(2, 12)] == [0] * 10
            assert await give(AppendRequest(1, 12, 1, 1, 2, True, [(1, b"\x01a")])) > 0
            assert engine.applied_index == 2
        finally:
            await node.stop()

    asyncio.run(work())


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_timer_due_within_a_millisecond_is_moved_like_any_other(
    tmp_path: Path, run: Callable[[Coroutine[None, None, None]], None]
) -> None:
    async def work() -> None:
        node = alone(tmp_path)
        await node.consensus.start()
        await asyncio.sleep(0)
        engine, now_s = node.consensus._engine, node.consensus._clock.monotonic_s
        due_s = now_s() + 60.0
        engine.next_due_s = lambda: due_s  # type: ignore[method-assign]
        ticks = counting(node)
        try:
            node.consensus._set_timer()
            for wait_s in (0.0004, 0.0002, 30.0):
                due_s = now_s() + wait_s
                node.consensus._set_timer()
            assert ticks == []
            due_s = now_s() + 0.0003
            node.consensus._set_timer()
            async with asyncio.timeout(20.0):
                while not ticks:
                    await asyncio.sleep(0.001)
            due_s = now_s() + 60.0
        finally:
            await node.stop()

    run(work())


@pytest.mark.parametrize("replicas", [2, 3, 4, 5, 7])
def test_followers_of_one_leader_draw_timeouts_from_disjoint_ranges(replicas: int) -> None:
    names = [f"r{number}" for number in range(1, replicas + 1)]
    for leader in names:
        ranges = []
        for me in names:
            if me != leader:
                engine = Harness(replicas, me=me).engine
                assert election_range_s(engine.raft) == (TIMING.election_min_s, TIMING.election_max_s)
                engine.receive(leader, Heartbeat(1, 1, 0, True))
                ranges.append(election_range_s(engine.raft))
        ends_s = [round(end_s, 9) for pair in ranges for end_s in pair]
        assert ends_s == sorted(ends_s)
        assert ends_s[0] == TIMING.election_min_s
        assert ends_s[-1] <= TIMING.election_max_s
        assert all(first_s < last_s for first_s, last_s in ranges)


def test_silent_leader_is_replaced_by_the_first_candidate() -> None:
    span_s = TIMING.election_max_s - TIMING.election_min_s
    for seed in range(20):
        with Simulation(seed) as sim:
            silent = sim.elect()
            sim.run(1.0 + seed / 20 * TIMING.heartbeat_s)
            term = sim.engine(silent.name).term
            sim.black = {pair for other in sim.others(silent) for pair in ((silent.name, other.name),)}
            began_s = sim.clock.now_s
            assert sim.run(5.0, until=lambda: len({t for t in sim.leaders if t > term}) > 0)  # noqa: B023
            taken_s = sim.clock.now_s - began_s
            assert taken_s <= TIMING.election_min_s + FIRST_SHARE * span_s / 2 + 10 * sim.latency_s, seed
            assert min(t for t in sim.leaders if t > term) == term + 1, seed


@pytest.mark.parametrize(("early_heartbeats", "answered"), [(0.4, True), (0.6, False)])
def test_voter_with_a_slightly_later_last_heartbeat_still_votes(early_heartbeats: float, answered: bool) -> None:
    harness = Harness(me="r3")
    harness.engine.receive("r2", Heartbeat(1, 1, 0, True))
    harness.engine.tick()
    harness.take(AppendReply)
    harness.clock.now_s += TIMING.election_min_s - early_heartbeats * TIMING.heartbeat_s
    harness.give("r1", VoteRequest(1, 1, 0, 0, True))
    assert [reply.granted for reply in harness.take(VoteReply)] == [True] * answered
