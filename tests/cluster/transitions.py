"""Applied entries as the controller passes them to its observers."""

from forebay.cluster.server.applied_log import AppliedEntry, Transition
from forebay.replica.messages import Batch
from forebay.replica.state import State


def transition_of(before: State, after: State, batch: Batch | None = None, *, index: int = 1) -> Transition:
    """Return an applied entry of term 1 with this batch, between these states."""
    return Transition(before, after, AppliedEntry(index, 1, b"", before.revision, after.revision, batch, False, 1))
