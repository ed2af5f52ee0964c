"""Metrics of one replica: consensus, ledger, checkpoints, commands, drills, and certificates."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cluster.api.history_service import HistoryService
from cluster.api.traces import Tracer
from cluster.consensus import Role
from cluster.security import certificate_of
from cluster.server import Controller
from cluster.server.tlog import Publisher
from replica.messages import features
from replica.model import last_tried
from replica.state import State
from replica.values import MICROSECONDS_PER_SECOND, Instant


class ReplicaCollector(Collector):
    """Reads consensus, ledger and command metrics at the scrape, so that nothing is updated in between.

    `read` runs on the event loop; `collect` returns the values in any thread.
    """

    def __init__(
        self, controller: Controller, past: HistoryService, tracer: Tracer, publisher: Callable[[], Publisher]
    ) -> None:
        self._controller = controller
        self._past = past
        self._tracer = tracer
        self._publisher = publisher
        self._families: list[Metric] = []

    def read(self) -> None:
        """Read all values, on the event loop."""
        self._families = [
            *self._consensus(),
            *self._history(),
            *self._traces(),
            *self._checkpoints(),
            *self._commands(),
            *_drills(self._controller.state, self._controller.agreed.now()),
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
        yield gauge("forebay_ready", "Whether this replica may decide or follows a leader closely.", engine.ready)
        yield gauge("forebay_term", "Raft's term.", engine.term)
        yield gauge("forebay_commit_index", "Last entry known to be committed.", engine.commit_index)
        yield gauge("forebay_applied_index", "Last entry applied.", controller.applied_index)
        yield gauge("forebay_last_index", "Last entry of the journal.", engine.last_index)
        yield gauge("forebay_revision", "Commands settled so far.", controller.state.revision)
        yield gauge(
            "forebay_feature_level", "Feature level of the cluster, as applied.", controller.state.feature_level
        )
        yield gauge(
            "forebay_feature_level_known",
            "The highest feature level that this replica could carry out.",
            features.FEATURE_LEVEL_KNOWN,
        )
        yield counter("forebay_entries_applied", "Entries applied since the start.", controller.entries_applied)
        yield counter(
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
        yield gauge(
            "forebay_clock_off", "1 if this replica's wall clock is off from those of a majority.", engine.clock_off
        )
        yield gauge(
            "forebay_clock_ahead_seconds",
            "How far the cluster's time is ahead of what a majority's wall clocks say.",
            controller.agreed.ahead_us / MICROSECONDS_PER_SECOND,
        )
        yield gauge("forebay_journal_fill_ratio", "Share of the journal's room that is used.", controller.journal_fill)
        yield gauge(
            "forebay_ledger_missing_entries",
            "Entries of the ledger that this replica does not hold: a snapshot came instead, and they are fetched.",
            sum(gap.last_index - gap.first_index + 1 for gap in controller.ledger.missing()),
        )
        pruned = controller.ledger.pruned_range()
        yield gauge(
            "forebay_ledger_oldest_entry",
            "First entry from which on this replica holds all of the ledger.",
            controller.ledger.whole_from,
        )
        yield gauge(
            "forebay_ledger_pruned_below",
            "Entry below which this replica holds nothing on purpose: it is in the archive. 0: nothing was pruned.",
            0 if pruned is None else pruned.below,
        )
        scrubbed = controller.scrubbed
        yield gauge(
            "forebay_ledger_verified_index",
            "The last entry that was read and checked in this round of the whole ledger.",
            scrubbed.verified_index,
        )
        if scrubbed.round_ended_s is not None:
            age_s = controller.clock.monotonic_s() - scrubbed.round_ended_s
            yield gauge("forebay_ledger_verified_age_seconds", "Time since all of the ledger had been checked.", age_s)
        yield gauge(
            "forebay_ledger_damaged_entries",
            "Entries that are damaged here and that nobody has given yet.",
            scrubbed.damaged_entries,
        )
        yield counter(
            "forebay_ledger_mended_entries", "Entries that were damaged here and are whole again.", scrubbed.mended
        )
        yield gauge("forebay_snapshot_index", "Entry of the newest snapshot.", controller.snapshot_index)
        yield gauge(
            "forebay_snapshot_behind_entries",
            "Entries applied since the newest snapshot.",
            controller.applied_index - controller.snapshot_index,
        )
        if controller.snapshot_at_s is not None:
            age_s = controller.clock.monotonic_s() - controller.snapshot_at_s
            yield gauge("forebay_snapshot_age_seconds", "Time since this process wrote a snapshot.", age_s)
        yield counter("forebay_snapshots_failed", "Snapshots that could not be written.", controller.snapshots_failed)

    def _history(self) -> Iterator[Metric]:
        progress = self._past.progress
        yield gauge(
            "forebay_history_index_entry", "Last entry of the ledger in the index by job, as told last.", progress.index
        )
        yield gauge("forebay_history_index_bytes", "What the index by job takes on the disk.", progress.size_bytes)
        yield gauge(
            "forebay_proofs_entry",
            "Last entry of the ledger in its tree, as told last: what can be proven.",
            progress.tree_size,
        )
        yield counter(
            "forebay_proofs_made_again",
            "Files of the tree of the ledger that were missing or damaged, and derived anew.",
            progress.tree_made_again,
        )
        yield counter(
            "forebay_historians_started",
            "Historians started: more than one where one has ended.",
            self._past.started,
        )

    def _traces(self) -> Iterator[Metric]:
        tracer = self._tracer
        yield counter("forebay_traces_sent", "Traces of jobs that the collector has taken.", tracer.sent_count)
        yield counter(
            "forebay_traces_dropped",
            "Traces of jobs that no collector took, dropped.",
            tracer.dropped_count,
        )
        yield gauge("forebay_traces_waiting", "Traces of jobs that wait for the collector.", tracer.waiting)

    def _checkpoints(self) -> Iterator[Metric]:
        publisher = self._publisher()
        yield gauge(
            "forebay_checkpoint_entry", "Entries under the last checkpoint that a majority has signed.", publisher.size
        )
        yield gauge(
            "forebay_checkpoint_age_seconds",
            "Time since this process got a checkpoint, or began.",
            self._controller.clock.monotonic_s() - publisher.published_s,
        )
        yield counter(
            "forebay_checkpoints_failed",
            "Checkpoints that this replica asked for while it led, and that no majority has signed.",
            publisher.failed,
        )
        cosigning = publisher.cosigning
        yield gauge(
            "forebay_checkpoint_witnesses_needed",
            "Witnesses that must have cosigned a checkpoint that is called witnessed; 0: none is configured.",
            cosigning.needed,
        )
        yield gauge(
            "forebay_checkpoint_witnesses",
            "Witnesses that have cosigned the last checkpoint.",
            len(publisher.witnessed_by),
        )
        yield gauge(
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
        yield gauge("forebay_queue_commands", "Commands waiting to be decided.", proposer.queued)
        yield gauge("forebay_batches_in_flight", "Batches proposed and not applied.", proposer.batches_in_flight)
        yield counter("forebay_batches", "Batches proposed by this replica.", counts.batches)
        yield counter("forebay_commands", "Commands in those batches.", counts.commands)
        yield counter("forebay_retries_answered", "Commands answered from a receipt.", counts.receipts_answered)
        yield counter(
            "forebay_too_many_answers",
            "Commands refused because as many answers were kept for their senders as may be.",
            counts.too_many_answers,
        )
        yield counter("forebay_queue_full", "Commands refused because the queue was full.", counts.queue_full)
        yield counter(
            "forebay_journal_full", "Commands refused because the journal had no room for them.", counts.journal_full
        )
        yield counter(
            "forebay_outcomes_unknown", "Commands under way when leadership was lost.", counts.outcomes_unknown
        )
        refusals = CounterMetricFamily("forebay_refusals", "Commands refused, by code.", labels=["code"])
        for code, count in sorted(counts.refusals.items()):
            refusals.add_metric([code], count)
        yield refusals


class CertificateCollector(Collector):
    """Reads the expiry of this replica's certificate and authority from their files."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    def collect(self) -> Iterator[Metric]:
        """Yield each expiry; omit unreadable files."""
        files = self._controller.config.tls_files(self._controller.name)
        expiry = GaugeMetricFamily(
            "forebay_certificate_expiry_timestamp_seconds",
            "When the certificate of this replica, and that of the authority, expires; seconds since 1970.",
            labels=["kind", "name"],
        )
        for kind, path in (("replica", files.certificate), ("authority", files.authority)):
            found = certificate_of(path.parent, path.stem)
            if not found.problem:
                expiry.add_metric([kind, found.name], found.valid_until / MICROSECONDS_PER_SECOND)
        yield expiry


def _drills(state: State, at: Instant) -> Iterator[Metric]:
    """Yield the time each kind of drill was last completed, as a reminder of missing ones."""
    under_way = max((number for number, drill in state.drills.items() if drill.is_under_way(at)), default=0)
    yield gauge("forebay_drill_under_way", "Number of the drill under way; 0: none is.", under_way)
    age = GaugeMetricFamily(
        "forebay_drill_age_seconds",
        "Time since a drill of this kind was passed or failed; absent for one that was never tried.",
        labels=["scenario"],
    )
    for scenario, drill in sorted(last_tried(state.drills.values()).items()):
        age.add_metric([scenario], max(0, at - drill.ended_at) / MICROSECONDS_PER_SECOND)
    yield age


def gauge(name: str, help_text: str, value: float) -> Metric:
    """Return a gauge without labels."""
    return GaugeMetricFamily(name, help_text, value=float(value))


def counter(name: str, help_text: str, value: float) -> Metric:
    """Return a counter without labels; `name` is without its `_total`."""
    return CounterMetricFamily(name, help_text, value=float(value))
