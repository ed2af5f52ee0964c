"""Interface of consensus for controller and proposer; implemented by `cluster.consensus.Consensus` and by tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from forebay.cluster.consensus.configurations import MemberChange
from forebay.cluster.consensus.peer_clocks import ClockBounds
from forebay.wal import Configuration


class Peer(Protocol):
    """Status of a peer. A leader knows all peers; a follower knows its leader."""

    @property
    def name(self) -> str: ...
    @property
    def connected(self) -> bool: ...
    @property
    def match_index(self) -> int: ...
    @property
    def last_contact_s(self) -> float | None: ...
    @property
    def lag_entries(self) -> int: ...
    @property
    def sending_snapshot(self) -> bool: ...
    @property
    def votes(self) -> bool: ...
    @property
    def forgot(self) -> bool: ...
    @property
    def clock_offset_s(self) -> float | None: ...
    @property
    def clock_off(self) -> bool: ...


class Engine(Protocol):
    """Replica's view of the group: leader, progress, and proposing entries."""

    @property
    def role(self) -> str: ...
    @property
    def term(self) -> int: ...
    @property
    def leader(self) -> str | None: ...
    @property
    def commit_index(self) -> int: ...
    @property
    def applied_index(self) -> int: ...
    @property
    def last_index(self) -> int: ...
    @property
    def ready(self) -> bool: ...

    @property
    def configuration(self) -> Configuration: ...

    @property
    def sync_s(self) -> float | None: ...
    @property
    def clock_off(self) -> bool: ...
    @property
    def clock_bounds(self) -> ClockBounds: ...

    def propose(self, data: bytes) -> tuple[int, int]:
        """Append `data` to the journal as leader; return (index, term).

        Raises:
            NotLeader: This replica does not lead.
        """
        ...

    async def confirm_leadership(self) -> int:
        """Return a commit index after a majority has answered a heartbeat sent after the call.

        Raises:
            NotLeader: This replica does not lead, or loses leadership meanwhile.
        """
        ...

    async def read_index(self, news: bytes) -> int:
        """Return the leader's commit index, confirmed after the call.

        A follower's own state answers a linearizable read once it has applied that index. `news` is sent to the leader.

        Raises:
            NotLeader: No leader is known, or no answer arrives in time.
        """
        ...

    def peers(self) -> Sequence[Peer]: ...

    def change(self, wanted: MemberChange) -> tuple[int, int]:
        """Append a membership change as leader; return (index, term).

        Raises:
            NotLeader: This replica does not lead.
            ChangeRefused: The change is impossible now.
        """
        ...

    def reach_at(self, members: Mapping[str, str]) -> None:
        """Set addresses, by name, that are dialled before those of the configuration."""
        ...

    def address_of(self, name: str) -> str | None:
        """Return the address at which replica `name` is connected now, or None."""
        ...

    def promotable(self) -> str | None:
        """Return the ID of a learner that may be promoted now, or None."""
        ...

    def unrecorded(self) -> tuple[str, bytes] | None:
        """Return the ID of a voter whose key a change should record, and the key, or None."""
        ...

    async def transfer(self, target: str | None = None) -> str | None:
        """Transfer leadership and return the new leader's name.

        Raises:
            NotLeader: This replica does not lead.
            ChangeRefused: The target cannot take over.
        """
        ...

    def compact_to(self, index: int) -> None: ...

    async def start(self) -> None: ...

    async def stop(self) -> None: ...
