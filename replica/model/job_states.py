"""Job states, as Slurm names them."""

from __future__ import annotations

from enum import IntEnum


class JobState(IntEnum):
    """Slurm's job states that Forebay uses. The numbers are wire numbers (law 12)."""

    PENDING = 1
    CONFIGURING = 2
    RUNNING = 3
    SUSPENDED = 4
    STAGE_OUT = 5
    COMPLETED = 6
    FAILED = 7
    CANCELLED = 8
    TIMEOUT = 9
    NODE_FAIL = 10

    @property
    def code(self) -> str:
        """Return the two-letter code of squeue."""
        return _CODES[self]


_CODES = {
    JobState.PENDING: "PD",
    JobState.CONFIGURING: "CF",
    JobState.RUNNING: "R",
    JobState.SUSPENDED: "S",
    JobState.STAGE_OUT: "SO",
    JobState.COMPLETED: "CD",
    JobState.FAILED: "F",
    JobState.CANCELLED: "CA",
    JobState.TIMEOUT: "TO",
    JobState.NODE_FAIL: "NF",
}

ENDED: frozenset[JobState] = frozenset(
    {JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED, JobState.TIMEOUT, JobState.NODE_FAIL}
)
"""States in which the job's result is known. Its buffer may still be in teardown."""
