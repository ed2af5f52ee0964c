"""Leader election (sections 5.1, 5.2 and 5.4.1) that does not disturb a live leader (pre-vote: thesis 9.6; H14).

Only this module changes terms and roles. A candidate first runs a pre-vote, then campaigns. A replica votes once a
term, for a candidate that it trusts, whose journal is at least as complete, and whose ledger does not contradict its
own. A replica that learns of a higher term knows no leader in that term yet.
"""

import logging
from typing import Final

import msgspec

from forebay.cluster.consensus.frames import AnyMessage, AppendRequest, Heartbeat, SnapshotChunk, VoteReply, VoteRequest
from forebay.cluster.consensus.interface import HistoryElsewhere, Role
from forebay.cluster.consensus.raft_log import append_own
from forebay.cluster.consensus.seals import SealBroken, remedy_for
from forebay.cluster.consensus.state import NEVER, RaftState
from forebay.cluster.system import SLOW_SYNC_S, about
from forebay.wal import Change, ChangeKind, Configuration, Member, encode_configuration, name_of, no_op_of

_log = logging.getLogger(__name__)

GRACE_HEARTBEATS: Final = 2
"""Length of the grace period of a replica that could not receive for a while, in heartbeat intervals."""

TERM_JUMP_MAX: Final = 1 << 32
"""Maximum lead of a term claimed by an unknown replica, which a later configuration may have added: a century of terms
at one election a second.
"""

TERM_HIGH: Final = 1 << 61
TERM_STEP_MAX: Final = 1 << 10
"""Above TERM_HIGH, half of the maximum in a frame (`frames.Number`), a term may advance by at most TERM_STEP_MAX, from
any sender. Terms never decrease, so no frame may exhaust them. A campaign continues from the accepted term.
"""

SOON_SHARE: Final = (0.1, 0.6)
"""Random share of the shortest election timeout after which a follower campaigns when the leader's link breaks."""

FIRST_SHARE: Final = 0.5
"""Share of the range of election timeouts that a leader's followers use, each drawing from its own part. One follower
then campaigns first, and wins before the next times out. After a failed election the whole range is used.
"""

SLOW_SYNCS: Final = 2
"""Delay of the campaign of a replica with a slow disk, in syncs of its disk."""

GIVES_WAY_TIMEOUTS: Final = 10
"""Number of longest election timeouts without a leader, for which a replica with a deviating wall clock lets others
campaign (they need one or two). Having no leader is worse, because law 3 keeps time even under a leader with a wrong
clock (`cluster.server.agreed_time`).
"""

FOUNDING_NOTICE_S: Final = 5.0
"""Interval of log messages about the votes that a new cluster lacks, seconds: an operator is usually watching."""

SKEW_HEARTBEATS: Final = 0.5
"""Tolerance of a voter that requires a leader's silence for the shortest election timeout, in heartbeat intervals: the
last heartbeat may have arrived later here than at the first candidate, which must not be rejected for that.
"""


# ---- terms and roles (5.1) ----


def become_follower(raft: RaftState, leader: str | None) -> None:
    """Become a follower of `leader`; None if no leader is known yet."""
    led = raft.leads
    _set_role(raft, Role.FOLLOWER, leader)
    if leader is None:
        raft.leader_ready = False
    if led:
        raft.led_s = raft.clock.monotonic_s()
        postpone_election(raft)
        raft.end_leadership()


def adopt_term(raft: RaftState, term: int) -> None:
    """Enter a higher term of another replica, without a vote or a known leader."""
    _enter_term(raft, term, None)
    become_follower(raft, None)


def is_term_reachable(raft: RaftState, peer: str, term: int) -> bool:
    """Return whether a claimed term is plausible for this cluster.

    The term of a known member is accepted without limit, because the others must follow it; otherwise that member would
    be excluded permanently. A joining replica knows no members and learns the term from the others.
    """
    if term <= raft.term:
        return True
    if term > TERM_HIGH:
        reach = TERM_STEP_MAX
    elif not raft.configuration.voters or any(known.holds(peer) for known in raft.configurations.known()):
        return True
    else:
        reach = TERM_JUMP_MAX
    if term - raft.term <= reach:
        return True
    more = raft.limiter.due(peer, "term")
    if more is not None:
        _log.error(
            "%s claims term %d, and this replica is in term %d: elections cannot advance so far, so the message is "
            "ignored%s",
            peer,
            term,
            raft.term,
            more,
        )
    return False


