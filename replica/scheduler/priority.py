"""In which order jobs get space and CPUs: active reservations first, then effective priority, then number (SPUR.md)."""

from __future__ import annotations

from replica.model import Buffer, Job
from replica.state import Facts

RESERVED_FIRST = 2**60
"""Priority bonus that puts jobs of active reservations first; larger than any effective priority."""

GIB_BYTES = 1024**3


def effective_priority(state: Facts, job: Job, buffer: Buffer | None) -> int:
    """Return the job's priority minus its nice value, plus the weights of its QOS and of its size.

    Slurm weighs the size as a share of the total. Here it is points for each GiB, so resizing a pool reorders no jobs.
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
    """Return what jobs are sorted by, smallest first, before their number."""
    options = job.request.options
    if options is not None and options.reservation:
        reservation = state.reservations.get(options.reservation)
        if reservation is not None and reservation.active:
            return -effective_priority(state, job, buffer) - RESERVED_FIRST
    return -effective_priority(state, job, buffer)
