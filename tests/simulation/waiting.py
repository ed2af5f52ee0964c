"""Random requests about pending jobs: partitions, updates, alternative dependencies, and usage limits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from forebay.replica.messages import commands as c
from forebay.replica.model.accounts import Limit, LimitKind, Qos
from forebay.replica.model.buffers import Access
from forebay.replica.model.job_states import JobState
from forebay.replica.model.jobs import Hold
from forebay.replica.model.partitions import Partition, PartitionState
from forebay.replica.model.requests import (
    BufferRequest,
    Dependency,
    DependencyKind,
    JobChange,
    JobOptions,
    with_options,
)
from forebay.replica.values.units import NEVER, Instant

if TYPE_CHECKING:
    from tests.simulation.clients import SimClient

GRAIN_BYTES = 1 << 20
QOS = "shared"
NAMES = ("batch", "debug")
"""The partitions that there may be."""


def idea(client: SimClient) -> c.Request:
    """Return a random request."""
    rng, state = client.rng, client.world.oracle.state
    draw = rng.random()
    if draw < 0.10 and state.partitions:
        return client.request(c.DeletePartition(rng.choice(sorted(state.partitions))), operator=True)
    if draw < 0.16 and state.consumed:
        return client.request(c.ResetUsage("q", QOS), operator=True)
    if draw < 0.22:
        return client.request(c.SetPartition(_partition(client)), operator=True)
    if draw < 0.26 or QOS not in state.qos:
        limit = Limit(LimitKind.GRP_BB_MINUTES, "native", rng.choice((5, 50, 5_000)) * GRAIN_BYTES)
        return client.request(c.SetQos(Qos(QOS, limits=(limit,))), operator=True)
    if draw < 0.45 or not client.jobs:
        return client.request(_submission(client))
    waiting = [job for job in client.jobs if job in state.jobs and state.jobs[job].state is JobState.PENDING]
    return client.request(_change(client, rng.choice(waiting or client.jobs[-4:])), operator=rng.random() < 0.6)


def _partition(client: SimClient) -> Partition:
    """Return a partition; most let jobs start, so that somebody comes to an end."""
    rng, nodes = client.rng, sorted(client.world.nodes)
    every = rng.random() < 0.3
    return Partition(
        rng.choice(NAMES),
        nodes=() if every else tuple(nodes[: rng.randrange(1, len(nodes) + 1)]),
        every_node=every,
        state=rng.choice((PartitionState.UP,) * 6 + tuple(PartitionState)),
        is_default=rng.random() < 0.2,
        max_time_s=rng.choice((0, 0, 0, 30)),
    )


def _others(client: SimClient) -> tuple[Dependency, ...]:
    rng = client.rng
    kinds = (DependencyKind.AFTER_ANY, DependencyKind.AFTER_OK, DependencyKind.AFTER)
    return tuple(Dependency(rng.choice(kinds), job) for job in client.jobs[-rng.randrange(1, 3) :])


def _submission(client: SimClient) -> c.SubmitJob:
    rng = client.rng
    partition, qos = rng.choice(("", *NAMES)), QOS if rng.random() < 0.5 else ""
    dependencies = _others(client) if client.jobs and rng.random() < 0.5 else ()
    made = client.submission()
    # Some are held, so that there is time to change them.
    hold = Hold.USER if rng.random() < 0.3 else made.hold
    options = JobOptions(partition=partition, qos=qos, any_of=rng.random() < 0.7)
    return replace(made, request=with_options(replace(made.request, dependencies=dependencies), options), hold=hold)


def _change(client: SimClient, job: int) -> c.UpdateJob:
    rng, at = client.rng, client.world.oracle.state.at
    if rng.random() < 0.3:
        request = BufferRequest(
            pool="", capacity_bytes=rng.randrange(1, 4) * GRAIN_BYTES, access=(Access.STRIPED,), type="scratch",
            stage_in=(), stage_out=(), text="capacity",
        )  # fmt: skip
        return c.UpdateJob(job, buffer=request)
    change = JobChange(
        time_limit_s=rng.choice((None, 20, 60)),
        priority=rng.choice((None, 0, 3)),
        begin_at=rng.choice((None, NEVER, Instant(at + 500_000))),
        dependencies=rng.choice((None, (), _others(client))),
        any_of=rng.choice((None, True, False)),
        qos=rng.choice((None, "", QOS)),
        partition=rng.choice((None, "", *NAMES)),
        comment=rng.choice((None, "changed")),
    )
    return c.UpdateJob(job, change)
