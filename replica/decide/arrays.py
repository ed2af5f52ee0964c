"""Job arrays: resolve a submit into one event (SPUR.md, 8), dependencies on arrays, and commands about tasks."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from msgspec.structs import replace

from forebay.replica.decide.checks import NODE_COUNT_INVALID, RejectionError
from forebay.replica.messages import commands as c
from forebay.replica.messages import events as e
from forebay.replica.model import (
    AfterTask,
    ArrayTask,
    Dependency,
    DependencyKind,
    JobRequest,
    Tasks,
    format_tasks,
)
from forebay.replica.state import Facts
from forebay.replica.values import Rejection, RejectionCode, Steps, limits

DEFAULT_OUTPUT = "forebay-%A_%a.out"
"""Default output file of a task (Slurm: slurm-%A_%a.out)."""


def check_array(state: Facts, command: c.SubmitJob) -> None:
    """Check the tasks and the throttle of a submit.

    Raises:
        RejectionError: They are invalid, or exceed a limit.
    """
    tasks, throttle = command.tasks, command.throttle
    if command.request.array is not None:
        raise _invalid_array("array is set by the controller", "leave it out")
    if not tasks:
        if throttle:
            raise _invalid_array("a throttle is given without an array", "write --array=1-10%2")
        return
    if list(tasks) != sorted(set(tasks)) or tasks[0] < 0:
        raise _invalid_array("the task numbers are not ascending and distinct", "write --array=1-10")
    if tasks[-1] >= limits.ARRAY_SIZE_MAX:
        raise _invalid_array(f"task number {tasks[-1]} is too large", f"use numbers up to {limits.ARRAY_SIZE_MAX - 1}")
    if not 0 <= throttle <= limits.ARRAY_SIZE_MAX:
        raise _invalid_array(f"throttle {throttle} is out of range", f"use a number from 1 to {limits.ARRAY_SIZE_MAX}")
    if command.request.effective_options.nodes == 0:
        remedy = "omit --array, or request a node: a job without nodes cannot be an array"
        raise RejectionError(RejectionCode.INVALID_FIELD, NODE_COUNT_INVALID, remedy, "array")
    if len(state.unfinished) + len(tasks) > limits.JOBS_UNFINISHED_MAX:
        raise RejectionError(
            RejectionCode.LIMIT_EXCEEDED,
            f"{len(tasks)} tasks would exceed the limit of {limits.JOBS_UNFINISHED_MAX} unfinished jobs",
            "wait until some have finished, or submit fewer tasks",
            "array",
        )


def _invalid_array(sentence: str, remedy: str) -> RejectionError:
    return RejectionError(RejectionCode.INVALID_FIELD, sentence, remedy, "array")


def resolve_array(
    command: c.SubmitJob, array: int, resolve: Callable[[JobRequest, int], e.JobSubmitted]
) -> Steps[e.JobSubmitted]:
    """Return the submit event of an array, in steps. If paths contain symbols, `resolve` is called once per task.

    Raises:
        RejectionError: The array is too large, or a task is invalid.
    """
    request, tasks = command.request, command.tasks
    if not request.output:
        request = replace(request, output=DEFAULT_OUTPUT)
    transfers = () if request.buffer is None else request.buffer.stage_in + request.buffer.stage_out
    differs = "%" in request.output or any(
        "%" in transfer.outside + transfer.inside + transfer.pattern for transfer in transfers
    )
    texts = len(request.output) + len(request.workdir)
    texts += sum(len(transfer.outside) + len(transfer.inside) + len(transfer.pattern) for transfer in transfers)
    if differs and texts * len(tasks) > limits.ARRAY_ENTRY_BYTES_MAX:
        raise _array_too_large(f"the paths of its {len(tasks)} tasks take at least {texts * len(tasks)} bytes")
    made = []
    for number, task in enumerate(tasks if differs else tasks[:1]):
        made.append(resolve(replace(request, array=ArrayTask(array, task)), array + number))
        yield 1 + len(transfers)
    shared = replace(made[0].request, array=None)
    outputs = tuple(one.request.output for one in made)
    moves = tuple((one.stage_in, one.stage_out) for one in (each.request.buffer for each in made) if one is not None)
    event = replace(
        made[0],
        request=shared,
        array=e.SubmittedTasks(
            tasks,
            command.throttle,
            outputs if any(one != outputs[0] for one in outputs) else (),
            moves if any(one != moves[0] for one in moves) else (),
        ),
    )
    size_bytes = len(_ENCODER.encode(event))
    if size_bytes > limits.ARRAY_ENTRY_BYTES_MAX:
        raise _array_too_large(f"its record takes {size_bytes} bytes")
    return event


_ENCODER = msgspec.msgpack.Encoder()


def _array_too_large(sentence: str) -> RejectionError:
    return RejectionError(
        RejectionCode.LIMIT_EXCEEDED,
        f"the array is too large: {sentence}",
        f"submit fewer tasks, or stage whole directories; the limit is {limits.ARRAY_ENTRY_BYTES_MAX} bytes",
        "array",
    )


def resolve_dependencies(
    state: Facts, asked: tuple[Dependency, ...], after_tasks: tuple[AfterTask, ...]
) -> tuple[Dependency, ...]:
    """Return the dependencies, with those on arrays and on their tasks resolved to jobs.

    Raises:
        RejectionError: A job, array or task does not exist.
    """
    found: list[Dependency] = []
    for dependency in asked:
        if dependency.kind is DependencyKind.AFTER_BURST_BUFFER and _is_purged(state, dependency.job):
            # A purged job has no buffer to wait for, as in Slurm.
            continue
        if dependency.job in state.arrays:
            dependency = Dependency(dependency.kind.for_array, dependency.job)
        elif dependency.kind.is_for_array:
            raise _unknown_dependency(dependency.kind.word, str(dependency.job))
        found.append(dependency)
    for after in after_tasks:
        job_id = state.arrays[after.array].get(after.task) if after.array in state.arrays else None
        if job_id is None and after.kind is DependencyKind.AFTER_BURST_BUFFER:
            continue
        if job_id is None:
            raise _unknown_dependency(after.kind.word, f"{after.array}_{after.task}")
        found.append(Dependency(after.kind.for_job, job_id))
    return tuple(found)


def _is_purged(state: Facts, job_id: int) -> bool:
    return job_id not in state.jobs and job_id not in state.arrays


def _unknown_dependency(word: str, job: str) -> RejectionError:
    return RejectionError(
        RejectionCode.UNKNOWN_DEPENDENCY,
        f"{word}:{job}: job {job} does not exist",
        "forebay queue shows the jobs",
        "dependencies",
    )


# ---- commands about a whole array or some of its tasks: `1`, `1_3`, `1_[2-4,7]` (Slurm)


def jobs_of_tasks(state: Facts, job: int, tasks: Tasks) -> tuple[int, ...] | Rejection | None:
    """Return the jobs of an array's tasks in ascending order; None if `job` is a single job and `tasks` is None.

    Return a Rejection if the array or a task does not exist.
    """
    array = state.arrays.get(job)
    if array is None and tasks is None:
        return None
    if array is None:
        known = 0 < job < state.next_job
        return Rejection(
            RejectionCode.UNKNOWN_JOB,
            f"array {job} does not exist, or all of its tasks were purged" if known else f"job {job} does not exist",
            "forebay queue shows the jobs",
            "job",
        )
    if tasks is None:
        return tuple(array[task] for task in sorted(array))
    unknown = [task for task in tasks if task not in array]
    if unknown:
        return Rejection(
            RejectionCode.UNKNOWN_JOB,
            f"task {unknown[0]} of array {job} does not exist, or was purged",
            f"its tasks are {format_tasks(sorted(array))}"[:1_000],
            "job",
        )
    return tuple(array[task] for task in tasks)


def job_of_task(state: Facts, job: int, tasks: Tasks) -> int | None:
    """Return the job of a reference: the job itself, the first task of an array, or the job of a single task.

    Return None if it does not exist, or if the reference has several tasks.
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
