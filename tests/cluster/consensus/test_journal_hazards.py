"""Hazards of memory and promises: H1, H2, H3, H4, H9 to H11, H25.

wal guards H1 and H9 to H11, so their tests use its real journal over a disk that forgets unsynced data in a power cut.
Consensus guards the others; their tests use a journal in memory with the rules of the real one.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from forebay.cluster.consensus.frames import (
    DONE,
    PROMISES,
    AppendReply,
    AppendRequest,
    Heartbeat,
    SnapshotChunk,
    SnapshotReply,
    VoteReply,
    VoteRequest,
)
from forebay.cluster.consensus.interface import Role
from forebay.wal import Entry, Journal, no_op_of
from forebay.wal.codec import NO_OP
from forebay.wal.failures import BrokenInvariant
from forebay.wal.ledger import Ledger
from forebay.wal.records import GENESIS, chain_digest
from tests.cluster.consensus.harness import STAND_S, Harness, StockHarness
from tests.cluster.consensus.simulator import Simulation
from tests.wal.lives import Life, lives, state_of
from tests.wal.support import entry, fill

A, B, C, D = (b"\x01a", b"\x01b", b"\x01c", b"\x01d")

POWER_CUTS = range(12)
"""Seeds of a disk. The unsynced data that it loses is random, so a single power cut may lose none."""


@pytest.fixture
def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Life]:
    """Return a function that makes the real journal over the simulator's disk from a seed."""
    return lives(tmp_path, monkeypatch)


@pytest.mark.parametrize("where", ["sync log", "LMDB"])
def test_h01_synced_entries_survive_a_power_cut(at: Callable[[int], Life], where: str) -> None:
    for seed in POWER_CUTS:
        life = at(seed)
        journal = life.open()
        life.create = False
        for index in range(1, 6):
            fill(journal, index, applied=index - 1, term=index)
            if where == "LMDB":
                journal.flush_hints()
        journal.set_term(9, "r2")
        journal.sync()
        assert journal._sync_log.is_empty is False, "a sync goes to the log"
        if where == "LMDB":
            journal.flush_hints()
            assert journal._sync_log.is_empty
        promised = state_of(journal)
        journal.append([entry(6, 9)])
        life.lose_power()
        assert state_of(life.open()) == promised


def test_power_cut_of_all_replicas_loses_no_acknowledged_entry() -> None:
    with Simulation(1) as sim:
        for number in range(20):
            sim.commit(b"\x01%d" % number)
        for replica in sim.replicas.values():
            replica.crash()
        sim.converge()
        assert len(sim.acknowledged) == 20


def test_h01_vote_alone_survives_a_power_cut_so_no_term_has_two_votes(at: Callable[[int], Life]) -> None:
    for seed in POWER_CUTS:
        life = at(seed)
        harness = Harness(journal=life.open())
        life.create = False
        harness.give("r2", VoteRequest(4, 1, 0, 0, pre=False))
        assert harness.take(VoteReply, "r2")[0].granted
        life.lose_power()
        restarted = Harness(journal=life.open())
        assert restarted.engine.term == 4
        restarted.give("r3", VoteRequest(4, 1, 0, 0, pre=False))
        assert not restarted.take(VoteReply, "r3")[0].granted
        restarted.give("r2", VoteRequest(4, 2, 0, 0, pre=False))
        assert restarted.take(VoteReply, "r2")[0].granted, "the same candidate gets the vote again"


def test_h02_no_promise_leaves_before_its_sync() -> None:
    for message in (
        VoteRequest(4, 1, 0, 0, pre=False),
        AppendRequest(4, 1, 0, 0, 0, True, [(4, A)]),
        Heartbeat(4, 1, 0, True),
    ):
        harness = Harness()
        promised_at_sync: list[int] = []
        harness.disk.before_sync = lambda harness=harness, seen=promised_at_sync: seen.append(len(harness.out))  # type: ignore[misc]
        harness.engine.receive("r2", message)
        assert harness.out == []
        harness.engine.tick()
        assert promised_at_sync == [0]
        assert len(harness.out) == 1 and isinstance(harness.out[0][1], PROMISES)


def test_h02_candidate_requests_votes_after_its_own_vote_is_durable() -> None:
    harness = Harness()
    harness.wait(STAND_S)
    (question, *_) = harness.take(VoteRequest)
    harness.disk.fail_next = OSError("the disk is gone")
    with pytest.raises(OSError):
        harness.give("r2", VoteReply(0, question.seq, True, pre=True))
    assert harness.out == [], "a vote request is a promise: its sender has voted for itself"


