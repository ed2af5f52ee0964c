"""Unfinished jobs of a user by job name, for `--dependency=singleton`.

Most names belong to one job. Such a group is the job's ID alone, without a record.
"""

from __future__ import annotations

from collections.abc import Iterator

import immutables
import msgspec


class NamedJobs(msgspec.Struct, frozen=True, gc=False):
    """Jobs that share a name."""

    first: int
    """The smallest job ID among them."""
    jobs: immutables.Map[int, bool]


NameGroup = int | NamedJobs
"""The ID of the only job of a name, or its jobs."""

ByName = immutables.Map[str, immutables.Map[str, NameGroup]]
"""User -> job name -> jobs."""

_NO_NAMES: immutables.Map[str, NameGroup] = immutables.Map()


def first_job(group: NameGroup) -> int:
    """Return the first job of a group."""
    return group if isinstance(group, int) else group.first


def group_members(group: NameGroup) -> Iterator[int]:
    """Yield the jobs of a group, in no particular order."""
    return iter((group,) if isinstance(group, int) else group.jobs)


def add_job(names: immutables.Map[str, NameGroup] | None, name: str, job_id: int) -> immutables.Map[str, NameGroup]:
    """Return a user's groups with a job added, which must not be among them."""
    names = _NO_NAMES if names is None else names
    group = names.get(name)
    if group is None:
        return names.set(name, job_id)
    if isinstance(group, int):
        group = NamedJobs(group, immutables.Map({group: True}))
    return names.set(name, NamedJobs(min(group.first, job_id), group.jobs.set(job_id, True)))


def remove_job(names: immutables.Map[str, NameGroup], name: str, job_id: int) -> immutables.Map[str, NameGroup]:
    """Return a user's groups with a job removed, which must be among them."""
    group = names[name]
    if isinstance(group, int):
        return names.delete(name)
    jobs = group.jobs.delete(job_id)
    if len(jobs) == 1:
        return names.set(name, next(iter(jobs)))
    return names.set(name, NamedJobs(_first(jobs, job_id) if job_id == group.first else group.first, jobs))


def _first(jobs: immutables.Map[int, bool], after: int) -> int:
    """Return the smallest job ID; all IDs are greater than `after`.

    IDs are tried in sequence as long as that is cheaper than a search of all. The first job of a group only grows, so
    all attempts together are bounded by the range of IDs.
    """
    for job_id in range(after + 1, after + 1 + len(jobs)):
        if job_id in jobs:
            return job_id
    return min(jobs)
