"""Adapter of PySyncObj 0.3.17: the only module that uses its private names.

A `SyncObj` restores term, vote and commit mark from the journal, changes role and term by its own setters, and receives
ticks and messages. Its variables are views of `RaftState`. Its rules are replaced or disabled; calling a disabled one
raises. `tests/cluster/consensus/test_stock.py` hashes the source of each method that this module uses or replaces.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NoReturn

import pysyncobj.syncobj as stock
from pysyncobj.config import SyncObjConf
from pysyncobj.node import Node
from pysyncobj.transport import Transport
from pysyncobj.version import VERSION

from forebay.cluster.consensus.frames import AnyMessage
from forebay.cluster.consensus.interface import JournalLike, Role
from forebay.cluster.consensus.state import RaftState
from forebay.wal import BrokenInvariant

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


class JournalAdapter:
    """Journal as the stock constructor and setters use it. It is never empty, so that the constructor adds nothing."""

    def __init__(self, journal: JournalLike) -> None:
        self._journal = journal

    def __len__(self) -> int:
        # The stock engine has a first entry that it never applies; the base takes its place.
        return self._journal.last_index - self._journal.base_index + 1

    def __getitem__(self, position: int) -> tuple[bytes, int, int]:
        if position != -1:
            raise BrokenInvariant("the stock engine may read the last entry only, for its term")
        return b"", self._journal.last_index, self._journal.last_term

    def getCurrentTerm(self) -> int:
        return self._journal.term

    def getVotedForNodeId(self) -> str | None:
        return self._journal.voted_for

    def getRaftCommitIndex(self) -> int:
        return self._journal.commit_index

    def setCurrentTerm(self, term: int, votedForNodeId: str | None) -> None:
        self._journal.set_term(term, votedForNodeId)

    def _destroy(self) -> None:
        """Do nothing: the owner of the journal closes it."""


class _Inlet(Transport):  # type: ignore[misc]
    """Stock network interface for incoming messages only; the stock engine sends nothing."""

    def __init__(self) -> None:
        super().__init__(None, None, [])

    def setOnUtilityMessageCallback(self, message: str, callback: object) -> None:
        """Ignore the callback: peers cannot add, remove, set_version, transfer or status (hazard H5)."""

    def send(self, node: object, message: object) -> NoReturn:
        raise BrokenInvariant(f"the stock engine tried to send a {type(message).__name__}; it must not send messages")

    def destroy(self) -> None:
        """Do nothing: the links belong to the driver."""


class _NoPoller:
    """Replacement for the stock socket poller; the asyncio loop does the polling."""


@contextmanager
def _construction(adapter: JournalAdapter) -> Iterator[None]:
    """Make the stock constructor use this journal, and no poller."""
    create_journal, create_poller = stock.createJournal, stock.createPoller
    stock.createJournal = lambda file: adapter
    stock.createPoller = lambda kind: _NoPoller()
    try:
        yield
    finally:
        stock.createJournal, stock.createPoller = create_journal, create_poller


def stock_configuration(**options: object) -> Any:
    """Return the stock configuration.

    Raises:
        TypeError: An option is unknown; the stock class would silently ignore it (H22).
    """
    known = vars(SyncObjConf())
    for name in options:
        if name not in known:
            raise TypeError(f"PySyncObj {ENGINE_VERSION} has no option {name!r}")
    return SyncObjConf(**options)


def _view(name: str) -> property:
    """Return a property that maps a stock variable to a field of the state, so that each value exists once."""

    def read(node: "StockNode") -> Any:
        return getattr(node._raft, name)

    def write(node: "StockNode", value: Any) -> None:
        setattr(node._raft, name, value)

    return property(read, write)


def _role(node: "StockNode") -> int:
    return _STATES[node._raft.role]


def _set_role(node: "StockNode", state: int) -> None:
    node._raft.role = _ROLES[state]


def _off(why: str) -> Any:
    """Return a replacement for a stock method that must not run."""

    def refuse(*given: object, **named: object) -> NoReturn:
        raise BrokenInvariant(why)

    return refuse


_REPLACED: Final = "the stock engine's rules are replaced, and must not be called"


class StockNode(stock.SyncObj):  # type: ignore[misc]
    """Stock engine over `RaftState`, with its rules replaced."""

    _SyncObj__raftState = property(_role, _set_role)
    _SyncObj__raftCurrentTerm = _view("term")
    _SyncObj__votedForNodeId = _view("voted_for")
    _SyncObj__raftCommitIndex = _view("commit_index")

    def __init__(
        self,
        raft: RaftState,
        *,
        peers: Iterable[str],
        on_tick: Callable[[], None],
        on_message: Callable[[str, AnyMessage], None],
    ) -> None:
        """Restore term, vote and commit mark of `raft` from its journal; pass ticks and messages to the rules."""
        # Set these first: the stock constructor calls overridden methods and evaluates every property.
        self._raft: Final = raft
        self._on_tick: Final = on_tick
        self._on_message: Final = on_message
        self._inlet: Final = _Inlet()
        self._nodes: Final = {name: Node(name) for name in peers}
        timing = raft.timing
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
        with _construction(JournalAdapter(raft.journal)):
            super().__init__(
                Node(raft.me), list(self._nodes.values()), conf=conf, nodeClass=Node, transport=self._inlet
            )

    def set_role(self, role: Role, leader: str | None) -> None:
        """Become `role` in the term of `leader`, None if no leader is known."""
        self._SyncObj__setState(_STATES[role])
        self._raft.leader = leader

    def set_term(self, term: int, voted_for: str | None) -> None:
        """Set term and vote in the state and in the journal, where they are buffered until the next sync."""
        self._SyncObj__setCurrentTerm(term, voted_for)

    def deliver(self, peer: str, message: AnyMessage) -> None:
        """Handle a message of `peer`: a member, or an unknown replica (nodes are equal if their IDs are)."""
        self._inlet._onMessageReceived(self._nodes.get(peer) or Node(peer), message)

    # ---- entry points of the rules ----

    def _onTick(self, timeToWait: float = 0.0) -> None:
        self._on_tick()

    def _SyncObj__onMessageReceived(self, node: Any, message: AnyMessage) -> None:
        self._on_message(node.id, message)

    def _SyncObj__generateRaftTimeout(self) -> float:
        return self._raft.uniform(self._raft.timing.election_min_s, self._raft.timing.election_max_s)

    # ---- disabled ----

    _SyncObj__onBecomeLeader = _off(_REPLACED)
    _SyncObj__sendAppendEntries = _off(_REPLACED)
    _SyncObj__applyLogEntries = _off(_REPLACED)
    _applyCommand = _off("the stock engine's commands are pickled, forwarded and applied twice; use propose (H18)")
    _SyncObj__doApplyCommand = _off("the stock engine would unpickle the entry, its method by position (H21)")
    transferLeadership = _off("the stock engine's transfer of leadership is not supported")
    _SyncObj__tryLogCompaction = _off("the stock engine would clear its log and add it again (H9, H10, H11)")
    _SyncObj__loadDumpFile = _off("the stock engine would unpickle a dump and swallow its errors (H8)")
    _SyncObj__doChangeCluster = _off("the stock engine lets any number of membership changes be in flight (H12)")
