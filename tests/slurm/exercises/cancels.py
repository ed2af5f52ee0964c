"""Jobs cancelled during stage-in, between two queries of Slurm or during a query."""

from __future__ import annotations

import asyncio
import random
import signal

from forebay.cluster.client import Client
from tests.slurm.exercises.common import SETTLED, Figures, no_alarms, nothing_left, require
from tests.slurm.site import MOVERS, Seen, Site

AT_ONCE = 20
SPREAD_S = 12.0
"""Seconds over which cancels are spread: longer than the bridge holds a question."""

STAGING_S = 90.0
"""Seconds for stage-ins to begin: Slurm's passes are up to half a minute apart."""


async def cancels(site: Site, client: Client, count: int, seed: int) -> Figures:
    """Check that cancelled jobs show no buffer failure, log no errors, and leave nothing."""
    # What is cancelled before it has run lingers: here for a moment only.
    await asyncio.to_thread(site.cluster.forebay, "config", "set", "ExternalJobLinger=1")
    chance = random.Random(seed)
    jobs, left = list[str](), 0
    while len(jobs) < count:
        for mover in MOVERS:
            site.signal(mover, signal.SIGSTOP)
        batch = []
        for number in range(min(AT_ONCE, count - len(jobs))):
            name = f"cancelled.{len(jobs) + number}"
            site.make_input(name)
            batch.append(await site.submit(site.script(name)))

        async def all_staging(batch: list[str] = batch) -> bool:
            external_jobs = await site.external_jobs(client)
            return all(job in external_jobs and external_jobs[job].phase in ("set-up", "staging-in") for job in batch)

        await site.until("all jobs are being staged in", all_staging, STAGING_S)

        async def cancel(job: str, after_s: float) -> None:
            await asyncio.sleep(after_s)
            await site.ask("scancel", job)

        await asyncio.gather(*(cancel(job, chance.uniform(0, SPREAD_S)) for job in batch))
        for mover in MOVERS:
            site.signal(mover, signal.SIGCONT)
        for job in batch:
            left += await _ended(site, client, job)
        jobs += batch
    await nothing_left(site, client)
    no_alarms(site)
    return {"cancelled": len(jobs), "left_in_teardown": left}


async def _ended(site: Site, client: Client, job: str) -> bool:
    """Wait for the end of a cancelled job; return whether Slurm has left it in teardown.

    Whatever the script, the signal that ends a job's calls may also end the teardown that has just begun.
    """

    async def is_over() -> Seen | None:
        seen, external_job = await site.seen(job), (await site.external_jobs(client)).get(job)
        gone = external_job is None or external_job.phase in (*SETTLED, "lingering")
        return seen if seen is not None and (seen.is_over or (gone and seen.buffer == "teardown")) else None

    ended = await site.until(f"job {job} has ended", is_over)
    require(ended.state == "CANCELLED", f"job {job}, which was cancelled, is {ended}")
    require("slurm_bb" not in ended.reason, f"job {job} was cancelled, and its reason is {ended.reason}")
    return bool(ended.buffer == "teardown")
