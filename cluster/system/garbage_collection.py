"""Garbage collection of cycles: often among new objects, rarely and at a chosen moment among all.

A collection of everything walks over each object of the state; with 100,000 jobs that takes most of a second, in which
a leader sends no heartbeat. The state itself is a tree and never part of a cycle, so such a collection finds nearly
nothing. Python starts them by itself, at any moment; here that is switched off, and one is run by hand: at the start,
and later where it cannot cost the leadership: on a follower, or where the last one was short.

What Python still does by itself is to look through what is new, a little at a time. A node of a persistent map refers
to up to 32 others, so 20,000 objects take 3 to 20 ms, and what has survived that is not looked through a second time:
that would take a tenth of a second and more, every few seconds of load.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

from cluster.system.clock import Clock

YOUNG_OBJECTS = 4_000
"""New objects after which the young are collected, count: one to four milliseconds."""

NEVER_ROUNDS = 1_000_000_000
"""As good as never: what is not young is collected by hand."""

FULL_PERIOD_S = 600.0
"""How often everything is collected if that is possible, seconds: cycles that grow old are rare and small."""

FULL_SHARE = 0.25
"""The part of the shortest election timeout that a leader may spend on it."""


READER_YOUNG_OBJECTS = 20_000
"""New objects after which a reader of the ledger collects the young, count: nobody waits for its loop."""

READER_MIDDLE_ROUNDS = 20
"""Rounds among the young after which it collects the middle-aged too, count."""

READER_ROUNDS = 10
"""Rounds among the middle-aged after which it collects everything, if Python finds that enough of it is new."""


def collect_for_a_reader() -> None:
    """Have a process that folds the ledger beside a replica collect rarely: all that it keeps is states, too."""
    gc.set_threshold(READER_YOUNG_OBJECTS, READER_MIDDLE_ROUNDS, READER_ROUNDS)


class Collector:
    """Collects everything once now and then periodically, when that harms nobody."""

    def __init__(self, *, leads: Callable[[], bool], election_min_s: float, clock: Clock) -> None:
        """`leads`: whether a pause of this process would cost the cluster its leader."""
        self._leads = leads
        self._bound_s = FULL_SHARE * election_min_s
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None
        self._before = gc.get_threshold()
        self.last_s = 0.0
        """How long the last full collection took, seconds."""
        self.passed_over = 0
        """How often one was due and would have been too long, since the last one."""

    def start(self) -> None:
        """Take over from Python's own timing, with everything that is loaded collected once."""
        gc.set_threshold(YOUNG_OBJECTS, NEVER_ROUNDS, NEVER_ROUNDS)
        self._collect()
        self._timer = asyncio.get_running_loop().call_later(FULL_PERIOD_S, self.due)

    def stop(self) -> None:
        """Collect no more, and leave it to Python again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        gc.set_threshold(*self._before)

    def due(self) -> None:
        """Collect everything, unless this replica leads and the last time took too long for a leader."""
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
