"""Applied entries as the controller passes them to its observers."""

from cluster.server.applied_log import Applied, AppliedEntry
from replica.messages import Batch
from replica.state import State


def applied_of(before: State, after: State, batch: Batch | None = None, *, index: int = 1) -> Applied:
    """Return an applied entry of term 1 with this batch, between these states."""
    return Applied(before, after, AppliedEntry(index, 1, b"", before.revision, after.revision, batch, False, 1))
