"""Folding what came with feature level 4 for scheduling: partitions, consumption, and changes of waiting jobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import replace

from replica.messages import events as e
from replica.model import usage
from replica.model.buffers import Buffer, BufferState
from replica.model.job_options import NO_OPTIONS, NO_TERMS, OF_OPTIONS, OF_SPEC, JobOptions, JobTerms, changed_fields
from replica.model.jobs import Job, JobState
from replica.state.draft import Draft
from replica.state.interning import shared_options, shared_request, shared_spec
from replica.values.errors import LedgerViolation
from replica.values.units import NEVER, Instant


def _partition_set(draft: Draft, event: e.PartitionSet) -> None:
    draft.partitions = draft.partitions.set(event.partition.name, event.partition)


def _partition_deleted(draft: Draft, event: e.PartitionDeleted) -> None:
    if event.partition not in draft.partitions:
        raise LedgerViolation(f"an event is about partition {event.partition!r}, which does not exist")
    draft.partitions = draft.partitions.delete(event.partition)


def _usage_reset(draft: Draft, event: e.UsageReset) -> None:
    draft.consumed = usage.without(draft.consumed, event.whose, event.name)


def _job_terms_given(draft: Draft, event: e.JobTermsGiven) -> None:
    for job_id in range(event.job, event.job + event.tasks):
        _give_terms(draft, draft.job(job_id).id, event.terms)


def _give_terms(draft: Draft, job_id: int, terms: JobTerms) -> None:
    if terms != NO_TERMS:
        draft.terms[job_id] = terms
    elif job_id in draft.terms:
        del draft.terms[job_id]


def _waiting(draft: Draft, job_id: int) -> Job:
    job = draft.job(job_id)
    if job.state is not JobState.PENDING:
        raise LedgerViolation(f"job {job_id} was changed though it does not wait")
    return job


def _job_updated(draft: Draft, event: e.JobUpdated) -> None:
    job, change, at = _waiting(draft, event.job), event.change, Instant(draft.at)
    of_spec = changed_fields(change, OF_SPEC)
    if of_spec:
        spec = shared_spec(replace(job.spec, **of_spec))
        if change.name is not None:
            draft.rename(job, spec.name)
        changed = replace(job, spec=spec, priority=job.priority if change.priority is None else change.priority)
        if change.begin_at is not None:
            changed = replace(changed, eligible_at=at if change.begin_at <= at else NEVER)
        if change.deadline is not None or change.time_limit_s is not None:
            changed = replace(changed, late=False)  # whether it still is, the next pass says
        draft.put(changed, draft.buffers.get(job.id))
    of_options = changed_fields(change, OF_OPTIONS)
    if of_options:
        _give_options(draft, job.id, replace(draft.options.get(job.id, NO_OPTIONS), **of_options))
    if change.any_of is not None:
        _give_terms(draft, job.id, replace(draft.terms.get(job.id, NO_TERMS), any_of=change.any_of))


def _give_options(draft: Draft, job_id: int, options: JobOptions) -> None:
    draft.give_options(job_id, shared_options(options))
    if options == NO_OPTIONS:
        del draft.options[job_id]


def _buffer_request_changed(draft: Draft, event: e.BufferRequestChanged) -> None:
    job, at = _waiting(draft, event.job), Instant(draft.at)
    before = draft.buffers.get(job.id)
    if before is not None and before.state is not BufferState.PENDING:
        raise LedgerViolation(f"the request of job {job.id} was changed though its buffer is {before.state.word}")
    buffer = Buffer(
        job=job.id,
        user=job.spec.user,
        state=BufferState.PENDING,
        request=shared_request(event.request),
        pool=event.pool,
        granted_bytes=event.granted_bytes,
        created_at=at,
        changed_at=at,
    )
    draft.put(job if job.has_buffer else replace(job, has_buffer=True), buffer)
    options = draft.options.get(job.id, NO_OPTIONS)
    if options.buffer != event.options:
        _give_options(draft, job.id, replace(options, buffer=event.options))


CHANGE_FOLDS: Mapping[type, Callable[[Draft, Any], None]] = {
    e.PartitionSet: _partition_set,
    e.PartitionDeleted: _partition_deleted,
    e.UsageReset: _usage_reset,
    e.JobTermsGiven: _job_terms_given,
    e.JobUpdated: _job_updated,
    e.BufferRequestChanged: _buffer_request_changed,
}
"""What each event does; `replica.fold` has them all."""
