"""Metrics of jobs, buffers, pools, nodes and transfers.

Labels are states, reasons, stages, pools and nodes, which are bounded. Users and jobs are never labels.
"""

from __future__ import annotations

from collections import Counter as Count
from collections.abc import Iterator, Sequence

import msgspec

from forebay.cluster.api.metrics.families import MetricFamily, gauge, gauges
from forebay.cluster.api.render import Verdicts
from forebay.cluster.server import AgentContacts, Transfer
from forebay.cluster.system.eventloop import RECORDS_PER_SLICE, SlicedWork, iterate_paced
from forebay.replica.model import (
    ACCOUNT_REASONS,
    QOS_REASONS,
    QUEUED_STAGES,
    TRANSFERS,
    Buffer,
    BufferState,
    Job,
    JobState,
    takes_cpus,
)
from forebay.replica.operations import active_rules, waiting_stage
from forebay.replica.state import State
from forebay.replica.values import Reason
from forebay.replica.views import pool_use

PARTS_PER_JOB = 3
"""Slice parts for counting one job: about four microseconds."""

PARTS_PER_REASON = 4
"""Slice parts for the reason of one job."""

PARTS_PER_NODE = 8
"""Slice parts for the figures of one node."""

OTHER_REASON = "other"
"""Label of a free-text reason, such as a message of a site's script."""

_REASONS = frozenset({*Reason, *ACCOUNT_REASONS.values(), *QOS_REASONS.values()})
_BY_PLUGIN = "burst_buffer/"
"""Prefix of reasons that name a failed operation: bounded up to the colon, free text after it."""


def reason_label(reason: str) -> str:
    """Return the label of a reason: itself if it is one of Slurm's fixed words."""
    if reason in _REASONS:
        return reason
    return reason.partition(":")[0] if reason.startswith(_BY_PLUGIN) else OTHER_REASON


class _Queue(msgspec.Struct):
    """Counts from one pass over the unfinished jobs."""

    states: Count[str]
    buffers: Count[str]
    stuck: Count[str]
    waiting: Count[str] = msgspec.field(default_factory=Count)
    """Jobs that wait for space, by pool."""
    waiting_bytes: Count[str] = msgspec.field(default_factory=Count)
    cpus: Count[str] = msgspec.field(default_factory=Count)
    """CPUs in use, by node."""
    held: Count[str] = msgspec.field(default_factory=Count)
    """Space held on a node of its own, by node."""

    def add(self, job: Job, buffer: Buffer | None) -> None:
        self.states[job.state.name] += 1
        if takes_cpus(job, buffer):
            self.cpus[job.node] += job.request.cpus
        if buffer is None:
            return
        self.buffers[buffer.state.word] += 1
        if buffer.held_bytes and buffer.node:
            self.held[buffer.node] += buffer.held_bytes
        if job.stuck:
            stage = waiting_stage(job, buffer)
            if stage is not None:
                self.stuck[stage.word] += 1
        if buffer.state is BufferState.PENDING and job.state is JobState.PENDING and not job.hold:
            self.waiting[buffer.pool] += 1
            self.waiting_bytes[buffer.pool] += buffer.granted_bytes


async def state_families(
    state: State, reports: AgentContacts | None, verdicts: Verdicts, work: SlicedWork
) -> list[MetricFamily]:
    """Return the metrics of a state, built in slices; `reports`: None on a replica that does not lead."""
    queue = _Queue(
        Count(dict.fromkeys((job_state.name for job_state in JobState), 0)),
        Count(dict.fromkeys((buffer_state.word for buffer_state in BufferState), 0)),
        Count(dict.fromkeys((stage.word for stage in QUEUED_STAGES), 0)),
    )
    async for job_id in iterate_paced(state.unfinished, work, parts=PARTS_PER_JOB):
        queue.add(state.jobs[job_id], state.buffers.get(job_id))
    reasons = Count[str]() if reports is None else await _reasons(state, verdicts, work)
    nodes = await _nodes(state, queue, reports, work)
    await work.take(RECORDS_PER_SLICE)
    return [
        *_jobs(state, queue, reasons),
        *_pools(state, queue),
        *nodes,
        *_transfers(state, [] if reports is None else reports.transfers(state)),
        gauge("forebay_cached_replies", "Cached replies to single commands.", len(state.receipts)),
        gauge("forebay_sessions", "Open client sessions.", len(state.sessions)),
        gauge("forebay_session_cached_replies", "Cached replies of client sessions.", len(state.answers)),
    ]


async def _reasons(state: State, verdicts: Verdicts, work: SlicedWork) -> Count[str]:
    """Count the reasons of waiting jobs, as job lists show them."""
    known = await verdicts.verdicts_of(state, state.unfinished, work, reasons=True)
    reasons: Count[str] = Count()
    async for job_id in iterate_paced(state.unfinished, work, parts=PARTS_PER_REASON):
        if state.jobs[job_id].state is JobState.PENDING:
            reasons[reason_label(known.reason(job_id))] += 1
    return reasons


