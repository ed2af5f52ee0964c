"""Fold events of event sinks: the revision up to which each receiver has accepted all events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from forebay.replica.messages import events as e
from forebay.replica.state import StateBuilder
from forebay.replica.values import LedgerViolation


def _fold_advanced(builder: StateBuilder, event: e.SinkAdvanced) -> None:
    if event.revision > builder.revision or event.revision <= builder.sink_marks.get(event.sink, -1):
        raise LedgerViolation(f"sink {event.sink!r} advanced to revision {event.revision} at {builder.revision}")
    builder.sink_marks = builder.sink_marks.set(event.sink, event.revision)


def _fold_removed(builder: StateBuilder, event: e.SinkRemoved) -> None:
    if event.sink not in builder.sink_marks:
        raise LedgerViolation(f"sink {event.sink!r} was removed, and has no mark")
    builder.sink_marks = builder.sink_marks.delete(event.sink)


SINK_FOLDS: dict[type, Callable[[StateBuilder, Any], None]] = {
    e.SinkAdvanced: _fold_advanced,
    e.SinkRemoved: _fold_removed,
}
"""Event type -> fold, merged in `replica.fold.fold`."""
