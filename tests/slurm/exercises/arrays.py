"""Job arrays: each task is a buffer of its own, in whatever form the directives name the task."""

from __future__ import annotations

from collections import Counter

from cluster.client import Client
from tests.slurm.exercises.common import Figures, exported, nothing_left, require
from tests.slurm.site import Site

TASKS = 4


async def all_tasks(site: Site, array: str, count: int = TASKS) -> None:
    """Wait until all tasks of an array have completed and their buffers are gone."""

    async def ended() -> bool:
        shown = (await site.ask("squeue", "-h", "-r", "--states=all", "-j", array, "-o", "%A %T")).stdout
        rows = [line.split() for line in shown.splitlines()]
        states = Counter(state for _, state in rows)
        require(not set(states) & {"FAILED", "CANCELLED", "TIMEOUT"}, f"tasks of job array {array}: {dict(states)}")
        buffers = (await site.ask("scontrol", "show", "burst")).stdout
        return states == {"COMPLETED": count} and f"JobID={array}_" not in buffers

    await site.until(f"all {count} tasks of job array {array} have completed, and their buffers are gone", ended)


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
