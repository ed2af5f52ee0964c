"""Election hazards: H14, H15, votes counted twice, and unconfirmed reads."""

import itertools

import pytest

from forebay.cluster.consensus.frames import AppendReply, AppendRequest, Heartbeat, VoteReply, VoteRequest
from forebay.cluster.consensus.interface import NotLeader, Role
from forebay.wal.failures import BrokenInvariant
from forebay.wal.journal import Entry
from tests.cluster.consensus.harness import STAND_S, TIMING, Harness, StockHarness
from tests.cluster.consensus.simulator import Simulation


def test_h14_isolated_replica_raises_no_term_and_deposes_no_leader_on_return() -> None:
    with Simulation(1) as sim:
        leader = sim.commit(b"\x01a")
        term = sim.engine(leader.name).term
        lonely = sim.others(leader)[0]
        for peer in sim.others(lonely):
            sim.black |= {(lonely.name, peer.name), (peer.name, lonely.name)}
        assert not sim.run(10.0, until=lambda: sim.leader() is not leader)
        assert sim.engine(lonely.name).term == term
        sim.black.clear()
        assert not sim.run(3.0, until=lambda: sim.leader() is not leader)
        assert sim.engine(leader.name).term == term
        assert sim.engine(lonely.name).leader == leader.name


def test_h14_replica_that_hears_a_leader_ignores_vote_requests() -> None:
    for pre in (True, False):
        harness = Harness()
        harness.give("r2", Heartbeat(3, 1, 0, True))
        harness.take(AppendReply)
        harness.give("r3", VoteRequest(9, 1, 5, 5, pre))
        assert harness.engine.term == 3 and harness.engine.leader == "r2"
        assert harness.take(VoteReply) == []
        harness.clock.now_s += TIMING.election_min_s
        harness.engine.receive("r3", VoteRequest(9, 2, 5, 5, pre))
        harness.engine.tick()
        assert harness.take(VoteReply, "r3")[0].granted


def test_h14_leader_with_a_responding_majority_ignores_vote_requests() -> None:
    harness = Harness()
    harness.lead()
    term = harness.engine.term
    harness.give("r3", VoteRequest(term + 5, 1, 99, term + 5, pre=False))
    assert harness.engine.role is Role.LEADER and harness.engine.term == term


def test_h14_stock_engine_obeys_any_vote_request_of_a_higher_term() -> None:
    stock = StockHarness()
    stock.win()
    stock.give("r3", type="request_vote", term=999, last_log_term=0, last_log_index=0)
    assert stock.engine.raftCurrentTerm == 999 and not stock.engine._isLeader(), "HAZARDS.md H14"


def test_h14_pre_vote_changes_nothing_at_the_voter() -> None:
    harness = Harness()
    harness.give("r2", VoteRequest(7, 1, 5, 5, pre=True))
    assert harness.take(VoteReply)[0].granted
    assert (harness.engine.term, harness.journal.voted_for, harness.disk.syncs) == (0, None, 0)


def test_candidate_without_votes_keeps_its_term() -> None:
    harness = Harness()
    harness.wait(STAND_S)
    seq = harness.take(VoteRequest)[0].seq
    harness.give("r2", VoteReply(0, seq, False, pre=True))
    harness.give("r3", VoteReply(0, seq, False, pre=True))
    for _ in range(20):
        harness.wait(STAND_S)
    assert harness.engine.term == 0
    assert harness.disk.syncs == 0, "a pre-vote writes nothing"


def test_vote_delivered_twice_counts_once() -> None:
    harness = Harness(replicas=5)
    harness.wait(STAND_S)
    seq = harness.take(VoteRequest)[0].seq
    for peer in ("r2", "r3"):
        harness.give(peer, VoteReply(0, seq, True, pre=True))
    seq = harness.take(VoteRequest)[0].seq
    for _ in range(3):
        harness.give("r2", VoteReply(1, seq, True, pre=False))
    assert harness.engine.role is Role.CANDIDATE
    harness.give("r3", VoteReply(1, seq, True, pre=False))
    assert harness.engine.role is Role.LEADER


def test_stock_engine_counts_a_vote_delivered_twice_as_two() -> None:
    stock = StockHarness(replicas=5)
    stock.set_private("raftElectionDeadline", 0)
    stock.engine.doTick()
    for _ in range(2):
        stock.give("r2", type="response_vote", term=stock.engine.raftCurrentTerm)
    assert stock.engine._isLeader(), "not in HAZARDS.md; if this fails, the release changed"


def test_vote_of_an_older_campaign_does_not_count() -> None:
    harness = Harness()
    harness.wait(STAND_S)
    old = harness.take(VoteRequest)[0].seq
    harness.wait(STAND_S)
    harness.give("r2", VoteReply(0, old, True, pre=True))
    assert harness.engine.term == 0


