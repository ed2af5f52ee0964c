"""Where Forebay reads a clock: the only importer of `time`.

Everything below `cluster` takes time as an argument (law 3 of the design); everything in `cluster` takes a `Clock`, so
that a test can pass one that stands still or jumps.
"""

import datetime
import time
from typing import Final, Protocol

from replica.values import MICROSECONDS_PER_SECOND, NEVER, Instant

NANOSECONDS_PER_MICROSECOND: Final = 1_000


class Clock(Protocol):
    """What tells the time: one wall clock for facts, one monotonic clock for waiting."""

    def now(self) -> Instant:
        """Return the wall clock in microseconds since the epoch, UTC; it may jump when somebody sets it."""
        ...

    def monotonic_s(self) -> float:
        """Return seconds since an arbitrary start; it never goes backwards and has nothing to do with the date."""
        ...


class SystemClock:
    """The machine's own clocks."""

    __slots__ = ()

    def now(self) -> Instant:
        """Return the wall clock in microseconds since the epoch, UTC."""
        return Instant(time.time_ns() // NANOSECONDS_PER_MICROSECOND)

    def monotonic_s(self) -> float:
        """Return seconds of the system's monotonic clock."""
        return time.monotonic()


def format_instant(instant: Instant) -> str | None:
    """Return the instant as ISO 8601 in UTC with microseconds, `2026-01-31T12:00:00.000000Z`; None for NEVER."""
    if instant == NEVER:
        return None
    whole_s, fraction_us = divmod(instant, MICROSECONDS_PER_SECOND)
    moment = datetime.datetime.fromtimestamp(whole_s, tz=datetime.UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{fraction_us:06d}Z"


def parse_instant(text: str) -> Instant:
    """Return the instant that an ISO 8601 text with a zone says; ValueError says what would be right.

    A text without a zone is refused: a client and a replica in different zones would read two different moments.
    """
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a time; write it as 2026-01-31T12:00:00Z") from None
    if moment.tzinfo is None:
        raise ValueError(f"the time {text!r} has no zone; write {text}Z for UTC, or {text}+01:00")
    since = moment - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    return Instant((since.days * 86_400 + since.seconds) * MICROSECONDS_PER_SECOND + since.microseconds)
