"""One replica's Raft as a synchronous, deterministic object: time, randomness, links and disk are given to it.

The asyncio driver and the simulators drive it in the same way: `receive`, `propose`, `read`, then `tick`;
`next_due_s` says when to tick although nothing happened.
"""

from collections.abc import Callable
from typing import Any, Final

from cluster.consensus.changes import Wanted
from cluster.consensus.changing import Changing
from cluster.consensus.core import NEVER
from cluster.consensus.frames import (
    APPEND_ENTRIES,
    MAX_ENTRY_BYTES,
    AnyMessage,
    AppendReply,
    AppendRequest,
    Forgotten,
    Heartbeat,
    Removed,
    SnapshotChunk,
    SnapshotReply,
    TimeoutNow,
    VoteReply,
    VoteRequest,
)
from cluster.consensus.interface import EntryTooLarge, PeerStatus
from cluster.consensus.progress import Phase, Progress
from cluster.consensus.reads import ReadWaiter
from wal import BrokenInvariant, Entry, is_configuration

APPLY_SLICE_S: Final = 0.02
"""Seconds of applying after which a tick gives the loop back: less than half of the shortest sensible heartbeat."""

APPLY_BYTES: Final = 4 << 20
"""Bytes of entries read from the journal at once for applying."""

SYNC_POSTPONED_BYTES: Final = 32 << 10
"""What a leader has proposed since its last sync, bytes, from which on it lets its followers commit it alone: so much
at once means that the leader's processor is what everybody waits for, and a sync would hold it up."""

SYNC_POSTPONED_S: Final = 0.003
"""How long it does so, seconds: several round trips, and little for a client if one of the followers is slow."""

READY_LAG_ENTRIES: Final = 256
"""Entries that a follower may be behind its leader's commit index and still call itself ready: well under a second."""


