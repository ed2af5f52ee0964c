"""Simulation of a whole cluster in one thread from one seed, with Raft's promises checked at every step.

The clock is virtual. Links keep order, and lose messages in flight when they break. Disks forget unsynced data.
"""

import hashlib
import heapq
import itertools
import random
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from forebay.cluster.consensus.configurations import MemberChange
from forebay.cluster.consensus.engine import Engine
from forebay.cluster.consensus.frames import (
    PROMISES,
    AnyMessage,
    AppendReply,
    AppendRequest,
    SnapshotReply,
    decode_body,
    encode_frame,
)
from forebay.cluster.consensus.interface import ChangeRefused, NotLeader, RemovedFromCluster, Role, SnapshotRef, Timing
from forebay.cluster.consensus.seals import Seals
from forebay.cluster.consensus.state import RaftState
from forebay.wal.codec import NO_OP
from forebay.wal.configuration import (
    ChangeKind,
    Configuration,
    ConfigurationAt,
    Member,
    decode_configuration,
    initial,
    is_configuration,
    unknown,
)
from forebay.wal.journal import Entry
from tests.cluster.consensus.marks import broken_marks, votes_missing
from tests.cluster.consensus.memory_journal import Disk, MemoryJournal

CLUSTER = "6f1c0000000000000000000000000000"
TIMING = Timing()


def key_of(name: str) -> Ed25519PrivateKey:
    """Return the signing key of the member with this ID."""
    return Ed25519PrivateKey.from_private_bytes(hashlib.sha256(name.encode()).digest())


class Violation(AssertionError):
    """A promise of Raft was broken."""


class SimClock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def now(self) -> int:
        return round(self.now_s * 1_000_000)

    def monotonic_s(self) -> float:
        return self.now_s


class Replica:
    """One replica: a machine that keeps applied entries, a disk, and an engine while it runs."""

    def __init__(self, sim: "Simulation", name: str, bootstrap: Configuration | None) -> None:
        self.sim = sim
        self.name = name
        self.bootstrap = bootstrap
        self.removed: RemovedFromCluster | None = None
        self.disk = self.first_disk = Disk()
        self.seen_commit = 0
        self.history: list[tuple[int, int, bytes]] = []
        """All applied entries, from index 1 on; a snapshot contains all of them."""
        self.snapshots: list[tuple[SnapshotRef, list[tuple[int, int, bytes]]]] = []
        self.installs = 0
        self.engine: Engine | None = None
        self.journal = MemoryJournal(self.disk)
        self.wake_s = float("inf")
        self.proposed: dict[tuple[int, int], bytes] = {}
        self.refuse_install: Exception | None = None
        self.verify_s = 0.0
        """Duration of the verification of a received snapshot, seconds."""
        self.at_apply: Callable[[int, int, bytes], None] = lambda index, term, data: None

    # Machine

    def apply(self, index: int, term: int, data: bytes) -> None:
        self.at_apply(index, term, data)
        self.sim.check_applied(self, index, term, data)
        self.journal.record_applied(Entry(index, term, data), index)
        self.history.append((index, term, data))
        if self.proposed.pop((index, term), None) == data:
            self.sim.acknowledged.add(data)

    def newest_snapshot(self) -> SnapshotRef | None:
        return self.snapshots[-1][0] if self.snapshots else None

    def snapshot_refused(self, index: int) -> None:
        pass

    def begin_install(self, index: int, term: int) -> "Sink":
        return Sink(self, index, term)

    # Life cycle

    def start(self) -> None:
        assert self.engine is None
        self.journal = MemoryJournal(self.disk)
        # The controller rebuilds its state from snapshot and ledger up to the applied mark.
        del self.history[self.journal.applied_index :]
        self.proposed.clear()
        self.seen_commit = 0
        try:
            self.engine = self._engine()
        except RemovedFromCluster as error:
            self.removed = error
            return
        self.wake_s = float("inf")
        self.sim.schedule_tick(self)

    def placed(self) -> ConfigurationAt | None:
        """Return the membership in the history."""
        return last_configuration(self.history)

    def _engine(self) -> Engine:
        return Engine(
            me=self.name,
            peers=self.sim.names,
            bootstrap=self.bootstrap,
            configuration=self.placed(),
            journal=self.journal,
            machine=self,
            timing=self.sim.timing,
            clock=self.sim.clock,
            uniform=self.sim.random.uniform,
            links=SimLinks(self.sim, self.name),
            seals=Seals(CLUSTER, self.name, key_of(self.name)),
            on_due=lambda: self.sim.schedule_tick(self),
        )

    def crash(self) -> None:
        """Stop at once; unsynced data is lost."""
        assert self.engine is not None
        self.engine = None
        for peer in self.sim.names:
            if peer != self.name:
                self.sim.break_link(self.name, peer)
                self.sim.break_link(peer, self.name)

    def take_snapshot(self, keep: int = 0, *, compact: bool = True) -> None:
        """Finalize a snapshot of the applied entries, and compact the journal to `keep` entries before it."""
        index = len(self.history)
        if index == 0 or (self.snapshots and self.snapshots[-1][0].index >= index):
            return
        data = msgspec.msgpack.encode(self.history)
        path = self.sim.directory / f"{self.name}-{index}-{len(self.snapshots)}"
        path.write_bytes(data)
        self.snapshots.append((SnapshotRef(path, index, self.history[-1][1], len(data)), list(self.history)))
        if compact and self.engine is not None and index - keep > 0:
            self.journal.compact_to(self.engine.compactable_to(index - keep))

    def change(self, action: ChangeKind, name: str) -> bool:
        """Change the membership as leader; return False if the change is rejected now."""
        assert self.engine is not None
        try:
            self.engine.change(MemberChange(action=action, name=name))
        except (NotLeader, ChangeRefused):
            return False
        return True

    def propose(self, data: bytes) -> bool:
        assert self.engine is not None
        try:
            place = self.engine.propose(data)
        except NotLeader:
            return False
        self.proposed[place] = data
        return True


