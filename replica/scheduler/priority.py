"""Scheduling order (SPUR.md): active reservations first, then effective priority, then job ID."""

from __future__ import annotations

from forebay.replica.model import Buffer, Job
from forebay.replica.state import Facts

RESERVED_FIRST = 2**60
"""Priority bonus that puts jobs of active reservations first; larger than any effective priority."""

GIB_BYTES = 1024**3


def effective_priority(state: Facts, job: Job, buffer: Buffer | None) -> int:
    """Return the job's priority minus its nice value, plus the priority of its QOS and the points for its size.

    Slurm weighs the size as a share of the total. Here, points per GiB are used, so that resizing a pool does not
    reorder jobs.
    """
    priority = job.request.priority
    options = job.request.options
    if options is not None:
        priority -= options.nice
        qos = state.qos.get(options.qos) if options.qos else None
        if qos is not None:
            priority += qos.priority
    if buffer is not None and buffer.granted_bytes and state.scheduling_rules.size_points_per_gib:
        priority += state.scheduling_rules.size_points_per_gib * (buffer.granted_bytes // GIB_BYTES)
    return priority


def order_of(state: Facts, job: Job, buffer: Buffer | None) -> int:
    """Return the sort key of a job, smallest first; jobs with equal keys are sorted by ID."""
    options = job.request.options
    if options is not None and options.reservation:
        reservation = state.reservations.get(options.reservation)
        if reservation is not None and reservation.active:
            return -effective_priority(state, job, buffer) - RESERVED_FIRST
    return -effective_priority(state, job, buffer)
