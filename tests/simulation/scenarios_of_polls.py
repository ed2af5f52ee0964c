"""Scenarios of agents that poll followers: see `scenarios`."""

from __future__ import annotations

from tests.simulation.scenarios import Story
from tests.simulation.world import World


def a_poll_in_a_minority(world: World) -> None:
    """A follower is cut off, the others go on, and an agent polls it: it must not tell orders that may be given up."""
    story = Story(world)
    a = story.elect()
    story.wait(0.3)
    b = story.others(a)[0]
    agent = world.agents[0]
    agent.polls_anywhere = True
    agent.ask(b)
    story.must(lambda: world.counts["polls_of_followers"] == 1)
    story.isolate(b)
    told = story.ask(a)
    story.must(lambda: "settled" in told)
    for _ in range(20):
        agent.ask(b)
        story.wait(0.4)
    if not world.violations:
        assert world.counts["polls_of_followers"] == 1
    story.join()
    story.must(world.converged)
    agent.ask(b)
    story.must(lambda: world.counts["polls_of_followers"] > 1)


def a_poll_beside_a_deposed_leader(world: World) -> None:
    """A follower is cut off together with its leader, who cannot notice that the others have another one."""
    story = Story(world)
    a = story.elect()
    story.wait(0.3)
    b = story.others(a)[0]
    rest = story.others(a, b)
    story.isolate(a, b)
    agent = world.agents[0]
    agent.polls_anywhere = True
    leader = story.elect(rest)
    told = story.ask(leader)
    story.must(lambda: "settled" in told)
    for replica in (a, b) * 5:
        agent.ask(replica)
        story.wait(0.4)
    story.join()
    story.must(world.converged)