def _enter_term(raft: RaftState, term: int, voted_for: str | None) -> None:
    """Enter a higher term, whose leader is unknown."""
    # Promises of an older term are useless, and a new leader may cut the entries they refer to.
    raft.outbox.drop()
    raft.transitions.set_term(term, voted_for)
    raft.leader_heard_s = -NEVER
    raft.leader_commit = 0
    # Uncommitted entries that agreed with the previous leader may differ from the new leader's.
    raft.checked_index = raft.commit_index


def _set_role(raft: RaftState, role: Role, leader: str | None) -> None:
    raft.transitions.set_role(role, leader)
    draw_election_timeout(raft)


def _become_candidate(raft: RaftState, *, pre_vote: bool) -> None:
    _set_role(raft, Role.CANDIDATE, None)
    raft.leader_ready = False
    raft.pre_vote = pre_vote


def _become_leader(raft: RaftState) -> None:
    _set_role(raft, Role.LEADER, raft.me)
    raft.receiver.abort()
    now_s, last = raft.clock.monotonic_s(), raft.journal.last_index
    for known in raft.progress.values():
        known.begin_term(last + 1, now_s)
    raft.snapshot_after_s.clear()
    # Without an entry of its own term, a leader could never commit earlier entries (sections 5.4.2 and 8).
    raft.no_op_index = last + 1
    append_own(raft, _first_entry(raft), raft.vote_signatures)
    raft.heartbeat_due_s = now_s
    raft.grace_given = False
    _log.info("%s leads term %d, starting at index %d", raft.me, raft.term, last + 1, extra=about(term=raft.term))


def _first_entry(raft: RaftState) -> bytes:
    """Return a leader's first entry: a no-op with its ID, or the bootstrap configuration if none was agreed on yet.

    After the bootstrap the journal holds the membership, and replicas no longer use their configuration files.
    """
    if raft.bootstrap is None or raft.configuration.version > 0:
        return no_op_of(raft.me)
    change = Change(ChangeKind.FOUND, None, raft.me, raft.clock.now())
    founded = msgspec.structs.replace(raft.bootstrap, version=1, change=change)
    return encode_configuration(with_keys(founded, raft))


def with_keys(configuration: Configuration, raft: RaftState) -> Configuration:
    """Return the configuration with missing keys added from the keys that members sent."""
    known = raft.keys if raft.seals is None else {**raft.keys, raft.me: raft.seals.key}

    def keyed(members: tuple[Member, ...]) -> tuple[Member, ...]:
        return tuple(
            member if member.key else msgspec.structs.replace(member, key=known.get(member.id, b""))
            for member in members
        )

    return msgspec.structs.replace(
        configuration, voters=keyed(configuration.voters), learners=keyed(configuration.learners)
    )


def distrust(raft: RaftState, peer: str, why: SealBroken) -> None:
    """Stop following a leader that sent an entry which no leader accepted, and never vote for it again.

    The other members may elect one of themselves. Entries of this leader are no longer acknowledged.
    """
    raft.distrusted.add(peer)
    become_follower(raft, None)
    raft.leader_heard_s = -NEVER
    _log.error("%s is no longer accepted as leader: %s; %s", peer, why, remedy_for(peer))


# ---- timeouts ----


def election_range_s(raft: RaftState) -> tuple[float, float]:
    """Return the range from which to draw the election timeout. One leader's followers have disjoint ranges, ordered by
    ID.

    If replicas may disagree about the leader or the voters, and after a failed election, every replica uses the whole
    range.
    """
    least_s, most_s = raft.timing.election_min_s, raft.timing.election_max_s
    followers = [voter for voter in raft.configuration.voter_ids if voter != raft.leader]
    if raft.role is not Role.FOLLOWER or raft.leader is None or raft.me not in followers:
        return least_s, most_s
    share_s = FIRST_SHARE * (most_s - least_s) / len(followers)
    first_s = least_s + followers.index(raft.me) * share_s
    return first_s, first_s + share_s


def draw_election_timeout(raft: RaftState) -> None:
    """Draw a new tolerated silence for each leader and each attempt (5.2), but not for each heartbeat.

    While a leader is alive the deadline therefore only moves later, and a timer set for it never fires too late.
    """
    raft.election_timeout_s = raft.uniform(*election_range_s(raft))


def postpone_election(raft: RaftState) -> None:
    """Restart the election timeout."""
    raft.election_deadline_s = raft.clock.monotonic_s() + raft.election_timeout_s + _later_s(raft)


def _later_s(raft: RaftState) -> float:
    """Return the extra delay before a replica with a slow disk campaigns: it would lead slowly too."""
    sync_s = raft.sync_times.least_s
    if sync_s is None or sync_s < SLOW_SYNC_S:
        return 0.0
    return min(SLOW_SYNCS * sync_s, raft.timing.election_max_s)


