"""Folding: what each event does to the state. It decides nothing, and it cannot fail for an event of a ledger (law
2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from replica.fold_changes import CHANGE_FOLDS
from replica.fold_cluster import CLUSTER_FOLDS
from replica.fold_jobs import JOB_FOLDS
from replica.fold_scheduling import SCHEDULING_FOLDS
from replica.fold_transfers import TRANSFER_FOLDS
from replica.fold_whole import FOLDS as FOLDS_OF_WHOLE_BUFFERS
from replica.messages import events as e
from replica.messages import features
from replica.model import mail
from replica.state.draft import Draft as Draft
from replica.state.state import State
from replica.values.errors import LedgerViolation as LedgerViolation
from replica.values.units import Instant


def fold(state: State, events: Iterable[e.Event], at: Instant) -> State:
    """Return the state after `events`, which happened at `at`. Raises LedgerViolation for what no ledger can hold."""
    draft = Draft(state)
    draft.at = at
    fold_into(draft, events)
    return draft.finish()


def fold_into(draft: Draft, events: Iterable[e.Event]) -> None:
    """Fold `events` onto a draft."""
    for event in events:
        _FOLDS[type(event)](draft, event)


_FOLDS: dict[type, Callable[[Draft, Any], None]] = {
    **CLUSTER_FOLDS,
    **JOB_FOLDS,
    **SCHEDULING_FOLDS,
    **CHANGE_FOLDS,
    **FOLDS_OF_WHOLE_BUFFERS,
    **TRANSFER_FOLDS,
}
_FOLDS |= {e.MailSent: mail.fold_sent, e.MailDropped: mail.fold_dropped}
_FOLDS |= {kind: mail.owing(_FOLDS[kind]) for kind in mail.OWING}
_FOLDS |= {kind: features.since(level, _FOLDS[kind]) for kind, level in features.EVENT_LEVELS.items()}
