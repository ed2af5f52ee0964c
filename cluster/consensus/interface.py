"""Interface of consensus to controller, journal and links: protocols, values and exceptions, without any machinery."""

from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Final, Protocol

import msgspec

from cluster.consensus.frames import MAX_ENTRY_BYTES, AnyMessage
from wal import ConfigurationAt, Entry

HEARTBEATS_PER_ELECTION: Final = 3
"""Heartbeats that must fit in the shortest election timeout, so that one or two late ones elect nobody."""


class Role(StrEnum):
    """What a replica is in its current term; a candidate also while it only asks whether it could win."""

    LEADER = "leader"
    FOLLOWER = "follower"
    CANDIDATE = "candidate"


class NotLeader(Exception):
    """This replica cannot propose or confirm: it does not lead, or its own first entry is not applied yet."""

    def __init__(self, leader: str | None, *, sentence: str | None = None) -> None:
        hint = f"replica {leader} does" if leader else "no leader is known now; ask again in a moment"
        super().__init__(sentence or f"this replica does not lead: {hint}")
        self.leader = leader


class ChangeRefused(Exception):
    """A change of membership, or a transfer of leadership, is not possible now: nothing has happened."""

    def __init__(self, code: str, sentence: str, remedy: str) -> None:
        super().__init__(f"{sentence}; {remedy}")
        self.code = code
        self.sentence = sentence
        self.remedy = remedy


class RemovedFromCluster(Exception):
    """This replica is no member any more, for good: it must stop. The message is for the operator."""

    def __init__(self, me: str, version: int) -> None:
        super().__init__(
            f"{me} was removed from the cluster by version {version} of the configuration or an earlier one; if it is "
            f"to come back: move its directory away, `forebay member add` it, and start it"
        )
        self.version = version


class LostDurableState(Exception):
    """This replica lacks entries that it acknowledged: it must stop, and not come back under its old name."""

    def __init__(self, me: str, acknowledged_index: int, last_index: int) -> None:
        super().__init__(
            f"{me} acknowledged the entries up to {acknowledged_index} to its leader, and now its journal ends at "
            f"{last_index}: its data was lost, or older data was put in its place, and its votes with it. Under its "
            f"old identity it must not take part any more: run `forebay member replace {me}` on another replica, move "
            f"its directory away, and start it"
        )
        self.acknowledged_index = acknowledged_index
        self.last_index = last_index


class HistoryElsewhere(Exception):
    """This replica never ran, and a peer shows a history: it must stop before it promises anything in that history."""

    def __init__(self, me: str, peer: str, index: int) -> None:
        super().__init__(
            f"{me} has no data, and {peer} shows a history of {index} entries: the cluster is founded, and {me} "
            f"takes no part in it as it is. If {me} lost its data: while a majority runs, `forebay member "
            f"replace {me}` on another replica, and start this one again; without a majority, `forebay recover` "
            f'on a machine whose data is left (docs/operations.md, "A lost majority"). If it is new: `forebay member '
            "add` with its name and addresses"
        )
        self.peer = peer


class IncarnationOver(Exception):
    """The cluster goes on as a later incarnation, without this replica: it must stop, and not come back as it is."""

    def __init__(self, me: str, mine: str, theirs: str, peer: str) -> None:
        super().__init__(
            f"{me} is of incarnation {mine} of the cluster, which is over: {peer} is of incarnation {theirs}, begun by "
            f"`forebay recover` after a majority was lost. What {me} holds may be what was lost: keep its directory "
            f"for an examination (`forebay ledger dump --data DIRECTORY`), move it away, run `forebay member add` "
            "with its name and addresses, and start it"
        )


class EntryTooLarge(ValueError):
    """A proposal is larger than one entry may be; the proposer must split it."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__(f"an entry of {size_bytes} bytes was proposed; the bound is {MAX_ENTRY_BYTES}: split it")


class Timing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long consensus waits, in seconds. ValueError for a combination that cannot keep a leader."""

    election_min_s: float = 0.3
    election_max_s: float = 0.6
    heartbeat_s: float = 0.05
    commit_notice_s: float = 0.005
    """Followers learn that an entry is committed at most this much later; a further entry tells them sooner."""
    idle_flush_s: float = 1.0
    """Quiet time after which the lazily written marks (commit, applied) go to disk, once."""
    reconnect_min_s: float = 0.05
    reconnect_max_s: float = 1.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not 0 < value < 3600:
                raise ValueError(f"timing.{name} is {value} s; it must be above 0 and below 3600 s")
        if self.election_min_s <= HEARTBEATS_PER_ELECTION * self.heartbeat_s:
            raise ValueError(
                f"timing.election_min_s is {self.election_min_s} s; it must be more than {HEARTBEATS_PER_ELECTION} "
                f"heartbeats of {self.heartbeat_s} s, or a late heartbeat elects a new leader"
            )
        if self.election_max_s <= self.election_min_s:
            raise ValueError(
                f"timing.election_max_s is {self.election_max_s} s; it must be more than election_min_s "
                f"({self.election_min_s} s), or all replicas stand at the same moment and none wins"
            )
        if self.reconnect_max_s < self.reconnect_min_s:
            raise ValueError("timing.reconnect_max_s must not be below reconnect_min_s")