def has_passed(raft: RaftState, deadline_s: float, now_s: float) -> bool:
    """Return whether a deadline for hearing from others has passed while this replica was able to receive.

    A deadline that is noticed late passed during a slow sync, or while the process did not run. Messages that arrived
    meanwhile wait in the sockets and are read first, during one grace period. Otherwise replicas on one slow disk would
    depose their leader at every stall.
    """
    if now_s < max(deadline_s, raft.grace_until_s):
        return False
    if not raft.grace_given and now_s - deadline_s > raft.timing.heartbeat_s:
        raft.grace_given = True
        raft.grace_until_s = now_s + GRACE_HEARTBEATS * raft.timing.heartbeat_s
        return False
    return True


def lose_sight(raft: RaftState, peer: str) -> None:
    """Handle the loss of the connection that `peer` opened. A leader is probably dead: start a pre-vote soon."""
    if raft.role is Role.FOLLOWER and raft.leader == peer and raft.votes_here:
        raft.leader_heard_s = -NEVER
        soon_s = raft.clock.monotonic_s() + raft.uniform(*SOON_SHARE) * raft.timing.election_min_s + _later_s(raft)
        raft.election_deadline_s = min(raft.election_deadline_s, soon_s)


# ---- RequestVote, the candidate's side ----


def check_election_timeout(raft: RaftState, now_s: float) -> None:
    """Start a pre-vote after an election timeout without a leader."""
    if not has_passed(raft, raft.election_deadline_s, now_s):
        return
    if raft.founds and raft.votes:
        _say_who_is_missing(raft)
    if raft.votes_here and not _gives_way(raft, now_s):
        # Check that a majority would vote for this replica before a new term disturbs others.
        _become_candidate(raft, pre_vote=True)
        _ask_for_votes(raft)
    else:
        # This replica may not lead, so replies do not count. But a removed replica learns of its removal this way.
        become_follower(raft, None)
        postpone_election(raft)
        raft.grace_given = False
        if not raft.votes_here:
            _request_votes(raft, pre=True, transfer=False)


def _say_who_is_missing(raft: RaftState) -> None:
    """Log every few seconds which votes a new cluster is waiting for."""
    missing = sorted(name_of(one) for one in set(raft.configuration.voter_ids) - raft.votes - raft.found_without)
    now_s = raft.clock.monotonic_s()
    if missing and now_s - raft.founding_said_s >= FOUNDING_NOTICE_S:
        raft.founding_said_s = now_s
        _log.warning(
            "the cluster is not founded yet and waits for %s: every founder must report that it is new. Start those "
            "that do not run. To omit founders that never ran and cannot start: `forebay run replica --name %s%s`",
            ", ".join(missing),
            name_of(raft.me),
            "".join(f" --found-without {name}" for name in missing),
        )


def is_heeded_by_new(raft: RaftState, peer: str, message: AnyMessage) -> bool:
    """Return whether a founder without data may handle a message. Raise HistoryElsewhere if the message shows a
    history.

    A replica that lost its data cannot be distinguished from a new one by itself, and would grant votes against entries
    that it had acknowledged. A reply shows no history by its term alone; the term is not adopted, because it would look
    like a promise. A peer in a later term requests votes itself.
    """
    match message:
        case VoteRequest():
            index = message.last_index
        case AppendRequest():
            index = max(message.prev_index + len(message.entries), message.commit_index)
        case Heartbeat():
            index = message.commit_index
        case SnapshotChunk():
            index = message.index
        case _:
            return message.term == 0
    if index > 0:
        raise HistoryElsewhere(name_of(raft.me), name_of(peer), index)
    return True


def _gives_way(raft: RaftState, now_s: float) -> bool:
    """Return whether others should campaign first, because this replica's wall clock deviates from a majority's.

    Only for a limited time: this replica may be the only one with a complete journal, or all clocks may differ. It then
    leads and transfers leadership.
    """
    if not raft.clock_off(raft.me):
        return False
    return now_s - raft.led_s < GIVES_WAY_TIMEOUTS * raft.timing.election_max_s


def stand(raft: RaftState, *, transfer: bool = False) -> None:
    """Campaign in the next term; `transfer` if the leader requested it."""
    _become_candidate(raft, pre_vote=False)
    _enter_term(raft, raft.term + 1, raft.me)
    _ask_for_votes(raft, transfer=transfer)


