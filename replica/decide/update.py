"""Decide updates of pending jobs, as `scontrol update` permits them, and check permissions.

Users may lower the time limit and the priority of their jobs; only operators may raise them or set a nice value below
0. Changed fields are validated as at submit; an unchanged value is no change. Source: Slurm's manual page of scontrol.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from msgspec.structs import replace

from forebay.replica.decide.accounts import check_admission, check_limits
from forebay.replica.decide.arrays import resolve_dependencies
from forebay.replica.decide.buffer_request import check_buffer_user, resolve_buffer, resolve_space
from forebay.replica.decide.checks import (
    RejectionError,
    check_dependencies,
    check_name,
    check_number,
    check_options,
    check_unprivileged,
    permission_denied,
    require,
)
from forebay.replica.messages import commands as c
from forebay.replica.messages import events as e
from forebay.replica.model import (
    NATIVE,
    NO_CHANGE,
    BufferRequest,
    BufferState,
    Job,
    JobChange,
    JobRequest,
    JobState,
    apply_change,
    check_licenses_and_nice,
    choose_partition,
    effective_change,
    group_members,
    with_options,
)
from forebay.replica.scheduler import dependency_jobs
from forebay.replica.state import Facts
from forebay.replica.values import DEPENDENCY_CHAIN_MAX, Rejection, RejectionCode

Events = tuple[e.Event, ...]

_ACCOUNTING_FIELDS = ("account", "qos", "licenses", "reservation")
"""Fields that require a new admission check if they change."""

_WAIT_FIELDS = ("dependencies", "singleton", "name")
"""Fields whose change may create a dependency cycle."""


def update_job(state: Facts, actor: c.Actor, job: Job, command: c.UpdateJob, jobs: int) -> Events | Rejection:
    """Return the events that change one job. `jobs` is the number of jobs changed alike by the same command."""
    if job.state is not JobState.PENDING:
        sentence = f"job {job.id} is {job.state.name}"
        return Rejection(RejectionCode.WRONG_STATE, sentence, "only pending jobs can be changed", "job")
    try:
        return _update_job(state, actor, job, command, jobs)
    except RejectionError as error:
        return error.rejection


def _update_job(state: Facts, actor: c.Actor, job: Job, command: c.UpdateJob, jobs: int) -> Events:
    change = effective_change(job.request, _resolve_change(state, command))
    after = apply_change(job.request, change)
    options = after.effective_options
    _check_permitted(actor, job.request, change)
    _check_change(state, change)
    require(check_licenses_and_nice(options.licenses, options.nice))
    if any(getattr(change, field) is not None for field in _WAIT_FIELDS):
        check_dependency_cycle(state, job, after)
    check_options(options)
    if any(getattr(change, field) is not None for field in _ACCOUNTING_FIELDS):
        check_admission(state, after.user, options, jobs if change.qos else 0)
    if change.partition is not None:
        partition = require(choose_partition(state.partitions, change.partition, after.user, options.account))
        change, after = replace(change, partition=partition), with_options(after, replace(options, partition=partition))
    asked = _resolve_new_buffer(state, actor, job, after, command)
    if change == NO_CHANGE and asked is None:
        return ()
    buffer, pool, granted = (None, *_requested_space(state, job)) if asked is None else asked
    check_limits(state, after, pool, granted)
    return (e.JobUpdated(job.id, change) if asked is None else e.JobUpdated(job.id, change, buffer, pool, granted),)


def _requested_space(state: Facts, job: Job) -> tuple[str, int]:
    buffer = state.buffers.get(job.id)
    # Space that the job already holds was admitted before (`quotas.class_gate`).
    return ("", 0) if buffer is None or buffer.held_bytes else (buffer.pool, buffer.granted_bytes)


def _resolve_change(state: Facts, command: c.UpdateJob) -> JobChange:
    """Return the change with its dependencies on arrays and their tasks resolved."""
    change = command.change
    if change.dependencies is None and not command.after_tasks:
        return change
    dependencies = resolve_dependencies(state, change.dependencies or (), command.after_tasks)
    singleton = bool(change.singleton)
    any_of = bool(change.any_of) and len(dependencies) + singleton > 1
    return replace(change, dependencies=dependencies, singleton=singleton, any_of=any_of)


def _check_permitted(actor: c.Actor, request: JobRequest, change: JobChange) -> None:
    """Check that the actor may make this change.

    Raises:
        RejectionError: Only an operator may.
    """
    if actor.role is c.ActorRole.OPERATOR:
        return
    if change.time_limit_s is not None and change.time_limit_s > request.time_limit_s:
        raise permission_denied("time_limit_s", "raising a job's time limit requires the operator role")
    priority = request.priority if change.priority is None else change.priority
    nice = request.effective_options.nice if change.nice is None else change.nice
    check_unprivileged(priority, request.priority, nice, request.effective_options.nice)


def _check_change(state: Facts, change: JobChange) -> None:
    if change.name is not None:
        check_name("name", change.name)
    if change.time_limit_s is not None:
        check_number("time_limit_s", change.time_limit_s)
    if change.priority is not None:
        check_number("priority", change.priority)
    if change.dependencies:
        check_dependencies(state, change.dependencies)


def check_dependency_cycle(state: Facts, job: Job, after: JobRequest) -> None:
    """Check that a changed job would not wait for itself, directly or through other jobs.

    Raises:
        RejectionError: It would, or its chain of dependencies is too long to check.
    """
    seen: set[int] = set()
    waiting = [(job.id, after)]
    while waiting:
        for other in _awaited_jobs(state, *waiting.pop(), job.id, after):
            if other == job.id:
                sentence = f"job {job.id} would wait for itself, directly or through other jobs"
                raise RejectionError(RejectionCode.WRONG_STATE, sentence, "remove this dependency", "dependencies")
            if other in seen:
                continue
            seen.add(other)
            if len(seen) > DEPENDENCY_CHAIN_MAX:
                sentence = (
                    f"job {job.id} would wait for more than {DEPENDENCY_CHAIN_MAX} jobs, directly or through other jobs"
                )
                raise RejectionError(RejectionCode.LIMIT_EXCEEDED, sentence, "depend on fewer", "dependencies")
            waiting.append((other, state.jobs[other].request))


def _awaited_jobs(
    state: Facts, job_id: int, request: JobRequest, changed: int, changed_request: JobRequest
) -> Iterator[int]:
    """Yield the pending jobs that a job waits for.

    `changed` counts as pending, with the request `changed_request`.
    """
    for dependency in request.dependencies:
        for other in dependency_jobs(state, dependency):
            job = state.jobs.get(other)
            if job is not None and (job.state is JobState.PENDING or other == changed):
                yield other
    if not request.effective_options.singleton:
        return
    names = state.named.get(request.user)
    group = None if names is None else names.get(request.name)
    # One more than the limit is enough for the caller to reject the change.
    members = () if group is None else islice(group_members(group), DEPENDENCY_CHAIN_MAX + 1)
    for other in members:
        if other < job_id and other != changed and state.jobs[other].state is JobState.PENDING:
            yield other
    if changed < job_id and (changed_request.user, changed_request.name) == (request.user, request.name):
        yield changed


def _resolve_new_buffer(
    state: Facts, actor: c.Actor, job: Job, after: JobRequest, command: c.UpdateJob
) -> tuple[BufferRequest, str, int] | None:
    """Return the new buffer request of the job with its pool and space, or None if it does not change.

    Raises:
        RejectionError: The buffer can no longer be changed, or the request is invalid.
    """
    if command.buffer is None:
        return None
    if state.site.provider != NATIVE:
        # Other providers read the job's script, which cannot be changed.
        sentence = "Requested operation not supported on this system"
        raise RejectionError(RejectionCode.WRONG_STATE, sentence, "cancel the job, and submit it again", "--bb")
    buffer = state.buffers.get(job.id)
    if after.array is not None:
        sentence = "the buffer request of an array cannot be changed, because its tasks share it"
        raise RejectionError(RejectionCode.WRONG_STATE, sentence, "cancel the array, and submit it again", "--bb")
    if buffer is not None and buffer.state is not BufferState.PENDING:
        sentence = f"the buffer of job {job.id} is {buffer.state.word}, so its request cannot be changed"
        raise RejectionError(
            RejectionCode.WRONG_STATE, sentence, "requeue the job first, which revokes its buffer", "--bb"
        )
    asked = resolve_buffer(state, actor, replace(after, buffer=command.buffer), of_array=False).buffer
    assert asked is not None  # resolving keeps the request
    if asked.creates or asked.destroys or asked.uses or asked.lists:
        sentence = "persistent buffers and lists (type=list) cannot be added to an existing job"
        raise RejectionError(RejectionCode.INVALID_DIRECTIVE, sentence, "submit another job", "--bb")
    check_buffer_user(state, after.user)
    asked, pool, granted = resolve_space(state, after, asked, job.id)
    same = buffer is not None and job.request.buffer == asked and (buffer.pool, buffer.granted_bytes) == (pool, granted)
    return None if same else (asked, pool, granted)
