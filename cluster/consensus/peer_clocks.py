"""Wall clocks of the replicas, compared over their links: what a majority of them says, and whose is off.

Theory of operation
===================

Every replica asks each peer what its wall clock says, on the link there is, and notes its own monotonic clock when the
question leaves and when the answer comes. As in NTP (RFC 5905, section 8), the peer's clock was read between the two:
so when the answer is here, it shows at least what it said, and at most the round trip more. Between two answers a
peer's clock is taken to go on as this replica's monotonic clock does; what is older than STALE_S counts for nothing.

From such intervals, one a voter, two bounds follow that no minority of wrong clocks can move: a majority's clocks have
passed `earliest`, and a majority's have not reached `latest`. What the cluster takes for the time is held between them
(`cluster.server.agreed_time`). A clock is off where a majority of the voters' are all on one side of it, OFF_S away:
where less than that can be heard, nobody can tell whose is wrong, and none is.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, NamedTuple

import msgspec

from cluster.consensus.frames import ClockReply, ClockRequest
from cluster.system import Clock
from replica.values import MICROSECONDS_PER_SECOND, Instant

ASK_S: Final = 2.0
"""How often each peer is asked, seconds: two frames each way, and a clock that was set is noticed within it."""

STALE_S: Final = 10.0
"""Age from which a reading counts for nothing, seconds: five questions without an answer. Two monotonic clocks drift
apart by a millisecond in it."""

OFF_S: Final = 5.0
"""How far a wall clock may be from a majority's, seconds. Clocks that NTP keeps differ by milliseconds; a machine that
was just started may need a while."""

OFF_US: Final = round(OFF_S * MICROSECONDS_PER_SECOND)


class ClockBounds(NamedTuple):
    """What a majority of the voters' wall clocks say: they have passed `earliest` and not reached `latest`.

    None where a majority could not be read lately.
    """

    earliest: Instant | None
    latest: Instant | None
    is_final: bool = True
    """Whether more readings would not change them much: every voter was read, or they are at most OFF_S apart. Where a
    bare majority was read, one wrong clock of it is `earliest` or `latest`."""


class Offset(msgspec.Struct, frozen=True):
    """How far a peer's wall clock is ahead of this replica's, microseconds: no less, no more."""

    least_us: int
    most_us: int

    @property
    def middle_s(self) -> float:
        """The likeliest one, seconds."""
        return (self.least_us + self.most_us) / 2 / MICROSECONDS_PER_SECOND


class _Reading(NamedTuple):
    wall_us: int
    """What the peer's clock said when it answered."""
    heard_s: float
    round_trip_us: int


class PeerClocks:
    """Readings of the peers' wall clocks, by id, and what follows from them and this replica's own."""

    def __init__(self, me: str, clock: Clock) -> None:
        self._me: Final = me
        self._clock: Final = clock
        self._seq = 0
        self._asked: dict[str, tuple[int, float]] = {}
        """Peer -> the question under way, and when it left, on the monotonic clock."""
        self._readings: dict[str, _Reading] = {}

    def ask(self, peer: str) -> ClockRequest:
        """Return the question to send to `peer` now; it takes the place of one that was not answered."""
        self._seq += 1
        self._asked[peer] = (self._seq, self._clock.monotonic_s())
        return ClockRequest(0, self._seq)

    def answer(self, request: ClockRequest) -> ClockReply:
        """Return the answer to a peer's question."""
        return ClockReply(0, request.seq, max(0, self._clock.now()))

    def heard(self, peer: str, reply: ClockReply) -> None:
        """Take a peer's answer; one to no question under way says nothing."""
        asked = self._asked.get(peer)
        if asked is None or asked[0] != reply.seq:
            return
        del self._asked[peer]
        now_s = self._clock.monotonic_s()
        self._readings[peer] = _Reading(reply.wall_us, now_s, _us(now_s - asked[1]))

    def forget(self, gone: str) -> None:
        """Expect no answer any more: the link broke."""
        self._asked.pop(gone, None)

    def bounds(self, voters: Collection[str]) -> ClockBounds:
        """Return what a majority of `voters` says now."""
        own, majority = self._clock.now(), len(voters) // 2 + 1
        offsets = [offset for voter in voters if (offset := self.offset(voter)) is not None]
        if not voters or len(offsets) < majority:
            return ClockBounds(None, None)
        earliest = sorted((own + offset.least_us for offset in offsets), reverse=True)[majority - 1]
        latest = sorted(own + offset.most_us for offset in offsets)[majority - 1]
        is_final = len(offsets) == len(voters) or latest - earliest <= OFF_US
        return ClockBounds(Instant(earliest), Instant(latest), is_final)

    def offset(self, peer: str) -> Offset | None:
        """Return how far a peer's clock is ahead of this replica's; None if it was not read lately."""
        if peer == self._me:
            return Offset(0, 0)
        reading = self._readings.get(peer)
        if reading is None:
            return None
        age_s = self._clock.monotonic_s() - reading.heard_s
        if age_s > STALE_S:
            return None
        least_us = reading.wall_us + _us(age_s) - self._clock.now()
        return Offset(least_us, least_us + reading.round_trip_us)

    def is_off(self, one: str, voters: Collection[str]) -> bool:
        """Whether a majority of `voters` have clocks that are all more than OFF_S ahead of this one's, or behind."""
        mine = self.offset(one)
        if mine is None:
            return False
        others = [offset for voter in voters if voter != one and (offset := self.offset(voter)) is not None]
        majority = len(voters) // 2 + 1
        ahead = sum(other.least_us - mine.most_us > OFF_US for other in others)
        behind = sum(mine.least_us - other.most_us > OFF_US for other in others)
        return max(ahead, behind) >= majority


def _us(seconds: float) -> int:
    return round(max(0.0, seconds) * MICROSECONDS_PER_SECOND)
