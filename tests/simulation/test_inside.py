"""The marks of every simulated replica are checked after each step, so that a wrong mark is found at once."""

from collections.abc import Callable

import pytest

from forebay.wal.journal import Entry
from forebay.wal.records import HardState
from tests.simulation.replicas import SimReplica
from tests.simulation.world import World


def leader_of(world: World) -> SimReplica:
    """Run until there is a leader, and somebody was told of something."""
    world.begin()
    assert world.run(30.0, lambda: world.leader() is not None and world.oracle.told_index > 3)
    leader = world.leader()
    assert leader is not None and not world.violations
    return leader


def durable(leader: SimReplica) -> None:
    raft = leader.engine._engine.raft
    raft.journal.append([Entry(raft.journal.last_index + 1, raft.term, b"\0")])
    raft.durable_index = raft.journal.last_index


def match(leader: SimReplica) -> None:
    raft = leader.engine._engine.raft
    for known in raft.progress.values():
        known.match = raft.journal.last_index + 1


def vote(leader: SimReplica) -> None:
    leader.engine._engine.raft.voted_for = None


def commit(leader: SimReplica) -> None:
    leader.engine._engine.raft.commit_index = leader.engine._engine.raft.journal.last_index + 1


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (durable, "its durable index is"),
        (match, "matches up to"),
        (vote, "with its vote for None"),
        (commit, "base, applied, commit and last are"),
    ],
)
def test_a_wrong_applied_mark_is_detected_after_its_step(wrong: Callable[[SimReplica], None], said: str) -> None:
    with World(4, profile="net") as world:
        leader = leader_of(world)
        wrong(leader)
        leader.loop.after_step()
        assert any(said in sentence for sentence in world.violations), world.violations


def test_a_forgotten_vote_is_detected_at_the_crash() -> None:
    with World(4, profile="net") as world:
        leader = leader_of(world)
        inside, disk = world.inside, leader.disk
        promised = inside._promised[leader.identity]
        inside._promised[leader.identity] = HardState(promised.term + 1, leader.identity)
        leader.crash()
        assert "had promised term" in world.violations[0] and "after a crash its disk says" in world.violations[0]
        assert disk.hard.term <= promised.term + 1


def test_an_acknowledgement_on_too_few_disks_is_detected_at_the_next_crash() -> None:
    with World(4, profile="net") as world:
        leader = leader_of(world)
        index = world.oracle.told_index
        for replica in world.replicas.values():
            if replica is not leader:
                replica.disk.holds = lambda *entry: False  # type: ignore[method-assign]
        leader.crash()
        assert world.violations == [
            f"entry {index}, which somebody was told of, is on 1 disks of the 3 voters of version 1 of the "
            "configuration: a majority could be without it"
        ]
