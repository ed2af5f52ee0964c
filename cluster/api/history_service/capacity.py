"""Pool use over time, recorded while the ledger is followed, so that every replica can report it.

A sample is two maps of an existing State. There is one per time step with a change. Steps grow with the recorded time
until POINTS_MAX of them cover a day.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import immutables

from forebay.cluster.api.history_service.frames import PoolUseQuery, PoolUseReply, PoolUseSteps
from forebay.replica.model import Pool
from forebay.replica.state import State
from forebay.replica.values import MICROSECONDS_PER_SECOND, NEVER, Instant

POINTS_MAX = 338
"""Samples kept, count: a day of the longest steps, and one for every third pixel of a page."""

STEP_US = MICROSECONDS_PER_SECOND
"""Initial step, microseconds; doubled whenever there are too many samples, ..."""

STEP_US_MAX = 256 * MICROSECONDS_PER_SECOND
"""... up to this. Older samples are dropped from then on."""

POOLS_SHOWN_MAX = 16
"""Pools in one response, count: the first by name."""


class _Point(NamedTuple):
    at: Instant
    pools: immutables.Map[str, Pool]
    held_bytes: immutables.Map[str, int]


class Capacity:
    """Pool use, sampled in time steps."""

    def __init__(self) -> None:
        self._points: deque[_Point] = deque()
        self._step_us = STEP_US
        self._last: _Point | None = None
        self._now = NEVER

    def note(self, state: State) -> None:
        """Record a state; the last one of each step is kept."""
        if state.at == NEVER:
            return  # the cluster is not founded yet
        self._now = max(self._now, state.at)
        last = self._last
        if last is not None and last.pools is state.pools and last.held_bytes is state.held_bytes:
            return
        # If an operator set the clock back, time stands still here until it has caught up.
        point = self._last = _Point(self._now, state.pools, state.held_bytes)
        if self._points and self._points[-1].at // self._step_us == point.at // self._step_us:
            self._points[-1] = point._replace(at=self._points[-1].at)
            return
        self._points.append(point)
        if len(self._points) > POINTS_MAX:
            self._thin_out()
        oldest = self._now - POINTS_MAX * STEP_US_MAX
        # The last sample before the day is its initial value.
        while len(self._points) > POINTS_MAX or (len(self._points) > 1 and self._points[1].at <= oldest):
            self._points.popleft()

    def _thin_out(self) -> None:
        """Double the step, up to STEP_US_MAX, and drop samples."""
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
        """Return the samples of all pools, or of the named one."""
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
