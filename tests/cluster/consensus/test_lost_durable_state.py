"""A replica that lost its disk and returns empty under its old ID is detected by replicas with its promises."""

import logging
from pathlib import Path

import pytest

from forebay.cluster.consensus.frames import AppendReply, AppendRequest, Heartbeat, SnapshotChunk, StateLost
from forebay.cluster.consensus.interface import LostDurableState, Role, SnapshotRef
from forebay.cluster.consensus.progress import Phase
from tests.cluster.consensus.harness import TIMING, Harness
from tests.cluster.consensus.memory_journal import Disk
from tests.cluster.consensus.simulator import Replica, Simulation

ENTRIES = 20


def leader() -> Harness:
    """Return a leader whose entries r2 and r3 have acknowledged, and whose link to r2 broke."""
    harness = Harness()
    harness.lead()
    for number in range(ENTRIES):
        harness.engine.propose(b"\x01%d" % number)
    harness.engine.tick()
    kept = list(harness.out)
    for peer in harness.peers:
        harness.out = list(kept)
        harness.accept(peer)
    assert harness.engine.commit_index == ENTRIES + 1
    harness.engine.disconnected("r2")
    return harness


def returns(harness: Harness) -> AppendRequest:
    """Restore the link of r2; return the probe of its journal."""
    harness.out.clear()
    harness.engine.connected("r2")
    harness.engine.tick()
    (probe,) = harness.take(AppendRequest, "r2")
    return probe


def refuse(harness: Harness, probe: AppendRequest, last_index: int = 0) -> None:
    """Reply as a replica whose journal ends at `last_index`."""
    harness.give("r2", AppendReply(harness.engine.term, probe.seq, last_index, True, last_index, int(last_index > 0)))


