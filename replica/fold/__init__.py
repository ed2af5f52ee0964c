"""What each event does to a state, by noun."""

from replica.fold.settle import SpeculativeState, is_new, receipt_for, settle, settle_entry
