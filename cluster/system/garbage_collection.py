"""Garbage collection of cycles: often for new objects, and rarely, at chosen moments, for all objects.

A full collection visits each object of the state. With 100,000 jobs that takes most of a second, in which a leader
sends no heartbeat. The state is a tree and never part of a cycle, so a full collection finds almost nothing, but Python
would start one at any moment. It is therefore disabled here and run manually: at start, and later when it cannot cost
the leadership, that is, on a follower or if the last one was short.

Python still collects new objects, a little at a time. A node of a persistent map refers to up to 32 others, so 20,000
objects take 3 to 20 ms. Objects that survive are not visited a second time, because that would take a tenth of a second
or more, every few seconds of load.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

from forebay.cluster.system.clock import Clock

YOUNG_OBJECTS = 4_000
"""Number of new objects that start a collection of the young generation, which takes one to four milliseconds."""

NEVER_ROUNDS = 1_000_000_000
"""Threshold that is never reached, because older generations are collected manually."""

FULL_PERIOD_S = 600.0
"""Period of full collections if possible, seconds: cycles that grow old are rare and small."""

FULL_SHARE = 0.25
"""Share of the shortest election timeout that a leader may spend on a full collection."""


READER_YOUNG_OBJECTS = 20_000
"""Number of new objects that start a collection of a ledger reader's young generation: no event loop waits for it."""

READER_MIDDLE_ROUNDS = 20
"""Number of a ledger reader's young collections before one of the middle generation."""

READER_ROUNDS = 10
"""Number of a ledger reader's middle collections before a full one, if there are enough new objects."""


def collect_for_a_reader() -> None:
    """Configure rare collections for a process that folds the ledger beside a replica, because it keeps only states."""
    gc.set_threshold(READER_YOUNG_OBJECTS, READER_MIDDLE_ROUNDS, READER_ROUNDS)


class Collector:
    """Runs a full collection at start, and then periodically when it does no harm."""

    def __init__(self, *, leads: Callable[[], bool], election_min_s: float, clock: Clock) -> None:
        """Initialize. `leads` returns whether a pause of this process would cost the cluster its leader."""
        self._leads = leads
        self._bound_s = FULL_SHARE * election_min_s
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None
        self._before = gc.get_threshold()
        self.last_s = 0.0
        """Duration of the last full collection, seconds."""
        self.passed_over = 0
        """Number of full collections skipped since the last one, because they would have taken too long."""

    def start(self) -> None:
        """Replace Python's own timing, after one full collection."""
        gc.set_threshold(YOUNG_OBJECTS, NEVER_ROUNDS, NEVER_ROUNDS)
        self._collect()
        self._timer = asyncio.get_running_loop().call_later(FULL_PERIOD_S, self.due)

    def stop(self) -> None:
        """Restore Python's own timing."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        gc.set_threshold(*self._before)

    def due(self) -> None:
        """Run a full collection, unless this replica leads and the last collection took too long for a leader."""
        self._timer = asyncio.get_running_loop().call_later(FULL_PERIOD_S, self.due)
        if self._leads() and self.last_s > self._bound_s:
            self.passed_over += 1
            return
        self._collect()

    def _collect(self) -> None:
        started_s = self._clock.monotonic_s()
        gc.collect()
        self.last_s = self._clock.monotonic_s() - started_s
        self.passed_over = 0
