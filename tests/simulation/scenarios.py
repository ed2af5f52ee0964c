"""Scenarios written by hand for situations that random faults reach too seldom.

None has a violation unless a guard is gone.

Names: in a story the leader that comes first is A, its follower in the know B; the others are in the dark.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any
from unittest.mock import patch

import msgspec

from forebay.cluster.consensus import log_replication
from forebay.cluster.consensus.frames import (
    AnyMessage,
    AppendReply,
    AppendRequest,
    Heartbeat,
    SnapshotChunk,
    VoteReply,
    VoteRequest,
)
from forebay.cluster.server.pending import NotLeading
from forebay.replica.messages.commands import Request
from tests.simulation.clients import SimClient
from tests.simulation.replicas import SimReplica
from tests.simulation.world import World


class Ended(Exception):
    """A promise was broken: nothing after it means anything."""


class Story:
    """A cluster without faults, of which one can direct who hears whom."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.network = world.network
        self.network.losses = self.network.repeats = self.network.breaks = 0.0
        self.network.latency_s = 0.001
        world.request_losses = world.request_copies = 0.0
        self.user = SimClient(world, 7)
        self.user.stopped = True
        self._number = 0
        for replica in world.replicas.values():
            replica.start()

    def wait(self, duration_s: float, until: Callable[[], bool] | None = None) -> bool:
        return self.world.run(duration_s, until)

    def must(self, until: Callable[[], bool], within_s: float = 20.0) -> None:
        """Run until a condition holds; a scenario in which it never holds is wrong."""
        came = self.wait(within_s, until)
        if self.world.violations:
            raise Ended
        if not came:
            raise AssertionError(f"the story does not go on: {self.world.describe()}")

    def elect(self, among: list[SimReplica] | None = None) -> SimReplica:
        """Wait for a leader, and for it to have founded the cluster or committed its first entry."""
        candidates = among or list(self.world.replicas.values())
        self.must(lambda: any(replica.leads and self._rests(replica) for replica in candidates))
        return next(replica for replica in candidates if replica.leads)

    def _rests(self, replica: SimReplica) -> bool:
        controller = replica.controller
        return controller is not None and controller.state.revision > 0 and not controller.proposer.batches_in_flight

    def ask(self, replica: SimReplica, request: Request | None = None) -> dict[str, Any]:
        """Submit a job at a replica, or a request again; what is returned has it, and later its answer."""
        request = request or self.user.request(self.user.submission())
        told: dict[str, Any] = {"request": request}

        def arrive() -> None:
            assert replica.controller is not None
            with suppress(NotLeading):
                replica.controller.submit(request).add_done_callback(note)

        def note(done: Any) -> None:
            if done.exception() is None and not replica.disk.dead:
                settled = done.result()
                self.world.oracle.answered(replica.name, request.id, settled.revision, settled.job, None)
                self.world.oracle.heard(request.id, settled.revision, settled.job, None)
                told["settled"] = settled

        replica.loop.call_soon(arrive)
        return told

    def make_lead(self, replica: SimReplica) -> None:
        """Stop the others again and again, until this one was the first to stand."""
        for _ in range(30):
            if replica.leads:
                return
            for other in self.others(replica):
                if other.up:
                    other.loop.hold(self.world.timeline.now_s + 0.31)
            self.wait(0.6)
            self.must(lambda: self.world.leader() is not None)
        raise AssertionError(f"{replica.name} was not elected: {self.world.describe()}")

    def others(self, *replicas: SimReplica) -> list[SimReplica]:
        return [replica for replica in self.world.replicas.values() if replica not in replicas]

    def isolate(self, *replicas: SimReplica) -> None:
        """Isolate this group from the other replicas."""
        names = {replica.name for replica in replicas}
        for (sender, receiver), link in self.network.links.items():
            link.cut = (sender in names) != (receiver in names)
            if link.cut:
                self.network.drop(sender, receiver)

    def join(self) -> None:
        """Connect all replicas."""
        self.network.heal()

    def last(self, replica: SimReplica) -> int:
        assert replica.controller is not None
        return replica.controller.journal.last_index