class Sink:
    def __init__(self, replica: Replica, index: int, term: int) -> None:
        self._replica, self._index, self._term = replica, index, term
        self._data = bytearray()
        self.aborted = False

    @property
    def received_bytes(self) -> int:
        return len(self._data)

    def verify(self, done: Callable[[], None]) -> None:
        self._replica.sim.at(self._replica.verify_s, done)

    def write(self, offset: int, data: bytes) -> None:
        assert offset == len(self._data)
        self._data += data

    def finish(self) -> ConfigurationAt | None:
        replica = self._replica
        if replica.refuse_install is not None:
            raise replica.refuse_install
        history = msgspec.msgpack.decode(bytes(self._data), type=list[tuple[int, int, bytes]])
        assert history[-1][:2] == (self._index, self._term)
        replica.journal.reset_to(self._index, self._term, b"\0" * 32, self._index)
        replica.sim.check_installed(history)
        replica.history = history
        replica.installs += 1
        replica.take_snapshot(compact=False)  # a received snapshot is finalized too, and can be sent to others
        return replica.placed()

    def abort(self) -> None:
        self.aborted = True

    def suspend(self) -> None:
        self.aborted = True


class SimLinks:
    def __init__(self, sim: "Simulation", me: str) -> None:
        self._sim, self._me = sim, me

    def send(self, peer: str, message: AnyMessage) -> None:
        self._sim.send(self._me, peer, message)

    def flush(self) -> None:
        pass


