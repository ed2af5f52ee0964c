"""Leadership transfer (thesis 3.10): the leader brings the target up to date, then asks it to campaign (TimeoutNow)."""

import logging
from typing import Final

from forebay.cluster.consensus.frames import TimeoutNow
from forebay.cluster.consensus.interface import ChangeRefused, Role
from forebay.cluster.consensus.leader_election import stand
from forebay.cluster.consensus.progress import Phase
from forebay.cluster.consensus.state import RaftState
from forebay.wal import name_of

_log = logging.getLogger(__name__)

TARGET_LAG_ENTRIES: Final = 512
"""Maximum lag of the target when a transfer begins, entries: one append request. The leader accepts no proposals until
the target has caught up, so catching up must take only a fraction of an election timeout.
"""


def transfer(raft: RaftState, target: str | None = None) -> str:
    """Begin to transfer leadership to `target` (a name or ID), or to the best voter; return the target's ID.

    From now on the leader accepts no proposals. The target campaigns once it is up to date. If it does not win within
    an election timeout, this replica continues to lead.

    Raises:
        NotLeader: This replica does not lead.
        ChangeRefused: The target is not a voter, does not respond, or lags too far.
    """
    under_way = raft.transfer_target
    if raft.leads and under_way is not None and target in (None, under_way, name_of(under_way)):
        return under_way
    raft.require_ready()
    chosen = _best_target(raft) if target is None else _checked_target(raft, target)
    raft.transfer_target, raft.transfer_sent = chosen, False
    raft.transfer_deadline_s = raft.clock.monotonic_s() + raft.timing.election_max_s
    _log.info("%s transfers leadership to %s", raft.me, chosen)
    return chosen


def hand_over(raft: RaftState, now_s: float) -> None:
    """Ask the target to campaign once it is up to date; abandon the transfer at the deadline."""
    target = raft.transfer_target
    if target is None:
        return
    known = raft.progress.get(target)
    if now_s >= raft.transfer_deadline_s or known is None:
        _log.warning("%s did not take over from %s, which stays the leader", target, raft.me)
        raft.end_transfer()
    elif not raft.transfer_sent and known.match == raft.journal.last_index:
        raft.transfer_sent = True
        raft.outbox.send(target, TimeoutNow(raft.term, raft.next_seq()))


def on_timeout_now(raft: RaftState, peer: str, message: TimeoutNow) -> None:
    """Campaign without a pre-vote, because the leader requests it."""
    if message.term == raft.term and raft.role is Role.FOLLOWER and raft.leader == peer and raft.votes_here:
        stand(raft, transfer=True)


def _best_target(raft: RaftState) -> str:
    others = [peer for peer in raft.configuration.voter_ids if peer != raft.me and raft.answers(peer)]
    voters = [peer for peer in others if not raft.clock_off(peer)] or others
    if not voters:
        raise ChangeRefused("no_heir", "no other voter is reachable", "wait until one is")
    return _checked_target(raft, max(voters, key=lambda peer: raft.progress[peer].match))


def _checked_target(raft: RaftState, target: str) -> str:
    member = raft.configuration.member(target)
    if member is None:
        raise ChangeRefused("unknown_member", f"replica {target!r} does not exist", "name a member")
    if member.id == raft.me:
        raise ChangeRefused("leader", f"{member.name} is already the leader", "name another replica")
    if not raft.configuration.votes(member.id):
        raise ChangeRefused("learner", f"{member.name} is not a voter yet", "wait until it has caught up")
    known = raft.progress[member.id]
    behind = raft.journal.last_index - known.match
    if not raft.answers(member.id):
        raise ChangeRefused("silent", f"{member.name} is not reachable", "name another replica")
    if raft.clock_off(member.id):
        raise ChangeRefused(
            "clock_off",
            f"the wall clock of {member.name} differs from its peers'",
            "correct that clock, or name another replica",
        )
    if known.phase is not Phase.REPLICATE or behind > TARGET_LAG_ENTRIES:
        raise ChangeRefused("lagging", f"{member.name} is {behind} entries behind", "wait until it has caught up")
    return member.id
