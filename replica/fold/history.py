"""The fold of a history that is there already: batch after batch, held against the digests that it records."""

from __future__ import annotations

from replica.fold.apply import settle_into
from replica.messages import Batch
from replica.messages import events as e
from replica.state import RecordedDigests, State, StateBuilder, is_checkpoint
from replica.values import Instant, Revision


class HistoryFold:
    """A state under the batches of a history, one after the other.

    They are folded on one StateBuilder until somebody looks at the state: a State is made at each checkpoint, and not
    after each batch. It comes to what `apply_batch` comes to. Behind an error nothing is left but the State that was
    looked at last.
    """

    def __init__(self, start: State, *, every_digest: bool = False) -> None:
        """Begin with `start`; `every_digest`: compare each that is recorded, whatever that costs."""
        self.digests = RecordedDigests(start, every=every_digest)
        self._reached = start
        self._builder: StateBuilder | None = None

    @property
    def state(self) -> State:
        """The state after what was folded; set by whoever has folded something by himself."""
        if self._builder is not None:
            self._reached, self._builder = self._builder.finish(), None
        return self._reached

    @state.setter
    def state(self, state: State) -> None:
        self._reached, self._builder = state, None

    @property
    def revision(self) -> Revision:
        """The revision of it."""
        return Revision(self._reached.revision if self._builder is None else self._builder.revision)

    @property
    def at(self) -> Instant:
        """The clock of it."""
        return Instant(self._reached.at if self._builder is None else self._builder.at)

    def take(self, index: int, batch: Batch | None) -> bool:
        """Fold entry `index`; return whether it settled anything: another kind of entry, None, and a batch that was
        decided on another revision do not. Raises what `apply_batch` raises, and StateDiffers.
        """
        at = self.at
        if batch is not None and batch.base != self.revision:
            batch = None
        after = at if batch is None else batch.at
        if is_checkpoint(index, at, after) or (batch is not None and _sets_clock(batch)):
            before = self.state
            if batch is not None:
                self._settle(batch)
            self.digests.applied(index, before, batch, self.state)
        elif batch is not None:
            self._settle(batch)
            self.digests.passed(index, batch)
        return batch is not None

    def branch(self) -> HistoryFold:
        """Return another one that goes on from here by itself."""
        other = HistoryFold(self.state)
        other.digests = self.digests.branch()
        return other

    def _settle(self, batch: Batch) -> None:
        builder = StateBuilder(self._reached) if self._builder is None else self._builder
        self._builder = None
        for _ in settle_into(builder, batch):
            pass
        self._builder = builder


def _sets_clock(batch: Batch) -> bool:
    """Whether the clock after a batch may be another than its own."""
    for entry in batch.entries:
        for event in entry.events:
            if type(event) is e.ClockSet:
                return True
    return False
