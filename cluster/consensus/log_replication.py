"""Log replication: AppendEntries on leader and follower, commitment, and the leader's quorum.

Sections: AppendEntries (5.3), commitment (5.4.2) and the quorum (thesis 6.2) of Raft. Also the read requests of
followers (thesis 6.4): `ask_leader`, `on_read_request` and `on_read_reply`.
"""

import logging
from itertools import chain, repeat

from forebay.cluster.consensus import log_compaction
from forebay.cluster.consensus.frames import (
    APPEND_BYTES,
    APPEND_ENTRIES,
    MAX_ENTRY_BYTES,
    AppendReply,
    AppendRequest,
    Heartbeat,
    ReadReply,
    ReadRequest,
    SnapshotChunk,
    SnapshotReply,
    StateLost,
)
from forebay.cluster.consensus.interface import EntryTooLarge, LostDurableState, Role
from forebay.cluster.consensus.leader_election import become_follower, distrust, has_passed, postpone_election
from forebay.cluster.consensus.progress import Phase, Progress
from forebay.cluster.consensus.raft_log import (
    append,
    append_own,
    check_received,
    commit,
    last_index_not_above_term,
    truncate_from,
)
from forebay.cluster.consensus.read_index import ReadWaiter
from forebay.cluster.consensus.seals import SealBroken
from forebay.cluster.consensus.state import NEVER, RaftState
from forebay.cluster.system import about
from forebay.wal import BrokenInvariant, Entry, is_configuration, name_of

_log = logging.getLogger(__name__)

ASKED_MAX = 16
"""Maximum number of a follower's unanswered read requests; one more drops the oldest. Requests are sent one at a time,
and repeated after an election timeout.
"""


# ---- leader: proposals and requests ----


def propose(raft: RaftState, data: bytes) -> tuple[int, int]:
    """Append an entry as leader; return (index, term). Raises the exceptions of `Engine.propose`."""
    raft.require_ready()
    if not data or is_configuration(data):
        raise ValueError("the proposed entry is empty or a configuration, which only `change` proposes (H12)")
    if len(data) > MAX_ENTRY_BYTES:
        raise EntryTooLarge(len(data))
    raft.unsynced_bytes += len(data)
    with raft.fail_stop:
        index = append_own(raft, data)
    raft.stirred = True
    return index, raft.term


def check_quorum(raft: RaftState, now_s: float) -> None:
    """Step down when no majority responds, so that this replica no longer seems to lead (thesis 6.2, H15)."""
    deadline_s = quorum_deadline_s(raft)
    if now_s < deadline_s:
        # Only replies of a majority allow another grace period; a reply of one peer or a learner moves no deadline.
        raft.grace_given = False
    elif has_passed(raft, deadline_s, now_s):
        _log.warning(
            "%s steps down in term %d: no majority responded for an election timeout",
            raft.me,
            raft.term,
            extra=about(term=raft.term),
        )
        become_follower(raft, None)


def quorum_deadline_s(raft: RaftState) -> float:
    """Return the time at which this leader must step down without further answers."""
    return raft.reached(NEVER, lambda known: known.answered_s) + raft.timing.election_max_s


def send_appends(raft: RaftState, now_s: float) -> None:
    """Send each peer missing entries, a snapshot, or a due heartbeat."""
    reads = raft.reads
    beat = now_s >= raft.heartbeat_due_s or reads.wants_round
    notice = now_s >= raft.notice_due_s
    if reads.wants_round:
        reads.start(raft.seq + 1)
    for peer, known in raft.progress.items():
        if peer not in raft.connected:
            continue
        sent = False
        if known.phase is not Phase.SNAPSHOT:
            sent = _send_entries(raft, peer, known)
        if known.phase is Phase.SNAPSHOT and not known.lost:
            log_compaction.send_snapshot(raft, peer, now_s)
        if not sent and (beat or (notice and known.commit_sent < raft.commit_index)):
            raft.outbox.send(peer, Heartbeat(raft.term, raft.next_seq(), raft.commit_index, raft.has_begun))
            known.commit_sent = raft.commit_index
    if beat:
        raft.heartbeat_due_s = now_s + raft.timing.heartbeat_s
    if beat or notice:
        raft.notice_due_s = NEVER


