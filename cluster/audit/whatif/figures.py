"""Figures of a what-if as `--json` prints them; table, charts and page show these figures only.

Times are microseconds since 1970 by the cluster's clock (`at_us`), durations microseconds (`us`).
"""

from __future__ import annotations

from typing import Final

import msgspec

from forebay.cluster.audit.report import PendingJobs, PoolUsage

ROUGH_SHARE: Final = 0.95
"""Share of identical starts below which a calibration is rough."""


class Waits(msgspec.Struct, frozen=True):
    """Waiting times of a number of jobs, in total or for one reason: the median and the 95th percentile."""

    reason: str
    jobs: int
    p50_us: int
    p95_us: int


class PoolFigures(msgspec.Struct, frozen=True):
    """Usage of a pool: mean and peak over the window, in its units and as a share of the capacity in service.

    A share is from 0 to 1. `use` has the steps.
    """

    name: str
    unit: str
    mean: float
    peak: int
    mean_share: float
    peak_share: float
    use: PoolUsage


class Figures(msgspec.Struct, frozen=True):
    """Figures of one world in the window."""

    submitted: int
    started: int
    """Jobs that started for the first time in the window."""
    ended: dict[str, int]
    """Result -> number of jobs that finished for the first time, including their teardown."""
    unfinished: int
    """Number of jobs that had not finished at the end of the window."""
    unstarted: int
    """Number of unfinished jobs that had not started."""
    refused: int
    """Number of commands that succeeded in the ledger and are rejected in this world."""
    wait: Waits
    """Waiting times from submission to the first start, for jobs that started."""
    waits: tuple[Waits, ...]
    """Waiting times by reason, from samples of pending jobs; the longest first, bounded."""
    waits_left_out: int
    """Number of unlisted reasons."""
    pools: tuple[PoolFigures, ...]
    makespan_us: int
    """Time from the start of the window to the last end of a job in the window; 0 if no job ended."""
    waiting: tuple[PendingJobs, ...]


class Fit(msgspec.Struct, frozen=True):
    """Agreement between the job starts of an unchanged replay and the recorded ones."""

    starts: int
    """Number of jobs that started in the ledger, in the replay, or in both."""
    identical: int
    """Number of jobs that started at exactly the same time in both."""
    share: float
    median_off_us: int
    """Median deviation from the recorded start, for starts in both."""


class Calibration(msgspec.Struct, frozen=True):
    """Accuracy of a what-if of this window, measured by replays without changes."""

    in_place: Fit
    """Agreement of the replay in which reports keep their positions in the ledger as long as nothing differs."""
    by_times: Fit
    """Agreement of a replay that uses service times for every report, as after a change."""
    decisions: int
    """Number of ledger decisions that the replay repeated at their positions."""
    same: int
    """Number of these decisions with the same events."""
    is_rough: bool
    """True if the share of identical starts is below ROUGH_SHARE in either replay."""


class MovedJob(msgspec.Struct, frozen=True):
    """Job whose start differs from the unchanged replay. A time of None means no start in the window."""

    job: int
    name: str
    user: str
    submitted_us: int
    recorded_us: int | None
    unchanged_us: int | None
    changed_us: int | None
    gain_us: int
    """Gained time; a job without a start counts as started at the end of the window."""


class WhatIfSource(msgspec.Struct, frozen=True):
    """Replayed window, from which the simulation can be reproduced."""

    cluster_id: str
    cluster: str
    from_us: int
    to_us: int
    first_revision: int
    last_revision: int
    last_index: int
    ledger_digest: str


class WhatIf(msgspec.Struct, frozen=True):
    """Figures of all worlds; `changed` is None without changes."""

    source: WhatIfSource
    changes: tuple[str, ...]
    assumptions: tuple[str, ...]
    calibration: Calibration
    recorded: Figures
    unchanged: Figures
    changed: Figures | None
    earlier: int
    """Jobs that start earlier than in the unchanged replay."""
    later: int
    gaining: tuple[MovedJob, ...]
    """Jobs with the largest gains, bounded."""
    losing: tuple[MovedJob, ...]
    left_out: dict[str, int]
    """Kind of command -> number of commands in the ledger that were not replayed."""
    unproven: dict[str, int]
    """Kind of command -> number of commands replayed without the proof of a digest."""
