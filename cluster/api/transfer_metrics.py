"""What Prometheus is told of transfers: what agents say at the moment (leader only), and what receipts add up to."""

from __future__ import annotations

from collections import Counter as Count
from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from cluster.server import Controller
from replica.model import TRANSFERS
from replica.operations import rules_in_force
from replica.state import State


def transfer_metrics(controller: Controller, state: State) -> Iterator[Metric]:
    """Yield every family about transfers."""
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
