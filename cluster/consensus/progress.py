"""Leader's view of one peer's log: probe, replicate, snapshot, and the sending window (H16, H26).

The states are those of etcd's progress: a peer with an unknown log position gets one request at a time until one is
accepted; requests then stream ahead of their replies inside a window; a peer that needs compacted entries gets a
snapshot.
"""

from collections import deque
from enum import Enum
from typing import Final, NamedTuple

WINDOW_BYTES: Final = 4 << 20
"""Maximum size of unanswered entries to one peer: enough for 1 Gbit/s at 30 ms, cheap to lose and resend."""

WINDOW_REQUESTS: Final = 64
"""Maximum number of unanswered append requests to one peer."""


class Phase(Enum):
    """Sending mode of a leader to a peer."""

    PROBE = "probe"
    REPLICATE = "replicate"
    SNAPSHOT = "snapshot"


class _Flight(NamedTuple):
    seq: int
    last_index: int
    size_bytes: int


class Progress:
    """Progress of one peer towards the log of this term's leader."""

    __slots__ = (
        "_bytes",
        "_flights",
        "acked_seq",
        "answered_s",
        "commit_sent",
        "held",
        "last_contact_s",
        "lost",
        "match",
        "next",
        "phase",
        "probe_seq",
    )

    def __init__(self) -> None:
        self._flights: deque[_Flight] = deque()
        self._bytes = 0
        self.phase = Phase.PROBE
        self.match = 0
        self.next = 1
        self.probe_seq = 0
        """Sequence number of the pending probe; 0 if there is none."""
        self.acked_seq = 0
        """Newest request of this leader that the peer answered in this term."""
        self.commit_sent = 0
        self.last_contact_s: float | None = None
        """Time of the peer's last message of any kind."""
        self.answered_s = 0.0
        """Time of the peer's last answer to this leader in this term; the election counts as one."""
        self.held: tuple[int, int] | None = None
        """Index and term of an entry the peer acknowledged before its link broke: the next probe asks for it, even if
        it has been compacted here.
        """
        self.lost = 0
        """Index up to which the peer acknowledged entries that it lacks now; 0 if its state is durable.

        Survives the term: no reply of the peer counts until it shows that entry again.
        """

    def begin_term(self, next_index: int, now_s: float) -> None:
        """Reset the knowledge of an earlier leadership."""
        self.match = 0
        self.acked_seq = 0
        self.commit_sent = 0
        self.answered_s = now_s
        self.held = None
        self.probe_from(next_index)

    def link_broke(self, term: int | None) -> None:
        """Record the peer's last acknowledged entry, which is of `term`; after reconnecting it must show it."""
        if self.match and term is not None:
            self.held = (self.match, term)

    def lose(self) -> None:
        """Discount all entries the peer acknowledged: it lacks them."""
        self.lost, self.match = max(self.lost, self.match), 0
        self.probe_from(self.lost + 1)

    def restore(self) -> None:
        """Record that the peer holds the entries it seemed to lack."""
        self.lost = 0

    def probe_from(self, next_index: int) -> None:
        """Send one request at a time from `next_index`, until one is accepted."""
        self.phase = Phase.PROBE
        # A peer that lost durable state gets no entries: it must not catch up as if nothing had happened.
        self.next = max(next_index, self.match + 1, self.lost + 1)
        self.probe_seq = 0
        self._land_all()

    def snapshot(self) -> None:
        """Send no entries while a snapshot is under way."""
        self.phase = Phase.SNAPSHOT
        self._land_all()

    @property
    def may_send(self) -> bool:
        """Return whether an append request may be sent now."""
        if self.phase is Phase.PROBE:
            return self.probe_seq == 0
        if self.phase is Phase.REPLICATE:
            return len(self._flights) < WINDOW_REQUESTS and self._bytes < WINDOW_BYTES
        return False

    def sent(self, seq: int, last_index: int, size_bytes: int) -> None:
        """Record an append request that was sent; `last_index` is that of its last entry."""
        if self.phase is Phase.PROBE:
            self.probe_seq = seq
            return
        self._flights.append(_Flight(seq, last_index, size_bytes))
        self._bytes += size_bytes
        self.next = last_index + 1

    def accepted(self, seq: int, match_index: int) -> None:
        """Record a reply to request `seq` that the peer holds everything up to `match_index`."""
        self.match = max(self.match, match_index)
        self.next = max(self.next, self.match + 1)
        if self.phase is Phase.PROBE:
            if self.probe_seq and seq == self.probe_seq:
                self.phase = Phase.REPLICATE
                self.next = self.match + 1
                self.probe_seq = 0
                self.held = None
            elif seq > self.probe_seq:
                # A later request was answered before the probe: the probe or its reply was lost, so probe again.
                self.probe_seq = 0
        elif self.phase is Phase.REPLICATE:
            sent = 0
            while self._flights and self._flights[0].seq <= seq:
                flight = self._flights.popleft()
                self._bytes -= flight.size_bytes
                sent = flight.last_index
            if sent > self.match:
                # Links keep order, so a request older than the answered one whose entries the peer lacks was lost.
                self.probe_from(self.match + 1)

    def rejected(self, seq: int, next_index: int) -> None:
        """Record a reply that the peer's log differs; probe at `next_index`, never at or below the match."""
        if self.phase is Phase.REPLICATE or (self.phase is Phase.PROBE and seq == self.probe_seq):
            # While probing, a rejection of an older request is ignored, or each of a whole window would move `next`
            # back. The next probe is always below the rejected one, so probing ends.
            self.probe_from(min(next_index, self.next - 1) if self.phase is Phase.PROBE else min(next_index, self.next))

    def _land_all(self) -> None:
        self._flights.clear()
        self._bytes = 0
