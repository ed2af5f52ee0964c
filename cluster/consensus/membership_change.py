"""Membership changes (thesis 4): one at a time, checked by the leader (H12), and messages from non-members.

Each change is committed and applied before the next one, and changes at most one vote, so the majorities of successive
configurations overlap.
"""

import logging
from typing import Final

from forebay.cluster.consensus.configurations import MemberChange, may_be_later, next_configuration
from forebay.cluster.consensus.frames import AnyMessage, RemovalNotice
from forebay.cluster.consensus.interface import ChangeRefused, RemovedFromCluster
from forebay.cluster.consensus.leader_election import with_keys
from forebay.cluster.consensus.progress import Phase
from forebay.cluster.consensus.raft_log import append_own
from forebay.cluster.consensus.state import SEQ_BITS, RaftState, first_seq
from forebay.wal import ChangeKind, Configuration, encode_configuration, incarnation_of, name_of

_log = logging.getLogger(__name__)

PROMOTION_LAG_ENTRIES: Final = 64
"""Maximum lag of a learner that becomes a voter, entries behind the commit index. A lagging voter delays commits; this
lag takes less than a heartbeat to catch up.
"""

FORSAKEN_TIMEOUTS: Final = 5
"""Number of longest election timeouts without a leader, after which a replica accepts a removal notice from unknown
replicas too.
"""


# ---- changes, on the leader ----


def change(raft: RaftState, wanted: MemberChange) -> tuple[int, int]:
    """Append the configuration that results from `wanted`; return (index, term). It is in force at once.

    Raises:
        NotLeader: This replica does not lead.
        ChangeRefused: Another change is not committed and applied, a learner lags too far, the leader would remove
            itself, or too few of the remaining voters answer.
    """
    raft.require_ready()
    if raft.configurations.index > raft.applied_index:
        raise ChangeRefused("change_under_way", "another change of the members is under way", "try again shortly")
    if raft.configuration.version == 0:
        raise ChangeRefused("not_founded", "the cluster is not founded yet", "try again shortly")
    configuration = with_keys(next_configuration(raft.configuration, wanted, at=raft.clock.now()), raft)
    _admit(raft, wanted, configuration)
    with raft.fail_stop:
        index = append_own(raft, encode_configuration(configuration))
    who = name_of(configuration.change.member or "")
    _log.info("%s of %s: version %d of the configuration", wanted.action.word, who, configuration.version)
    raft.stirred = True
    return index, raft.term


def promotable(raft: RaftState) -> str | None:
    """Return the ID of a learner that `change` would promote now, or None."""
    if not raft.leads or not raft.ready or raft.configurations.index > raft.applied_index:
        return None
    return next((one.id for one in raft.configuration.learners if _has_caught_up(raft, one.id)), None)


def voter_without_key(raft: RaftState) -> tuple[str, bytes] | None:
    """Return the ID of a voter, and the key it sent, if the configuration lacks the key; otherwise None."""
    if raft.seals is None or not raft.leads or not raft.ready or raft.configurations.index > raft.applied_index:
        return None
    if raft.configuration.version == 0:
        return None
    known = raft.keys | {raft.me: raft.seals.key}
    return next(((one.id, known[one.id]) for one in raft.configuration.voters if not one.key and one.id in known), None)


def _admit(raft: RaftState, wanted: MemberChange, configuration: Configuration) -> None:
    me = raft.configuration.member(raft.me)
    if me is not None and not configuration.votes(me.id):
        raise ChangeRefused("leader", f"{me.name} is the leader", "run `forebay cluster transfer`, then try again")
    if wanted.action is ChangeKind.PROMOTE:
        subject = configuration.change.member or ""
        if not _has_caught_up(raft, subject):
            raise ChangeRefused(
                "lagging", f"{name_of(subject)} has not caught up", "wait until it is close to the leader"
            )
    if configuration.voter_ids == raft.configuration.voter_ids:
        return
    answering = sum(1 for one in configuration.voters if one.id == raft.me or raft.answers(one.id))
    if answering < configuration.majority:
        raise ChangeRefused(
            "no_majority",
            f"only {answering} of the {len(configuration.voters)} future voters are reachable, which is not a majority",
            "restart the unreachable replicas, or remove them first",
        )


def _has_caught_up(raft: RaftState, peer: str) -> bool:
    known = raft.progress[peer]
    behind = raft.commit_index - known.match
    if raft.seals is not None and peer not in raft.keys:
        return False  # votes of this learner could not be verified
    return known.phase is Phase.REPLICATE and behind <= PROMOTION_LAG_ENTRIES and raft.answers(peer)


# ---- non-members ----


def concerns(raft: RaftState, peer: str, message: AnyMessage) -> bool:
    """Return whether a message must be handled, given its sender. Notify a sender that was removed.

    Also handled are messages of members that a truncation could restore, and of replicas that a later configuration may
    have added, because these may lead.
    """
    if peer in raft.progress:
        return True  # a member in force
    committed = raft.configurations.committed(raft.commit_index)
    if not committed.voters:
        return True  # this replica is joining, and all others know more
    if any(known.holds(peer) for known in raft.configurations.known()) or may_be_later(peer, committed):
        return True
    if committed.version > 0 and not isinstance(message, RemovalNotice):
        raft.outbox.send(peer, RemovalNotice(raft.term, message.seq, committed.version))
    return False


def on_removed(raft: RaftState, peer: str, notice: RemovalNotice) -> None:
    """Handle a peer's notice that this replica was removed. IDs are never reused, so a later version is final.

    The sender must be a known member, unless this replica knows no voters or is no member in its own configuration. (A
    removed replica still has a certificate, and could pretend to be a new member.) After a long time without a leader,
    any sender is accepted, because all known members may have left.

    The notice repeats the sequence number of the message that it answers. A number that is not this member's belongs to
    a predecessor at this address; the notice is then ignored. Notices for this member's own requests follow soon.
    """
    if notice.seq >> SEQ_BITS != first_seq(raft.me) >> SEQ_BITS:
        return
    known = raft.configurations.known()
    is_member = any(each.holds(raft.me) for each in known)
    is_unknown = bool(raft.configuration.voters) and not any(each.holds(peer) for each in known)
    if is_member and is_unknown and not _is_forsaken(raft):
        return
    newer = notice.version > raft.configuration.version or not raft.configuration.holds(raft.me)
    if newer and notice.version >= max(1, incarnation_of(raft.me)):
        raise RemovedFromCluster(name_of(raft.me), notice.version)


def _is_forsaken(raft: RaftState) -> bool:
    """Return whether no leader was heard for so long that all known members may have left."""
    silence_s = raft.clock.monotonic_s() - raft.led_s
    return not raft.leads and silence_s > FORSAKEN_TIMEOUTS * raft.timing.election_max_s
