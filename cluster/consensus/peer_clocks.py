"""Comparison of the replicas' wall clocks over their links: bounds from a majority, and deviating clocks.

Theory of operation
===================

Every replica periodically requests each peer's wall clock over the existing link. It records its own monotonic clock
when the request leaves and when the reply arrives. As in NTP (RFC 5905, section 8), the peer read its clock between
these two moments. When the reply arrives, the peer's clock thus shows at least the stated time, and at most the stated
time plus the round trip. Between replies, a peer's clock is assumed to advance like this replica's monotonic clock.
Readings older than STALE_S are ignored.

These intervals, one for each voter, give two bounds that no minority of wrong clocks can move: a majority's clocks have
passed `earliest`, and a majority's clocks have not reached `latest`. The cluster's time is kept between the bounds
(`cluster.server.agreed_time`). A clock deviates if the clocks of a majority of the voters are all more than OFF_S ahead
of it, or all more than OFF_S behind it. With readings of fewer clocks, no clock counts as deviating.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, NamedTuple

import msgspec

from forebay.cluster.consensus.frames import ClockReply, ClockRequest
from forebay.cluster.system import Clock
from forebay.replica.values import MICROSECONDS_PER_SECOND, Instant

ASK_S: Final = 2.0
"""Interval of requests to each peer, seconds: a request and a reply in each direction."""

STALE_S: Final = 10.0
"""Age at which a reading is ignored, seconds: five unanswered requests. Two monotonic clocks drift apart by a
millisecond in this time.
"""

OFF_S: Final = 5.0
"""Maximum deviation of a wall clock from a majority's, seconds. Clocks under NTP differ by milliseconds, but a machine
that has just started may deviate more for a while.
"""

OFF_US: Final = round(OFF_S * MICROSECONDS_PER_SECOND)


class ClockBounds(NamedTuple):
    """Bounds from a majority of the voters' wall clocks, which have passed `earliest` and not reached `latest`.

    None without recent readings from a majority.
    """

    earliest: Instant | None
    latest: Instant | None
    is_final: bool = True
    """True if further readings matter little: every voter was read, or the bounds are at most OFF_S apart.

    With readings of a bare majority, one wrong clock determines `earliest` or `latest`.
    """


class Offset(msgspec.Struct, frozen=True):
    """Lead of a peer's wall clock over this replica's: minimum and maximum, microseconds."""

    least_us: int
    most_us: int

    @property
    def middle_s(self) -> float:
        """Middle of the interval, seconds."""
        return (self.least_us + self.most_us) / 2 / MICROSECONDS_PER_SECOND


class _Reading(NamedTuple):
    wall_us: int
    """Peer's clock in its reply."""
    heard_s: float
    round_trip_us: int


class PeerClocks:
    """Readings of the peers' wall clocks, and the bounds and deviations derived from them."""

    def __init__(self, me: str, clock: Clock) -> None:
        self._me: Final = me
        self._clock: Final = clock
        self._seq = 0
        self._asked: dict[str, tuple[int, float]] = {}
        """Peer -> sequence number of the pending request, and its departure on the monotonic clock."""
        self._readings: dict[str, _Reading] = {}

    def ask(self, peer: str) -> ClockRequest:
        """Return a request to send to `peer` now. It replaces an unanswered request."""
        self._seq += 1
        self._asked[peer] = (self._seq, self._clock.monotonic_s())
        return ClockRequest(0, self._seq)

    def answer(self, request: ClockRequest) -> ClockReply:
        """Return the reply to a peer's request."""
        return ClockReply(0, request.seq, max(0, self._clock.now()))

    def heard(self, peer: str, reply: ClockReply) -> None:
        """Record a peer's reply; ignore a reply without a pending request."""
        asked = self._asked.get(peer)
        if asked is None or asked[0] != reply.seq:
            return
        del self._asked[peer]
        now_s = self._clock.monotonic_s()
        self._readings[peer] = _Reading(reply.wall_us, now_s, _us(now_s - asked[1]))

    def forget(self, gone: str) -> None:
        """Drop the pending request of a peer whose link broke."""
        self._asked.pop(gone, None)

    def bounds(self, voters: Collection[str]) -> ClockBounds:
        """Return the bounds on the present time from the clocks of a majority of `voters`."""
        own, majority = self._clock.now(), len(voters) // 2 + 1
        offsets = [offset for voter in voters if (offset := self.offset(voter)) is not None]
        if not voters or len(offsets) < majority:
            return ClockBounds(None, None)
        earliest = sorted((own + offset.least_us for offset in offsets), reverse=True)[majority - 1]
        latest = sorted(own + offset.most_us for offset in offsets)[majority - 1]
        is_final = len(offsets) == len(voters) or latest - earliest <= OFF_US
        return ClockBounds(Instant(earliest), Instant(latest), is_final)

    def offset(self, peer: str) -> Offset | None:
        """Return the lead of a peer's clock over this replica's; None without a recent reading."""
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
        """Return whether the clocks of a majority of `voters` are all more than OFF_S ahead of or behind this one."""
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
