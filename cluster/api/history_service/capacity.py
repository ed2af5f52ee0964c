"""How full pools were: noted while the ledger is followed, so that every replica can say it, whoever led.

A note is two maps of a State that was there anyway. There is one for a step of time in which something changed; the
step grows with what is to be remembered, up to where POINTS_MAX of them make a day.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import immutables

from cluster.api.history_service.frames import PoolUseQuery, PoolUseReply, PoolUseSteps
from replica.model import Pool
from replica.state import State
from replica.values import MICROSECONDS_PER_SECOND, NEVER, Instant

POINTS_MAX = 338
"""Steps that are remembered, count: a day of the longest ones, and one for every third pixel of a page."""

STEP_US = MICROSECONDS_PER_SECOND
"""How long a step is at first, microseconds; doubled whenever there are too many, ..."""

STEP_US_MAX = 256 * MICROSECONDS_PER_SECOND
"""... up to this. From then on what is older is forgotten."""

POOLS_SHOWN_MAX = 16
"""Pools in one answer, count: the first by name."""


class _Point(NamedTuple):
    at: Instant
    pools: immutables.Map[str, Pool]
    held_bytes: immutables.Map[str, int]


class Capacity:
    """What was in the pools, in steps of time."""

    def __init__(self) -> None:
        self._points: deque[_Point] = deque()
        self._step_us = STEP_US
        self._last: _Point | None = None
        self._now = NEVER

    def note(self, state: State) -> None:
        """Take note of a state that was reached: the last one of a step stays."""
        if state.at == NEVER:
            return  # the cluster is not founded yet
        self._now = max(self._now, state.at)
        last = self._last
        if last is not None and last.pools is state.pools and last.held_bytes is state.held_bytes:
            return
        # A clock that an operator set back stands still here until it has caught up.
        point = self._last = _Point(self._now, state.pools, state.held_bytes)
        if self._points and self._points[-1].at // self._step_us == point.at // self._step_us:
            self._points[-1] = point._replace(at=self._points[-1].at)
            return
        self._points.append(point)
        if len(self._points) > POINTS_MAX:
            self._thin_out()
        oldest = self._now - POINTS_MAX * STEP_US_MAX
        # The last one before the day begins says how it began.
        while len(self._points) > POINTS_MAX or (len(self._points) > 1 and self._points[1].at <= oldest):
            self._points.popleft()

    def _thin_out(self) -> None:
        """Make room by longer steps, while they are shorter than may be."""
        while self._step_us < STEP_US_MAX and len(self._points) > POINTS_MAX // 2:
            self._step_us *= 2
            kept: deque[_Point] = deque()
            for point in self._points:
                if kept and kept[-1].at // self._step_us == point.at // self._step_us:
                    kept[-1] = point._replace(at=kept[-1].at)
                else:
                    kept.append(point)
            self._points = kept

    def answer(self, asked: PoolUseQuery) -> PoolUseReply:
        """Return the answer: of each pool, or of the one that is named, what changed, and when."""
        names = sorted({name for point in self._points for name in point.pools if asked.name in ("", name)})
        pools = tuple(PoolUseSteps(name, *self._steps(name)) for name in names[:POOLS_SHOWN_MAX])
        since = self._points[0].at if self._points else NEVER
        step_s = self._step_us / MICROSECONDS_PER_SECOND
        return PoolUseReply(asked.number, since, self._now, step_s, pools, len(names) > POOLS_SHOWN_MAX)

    def _steps(self, name: str) -> tuple[int, tuple[tuple[Instant, int, int, int], ...]]:
        unit, found = 0, list[tuple[Instant, int, int, int]]()
        for point in self._points:
            pool = point.pools.get(name)
            figures = (0, 0, 0)
            if pool is not None:
                served = max(0, pool.quantity_bytes - pool.out_of_service_bytes)
                figures, unit = (point.held_bytes.get(name, 0), served, pool.quantity_bytes), int(pool.unit)
            if not found or found[-1][1:] != figures:
                found.append((point.at, *figures))
        return unit, tuple(found)
