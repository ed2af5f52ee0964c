"""Commands about a whole array or some of its tasks: `1`, `1_3`, `1_[2-4,7]` (Slurm)."""

from __future__ import annotations

import re

from replica.model.arrays import ArrayFault, compressed, parse_tasks
from replica.state.state import Facts
from replica.values.errors import Refusal, RefusalCode

Tasks = tuple[int, ...] | None
"""Tasks of an array, ascending; None: what the number alone says, an array as a whole or one job."""

_REFERENCE = re.compile(r"(\d{1,18})(?:_(?:(\d{1,9})|\[([\d,:-]{1,4096})\]))?", re.ASCII)


def parse_reference(text: str) -> tuple[int, Tasks]:
    """Return the job and the tasks that `1`, `1_3` or `1_[2-4]` names; ArrayFault for anything else."""
    found = _REFERENCE.fullmatch(text)
    if found is None:
        raise ArrayFault(f"{text!r} names no job; write for example 12, or 12_3 or 12_[1-4] for tasks of an array")
    if found[2] is not None:
        return int(found[1]), parse_tasks(found[2])
    return int(found[1]), None if found[3] is None else parse_tasks(found[3])


def shown_reference(job: int, tasks: Tasks) -> str:
    """Return what `parse_reference` reads."""
    if tasks is None:
        return str(job)
    return f"{job}_{tasks[0]}" if len(tasks) == 1 else f"{job}_[{compressed(tasks)}]"


def members(state: Facts, job: int, tasks: Tasks) -> tuple[int, ...] | Refusal | None:
    """Return the jobs of the tasks that are meant, by task; None where one job is meant that is no array."""
    array = state.arrays.get(job)
    if array is None and tasks is None:
        return None
    if array is None:
        known = 0 < job < state.next_job
        return Refusal(
            RefusalCode.UNKNOWN_JOB,
            f"job {job} is no array, or none of its tasks is in the state" if known else f"there is no job {job}",
            "forebay job list shows the jobs",
            "job",
        )
    if tasks is None:
        return tuple(array[task] for task in sorted(array))
    unknown = [task for task in tasks if task not in array]
    if unknown:
        return Refusal(
            RefusalCode.UNKNOWN_JOB,
            f"array {job} has no task {unknown[0]}, or it is no longer in the state",
            f"its tasks are {compressed(sorted(array))}"[:1_000],
            "job",
        )
    return tuple(array[task] for task in tasks)


def job_of_task(state: Facts, job: int, tasks: Tasks) -> int | None:
    """Return the one job that a reference names: a job, the first task of an array, or a task; None if there is none.

    Several tasks name no one job.
    """
    if tasks is None:
        if job in state.jobs:
            return job
        array = state.arrays.get(job)
        return None if array is None else array[min(array)]
    if len(tasks) != 1:
        return None
    array = state.arrays.get(job)
    return None if array is None else array.get(tasks[0])
