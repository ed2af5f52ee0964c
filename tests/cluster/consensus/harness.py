"""Harness of one engine with a virtual clock, recording links and a forgetful disk; and the stock engine beside it."""

from collections.abc import Callable
from typing import Any, TypeVar

from pysyncobj import SyncObj, SyncObjConf
from pysyncobj.node import Node
from pysyncobj.transport import Transport

from forebay.cluster.consensus.engine import Engine
from forebay.cluster.consensus.frames import AnyMessage, AppendReply, AppendRequest, VoteReply, VoteRequest
from forebay.cluster.consensus.interface import Role, SnapshotRef, SnapshotSink, Timing
from forebay.wal.journal import Entry
from tests.cluster.consensus.memory_journal import Disk, MemoryJournal
from tests.cluster.consensus.simulator import SimClock

TIMING = Timing()
STAND_S = 1.5 * TIMING.election_min_s
"""Silence after which the engine, which draws the shortest timeouts, has campaigned once but not twice."""
M = TypeVar("M")


class Harness:
    """Engine `me` among `replicas` replicas (r1, r2, ...), all links up. `out` has its messages, in order."""

    def __init__(
        self,
        replicas: int = 3,
        *,
        me: str = "r1",
        disk: Disk | None = None,
        journal: Any = None,
        began_s: float = 0.0,
        **members: Any,
    ) -> None:
        """`members`: bootstrap and configuration, as for Engine. The clock starts at `began_s`."""
        self.clock = SimClock()
        self.clock.now_s = began_s
        self.disk = disk or Disk()
        self.journal = journal or MemoryJournal(self.disk)
        self.peers = [f"r{number}" for number in range(1, replicas + 1) if f"r{number}" != me]
        self.out: list[tuple[str, AnyMessage]] = []
        self.applied: list[tuple[int, int, bytes]] = []
        self.at_change: Callable[[], None] = lambda: None
        self.snapshot: SnapshotRef | None = None
        self.engine = Engine(
            me=me,
            peers=[me, *self.peers],
            journal=self.journal,
            machine=self,
            timing=TIMING,
            clock=self.clock,
            uniform=lambda low, high: low,
            links=self,
            on_change=self.on_change,
            **members,
        )
        for peer in self.peers:
            self.engine.connected(peer)

    # Links, machine, on_change

    def send(self, peer: str, message: AnyMessage) -> None:
        self.out.append((peer, message))

    def flush(self) -> None:
        pass

    def apply(self, index: int, term: int, data: bytes) -> None:
        self.applied.append((index, term, data))
        self.journal.record_applied(Entry(index, term, data), index)

    def newest_snapshot(self) -> SnapshotRef | None:
        return self.snapshot

    def snapshot_refused(self, index: int) -> None:
        pass

    def begin_install(self, index: int, term: int) -> SnapshotSink:
        raise NotImplementedError

    def on_change(self) -> None:
        self.at_change()

    # Driving

    def take(self, kind: type[M], peer: str | None = None) -> list[M]:
        """Return the messages of one kind sent since the last call, and forget the others."""
        out, self.out = self.out, []
        return [message for to, message in out if isinstance(message, kind) and peer in (None, to)]

    def give(self, peer: str, message: AnyMessage) -> None:
        self.engine.receive(peer, message)
        self.engine.tick()

    def settle(self) -> None:
        """Tick as long as a tick is due at this instant."""
        self.engine.tick()
        while self.engine.next_due_s() <= self.clock.now_s:
            self.engine.tick()

    def wait(self, duration_s: float) -> None:
        """Let time pass, with a tick whenever one is due and one at the end."""
        end_s = self.clock.now_s + duration_s
        while (due_s := self.engine.next_due_s()) < end_s:
            self.clock.now_s = max(self.clock.now_s, due_s)
            self.engine.tick()
        self.clock.now_s = end_s
        self.engine.tick()

    def win(self) -> None:
        """Become leader of the next term with everyone's vote; the first entry is not committed yet."""
        self.wait(STAND_S)
        for pre in (True, False):
            (request, *_) = self.take(VoteRequest)
            assert request.pre is pre
            for peer in self.peers:
                if self.engine.role is Role.CANDIDATE:
                    self.give(peer, VoteReply(self.engine.term, request.seq, True, pre))
        assert self.engine.role is Role.LEADER

    def accept(self, peer: str) -> None:
        """Let a peer accept all entries sent to it."""
        for request in self.take(AppendRequest, peer):
            told = request.prev_index + len(request.entries)
            self.give(peer, AppendReply(self.engine.term, request.seq, told))

    def lead(self) -> None:
        """Become a ready leader, whose first entry is committed and applied."""
        self.win()
        kept = list(self.out)
        for peer in self.peers:
            self.out = list(kept)
            self.accept(peer)
        self.out = []
        assert self.engine.ready

    def follow(self, entries: list[tuple[int, bytes]], *, leader: str = "r2", term: int = 1, commit: int = 0) -> None:
        """Receive `entries` (term, data) from index 1 on, as a follower of `leader` in `term`."""
        self.give(leader, AppendRequest(term, 1, 0, 0, commit, True, entries))
        assert self.journal.last_index == len(entries)


class RecordingTransport(Transport):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(None, None, [])
        self.out: list[tuple[str, dict[str, Any]]] = []

    def send(self, node: Any, message: dict[str, Any]) -> bool:
        self.out.append((node.id, message))
        return True


class StockHarness:
    """Stock engine with a recording transport and a journal in memory."""

    def __init__(self, replicas: int = 3, engine: type[Any] = SyncObj) -> None:
        self.transport = RecordingTransport()
        self.nodes = {f"r{number}": Node(f"r{number}") for number in range(1, replicas + 1)}
        others = [node for name, node in self.nodes.items() if name != "r1"]
        conf = SyncObjConf(autoTick=False)
        self.engine = engine(self.nodes["r1"], others, conf=conf, nodeClass=Node, transport=self.transport)
        for node in others:
            self.transport._onNodeConnected(node)

    def private(self, name: str) -> Any:
        return getattr(self.engine, f"_SyncObj__{name}")

    def set_private(self, name: str, value: Any) -> None:
        setattr(self.engine, f"_SyncObj__{name}", value)

    def give(self, peer: str, **message: Any) -> None:
        self.transport._onMessageReceived(self.nodes[peer], message)

    def win(self) -> None:
        self.set_private("raftElectionDeadline", 0)
        self.engine.doTick()
        for peer in list(self.nodes)[1:]:
            if not self.engine._isLeader():
                self.give(peer, type="response_vote", term=self.engine.raftCurrentTerm)
        assert self.engine._isLeader()


__all__ = ["STAND_S", "TIMING", "Harness", "StockHarness"]
