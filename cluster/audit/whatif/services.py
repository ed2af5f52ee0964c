"""Service times: how long agents, and schedulers of external jobs, took for each task.

Theory of operation
===================

Agents are level-triggered: the next task of a job's agent is a function of the state (`agent_work`), and so is the next
step of an external job's scheduler (`scheduler_work`). A *service* starts with the entry that changes this task. It
ends with the report of its end, or with an entry that cancels it; then only a lower bound of its duration is known
(`lasted_us`). If a simulation starts the same service at the same entry, the reports keep their positions in the
ledger; otherwise they follow the new start after the recorded times.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import Final, NamedTuple

import msgspec

from forebay.replica.messages import Entry, Event, jobs_of
from forebay.replica.messages import commands as c
from forebay.replica.messages import events as e
from forebay.replica.model import ENDED, ExternalJobStep, Job, JobState, Stage
from forebay.replica.operations import active_stage
from forebay.replica.state import State
from forebay.replica.values import MICROSECONDS_PER_SECOND, NEVER

JOBS_MAX: Final = 1_000_000
"""Maximum number of jobs with recorded services in a window: each takes about 2.5 kB, with the data of the worlds."""

INTERRUPTED_US: Final = MICROSECONDS_PER_SECOND
"""Assumed remaining time of a cancelled service, microseconds."""

CANCEL_US: Final = MICROSECONDS_PER_SECOND
"""Time a script takes to end on request if none was recorded, microseconds."""

Work = tuple[int, int]
"""Stage, and a value that distinguishes services of that stage.

A stage below 0 is a step that the scheduler of an external job waits for.
"""

_EXTERNAL_JOB_STEPS: Final = {
    c.kind_of(command("", "")): command
    for command in (
        c.StageInExternalJob,
        c.BeginExternalJobRun,
        c.EndExternalJobRun,
        c.StageOutExternalJob,
        c.TearDownExternalJob,
    )
}
"""Steps of an external job's scheduler that depend on the job's progress, by command name."""

Answer = (
    c.OperationResult
    | c.StageInExternalJob
    | c.BeginExternalJobRun
    | c.EndExternalJobRun
    | c.StageOutExternalJob
    | c.TearDownExternalJob
)
"""Report of a service, by an agent or an external job's scheduler."""


def agent_work(state: State, job: Job) -> Work | None:
    """Return the present task of the job's agent, or None."""
    stage = active_stage(job, state.buffers.get(job.id))
    return None if stage is None else (int(stage), job.attempt)


def scheduler_work(state: State, job: Job) -> Work | None:
    """Return the step that an external job's scheduler is to report next; None for other jobs."""
    buffer = state.buffers.get(job.id)
    if job.external_job is None or buffer is None:
        return None
    return -1 - int(buffer.state) * len(ExternalJobStep) - int(job.external_job.step), job.external_job.epoch


class Lane(NamedTuple):
    """Job, and the party that works on it: the job's agent, or the scheduler of an external job."""

    job: int
    is_scheduler: bool


def works_of(state: State, jobs: Iterable[int]) -> Iterator[tuple[Lane, Work | None]]:
    """Yield the present works of these jobs with their lanes."""
    for job_id in jobs:
        job = state.jobs.get(job_id) if job_id in state.unfinished else None
        yield Lane(job_id, False), None if job is None else agent_work(state, job)
        if job is None or job.external_job is not None:
            yield Lane(job_id, True), None if job is None else scheduler_work(state, job)


def touched_by(events: Iterable[Event]) -> dict[int, None]:
    """Return the jobs that events concern, without duplicates."""
    return dict.fromkeys(job for event in events for job in jobs_of(event))


def is_external_job_step(entry: Entry) -> bool:
    """Return whether an entry settled a step of an external job's scheduler that depends on the job's progress."""
    return entry.command in _EXTERNAL_JOB_STEPS and bool(entry.events)


def answer_in(stage: int, events: Sequence[Event]) -> c.OperationResult | None:
    """Return an agent's report of a stage, rebuilt from its events; None if it reports neither an end nor a start."""
    receipt = next((event.receipt for event in events if isinstance(event, e.TransferRecorded)), None)
    for event in events:
        match event:
            case e.RunStarted():
                return c.ScriptStarted()
            case e.RunEnded():
                result = event.result if event.result in ENDED else _before_requeue(events)
                return c.ScriptEnded(result, event.exit_code, event.signal, event.message)
            case e.StagedIn() | e.StagedOut():
                return c.OperationDone(event.files, event.size_bytes, event.digest, receipt)
            case e.TornDown():
                return c.OperationDone(receipt=receipt)
            case e.StageFailed():
                return c.OperationFailed(_message(event), event.retry_at == NEVER, event.operation, receipt)
            case e.PreRunFailed():
                return c.OperationFailed(_message(event))
            case _:
                pass
    if stage == Stage.RUN:
        return c.ScriptEnded(_before_requeue(events))  # the script never started
    if stage == Stage.POST_RUN and any(isinstance(one, e.StageOutStarted | e.TeardownStarted) for one in events):
        return c.OperationDone()
    named = next((one.name for one in events if isinstance(one, e.PersistentCreated | e.PersistentDeleted)), None)
    return None if named is None else c.PersistentChanged(named)


