"""How long to wait before asking all replicas again: longer each time, and never in step with other clients."""

import random
from collections.abc import Callable
from typing import Final

FIRST_WAIT_S: Final = 0.05
"""Seconds before the second round: elections take tenths of a second, so asking soon often meets a new leader."""

LONGEST_WAIT_S: Final = 1.0
"""Longest wait between rounds, seconds: 1,000 waiting clients then cost a replica about 1,500 requests a second."""

LEAST_SHARE: Final = 0.5
"""Share of a wait that is certain; the rest is chance: clients that failed together do not come back together."""

RETRY_AFTER_S_MAX: Final = 60.0
"""Longest Retry-After that is believed, seconds: the deadline of the call bounds it anyway."""


class BackOff:
    """The waits of one call."""

    def __init__(self, chance: Callable[[], float] = random.random) -> None:
        self._chance = chance
        self._next_s = FIRST_WAIT_S

    def wait_s(self, retry_after_s: float = 0.0) -> float:
        """Return the next wait in seconds: at least `retry_after_s`, doubled each time up to LONGEST_WAIT_S."""
        wait_s = self._next_s * (LEAST_SHARE + (1 - LEAST_SHARE) * self._chance())
        self._next_s = min(LONGEST_WAIT_S, 2 * self._next_s)
        return max(wait_s, min(retry_after_s, RETRY_AFTER_S_MAX))


def parse_retry_after(text: str | None) -> float:
    """Return the seconds of a Retry-After header; 0.0 where there is none or it is a date or nonsense."""
    try:
        seconds = float(text) if text else 0.0
    except ValueError:
        return 0.0
    return seconds if 0.0 < seconds < float("inf") else 0.0
