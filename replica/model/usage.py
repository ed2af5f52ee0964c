"""Usage that counts towards limits, licences and reservations: an index derived by `fold`.

A job counts as submitted until it has finished. Its nodes, CPUs and licences count from the run order to the end of
post-run, its space while its buffer holds it. Staging takes only space (SPUR.md, 4). A suspended job keeps counting,
but its CPUs are free for others meanwhile (`takes_cpus`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import immutables

from forebay.replica.model.buffers import Buffer, BufferState
from forebay.replica.model.job_states import ENDED, JobState
from forebay.replica.model.jobs import ExternalJobStep, Job
from forebay.replica.model.requests import JobRequest
from forebay.replica.values import CONSUMED_MAX, MICROSECONDS_PER_SECOND, SIZE_BYTES_MAX

UsageKey = tuple[str, str, str, str, str]
"""(resource, holder kind, holder name, user, pool).

The holder kind is a (account), q (QOS), qa (account in a QOS), l (licence) or r (reservation); for qa the user field
has the account. An empty user or pool stands for all.
"""

SECONDS_PER_MINUTE = 60

_ON_CPUS = frozenset({JobState.CONFIGURING, JobState.RUNNING})


class SchedulingClass(NamedTuple):
    """Jobs to which the same limits apply; returned by `scheduling_class_of`."""

    user: str
    account: str
    qos: str
    licenses: tuple[tuple[str, int], ...]
    reservation: str
    nodes: int
    partition: str = ""

    @property
    def limits_runs(self) -> bool:
        """Return whether a limit or licence may block jobs of this class but not those behind them."""
        return bool(self.account or self.qos or self.licenses)


def scheduling_class_of(request: JobRequest) -> SchedulingClass | None:
    """Return the job's scheduling class; None without account, QOS, licences, reservation and partition."""
    options = request.options
    if options is None:
        return None
    account, qos, partition = options.account, options.qos, options.partition
    if not (account or qos or options.licenses or options.reservation or partition):
        return None
    return SchedulingClass(request.user, account, qos, options.licenses, options.reservation, options.nodes, partition)


def takes_cpus(job: Job, buffer: Buffer | None) -> bool:
    """Return whether the job occupies CPUs of its node: from the run order to the end of post-run, unless suspended.

    As in Slurm, a resumed job takes them at once, even if other jobs use them by then.
    """
    on_node = job.state in _ON_CPUS or (buffer is not None and buffer.state is BufferState.POST_RUN)
    return on_node and job.external_job is None


def is_running(job: Job, buffer: Buffer | None) -> bool:
    """Return whether the job counts as running, which includes suspension."""
    return (job.state is JobState.SUSPENDED and job.external_job is None) or takes_cpus(job, buffer)


