"""Folding: what each event does to the state. It decides nothing, and it cannot fail for an event of a ledger (law
2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from replica.fold.accounts import SCHEDULING_FOLDS
from replica.fold.cluster import CLUSTER_FOLDS, Levelled
from replica.fold.jobs import CHANGE_FOLDS, JOB_FOLDS
from replica.fold.mail import OWING, fold_dropped, fold_sent, owing
from replica.fold.runs import FOLDS as FOLDS_OF_WHOLE_BUFFERS
from replica.fold.transfers import TRANSFER_FOLDS
from replica.messages import events as e
from replica.state import State, StateBuilder
from replica.values import Instant, LedgerViolation


def fold(state: State, events: Iterable[e.Event], at: Instant) -> State:
    """Return the state after `events`, which happened at `at`. Raises LedgerViolation for what no ledger can hold."""
    draft = StateBuilder(state)
    draft.at = at
    fold_into(draft, events)
    return draft.finish()


def fold_into(draft: StateBuilder, events: Iterable[e.Event]) -> None:
    """Fold `events` onto a draft."""
    for event in events:
        _FOLDS[type(event)](draft, event)


_FOLDS: dict[type, Callable[[StateBuilder, Any], None]] = {
    **CLUSTER_FOLDS,
    **JOB_FOLDS,
    **SCHEDULING_FOLDS,
    **CHANGE_FOLDS,
    **FOLDS_OF_WHOLE_BUFFERS,
    **TRANSFER_FOLDS,
}
_FOLDS |= {e.MailSent: fold_sent, e.MailDropped: fold_dropped}
_FOLDS |= {kind: owing(_FOLDS[kind]) for kind in OWING}


def since(level: int, fold: Callable[[_Draft, Any], None]) -> Callable[[_Draft, Any], None]:
    """Return the fold of an event that came with `level`: below it no ledger can hold the event."""

    def fold_at_level(draft: _Draft, event: Any) -> None:
        fold(draft, event)
        if draft.feature_level < level:
            raise LedgerViolation(
                f"{type(event).__name__} came with feature level {level}, and the cluster is at {draft.feature_level}"
            )

    return fold_at_level


_FOLDS |= {kind: since(kind.since_level, _FOLDS[kind]) for kind in e.EVENTS if kind.since_level > 1}


_Draft = TypeVar("_Draft", bound=Levelled)
