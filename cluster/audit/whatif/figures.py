"""What a what-if says, as `--json` prints it: table, pictures and page are made from these and from nothing else.

Times are microseconds since 1970 of the cluster's clock (`at_us`), spans microseconds (`us`).
"""

from __future__ import annotations

from typing import Final

import msgspec

from cluster.audit.report import PendingJobs, PoolUsage

ROUGH_SHARE: Final = 0.95
"""A calibration in which a smaller share of the starts is where it was is rough."""


class Waits(msgspec.Struct, frozen=True):
    """How long jobs waited, or waited for one reason: of so many jobs the median, and what one in twenty exceeds."""

    reason: str
    jobs: int
    p50_us: int
    p95_us: int


class PoolFigures(msgspec.Struct, frozen=True):
    """What was held of a pool, units of the pool: the mean over the window and the peak; and as a share of what was in
    service, from 0 to 1. `use` has the steps.
    """

    name: str
    unit: str
    mean: float
    peak: int
    mean_share: float
    peak_share: float
    use: PoolUsage


class Figures(msgspec.Struct, frozen=True):
    """One world in the window."""

    submitted: int
    started: int
    """Jobs that started in the window for the first time."""
    ended: dict[str, int]
    """Result -> jobs that were over for the first time, torn down."""
    unfinished: int
    """Jobs that were not over as the window ended."""
    unstarted: int
    """Of these, jobs that had not started."""
    refused: int
    """Commands that were carried out in the ledger and are refused here."""
    wait: Waits
    """From submission to the first start, of the jobs that started."""
    waits: tuple[Waits, ...]
    """By reason, as pending jobs were sampled; the longest first, bounded."""
    waits_left_out: int
    """Reasons that are not listed, count."""
    pools: tuple[PoolFigures, ...]
    makespan_us: int
    """From the beginning of the window to the last end of a job in it; 0 where none ended."""
    waiting: tuple[PendingJobs, ...]


class Fit(msgspec.Struct, frozen=True):
    """How well the starts of a replay in which nothing was changed are those that were."""

    starts: int
    """Starts that are in the ledger, the replay, or both."""
    identical: int
    """Of them, those at the very same moment."""
    share: float
    median_off_us: int
    """Median of how far a start lies from the recorded one, of those that are in both."""


class Calibration(msgspec.Struct, frozen=True):
    """How far a what-if of this window is to be trusted, by what comes of it where nothing is changed."""

    in_place: Fit
    """Of the replay that stands beside what was: where nothing differs, agents report where the ledger has it."""
    by_times: Fit
    """Of a replay in which no report is where the ledger has it: all come by their service times alone, as those do
    that a change has moved.
    """
    decisions: int
    """Decisions of the ledger that were taken again in their places."""
    same: int
    """Of them, those that came to the same events."""
    is_rough: bool
    """Whether fewer than ROUGH_SHARE of the starts are identical, in either."""


class MovedJob(msgspec.Struct, frozen=True):
    """A job that starts at another time than it does in the replay in which nothing was changed. None: not in the
    window.
    """

    job: int
    name: str
    user: str
    submitted_us: int
    recorded_us: int | None
    unchanged_us: int | None
    changed_us: int | None
    gain_us: int
    """By how much it starts earlier; one that does not start counts as starting at the end of the window."""


class WhatIfSource(msgspec.Struct, frozen=True):
    """The window that was replayed, by which anybody can do it again."""

    cluster_id: str
    cluster: str
    from_us: int
    to_us: int
    first_revision: int
    last_revision: int
    last_index: int
    ledger_digest: str


class WhatIf(msgspec.Struct, frozen=True):
    """All figures, side by side; `changed` is None where nothing was to be changed."""

    source: WhatIfSource
    changes: tuple[str, ...]
    assumptions: tuple[str, ...]
    calibration: Calibration
    recorded: Figures
    unchanged: Figures
    changed: Figures | None
    earlier: int
    """Jobs that start earlier than where nothing was changed."""
    later: int
    gaining: tuple[MovedJob, ...]
    """Those that gain most, bounded."""
    losing: tuple[MovedJob, ...]
    left_out: dict[str, int]
    """What is in the ledger and was not replayed, by kind of command."""
    unproven: dict[str, int]
    """What was replayed without the proof of a digest, by kind of command."""