def a_resent_prefix(world: World) -> None:
    """A copy of an older request arrives after the newer one: nothing that was acknowledged goes (H3)."""
    story = Story(world)
    a = story.elect()
    b, dark = story.others(a)
    story.wait(0.3)
    known = a.engine.commit_index
    story.isolate(dark)
    requests: list[AppendRequest] = []

    def keep_in_the_dark(sender: str, receiver: str, message: AnyMessage) -> AnyMessage:
        if sender == a.name and isinstance(message, AppendRequest | Heartbeat):
            if isinstance(message, AppendRequest) and message.entries:
                requests.append(message)
            return msgspec.structs.replace(message, commit_index=min(message.commit_index, known))
        return message

    story.network.tamper = keep_in_the_dark
    first = story.ask(a)
    story.must(lambda: "settled" in first)
    second = story.ask(a)
    story.must(lambda: "settled" in second)
    story.isolate(a)
    story.wait(0.01)
    world.hear(b.name, "on_frame", a.name, next(request for request in requests if request.prev_index >= known))
    story.wait(0.01)
    _lead_without_the_old_leader(story, b, dark)


def _lead_without_the_old_leader(story: Story, b: SimReplica, dark: SimReplica) -> None:
    """The two that were cut off from each other elect one of them; then everybody is back and agrees."""
    for pair in ((b.name, dark.name), (dark.name, b.name)):
        story.network.links[pair].cut = False
    story.elect([b, dark])
    story.wait(0.5)
    story.join()
    story.must(story.world.converged)


def a_late_answer(world: World) -> None:
    """An acknowledgement given in an old term comes to its leader in a later one (H4). Five replicas."""
    story = Story(world)
    a = story.elect()
    story.wait(0.3)
    b, *rest = story.others(a)
    kept: list[AppendReply] = []

    def hold_back(sender: str, receiver: str, message: AnyMessage) -> AnyMessage | None:
        if (sender, receiver) == (b.name, a.name) and isinstance(message, AppendReply):
            kept.append(message)
            return None
        return message

    story.isolate(a, b)
    story.network.tamper = hold_back
    before = story.last(a)
    for _ in range(4):
        story.ask(a)
        story.wait(0.01)
    story.must(lambda: bool(kept) and kept[-1].match_index >= before + 4, within_s=0.2)
    answer = kept[-1]
    story.network.tamper = None
    story.elect(rest)
    story.join()
    story.must(world.converged)
    story.make_lead(a)
    told = rest[0]

    def to_one_only(sender: str, receiver: str, message: AnyMessage) -> AnyMessage | None:
        entries = isinstance(message, AppendRequest) and message.entries
        return None if entries and sender == a.name and receiver != told.name else message

    story.network.tamper = to_one_only
    while story.last(a) < answer.match_index:
        later = story.last(a)
        story.ask(a)
        story.must(lambda later=later: story.last(a) > later, within_s=0.1)  # type: ignore[misc]
    world.hear(a.name, "on_frame", b.name, answer)
    story.wait(0.05)
    story.network.tamper = None
    story.must(world.converged)


def figure_8(world: World) -> None:
    """Entries of an older term reach a majority and are overwritten all the same (Raft, figure 8). Five replicas."""
    with patch.object(log_replication, "APPEND_ENTRIES", 1):
        story = Story(world)
        a = story.elect()
        story.wait(0.3)
        b, *rest = story.others(a)
        dark = {replica.name for replica in rest}
        story.network.tamper = lambda sender, receiver, message: (
            None if sender in dark and isinstance(message, AppendRequest) and message.entries else message
        )
        story.isolate(a, b)
        story.ask(a)
        story.wait(0.02)
        for replica in (a, b):
            replica.crash()
        story.must(lambda: any(world.believes(replica.name) for replica in rest))
        x = next(replica for replica in rest if world.believes(replica.name))
        story.wait(0.02)
        x.crash()
        story.join()
        terms = world.oracle.leaders

        def only_old(sender: str, receiver: str, message: AnyMessage) -> AnyMessage | None:
            if isinstance(message, AppendRequest) and any(term == message.term for term, _ in message.entries):
                return msgspec.structs.replace(message, entries=[])
            return message

        story.network.tamper = only_old
        known = len(terms)
        for replica in (a, b):
            replica.start()
        story.must(lambda: len(terms) > known)
        leader = world.replicas[terms[max(terms)]]
        story.wait(0.4)
        leader.crash()
        story.network.tamper = None
        x.start()
        story.make_lead(x)
        for replica in world.replicas.values():
            if not replica.up:
                replica.start()
        story.must(world.converged)


