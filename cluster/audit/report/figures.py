"""Report figures as `--json` prints them; every chart is drawn from these alone.

Times are microseconds since 1970 by the cluster's clock (`at_us`); times of transfers are by their agents' clocks.
"""

from __future__ import annotations

import sys
from typing import Final

import msgspec

COLUMNS: Final = 600
"""Columns of a window: the resolution of every chart, and the maximum length of every series."""


class PoolUsage(msgspec.Struct, frozen=True):
    """Capacity and usage of a pool as steps, each valid until the next.

    In each column of the window, the first, last, smallest and greatest step are kept.
    """

    name: str
    unit: str
    steps: tuple[tuple[int, int, int, int], ...]
    """(at_us, used, in service, total)"""


class PendingJobs(msgspec.Struct, frozen=True):
    """Numbers of pending jobs by reason, as the scheduler would have reported them at that time."""

    at_us: int
    jobs: dict[str, int]


UNFINISHED: Final = "UNFINISHED"
"""Outcome of a job that had not finished at the end of the window."""

NO_WAIT: Final = "None"
"""Reason of a job without a sampled reason."""


class StateBar(msgspec.Struct, frozen=True):
    """Time a job spent in `burst_buffer_state`, or in `state` if it has no buffer.

    If the state continues, `to_us` is None.
    """

    state: str
    burst_buffer_state: str | None
    from_us: int
    to_us: int | None
    attempt: int
    reasons: tuple[str, ...] = ()
    """Sampled reasons for waiting, in order of appearance."""

    @property
    def word(self) -> str:
        """Return the label in a chart: the buffer's state if there is one, otherwise the job's."""
        return (
            self.state.lower()
            if self.burst_buffer_state in (None, "pending", "complete")
            else str(self.burst_buffer_state)
        )


class JobBars(msgspec.Struct, frozen=True):
    """Bars of a job in the window, in order; a gap separates a finish from a requeue.

    `left_out` counts unlisted bars.
    """

    job: int
    name: str
    user: str
    pool: str
    size_bytes: int
    result: str
    waited_us: int
    bars: tuple[StateBar, ...]
    left_out: int = 0
    called: str = ""
    """Display name: `17`, `17_3` or `slurm:42`."""

    @property
    def main_reason(self) -> str:
        """Return the first reason of the longest wait, or NO_WAIT."""
        return self.longest_wait[1]

    @property
    def longest_wait(self) -> tuple[int, str]:
        """Return the length in microseconds and the first reason of the longest wait; (-1, NO_WAIT) without one."""
        waits = [
            (sys.maxsize if bar.to_us is None else bar.to_us - bar.from_us, bar.reasons[0])
            for bar in self.bars
            if bar.reasons
        ]
        return max(waits, key=lambda wait: wait[0], default=(-1, NO_WAIT))


class Term(msgspec.Struct, frozen=True):
    """Leader's term in the ledger, from its first entry to its last.

    `silent_us`: time from the previous entry to the term's first entry, an upper bound of the time without a leader.
    """

    term: int
    first_index: int
    from_us: int
    to_us: int
    entries: int
    silent_us: int | None


class TransferFigures(msgspec.Struct, frozen=True):
    """Receipt of a transfer."""

    job: int
    node: str
    stage: str
    attempt: int
    complete: bool
    files: int
    size_bytes: int
    from_us: int
    to_us: int


class ReportSource(msgspec.Struct, frozen=True):
    """Window of a ledger from which the figures were computed and can be reproduced."""

    cluster_id: str
    cluster: str
    from_us: int
    to_us: int
    first_revision: int
    last_revision: int
    last_index: int
    ledger_digest: str
    state_digest: str


class ReasonFigures(msgspec.Struct, frozen=True):
    """Jobs that waited longest for the same reason."""

    jobs: int
    waited_us: int
    """Total pending time of these jobs in the window."""


class WindowTotals(msgspec.Struct, frozen=True):
    """Headline figures of a window, over all its jobs and transfers."""

    outcomes: dict[str, int]
    """Final state, or UNFINISHED for jobs unfinished at the end of the window -> number of jobs."""
    wait_p50_us: int
    """Median of the time that a job was pending in the window."""
    wait_p95_us: int
    staged_in_bytes: int
    """Bytes moved by transfers that ended in the window."""
    staged_out_bytes: int
    failovers: int
    """Number of changes of the leader's term, by failure or by command."""
    interruptions: int
    """Number of runs that ended because their node was lost."""
    reasons: dict[str, ReasonFigures]
    """Jobs of the window, grouped by the reason of each job's longest wait."""


class WindowReport(msgspec.Struct, frozen=True):
    """Figures of a window. Lists of jobs and transfers are bounded: `jobs_left_out`, `transfers_left_out`."""

    source: ReportSource
    totals: WindowTotals
    pools: tuple[PoolUsage, ...]
    waiting: tuple[PendingJobs, ...]
    jobs: tuple[JobBars, ...]
    jobs_left_out: int
    terms: tuple[Term, ...]
    terms_left_out: int
    commands: tuple[int, ...]
    """Number of commands settled in each column of the window."""
    moved: dict[str, tuple[int, ...]]
    """Node -> bytes moved in each column, assuming the mean rate of each transfer."""
    transfers: tuple[TransferFigures, ...]
    transfers_left_out: int
