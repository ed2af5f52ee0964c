"""Metrics of one replica: consensus, ledger, checkpoints, commands, drills, and certificates."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from forebay.cluster.api.history_service import HistoryService
from forebay.cluster.api.sinks import EventSinks
from forebay.cluster.api.traces import Tracer
from forebay.cluster.consensus import Role
from forebay.cluster.security import certificate_of
from forebay.cluster.server import Controller
from forebay.cluster.server.tlog import Publisher
from forebay.replica.messages import features
from forebay.replica.model import latest_completed
from forebay.replica.state import State
from forebay.replica.values import MICROSECONDS_PER_SECOND, Instant


class ReplicaCollector(Collector):
    """Reads consensus, ledger and command metrics at the scrape, so that nothing is updated in between.

    `read` runs on the event loop; `collect` returns the values in any thread.
    """

    def __init__(
        self,
        controller: Controller,
        past: HistoryService,
        tracer: Tracer,
        sinks: EventSinks,
        publisher: Callable[[], Publisher],
    ) -> None:
        self._controller = controller
        self._past = past
        self._tracer = tracer
        self._sinks = sinks
        self._publisher = publisher
        self._families: list[Metric] = []

    def read(self) -> None:
        """Read all values, on the event loop."""
        self._families = [
            *self._consensus(),
            *self._peers(),
            *self._clocks(),
            *self._ledger(),
            *self._snapshots(),
            *self._history(),
            *self._traces(),
            *self._deliveries(),
            *self._checkpoints(),
            *self._commands(),
            *_drills(self._controller.state, self._controller.agreed.now()),
        ]

    def collect(self) -> Iterator[Metric]:
        """Yield every family."""
        yield from self._families

    def _consensus(self) -> Iterator[Metric]:
        controller, engine = self._controller, self._controller.engine
        role = GaugeMetricFamily("forebay_role", "1 for the current Raft role of this replica.", labels=["role"])
        for name in Role:
            role.add_metric([name.value], float(engine.role == name))
        yield role
        yield gauge(
            "forebay_ready", "1 if this replica can commit, or closely follows a leader that can.", engine.ready
        )
        yield gauge("forebay_term", "Raft term.", engine.term)
        yield gauge("forebay_commit_index", "Index of the last entry known to be committed.", engine.commit_index)
        yield gauge("forebay_applied_index", "Index of the last applied entry.", controller.applied_index)
        yield gauge("forebay_last_index", "Index of the last journal entry.", engine.last_index)
        yield gauge("forebay_revision", "Revision: the number of commands settled so far.", controller.state.revision)
        yield gauge("forebay_feature_level", "Feature level of the cluster.", controller.state.feature_level)
        yield gauge(
            "forebay_feature_level_known",
            "Highest feature level this replica supports.",
            features.FEATURE_LEVEL_KNOWN,
        )
        yield counter(
            "forebay_entries_applied", "Entries applied since this process started.", controller.entries_applied
        )
        yield counter(
            "forebay_entries_void",
            "Batches voided since this process started, because they were decided on an outdated state.",
            controller.entries_void,
        )

    def _peers(self) -> Iterator[Metric]:
        engine = self._controller.engine
        lag = GaugeMetricFamily("forebay_peer_lag_entries", "Entries the peer lacks; leader only.", labels=["peer"])
        contact = GaugeMetricFamily(
            "forebay_peer_contact_age_seconds", "Time since the last frame from the peer.", labels=["peer"]
        )
        forgot = GaugeMetricFamily(
            "forebay_peer_rejected",
            "1 if the peer is rejected because it lost entries it had acknowledged; leader only.",
            labels=["peer"],
        )
        offset = GaugeMetricFamily(
            "forebay_peer_clock_offset_seconds",
            "Lead of the peer's wall clock over this replica's.",
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

    def _clocks(self) -> Iterator[Metric]:
        controller = self._controller
        yield gauge(
            "forebay_clock_skewed",
            "1 if this replica's wall clock deviates too far from a majority's; it then does not campaign.",
            controller.engine.clock_off,
        )
        yield gauge(
            "forebay_clock_ahead_seconds",
            "Lead of the cluster's time over the wall clocks of a majority.",
            controller.agreed.ahead_us / MICROSECONDS_PER_SECOND,
        )

    def _ledger(self) -> Iterator[Metric]:
        controller = self._controller
        yield gauge(
            "forebay_journal_fill_ratio", "Used share of the journal's space, from 0 to 1.", controller.journal_fill
        )
        yield gauge(
            "forebay_ledger_missing_entries",
            "Ledger entries this replica lacks because it received a snapshot instead; it fetches them from its peers.",
            sum(gap.last_index - gap.first_index + 1 for gap in controller.ledger.missing()),
        )
        pruned = controller.ledger.pruned_range()
        yield gauge(
            "forebay_ledger_oldest_entry",
            "First entry of the contiguous ledger this replica holds.",
            controller.ledger.whole_from,
        )
        yield gauge(
            "forebay_ledger_pruned_below",
            "Entries below this index were pruned and are in the archive; 0 if nothing was pruned.",
            0 if pruned is None else pruned.below,
        )
        scrubbed = controller.scrubbed
        yield gauge(
            "forebay_ledger_verified_index",
            "Last entry checked in the current scrub of the ledger.",
            scrubbed.verified_index,
        )
        if scrubbed.round_ended_s is not None:
            age_s = controller.clock.monotonic_s() - scrubbed.round_ended_s
            yield gauge(
                "forebay_ledger_verified_age_seconds", "Time since the last complete scrub of the ledger.", age_s
            )
        yield gauge(
            "forebay_ledger_damaged_entries",
            "Damaged ledger entries that no peer has supplied yet.",
            scrubbed.damaged_entries,
        )
        yield counter(
            "forebay_ledger_repaired_entries",
            "Damaged ledger entries repaired since this process started.",
            scrubbed.mended,
        )

    def _snapshots(self) -> Iterator[Metric]:
        controller = self._controller
        yield gauge("forebay_snapshot_index", "Index of the entry of the newest snapshot.", controller.snapshot_index)
        yield gauge(
            "forebay_snapshot_behind_entries",
            "Entries applied since the newest snapshot.",
            controller.applied_index - controller.snapshot_index,
        )
        if controller.snapshot_at_s is not None:
            age_s = controller.clock.monotonic_s() - controller.snapshot_at_s
            yield gauge("forebay_snapshot_age_seconds", "Time since this process last wrote a snapshot.", age_s)
        yield counter(
            "forebay_snapshots_failed",
            "Snapshots that could not be written since this process started.",
            controller.snapshots_failed,
        )

    def _history(self) -> Iterator[Metric]:
        progress = self._past.progress
        yield gauge(
            "forebay_history_index_entry",
            "Last ledger entry in the per-job index, as last reported by the history service.",
            progress.index,
        )
        yield gauge("forebay_history_index_bytes", "Size of the per-job index on disk.", progress.size_bytes)
        yield gauge(
            "forebay_proofs_entry",
            "Last ledger entry in the Merkle tree, as last reported by the history service; entries up to it "
            "can be proven.",
            progress.tree_size,
        )
        yield counter(
            "forebay_proof_files_rebuilt",
            "Missing or damaged files of the Merkle tree that were rebuilt.",
            progress.tree_made_again,
        )
        yield counter(
            "forebay_history_service_started",
            "Starts of the history service; more than one if it has ended and was restarted.",
            self._past.process.started,
        )

    def _traces(self) -> Iterator[Metric]:
        tracer = self._tracer
        yield counter("forebay_traces_sent", "Job traces accepted by the collector.", tracer.sent_count)
        yield counter(
            "forebay_traces_dropped",
            "Job traces dropped because no collector accepted them.",
            tracer.dropped_count,
        )
        yield gauge("forebay_traces_waiting", "Job traces waiting for the collector.", tracer.waiting)

    def _deliveries(self) -> Iterator[Metric]:
        revision, now = self._controller.state.revision, self._controller.agreed.now()
        lag = GaugeMetricFamily(
            "forebay_sink_lag_revisions",
            "Revisions after the last one that the event sink's receiver accepted; leader only.",
            labels=["sink"],
        )
        age = GaugeMetricFamily(
            "forebay_sink_lag_seconds",
            "Age of the oldest event that the sink's receiver has not accepted; leader only.",
            labels=["sink"],
        )
        events = CounterMetricFamily(
            "forebay_sink_events", "Events accepted by the sink's receiver since this replica leads.", labels=["sink"]
        )
        deliveries = CounterMetricFamily(
            "forebay_sink_deliveries",
            "Requests accepted by the sink's receiver since this replica leads.",
            labels=["sink"],
        )
        failures = CounterMetricFamily(
            "forebay_sink_failures", "Failed attempts to send events since this replica leads.", labels=["sink"]
        )
        for name, delivery in sorted(self._sinks.deliveries.items()):
            lag.add_metric([name], revision - delivery.position.revision)
            age.add_metric([name], delivery.lag_s(now))
            events.add_metric([name], delivery.events)
            deliveries.add_metric([name], delivery.deliveries)
            failures.add_metric([name], delivery.failures)
        yield from (lag, age, events, deliveries, failures)

    def _checkpoints(self) -> Iterator[Metric]:
        publisher = self._publisher()
        yield gauge(
            "forebay_checkpoint_entry", "Entries covered by the last checkpoint signed by a majority.", publisher.size
        )
        yield gauge(
            "forebay_checkpoint_age_seconds",
            "Time since the last checkpoint, or since this process started.",
            self._controller.clock.monotonic_s() - publisher.published_s,
        )
        yield counter(
            "forebay_checkpoints_failed",
            "Checkpoints requested by this replica as leader that no majority signed.",
            publisher.failed,
        )
        cosigning = publisher.cosigning
        yield gauge(
            "forebay_checkpoint_witnesses_needed",
            "Witness cosignatures a checkpoint requires; 0 if no witness is configured.",
            cosigning.needed,
        )
        yield gauge(
            "forebay_checkpoint_witnesses",
            "Witness cosignatures of the last checkpoint.",
            len(publisher.witnessed_by),
        )
        yield gauge(
            "forebay_checkpoint_unwitnessed_seconds",
            "Time since checkpoints last had the required cosignatures; 0 if the last one has them.",
            publisher.unwitnessed_s,
        )
        disputes = GaugeMetricFamily(
            "forebay_witness_disputes",
            "1 if the witness has cosigned a history that this ledger does not contain: the ledger was reset "
            "or altered; leader only.",
            labels=["witness"],
        )
        for one in cosigning.witnesses:
            disputes.add_metric([one.name], float(one.name in cosigning.disputes))
        yield disputes

    def _commands(self) -> Iterator[Metric]:
        proposer = self._controller.proposer
        counts = proposer.counts
        yield gauge("forebay_queue_commands", "Commands waiting in the leader's queue.", proposer.queued)
        yield gauge("forebay_batches_in_flight", "Batches proposed and not yet applied.", proposer.batches_in_flight)
        yield counter("forebay_batches", "Batches proposed by this replica.", counts.batches)
        yield counter("forebay_commands", "Commands in batches proposed by this replica.", counts.commands)
        yield counter(
            "forebay_retries_answered", "Retried commands answered with a cached reply.", counts.receipts_answered
        )
        yield counter(
            "forebay_reply_cache_full",
            "Commands rejected because the sender has the maximum number of cached replies.",
            counts.too_many_answers,
        )
        yield counter("forebay_queue_full", "Commands rejected because the queue was full.", counts.queue_full)
        yield counter(
            "forebay_journal_full", "Commands rejected because the journal was nearly full.", counts.journal_full
        )
        yield counter(
            "forebay_outcomes_unknown",
            "Commands whose outcome is unknown because leadership was lost.",
            counts.outcomes_unknown,
        )
        rejections = CounterMetricFamily("forebay_rejections", "Rejected commands by code.", labels=["code"])
        for code, count in sorted(counts.rejections.items()):
            rejections.add_metric([code], count)
        yield rejections


class CertificateCollector(Collector):
    """Reads the expiry of this replica's certificate and authority from their files."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    def collect(self) -> Iterator[Metric]:
        """Yield each expiry; omit unreadable files."""
        files = self._controller.config.tls_files(self._controller.name)
        expiry = GaugeMetricFamily(
            "forebay_certificate_expiry_timestamp_seconds",
            "Expiry of the certificates of this replica and of the authority, seconds since 1970.",
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
    yield gauge("forebay_drill_under_way", "ID of the drill under way; 0 if none.", under_way)
    age = GaugeMetricFamily(
        "forebay_drill_age_seconds",
        "Time since a drill of this scenario last passed or failed; absent if it never ran.",
        labels=["scenario"],
    )
    for scenario, drill in sorted(latest_completed(state.drills.values()).items()):
        age.add_metric([scenario], max(0, at - drill.ended_at) / MICROSECONDS_PER_SECOND)
    yield age


def gauge(name: str, help_text: str, value: float) -> Metric:
    """Return a gauge without labels."""
    return GaugeMetricFamily(name, help_text, value=float(value))


def counter(name: str, help_text: str, value: float) -> Metric:
    """Return a counter without labels; `name` is without its `_total`."""
    return CounterMetricFamily(name, help_text, value=float(value))
