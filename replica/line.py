"""The first in line for a pool: when it should get its space, and who may pass it meanwhile (SPUR.md, 3)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from replica.buffers import Buffer
from replica.jobs import ENDED, Job, JobState
from replica.units import NEVER, Instant, seconds

DRAIN_TIME_S = 60
"""What stage-out and teardown are expected to take in estimates of a start, seconds, until transfer rates are
measured.
"""

DRAINING = 0
"""In place of `run_until` of a job whose script has ended: it only drains."""


class Head:
    """The first request in line for a pool."""

    def __init__(self, job: Job, estimate: Callable[[], tuple[Instant, int]]) -> None:
        """`estimate` gives when it should get its space (NEVER: not known) and what is left beside it then, bytes."""
        self.job = job.id
        self.passed = job.passed
        self.harmless = False
        """Whether the last one let past does not delay this one."""
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
        """Whether a request that fits may go first; what stands beside the head by then is taken from the spare."""
        # Estimates move, because holders start later than expected. What was expected at the first pass does not, so
        # that passes which are not counted come to an end.
        self.harmless = True
        start_at = self.start_at
        if start_at != NEVER and at < start_at:
            if expected_end <= start_at:
                return True
            if granted_bytes <= self._spare_bytes:
                self._spare_bytes -= granted_bytes
                return True
        self.harmless = False
        return self.passed < max_passes


def run_until(job: Job, buffer: Buffer) -> int:
    """Return when the job that holds `buffer` should be over at the latest, or DRAINING."""
    if job.state in ENDED or job.state is JobState.STAGE_OUT:
        return DRAINING
    # A job that has not started counts from its last step, not from now: else its end would move with every pass.
    since = job.started_at if job.started_at != NEVER else buffer.changed_at
    return since + seconds(job.spec.time_limit_s)


def release_at(until: int, at: Instant) -> int:
    """Return when a holder that runs until `until` should have given back its space."""
    return max(at, until) + seconds(DRAIN_TIME_S)


def expected_end(job: Job, at: Instant) -> int:
    """Return when a job that gets its space at `at` should have given it back."""
    return release_at(at + seconds(job.spec.time_limit_s), at)


def start_of(releases: Iterable[tuple[int, int]], free_bytes: int, wanted_bytes: int) -> tuple[Instant, int]:
    """Return when so much is free and what is left beside it, given (release_at, size) in ascending order."""
    for instant, size_bytes in releases:
        free_bytes += size_bytes
        if free_bytes >= wanted_bytes:
            return Instant(instant), free_bytes - wanted_bytes
    return NEVER, 0
