"""Interface between consensus and its users (controller, journal, links): protocols, values and exceptions."""

from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Final, Protocol

import msgspec

from forebay.cluster.consensus.frames import MAX_ENTRY_BYTES, AnyMessage
from forebay.wal import ConfigurationAt, Entry

HEARTBEATS_PER_ELECTION: Final = 3
"""Minimum number of heartbeats in the shortest election timeout, so that one or two late ones cause no election."""


class Role(StrEnum):
    """Role of a replica in its current term. CANDIDATE includes the pre-vote."""

    LEADER = "leader"
    FOLLOWER = "follower"
    CANDIDATE = "candidate"


class NotLeader(Exception):
    """Request to a replica that does not lead, or that has not applied the first entry of its leadership."""

    def __init__(self, leader: str | None, *, sentence: str | None = None) -> None:
        hint = f"the leader is {leader}" if leader else "there is no leader now; try again in a moment"
        super().__init__(sentence or f"this replica is not the leader: {hint}")
        self.leader = leader


class ChangeRefused(Exception):
    """Membership change or leadership transfer that is impossible now; nothing was changed."""

    def __init__(self, code: str, sentence: str, remedy: str) -> None:
        super().__init__(f"{sentence}; {remedy}")
        self.code = code
        self.sentence = sentence
        self.remedy = remedy


class RemovedFromCluster(Exception):
    """This replica was permanently removed from the cluster and must stop. The message is for the operator."""

    def __init__(self, me: str, version: int) -> None:
        super().__init__(
            f"{me} was removed from the cluster by version {version} of the configuration or an earlier one; to add "
            "it again, move its directory away, run `forebay cluster add`, and start it"
        )
        self.version = version


class LostDurableState(Exception):
    """This replica lost entries that it had acknowledged. It must stop, and never return under its old ID."""

    def __init__(self, me: str, acknowledged_index: int, last_index: int) -> None:
        super().__init__(
            f"{me} acknowledged the entries up to {acknowledged_index} to its leader, but its journal now ends at "
            f"{last_index}: its data and votes were lost or replaced by older data. It must not take part under its "
            f"old identity: run `forebay cluster replace {me}` on another replica, move its directory "
            "away, and start it"
        )
        self.acknowledged_index = acknowledged_index
        self.last_index = last_index


class HistoryElsewhere(Exception):
    """A peer has a history, but this replica has no data. It must stop before it makes any promise."""

    def __init__(self, me: str, peer: str, index: int) -> None:
        super().__init__(
            f"{me} has no data, and {peer} has a history of {index} entries: the cluster exists, and {me} cannot "
            f"join it without data. If {me} lost its data and a majority runs: run `forebay cluster replace {me}` on "
            "another replica, and start {me} again; without a majority, run `forebay cluster recover` on a machine "
            f"that still has its data (docs/operate/lost-majority.md). If {me} is new: run `forebay cluster add` with "
            "its name and addresses"
        )
        self.peer = peer


class IncarnationOver(Exception):
    """The cluster continues as a later incarnation without this replica, which must stop."""

    def __init__(self, me: str, mine: str, theirs: str, peer: str) -> None:
        super().__init__(
            f"{me} has incarnation {mine} of the cluster, which has ended: {peer} has incarnation {theirs}, begun by "
            f"`forebay cluster recover` after a majority was lost. The data of {me} may contain the lost entries: "
            "keep its directory for an examination (`forebay audit dump --data DIRECTORY`), move it away, run "
            "`forebay cluster add` with its name and addresses, and start it"
        )


class EntryTooLarge(ValueError):
    """Proposal larger than the maximum of an entry; the proposer must split it."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__(f"an entry of {size_bytes} bytes was proposed; the maximum is {MAX_ENTRY_BYTES}: split it")


class Timing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Timeouts of consensus, in seconds.

    Raises:
        ValueError: No leader could keep its leadership with these timeouts.
    """

    election_min_s: float = 0.3
    election_max_s: float = 0.6
    heartbeat_s: float = 0.05
    commit_notice_s: float = 0.005
    """Maximum delay until followers are notified of a commit; the next entry notifies them sooner."""
    idle_flush_s: float = 1.0
    """Idle time after which the lazy marks (commit, applied) are written once."""
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
                f"heartbeats of {self.heartbeat_s} s, or one late heartbeat causes an election"
            )
        if self.election_max_s <= self.election_min_s:
            raise ValueError(
                f"timing.election_max_s is {self.election_max_s} s; it must be more than election_min_s "
                f"({self.election_min_s} s), or all replicas campaign at the same moment and none wins"
            )
        if self.reconnect_max_s < self.reconnect_min_s:
            raise ValueError("timing.reconnect_max_s must not be below reconnect_min_s")


