"""Hazards of catching up a peer: H16, H26, and snapshot transfer."""

import itertools
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from forebay.cluster.consensus.frames import (
    APPEND_BYTES,
    CHUNK_BYTES,
    CONTINUE,
    MAX_ENTRY_BYTES,
    REFUSED,
    RESUME,
    AppendReply,
    AppendRequest,
    Heartbeat,
    SnapshotChunk,
    SnapshotReply,
)
from forebay.cluster.consensus.interface import SnapshotRef, Timing
from forebay.cluster.consensus.progress import WINDOW_BYTES, WINDOW_REQUESTS, Phase, Progress
from forebay.cluster.consensus.snapshots import CHUNKS_IN_FLIGHT, RETRY_S, SnapshotReceiver, SnapshotSender
from forebay.replica.messages.features import ReleaseNeeded
from forebay.wal.failures import StorageFailed
from tests.cluster.consensus.harness import TIMING, Harness
from tests.cluster.consensus.simulator import Simulation


def test_h16_replica_far_behind_with_a_divergent_tail_catches_up() -> None:
    slow = Timing(election_min_s=1.5, election_max_s=3.0, heartbeat_s=0.1)
    with Simulation(1, timing=slow, latency_s=0.2) as sim:
        sim.commit(b"\x01a")
        old = sim.elect()
        sim.isolate(old.name)
        for number in range(50):
            old.propose(b"\x01ghost%d" % number)
        sim.tick(old)
        assert sim.run(30.0, until=lambda: sim.leader() not in (None, old))
        for number in range(30):
            sim.commit(b"\x01%d" % number)
        sim.converge()
        assert not any(data.startswith(b"\x01ghost") for _, _, data in old.history)


def test_h16_follower_with_an_unacknowledged_tail_rejoins() -> None:
    with Simulation(2) as sim:
        leader = sim.commit(b"\x01a")
        follower, other = sim.others(leader)
        sim.filter = lambda sender, receiver, message: (
            not (sender == follower.name and isinstance(message, AppendReply))
        )
        sim.commit(b"\x01b")
        sim.break_link(leader.name, follower.name)
        sim.break_link(follower.name, leader.name)
        leader.crash()
        sim.filter = lambda sender, receiver, message: True
        assert sim.run(5.0, until=lambda: sim.leader() not in (None, leader))
        sim.commit(b"\x01c")
        sim.converge()
        assert other.history == follower.history


def test_h16_requests_lost_on_an_intact_link_are_sent_again() -> None:
    with Simulation(3) as sim:
        leader = sim.commit(b"\x01a")
        follower = sim.others(leader)[0]
        dropped: list[AppendRequest] = []

        def lossy(sender: str, receiver: str, message: object) -> bool:
            if receiver == follower.name and isinstance(message, AppendRequest) and len(dropped) < 3:
                dropped.append(message)
                return False
            return True

        sim.filter = lossy
        for number in range(3):
            sim.commit(b"\x01%d" % number)
        assert len(dropped) == 3
        last = leader.journal.last_index
        assert sim.run(2.0, until=lambda: sim.engine(follower.name).applied_index == last)


def test_h16_requests_lost_with_a_link_are_sent_again_after_reconnecting() -> None:
    harness = Harness()
    harness.lead()
    harness.engine.propose(b"\x01a")
    harness.engine.tick()
    assert [len(request.entries) for request in harness.take(AppendRequest, "r2")] == [1]
    harness.engine.disconnected("r2")
    harness.engine.tick()
    assert harness.take(AppendRequest, "r2") == []
    harness.engine.connected("r2")
    harness.engine.tick()
    assert [request.prev_index for request in harness.take(AppendRequest, "r2")] == [1]


def test_h16_rejections_of_a_whole_window_move_the_probe_back_once() -> None:
    progress = Progress()
    progress.begin_term(101, 0.0)
    progress.sent(1, 100, 0)
    progress.accepted(1, 100)
    for seq in range(2, 10):
        progress.sent(seq, 100 + seq, 10)
    progress.match = 40
    progress.rejected(2, 61)
    assert (progress.phase, progress.next) == (Phase.PROBE, 61)
    progress.sent(20, 60, 0)
    for seq in range(3, 10):
        progress.rejected(seq, 41)
    assert progress.next == 61, "only the rejected probe counts"
    progress.rejected(20, 61)
    assert progress.next == 60, "a rejection always moves back"


