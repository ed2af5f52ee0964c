"""Wait for submitted jobs as `sbatch --wait` does, and derive the exit code."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Final

from forebay.cluster.client import ApiError, Client
from forebay.cluster.schemas import JobView
from forebay.cluster.schemas import operations as ops
from forebay.replica.model import ENDED

POLL_S: Final = 0.1
"""First polling interval, seconds: a small job finishes in less than two of them."""

POLL_S_MAX: Final = 5.0
"""Longest polling interval, seconds: hundreds of waiting commands are a small load for a replica."""

GROWTH: Final = 1.3

EXIT_CODE_FAILED: Final = 1
"""Exit code for a job that was ended by a signal or never ran, as of `sbatch --wait`."""

_OVER: Final = frozenset(state.name for state in ENDED)


async def wait_until_finished(client: Client, jobs: Iterable[int], tell: Callable[[str], None]) -> int:
    """Wait until these jobs, with all array tasks, have finished, and return their largest exit code.

    If the cluster does not answer, `tell` is called once and the request repeated.

    Raises:
        ApiError: if a job does not exist.
    """
    largest = 0
    for job in jobs:
        largest = max(largest, await _wait(client, job, tell))
    return largest


async def _wait(client: Client, job: int, tell: Callable[[str], None]) -> int:
    pause_s, told = POLL_S, False
    while True:
        try:
            found = await client.call(ops.LIST_JOBS, job=str(job), limit=ops.JOBS_LISTED_MAX)
        except ApiError as error:
            if 400 <= error.status < 500:
                raise
            if not told:
                tell(f"forebay: no answer about job {job}, still waiting: {error.sentence}")
            told = True
        else:
            told = False
            if all(one.state in _OVER for one in found.jobs):
                return max(map(exit_code_of, found.jobs), default=0)
        await asyncio.sleep(pause_s)
        pause_s = min(pause_s * GROWTH, POLL_S_MAX)


def exit_code_of(job: JobView) -> int:
    """Return the exit code of a finished job's script; 1 if it failed without one."""
    if job.signal or (job.state != "COMPLETED" and not job.exit_code):
        return EXIT_CODE_FAILED
    return job.exit_code
