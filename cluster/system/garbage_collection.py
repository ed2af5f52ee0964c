"""Garbage collection of cycles: frequent for new objects, rare and at chosen moments for all objects.

A full collection visits each object of the state; with 100,000 jobs that takes most of a second, in which a leader
sends no heartbeat. The state is a tree and never part of a cycle, so a full collection finds almost nothing. Python
would start it at any moment. It is disabled here and run manually: at start, and later when it cannot cost the
leadership, that is, on a follower or if the last one was short.

Python still collects new objects, a little at a time. A node of a persistent map refers to up to 32 others, so 20,000
objects take 3 to 20 ms. Survivors are not visited a second time: that would take a tenth of a second and more, every
few seconds of load.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

from forebay.cluster.system.clock import Clock

YOUNG_OBJECTS = 4_000
"""New objects before a collection of the young generation, count: one to four milliseconds."""

NEVER_ROUNDS = 1_000_000_000
"""Effectively never: older generations are collected manually."""

FULL_PERIOD_S = 600.0
"""Period of full collections if possible, seconds: cycles that grow old are rare and small."""

FULL_SHARE = 0.25
"""Share of the shortest election timeout that a leader may spend on one."""


READER_YOUNG_OBJECTS = 20_000
"""New objects before a ledger reader collects the young generation, count: nothing waits for its loop."""

READER_MIDDLE_ROUNDS = 20
"""Young collections of a ledger reader before one of the middle generation, count."""

READER_ROUNDS = 10
"""Middle collections of a ledger reader before a full one, count, if Python finds enough new objects."""


def collect_for_a_reader() -> None:
    """Configure rare collections for a process that folds the ledger beside a replica: it, too, keeps only states."""
    gc.set_threshold(READER_YOUNG_OBJECTS, READER_MIDDLE_ROUNDS, READER_ROUNDS)


class Collector:
    """Runs a full collection at start and then periodically, when it disturbs nothing."""

    def __init__(self, *, leads: Callable[[], bool], election_min_s: float, clock: Clock) -> None:
        """Create a collector; `leads` returns whether a pause of this process would cost the cluster its leader."""
        self._leads = leads
        self._bound_s = FULL_SHARE * election_min_s
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None
        self._before = gc.get_threshold()
        self.last_s = 0.0
        """Duration of the last full collection, seconds."""
        self.passed_over = 0
        """Full collections skipped since the last one because they would have taken too long, count."""

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
        """Run a full collection, unless this replica leads and the last one took too long for a leader."""
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
