"""Wrong wall clock of the leader, set an hour ahead or half a minute behind."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import struct
import time
from pathlib import Path
from typing import Final

from forebay.cluster.client import Client
from forebay.cluster.schemas import operations as ops
from forebay.cluster.system.clock import SystemClock, format_instant, parse_instant
from forebay.replica.values import MICROSECONDS_PER_SECOND, Instant, seconds
from tests.faults import faults
from tests.faults.attacks.sites import PATIENCE_S, RunFailed, works
from tests.faults.bare import BareCluster, held_job
from tests.faults.local_cluster import REPLICAS

SOURCE: Final = Path(__file__).parents[1] / "wallclock.c"

OFF_S: Final = (3600, -31)
"""How far a leader's clock is set off, seconds: at an hour all time was too late, at half a minute all ids too new."""

APART_S: Final = 20.0
"""How far the cluster's time may be from the truth at a moment that this process has read, seconds. On a machine that
is busy it is late; it is never an hour ahead."""

REPAIRED_S: Final = 15.0
"""How far a clock that was set right may still seem to be off, seconds: its reading is late on a busy machine."""

BEGINS_S: Final = 1800
"""When the job begins that must not begin, seconds from now."""

_FORMAT: Final = "<q"


class WallClocks:
    """The wall clocks of the replicas."""

    def __init__(self, site: BareCluster) -> None:
        library = faults.build(site.directory / "shim", SOURCE)
        self._files = {name: site.directory / f"{name}.wallclock" for name in REPLICAS}
        for name, file in self._files.items():
            file.write_bytes(struct.pack(_FORMAT, 0))
            site.environments[name] = {"LD_PRELOAD": str(library), "FOREBAY_WALLCLOCK": str(file)}

    def set(self, name: str, off_s: int) -> None:
        """Let a replica's wall clock be so far off from now on."""
        with self._files[name].open("r+b") as file, contextlib.closing(mmap.mmap(file.fileno(), 8)) as mapped:
            mapped[:] = struct.pack(_FORMAT, off_s)


class Site(BareCluster):
    """Three replicas whose wall clocks can be set."""

    clocks: WallClocks


def settable(directory: Path) -> Site:
    """Return three replicas whose wall clocks can be set."""
    site = Site(directory)
    site.found()
    site.clocks = WallClocks(site)
    site.start_all()
    return site


async def clocks(site: Site, rounds: int) -> dict[str, int]:
    """Set the clock of whoever leads off, in each way, and right again when somebody else leads.

    The cluster's time follows the others, nothing begins early, and nobody who asks for something meanwhile is refused.
    """
    jobs = 0
    async with site.client() as client:
        await site.leader(client)
        begin = Instant(SystemClock().now() + seconds(BEGINS_S))
        waits = held_job(client, "later", hold=False, begin_at=format_instant(begin))
        later = (await client.call(ops.SUBMIT_JOB, waits)).job_id
        for off_s in OFF_S * rounds:
            leader = await site.leader(client)
            site.clocks.set(leader, off_s)
            until_s = time.monotonic() + PATIENCE_S
            while await site.leader(client) == leader:
                jobs += await _asks(site, client, off_s)
                if time.monotonic() > until_s:
                    raise RunFailed(f"{leader} still leads with a clock that is {off_s} s off")
                await asyncio.sleep(0.1)
            jobs += await _asks(site, client, off_s)
            site.clocks.set(leader, 0)
            await _repaired(site, client)
            view = await client.call(ops.SHOW_JOB, id=later)
            if view.eligible_time is not None and view.reason != "BeginTime":
                raise RunFailed(f"job {later} is to begin in {BEGINS_S} s, and is {view.state} ({view.reason})")

    return {"rounds": len(OFF_S) * rounds, "jobs": jobs}


async def _repaired(site: BareCluster, client: Client) -> None:
    """Wait until every replica has read the repaired clock: two clocks that are off at once are a majority."""
    async with asyncio.timeout(PATIENCE_S):
        for name in REPLICAS:
            replica = site.config.replica(name).api
            while True:
                members = (await client.call(ops.LIST_MEMBERS, replica=replica)).members
                offsets = [member.clock_offset_s for member in members if member.name != name]
                if all(offset_s is not None and abs(offset_s) < REPAIRED_S for offset_s in offsets):
                    break
                await asyncio.sleep(0.1)


async def _asks(site: BareCluster, client: Client, off_s: int) -> int:
    """Submit a job, and look at the clock of the cluster; return the number of jobs."""
    await works(site, client)
    before = SystemClock().now()
    at = (await client.call(ops.SHOW_CLOCK)).at
    apart_s = (parse_instant(at) - before) / MICROSECONDS_PER_SECOND
    if abs(apart_s) > APART_S:
        raise RunFailed(f"a leader whose clock is {off_s} s off made the cluster's time {apart_s:.0f} s off")
    return 1