def _send_entries(raft: RaftState, peer: str, known: Progress) -> bool:
    """Send missing entries to the peer as far as its window allows; return whether any were sent."""
    journal, sent = raft.journal, False
    while known.may_send and (known.phase is Phase.PROBE or known.next <= journal.last_index):
        prev = known.next - 1
        prev_term = journal.term_of(prev)
        if prev_term is None and known.held is not None:
            prev, prev_term = known.held  # compacted here, but the peer must still show that entry
        if prev_term is None:
            known.snapshot()  # the entries it needs are compacted
            break
        entries: list[Entry] = []
        if journal.base_index <= prev < journal.last_index:
            entries = journal.entries(prev + 1, max_bytes=APPEND_BYTES, max_entries=APPEND_ENTRIES)
        seq = raft.next_seq()
        pairs = [(entry.term, entry.data) for entry in entries]
        seals = [entry.seal for entry in entries] if raft.seals is not None else []
        request = AppendRequest(raft.term, seq, prev, prev_term, raft.commit_index, raft.has_begun, pairs, seals)
        raft.outbox.send(peer, request)
        known.sent(seq, prev + len(entries), sum(len(entry.data) for entry in entries))
        known.commit_sent = raft.commit_index
        sent = True
    return sent


# ---- leader: replies and commitment ----


def on_reply(raft: RaftState, peer: str, reply: AppendReply | SnapshotReply) -> None:
    """Handle a reply to one of this leader's requests."""
    # Only replies of this term count: an acknowledgement of an older term may concern other entries (H4).
    if not raft.leads or reply.term != raft.term:
        return
    known = raft.progress.get(peer)
    if known is None:
        return  # no longer a member
    if not known.acked_seq < reply.seq <= raft.seq:
        return  # a duplicate, or an outdated reply
    if reply.match_index > raft.journal.last_index:
        more = raft.limiter.due(peer, "claim")
        if more is not None:
            last = raft.journal.last_index
            _log.error("%s claims entries up to %d; this leader has %d%s", peer, reply.match_index, last, more)
        return
    if known.lost and not _shows_what_it_lost(raft, peer, known, reply):
        return
    if isinstance(reply, AppendReply) and reply.key:
        raft.keys[peer] = reply.key
    known.acked_seq = reply.seq
    known.answered_s = raft.clock.monotonic_s()
    if isinstance(reply, SnapshotReply):
        log_compaction.on_snapshot_reply(raft, peer, known, reply)
    elif reply.rejected:
        _on_rejection(raft, peer, known, reply)
    else:
        known.accepted(reply.seq, reply.match_index)
        if known.phase is Phase.SNAPSHOT and known.match >= raft.journal.base_index:
            raft.end_sending(peer)
            known.probe_from(known.match + 1)


def _on_rejection(raft: RaftState, peer: str, known: Progress, reply: AppendReply) -> None:
    # Entries that a peer acknowledged in a term agree with that term's leader, so nothing may cut them, and a request
    # that begins at or after them is rejected at or after them (5.3). A lower hint means that the peer's disk lost
    # entries that others rely on, and probably votes as well.
    if reply.hint_index < known.match:
        _log.error(
            "%s acknowledged entries up to %d and now lacks those after %d: its data was lost, or replaced by older "
            "data; it no longer counts; run `forebay cluster replace %s`",
            peer,
            known.match,
            reply.hint_index,
            name_of(peer),
        )
        known.lose()
        _shows_what_it_lost(raft, peer, known, reply)
        return
    journal = raft.journal
    at = min(reply.hint_index, journal.last_index)
    if journal.term_of(at) != reply.hint_term:
        at = last_index_not_above_term(raft, at, reply.hint_term, journal.base_index)
    known.rejected(reply.seq, at + 1)


