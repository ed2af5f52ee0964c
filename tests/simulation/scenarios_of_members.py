"""Scenarios of membership changes: see `scenarios`. They use only external observations."""

from __future__ import annotations

from contextlib import suppress

from forebay.cluster.consensus import ChangeRefused, MemberChange, NotLeader
from forebay.cluster.consensus.frames import AnyMessage, AppendRequest, Heartbeat, VoteRequest
from forebay.wal.configuration import ChangeKind
from tests.simulation.replicas import SimReplica
from tests.simulation.scenarios import Story
from tests.simulation.world import World


def _remove(leader: SimReplica, *gone: SimReplica) -> None:
    """Have a leader remove members, one right after the other."""

    def ask() -> None:
        for replica in gone:
            with suppress(ChangeRefused, NotLeader):
                leader.engine.change(MemberChange(action=ChangeKind.REMOVE, name=replica.name))

    leader.loop.call_now(ask)


def _apart(story: Story, *groups: list[SimReplica]) -> None:
    """Isolate a group from the other replicas."""
    for (sender, receiver), link in story.network.links.items():
        together = any({sender, receiver} <= {one.name for one in group} for group in groups)
        link.cut = not together
        if link.cut:
            story.network.drop(sender, receiver)


def three_changes_in_one_breath(world: World) -> None:
    """A leader that was just cut off removes whoever is out of its sight (H12). Five replicas.

    One at a time, none of these is ever committed. All together leave a majority of two on its side, and one of three
    on the other.
    """
    story = Story(world)
    a = story.elect()
    story.wait(0.3)
    b, *rest = story.others(a)
    _apart(story, [a, b], rest)
    _remove(a, *rest)
    told = story.ask(a)
    story.wait(0.1)
    story.elect(rest)
    leader = next(replica for replica in rest if replica.leads)
    other = story.ask(leader)
    story.must(lambda: "settled" in other)
    assert "settled" not in told, "a minority answers"
    story.join()
    story.must(world.converged)


def two_leaders_who_change_at_once(world: World) -> None:
    """Two leaders, one after the other, begin with a change each before they have committed anything. Five replicas.

    Of four voters, the first removes one and is cut off; the second removes another one. Were its change taken before
    an entry of its own is committed, {first, fourth} and {second, third} would both be majorities.
    """
    story = Story(world)
    a = story.elect()
    story.wait(0.3)
    *_, fifth = story.others(a)
    _remove(a, fifth)
    story.must(lambda: fifth.removed)
    b, fourth, x = (replica for replica in story.others(a) if replica is not fifth)

    def keep_behind(sender: str, receiver: str, message: AnyMessage) -> AnyMessage | None:
        if sender == fourth.name and isinstance(message, VoteRequest):
            return None
        entries = isinstance(message, AppendRequest) and message.entries
        return None if entries and receiver == fourth.name and sender != a.name else message

    story.must(world.converged)
    story.network.tamper = keep_behind
    _apart(story, [a], [b, fourth, x])
    _remove(a, x)
    story.must(lambda: any(replica.is_leader for replica in (b, x)))
    second = next(replica for replica in (b, x) if replica.is_leader)
    story.wait(0.02)  # it hears of the others that they live; what it sends reaches two of four
    _remove(second, fourth)
    told = story.ask(second)
    story.wait(0.1)
    _apart(story, [a, fourth], [b, x])
    story.wait(3.0)
    told_too = story.ask(a) if a.leads else {}
    story.wait(0.5)
    assert world.violations or not ("settled" in told and "settled" in told_too)
    story.network.tamper = None
    story.join()
    story.must(world.converged)


def a_batch_in_the_place_of_another(world: World) -> None:
    """A leader that is cut off changes the members and decides; its successor decides as much on the same revision.

    The successor's first entry stands where the change stood, so its batch stands where the other batch stood. The
    old leader meets it, committed, in the first message that it hears: nothing was acknowledged of its own.
    """
    story = Story(world)
    a = story.elect()
    story.wait(0.3)
    rest = story.others(a)
    story.must(world.converged)

    def from_nobody(sender: str, receiver: str, message: AnyMessage) -> AnyMessage | None:
        return None if sender == a.name and isinstance(message, AppendRequest | Heartbeat) else message

    story.network.tamper = from_nobody
    _remove(a, rest[0])
    told = story.ask(a)
    story.wait(0.005)
    a.loop.hold(world.timeline.now_s + 6.0)  # it stands still, and so believes on that it leads
    story.isolate(a)
    story.network.tamper = None
    story.elect(rest)
    leader = next(replica for replica in rest if replica.leads)
    assert leader.controller is not None and a.controller is not None
    own = a.controller.journal.last_index
    assert story.last(leader) >= own - 1
    later = story.ask(leader)
    story.must(lambda: "settled" in later)
    journal = leader.controller.journal
    before = a.controller.journal.applied_index
    behind = journal.entries(before + 1, max_bytes=1 << 20, max_entries=100)[: own - before]
    request = AppendRequest(
        leader.engine.term,
        1 << 20,
        before,
        journal.term_of(before) or 0,
        leader.engine.commit_index,
        True,
        [(entry.term, entry.data) for entry in behind],
        [entry.seal for entry in behind],
    )
    world.hear(a.name, "on_frame", leader.name, request)
    story.wait(6.5)
    assert world.violations or "settled" not in told
    story.join()
    story.must(world.converged)
