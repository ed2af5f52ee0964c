"""Deciding what is asked about jobs, by people, and by the agents that carry their operations out.

One function per command, as in `replica.decide`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from replica.accounting_changes import admitted_options, default_account, limits_refusal
from replica.array_commands import members
from replica.array_submission import array_refusal, array_submitted, with_arrays
from replica.decide_runs import (
    cleared_job,
    cleared_persistent,
    requeued,
    restarted,
    resumed,
    suspended,
    with_operator_noted,
)
from replica.decide_transfers import reached, recorded
from replica.decide_updates import updated
from replica.messages import commands as c
from replica.messages import events as e
from replica.messages import features
from replica.messages.entries import NOTHING, Accepted, Decision, accepted
from replica.model.buffers import BufferState
from replica.model.job_options import NO_OPTIONS, NO_TERMS, JobTerms
from replica.model.jobs import ENDED, Hold, Job, JobState
from replica.model.mail import settling_events
from replica.model.operations import Stage
from replica.model.partitions import chosen_partition
from replica.operations.outcomes import (
    active_stage,
    failed,
    pre_run_failed,
    script_ended,
    succeeded,
    unwound,
    waiting_stage,
)
from replica.request_options import with_options_decided
from replica.state.state import Facts
from replica.submission import job_submitted, options_refusal
from replica.values.errors import Refusal, RefusalCode
from replica.values.limits import MAILS_SETTLED_MAX
from replica.values.units import Instant


def _submit_job(state: Facts, actor: c.Actor, command: c.SubmitJob, at: Instant) -> Decision:
    decided = with_options_decided(state, actor, command)
    if isinstance(decided, Refusal):
        return decided
    noted = with_operator_noted(actor, decided.options)
    command = decided if noted is decided.options else msgspec.structs.replace(decided, options=noted)
    refusal = options_refusal(state, command)
    if refusal is not None:
        return refusal
    refusal = array_refusal(state, command)
    if refusal is not None:
        return refusal
    resolved = with_arrays(state, command)
    if isinstance(resolved, Refusal):
        return resolved
    command = resolved
    terms = _terms(state, command)
    if isinstance(terms, Refusal):
        return terms
    placed = _in_a_partition(state, command)
    if isinstance(placed, Refusal):
        return placed
    command = placed
    options = admitted_options(state, command.spec, command.options, at, max(1, len(command.array)))
    if isinstance(options, Refusal):
        return options
    if options is not command.options:
        command = msgspec.structs.replace(command, options=options)
    if command.array:
        array = array_submitted(state, actor, command)
        if isinstance(array, Refusal):
            return array
        return limits_refusal(state, array, command.options) or Accepted(
            (array, *_said(terms, array.job, len(command.array)))
        )
    submitted = job_submitted(state, actor, command)
    if isinstance(submitted, Refusal):
        return submitted
    refusal = limits_refusal(state, submitted, command.options)
    if refusal is not None:
        return refusal
    said = _said(terms, submitted.job, 1)
    if command.options == NO_OPTIONS:
        return Accepted((submitted, *said))
    return Accepted((submitted, e.JobOptionsGiven(submitted.job, command.options), *said))


def _in_a_partition(state: Facts, command: c.SubmitJob) -> c.SubmitJob | Refusal:
    """Return the submit with the partition that it goes to, or why it may not."""
    options = command.options
    if not state.partitions:
        return command
    # The default account counts, too: a partition may be for the jobs of some accounts only.
    account = options.account or default_account(state, command.spec.user)
    chosen = chosen_partition(state.partitions, options.partition, command.spec.user, account)
    if isinstance(chosen, Refusal):
        return chosen
    if chosen == options.partition:
        return command
    return msgspec.structs.replace(command, options=msgspec.structs.replace(options, partition=chosen))


def _terms(state: Facts, command: c.SubmitJob) -> JobTerms | Refusal:
    """Return how the conditions of a submit are to be read, or why they cannot be."""
    conditions = len(command.spec.dependencies) + command.options.singleton
    if not command.any_of or conditions < 2:
        return NO_TERMS
    what = "a job that waits for one of several (?)"
    refusal = features.level_refusal(state.feature_level, features.TRANSFERS_AND_PARTITIONS, what, "dependencies")
    return JobTerms(any_of=True) if refusal is None else refusal


def _said(terms: JobTerms, job_id: int, tasks: int) -> tuple[e.Event, ...]:
    return () if terms == NO_TERMS else (e.JobTermsGiven(job_id, terms, tasks),)


def _find_job(state: Facts, actor: c.Actor, job_id: int) -> Job | Refusal:
    """Return the job, if it exists and the actor may act on it."""
    job = state.jobs.get(job_id)
    if job is None:
        gone = 0 < job_id < state.next_job
        return Refusal(
            RefusalCode.UNKNOWN_JOB,
            f"job {job_id} is no longer in the state" if gone else f"there is no job {job_id}",
            f"forebay job history {job_id} shows what became of it" if gone else "forebay job list shows the jobs",
            "job",
        )
    if actor.role is c.ActorRole.USER and actor.name != job.spec.user:
        return Refusal(
            RefusalCode.PERMISSION_DENIED,
            f"job {job_id} is of user {job.spec.user}",
            "ask its user or an operator",
            "job",
        )
    return job


def _cancel_job(state: Facts, actor: c.Actor, command: c.CancelJob, at: Instant) -> Decision:
    job = _find_job(state, actor, command.job)
    if isinstance(job, Refusal):
        return job
    buffer = state.buffers.get(job.id)
    if job.state is JobState.PENDING:
        if buffer is None or buffer.state is BufferState.PENDING:
            return Accepted((e.JobCancelled(job.id),))
        if buffer.state in (BufferState.STAGING_IN, BufferState.STAGED_IN):
            return Accepted(
                (
                    e.CancelRequested(job.id, command.hurry),
                    *unwound(state, job),
                    e.TeardownStarted(job.id, job.attempt + 1, JobState.CANCELLED, command.hurry, "cancelled"),
                )
            )
        return Accepted((e.CancelRequested(job.id, command.hurry),))
    if job.state in ENDED:
        if job.id not in state.unfinished:
            return Refusal(
                RefusalCode.WRONG_STATE, f"job {job.id} is already {job.state.name}", "nothing is left to cancel", "job"
            )
        return NOTHING
    if job.state is JobState.STAGE_OUT:
        requeueing = job.result is JobState.PENDING
        if not command.hurry:
            # Its results go on to their end; but it is not run again.
            ends = requeueing and not job.cancelled
            return Accepted((e.CancelRequested(job.id, False),)) if ends else NOTHING
        result = JobState.CANCELLED if requeueing else job.result
        return Accepted(
            (
                e.CancelRequested(job.id, True),
                e.TeardownStarted(job.id, job.attempt + 1, result, True, "stage-out skipped: cancelled with --hurry"),
            )
        )
    if job.cancelled and (job.hurry or not command.hurry):
        return NOTHING
    return Accepted((e.CancelRequested(job.id, command.hurry),))


def _hold_job(state: Facts, actor: c.Actor, command: c.HoldJob, at: Instant) -> Decision:
    job = _find_job(state, actor, command.job)
    if isinstance(job, Refusal):
        return job
    if job.state is not JobState.PENDING:
        return Refusal(
            RefusalCode.WRONG_STATE, f"job {job.id} is {job.state.name}", "only pending jobs can be held", "job"
        )
    hold = Hold.ADMIN if actor.role is c.ActorRole.OPERATOR and actor.name != job.spec.user else Hold.USER
    return NOTHING if job.hold >= hold else Accepted((e.JobHeld(job.id, hold),))


def _release_job(state: Facts, actor: c.Actor, command: c.ReleaseJob, at: Instant) -> Decision:
    job = _find_job(state, actor, command.job)
    if isinstance(job, Refusal):
        return job
    if job.hold is Hold.ADMIN and actor.role is c.ActorRole.USER:
        return Refusal(
            RefusalCode.PERMISSION_DENIED,
            f"job {job.id} is held by an operator",
            "ask an operator to release it",
            "job",
        )
    events: list[e.Event] = []
    if job.hold is not Hold.NONE and job.state not in ENDED:
        events.append(e.JobReleased(job.id))
    buffer = state.buffers.get(job.id)
    stage = None if buffer is None else waiting_stage(job, buffer)
    if stage is not None:
        events.append(e.StageRetried(job.id, stage, job.attempt + 1, "released"))
    if not events:
        return Refusal(
            RefusalCode.WRONG_STATE,
            f"job {job.id} is not held and no operation of it has failed",
            "nothing is left to release",
            "job",
        )
    return Accepted(tuple(events))


def _suspend_job(state: Facts, actor: c.Actor, command: c.SuspendJob, at: Instant) -> Decision:
    job = _find_job(state, actor, command.job)
    return job if isinstance(job, Refusal) else accepted(suspended(state, job))


def _resume_job(state: Facts, actor: c.Actor, command: c.ResumeJob, at: Instant) -> Decision:
    job = _find_job(state, actor, command.job)
    return job if isinstance(job, Refusal) else accepted(resumed(state, job))


def _requeue_job(state: Facts, actor: c.Actor, command: c.RequeueJob, at: Instant) -> Decision:
    job = _find_job(state, actor, command.job)
    return job if isinstance(job, Refusal) else accepted(requeued(state, actor, job))


def _update_job(state: Facts, actor: c.Actor, command: c.UpdateJob, at: Instant) -> Decision:
    jobs = members(state, command.job, command.tasks)
    if isinstance(jobs, Refusal):
        return jobs
    events: list[e.Event] = []
    refusals: list[Refusal] = []
    wanted = (command.job,) if jobs is None else jobs
    for job_id in wanted:
        job = _find_job(state, actor, job_id)
        # All of them count at once where a QOS allows only so many jobs.
        changed = job if isinstance(job, Refusal) else updated(state, actor, job, command, len(wanted))
        if isinstance(changed, Refusal):
            refusals.append(changed)
        else:
            events.extend(changed)
    return refusals[0] if len(refusals) == len(wanted) else Accepted(tuple(events))


def _clear_buffer(state: Facts, actor: c.Actor, command: c.ClearBuffer, at: Instant) -> Decision:
    if command.name:
        return accepted(cleared_persistent(state, actor, command.name, command.discard))
    job = _find_job(state, actor, command.job)
    return job if isinstance(job, Refusal) else accepted(cleared_job(state, actor, job, command.discard))


def _restart_operations(state: Facts, actor: c.Actor, command: c.RestartOperations, at: Instant) -> Decision:
    return accepted(restarted(state, command.jobs))


def _report_operation(state: Facts, actor: c.Actor, command: c.ReportOperation, at: Instant) -> Decision:
    job = state.jobs.get(command.job)
    if job is None:
        return Refusal(RefusalCode.UNKNOWN_JOB, f"there is no job {command.job}", "drop the report", "job")
    buffer = state.buffers.get(job.id)
    stage = active_stage(job, buffer)
    if job.node != command.node or job.attempt != command.attempt or stage is not command.stage:
        ordered = "nothing" if stage is None else f"{stage.word} as attempt {job.attempt} on {job.node}"
        return Refusal(
            RefusalCode.STALE_ATTEMPT,
            f"job {job.id}: {command.stage.word} as attempt {command.attempt} on {command.node} is not ordered now, "
            f"but {ordered}",
            "drop the report",
            "attempt",
        )
    result = command.result
    if stage is Stage.RUN:
        if isinstance(result, c.ScriptStarted):
            if job.state is JobState.CONFIGURING:
                return Accepted((e.RunStarted(job.id),))
            return Refusal(
                RefusalCode.STALE_ATTEMPT, f"the start of job {job.id} is known", "drop the report", "result"
            )
        if isinstance(result, c.ScriptEnded) and result.result in ENDED:
            return Accepted(
                script_ended(state, job, buffer, result.result, result.exit_code, result.signal, result.message)
            )
        starting = job.state is JobState.CONFIGURING and buffer is not None
        if starting and isinstance(result, c.OperationFailed) and state.feature_level >= features.BURST_BUFFERS_WHOLE:
            return Accepted(pre_run_failed(state, job, result.message))
    elif buffer is not None:
        if isinstance(result, c.OperationReached):
            return Accepted(reached(state, job, stage, result, at))
        if isinstance(result, c.OperationDone):
            follows = succeeded(state, job, buffer, stage, result.files, result.size_bytes, result.digest)
            return Accepted((*recorded(state, job, stage, result.receipt), *follows))
        if isinstance(result, c.OperationFailed):
            follows = failed(state, job, stage, result.message, at, final=result.final, operation=result.operation)
            return Accepted((*recorded(state, job, stage, result.receipt), *follows))
    return Refusal(
        RefusalCode.INVALID_FIELD,
        f"a {type(result).__name__} is no answer to {stage.word}",
        "report what the order asks for",
        "result",
    )


def _settle_mails(state: Facts, actor: c.Actor, command: c.SettleMails, at: Instant) -> Decision:
    if len(command.sent) + len(command.dropped) > MAILS_SETTLED_MAX:
        return Refusal(
            RefusalCode.LIMIT_EXCEEDED,
            f"{len(command.sent) + len(command.dropped)} mails are to be settled",
            f"settle at most {MAILS_SETTLED_MAX} at once",
            "sent",
        )
    return Accepted(settling_events(state.mails, command.sent, command.dropped))


JOBS_BY_KEY: dict[type, Callable[[Facts, c.Actor, Any, Instant], Decision]] = {
    c.SubmitJob: _submit_job,
    c.CancelJob: _cancel_job,
    c.HoldJob: _hold_job,
    c.ReleaseJob: _release_job,
    c.SuspendJob: _suspend_job,
    c.ResumeJob: _resume_job,
    c.RequeueJob: _requeue_job,
    c.UpdateJob: _update_job,
    c.ClearBuffer: _clear_buffer,
    c.RestartOperations: _restart_operations,
    c.ReportOperation: _report_operation,
    c.SettleMails: _settle_mails,
}
"""Command -> what decides it by looking things up."""