@pytest.mark.parametrize("pre", [True, False], ids=["asked before", "asked to vote"])
def test_vote_needs_a_journal_at_least_as_complete(pre: bool) -> None:
    own = [2, 2, 3]  # terms, so that (3, 3) is the last entry
    for last_term, last_index in itertools.product(range(1, 5), range(1, 6)):
        harness = Harness()
        harness.give("r2", VoteRequest(3, 1, 9, 9, pre=False))
        harness.journal.append([harness_entry(index, term) for index, term in enumerate(own, start=1)])
        harness.take(VoteReply)
        harness.give("r3", VoteRequest(5, 1, last_index, last_term, pre=pre))
        is_complete = last_term > 3 or (last_term == 3 and last_index >= 3)
        assert [reply.granted for reply in harness.take(VoteReply, "r3")] == [is_complete], (last_term, last_index)


def test_h14_replica_that_lacks_committed_entries_raises_no_term() -> None:
    with Simulation(seed=3) as sim:
        sim.commit(b"\x011")
        leader = sim.elect()
        behind, other = sim.others(leader)
        sim.isolate(behind.name)
        for number in range(5):
            sim.commit(b"\x012%d" % number)
        term = sim.engine(leader.name).term
        leader.crash()
        sim.heal()
        # There is no leader. The lagging replica runs a pre-vote first: the other one must neither vote nor be
        # disturbed.
        sim.tick(behind)
        sim.filter = lambda sender, receiver, message: sender != other.name or not isinstance(message, VoteRequest)
        sim.run(10 * TIMING.election_max_s)
        assert sim.engine(behind.name).term == sim.engine(other.name).term == term


def harness_entry(index: int, term: int) -> Entry:
    return Entry(index, term, b"\x01x")


def test_h15_isolated_leader_steps_down_within_an_election_timeout() -> None:
    with Simulation(2) as sim:
        old = sim.commit(b"\x01a")
        answers: list[int | None] = []
        for peer in sim.others(old):
            sim.black |= {(old.name, peer.name), (peer.name, old.name)}
        sim.engine(old.name).read(answers.append)
        sim.schedule_tick(old)
        assert sim.run(TIMING.election_max_s + 0.05, until=lambda: sim.engine(old.name).role is not Role.LEADER)
        assert answers == [None]
        with pytest.raises(NotLeader):
            sim.engine(old.name).propose(b"\x01b")
        assert sim.run(3.0, until=lambda: sim.leader() not in (None, old))


def test_h15_messages_other_than_replies_do_not_keep_a_leader_alive() -> None:
    harness = Harness()
    harness.lead()
    for _ in range(20):
        harness.clock.now_s += 0.1
        harness.engine.receive("r2", VoteReply(harness.engine.term, 1, False, pre=True))
        harness.engine.receive("r3", VoteRequest(0, 1, 0, 0, pre=True))
        harness.engine.tick()
    assert harness.engine.role is not Role.LEADER


def test_h15_linearizable_read_waits_for_a_later_round() -> None:
    harness = Harness()
    harness.lead()
    harness.wait(TIMING.heartbeat_s)
    early = harness.take(Heartbeat, "r2")[-1]
    answers: list[int | None] = []
    harness.engine.read(answers.append)
    harness.engine.tick()
    asked = harness.take(Heartbeat, "r2")[-1]
    harness.give("r2", AppendReply(harness.engine.term, early.seq, 1))
    assert answers == [], "this reply belongs to a request from before the read"
    harness.give("r2", AppendReply(harness.engine.term, asked.seq, 1))
    assert answers == [harness.engine.commit_index]


def test_h15_reads_during_a_round_share_the_next_round() -> None:
    harness = Harness()
    harness.lead()
    answers: list[int | None] = []
    harness.engine.read(answers.append)
    harness.engine.tick()
    first = harness.take(Heartbeat, "r2")
    for _ in range(100):
        harness.engine.read(answers.append)
        harness.engine.tick()
    assert harness.take(Heartbeat) == []
    harness.give("r2", AppendReply(harness.engine.term, first[-1].seq, 1))
    assert len(answers) == 1
    harness.engine.tick()
    second = harness.take(Heartbeat, "r3")
    assert len(second) == 1
    harness.give("r3", AppendReply(harness.engine.term, second[-1].seq, 1))
    assert len(answers) == 101