class JournalLike(Protocol):
    """Part of `wal.journal.Journal` that consensus uses; a test may put a disk that forgets behind it."""

    @property
    def last_index(self) -> int: ...
    @property
    def last_term(self) -> int: ...
    @property
    def base_index(self) -> int: ...
    @property
    def term(self) -> int: ...
    @property
    def voted_for(self) -> str | None: ...
    @property
    def commit_index(self) -> int: ...
    @property
    def applied_index(self) -> int: ...
    @property
    def dirty(self) -> bool: ...
    def term_of(self, index: int) -> int | None: ...
    def digest_at(self, index: int) -> bytes | None: ...
    def entries(self, first: int, *, max_bytes: int, max_entries: int) -> list[Entry]: ...
    def append(self, entries: Sequence[Entry]) -> None: ...
    def truncate_from(self, index: int) -> None: ...
    def set_term(self, term: int, voted_for: str | None) -> None: ...
    def set_commit(self, index: int) -> None: ...
    def compact_to(self, index: int) -> None: ...
    def sync(self) -> None: ...
    def flush_hints(self) -> None: ...


class Links(Protocol):
    """Carrier of messages to peers; it may lose them, never alter them, and keeps their order while a link is up."""

    def send(self, peer: str, message: AnyMessage) -> None: ...
    def flush(self) -> None: ...


Uniform = Callable[[float, float], float]
"""Draws a number between two bounds: `random.uniform`, or a seeded one in a simulation."""


class SnapshotRef(msgspec.Struct, frozen=True):
    """A sealed snapshot file that may be sent to a peer."""

    path: Path
    index: int
    term: int
    size_bytes: int


class SnapshotSink(Protocol):
    """Where a snapshot that a leader sends is written to. After `verify` or `abort` nothing more is written."""

    @property
    def received_bytes(self) -> int:
        """How much is there already: more than 0 at the beginning where an earlier process received a part."""
        ...

    def write(self, offset: int, data: bytes) -> None:
        """Take the bytes at `offset`; they come in order. An exception refuses the install."""
        ...

    def verify(self, done: Callable[[], None]) -> None:
        """Begin to verify the whole; call `done` in this thread when that is over, well or not, at once or later.

        It is the slow part, so that it should go on beside the loop: this replica answers heartbeats and votes
        meanwhile, by the journal that it has. An exception refuses the install.
        """
        ...

    def finish(self) -> ConfigurationAt | None:
        """Swap the state and call `journal.reset_to`; an exception, also one of `verify`, refuses the install.

        Returns the configuration that the snapshot holds; None if this machine does not keep them.
        """
        ...

    def abort(self) -> None:
        """Throw away what came so far, at any time before `finish`."""
        ...

    def suspend(self) -> None:
        """Let go, and leave what came so far for the next process, if this machine can."""
        ...


class Machine(Protocol):
    """The replicated state machine, as consensus sees it."""

    def apply(self, index: int, term: int, data: bytes) -> bool | None:
        """Apply a committed entry and call `journal.record_applied` for it; whatever it raises stops the replica.

        True where only a part of that is done: then this is called again, with the same entry, in another tick.
        """
        ...

    def hear(self, peer: str, news: bytes) -> None:
        """Take what the machine of a follower says, by its replica's name. It may be anything, and stops nobody."""
        ...

    def newest_snapshot(self) -> SnapshotRef | None:
        """Return the newest sealed snapshot, to send to a peer that needs entries that are compacted.

        Where there is none that will do, make one: this is asked again until it is there.
        """
        ...

    def snapshot_refused(self, index: int) -> None:
        """A peer did not take the snapshot of this index: look whether it is still sound."""
        ...

    def begin_install(self, index: int, term: int) -> SnapshotSink:
        """Return a sink for a snapshot of (index, term); an exception refuses the install."""
        ...


class PeerStatus(msgspec.Struct, frozen=True):
    """What this replica knows of one peer. The indexes are those of a leader's bookkeeping, 0 on other replicas."""

    name: str
    connected: bool
    match_index: int
    next_index: int
    last_contact_s: float | None
    """Seconds since the last frame of this peer; None if there was none."""
    lag_entries: int
    sending_snapshot: bool
    votes: bool = True
    """Whether it counts in majorities; a learner does not yet."""
    forgot: bool = False
    """Whether it lacks entries that it acknowledged to this leader: it is refused until it is replaced."""
    clock_offset_s: float | None = None
    """How far its wall clock is ahead of this replica's, seconds; None if it was not read lately."""
    clock_off: bool = False
    """Whether its wall clock is off from a majority's (`peer_clocks`)."""
