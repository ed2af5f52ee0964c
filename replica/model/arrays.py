"""Job arrays: `--array=1-10:2%3`, and limits on concurrent tasks.

Each task is a job with its own buffer, displayed as `JOB_TASK` (Slurm). The tasks have consecutive job IDs, starting
with the array's. `%N` is a throttle: at most N tasks are between receiving their space (or their CPUs, without a
buffer) and the end of their script. In addition, at most `array_stage_count` tasks that have not started hold space
(Slurm's bb_array_stage_cnt), so that an array does not fill a pool ahead of other jobs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from forebay.replica.model.buffers import Buffer, BufferState
from forebay.replica.model.job_states import JobState
from forebay.replica.model.jobs import Job
from forebay.replica.model.requests import JobRequest
from forebay.replica.values import ARRAY_SIZE_MAX, Reason, Verdict


class ArrayError(ValueError):
    """An invalid array specification or task reference."""


_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9})(?::(\d{1,9}))?)?", re.ASCII)


def parse_tasks(text: str) -> tuple[int, ...]:
    """Return the task numbers in `1,3-7:2`, ascending.

    Raises:
        ArrayError: the text names no task, too many tasks, or a task twice.
    """
    tasks: set[int] = set()
    for part in text.split(","):
        found = _RANGE.fullmatch(part.strip())
        if found is None:
            raise ArrayError(f"{part!r} is not a task range; write for example 1-10, 1-10:2 or 1,4,7")
        first = int(found[1])
        last = first if found[2] is None else int(found[2])
        step = 1 if found[3] is None else int(found[3])
        if last < first or step < 1:
            raise ArrayError(f"{part!r} names no tasks: its end is before its start, or its step is 0")
        if last >= ARRAY_SIZE_MAX:
            raise ArrayError(f"task {last} is too large; the largest is {ARRAY_SIZE_MAX - 1}")
        named = range(first, last + 1, step)
        if not tasks.isdisjoint(named):
            raise ArrayError(f"{part!r} repeats a task")
        tasks.update(named)
    return tuple(sorted(tasks))


def parse_array(text: str) -> tuple[tuple[int, ...], int]:
    """Return the tasks and the throttle (0: none) of `--array=1-10:2%3`.

    Raises:
        ArrayError: the text is not an array specification.
    """
    ranges, percent, throttle = text.strip().partition("%")
    tasks = parse_tasks(ranges)
    if not percent:
        return tasks, 0
    if not throttle.isascii() or not throttle.isdigit() or len(throttle) > 9 or not int(throttle):
        raise ArrayError(
            f"%{throttle} is not a throttle; write the number of tasks that may run at once, for example %4"
        )
    return tasks, int(throttle)


def format_tasks(tasks: Iterable[int]) -> str:
    """Format ascending task numbers, for example `1-3,7`."""
    parts: list[str] = []
    first = last = -1
    for task in tasks:
        if task == last + 1 and first >= 0:
            last = task
            continue
        if first >= 0:
            parts.append(str(first) if first == last else f"{first}-{last}")
        first = last = task
    if first >= 0:
        parts.append(str(first) if first == last else f"{first}-{last}")
    return ",".join(parts)


# Concurrent tasks -----------------------------------------------------------------------------------------------------

_WITH_SPACE = (BufferState.STAGING_IN, BufferState.STAGED_IN)
_STARTED = (JobState.CONFIGURING, JobState.RUNNING, JobState.SUSPENDED)


def is_staged_ahead(job: Job, buffer: Buffer | None) -> bool:
    """Return whether the job holds space and has not started."""
    return job.state is JobState.PENDING and buffer is not None and buffer.state in _WITH_SPACE


def is_active(job: Job, buffer: Buffer | None) -> bool:
    """Return whether the job counts towards the throttle of its array."""
    return job.state in _STARTED or is_staged_ahead(job, buffer)


def waits_for_array(job: Job, buffer: Buffer | None) -> bool:
    """Return whether a pending job needs a free slot of its array to become active."""
    return job.state is JobState.PENDING and (buffer is None or buffer.state is BufferState.PENDING)


class ArrayUse:
    """Number of active tasks of one array, and of those among them that have not started."""

    __slots__ = ("active", "ahead")

    def __init__(self, active: int = 0, ahead: int = 0) -> None:
        self.active = active
        self.ahead = ahead

    def count(self, job: Job, buffer: Buffer | None) -> None:
        """Count one more task."""
        self.active += is_active(job, buffer)
        self.ahead += is_staged_ahead(job, buffer)

    def free_slots(self, request: JobRequest, stage_count: int) -> int:
        """Return the number of waiting tasks that the next scheduling cycle may consider, in its order."""
        throttle = _throttle(request)
        room = throttle - self.active if throttle else ARRAY_SIZE_MAX
        if request.buffer is not None:
            room = min(room, stage_count - self.ahead)
        return max(0, room)

    def verdict(self, request: JobRequest, stage_count: int, before: int) -> Verdict | None:
        """Return the verdict on a waiting task behind `before` other waiting tasks; None if it may become active."""
        throttle = _throttle(request)
        if throttle and self.active + before >= throttle:
            figures: tuple[tuple[str, str], ...] = (
                ("throttle", str(throttle)),
                ("active", str(self.active)),
                ("before_it", str(before)),
            )
            sentence = f"at most {throttle} tasks of the array may run at once"
            return Verdict(Reason.JOB_ARRAY_TASK_LIMIT, sentence, figures)
        if request.buffer is not None and self.ahead + before >= stage_count:
            figures = (("staged_ahead", str(self.ahead)), ("before_it", str(before)))
            sentence = f"at most {stage_count} tasks of an array hold space before they start"
            return Verdict(Reason.BURST_BUFFER_RESOURCES, sentence, figures)
        return None


def _throttle(request: JobRequest) -> int:
    return 0 if request.array is None else request.array.throttle


def has_array_limits(request: JobRequest) -> bool:
    """Return whether the number of concurrent tasks of the job's array is limited."""
    return request.array is not None and (request.array.throttle > 0 or request.buffer is not None)


Tasks = tuple[int, ...] | None
"""Task numbers of an array, ascending; None: the ID alone, which means a single job or a whole array."""

_REFERENCE = re.compile(r"(\d{1,18})(?:_(?:(\d{1,9})|\[([\d,:-]{1,4096})\]))?", re.ASCII)


def parse_reference(text: str) -> tuple[int, Tasks]:
    """Return the job ID and the tasks in `1`, `1_3` or `1_[2-4]`.

    Raises:
        ArrayError: the text is not a job reference.
    """
    found = _REFERENCE.fullmatch(text)
    if found is None:
        raise ArrayError(f"{text!r} is not a job ID; write for example 12, or 12_3 or 12_[1-4] for tasks of an array")
    if found[2] is not None:
        return int(found[1]), parse_tasks(found[2])
    return int(found[1]), None if found[3] is None else parse_tasks(found[3])


def format_reference(job: int, tasks: Tasks) -> str:
    """Format a job reference as `parse_reference` reads it."""
    if tasks is None:
        return str(job)
    return f"{job}_{tasks[0]}" if len(tasks) == 1 else f"{job}_[{format_tasks(tasks)}]"
