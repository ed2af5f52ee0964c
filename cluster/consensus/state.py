"""Raft state of one replica, as one record: each field with its invariant, and steps that several rules share.

The modules of rules are functions of this record and keep no state of their own. Section numbers refer to the extended
Raft paper (Ongaro and Ousterhout, 2014); "thesis" refers to Ongaro's dissertation.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeVar

from forebay.cluster.consensus.configurations import Configurations
from forebay.cluster.consensus.frames import PROMISES, AnyMessage
from forebay.cluster.consensus.interface import JournalLike, Links, Machine, NotLeader, Role, Timing, Uniform
from forebay.cluster.consensus.progress import Progress
from forebay.cluster.consensus.read_index import ReadRounds, ReadWaiter
from forebay.cluster.consensus.seals import Seals
from forebay.cluster.consensus.snapshots import SnapshotReceiver, SnapshotSender
from forebay.cluster.system import Clock, LogRateLimiter
from forebay.wal import Configuration, incarnation_of, name_of

_Reached = TypeVar("_Reached", int, float)

NEVER: Final = float("inf")

READY_LAG_ENTRIES: Final = 256
"""Maximum lag of a ready follower behind its leader's commit index, entries: well under a second."""

SEQ_BITS: Final = 40
"""Bits of a sequence number that count the requests of one process. At 100,000 a second they last 127 days; after that
only the protection of `first_seq` is lost. The higher bits allow 2**22 membership changes.
"""

SYNCS: Final = 5
"""Number of recent syncs. The fastest counts as the disk's sync time, to ignore checkpoints and stalls."""

_LEADER: Final = Role.LEADER


def first_seq(me: str) -> int:
    """Return the first sequence number of a member. The successor at the same address has other numbers.

    A frame names its sender but not its addressee. A reply to a replaced member (a vote, or a removal notice) can reach
    the successor, which must not mistake it for a reply to its own request.
    """
    return incarnation_of(me) << SEQ_BITS


class Transitions(Protocol):
    """Changes of role and term by PySyncObj's setters (`stock`), which write term and vote to the journal."""

    def set_role(self, role: Role, leader: str | None) -> None: ...
    def set_term(self, term: int, voted_for: str | None) -> None: ...


class Outbox:
    """Messages to peers. Promises wait here for the sync that makes them true (H2)."""

    __slots__ = ("_held", "_links", "_queued")

    def __init__(self, links: Links) -> None:
        self._links = links
        self._held: list[tuple[str, AnyMessage]] = []
        self._queued = False
        """True if messages were passed to the links since their last flush."""

    def send(self, peer: str, message: AnyMessage) -> None:
        """Pass a message to the links, or hold it until `release` if it is a promise."""
        if isinstance(message, PROMISES):
            self._held.append((peer, message))
        else:
            self._links.send(peer, message)
            self._queued = True

    @property
    def holds(self) -> bool:
        """Return whether promises are waiting."""
        return bool(self._held)

    def release(self) -> None:
        """Send the promises. The caller has synced the journal since the last promise."""
        if not self._held:
            return
        held, self._held = self._held, []
        self._queued = True
        for peer, message in held:
            self._links.send(peer, message)

    def flush(self) -> None:
        """Make the links send queued messages."""
        if self._queued:
            self._queued = False
            self._links.flush()

    def drop(self) -> None:
        """Drop the promises before they are sent."""
        self._held.clear()


