"""Real jobs through agents: many small ones, one on an idle cluster, and an agent's memory with many transfers."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import uvloop

from forebay.cluster.schemas import operations
from tests.benchmarks.processes import ServerFailed
from tests.benchmarks.users import slurm
from tests.benchmarks.users.rows import Found, Row, Say, median, spread
from tests.benchmarks.users.site import ForebaySite

IDLE_JOBS = 7
"""Jobs sent one by one into a cluster that does nothing else, count; their median is shown."""

RESULTS_WAIT_S = 300.0
"""Seconds until the results of one batch must be there."""

LOOK_S = 0.002
"""How often it is looked whether a result is there, seconds: a hundredth of what a fast job takes."""

BATCH_LOOK_S = 0.02

QUIET_S = 1.0
"""Seconds between two jobs of an idle cluster."""

TRANSFERS = 50
"""Transfers that one agent has under way while its memory is read, where it takes so many."""

TRANSFER_RATE = "16KiB"
"""Bytes a second of each."""

TRANSFER_BYTES = 960 * 1024
"""Bytes of each: it takes a minute at its rate, in which all of them have started, and fits into its buffer."""

TRANSFERS_WAIT_S = 120.0
"""Seconds until all of them are under way, where the agent takes so many."""

TRANSFERS_STILL_S = 30.0
"""Seconds without one more under way after which that is all that the agent takes."""


class SlowSite(ForebaySite):
    """One agent whose transfers take long."""

    agents: Sequence[str] = ("n1",)
    agent_keys: Sequence[str] = (f'copy_rate = "{TRANSFER_RATE}"',)


async def until(is_so: Callable[[], bool], what: str, look_s: float, check: Callable[[], None]) -> None:
    """Return when something is so; ServerFailed if it does not come."""
    deadline = time.monotonic() + RESULTS_WAIT_S
    while not is_so():
        if time.monotonic() > deadline:
            raise ServerFailed(f"{what} not there after {RESULTS_WAIT_S:g} s")
        check()
        await asyncio.sleep(look_s)


async def run_jobs(
    site: "ForebaySite | slurm.SlurmSite",
    submit: Callable[[str], Awaitable[object]],
    gone: Callable[[], Awaitable[object]],
    jobs: int,
    idle_jobs: int,
) -> dict[str, Any]:
    """Send jobs one by one, then `jobs` of them as fast as one client submits; return the figures.

    `gone` returns when no buffer is left.
    """
    results_s, gone_s = [], []
    for number in range(idle_jobs + 1):  # the first is not counted: it makes directories and loads code
        await asyncio.sleep(QUIET_S)
        name, started = f"idle-{number}", time.perf_counter()
        await submit(name)
        await until(lambda name=name: site.files.is_finished(name), f"{site.name}: a result", LOOK_S, site.check)
        results_s.append(time.perf_counter() - started)
        await gone()
        gone_s.append(time.perf_counter() - started)
    before, cpu_s, started = site.files.finished(), site.cpu_s(), time.perf_counter()
    for number in range(jobs):
        await submit(f"job-{number}")
    submitted_s = time.perf_counter() - started
    await until(lambda: site.files.finished() == before + jobs, f"{site.name}: results", BATCH_LOOK_S, site.check)
    seconds = time.perf_counter() - started
    load = os.getloadavg()[0]
    await gone()
    return {
        "system": site.name,
        "jobs": jobs,
        "jobs_per_s": round(jobs / seconds, 2),
        "submitted_s": round(submitted_s, 3),
        "seconds": round(seconds, 3),
        "processor_ms_per_job": round(1000 * (site.cpu_s() - cpu_s) / jobs, 1),
        "load_average": round(load, 1),
        "idle_results_s": median(results_s[1:]),
        "idle_gone_s": median(gone_s[1:]),
    }


async def forebay(directory: Path, jobs: int, idle_jobs: int) -> dict[str, Any]:
    """Run the jobs through a fresh Forebay."""
    site = ForebaySite(directory)
    try:
        await site.start()
        async with site.client() as client:

            async def gone() -> None:
                while (await client.call(operations.LIST_BUFFERS, live="yes")).buffers:
                    await asyncio.sleep(LOOK_S)

            return await run_jobs(site, lambda name: site.submit(client, name), gone, jobs, idle_jobs)
    finally:
        site.stop()


async def beside(directory: Path, jobs: int, idle_jobs: int) -> dict[str, Any]:
    """Run the jobs through a fresh Slurm."""
    site = slurm.SlurmSite(directory)

    async def submit(name: str) -> None:
        site.submit(name)

    async def gone() -> None:
        await until(lambda: not site.buffers(), "slurm: the end of its buffers", LOOK_S, site.check)

    try:
        site.start()
        return await run_jobs(site, submit, gone, jobs, idle_jobs)
    finally:
        site.stop()


async def memory(directory: Path, transfers: int) -> dict[str, Any]:
    """Have one agent move many files at once; return its memory when it had most under way."""
    site = SlowSite(directory)
    most, pss, grew = 0, 0, 0.0
    try:
        site.files.source.write_bytes(os.urandom(TRANSFER_BYTES))
        await site.start()
        quiet = site.pss_bytes("n1")
        deadline = time.monotonic() + TRANSFERS_WAIT_S
        async with site.client() as client:
            for number in range(transfers):
                await site.submit(client, f"slow-{number}")
            while time.monotonic() < deadline and most < transfers:
                views = (await client.call(operations.LIST_TRANSFERS)).transfers
                copying = sum(view.phase == "copying" for view in views)
                if copying > most:
                    most, grew = copying, time.monotonic()
                pss = max(pss, site.pss_bytes("n1"))
                if most and time.monotonic() - grew > TRANSFERS_STILL_S:
                    break
                site.check()
                await asyncio.sleep(0.5)
        return {"transfers": most, "asked": transfers, "pss_bytes": pss, "quiet_bytes": quiet}
    finally:
        site.stop()


def report(directory: Path, rounds: int, jobs: int, say: Say, *, idle_jobs: int = IDLE_JOBS) -> Found:
    """Run all of it, the systems in turn; return the rows."""
    say(f"\nJobs: {jobs} at once and {idle_jobs} one by one, 100 kB in and out; submitted one after another")
    why_not = slurm.missing()
    if why_not:
        say(why_not)
    say(f"{'round':>5} {'system':<8} {'jobs/s':>8} {'CPU ms/job':>10} {'load':>6} {'one, s':>8} {'gone, s':>8}")
    found: dict[str, list[dict[str, Any]]] = {"forebay": [], "slurm": []}
    runs = {"forebay": forebay} if why_not else {"forebay": forebay, "slurm": beside}
    for round_ in range(rounds):
        for system in list(runs) if round_ % 2 == 0 else list(runs)[::-1]:
            one = uvloop.run(runs[system](directory / f"jobs-{system}-{round_}", jobs, idle_jobs))
            found[system].append(one)
            say(
                f"{round_ + 1:>5} {system:<8} {one['jobs_per_s']:>8.2f} {one['processor_ms_per_job']:>10.1f} "
                f"{one['load_average']:>6.1f} {one['idle_results_s']:>8.3f} {one['idle_gone_s']:>8.3f}"
            )
    held = uvloop.run(memory(directory / "jobs-memory", TRANSFERS))
    say(f"an agent with {held['transfers']} transfers at once: {held['pss_bytes'] / 2**20:.0f} MiB")

    def of(system: str, key: str, digits: int, unit: str) -> str:
        runs_of = found[system]
        return f"{spread([one[key] for one in runs_of], digits)} {unit}".strip() if runs_of else ""

    rows = [
        Row(what, of("forebay", key, digits, unit), of("slurm", key, digits, f"{unit} (Slurm)"))
        for what, key, digits, unit in (
            (f"{jobs} small buffer jobs, submit to all results", "jobs_per_s", 1, "jobs/s"),
            ("processor time of all servers, agents and jobs, for each", "processor_ms_per_job", 0, "ms"),
            ("load average at the end of it", "load_average", 1, ""),
            ("one such job on an idle cluster, submit to results", "idle_results_s", 3, "s"),
            ("the same, to the buffer gone", "idle_gone_s", 3, "s"),
        )
    ]
    rows.append(
        Row(
            f"memory of an agent with {held['transfers']} transfers at once (at rest), all its processes",
            f"{held['pss_bytes'] / 2**20:.0f} MiB ({held['quiet_bytes'] / 2**20:.0f})",
        )
    )
    return Found(rows, {"runs": found, "memory": held, "slurm_missing": why_not})
