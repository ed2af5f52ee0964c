"""State of one replica in Raft: one record, each field with its invariant, and the steps that several rules share.

Modules of rules are functions of this record; none keeps a state of its own. Section numbers in them are those of the
extended Raft paper (Ongaro and Ousterhout, 2014) and, with "thesis", of Ongaro's dissertation.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeVar

from cluster.consensus.configurations import Configurations
from cluster.consensus.frames import PROMISES, AnyMessage
from cluster.consensus.interface import JournalLike, Links, Machine, NotLeader, Role, Timing, Uniform
from cluster.consensus.progress import Progress
from cluster.consensus.read_index import ReadRounds, ReadWaiter
from cluster.consensus.seals import Seals
from cluster.consensus.snapshots import SnapshotReceiver, SnapshotSender
from cluster.system import Clock, LogRateLimiter
from wal import Configuration, incarnation_of, name_of

_Reached = TypeVar("_Reached", int, float)

NEVER: Final = float("inf")

READY_LAG_ENTRIES: Final = 256
"""Entries that a follower may be behind its leader's commit index and still call itself ready: well under a second."""

SEQ_BITS: Final = 40
"""Bits of a request's number that count requests of one process: at 100,000 a second they last 127 days, after which
only the protection below is gone. Above them is room for 2**22 changes of the members."""

SYNCS: Final = 5
"""Syncs of which the quickest says how long this disk takes for one, count: a checkpoint or a stall among them is no
slow disk."""

_LEADER: Final = Role.LEADER


def first_seq(me: str) -> int:
    """Return where a member's request numbers begin: its successor at the same address has others.

    A frame says who speaks, not to whom. One that was meant for a member that was replaced can reach the new one,
    which must not take an answer to its predecessor for its own (a vote, or the notice that it was removed).
    """
    return incarnation_of(me) << SEQ_BITS


class Transitions(Protocol):
    """Changes of role and term: PySyncObj's own, behind `stock`, which write term and vote to the journal."""

    def set_role(self, role: Role, leader: str | None) -> None: ...
    def set_term(self, term: int, voted_for: str | None) -> None: ...


class Outbox:
    """Messages to peers, with the durability gate: promises wait here for the sync that makes them true (H2)."""

    __slots__ = ("_held", "_links", "_queued")

    def __init__(self, links: Links) -> None:
        self._links = links
        self._held: list[tuple[str, AnyMessage]] = []
        self._queued = False
        """Whether the links were given something since they were last flushed."""

    def send(self, peer: str, message: AnyMessage) -> None:
        """Hand a message to the links; keep it until `release` if somebody counts on it."""
        if isinstance(message, PROMISES):
            self._held.append((peer, message))
        else:
            self._links.send(peer, message)
            self._queued = True

    @property
    def holds(self) -> bool:
        """Whether promises wait."""
        return bool(self._held)

    def release(self) -> None:
        """Let the promises go: the journal was synced after the last of them was made."""
        if not self._held:
            return
        held, self._held = self._held, []
        self._queued = True
        for peer, message in held:
            self._links.send(peer, message)

    def flush(self) -> None:
        """Let the links send what they were given."""
        if self._queued:
            self._queued = False
            self._links.flush()

    def drop(self) -> None:
        """Drop the promises: they were never made."""
        self._held.clear()


