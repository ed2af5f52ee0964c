"""What Prometheus scrapes: counters where things happen, gauges read from the replica at the moment of the scrape."""

from __future__ import annotations

import asyncio
from collections import Counter as Count
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cluster.api.past import Historian
from cluster.consensus import Role
from cluster.server import Controller
from cluster.server.tlog import Publisher
from cluster.system.eventloop import RECORDS_PER_SLICE, Work, paced
from replica.messages import features
from replica.model import TRANSFERS, BufferState, DrillVerdict, JobState
from replica.operations import rules_in_force
from replica.state import State
from replica.values import MICROSECONDS_PER_SECOND, Instant
from replica.views import pool_use

SYNC_BUCKETS_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
"""Bounds of the sync histogram, seconds: from an idle NVMe to a disk that should be replaced."""

LATENCY_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Bounds of the request histogram, seconds: from a stale read to the longest poll."""

SYNCS_KEPT_MAX = 4096
"""Syncs whose times wait for a scrape, count: some 100 KiB."""

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """The registry of one replica."""

    def __init__(self, controller: Controller, past: Historian, publisher: Callable[[], Publisher]) -> None:
        self._registry = CollectorRegistry()
        self._controller = controller
        self._rendering = asyncio.Lock()
        self._collector = _ReplicaCollector(controller, past, publisher)
        self._registry.register(self._collector)
        self._sync_times_s: list[float] = []
        """What `_syncs` has not been told: telling takes longer than all else between a sync and its answer."""
        self._syncs = Histogram(
            "forebay_journal_sync_seconds",
            "Time of each durable write of the journal.",
            buckets=SYNC_BUCKETS_S,
            registry=self._registry,
        )
        self.requests = Histogram(
            "forebay_api_request_seconds",
            "Time of each API request by route and status class; long polls wait on purpose.",
            ["route", "status"],
            buckets=LATENCY_BUCKETS_S,
            registry=self._registry,
        )
        self.doors = Gauge(
            "forebay_doors", "Doors that serve clients in front of this replica.", registry=self._registry
        )
        self.doors_started = Counter(
            "forebay_doors_started_total",
            "Doors started: more than there are to be where one has ended.",
            registry=self._registry,
        )
        self.problems = Counter(
            "forebay_api_problems_total", "API answers with an error, by code.", ["code"], registry=self._registry
        )

    def synced(self, duration_s: float) -> None:
        """Note how long a durable write of the journal took."""
        self._sync_times_s.append(duration_s)
        if len(self._sync_times_s) >= SYNCS_KEPT_MAX:
            self._tell_syncs()

    async def text(self, work: Work) -> bytes:
        """Return everything in Prometheus's text format."""
        async with self._rendering:
            self._tell_syncs()
            await self._collector.read(self._controller.state, work)
            # In a thread: rendering a line for each route and bucket takes longer than a heartbeat may wait.
            return await asyncio.to_thread(generate_latest, self._registry)

    def _tell_syncs(self) -> None:
        times_s, self._sync_times_s = self._sync_times_s, []
        for duration_s in times_s:
            self._syncs.observe(duration_s)