def a_late_snapshot(world: World) -> None:
    """A snapshot comes to a replica that holds, and has acknowledged, more than it contains (H25)."""
    story = Story(world)
    a = story.elect()
    b, dark = story.others(a)
    story.wait(0.3)
    known = a.engine.commit_index
    story.isolate(dark)

    def keep_in_the_dark(sender: str, receiver: str, message: AnyMessage) -> AnyMessage:
        if sender == a.name and isinstance(message, AppendRequest | Heartbeat):
            return msgspec.structs.replace(message, commit_index=min(message.commit_index, known))
        return message

    story.network.tamper = keep_in_the_dark
    first = story.ask(a)
    story.must(lambda: "settled" in first)
    assert a.controller is not None
    controller = a.controller
    at = controller.applied_index
    a.loop.call_now(controller.save_snapshot)
    story.must(lambda: controller.snapshot_index >= at)
    second = story.ask(a)
    story.must(lambda: "settled" in second)
    ref = controller.newest_snapshot()
    assert ref is not None
    data = ref.path.read_bytes()
    term, size = a.engine.term, len(data)
    for start in range(0, size, 4096):
        chunk = SnapshotChunk(term, 1_000_000 + start, ref.index, ref.term, size, start, data[start : start + 4096])
        world.hear(b.name, "on_frame", a.name, chunk)
    story.wait(0.02)
    story.isolate(a)
    _lead_without_the_old_leader(story, b, dark)


def a_decision_too_early(world: World) -> None:
    """A new leader is asked again for what its predecessor has settled, before it has applied that (section 8).

    The fence makes its first batch void. The second one, decided after it, would have the right revision by number.
    """
    story = Story(world)
    a = story.elect()
    b, dark = story.others(a)
    story.wait(0.3)
    known = a.engine.commit_index
    story.isolate(dark)

    def keep_in_the_dark(sender: str, receiver: str, message: AnyMessage) -> AnyMessage | None:
        if sender == a.name and isinstance(message, AppendRequest | Heartbeat):
            return msgspec.structs.replace(message, commit_index=min(message.commit_index, known))
        # Nor does b hear that its own first entry is held by somebody else.
        return None if sender == dark.name and isinstance(message, AppendReply) else message

    story.network.tamper = keep_in_the_dark
    told = story.ask(a)
    story.must(lambda: "settled" in told)
    story.isolate(a)
    story.must(lambda: b.is_leader)
    for request in (None, told["request"]):
        story.ask(b, request)
        story.wait(0.01)
    story.network.tamper = None
    story.wait(0.5)
    story.join()
    story.must(world.converged)


def a_second_vote(world: World) -> None:
    """A replica that voted and lost its power is asked by another candidate of the same term (H1)."""
    story = Story(world)
    story.elect()
    story.wait(0.2)
    voter, one, other = world.replicas.values()
    story.network.tamper = lambda sender, receiver, message: None if sender != voter.name else message
    granted: list[str] = []
    world.network.tamper = lambda sender, receiver, message: _note_grant(granted, voter, sender, receiver, message)
    story.wait(1.0)
    term = voter.engine.term + 5
    far = 1_000_000
    for candidate in (one, other):
        world.hear(voter.name, "on_frame", candidate.name, VoteRequest(term, 1, far, term - 1, False))
        story.wait(0.02)
        voter.crash()
        voter.start()
        story.wait(0.4, lambda: world.is_listening(voter.name))
        story.wait(0.3)
    if len(set(granted)) > 1:
        world.violate(f"{voter.name} voted for {' and '.join(granted)} in one term")


