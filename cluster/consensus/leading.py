"""What a leader does: send entries, heartbeats and snapshots, count answers, commit (5.3, 5.4.2, 7; thesis 6.2)."""

import logging
from typing import Any, Final

import msgspec

from cluster.consensus.core import NEVER
from cluster.consensus.following import Following
from cluster.consensus.frames import (
    APPEND_BYTES,
    APPEND_ENTRIES,
    DONE,
    REFUSED,
    AppendReply,
    AppendRequest,
    Forgotten,
    Heartbeat,
    SnapshotReply,
)
from cluster.consensus.interface import NO_OP, Role
from cluster.consensus.progress import Phase, Progress
from cluster.consensus.reads import ReadRounds
from cluster.consensus.snapshots import RETRY_S, SnapshotSender
from wal import Action, Change, Entry, encode_configuration, name_of

_log = logging.getLogger(__name__)


HELD_BACK_ENTRIES: Final = 1 << 18
"""Entries before a snapshot that are kept for peers that still need them, count: a minute of catching up under load. A
peer that only looks alive holds back no more. A start reads and checks what is kept, at about 7 us an entry: 2 s."""


class Leading(Following):
    """The leader's rules."""

    def __init__(self, **given: Any) -> None:
        self._reads: Final = ReadRounds()
        self._senders: Final[dict[str, SnapshotSender]] = {}
        self._snapshot_after_s: Final[dict[str, float]] = {}
        self._no_op_index = 0
        self._heartbeat_due_s = NEVER
        self._notice_due_s = NEVER
        super().__init__(**given)

    @property
    def _has_begun(self) -> bool:
        """Whether a leader has applied its own first entry."""
        return self._leads and self.applied_index >= self._no_op_index

    # ---- beginning and end ----

    def _become_leader(self) -> None:
        self._set_role(Role.LEADER, self.me)
        self._receiver.abort()
        now_s, last = self._clock.monotonic_s(), self._journal.last_index
        for known in self._progress.values():
            known.begin_term(last + 1, now_s)
        self._snapshot_after_s.clear()
        # An entry of its own term, or it could never commit those before it (sections 5.4.2 and 8).
        self._no_op_index = last + 1
        self._append([Entry(last + 1, self.term, self._first_entry())])
        self._heartbeat_due_s = now_s
        self._grace_given = False
        _log.info("%s leads term %d from index %d on", self.me, self.term, last + 1)

    def _first_entry(self) -> bytes:
        """Return what a leader begins with: a no-op, or the founding configuration if none was ever agreed on.

        From then on the journal says who is a member, and no replica asks its file any more.
        """
        if self._founding is None or self.configuration.version > 0:
            return NO_OP
        change = Change(Action.FOUND, None, self.me, self._clock.now())
        return encode_configuration(msgspec.structs.replace(self._founding, version=1, change=change))

    def _at_configuration(self, new: set[str], gone: set[str]) -> None:
        for peer in gone:
            self._end_transfer(peer)
        if self._leads:
            now_s = self._clock.monotonic_s()
            for peer in new:
                self._progress[peer].begin_term(self._journal.last_index + 1, now_s)
        super()._at_configuration(new, gone)

    def _after_leading(self) -> None:
        self._heartbeat_due_s = self._notice_due_s = NEVER
        for peer in list(self._senders):
            self._end_transfer(peer)
        self._reads.abandon()

    def _check_quorum(self, now_s: float) -> None:
        """Step down when no majority answers any more: such a leader must not look like one (thesis 6.2, H15)."""
        deadline_s = self._quorum_deadline_s()
        if now_s < deadline_s:
            # Only a majority earns the next grace: an answer of one peer, or of a learner, moves no deadline.
            self._grace_given = False
        elif self._has_passed(deadline_s, now_s):
            _log.warning(
                "%s gives up leading term %d: no majority answered for an election timeout", self.me, self.term
            )
            self._follow(None)

    def _quorum_deadline_s(self) -> float:
        """Return when this leader must step down unless somebody answers."""
        return self._reached(NEVER, lambda known: known.answered_s) + self._timing.election_max_s

    # ---- sending ----

    def _send_appends(self) -> None:
        now_s = self._clock.monotonic_s()
        beat = now_s >= self._heartbeat_due_s or self._reads.wants_round
        notice = now_s >= self._notice_due_s
        if self._reads.wants_round:
            self._reads.start(self._seq + 1)
        for peer, known in self._progress.items():
            if not self._is_connected(peer):
                continue
            sent = False
            if known.phase is not Phase.SNAPSHOT:
                sent = self._send_entries(peer, known)
            if known.phase is Phase.SNAPSHOT and not known.forgot:
                self._send_snapshot(peer, now_s)
            if not sent and (beat or (notice and known.commit_sent < self.commit_index)):
                self._send(peer, Heartbeat(self.term, self._next_seq(), self.commit_index, self._has_begun))
                known.commit_sent = self.commit_index
        if beat:
            self._heartbeat_due_s = now_s + self._timing.heartbeat_s
        if beat or notice:
            self._notice_due_s = NEVER

    def _send_entries(self, peer: str, known: Progress) -> bool:
        """Send what the peer misses, as far as its window allows; return whether anything left."""
        journal, sent = self._journal, False
        while known.may_send and (known.phase is Phase.PROBE or known.next <= journal.last_index):
            prev = known.next - 1
            prev_term = journal.term_of(prev)
            if prev_term is None and known.held is not None:
                prev, prev_term = known.held  # compacted meanwhile; but it must still have that
            if prev_term is None:
                known.snapshot()  # what it needs is compacted
                break
            entries: list[Entry] = []
            if journal.base_index <= prev < journal.last_index:
                entries = journal.entries(prev + 1, max_bytes=APPEND_BYTES, max_entries=APPEND_ENTRIES)
            seq = self._next_seq()
            pairs = [(entry.term, entry.data) for entry in entries]
            self._send(peer, AppendRequest(self.term, seq, prev, prev_term, self.commit_index, self._has_begun, pairs))
            known.sent(seq, prev + len(entries), sum(len(entry.data) for entry in entries))
            known.commit_sent = self.commit_index
            sent = True
        return sent

    # ---- answers ----

    def _on_reply(self, peer: str, reply: AppendReply | SnapshotReply) -> None:
        # Of this term, or it says nothing: an acknowledgement in an older term may be of other entries (H4).
        if not self._leads or reply.term != self.term:
            return
        known = self._progress.get(peer)
        if known is None:
            return  # no member any more
        if not known.acked_seq < reply.seq <= self._seq:
            return  # a copy, or older than what is known
        if reply.match_index > self._journal.last_index:
            more = self._seldom.due(peer, "claim")
            if more is not None:
                last = self._journal.last_index
                _log.error("%s claims entries up to %d; this leader has %d%s", peer, reply.match_index, last, more)
            return
        if known.forgot and not self._holds_again(peer, known, reply):
            return
        known.acked_seq = reply.seq
        known.answered_s = self._clock.monotonic_s()
        if isinstance(reply, SnapshotReply):
            self._on_snapshot_reply(peer, known, reply)
        elif reply.rejected:
            self._on_rejection(peer, known, reply)
        else:
            known.accepted(reply.seq, reply.match_index)
            if known.phase is Phase.SNAPSHOT and known.match >= self._journal.base_index:
                self._end_transfer(peer)
                known.probe_from(known.match + 1)

    def _on_rejection(self, peer: str, known: Progress, reply: AppendReply) -> None:
        # What a peer acknowledged in a term agrees with the journal of that term's leader, so nothing may ever cut it,
        # and a request that begins at or after it is refused at or after it (5.3). Less means that its disk has lost
        # what others count on, and its votes besides.
        if reply.hint_index < known.match:
            _log.error(
                "%s acknowledged entries up to %d and now lacks those after %d: its data was lost, or older data was "
                "put in its place; it counts no more; run `forebay member replace %s`",
                peer,
                known.match,
                reply.hint_index,
                name_of(peer),
            )
            known.forget()
            self._holds_again(peer, known, reply)
            return
        at = min(reply.hint_index, self._journal.last_index)
        if self._journal.term_of(at) != reply.hint_term:
            at = self._last_index_not_above_term(at, reply.hint_term, self._journal.base_index)
        known.rejected(reply.seq, at + 1)

    def _holds_again(self, peer: str, known: Progress, reply: AppendReply | SnapshotReply) -> bool:
        """Say whether a peer that seemed to have forgotten its promises shows that it has not; else tell it to stop."""
        if isinstance(reply, AppendReply) and not reply.rejected and reply.match_index >= known.forgot:
            _log.warning("%s holds the entries up to %d again", peer, known.forgot)
            known.remember()
            return True
        self._send(peer, Forgotten(self.term, reply.seq, peer, known.forgot))
        return False

    def _advance_commit(self) -> None:
        """Commit what a majority holds durably, if the last of it is of this term (section 5.4.2, figure 8)."""
        index = self._reached(self._durable_index, lambda known: known.match)
        if index > self.commit_index and self._journal.term_of(index) == self.term:
            self._commit(index)
            self._notice_due_s = min(self._notice_due_s, self._clock.monotonic_s() + self._timing.commit_notice_s)

    def _answer_reads(self) -> None:
        """Release the reads whose round a majority has answered, once the entries before them are known (section 8)."""
        if self._reads.under_way and self._has_begun:
            self._reads.answer(self._quorum_seq(), self.commit_index)

    def _quorum_seq(self) -> int:
        """Return the newest sequence up to which a majority has answered this leader."""
        return self._reached(self._seq + 1, lambda known: known.acked_seq)

    # ---- snapshots for peers that need what is compacted ----

    def compactable_to(self, index: int) -> int:
        """Return up to where the journal may be compacted, where a snapshot would allow it up to `index`.

        What follows a snapshot that is being sent is needed once that is installed, and then until the peer has caught
        up: without it another snapshot would have to follow, and under steady load another after that, for ever.
        """
        if not self._leads:
            return index
        base_index = self._journal.base_index
        needed = [sender.ref.index for sender in self._senders.values()]
        for peer, known in self._progress.items():
            # Of a peer further back what it needs is gone already.
            is_fed = known.phase is not Phase.SNAPSHOT and not known.forgot and known.match >= base_index
            if is_fed and self._is_connected(peer):
                needed.append(known.match)
        return min(index, max(min(needed, default=index), index - HELD_BACK_ENTRIES))

    def _send_snapshot(self, peer: str, now_s: float) -> None:
        if peer not in self._senders and now_s < self._snapshot_after_s.get(peer, -NEVER):
            return
        try:
            sender = self._senders.get(peer) or self._begin_transfer(peer, now_s)
            sender.pump(self.term, self._next_seq, lambda chunk: self._send(peer, chunk), now_s)
        except (OSError, ValueError, LookupError) as error:
            self._give_up_transfer(peer, str(error))

    def _begin_transfer(self, peer: str, now_s: float) -> SnapshotSender:
        ref = self._machine.newest_snapshot()
        if ref is None or ref.index < self._journal.base_index:
            raise LookupError(f"there is no snapshot at or after entry {self._journal.base_index}")
        sender = self._senders[peer] = SnapshotSender(ref, now_s)
        return sender

    def _on_snapshot_reply(self, peer: str, known: Progress, reply: SnapshotReply) -> None:
        known.match = max(known.match, reply.match_index)
        sender = self._senders.get(peer)
        if reply.outcome == DONE:
            self._end_transfer(peer)
            if known.phase is Phase.SNAPSHOT:
                known.probe_from(known.match + 1)
        elif reply.outcome == REFUSED:
            if sender is not None:
                self._machine.snapshot_refused(sender.ref.index)
            self._give_up_transfer(peer, "it was refused")
        elif sender is not None:
            sender.answered(reply, self._seq, self._clock.monotonic_s())

    def _end_transfer(self, peer: str) -> None:
        sender = self._senders.pop(peer, None)
        if sender is not None:
            sender.close()

    def _give_up_transfer(self, peer: str, why: str) -> None:
        _log.error("no snapshot went to %s: %s; another attempt follows", peer, why)
        self._end_transfer(peer)
        self._snapshot_after_s[peer] = self._clock.monotonic_s() + RETRY_S
