"""Reads at followers (ReadIndex, thesis 6.4): never older than the request, and never hanging without a majority."""

from __future__ import annotations

import random

import pytest

from forebay.cluster.consensus import log_replication
from forebay.cluster.consensus.frames import Heartbeat, ReadReply, ReadRequest
from forebay.cluster.consensus.interface import Role
from forebay.cluster.consensus.state import RaftState
from tests.cluster.consensus.harness import Harness
from tests.cluster.consensus.simulator import Replica, Simulation, Violation
from tests.cluster.consensus.test_simulation import fault

WORLDS = 40
FAULTY_S = 6.0


class Reads:
    """Reads at followers, each compared with the entries committed before the request."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.answers = 0

    def ask(self, replica: Replica) -> None:
        engine = replica.engine
        assert engine is not None
        floor = max(self.sim.committed, default=0)

        def answered(index: int | None) -> None:
            if index is not None:
                self.answers += 1
                if index < floor:
                    raise Violation(f"stale read: {replica.name} may answer from {index}; {floor} was committed before")

        engine.ask_leader(b"", answered)
        self.sim.schedule_tick(replica)


def world(seed: int) -> int:
    """Let followers read under all faults; return the number of answered reads."""
    with Simulation(seed, replicas=5 if seed % 5 == 4 else 3, latency_s=0.004) as sim:
        rng, chance = sim.random, random.Random(seed)
        sim.duplicates, sim.losses = chance.choice([0.0, 0.1]), chance.choice([0.0, 0.02])
        reads, number, next_fault_s = Reads(sim), 0, 0.5
        while sim.clock.now_s < FAULTY_S:
            sim.run(0.02)
            for replica in sim.replicas.values():
                if replica.engine is None:
                    continue
                if chance.random() < 0.5:
                    reads.ask(replica)
                if replica.engine.role is Role.LEADER and replica.propose(b"\x01%d" % number):
                    number += 1
                    sim.tick(replica)
            if sim.clock.now_s >= next_fault_s:
                fault(sim, rng)
                next_fault_s = sim.clock.now_s + chance.expovariate(4.0)
        return reads.answers


@pytest.mark.campaign(3)
def test_read_at_a_follower_is_never_older_than_its_request_under_faults() -> None:
    assert sum(world(seed) for seed in range(WORLDS)) > 20 * WORLDS


def cut_off() -> list[int]:
    """Return the indexes that a follower gets while isolated with a leader that the others depose."""
    with Simulation(3, replicas=5) as sim:
        leader = sim.elect()
        beside, *majority = sim.others(leader)
        for one in (leader, beside):
            for other in majority:
                sim.black |= {(one.name, other.name), (other.name, one.name)}
        heard: list[int | None] = []
        assert beside.engine is not None
        # Before and after the old leader notices.
        for _ in range(40):
            beside.engine.ask_leader(b"", heard.append)
            sim.run(0.05)
        assert sim.leader() in majority
        return [index for index in heard if index is not None]


def test_follower_isolated_with_a_deposed_leader_gets_no_index() -> None:
    assert cut_off() == []


def test_leader_that_answers_without_a_majority_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def hasty(raft: RaftState, peer: str, request: ReadRequest) -> None:
        if raft.leads:
            raft.outbox.send(peer, ReadReply(raft.term, request.seq, raft.commit_index))

    monkeypatch.setattr(log_replication, "on_read_request", hasty)
    assert cut_off() != []


def followed(began_s: float = 0.0) -> Harness:
    """Return an engine that follows r2, in a process that began at `began_s`."""
    bench = Harness(began_s=began_s)
    bench.give("r2", Heartbeat(1, 1, 0, True))
    bench.take(Heartbeat)
    return bench


def test_reply_of_another_term_or_sender_is_ignored() -> None:
    bench = followed()
    heard: list[int | None] = []
    bench.engine.ask_leader(b"", heard.append)
    (asked,) = bench.take(ReadRequest, "r2")
    bench.give("r3", ReadReply(1, asked.seq, 9))
    bench.give("r2", ReadReply(1, asked.seq + 1, 9))
    bench.give("r2", ReadReply(0, asked.seq, 9))
    assert heard == []
    bench.give("r2", ReadReply(1, asked.seq, 5))
    bench.give("r2", ReadReply(1, asked.seq, 7))
    assert heard == [5]


@pytest.mark.parametrize("asked_before", [1, 2, 1_000])
@pytest.mark.parametrize("down_s", [0.001, 1.0, 86_400.0])
def test_reply_to_a_request_of_the_previous_process_is_ignored(asked_before: int, down_s: float) -> None:
    before = followed(began_s=1_800_000_000.0)
    for _ in range(asked_before):
        before.engine.ask_leader(b"", lambda index: None)
    late = [ReadReply(1, asked.seq, 5) for asked in before.take(ReadRequest, "r2")]
    after = followed(began_s=before.clock.now_s + down_s)
    heard: list[int | None] = []
    for _ in range(log_replication.ASKED_MAX):
        after.engine.ask_leader(b"", heard.append)
    for reply in late:
        after.give("r2", reply)
    assert len(late) == asked_before and heard == []


def test_unanswered_read_requests_are_bounded() -> None:
    bench = followed()
    heard: list[int | None] = []
    for _ in range(10 * log_replication.ASKED_MAX):
        bench.engine.ask_leader(b"", heard.append)
    assert len(bench.engine.raft.asked_reads) == log_replication.ASKED_MAX
    assert heard == [None] * (9 * log_replication.ASKED_MAX)


def test_leader_takes_news_only_from_members_in_its_own_term() -> None:
    bench = Harness()
    bench.lead()
    told: list[tuple[str, bytes]] = []
    bench.hear = lambda peer, news: told.append((peer, news))  # type: ignore[attr-defined]
    term = bench.engine.term
    bench.give("r2", ReadRequest(term, 900, b"news"))
    bench.give("r2", ReadRequest(term - 1, 901, b"old"))
    bench.give("r9", ReadRequest(term, 902, b"strange"))
    assert told == [("r2", b"news")]
