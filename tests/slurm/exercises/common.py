"""Common parts of exercises: a batch of jobs, and checks of the jobs and of the site afterwards."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any, Final

from forebay.cluster.client import Client
from forebay.cluster.schemas import operations as ops
from tests.slurm.site import RunFailed, Site
from tests.slurm.slurm import PATIENCE_S, Submitted

Figures = dict[str, Any]
Jobs = dict[str, tuple[str, bytes]]
"""Names and contents of what is staged, by the numbers of Slurm's jobs."""

Told = Callable[[Site, Client, int, int], Awaitable[Figures]]
"""Exercise function: site, size and seed."""

SETTLED: Final = ("none", "over")

GONE_S: Final = 420.0
"""Seconds for buffers that never ran to be gone: they linger (ExternalJobLinger, 300 s), as after a restart of
slurmctld.
"""

ALARM: Final = re.compile(r"slurm_bb_\w+ for JobId=\S+ failed|unable to find bb_alloc")
"""Lines with which slurmctld reports that a call has failed, or that a buffer came back after its teardown."""

REGISTERS_S: Final = 60.0
"""Seconds within which an agent that was started registers."""


def require(holds: object, sentence: str) -> None:
    """Raise RunFailed with the sentence unless the condition holds."""
    if not holds:
        raise RunFailed(sentence)


async def nothing_left(site: Site, client: Client, patience_s: float = PATIENCE_S) -> None:
    """Wait until no external job holds space, the shared filesystem has no buffer, and the pool is free."""

    async def gone() -> bool:
        external_jobs = await site.external_jobs(client)
        held = [pool.held_bytes for pool in (await client.call(ops.LIST_POOLS)).pools]
        return (
            all(external_job.phase in SETTLED for external_job in external_jobs.values())
            and not any(held)
            and not site.left()
        )

    await site.until("all buffers are gone", gone, patience_s)


def no_alarms(site: Submitted) -> None:
    """Raise RunFailed if slurmctld has reported failures of the buffer, as for jobs that were only cancelled."""
    said = (site.directory / "slurm" / "slurmctld.output").read_text(errors="replace")
    alarms = [line for line in said.splitlines() if ALARM.search(line)]
    require(not alarms, f"slurmctld reports {len(alarms)} failures of cancelled jobs, for example {alarms[:1]}")


async def node_starts(site: Site, client: Client, name: str) -> None:
    """Add a node for Forebay's own jobs to the cluster, and wait until its agent has registered."""
    await asyncio.to_thread(site.start_agent, name)

    async def is_up() -> bool:
        nodes = (await client.call(ops.LIST_NODES)).nodes
        return any(node.name == name and node.state == "UP" for node in nodes)

    await site.until(f"the agent of node {name} has registered", is_up, REGISTERS_S)


def exported(site: Submitted, name: str, data: bytes) -> None:
    """Raise RunFailed unless the result is what was staged in, and the user's."""
    path = site.results / name
    require(path.exists(), f"{name} was not exported")
    require(path.read_bytes() == data, f"{name} is not what was staged in")
    require(path.stat().st_uid == site.exports_as, f"{name} is not its user's")


async def many(
    site: Submitted, count: int, tag: str, *body: str, size_bytes: int = 100_000, options: tuple[str, ...] = ()
) -> Jobs:
    """Submit jobs that stage a file in and out; return by their numbers the names and contents of what they stage."""
    jobs = {}
    for number in range(count):
        name = f"{tag}.{number}"
        data = site.make_input(name, size_bytes)
        jobs[await site.submit(site.script(name, *body), *options)] = name, data
    return jobs


async def all_well(site: Site, client: Client, jobs: Jobs) -> None:
    """Raise RunFailed unless each job completed normally, and each byte was staged in once."""
    for job, (name, data) in jobs.items():
        ended = await site.over(job)
        require(ended.state == "COMPLETED", f"job {job} ended as {ended}")
        exported(site, name, data)
    written = await site.written_in(client, jobs)
    for job, (_, data) in jobs.items():
        require(written[job] == len(data), f"job {job} had {written[job]} bytes written for {len(data)}")


async def rejection(site: Site, script: str) -> str:
    """Return what sbatch says to a script that it refuses; RunFailed if it accepts it."""
    done = await site.ask("sbatch", script=script)
    require(done.returncode != 0, f"this was accepted: {script}")
    return str(done.stderr)
