"""When those in line for a pool should get their space where part of it is set aside for reservations.

The free space is drawn over time, with what holders give back, what those before take and give back, and what is set
aside from the beginning of each reservation to its end. Somebody gets his space at the first instant from which on it
is his for as long as he needs it: so nobody takes what a reservation that comes would then lack, and the jobs of a
reservation find its own space. Source: `replica.headroom` (`set_aside_bytes`, `coming_gate`), which decides it.
"""

from __future__ import annotations

from bisect import insort
from typing import Final

from replica.judging import reservation_of
from replica.line import NOBODY_KNOWS, drain_us, release_at, run_until
from replica.state.state import State
from replica.values.units import Instant

STEPS_MAX: Final = 100_000
"""Changes of the free space that one estimate looks at, count: some 100 ms, during which a replica only does that."""


class TooManySteps(Exception):
    """Saying it would take too long."""


class ReservedLine:
    """The free space of one pool as time goes on, and who has it."""

    def __init__(self, state: State, pool: str, at: Instant) -> None:
        """Begin with who holds a part now. KeyError for a pool that is not there."""
        self._state = state
        self._free = state.pools[pool].usable_bytes - state.held_bytes.get(pool, 0)
        self._reservations = [one for one in state.reservations.values() if one.size_in(pool)]
        self._pool = pool
        self._held = {one.name: state.use.get(("bb", "r", one.name, "", pool), 0) for one in self._reservations}
        self._changes: list[tuple[int, int, str]] = []
        """(instant, bytes that become free, the reservation whose job gives them back or takes them), ascending."""
        self._steps = 0
        drains_us = drain_us(state, pool)
        for other in state.holders.get(pool, ()):
            until = run_until(state.jobs[other], state.buffers[other])
            if until != NOBODY_KNOWS:
                change = (
                    release_at(until, at, drains_us),
                    state.buffers[other].held_bytes,
                    reservation_of(state, other),
                )
                self._changes.append(change)
        self._changes += [(instant, 0, "") for one in self._reservations for instant in (one.start_at, one.end_at)]
        self._changes.sort()

    def place(self, job_id: int, wanted_bytes: int, takes_us: int, asked_at: int) -> int | None:
        """Give the job its space as soon as can be, not before `asked_at`, for `takes_us`; return when. None: never.

        Raises TooManySteps where the line is too long to say.
        """
        own = reservation_of(self._state, job_id)
        start_at = self._start_of(own, wanted_bytes, takes_us, asked_at)
        if start_at is not None:
            insort(self._changes, (start_at, -wanted_bytes, own))
            insort(self._changes, (start_at + takes_us, wanted_bytes, own))
        return start_at

    def _start_of(self, own: str, wanted_bytes: int, takes_us: int, now: int) -> int | None:
        free, held = self._free, dict(self._held)
        start_at: int | None = None
        done, changes = 0, self._changes
        while True:
            while done < len(changes) and changes[done][0] <= now:
                _, given, whose = changes[done]
                free += given
                if whose in held:
                    held[whose] -= given
                done += 1
                self._steps += 1
            if self._steps > STEPS_MAX:
                raise TooManySteps
            if free - self._set_aside(now, own, held) < wanted_bytes:
                start_at = None
            elif start_at is None:
                start_at = now
            if start_at is not None and (done == len(changes) or changes[done][0] >= start_at + takes_us):
                return start_at
            if done == len(changes):
                return None
            now = changes[done][0]

    def _set_aside(self, now: int, own: str, held: dict[str, int]) -> int:
        self._steps += len(self._reservations)
        return sum(
            max(0, one.size_in(self._pool) - held[one.name])
            for one in self._reservations
            if one.name != own and one.start_at <= now < one.end_at
        )
