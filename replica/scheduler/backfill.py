"""Backfill (SPUR.md, 3): estimate the start of the first request in a pool's queue, and decide which may go first."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable
from typing import Final

from forebay.replica.model import ENDED, Buffer, BufferState, Job, JobState, rates_of
from forebay.replica.scheduler.gates import reservation_of
from forebay.replica.state import Facts, State
from forebay.replica.values import NEVER, Instant, seconds

DRAINING = 0
"""Value of `run_until` for a job whose script has ended, so that only stage-out and teardown remain."""

UNKNOWN_END = 2**62
"""Value of `run_until` if the end is unknown: a failed stage-out or teardown, or an external job that runs."""


BEING_REMOVED = (BufferState.ALLOC_REVOKE, BufferState.TEARDOWN, BufferState.TEARDOWN_FAIL)


_EXTERNAL_JOBS_DRAIN = (*BEING_REMOVED, BufferState.STAGING_OUT)


class ReservationHead:
    """First request in a pool's queue that does not fit. Its space is reserved from its expected start on."""

    def __init__(self, job: Job, estimate: Callable[[], tuple[Instant, int]]) -> None:
        """Create the head for `job`; `estimate` returns its expected start (NEVER: unknown) and the bytes left then."""
        self.job = job.id
        self.passed = job.passed
        self.behind = 0
        """Number of candidates behind the head that this cycle has checked."""
        self._promised_at = job.promised_at
        self._estimate: Callable[[], tuple[Instant, int]] | None = estimate
        self._start_at = NEVER
        self._spare_bytes = 0

    @property
    def start_at(self) -> Instant:
        """Expected start of the head if every holder uses its full time; NEVER if unknown."""
        if self._estimate is not None:
            # Estimate lazily: it iterates over all holders of the pool, and often is not needed.
            self._start_at, self._spare_bytes = self._estimate()
            self._estimate = None
            if self._start_at != NEVER and self._promised_at != NEVER:
                self._start_at = min(self._start_at, self._promised_at)
        return self._start_at

    def may_be_backfilled(self, granted_bytes: int, expected_end: int, at: Instant, max_passes: int) -> bool:
        """Return whether a request that fits may be backfilled past the head."""
        return self._is_harmless(granted_bytes, expected_end, at) or self.passed < max_passes

    def backfill(self, granted_bytes: int, expected_end: int, at: Instant) -> bool:
        """Note a request that is backfilled past the head; return whether it counts toward the limit.

        A request that holds its space beyond the head's start uses up the space left beside the head.
        """
        harmless = self._is_harmless(granted_bytes, expected_end, at)
        if harmless and expected_end > self.start_at:
            self._spare_bytes -= granted_bytes
        self.passed += not harmless
        return not harmless

    def _is_harmless(self, granted_bytes: int, expected_end: int, at: Instant) -> bool:
        # Estimates move when holders start later than expected. The first estimate (`promised_at`) does not, so that
        # uncounted backfills come to an end.
        start_at = self.start_at
        if start_at == NEVER or at >= start_at:
            return False
        return expected_end <= start_at or granted_bytes <= self._spare_bytes


def run_until(job: Job, buffer: Buffer) -> int:
    """Return the latest expected end of the run of the job that holds `buffer`, or DRAINING, or UNKNOWN_END."""
    if job.external_job is not None and buffer.state not in _EXTERNAL_JOBS_DRAIN:
        return UNKNOWN_END  # only its own scheduler knows
    if job.state in ENDED or job.state is JobState.STAGE_OUT or buffer.state in BEING_REMOVED:
        return UNKNOWN_END if job.stuck else DRAINING
    # A job that has not started counts from its last change of state: counted from now, its end would move every cycle.
    since = job.started_at if job.started_at != NEVER else buffer.changed_at
    return since + seconds(job.request.time_limit_s)


def release_at(until: int, at: Instant, drain_us: int) -> int:
    """Return the expected release time of the space of a job that runs until `until`."""
    return max(at, until) + drain_us


def drain_us(state: Facts, pool: str) -> int:
    """Return the measured mean duration of stage-out and teardown in the pool, µs."""
    return rates_of(state.rates.get(pool), pool).drain_us


def expected_end(state: Facts, job: Job, pool: str, at: Instant) -> int:
    """Return the expected release time of a job's space that is allocated at `at`.

    It follows from the job's time limit and the measured transfers of the pool.
    """
    rates = rates_of(state.rates.get(pool), pool)
    return release_at(at + rates.stage_in.mean_us + seconds(job.request.time_limit_s), at, rates.drain_us)


def expected_start(releases: Iterable[tuple[int, int]], free_bytes: int, wanted_bytes: int) -> tuple[Instant, int]:
    """Return when `wanted_bytes` are free, and the bytes left then; (NEVER, 0) if they never are.

    `releases` are (time, bytes) in ascending order.
    """
    for instant, size_bytes in releases:
        free_bytes += size_bytes
        if free_bytes >= wanted_bytes:
            return Instant(instant), free_bytes - wanted_bytes
    return NEVER, 0


# ---- pools with reservations


STEPS_MAX: Final = 100_000
"""Limit on the changes of free space that one estimate visits, count: about 100 ms, during which the replica does
nothing else.
"""


class TooManySteps(Exception):
    """An estimate has exceeded STEPS_MAX."""


class ReservedTimeline:
    """Future free space of one pool, of which reservations have a part."""

    def __init__(self, state: State, pool: str, at: Instant) -> None:
        """Create the timeline from the current holders of the pool.

        Raises:
            KeyError: The pool does not exist.
        """
        self._state = state
        self._free = state.pools[pool].usable_bytes - state.held_bytes.get(pool, 0)
        self._reservations = [one for one in state.reservations.values() if one.size_in(pool)]
        self._pool = pool
        self._held = {one.name: state.use.get(("bb", "r", one.name, "", pool), 0) for one in self._reservations}
        self._changes: list[tuple[int, int, str]] = []
        """(time, bytes released, or taken if negative, reservation of the job), ascending."""
        self._steps = 0
        drains_us = drain_us(state, pool)
        for other in state.holders.get(pool, ()):
            until = run_until(state.jobs[other], state.buffers[other])
            if until != UNKNOWN_END:
                change = (
                    release_at(until, at, drains_us),
                    state.buffers[other].held_bytes,
                    reservation_of(state, other),
                )
                self._changes.append(change)
        self._changes += [(instant, 0, "") for one in self._reservations for instant in (one.start_at, one.end_at)]
        self._changes.sort()

    def place(self, job_id: int, wanted_bytes: int, takes_us: int, asked_at: int) -> int | None:
        """Allocate the job's space at the earliest time from `asked_at` on, for `takes_us`; return the time.

        Return None if the space never becomes free.

        Raises:
            TooManySteps: The estimate takes too long.
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
