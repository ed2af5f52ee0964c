"""Names and units of a drill's figures for display."""

from __future__ import annotations

from typing import Final

from forebay.cluster.system import format_span, readable_size

LABELS: Final = {
    "goal_us": "Goal for writes stopped",
    "write_stop_us": "Writes stopped",
    "read_stop_us": "Reads stopped",
    "stale_read_stop_us": "Stale reads stopped",
    "user_write_stop_us": "User writes stopped",
    "writes_lost": "Acknowledged writes lost",
    "writes_said_lost": "Writes announced as lost",
    "lost_span_us": "Span of the announced writes",
    "runs_again": "Re-runs",
    "stages_again": "Repeated transfers",
    "nodes_lost": "Nodes down",
    "states_agree": "Replicas consistent",
    "folds_agree": "Replay consistent",
    "writes_acknowledged": "Writes acknowledged",
    "writes_unanswered": "Writes unanswered",
    "write_p99_us": "Write latency p99",
    "control_write_p50_us": "Write latency p50 before",
    "control_write_gap_us": "Longest write gap before",
    "control_read_gap_us": "Longest read gap before",
    "handover_us": "Leadership transfer",
    "target_back_us": "Target back",
    "agents_back_us": "Agents back",
    "begun_us": "Fault injected after",
    "held_us": "Fault held",
    "fault_at_us": "Fault at",
    "write_stop_at_us": "Writes stopped at",
    "watched_us": "Observed after the fault",
    "client_late_us": "Client delay",
    "upgraded_us": "Upgrade",
    "stands_loss_us": "Fault tolerant again after",
    "planned_us": "Recovery plan",
    "recovered_us": "Recovery",
    "restored_us": "Restore",
    "fetched_us": "Snapshot fetched",
    "checked_us": "Snapshot checked",
    "folded_us": "Replay",
    "snapshot_bytes": "Snapshot",
    "behind_us": "Age of the backup",
    "behind_revisions": "Revisions not in the backup",
    "uncertain_entries": "Uncertain entries",
}
"""Figure -> label, the most important ones first."""

YES_NO: Final = frozenset({"states_agree", "folds_agree"})
"""Figures that are 1 for yes and 0 for no."""


def display_order(figures: dict[str, int]) -> list[str]:
    """Return the names of the figures in the order of LABELS, then others by name."""
    known = [name for name in LABELS if name in figures]
    return [*known, *sorted(figures.keys() - LABELS.keys())]


def label_of(name: str) -> str:
    """Return the label of a figure."""
    return LABELS.get(name) or name.removesuffix("_us").removesuffix("_bytes").replace("_", " ").capitalize()


def format_figure(name: str, value: int) -> str:
    """Format a figure in human units: `375.5 ms`, `yes`, `12 MiB`."""
    if name in YES_NO:
        return "yes" if value else "no"
    if name.endswith("_us"):
        return format_duration(value)
    return readable_size(value) if name.endswith("_bytes") else str(value)


def format_duration(length_us: int) -> str:
    """Format a measured time; below a second to a tenth of a millisecond."""
    return f"{length_us / 1000:.1f} ms" if abs(length_us) < 1_000_000 else format_span(length_us)
