"""Dispatch events to their folds. A fold decides nothing and cannot fail for an event in a ledger (law 2)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from forebay.replica.fold.accounts import SCHEDULING_FOLDS
from forebay.replica.fold.cluster import CLUSTER_FOLDS, FeatureLevelHolder
from forebay.replica.fold.dedup_cache import SESSION_FOLDS
from forebay.replica.fold.drills import DRILL_FOLDS
from forebay.replica.fold.external_jobs import EXTERNAL_JOB_FOLDS
from forebay.replica.fold.jobs import CHANGE_FOLDS, JOB_FOLDS, fold_submit_steps
from forebay.replica.fold.mail import MAIL_EVENTS, fold_dropped, fold_sent, with_mail
from forebay.replica.fold.runs import RUN_FOLDS as FOLDS_OF_WHOLE_BUFFERS
from forebay.replica.fold.sinks import SINK_FOLDS
from forebay.replica.fold.transfers import TRANSFER_FOLDS
from forebay.replica.messages import events as e
from forebay.replica.state import State, StateBuilder
from forebay.replica.values import Instant, LedgerViolation, Steps


def fold(state: State, events: Iterable[e.Event], at: Instant) -> State:
    """Return the state after `events`, which happened at `at`.

    Raises:
        LedgerViolation: No correct ledger can contain the events.
    """
    builder = StateBuilder(state)
    builder.at = at
    fold_into(builder, events)
    return builder.finish()


def fold_into(builder: StateBuilder, events: Iterable[e.Event]) -> None:
    """Fold `events` onto a builder."""
    for event in events:
        _FOLDS[type(event)](builder, event)


def is_one_step(events: Sequence[e.Event]) -> bool:
    """Return whether the events fold in one step, as most entries do, so that `fold_steps` gains nothing."""
    return not events or (len(events) == 1 and type(events[0]) is not e.JobSubmitted)


def fold_steps(builder: StateBuilder, events: Iterable[e.Event]) -> Steps[None]:
    """Fold `events` onto a builder, one step for each event and for each task of a submitted array."""
    for event in events:
        if isinstance(event, e.JobSubmitted) and event.array is not None:
            yield from fold_submit_steps(builder, event)
        else:
            _FOLDS[type(event)](builder, event)
        yield 1


_FOLDS: dict[type, Callable[[StateBuilder, Any], None]] = {
    **CLUSTER_FOLDS,
    **JOB_FOLDS,
    **SCHEDULING_FOLDS,
    **CHANGE_FOLDS,
    **FOLDS_OF_WHOLE_BUFFERS,
    **TRANSFER_FOLDS,
    **EXTERNAL_JOB_FOLDS,
    **DRILL_FOLDS,
    **SESSION_FOLDS,
    **SINK_FOLDS,
}
_FOLDS |= {e.MailSent: fold_sent, e.MailDropped: fold_dropped}
_FOLDS |= {kind: with_mail(_FOLDS[kind]) for kind in MAIL_EVENTS}


def fold_since_level(level: int, fold: Callable[[_Builder, Any], None]) -> Callable[[_Builder, Any], None]:
    """Wrap the fold of an event introduced with `level`: below that level no ledger can contain the event."""

    def fold_at_level(builder: _Builder, event: Any) -> None:
        fold(builder, event)
        if builder.feature_level < level:
            raise LedgerViolation(
                f"{type(event).__name__} came with feature level {level}, and the cluster is at {builder.feature_level}"
            )

    return fold_at_level


_FOLDS |= {kind: fold_since_level(kind.since_level, _FOLDS[kind]) for kind in e.EVENTS if kind.since_level > 1}


_Builder = TypeVar("_Builder", bound=FeatureLevelHolder)