def _shows_what_it_lost(raft: RaftState, peer: str, known: Progress, reply: AppendReply | SnapshotReply) -> bool:
    """Return whether a peer that seemed to have lost entries proves that it has them; otherwise tell it to stop."""
    if isinstance(reply, AppendReply) and not reply.rejected and reply.match_index >= known.lost:
        _log.warning("%s holds the entries up to %d again", peer, known.lost)
        known.restore()
        return True
    raft.outbox.send(peer, StateLost(raft.term, reply.seq, peer, known.lost))
    return False


def advance_commit(raft: RaftState) -> None:
    """Commit the entries that are durable on a majority, if the last one is of this term (5.4.2, figure 8)."""
    index = raft.reached(raft.durable_index, lambda known: known.match)
    if index > raft.commit_index and raft.journal.term_of(index) == raft.term:
        commit(raft, index)
        raft.notice_due_s = min(raft.notice_due_s, raft.clock.monotonic_s() + raft.timing.commit_notice_s)


def quorum_seq(raft: RaftState) -> int:
    """Return the newest sequence number up to which a majority has answered this leader."""
    return raft.reached(raft.seq + 1, lambda known: known.acked_seq)


# ---- follower: a leader that contradicts a committed entry stops this replica ----


def on_leader_message(raft: RaftState, peer: str, message: AppendRequest | Heartbeat | SnapshotChunk) -> None:
    """Handle a message of a leader of this term."""
    if message.term < raft.term:
        # The sender only needs the term of this reply.
        raft.outbox.send(peer, AppendReply(raft.term, message.seq, 0, rejected=True))
        return
    if peer in raft.distrusted:
        return
    if raft.leader not in (None, peer):
        raise BrokenInvariant(f"two leaders in term {raft.term}: {raft.leader} and {peer}")
    if raft.leader is None or raft.role is not Role.FOLLOWER:
        become_follower(raft, peer)
    raft.leader_heard_s = raft.led_s = raft.clock.monotonic_s()
    raft.grace_given = False
    postpone_election(raft)
    match message:
        case AppendRequest():
            _on_append(raft, peer, message)
        case Heartbeat():
            take_commit(raft, message)
            _acknowledge(raft, peer, message.seq)
        case SnapshotChunk():
            log_compaction.on_chunk(raft, peer, message)


def on_state_lost(raft: RaftState, peer: str, notice: StateLost) -> None:
    """Stop if this replica lacks entries that it acknowledged to the leader: its promises are then unreliable.

    A replica with an empty disk cannot detect that itself, but replicas that received its promises can.
    """
    last_index = raft.journal.last_index
    if (notice.term, notice.member) != (raft.term, raft.me) or raft.leader != peer:
        return
    if last_index < notice.match_index:
        raise LostDurableState(name_of(raft.me), notice.match_index, last_index)


def take_commit(raft: RaftState, message: AppendRequest | Heartbeat) -> None:
    """Advance the commit index, but only over entries that were compared with this leader's journal (H25)."""
    raft.leader_ready = message.ready
    raft.leader_commit = max(raft.leader_commit, message.commit_index)
    commit(raft, min(message.commit_index, raft.checked_index))


def _on_append(raft: RaftState, peer: str, request: AppendRequest) -> None:
    if not _agrees_before(raft, peer, request):
        return
    prev = request.prev_index
    seals = chain(request.seals, repeat(b""))
    entries = [
        Entry(prev + 1 + at, term, data, seal)
        for (at, (term, data)), seal in zip(enumerate(request.entries), seals, strict=False)
    ]
    try:
        append_what_is_missing(raft, peer, entries)
    except SealBroken as error:
        distrust(raft, peer, error)
        return
    raft.checked_index = max(raft.checked_index, prev + len(entries))
    if request.entries or raft.receiver.index <= raft.checked_index:
        # A leader that sends entries need not send a snapshot; one being verified is older.
        raft.receiver.abort()
    take_commit(raft, request)
    _acknowledge(raft, peer, request.seq)


