"""Timing of the leader's scheduling cycles: with a batch, after a rest, or when work becomes due; never without cause.

The cost of a cycle depends on the number of changes, not on the number of waiting jobs, so a single command gets its
cycle at once. Under load, one cycle covers many batches, within a bounded share of the time. Without commands, a cycle
runs if the last cycle enabled further work, and at times at which a cycle could start something.
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
"""Number of consecutive cycles without a command. A plan settles after two or three cycles; a plan that never settles
is slowed down to one cycle in PASS_PAUSE_S, instead of filling the disk.
"""

PASS_PAUSE_S = 1.0

PASS_CHEAP_S = 0.0002
"""Duration below which a cycle runs with every batch, seconds: such a cycle examines a few jobs."""

PASS_REST = 5
"""Rest after a longer cycle, as a multiple of its duration: commands get five sixths of the processor for any number of
jobs.
"""

PASS_REST_LONG = 20
PASS_REST_LONG_S = 0.1
"""Longer rest, as a multiple of the duration, up to this many seconds. Users do not notice a tenth of a second, and a
job that changes several times in it is examined once.
"""

ARM_DELAY_S = 0.02
"""Delay before an idle leader computes the next due time, seconds: one computation serves many batches."""

TIMER_S_MAX = 30.0
"""Maximum sleep before the next due time is checked again, seconds, because the agreed time may jump forward."""


class PassTimer:
    """Decides whether a batch includes or precedes a cycle, and wakes the pump for a cycle without a batch."""

    def __init__(
        self,
        *,
        next_due: Callable[[Instant], Instant | None],
        idle: Callable[[], bool],
        wake: Callable[[], None],
        clock: Clock,
        fail: Callable[[BaseException], NoReturn],
    ) -> None:
        """Initialize without a planned cycle.

        `next_due` returns the earliest time, after a given one, at which a cycle over the applied state could do
        something by time alone. `idle` returns whether this replica leads and nothing is queued or in flight. `wake`
        runs the pump.
        """
        self._next_due = next_due
        self._idle = idle
        self._wake = wake
        self._clock = clock
        self._fail = fail
        self._unsettled = False
        """True if the last cycle decided something, which may enable further work."""
        self._in_a_row = 0
        self._rest_until_s = 0.0
        self._passed_at = NEVER
        """Time of the last cycle: work due until then is done or impossible."""
        self._timer: asyncio.TimerHandle | None = None
        self._arming: asyncio.TimerHandle | None = None
        self._resting: asyncio.TimerHandle | None = None
        self.due = False
        """True if a cycle is requested: the next batch includes it, and an empty batch is made for it if necessary."""

    @property
    def sleeping(self) -> bool:
        """Return whether a timer is set for the next cycle."""
        return self._timer is not None

    @property
    def _goes_on(self) -> bool:
        """Return whether the next cycle follows the last one at once."""
        return self._unsettled and self._in_a_row < PASSES_IN_A_ROW_MAX

    def schedule(self) -> None:
        """Request a cycle, with the next batch or in a batch of its own."""
        self.due = True
        self._wake()

    def wanted(self, *, decided: bool) -> bool:
        """Return whether the batch under construction gets a cycle. `decided`: the batch has events."""
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
        """Record a cycle at `at` that took `cost_s` seconds. `found`: it has events; `decided`: its batch had some."""
        self.due = False
        self._passed_at = at
        self._unsettled = found
        self._in_a_row = self._in_a_row + 1 if found and not decided else 0
        rest_s = max(PASS_REST * cost_s, min(PASS_REST_LONG * cost_s, PASS_REST_LONG_S))
        self._rest_until_s = self._clock.monotonic_s() + (rest_s if cost_s > PASS_CHEAP_S else 0.0)

    def rest(self) -> None:
        """Schedule the next cycle, because nothing is queued or in flight."""
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
        """Run a cycle that is due by time, or set a timer for the next one."""
        self._arming = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        try:
            if not self._idle():
                # `rest` is called again when the pending work ends.
                return
            loop = asyncio.get_running_loop()
            if self._goes_on:
                # Other cycles have run since the timer was set, and the next one follows at once.
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
