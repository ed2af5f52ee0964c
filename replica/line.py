"""The first in line for a pool: when it should get its space, and who may pass it meanwhile (SPUR.md, 3)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from replica.model.buffers import Buffer, BufferState
from replica.model.jobs import ENDED, Job, JobState
from replica.model.rates import rates_of
from replica.state.state import Facts
from replica.values.units import NEVER, Instant, seconds

DRAINING = 0
"""In place of `run_until` of a job whose script has ended: it only drains."""

NOBODY_KNOWS = 2**62
"""In place of `run_until` of a job whose stage-out or teardown waits for somebody to release it."""


_BEING_REMOVED = (BufferState.ALLOC_REVOKE, BufferState.TEARDOWN, BufferState.TEARDOWN_FAIL)


class Head:
    """The first request in line for a pool."""

    def __init__(self, job: Job, estimate: Callable[[], tuple[Instant, int]]) -> None:
        """`estimate` gives when it should get its space (NEVER: not known) and what is left beside it then, bytes."""
        self.job = job.id
        self.passed = job.passed
        self.behind = 0
        """Candidates behind it that this pass has looked at."""
        self._promised_at = job.promised_at
        self._estimate: Callable[[], tuple[Instant, int]] | None = estimate
        self._start_at = NEVER
        self._spare_bytes = 0

    @property
    def start_at(self) -> Instant:
        """When it should get its space if every holder uses its time; NEVER if nobody can say."""
        if self._estimate is not None:
            # Only now: it looks at everybody who holds a part of the pool, and often nobody asks.
            self._start_at, self._spare_bytes = self._estimate()
            self._estimate = None
            if self._start_at != NEVER and self._promised_at != NEVER:
                self._start_at = min(self._start_at, self._promised_at)
        return self._start_at

    def may_be_passed(self, granted_bytes: int, expected_end: int, at: Instant, max_passes: int) -> bool:
        """Whether a request that fits may go first."""
        return self._is_harmless(granted_bytes, expected_end, at) or self.passed < max_passes

    def let_pass(self, granted_bytes: int, expected_end: int, at: Instant) -> bool:
        """Let a request go first; return whether that counts. What stands beside the head by then is taken from the
        spare.
        """
        harmless = self._is_harmless(granted_bytes, expected_end, at)
        if harmless and expected_end > self.start_at:
            self._spare_bytes -= granted_bytes
        self.passed += not harmless
        return not harmless

    def _is_harmless(self, granted_bytes: int, expected_end: int, at: Instant) -> bool:
        # Estimates move, because holders start later than expected. What was expected at the first pass does not, so
        # that passes which are not counted come to an end.
        start_at = self.start_at
        if start_at == NEVER or at >= start_at:
            return False
        return expected_end <= start_at or granted_bytes <= self._spare_bytes


def run_until(job: Job, buffer: Buffer) -> int:
    """Return when the job that holds `buffer` should be over at the latest, or DRAINING, or NOBODY_KNOWS."""
    if job.state in ENDED or job.state is JobState.STAGE_OUT or buffer.state in _BEING_REMOVED:
        return NOBODY_KNOWS if job.stuck else DRAINING
    # A job that has not started counts from its last step, not from now: else its end would move with every pass.
    since = job.started_at if job.started_at != NEVER else buffer.changed_at
    return since + seconds(job.spec.time_limit_s)


def release_at(until: int, at: Instant, drain_us: int) -> int:
    """Return when a holder that runs until `until` should have given back its space."""
    return max(at, until) + drain_us


def drain_us(state: Facts, pool: str) -> int:
    """Return how long stage-out and teardown of a buffer of the pool should take, as measured, µs."""
    return rates_of(state.rates.get(pool), pool).drain_us


def expected_end(state: Facts, job: Job, pool: str, at: Instant) -> int:
    """Return when a job that gets its space at `at` should have given it back: by its time limit, and by how long
    transfers of the pool took so far.
    """
    rates = rates_of(state.rates.get(pool), pool)
    return release_at(at + rates.stage_in.mean_us + seconds(job.spec.time_limit_s), at, rates.drain_us)


def start_of(releases: Iterable[tuple[int, int]], free_bytes: int, wanted_bytes: int) -> tuple[Instant, int]:
    """Return when so much is free and what is left beside it, given (release_at, size) in ascending order."""
    for instant, size_bytes in releases:
        free_bytes += size_bytes
        if free_bytes >= wanted_bytes:
            return Instant(instant), free_bytes - wanted_bytes
    return NEVER, 0