class JournalLike(Protocol):
    """Part of `wal.journal.Journal` that consensus uses; tests substitute a simulated journal."""

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
    """Transport to peers. It may lose messages, but never alters them, and keeps their order while a link is up."""

    def send(self, peer: str, message: AnyMessage) -> None: ...
    def flush(self) -> None: ...


Uniform = Callable[[float, float], float]
"""Function that draws a number between two bounds: `random.uniform`, or a seeded one in simulations."""


class SnapshotRef(msgspec.Struct, frozen=True):
    """Finalized snapshot file that may be sent to a peer."""

    path: Path
    index: int
    term: int
    size_bytes: int


class SnapshotSink(Protocol):
    """Receiver of a leader's snapshot. Nothing is written after `verify` or `abort`."""

    @property
    def received_bytes(self) -> int:
        """Number of bytes received, including those that an earlier process received."""
        ...

    def write(self, offset: int, data: bytes) -> None:
        """Write the bytes at `offset`; they arrive in order. An exception rejects the installation."""
        ...

    def verify(self, done: Callable[[], None]) -> None:
        """Begin to verify the snapshot; call `done` in this thread at the end, now or later, whatever the result.

        Verification is slow and should run beside the loop: meanwhile this replica answers heartbeats and votes from
        its present journal. An exception rejects the installation.
        """
        ...

    def finish(self) -> ConfigurationAt | None:
        """Replace the state and call `journal.reset_to`. Any exception, including one of `verify`, rejects the
        installation.

        Returns the configuration in the snapshot; None if this machine keeps no configurations.
        """
        ...

    def abort(self) -> None:
        """Discard the received part, at any time before `finish`."""
        ...

    def suspend(self) -> None:
        """Stop, and keep the received part for the next process if possible."""
        ...


class Machine(Protocol):
    """Replicated state machine, as consensus sees it."""

    def apply(self, index: int, term: int, data: bytes) -> bool | None:
        """Apply a committed entry and call `journal.record_applied` for it; an exception stops the replica.

        Returns True if only a part was applied: a later tick then calls again with the same entry.
        """
        ...

    def hear(self, peer: str, news: bytes) -> None:
        """Handle untrusted news from the machine of follower `peer` (a name). It must not stop this replica."""
        ...

    def newest_snapshot(self) -> SnapshotRef | None:
        """Return the newest finalized snapshot, for a peer that needs compacted entries.

        If no snapshot is suitable, start making one and return None; the call is repeated.
        """
        ...

    def snapshot_refused(self, index: int) -> None:
        """Handle a peer's rejection of the snapshot at `index`: check whether the snapshot is still valid."""
        ...

    def begin_install(self, index: int, term: int) -> SnapshotSink:
        """Return a sink for a snapshot of (index, term); an exception rejects the installation."""
        ...


class PeerStatus(msgspec.Struct, frozen=True):
    """Status of one peer. Indexes are 0 unless this replica leads."""

    name: str
    connected: bool
    match_index: int
    next_index: int
    last_contact_s: float | None
    """Seconds since the peer's last frame; None if there was none."""
    lag_entries: int
    sending_snapshot: bool
    votes: bool = True
    """True if the peer is a voter."""
    forgot: bool = False
    """True if the peer lacks entries that it acknowledged: it is ignored until it is replaced."""
    clock_offset_s: float | None = None
    """Lead of the peer's wall clock over this replica's, seconds; None without a recent reading."""
    clock_off: bool = False
    """True if the peer's wall clock deviates from a majority's (`peer_clocks`)."""
