"""Event handlers: the effect of each event on a state, one module per resource."""

from replica.fold.answers import (
    Bounds,
    answer_to,
    is_forgotten,
    is_routine,
    may_keep,
    may_keep_answer,
    may_settle,
    receipt_for,
    unknown_session,
)
from replica.fold.apply import SpeculativeState, apply_batch, apply_entry, applying
from replica.fold.history import HistoryFold
