"""Leader's view of one peer's log: probe, replicate, snapshot, and the sending window (H16, H26).

The states are those of etcd's progress. A peer whose log position is unknown gets one request at a time, until it
accepts one. Requests are then sent without waiting for replies, inside a window. A peer that needs compacted entries
gets a snapshot.
"""

from collections import deque
from enum import Enum
from typing import Final, NamedTuple

WINDOW_BYTES: Final = 4 << 20
"""Maximum size of unanswered entries to one peer: enough for 1 Gbit/s at 30 ms, and cheap to resend."""

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
        """Sequence number of this leader's newest request that the peer answered in this term."""
        self.commit_sent = 0
        self.last_contact_s: float | None = None
        """Time of the peer's last message of any kind."""
        self.answered_s = 0.0
        """Time of the peer's last reply to this leader in this term; initially the time of the election."""
        self.held: tuple[int, int] | None = None
        """Index and term of the last entry that the peer acknowledged before its link broke. The next probe names this
        entry, even if it has been compacted here.
        """
        self.lost = 0
        """Index up to which the peer acknowledged entries that it lacks now; 0 if its state is durable.

        Kept across terms: replies of the peer do not count until it has the entry at this index again.
        """

    def begin_term(self, next_index: int, now_s: float) -> None:
        """Reset the progress at the begin of a leadership."""
        self.match = 0
        self.acked_seq = 0
        self.commit_sent = 0
        self.answered_s = now_s
        self.held = None
        self.probe_from(next_index)

    def link_broke(self, term: int | None) -> None:
        """Record the peer's last acknowledged entry, of `term`, to check later that the peer still has it."""
        if self.match and term is not None:
            self.held = (self.match, term)

    def lose(self) -> None:
        """Record that the peer lacks entries it acknowledged; none of its acknowledgements counts any more."""
        self.lost, self.match = max(self.lost, self.match), 0
        self.probe_from(self.lost + 1)

    def restore(self) -> None:
        """Record that the peer has the entries that it seemed to lack."""
        self.lost = 0

    def probe_from(self, next_index: int) -> None:
        """Send one request at a time from `next_index`, until one is accepted."""
        self.phase = Phase.PROBE
        # A peer that lost durable state gets no entries: it must not catch up as if nothing had happened.
        self.next = max(next_index, self.match + 1, self.lost + 1)
        self.probe_seq = 0
        self._land_all()

    def snapshot(self) -> None:
        """Stop sending entries, because a snapshot is sent."""
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
        """Record the reply to request `seq`: the peer has all entries up to `match_index`."""
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
                # Links keep order. An older request whose entries the peer lacks was therefore lost.
                self.probe_from(self.match + 1)

    def rejected(self, seq: int, next_index: int) -> None:
        """Record the reply that the peer's log differs. Probe at `next_index`, but after the matching entries."""
        if self.phase is Phase.REPLICATE or (self.phase is Phase.PROBE and seq == self.probe_seq):
            # While probing, ignore rejections of older requests; otherwise each rejection of a whole window would move
            # `next` back. The next probe is always below the rejected one, so probing ends.
            self.probe_from(min(next_index, self.next - 1) if self.phase is Phase.PROBE else min(next_index, self.next))

    def _land_all(self) -> None:
        self._flights.clear()
        self._bytes = 0