class SyncTimes:
    """Durations of recent syncs."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=SYNCS)

    def took(self, duration_s: float) -> None:
        """Record the duration of a sync."""
        self._last.append(duration_s)

    @property
    def least_s(self) -> float | None:
        """Shortest recent duration, seconds; None after fewer than SYNCS syncs."""
        return min(self._last) if len(self._last) == SYNCS else None


@dataclass(slots=True, kw_only=True, eq=False)
class RaftState:
    """State of one replica: figure 2 of the paper, extended by time, links and membership."""

    # ---- set at start ----

    me: str
    """ID of this member."""
    journal: JournalLike
    machine: Machine
    timing: Timing
    clock: Clock
    uniform: Uniform
    outbox: Outbox
    configurations: Configurations
    """Configurations from the last committed one on; updated with every append to and cut of the journal."""
    bootstrap: Configuration | None
    """Configuration that the first leader appends to a journal without one; None to append none."""
    receiver: SnapshotReceiver
    limiter: LogRateLimiter
    seals: Seals | None = None
    """Signs and verifies entries and votes; None in tests without signatures."""
    found_without: frozenset[str] = frozenset()
    """Founders the operator excludes while the cluster is not founded."""
    clock_off: Callable[[str], bool] = lambda member: False
    """True if a member's wall clock deviates from a majority's; such a member avoids leading."""
    transitions: Transitions = field(init=False)
    """The only writer of role, leader, term and vote."""
    on_members: Callable[[], None] = lambda: None
    """Called when the configuration in force changes, or when a configuration is applied."""

    # ---- persistent (figure 2): same as in the journal ----

    term: int = 0
    """Current term; never decreases."""
    voted_for: str | None = None
    """Vote in this term; changes at most once in a term, from None to a member."""

    # ---- volatile, in every role ----

    role: Role = Role.FOLLOWER
    leader: str | None = None
    """Leader of this term, if known. Equals `me` if and only if this replica leads."""
    commit_index: int = 0
    """At most `checked_index` on a follower; never decreases. Entries up to here are never cut."""
    applied_index: int = 0
    """At most `commit_index`; equals the journal's, except while an entry is applied."""
    checked_index: int = 0
    """Entries up to here equal those in the journal of this term's leader (H25)."""
    durable_index: int = 0
    """Entries up to here are synced: the leader's own copy, counted for commits."""
    connected: set[str] = field(default_factory=set)
    """Peers with an established link."""
    progress: dict[str, Progress] = field(default_factory=dict)
    """Other members in force, voters and learners, in the order of their IDs (H24)."""
    seq: int = 0
    """Sequence number of this process's last request; unique."""
    stopped: bool = False
    """Set permanently after an exception in a rule: no promise or message follows (H23)."""
    stirred: bool = False
    """True if a message or proposal arrived since the last tick, so that a tick may have work."""

    # ---- elections ----

    election_timeout_s: float = 0.0
    """Tolerated silence, drawn anew for each leader and each attempt (5.2)."""
    election_deadline_s: float = 0.0
    """Time at which a follower or candidate campaigns; messages of a leader postpone it."""
    leader_heard_s: float = -NEVER
    """Time of this term's leader's last message; -NEVER if there was none, or its link broke."""
    led_s: float = 0.0
    """Time at which this replica last led or heard a leader of any term; its start if it never did."""
    grace_given: bool = False
    """True if a deadline that was noticed late has had its grace period; reset by a leader or a majority."""
    grace_until_s: float = -NEVER
    """End of the grace period, in which silence does not count as failure."""
    votes: set[str] = field(default_factory=set)
    """Voters that granted the vote; a set, so that duplicates count once."""
    vote_signatures: dict[str, bytes] = field(default_factory=dict)
    """Signatures of these votes, by voter; the first entry of the leadership contains them."""
    keys: dict[str, bytes] = field(default_factory=dict)
    """Public keys sent by members, by ID, for a configuration that lacks them."""
    distrusted: set[str] = field(default_factory=set)
    """Members that, as leaders, sent an entry that no leader accepted. They get no votes and no followers."""
    pre_vote: bool = False
    """True if the candidate is still in its pre-vote (thesis 9.6)."""
    founding_said_s: float = 0.0
    """Time of the last log message about missing votes for the founding, or of the start."""
    campaign_seq: int = 0
    """Sequence number of the newest campaign; replies to earlier ones do not count."""

    # ---- follower ----

    leader_ready: bool = False
    """True if the leader has applied its own first entry."""
    leader_commit: int = 0
    """Highest commit index that this term's leader has named; may exceed `checked_index`."""

    asked_reads: dict[int, ReadWaiter] = field(default_factory=dict)
    """Reads waiting for an index from the leader, by sequence number of the request."""

    # ---- leader: reset with every leadership ----

    no_op_index: int = 0
    """Index of the first entry of this leadership; proposals and reads wait until it is applied."""
    heartbeat_due_s: float = NEVER
    """Time of the next heartbeat to every connected peer; NEVER unless leading."""
    notice_due_s: float = NEVER
    """Time at which the commit index is sent to followers that have not received it."""
    reads: ReadRounds = field(default_factory=ReadRounds)
    """Reads waiting for a round of heartbeats; empty unless leading."""
    senders: dict[str, SnapshotSender] = field(default_factory=dict)
    """Snapshots being sent, by peer; empty unless leading."""
    snapshot_after_s: dict[str, float] = field(default_factory=dict)
    """Time at which a snapshot is offered again after a failed transfer, by peer."""
    transfer_target: str | None = None
    """Target of the leadership transfer, or None. During a transfer no proposals are accepted."""
    transfer_sent: bool = False
    """True if the target was asked to campaign."""
    transfer_deadline_s: float = NEVER
    """Time at which the transfer is abandoned; NEVER without one."""

    # ---- syncs ----

    sync_due_s: float = NEVER
    sync_owed_s: float = NEVER
    """Time of a leader's postponed sync, and the latest allowed time; NEVER if no sync is postponed."""
    unsynced_bytes: int = 0
    """Size of proposals since the last sync."""
    sync_times: SyncTimes = field(default_factory=SyncTimes)
    """Sync times of this replica's disk. A replica with a slow disk campaigns later."""
    _began_us: int = field(init=False)
    """Start of this process, microseconds."""
    hints_due_s: float = NEVER
    """Time at which the lazy marks are written; NEVER if they are written."""
    fail_stop: "FailStop" = field(init=False)
    """Context of every step: an exception sets `stopped` and drops pending promises."""

    def __post_init__(self) -> None:
        self.fail_stop = FailStop(self)
        self.seq = first_seq(self.me)
        self._began_us = int(self.clock.now())
        self.led_s = self.founding_said_s = self.clock.monotonic_s()

    # ---- derived ----

    @property
    def leads(self) -> bool:
        """Return whether this replica leads its term."""
        return self.role is _LEADER

    @property
    def configuration(self) -> Configuration:
        """Newest configuration in the journal, committed or not; it determines majorities."""
        return self.configurations.in_force

    @property
    def votes_here(self) -> bool:
        """Return whether this replica is a voter of the configuration in force."""
        return self.configuration.votes(self.me)

    @property
    def founds(self) -> bool:
        """Return whether no entry holds a configuration yet, and this replica is one of the cluster's founders."""
        return self.bootstrap is not None and self.configuration.version == 0 and self.bootstrap.votes(self.me)

    @property
    def is_new(self) -> bool:
        """Return whether this replica is a founder without data: it never ran, or lost its data."""
        return self.term == 0 and self.journal.last_index == 0 and self.founds

    @property
    def has_votes(self) -> bool:
        """Return whether enough voters granted the vote: a majority; to found a cluster, all of them.

        An empty journal does not prove that no entries were acknowledged. If two of three replicas lost their data, a
        majority of these two would found a second history beside the third replica's.
        """
        voters = self.configuration.voter_ids
        granted = self.votes.intersection(voters)
        if self.founds and granted.union(self.found_without) < set(voters):
            return False
        return len(granted) >= self.configuration.majority

    @property
    def has_begun(self) -> bool:
        """Return whether a leader has applied its own first entry."""
        return self.role is _LEADER and self.applied_index >= self.no_op_index

    @property
    def ready(self) -> bool:
        """Return whether a leader may accept proposals, or a follower is close behind such a leader."""
        if self.role is _LEADER:
            return self.has_begun and self.transfer_target is None
        behind = self.leader_commit - self.applied_index
        return self.leader is not None and self.leader_ready and behind <= READY_LAG_ENTRIES

    def reached(self, own: _Reached, of: Callable[[Progress], _Reached]) -> _Reached:
        """Return the highest value that a majority of the voters has reached, with `own` as this replica's."""
        configuration, progress, me = self.configuration, self.progress, self.me
        reached = [own if one.id == me else of(progress[one.id]) for one in configuration.voters]
        reached.sort(reverse=True)
        return reached[configuration.majority - 1]

    def answers(self, peer: str) -> bool:
        """Return whether a peer answered this leader within the shortest election timeout."""
        known = self.progress[peer]
        silent_s = self.clock.monotonic_s() - known.answered_s
        return peer in self.connected and known.acked_seq > 0 and silent_s < self.timing.election_min_s

    def require_running(self) -> None:
        """Check that the replica has not stopped.

        Raises:
            RuntimeError: The replica has stopped.
        """
        if self.stopped:
            raise RuntimeError("this engine has stopped; create a new one on the journal")

    def require_ready(self) -> None:
        """Check that this replica leads, has applied its own first entry, and is not transferring its leadership.

        Raises:
            NotLeader: One of these does not hold.
        """
        self.require_running()
        if not self.leads:
            raise NotLeader(self.leader)
        target = self.transfer_target
        if target is not None:
            raise NotLeader(target, sentence=f"this replica is transferring leadership to {name_of(target)}")
        if not self.has_begun:
            raise NotLeader(self.me, sentence="this replica leads, but has not applied its own first entry yet")

    # ---- steps ----

    def next_seq(self) -> int:
        """Return the sequence number of the next request."""
        self.seq += 1
        return self.seq

    def next_question(self) -> int:
        """Return the sequence number of a read request, which no earlier process of this member has used.

        A late reply to a request from before a restart names an outdated index, and must not match. Each process
        therefore begins at its start time in microseconds, and makes less than one request a microsecond.
        """
        counted = self.next_seq() + self._began_us
        return first_seq(self.me) | counted & (1 << SEQ_BITS) - 1

    def touch_hints(self) -> None:
        """Schedule the lazy write of the marks."""
        self.hints_due_s = self.clock.monotonic_s() + self.timing.idle_flush_s

    def end_transfer(self) -> None:
        """End the leadership transfer, if one is under way."""
        self.transfer_target, self.transfer_sent, self.transfer_deadline_s = None, False, NEVER

    def end_sending(self, peer: str) -> None:
        """End the snapshot transfer to `peer`, if one is under way."""
        sender = self.senders.pop(peer, None)
        if sender is not None:
            sender.close()

    def end_leadership(self) -> None:
        """Reset the leader's state, and call waiting readers with None."""
        self.end_transfer()
        self.heartbeat_due_s = self.notice_due_s = NEVER
        for peer in list(self.senders):
            self.end_sending(peer)
        self.reads.abandon()


class FailStop:
    """Context in which an exception stops the replica: a plain class, because each frame and tick enters it."""

    __slots__ = ("_raft",)

    def __init__(self, raft: RaftState) -> None:
        self._raft: Final = raft

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is not None:
            self._raft.stopped = True
            self._raft.outbox.drop()
