"""Metrics of jobs, buffers, pools, nodes and transfers.

Labels are states, reasons, stages, pools and nodes, which are bounded. Users and jobs are never labels.
"""

from __future__ import annotations

from collections import Counter as Count
from collections.abc import Iterable, Iterator, Mapping

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from forebay.cluster.api.metrics.replica import counter, gauge
from forebay.cluster.api.render import Verdicts
from forebay.cluster.server import Controller, Durations, Liveness
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


class WorkCollector(Collector):
    """Reads the applied state and event counters at the scrape.

    `read` runs on the event loop in slices; `collect` returns the values in any thread.
    """

    def __init__(self, controller: Controller, verdicts: Verdicts) -> None:
        self._controller = controller
        self._verdicts = verdicts
        self._families: list[Metric] = []

    async def read(self, state: State, work: SlicedWork) -> None:
        """Read all values, in slices."""
        controller = self._controller
        liveness = controller.liveness if controller.leads else None
        queue = _Queue(
            Count(dict.fromkeys((job_state.name for job_state in JobState), 0)),
            Count(dict.fromkeys((buffer_state.word for buffer_state in BufferState), 0)),
            Count(dict.fromkeys((stage.word for stage in QUEUED_STAGES), 0)),
        )
        async for job_id in iterate_paced(state.unfinished, work, parts=PARTS_PER_JOB):
            queue.add(state.jobs[job_id], state.buffers.get(job_id))
        reasons = await self._reasons(state, work) if controller.leads else Count()
        nodes = await _nodes(state, queue, liveness, work)
        await work.take(RECORDS_PER_SLICE)
        self._families = [
            *_jobs(state, queue, reasons),
            *self._became(),
            *_pools(state, queue),
            *nodes,
            *_transfers(controller, state),
            gauge("forebay_cached_replies", "Cached replies to single commands.", len(state.receipts)),
            gauge("forebay_sessions", "Open client sessions.", len(state.sessions)),
            gauge("forebay_session_cached_replies", "Cached replies of client sessions.", len(state.answers)),
        ]

    def collect(self) -> Iterator[Metric]:
        """Yield every family."""
        yield from self._families

    async def _reasons(self, state: State, work: SlicedWork) -> Count[str]:
        """Count the reasons of waiting jobs, as job lists show them."""
        known = await self._verdicts.verdicts_of(state, state.unfinished, work, reasons=True)
        reasons: Count[str] = Count()
        async for job_id in iterate_paced(state.unfinished, work, parts=PARTS_PER_REASON):
            if state.jobs[job_id].state is JobState.PENDING:
                reasons[reason_label(known.reason(job_id))] += 1
        return reasons

    def _became(self) -> Iterator[Metric]:
        """Yield job counters since the process started."""
        totals = self._controller.job_totals
        yield counter("forebay_jobs_submitted", "Jobs submitted; each array task counts as one.", totals.submitted)
        yield _counters("forebay_jobs_ended", "Finished jobs by outcome.", "outcome", totals.ended)
        yield counter("forebay_jobs_requeued", "Jobs requeued after a run.", totals.requeued)
        yield counter("forebay_buffers_revoked", "Buffers revoked before their job ran.", totals.revoked)
        failed = CounterMetricFamily(
            "forebay_stage_failures",
            "Failed operations by stage and by node.",
            labels=["stage", "node"],
        )
        for (stage, node), count in sorted(totals.failed.items()):
            failed.add_metric([stage, node], count)
        yield failed
        yield _counters("forebay_stage_retries", "Retried operations by stage.", "stage", totals.retried)
        yield _histograms(
            "forebay_job_space_wait_seconds",
            "Time from a job's eligibility for its buffer to the allocation of its space.",
            "pool",
            sorted(totals.space_waits.items()),
        )
        yield _histogram(
            "forebay_job_start_wait_seconds", "Time from a job's eligibility to its first start.", totals.start_waits
        )
        yield _histogram("forebay_job_run_seconds", "Run time of scripts, without suspended time.", totals.runs)
        yield _histograms(
            "forebay_stage_seconds",
            "Duration of successful buffer operations from their order; for retried ones, of the last attempt.",
            "stage",
            totals.stages.items(),
        )


def _jobs(state: State, queue: _Queue, reasons: Count[str]) -> Iterator[Metric]:
    yield _gauges("forebay_jobs", "Unfinished jobs by state.", "state", queue.states)
    yield _gauges("forebay_jobs_waiting", "Pending jobs by reason; leader only.", "reason", reasons)
    yield _gauges(
        "forebay_jobs_stuck",
        "Jobs whose operation failed permanently, by stage; a user or operator must release, clear or cancel them.",
        "stage",
        queue.stuck,
    )
    yield _gauges("forebay_buffers", "Buffers of unfinished jobs by state.", "state", queue.buffers)
    yield gauge("forebay_jobs_finished_kept", "Finished jobs kept in the state.", len(state.finished))


