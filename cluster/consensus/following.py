"""What a replica does with the messages of the leader: append (section 5.3), commit, install a snapshot (section 7)."""

from cluster.consensus.elections import Elections
from cluster.consensus.frames import (
    DONE,
    AppendReply,
    AppendRequest,
    Forgotten,
    Heartbeat,
    SnapshotChunk,
    SnapshotReply,
)
from cluster.consensus.interface import PromisesForgotten, Role
from wal import BrokenInvariant, Entry, name_of


class Following(Elections):
    """The follower's rules. What is committed here is never contradicted: a leader that tries it stops this replica."""

    def _on_leader_message(self, peer: str, message: AppendRequest | Heartbeat | SnapshotChunk) -> None:
        if message.term < self.term:
            # Its sender learns the term from this; nothing else in it counts.
            self._send(peer, AppendReply(self.term, message.seq, 0, rejected=True))
            return
        if self.leader not in (None, peer):
            raise BrokenInvariant(f"two leaders in term {self.term}: {self.leader} and {peer}")
        if self.leader is None or self.role is not Role.FOLLOWER:
            self._follow(peer)
        self._leader_heard_s = self._led_s = self._clock.monotonic_s()
        self._grace_given = False
        self._postpone_election()
        match message:
            case AppendRequest():
                self._on_append(peer, message)
            case Heartbeat():
                self._take_commit(message)
                self._send(peer, AppendReply(self.term, message.seq, self._checked_index))
            case SnapshotChunk():
                self._on_chunk(peer, message)

    def _on_forgotten(self, peer: str, notice: Forgotten) -> None:
        """The leader says that this replica lacks what it acknowledged. If so, no promise of it can be relied on.

        An empty disk cannot tell that it is not a new one; who was promised something can.
        """
        last_index = self._journal.last_index
        if (notice.term, notice.member) != (self.term, self.me) or self.leader != peer:
            return
        if last_index < notice.match_index:
            raise PromisesForgotten(name_of(self.me), notice.match_index, last_index)

    def _on_append(self, peer: str, request: AppendRequest) -> None:
        if not self._agrees_before(peer, request):
            return
        prev = request.prev_index
        entries = [Entry(prev + 1 + at, term, data) for at, (term, data) in enumerate(request.entries)]
        self._append_what_is_missing(peer, entries)
        self._checked_index = max(self._checked_index, prev + len(entries))
        if request.entries or self._receiver.index <= self._checked_index:
            # A leader that sends entries does not need to send a snapshot; one that is being verified is older.
            self._receiver.abort()
        self._take_commit(request)
        self._send(peer, AppendReply(self.term, request.seq, self._checked_index))

    def _agrees_before(self, peer: str, request: AppendRequest) -> bool:
        """Say whether the journal agrees with the leader's just before its entries; if not, answer where it might."""
        journal, prev = self._journal, request.prev_index
        # Below the base everything is committed, hence also in the leader's journal.
        if prev < journal.base_index or journal.term_of(prev) == request.prev_term:
            return True
        if prev <= self.commit_index:
            raise BrokenInvariant(
                f"leader {peer} of term {request.term} has term {request.prev_term} at entry {prev}; "
                f"here the entry of term {journal.term_of(prev)} is committed"
            )
        last_to_try = min(prev, journal.last_index)
        floor = max(self._checked_index, journal.base_index)
        hint = self._last_index_not_above_term(last_to_try, request.prev_term, floor)
        hint_term = journal.term_of(hint) or 0
        self._send(peer, AppendReply(self.term, request.seq, self._checked_index, True, hint, hint_term))
        return False

    def _append_what_is_missing(self, peer: str, entries: list[Entry]) -> None:
        """Append the entries that are not there; cut the journal at the first that differs, and only then (H3)."""
        journal = self._journal
        for at, entry in enumerate(entries):
            if entry.index <= journal.base_index:
                continue
            if entry.index <= journal.last_index:
                known = journal.term_of(entry.index)
                if known == entry.term:
                    continue
                if entry.index <= self.commit_index:
                    raise BrokenInvariant(
                        f"leader {peer} sends entry {entry.index} of term {entry.term}; "
                        f"here the entry of term {known} is committed"
                    )
                self._truncate_from(entry.index)
            self._append(entries[at:])
            return

    def _take_commit(self, message: AppendRequest | Heartbeat) -> None:
        """Move the commit index, over entries that were checked against this leader's journal only (H25)."""
        self._leader_ready = message.ready
        self._leader_commit = max(self._leader_commit, message.commit_index)
        self._commit(min(message.commit_index, self._checked_index))

    def _on_chunk(self, peer: str, chunk: SnapshotChunk) -> None:
        # Everything up to the checked index is the leader's too, so this snapshot has nothing that is missing here,
        # and installing it would throw away entries that are acknowledged (H25).
        if chunk.index <= self._checked_index:
            self._receiver.abort()
            outcome, offset = DONE, chunk.size_bytes
        else:
            outcome, offset = self._receiver.take(chunk)
        place = (chunk.index, chunk.snapshot_term, outcome, offset, self._checked_index)
        self._send(peer, SnapshotReply(self.term, chunk.seq, *place))

    def _install_verified(self) -> None:
        """Install a snapshot whose verification is over: from one moment to the next, between two messages (7).

        What it holds is committed, so it is in the journal of every leader since, whatever the term is by now.
        """
        if self._receiver.verified is None:
            return
        if self._receiver.verified[0] <= self._checked_index:
            raise BrokenInvariant(
                f"a snapshot of entry {self._receiver.verified[0]} is to be installed, but everything up to "
                f"{self._checked_index} came from a leader since it was received"
            )
        place = self._receiver.install()
        if place is not None:
            self._note_install(*place)

    def _note_install(self, index: int, term: int) -> None:
        journal = self._journal
        if journal.applied_index != index or journal.term_of(index) != term:
            raise BrokenInvariant(
                f"a snapshot of index {index} and term {term} was installed, but the journal is "
                f"at {journal.applied_index}, term {journal.term_of(journal.applied_index)}"
            )
        self._move_applied(journal.applied_index)
        self._move_commit(max(self.commit_index, journal.commit_index))
        self._checked_index = index
        if self._members.installed(index, self._receiver.configuration, journal.last_index):
            self._rearrange()
        self._touch_hints()