class _ReplicaCollector(Collector):
    """Reads the replica at the moment of a scrape, so that nothing has to be kept up to date.

    `read` does so on the loop; `collect` gives what was read, in whatever thread.
    """

    def __init__(self, controller: Controller, past: Historian, publisher: Callable[[], Publisher]) -> None:
        self._controller = controller
        self._past = past
        self._publisher = publisher
        self._families: list[Metric] = []

    async def read(self, state: State, work: Work) -> None:
        """Read everything, in slices."""
        by_state: Count[str] = Count(dict.fromkeys((job_state.name for job_state in JobState), 0))
        by_buffer: Count[str] = Count(dict.fromkeys((buffer_state.word for buffer_state in BufferState), 0))
        async for job_id in paced(state.unfinished, work, parts=1):
            by_state[state.jobs[job_id].state.name] += 1
            buffer = state.buffers.get(job_id)
            if buffer is not None:
                by_buffer[buffer.state.word] += 1
        await work.take(RECORDS_PER_SLICE)
        self._families = [
            *self._consensus(),
            *self._history(),
            *self._checkpoints(),
            *self._commands(),
            *_capacity(state),
            *_drills(state, self._controller.agreed.now()),
            *self._work(state, by_state, by_buffer),
        ]

    def collect(self) -> Iterator[Metric]:
        """Yield every family."""
        yield from self._families

    def _consensus(self) -> Iterator[Metric]:
        controller, engine = self._controller, self._controller.engine
        role = GaugeMetricFamily("forebay_role", "1 for the role that this replica has.", labels=["role"])
        for name in Role:
            role.add_metric([name.value], float(engine.role == name))
        yield role
        yield _gauge("forebay_ready", "Whether this replica may decide or follows a leader closely.", engine.ready)
        yield _gauge("forebay_term", "Raft's term.", engine.term)
        yield _gauge("forebay_commit_index", "Last entry known to be committed.", engine.commit_index)
        yield _gauge("forebay_applied_index", "Last entry applied.", controller.applied_index)
        yield _gauge("forebay_last_index", "Last entry of the journal.", engine.last_index)
        yield _gauge("forebay_revision", "Commands settled so far.", controller.state.revision)
        yield _gauge(
            "forebay_feature_level", "Feature level of the cluster, as applied.", controller.state.feature_level
        )
        yield _gauge(
            "forebay_feature_level_known",
            "The highest feature level that this replica could carry out.",
            features.FEATURE_LEVEL_KNOWN,
        )
        yield _counter("forebay_entries_applied", "Entries applied since the start.", controller.entries_applied)
        yield _counter(
            "forebay_entries_void", "Batches that the fence refused since the start.", controller.entries_void
        )
        lag = GaugeMetricFamily("forebay_peer_lag_entries", "Entries that a peer lacks; leader only.", labels=["peer"])
        contact = GaugeMetricFamily(
            "forebay_peer_contact_age_seconds", "Time since a peer's last frame.", labels=["peer"]
        )
        forgot = GaugeMetricFamily(
            "forebay_peer_refused", "1 for a peer that lacks what it acknowledged; leader only.", labels=["peer"]
        )
        offset = GaugeMetricFamily(
            "forebay_peer_clock_offset_seconds",
            "How far a peer's wall clock is ahead of this replica's.",
            labels=["peer"],
        )
        for peer in engine.peers():
            if peer.clock_offset_s is not None:
                offset.add_metric([peer.name], peer.clock_offset_s)
            if engine.role == Role.LEADER:
                forgot.add_metric([peer.name], float(peer.forgot))
                lag.add_metric([peer.name], peer.lag_entries)
            if peer.last_contact_s is not None:
                contact.add_metric([peer.name], peer.last_contact_s)
        yield lag
        yield forgot
        yield contact
        yield offset
        yield _gauge(
            "forebay_clock_off", "1 if this replica's wall clock is off from those of a majority.", engine.clock_off
        )
        yield _gauge(
            "forebay_clock_ahead_seconds",
            "How far the cluster's time is ahead of what a majority's wall clocks say.",
            controller.agreed.ahead_us / MICROSECONDS_PER_SECOND,
        )
        yield _gauge("forebay_journal_fill_ratio", "Share of the journal's room that is used.", controller.journal_fill)
        yield _gauge(
            "forebay_ledger_missing_entries",
            "Entries of the ledger that this replica does not hold: a snapshot came instead, and they are fetched.",
            sum(gap.last_index - gap.first_index + 1 for gap in controller.ledger.missing()),
        )
        pruned = controller.ledger.pruned()
        yield _gauge(
            "forebay_ledger_oldest_entry",
            "First entry from which on this replica holds all of the ledger.",
            controller.ledger.whole_from,
        )
        yield _gauge(
            "forebay_ledger_pruned_below",
            "Entry below which this replica holds nothing on purpose: it is in the archive. 0: nothing was pruned.",
            0 if pruned is None else pruned.below,
        )
        scrubbed = controller.scrubbed
        yield _gauge(
            "forebay_ledger_verified_index",
            "The last entry that was read and checked in this round of the whole ledger.",
            scrubbed.verified_index,
        )
        if scrubbed.round_ended_s is not None:
            age_s = controller.clock.monotonic_s() - scrubbed.round_ended_s
            yield _gauge("forebay_ledger_verified_age_seconds", "Time since all of the ledger had been checked.", age_s)
        yield _gauge(
            "forebay_ledger_damaged_entries",
            "Entries that are damaged here and that nobody has given yet.",
            scrubbed.damaged_entries,
        )
        yield _counter(
            "forebay_ledger_mended_entries", "Entries that were damaged here and are whole again.", scrubbed.mended
        )
        yield _gauge("forebay_snapshot_index", "Entry of the newest snapshot.", controller.snapshot_index)
        yield _gauge(
            "forebay_snapshot_behind_entries",
            "Entries applied since the newest snapshot.",
            controller.applied_index - controller.snapshot_index,
        )
        if controller.snapshot_at_s is not None:
            age_s = controller.clock.monotonic_s() - controller.snapshot_at_s
            yield _gauge("forebay_snapshot_age_seconds", "Time since this process wrote a snapshot.", age_s)
        yield _counter("forebay_snapshots_failed", "Snapshots that could not be written.", controller.snapshots_failed)

    def _history(self) -> Iterator[Metric]:
        progress = self._past.progress
        yield _gauge(
            "forebay_history_index_entry", "Last entry of the ledger in the index by job, as told last.", progress.index
        )
        yield _gauge("forebay_history_index_bytes", "What the index by job takes on the disk.", progress.size_bytes)
        yield _gauge(
            "forebay_proofs_entry",
            "Last entry of the ledger in its tree, as told last: what can be proven.",
            progress.tree_size,
        )
        yield _counter(
            "forebay_proofs_made_again",
            "Files of the tree of the ledger that were missing or damaged, and derived anew.",
            progress.tree_made_again,
        )
        yield _counter(
            "forebay_historians_started",
            "Historians started: more than one where one has ended.",
            self._past.started,
        )

    def _checkpoints(self) -> Iterator[Metric]:
        publisher = self._publisher()
        yield _gauge(
            "forebay_checkpoint_entry", "Entries under the last checkpoint that a majority has signed.", publisher.size
        )
        yield _gauge(
            "forebay_checkpoint_age_seconds",
            "Time since this process got a checkpoint, or began.",
            self._controller.clock.monotonic_s() - publisher.published_s,
        )
        yield _counter(
            "forebay_checkpoints_failed",
            "Checkpoints that this replica asked for while it led, and that no majority has signed.",
            publisher.failed,
        )
        cosigning = publisher.cosigning
        yield _gauge(
            "forebay_checkpoint_witnesses_needed",
            "Witnesses that must have cosigned a checkpoint that is called witnessed; 0: none is configured.",
            cosigning.needed,
        )
        yield _gauge(
            "forebay_checkpoint_witnesses",
            "Witnesses that have cosigned the last checkpoint.",
            len(publisher.witnessed_by),
        )
        yield _gauge(
            "forebay_checkpoint_unwitnessed_seconds",
            "For how long checkpoints have lacked the cosignatures that are needed; 0 where the last one has them.",
            publisher.unwitnessed_s,
        )
        disputes = GaugeMetricFamily(
            "forebay_witness_disputes",
            "1 for a witness that has seen what is not in this ledger: set back, or altered; leader only.",
            labels=["witness"],
        )
        for one in cosigning.witnesses:
            disputes.add_metric([one.name], float(one.name in cosigning.disputes))
        yield disputes

    def _commands(self) -> Iterator[Metric]:
        proposer = self._controller.proposer
        counts = proposer.counts
        yield _gauge("forebay_queue_commands", "Commands waiting to be decided.", proposer.queued)
        yield _gauge("forebay_batches_in_flight", "Batches proposed and not applied.", proposer.batches_in_flight)
        yield _counter("forebay_batches", "Batches proposed by this replica.", counts.batches)
        yield _counter("forebay_commands", "Commands in those batches.", counts.commands)
        yield _counter("forebay_retries_answered", "Commands answered from a receipt.", counts.receipts_answered)
        yield _counter(
            "forebay_too_many_answers",
            "Commands refused because as many answers were kept for their senders as may be.",
            counts.too_many_answers,
        )
        yield _counter("forebay_queue_full", "Commands refused because the queue was full.", counts.queue_full)
        yield _counter(
            "forebay_journal_full", "Commands refused because the journal had no room for them.", counts.journal_full
        )
        yield _counter(
            "forebay_outcomes_unknown", "Commands under way when leadership was lost.", counts.outcomes_unknown
        )
        refusals = CounterMetricFamily("forebay_refusals", "Commands refused, by code.", labels=["code"])
        for code, count in sorted(counts.refusals.items()):
            refusals.add_metric([code], count)
        yield refusals

    def _work(self, state: State, by_state: Count[str], by_buffer: Count[str]) -> Iterator[Metric]:
        controller = self._controller
        jobs = GaugeMetricFamily("forebay_jobs", "Jobs that are not over, by state.", labels=["state"])
        for name, count in by_state.items():
            jobs.add_metric([name], count)
        yield jobs
        buffers = GaugeMetricFamily("forebay_buffers", "Buffers of those jobs, by state.", labels=["state"])
        for name, count in by_buffer.items():
            buffers.add_metric([name], count)
        yield buffers
        yield _gauge("forebay_jobs_finished_kept", "Finished jobs kept in the state.", len(state.finished))
        yield _gauge("forebay_receipts", "Answers to single commands that are kept.", len(state.receipts))
        yield _gauge("forebay_sessions", "Sessions of programs.", len(state.sessions))
        yield _gauge("forebay_session_answers", "Answers that are kept for them.", len(state.answers))
        yield from _transfers(controller, state)
        nodes: Count[str] = Count(node.state.name for node in state.nodes.values())
        families = GaugeMetricFamily("forebay_nodes", "Nodes by state.", labels=["state"])
        for name, count in sorted(nodes.items()):
            families.add_metric([name], count)
        yield families