def _before_requeue(events: Sequence[Event]) -> JobState:
    """Return the result of a requeued run: the ledger has only the request, or the failure of its node."""
    requeued = next((event.reason for event in events if isinstance(event, e.RequeueRequested)), "")
    word = requeued.removeprefix("requeued after ")
    return JobState[word] if word in JobState.__members__ else JobState.CANCELLED


def _message(event: e.StageFailed | e.PreRunFailed) -> str:
    """Return the agent's message: the comment is `PLUGIN: OPERATION: MESSAGE`, and plugin names have no colon."""
    return event.comment.split(": ", 2)[-1] if event.comment.count(": ") > 1 else ""


def is_end(answer: Answer) -> bool:
    """Return whether a report ends its service."""
    return not isinstance(answer, c.ScriptStarted | c.PersistentChanged)


class RecordedService(msgspec.Struct, frozen=True, gc=False):
    """Recorded service. `index`: the entry that started it, 0 if it started before the window."""

    stage: int
    index: int
    answers: tuple[tuple[int, int, Answer], ...]
    """(entry, microseconds after the start, report)"""
    lasted_us: int
    """Duration up to the last recorded moment, without the time for which a script was suspended."""
    is_ended: bool
    """True if the service ended by itself: without a cancellation or a request to end the script."""
    cut_us: int = -1
    """Time of the request to end the script, microseconds after the start; -1: never."""

    @property
    def begun_us(self) -> int | None:
        """Return the time from the service's start to the script's reported start, µs; None without a start."""
        return next((us for _, us, answer in self.answers if isinstance(answer, c.ScriptStarted)), None)

    @property
    def has_worked(self) -> bool:
        """Return whether it ended successfully."""
        return self.is_ended and not isinstance(self.answers[-1][2], c.OperationFailed)


class _Seen(msgspec.Struct, gc=False):
    """Service being recorded."""

    work: Work
    index: int
    at: int
    answers: list[tuple[int, int, Answer]]
    suspended_at: int = 0
    suspended_us: int = 0
    cut_us: int = -1

    def since(self, at: int) -> int:
        """Return the duration of the service so far, without suspensions."""
        suspended_us = self.suspended_us + (at - self.suspended_at if self.suspended_at else 0)
        return max(0, at - self.at - suspended_us)


