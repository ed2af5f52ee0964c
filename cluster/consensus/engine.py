"""PySyncObj 0.3.17 as the Raft engine, with every rule that HAZARDS.md found wrong replaced: the only module that knows it.

Kept from the stock class: its construction, its roles and variables, its set of connected nodes, its log accessors. Overridden: the tick,
the message handler, elections, append, commit, apply, and everything that touches files, pickles or clocks. Section numbers
are those of the extended Raft paper (Ongaro and Ousterhout, 2014) and, with "thesis", of Ongaro's dissertation.

The engine is synchronous and deterministic: time, randomness, links and disk are given to it, so a simulator can run a whole
cluster in one thread. `tests/cluster/consensus/test_seam.py` hashes the source of each stock method that this relies on.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NoReturn, Protocol

import pysyncobj.syncobj as stock
from pysyncobj.config import SyncObjConf
from pysyncobj.node import Node
from pysyncobj.transport import Transport
from pysyncobj.version import VERSION

from cluster.clock import Clock
from cluster.consensus.frames import (
    APPEND_BYTES,
    APPEND_ENTRIES,
    DONE,
    MAX_ENTRY_BYTES,
    PROMISES,
    REFUSED,
    AnyMessage,
    AppendReply,
    AppendRequest,
    Heartbeat,
    SnapshotChunk,
    SnapshotReply,
    VoteReply,
    VoteRequest,
)
from cluster.consensus.interface import NO_OP, EntryTooLarge, Machine, NotLeader, PeerStatus, Role, Timing
from cluster.consensus.journal_adapter import JournalAdapter, JournalLike
from cluster.consensus.progress import Phase, Progress
from cluster.consensus.reads import ReadRounds, ReadWaiter
from cluster.consensus.snapshots import RETRY_S, SnapshotReceiver, SnapshotSender
from wal.failures import BrokenInvariant
from wal.journal import Entry

_log = logging.getLogger(__name__)

ENGINE_VERSION: Final = "0.3.17"
if VERSION != ENGINE_VERSION:
    raise ImportError(
        f"PySyncObj {VERSION} is installed, but Forebay overrides private methods of exactly {ENGINE_VERSION}; "
        f"install it: pip install pysyncobj=={ENGINE_VERSION}"
    )

FOLLOWER: Final[int] = stock._RAFT_STATE.FOLLOWER
CANDIDATE: Final[int] = stock._RAFT_STATE.CANDIDATE
LEADER: Final[int] = stock._RAFT_STATE.LEADER
ROLES: Final = {FOLLOWER: Role.FOLLOWER, CANDIDATE: Role.CANDIDATE, LEADER: Role.LEADER}

NEVER: Final = float("inf")

APPLY_SLICE_S: Final = 0.02
"""Seconds of applying after which a tick gives the loop back: less than half of the shortest sensible heartbeat."""

APPLY_BYTES: Final = 4 << 20
"""Bytes of entries read from the journal at once for applying."""

READY_LAG_ENTRIES: Final = 256
"""Entries that a follower may be behind its leader's commit index and still call itself ready: well under a second."""

SOON_SHARE: Final = (0.1, 0.6)
"""When the leader's link breaks, a follower stands after this share of the shortest election timeout, at random."""

Uniform = Callable[[float, float], float]
"""Draws a number between two bounds: `random.uniform`, or a seeded one in a simulation."""


class Links(Protocol):
    """What carries messages to peers; it may lose them, never alter them, and keeps their order while a link is up."""

    def send(self, peer: str, message: AnyMessage) -> None: ...
    def flush(self) -> None: ...


class _Bridge(Transport):  # type: ignore[misc]
    """The stock transport interface over Links, with the durability gate (H2): promises wait here for the sync."""

    def __init__(self, links: Links) -> None:
        super().__init__(None, None, [])
        self._links = links
        self._held: list[tuple[str, AnyMessage]] = []

    def setOnUtilityMessageCallback(self, message: str, callback: object) -> None:
        """Ignored: add, remove, set_version, transfer and status are not offered to peers (H5)."""

    def send(self, node: Any, message: AnyMessage) -> bool:
        if not isinstance(message, AnyMessage):
            raise BrokenInvariant(f"the stock engine tried to send {type(message).__name__}; nothing of it may leave")
        if isinstance(message, PROMISES):
            self._held.append((node.id, message))
        else:
            self._links.send(node.id, message)
        return True

    def release(self) -> None:
        """Let the promises go; the journal was synced since the first of them was made."""
        held, self._held = self._held, []
        for peer, message in held:
            self._links.send(peer, message)

    @property
    def holds(self) -> bool:
        return bool(self._held)

    def flush(self) -> None:
        self._links.flush()

    def destroy(self) -> None:
        self._held.clear()


