"""A leader whose own timer fired late (H15) gets one grace period, even if a minority keeps responding."""

from collections.abc import Iterable

import pytest

from forebay.cluster.consensus.interface import Role
from forebay.cluster.consensus.log_replication import quorum_deadline_s
from forebay.wal.configuration import ChangeKind
from tests.cluster.consensus.simulator import TIMING, Replica, Simulation
from tests.cluster.consensus.test_membership_hazards import changed

LATE_S = 1.6 * TIMING.heartbeat_s
"""Delay of the tick at the deadline: more than a heartbeat, up to which a tick counts as punctual."""

ALL_TOGETHER_S = TIMING.election_max_s + LATE_S + 3 * TIMING.heartbeat_s
"""Time in which a leader must notice the loss of its majority: a timeout, a late tick, one grace period and its tick.
"""


def cut(sim: Simulation, pairs: Iterable[tuple[str, str]]) -> None:
    for pair in pairs:
        sim.cut.add(pair)
        sim.break_link(*pair)


def steps_down(sim: Simulation, leader: Replica, late_s: float, within_s: float = ALL_TOGETHER_S) -> bool:
    """Stop the whole machine around the leader's deadline; return whether it steps down `within_s`."""
    engine, began_s = sim.engine(leader.name), sim.clock.now_s
    sim.run(quorum_deadline_s(engine.raft) - 0.01 - sim.clock.now_s)
    assert engine.role is Role.LEADER
    sim.clock.now_s += 0.01 + late_s
    return sim.run(began_s + within_s - sim.clock.now_s, until=lambda: engine.role is not Role.LEADER)


@pytest.mark.parametrize("late_s", [0.0, LATE_S])
@pytest.mark.parametrize("one_way", [False, True])
def test_h15_late_leader_with_one_of_four_peers_steps_down_after_one_grace(one_way: bool, late_s: float) -> None:
    with Simulation(7, replicas=5) as sim:
        leader = sim.commit(b"\x01a")
        kept, *lost = [replica.name for replica in sim.others(leader)]
        cut(sim, [(name, leader.name) for name in lost])
        if not one_way:
            cut(sim, [pair for name in lost for side in (leader.name, kept) for pair in ((name, side), (side, name))])
        assert steps_down(sim, leader, late_s)
        assert sim.run(5.0, until=lambda: sim.leader() not in (None, leader))


@pytest.mark.parametrize("late_s", [0.0, LATE_S])
def test_h15_late_leader_with_only_a_learner_steps_down_after_one_grace(late_s: float) -> None:
    with Simulation(7, membership=True) as sim:
        leader = sim.commit(b"\x01a")
        added = changed(sim, ChangeKind.ADD, "r4")
        learner = sim.join(added.learners[0].id)
        assert sim.run(5.0, until=lambda: learner.journal.last_index == leader.journal.last_index)
        for replica in sim.others(leader):
            if replica is not learner:
                sim.isolate(replica.name)
        assert steps_down(sim, leader, late_s)


def test_h15_late_leader_whose_majority_responds_continues_to_lead() -> None:
    with Simulation(7, replicas=5) as sim:
        leader = sim.commit(b"\x01a")
        engine = sim.engine(leader.name)
        for _ in range(5):
            sim.run(1.0)
            sim.clock.now_s += TIMING.election_max_s + LATE_S
            sim.tick(leader)
            assert engine.role is Role.LEADER, "messages sent meanwhile wait to be read"
