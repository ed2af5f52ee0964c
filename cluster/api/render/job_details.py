"""What a job asked for beyond the ordinary, from the State to what clients see."""

from __future__ import annotations

from typing import Any

from cluster.schemas import NO_DETAILS, JobDetailsView
from cluster.system import format_instant
from replica.model import NO_OPTIONS, Job, JobOptions
from replica.state import State
from replica.values import MICROSECONDS_PER_SECOND

_OF_OPTIONS = tuple(name for name in JobDetailsView.__struct_fields__ if name in JobOptions.__struct_fields__)


def job_words(state: State, job_id: int) -> str:
    """Return what people call a job: `13`, or `10_3` for task 3 of array 10."""
    return task_words(state, job_id) or str(job_id)


def task_words(state: State, job_id: int) -> str | None:
    """Return what people call a task of an array, such as `10_3`; None for every other job."""
    array = state.jobs[job_id].request.array if job_id in state.jobs else None
    return None if array is None else f"{array.job}_{array.task}"


def details_of(state: State, job: Job) -> JobDetailsView | None:
    """Return the details of a job at `state`; None where there are none, as for most."""
    request, before = job.request, job.interrupted
    options, array = request.asked, request.array
    if options is NO_OPTIONS and array is None and job.interruptions is None and not request.deadline:
        return None
    own: dict[str, Any] = {name: value for name in _OF_OPTIONS if (value := getattr(options, name)) != ""}
    if array is not None:
        own |= {"array_job_id": array.job, "array_task_id": array.task, "array_throttle": array.throttle}
    own |= {
        "gid": options.gid or None,
        "licenses": tuple(f"{name}:{count}" for name, count in options.licenses),
        "dependency_any": options.any_of,
        "restarts": before.requeues,
        "deadline": format_instant(request.deadline),
        "suspend_time": format_instant(before.suspended_at),
        "suspended_s": before.suspended_us // MICROSECONDS_PER_SECOND,
    }
    details = JobDetailsView(**own)
    return None if details == NO_DETAILS else details
