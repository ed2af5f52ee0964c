"""Rows about resources of jobs: pools and nodes."""

from __future__ import annotations

import asyncio
import signal

from forebay.cluster.schemas import JobView, NodeView, SubmitRequest
from forebay.cluster.schemas import operations as ops
from tests.faults import verify
from tests.faults.day2.day import Day, check
from tests.faults.day2.site import until
from tests.faults.local_cluster import USER


async def resize(day: Day) -> str:
    """A pool grows and shrinks while jobs hold parts of it, and nothing is taken from them."""
    site = day.site

    async def size() -> int:
        async with site.client() as client:
            pools = (await client.call(ops.LIST_POOLS)).pools
        return next(pool.quantity_bytes for pool in pools if pool.name == "fast")

    before = await size()
    await day.types()
    grown = await size()
    check(grown == 2 * 1024**4, f"fast has {grown} bytes")
    await day.load.commits()
    await site.typed(["pool", "set", "fast", "--quantity", "8MiB"])
    check(await size() == 8 * 1024**2, "fast did not shrink")
    await day.load.commits()
    await site.typed(["pool", "set", "fast", "--quantity", str(before)])
    return f"fast had {before}, {grown} and 8388608 bytes"


async def drain(day: Day) -> str:
    """What a node has goes on, new work goes elsewhere, until it is resumed."""
    site = day.site
    await day.types()

    async def empty() -> bool:
        async with site.client() as client:
            nodes = {node.name: node for node in (await client.call(ops.LIST_NODES)).nodes}
        return nodes["n1"].state == "DRAINED" and not nodes["n1"].jobs

    await until(empty, "n1 is empty")
    before = set(day.load.jobs)

    async def elsewhere() -> bool:
        came = [job for job, one in day.load.jobs.items() if one.example and job not in before]
        async with site.client() as client:
            views = await verify.jobs(client)
        since = [views[job] for job in came]
        check(all(job.node != "n1" for job in since), "a job went to n1 though it is drained")
        return sum(job.state == "COMPLETED" for job in since) >= 2

    await until(elsewhere, "two jobs that came since have completed elsewhere")
    await site.typed(["node", "resume", "n1"])
    return "n1 was DRAINED and empty, two jobs went elsewhere"


async def lost(day: Day) -> str:
    """What a node had is given up, also a job that was cancelled in vain; its agent removes it when it returns."""
    site = day.site

    async def node(name: str) -> NodeView:
        async with site.client() as client:
            return next(one for one in (await client.call(ops.LIST_NODES)).nodes if one.name == name)

    async def job(number: int) -> JobView:
        async with site.client() as client:
            return await client.call(ops.SHOW_JOB, id=str(number))

    await site.typed(["node", "drain", "n1", "--reason", "everything goes to n2"])
    async with day.load.paused():

        async def idle() -> bool:
            return not (await node("n1")).jobs and not (await node("n2")).jobs

        await until(idle, "no job has anything on a node")
        mine = []
        async with site.client(USER) as client:
            for cpus in (1, (await node("n2")).cpus):
                request = SubmitRequest(
                    command_id=client.new_command_id(),
                    script=f"#!/bin/sh\necho > $DW_JOB_STRIPED/much\nwhile sleep 0.1; do echo >> beats-{cpus}; done\n",
                    time_limit_s=900,
                    workdir=str(site.work),
                    name="lost",
                    bb="capacity=1MiB pool=fast access=striped",
                    cpus=cpus,
                )
                mine.append((await client.call(ops.SUBMIT_JOB, request)).job_id)

                async def there() -> bool:
                    found = await job(mine[-1])
                    return found.state == "RUNNING" if len(mine) == 1 else found.burst_buffer_state == "staged-in"

                await until(there, "one job runs on n2, and the next one is staged there")
        runs, waits = mine
        buffers = site.home("n2") / "buffers"
        check({str(runs), str(waits)} <= {one.name for one in buffers.iterdir()}, "their buffers are not on n2")
        site.processes["n2"].send_signal(signal.SIGSTOP)

        async def is_down() -> bool:
            return (await node("n2")).state == "DOWN"

        await until(is_down, "n2 is DOWN")
        said = await site.typed(["cancel", str(runs)], code=1)
        check("forebay node lost n2" in said.err, "the cancel does not say how it takes effect")
        check((await job(runs)).state == "RUNNING", "the cancel took effect on a node that does not answer")
        await day.types("--yes")

        async def given_up() -> bool:
            return (await job(runs)).state == "CANCELLED" and (await job(waits)).burst_buffer_state == "pending"

        await until(given_up, "the jobs of n2 are given up")
        check(sorted((await node("n2")).abandoned) == sorted(mine), "what was given up is not listed")
        await site.typed(["node", "resume", "n1"])

        async def staged_again() -> bool:
            return (await job(waits)).node == "n1" and (await job(waits)).state == "RUNNING"

        await until(staged_again, "the job that waited runs on n1")
        site.processes["n2"].send_signal(signal.SIGCONT)

        async def removed() -> bool:
            n2 = await node("n2")
            left = {str(one) for one in mine} & {one.name for one in buffers.iterdir()}
            return n2.state == "UP" and not n2.abandoned and not left

        await until(removed, "n2 has returned and removed what was given up")
        beats = (site.work / "beats-1").stat().st_size
        await asyncio.sleep(1)
        check((site.work / "beats-1").stat().st_size == beats, "the script of the job that was given up runs on")
        await site.typed(["cancel", str(waits), "--hurry"])

        async def over() -> bool:
            return (await job(waits)).burst_buffer_state == "complete"

        await until(over, "the job is cancelled")
    return "a job that ran on n2 was given up, one that waited ran on n1, and n2 removed both when it returned"