def a_vote_that_outruns_the_disk(world: World) -> None:
    """A replica loses its power while it writes its vote, and is asked by another candidate of the same term (H2)."""
    story = Story(world)
    story.elect()
    story.wait(0.2)
    voter, one, other = world.replicas.values()
    granted: list[str] = []
    world.network.tamper = lambda sender, receiver, message: _note_grant(granted, voter, sender, receiver, message)
    story.wait(1.0)
    term = voter.engine.term + 5
    far = 1_000_000
    for candidate in (one, other):
        voter.disk.operations_left = 1 if candidate is one else None
        world.hear(voter.name, "on_frame", candidate.name, VoteRequest(term, 1, far, term - 1, False))
        story.wait(0.6)
        story.must(lambda: world.is_listening(voter.name))
    if len(set(granted)) > 1:
        world.violate(f"{voter.name} voted for {' and '.join(granted)} in one term")
    assert granted[-1:] == [other.name], "the second vote is as it should be"


def _note_grant(
    granted: list[str], voter: SimReplica, sender: str, receiver: str, message: AnyMessage
) -> AnyMessage | None:
    if sender != voter.name:
        return None
    if isinstance(message, VoteReply) and message.granted and not message.pre:
        granted.append(receiver)
    return message


def a_deposed_reader(world: World) -> None:
    """A leader that was cut off is asked for the state, while the others have gone on (H15)."""
    story = Story(world)
    a = story.elect()
    story.wait(0.3)
    rest = story.others(a)
    a.loop.hold(world.timeline.now_s + 5.0)  # stopped, so that it cannot notice
    for pair, link in story.network.links.items():
        link.black = link.black or a.name in pair
    story.elect(rest)
    leader = next(replica for replica in rest if replica.leads)
    told = story.ask(leader)
    story.must(lambda: "settled" in told, within_s=4.0)
    reader = SimClient(world, 8)
    reader.stopped = True
    reader.target = a.name
    reader.what, reader.tries, reader.floor = None, 0, world.oracle.floor
    reader.patience_s = 30.0
    reader._send()
    story.wait(5.0)
    story.join()
    story.must(lambda: reader.answers > 0)
    story.must(world.converged)


def tell(scenario: Callable[[World], None], world: World) -> None:
    """Run a scenario to its end, or to the first violation."""
    with suppress(Ended):
        scenario(world)


def installs_that_do_not_last(world: World) -> None:
    """A replica with a gap in its ledger receives snapshots, and each time dies before its journal can adopt them.

    What it stood on before must still be there: else it refuses its own storage for ever.
    """
    story = Story(world)
    a = story.elect()
    b, _ = story.others(a)
    assert a.controller is not None
    leader = a.controller

    def fall_behind_and_meet(adopts: bool) -> None:
        story.isolate(b)
        for _ in range(3):
            told = story.ask(a)
            story.must(partial(told.__contains__, "settled"))
        at = leader.applied_index
        a.loop.call_now(leader.save_snapshot)
        story.must(lambda: leader.snapshot_index >= at)
        a.loop.call_now(a.engine.compact_to, at)
        if not adopts:
            story.network.tamper = fill_the_disk
        story.join()
        story.must(lambda: world.counts["installs"] > 0 if adopts else not b.up)
        story.network.tamper = None

    def fill_the_disk(sender: str, receiver: str, message: AnyMessage) -> AnyMessage:
        # The journal has no room; snapshots, on a file system of their own, do.
        if isinstance(message, SnapshotChunk) and receiver == b.name and not b.disk.full:
            b.disk.full = True
        return message

    fall_behind_and_meet(adopts=True)
    for _ in range(3):
        fall_behind_and_meet(adopts=False)
        b.disk.full = False
        if not b.up:
            b.start()
        if world.violations:
            raise Ended
    story.must(world.converged)
