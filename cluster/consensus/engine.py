"""Engine: Raft of one replica as a synchronous, deterministic object. Time, randomness, links and disk are injected.

The asyncio driver and the simulators use the engine in the same way: `receive`, `propose`, `read`, then `tick`.
`next_due_s` returns the time at which a tick is due without further events. The engine combines modules of rules over
one `RaftState`.
"""

from collections.abc import Callable, Sequence
from typing import Final

from forebay.cluster.consensus import (
    leader_election,
    leadership_transfer,
    log_compaction,
    log_replication,
    membership_change,
    raft_log,
)
from forebay.cluster.consensus.configurations import Configurations, MemberChange
from forebay.cluster.consensus.frames import (
    AnyMessage,
    AppendReply,
    AppendRequest,
    Heartbeat,
    ReadReply,
    ReadRequest,
    RemovalNotice,
    SnapshotChunk,
    SnapshotReply,
    StateLost,
    TimeoutNow,
    VoteReply,
    VoteRequest,
)
from forebay.cluster.consensus.interface import JournalLike, Links, Machine, PeerStatus, Role, Timing, Uniform
from forebay.cluster.consensus.progress import Phase, Progress
from forebay.cluster.consensus.read_index import ReadWaiter
from forebay.cluster.consensus.seals import Seals
from forebay.cluster.consensus.snapshots import SnapshotReceiver
from forebay.cluster.consensus.state import NEVER, Outbox, RaftState
from forebay.cluster.consensus.stock import StockNode
from forebay.cluster.system import Clock, LogRateLimiter
from forebay.wal import BrokenInvariant, Configuration, ConfigurationAt, Member, initial

_ROUTINE: Final = (Heartbeat, AppendReply)
"""Messages that form almost all traffic of an idle cluster."""