def test_h02_append_requests_leave_before_the_sync_but_the_leader_counts_after_it() -> None:
    harness = Harness(replicas=3)
    harness.lead()
    index, _ = harness.engine.propose(A)
    seen: list[tuple[int, int]] = []
    harness.disk.before_sync = lambda: seen.append((len(harness.out), harness.engine.commit_index))
    harness.engine.tick()
    assert seen == [], "the event loop sends at the end of a turn, and the disk delays the next turn"
    requests = harness.take(AppendRequest, "r2")
    assert len(requests) == 1
    # One peer and the leader itself are a majority; with a failed sync the leader does not count.
    harness.engine.receive("r2", AppendReply(harness.engine.term, requests[-1].seq, index))
    harness.disk.before_sync = lambda: seen.append((0, harness.engine.commit_index))
    harness.disk.fail_next = OSError("the disk is gone")
    with pytest.raises(OSError):
        harness.engine.tick()
    assert seen == [(0, index - 1)]
    assert harness.engine.commit_index == index - 1


def test_h02_promises_of_an_older_term_are_dropped_after_a_cut() -> None:
    harness = Harness()
    harness.follow([(1, A), (1, B)], commit=1)
    harness.take(AppendReply)
    # Messages of both leaders wait in the sockets of a paused replica, and are read in one turn.
    harness.engine.receive("r2", AppendRequest(1, 50, 2, 1, 1, True, [(1, C)]))
    harness.engine.receive("r3", AppendRequest(2, 1, 1, 1, 1, True, [(2, D)]))
    harness.engine.tick()
    assert harness.journal.last_index == 2
    assert [(peer, reply.term, reply.match_index) for peer, reply in harness.out if isinstance(reply, AppendReply)] == [
        ("r3", 2, 2)
    ]


def test_h03_stale_prefix_removes_nothing() -> None:
    harness = Harness()
    harness.follow([(1, A), (1, B), (1, C)], commit=1)
    harness.give("r2", AppendRequest(1, 2, 0, 0, 1, True, [(1, A)]))
    assert harness.journal.last_index == 3
    harness.give("r2", AppendRequest(1, 3, 1, 1, 1, True, []))
    assert harness.journal.last_index == 3
    assert harness.take(AppendReply)[-1].match_index == 3


def test_h03_stock_engine_truncates_at_a_stale_prefix() -> None:
    stock = StockHarness()
    entries = [(A, 2, 1), (B, 3, 1), (C, 4, 1)]
    common = {"type": "append_entries", "term": 1, "commit_index": 1, "prevLogIdx": 1, "prevLogTerm": 0}
    stock.give("r2", **common, entries=entries)
    assert stock.private("raftLog")[-1][1] == 4
    stock.give("r2", **common, entries=entries[:1])
    assert stock.private("raftLog")[-1][1] == 2, "HAZARDS.md H3; if this fails, the release changed"


def test_h03_conflict_of_terms_truncates_from_the_conflict_on() -> None:
    harness = Harness()
    harness.follow([(1, A), (1, B), (1, C)], commit=1)
    harness.give("r3", AppendRequest(2, 1, 1, 1, 1, True, [(2, D)]))
    assert [harness.journal.entry(index).data for index in (1, 2)] == [A, D]
    assert harness.journal.last_index == 2


def test_replacement_of_cut_entries_does_not_count_as_synced() -> None:
    harness = Harness()
    harness.follow([(1, A), (1, B), (1, C)])
    assert harness.engine.raft.durable_index == 3
    harness.engine.receive("r3", AppendRequest(2, 1, 1, 1, 0, True, [(2, D), (2, A), (2, B)]))
    assert harness.journal.dirty and harness.journal.last_index == 4
    assert harness.engine.raft.durable_index == 1
    harness.engine.tick()
    assert harness.engine.raft.durable_index == 4


@pytest.mark.parametrize(
    "request_",
    [AppendRequest(2, 1, 0, 0, 2, True, [(2, D)]), AppendRequest(2, 1, 1, 2, 2, True, [(2, D)])],
    ids=["an entry", "the entry before"],
)
def test_h03_leader_that_contradicts_committed_entries_stops_the_replica(request_: AppendRequest) -> None:
    harness = Harness()
    harness.follow([(1, A), (1, B), (1, C)], commit=2)
    with pytest.raises(BrokenInvariant, match="here the entry of term"):
        harness.give("r3", request_)
    assert harness.engine.stopped
    assert [harness.journal.entry(index).data for index in (1, 2, 3)] == [A, B, C]