def _acknowledge(raft: RaftState, leader: str, seq: int) -> None:
    """Report the durable entries to the leader, and this replica's key while the configuration lacks it."""
    mine = raft.configuration.by_id(raft.me)
    key = b"" if raft.seals is None or mine is None or mine.key else raft.seals.key
    raft.outbox.send(leader, AppendReply(raft.term, seq, raft.checked_index, key=key))


def _agrees_before(raft: RaftState, peer: str, request: AppendRequest) -> bool:
    """Return whether the journals agree just before the received entries; if not, reply with a hint."""
    journal, prev = raft.journal, request.prev_index
    # Everything below the base is committed, hence also in the leader's journal.
    if prev < journal.base_index or journal.term_of(prev) == request.prev_term:
        return True
    if prev <= raft.commit_index:
        raise BrokenInvariant(
            f"leader {peer} of term {request.term} has term {request.prev_term} at entry {prev}; "
            f"here the entry of term {journal.term_of(prev)} is committed"
        )
    last_to_try = min(prev, journal.last_index)
    floor = max(raft.checked_index, journal.base_index)
    hint = last_index_not_above_term(raft, last_to_try, request.prev_term, floor)
    hint_term = journal.term_of(hint) or 0
    raft.outbox.send(peer, AppendReply(raft.term, request.seq, raft.checked_index, True, hint, hint_term))
    return False


def append_what_is_missing(raft: RaftState, peer: str, entries: list[Entry]) -> None:
    """Append missing entries. Cut the journal only at the first entry that differs (H3).

    Raises:
        SealBroken: The leader of an entry's term did not accept the entry; nothing was changed.
    """
    journal = raft.journal
    for at, entry in enumerate(entries):
        if entry.index <= journal.base_index:
            continue
        if entry.index <= journal.last_index:
            known = journal.term_of(entry.index)
            if known == entry.term:
                continue
            if entry.index <= raft.commit_index:
                raise BrokenInvariant(
                    f"leader {peer} sends entry {entry.index} of term {entry.term}; "
                    f"here the entry of term {known} is committed"
                )
        check_received(raft, entries[at:])
        if entry.index <= journal.last_index:
            truncate_from(raft, entry.index)
        append(raft, entries[at:])
        return


# ---- reads of followers (ReadIndex, thesis 6.4): a majority confirms the leader before it returns the index ----


def ask_leader(raft: RaftState, news: bytes, waiter: ReadWaiter) -> None:
    """Request from the leader the index to wait for, and send `news`.

    `waiter` is called with None if no leader is known. It is never called if request or reply is lost, or leadership
    changes: ask again.
    """
    leader = raft.leader
    if leader is None or leader == raft.me or leader not in raft.connected:
        waiter(None)
        return
    asked = raft.asked_reads
    while len(asked) >= ASKED_MAX:
        asked.pop(next(iter(asked)))(None)
    seq = raft.next_question()
    asked[seq] = waiter
    raft.outbox.send(leader, ReadRequest(raft.term, seq, news))
    raft.outbox.flush()


def on_read_request(raft: RaftState, peer: str, request: ReadRequest) -> None:
    """Handle a follower's read request: reply after a later round of heartbeats has confirmed this leader."""
    if not raft.leads or request.term != raft.term or peer not in raft.progress:
        return
    if request.news:
        raft.machine.hear(name_of(peer), request.news)

    def answer(index: int | None) -> None:
        if index is not None and raft.leads and raft.term == request.term:
            raft.outbox.send(peer, ReadReply(raft.term, request.seq, index))

    raft.reads.add(answer)


def on_read_reply(raft: RaftState, peer: str, reply: ReadReply) -> None:
    """Handle a reply of this term's leader, which a majority confirmed after the request."""
    if reply.term == raft.term and peer == raft.leader:
        waiter = raft.asked_reads.pop(reply.seq, None)
        if waiter is not None:
            waiter(reply.index)