class Services:
    """Services of a window by job, in order of their start, and the usual durations of each kind."""

    def __init__(self) -> None:
        self.by_job: dict[int, list[RecordedService]] = {}
        self._seen: dict[Lane, _Seen] = {}
        self._answers: dict[Answer, Answer] = {}
        """Interned reports; most of them are equal."""
        self._runs: defaultdict[str, list[int]] = defaultdict(list)
        self._stages: defaultdict[int, list[int]] = defaultdict(list)
        self._begins: list[int] = []
        self._medians: dict[str | int, int] = {}

    def begins(self, state: State, at: int) -> None:
        """Record the works in progress at the start of the window."""
        for lane, work in works_of(state, sorted(state.unfinished)):
            if work is not None:
                job = state.jobs[lane.job]
                since = job.order_at or (job.started_at if work[0] == Stage.RUN else NEVER) or at
                self._seen[lane] = _Seen(work, 0, int(since), [])

    def saw(self, index: int, at: int, entries: Sequence[Entry], before: State, after: State) -> None:
        """Record an entry of the ledger: its commands, and the states around it."""
        for entry in entries:
            if entry.events:
                self._said(index, at, entry, before)
        touched = touched_by(event for entry in entries for event in entry.events)
        for lane, work in works_of(after, touched):
            seen = self._seen.get(lane)
            if seen is not None and seen.work == work:
                continue
            if seen is not None:
                self._close(lane, seen, at, before)
            if work is None:
                self._seen.pop(lane, None)
            else:
                self._seen[lane] = _Seen(work, index, at, [])

    def _said(self, index: int, at: int, entry: Entry, before: State) -> None:
        job = next((one for event in entry.events for one in jobs_of(event)), 0)
        if entry.command == "report_operation":
            seen = self._seen.get(Lane(job, False))
            answer = None if seen is None else answer_in(seen.work[0], entry.events)
            if seen is not None and answer is not None:
                seen.answers.append((index, seen.since(at), self._once(without_receipt(answer))))
        elif is_external_job_step(entry) and (seen := self._seen.get(Lane(job, True))) is not None:
            seen.answers.append((index, seen.since(at), self._once(external_job_step(entry, before, job))))
        for event in entry.events:
            # The requeue of a failed run is not a request to end it.
            if entry.command != "report_operation" or not isinstance(event, e.RequeueRequested):
                self._noted(event, at)

    def _noted(self, event: Event, at: int) -> None:
        if isinstance(event, e.ClockSet):
            self._clock_set(event.at - at)
        elif isinstance(event, e.CancelRequested | e.RequeueRequested | e.JobSuspended | e.JobResumed):
            seen = self._seen.get(Lane(event.job, False))
            if seen is None or seen.work[0] != Stage.RUN:
                return
            if isinstance(event, e.JobSuspended):
                seen.suspended_at = at
            elif isinstance(event, e.JobResumed):
                seen.suspended_us += at - seen.suspended_at if seen.suspended_at else 0
                seen.suspended_at = 0
            elif seen.cut_us < 0:
                seen.cut_us = seen.since(at)

    def _clock_set(self, by_us: int) -> None:
        """Shift the services in progress by the change of the clock."""
        for seen in self._seen.values():
            seen.at += by_us
            seen.suspended_at += by_us if seen.suspended_at else 0

    def _once(self, answer: Answer) -> Answer:
        return self._answers.setdefault(answer, answer)

    def _close(self, lane: Lane, seen: _Seen, at: int, state: State) -> None:
        stage, answers = seen.work[0], tuple(seen.answers)
        lasted_us = answers[-1][1] if answers and is_end(answers[-1][2]) else seen.since(at)
        is_ended = bool(answers) and is_end(answers[-1][2]) and seen.cut_us < 0
        if lane.job not in self.by_job and len(self.by_job) >= JOBS_MAX:
            raise TooManyJobs(f"more than {JOBS_MAX} jobs were active in this window")
        made = RecordedService(stage, seen.index, answers, lasted_us, is_ended, seen.cut_us)
        self.by_job.setdefault(lane.job, []).append(made)
        if made.has_worked and not lane.is_scheduler:
            job = state.jobs.get(lane.job)
            if stage == Stage.RUN and job is not None:
                self._runs[job.request.user].append(lasted_us)
            self._stages[stage].append(lasted_us)
        if (begun_us := made.begun_us) is not None:
            self._begins.append(begun_us)

    def ends(self, state: State, at: int) -> None:
        """Record the works in progress at the end of the window."""
        for lane, seen in self._seen.items():
            self._close(lane, seen, at, state)
        self._seen.clear()

    @property
    def usual_begin_us(self) -> int:
        """Return the assumed time to start a script, microseconds: the median."""
        return self._median("", self._begins)

    def limit_us(self, job: Job) -> int:
        """Return the time limit of a run with its start, microseconds; 0: unlimited."""
        limit_s = job.request.time_limit_s
        return limit_s * MICROSECONDS_PER_SECOND + self.usual_begin_us if limit_s else 0

    def usual_us(self, stage: int, job: Job, *, was_seen: bool) -> int:
        """Return the assumed duration of a service without a recorded end, microseconds.

        A run that was still in progress (`was_seen`) takes its time limit. Another run takes the median of its user's
        runs, else of all runs, at most its limit; without any runs it takes the limit. Another operation takes the
        median of its kind, else 0.
        """
        runs, all_of_stage = self._runs.get(job.request.user), self._stages.get(stage, [])
        if stage != Stage.RUN:
            return self._median(stage, all_of_stage)
        limit_us = self.limit_us(job)
        if limit_us and (was_seen or not all_of_stage):
            return limit_us
        usual_us = self._median(job.request.user, runs) if runs else self._median(stage, all_of_stage)
        return min(usual_us, limit_us) if limit_us else usual_us

    def _median(self, key: str | int, lasted: list[int]) -> int:
        """Return a median, which is cached because all durations are recorded before the first request."""
        if key not in self._medians:
            self._medians[key] = int(median(lasted)) if lasted else 0
        return self._medians[key]


class TooManyJobs(Exception):
    """Window with more jobs than can be kept."""


def without_receipt(answer: c.OperationResult) -> c.OperationResult:
    """Return a report without the transfer's counts, which belong to that transfer only."""
    if isinstance(answer, c.OperationDone | c.OperationFailed) and answer.receipt is not None:
        return msgspec.structs.replace(answer, receipt=None)
    return answer


def external_job_step(entry: Entry, state: State, job_id: int) -> Answer:
    """Rebuild the step of an external job's scheduler from its events."""
    job, scheduler = state.jobs.get(job_id), state.schedulers.get(entry.actor.name)
    number = "" if job is None or job.external_job is None else job.external_job.job
    cluster = "" if scheduler is None else scheduler.cluster
    if entry.command == c.kind_of(c.TearDownExternalJob("", "")):
        started = next((event for event in entry.events if isinstance(event, e.TeardownStarted)), None)
        hurry, reason = (False, "") if started is None else (started.hurry, started.reason)
        return c.TearDownExternalJob(cluster, number, hurry, reason=reason)
    made: Answer = _EXTERNAL_JOB_STEPS[entry.command](cluster, number)
    return made