class _NoPoller:
    """The stock engine wants a poller; ours is the asyncio loop, outside."""

    def poll(self, timeout: float) -> None: ...


@contextmanager
def _construction(adapter: JournalAdapter) -> Iterator[None]:
    """Let the stock constructor find our journal, and no poller."""
    create_journal, create_poller = stock.createJournal, stock.createPoller
    stock.createJournal = lambda file: adapter
    stock.createPoller = lambda kind: _NoPoller()
    try:
        yield
    finally:
        stock.createJournal, stock.createPoller = create_journal, create_poller


def stock_configuration(**options: object) -> Any:
    """Return the stock configuration; TypeError for an option that it does not know and would silently ignore (H22)."""
    known = vars(SyncObjConf())
    for name in options:
        if name not in known:
            raise TypeError(f"PySyncObj {ENGINE_VERSION} has no option {name!r}")
    return SyncObjConf(**options)


class Engine(stock.SyncObj):  # type: ignore[misc]
    """One replica's Raft. The driver (or a simulator) calls `receive`, `tick`, `propose`; it is never re-entered.

    An exception out of any of them means that the replica must stop: the engine then refuses every further call.
    """

    # The stock variables that the overriding methods share with the stock ones.
    _SyncObj__raftState: int
    _SyncObj__raftCurrentTerm: int
    _SyncObj__votedForNodeId: str | None
    _SyncObj__raftLeader: Any
    _SyncObj__raftElectionDeadline: float
    _SyncObj__raftCommitIndex: int
    _SyncObj__raftLastApplied: int
    _SyncObj__connectedNodes: set[Any]
    _SyncObj__noopIDx: int | None

    def __init__(
        self,
        *,
        me: str,
        peers: Sequence[str],
        journal: JournalLike,
        machine: Machine,
        timing: Timing,
        clock: Clock,
        uniform: Uniform,
        links: Links,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        if not journal.base_index <= journal.applied_index <= journal.commit_index <= journal.last_index:
            raise BrokenInvariant(
                f"the journal's marks are out of order: base {journal.base_index}, applied {journal.applied_index}, "
                f"commit {journal.commit_index}, last {journal.last_index}"
            )
        # Before the stock constructor: it calls the overridden methods, and it evaluates every property.
        self.me: Final = me
        self._journal: Final = journal
        self._machine: Final = machine
        self._timing: Final = timing
        self._clock: Final = clock
        self._uniform: Final = uniform
        self._on_change: Final = on_change
        self._bridge: Final = _Bridge(links)
        # Sorted, and walked in this order always: the stock engine walks sets, in the order of their hashes (H24).
        self._nodes: Final = {name: Node(name) for name in sorted(set(peers) - {me})}
        self._progress: Final = {name: Progress() for name in self._nodes}
        self._majority: Final = (len(self._nodes) + 1) // 2 + 1
        self._reads: Final = ReadRounds()
        self._receiver: Final = SnapshotReceiver(machine)
        self._senders: Final[dict[str, SnapshotSender]] = {}
        self._snapshot_after_s: Final[dict[str, float]] = {}
        self._stopped = False
        self._seq = 0
        self._votes: set[str] = set()
        self._asking_first = False
        self._campaign_seq = 0
        self._leader_heard_s = -NEVER
        self._leader_ready = False
        self._leader_commit = 0
        self._checked_index = journal.commit_index
        self._durable_index = 0
        self._heartbeat_due_s = NEVER
        self._notice_due_s = NEVER
        self._hints_due_s = NEVER
        self._shown: tuple[object, ...] = ()
        conf = stock_configuration(
            autoTick=False,
            raftMinTimeout=timing.election_min_s,
            raftMaxTimeout=timing.election_max_s,
            appendEntriesPeriod=timing.heartbeat_s,
            leaderFallbackTimeout=timing.election_max_s,
            connectionTimeout=timing.election_max_s,
            dynamicMembershipChange=False,
            journalFile=None,
            fullDumpFile=None,
            useFork=False,
        )
        with _construction(JournalAdapter(journal)):
            super().__init__(Node(me), list(self._nodes.values()), conf=conf, nodeClass=Node, transport=self._bridge)
        self._SyncObj__raftLastApplied = journal.applied_index
        self._postpone_election()
        self._shown = self._status()

    # ---- what the driver sees ----

    @property
    def role(self) -> Role:
        return ROLES[self._SyncObj__raftState]

    @property
    def term(self) -> int:
        return self._SyncObj__raftCurrentTerm

    @property
    def leader(self) -> str | None:
        node = self._SyncObj__raftLeader
        return None if node is None else str(node.id)

    @property
    def commit_index(self) -> int:
        return self._SyncObj__raftCommitIndex

    @property
    def applied_index(self) -> int:
        return self._SyncObj__raftLastApplied

    @property
    def ready(self) -> bool:
        """Whether a leader has applied its own first entry; whether a follower is close behind a leader that has."""
        if self._SyncObj__raftState == LEADER:
            return self._SyncObj__noopIDx is not None and self.applied_index >= self._SyncObj__noopIDx
        behind = self._leader_commit - self.applied_index
        return self.leader is not None and self._leader_ready and behind <= READY_LAG_ENTRIES

    def peers(self) -> list[PeerStatus]:
        """Return what is known of each peer."""
        now_s, last = self._clock.monotonic_s(), self._journal.last_index
        leads = self._SyncObj__raftState == LEADER
        return [
            PeerStatus(
                name=name,
                connected=self._nodes[name] in self._SyncObj__connectedNodes,
                match_index=known.match if leads else 0,
                next_index=known.next if leads else 0,
                last_contact_s=None if known.last_contact_s is None else max(0.0, now_s - known.last_contact_s),
                lag_entries=max(0, last - known.match) if leads else 0,
                sending_snapshot=name in self._senders,
            )
            for name, known in self._progress.items()
        ]

    def propose(self, data: bytes) -> tuple[int, int]:
        """Append an entry as leader; return (index, term). It leaves with the next tick.

        NotLeader if this replica does not lead or its own first entry is not applied; EntryTooLarge; ValueError if empty.
        """
        self._require_running()
        if self._SyncObj__raftState != LEADER:
            raise NotLeader(self.leader)
        if not self.ready:
            raise NotLeader(self.me, sentence="this replica leads, but has not applied its own first entry yet")
        if not data:
            raise ValueError("an empty entry was proposed; an entry's first byte tells its kind")
        if len(data) > MAX_ENTRY_BYTES:
            raise EntryTooLarge(len(data))
        index = self._journal.last_index + 1
        with self._stops_at_an_exception():
            self._journal.append([Entry(index, self.term, data)])
        return index, self.term

    def read(self, waiter: ReadWaiter) -> None:
        """Call `waiter` with the commit index once a majority has confirmed, from now on, that this replica leads."""
        if self._SyncObj__raftState != LEADER:
            waiter(None)
        else:
            self._reads.add(waiter)

    def next_due_s(self) -> float:
        """Return the monotonic second at which `tick` has something to do; the past if it has now."""
        if self._stopped:
            return NEVER
        if self._journal.dirty or self._bridge.holds or self.applied_index < self.commit_index:
            return -NEVER
        due = min(self._notice_due_s, self._hints_due_s)
        if self._SyncObj__raftState != LEADER:
            return min(due, self._SyncObj__raftElectionDeadline)
        return -NEVER if self._reads.wants_round else min(due, self._heartbeat_due_s, self._quorum_deadline_s())

    def tick(self) -> None:
        """Do what is due: stand, send, sync, release promises, commit, apply. Any exception is fail-stop (H23)."""
        self._require_running()
        with self._stops_at_an_exception():
            self.doTick()
            self._tell()

    def receive(self, peer: str, message: AnyMessage) -> None:
        """Take a message of an authenticated peer. What it promises in answer leaves at the end of the next tick."""
        self._require_running()
        with self._stops_at_an_exception():
            if peer in self._nodes:
                self._bridge._onMessageReceived(self._nodes[peer], message)

    def connected(self, peer: str) -> None:
        """A link to `peer` is up."""
        self._bridge._onNodeConnected(self._nodes[peer])
        self._progress[peer].probe_from(self._progress[peer].match + 1)

    def disconnected(self, peer: str) -> None:
        """The link to `peer` broke, and lost everything that was in flight."""
        self._bridge._onNodeDisconnected(self._nodes[peer])
        self._end_transfer(peer)
        self._progress[peer].probe_from(self._progress[peer].match + 1)

    def lost_sight(self, peer: str) -> None:
        """The link from `peer` broke. If it led, it is probably dead: ask around soon instead of after a whole timeout."""
        if self._SyncObj__raftState == FOLLOWER and self.leader == peer:
            self._leader_heard_s = -NEVER
            low, high = SOON_SHARE
            soon = self._uniform(low, high) * self._timing.election_min_s
            self._SyncObj__raftElectionDeadline = min(
                self._SyncObj__raftElectionDeadline, self._clock.monotonic_s() + soon
            )

    def stop(self) -> None:
        """Let go of everything; readers who wait learn that leadership is lost. Nothing is written."""
        self._stopped = True
        self._reads.abandon()
        self._receiver.abort()
        for peer in list(self._senders):
            self._end_transfer(peer)
        self.destroy()

    # ---- the tick (overrides _onTick) ----

    def _onTick(self, timeToWait: float = 0.0) -> None:
        now_s = self._clock.monotonic_s()
        if self._SyncObj__raftState == LEADER:
            if now_s >= self._quorum_deadline_s():
                self._step_down()
        elif now_s >= self._SyncObj__raftElectionDeadline:
            self._ask_first()
        if self._SyncObj__raftState == LEADER:
            self._SyncObj__sendAppendEntries()
        self._make_durable()
        if self._SyncObj__raftState == LEADER:
            self._advance_commit()
        self._SyncObj__applyLogEntries()
        if self._SyncObj__raftState == LEADER and self.ready:
            self._reads.answer(self._quorum_seq(), self.commit_index)
        if now_s >= self._hints_due_s:
            self._hints_due_s = NEVER
            self._journal.flush_hints()

    def _make_durable(self) -> None:
        """Sync once for everything this tick promises, then let the promises go (H1, H2)."""
        self._bridge.flush()  # append requests travel while the disk works; they promise nothing
        if self._journal.dirty:
            self._journal.sync()
        self._durable_index = self._journal.last_index
        self._bridge.release()
        self._bridge.flush()

    # ---- terms and roles (section 5.1) ----

    def _SyncObj__generateRaftTimeout(self) -> float:
        return self._uniform(self._timing.election_min_s, self._timing.election_max_s)

    def _postpone_election(self) -> None:
        self._SyncObj__raftElectionDeadline = self._clock.monotonic_s() + self._SyncObj__generateRaftTimeout()

    def _set_term(self, term: int, voted_for: str | None) -> None:
        self._SyncObj__setCurrentTerm(term, voted_for)

    def _follow(self, leader: str | None) -> None:
        """Become a follower, of nobody if `leader` is None."""
        led = self._SyncObj__raftState == LEADER
        self._SyncObj__setState(FOLLOWER)
        self._SyncObj__raftLeader = None if leader is None else self._nodes[leader]
        self._asking_first = False
        self._votes.clear()
        if leader is None:
            self._leader_ready = False
        if led:
            self._heartbeat_due_s = self._notice_due_s = NEVER
            for peer in list(self._senders):
                self._end_transfer(peer)
            self._reads.abandon()
            self._postpone_election()

    def _adopt_term(self, term: int) -> None:
        """A higher term was seen: follow nobody in it yet, with no vote given."""
        self._set_term(term, None)
        self._follow(None)
        self._leader_heard_s = -NEVER
        self._leader_commit = 0
        # What agreed with the leader of an older term may differ from the new one's, except what is committed (H25).
        self._checked_index = self.commit_index

    def _step_down(self) -> None:
        """A leader that no majority answers any more must not look like one (thesis 6.2, H15)."""
        _log.warning(
            "%s gives up leadership of term %d: no majority answered within an election timeout", self.me, self.term
        )
        self._follow(None)

    def _quorum_deadline_s(self) -> float:
        """Return when this leader must step down unless a further peer answers."""
        if self._majority == 1:
            return NEVER
        heard = sorted((known.answered_s for known in self._progress.values()), reverse=True)
        return heard[self._majority - 2] + self._timing.election_max_s

    # ---- elections (sections 5.2, 5.4.1; pre-vote: thesis 9.6; H14) ----

    def _ask_first(self) -> None:
        """Ask whether a majority would vote for this replica, before it disturbs anybody with a new term."""
        self._follow(None)
        self._SyncObj__setState(CANDIDATE)
        self._asking_first = True
        self._ask_for_votes()
        if len(self._votes) >= self._majority:
            self._stand()

    def _stand(self) -> None:
        self._asking_first = False
        self._set_term(self.term + 1, self.me)
        self._checked_index = self.commit_index
        self._leader_commit = 0
        self._ask_for_votes()
        if len(self._votes) >= self._majority:
            self._SyncObj__onBecomeLeader()

    def _ask_for_votes(self) -> None:
        self._postpone_election()
        self._campaign_seq = self._next_seq()
        # A set of names: the stock engine counts messages, so that a vote delivered twice counts twice.
        self._votes = {self.me}
        journal = self._journal
        for node in self._nodes.values():
            self._send(
                node,
                VoteRequest(self.term, self._campaign_seq, journal.last_index, journal.last_term, self._asking_first),
            )

    def _hears_leader(self, besides: str) -> bool:
        """Whether a leader other than `besides` lives, as far as this replica can tell."""
        if self._SyncObj__raftState == LEADER:
            return True
        recent = self._clock.monotonic_s() - self._leader_heard_s < self._timing.election_min_s
        return recent and self.leader not in (None, besides)

    def _on_vote_request(self, node: Any, request: VoteRequest) -> None:
        if request.term < self.term:
            self._send(node, VoteReply(self.term, request.seq, False, request.pre))
            return
        if self._hears_leader(besides=node.id):
            return
        if not request.pre and request.term > self.term:
            self._adopt_term(request.term)
        journal = self._journal
        up_to_date = (request.last_term, request.last_index) >= (journal.last_term, journal.last_index)
        if request.pre:
            granted = up_to_date
        else:
            granted = up_to_date and self._SyncObj__votedForNodeId in (None, node.id)
            if granted:
                if self._SyncObj__votedForNodeId is None:
                    self._set_term(self.term, node.id)
                self._postpone_election()
        self._send(node, VoteReply(self.term, request.seq, granted, request.pre))

    def _on_vote_reply(self, node: Any, reply: VoteReply) -> None:
        if self._SyncObj__raftState != CANDIDATE or (reply.seq, reply.pre) != (self._campaign_seq, self._asking_first):
            return
        if not reply.granted or (not reply.pre and reply.term != self.term):
            return
        self._votes.add(node.id)
        if len(self._votes) >= self._majority:
            if self._asking_first:
                self._stand()
            else:
                self._SyncObj__onBecomeLeader()

    def _SyncObj__onBecomeLeader(self) -> None:
        self._SyncObj__raftLeader = self._SyncObj__selfNode
        self._SyncObj__setState(LEADER)
        self._votes.clear()
        self._receiver.abort()
        now_s, last = self._clock.monotonic_s(), self._journal.last_index
        for known in self._progress.values():
            known.begin_term(last + 1, now_s)
        self._snapshot_after_s.clear()
        # An entry of its own term, or it could never commit those before it (section 5.4.2, section 8).
        self._journal.append([Entry(last + 1, self.term, NO_OP)])
        self._SyncObj__noopIDx = last + 1
        self._heartbeat_due_s = now_s
        _log.info("%s leads term %d from index %d", self.me, self.term, last + 1)

    # ---- messages ----

    def _SyncObj__onMessageReceived(self, node: Any, message: AnyMessage) -> None:
        self._progress[node.id].last_contact_s = self._clock.monotonic_s()
        if isinstance(message, VoteRequest):
            self._on_vote_request(node, message)
            return
        if message.term > self.term:
            self._adopt_term(message.term)
        match message:
            case AppendRequest() | Heartbeat() | SnapshotChunk():
                self._on_leader_message(node, message)
            case VoteReply():
                self._on_vote_reply(node, message)
            case AppendReply() | SnapshotReply():
                # Of this term, or it says nothing: an acknowledgement of an older term may be of other entries (H4).
                if self._SyncObj__raftState == LEADER and message.term == self.term:
                    self._on_reply(node, message)

    def _on_leader_message(self, node: Any, message: AppendRequest | Heartbeat | SnapshotChunk) -> None:
        if message.term < self.term:
            self._send(node, AppendReply(self.term, message.seq, 0, rejected=True))
            return
        if self._SyncObj__raftState == LEADER or self.leader not in (None, node.id):
            raise BrokenInvariant(f"two leaders in term {self.term}: {self.leader} and {node.id}")
        if self.leader is None or self._SyncObj__raftState != FOLLOWER:
            self._follow(node.id)
        self._leader_heard_s = self._clock.monotonic_s()
        self._postpone_election()
        match message:
            case AppendRequest():
                self._on_append(node, message)
            case Heartbeat():
                self._take_commit(message)
                self._send(node, AppendReply(self.term, message.seq, self._checked_index))
            case SnapshotChunk():
                self._on_chunk(node, message)

    # ---- append, as follower (section 5.3) ----

    def _on_append(self, node: Any, request: AppendRequest) -> None:
        journal = self._journal
        prev = request.prev_index
        # Below the base everything is committed, hence the leader's too.
        if prev >= journal.base_index and journal.term_of(prev) != request.prev_term:
            if prev <= self.commit_index:
                raise BrokenInvariant(
                    f"leader {node.id} of term {request.term} denies the committed entry {prev} of term "
                    f"{journal.term_of(prev)}: it says term {request.prev_term}"
                )
            floor = max(self._checked_index, journal.base_index)
            hint = self._last_index_not_above_term(min(prev, journal.last_index), request.prev_term, floor)
            self._send(
                node,
                AppendReply(
                    self.term,
                    request.seq,
                    self._checked_index,
                    rejected=True,
                    hint_index=hint,
                    hint_term=journal.term_of(hint) or 0,
                ),
            )
            return
        entries = [Entry(prev + 1 + at, term, data) for at, (term, data) in enumerate(request.entries)]
        told = prev + len(entries)
        self._append_what_is_missing(node, entries)
        self._checked_index = max(self._checked_index, told)
        self._receiver.abort()
        self._take_commit(request)
        self._send(node, AppendReply(self.term, request.seq, self._checked_index))

    def _append_what_is_missing(self, node: Any, entries: list[Entry]) -> None:
        """Append the entries that are not there; cut the journal at the first that differs, and only then (H3)."""
        journal = self._journal
        for at, entry in enumerate(entries):
            if entry.index <= journal.base_index:
                continue
            if entry.index > journal.last_index:
                journal.append(entries[at:])
                return
            known = journal.term_of(entry.index)
            if known == entry.term:
                continue
            if entry.index <= self.commit_index:
                raise BrokenInvariant(
                    f"leader {node.id} sends entry {entry.index} of term {entry.term}; here the one of term {known} is committed"
                )
            journal.truncate_from(entry.index)
            self._durable_index = min(self._durable_index, entry.index - 1)
            journal.append(entries[at:])
            return

    def _take_commit(self, message: AppendRequest | Heartbeat) -> None:
        """Move the commit index, over entries that were checked against this leader's log only (H25)."""
        self._leader_ready = message.ready
        self._leader_commit = max(self._leader_commit, message.commit_index)
        self._set_commit(min(message.commit_index, self._checked_index))

    def _set_commit(self, index: int) -> None:
        if index > self.commit_index:
            self._SyncObj__raftCommitIndex = index
            self._journal.set_commit(index)
            self._hints_due_s = self._clock.monotonic_s() + self._timing.idle_flush_s

    def _last_index_not_above_term(self, index: int, term: int, floor: int) -> int:
        """Return the last index from `floor` to `index` whose term is not above `term`: logs may agree there (5.3)."""
        # A stretch of terms above `term` is as long as what one leader left uncommitted, so a step at a time is enough.
        while index > floor and (self._journal.term_of(index) or 0) > term:
            index -= 1
        return index

    # ---- append, as leader (sections 5.3, 5.4.2) ----

    def _SyncObj__sendAppendEntries(self) -> None:
        now_s = self._clock.monotonic_s()
        beat = now_s >= self._heartbeat_due_s
        notice = now_s >= self._notice_due_s
        if self._reads.wants_round:
            self._reads.start(self._seq + 1)
            beat = True
        for name, node in self._nodes.items():
            if node not in self._SyncObj__connectedNodes:
                continue
            known = self._progress[name]
            sent = (
                self._send_snapshot(node, known) if known.phase is Phase.SNAPSHOT else self._send_entries(node, known)
            )
            if not sent and (beat or (notice and known.commit_sent < self.commit_index)):
                self._send(node, Heartbeat(self.term, self._next_seq(), self.commit_index, self.ready))
                known.commit_sent = self.commit_index
        if beat:
            self._heartbeat_due_s = now_s + self._timing.heartbeat_s
        if beat or notice:
            self._notice_due_s = NEVER

    def _send_entries(self, node: Any, known: Progress) -> bool:
        """Send what the peer misses as far as its window allows; return whether anything left."""
        journal, sent = self._journal, False
        while known.may_send and (known.phase is Phase.PROBE or known.next <= journal.last_index):
            prev = known.next - 1
            prev_term = journal.term_of(prev) if prev >= journal.base_index else None
            if prev_term is None:
                known.snapshot()
                self._send_snapshot(node, known)
                return False
            entries: list[Entry] = []
            if known.next <= journal.last_index:
                entries = journal.entries(known.next, max_bytes=APPEND_BYTES, max_entries=APPEND_ENTRIES)
            seq = self._next_seq()
            pairs = [(entry.term, entry.data) for entry in entries]
            self._send(node, AppendRequest(self.term, seq, prev, prev_term, self.commit_index, self.ready, pairs))
            known.sent(seq, prev + len(entries), sum(len(entry.data) for entry in entries))
            known.commit_sent = self.commit_index
            sent = True
        return sent

    def _on_reply(self, node: Any, reply: AppendReply | SnapshotReply) -> None:
        known = self._progress[node.id]
        if not known.acked_seq < reply.seq <= self._seq:
            return  # a copy, or older than what is known
        if reply.match_index > self._journal.last_index:
            _log.error(
                "%s claims entries up to %d; this leader has %d", node.id, reply.match_index, self._journal.last_index
            )
            return
        known.acked_seq = reply.seq
        known.answered_s = self._clock.monotonic_s()
        if isinstance(reply, SnapshotReply):
            self._on_snapshot_reply(node, known, reply)
        elif reply.rejected:
            at = min(reply.hint_index, self._journal.last_index)
            if (self._journal.term_of(at) or 0) != reply.hint_term:
                at = self._last_index_not_above_term(at, reply.hint_term, self._journal.base_index)
            known.rejected(reply.seq, at + 1)
        else:
            known.accepted(reply.seq, reply.match_index)
            if known.phase is Phase.SNAPSHOT and known.match >= self._journal.base_index:
                self._end_transfer(node.id)
                known.probe_from(known.match + 1)

    def _advance_commit(self) -> None:
        """Commit what a majority holds durably, if the last of it is of this term (section 5.4.2, figure 8)."""
        held = sorted([self._durable_index, *(known.match for known in self._progress.values())])
        index = held[len(held) - self._majority]
        if index > self.commit_index and self._journal.term_of(index) == self.term:
            self._set_commit(index)
            self._notice_due_s = min(self._notice_due_s, self._clock.monotonic_s() + self._timing.commit_notice_s)

    def _quorum_seq(self) -> int:
        """Return the newest sequence up to which a majority has answered this leader."""
        if self._majority == 1:
            return self._seq + 1
        answered = sorted((known.acked_seq for known in self._progress.values()), reverse=True)
        return answered[self._majority - 2]

    # ---- apply ----

    def _SyncObj__applyLogEntries(self) -> bool:
        """Apply committed entries in order, each once; an exception stops the replica before the next (H6, H7)."""
        began_s = self._clock.monotonic_s()
        while (count := self.commit_index - self.applied_index) > 0:
            first = self.applied_index + 1
            for entry in self._journal.entries(first, max_bytes=APPLY_BYTES, max_entries=min(count, APPEND_ENTRIES)):
                self._SyncObj__doApplyCommand(entry)
                if self._clock.monotonic_s() - began_s > APPLY_SLICE_S:
                    return False  # next_due_s asks for another tick at once
        return False

    def _SyncObj__doApplyCommand(self, entry: Entry) -> None:
        if entry.index != self.applied_index + 1:
            raise BrokenInvariant(f"entry {entry.index} came to be applied after {self.applied_index}")
        self._machine.apply(entry.index, entry.term, entry.data)
        if self._journal.applied_index != entry.index:
            raise BrokenInvariant(f"the machine did not record entry {entry.index} as applied in the journal")
        self._SyncObj__raftLastApplied = entry.index
        self._hints_due_s = self._clock.monotonic_s() + self._timing.idle_flush_s

    # ---- snapshots (section 7) ----

    def _send_snapshot(self, node: Any, known: Progress) -> bool:
        """Send chunks of the newest snapshot; return False, since a chunk does not stand for a heartbeat."""
        now_s = self._clock.monotonic_s()
        sender = self._senders.get(node.id)
        if sender is None:
            if now_s < self._snapshot_after_s.get(node.id, -NEVER):
                return False
            ref = self._machine.newest_snapshot()
            if ref is None or ref.index < self._journal.base_index:
                _log.warning(
                    "%s needs entries before %d, and there is no snapshot to send", node.id, self._journal.first_index
                )
                self._snapshot_after_s[node.id] = now_s + RETRY_S
                return False
            try:
                sender = self._senders[node.id] = SnapshotSender(ref, now_s)
            except (OSError, ValueError) as error:
                self._give_up_transfer(node.id, f"{error}")
                return False
        try:
            sender.pump(self.term, self._next_seq, lambda chunk: self._send(node, chunk), now_s)
        except OSError as error:
            self._give_up_transfer(node.id, f"{error}")
        return False

    def _on_snapshot_reply(self, node: Any, known: Progress, reply: SnapshotReply) -> None:
        known.match = max(known.match, reply.match_index)
        sender = self._senders.get(node.id)
        if reply.outcome == DONE:
            self._end_transfer(node.id)
            if known.phase is Phase.SNAPSHOT:
                known.probe_from(known.match + 1)
        elif reply.outcome == REFUSED:
            self._give_up_transfer(node.id, "it was refused")
        elif sender is not None:
            sender.answered(reply, self._seq, self._clock.monotonic_s())

    def _end_transfer(self, peer: str) -> None:
        sender = self._senders.pop(peer, None)
        if sender is not None:
            sender.close()

    def _give_up_transfer(self, peer: str, why: str) -> None:
        _log.error("the snapshot for %s did not arrive: %s; another attempt follows", peer, why)
        self._end_transfer(peer)
        self._snapshot_after_s[peer] = self._clock.monotonic_s() + RETRY_S

    def _on_chunk(self, node: Any, chunk: SnapshotChunk) -> None:
        # Everything up to the checked index is the leader's too, so this snapshot has nothing that is missing here;
        # installing it would throw away entries that are acknowledged (H25).
        if chunk.index <= self._checked_index:
            self._receiver.abort()
            outcome, offset = DONE, chunk.size_bytes
        else:
            outcome, offset = self._receiver.take(chunk)
            if outcome == DONE:
                self._installed(chunk)
        self._send(
            node,
            SnapshotReply(self.term, chunk.seq, chunk.index, chunk.snapshot_term, outcome, offset, self._checked_index),
        )

    def _installed(self, chunk: SnapshotChunk) -> None:
        journal = self._journal
        if journal.applied_index != chunk.index or journal.term_of(chunk.index) != chunk.snapshot_term:
            raise BrokenInvariant(
                f"a snapshot of index {chunk.index} was installed, but the journal is at {journal.applied_index}"
            )
        self._SyncObj__raftCommitIndex = journal.commit_index
        self._SyncObj__raftLastApplied = journal.applied_index
        self._checked_index = max(self._checked_index, chunk.index)
        self._durable_index = 0
        self._hints_due_s = self._clock.monotonic_s() + self._timing.idle_flush_s

    # ---- what is switched off ----

    def _applyCommand(self, command: object, callback: object, commandType: object = None) -> NoReturn:
        raise BrokenInvariant("the stock engine's commands are pickled, forwarded and applied twice; use propose (H18)")

    def transferLeadership(self, node: object = None, callback: object = None) -> NoReturn:
        raise BrokenInvariant("the stock leadership transfer has no log check; it is not offered")

    def _SyncObj__tryLogCompaction(self) -> NoReturn:
        raise BrokenInvariant(
            "the stock engine would clear and re-add its log; snapshots are made elsewhere (H9, H10, H11)"
        )

    def _SyncObj__loadDumpFile(self, clearJournal: bool) -> NoReturn:
        raise BrokenInvariant("the stock engine would unpickle a dump and swallow its errors (H8)")

    def _SyncObj__doChangeCluster(self, request: object, reverse: bool = False) -> NoReturn:
        raise BrokenInvariant("the stock engine lets any number of membership changes be in flight (H12)")

    # ---- helpers ----

    def _next_seq(self) -> int:
        self._seq += 1
        return self._seq

    def _send(self, node: Any, message: AnyMessage) -> None:
        self._bridge.send(node, message)

    def _status(self) -> tuple[object, ...]:
        return self.role, self.term, self.leader, self.ready

    def _tell(self) -> None:
        status = self._status()
        if status != self._shown:
            self._shown = status
            self._on_change()

    def _require_running(self) -> None:
        if self._stopped:
            raise RuntimeError("this engine has stopped; make a new one over the journal")

    @contextmanager
    def _stops_at_an_exception(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._stopped = True
            self._bridge.destroy()
            raise
