"""Jobs that are cancelled while they are staged in, between two questions of Slurm or during one."""

from __future__ import annotations

import asyncio
import random
import re
import signal

from cluster.client import Client
from tests.slurm.exercises.common import Figures, nothing_left, require
from tests.slurm.site import MOVERS, Site

AT_ONCE = 20
SPREAD_S = 12.0
"""Seconds over which cancels are spread: longer than the bridge holds a question."""

STAGING_S = 90.0
"""Seconds for stage-ins to begin: Slurm's passes are up to half a minute apart."""

_ALARM = re.compile(r"slurm_bb_\w+ for JobId=\S+ failed|unable to find bb_alloc")


async def cancels(site: Site, client: Client, count: int, seed: int) -> Figures:
    """Cancelled jobs show no failure of the buffer as their reason, alarm no administrator, and leave nothing."""
    chance = random.Random(seed)
    jobs: list[str] = []
    while len(jobs) < count:
        for mover in MOVERS:
            site.signal(mover, signal.SIGSTOP)
        batch = []
        for number in range(min(AT_ONCE, count - len(jobs))):
            name = f"cancelled.{len(jobs) + number}"
            site.make_input(name)
            batch.append(await site.submit(site.script(name)))

        async def all_staging(batch: list[str] = batch) -> bool:
            guests = await site.guests(client)
            return all(job in guests and guests[job].phase in ("set-up", "staging-in") for job in batch)

        await site.until("all jobs are being staged in", all_staging, STAGING_S)

        async def cancel(job: str, after_s: float) -> None:
            await asyncio.sleep(after_s)
            await site.ask("scancel", job)

        await asyncio.gather(*(cancel(job, chance.uniform(0, SPREAD_S)) for job in batch))
        for mover in MOVERS:
            site.signal(mover, signal.SIGCONT)
        for job in batch:
            ended = await site.over(job)
            require(ended.state == "CANCELLED", f"job {job}, which was cancelled, is {ended}")
            require("slurm_bb" not in ended.reason, f"job {job} was cancelled, and its reason is {ended.reason}")
        jobs += batch
    await nothing_left(site, client)
    said = (site.directory / "slurm" / "slurmctld.output").read_text(errors="replace")
    alarms = [line for line in said.splitlines() if _ALARM.search(line)]
    require(not alarms, f"slurmctld reports {len(alarms)} failures of cancelled jobs, for example {alarms[:1]}")
    return {"cancelled": len(jobs)}
