"""Job arrays: each task has its own buffer, for every form of symbols in the directives."""

from __future__ import annotations

import time
from collections import Counter

from forebay.cluster.client import Client
from tests.slurm.exercises.common import Figures, exported, nothing_left, require
from tests.slurm.site import Site
from tests.slurm.slurm import PATIENCE_S

TASKS = 4


async def all_tasks(
    site: Site, job: str, count: int = TASKS, *, patience_s: float = PATIENCE_S, every_s: float = 0.1
) -> None:
    """Wait until all tasks of an array have completed and their buffers are gone."""

    async def ended() -> bool:
        shown = (await site.ask("squeue", "-h", "-r", "--states=all", "-j", job, "-o", "%A %T")).stdout
        rows = [line.split() for line in shown.splitlines()]
        states = Counter(state for _, state in rows)
        require(not set(states) & {"FAILED", "CANCELLED", "TIMEOUT"}, f"tasks of job array {job}: {dict(states)}")
        buffers = (await site.ask("scontrol", "show", "burst")).stdout
        return states == {"COMPLETED": count} and f"JobID={job}_" not in buffers

    what = f"all {count} tasks of job array {job} have completed, and their buffers are gone"
    await site.until(what, ended, patience_s, every_s=every_s)


TASK_S = 3.0
"""Seconds that a task of a large array may take on average: Slurm stages ten tasks at a time."""


async def large_array(site: Site, client: Client, size: int, seed: int) -> Figures:
    """One large array: every task is staged in and out, once."""
    names = [f"task{task}" for task in range(1, size + 1)]
    data = {name: site.make_input(name) for name in names}
    began_s = time.monotonic()
    job = await site.submit(site.script("task%a"), f"--array=1-{size}")
    await all_tasks(site, job, size, patience_s=PATIENCE_S + size * TASK_S, every_s=2)
    took_s = time.monotonic() - began_s
    for name, expected in data.items():
        exported(site, name, expected)
    await nothing_left(site, client)
    return {"tasks": size, "tasks_s": round(size / took_s, 2)}


async def arrays(site: Site, client: Client, size: int, seed: int) -> Figures:
    """Arrays with and without symbols in their directives, limited and not: every task runs on its own data."""
    tasks = range(1, TASKS + 1)
    figures: Figures = {}
    inputs = {f"task{task}": site.make_input(f"task{task}") for task in tasks}
    array = await site.submit(site.script("task%a"), f"--array=1-{TASKS}%2")
    await all_tasks(site, array)
    for name, data in inputs.items():
        exported(site, name, data)
    figures["symbols"] = len(inputs)
    # Without symbols all tasks share one text, so each writes its result by itself.
    data = site.make_input("shared")
    body = f'cp "$DW_JOB_STRIPED/in" {site.results}/shared.$SLURM_ARRAY_TASK_ID || exit 3'
    lines = site.script("shared", body).splitlines()
    script = "\n".join(line for line in lines if " stage_out " not in line) + "\n"
    array = await site.submit(script, f"--array=1-{TASKS}")
    await all_tasks(site, array)
    for task in tasks:
        exported(site, f"shared.{task}", data)
    figures["plain"] = TASKS
    await nothing_left(site, client)
    return figures
