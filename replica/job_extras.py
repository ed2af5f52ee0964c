"""What is known of a job beyond its Job record, from feature level 3 on: Job itself must not grow (law 12).

A job about which there is nothing of it has no record (State.extras).
"""

from __future__ import annotations

import msgspec

from replica.values.units import NEVER, Instant


class JobExtra(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """More of one job. Times are Instants, durations microseconds."""

    held_because: str = ""
    """The reason that is shown while the job is held by the system, in Slurm's form; it outlives the teardown."""
    operation: str = ""
    """The operation that failed last, for example `setup`."""
    pre_run_failures: int = 0
    """Failures of pre-run since somebody released the job last."""
    requeues: int = 0
    """How often the job was requeued (SLURM_RESTART_COUNT)."""
    requeueing: bool = False
    """The present run is being ended, or its results staged out, and the job waits again afterwards."""
    suspended_at: Instant = NEVER
    suspended_us: int = 0
    """When the job was suspended, NEVER if it is not; and for how long in all before: its time limit stands still."""


NO_EXTRA = JobExtra()
"""What a job without a record is."""
