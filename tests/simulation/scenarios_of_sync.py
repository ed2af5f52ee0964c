"""Scenario of a leader that sends an entry before syncing its own copy: see `scenarios`."""

from __future__ import annotations

from unittest.mock import patch

from msgspec.structs import replace

from forebay.cluster.consensus import raft_log
from forebay.cluster.consensus.frames import AnyMessage, AppendRequest
from tests.simulation.scenarios import Story
from tests.simulation.world import World


def a_copy_that_was_put_off(world: World) -> None:
    """A leader that lets its followers commit first loses its power as it answers: what it answered is on two disks.

    Only B has the entry besides, and nobody hears B afterwards; so the leader's own copy is what counts (H2).
    """
    # Always, and for long enough that B's answer comes first.
    with patch.multiple(raft_log, SYNC_POSTPONED_BYTES=0, SYNC_POSTPONED_S=0.02):
        story = Story(world)
        a = story.elect()
        story.wait(0.3)
        b, dark = story.others(a)
        # A snapshot that began with this entry would sync it at once.
        assert a.controller is not None
        storage = replace(a.controller.config.storage, snapshot_every_entries=1000)
        a.controller.config = replace(a.controller.config, storage=storage)

        def keep_in_the_dark(sender: str, receiver: str, message: AnyMessage) -> AnyMessage | None:
            if (sender, receiver) == (a.name, dark.name) and isinstance(message, AppendRequest) and message.entries:
                return None
            return message

        story.network.tamper = keep_in_the_dark
        told = story.ask(a)
        story.must(lambda: "settled" in told)
        a.crash()
        story.isolate(b)
        story.network.tamper = None
        a.start()
        story.elect([a, dark])
        later = story.ask(next(replica for replica in (a, dark) if replica.leads))
        story.must(lambda: "settled" in later)
        story.join()
        story.must(world.converged)
