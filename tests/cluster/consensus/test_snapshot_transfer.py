"""A snapshot is verified beside the loop, and its transfer continues after a restart (H8, H25; paper, section 7)."""

import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from forebay.cluster.consensus.frames import (
    CHUNK_BYTES,
    AppendReply,
    AppendRequest,
    Heartbeat,
    SnapshotChunk,
    SnapshotReply,
    VoteReply,
    VoteRequest,
)
from forebay.cluster.consensus.interface import Role, SnapshotRef
from forebay.cluster.consensus.snapshots import SnapshotReceiver, SnapshotSender
from forebay.snapshots import Image, SnapshotName, SnapshotStore, write_snapshot
from forebay.snapshots.receive import receiving_name
from forebay.wal.configuration import ConfigurationAt
from forebay.wal.failures import BrokenInvariant
from tests.cluster.consensus.harness import TIMING, Harness
from tests.cluster.consensus.simulator import Replica, Simulation
from tests.cluster.consensus.test_catching_up import FakeSink
from tests.snapshots.states import many_jobs

LONG_S = 20 * TIMING.election_max_s
"""Duration of the slow verification: many election timeouts."""


def one_that_needs_a_snapshot(sim: Simulation) -> tuple[Replica, Replica, Replica]:
    """Return a leader, an up-to-date follower, and a returning replica that needs compacted entries."""
    leader = sim.commit(b"\x01a")
    behind = sim.others(leader)[0]
    sim.isolate(behind.name)
    for number in range(10):
        sim.commit(b"\x01%d" % number)
    leader = sim.elect()
    leader.take_snapshot()
    behind.verify_s = LONG_S
    (other,) = (replica for replica in sim.others(leader) if replica is not behind)
    sim.heal()
    return leader, other, behind


def test_heartbeats_are_answered_during_verification_without_an_election() -> None:
    with Simulation(11) as sim:
        leader, _, behind = one_that_needs_a_snapshot(sim)
        assert sim.run(2.0, until=lambda: sim.engine(behind.name).raft.receiver._verifying)
        term = sim.engine(leader.name).term
        sim.sent = []
        sim.run(LONG_S / 2)
        answers = [m for who, to, m in sim.sent if who == behind.name and isinstance(m, AppendReply)]
        beats = [m for who, to, m in sim.sent if to == behind.name and isinstance(m, Heartbeat)]
        assert len(answers) >= len(beats) - 1 > LONG_S / 2 / TIMING.heartbeat_s / 2
        assert not any(isinstance(m, VoteRequest) for _, _, m in sim.sent), "no vote is requested"
        assert behind.installs == 0 and sim.engine(leader.name).raft.answers(behind.name)
        chunks = [m for who, to, m in sim.sent if to == behind.name and isinstance(m, SnapshotChunk)]
        assert not any(chunk.data for chunk in chunks), "the complete snapshot is not sent again"
        sim.commit(b"\x01meanwhile")
        sim.run(LONG_S)
        assert behind.installs == 1
        assert (sim.engine(leader.name).role, sim.engine(leader.name).term) == (Role.LEADER, term)
        sim.converge()


def test_replica_votes_and_follows_another_leader_during_verification() -> None:
    with Simulation(12) as sim:
        leader, other, behind = one_that_needs_a_snapshot(sim)
        assert sim.run(2.0, until=lambda: sim.engine(behind.name).raft.receiver._verifying)
        other.take_snapshot()  # otherwise the leader would send entries instead
        leader.crash()
        elected = sim.run(3.0, until=lambda: sim.engine(other.name).role is Role.LEADER)
        assert elected and behind.installs == 0, "a majority needs this replica's vote"
        sim.run(LONG_S)
        assert behind.installs == 1, "the snapshot's content is committed under any leader"
        sim.converge()


def test_snapshot_that_fails_verification_is_rejected_with_the_next_reply() -> None:
    with Simulation(13) as sim:
        leader, _, behind = one_that_needs_a_snapshot(sim)
        behind.refuse_install = ValueError("checksum")
        behind.verify_s = 0.5
        sim.sent = []
        sim.run(4.0)
        assert any(isinstance(m, SnapshotReply) and m.outcome == 3 for who, _, m in sim.sent if who == behind.name)
        assert behind.installs == 0 and not sim.engine(behind.name).stopped
        behind.refuse_install = None
        sim.converge()
        assert behind.installs == 1 and sim.elect() is leader


class SinkHarness(Harness):
    """Engine whose machine receives snapshots."""

    def __init__(self) -> None:
        self.sinks: list[FakeSink] = []
        super().__init__()

    def begin_install(self, index: int, term: int) -> FakeSink:
        self.sinks.append(FakeSink())
        return self.sinks[-1]

    def verifying(self) -> Callable[[], None]:
        """Give it entries 1 to 3 and a snapshot of entry 9; return the function that ends the verification."""
        self.follow([(1, b"\x01a"), (1, b"\x01b"), (1, b"\x01c")], commit=3)
        self.give("r2", SnapshotChunk(1, 2, 9, 1, 6, 0, b"abcdef"))
        (done,) = self.sinks[0].verified
        self.out.clear()
        return done


def test_entries_that_arrive_during_verification_are_accepted_and_end_it() -> None:
    harness = SinkHarness()
    done = harness.verifying()
    entries = [(2, b"\x01%d" % number) for number in range(4, 12)]
    harness.give("r3", AppendRequest(2, 1, 3, 1, 11, True, entries))
    assert harness.take(AppendReply, "r3")[-1].match_index == 11
    assert harness.sinks[0].aborted and len(harness.applied) == 11
    done()
    harness.engine.tick()
    assert not harness.sinks[0].finished and harness.engine.applied_index == 11