def test_read_of_an_unready_leader_waits_for_its_first_entry() -> None:
    harness = Harness()
    harness.win()
    answers: list[int | None] = []
    harness.engine.read(answers.append)
    harness.engine.tick()
    harness.give("r2", AppendReply(harness.engine.term, harness.take(Heartbeat, "r2")[-1].seq, 0))
    assert answers == [], "it leads, but does not know yet which entries are committed"
    harness.accept("r2")
    assert answers == [1]


def test_leader_rejects_proposals_before_its_first_entry_is_applied() -> None:
    harness = Harness()
    harness.win()
    harness.engine.tick()
    assert not harness.engine.ready
    with pytest.raises(NotLeader, match="own first entry"):
        harness.engine.propose(b"\x01a")
    harness.accept("r2")
    assert harness.engine.ready
    assert harness.engine.propose(b"\x01a") == (2, 1)


def test_two_leaders_in_one_term_stop_the_receiving_replica() -> None:
    harness = Harness()
    harness.give("r2", Heartbeat(3, 1, 0, True))
    with pytest.raises(BrokenInvariant, match="two leaders"):
        harness.give("r3", Heartbeat(3, 1, 0, True))


def test_stale_leader_learns_the_newer_term_from_a_reply() -> None:
    harness = Harness()
    harness.give("r2", Heartbeat(5, 1, 0, True))
    harness.take(AppendReply)
    harness.give("r3", Heartbeat(4, 1, 0, True))
    (reply,) = harness.take(AppendReply, "r3")
    assert reply.term == 5 and reply.rejected
    leader = Harness(me="r3")
    leader.lead()
    leader.give("r1", AppendReply(5, 1, 0, rejected=True))
    assert leader.engine.role is Role.FOLLOWER and leader.engine.term == 5


def test_paused_follower_reads_waiting_messages_before_it_counts_silence() -> None:
    harness = Harness()
    harness.follow([(1, b"\x01a")])
    harness.disk.before_sync = lambda: harness.clock.__setattr__("now_s", harness.clock.now_s + 5.0)
    for index in (2, 3):
        harness.give("r2", AppendRequest(1, index, index - 1, 1, 0, True, [(1, b"\x01b")]))
        harness.take(VoteRequest)
        harness.engine.tick()
        harness.engine.tick()
        assert harness.engine.leader == "r2" and harness.take(VoteRequest) == []
        harness.give("r2", Heartbeat(1, index, 0, True))
        assert harness.engine.leader == "r2"
    harness.wait(TIMING.election_min_s + 0.001)
    assert harness.take(VoteRequest), "silence while running counts as usual"


def test_paused_follower_without_messages_campaigns_after_a_short_grace() -> None:
    harness = Harness()
    harness.give("r2", Heartbeat(1, 1, 0, True))
    harness.clock.now_s += 5.0
    harness.engine.tick()
    assert harness.take(VoteRequest) == []
    harness.wait(3 * TIMING.heartbeat_s)
    assert harness.take(VoteRequest)


def test_leader_with_a_slow_disk_does_not_blame_its_followers() -> None:
    harness = Harness()
    harness.lead()
    harness.disk.before_sync = lambda: harness.clock.__setattr__("now_s", harness.clock.now_s + 5.0)
    for _ in range(2):
        harness.engine.propose(b"\x01a")
        harness.engine.tick()
        harness.engine.tick()
        harness.engine.tick()
        assert harness.engine.role is Role.LEADER
        harness.give("r2", AppendReply(harness.engine.term, harness.engine.raft.seq, 1))
    harness.clock.now_s += 5.0
    harness.engine.tick()
    assert harness.engine.role is Role.LEADER
    harness.wait(3 * TIMING.heartbeat_s)
    assert harness.engine.role is Role.FOLLOWER, "silence after the slow sync counts"


def test_broken_link_to_the_leader_speeds_up_the_next_election() -> None:
    def take_over_s(*, tells: bool) -> float:
        with Simulation(9) as sim:
            old = sim.commit(b"\x01a")
            began_s = sim.clock.now_s
            if tells:
                old.crash()
            else:
                for peer in sim.others(old):
                    sim.black |= {(old.name, peer.name), (peer.name, old.name)}
            assert sim.run(5.0, until=lambda: sim.leader() not in (None, old))
            return sim.clock.now_s - began_s

    assert take_over_s(tells=True) < TIMING.election_min_s < take_over_s(tells=False)


def test_follower_is_ready_when_close_behind_a_ready_leader() -> None:
    harness = Harness()
    assert not harness.engine.ready
    harness.give("r2", Heartbeat(1, 1, 0, False))
    assert not harness.engine.ready
    harness.give("r2", Heartbeat(1, 2, 0, True))
    assert harness.engine.ready
    harness.give("r2", Heartbeat(1, 3, 1_000_000, True))
    assert not harness.engine.ready