def test_h26_messages_and_unanswered_entries_are_bounded_for_any_lag() -> None:
    harness = Harness()
    harness.lead()
    size = 8 * 1024
    for _ in range(2_000):
        harness.engine.propose(b"\x01" + b"x" * (size - 1))
    harness.engine.tick()
    requests = harness.take(AppendRequest, "r2")
    in_flight = sum(len(data) for request in requests for _, data in request.entries)
    assert WINDOW_BYTES <= in_flight < WINDOW_BYTES + APPEND_BYTES + size
    assert all(sum(len(data) for _, data in r.entries) <= APPEND_BYTES + size for r in requests)
    assert len(requests) <= WINDOW_REQUESTS
    harness.engine.tick()
    assert harness.take(AppendRequest, "r2") == [], "the window is full"
    first = requests[0]
    harness.give("r2", AppendReply(harness.engine.term, first.seq, first.prev_index + len(first.entries)))
    assert len(harness.take(AppendRequest, "r2")) >= 1, "a reply opens the window"


def test_h26_sending_reads_slices_of_the_journal_not_the_whole_tail() -> None:
    harness = Harness()
    harness.lead()
    for _ in range(5_000):
        harness.engine.propose(b"\x01" + b"x" * 1024)
    counts: list[int] = []
    entries = harness.journal.entries

    def counting(first: int, *, max_bytes: int, max_entries: int):  # type: ignore[no-untyped-def]
        found = entries(first, max_bytes=max_bytes, max_entries=max_entries)
        counts.append(len(found))
        return found

    harness.journal.entries = counting  # type: ignore[method-assign]
    harness.engine.tick()
    assert sum(counts) <= 2 * (WINDOW_BYTES + 2 * APPEND_BYTES) // 1024


def test_h26_too_large_entry_is_rejected_when_proposed() -> None:
    harness = Harness()
    harness.lead()
    with pytest.raises(ValueError, match="split it"):
        harness.engine.propose(b"\x01" + b"x" * MAX_ENTRY_BYTES)
    assert harness.engine.propose(b"x" * MAX_ENTRY_BYTES)


def make_ref(directory: Path, index: int, term: int, size_bytes: int) -> SnapshotRef:
    path = directory / f"snapshot-{index}"
    path.write_bytes(bytes(number % 251 for number in range(size_bytes)))
    return SnapshotRef(path, index, term, size_bytes)


def leader_with_snapshot(directory: Path, size_bytes: int) -> Harness:
    """Return a leader whose journal begins after entry 11, so that the empty r2 needs the snapshot."""
    harness = Harness()
    harness.lead()
    for number in range(10):
        harness.engine.propose(b"\x01%d" % number)
    harness.engine.tick()
    harness.accept("r3")
    assert harness.engine.applied_index == 11
    harness.snapshot = make_ref(directory, 11, harness.engine.term, size_bytes)
    harness.journal.compact_to(11)
    harness.engine.disconnected("r2")
    harness.engine.raft.progress["r2"].match = 0
    harness.engine.connected("r2")
    harness.engine.raft.progress["r2"].probe_from(1)
    harness.out = []
    harness.engine.tick()
    return harness


def test_snapshot_is_sent_in_few_chunks_at_a_time_between_heartbeats(tmp_path: Path) -> None:
    size = 10 * CHUNK_BYTES + 17
    harness = leader_with_snapshot(tmp_path, size)
    (question,) = harness.take(SnapshotChunk, "r2")
    assert (question.data, question.offset, question.size_bytes) == (b"", 0, size)
    term = harness.engine.term
    harness.give("r2", SnapshotReply(term, question.seq, 11, term, RESUME, 0, 0))
    received = bytearray()
    while len(received) < size:
        chunks = [m for to, m in harness.out if to == "r2" and isinstance(m, SnapshotChunk)]
        harness.out = []
        assert 0 < len(chunks) <= CHUNKS_IN_FLIGHT
        harness.wait(TIMING.heartbeat_s)
        assert harness.take(Heartbeat, "r2"), "heartbeats continue"
        for chunk in chunks:
            assert chunk.offset == len(received)
            received += chunk.data
            if len(received) < size:
                harness.engine.receive("r2", SnapshotReply(term, chunk.seq, 11, term, CONTINUE, len(received), 0))
        harness.engine.receive("r3", AppendReply(term, harness.engine.raft.seq, 11))
        harness.engine.tick()
    assert harness.snapshot is not None
    assert bytes(received) == harness.snapshot.path.read_bytes()
    assert harness.engine.peers()[0].sending_snapshot


