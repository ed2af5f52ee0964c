"""What a cluster does that nobody asks anything of: as little as keeps its leader; and who stands when it is silent."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from cluster.consensus.elections import FIRST_SHARE
from cluster.consensus.frames import AppendReply, AppendRequest, Heartbeat, VoteReply, VoteRequest
from cluster.consensus.interface import Role, Timing
from tests.cluster.consensus.rig import TIMING, Rig
from tests.cluster.consensus.simulator import Simulation
from tests.cluster.consensus.tls_cluster import Node, certify, make_authority, make_members


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
def test_an_idle_leader_ticks_once_a_heartbeat_and_its_followers_never(replicas: int) -> None:
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
        assert max(sent.values()) <= ticks[leader.name] + 1  # an answer to the last heartbeat before
        assert sim.engine(leader.name).term == term


def test_answers_to_heartbeats_keep_a_leader_and_release_reads_although_they_cause_no_tick() -> None:
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
        # And it notices when they stay out.
        sim.black = {(other.name, leader.name) for other in sim.others(leader)}
        assert sim.run(2 * TIMING.election_max_s, until=lambda: engine.role is not Role.LEADER)


def test_an_answer_leaves_at_once_if_the_journal_is_clean_and_with_the_sync_if_it_is_not() -> None:
    rig = Rig()
    rig.follow([(1, b"\x00")], commit=1)
    rig.take(AppendReply)
    assert rig.engine.receive("r2", Heartbeat(1, 2, 1, True)) is False
    assert rig.take(AppendReply) == [AppendReply(1, 2, 1)]
    assert rig.engine.receive("r2", AppendRequest(1, 3, 1, 1, 1, True, [(1, b"\x01a")])) is True
    assert rig.engine.receive("r2", Heartbeat(1, 4, 1, True)) is True
    assert rig.take(AppendReply) == []
    rig.engine.tick()
    assert [reply.seq for reply in rig.take(AppendReply)] == [3, 4]


def test_a_heartbeat_that_commits_asks_for_a_tick() -> None:
    rig = Rig()
    rig.follow([(1, b"\x00"), (1, b"\x01a")], commit=1)
    assert rig.engine.receive("r2", Heartbeat(1, 2, 2, True)) is True
    rig.engine.tick()
    assert rig.engine.applied_index == 2


def test_an_answer_that_moves_a_peer_on_asks_for_a_tick() -> None:
    rig = Rig()
    rig.lead()
    index, _ = rig.engine.propose(b"\x01a")
    rig.engine.tick()
    requests = dict(message for message in rig.out if isinstance(message[1], AppendRequest))
    assert rig.engine.receive("r2", AppendReply(rig.engine.term, requests["r2"].seq, index)) is True
    rig.engine.tick()
    assert rig.engine.commit_index == index


def test_the_driver_ticks_only_for_frames_that_ask_for_it(tmp_path: Path) -> None:
    async def work() -> None:
        members = make_members(["r1", "r2", "r3"])
        authority = make_authority(tmp_path / "tls")
        patient = Timing(election_min_s=60.0, election_max_s=120.0, heartbeat_s=10.0)
        node = Node(tmp_path, "r1", members, certify(authority, tmp_path / "tls", "r1"), timing=patient)
        engine = node.consensus._engine
        ticks = []
        tick = engine.tick

        def counted() -> None:
            ticks.append(engine.term)
            tick()

        engine.tick = counted  # type: ignore[method-assign]
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


@pytest.mark.parametrize("replicas", [2, 3, 4, 5, 7])
def test_followers_of_one_leader_draw_their_patience_from_ranges_of_their_own(replicas: int) -> None:
    names = [f"r{number}" for number in range(1, replicas + 1)]
    for leader in names:
        ranges = []
        for me in names:
            if me != leader:
                engine = Rig(replicas, me=me).engine
                assert engine._election_range_s() == (TIMING.election_min_s, TIMING.election_max_s)
                engine.receive(leader, Heartbeat(1, 1, 0, True))
                ranges.append(engine._election_range_s())
        ends_s = [round(end_s, 9) for pair in ranges for end_s in pair]
        assert ends_s == sorted(ends_s)
        assert ends_s[0] == TIMING.election_min_s
        assert ends_s[-1] <= TIMING.election_max_s
        assert all(first_s < last_s for first_s, last_s in ranges)


def test_a_leader_that_falls_silent_is_replaced_by_the_first_to_stand() -> None:
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
def test_who_heard_the_last_heartbeat_a_little_later_still_votes(early_heartbeats: float, answered: bool) -> None:
    rig = Rig(me="r3")
    rig.engine.receive("r2", Heartbeat(1, 1, 0, True))
    rig.engine.tick()
    rig.take(AppendReply)
    rig.clock.now_s += TIMING.election_min_s - early_heartbeats * TIMING.heartbeat_s
    rig.give("r1", VoteRequest(1, 1, 0, 0, True))
    assert [reply.granted for reply in rig.take(VoteReply)] == [True] * answered
