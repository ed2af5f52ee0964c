"""What each event does to a state, by noun."""

from replica.fold.apply import SpeculativeState, apply_batch, apply_entry, is_new, receipt_for