class Simulation:
    """Simulated cluster. All randomness comes from one seed; `faults` are probabilities per event or second."""

    def __init__(
        self,
        seed: int,
        *,
        replicas: int = 3,
        timing: Timing = TIMING,
        latency_s: float = 0.002,
        membership: bool = False,
    ) -> None:
        """With `membership`, the first leader writes the founders to the journal, and members may change."""
        self.random = random.Random(seed)
        self.clock = SimClock()
        self.timing = timing
        self.latency_s = latency_s
        self.duplicates = 0.0
        self.losses = 0.0
        self.names = [f"r{number}" for number in range(1, replicas + 1)]
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._up: dict[tuple[str, str], int | None] = {}
        self._epochs = itertools.count(1)
        self._busy_until: dict[tuple[str, str], float] = {}
        self.cut: set[tuple[str, str]] = set()
        """Directed pairs without a link, which cannot connect until removed from this set."""
        self.black: set[tuple[str, str]] = set()
        """Directed pairs whose link stays up but delivers nothing."""
        self.filter: Callable[[str, str, AnyMessage], bool] = lambda sender, receiver, message: True
        self.sent: list[tuple[str, str, AnyMessage]] | None = None
        self.leaders: dict[int, str] = {}
        self.applied: dict[int, tuple[int, bytes]] = {}
        self.acknowledged: set[bytes] = set()
        self.committed: dict[int, int] = {}
        """Index -> term of each committed entry."""
        self.committed_by: dict[int, int] = {}
        """Term -> last entry that this term's leader was the first to commit."""
        self.answered: dict[tuple[str, int, str], int] = {}
        """Leader, term and peer -> newest request of that leadership that the peer has answered."""
        self.reads = 0
        self.slow: dict[str, float] = {}
        self.batches_s = 0.0
        """Time for which a replica may collect messages before it ticks, seconds."""
        self._directory = tempfile.TemporaryDirectory(prefix="forebay-sim-")
        self.directory = Path(self._directory.name)
        self.membership = membership
        bootstrap = initial(tuple(map(Member, self.names))) if membership else None
        self.replicas = {name: Replica(self, name, bootstrap) for name in self.names}
        for replica in self.replicas.values():
            replica.start()
        self.connect_all()

    def join(self, name: str) -> Replica:
        """Start a joining replica without known members, under the ID that the cluster added."""
        self.names.append(name)
        self.replicas[name] = replica = Replica(self, name, unknown())
        replica.start()
        self.connect_all()
        return replica

    def close(self) -> None:
        self._directory.cleanup()

    def __enter__(self) -> "Simulation":
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    # Time

    def at(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.clock.now_s + delay_s, next(self._count), action))

    def run(self, duration_s: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Run for `duration_s`, or until `until()` is true; return whether it became true."""
        end_s = self.clock.now_s + duration_s
        while self._events and self._events[0][0] <= end_s:
            if until():
                return True
            at_s, _, action = heapq.heappop(self._events)
            self.clock.now_s = max(self.clock.now_s, at_s)
            action()
        if not until():
            self.clock.now_s = end_s
            return until()
        return True

    def schedule_tick(self, replica: Replica) -> None:
        """Schedule the next due tick of the engine, with one event under way at a time."""
        engine = replica.engine
        if engine is None:
            return
        wake_s = max(self.clock.now_s, engine.next_due_s() + 1e-6)
        if replica.wake_s <= wake_s:
            return
        replica.wake_s = wake_s

        def tick() -> None:
            if replica.engine is engine and replica.wake_s == wake_s:
                replica.wake_s = float("inf")
                if self.clock.now_s >= engine.next_due_s():
                    self.tick(replica)
                else:
                    self.schedule_tick(replica)

        self.at(wake_s - self.clock.now_s, tick)

    def tick(self, replica: Replica) -> None:
        engine = replica.engine
        if engine is None:
            return
        for _ in range(100):
            if not self._alive(replica, engine.tick):
                return
            self.check(replica)
            if engine.next_due_s() > self.clock.now_s:
                break
        else:
            raise Violation("a replica ticks without end")
        self.schedule_tick(replica)

    # Links

    def connect_all(self) -> None:
        for pair in itertools.permutations(self.names, 2):
            self.connect(*pair)

    def connect(self, sender: str, receiver: str) -> None:
        alive = self.replicas[sender].engine is not None and self.replicas[receiver].engine is not None
        if self._up.get((sender, receiver)) is None and alive and (sender, receiver) not in self.cut:
            self._up[sender, receiver] = next(self._epochs)
            engine = self.replicas[sender].engine
            assert engine is not None
            engine.connected(receiver)
            self.schedule_tick(self.replicas[sender])

    def break_link(self, sender: str, receiver: str) -> None:
        if self._up.get((sender, receiver)) is None:
            return
        self._up[sender, receiver] = None
        for end, tell in ((sender, "disconnected"), (receiver, "lost_sight")):
            engine = self.replicas[end].engine
            if engine is not None:
                getattr(engine, tell)(receiver if end == sender else sender)
                self.schedule_tick(self.replicas[end])

    def isolate(self, name: str) -> None:
        """Break every link of a replica, and prevent reconnections."""
        for peer in self.names:
            if peer != name:
                self.cut |= {(name, peer), (peer, name)}
                self.break_link(name, peer)
                self.break_link(peer, name)

    def heal(self) -> None:
        self.cut.clear()
        self.black.clear()
        self.connect_all()

    def send(self, sender: str, receiver: str, message: AnyMessage) -> None:
        if isinstance(message, PROMISES) and self.replicas[sender].journal.dirty:
            raise Violation(f"{sender} promises {message} before it is durable")
        if isinstance(message, AppendReply | SnapshotReply):
            place = (receiver, message.term, sender)
            self.answered[place] = max(self.answered.get(place, 0), message.seq)
        if self.sent is not None:
            self.sent.append((sender, receiver, message))
        epoch = self._up.get((sender, receiver))
        if epoch is None or (sender, receiver) in self.black or not self.filter(sender, receiver, message):
            return
        if self.losses and self.random.random() < self.losses:
            return
        frame = encode_frame(CLUSTER, sender, message)
        delay_s = self.latency_s * self.random.uniform(0.5, 2.0) + self.slow.get(receiver, 0.0)
        arrives_s = max(self.clock.now_s + delay_s, self._busy_until.get((sender, receiver), 0.0))
        self._busy_until[sender, receiver] = arrives_s

        def deliver() -> None:
            if self._up.get((sender, receiver)) == epoch and (sender, receiver) not in self.black:
                self.deliver(sender, receiver, decode_body(CLUSTER, frame[4:]).message)

        self.at(arrives_s - self.clock.now_s, deliver)
        if self.duplicates and self.random.random() < self.duplicates:
            self.at(arrives_s - self.clock.now_s + self.random.uniform(0.0, 0.5), deliver)

    def deliver(self, sender: str, receiver: str, message: AnyMessage) -> None:
        replica = self.replicas[receiver]
        engine = replica.engine
        if engine is None or not self._alive(replica, lambda: engine.receive(sender, message)):
            return
        if engine.next_due_s() <= self.clock.now_s:
            if self.batches_s and self.random.random() < 0.5:  # messages that arrive meanwhile precede the tick
                self.check(replica)
                self.at(self.random.uniform(0.0, self.batches_s), lambda: self._tick_if(replica, engine))
            else:
                self.tick(replica)
        else:  # like the driver: tick only if a message needs it
            self.check(replica)
            self.schedule_tick(replica)

    def _tick_if(self, replica: Replica, engine: Engine) -> None:
        if replica.engine is engine:
            self.tick(replica)

    def _alive(self, replica: Replica, step: Callable[[], None]) -> bool:
        """Run a step of a replica; return False if the replica stopped because it was removed."""
        try:
            step()
        except RemovedFromCluster as error:
            if self.membership:
                replica.removed = error
                replica.crash()
                return False
            raise
        return True

    # Queries

    def leader(self) -> Replica | None:
        """Return the ready leader of the highest term."""
        ready = [
            (replica.engine.term, replica.name)
            for replica in self.replicas.values()
            if replica.engine is not None and replica.engine.role is Role.LEADER and replica.engine.ready
        ]
        return self.replicas[max(ready)[1]] if ready else None

    def elect(self) -> Replica:
        assert self.run(10.0, until=lambda: self.leader() is not None), "no leader within 10 s"
        leader = self.leader()
        assert leader is not None
        return leader

    def members(self, leader: Replica) -> list[Replica]:
        """Return all members in a leader's configuration, including itself."""
        assert leader.engine is not None
        return [self.replicas[member.id] for member in leader.engine.configuration.members()]

    def knows_a_member(self, replica: Replica, leader: Replica) -> bool:
        """Return whether a replica knows a member that could notify it of its removal."""
        if replica.engine is None:
            return False
        known = {member.id for member in replica.engine.configuration.voters}
        return any(member.name in known for member in self.members(leader))

    def others(self, replica: Replica) -> list[Replica]:
        return [other for other in self.replicas.values() if other is not replica]

    def engine(self, name: str) -> Engine:
        engine = self.replicas[name].engine
        assert engine is not None
        return engine

    def commit(self, data: bytes) -> Replica:
        """Propose at the leader and run until the entry is acknowledged; return the leader."""
        leader = self.elect()
        assert leader.propose(data)
        self.tick(leader)
        assert self.run(5.0, until=lambda: data in self.acknowledged), f"{data!r} was not acknowledged"
        return leader

    def converge(self, within_s: float = 30.0) -> None:
        """Heal all faults, start all replicas, wait until all have applied the same, and check the promises."""
        self.heal()
        self.filter = lambda sender, receiver, message: True
        self.duplicates = self.losses = 0.0
        for replica in self.replicas.values():
            if replica.engine is None and replica.removed is None:
                replica.start()
        self.connect_all()

        def same() -> bool:
            leader = self.leader()
            if leader is None or leader.engine is None:
                return False
            applied = [r.engine.applied_index if r.engine else -1 for r in self.members(leader)]
            gone = [r for r in self.replicas.values() if r not in self.members(leader)]
            told = all(r.removed or not self.knows_a_member(r, leader) for r in gone)
            return min(applied) == max(applied) == leader.journal.last_index and told

        if not self.run(within_s, until=same):
            raise Violation(f"no convergence: {self.describe()}")
        leader = self.leader()
        assert leader is not None
        histories = [replica.history for replica in self.members(leader)]
        if any(history != histories[0] for history in histories):
            raise Violation("the replicas applied different histories")
        seen = Counter(data for _, _, data in histories[0] if not data.startswith(NO_OP) and not is_configuration(data))
        for data in self.acknowledged:
            if seen[data] != 1:
                raise Violation(f"{data!r} was acknowledged and is there {seen[data]} times")

    def describe(self) -> list[tuple[Any, ...]]:
        return [
            (
                r.name,
                r.engine.role.value,
                r.engine.term,
                r.journal.last_index,
                r.engine.commit_index,
                r.engine.applied_index,
            )
            if r.engine
            else (r.name, "down")
            for r in self.replicas.values()
        ]

    # The promises of Raft (figure 3 of the paper)

    def check(self, replica: Replica) -> None:
        engine = replica.engine
        assert engine is not None
        raft = engine.raft
        for sentence in broken_marks(raft, self.copy_of, self.raft_of):
            raise Violation(f"{replica.name}: {sentence}")
        if engine.role is Role.LEADER and engine.term not in self.leaders:
            missing = votes_missing(raft, self.copy_of)
            if missing:
                raise Violation(f"{replica.name}: {missing}")
            self.check_complete(replica)
        self.check_committed(replica)
        if engine.role is Role.LEADER and self.leaders.setdefault(engine.term, replica.name) != replica.name:
            raise Violation(f"election safety: {self.leaders[engine.term]} and {replica.name} lead term {engine.term}")

    def copy_of(self, name: str) -> Disk | None:
        """Return the disk of a member; None if the disk was replaced."""
        replica = self.replicas.get(name)
        return None if replica is None or replica.disk is not replica.first_disk else replica.disk

    def raft_of(self, name: str) -> RaftState | None:
        """Return the state of a running member."""
        replica = self.replicas.get(name)
        return None if replica is None or replica.engine is None else replica.engine.raft

    def check_complete(self, replica: Replica) -> None:
        """Check that a new leader has the entries that earlier leaders committed (5.4.3)."""
        assert replica.engine is not None
        term, journal = replica.engine.term, replica.journal
        last = max((last for by, last in self.committed_by.items() if by < term), default=0)
        held = journal.term_of(last)
        if journal.last_index < last or (last and held is not None and held != self.committed[last]):
            raise Violation(
                f"leader completeness: {replica.name} leads term {term} without entry {last} of term "
                f"{self.committed[last]}, which was committed before"
            )

    def check_committed(self, replica: Replica) -> None:
        """Check that committed entries are on the disks of a majority, and never change."""
        engine = replica.engine
        assert engine is not None
        for index in range(replica.seen_commit + 1, engine.commit_index + 1):
            term = replica.journal.term_of(index)
            if term is None:
                continue
            known = self.committed.get(index)
            if known is None:
                voters = engine.configuration.voter_ids
                copies = [copy for copy in map(self.copy_of, voters) if copy is None or copy.holds(index, term)]
                if len(copies) < engine.configuration.majority:
                    raise Violation(
                        f"{replica.name} commits entry {index} of term {term}, which is on {len(copies)} disks; "
                        f"{engine.configuration.majority} are needed"
                    )
                self.committed[index] = term
                self.committed_by[engine.term] = index
            elif known != term:
                raise Violation(f"{replica.name} commits entry {index} of term {term}; committed was that of {known}")
        replica.seen_commit = engine.commit_index

    # Reads

    def read(self, replica: Replica) -> None:
        """Read from a replica that believes that it leads: the answer must be newer than the request."""
        engine = replica.engine
        assert engine is not None
        floor, seq, term = max(self.committed, default=0), engine.raft.seq, engine.term

        def answered(index: int | None) -> None:
            if index is None:
                return
            self.reads += 1
            if index < floor:
                raise Violation(f"stale read: {replica.name} gave entry {index}; {floor} was committed before")
            voters = [voter for voter in engine.configuration.voter_ids if voter != replica.name]
            asked = [voter for voter in voters if self.answered.get((replica.name, term, voter), 0) > seq]
            confirmed = len(asked) + engine.configuration.votes(replica.name)
            if confirmed < engine.configuration.majority:
                raise Violation(
                    f"{replica.name} answers a read in term {term} that {confirmed} of {len(voters) + 1} voters have "
                    "confirmed since it was asked"
                )

        engine.read(answered)

    def check_applied(self, replica: Replica, index: int, term: int, data: bytes) -> None:
        if index != len(replica.history) + 1:
            raise Violation(f"{replica.name} applies {index} after {len(replica.history)} entries")
        if self.applied.setdefault(index, (term, data)) != (term, data):
            raise Violation(
                f"state machine safety: {replica.name} applies {(term, data)} at {index}: {self.applied[index]}"
            )

    def check_installed(self, history: list[tuple[int, int, bytes]]) -> None:
        for index, term, data in history:
            if self.applied.setdefault(index, (term, data)) != (term, data):
                raise Violation(f"a snapshot has {(term, data)} at {index}, applied was {self.applied[index]}")

    def check_log_matching(self) -> None:
        """Check that two journals with an entry of the same index and term agree in all earlier entries."""
        for one, two in itertools.combinations(self.replicas.values(), 2):
            low = max(one.journal.first_index, two.journal.first_index)
            agree = None
            for index in range(min(one.journal.last_index, two.journal.last_index), low - 1, -1):
                same = one.journal.entry(index) == two.journal.entry(index)
                if agree and not same:
                    raise Violation(f"log matching: {one.name} and {two.name} differ at {index}, agree at {agree}")
                if one.journal.term_of(index) == two.journal.term_of(index):
                    if not same:
                        raise Violation(f"log matching: {one.name} and {two.name} differ at {index}, in one term")
                    agree = agree or index


def last_configuration(history: list[tuple[int, int, bytes]]) -> ConfigurationAt | None:
    """Return the newest configuration in a history."""
    for index, _, data in reversed(history):
        if is_configuration(data):
            return ConfigurationAt(index, decode_configuration(data))
    return None


def carries(message: AnyMessage) -> bool:
    """Return whether a message contains entries."""
    return isinstance(message, AppendRequest) and bool(message.entries)
