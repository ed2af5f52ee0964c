"""Clocks: the only importer of `time`.

Packages below `cluster` take time as an argument (law 3 of the design). Modules in `cluster` take a `Clock`, so that
tests can pass a clock that stands still or jumps.
"""

import datetime
import time
from typing import Final, Protocol

from forebay.replica.values import MICROSECONDS_PER_SECOND, NEVER, Instant

NANOSECONDS_PER_MICROSECOND: Final = 1_000


class Clock(Protocol):
    """Source of time: a wall clock for facts, a monotonic clock for waiting."""

    def now(self) -> Instant:
        """Return the wall clock in microseconds since the epoch, UTC; it may jump when it is set."""
        ...

    def monotonic_s(self) -> float:
        """Return seconds since an arbitrary start; they never decrease and are unrelated to the date."""
        ...


class SystemClock:
    """Clocks of this machine."""

    __slots__ = ()

    def now(self) -> Instant:
        """Return the wall clock in microseconds since the epoch, UTC."""
        return Instant(time.time_ns() // NANOSECONDS_PER_MICROSECOND)

    def monotonic_s(self) -> float:
        """Return seconds of the system's monotonic clock."""
        return time.monotonic()


def processor_s() -> float:
    """Return the processor time of this process and its threads, seconds."""
    return time.process_time()


def format_instant(instant: Instant) -> str | None:
    """Format an instant as ISO 8601 in UTC with microseconds, `2026-01-31T12:00:00.000000Z`; None for NEVER."""
    if instant == NEVER:
        return None
    whole_s, fraction_us = divmod(instant, MICROSECONDS_PER_SECOND)
    moment = datetime.datetime.fromtimestamp(whole_s, tz=datetime.UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{fraction_us:06d}Z"


def parse_instant(text: str) -> Instant:
    """Parse an ISO 8601 time with a zone.

    A text without a zone is rejected: client and replica in different zones would read two different times.

    Raises:
        ValueError: The text is not a time with a zone; the message has the valid form.
    """
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a time; write it as 2026-01-31T12:00:00Z") from None
    if moment.tzinfo is None:
        raise ValueError(f"the time {text!r} has no zone; write {text}Z for UTC, or for example {text}+01:00")
    since = moment - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    return Instant((since.days * 86_400 + since.seconds) * MICROSECONDS_PER_SECOND + since.microseconds)
