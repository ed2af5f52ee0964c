"""Effects on other jobs while Forebay is down, and many jobs at once, compared with a Slurm that copies itself."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from forebay.cluster.client import Client
from tests.benchmarks.processes import tree, tree_cpu_s
from tests.faults.local_cluster import REPLICAS, RunFailed
from tests.slurm.exercises.common import (
    GONE_S,
    Figures,
    Jobs,
    all_well,
    exported,
    many,
    no_alarms,
    nothing_left,
    rejection,
    require,
)
from tests.slurm.plain import PlainSite
from tests.slurm.site import MOVERS, Site
from tests.slurm.slurm import Submitted

WITHIN: Final = 1.2
"""Largest ratio of a figure to its value without Forebay."""

BELIEVED_S: Final = 11.0
"""Seconds after which files of the bridge are no longer believed."""

TURNS: Final = 4
"""How often each condition is measured, in turn with the one before; a p99 is that of all turns."""

Latencies = dict[str, list[float]]
"""Seconds by command."""

STAGE_INS: Final = 128
"""What Slurm 22.05 has staged in at a time."""

PASSES_S: Final = 3.0
"""Seconds between two passes of an idle slurmctld. A tiny job waits for two of them, so jobs begin at random times."""

PLAIN_JOB: Final = "#!/bin/sh\n#SBATCH -o /dev/null -J plain --hold\ntrue\n"


# ---- away


async def _latencies(site: Site, count: int) -> Latencies:
    """Return how long `sbatch` without a buffer and `squeue` took, so many times each, in turn."""
    found: Latencies = {"sbatch": [], "squeue": []}
    for _ in range(count):
        for command, times_s in found.items():
            began_s = time.monotonic()
            done = await site.ask(command, script=PLAIN_JOB if command == "sbatch" else None)
            times_s.append(time.monotonic() - began_s)
            require(done.returncode == 0, f"{command}: {done.stderr}")
    await site.ask("scancel", "--state=PENDING", "--name=plain")
    return found


def _p99(times_s: list[float]) -> float:
    return statistics.quantiles(times_s, n=100)[98]


@asynccontextmanager
async def _bridge_stopped(site: Site) -> AsyncIterator[None]:
    site.signal("bridge", signal.SIGSTOP)
    await asyncio.sleep(BELIEVED_S)
    yield
    site.signal("bridge", signal.SIGCONT)


@asynccontextmanager
async def _replicas_dead(site: Site) -> AsyncIterator[None]:
    for name in REPLICAS:
        site.cluster.kill(name)
    await asyncio.sleep(BELIEVED_S)
    yield
    for name in REPLICAS:
        site.cluster.start(name)


async def away(site: Site, client: Client, rounds: int, seed: int) -> Figures:
    """With the bridge stopped, then all replicas dead, and buffer jobs on their way: other jobs and `squeue` as before,
    a new buffer job is rejected with the sentence, and those on their way end well.

    What it measures is reported and not judged: a busy machine is slow in each condition, at one time more than at
    another.
    """
    figures: Figures = {"turns": TURNS, "samples": rounds}
    for name, condition in (("bridge_stopped", _bridge_stopped), ("replicas_dead", _replicas_dead)):
        before: Latencies = {"sbatch": [], "squeue": []}
        while_away: Latencies = {"sbatch": [], "squeue": []}
        sentences_s = []
        for turn in range(TURNS):
            _add(before, first := await _latencies(site, rounds))
            jobs = await many(site, 5, f"{name}{turn}")
            async with condition(site):
                _add(while_away, second := await _latencies(site, rounds))
                began_s = time.monotonic()
                said = await rejection(site, site.script("none"))
                sentences_s.append(time.monotonic() - began_s)
                require("the buffer is not available on" in said, said)
            print(f"{name}, turn {turn + 1}: p99 before {_ms(first)}, while away {_ms(second)}", flush=True)
            await _accepted_again(site, f"{name}{turn}.after")
            await all_well(site, client, jobs)
        for command in before:
            figures[f"{name}_{command}_p99_ratio"] = round(_p99(while_away[command]) / _p99(before[command]), 3)
        figures[f"{name}_sentence_s"] = round(max(sentences_s), 3)
    await nothing_left(site, client)
    return figures


def _add(all_of_them: Latencies, more: Latencies) -> None:
    for command, times_s in more.items():
        all_of_them[command] += times_s


def _ms(found: Latencies) -> str:
    return ", ".join(f"{command} {_p99(times_s) * 1000:.0f} ms" for command, times_s in found.items())


async def _accepted_again(site: Site, name: str) -> None:
    """Submit a buffer job until it is accepted, and see that it ends well."""
    data = site.make_input(name)
    job = ""

    async def accepted() -> bool:
        nonlocal job
        done = await site.ask("sbatch", script=site.script(name))
        job = done.stdout.split()[-1] if done.returncode == 0 else ""
        return bool(job)

    await site.until("buffer jobs are accepted again", accepted, 60)
    require((await site.over(job)).state == "COMPLETED", "the first job after that did not end well")
    exported(site, name, data)


# ---- one


async def tiny_job(site: Site, client: Client, rounds: int, seed: int) -> Figures:
    """Tiny jobs, in turn with those of a Slurm whose script copies: how long from `sbatch` to the end of the buffer."""
    plain = PlainSite(site.directory / "plain", plugin=site.plugin, gated=False)
    took_s: dict[str, list[float]] = {"forebay": [], "plain": []}
    sites: dict[str, Submitted] = {"forebay": site, "plain": plain}
    chance = random.Random(seed)
    try:
        await plain.start()
        for number in range(rounds + 1):
            for name, one in sites.items() if number % 2 else reversed(sites.items()):
                await asyncio.sleep(chance.uniform(0, PASSES_S))
                began_s = time.monotonic()
                [(job, (result, data))] = (await many(one, 1, f"tiny{number}")).items()
                ended = await one.over(job)
                if number:  # the first job of each site waits until Slurm has asked for its pools
                    took_s[name].append(time.monotonic() - began_s)
                require(ended.state == "COMPLETED", f"{name}: job {job} ended as {ended}")
                exported(one, result, data)
    finally:
        await asyncio.to_thread(plain.stop)
    await nothing_left(site, client)
    medians_s = {name: statistics.median(times_s) for name, times_s in took_s.items()}
    ratio = medians_s["forebay"] / medians_s["plain"]
    figures: Figures = {f"{name}_median_s": round(median_s, 2) for name, median_s in medians_s.items()}
    figures |= {"pairs": rounds, "ratio": round(ratio, 3)}
    figures |= {f"{name}_s": [round(time_s, 2) for time_s in times_s] for name, times_s in took_s.items()}
    require(ratio <= WITHIN, f"more than {WITHIN} times a script that copies: {figures}")
    return figures


# ---- many


class _Block:
    """So many jobs one after the other in one Slurm, and what they cost."""

    def __init__(self, site: Submitted, count: int, tag: str) -> None:
        self.site, self.count, self.tag = site, count, tag
        self.jobs: Jobs = {}
        self.submits_s = self.jobs_s = 0.0
        self.controller_ms = self.slurm_ms = self.forebay_ms = 0.0
        """Processor time a job: of slurmctld alone; of all of Slurm with jobs and scripts; of all of Forebay."""

    async def run(self) -> None:
        """Submit all, and wait until Slurm has done with all of them."""
        before, began_s = self._cpu_s(), time.monotonic()
        self.jobs = await many(self.site, self.count, self.tag)
        self.submits_s = self.count / (time.monotonic() - began_s)

        async def over() -> bool:
            asked = await self.site.ask("squeue", "-h", "-o", "%i")
            await asyncio.sleep(1)
            return asked.returncode == 0 and not asked.stdout.strip()

        await self.site.until(f"{self.count} jobs are over", over, 120 + self.count)
        self.jobs_s = self.count / (time.monotonic() - began_s)
        used = [
            (after_s - before_s) * 1000 / self.count for before_s, after_s in zip(before, self._cpu_s(), strict=True)
        ]
        self.controller_ms, self.slurm_ms, self.forebay_ms = used
        print(
            f"{self.tag}: {self.count} jobs, {self.submits_s:.1f} submits/s, {self.jobs_s:.2f} jobs/s; "
            f"ms a job: slurmctld {self.controller_ms:.1f}, Slurm {self.slurm_ms:.0f}, Forebay {self.forebay_ms:.0f}",
            flush=True,
        )

    def _cpu_s(self) -> tuple[float, float, float]:
        slurm = self.site.slurm
        forebay = tree_cpu_s(self.site.pids()) if isinstance(self.site, Site) else 0.0
        return _own_cpu_s(slurm.controller()), slurm.cpu_s(), forebay


def _own_cpu_s(pid: int) -> float:
    """Return the processor time of a process without its children's, seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def mass(site: Site, client: Client, rounds: int, seed: int) -> Figures:
    """Many jobs at once: none is lost or doubled; how fast, beside a script that does nothing and one that copies, in
    turn; and all are cancelled while they are staged in.
    """
    beside = {
        "trivial": PlainSite(site.directory / "trivial", plugin=site.plugin, gated=False, copies=False),
        "copying": PlainSite(site.directory / "copying", plugin=site.plugin, gated=False),
    }
    blocks: dict[str, list[_Block]] = {"forebay": [], "trivial": [], "copying": []}
    movers = {name: len(tree([site.process(name).pid])) for name in MOVERS}
    for turn in range(2):
        for name, plain in beside.items():
            if turn == 0:
                await plain.start()
            blocks[name].append(_Block(plain, rounds // 2, f"{name}{turn}"))
            await blocks[name][-1].run()
        blocks["forebay"].append(_Block(site, rounds // 2, f"forebay{turn}"))
        await blocks["forebay"][-1].run()
        await all_well(site, client, blocks["forebay"][-1].jobs)
    for plain in beside.values():
        await asyncio.to_thread(plain.stop)
    await nothing_left(site, client)
    figures: Figures = {"jobs": rounds, "cancelled": await _cancelled(site, client, movers)}
    for name, done in blocks.items():
        figures[f"{name}_jobs_s"] = round(statistics.mean(block.jobs_s for block in done), 2)
        figures[f"{name}_slurmctld_ms_a_job"] = round(statistics.mean(block.controller_ms for block in done), 2)
    cpu = figures["forebay_slurmctld_ms_a_job"] / figures["trivial_slurmctld_ms_a_job"]
    pace = figures["trivial_jobs_s"] / figures["forebay_jobs_s"]
    figures |= {"slurmctld_ratio": round(cpu, 3), "pace_ratio": round(pace, 3)}
    require(cpu <= WITHIN and pace <= WITHIN, f"more than {WITHIN} times a script that does nothing: {figures}")
    return figures


async def _cancelled(site: Site, client: Client, processes: dict[str, int]) -> int:
    """Cancel all jobs while they are staged in, and see that nothing of them is left; return how many they were."""
    for name in MOVERS:
        site.signal(name, signal.SIGSTOP)
    jobs = await many(site, STAGE_INS + 20, "cancelled")

    async def staging() -> bool:
        phases = [
            str(external_job.phase) for job, external_job in (await site.external_jobs(client)).items() if job in jobs
        ]
        # The others: their setup has ended, which slurmscriptd sees when those have ended that it forked meanwhile.
        return len(phases) >= STAGE_INS and phases.count("staging-in") >= STAGE_INS / 2

    try:
        await site.until(f"{STAGE_INS} jobs have buffers, and half of them are staged in", staging)
    except RunFailed as error:
        phases = Counter(
            str(external_job.phase) for job, external_job in (await site.external_jobs(client)).items() if job in jobs
        )
        raise RunFailed(f"{error}; they are {dict(phases)}") from error
    require((await site.ask("scancel", *jobs)).returncode == 0, "scancel")
    await asyncio.sleep(1)
    for name in MOVERS:
        site.signal(name, signal.SIGCONT)
    await nothing_left(site, client, GONE_S)
    for job in jobs:
        # Of some the buffer is in teardown for ever there: Slurm has lost the end of that call, or the call.
        found = await site.seen(job)
        require(found is not None and found.state == "CANCELLED", f"job {job} is {found}")

    def of_calls() -> list[str]:
        helpers = str(site.directory / "helpers").encode()
        return [entry.name for entry in Path("/proc").iterdir() if entry.name.isdigit() and helpers in _line(entry)]

    async def ended() -> bool:
        left = {name: len(tree([site.process(name).pid])) - count for name, count in processes.items()}
        return not of_calls() and not any(count > 0 for count in left.values())

    await site.until("no process of the cancelled jobs is left", ended, 60)
    require(not list((site.run / "calls").iterdir()), "no call waits for its answer")
    no_alarms(site)
    return len(jobs)


def _line(entry: Path) -> bytes:
    try:
        return (entry / "cmdline").read_bytes()
    except OSError:
        return b""
