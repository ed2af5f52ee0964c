"""When the leader runs its next scheduling pass: with a batch, after a rest, when something is due by time, never idly.

A pass over the scheduling index costs what has changed, not what waits, so one sequential command has its pass with
it; under load passes share the work of many batches, at a bounded share of the time. By itself it is run when
the last one made more possible, and when an instant comes at which it could do something.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import NoReturn

from cluster.system import Clock
from replica.values import MICROSECONDS_PER_SECOND, NEVER, Instant

LOGGER = logging.getLogger(__name__)

PASSES_IN_A_ROW_MAX = 64
"""Passes that follow each other without a command, count: a plan settles after two or three; one that never does is
slowed down to one pass in PASS_PAUSE_S rather than let fill the disk."""

PASS_PAUSE_S = 1.0

PASS_CHEAP_S = 0.0002
"""A pass that took less than this is run with every batch, seconds: it examined a few jobs."""

PASS_REST = 5
"""After a dearer pass the leader rests from passes for at least this many times what it took: whatever the jobs,
deciding and answering commands keep five sixths of the processor."""

PASS_REST_LONG = 20
PASS_REST_LONG_S = 0.1
"""It rests for this many times what it took if that is at most so many seconds: nobody notices a tenth of a second, and
a job that changes several times meanwhile is examined once."""

ARM_DELAY_S = 0.02
"""When nothing is under way, what is due next is determined after this long, seconds: one check serves many batches."""

TIMER_S_MAX = 30.0
"""The longest sleep before the next due instant is checked again, seconds: it may jump forward meanwhile."""


class PassTimer:
    """Says whether a batch has a pass in it or behind it, and wakes the pump when one is needed without a batch."""

    def __init__(
        self,
        *,
        next_due: Callable[[Instant], Instant | None],
        idle: Callable[[], bool],
        wake: Callable[[], None],
        clock: Clock,
        fail: Callable[[BaseException], NoReturn],
    ) -> None:
        """`next_due`: the earliest instant after another at which a pass over the applied state could do something by
        time alone; `idle`: whether this replica leads and nothing is queued or in flight; `wake`: run the pump.
        """
        self._next_due = next_due
        self._idle = idle
        self._wake = wake
        self._clock = clock
        self._fail = fail
        self._unsettled = False
        """Whether the last pass decided something: what it made possible is for the next one."""
        self._in_a_row = 0
        self._rest_until_s = 0.0
        self._passed_at = NEVER
        """The instant of the last pass: what was due by then was done or could not be: no use to check again."""
        self._timer: asyncio.TimerHandle | None = None
        self._arming: asyncio.TimerHandle | None = None
        self._resting: asyncio.TimerHandle | None = None
        self.due = False
        """Whether the next batch has a pass whatever it decides, and is made for that if need be."""

    @property
    def sleeping(self) -> bool:
        """Whether a timer is set for the next pass."""
        return self._timer is not None

    @property
    def _goes_on(self) -> bool:
        """Whether the next pass follows the last one at once."""
        return self._unsettled and self._in_a_row < PASSES_IN_A_ROW_MAX

    def schedule(self) -> None:
        """Have a pass, with the next batch or in one of its own."""
        self.due = True
        self._wake()

    def wanted(self, *, decided: bool) -> bool:
        """Whether the batch under construction has a pass; `decided`: whether it has events so far."""
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
        """Note a pass at `at` that took `cost_s` seconds. `found`: it has events; `decided`: so had the batch."""
        self.due = False
        self._passed_at = at
        self._unsettled = found
        self._in_a_row = self._in_a_row + 1 if found and not decided else 0
        rest_s = max(PASS_REST * cost_s, min(PASS_REST_LONG * cost_s, PASS_REST_LONG_S))
        self._rest_until_s = self._clock.monotonic_s() + (rest_s if cost_s > PASS_CHEAP_S else 0.0)

    def rest(self) -> None:
        """Nothing is queued or in flight any more: see to it that the next pass comes."""
        # Under load the next batch brings the next pass; here nothing else would.
        if self._goes_on:
            self.schedule()
        elif self._arming is None:
            self._arming = asyncio.get_running_loop().call_later(ARM_DELAY_S, self._check_due)

    def set_back(self) -> None:
        """Have a pass: the clock was set back, and what was due by an instant may be due again."""
        self._passed_at = NEVER
        self.schedule()

    def stop(self) -> None:
        """Forget what was planned: this replica does not lead."""
        for handle in (self._timer, self._arming, self._resting):
            if handle is not None:
                handle.cancel()
        self._timer = self._arming = self._resting = None
        self.due = False

    def _rested(self) -> None:
        self._resting = None
        self.schedule()

    def _check_due(self) -> None:
        """Run the pass that is due by time, or sleep until one is."""
        self._arming = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        try:
            if not self._idle():
                # Whatever ends that rests again.
                return
            loop = asyncio.get_running_loop()
            if self._goes_on:
                # Armed when all was settled, and passes follow each other since: the next one is on its way.
                self.schedule()
                return
            if self._unsettled:
                LOGGER.error("the scheduler has not settled after %d passes; it goes on slowly", self._in_a_row)
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
