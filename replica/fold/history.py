"""Fold a recorded history batch by batch, and compare the states with the digests that it records."""

from __future__ import annotations

from forebay.replica.fold.apply import fold_batch_steps
from forebay.replica.messages import Batch
from forebay.replica.messages import events as e
from forebay.replica.state import DigestChecker, State, StateBuilder, is_checkpoint
from forebay.replica.values import Instant, Revision


class HistoryFold:
    """State under the consecutive batches of a recorded history.

    Batches are folded onto one StateBuilder. A State is built only when it is read, not after each batch, with the same
    result as `apply_batch`. After an error, only the State that was read last is available.
    """

    def __init__(self, start: State, *, every_digest: bool = False) -> None:
        """Begin with `start`. With `every_digest`, compare each recorded digest regardless of the cost."""
        self.digests = DigestChecker(start, every=every_digest)
        self._reached = start
        self._builder: StateBuilder | None = None

    @property
    def state(self) -> State:
        """State after the folded batches. Callers that fold by themselves assign it."""
        if self._builder is not None:
            self._reached, self._builder = self._builder.finish(), None
        return self._reached

    @state.setter
    def state(self, state: State) -> None:
        self._reached, self._builder = state, None

    @property
    def revision(self) -> Revision:
        """Revision after the folded batches."""
        return Revision(self._reached.revision if self._builder is None else self._builder.revision)

    @property
    def at(self) -> Instant:
        """Replicated clock after the folded batches."""
        return Instant(self._reached.at if self._builder is None else self._builder.at)

    def take(self, index: int, batch: Batch | None) -> bool:
        """Fold entry `index`; return whether it settled commands.

        `batch` is None for entries of other kinds. They settle no commands, nor does a batch decided on another
        revision.

        Raises:
            StateDigestMismatch: The state has another digest than the recorded one.
            LedgerViolation: As for `apply_batch`.
        """
        at = self.at
        if batch is not None and batch.base != self.revision:
            batch = None
        after = at if batch is None else batch.at
        if is_checkpoint(index, at, after) or (batch is not None and _sets_clock(batch)):
            before = self.state
            if batch is not None:
                self._settle(batch)
            self.digests.observe(index, before, batch, self.state)
        elif batch is not None:
            self._settle(batch)
            self.digests.observe_batch(index, batch)
        return batch is not None

    def branch(self) -> HistoryFold:
        """Return an independent copy that continues from here."""
        other = HistoryFold(self.state)
        other.digests = self.digests.branch()
        return other

    def _settle(self, batch: Batch) -> None:
        builder = StateBuilder(self._reached) if self._builder is None else self._builder
        self._builder = None
        for _ in fold_batch_steps(builder, batch):
            pass
        self._builder = builder


def _sets_clock(batch: Batch) -> bool:
    """Return whether the clock after a batch may differ from the batch's own time."""
    for entry in batch.entries:
        for event in entry.events:
            if type(event) is e.ClockSet:
                return True
    return False
