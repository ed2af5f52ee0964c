"""What a report says, as `--json` prints it: each picture is drawn from these and from nothing else.

Times are microseconds since 1970 of the cluster's clock (`at_us`), those of transfers of their agents' clocks.
"""

from __future__ import annotations

from typing import Final

import msgspec

COLUMNS: Final = 600
"""Into how many pieces a window is cut: no picture is finer, and nothing that is kept of a window is longer."""


class PoolUsage(msgspec.Struct, frozen=True):
    """What a pool had and what was held of it: steps, each until the next. In each column of the window the first,
    the last, the smallest and the greatest step are kept.
    """

    name: str
    unit: str
    steps: tuple[tuple[int, int, int, int], ...]
    """(at_us, held, in service, in all)"""


class PendingJobs(msgspec.Struct, frozen=True):
    """How many jobs were pending for which reason, as the scheduler would have said it then."""

    at_us: int
    jobs: dict[str, int]


class StateBar(msgspec.Struct, frozen=True):
    """One stay of a job: in `burst_buffer_state`, or in `state` where it has no buffer; `to_us` None: still there."""

    state: str
    burst_buffer_state: str | None
    from_us: int
    to_us: int | None
    attempt: int
    reasons: tuple[str, ...] = ()
    """Why it waited, where it was looked at; in the order in which that was seen."""

    @property
    def word(self) -> str:
        """What it is called in a picture: the buffer's state while it has one, else the job's."""
        return (
            self.state.lower()
            if self.burst_buffer_state in (None, "pending", "complete")
            else str(self.burst_buffer_state)
        )


class JobBars(msgspec.Struct, frozen=True):
    """One job in the window: its stays, one after the other, with a gap where it was over and requeued;
    `left_out` of them are not listed.
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


class Term(msgspec.Struct, frozen=True):
    """One leader's term as the ledger has it: from its first entry to its last. `silent_us`: from the last entry before
    it to its own first one, so never less than for how long nobody could be heard.
    """

    term: int
    first_index: int
    from_us: int
    to_us: int
    entries: int
    silent_us: int | None


class TransferFigures(msgspec.Struct, frozen=True):
    """One transfer's receipt."""

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
    """What the figures were taken from: a window of one ledger, by which anybody can make them again."""

    cluster_id: str
    cluster: str
    from_us: int
    to_us: int
    first_revision: int
    last_revision: int
    last_index: int
    ledger_digest: str
    state_digest: str


class WindowReport(msgspec.Struct, frozen=True):
    """All figures of a window. Lists of jobs and transfers are bounded: `jobs_left_out`, `transfers_left_out`."""

    source: ReportSource
    pools: tuple[PoolUsage, ...]
    waiting: tuple[PendingJobs, ...]
    jobs: tuple[JobBars, ...]
    jobs_left_out: int
    terms: tuple[Term, ...]
    terms_left_out: int
    commands: tuple[int, ...]
    """Commands settled in each column of the window, count."""
    moved: dict[str, tuple[int, ...]]
    """Node -> bytes moved in each column, as if each transfer had gone at its mean rate."""
    transfers: tuple[TransferFigures, ...]
    transfers_left_out: int
