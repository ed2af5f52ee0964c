"""Apply committed batches to the state (laws 1, 4, 6): check the base revision, fold entries, cache replies."""

from __future__ import annotations

from forebay.replica.fold.fold import fold_into, fold_steps, is_one_step
from forebay.replica.messages import Batch, CachedReply, Entry, job_of
from forebay.replica.state import Facts, State, StateBuilder
from forebay.replica.values import Instant, LedgerViolation, Revision, Steps, run_to_end


def apply_batch(state: State, batch: Batch) -> State | None:
    """Return the state after the batch, or None if the batch was decided on another revision.

    Every replica rejects the same batches, so two competing leaders do no harm.

    Raises:
        LedgerViolation: The batch sets the clock back, or contains events that no correct leader can have committed.
    """
    return run_to_end(apply_batch_steps(state, batch))


def apply_batch_steps(state: State, batch: Batch) -> Steps[State | None]:
    """Apply a batch as `apply_batch` does, in steps."""
    if batch.base != state.revision:
        return None
    builder = StateBuilder(state)
    yield from fold_batch_steps(builder, batch)
    return builder.finish()


def fold_batch_steps(builder: StateBuilder, batch: Batch) -> Steps[None]:
    """Fold a batch decided on the builder's revision, in steps.

    Raises:
        LedgerViolation: As for `apply_batch`.
    """
    if batch.at < builder.at:
        raise LedgerViolation(f"the clock of revision {batch.base} goes back from {builder.at} to {batch.at}")
    for entry in batch.entries:
        if builder.revision != batch.base and builder.at != batch.at:
            raise LedgerViolation(f"an entry follows one that set the clock, in the batch of revision {batch.base}")
        if is_one_step(entry.events):
            _apply_entry(builder, entry, batch.at)
            yield 1
        else:
            yield from _apply_entry_steps(builder, entry, batch.at)


def apply_entry(state: State, entry: Entry, at: Instant) -> State:
    """Return the state after one entry, for a proposer that builds a batch."""
    builder = StateBuilder(state)
    _apply_entry(builder, entry, at)
    return builder.finish()


class SpeculativeState:
    """State of a batch under construction: each entry is settled at once, on one StateBuilder for all entries.

    `facts` costs nothing and is enough for most decisions. `state()` builds a complete State, for decisions that
    iterate over jobs and for the finished batch.
    """

    def __init__(self, base: State, at: Instant) -> None:
        """Start from `base` with the clock at `at`.

        Raises:
            ValueError: The clock would go back.
        """
        if at < base.at:
            raise ValueError(f"the clock would go back from {base.at} to {at}")
        self.base = base
        self.at = at
        self.entries: list[Entry] = []
        self._reached = base
        self._settled = 0
        """Number of entries settled in `_reached`; the others are on the builder."""
        self._builder: StateBuilder | None = None

    @property
    def facts(self) -> Facts:
        """Facts after the entries added so far; valid until the next entry is added."""
        if self._builder is None:
            return self._reached
        return self._builder

    @property
    def revision(self) -> int:
        """Revision after the entries added so far."""
        return self._reached.revision if self._builder is None else self._builder.revision

    def add(self, entry: Entry) -> int:
        """Settle another entry; return the job it created or concerns, 0 for none.

        If the fold raises, the entry is not added and the state is unchanged.
        """
        if self._builder is None:
            self._builder = StateBuilder(self._reached)
        try:
            job = _apply_entry(self._builder, entry, self.at)
        except BaseException:
            self._begin_again()
            raise
        self.entries.append(entry)
        return job

    def add_steps(self, entry: Entry) -> Steps[int]:
        """Settle an entry as `add` does, in steps. `facts` is invalid until the last step."""
        if self._builder is None:
            self._builder = StateBuilder(self._reached)
        try:
            job = yield from _apply_entry_steps(self._builder, entry, self.at)
        except BaseException:
            self._begin_again()
            raise
        self.entries.append(entry)
        return job

    def _begin_again(self) -> None:
        """Discard the partly folded entry: restore the builder from the last complete state."""
        self._builder = StateBuilder(self._reached)
        for settled in self.entries[self._settled :]:
            _apply_entry(self._builder, settled, self.at)

    def state(self) -> State:
        """Return the State after the entries added so far."""
        if self._builder is not None:
            self._reached, self._builder = self._builder.finish(), None
            self._settled = len(self.entries)
        return self._reached


def _apply_entry(builder: StateBuilder, entry: Entry, at: Instant) -> int:
    builder.at = at
    builder.revision += 1
    fold_into(builder, entry.events)
    return _cache_reply(builder, entry)


def _apply_entry_steps(builder: StateBuilder, entry: Entry, at: Instant) -> Steps[int]:
    builder.at = at
    builder.revision += 1
    yield from fold_steps(builder, entry.events)
    return _cache_reply(builder, entry)


def _cache_reply(builder: StateBuilder, entry: Entry) -> int:
    """Cache the reply of a folded entry; return the job it created or concerns."""
    job = _job_concerned(entry)
    if entry.id:
        builder.settle(
            entry.id, CachedReply(Revision(builder.revision), job, entry.rejection, entry.digest, entry.actor)
        )
    return job


def _job_concerned(entry: Entry) -> int:
    """Return the job that the entry created or concerns, 0 for none, as in its cached reply."""
    for event in entry.events:
        job = job_of(event)
        if job is not None:
            return job
    return 0