def _pools(state: State, queue: _Queue) -> Iterator[Metric]:
    total = GaugeMetricFamily("forebay_pool_bytes", "Total capacity of the pool.", labels=["pool"])
    free = GaugeMetricFamily("forebay_pool_free_bytes", "Free capacity of the pool.", labels=["pool"])
    held = GaugeMetricFamily("forebay_pool_held_bytes", "Capacity held by buffers of the pool.", labels=["pool"])
    out = GaugeMetricFamily(
        "forebay_pool_out_of_service_bytes", "Capacity of the pool that is out of service.", labels=["pool"]
    )
    buffers = GaugeMetricFamily("forebay_pool_buffers", "Buffers that hold space of the pool.", labels=["pool"])
    waiting = GaugeMetricFamily(
        "forebay_pool_jobs_waiting", "Jobs waiting for space of the pool, without held jobs.", labels=["pool"]
    )
    wanted = GaugeMetricFamily(
        "forebay_pool_wanted_bytes", "Capacity requested by jobs waiting for space of the pool.", labels=["pool"]
    )
    for name in sorted(state.pools):
        use = pool_use(state, name)
        total.add_metric([name], use.pool.quantity_bytes)
        free.add_metric([name], use.free_bytes)
        held.add_metric([name], use.held_bytes)
        out.add_metric([name], use.pool.out_of_service_bytes)
        buffers.add_metric([name], len(state.holders.get(name, ())))
        waiting.add_metric([name], queue.waiting[name])
        wanted.add_metric([name], queue.waiting_bytes[name])
    yield from (total, free, held, out, buffers, waiting, wanted)


async def _nodes(state: State, queue: _Queue, liveness: Liveness | None, work: SlicedWork) -> list[Metric]:
    states: Count[str] = Count()
    up = GaugeMetricFamily("forebay_node_up", "1 if the node's agent responds, 0 if the node is DOWN.", labels=["node"])
    drained = GaugeMetricFamily("forebay_node_drained", "1 if the node is drained.", labels=["node"])
    cpus = GaugeMetricFamily("forebay_node_cpus", "CPUs of the node.", labels=["node"])
    used = GaugeMetricFamily("forebay_node_cpus_in_use", "CPUs of the node in use by jobs.", labels=["node"])
    jobs = GaugeMetricFamily("forebay_node_jobs", "Jobs with a buffer, run or operation on the node.", labels=["node"])
    held = GaugeMetricFamily("forebay_node_held_bytes", "Space held by buffers on the node.", labels=["node"])
    contact = GaugeMetricFamily(
        "forebay_node_contact_age_seconds",
        "Time since the last contact with the node's agent; leader only.",
        labels=["node"],
    )
    for name in await work.sort(state.nodes):
        await work.take(0, parts=PARTS_PER_NODE)
        node = state.nodes[name]
        states[node.state.name] += 1
        up.add_metric([name], float(not node.down))
        drained.add_metric([name], float(node.drained))
        cpus.add_metric([name], node.cpus)
        used.add_metric([name], queue.cpus[name])
        jobs.add_metric([name], len(state.on_node.get(name, ())))
        held.add_metric([name], queue.held[name])
        age_s = None if liveness is None else liveness.last_contact_s(name)
        if age_s is not None:
            contact.add_metric([name], age_s)
    by_state = _gauges("forebay_nodes", "Nodes by state.", "state", states)
    return [by_state, up, drained, cpus, used, jobs, held, contact]


def _transfers(controller: Controller, state: State) -> Iterator[Metric]:
    """Yield current transfer progress (leader only) and the totals of receipts."""
    rows = controller.liveness.transfers(state) if controller.leads else []
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
    turns = GaugeMetricFamily(
        "forebay_transfer_turns",
        "Transfers admitted by the limit on concurrent operations, by stage.",
        labels=["stage"],
    )
    for stage in TRANSFERS:
        turns.add_metric([stage.word], state.operations.get(stage, 0))
    yield turns
    yield from _limits(state)
    totals = controller.transfer_totals
    ended = CounterMetricFamily(
        "forebay_transfers_ended",
        "Transfers ended since this process started, by stage and outcome.",
        labels=["stage", "outcome"],
    )
    for (stage_word, outcome), count in sorted(totals.ended.items()):
        ended.add_metric([stage_word, outcome], count)
    yield ended
    yield _counters("forebay_transferred_files", "Files moved by ended transfers.", "stage", totals.files)
    yield _counters("forebay_transferred_bytes", "Bytes moved by ended transfers.", "stage", totals.size_bytes)
    yield _counters(
        "forebay_transfer_resumed_bytes",
        "Bytes that a retried transfer did not have to move again.",
        "stage",
        totals.resumed_bytes,
    )
    yield _counters(
        "forebay_transfer_retries",
        "Files or chunks moved again because they changed or were damaged.",
        "stage",
        totals.retries,
    )
    yield _counters("forebay_transfer_left_out", "Files and links left out of transfers.", "stage", totals.left_out)


def _limits(state: State) -> Iterator[Metric]:
    rules = active_rules(state)
    if rules is None:
        return
    limits = GaugeMetricFamily(
        "forebay_transfer_limit_bytes_per_second", "Configured rate limit; absent if there is none.", labels=["scope"]
    )
    for scope, limit in (
        ("transfer", rules.transfer_bytes_s),
        ("user", rules.user_bytes_s),
        ("node", rules.node_bytes_s),
        ("cluster", rules.cluster_bytes_s),
    ):
        if limit is not None:
            limits.add_metric([scope], limit)
    yield limits


def _gauges(name: str, help_text: str, label: str, values: Mapping[str, int]) -> Metric:
    family = GaugeMetricFamily(name, help_text, labels=[label])
    for value, count in sorted(values.items()):
        family.add_metric([value], count)
    return family


def _counters(name: str, help_text: str, label: str, values: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(name, help_text, labels=[label])
    for value, count in sorted(values.items()):
        family.add_metric([value], count)
    return family


def _histogram(name: str, help_text: str, durations: Durations) -> Metric:
    family = HistogramMetricFamily(name, help_text)
    family.add_metric([], list(durations.buckets()), durations.sum_s)
    return family


def _histograms(name: str, help_text: str, label: str, values: Iterable[tuple[str, Durations]]) -> Metric:
    family = HistogramMetricFamily(name, help_text, labels=[label])
    for value, durations in values:
        family.add_metric([value], list(durations.buckets()), durations.sum_s)
    return family
