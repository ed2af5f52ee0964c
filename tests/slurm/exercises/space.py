"""More jobs than space, and other users of the same pool."""

from __future__ import annotations

import asyncio
import random
import re
import signal
import time
from collections import Counter
from contextlib import suppress

from forebay.cluster.client import ApiError, Client
from forebay.cluster.schemas import operations as ops
from forebay.replica.values import parse_size
from tests.account import KNOWN
from tests.slurm.exercises.common import Figures, Jobs, exported, node_starts, nothing_left, require
from tests.slurm.site import GRAIN, RunFailed, Site

_SPACE = re.compile(r"(?:PoolName\[0\]|DefaultPool)=fast .*TotalSpace=(\w+) FreeSpace=(\w+) UsedSpace=(\w+)")

DRAINED_GRAINS = 15
"""Of the pool, out of service for a while, again and again."""

REJECTED_FOR_NOW = ("bridge not running", "no replica of Forebay has answered yet")
"""What `sbatch` says while the bridge is away, and in the moment after its start."""

SHARE_S = 20.0
"""Seconds that a job may take on average until all are over: a pool is asked for its space every 30 s."""


class _Watched:
    """Observations during the exercise."""

    def __init__(self, site: Site, client: Client) -> None:
        self.site = site
        self.client = client
        self.over = asyncio.Event()
        self.held_most = 0
        self.counts: Counter[str] = Counter()

    async def held(self) -> None:
        """Check continuously that held space never exceeds the pool, in Forebay and in Slurm."""
        looked_s = 0.0
        while not self.over.is_set():
            with suppress(ApiError):
                pool = (await self.client.call(ops.LIST_POOLS)).pools[0]
                self.held_most = max(self.held_most, pool.held_bytes)
                require(pool.held_bytes <= pool.quantity_bytes, f"{pool.held_bytes} bytes are held of {pool}")
                self.counts["looks"] += 1
            if time.monotonic() > looked_s + 1:
                looked_s = time.monotonic()
                shown = (await self.site.ask("scontrol", "show", "burst")).stdout
                if found := _SPACE.search(shown):
                    total, free, used = (0 if size == "0" else parse_size(size) for size in found.groups())
                    # Slurm shows a negative free space as a huge one. TotalSpace is what is in service: jobs that
                    # began before a drain may use more than that, but never more than the whole pool.
                    require(free <= total and used <= self.site.grains * GRAIN, f"Slurm's books: {shown}")
                    self.counts["looks at Slurm's books"] += 1
            await asyncio.sleep(0.02)

    async def disturb(self, chance: random.Random) -> None:
        """Kill the bridge now and then."""
        while not await self._over_within(chance.uniform(5, 20)):
            self.site.signal("bridge", chance.choice((signal.SIGKILL, signal.SIGTERM)))
            self.counts["bridge kills"] += 1
            await self._over_within(chance.choice((0, 0, 12)))  # 12 s: its files are no longer believed
            self.site.start_bridge()

    async def drain(self, chance: random.Random) -> None:
        """Take a part of the pool out of service, and give it back."""
        forebay = self.site.cluster.forebay
        while not await self._over_within(chance.uniform(10, 30)):
            await asyncio.to_thread(forebay, "pool", "drain", "fast", f"{DRAINED_GRAINS}MiB")
            self.counts["drains"] += 1
            await self._over_within(chance.uniform(10, 40))
            await asyncio.to_thread(forebay, "pool", "resume", "fast")

    async def natives(self, chance: random.Random) -> None:
        """Submit jobs of Forebay's own that take from the same pool."""
        script = self.site.directory / "native.sh"
        while not await self._over_within(chance.uniform(2, 10)):
            space = f"#DW jobdw pool=fast capacity={chance.randint(1, 5)}MiB access_mode=striped type=scratch"
            script.write_text(f"#!/bin/sh\n{space}\ntouch $DW_JOB_STRIPED/here; sleep {chance.randint(0, 5)}\n")
            command = self.site.cluster.command(
                "submit", "--chdir", str(self.site.results), str(script), identity=KNOWN
            )
            running = await asyncio.create_subprocess_exec(
                *command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
            )
            _, said = await running.communicate()
            require(running.returncode == 0, f"forebay submit: {said.decode()}")
            self.counts["native jobs"] += 1

    async def _over_within(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            await asyncio.wait_for(self.over.wait(), seconds)
        return self.over.is_set()


async def overcommit(site: Site, client: Client, rounds: int, seed: int) -> Figures:
    """More jobs than the pool has room for, native ones and a drain beside them, the bridge killed meanwhile: what is
    held never exceeds the pool, and all jobs end well.
    """
    chance = random.Random(seed)
    await node_starts(site, client, "n3")
    # As `install` writes it: who is held begins anew when an administrator releases him.
    site.slurmctld(signal.SIGTERM)
    site.slurm.configure_buffers("Flags=TeardownFailure\n")
    await site.slurmctld_again()
    watched = _Watched(site, client)
    tasks = [asyncio.create_task(watched.held())]
    tasks += [asyncio.create_task(act(chance)) for act in (watched.disturb, watched.drain, watched.natives)]
    jobs: Jobs = {}
    try:
        for number in range(rounds):
            name = f"over{number}"
            data = site.make_input(name)
            jobs[await _accepted(site, site.script(name, grains=chance.randint(1, 3)), watched)] = name, data
        await _all_over(site, jobs, watched, tasks, rounds)
    finally:
        watched.over.set()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    for one in ended:
        if isinstance(one, BaseException):
            raise one
    for name, data in jobs.values():
        exported(site, name, data)
    require(watched.held_most <= site.grains * GRAIN, f"{watched.held_most} bytes were held")
    await asyncio.to_thread(site.cluster.forebay, "pool", "resume", "fast")
    await nothing_left(site, client)
    counts = {what.replace(" ", "_").replace("'", ""): count for what, count in watched.counts.items()}
    return {"jobs": rounds, "held_most_bytes": watched.held_most, "pool_bytes": site.grains * GRAIN, **counts}


async def _accepted(site: Site, script: str, watched: _Watched) -> str:
    """Return the number of a job that was submitted as often as it took."""
    while True:
        try:
            return await site.submit(script)
        except RunFailed as error:
            # While no bridge runs, or one that has just started knows nothing yet, a buffer job is rejected with the
            # sentence that says so.
            require(any(sentence in str(error) for sentence in REJECTED_FOR_NOW), str(error))
            watched.counts["refused without a bridge"] += 1
            await asyncio.sleep(0.5)


async def _all_over(site: Site, jobs: Jobs, watched: _Watched, tasks: list[asyncio.Task[None]], rounds: int) -> None:
    """Wait until all jobs are over, and release those that were held since there was no space after all."""
    left = dict.fromkeys(jobs)
    deadline_s = time.monotonic() + 120 + rounds * SHARE_S
    said_s = time.monotonic()
    while left:
        for task in tasks:
            if task.done():
                task.result()
        site.check()
        for job in list(left):
            found = await site.seen(job)
            if found is not None and found.is_over:
                require(found.state == "COMPLETED", f"job {job} ended as {found}")
                del left[job]
            elif found is not None and "no_space" in found.reason:
                watched.counts["held for space"] += 1
                await site.as_administrator("scontrol", "release", job)
            elif found is not None and ("slurm_bb" in found.reason or found.reason.startswith("JobHeld")):
                raise RunFailed(f"job {job} is held: {found}")
        require(time.monotonic() < deadline_s, f"not over: {', '.join(left)}")
        if time.monotonic() > said_s + 20:
            said_s = time.monotonic()
            print(f"{len(jobs) - len(left)} of {rounds} jobs are over; {dict(watched.counts)}", flush=True)
        await asyncio.sleep(0.5)
