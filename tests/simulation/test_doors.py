"""Clients with wrong clocks are rejected with a remedy; agents and other clients are accepted."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from forebay.replica.messages import commands as c
from tests.simulation.clients import SimAgent, SimClient
from tests.simulation.doors import OwnClock
from tests.simulation.scenarios import Story
from tests.simulation.world import World, simulate

WITHIN = 12
"""Seeds in which somebody is turned away, and some agent heard without a receipt, count."""


@contextmanager
def led() -> Iterator[Story]:
    """A cluster that has a leader, and of which no clock is wrong yet."""
    with World(3, profile="net") as world:
        story = Story(world)
        story.elect()
        story.wait(5.0)  # until all clocks are read
        yield story
        assert world.violations == []


def off(clock: OwnClock, by_s: float) -> None:
    """Set a clock ahead of the true time."""
    clock.set_back(clock.off_s - by_s)


@pytest.mark.parametrize("off_s", [12.0, 3600.0, -310.0, -86_400.0])
def test_a_command_with_a_wrong_clock_runs_once_after_the_remedy(off_s: float) -> None:
    with led() as story:
        world, user = story.world, story.user
        off(user.clock, off_s)
        user.begin(user.request(user.submission()))
        story.must(lambda: user.answers == 1)
        assert world.counts["turned_away"] == 1
        assert abs(user.clock.off_s) <= 1.5
        names = [job.request.name for job in world.oracle.state.jobs.values()]
        assert len(names) == len(set(names)) == 1


@pytest.mark.parametrize("off_s", [8.0, -280.0])
def test_a_slightly_wrong_clock_is_accepted(off_s: float) -> None:
    with led() as story:
        off(story.user.clock, off_s)
        story.user.begin(story.user.request(story.user.submission()))
        story.must(lambda: story.user.answers == 1)
        assert story.world.counts["turned_away"] == 0


@pytest.mark.parametrize("off_s", [3600.0, -3600.0])
def test_agents_with_wrong_clocks_are_accepted_and_others_unaffected(off_s: float) -> None:
    with led() as story:
        world, agent = story.world, story.world.agents[0]
        off(agent.clock, off_s)
        agent.start()
        story.must(lambda: agent.node in world.oracle.state.nodes)
        job = c.SubmitJob(story.user.submission().request)
        story.user.begin(story.user.request(job))
        story.must(lambda: story.user.answers == 1)
        story.must(lambda: any(row.ended_at for row in world.oracle.state.jobs.values()), within_s=60.0)
        assert world.counts["turned_away"] == 0
        assert world.counts["heard_without_receipt"] > 2


def test_client_clocks_are_wrong_only_in_the_intended_profiles() -> None:
    with World(1, profile="net") as world:
        assert {one.clock.off_s for one in _everybody(world)} == {0.0}
    with World(1, profile="all") as world:
        assert len({one.clock.off_s for one in _everybody(world)}) > 1


def test_seeds_cover_rejected_users_and_agents_with_wrong_clocks() -> None:
    seen = {"turned_away", "heard_without_receipt"}
    for seed in range(1, 1 + WITHIN):
        outcome = simulate(seed)
        assert outcome.violations == ()
        seen -= {name for name in seen if outcome.counts.get(name)}
        if not seen:
            return
    assert seen == set()


def _everybody(world: World) -> list[SimAgent | SimClient]:
    return [*world.agents, *world.clients]