class Engine:
    """Raft rules combined. Not reentrant, except that `apply` may propose.

    `on_change` is called when role, term, leader or readiness changes; `on_members` when the members change; `on_due`
    when a tick becomes due without a call. If `receive`, `tick`, or a proposal that reached the journal raises, the
    replica must stop: `stopped` is set, unsent promises are dropped, and every further call fails.
    """

    def __init__(
        self,
        *,
        me: str,
        peers: Sequence[str] = (),
        journal: JournalLike,
        machine: Machine,
        timing: Timing,
        clock: Clock,
        uniform: Uniform,
        links: Links,
        bootstrap: Configuration | None = None,
        configuration: ConfigurationAt | None = None,
        found_without: frozenset[str] = frozenset(),
        seals: Seals | None = None,
        on_change: Callable[[], None] = lambda: None,
        on_members: Callable[[], None] = lambda: None,
        on_due: Callable[[], None] = lambda: None,
        clock_off: Callable[[str], bool] = lambda member: False,
    ) -> None:
        """Participate as the member with the ID `me`, over `journal`.

        `configuration` is the membership at `journal.applied_index`, from snapshot and ledger; later entries are read
        here. If it is None, the whole journal is read, and `bootstrap` is in force before the journal's first
        configuration. Without both, `peers` and `me` are the members (for tests). `clock_off` returns whether a
        member's wall clock deviates from a majority's. `found_without` names founders that an operator excludes from
        founding the cluster, which needs the votes of all others. `seals` signs and verifies entries and votes; without
        seals nothing is verified.

        Raises:
            RemovedFromCluster: The journal already contains this replica's removal.
            BrokenInvariant: The journal's marks are out of order.
            SealBroken: This replica's log has an entry that no leader accepted.
            KeyReplaced: The configuration has another key for this replica.
        """
        if not journal.base_index <= journal.applied_index <= journal.commit_index <= journal.last_index:
            raise BrokenInvariant(
                f"the journal's marks are out of order: base {journal.base_index}, applied {journal.applied_index}, "
                f"commit {journal.commit_index}, last {journal.last_index}"
            )
        members = tuple(Member(identity) for identity in {*peers, me})
        self.raft: Final = RaftState(
            me=me,
            journal=journal,
            machine=machine,
            timing=timing,
            clock=clock,
            uniform=uniform,
            outbox=Outbox(links),
            configurations=Configurations(configuration or ConfigurationAt(0, bootstrap or initial(members))),
            bootstrap=bootstrap,
            receiver=SnapshotReceiver(machine),
            limiter=LogRateLimiter(clock.monotonic_s),
            seals=seals,
            found_without=found_without,
            clock_off=clock_off,
        )
        raft = self.raft
        raft_log.read_configurations(raft, journal.base_index if configuration is None else journal.applied_index)
        raft_log.check_held(raft)
        raft_log.follow_configuration(raft)
        self.stock: Final = StockNode(raft, peers=raft.progress, on_tick=self._tick, on_message=self._dispatch)
        raft.transitions = self.stock
        raft.applied_index = journal.applied_index
        raft.checked_index = raft.commit_index
        leader_election.draw_election_timeout(raft)
        leader_election.postpone_election(raft)
        raft.on_members = on_members
        raft.receiver.on_verified = on_due
        self._on_change: Final = on_change
        self._shown = self._status()
        raft_log.leave_if_removed(raft)

    # ---- status ----

    @property
    def role(self) -> Role:
        """Role of this replica in its term."""
        return self.raft.role

    @property
    def term(self) -> int:
        """Current term."""
        return self.raft.term

    @property
    def leader(self) -> str | None:
        """ID of this term's leader, if known."""
        return self.raft.leader

    @property
    def commit_index(self) -> int:
        """Last index known to be committed."""
        return self.raft.commit_index

    @property
    def applied_index(self) -> int:
        """Last index applied."""
        return self.raft.applied_index

    @property
    def ready(self) -> bool:
        """Return whether a leader may accept proposals, or a follower is close behind such a leader."""
        return self.raft.ready

    @property
    def hands_over(self) -> bool:
        """Return whether a leadership transfer is under way."""
        return self.raft.transfer_target is not None

    @property
    def stopped(self) -> bool:
        """Return whether an exception or `stop` has ended this replica's participation."""
        return self.raft.stopped

    @property
    def configuration(self) -> Configuration:
        """Newest configuration in the journal, committed or not; it determines majorities."""
        return self.raft.configuration

    @property
    def addresses(self) -> dict[str, str]:
        """Addresses of the other members, by ID, from every configuration that may be in force."""
        known = self.raft.configurations.known()
        return {one.id: one.peer for each in known for one in each.members() if one.id != self.raft.me}

    @property
    def sync_s(self) -> float | None:
        """Fastest of the last SYNCS syncs of this replica's disk, seconds; None after fewer syncs."""
        return self.raft.sync_times.least_s

    def peers(self) -> list[PeerStatus]:
        """Return the status of each peer, sorted by name."""
        raft = self.raft
        now_s, last, leads = raft.clock.monotonic_s(), raft.journal.last_index, raft.leads
        return [
            PeerStatus(
                name=name,
                connected=name in raft.connected,
                match_index=known.match if leads else 0,
                next_index=known.next if leads else 0,
                last_contact_s=None if known.last_contact_s is None else max(0.0, now_s - known.last_contact_s),
                lag_entries=max(0, last - known.match) if leads else 0,
                sending_snapshot=name in raft.senders,
                votes=raft.configuration.votes(name),
                forgot=known.lost > 0,
            )
            for name, known in raft.progress.items()
        ]

    def promotable(self) -> str | None:
        """Return the ID of a learner that `change` would promote now, or None."""
        return membership_change.promotable(self.raft)

    def unrecorded(self) -> tuple[str, bytes] | None:
        """Return the ID of a voter whose key a change should record, and the key, or None."""
        return membership_change.voter_without_key(self.raft)

    def compactable_to(self, index: int) -> int:
        """Return the index up to which the journal may be compacted, given a snapshot at `index`."""
        return log_compaction.compactable_to(self.raft, index)

    # ---- requests ----

    def propose(self, data: bytes) -> tuple[int, int]:
        """Append an entry as leader; return (index, term). The next tick sends it.

        Raises:
            NotLeader: This replica does not lead, or has not applied its own first entry.
            EntryTooLarge: The data exceeds the size of an entry.
            ValueError: The data is empty or a configuration.
        """
        return log_replication.propose(self.raft, data)

    def change(self, wanted: MemberChange) -> tuple[int, int]:
        """Append the configuration that results from `wanted`; return (index, term). The next tick sends it.

        Raises:
            NotLeader: This replica does not lead.
            ChangeRefused: The change is impossible now.
        """
        return membership_change.change(self.raft, wanted)

    def transfer(self, target: str | None = None) -> str:
        """Begin to transfer leadership to `target`, or to the best voter; return the target's ID.

        Raises:
            NotLeader: This replica does not lead.
            ChangeRefused: The target cannot take over.
        """
        return leadership_transfer.transfer(self.raft, target)

    def read(self, waiter: ReadWaiter) -> None:
        """Call `waiter` with the commit index once a majority has confirmed, after this call, that this replica leads.

        Call `waiter` with None if this replica does not lead, or loses leadership first.
        """
        raft = self.raft
        if raft.leads and not raft.stopped:
            raft.reads.add(waiter)
        else:
            waiter(None)

    def ask_leader(self, news: bytes, waiter: ReadWaiter) -> None:
        """Call `waiter` with the index that this replica must apply before a linearizable read of its own state.

        A majority must confirm the leader after this call. The leader also receives `news`. `waiter` is called with
        None if no leader is known; it is never called if request or reply is lost, or leadership changes.
        """
        self.raft.require_running()
        log_replication.ask_leader(self.raft, news, waiter)

    # ---- events ----

    def next_due_s(self) -> float:
        """Return the monotonic time at which `tick` is due, seconds; a time in the past means now."""
        raft = self.raft
        if raft.stopped:
            return NEVER
        if self._wants_tick:
            return -NEVER
        if not raft.leads:
            return min(raft.hints_due_s, max(raft.election_deadline_s, raft.grace_until_s))
        if raft.reads.wants_round:
            return -NEVER
        return min(
            raft.sync_due_s,
            raft.hints_due_s,
            raft.notice_due_s,
            raft.heartbeat_due_s,
            max(log_replication.quorum_deadline_s(raft), raft.grace_until_s),
            raft.transfer_deadline_s,
        )

    def tick(self) -> None:
        """Do all due work: campaign, send, sync, release promises, commit, apply. Any exception is fail-stop (H23)."""
        raft = self.raft
        raft.require_running()
        with raft.fail_stop:
            raft.stirred = False
            self.stock.doTick()
            status = self._status()
            if status != self._shown:
                self._shown = status
                self._on_change()

    def receive(self, peer: str, message: AnyMessage) -> bool:
        """Handle a message of an authenticated peer; return whether a tick is needed (`next_due_s` then shows it too).

        Promises in the reply are sent at once if the state that they depend on is durable, otherwise with the next
        tick. A message that needs no tick makes nothing due earlier, so an existing timer stays valid.
        """
        raft = self.raft
        raft.require_running()
        with raft.fail_stop:
            known = raft.progress.get(peer)
            before = None if known is None else _footing(known)
            self.stock.deliver(peer, message)
            if not raft.journal.dirty:
                raft.outbox.release()
                raft.outbox.flush()
            # A routine message does not change the result of a tick.
            is_routine = (
                isinstance(message, _ROUTINE)
                and (known is None or _footing(known) == before or self._only_confirms(known))
                and not raft.reads.under_way
                and self._status() == self._shown
            )
            raft.stirred = raft.stirred or not is_routine
            return self._wants_tick

    def connected(self, peer: str) -> None:
        """Handle a new link to `peer`: probe its journal, because requests on an earlier link may be lost."""
        self.raft.connected.add(peer)
        known = self.raft.progress.get(peer)
        if known is not None:
            known.probe_from(known.match + 1)

    def disconnected(self, peer: str) -> None:
        """Handle the loss of the link to `peer`, with everything in flight."""
        self.raft.connected.discard(peer)
        self.raft.end_sending(peer)
        known = self.raft.progress.get(peer)
        if known is not None:
            known.link_broke(self.raft.journal.term_of(known.match))

    def lost_sight(self, peer: str) -> None:
        """Handle the loss of the connection that `peer` opened."""
        leader_election.lose_sight(self.raft, peer)

    def stop(self) -> None:
        """Release everything, and call waiting readers with None. Nothing is written or sent."""
        self.raft.stopped = True
        self.raft.end_leadership()
        self.raft.receiver.suspend()
        self.raft.outbox.drop()
        self.stock.destroy()

    # ---- internals ----

    @property
    def _wants_tick(self) -> bool:
        """Return whether there is work regardless of the time."""
        raft = self.raft
        return (
            raft.stirred
            or (raft.journal.dirty and raft.sync_due_s == NEVER)
            or raft.outbox.holds
            or raft.applied_index < raft.commit_index
            or raft.receiver.verified is not None
        )

    def _tick(self) -> None:
        raft = self.raft
        log_compaction.install_verified(raft)
        now_s = raft.clock.monotonic_s()
        if raft.leads:
            log_replication.check_quorum(raft, now_s)
        else:
            leader_election.check_election_timeout(raft, now_s)
        if raft.leads:
            leadership_transfer.hand_over(raft, now_s)
            log_replication.send_appends(raft, now_s)
            log_replication.advance_commit(raft)  # others' copies may suffice, without this disk
        durable = raft.durable_index
        raft_log.make_durable(raft)
        if raft.leads and raft.durable_index != durable:
            log_replication.advance_commit(raft)
        raft_log.apply_committed(raft)
        if raft.reads.under_way and raft.has_begun:  # earlier entries must be committed (section 8)
            raft.reads.answer(log_replication.quorum_seq(raft), raft.commit_index)
            raft.outbox.flush()  # to followers among the readers
        if now_s >= raft.hints_due_s:
            raft.hints_due_s = NEVER
            raft.journal.flush_hints()

    def _dispatch(self, peer: str, message: AnyMessage) -> None:
        raft = self.raft
        if not membership_change.concerns(raft, peer, message):
            return
        if raft.is_new and not leader_election.is_heeded_by_new(raft, peer, message):
            return
        if not leader_election.is_term_reachable(raft, peer, message.term):
            return
        known = raft.progress.get(peer)
        if known is not None:
            known.last_contact_s = raft.clock.monotonic_s()
        match message:
            case RemovalNotice():
                membership_change.on_removed(raft, peer, message)
                return
            case VoteRequest():
                leader_election.on_vote_request(raft, peer, message)  # only this handler may ignore a higher term (H14)
                return
        if message.term > raft.term:
            leader_election.adopt_term(raft, message.term)
        match message:
            case AppendRequest() | Heartbeat() | SnapshotChunk():
                log_replication.on_leader_message(raft, peer, message)
            case AppendReply() | SnapshotReply():
                log_replication.on_reply(raft, peer, message)
            case VoteReply():
                leader_election.on_vote_reply(raft, peer, message)
            case ReadRequest():
                log_replication.on_read_request(raft, peer, message)
            case ReadReply():
                log_replication.on_read_reply(raft, peer, message)
            case StateLost():
                log_replication.on_state_lost(raft, peer, message)
            case TimeoutNow():
                leadership_transfer.on_timeout_now(raft, peer, message)

    def _only_confirms(self, known: Progress) -> bool:
        """Return whether the peer's reply can only have confirmed entries that are already committed."""
        raft = self.raft
        last = raft.journal.last_index
        return (
            raft.leads
            and raft.transfer_target is None
            and known.phase is Phase.REPLICATE
            and known.next > last
            and raft.commit_index == last
        )

    def _status(self) -> tuple[object, ...]:
        raft = self.raft
        return raft.role, raft.term, raft.leader, raft.ready


def _footing(known: Progress) -> tuple[object, ...]:
    """Return the values that determine the leader's next request to a peer and the peer's share in commits."""
    return known.match, known.phase, known.probe_seq, known.may_send
