"""Rows about disasters: a lost majority, a lost cluster, and a wrong clock."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from forebay.cluster.schemas import operations as ops
from forebay.cluster.system import SystemClock, parse_instant
from forebay.replica.values import MICROSECONDS_PER_SECOND
from tests.faults import verify
from tests.faults.day2.day import Day, check
from tests.faults.day2.site import Site, until
from tests.faults.local_cluster import REPLICAS

EXITS_OVER: Final = (66, 77)
"""How a replica of an incarnation that is over ends: it was refused by its storage, or told by a peer."""

GONE: Final = "is not on this node"
"""What is said of a buffer that was torn down in a history that is lost."""

OFF_S: Final = 45
"""How far a clock is set off, seconds."""

APART_S: Final = 20.0
"""How far the cluster's time may be from the truth at a moment that we have read, seconds: answers of a busy machine
are late."""


async def recover(day: Day) -> str:
    """Two machines are gone with their disks; what the third one has goes on, and nobody of before joins it."""
    site = day.site
    await site.kill_now("r2", "r3")
    old = site.directory / "moved-away"
    shutil.copytree(site.home("r3"), old)
    for name in ("r2", "r3"):
        site.lose_disk(name)
    await site.stop("r1")
    shown = (await day.types(at="r1")).err
    plan = (await day.types("--json", at="r1")).json()
    check(plan["plan"] in shown, f"the plan is another one each time: {shown}")
    await day.types("--confirm", plan["plan"], at="r1")
    site.members = ["r1"]
    site.start("r1")
    await _leads_alone(site)
    lost = await day.load.forget(plan["lost_after_revision"])

    shutil.copytree(old, site.home("r3"), dirs_exist_ok=True)
    site.start("r3")
    code = await site.ended_with("r3")
    check(code in EXITS_OVER, f"r3 of the incarnation before ended with {code}: {site.last_words('r3')}")
    site.lose_disk("r3")
    shutil.rmtree(old)
    for name in ("r2", "r3"):
        await site.add(name)
    requeued = await _run_again(day)
    return (
        f"r1 went on alone from revision {plan['kept_revision']}, {lost} acknowledged commands of those that the plan "
        f"gave up are gone, r3 of before ended with {code}, r2 and r3 joined anew, "
        f"{requeued} jobs were requeued"
    )


async def restore(day: Day) -> str:
    """All machines have lost their disks; a snapshot that was fetched before is all there is."""
    site = day.site
    backups = site.directory / "backups"
    await site.typed(["backup", "create", "--into", str(backups), "--save", "--keep", "168"])
    [file] = backups.iterdir()
    await day.load.commits()
    await site.kill_now(*REPLICAS)
    for name in REPLICAS:
        site.lose_disk(name)
    here = {"FILE": str(_carried(file, site.machine("r1")))}
    shown = (await day.types(at="r1", names=here)).err
    plan = (await day.types("--json", at="r1", names=here)).json()
    check(plan["plan"] in shown, f"the plan is another one each time: {shown}")
    await day.types("--confirm", plan["plan"], at="r1", names=here)
    site.members = ["r1"]
    site.start("r1")
    await _leads_alone(site)
    lost = await day.load.forget(plan["kept_revision"])
    day.load.unrecord()
    check(lost, "nothing came after the snapshot")
    for name in ("r2", "r3"):
        await site.add(name)
    requeued = await _run_again(day)
    return (
        f"r1 began from a snapshot of revision {plan['kept_revision']}, {lost} later commands are gone as it said, "
        f"{requeued} jobs were requeued"
    )


async def clock(day: Day) -> str:
    """The leader's wall clock is set off: it is named, others lead, and the cluster's time stays right."""
    site = day.site
    wrong = await site.leader()
    site.set_wall_clock(wrong, OFF_S)

    async def named() -> bool:
        return wrong in (await day.types()).err

    await until(named, f"`cluster clock` names {wrong}")

    async def others_lead() -> bool:
        return (await site.listed()).leader not in (None, wrong)

    await until(others_lead, f"another one than {wrong} leads")
    await day.load.commits()
    async with site.client() as client:
        at = parse_instant((await client.call(ops.SHOW_CLOCK)).at)
    apart_s = (at - SystemClock().now()) / MICROSECONDS_PER_SECOND
    check(abs(apart_s) < APART_S, f"the cluster's time is {apart_s:.0f} s off")
    site.set_wall_clock(wrong, 0)

    async def nobody_named() -> bool:
        return not (await day.types()).err

    await until(nobody_named, "`cluster clock` names nobody")
    return f"{wrong} led, was named at {OFF_S} s off and led no longer; the cluster's time was {apart_s:.1f} s off"


async def _run_again(day: Day) -> int:
    """Look at what was under way in what a recovery began with, as "A lost majority" says: what ran on and was torn
    down since has no buffer any more, and is to be requeued. Return how many jobs were."""
    site, load = day.site, day.load
    requeued: set[int] = set()

    async def completed() -> bool:
        views = await load.views()
        for job in load.twice:
            if views[job].state == "STAGE_OUT" and GONE in f"{views[job].reason} {views[job].system_comment}":
                await site.typed(["buffer", "clear", str(job), "--discard"], code=None)
            elif verify.over(views[job]) and views[job].state != "COMPLETED":
                await site.typed(["job", "requeue", str(job)], code=None)
                requeued.add(job)
        return all(verify.over(views[job]) and views[job].state == "COMPLETED" for job in load.twice)

    await until(completed, f"jobs {sorted(load.twice)} have completed, run again where need be", every_s=1.0)
    return len(requeued)


def _carried(file: Path, machine: Path) -> Path:
    """Copy a backup to a machine."""
    return shutil.copy2(file, machine / file.name)


async def _leads_alone(site: Site) -> None:
    async def leads() -> bool:
        answer = await site.listed()
        return answer.leader == "r1" and [one.name for one in answer.members] == ["r1"]

    await until(leads, "r1 leads alone")
