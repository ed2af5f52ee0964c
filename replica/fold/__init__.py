"""Event handlers: the effect of each event on a state, one module per resource."""

from forebay.replica.fold.apply import SpeculativeState, apply_batch, apply_batch_steps, apply_entry
from forebay.replica.fold.dedup_cache import (
    CacheLimits,
    find_reply,
    is_certainly_new,
    look_up_reply,
    may_be_forgotten,
    may_cache,
    may_cache_next_reply,
    may_cache_reply,
    unknown_session_rejection,
)
from forebay.replica.fold.history import HistoryFold