def _capacity(state: State) -> Iterator[Metric]:
    total = GaugeMetricFamily("forebay_pool_bytes", "Total of a pool.", labels=["pool"])
    free = GaugeMetricFamily("forebay_pool_free_bytes", "Derived free capacity of a pool.", labels=["pool"])
    held = GaugeMetricFamily("forebay_pool_held_bytes", "What buffers hold of a pool.", labels=["pool"])
    for name in sorted(state.pools):
        use = pool_use(state, name)
        total.add_metric([name], use.pool.quantity_bytes)
        free.add_metric([name], use.free_bytes)
        held.add_metric([name], use.held_bytes)
    yield total
    yield free
    yield held


def _drills(state: State, at: Instant) -> Iterator[Metric]:
    """Yield when each kind of drill was last carried out to its end: what reminds of those that were not."""
    ended: dict[str, int] = {}
    under_way = 0
    for number, drill in state.drills.items():
        if drill.verdict in (DrillVerdict.PASSED, DrillVerdict.FAILED):
            ended[drill.scenario] = max(ended.get(drill.scenario, 0), drill.ended_at)
        if drill.is_under_way(at):
            under_way = number
    yield _gauge("forebay_drill_under_way", "Number of the drill under way; 0: none is.", under_way)
    age = GaugeMetricFamily(
        "forebay_drill_age_seconds",
        "Time since a drill of this kind was passed or failed; absent for one that was never tried.",
        labels=["scenario"],
    )
    for scenario in sorted(ended):
        age.add_metric([scenario], max(0, at - ended[scenario]) / MICROSECONDS_PER_SECOND)
    yield age