class Engine(Changing):
    """The rules together. Never re-entered, except that `apply` may propose.

    Takes me, peers, journal, machine, timing, clock, uniform, links, founding and configuration as Core does;
    `on_change` is called when role, term, leader or readiness is another, `on_members` when the members are, `on_due`
    when there is something to tick for although nothing was called. An exception out of `receive`, `tick`, or a
    proposal that reached the journal means that the replica must stop: `stopped` is set, its unsent promises are
    forgotten, and every further call is refused. Raises RemovedFromCluster for a replica that knows already that it is
    no member any more.
    """

    def __init__(
        self,
        *,
        on_change: Callable[[], None] = lambda: None,
        on_members: Callable[[], None] = lambda: None,
        on_due: Callable[[], None] = lambda: None,
        **given: Any,
    ) -> None:
        self._on_members: Callable[[], None] = lambda: None
        self._on_change: Final = on_change
        self._shown: tuple[object, ...] = ()
        self._stirred = False
        """Whether a message or a proposal came since the last tick, after which a tick may have something to do."""
        super().__init__(**given)
        self._on_members = on_members
        self._receiver.on_verified = on_due
        self._shown = self._status()
        self._leave_if_removed()

    @property
    def ready(self) -> bool:
        """Whether a leader has applied its own first entry; whether a follower is close behind a leader that has."""
        if self._leads:
            return super().ready
        behind = self._leader_commit - self.applied_index
        return self.leader is not None and self._leader_ready and behind <= READY_LAG_ENTRIES

    def peers(self) -> list[PeerStatus]:
        """Return what is known of each peer, sorted by name."""
        now_s, last, leads = self._clock.monotonic_s(), self._journal.last_index, self._leads
        return [
            PeerStatus(
                name=name,
                connected=self._is_connected(name),
                match_index=known.match if leads else 0,
                next_index=known.next if leads else 0,
                last_contact_s=None if known.last_contact_s is None else max(0.0, now_s - known.last_contact_s),
                lag_entries=max(0, last - known.match) if leads else 0,
                sending_snapshot=name in self._senders,
                votes=self.configuration.votes(name),
                forgot=known.forgot > 0,
            )
            for name, known in self._progress.items()
        ]

    def propose(self, data: bytes) -> tuple[int, int]:
        """Append an entry as leader; return (index, term). It leaves with the next tick.

        NotLeader if this replica does not lead or has not applied its own first entry; EntryTooLarge; ValueError.
        """
        self._require_ready()
        if not data or is_configuration(data):
            raise ValueError("what was proposed is empty or a configuration; `change` makes those (H12)")
        if len(data) > MAX_ENTRY_BYTES:
            raise EntryTooLarge(len(data))
        index = self._journal.last_index + 1
        self._unsynced_bytes += len(data)
        with self._stopping_at_an_exception():
            self._append([Entry(index, self.term, data)])
        self._stirred = True
        return index, self.term

    def change(self, wanted: Wanted) -> tuple[int, int]:
        """Append the configuration that `wanted` makes, as `Changing.change` does. It leaves with the next tick."""
        place = super().change(wanted)
        self._stirred = True
        return place

    def read(self, waiter: ReadWaiter) -> None:
        """Call `waiter` with the commit index once a majority, asked from now on, confirms that this replica leads.

        With None if it does not lead, or loses its leadership before.
        """
        if self._leads and not self.stopped:
            self._reads.add(waiter)
        else:
            waiter(None)

    def next_due_s(self) -> float:
        """Return the monotonic second at which `tick` has something to do; the past if it has now."""
        if self.stopped:
            return NEVER
        if self._wants_tick:
            return -NEVER
        if not self._leads:
            return min(self._hints_due_s, max(self._election_deadline_s, self._grace_until_s))
        if self._reads.wants_round:
            return -NEVER
        quorum_due_s = max(self._quorum_deadline_s(), self._grace_until_s)
        return min(
            self._sync_due_s,
            self._hints_due_s,
            self._notice_due_s,
            self._heartbeat_due_s,
            quorum_due_s,
            self._heir_deadline_s,
        )

    def tick(self) -> None:
        """Do what is due: stand, send, sync, release promises, commit, apply. Any exception is fail-stop (H23)."""
        self._require_running()
        with self._stopping_at_an_exception():
            self._stirred = False
            self.doTick()
            status = self._status()
            if status != self._shown:
                self._shown = status
                self._on_change()

    def receive(self, peer: str, message: AnyMessage) -> bool:
        """Take a message of an authenticated peer; return whether it asks for a tick, as `next_due_s` does then too.

        What is promised in answer leaves at once if all that it rests on is durable already, or with the next tick.
        What asks for none makes nothing due sooner, so a timer that is set stays right.
        """
        self._require_running()
        with self._stopping_at_an_exception():
            known = self._progress.get(peer)
            before = None if known is None else _footing(known)
            self._deliver(peer, message)
            if not self._journal.dirty:
                self._bridge.release()
                self._bridge.flush()
            # Nearly all that an idle cluster says: what a tick would do does not depend on it.
            is_routine = (
                isinstance(message, Heartbeat | AppendReply)
                and (known is None or _footing(known) == before or self._only_confirms(known))
                and not self._reads.under_way
                and self._status() == self._shown
            )
            self._stirred = self._stirred or not is_routine
            return self._wants_tick

    def connected(self, peer: str) -> None:
        """The link to `peer` is up; what an earlier one had in flight is unknown, so its journal is probed."""
        self._note_link(peer, is_up=True)
        known = self._progress.get(peer)
        if known is not None:
            known.probe_from(known.match + 1)

    def disconnected(self, peer: str) -> None:
        """The link to `peer` broke, and lost everything that was in flight."""
        self._note_link(peer, is_up=False)
        self._end_transfer(peer)
        known = self._progress.get(peer)
        if known is not None:
            known.link_broke(self._journal.term_of(known.match))

    def stop(self) -> None:
        """Let go of everything; readers who wait learn that leadership is lost. Nothing is written or sent."""
        self.stopped = True
        self._after_leading()
        self._receiver.suspend()
        self.destroy()

    # ---- inside ----

    @property
    def _wants_tick(self) -> bool:
        """Whether there is something to do whatever the time."""
        return (
            self._stirred
            or (self._journal.dirty and self._sync_due_s == NEVER)
            or self._bridge.holds
            or self.applied_index < self.commit_index
            or self._receiver.verified is not None
        )

    def _do_tick(self) -> None:
        self._install_verified()
        now_s = self._clock.monotonic_s()
        if self._leads:
            self._check_quorum(now_s)
        elif self._has_passed(self._election_deadline_s, now_s):
            if self._votes_here:
                self._ask_first()
            else:
                self._ask_around()
        if self._leads:
            self._hand_over(now_s)
            self._send_appends()
            self._advance_commit()  # by what the others hold: then nothing waits for this replica's disk
        durable = self._durable_index
        self._make_durable()
        if self._leads and self._durable_index != durable:
            self._advance_commit()
        self._apply_committed()
        if self._leads:
            self._answer_reads()
        if now_s >= self._hints_due_s:
            self._hints_due_s = NEVER
            self._journal.flush_hints()

    def _make_durable(self) -> None:
        """Sync once for everything that this tick promises, then let the promises go (H1, H2)."""
        self._bridge.flush()  # append requests promise nothing, and travel while the disk works
        if self._journal.dirty:
            if self._postpones_sync():
                return
            self._journal.sync()
        self._sync_due_s = self._sync_owed_s = NEVER
        self._unsynced_bytes = 0
        self._durable_index = self._journal.last_index
        self._bridge.release()
        self._bridge.flush()

    def _postpones_sync(self) -> bool:
        """Say whether this leader's own copy can wait: nothing rests on it but the leader's own vote for a commit.

        It always waits for the next tick: what was sent is under way, and answers may be there. It waits on, under load
        and where the others have committed everything, while they can commit without it (thesis 10.2.1).
        """
        if not self._leads or self._bridge.holds:
            return False
        now_s = self._clock.monotonic_s()
        voters = self.configuration.voters
        streaming = sum(one.id != self.me and self._is_streaming(one.id) for one in voters)
        if self._sync_owed_s == NEVER:
            if not streaming:
                return False
            self._sync_owed_s = now_s + SYNC_POSTPONED_S
        elif now_s >= self._sync_owed_s:
            return False
        is_spared = self._unsynced_bytes >= SYNC_POSTPONED_BYTES or self.commit_index == self._journal.last_index
        if is_spared and streaming >= self.configuration.majority:
            self._sync_due_s = self._sync_owed_s
            return True
        asked_before = self._sync_due_s <= now_s
        self._sync_due_s = now_s
        return not asked_before

    def _only_confirms(self, known: Progress) -> bool:
        """Whether all that a peer may have said is that it holds, too, what is committed already."""
        last = self._journal.last_index
        return (
            self._leads
            and not self.hands_over
            and known.phase is Phase.REPLICATE
            and known.next > last
            and self.commit_index == last
        )

    def _is_streaming(self, peer: str) -> bool:
        """Whether a peer takes entries as they come."""
        return self._is_connected(peer) and self._progress[peer].phase is Phase.REPLICATE

    def _apply_committed(self) -> None:
        """Apply committed entries in order, each once; an exception stops the replica before the next (H6, H7)."""
        began_s = self._clock.monotonic_s()
        while (count := self.commit_index - self.applied_index) > 0:
            first = self.applied_index + 1
            for entry in self._journal.entries(first, max_bytes=APPLY_BYTES, max_entries=min(count, APPEND_ENTRIES)):
                self._apply(entry)
                if self._clock.monotonic_s() - began_s > APPLY_SLICE_S:
                    return  # next_due_s asks for another tick at once

    def _apply(self, entry: Entry) -> None:
        if entry.index != self.applied_index + 1:
            raise BrokenInvariant(f"entry {entry.index} came to be applied after {self.applied_index}")
        self._machine.apply(entry.index, entry.term, entry.data)
        if self._journal.applied_index != entry.index:
            raise BrokenInvariant(f"the machine did not record entry {entry.index} as applied in the journal")
        self._move_applied(entry.index)
        self._touch_hints()
        if is_configuration(entry.data):
            self._leave_if_removed()
            self._on_members()

    def _on_message(self, peer: str, message: AnyMessage) -> None:
        if not self._concerns(peer, message) or not self._may_be_reached(peer, message.term):
            return
        if peer in self._progress:
            self._progress[peer].last_contact_s = self._clock.monotonic_s()
        match message:
            case Removed():
                self._on_removed(peer, message)
                return
            case VoteRequest():
                self._on_vote_request(peer, message)  # it alone may leave a higher term unheeded (H14)
                return
        if message.term > self.term:
            self._adopt_term(message.term)
        match message:
            case AppendRequest() | Heartbeat() | SnapshotChunk():
                self._on_leader_message(peer, message)
            case VoteReply():
                self._on_vote_reply(peer, message)
            case AppendReply() | SnapshotReply():
                self._on_reply(peer, message)
            case Forgotten():
                self._on_forgotten(peer, message)
            case TimeoutNow():
                self._on_timeout_now(peer, message)

    def _at_configuration(self, new: set[str], gone: set[str]) -> None:
        super()._at_configuration(new, gone)
        self._on_members()

    def _status(self) -> tuple[object, ...]:
        return self._standing, self.ready


def _footing(known: Progress) -> tuple[object, ...]:
    """Return what decides about a peer what a leader sends to it, and whether it counts for a commit."""
    return known.match, known.phase, known.probe_seq, known.may_send
