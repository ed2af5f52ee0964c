"""A leader's own copy: when it is durable, and what is never counted or promised before (H1, H2; thesis 10.2.1)."""

import pytest

from cluster.consensus.frames import AppendReply, AppendRequest, VoteReply, VoteRequest
from cluster.consensus.interface import Role
from cluster.consensus.raft_log import SYNC_POSTPONED_BYTES, SYNC_POSTPONED_S
from tests.cluster.consensus.rig import TIMING, Rig

SMALL = b"\x01small"
LARGE = b"\x01" + bytes(SYNC_POSTPONED_BYTES)


def leading(replicas: int = 3) -> Rig:
    rig = Rig(replicas=replicas)
    rig.lead()
    rig.settle()
    assert not rig.journal.dirty
    rig.out.clear()
    return rig


def acknowledge(rig: Rig, peer: str, index: int) -> None:
    seq = next(message.seq for to, message in reversed(rig.out) if to == peer and isinstance(message, AppendRequest))
    rig.engine.receive(peer, AppendReply(rig.engine.term, seq, index))


def have_committed(rig: Rig, data: bytes) -> int:
    """Have the others commit a proposal before the leader's next tick; return its index."""
    index, _ = rig.engine.propose(data)
    rig.engine.tick()
    for peer in ("r2", "r3"):
        acknowledge(rig, peer, index)
    rig.engine.tick()
    return index


def putting_off() -> tuple[Rig, int]:
    """Return a leader that put off its copy of what the others have committed, and the index of that."""
    rig = leading()
    return rig, have_committed(rig, SMALL)


@pytest.mark.parametrize("data", [SMALL, LARGE])
def test_what_is_sent_leaves_in_a_tick_of_its_own_before_the_leader_syncs(data: bytes) -> None:
    rig = leading()
    syncs = rig.disk.syncs
    rig.engine.propose(data)
    rig.engine.tick()
    assert rig.disk.syncs == syncs
    assert len(rig.take(AppendRequest)) == 2


def test_a_small_proposal_is_synced_in_the_very_next_tick() -> None:
    rig = leading()
    syncs = rig.disk.syncs
    rig.engine.propose(SMALL)
    rig.engine.tick()
    assert rig.engine.next_due_s() <= rig.clock.now_s
    rig.engine.tick()
    assert rig.disk.syncs == syncs + 1
    assert not rig.journal.dirty


def test_under_load_the_others_commit_while_the_leader_has_not_synced() -> None:
    rig = leading()
    syncs = rig.disk.syncs
    index, _ = rig.engine.propose(LARGE)
    rig.engine.tick()
    acknowledge(rig, "r2", index)
    rig.engine.tick()
    assert rig.engine.commit_index == index - 1, "one follower is no majority, and the leader's own copy is not durable"
    acknowledge(rig, "r3", index)
    rig.engine.tick()
    assert rig.engine.commit_index == index
    assert rig.applied[-1][0] == index
    assert rig.disk.syncs == syncs


def test_what_the_others_have_committed_is_applied_before_the_leader_syncs_it_within_the_bound() -> None:
    rig = leading()
    syncs = rig.disk.syncs
    index = have_committed(rig, SMALL)
    assert rig.applied[-1][0] == index
    assert rig.disk.syncs == syncs
    assert rig.journal.dirty
    rig.wait(SYNC_POSTPONED_S)
    assert not rig.journal.dirty
    assert rig.disk.syncs == syncs + 1


def test_a_copy_that_was_put_off_is_synced_with_the_next_proposal_that_needs_it() -> None:
    rig, index = putting_off()
    syncs = rig.disk.syncs
    rig.out.clear()
    rig.engine.propose(SMALL)
    rig.engine.tick()
    acknowledge(rig, "r2", index + 1)
    rig.engine.tick()
    assert rig.disk.syncs == syncs + 1
    assert rig.engine.commit_index == index + 1


def test_who_put_a_copy_off_makes_it_when_too_few_of_the_others_are_left() -> None:
    rig, _ = putting_off()
    assert rig.journal.dirty
    rig.engine.disconnected("r3")
    rig.settle()
    assert not rig.journal.dirty


def test_a_follower_that_is_slow_is_waited_for_no_longer_than_the_bound() -> None:
    rig = leading()
    index, _ = rig.engine.propose(LARGE)
    rig.engine.tick()
    acknowledge(rig, "r2", index)
    rig.engine.tick()
    assert rig.clock.now_s < rig.engine.next_due_s() <= rig.clock.now_s + SYNC_POSTPONED_S
    rig.wait(SYNC_POSTPONED_S)
    assert rig.engine.commit_index == index


def test_with_too_few_followers_at_hand_the_leader_does_not_wait_under_load() -> None:
    rig = leading()
    rig.engine.disconnected("r3")
    index, _ = rig.engine.propose(LARGE)
    rig.engine.tick()
    acknowledge(rig, "r2", index)
    rig.settle()
    assert rig.engine.commit_index == index


def test_a_leader_alone_syncs_at_once() -> None:
    rig = Rig(replicas=1)
    rig.wait(2 * TIMING.election_max_s)
    assert rig.engine.role is Role.LEADER
    index, _ = rig.engine.propose(SMALL)
    rig.engine.tick()
    assert rig.engine.commit_index == index


def test_a_leader_that_owes_a_sync_makes_it_before_it_promises_anything_in_another_term() -> None:
    rig = leading()
    index, term = rig.engine.propose(LARGE)
    rig.engine.tick()
    assert rig.journal.dirty
    rig.disk.before_sync = lambda: order.append("sync")
    order: list[str] = []
    rig.clock.now_s += 2 * TIMING.election_max_s
    rig.out.clear()
    rig.engine.receive("r2", VoteRequest(term + 1, 1, index, term, False, True))
    rig.engine.tick()
    assert order == ["sync"]
    assert [reply.granted for reply in rig.take(VoteReply, "r2")] == [True]
    assert not rig.journal.dirty


def test_what_a_leader_has_not_synced_is_gone_after_a_power_cut_and_was_committed_by_others_only() -> None:
    rig = leading()
    index = have_committed(rig, LARGE)
    assert rig.engine.commit_index == index
    again = Rig(disk=rig.disk)
    assert again.journal.last_index == index - 1
    term = rig.engine.term
    again.give("r2", AppendRequest(term + 1, 1, index - 1, term, index, True, [(term, LARGE)]))
    assert (again.journal.last_index, again.engine.commit_index) == (index, index)