def _transfers(controller: Controller, state: State) -> Iterator[Metric]:
    """Yield what agents say of transfers at the moment (leader only), and what receipts add up to."""
    rows = controller.liveness.transfers(state) if controller.leads else []
    yield _gauge("forebay_transfers", "Operations under way, as the leader has heard.", len(rows))
    yield _gauge("forebay_transfers_done_bytes", "What they have moved.", sum(row.bytes_done for row in rows))
    yield _gauge("forebay_transfers_left_bytes", "What they have yet to move.", sum(
        max(0, row.bytes_total - row.bytes_done) for row in rows
    ))  # fmt: skip
    yield _gauge("forebay_transfers_rate_bytes_per_second", "Their rate.", sum(row.rate_bytes_s for row in rows))
    yield _gauge("forebay_transfers_held_back", "Those that a rate holds back.", sum(1 for row in rows if row.waiting))
    turns = GaugeMetricFamily("forebay_transfer_turns", "Transfers that have their turn, by stage.", labels=["stage"])
    for stage in TRANSFERS:
        turns.add_metric([stage.word], state.operations.get(stage, 0))
    yield turns
    yield from _limits(state)
    totals = controller.transfer_totals
    ended = CounterMetricFamily(
        "forebay_transfers_ended", "Transfers that ended since the start, by outcome.", labels=["stage", "outcome"]
    )
    for (stage_word, outcome), count in sorted(totals.ended.items()):
        ended.add_metric([stage_word, outcome], count)
    yield ended
    yield _by_stage("forebay_transferred_files", "Files of those.", totals.files)
    yield _by_stage("forebay_transferred_bytes", "Bytes of those.", totals.size_bytes)
    yield _by_stage("forebay_transfer_resumed_bytes", "Bytes that need not be moved again.", totals.resumed_bytes)
    yield _by_stage("forebay_transfer_retries", "Files or chunks that were moved again.", totals.retries)
    yield _by_stage("forebay_transfer_left_out", "Things that were left out.", totals.left_out)


def _limits(state: State) -> Iterator[Metric]:
    rules = rules_in_force(state)
    if rules is None:
        return
    limits = GaugeMetricFamily(
        "forebay_transfer_limit_bytes_per_second", "What the site allows; absent without limit.", labels=["scope"]
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


def _by_stage(name: str, help_text: str, counts: Mapping[str, int] | Count[str]) -> Metric:
    family = CounterMetricFamily(name, help_text, labels=["stage"])
    for stage, count in sorted(counts.items()):
        family.add_metric([stage], count)
    return family


def _gauge(name: str, help_text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, help_text, value=float(value))


def _counter(name: str, help_text: str, value: float) -> Metric:
    return CounterMetricFamily(name, help_text, value=float(value))