def test_h04_acknowledgement_of_an_older_term_does_not_count() -> None:
    harness = Harness(replicas=5)
    harness.lead()
    first_term = harness.engine.term
    harness.engine.propose(A)
    harness.engine.tick()
    old = harness.take(AppendRequest, "r2")[0]
    # It loses leadership, another leader replaces the entry at A's index, and this replica leads again.
    harness.give("r3", AppendRequest(first_term + 1, 1, 1, first_term, 1, True, [(first_term + 1, B)]))
    harness.take(AppendReply)
    harness.win()
    harness.engine.tick()
    sent = harness.take(AppendRequest, "r3")
    last = harness.journal.last_index
    # Only r3 accepts in this term. The acknowledgements of r2 and r4 are of the older term, with the same indexes.
    for peer in ("r2", "r4"):
        harness.give(peer, AppendReply(first_term, old.seq, last))
        harness.give(peer, AppendReply(first_term, harness.engine.raft.seq, last))
    harness.give("r3", AppendReply(harness.engine.term, sent[-1].seq, last))
    assert harness.engine.commit_index == 1
    assert not harness.engine.ready


def test_h04_stock_engine_counts_an_acknowledgement_without_a_term() -> None:
    stock = StockHarness()
    stock.win()
    last = stock.private("raftLog")[-1][1]
    # This message has no term, so the engine cannot know that it answers a request of an older term.
    stock.give("r2", type="next_node_idx", next_node_idx=last + 1, reset=False, success=True)
    stock.engine.doTick()
    assert stock.engine.raftCommitIndex == last, "HAZARDS.md H4; if this fails, the release changed"


def test_h04_duplicate_and_older_replies_are_dropped() -> None:
    harness = Harness()
    harness.lead()
    known = harness.engine.raft.progress["r2"]
    seq = known.acked_seq
    before = (known.match, known.next, known.phase)
    harness.give("r2", AppendReply(harness.engine.term, seq, 0, rejected=True, hint_index=0, hint_term=0))
    harness.give("r2", AppendReply(harness.engine.term, harness.engine.raft.seq + 5, 0, rejected=True))
    assert (known.match, known.next, known.phase) == before


def test_peer_that_claims_more_entries_than_the_leader_has_is_not_counted() -> None:
    harness = Harness()
    harness.win()
    harness.engine.tick()
    seq = harness.take(AppendRequest, "r2")[-1].seq
    harness.give("r2", AppendReply(harness.engine.term, seq, 99))
    assert harness.engine.commit_index == 0


def test_entry_of_an_older_term_is_committed_only_with_one_of_this_term() -> None:
    """Figure 8 of the paper: an old entry on a majority is not committed by that alone."""
    harness = Harness(replicas=5)
    harness.follow([(1, A)], leader="r2")
    harness.take(AppendReply)
    harness.win()
    harness.engine.tick()
    requests = harness.take(AppendRequest)
    for peer in ("r2", "r3", "r4"):
        harness.give(peer, AppendReply(harness.engine.term, requests[-1].seq, 1))
    assert harness.engine.commit_index == 0


@pytest.mark.parametrize("moment", ["before compaction", "after compaction, unsynced", "after compaction, synced"])
def test_crash_of_all_replicas_around_compaction_keeps_acknowledged_entries(moment: str) -> None:
    with Simulation(3) as sim:
        for number in range(10):
            sim.commit(b"\x01%d" % number)
        for replica in sim.replicas.values():
            replica.take_snapshot(compact=moment != "before compaction")
            if moment.endswith(", synced"):
                replica.journal.flush_hints()
        sim.commit(b"\x01after")
        for replica in sim.replicas.values():
            replica.crash()
        sim.converge()
        assert len(sim.acknowledged) == 11


