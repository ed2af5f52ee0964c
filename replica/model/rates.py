"""How long transfers take here, measured: sums over the recorded stage-ins, stage-outs and teardowns of a pool.

Sums are kept instead of single measurements, and halved now and then, so that what was measured long ago fades. All
figures are integers, the same on every replica.
"""

from __future__ import annotations

import msgspec

from replica.values import MICROSECONDS_PER_SECOND

MEASURED_MAX = 256
"""Operations summed up before all sums are halved, count: the last few hundred decide."""

DRAIN_TIME_S = 60
"""What stage-out and teardown are expected to take until some were measured, seconds."""


class Measured(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Sums over one kind of operation."""

    count: int = 0
    duration_us: int = 0
    moved_bytes: int = 0
    granted_bytes: int = 0
    """The capacity of the buffers: tells how long one will take whose data nobody has counted yet."""

    def with_one(self, duration_us: int, moved_bytes: int, granted_bytes: int) -> Measured:
        """Return the sums with one operation more."""
        half = 2 if self.count >= MEASURED_MAX else 1
        return Measured(
            self.count // half + 1,
            self.duration_us // half + max(0, duration_us),
            self.moved_bytes // half + max(0, moved_bytes),
            self.granted_bytes // half + max(0, granted_bytes),
        )

    @property
    def mean_us(self) -> int:
        """How long one took on average, µs; 0 where none was measured."""
        return self.duration_us // self.count if self.count else 0

    @property
    def bytes_per_s(self) -> int:
        """The rate; 0 where nothing was measured."""
        return self.moved_bytes * MICROSECONDS_PER_SECOND // self.duration_us if self.duration_us else 0

    def expected_us(self, granted_bytes: int) -> int:
        """Return how long it should take for a buffer of this capacity, µs: in proportion to those measured."""
        if self.granted_bytes and granted_bytes:
            return granted_bytes * self.duration_us // self.granted_bytes
        return self.mean_us


class Rates(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What was measured of one pool (of buffers without a pool, under the empty name)."""

    pool: str
    stage_in: Measured = Measured()
    stage_out: Measured = Measured()
    teardown: Measured = Measured()

    @property
    def drain_us(self) -> int:
        """How long stage-out and teardown take together, on average, µs."""
        if not self.stage_out.count and not self.teardown.count:
            return DRAIN_TIME_S * MICROSECONDS_PER_SECOND
        return self.stage_out.mean_us + self.teardown.mean_us


def rates_of(rates: Rates | None, pool: str) -> Rates:
    """Return the rates, or those of a pool of which nothing was measured."""
    return Rates(pool) if rates is None else rates
