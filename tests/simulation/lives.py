"""Invariants of jobs, buffers and space, checked event by event: the part of the oracle that interprets the ledger.

It folds the history as every replica does, and judges each event by what it changes, with books of its own: which names
were submitted, which scripts were ordered and started, how much is held.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from forebay.replica.fold.fold import fold_into
from forebay.replica.messages import events as e
from forebay.replica.model.buffers import HOLDING, TRANSITIONS, BufferState, PersistentBuffer
from forebay.replica.model.job_states import ENDED
from forebay.replica.model.requests import JobRequest
from forebay.replica.state.builder import StateBuilder
from forebay.replica.state.state import State

LEGAL = frozenset((before, after) for (before, _), after in TRANSITIONS.items())
LEGAL_OF_EXTERNAL_JOBS = LEGAL | {(BufferState.STAGED_IN, BufferState.RUNNING)}
"""Their scheduler alone knows what is done between the stage-in and the run."""
WORKS = frozenset({BufferState.PRE_RUN, BufferState.RUNNING, BufferState.SUSPENDED})
"""The states in which a script works with what its job asked for, or is about to."""


class Lives:
    """Jobs and buffers of the one history. `violate` is told each broken promise, as a sentence."""

    def __init__(self, violate: Callable[[str], None]) -> None:
        self._violate = violate
        self.kinds: Counter[str] = Counter()
        """How often each kind of event is in the history."""
        self._submitted: dict[str, int] = {}
        self._ordered: dict[int, int] = {}
        """Jobs whose script was ordered, and since then neither given up nor requeued -> the attempt."""
        self._started: set[int] = set()
        """Jobs whose script has started, and whose run was not requeued since."""
        self._begun: Counter[int] = Counter()
        """How often everything of a job began again."""
        self._runs: dict[tuple[int, int], int] = {}
        """(job, attempt) of each ordered script -> how often the job had begun again then."""

    def may_run(self, job: int, earlier: int, later: int) -> bool:
        """Whether a script that was ordered as attempt `earlier` may be run again as `later`."""
        return self._runs.get((job, earlier)) != self._runs.get((job, later))

    def fold(self, builder: StateBuilder, event: e.Event, index: int) -> None:
        """Fold an event of entry `index`, and check what it does."""
        self.kinds[type(event).__name__] += 1
        jobs = e.jobs_of(event)
        former = [(builder.jobs.get(job), builder.buffers.get(job)) for job in jobs]
        persistent = builder.persistent
        fold_into(builder, (event,))
        for job, (job_before, before) in zip(jobs, former, strict=True):
            after, job_after = builder.buffers.get(job), builder.jobs.get(job)
            if before is not None and after is not None and before.state != after.state:
                is_external_job = job_after is not None and job_after.external_job is not None
                if (before.state, after.state) not in (LEGAL_OF_EXTERNAL_JOBS if is_external_job else LEGAL):
                    self._violate(f"entry {index}: job {job} goes from {before.state.word} to {after.state.word}")
            if before is None and after is not None and after.state is not BufferState.PENDING:
                self._violate(f"entry {index}: job {job} begins as {after.state.word}")
            if job_before is not None and job_after is not None and job_before.state in ENDED:
                if job_after.state is not job_before.state and not isinstance(event, e.RunRequeued):
                    self._violate(
                        f"entry {index}: job {job} was {job_before.state.name}, and is {job_after.state.name}"
                    )
            if isinstance(event, e.OperationsRestarted) and before is not None and before.state is BufferState.PRE_RUN:
                # Its agent ends what it has begun, and begins again as the next attempt (restart-policy slurm).
                self._begun[job] += 1
                self._runs[job, event.attempt] = self._begun[job]
        if builder.persistent is not persistent:
            for name in {*persistent, *builder.persistent}:
                self._check_persistent(name, persistent.get(name), builder.persistent.get(name), index)
        self._check_once(event, index)

    def _check_once(self, event: e.Event, index: int) -> None:
        """Exactly once: a job is made once, and in each of its lives its script is ordered once and started once."""
        match event:
            case e.JobSubmitted(job=job, request=request, array=array):
                self.kinds.update(_asked(request, array))
                known = self._submitted.setdefault(request.name, job)
                if known != job:
                    self._violate(f"exactly once: {request.name} is job {known} and job {job}")
            case e.RunOrdered(job=job, attempt=attempt):
                known = self._ordered.setdefault(job, attempt)
                if known != attempt:
                    self._violate(
                        f"exactly once: the script of job {job} is ordered as attempts {known} and {attempt} in one "
                        f"life (entry {index})"
                    )
                self._runs[job, attempt] = self._begun[job]
            case e.RunStarted(job=job):
                if job in self._started:
                    self._violate(f"exactly once: the script of job {job} started again in entry {index}")
                self._started.add(job)
            case e.RunRequeued(job=job):
                self._started.discard(job)
                self._begin_again(job)
            case e.JobRequeued(job=job):
                self._begin_again(job)

    def _begin_again(self, job: int) -> None:
        self._ordered.pop(job, None)
        self._begun[job] += 1

    def _check_persistent(
        self, name: str, before: PersistentBuffer | None, after: PersistentBuffer | None, index: int
    ) -> None:
        said = f"entry {index}: the persistent buffer {name}"
        if before is None:
            if after is not None and after.state is not BufferState.ALLOCATING:
                self._violate(f"{said} begins as {after.state.word}")
        elif after is None:
            if before.state is not BufferState.DELETING:
                self._violate(f"{said} is gone, and was {before.state.word}")
        else:
            if before.state != after.state and (before.state, after.state) not in LEGAL:
                self._violate(f"{said} goes from {before.state.word} to {after.state.word}")
            if _owned(before) != _owned(after):
                self._violate(f"{said} changes from {_owned(before)} to {_owned(after)}")

    def check_space(self, before: State, after: State, index: int) -> None:
        """Space held is what its holders were granted, and is never raised above what a pool has in service.

        And who works with a persistent buffer finds it, where it is.
        """
        held: Counter[str] = Counter()
        for buffer in (*after.buffers.values(), *after.persistent.values()):
            if buffer.state in HOLDING:
                held[buffer.pool] += buffer.granted_bytes
        for name, pool in after.pools.items():
            now, was = after.held_bytes.get(name, 0), before.held_bytes.get(name, 0)
            if now != held[name]:
                self._violate(f"entry {index}: pool {name} holds {held[name]} bytes, and {now} are counted")
            if now < 0 or (now > was and now > pool.usable_bytes):
                self._violate(f"entry {index}: pool {name} holds {now} bytes of {pool.usable_bytes}")
        for job, own in after.buffers.items():
            asked = after.jobs[job].request.buffer
            if asked is None or own.state not in WORKS:
                continue
            for name in asked.uses:
                used = after.persistent.get(name)
                if used is None or used.state is not BufferState.ALLOCATED or used.node != own.node:
                    self._violate(f"entry {index}: job {job} works with the persistent buffer {name}, which is {used}")


def _asked(request: JobRequest, array: e.SubmittedTasks | None) -> set[str]:
    """Return by which words it is counted what was asked of a job."""
    said = {
        "array": array is not None,
        "options": request.options is not None,
        "any_of": request.effective_options.any_of,
    }
    return {word for word, true in said.items() if true}


def _owned(buffer: PersistentBuffer) -> tuple[Any, ...]:
    return buffer.user, buffer.pool, buffer.granted_bytes, buffer.node
