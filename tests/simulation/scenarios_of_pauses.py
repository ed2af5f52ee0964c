"""Scenario of a leader whose process was paused: see `scenarios`."""

from __future__ import annotations

from forebay.cluster.consensus.log_replication import quorum_deadline_s
from tests.simulation.scenarios import Story
from tests.simulation.world import World


def a_late_leader_of_a_minority(world: World) -> None:
    """A leader that loses its majority stands still around its deadline, and one peer answers on (H15). Five replicas.

    A majority elects somebody else meanwhile; to whoever asks the old one, there are two.
    """
    story = Story(world)
    a = story.elect()
    story.wait(0.3)
    b = story.others(a)[0]
    story.isolate(a, b)
    deadline_s = quorum_deadline_s(a.engine._engine.raft)
    story.wait(deadline_s - 0.001 - world.timeline.now_s)
    a.loop.hold(deadline_s + 1.6 * world.timing.heartbeat_s)
    story.wait(2 * world.timing.election_max_s)
    story.elect(story.others(a, b))
    story.wait(1.0)
    story.join()
    story.must(world.converged)
