"""The index by job held against the ledger, over and over: every row is noted again, and compared.

An index whose rows were altered, with their checksums made right, reads like any other. Each pass folds the ledger as
the follower did, a step at a time, and compares what it would note with what is there. What is not the same is damage:
the index is made anew. What was pruned cannot be noted again, and stays as it was noted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, cast

from cluster.api.history_service.follower import Follower, Point
from wal import IndexPosition, JobIndex, JobIndexBroken, JobIndexRow
from wal.job_index import NOTHING

LOOK_S: Final = 0.25
"""Seconds between two steps of a pass, of some ten milliseconds: two hours for a million entries of one command each,
for a twentieth of the processor that a historian has."""

AGAIN_S: Final = 3600.0
"""Seconds between two passes."""

JOBS_PER_STEP: Final = 256
"""Jobs whose rows are counted in one step at the end of a pass, count."""


class IndexScrub:
    """Compares a follower's index with the ledger, in steps."""

    def __init__(self, follower: Follower, monotonic_s: Callable[[], float]) -> None:
        """Begin with the first step."""
        self._follower = follower
        self._monotonic_s = monotonic_s
        self._due_s = 0.0
        self._counting: Iterator[int] | None = None
        self.passes = 0
        """Passes that came to the end, count."""
        self._begin()

    def step(self) -> None:
        """Compare a few entries more, if a step is due. JobIndexBroken where a row is not what the ledger comes to."""
        if self._begun != self._follower.begun:
            self._begin()
        now_s = self._monotonic_s()
        if now_s < self._due_s:
            return
        self._due_s = now_s + LOOK_S
        if self._counting is None:
            # What is noted by now: the follower goes on meanwhile.
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
            index=cast(JobIndex, self._noted),  # all that a follower asks of one
            monotonic_s=self._monotonic_s,
        )
        self._counting = None

    def _end(self, now_s: float) -> None:
        self.passes += 1
        self._follower.is_confirmed = True
        self._begin()
        self._due_s = now_s + AGAIN_S


class _Checker(Follower):
    """A follower that keeps no state but the last one."""

    def keep(self, point: Point) -> None:
        """Keep only this state."""
        self._points = [point]

    def _leap(self, index: int) -> None:
        # What was noted before the entries that are not held is compared without them.
        self.write()
        super()._leap(index)


class _IndexComparison:
    """What stands in the place of an index: takes what is noted, and compares it with what the follower has."""

    def __init__(self, follower: Follower) -> None:
        self._follower = follower
        self.position: IndexPosition = NOTHING
        self._counted: Counter[int] = Counter()
        self._unknown: list[tuple[int, int]] = []
        """Revisions of history that is not held, first and last."""

    def begin_anew(self) -> None:
        self.position = NOTHING

    def rows(self, job: int, after: int = 0) -> list[JobIndexRow]:
        """Nothing is kept."""
        return []

    def add(self, rows: Mapping[int, Sequence[JobIndexRow]], position: IndexPosition) -> None:
        """Compare rows with those that the follower has of their jobs up to a position. JobIndexBroken."""
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
        """Check that there are no other rows of a job than those that were compared. JobIndexBroken."""
        unknown, end = self._unknown, self.position.revision
        revisions = [row.revision for row in self._follower.rows(job) if row.revision <= end]
        found = sum(not any(first <= revision <= last for first, last in unknown) for revision in revisions)
        if found != self._counted[job]:
            raise self._differs(job, f"it has {found} rows, and the ledger {self._counted[job]}")

    def _differs(self, job: int, how: str) -> JobIndexBroken:
        return JobIndexBroken(f"what it says of job {job} is not what the ledger comes to: {how}")
