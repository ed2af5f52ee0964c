"""Deciding changes of a job that waits: what `scontrol update` allows of a pending job, and who may (level 4).

A user may lower the time limit and the priority of his job, an operator may raise them; a nice value below 0 is an
operator's. What a submit would refuse is refused here, too, as far as it is changed; what is so already is no change.
Source: Slurm's manual page of scontrol.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from msgspec.structs import replace

from replica.decide.accounts import limits_refusal, readmission_refusal
from replica.decide.arrays import with_arrays
from replica.decide.buffer_request import check_plain_options, with_options_decided
from replica.decide.submit import Unfit, check_dependencies, request_decided
from replica.messages import TRANSFERS_AND_PARTITIONS, level_refusal
from replica.messages import commands as c
from replica.messages import events as e
from replica.model import (
    NATIVE,
    NO_CHANGE,
    NO_OPTIONS,
    NO_TERMS,
    OF_OPTIONS,
    OF_SPEC,
    BufferState,
    Job,
    JobChange,
    JobOptions,
    JobSpec,
    JobState,
    changed_fields,
    check_asked,
    chosen_partition,
    members_of,
)
from replica.scheduler import depended_on
from replica.state import Facts
from replica.values import DEPENDENCY_CHAIN_MAX, PRIORITY_MAX, TIME_LIMIT_S_MAX, Refusal, RefusalCode, name_fault

Events = tuple[e.Event, ...]

_ADMITTED = ("account", "qos", "licenses", "reservation")
"""Fields that accounts, QOS, licences and reservations have a say in."""

_WAITS = ("dependencies", "singleton", "name")
"""Fields that say for whom a job waits, or who waits for it."""


def updated(state: Facts, actor: c.Actor, job: Job, command: c.UpdateJob, jobs: int) -> Events | Refusal:
    """Return what the change of one job leads to; `jobs`: how many are changed with it, all alike."""
    refusal = level_refusal(state.feature_level, TRANSFERS_AND_PARTITIONS, "changing a job that waits", "job")
    if refusal is not None:
        return refusal
    if job.state is not JobState.PENDING:
        sentence = f"job {job.id} is {job.state.name}: it is no longer pending"
        return Refusal(RefusalCode.WRONG_STATE, sentence, "only jobs that wait can be changed", "job")
    try:
        return _updated(state, actor, job, command, jobs)
    except Unfit as unfit:
        return unfit.refusal


def _updated(state: Facts, actor: c.Actor, job: Job, command: c.UpdateJob, jobs: int) -> Events | Refusal:
    options = state.options.get(job.id, NO_OPTIONS)
    change = _resolved(state, job, options, command)
    if isinstance(change, Refusal):
        return change
    change = _difference(state, job, options, change)
    spec = replace(job.spec, **changed_fields(change, OF_SPEC))
    after = replace(options, **changed_fields(change, OF_OPTIONS))
    refusal = (
        _forbidden(actor, job, options, change)
        or _spec_fault(state, job, change)
        or check_asked(after.licenses, after.nice)
    )
    if refusal is None and any(getattr(change, field) is not None for field in _WAITS):
        refusal = _circle(state, job, spec, after)
    if refusal is not None:
        return refusal
    check_plain_options(after)
    if any(getattr(change, field) is not None for field in _ADMITTED):
        refusal = readmission_refusal(state, spec.user, after, jobs if change.qos else 0)
        if refusal is not None:
            return refusal
    if change.partition is not None:
        partition = chosen_partition(state.partitions, change.partition, spec.user, after.account)
        if isinstance(partition, Refusal):
            return partition
        change, after = replace(change, partition=partition), replace(after, partition=partition)
    asked = _request_changed(state, actor, job, spec, after, command)
    if isinstance(asked, Refusal):
        return asked
    pool, granted = (asked.pool, asked.granted_bytes) if asked is not None else _held(state, job)
    if change != NO_CHANGE or asked is not None:
        refusal = limits_refusal(state, e.JobSubmitted(job.id, spec, None, pool, granted), after)
        if refusal is not None:
            return refusal
    updates: Events = (e.JobUpdated(job.id, change),) if change != NO_CHANGE else ()
    return (*updates, asked) if asked is not None else updates


def _held(state: Facts, job: Job) -> tuple[str, int]:
    buffer = state.buffers.get(job.id)
    # What it holds already was allowed (`quotas.class_gate`).
    return ("", 0) if buffer is None or buffer.held_bytes else (buffer.pool, buffer.granted_bytes)


def _resolved(state: Facts, job: Job, options: JobOptions, command: c.UpdateJob) -> JobChange | Refusal:
    """Return the change with its dependencies on arrays and their tasks resolved."""
    change = command.change
    if change.dependencies is None and not command.after_tasks:
        return change
    spec = replace(job.spec, dependencies=change.dependencies or ())
    resolved = with_arrays(state, c.SubmitJob(spec, None, after_tasks=command.after_tasks))
    if isinstance(resolved, Refusal):
        return resolved
    singleton = bool(change.singleton)
    conditions = len(resolved.spec.dependencies) + singleton
    any_of = bool(change.any_of) and conditions > 1
    return replace(change, dependencies=resolved.spec.dependencies, singleton=singleton, any_of=any_of)


def _difference(state: Facts, job: Job, options: JobOptions, change: JobChange) -> JobChange:
    """Return what of the change is not so already."""
    same: dict[str, None] = {}
    for field in OF_SPEC:
        present = job.priority if field == "priority" else getattr(job.spec, field)
        if getattr(change, field) == present:
            same[field] = None
    for field in OF_OPTIONS:
        if getattr(change, field) == getattr(options, field):
            same[field] = None
    if change.any_of == state.terms.get(job.id, NO_TERMS).any_of:
        same["any_of"] = None
    return replace(change, **same)


def _forbidden(actor: c.Actor, job: Job, options: JobOptions, change: JobChange) -> Refusal | None:
    """Return what of the change only an operator may do, or None."""
    if actor.role is c.ActorRole.OPERATOR:
        return None
    if change.time_limit_s is not None and change.time_limit_s > job.spec.time_limit_s:
        return _denied("time_limit_s", "only an operator may raise the time limit of a job")
    if change.priority is not None and change.priority > job.priority:
        return _denied("priority", "only an operator may raise the priority of a job")
    if change.nice is not None and change.nice < min(0, options.nice):
        return _denied("nice", "only an operator may set a negative nice value")
    return None


def _denied(place: str, sentence: str) -> Refusal:
    return Refusal(RefusalCode.PERMISSION_DENIED, sentence, "ask an operator", place)


def _spec_fault(state: Facts, job: Job, change: JobChange) -> Refusal | None:
    fault = name_fault(change.name) if change.name is not None else None
    if fault is not None:
        return Refusal(RefusalCode.INVALID_FIELD, f"the name {fault}", "choose another", "name")
    for field, number, least, most in (
        ("time_limit_s", change.time_limit_s, 1, TIME_LIMIT_S_MAX),
        ("priority", change.priority, 0, PRIORITY_MAX),
    ):
        if number is not None and not least <= number <= most:
            sentence = f"{field} is {number}"
            return Refusal(RefusalCode.INVALID_FIELD, sentence, f"use a number from {least} to {most}", field)
    if change.dependencies:
        check_dependencies(state, change.dependencies)
    return None


def _circle(state: Facts, job: Job, spec: JobSpec, options: JobOptions) -> Refusal | None:
    """Return why a job cannot be as it would be: it would wait for itself, directly or by way of others."""
    seen: set[int] = set()
    waiting = list(_awaited(state, job.id, spec, options, job.id, spec))
    while waiting:
        other = waiting.pop()
        if other == job.id:
            sentence = f"job {job.id} would wait for itself, directly or by way of others"
            return Refusal(RefusalCode.WRONG_STATE, sentence, "leave that dependency out", "dependencies")
        if other in seen:
            continue
        seen.add(other)
        if len(seen) > DEPENDENCY_CHAIN_MAX:
            sentence = f"the job would wait, by way of others, for more than {DEPENDENCY_CHAIN_MAX} jobs"
            return Refusal(RefusalCode.LIMIT_EXCEEDED, sentence, "depend on fewer", "dependencies")
        known = state.jobs[other].spec
        waiting.extend(_awaited(state, other, known, state.options.get(other, NO_OPTIONS), job.id, spec))
    return None


def _awaited(
    state: Facts, job_id: int, spec: JobSpec, options: JobOptions, changed: int, changed_spec: JobSpec
) -> Iterator[int]:
    """Yield the pending jobs that a job waits for; `changed` counts as having `changed_spec`."""
    for dependency in spec.dependencies:
        for other in depended_on(state, dependency):
            job = state.jobs.get(other)
            if job is not None and job.state is JobState.PENDING:
                yield other
    if not options.singleton:
        return
    names = state.named.get(spec.user)
    group = None if names is None else names.get(spec.name)
    # One more than is looked at says as much as all of them.
    members = () if group is None else islice(members_of(group), DEPENDENCY_CHAIN_MAX + 1)
    for other in members:
        if other < job_id and other != changed and state.jobs[other].state is JobState.PENDING:
            yield other
    if changed < job_id and (changed_spec.user, changed_spec.name) == (spec.user, spec.name):
        yield changed


def _request_changed(
    state: Facts, actor: c.Actor, job: Job, spec: JobSpec, options: JobOptions, command: c.UpdateJob
) -> e.BufferRequestChanged | Refusal | None:
    """Return the event that another burst-buffer request leads to; None where none is asked for."""
    if command.request is None:
        return None
    if state.site.provider != NATIVE:
        # Its script says what the provider does, and that does not change.
        sentence = "Requested operation not supported on this system"
        return Refusal(RefusalCode.WRONG_STATE, sentence, "cancel the job, and submit it again", "--bb")
    buffer = state.buffers.get(job.id)
    if options.array_job:
        sentence = "the tasks of an array share what they ask of burst buffers"
        return Refusal(RefusalCode.WRONG_STATE, sentence, "cancel the array, and submit it again", "--bb")
    if buffer is not None and buffer.state is not BufferState.PENDING:
        sentence = f"the buffer of job {job.id} is {buffer.state.word}: what it asks for can no longer be changed"
        return Refusal(RefusalCode.WRONG_STATE, sentence, "requeue the job first, which takes its buffer back", "--bb")
    submit = c.SubmitJob(spec, command.request, options=replace(options, buffer=command.buffer))
    decided = with_options_decided(state, actor, submit)
    if isinstance(decided, Refusal):
        return decided
    asked = decided.options.buffer
    if asked is not None and (asked.creates or asked.destroys or asked.uses or asked.lists):
        sentence = "persistent buffers and lists (type=list) cannot be asked for of a job that is there already"
        return Refusal(RefusalCode.INVALID_DIRECTIVE, sentence, "submit a job for it", "--bb")
    request, pool, granted = request_decided(state, spec, command.request, job.id, decided.options)
    same = buffer is not None and buffer.request == request and (buffer.pool, buffer.granted_bytes) == (pool, granted)
    return None if same else e.BufferRequestChanged(job.id, request, pool, granted, asked)
