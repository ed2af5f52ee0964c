"""Rows about what jobs get: pools and nodes."""

from __future__ import annotations

from cluster.schemas import operations as ops
from tests.faults import verify
from tests.faults.day2.day import Day, check
from tests.faults.day2.site import until


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
    await site.typed(["pool", "resize", "fast", "8MiB"])
    check(await size() == 8 * 1024**2, "fast did not shrink")
    await day.load.commits()
    await site.typed(["pool", "resize", "fast", str(before)])
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