def on_vote_reply(raft: RaftState, peer: str, reply: VoteReply) -> None:
    """Count a vote, if it belongs to this campaign."""
    if reply.key:
        raft.keys[peer] = reply.key
    if raft.role is not Role.CANDIDATE or (reply.seq, reply.pre) != (raft.campaign_seq, raft.pre_vote):
        return
    if reply.granted and (reply.pre or (reply.term == raft.term and _is_signed_vote(raft, peer, reply))):
        raft.votes.add(peer)
        _count_votes(raft)


def _is_signed_vote(raft: RaftState, peer: str, reply: VoteReply) -> bool:
    """Store the signature of a vote; return whether it is valid. Others reject a leader with an invalid signature."""
    if raft.seals is None:
        return True
    if not raft.seals.is_vote(raft.configuration, peer, reply.signature, raft.term, raft.me):
        more = raft.limiter.due(peer, "vote")
        if more is not None:
            _log.error("the vote of %s is not signed with its key in the configuration%s", peer, more)
        return False
    if reply.signature:
        raft.vote_signatures[peer] = reply.signature
    return True


def _ask_for_votes(raft: RaftState, *, transfer: bool = False) -> None:
    postpone_election(raft)
    raft.grace_given = False
    raft.votes = {raft.me}
    raft.vote_signatures = {}
    _request_votes(raft, pre=raft.pre_vote, transfer=transfer)
    _count_votes(raft)


def _request_votes(raft: RaftState, *, pre: bool, transfer: bool) -> None:
    seq = raft.campaign_seq = raft.next_seq()
    journal = raft.journal
    last_index, last_term, applied_index = journal.last_index, journal.last_term, journal.applied_index
    digest = journal.digest_at(applied_index) or b""
    for peer in raft.configuration.voter_ids:
        if peer != raft.me:
            request = VoteRequest(raft.term, seq, last_index, last_term, pre, transfer, applied_index, digest)
            raft.outbox.send(peer, request)


def _count_votes(raft: RaftState) -> None:
    # Only voters of the configuration in force count, although learners and removed members may reply.
    if raft.votes_here and raft.has_votes:
        if raft.pre_vote:
            stand(raft)
        else:
            _become_leader(raft)


# ---- RequestVote, the voter's side ----


def on_vote_request(raft: RaftState, peer: str, request: VoteRequest) -> None:
    """Reply to a candidate. Ignore it while a leader is alive, unless that leader requested the election."""
    if request.term < raft.term:
        raft.outbox.send(peer, VoteReply(raft.term, request.seq, False, request.pre))
        return
    if not raft.configuration.voters:
        return  # a joining replica does not know whether it voted under a former ID
    if _hears_leader(raft, besides=peer) and not (request.transfer and not request.pre):
        return
    if not request.pre and request.term > raft.term:
        adopt_term(raft, request.term)
    own = (raft.journal.last_term, raft.journal.last_index)
    granted = (request.last_term, request.last_index) >= own and not _has_another_ledger(raft, peer, request)
    granted = granted and peer not in raft.distrusted
    if not request.pre:
        granted = granted and raft.voted_for in (None, peer)
        if granted:
            if raft.voted_for is None:
                raft.transitions.set_term(raft.term, peer)
            postpone_election(raft)
    key = b"" if raft.seals is None else raft.seals.key
    signature = b"" if raft.seals is None or request.pre or not granted else raft.seals.vote(raft.term, peer)
    raft.outbox.send(peer, VoteReply(raft.term, request.seq, granted, request.pre, key, signature))


def _has_another_ledger(raft: RaftState, peer: str, request: VoteRequest) -> bool:
    """Return whether the candidate has applied a different history; False if this replica cannot tell.

    Rewriting an entry does not change its term. Without this check, a replica with a rewritten history could lead, and
    joining replicas would accept that history.
    """
    own = raft.journal.digest_at(request.ledger_index) if request.ledger_digest else None
    if own is None or own == request.ledger_digest:
        return False
    more = raft.limiter.due(peer, "ledger")
    if more is not None:
        _log.error(
            "the ledger of %s up to entry %d has digest %s, and that of %s has %s: one of them was altered, so this "
            "replica does not vote for %s; compare with `forebay cluster probe --digest`%s",
            peer,
            request.ledger_index,
            request.ledger_digest.hex()[:16],
            raft.me,
            own.hex()[:16],
            peer,
            more,
        )
    return True


def _hears_leader(raft: RaftState, besides: str) -> bool:
    """Return whether this replica has recently heard a leader other than `besides`."""
    if raft.leads:
        return True
    silence_s = raft.clock.monotonic_s() - raft.leader_heard_s
    recent = silence_s < raft.timing.election_min_s - SKEW_HEARTBEATS * raft.timing.heartbeat_s
    return recent and raft.leader not in (None, besides)