def minutes_of(time_limit_s: int) -> int:
    """Return a time limit in minutes, rounded up, as limits count it."""
    return -(-time_limit_s // SECONDS_PER_MINUTE)


def submitted_usage(scheduling_class: SchedulingClass) -> Iterator[tuple[UsageKey, int]]:
    """Yield the usage of a job until it has finished."""
    if scheduling_class.qos:
        yield ("submitted", "q", scheduling_class.qos, scheduling_class.user, ""), 1


def running_usage(scheduling_class: SchedulingClass, cpus: int) -> Iterator[tuple[UsageKey, int]]:
    """Yield the usage of a running job."""
    user, account, qos, nodes = (
        scheduling_class.user,
        scheduling_class.account,
        scheduling_class.qos,
        scheduling_class.nodes,
    )
    if account:
        yield ("jobs", "a", account, user, ""), 1
        yield ("nodes", "a", account, "", ""), nodes
        yield ("nodes", "a", account, user, ""), nodes
    if qos:
        yield ("jobs", "q", qos, user, ""), 1
        yield ("nodes", "q", qos, "", ""), nodes
        yield ("cpus", "q", qos, "", ""), cpus
    for name, count in scheduling_class.licenses:
        yield ("licenses", "l", name, "", ""), count


def holding_usage(
    scheduling_class: SchedulingClass, pool: str, size_bytes: int, time_limit_s: int
) -> Iterator[tuple[UsageKey, int]]:
    """Yield the usage of a job that holds space."""
    user, account, qos = scheduling_class.user, scheduling_class.account, scheduling_class.qos
    if scheduling_class.reservation:
        yield ("bb", "r", scheduling_class.reservation, "", pool), size_bytes
    if not account and not qos:
        return
    minutes = size_bytes * minutes_of(time_limit_s)
    for name in (pool, ""):
        if account:
            yield ("bb", "a", account, "", name), size_bytes
            yield ("bb", "a", account, user, name), size_bytes
            yield ("minutes", "a", account, "", name), minutes
            yield ("minutes", "a", account, user, name), minutes
        if qos:
            yield ("bb", "q", qos, "", name), size_bytes
            yield ("bb", "q", qos, user, name), size_bytes
            yield ("bb", "qa", qos, account, name), size_bytes
            yield ("minutes", "q", qos, "", name), minutes


def usage_of(job: Job, buffer: Buffer | None) -> dict[UsageKey, int]:
    """Return the present usage of a job."""
    scheduling_class = scheduling_class_of(job.request)
    found: dict[UsageKey, int] = {}
    if scheduling_class is None:
        return found
    if job.external_job is not None:
        # Only its space counts here, and not while it lingers, because any job may take it then.
        if buffer is not None and buffer.held_bytes and job.external_job.step is not ExternalJobStep.LINGERING:
            found.update(holding_usage(scheduling_class, buffer.pool, buffer.held_bytes, job.request.time_limit_s))
        return {key: amount for key, amount in found.items() if amount}
    if job.state not in ENDED:
        found.update(submitted_usage(scheduling_class))
    if is_running(job, buffer):
        found.update(running_usage(scheduling_class, job.request.cpus))
    if buffer is not None and buffer.held_bytes:
        found.update(holding_usage(scheduling_class, buffer.pool, buffer.held_bytes, job.request.time_limit_s))
    return {key: amount for key, amount in found.items() if amount}


# ---- consumption of accounts, their users and QOS: space times holding time


Consumed = immutables.Map[str, int]
"""`consumption_key` -> bytes (or units of the pool) times minutes, capped at SIZE_BYTES_MAX."""

MICROSECONDS_PER_MINUTE = SECONDS_PER_MINUTE * MICROSECONDS_PER_SECOND


def consumption_key(whose: str, name: str, user: str, pool: str) -> str:
    """Return the key of the consumption of an account (`a`) or a QOS (`q`).

    An empty user or pool stands for all. Names contain no slash.
    """
    return f"{whose}/{name}/{user}/{pool}"


def consumption_keys(scheduling_class: SchedulingClass, pool: str) -> Iterator[str]:
    """Yield the keys under which a job's buffer is recorded."""
    for name in (pool, ""):
        if scheduling_class.account:
            yield consumption_key("a", scheduling_class.account, "", name)
            yield consumption_key("a", scheduling_class.account, scheduling_class.user, name)
        if scheduling_class.qos:
            yield consumption_key("q", scheduling_class.qos, "", name)


def record_consumption(consumed: Consumed, scheduling_class: SchedulingClass, buffer: Buffer, at: int) -> Consumed:
    """Return the records with the consumption of a buffer added that released its space at `at`."""
    held_us = max(0, at - buffer.created_at)
    minutes = buffer.held_bytes * held_us // MICROSECONDS_PER_MINUTE
    if not minutes:
        return consumed
    for key in consumption_keys(scheduling_class, buffer.pool):
        used = consumed.get(key)
        if used is not None or len(consumed) < CONSUMED_MAX:
            consumed = consumed.set(key, min(SIZE_BYTES_MAX, (used or 0) + minutes))
    return consumed


def remove_consumption(consumed: Consumed, whose: str, name: str) -> Consumed:
    """Return the records without those of an account or QOS."""
    prefix = f"{whose}/{name}/"
    for key in [key for key in consumed if key.startswith(prefix)]:
        consumed = consumed.delete(key)
    return consumed
