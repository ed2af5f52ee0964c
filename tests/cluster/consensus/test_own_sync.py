"""The leader's own copy: when it becomes durable, and before that is never counted (H1, H2; thesis 10.2.1)."""

import pytest

from forebay.cluster.consensus.frames import AppendReply, AppendRequest, VoteReply, VoteRequest
from forebay.cluster.consensus.interface import Role
from forebay.cluster.consensus.raft_log import SYNC_POSTPONED_BYTES, SYNC_POSTPONED_S
from tests.cluster.consensus.harness import TIMING, Harness

SMALL = b"\x01small"
LARGE = b"\x01" + bytes(SYNC_POSTPONED_BYTES)


def leading(replicas: int = 3) -> Harness:
    harness = Harness(replicas=replicas)
    harness.lead()
    harness.settle()
    assert not harness.journal.dirty
    harness.out.clear()
    return harness


def acknowledge(harness: Harness, peer: str, index: int) -> None:
    seq = next(
        message.seq for to, message in reversed(harness.out) if to == peer and isinstance(message, AppendRequest)
    )
    harness.engine.receive(peer, AppendReply(harness.engine.term, seq, index))


def have_committed(harness: Harness, data: bytes) -> int:
    """Let the followers commit a proposal before the leader's next tick; return its index."""
    index, _ = harness.engine.propose(data)
    harness.engine.tick()
    for peer in ("r2", "r3"):
        acknowledge(harness, peer, index)
    harness.engine.tick()
    return index


def putting_off() -> tuple[Harness, int]:
    """Return a leader that postpones the sync of an entry that the followers have committed, and the entry's index."""
    harness = leading()
    return harness, have_committed(harness, SMALL)


@pytest.mark.parametrize("data", [SMALL, LARGE])
def test_messages_leave_in_a_tick_before_the_leader_syncs(data: bytes) -> None:
    harness = leading()
    syncs = harness.disk.syncs
    harness.engine.propose(data)
    harness.engine.tick()
    assert harness.disk.syncs == syncs
    assert len(harness.take(AppendRequest)) == 2


def test_small_proposal_is_synced_in_the_next_tick() -> None:
    harness = leading()
    syncs = harness.disk.syncs
    harness.engine.propose(SMALL)
    harness.engine.tick()
    assert harness.engine.next_due_s() <= harness.clock.now_s
    harness.engine.tick()
    assert harness.disk.syncs == syncs + 1
    assert not harness.journal.dirty


def test_under_load_followers_commit_before_the_leader_syncs() -> None:
    harness = leading()
    syncs = harness.disk.syncs
    index, _ = harness.engine.propose(LARGE)
    harness.engine.tick()
    acknowledge(harness, "r2", index)
    harness.engine.tick()
    assert harness.engine.commit_index == index - 1, (
        "one follower is no majority, and the leader's own copy is not durable"
    )
    acknowledge(harness, "r3", index)
    harness.engine.tick()
    assert harness.engine.commit_index == index
    assert harness.applied[-1][0] == index
    assert harness.disk.syncs == syncs


def test_leader_applies_entries_committed_by_followers_before_its_sync() -> None:
    harness = leading()
    syncs = harness.disk.syncs
    index = have_committed(harness, SMALL)
    assert harness.applied[-1][0] == index
    assert harness.disk.syncs == syncs
    assert harness.journal.dirty
    harness.wait(SYNC_POSTPONED_S)
    assert not harness.journal.dirty
    assert harness.disk.syncs == syncs + 1


def test_postponed_sync_happens_with_the_next_proposal_that_needs_it() -> None:
    harness, index = putting_off()
    syncs = harness.disk.syncs
    harness.out.clear()
    harness.engine.propose(SMALL)
    harness.engine.tick()
    acknowledge(harness, "r2", index + 1)
    harness.engine.tick()
    assert harness.disk.syncs == syncs + 1
    assert harness.engine.commit_index == index + 1


def test_postponed_sync_happens_when_too_few_followers_are_left() -> None:
    harness, _ = putting_off()
    assert harness.journal.dirty
    harness.engine.disconnected("r3")
    harness.settle()
    assert not harness.journal.dirty


def test_leader_waits_for_a_slow_follower_only_up_to_the_bound() -> None:
    harness = leading()
    index, _ = harness.engine.propose(LARGE)
    harness.engine.tick()
    acknowledge(harness, "r2", index)
    harness.engine.tick()
    assert harness.clock.now_s < harness.engine.next_due_s() <= harness.clock.now_s + SYNC_POSTPONED_S
    harness.wait(SYNC_POSTPONED_S)
    assert harness.engine.commit_index == index


def test_leader_with_too_few_followers_does_not_postpone_under_load() -> None:
    harness = leading()
    harness.engine.disconnected("r3")
    index, _ = harness.engine.propose(LARGE)
    harness.engine.tick()
    acknowledge(harness, "r2", index)
    harness.settle()
    assert harness.engine.commit_index == index


def test_single_leader_syncs_at_once() -> None:
    harness = Harness(replicas=1)
    harness.wait(2 * TIMING.election_max_s)
    assert harness.engine.role is Role.LEADER
    index, _ = harness.engine.propose(SMALL)
    harness.engine.tick()
    assert harness.engine.commit_index == index


def test_postponed_sync_precedes_any_promise_in_another_term() -> None:
    harness = leading()
    index, term = harness.engine.propose(LARGE)
    harness.engine.tick()
    assert harness.journal.dirty
    harness.disk.before_sync = lambda: order.append("sync")
    order: list[str] = []
    harness.clock.now_s += 2 * TIMING.election_max_s
    harness.out.clear()
    harness.engine.receive("r2", VoteRequest(term + 1, 1, index, term, False, True))
    harness.engine.tick()
    assert order == ["sync"]
    assert [reply.granted for reply in harness.take(VoteReply, "r2")] == [True]
    assert not harness.journal.dirty


def test_unsynced_entries_of_a_leader_are_lost_in_a_power_cut_but_stay_committed() -> None:
    harness = leading()
    index = have_committed(harness, LARGE)
    assert harness.engine.commit_index == index
    again = Harness(disk=harness.disk)
    assert again.journal.last_index == index - 1
    term = harness.engine.term
    again.give("r2", AppendRequest(term + 1, 1, index - 1, term, index, True, [(term, LARGE)]))
    assert (again.journal.last_index, again.engine.commit_index) == (index, index)
