"""Jobs of one user with one name that are not over: what `--dependency=singleton` asks about, and how it is kept.

Most names belong to one job: such a group is the number of that job alone, and takes no memory of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

import immutables
import msgspec


class NamedJobs(msgspec.Struct, frozen=True, gc=False):
    """The jobs of a name that belongs to more than one."""

    first: int
    """The smallest number among them."""
    jobs: immutables.Map[int, bool]


NameGroup = int | NamedJobs
"""The job of a name, or its jobs."""

ByName = immutables.Map[str, immutables.Map[str, NameGroup]]
"""User -> job name -> the jobs."""

_NO_NAMES: immutables.Map[str, NameGroup] = immutables.Map()


def first_job(group: NameGroup) -> int:
    """Return the first job of a group."""
    return group if isinstance(group, int) else group.first


def group_members(group: NameGroup) -> Iterator[int]:
    """Yield the jobs of a group, in no order."""
    return iter((group,) if isinstance(group, int) else group.jobs)


def add_job(names: immutables.Map[str, NameGroup] | None, name: str, job_id: int) -> immutables.Map[str, NameGroup]:
    """Return the groups of a user with one job more, which must not be there."""
    names = _NO_NAMES if names is None else names
    group = names.get(name)
    if group is None:
        return names.set(name, job_id)
    if isinstance(group, int):
        group = NamedJobs(group, immutables.Map({group: True}))
    return names.set(name, NamedJobs(min(group.first, job_id), group.jobs.set(job_id, True)))


def remove_job(names: immutables.Map[str, NameGroup], name: str, job_id: int) -> immutables.Map[str, NameGroup]:
    """Return the groups of a user with one job less, which must be there."""
    group = names[name]
    if isinstance(group, int):
        return names.delete(name)
    jobs = group.jobs.delete(job_id)
    if len(jobs) == 1:
        return names.set(name, next(iter(jobs)))
    return names.set(name, NamedJobs(_first(jobs, job_id) if job_id == group.first else group.first, jobs))


def _first(jobs: immutables.Map[int, bool], after: int) -> int:
    """Return the smallest job; all are greater than `after`.

    Numbers are tried one by one for as long as that is not more work than looking at all. The first job of a group
    only ever goes up, so all those trials together are no more than there are numbers.
    """
    for job_id in range(after + 1, after + 1 + len(jobs)):
        if job_id in jobs:
            return job_id
    return min(jobs)
