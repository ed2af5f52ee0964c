"""Slow disk without errors: its replica does not lead for long while another replica has a fast disk."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from forebay.cluster.system import SLOW_SYNC_S
from tests.simulation.replicas import SimReplica
from tests.simulation.scenarios import Story
from tests.simulation.world import World

SEEDS = range(6)
HANDED_OVER_S = 15.0
"""Within which a leader with a slow disk must have handed over: five syncs, a poll of duties, and its question."""
STANDS_LATER_S = 0.1
"""Sync from which on a replica surely stands later than the others: twice as long is longer than they differ by."""


@contextmanager
def telling(seed: int, replicas: int = 3) -> Iterator[Story]:
    with World(seed, replicas=replicas, profile="net") as world:
        yield Story(world)
        assert world.violations == []


def write(story: Story, duration_s: float, until_not: SimReplica | None = None) -> bool:
    """Submit jobs for so long, wherever somebody leads; say whether somebody other than `until_not` came to lead."""
    ends_s = story.world.timeline.now_s + duration_s
    while story.world.timeline.now_s < ends_s:
        leader = story.world.leader()
        if until_not is not None and leader not in (None, until_not):
            return True
        if leader is not None:
            story.ask(leader)
        story.wait(0.1)
    return False


@pytest.mark.campaign(3)
@pytest.mark.parametrize("sync_s", [1.1 * SLOW_SYNC_S, 0.05, 0.1, 0.25])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_leader_with_a_slow_disk_does_not_return_while_a_fast_one_exists(seed: int, sync_s: float) -> None:
    with telling(seed) as story:
        slow = story.elect()
        write(story, 2.0)
        slow.disk.sync_s = sync_s
        assert write(story, HANDED_OVER_S, until_not=slow)
        second = story.elect()
        write(story, 2.0)
        assert slow.engine.sync_s is not None and slow.engine.sync_s >= SLOW_SYNC_S
        second.crash()
        story.must(lambda: story.world.leader() not in (None, second))
        assert story.world.leader() is not slow or sync_s < STANDS_LATER_S
        second.start()
        assert write(story, HANDED_OVER_S, until_not=slow), "one that came to lead all the same hands over again"
        slow.disk.sync_s = 0.0005
        write(story, 2.0)
        assert slow.engine.sync_s < SLOW_SYNC_S


@pytest.mark.campaign(3)
@pytest.mark.parametrize("seed", SEEDS)
def test_with_slow_disks_everywhere_the_leadership_stays(seed: int) -> None:
    with telling(seed) as story:
        story.elect()
        for replica in story.world.replicas.values():
            replica.disk.sync_s = 0.05
        write(story, 2.0)  # until all have seen it
        first = story.elect()
        term = first.engine.term
        assert not write(story, 2 * HANDED_OVER_S, until_not=first)
        assert first.engine.term == term
        first.crash()
        story.must(lambda: story.world.leader() not in (None, first), within_s=3.0)