def _jobs(state: State, queue: _Queue, reasons: Count[str]) -> Iterator[MetricFamily]:
    yield gauges("forebay_jobs", "Unfinished jobs by state.", "state", queue.states)
    yield gauges("forebay_jobs_waiting", "Pending jobs by reason; leader only.", "reason", reasons)
    yield gauges(
        "forebay_jobs_stuck",
        "Jobs whose operation failed permanently, by stage; a user or operator must release, clear or cancel them.",
        "stage",
        queue.stuck,
    )
    yield gauges("forebay_buffers", "Buffers of unfinished jobs by state.", "state", queue.buffers)
    yield gauge("forebay_jobs_finished_kept", "Finished jobs kept in the state.", len(state.finished))


def _pools(state: State, queue: _Queue) -> Iterator[MetricFamily]:
    total = gauges("forebay_pool_bytes", "Total capacity of the pool.", "pool")
    free = gauges("forebay_pool_free_bytes", "Free capacity of the pool.", "pool")
    held = gauges("forebay_pool_held_bytes", "Capacity held by buffers of the pool.", "pool")
    out = gauges("forebay_pool_out_of_service_bytes", "Capacity of the pool that is out of service.", "pool")
    buffers = gauges("forebay_pool_buffers", "Buffers that hold space of the pool.", "pool")
    waiting = gauges("forebay_pool_jobs_waiting", "Jobs waiting for space of the pool, without held jobs.", "pool")
    wanted = gauges("forebay_pool_wanted_bytes", "Capacity requested by jobs waiting for space of the pool.", "pool")
    for name in sorted(state.pools):
        use = pool_use(state, name)
        total.add(use.pool.quantity_bytes, name)
        free.add(use.free_bytes, name)
        held.add(use.held_bytes, name)
        out.add(use.pool.out_of_service_bytes, name)
        buffers.add(len(state.holders.get(name, ())), name)
        waiting.add(queue.waiting[name], name)
        wanted.add(queue.waiting_bytes[name], name)
    yield from (total, free, held, out, buffers, waiting, wanted)


async def _nodes(state: State, queue: _Queue, reports: AgentContacts | None, work: SlicedWork) -> list[MetricFamily]:
    states: Count[str] = Count()
    up = gauges("forebay_node_up", "1 if the node's agent responds, 0 if the node is DOWN.", "node")
    drained = gauges("forebay_node_drained", "1 if the node is drained.", "node")
    cpus = gauges("forebay_node_cpus", "CPUs of the node.", "node")
    used = gauges("forebay_node_cpus_in_use", "CPUs of the node in use by jobs.", "node")
    jobs = gauges("forebay_node_jobs", "Jobs with a buffer, run or operation on the node.", "node")
    held = gauges("forebay_node_held_bytes", "Space held by buffers on the node.", "node")
    contact = gauges(
        "forebay_node_contact_age_seconds", "Time since the last contact with the node's agent; leader only.", "node"
    )
    for name in await work.sort(state.nodes):
        await work.take(0, parts=PARTS_PER_NODE)
        node = state.nodes[name]
        states[node.state.name] += 1
        up.add(float(not node.down), name)
        drained.add(float(node.drained), name)
        cpus.add(node.cpus, name)
        used.add(queue.cpus[name], name)
        jobs.add(len(state.on_node.get(name, ())), name)
        held.add(queue.held[name], name)
        age_s = None if reports is None else reports.last_contact_s(name)
        if age_s is not None:
            contact.add(age_s, name)
    by_state = gauges("forebay_nodes", "Nodes by state.", "state", states)
    return [by_state, up, drained, cpus, used, jobs, held, contact]


def _transfers(state: State, rows: Sequence[Transfer]) -> Iterator[MetricFamily]:
    """Yield current transfer progress, as reported to the leader."""
    yield gauge("forebay_transfers", "Operations under way, as reported to the leader.", len(rows))
    yield gauge(
        "forebay_transfers_done_bytes", "Bytes moved by operations under way.", sum(row.bytes_done for row in rows)
    )
    yield gauge("forebay_transfers_left_bytes", "Bytes left to move by operations under way.", sum(
        max(0, row.bytes_total - row.bytes_done) for row in rows
    ))  # fmt: skip
    yield gauge(
        "forebay_transfers_rate_bytes_per_second",
        "Total rate of operations under way.",
        sum(row.rate_bytes_s for row in rows),
    )
    yield gauge(
        "forebay_transfers_held_back",
        "Operations under way that are delayed by a rate limit.",
        sum(1 for row in rows if row.waiting),
    )
    turns = gauges(
        "forebay_transfer_turns", "Transfers admitted by the limit on concurrent operations, by stage.", "stage"
    )
    for stage in TRANSFERS:
        turns.add(state.operations.get(stage, 0), stage.word)
    yield turns
    yield from _limits(state)


def _limits(state: State) -> Iterator[MetricFamily]:
    rules = active_rules(state)
    if rules is None:
        return
    limits = gauges(
        "forebay_transfer_limit_bytes_per_second", "Configured rate limit; absent if there is none.", "scope"
    )
    for scope, limit in (
        ("transfer", rules.transfer_bytes_s),
        ("user", rules.user_bytes_s),
        ("node", rules.node_bytes_s),
        ("cluster", rules.cluster_bytes_s),
    ):
        if limit is not None:
            limits.add(limit, scope)
    yield limits
