"""Interrupted jobs: requeued, preempted, on a failed node, or at their time limit; and heterogeneous jobs."""

from __future__ import annotations

import asyncio
from typing import Final

from forebay.cluster.client import Client
from tests.slurm.exercises.common import Figures, exported, nothing_left, require
from tests.slurm.site import Seen, Site

SETTINGS: Final = """\
SlurmdTimeout=30
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=urgent Nodes=ALL PriorityTier=9 MaxTime=INFINITE State=UP
"""
"""Lines of slurm.conf: a node counts as failed after so many seconds without an answer, and the jobs of one partition
preempt those of the other."""

COPY: Final = 'cp "$DW_JOB_STRIPED/in" "$DW_JOB_STRIPED/out" || exit 3'
STAYS: Final = 'test "${SLURM_RESTART_COUNT:-0}" -gt 0 || exec sleep 900'
"""Line of a job that goes on working unless it has been started before."""

AGAIN_S: Final = 420.0
"""Seconds in which a job that Slurm requeues has run again: Slurm waits two minutes before it does."""

LIMIT_S: Final = 300.0
"""Seconds in which a job with a limit of one minute ends: Slurm checks limits every half a minute."""

STUCK_S: Final = 60.0
"""Seconds after which a job that waits counts as stuck, where the release is known to leave it waiting."""

HETEROGENEOUS: Final = (24, 11)
"""First release seen to run heterogeneous jobs that have buffers of `burst_buffer/lua`."""


async def _state(site: Site, job: str, *states: str) -> Seen:
    async def there() -> Seen | None:
        found = await site.seen(job)
        return found if found is not None and found.state in states else None

    found: Seen = await site.until(f"job {job} is {' or '.join(states)}", there)
    return found


async def _works(site: Site, client: Client, job: str) -> None:
    """Wait until a job has made its result: a file `out` in its buffer."""

    async def has_result() -> bool:
        found = (await site.external_jobs(client)).get(job)
        return found is not None and any(site.filesystem.glob(f"*/{found.job_id}.*/**/out"))

    await site.until(f"job {job} has made its result", has_result)


async def _completes(site: Site, job: str, name: str, data: bytes) -> None:
    ended = await site.over(job, AGAIN_S)
    require(ended.state == "COMPLETED", f"job {job} ended as {ended}")
    exported(site, name, data)


async def requeue(site: Site, client: Client, size: int, seed: int) -> Figures:
    """Jobs that their user requeues while they run: staged out, staged in again, and run to their end."""
    jobs = {}
    for number in range(size):
        name = f"requeued.{number}"
        data = site.make_input(name)
        job = await site.submit(site.script(name, COPY, STAYS), "--requeue")
        jobs[job] = name, data
    for job, (name, data) in jobs.items():
        await _works(site, client, job)
        done = await site.ask("scontrol", "requeue", job)
        require(done.returncode == 0, f"scontrol requeue {job}: {done.stderr}")

        async def is_exported(name: str = name) -> bool:
            return (site.results / name).exists()

        await site.until(f"the result of the first run of job {job} is exported", is_exported)
        exported(site, name, data)
        (site.results / name).unlink()
    for job, (name, data) in jobs.items():
        await _completes(site, job, name, data)
    await nothing_left(site, client)
    return {"requeued": len(jobs)}


async def preemption(site: Site, client: Client, size: int, seed: int) -> Figures:
    """Check that a preempted job is requeued, and that both jobs complete with their own results."""
    data = {name: site.make_input(name) for name in ("preempted", "urgent")}
    low = await site.submit(site.script("preempted", COPY, STAYS), "-N2", "--exclusive", "--requeue")
    await _works(site, client, low)
    high = await site.submit(site.script("urgent", COPY), "-N2", "--exclusive", "--partition=urgent")
    await _completes(site, high, "urgent", data["urgent"])
    found = await site.seen(low)
    require(found is not None and found.state != "RUNNING", f"job {low} was not preempted: {found}")
    await _completes(site, low, "preempted", data["preempted"])
    await nothing_left(site, client)
    return {"preempted": 1}


async def node_failure(site: Site, client: Client, size: int, seed: int) -> Figures:
    """A node dies under two jobs: one is requeued and ends well, the other ends with the node; both are exported."""
    data = {name: site.make_input(name) for name in ("again", "lost")}
    again = await site.submit(site.script("again", COPY, STAYS), "--nodelist=n1", "--requeue")
    lost = await site.submit(site.script("lost", COPY, STAYS), "--nodelist=n1", "--no-requeue")
    for job in (again, lost):
        await _works(site, client, job)
    await asyncio.to_thread(site.slurm.end_node, "n1")
    ended = await site.over(lost, AGAIN_S)
    require(ended.state == "NODE_FAIL", f"job {lost} ended as {ended}")
    exported(site, "lost", data["lost"])
    await asyncio.to_thread(site.slurm.node_again, "n1")
    await _completes(site, again, "again", data["again"])
    await site.nodes_up()
    await nothing_left(site, client)
    return {"ended": ended.state}


async def time_limit(site: Site, client: Client, size: int, seed: int) -> Figures:
    """Check that the results of a job at its time limit are staged out."""
    data = site.make_input("limited")
    job = await site.submit(site.script("limited", COPY, "exec sleep 900"), "--time=1")
    ended = await site.over(job, LIMIT_S)
    require(ended.state == "TIMEOUT", f"job {job} ended as {ended}")
    exported(site, "limited", data)
    await nothing_left(site, client)
    return {"ended": ended.state, "reason": ended.reason}


async def heterogeneous(site: Site, client: Client, size: int, seed: int) -> Figures:
    """A heterogeneous job with buffers runs, or waits, as docs/slurm/versions.md says of its release."""
    data = site.make_input("components")
    first = site.script("components", COPY).splitlines()
    at = first.index(COPY)
    # Directives above this line are those of the first component, where the script runs.
    script = "\n".join((*first[:at], "#SBATCH hetjob", site.space(2), *first[at:], ""))
    job = await site.submit(script)
    if site.plugin == "lua" and await site.release() < HETEROGENEOUS:
        await asyncio.sleep(STUCK_S)
        found = await site.seen(job)
        require(found is not None and found.reason == "BurstBufferResources", f"job {job} is {found}")
        # What never ran lingers: here for a moment only.
        await asyncio.to_thread(site.cluster.forebay, "config", "set", "ExternalJobLinger=1")
        await site.ask("scancel", job)
        await nothing_left(site, client)
        await asyncio.to_thread(site.cluster.forebay, "config", "set", "ExternalJobLinger=300")
        return {"waits": found.reason if found else ""}
    ended = await site.over(job)
    require(ended.state == "COMPLETED", f"job {job} ended as {ended}")
    exported(site, "components", data)
    await nothing_left(site, client)
    return {"ended": ended.state}
