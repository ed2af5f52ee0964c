"""A clock that tests move, and the zone that local times are in."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from forebay.replica.values.units import MICROSECONDS_PER_SECOND, NEVER, Instant


class ManualClock:
    """A clock that moves only when told to: for tests and simulations."""

    __slots__ = ("_monotonic_us", "_now")

    def __init__(self, now: Instant = NEVER) -> None:
        self._now = now
        self._monotonic_us = 0

    def now(self) -> Instant:
        """Return the wall clock as it was set, in microseconds."""
        return self._now

    def monotonic_s(self) -> float:
        """Return the seconds that `advance` has added up to."""
        return self._monotonic_us / MICROSECONDS_PER_SECOND

    def advance(self, duration_s: float) -> None:
        """Let both clocks go on by `duration_s` seconds; ValueError if it is negative."""
        if duration_s < 0:
            raise ValueError(f"a clock cannot advance by {duration_s} s; set the wall clock with set_wall() instead")
        step = round(duration_s * MICROSECONDS_PER_SECOND)
        self._now = Instant(self._now + step)
        self._monotonic_us += step

    def set_wall(self, now: Instant) -> None:
        """Jump the wall clock, forwards or backwards, as an administrator or NTP may; the monotonic one stays."""
        self._now = now


@contextmanager
def local_zone(name: str) -> Iterator[None]:
    """Have local times be those of a zone of the tz database, whatever this machine's are."""
    try:
        with mock.patch.dict(os.environ, TZ=name):
            # The C library reads the variable when it is told to.
            time.tzset()
            yield
    finally:
        time.tzset()
