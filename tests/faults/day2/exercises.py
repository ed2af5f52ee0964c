"""An exercise for each row of the table: what its section says, with the command as it stands there, and what it
promises. Each leaves a whole cluster, and returns what was checked in words."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

from cluster.schemas import operations as ops
from tests.faults.day2.load import Load
from tests.faults.day2.site import FOURTH, Site, Typed, until
from tests.faults.day2.table import ROWS
from tests.faults.local_cluster import RunFailed

EXIT_REMOVED: Final = 77

COMMANDS: Final = {row.task: row for row in ROWS}


def check(holds: object, sentence: str) -> None:
    """RunFailed with the sentence unless it holds."""
    if not holds:
        raise RunFailed(sentence)


class Day:
    """A cluster with clients at work, and the row that is exercised."""

    def __init__(self, site: Site, load: Load) -> None:
        self.site = site
        self.load = load
        self.task = ""

    async def types(self, *more: str, at: str | None = None, code: int = 0, **names: str) -> Typed:
        """Type the row's command; `names` says what its placeholders are here, `more` comes behind it."""
        words = COMMANDS[self.task].words(names)
        return await self.site.typed([*words, *more], at=at, code=code)


async def replace(day: Day) -> str:
    """A replica's process and disk are gone; it comes back as somebody new."""
    site = day.site
    await site.kill_now("r2")
    site.lose_disk("r2")
    await day.load.commits()
    said = await day.types()
    check("forebay serve --name r2 --join" in said.err, f"it does not say how to start it: {said.err}")
    site.start("r2", "--join")
    new = await site.voting("r2")
    check(new.startswith("r2#"), f"it came back as {new}")
    return f"r2 lost its disk and votes again as {new}"


async def add(day: Day) -> str:
    """A machine more: its certificate and its configuration first."""
    site = day.site
    check(FOURTH not in site.members, f"{FOURTH} is a member already")
    await site.prepare_fourth()
    said = await day.types()
    check("forebay serve --name r4 --join" in said.err, f"it does not say how to start it: {said.err}")
    site.start(FOURTH, "--join")
    site.members.append(FOURTH)
    new = await site.voting(FOURTH)
    return f"four vote, {new} among them"


async def remove(day: Day) -> str:
    """Who is removed is told, and ends by itself."""
    site = day.site
    if FOURTH not in site.members:
        day.task = TASKS["add"]
        await add(day)
        day.task = TASKS["remove"]
    await day.types()
    code = await site.ended_with(FOURTH)
    check(code == EXIT_REMOVED, f"{FOURTH} ended with {code}: {site.last_words(FOURTH)}")
    await site.retire_fourth()
    return f"three vote, {FOURTH} ended with {code}"


async def transfer(day: Day) -> str:
    """The one that is named leads."""
    site = day.site
    if await site.leader() == "r2":
        await site.typed(["member", "transfer", "r3"])
    await day.types()
    leader = await site.leader()
    check(leader == "r2", f"{leader} leads")
    return "r2 leads"


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
        async with site.client() as client:
            views = {job.job_id: job for job in (await client.call(ops.LIST_JOBS, limit=10_000)).jobs}
        since = [views[job] for job, one in day.load.jobs.items() if one.example and job not in before]
        check(all(job.node != "n1" for job in since), "a job went to n1 though it is drained")
        return sum(job.state == "COMPLETED" for job in since) >= 2

    await until(elsewhere, "two jobs that came since have completed elsewhere")
    await site.typed(["node", "resume", "n1"])
    return "n1 was DRAINED and empty, two jobs went elsewhere"


class Exercise(NamedTuple):
    """The row of the table that it exercises, and what does it."""

    task: str
    run: Callable[[Day], Awaitable[str]]


EXERCISES: Final = {
    "replace": Exercise("a replica lost its disk", replace),
    "add": Exercise("one replica more", add),
    "remove": Exercise("one replica less", remove),
    "transfer": Exercise("another replica leads", transfer),
    "resize": Exercise("a pool grows or shrinks", resize),
    "drain": Exercise("a node is to be emptied", drain),
}
"""By name, in the order in which they are done."""

TASKS: Final = {name: one.task for name, one in EXERCISES.items()}
