"""Indexes of jobs that wait for other jobs, through dependencies or because of `singleton`.

Both `apply` methods also return the jobs whose gates may have changed through the change of a job.
"""

from __future__ import annotations

from collections.abc import Iterable

import immutables

from forebay.replica.model import NameGroup, first_job
from forebay.replica.scheduler.index_row import IndexRow, Milestone, milestone_of, update_set
from forebay.replica.state import State
from forebay.replica.values import SortedKeys

_NO_NAMES: immutables.Map[str, NameGroup] = immutables.Map()


class DependencyIndex:
    """Jobs that depend on others, by the awaited job and milestone, and the finished jobs that may be purged.

    A dependency on a whole array is stored once, under the array's negated ID.
    """

    def __init__(self, state: State) -> None:
        self.purgeable: SortedKeys[int] = SortedKeys(sorted(state.finished))
        """Finished jobs on which no unfinished job depends."""
        self._counts: dict[int, int] = {}
        """Job or array -> number of unfinished jobs that depend on it."""
        self._waiting: dict[tuple[int, int], set[int]] = {}
        """(job or array, milestone) -> jobs that wait for it."""
        self.has_watched = False
        """A whole array was visited since the caller reset this flag, which costs as much as checking many jobs."""
        self._behind: dict[tuple[int, int], set[int]] = {}
        """(array, milestone) with waiting jobs -> tasks that have not reached the milestone."""

    def note_unfinished(self, job_id: int) -> None:
        """Note that a job is unfinished, because it is new or was requeued, and may not be purged."""
        self.purgeable.discard(job_id)

    def apply(self, state: State, job_id: int, before: IndexRow, after: IndexRow) -> set[int]:
        """Update the dependencies of a job; return the jobs that wait for a milestone it has reached or lost."""
        left, entered = before.rare.waits_for, after.rare.waits_for
        if left != entered:
            self._count(state, {other for other, _ in entered}, {other for other, _ in left})
            for waited_for in left:
                update_set(self._waiting, waited_for, job_id, False)
            for waited_for in entered:
                update_set(self._waiting, waited_for, job_id, True)
            self._watch(state, (*left, *entered))
        array = self._awaited_array(state, job_id)
        if after.milestone >= Milestone.FINISHED:
            # The job may have become unfinished and finished again since its last check, or be in the index already.
            self.purgeable.discard(job_id)
            if after.milestone == Milestone.FINISHED and job_id not in self._counts and not array:
                self.purgeable.add(job_id)
        found = self._advance_task(job_id, array, _milestone_at(state, job_id)) if array else set()
        if before.milestone == after.milestone or job_id not in self._counts:
            return found
        low, high = sorted((before.milestone, after.milestone))
        return found.union(*(self._waiting.get((job_id, number), ()) for number in range(low + 1, high + 1)))

    def _awaited_array(self, state: State, job_id: int) -> int:
        """Return the negated ID of a task's array if a job depends on the whole array; else 0."""
        job = state.jobs.get(job_id) if self._behind else None
        array = None if job is None else job.request.array
        return 0 if array is None or -array.job not in self._counts else -array.job

    def _advance_task(self, task: int, array: int, milestone: int) -> set[int]:
        """Note the milestone of a task; return the jobs that wait for its array if it has become (in)complete."""
        found: set[int] = set()
        for number in range(1, Milestone.FINISHED + 1):
            behind = self._behind.get((array, number))
            if behind is None:
                continue
            was_complete = not behind
            (behind.discard if milestone >= number else behind.add)(task)
            if was_complete != (not behind):
                found |= self._waiting[array, number]
        return found

    def _watch(self, state: State, keys: Iterable[tuple[int, int]]) -> None:
        """Start or stop tracking, for each array among the keys, the tasks that have not reached the milestone."""
        for key in keys:
            array, milestone = key
            if array > 0:
                continue
            if key not in self._waiting:
                self._behind.pop(key, None)
            elif key not in self._behind:
                self.has_watched = True
                self._behind[key] = {
                    task
                    for task in state.arrays.get(-array, _NO_TASKS).values()
                    if _milestone_at(state, task) < milestone
                }

    def _count(self, state: State, entered: set[int], left: set[int]) -> None:
        for other in entered - left:
            self._counts[other] = self._counts.get(other, 0) + 1
            if self._counts[other] == 1:
                for job_id in _jobs_of(state, other):
                    self.purgeable.discard(job_id)
        for other in left - entered:
            self._counts[other] -= 1
            if not self._counts[other]:
                del self._counts[other]
                for job_id in _jobs_of(state, other):
                    if job_id in state.finished and not self._is_awaited(state, job_id):
                        self.purgeable.discard(job_id)
                        self.purgeable.add(job_id)

    def _is_awaited(self, state: State, job_id: int) -> bool:
        array = state.jobs[job_id].request.array
        return job_id in self._counts or (array is not None and -array.job in self._counts)


def _milestone_at(state: State, job_id: int) -> int:
    return milestone_of(state.jobs[job_id], job_id in state.finished)


def _jobs_of(state: State, other: int) -> Iterable[int]:
    """Return the job `other`, or the tasks of an array if `other` is a negated array ID."""
    return (other,) if other > 0 else state.arrays.get(-other, _NO_TASKS).values()


_NO_TASKS: immutables.Map[int, int] = immutables.Map()


class SingletonIndex:
    """Pending `singleton` jobs by user and job name, and the first unfinished job of each of these names."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], int] = {}
        """(user, job name) -> number of its pending `singleton` jobs."""
        self._first_of: dict[int, tuple[str, str]] = {}
        """Job that is, or was, the first of a name -> user and name."""

    def apply(self, state: State, job_id: int, before: IndexRow, after: IndexRow) -> set[int]:
        """Update the entry of a job; return the new first job of its name if this job was first and no longer is."""
        left, group = before.rare.singleton, after.rare.singleton
        if left != group:
            for one, sign in ((left, -1), (group, 1)):
                if one is not None:
                    self._counts[one] = self._counts.get(one, 0) + sign
                    if not self._counts[one]:
                        del self._counts[one]
        if group is not None and (first := _first(state, group)) != job_id:
            self._first_of[first] = group
        group = self._first_of.get(job_id)
        if group is None or _first(state, group) == job_id:
            return set()
        return self._next_first(state, job_id)

    def _next_first(self, state: State, job_id: int) -> set[int]:
        group = self._first_of.pop(job_id, None)
        first = _first(state, group) if group is not None and group in self._counts else 0
        if not first or group is None:
            return set()
        self._first_of[first] = group
        return {first}

    def apply_rename(self, former: State, state: State, job_id: int) -> set[int]:
        """Return the jobs whose gates may change through the rename of a job.

        These are the first job of its former name, and the previous first job of its new name.
        """
        found = self._next_first(state, job_id)
        job = state.jobs.get(job_id)
        if job is not None:
            found.add(_first(former, (job.request.user, job.request.name)))
        return {one for one in found if one in state.jobs}


def _first(state: State, group: tuple[str, str]) -> int:
    """Return the first unfinished job of a user and job name; 0 for none."""
    found = state.named.get(group[0], _NO_NAMES).get(group[1])
    return 0 if found is None else first_job(found)