def test_snapshot_resumes_after_a_broken_link(tmp_path: Path) -> None:
    harness = leader_with_snapshot(tmp_path, 10 * CHUNK_BYTES)
    term = harness.engine.term
    (question,) = harness.take(SnapshotChunk, "r2")
    harness.give("r2", SnapshotReply(term, question.seq, 11, term, RESUME, 0, 0))
    harness.engine.disconnected("r2")
    assert not harness.engine.peers()[0].sending_snapshot
    harness.engine.connected("r2")
    harness.engine.raft.progress["r2"].probe_from(1)
    harness.out = []
    harness.engine.tick()
    (question,) = harness.take(SnapshotChunk, "r2")
    assert question.data == b""
    harness.give("r2", SnapshotReply(term, question.seq, 11, term, RESUME, 3 * CHUNK_BYTES, 0))
    assert harness.take(SnapshotChunk, "r2")[0].offset == 3 * CHUNK_BYTES


def test_rejected_snapshot_is_offered_again_later_without_stopping_replicas(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    harness = leader_with_snapshot(tmp_path, 100)
    term = harness.engine.term
    (question,) = harness.take(SnapshotChunk, "r2")
    harness.give("r2", SnapshotReply(term, question.seq, 11, term, REFUSED, 0, 0))
    assert "rejected" in caplog.text
    assert harness.take(SnapshotChunk) == []
    for _ in range(5):
        assert harness.take(SnapshotChunk, "r2") == []
        harness.engine.receive("r3", AppendReply(term, harness.engine.raft.seq, 11))
        harness.wait(RETRY_S / 5 + 0.001)
    assert len(harness.take(SnapshotChunk, "r2")) == 1


def test_sender_ignores_replies_to_chunks_sent_before_a_resume(tmp_path: Path) -> None:
    ref = make_ref(tmp_path, 9, 1, 20 * CHUNK_BYTES)
    sender = SnapshotSender(ref, 0.0)
    sent: list[SnapshotChunk] = []
    seqs = itertools.count(1)

    def pump(now_s: float = 0.0) -> list[SnapshotChunk]:
        sent.clear()
        sender.pump(1, lambda: next(seqs), sent.append, now_s)
        return list(sent)

    def answer(seq: int, outcome: int, offset: int, newest: int) -> None:
        sender.answered(SnapshotReply(1, seq, 9, 1, outcome, offset, 0), newest, 0.0)

    assert [chunk.data for chunk in pump()] == [b""]
    answer(1, RESUME, 0, 1)
    assert [chunk.offset // CHUNK_BYTES for chunk in pump()] == [0, 1, 2, 3]
    # The first chunk was lost, so each of the other three gets the same RESUME reply.
    answer(3, RESUME, 0, 5)
    assert [chunk.offset // CHUNK_BYTES for chunk in pump()] == [0, 1, 2, 3]
    answer(4, RESUME, 0, 9)
    answer(5, RESUME, 0, 9)
    assert pump() == [], "these replies belong to earlier chunks"
    answer(6, CONTINUE, CHUNK_BYTES, 9)
    assert [chunk.offset // CHUNK_BYTES for chunk in pump()] == [4]
    assert pump(RETRY_S - 0.1) == []
    assert [chunk.data for chunk in pump(RETRY_S)] == [b""], "the sender asks again without a reply"
    sender.close()


def test_snapshot_file_that_differs_from_its_reference_is_not_sent(tmp_path: Path) -> None:
    ref = make_ref(tmp_path, 9, 1, 100)
    ref.path.write_bytes(b"short")
    with pytest.raises(ValueError, match="has 5 bytes"):
        SnapshotSender(ref, 0.0)


class FakeSink:
    def __init__(self, finish: BaseException | None = None) -> None:
        self.data = bytearray()
        self.aborted = self.finished = self.suspended = False
        self.verified: list[Callable[[], None]] = []
        self.received_bytes = 0
        self._finish = finish

    def write(self, offset: int, data: bytes) -> None:
        self.data += data

    def verify(self, done: Callable[[], None]) -> None:
        self.verified.append(done)

    def suspend(self) -> None:
        self.suspended = True

    def finish(self) -> None:
        if self._finish is not None:
            raise self._finish
        self.finished = True

    def abort(self) -> None:
        self.aborted = True


class FakeMachine:
    def __init__(self, finish: BaseException | None = None) -> None:
        self.sinks: list[FakeSink] = []
        self._finish = finish

    def apply(self, index: int, term: int, data: bytes) -> None:
        raise NotImplementedError

    def newest_snapshot(self) -> None:
        return None

    def snapshot_refused(self, index: int) -> None:
        pass

    def begin_install(self, index: int, term: int) -> FakeSink:
        self.sinks.append(FakeSink(self._finish))
        return self.sinks[-1]


def chunk(offset: int, data: bytes, index: int = 9, size_bytes: int = 6) -> SnapshotChunk:
    return SnapshotChunk(1, 1, index, 1, size_bytes, offset, data)


def test_receiver_takes_chunks_in_order_and_names_the_resume_offset() -> None:
    machine = FakeMachine()
    receiver = SnapshotReceiver(machine)
    assert receiver.take(chunk(0, b"")) == (RESUME, 0)
    assert receiver.take(chunk(0, b"abc")) == (CONTINUE, 3)
    assert receiver.take(chunk(4, b"ef")) == (RESUME, 3), "a gap"
    assert receiver.take(chunk(0, b"abc")) == (RESUME, 3), "a copy"
    assert receiver.take(chunk(0, b"")) == (RESUME, 3), "a query"
    assert receiver.take(chunk(3, b"def")) == (CONTINUE, 6)
    sink = machine.sinks[0]
    assert receiver.take(chunk(0, b"")) == receiver.take(chunk(3, b"def")) == (RESUME, 6), "under verification"
    assert receiver.verified is None and not sink.finished
    (done,) = sink.verified
    done()
    assert receiver.verified == (9, 1) and not sink.finished, "installed only between two messages"
    assert receiver.install() == (9, 1) and sink.finished and bytes(sink.data) == b"abcdef"
    assert receiver.verified is None


def test_receiver_discards_one_snapshot_for_another() -> None:
    machine = FakeMachine()
    receiver = SnapshotReceiver(machine)
    receiver.take(chunk(0, b"abc"))
    assert receiver.take(chunk(3, b"def", index=10)) == (RESUME, 0)
    assert receiver.take(chunk(0, b"", index=10)) == (RESUME, 0)
    assert machine.sinks[0].aborted and len(machine.sinks) == 2


def test_receiver_rejects_more_bytes_than_announced() -> None:
    receiver = SnapshotReceiver(FakeMachine())
    assert receiver.take(chunk(0, b"abcdefg")) == (REFUSED, 0)


def test_h08_snapshot_that_fails_verification_is_rejected_and_the_state_stays(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.ERROR)
    with Simulation(6) as sim:
        leader = sim.commit(b"\x01a")
        sim.run(1.0)
        behind = sim.others(leader)[0]
        sim.isolate(behind.name)
        kept = list(behind.history)
        for number in range(5):
            sim.commit(b"\x01%d" % number)
        leader = sim.elect()
        leader.take_snapshot()
        behind.refuse_install = ValueError("checksum")
        sim.heal()
        sim.run(3.0)
        assert behind.history == kept and behind.installs == 0
        assert behind.engine is not None and not behind.engine.stopped
        assert "checksum" in caplog.text
        behind.refuse_install = None
        sim.converge()
        assert behind.installs == 1


@pytest.mark.parametrize(
    "failure",
    [SystemExit(3), StorageFailed("EIO"), ReleaseNeeded("the level is 9", level=9)],
    ids=["SystemExit", "StorageFailed", "ReleaseNeeded"],
)
def test_h08_exceptions_that_must_end_the_process_are_not_swallowed(failure: BaseException) -> None:
    machine = FakeMachine(failure)
    receiver = SnapshotReceiver(machine)
    receiver.take(chunk(0, b"abcdef"))
    machine.sinks[0].verified[0]()
    with pytest.raises(type(failure)):
        receiver.install()


def test_snapshot_survives_duplicates_losses_and_broken_links() -> None:
    with Simulation(8) as sim:
        leader = sim.commit(b"\x01a")
        behind = sim.others(leader)[0]
        sim.isolate(behind.name)
        for number in range(40):
            sim.commit(b"\x01%d" % number + b"x" * 60_000)
        leader = sim.elect()
        leader.take_snapshot()
        assert leader.snapshots[-1][0].size_bytes > 8 * CHUNK_BYTES
        sim.losses, sim.duplicates = 0.05, 0.1
        sim.heal()
        for _ in range(6):
            sim.run(0.05)
            sim.break_link(leader.name, behind.name)
            sim.connect_all()
        sim.converge()
        assert behind.installs == 1
