"""Timing of the leader's scheduling cycles: with a batch, after a rest, when work becomes due, never idly.

A cycle over the scheduling index costs as much as has changed, not as much as is waiting, so a single command has its
cycle with it. Under load, cycles cover many batches, within a bounded share of the time. Without commands a cycle runs
when the last one enabled further work, and at times at which it could do something.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import NoReturn

from forebay.cluster.system import Clock
from forebay.replica.values import MICROSECONDS_PER_SECOND, NEVER, Instant

LOGGER = logging.getLogger(__name__)

PASSES_IN_A_ROW_MAX = 64
"""Consecutive cycles without a command, count: a plan settles after two or three; one that never does is slowed down to
one cycle in PASS_PAUSE_S instead of filling the disk.
"""

PASS_PAUSE_S = 1.0

PASS_CHEAP_S = 0.0002
"""Duration below which a cycle runs with every batch, seconds: it examined a few jobs."""

PASS_REST = 5
"""Rest after a longer cycle, as a multiple of its duration: deciding and answering commands keep five sixths of the
processor for any number of jobs.
"""

PASS_REST_LONG = 20
PASS_REST_LONG_S = 0.1
"""Longer rest, as a multiple of the duration, if it is at most this many seconds: a tenth of a second goes unnoticed,
and a job that changes several times meanwhile is examined once.
"""

ARM_DELAY_S = 0.02
"""Delay before the next due time is computed while idle, seconds: one computation serves many batches."""

TIMER_S_MAX = 30.0
"""Maximum sleep before the next due time is checked again, seconds: time may jump forward meanwhile."""


class PassTimer:
    """Decides whether a batch includes or precedes a cycle, and wakes the pump if one is needed without a batch."""

    def __init__(
        self,
        *,
        next_due: Callable[[Instant], Instant | None],
        idle: Callable[[], bool],
        wake: Callable[[], None],
        clock: Clock,
        fail: Callable[[BaseException], NoReturn],
    ) -> None:
        """Create it.

        `next_due`: earliest time after another at which a cycle over the applied state could do something by time
        alone; `idle`: whether this replica leads and nothing is queued or in flight; `wake`: run the pump.
        """
        self._next_due = next_due
        self._idle = idle
        self._wake = wake
        self._clock = clock
        self._fail = fail
        self._unsettled = False
        """Whether the last cycle decided something, which may enable further work."""
        self._in_a_row = 0
        self._rest_until_s = 0.0
        self._passed_at = NEVER
        """Time of the last cycle: work due by then was done or impossible, and need not be checked again."""
        self._timer: asyncio.TimerHandle | None = None
        self._arming: asyncio.TimerHandle | None = None
        self._resting: asyncio.TimerHandle | None = None
        self.due = False
        """Whether the next batch includes a cycle regardless of its content, and is made for it if necessary."""

    @property
    def sleeping(self) -> bool:
        """Return whether a timer is set for the next cycle."""
        return self._timer is not None

    @property
    def _goes_on(self) -> bool:
        """Return whether the next cycle follows the last one at once."""
        return self._unsettled and self._in_a_row < PASSES_IN_A_ROW_MAX

    def schedule(self) -> None:
        """Request a cycle, with the next batch or in one of its own."""
        self.due = True
        self._wake()

    def wanted(self, *, decided: bool) -> bool:
        """Return whether the batch under construction includes a cycle; `decided`: whether it has events so far."""
        if self.due:
            return True
        if not decided:
            return False
        rest_s = self._rest_until_s - self._clock.monotonic_s()
        if rest_s <= 0:
            return True
        if self._resting is None:
            self._resting = asyncio.get_running_loop().call_later(rest_s, self._rested)
        return False

    def passed(self, at: Instant, *, cost_s: float, found: bool, decided: bool) -> None:
        """Record a cycle at `at` that took `cost_s` seconds. `found`: it has events; `decided`: so had the batch."""
        self.due = False
        self._passed_at = at
        self._unsettled = found
        self._in_a_row = self._in_a_row + 1 if found and not decided else 0
        rest_s = max(PASS_REST * cost_s, min(PASS_REST_LONG * cost_s, PASS_REST_LONG_S))
        self._rest_until_s = self._clock.monotonic_s() + (rest_s if cost_s > PASS_CHEAP_S else 0.0)

    def rest(self) -> None:
        """Schedule the next cycle when nothing is queued or in flight any more."""
        # Under load the next batch includes the next cycle; without load it needs a timer.
        if self._goes_on:
            self.schedule()
        elif self._arming is None:
            self._arming = asyncio.get_running_loop().call_later(ARM_DELAY_S, self._check_due)

    def set_back(self) -> None:
        """Request a cycle after the clock was set back: work may be due again."""
        self._passed_at = NEVER
        self.schedule()

    def stop(self) -> None:
        """Cancel planned cycles: this replica does not lead."""
        for handle in (self._timer, self._arming, self._resting):
            if handle is not None:
                handle.cancel()
        self._timer = self._arming = self._resting = None
        self.due = False

    def _rested(self) -> None:
        self._resting = None
        self.schedule()

    def _check_due(self) -> None:
        """Run the cycle that is due by time, or sleep until one is."""
        self._arming = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        try:
            if not self._idle():
                # The end of pending work calls `rest` again.
                return
            loop = asyncio.get_running_loop()
            if self._goes_on:
                # Cycles have been following each other since the timer was set: the next one is on its way.
                self.schedule()
                return
            if self._unsettled:
                LOGGER.error(
                    "the scheduler still finds changes after %d cycles; it continues at a lower rate", self._in_a_row
                )
                self._timer = loop.call_later(PASS_PAUSE_S, self.schedule)
                return
            due = self._next_due(self._passed_at)
            if due is None:
                return
            wait_s = (due - self._clock.now()) / MICROSECONDS_PER_SECOND
            if wait_s <= 0:
                self.schedule()
            else:
                self._timer = loop.call_later(min(wait_s, TIMER_S_MAX), self._check_due)
        except Exception as error:
            self._fail(error)
