"""Whoever has a wrong clock is told so, and what to do; agents are heard all the same; nobody else is turned away."""

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
    """Set a clock that far ahead of the truth."""
    clock.set_back(clock.off_s - by_s)


@pytest.mark.parametrize("off_s", [12.0, 3600.0, -310.0, -86_400.0])
def test_a_command_from_a_wrong_clock_is_carried_out_once_when_its_sender_did_what_it_was_told(off_s: float) -> None:
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
def test_a_clock_that_is_a_little_off_is_no_reason_to_turn_anybody_away(off_s: float) -> None:
    with led() as story:
        off(story.user.clock, off_s)
        story.user.begin(story.user.request(story.user.submission()))
        story.must(lambda: story.user.answers == 1)
        assert story.world.counts["turned_away"] == 0


@pytest.mark.parametrize("off_s", [3600.0, -3600.0])
def test_an_agent_is_heard_whatever_its_clock_says_and_nobody_else_is_kept_out_by_it(off_s: float) -> None:
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


def test_clocks_are_right_where_a_profile_says_so_and_wrong_elsewhere() -> None:
    with World(1, profile="net") as world:
        assert {one.clock.off_s for one in _everybody(world)} == {0.0}
    with World(1, profile="all") as world:
        assert len({one.clock.off_s for one in _everybody(world)}) > 1


def test_seeds_meet_people_who_are_turned_away_and_agents_whose_clock_is_wrong() -> None:
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
