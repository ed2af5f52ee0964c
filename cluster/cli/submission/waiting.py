"""Waiting until submitted jobs are over, as `sbatch --wait` does, and the exit code that they come to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Final

from cluster.client import ApiError, Client
from cluster.schemas import JobView
from cluster.schemas import operations as ops
from replica.model import ENDED

POLL_S: Final = 0.1
"""Until jobs are looked at again, seconds, at first: a small job is back in less than two of these."""

POLL_S_MAX: Final = 5.0
"""The same for jobs that take long: hundreds who wait cost a replica less than one who works."""

GROWTH: Final = 1.3

EXIT_CODE_FAILED: Final = 1
"""What a job comes to that was ended by a signal, or never ran; as `sbatch --wait`."""

_OVER: Final = frozenset(state.name for state in ENDED)


async def wait_until_finished(client: Client, jobs: Iterable[int], tell: Callable[[str], None]) -> int:
    """Return the largest exit code of these jobs, and of all tasks of those that are arrays, once all are over.

    A cluster that does not answer is asked again; `tell` is called when that begins. ApiError if a job is not there.
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
    """Return what a job that is over comes to: its script's exit code, or 1 where it has none that says so."""
    if job.signal or (job.state != "COMPLETED" and not job.exit_code):
        return EXIT_CODE_FAILED
    return job.exit_code
