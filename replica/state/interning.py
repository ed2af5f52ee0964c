"""Interning of equal values: 100,000 jobs share few users, directories, requests and scripts.

Values are frozen, so interning affects only memory. Caches of bounded size hold recent values.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from msgspec.structs import replace

from forebay.replica.messages import CachedReply
from forebay.replica.model import Buffer, BufferRequest, Job, JobRequest, Transfer

TEXTS_REMEMBERED = 4_096
"""Cached short texts (users, directories, names), count: a megabyte at most; more than a site's active users."""

SCRIPTS_REMEMBERED = 64
"""Cached scripts, count: 16 MiB at most. Users who submit thousands of jobs submit the same script."""

RECORDS_REMEMBERED = 2_048
"""Cached buffer requests, options and environments, count: a few megabytes at most."""


@lru_cache(TEXTS_REMEMBERED)
def _text(text: str) -> str:
    return text


@lru_cache(SCRIPTS_REMEMBERED)
def _script(script: str) -> str:
    return script


@lru_cache(RECORDS_REMEMBERED)
def _record(record: Any) -> Any:
    return record


def intern_request(request: JobRequest) -> JobRequest:
    """Return an equal request made of interned values."""
    return replace(
        request,
        name=_text(request.name),
        user=_text(request.user),
        script=_script(request.script),
        workdir=_text(request.workdir),
        environment=_record(request.environment) if request.environment else (),
        buffer=None if request.buffer is None else intern_buffer_request(request.buffer),
        options=None if request.options is None else _record(request.options),
    )


@lru_cache(RECORDS_REMEMBERED)
def intern_buffer_request(request: BufferRequest) -> BufferRequest:
    """Return an equal buffer request, the cached one if there is one."""
    return replace(
        request,
        pool=_text(request.pool),
        access=_record(request.access),
        type=_text(request.type),
        stage_in=_transfers(request.stage_in),
        stage_out=_transfers(request.stage_out),
        places=_record(request.places),
    )


def _transfers(transfers: tuple[Transfer, ...]) -> tuple[Transfer, ...]:
    """Return equal transfers with interned inside paths; outside paths mostly differ."""
    return tuple(replace(transfer, inside=_text(transfer.inside)) for transfer in transfers)


def intern_job(job: Job) -> Job:
    """Return an equal job made of interned values, whose equal times are one object, as `fold` makes it."""
    submitted_at = job.submitted_at
    return replace(
        job,
        request=intern_request(job.request),
        message=_text(job.message) if job.message else "",
        comment=_text(job.comment) if job.comment else "",
        node=_text(job.node) if job.node else "",
        mover=_text(job.mover) if job.mover else "",
        eligible_at=submitted_at if job.eligible_at == submitted_at else job.eligible_at,
        held_at=submitted_at if job.held_at == submitted_at else job.held_at,
    )


def intern_buffer(buffer: Buffer, job: Job | None) -> Buffer:
    """Return an equal buffer that shares values with its job and with other buffers."""
    created_at = buffer.created_at
    if job is not None and job.submitted_at == created_at:
        created_at = job.submitted_at
    return replace(
        buffer,
        job=buffer.job if job is None else job.id,
        pool=_text(buffer.pool) if buffer.pool else "",
        node=_text(buffer.node) if buffer.node else "",
        created_at=created_at,
        changed_at=created_at if buffer.changed_at == created_at else buffer.changed_at,
    )


def intern_receipt(receipt: CachedReply) -> CachedReply:
    """Return an equal receipt with an interned actor."""
    return replace(receipt, actor=_record(receipt.actor))
