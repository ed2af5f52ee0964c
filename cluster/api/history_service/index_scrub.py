"""Continuous comparison of the per-job index with the ledger: every row is derived again and compared.

Altered rows with corrected checksums read like any others. Each pass folds the ledger as the follower does, step by
step, and compares the rows. On a difference the index is rebuilt. Rows of pruned entries cannot be derived again and
stay as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, cast

from forebay.cluster.api.history_service.follower import Follower, Point
from forebay.wal import IndexPosition, JobIndex, JobIndexBroken, JobIndexRow
from forebay.wal.job_index import NOTHING

LOOK_S: Final = 0.25
"""Interval of a pass's steps of about ten milliseconds, seconds: two hours for a million entries of one command each,
at a twentieth of the history service's processor time.
"""

AGAIN_S: Final = 3600.0
"""Interval between two passes, seconds."""

JOBS_PER_STEP: Final = 256
"""Jobs whose rows are counted in one step at the end of a pass, count."""


class IndexScrub:
    """Compares a follower's index with the ledger, in steps."""

    def __init__(self, follower: Follower, monotonic_s: Callable[[], float]) -> None:
        """Start with the first step."""
        self._follower = follower
        self._monotonic_s = monotonic_s
        self._due_s = 0.0
        self._counting: Iterator[int] | None = None
        self.passes = 0
        """Completed passes, count."""
        self._begin()

    def step(self) -> None:
        """Compare a few more entries, if a step is due.

        Raises:
            JobIndexBroken: A row differs from the ledger.
        """
        if self._begun != self._follower.begun:
            self._begin()
        now_s = self._monotonic_s()
        if now_s < self._due_s:
            return
        self._due_s = now_s + LOOK_S
        if self._counting is None:
            # Compare up to the current end; the follower continues meanwhile.
            if self._checker.index < self._follower.index:
                self._checker.step()
            else:
                self._checker.write()
                self._counting = iter(self._follower.jobs.jobs())
            return
        for _ in range(JOBS_PER_STEP):
            job = next(self._counting, None)
            if job is None:
                self._end(now_s)
                return
            self._noted.check_count(job)

    def _begin(self) -> None:
        self._begun = self._follower.begun
        self._noted = _IndexComparison(self._follower)
        self._checker = _Checker(
            self._follower.live,
            snapshots=self._follower.snapshots,
            index=cast(JobIndex, self._noted),  # implements the part of the index a follower uses
            monotonic_s=self._monotonic_s,
        )
        self._counting = None

    def _end(self, now_s: float) -> None:
        self.passes += 1
        self._follower.is_confirmed = True
        self._begin()
        self._due_s = now_s + AGAIN_S


class _Checker(Follower):
    """Follower that keeps only its last state."""

    def keep(self, point: Point) -> None:
        """Keep only this state."""
        self._points = [point]

    def _leap(self, index: int) -> None:
        # Rows before the missing entries are compared separately.
        self.write()
        super()._leap(index)


class _IndexComparison:
    """Index replacement that compares written rows with the follower's index."""

    def __init__(self, follower: Follower) -> None:
        self._follower = follower
        self.position: IndexPosition = NOTHING
        self._counted: Counter[int] = Counter()
        self._unknown: list[tuple[int, int]] = []
        """First and last revisions of missing history."""

    def begin_anew(self) -> None:
        self.position = NOTHING

    def rows(self, job: int, after: int = 0) -> list[JobIndexRow]:
        """Return no rows, because none are kept."""
        return []

    def add(self, rows: Mapping[int, Sequence[JobIndexRow]], position: IndexPosition) -> None:
        """Compare rows with the follower's rows of the same jobs up to a position.

        Raises:
            JobIndexBroken: They differ.
        """
        if position.holes != self.position.holes:
            self._unknown.append((self.position.revision + 1, position.revision))
        for job, should in rows.items():
            self._counted[job] += len(should)
            first = should[0].revision
            says = [row for row in self._follower.rows(job, first - 1) if row.revision <= should[-1].revision]
            if says != list(should):
                raise self._differs(job, f"between the revisions {first} and {should[-1].revision}")
        self.position = position

    def check_count(self, job: int) -> None:
        """Check that a job has no rows beyond the compared ones.

        Raises:
            JobIndexBroken: It has.
        """
        unknown, end = self._unknown, self.position.revision
        revisions = [row.revision for row in self._follower.rows(job) if row.revision <= end]
        found = sum(not any(first <= revision <= last for first, last in unknown) for revision in revisions)
        if found != self._counted[job]:
            raise self._differs(job, f"it has {found} rows, but the ledger requires {self._counted[job]}")

    def _differs(self, job: int, how: str) -> JobIndexBroken:
        return JobIndexBroken(f"its rows of job {job} differ from the ledger: {how}")
