"""PySyncObj 0.3.17 and everything private of it that is touched: the only module that knows the stock engine.

Kept of the stock class: its construction, its variables (role, term, vote, leader, deadline, commit, applied), its
set of connected nodes, its state setters. Overridden: the tick, the message handler, elections, append, apply, and
whatever touches files, pickles, clocks or randomness. Each override leads to a method with a plain name, which the
rules define. `tests/cluster/consensus/test_seam.py` hashes the source of each stock method that this module relies on
or replaces.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NoReturn, Protocol

import pysyncobj.syncobj as stock
from pysyncobj.config import SyncObjConf
from pysyncobj.node import Node
from pysyncobj.transport import Transport
from pysyncobj.version import VERSION

from cluster.consensus.frames import PROMISES, AnyMessage
from cluster.consensus.interface import Role, Timing
from cluster.consensus.journal_adapter import JournalAdapter, JournalLike
from cluster.system import Clock
from wal import BrokenInvariant

ENGINE_VERSION: Final = "0.3.17"
if VERSION != ENGINE_VERSION:
    raise ImportError(
        f"PySyncObj {VERSION} is installed, but Forebay overrides private methods of exactly {ENGINE_VERSION}; "
        f"install it: pip install pysyncobj=={ENGINE_VERSION}"
    )

_STATES: Final[dict[Role, int]] = {
    Role.FOLLOWER: stock._RAFT_STATE.FOLLOWER,
    Role.CANDIDATE: stock._RAFT_STATE.CANDIDATE,
    Role.LEADER: stock._RAFT_STATE.LEADER,
}
_ROLES: Final = {state: role for role, state in _STATES.items()}
_LEADER: Final = _STATES[Role.LEADER]

Uniform = Callable[[float, float], float]
"""Draws a number between two bounds: `random.uniform`, or a seeded one in a simulation."""


class Links(Protocol):
    """What carries messages to peers; it may lose them, never alter them, and keeps their order while a link is up."""

    def send(self, peer: str, message: AnyMessage) -> None: ...
    def flush(self) -> None: ...


class _Bridge(Transport):  # type: ignore[misc]
    """The stock transport interface over Links, with the durability gate: promises wait here for the sync (H2)."""

    def __init__(self, links: Links) -> None:
        super().__init__(None, None, [])
        self._links = links
        self._held: list[tuple[str, AnyMessage]] = []
        self._queued = False
        """Whether the links were given something since they were last told to send."""

    def setOnUtilityMessageCallback(self, message: str, callback: object) -> None:
        """Ignored: add, remove, set_version, transfer and status are not offered to peers (H5)."""

    def send(self, node: Any, message: AnyMessage) -> bool:
        if not isinstance(message, AnyMessage):
            raise BrokenInvariant(f"the stock engine tried to send a {type(message).__name__}; nothing of it may leave")
        if isinstance(message, PROMISES):
            self._held.append((node.id, message))
        else:
            self._links.send(node.id, message)
            self._queued = True
        return True

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

    def forget(self) -> None:
        """Forget the promises: they were never made."""
        self._held.clear()

    def destroy(self) -> None:
        """What the stock engine calls at its end."""
        self.forget()


class _NoPoller:
    """The stock engine wants a poller of sockets; ours is the asyncio loop, outside."""


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


class Seam(stock.SyncObj):  # type: ignore[misc]
    """The stock engine, reduced to what it gets right, in plain names and with peers by name."""

    _SyncObj__raftState: int
    _SyncObj__raftCurrentTerm: int
    _SyncObj__votedForNodeId: str | None
    _SyncObj__raftLeader: Any
    _SyncObj__raftElectionDeadline: float
    _SyncObj__raftCommitIndex: int
    _SyncObj__raftLastApplied: int
    _SyncObj__connectedNodes: set[Any]

    def __init__(
        self,
        *,
        me: str,
        peers: Sequence[str],
        journal: JournalLike,
        timing: Timing,
        clock: Clock,
        uniform: Uniform,
        links: Links,
    ) -> None:
        # Before the stock constructor, since it calls overridden methods and evaluates every property.
        self.me: Final = me
        self._timing: Final = timing
        self._clock: Final = clock
        self._uniform: Final = uniform
        self._bridge: Final = _Bridge(links)
        # Sorted and walked in this order: the stock engine walks sets, in the order of their hashes (H24).
        self._nodes: Final = {name: Node(name) for name in sorted(set(peers) - {me})}
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
        self._draw_election_timeout()
        self._postpone_election()

    # ---- the stock variables, in plain names ----

    @property
    def role(self) -> Role:
        """What this replica is in its term."""
        return _ROLES[self._SyncObj__raftState]

    @property
    def term(self) -> int:
        """The current term."""
        return self._SyncObj__raftCurrentTerm

    @property
    def leader(self) -> str | None:
        """Who leads this term, as far as is known."""
        node = self._SyncObj__raftLeader
        return None if node is None else str(node.id)

    @property
    def commit_index(self) -> int:
        """The last index known to be committed."""
        return self._SyncObj__raftCommitIndex

    @property
    def applied_index(self) -> int:
        """The last index that was applied."""
        return self._SyncObj__raftLastApplied

    @property
    def _voted_for(self) -> str | None:
        return self._SyncObj__votedForNodeId

    @property
    def _leads(self) -> bool:
        return self._SyncObj__raftState == _LEADER

    @property
    def _standing(self) -> tuple[object, ...]:
        """Role, term and leader, to be compared with what they were."""
        return self._SyncObj__raftState, self._SyncObj__raftCurrentTerm, self._SyncObj__raftLeader

    def _set_role(self, role: Role, leader: str | None) -> None:
        self._SyncObj__setState(_STATES[role])
        if leader == self.me:
            self._SyncObj__raftLeader = self._SyncObj__selfNode
        else:
            self._SyncObj__raftLeader = None if leader is None else self._node(leader)
        self._draw_election_timeout()

    def _set_term(self, term: int, voted_for: str | None) -> None:
        """Set both, in memory and in the journal, where they are buffered until the next sync."""
        self._SyncObj__setCurrentTerm(term, voted_for)

    def _move_commit(self, index: int) -> None:
        self._SyncObj__raftCommitIndex = index
        self._SyncObj__raftLog.setRaftCommitIndex(index)

    def _move_applied(self, index: int) -> None:
        self._SyncObj__raftLastApplied = index

    @property
    def _election_deadline_s(self) -> float:
        return self._SyncObj__raftElectionDeadline

    def _draw_election_timeout(self) -> None:
        """Draw how long silence is tolerated: for each leader and each attempt anew (5.2), not for each heartbeat.

        So the deadline only moves later while a leader lives, and a timer that is set for it is never too late.
        """
        self._election_timeout_s = self._uniform(*self._election_range_s())

    def _postpone_election(self) -> None:
        self._SyncObj__raftElectionDeadline = self._clock.monotonic_s() + self._election_timeout_s

    def _hasten_election(self, wait_s: float) -> None:
        soon_s = self._clock.monotonic_s() + wait_s
        self._SyncObj__raftElectionDeadline = min(self._SyncObj__raftElectionDeadline, soon_s)

    def _is_connected(self, peer: str) -> bool:
        return self._node(peer) in self._SyncObj__connectedNodes

    def _send(self, peer: str, message: AnyMessage) -> None:
        self._bridge.send(self._node(peer), message)

    def _note_link(self, peer: str, *, is_up: bool) -> None:
        note = self._bridge._onNodeConnected if is_up else self._bridge._onNodeDisconnected
        note(self._node(peer))

    def _deliver(self, peer: str, message: AnyMessage) -> None:
        self._bridge._onMessageReceived(self._node(peer), message)

    def _node(self, peer: str) -> Any:
        # Members come and go, and one that is not known yet may speak first; nodes are equal if their ids are.
        return self._nodes.get(peer) or Node(peer)

    # ---- what the rules define ----

    def _election_range_s(self) -> tuple[float, float]:
        raise NotImplementedError

    def _do_tick(self) -> None:
        raise NotImplementedError

    def _on_message(self, peer: str, message: AnyMessage) -> None:
        raise NotImplementedError

    def _become_leader(self) -> None:
        raise NotImplementedError

    def _send_appends(self) -> None:
        raise NotImplementedError

    def _apply_committed(self) -> None:
        raise NotImplementedError

    # ---- overridden: the stock engine calls the rules ----

    def _onTick(self, timeToWait: float = 0.0) -> None:
        self._do_tick()

    def _SyncObj__onMessageReceived(self, node: Any, message: AnyMessage) -> None:
        self._on_message(node.id, message)

    def _SyncObj__onBecomeLeader(self) -> None:
        self._become_leader()

    def _SyncObj__sendAppendEntries(self) -> None:
        self._send_appends()

    def _SyncObj__applyLogEntries(self) -> None:
        self._apply_committed()

    def _SyncObj__generateRaftTimeout(self) -> float:
        return self._uniform(self._timing.election_min_s, self._timing.election_max_s)

    # ---- switched off ----

    def _applyCommand(self, command: object, callback: object, commandType: object = None) -> NoReturn:
        raise BrokenInvariant("the stock engine's commands are pickled, forwarded and applied twice; use propose (H18)")

    def _SyncObj__doApplyCommand(self, command: object) -> NoReturn:
        raise BrokenInvariant("the stock engine would unpickle the entry and look its method up by position (H21)")

    def transferLeadership(self, node: object = None, callback: object = None) -> NoReturn:
        raise BrokenInvariant("the stock transfer of leadership is not offered")

    def _SyncObj__tryLogCompaction(self) -> NoReturn:
        raise BrokenInvariant("the stock engine would clear its log and add it again (H9, H10, H11)")

    def _SyncObj__loadDumpFile(self, clearJournal: bool) -> NoReturn:
        raise BrokenInvariant("the stock engine would unpickle a dump and swallow its errors (H8)")

    def _SyncObj__doChangeCluster(self, request: object, reverse: bool = False) -> NoReturn:
        raise BrokenInvariant("the stock engine lets any number of membership changes be in flight (H12)")