class SyncTimes:
    """How long the disk took for the last few syncs."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=SYNCS)

    def took(self, duration_s: float) -> None:
        """Note how long a sync took."""
        self._last.append(duration_s)

    @property
    def least_s(self) -> float | None:
        """The quickest of them, seconds; None before there were as many."""
        return min(self._last) if len(self._last) == SYNCS else None


@dataclass(slots=True, kw_only=True, eq=False)
class RaftState:
    """State of one replica: what the paper's figure 2 lists, and what time, links and membership add to it."""

    # ---- given at the start ----

    me: str
    """Id of this member."""
    journal: JournalLike
    machine: Machine
    timing: Timing
    clock: Clock
    uniform: Uniform
    outbox: Outbox
    configurations: Configurations
    """Configurations that are committed last or may be undone; follows every append to and cut of the journal."""
    bootstrap: Configuration | None
    """What the first leader of a journal without a configuration appends; None where there is to be none."""
    receiver: SnapshotReceiver
    limiter: LogRateLimiter
    seals: Seals | None = None
    """What entries and votes are signed and verified with; None in tests that do without."""
    found_without: frozenset[str] = frozenset()
    """Founders whose word the operator does without while the cluster is not founded."""
    clock_off: Callable[[str], bool] = lambda member: False
    """Whether the wall clock of a member is off from a majority's: it leaves leading to others."""
    transitions: Transitions = field(init=False)
    """The only writer of role, leader, term and vote."""
    on_members: Callable[[], None] = lambda: None
    """Called when another configuration is in force, or applied."""

    # ---- persistent (figure 2): as in the journal, and in every message that leaves ----

    term: int = 0
    """Only ever grows."""
    voted_for: str | None = None
    """Changes from None to a member once in a term, and never otherwise."""

    # ---- volatile, of every role ----

    role: Role = Role.FOLLOWER
    leader: str | None = None
    """Leader of this term, as far as is known: at most one in a term, this replica if and only if it leads."""
    commit_index: int = 0
    """At most `checked_index` on a follower; never falls, and nothing up to it is cut or contradicted."""
    applied_index: int = 0
    """At most `commit_index`; as in the journal, except while an entry is applied."""
    checked_index: int = 0
    """Everything up to here is also in the journal of the leader of this term (H25)."""
    durable_index: int = 0
    """Everything up to here is synced, at most `journal.last_index`: what a leader may count of its own."""
    connected: set[str] = field(default_factory=set)
    """Peers to whom a link is up."""
    progress: dict[str, Progress] = field(default_factory=dict)
    """The other members in force, voters and learners, in the order of their ids (H24)."""
    seq: int = 0
    """Number of the last request of this process; no two have the same."""
    stopped: bool = False
    """True for good once an exception came out of a rule: nothing is promised or taken after it (H23)."""
    stirred: bool = False
    """Whether a message or a proposal came since the last tick, after which a tick may have something to do."""

    # ---- elections ----

    election_timeout_s: float = 0.0
    """Tolerated silence, drawn anew for each leader and each attempt (5.2)."""
    election_deadline_s: float = 0.0
    """When a follower or candidate stands; only moves later while a leader is heard."""
    leader_heard_s: float = -NEVER
    """When the leader of this term was last heard; -NEVER if it was not, or its link broke."""
    led_s: float = 0.0
    """When this replica last led or heard a leader, of whatever term; when it started, if it never did."""
    grace_given: bool = False
    """Whether a deadline that was seen late has had its grace, until a leader or a majority is heard again."""
    grace_until_s: float = -NEVER
    """Until when a silence is not believed; in the past where no grace runs."""
    votes: set[str] = field(default_factory=set)
    """Who granted the vote that is asked for: a set, so that a vote delivered twice counts once."""
    vote_signatures: dict[str, bytes] = field(default_factory=dict)
    """The signatures of those votes, by voter; the first entry of the leadership shows them."""
    keys: dict[str, bytes] = field(default_factory=dict)
    """Public keys that members have told, by ID: for a configuration that does not have them yet."""
    distrusted: set[str] = field(default_factory=set)
    """Members that sent, as leaders, an entry that no leader had accepted: neither followed nor voted for."""
    pre_vote: bool = False
    """Whether a candidate only asks whether it could win (thesis 9.6)."""
    founding_said_s: float = 0.0
    """When it was said last whose word the cluster waits for to be founded, or when this replica started."""
    campaign_seq: int = 0
    """Request of the newest campaign; answers to earlier ones do not count."""

    # ---- of a follower ----

    leader_ready: bool = False
    """Whether the leader has applied its own first entry."""
    leader_commit: int = 0
    """Highest commit index that a leader of this term has named; may be above `checked_index`."""

    asked_reads: dict[int, ReadWaiter] = field(default_factory=dict)
    """Reads whose index a leader was asked for, by the number of the question."""

    # ---- of a leader: nothing of an earlier leadership counts ----

    no_op_index: int = 0
    """Index of the first entry of this leadership; proposals and reads wait until it is applied."""
    heartbeat_due_s: float = NEVER
    """When every connected peer gets a message, with entries or without; NEVER on whoever does not lead."""
    notice_due_s: float = NEVER
    """When followers to whom nothing else was sent since get a newer commit index."""
    reads: ReadRounds = field(default_factory=ReadRounds)
    """Reads that wait for a round of heartbeats; empty on whoever does not lead."""
    senders: dict[str, SnapshotSender] = field(default_factory=dict)
    """Snapshots on their way, by peer; empty on whoever does not lead."""
    snapshot_after_s: dict[str, float] = field(default_factory=dict)
    """When a peer whose transfer failed is offered a snapshot again, by peer."""
    transfer_target: str | None = None
    """Voter that is to lead next; None when no transfer is under way. While there is one, nothing new is proposed."""
    transfer_sent: bool = False
    """Whether the target was asked to stand."""
    transfer_deadline_s: float = NEVER
    """When the transfer is given up; NEVER when none is under way."""

    # ---- syncs ----

    sync_due_s: float = NEVER
    sync_owed_s: float = NEVER
    """When a leader that put off its own sync does it, and by when at the latest; NEVER when it owes none."""
    unsynced_bytes: int = 0
    """Bytes proposed here since the last sync."""
    sync_times: SyncTimes = field(default_factory=SyncTimes)
    """What this replica's disk takes: who is slow to vote for itself stands later than others."""
    _began_us: int = field(init=False)
    """When this process began."""
    hints_due_s: float = NEVER
    """When the lazily written marks go to disk; NEVER when there are none."""
    fail_stop: "FailStop" = field(init=False)
    """Context of every step: an exception out of it sets `stopped` and drops what was to be promised."""

    def __post_init__(self) -> None:
        self.fail_stop = FailStop(self)
        self.seq = first_seq(self.me)
        self._began_us = int(self.clock.now())
        self.led_s = self.founding_said_s = self.clock.monotonic_s()

    # ---- derived ----

    @property
    def leads(self) -> bool:
        """Whether this replica leads its term."""
        return self.role is _LEADER

    @property
    def configuration(self) -> Configuration:
        """The configuration by which this replica counts: the newest in its journal, committed or not."""
        return self.configurations.in_force

    @property
    def votes_here(self) -> bool:
        """Whether this replica is a voter of the configuration in force."""
        return self.configuration.votes(self.me)

    @property
    def founds(self) -> bool:
        """Whether no entry says yet who is a member, and this replica is one of those who are to found the cluster."""
        return self.bootstrap is not None and self.configuration.version == 0 and self.bootstrap.votes(self.me)

    @property
    def is_new(self) -> bool:
        """Whether this replica is a founder that has promised nothing yet, as one that never ran, or lost its data."""
        return self.term == 0 and self.journal.last_index == 0 and self.founds

    @property
    def has_votes(self) -> bool:
        """Whether enough voters have granted what was asked: a majority; of a cluster to be founded, everybody.

        An empty journal says nothing of what was acknowledged before it was lost. Two of three that lost theirs are a
        majority, and would found a second history beside the one that the third has.
        """
        voters = self.configuration.voter_ids
        granted = self.votes.intersection(voters)
        if self.founds and granted.union(self.found_without) < set(voters):
            return False
        return len(granted) >= self.configuration.majority

    @property
    def has_begun(self) -> bool:
        """Whether a leader has applied its own first entry."""
        return self.role is _LEADER and self.applied_index >= self.no_op_index

    @property
    def ready(self) -> bool:
        """Whether a leader may take proposals; whether a follower is close behind a leader that has begun."""
        if self.role is _LEADER:
            return self.has_begun and self.transfer_target is None
        behind = self.leader_commit - self.applied_index
        return self.leader is not None and self.leader_ready and behind <= READY_LAG_ENTRIES

    def reached(self, own: _Reached, of: Callable[[Progress], _Reached]) -> _Reached:
        """Return the most that a majority of the voters has reached, where this replica stands at `own`."""
        configuration, progress, me = self.configuration, self.progress, self.me
        reached = [own if one.id == me else of(progress[one.id]) for one in configuration.voters]
        reached.sort(reverse=True)
        return reached[configuration.majority - 1]

    def answers(self, peer: str) -> bool:
        """Whether a peer answered this leader within the shortest election timeout."""
        known = self.progress[peer]
        silent_s = self.clock.monotonic_s() - known.answered_s
        return peer in self.connected and known.acked_seq > 0 and silent_s < self.timing.election_min_s

    def require_running(self) -> None:
        """Raise RuntimeError once the replica has stopped."""
        if self.stopped:
            raise RuntimeError("this engine has stopped; make a new one over the journal")

    def require_ready(self) -> None:
        """Raise NotLeader unless this replica leads, has begun, and hands its leadership to nobody."""
        self.require_running()
        if not self.leads:
            raise NotLeader(self.leader)
        target = self.transfer_target
        if target is not None:
            raise NotLeader(target, sentence=f"this replica hands the leadership over to {name_of(target)}")
        if not self.has_begun:
            raise NotLeader(self.me, sentence="this replica leads, but has not applied its own first entry yet")

    # ---- steps ----

    def next_seq(self) -> int:
        """Return the number of a new request."""
        self.seq += 1
        return self.seq

    def next_question(self) -> int:
        """Return the number of a question about reads, which no process of this member had before.

        Each process begins at another place: it takes less than one number a microsecond. The answer to a question that
        was asked before a restart, should it come at all, tells of an index that was known then, and is stale.
        """
        counted = self.next_seq() + self._began_us
        return first_seq(self.me) | counted & (1 << SEQ_BITS) - 1

    def touch_hints(self) -> None:
        """The journal has marks to write, some quiet time from now."""
        self.hints_due_s = self.clock.monotonic_s() + self.timing.idle_flush_s

    def end_transfer(self) -> None:
        """End the transfer of leadership, if one is under way."""
        self.transfer_target, self.transfer_sent, self.transfer_deadline_s = None, False, NEVER

    def end_sending(self, peer: str) -> None:
        """End the snapshot that is being sent to `peer`, if there is one."""
        sender = self.senders.pop(peer, None)
        if sender is not None:
            sender.close()

    def end_leadership(self) -> None:
        """Let go of what only a leader has; readers who wait learn that leadership is lost."""
        self.end_transfer()
        self.heartbeat_due_s = self.notice_due_s = NEVER
        for peer in list(self.senders):
            self.end_sending(peer)
        self.reads.abandon()


class FailStop:
    """Context out of which an exception stops the replica: a plain class, since each frame and each tick enters it."""

    __slots__ = ("_raft",)

    def __init__(self, raft: RaftState) -> None:
        self._raft: Final = raft

    def __enter__(self) -> None:
        """Nothing yet."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is not None:
            self._raft.stopped = True
            self._raft.outbox.drop()
