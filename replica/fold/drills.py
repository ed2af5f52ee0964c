"""Fold events of drills: start, confirmation, renewal, abort, end, and locks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from forebay.replica.messages import events as e
from forebay.replica.model import Drill, DrillLock, DrillVerdict
from forebay.replica.state import StateBuilder
from forebay.replica.values import Instant, LedgerViolation


def _fold_drill_started(builder: StateBuilder, event: e.DrillStarted) -> None:
    if event.drill in builder.drills:
        raise LedgerViolation(f"drill {event.drill} began twice")
    if event.forgotten:
        builder.drills = builder.drills.delete(_find_drill(builder, event.forgotten).id)
    begun = Drill(
        event.drill,
        event.scenario,
        event.target,
        event.by,
        event.lasts_s,
        event.forced,
        Instant(builder.at),
        plan=event.plan,
        lease_s=event.lease_s,
    )
    builder.drills = builder.drills.set(begun.id, begun)


def _find_drill(builder: StateBuilder, drill: int) -> Drill:
    known = builder.drills.get(drill)
    if known is None:
        raise LedgerViolation(f"drill {drill} does not exist")
    return known


def _fold_drill_confirmed(builder: StateBuilder, event: e.DrillConfirmed) -> None:
    builder.drills = builder.drills.set(event.drill, replace(_find_drill(builder, event.drill), second=event.by))


def _fold_drill_renewed(builder: StateBuilder, event: e.DrillRenewed) -> None:
    known = _find_drill(builder, event.drill)
    builder.drills = builder.drills.set(event.drill, replace(known, renewed_at=Instant(builder.at)))


def _fold_drill_abort_requested(builder: StateBuilder, event: e.DrillAbortRequested) -> None:
    builder.drills = builder.drills.set(event.drill, replace(_find_drill(builder, event.drill), abort=event.reason))


def _fold_drill_ended(builder: StateBuilder, event: e.DrillEnded) -> None:
    known = _find_drill(builder, event.drill)
    if known.verdict is not DrillVerdict.UNDER_WAY:
        raise LedgerViolation(f"drill {event.drill} ended twice")
    ended = replace(
        known, verdict=event.verdict, sentence=event.sentence, figures=event.figures, ended_at=Instant(builder.at)
    )
    builder.drills = builder.drills.set(event.drill, ended)


def _fold_drills_locked(builder: StateBuilder, event: e.DrillsLocked) -> None:
    builder.drill_locks = builder.drill_locks.set(event.by, DrillLock(event.by, event.reason, Instant(builder.at)))


def _fold_drills_unlocked(builder: StateBuilder, event: e.DrillsUnlocked) -> None:
    if event.by not in builder.drill_locks:
        raise LedgerViolation(f"{event.by} has no lock on drills")
    builder.drill_locks = builder.drill_locks.delete(event.by)


DRILL_FOLDS: dict[type, Callable[[StateBuilder, Any], None]] = {
    e.DrillStarted: _fold_drill_started,
    e.DrillConfirmed: _fold_drill_confirmed,
    e.DrillRenewed: _fold_drill_renewed,
    e.DrillAbortRequested: _fold_drill_abort_requested,
    e.DrillEnded: _fold_drill_ended,
    e.DrillsLocked: _fold_drills_locked,
    e.DrillsUnlocked: _fold_drills_unlocked,
}
"""Event type -> fold."""