@pytest.mark.parametrize("last_index", [0, 1, ENTRIES])
def test_replica_that_lacks_acknowledged_entries_is_rejected_and_reported(
    last_index: int, caplog: pytest.LogCaptureFixture
) -> None:
    harness = leader()
    refuse(harness, returns(harness), last_index)
    assert [(m.member, m.match_index) for m in harness.take(StateLost, "r2")] == [("r2", ENTRIES + 1)]
    (shown, _) = harness.engine.peers()
    assert shown.forgot and shown.match_index == 0 and shown.lag_entries == harness.journal.last_index
    (line,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "r2 acknowledged entries up to 21" in line.message and "cluster replace r2" in line.message


def test_messages_of_a_rejected_replica_do_not_count_and_it_gets_no_entries() -> None:
    harness = leader()
    refuse(harness, returns(harness))
    harness.engine.disconnected("r3")
    harness.engine.propose(b"\x01more")
    harness.engine.tick()
    commit = harness.engine.commit_index
    for _ in range(4):
        harness.wait(TIMING.heartbeat_s)
        for seq in [m.seq for to, m in harness.out if to == "r2"]:
            harness.give("r2", AppendReply(harness.engine.term, seq, 0))
        assert not [m for to, m in harness.out if to == "r2" and isinstance(m, AppendRequest) and m.entries]
    assert harness.take(StateLost, "r2"), "the replica is notified again"
    assert harness.engine.commit_index == commit
    harness.wait(TIMING.election_max_s)
    assert harness.engine.role is Role.FOLLOWER, "a leader with only this peer has no majority"


def test_lost_entries_are_detected_even_after_their_compaction() -> None:
    harness = leader()
    harness.engine.propose(b"\x01more")
    harness.engine.tick()
    harness.accept("r3")
    harness.journal.compact_to(ENTRIES + 2)
    harness.snapshot = SnapshotRef(path=None, index=ENTRIES + 2, term=1, size_bytes=1)  # type: ignore[arg-type]
    probe = returns(harness)
    assert (probe.prev_index, probe.prev_term, probe.entries) == (ENTRIES + 1, 1, [])
    refuse(harness, probe)
    assert len(harness.take(StateLost, "r2")) == 1
    harness.wait(3 * TIMING.heartbeat_s)
    assert harness.take(SnapshotChunk, "r2") == [], "the replica must not get a snapshot"


def test_rejected_replica_is_not_caught_up_after_a_reelection(tmp_path: Path) -> None:
    harness = leader()
    refuse(harness, returns(harness))
    harness.wait(TIMING.election_max_s)
    assert harness.engine.role is not Role.LEADER
    harness.out.clear()
    harness.win()
    harness.accept("r3")
    assert harness.engine.ready
    last = harness.journal.last_index
    path = tmp_path / "snapshot"
    path.write_bytes(b"x")
    harness.snapshot = SnapshotRef(path=path, index=last, term=harness.engine.term, size_bytes=1)
    harness.journal.compact_to(last)
    harness.engine.disconnected("r2")
    harness.engine.connected("r2")
    harness.out.clear()
    harness.wait(3 * TIMING.heartbeat_s)
    sent = [message for to, message in harness.out if to == "r2"]
    assert sent and all(isinstance(message, Heartbeat) for message in sent)


def test_replica_that_kept_compacted_entries_gets_the_snapshot() -> None:
    harness = leader()
    harness.engine.propose(b"\x01more")
    harness.engine.tick()
    harness.accept("r3")
    harness.journal.compact_to(ENTRIES + 2)
    probe = returns(harness)
    harness.give("r2", AppendReply(harness.engine.term, probe.seq, ENTRIES + 1))
    assert harness.engine.raft.progress["r2"].phase is Phase.SNAPSHOT
    assert not harness.engine.peers()[0].forgot


def test_restarted_replica_with_a_lagging_commit_mark_is_not_rejected() -> None:
    harness = leader()
    probe = returns(harness)
    (shown, _) = harness.engine.peers()
    harness.give("r2", AppendReply(harness.engine.term, probe.seq, probe.prev_index))
    harness.give("r2", AppendReply(harness.engine.term, harness.engine.raft.seq, 3))
    assert harness.take(StateLost) == [] and not shown.forgot
    assert harness.engine.peers()[0].match_index == ENTRIES + 1


def test_replica_whose_disk_was_not_mounted_counts_again_with_its_entries() -> None:
    harness = leader()
    refuse(harness, returns(harness))
    harness.engine.disconnected("r2")
    probe = returns(harness)
    assert probe.prev_index == ENTRIES + 1
    harness.give("r2", AppendReply(harness.engine.term, probe.seq, ENTRIES + 1))
    (shown, _) = harness.engine.peers()
    assert not shown.forgot and shown.match_index == ENTRIES + 1


def follower() -> Harness:
    harness = Harness(me="r3")
    harness.follow([(1, b"\x01a"), (1, b"\x01b")], leader="r2")
    return harness


def test_notified_replica_checks_the_claim_and_stops_with_the_remedy() -> None:
    harness = follower()
    with pytest.raises(LostDurableState, match="forebay cluster replace r3") as stopped:
        harness.engine.receive("r2", StateLost(1, 9, "r3", 7))
    assert (stopped.value.acknowledged_index, stopped.value.last_index) == (7, 2)
    assert harness.engine.stopped


@pytest.mark.parametrize(
    ("peer", "notice"),
    [
        ("r2", StateLost(1, 9, "r3", 2)),
        ("r2", StateLost(0, 9, "r3", 7)),
        ("r1", StateLost(1, 9, "r3", 7)),
        ("r2", StateLost(1, 9, "r3#4", 7)),
    ],
    ids=["it has the entry", "an older term", "who does not lead", "a namesake"],
)
def test_false_or_foreign_notice_changes_nothing(peer: str, notice: StateLost) -> None:
    harness = follower()
    harness.give(peer, notice)
    assert not harness.engine.stopped


def wipe(sim: Simulation, replica: Replica) -> None:
    replica.crash()
    replica.disk = Disk()
    replica.history.clear()
    sim.run(1.0)
    replica.start()
    sim.connect_all()


@pytest.mark.parametrize("compact", [False, True])
def test_wiped_replica_started_as_a_founder_beside_a_leader_stops(compact: bool) -> None:
    with Simulation(21) as sim:
        for number in range(30):
            first = sim.commit(b"\x01%d" % number)
        sim.run(1.0)
        wiped = sim.others(first)[0]
        if compact:
            wiped.crash()
            for number in range(30):
                sim.commit(b"\x01after %d" % number)
            first.take_snapshot()
            wiped.start()
            wiped.history.clear()
        with pytest.raises(LostDurableState):
            wipe(sim, wiped)
            sim.run(5.0)
        wiped.crash()
        assert sim.elect() is first and sim.engine(first.name).peers()
        assert [peer.name for peer in sim.engine(first.name).peers() if peer.forgot] == [wiped.name]
        sim.commit(b"\x01 the others go on")


def test_heartbeats_alone_neither_reject_nor_restore_a_replica() -> None:
    harness = leader()
    returns(harness)
    harness.wait(TIMING.heartbeat_s)
    for beat in harness.take(Heartbeat, "r2"):
        harness.give("r2", AppendReply(harness.engine.term, beat.seq, 0))
    assert harness.take(StateLost) == []
    probe = returns(harness)
    refuse(harness, probe)
    assert len(harness.take(StateLost, "r2")) == 1