def test_h09_compaction_dying_anywhere_loses_no_entry(at: Callable[[int], Life]) -> None:
    """After a death at any operation, the mark is old or new, and the ledger is complete."""
    for operation in range(1, 200):
        life = at(operation)
        journal = life.open()
        life.create = False
        fill(journal, 9, applied=6)
        journal.flush_hints()
        before = state_of(journal)
        assert before.base_index == 0 and [one.index for one in before.entries] == list(range(1, 10))

        def compact(journal: Journal = journal) -> None:
            journal.compact_to(5)
            journal.sync()
            journal.flush_hints()

        died = life.dies(operation, compact)
        if not died:
            life.lose_power()
        journal = life.open()
        after = state_of(journal)
        assert after.base_index == (5 if not died else after.base_index) and after.base_index in (0, 5)
        kept = tuple(one for one in before.entries if one.index > after.base_index)
        assert after == before._replace(base_index=after.base_index, entries=kept)
        assert life.env is not None
        assert [held.index for held in Ledger(life.env).read(1, limit=99)] == [1, 2, 3, 4, 5, 6]
        assert Ledger(life.env).verify().gaps == ()
        if not died:
            assert operation > 3, "there must be operations to die at"
            return
    raise AssertionError("the compaction must end")


def test_h09_matching_snapshot_keeps_the_suffix_if_its_installation_dies(at: Callable[[int], Life]) -> None:
    digest = GENESIS
    for index in range(1, 5):
        digest = chain_digest(digest, Entry(index, 1, NO_OP))
    for operation in range(1, 200):
        life = at(operation)
        journal = life.open()
        life.create = False
        journal.set_term(1, "r1")
        journal.append([Entry(index, 1, NO_OP) for index in range(1, 8)])
        journal.set_commit(1)
        journal.record_applied(journal.entry(1), 0)
        journal.sync()
        before = state_of(journal)

        def install(journal: Journal = journal) -> None:
            journal.reset_to(4, 1, digest, 0)
            journal.sync()

        died = life.dies(operation, install)
        if not died:
            life.lose_power()
        journal = life.open()
        after = state_of(journal)
        assert (after.term, after.voted_for) == (before.term, before.voted_for)
        assert (after.base_index, after.applied_index) in ([(0, 1), (4, 4)] if died else [(4, 4)])
        assert after.entries == before.entries[after.base_index :], "the suffix may be acknowledged"
        assert life.env is not None
        assert Ledger(life.env).gaps() == () and Ledger(life.env).verify().entries == after.applied_index
        if not died:
            assert operation > 3, "there must be operations to die at"
            return
    raise AssertionError("the installation must end")


def test_h25_heartbeat_commits_only_entries_checked_against_this_leader() -> None:
    harness = Harness()
    # An uncommitted tail of this replica's own leadership, or of an older leader.
    harness.follow([(1, A), (1, B), (1, C)], commit=1)
    harness.give("r3", Heartbeat(2, 1, 3, True))
    assert harness.engine.commit_index == 1
    assert harness.take(AppendReply)[-1].match_index == 1, "the reply must claim no more"
    harness.give("r3", AppendRequest(2, 2, 2, 1, 3, True, []))
    assert harness.engine.commit_index == 2, "the checked prefix ends at entry 2"
    assert harness.take(AppendReply)[-1].match_index == 2


def test_h25_snapshot_transfer_moves_no_commit_index() -> None:
    with Simulation(5) as sim:
        sim.commit(A)
        old = sim.elect()
        sim.isolate(old.name)
        ghosts = [b"\x01ghost%d" % number for number in range(5)]
        for ghost in ghosts:
            assert old.propose(ghost)
        sim.tick(old)
        assert sim.run(5.0, until=lambda: sim.leader() not in (None, old))
        for number in range(10):
            sim.commit(b"\x01%d" % number)
        new = sim.elect()
        new.take_snapshot()
        sim.converge()
        assert old.installs == 1
        assert not any(ghost in [data for _, _, data in old.history] for ghost in ghosts)


def test_h25_snapshot_at_or_below_the_checked_index_is_not_installed() -> None:
    harness = Harness()
    harness.follow([(1, A), (1, B), (1, C)], commit=2)
    harness.take(AppendReply)
    for index in (1, 2, 3):
        harness.give("r2", SnapshotChunk(1, 1 + index, index, 1, 10, 0, b""))
        reply = harness.take(SnapshotReply)[-1]
        assert (reply.outcome, reply.match_index) == (DONE, 3)
    assert harness.journal.last_index == 3
    assert harness.engine.commit_index == 2


def test_proposed_data_is_stored_unchanged_after_a_no_op_naming_the_leader() -> None:
    harness = Harness(replicas=1)
    harness.wait(STAND_S)
    assert harness.engine.role is Role.LEADER and harness.engine.ready
    harness.engine.propose(A)
    harness.engine.tick()
    assert [data for _, _, data in harness.applied] == [no_op_of(harness.engine.raft.me), A]
    assert [entry.data for entry in harness.disk.entries] == [no_op_of(harness.engine.raft.me), A]
