"""Who waits for whom: by their dependencies, and one of a name for the earlier ones (`singleton`)."""

from __future__ import annotations

import immutables

from replica.model import Job, JobState, NameGroup, first_of
from replica.scheduler.gates import depended_on
from replica.scheduler.index_rows import awaited, keep_in_set
from replica.state import State

_NO_NAMES: immutables.Map[str, NameGroup] = immutables.Map()


class Waiters:
    """The part of an agenda that says whose gates may open when a job comes further, or ends."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        """Job -> how many that are not over depend on it."""
        self._awaiting: dict[tuple[int, int], set[int]] = {}
        """(job, milestone) -> who depends on it."""
        self._awaits: dict[int, set[tuple[int, int]]] = {}
        """Job -> what it depends on, if on anything."""
        self._singletons: dict[tuple[str, str], set[int]] = {}
        """(user, job name) -> the `singleton` jobs that wait for earlier ones of that name."""
        self._singleton_of: dict[int, tuple[str, str]] = {}
        """Such a job -> its user and name."""
        self._first_of: dict[int, tuple[str, str]] = {}
        """The first job of such a name -> the name."""

    def is_awaited(self, job_id: int) -> bool:
        """Whether a job that is not over depends on this one."""
        return job_id in self._counts

    def reached(self, job_id: int, before: int, after: int) -> set[int]:
        """Return who waits for a milestone between the two, in either direction."""
        if job_id not in self._counts:
            return set()
        low, high = sorted((before, after))
        awaiting = self._awaiting
        return set().union(*(awaiting.get((job_id, number), ()) for number in range(low + 1, high + 1)))

    def depend(self, state: State, job: Job) -> set[int]:
        """Note what a job that was not known depends on, and return those jobs."""
        awaits = {
            (other, awaited(dependency.kind.of_one, job))
            for dependency in job.request.dependencies
            for other in depended_on(state, dependency)
        }
        if not awaits:
            return set()
        self._awaits[job.id] = awaits
        for waited_for in awaits:
            keep_in_set(self._awaiting, waited_for, job.id, True)
        others = {other for other, _ in awaits}
        for other in others:
            self._counts[other] = self._counts.get(other, 0) + 1
        return others

    def depend_no_longer(self, job_id: int) -> set[int]:
        """Forget what a job depended on; return those that nobody depends on any more."""
        awaits, left = self._awaits.pop(job_id, set()), set()
        for waited_for in awaits:
            keep_in_set(self._awaiting, waited_for, job_id, False)
        for other in {other for other, _ in awaits}:
            self._counts[other] -= 1
            if not self._counts[other]:
                del self._counts[other]
                left.add(other)
        return left

    def wait_for_name(self, state: State, job_id: int, job: Job | None) -> set[int]:
        """Note whether a `singleton` job (None: one that is over) waits for earlier ones; return who is first of a name
        now that this job no longer is.
        """
        group = self._singleton_of.pop(job_id, None)
        if group is not None:
            keep_in_set(self._singletons, group, job_id, False)
        options = None if job is None else state.jobs[job_id].request.options
        if job is not None and options is not None and options.singleton and job.state is JobState.PENDING:
            group = (job.request.user, job.request.name)
            first = _first(state, group)
            if first != job_id:
                self._singleton_of[job_id] = group
                keep_in_set(self._singletons, group, job_id, True)
                self._first_of[first] = group
        group = self._first_of.get(job_id)
        if group is None:
            return set()
        first = _first(state, group)
        if first == job_id:
            return set()
        del self._first_of[job_id]
        if not first or group not in self._singletons:
            return set()
        self._first_of[first] = group
        return {first}

    def renamed(self, former: State, state: State, job_id: int) -> set[int]:
        """Return whose gate may be another one now that a job has another name: who is first of its former name, and
        who was first of the present one.
        """
        found: set[int] = set()
        group = self._first_of.pop(job_id, None)
        if group is not None and group in self._singletons:
            first = _first(state, group)
            if first:
                self._first_of[first] = group
                found.add(first)
        job = state.jobs.get(job_id)
        if job is not None:
            found.add(_first(former, (job.request.user, job.request.name)))
        return {one for one in found if one in state.jobs}

    def contents(self) -> dict[str, object]:
        """Return it in a form that can be compared."""
        return {
            "waiters": dict(self._counts),
            "awaits": dict(self._awaits),
            "awaiting": dict(self._awaiting),
            "singletons": dict(self._singletons),
            "singleton_of": dict(self._singleton_of),
        }


def _first(state: State, group: tuple[str, str]) -> int:
    found = state.named.get(group[0], _NO_NAMES).get(group[1])
    return 0 if found is None else first_of(found)
