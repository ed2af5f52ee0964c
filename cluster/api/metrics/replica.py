"""Metrics of one replica: consensus, ledger, checkpoints, commands, drills, and certificates."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

from forebay.cluster.api.history_service import HistoryService
from forebay.cluster.api.metrics.families import MetricFamily, counter, counters, gauge, gauges, histogram, histograms
from forebay.cluster.api.sinks import EventSinks
from forebay.cluster.api.traces import Tracer
from forebay.cluster.consensus import Role
from forebay.cluster.security import Certificate, certificate_of
from forebay.cluster.server import Controller
from forebay.cluster.server.tlog import Publisher
from forebay.replica.messages import features
from forebay.replica.model import latest_completed
from forebay.replica.state import State
from forebay.replica.values import MICROSECONDS_PER_SECOND, Instant


class ReplicaMetrics:
    """Reads consensus, ledger and command metrics at the scrape, so that nothing is updated in between."""

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

    def families(self) -> Iterator[MetricFamily]:
        """Yield all families."""
        yield from self._consensus()
        yield from self._peers()
        yield from self._clocks()
        yield from self._ledger()
        yield from self._snapshots()
        yield from self._history()
        yield from self._traces()
        yield from self._deliveries()
        yield from self._checkpoints()
        yield from self._commands()
        yield from self._jobs()
        yield from self._transfers()
        yield _certificates(self._controller)
        yield from _drills(self._controller.state, self._controller.agreed.now())

    def _consensus(self) -> Iterator[MetricFamily]:
        controller, engine = self._controller, self._controller.engine
        role = gauges("forebay_role", "1 for the current Raft role of this replica.", "role")
        for name in Role:
            role.add(float(engine.role == name), name.value)
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

    def _peers(self) -> Iterator[MetricFamily]:
        engine = self._controller.engine
        lag = gauges("forebay_peer_lag_entries", "Entries the peer lacks; leader only.", "peer")
        contact = gauges("forebay_peer_contact_age_seconds", "Time since the last frame from the peer.", "peer")
        forgot = gauges(
            "forebay_peer_rejected",
            "1 if the peer is rejected because it lost entries it had acknowledged; leader only.",
            "peer",
        )
        offset = gauges(
            "forebay_peer_clock_offset_seconds", "Lead of the peer's wall clock over this replica's.", "peer"
        )
        for peer in engine.peers():
            if peer.clock_offset_s is not None:
                offset.add(peer.clock_offset_s, peer.name)
            if engine.role == Role.LEADER:
                forgot.add(float(peer.forgot), peer.name)
                lag.add(peer.lag_entries, peer.name)
            if peer.last_contact_s is not None:
                contact.add(peer.last_contact_s, peer.name)
        yield lag
        yield forgot
        yield contact
        yield offset

    def _clocks(self) -> Iterator[MetricFamily]:
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

    def _ledger(self) -> Iterator[MetricFamily]:
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

    def _snapshots(self) -> Iterator[MetricFamily]:
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

    def _history(self) -> Iterator[MetricFamily]:
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

    def _traces(self) -> Iterator[MetricFamily]:
        tracer = self._tracer
        yield counter("forebay_traces_sent", "Job traces accepted by the collector.", tracer.sent_count)
        yield counter(
            "forebay_traces_dropped",
            "Job traces dropped because no collector accepted them.",
            tracer.dropped_count,
        )
        yield gauge("forebay_traces_waiting", "Job traces waiting for the collector.", tracer.waiting)

    def _deliveries(self) -> Iterator[MetricFamily]:
        revision, now, deliveries = (
            self._controller.state.revision,
            self._controller.agreed.now(),
            self._sinks.deliveries,
        )
        yield gauges(
            "forebay_sink_lag_revisions",
            "Revisions after the last one that the event sink's receiver accepted; leader only.",
            "sink",
            {name: revision - one.position.revision for name, one in deliveries.items()},
        )
        yield gauges(
            "forebay_sink_lag_seconds",
            "Age of the oldest event that the sink's receiver has not accepted; leader only.",
            "sink",
            {name: one.lag_s(now) for name, one in deliveries.items()},
        )
        yield counters(
            "forebay_sink_events",
            "Events accepted by the sink's receiver since this replica leads.",
            "sink",
            {name: one.events for name, one in deliveries.items()},
        )
        yield counters(
            "forebay_sink_deliveries",
            "Requests accepted by the sink's receiver since this replica leads.",
            "sink",
            {name: one.deliveries for name, one in deliveries.items()},
        )
        yield counters(
            "forebay_sink_failures",
            "Failed attempts to send events since this replica leads.",
            "sink",
            {name: one.failures for name, one in deliveries.items()},
        )

    def _checkpoints(self) -> Iterator[MetricFamily]:
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
        disputes = gauges(
            "forebay_witness_disputes",
            "1 if the witness has cosigned a history that this ledger does not contain: the ledger was reset "
            "or altered; leader only.",
            "witness",
        )
        for one in cosigning.witnesses:
            disputes.add(float(one.name in cosigning.disputes), one.name)
        yield disputes

    def _commands(self) -> Iterator[MetricFamily]:
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
        yield counters("forebay_rejections", "Rejected commands by code.", "code", counts.rejections)

    def _jobs(self) -> Iterator[MetricFamily]:
        """Yield job counters since the process started."""
        totals = self._controller.job_totals
        yield counter("forebay_jobs_submitted", "Jobs submitted; each array task counts as one.", totals.submitted)
        yield counters("forebay_jobs_ended", "Finished jobs by outcome.", "outcome", totals.ended)
        yield counter("forebay_jobs_requeued", "Jobs requeued after a run.", totals.requeued)
        yield counter("forebay_buffers_revoked", "Buffers revoked before their job ran.", totals.revoked)
        failed = MetricFamily(
            "forebay_stage_failures", "Failed operations by stage and by node.", "counter", ("stage", "node")
        )
        for (stage, node), count in sorted(totals.failed.items()):
            failed.add(count, stage, node)
        yield failed
        yield counters("forebay_stage_retries", "Retried operations by stage.", "stage", totals.retried)
        yield histograms(
            "forebay_job_space_wait_seconds",
            "Time from a job's eligibility for its buffer to the allocation of its space.",
            "pool",
            sorted(totals.space_waits.items()),
        )
        yield histogram(
            "forebay_job_start_wait_seconds", "Time from a job's eligibility to its first start.", totals.start_waits
        )
        yield histogram("forebay_job_run_seconds", "Run time of scripts, without suspended time.", totals.runs)
        yield histograms(
            "forebay_stage_seconds",
            "Duration of successful buffer operations from their order; for retried ones, of the last attempt.",
            "stage",
            totals.stages.items(),
        )

    def _transfers(self) -> Iterator[MetricFamily]:
        """Yield the totals of transfer receipts."""
        totals = self._controller.transfer_totals
        ended = MetricFamily(
            "forebay_transfers_ended",
            "Transfers ended since this process started, by stage and outcome.",
            "counter",
            ("stage", "outcome"),
        )
        for (stage, outcome), count in sorted(totals.ended.items()):
            ended.add(count, stage, outcome)
        yield ended
        yield counters("forebay_transferred_files", "Files moved by ended transfers.", "stage", totals.files)
        yield counters("forebay_transferred_bytes", "Bytes moved by ended transfers.", "stage", totals.size_bytes)
        yield counters(
            "forebay_transfer_resumed_bytes",
            "Bytes that a retried transfer did not have to move again.",
            "stage",
            totals.resumed_bytes,
        )
        yield counters(
            "forebay_transfer_retries",
            "Files or chunks moved again because they changed or were damaged.",
            "stage",
            totals.retries,
        )
        yield counters("forebay_transfer_left_out", "Files and links left out of transfers.", "stage", totals.left_out)


def _certificates(controller: Controller) -> MetricFamily:
    """Return the expiry of this replica's certificate and of its authority; omit unreadable files."""
    expiry = MetricFamily(
        "forebay_certificate_expiry_timestamp_seconds",
        "Expiry of the certificates of this replica and of the authority, seconds since 1970.",
        "gauge",
        ("kind", "name"),
    )
    files = controller.config.tls_files(controller.name)
    for kind, path in (("replica", files.certificate), ("authority", files.authority)):
        with contextlib.suppress(OSError):
            found = _certificate(path, path.stat().st_mtime_ns)
            if not found.problem:
                expiry.add(found.valid_until / MICROSECONDS_PER_SECOND, kind, found.name)
    return expiry


@functools.lru_cache(maxsize=4)
def _certificate(path: Path, changed_ns: int) -> Certificate:
    """Return the cached status of a certificate until its file changes."""
    return certificate_of(path.parent, path.stem)


def _drills(state: State, at: Instant) -> Iterator[MetricFamily]:
    """Yield the time each kind of drill was last completed, as a reminder of missing ones."""
    under_way = max((number for number, drill in state.drills.items() if drill.is_under_way(at)), default=0)
    yield gauge("forebay_drill_under_way", "ID of the drill under way; 0 if none.", under_way)
    age = gauges(
        "forebay_drill_age_seconds",
        "Time since a drill of this scenario last passed or failed; absent if it never ran.",
        "scenario",
    )
    for scenario, drill in sorted(latest_completed(state.drills.values()).items()):
        age.add(max(0, at - drill.ended_at) / MICROSECONDS_PER_SECOND, scenario)
    yield age
