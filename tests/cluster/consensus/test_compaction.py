"""Journal entries that a leader keeps for peers that catch up (H9, H16), and for how long."""

from collections.abc import Callable

import pytest

from forebay.cluster.config.config import Config
from forebay.cluster.consensus import log_compaction
from forebay.cluster.consensus.interface import Role
from forebay.cluster.server import controller as controller_module
from tests.cluster.consensus.simulator import Replica, Simulation
from tests.cluster.harness import Harness, story
from tests.cluster.server.test_controller import small_snapshots, submit_until

RATE_HZ = 200
PERIOD_ENTRIES = 200
"""Number of entries between snapshots: one snapshot a second."""

MARGIN_ENTRIES = 20
VERIFY_S = 1.2
"""Longer than a snapshot period."""


def under_load(sim: Simulation, leader: Replica) -> None:
    """Let the leader propose at a steady rate, and take a snapshot every PERIOD_ENTRIES."""
    taken = leader.journal.base_index

    def load() -> None:
        nonlocal taken
        engine = sim.engine(leader.name)
        if engine.role is Role.LEADER:
            leader.propose(b"\x01%d" % leader.journal.last_index)
            sim.tick(leader)
            if engine.applied_index - taken >= PERIOD_ENTRIES:
                taken = engine.applied_index
                leader.take_snapshot(MARGIN_ENTRIES)
        sim.at(1 / RATE_HZ, load)

    load()


def one_that_fell_behind(sim: Simulation) -> tuple[Replica, Replica]:
    """Return a leader under load, and a follower that needs a snapshot and verifies it slowly."""
    leader = sim.commit(b"\x01a")
    behind = sim.others(leader)[0]
    behind.verify_s = VERIFY_S
    sim.isolate(behind.name)
    under_load(sim, leader)
    assert sim.run(10.0, until=lambda: leader.journal.base_index > behind.journal.last_index)
    return leader, behind


def caught_up(leader: Replica, behind: Replica) -> Callable[[], bool]:
    return lambda: leader.journal.last_index - behind.journal.last_index < 5


def test_h16_peer_slower_than_the_snapshot_period_catches_up() -> None:
    with Simulation(3) as sim:
        leader, behind = one_that_fell_behind(sim)
        sim.heal()
        assert sim.run(5 * VERIFY_S, until=caught_up(leader, behind))
        assert behind.installs == 1
        sim.run(2 * PERIOD_ENTRIES / RATE_HZ)
        assert leader.journal.last_index - leader.journal.base_index <= PERIOD_ENTRIES + 2 * MARGIN_ENTRIES


def test_disconnected_peer_holds_back_no_compaction() -> None:
    with Simulation(3) as sim:
        leader, behind = one_that_fell_behind(sim)
        sim.heal()
        assert sim.run(5.0, until=lambda: sim.engine(behind.name).raft.receiver._verifying)
        sim.isolate(behind.name)
        sim.run(4 * PERIOD_ENTRIES / RATE_HZ)
        assert leader.journal.last_index - leader.journal.base_index <= PERIOD_ENTRIES + 2 * MARGIN_ENTRIES


@pytest.mark.parametrize("phase", ["verifies for ever", "never answers an entry"])
def test_peer_that_only_seems_alive_holds_back_a_bounded_part(monkeypatch: pytest.MonkeyPatch, phase: str) -> None:
    held = 3 * PERIOD_ENTRIES
    monkeypatch.setattr(log_compaction, "HELD_BACK_ENTRIES", held)
    with Simulation(3) as sim:
        leader, behind = one_that_fell_behind(sim)
        behind.verify_s = 1000.0 if phase == "verifies for ever" else 0.0
        sim.heal()
        if phase == "never answers an entry":
            assert sim.run(5.0, until=caught_up(leader, behind))
            sim.black |= {(behind.name, leader.name), (leader.name, behind.name)}
        longest = 0
        for _ in range(80):
            sim.run(0.1)
            longest = max(longest, leader.journal.last_index - leader.journal.base_index)
        assert held < longest <= held + PERIOD_ENTRIES + 2 * MARGIN_ENTRIES


@story
async def test_margin_before_a_snapshot_covers_snapshot_periods(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller_module, "COMPACTION_MARGIN_ENTRIES", 1)
    async with Harness(small_snapshots(config, 5)) as harness:
        await submit_until(harness, lambda: bool(harness.engine.compacted))
        kept = harness.controller.snapshot_index - harness.storage.journal.base_index
        assert (
            5 * controller_module.COMPACTION_MARGIN_PERIODS
            <= kept
            < 5 * (controller_module.COMPACTION_MARGIN_PERIODS + 2)
        )