def test_mismatched_entries_are_rejected_and_do_not_disturb_verification() -> None:
    harness = SinkHarness()
    harness.verifying()
    harness.give("r2", AppendRequest(1, 3, 9, 1, 9, True, [(1, b"\x01x")]))
    (reply,) = harness.take(AppendReply, "r2")
    assert (reply.rejected, reply.match_index, harness.journal.last_index) == (True, 3, 3)
    assert not harness.sinks[0].aborted


def test_vote_during_verification_depends_on_the_present_journal() -> None:
    harness = SinkHarness()
    harness.verifying()
    harness.wait(TIMING.election_max_s)
    for last_index, granted in ((2, False), (3, True)):
        harness.out.clear()
        harness.give("r3", VoteRequest(5 + last_index, 1, last_index, 1, False))
        assert [reply.granted for reply in harness.take(VoteReply, "r3")] == [granted]


def test_h25_snapshot_is_never_installed_over_entries_sent_since() -> None:
    harness = SinkHarness()
    done = harness.verifying()
    harness.engine.raft.checked_index = 9
    done()
    with pytest.raises(BrokenInvariant, match="a leader has meanwhile sent"):
        harness.engine.tick()
    assert not harness.sinks[0].finished


# ---- the received part after the receiver is killed ----


class StoreSink:
    """Receives a snapshot into a store, as the controller does."""

    def __init__(self, machine: "StoreMachine", index: int, term: int) -> None:
        self._machine = machine
        self._receiver = machine.store.receive(index, term)

    @property
    def received_bytes(self) -> int:
        return self._receiver.next_offset

    def write(self, offset: int, data: bytes) -> None:
        self._receiver.write(offset, data)

    def verify(self, done: Callable[[], None]) -> None:
        self._receiver.verify()
        done()

    def finish(self) -> ConfigurationAt | None:
        self._receiver.finalize()
        self._machine.installed = self._receiver.image
        return None

    def abort(self) -> None:
        self._receiver.abort()

    def suspend(self) -> None:
        self._receiver.suspend()


class StoreMachine:
    def __init__(self, directory: Path) -> None:
        self.store = SnapshotStore(directory)
        self.installed: Image | None = None

    def apply(self, index: int, term: int, data: bytes) -> None:
        raise NotImplementedError

    def newest_snapshot(self) -> SnapshotRef | None:
        return None

    def snapshot_refused(self, index: int) -> None:
        pass

    def begin_install(self, index: int, term: int) -> StoreSink:
        return StoreSink(self, index, term)


def transfer(ref: SnapshotRef, machine: StoreMachine, chunks: int | None = None) -> list[SnapshotChunk]:
    """Send a snapshot, or its first `chunks` chunks; return the chunks with data."""
    sender, receiver = SnapshotSender(ref, 0.0), SnapshotReceiver(machine)
    sent: list[SnapshotChunk] = []
    seqs = itertools.count(1)
    waiting: list[SnapshotChunk] = []
    while receiver.verified is None and (chunks is None or len(sent) < chunks):
        sender.pump(1, lambda: next(seqs), waiting.append, 0.0)
        chunk = waiting.pop(0)
        if chunk.data:
            sent.append(chunk)
        outcome, offset = receiver.take(chunk)
        newest = max((one.seq for one in waiting), default=chunk.seq)
        sender.answered(SnapshotReply(1, chunk.seq, ref.index, ref.term, outcome, offset, 0), newest, 0.0)
    if receiver.verified is not None:
        receiver.install()
    sender.close()
    return sent


@pytest.mark.parametrize("killed_after", [1, 3, 5])
def test_follower_killed_between_two_chunks_continues_where_it_stopped(tmp_path: Path, killed_after: int) -> None:
    image = many_jobs(6_000)
    (tmp_path / "leader").mkdir()
    path = write_snapshot(tmp_path / "leader", image)
    ref = SnapshotRef(path, image.index, image.term, path.stat().st_size)
    whole = -(-ref.size_bytes // CHUNK_BYTES)
    assert whole > 5
    follower = tmp_path / "follower"
    child = os.fork()
    if child == 0:  # the follower's first life
        try:
            transfer(ref, StoreMachine(follower), killed_after)
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert os.listdir(follower) == [receiving_name(SnapshotName(image.index, image.term))]
    machine = StoreMachine(follower)
    assert machine.store.partial is not None
    sent = transfer(ref, machine)
    again = sum(len(chunk.data) for chunk in sent) - (ref.size_bytes - killed_after * CHUNK_BYTES)
    assert 0 <= again < CHUNK_BYTES / 2, "at most the interrupted piece is sent again"
    assert len(sent) <= whole - killed_after + 1
    assert machine.installed == image
    assert os.listdir(follower) == [path.name] and machine.store.partial is None
    machine.store.close()


def test_part_with_damage_in_the_middle_continues_before_the_damage(tmp_path: Path) -> None:
    image = many_jobs(6_000)
    (tmp_path / "leader").mkdir()
    path = write_snapshot(tmp_path / "leader", image)
    ref = SnapshotRef(path, image.index, image.term, path.stat().st_size)
    first = StoreMachine(tmp_path / "follower")
    transfer(ref, first, 4)
    first.store.close()
    part = tmp_path / "follower" / receiving_name(SnapshotName(image.index, image.term))
    content = bytearray(part.read_bytes())
    assert len(content) == 4 * CHUNK_BYTES
    content[CHUNK_BYTES + 7] ^= 1
    part.write_bytes(content)
    second = StoreMachine(tmp_path / "follower")
    assert second.store.partial is not None
    sound_bytes = second.store.partial.sound_bytes
    assert CHUNK_BYTES / 2 < sound_bytes <= CHUNK_BYTES + 7
    assert transfer(ref, second)[0].offset == sound_bytes
    assert second.installed == image
    second.store.close()
