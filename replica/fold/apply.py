"""What one agreed batch does to the state: the check of its base, its entries, their receipts (laws 1, 4, 6)."""

from __future__ import annotations

from replica.fold.fold import fold_into, folding, is_one_step
from replica.messages import Batch, Entry, Receipt, job_of
from replica.state import Facts, State, StateBuilder
from replica.values import Instant, LedgerViolation, Revision, Steps, whole


def apply_batch(state: State, batch: Batch) -> State | None:
    """Return the state after the batch, or None where the check of its base refuses it: it was decided on another
    revision.

    Every replica refuses the same batches, so two would-be leaders are harmless. Raises LedgerViolation for a batch
    whose clock goes backwards or whose events no ledger can hold.
    """
    return whole(applying(state, batch))


def applying(state: State, batch: Batch) -> Steps[State | None]:
    """Do what `apply_batch` does, in steps."""
    if batch.base != state.revision:
        return None
    builder = StateBuilder(state)
    yield from settle_into(builder, batch)
    return builder.finish()


def settle_into(builder: StateBuilder, batch: Batch) -> Steps[None]:
    """Settle on a builder a batch that was decided on its revision, in steps; the errors of `apply_batch`."""
    if batch.at < builder.at:
        raise LedgerViolation(f"the clock of revision {batch.base} goes back from {builder.at} to {batch.at}")
    for entry in batch.entries:
        if builder.revision != batch.base and builder.at != batch.at:
            raise LedgerViolation(f"an entry follows one that set the clock, in the batch of revision {batch.base}")
        if is_one_step(entry.events):
            _apply_entry(builder, entry, batch.at)
            yield 1
        else:
            yield from _applying_entry(builder, entry, batch.at)


def apply_entry(state: State, entry: Entry, at: Instant) -> State:
    """Return the state after one entry: what a proposer's speculative state goes through while it builds a batch."""
    builder = StateBuilder(state)
    _apply_entry(builder, entry, at)
    return builder.finish()


class SpeculativeState:
    """A batch under construction: each entry is settled at once, on one StateBuilder for all of them.

    `facts` is what to decide by and costs nothing; `state()` makes a whole State, and is for what has to walk over
    jobs, and for the end.
    """

    def __init__(self, base: State, at: Instant) -> None:
        """Begin on `base` with the clock at `at`, which must not be before its own."""
        if at < base.at:
            raise ValueError(f"the clock would go back from {base.at} to {at}")
        self.base = base
        self.at = at
        self.entries: list[Entry] = []
        self._reached = base
        self._settled = 0
        """Entries that are settled in `_reached`; the others are on the builder."""
        self._builder: StateBuilder | None = None

    @property
    def facts(self) -> Facts:
        """What is true after the entries so far; valid until the next one is added."""
        if self._builder is None:
            return self._reached
        return self._builder

    @property
    def revision(self) -> int:
        """The revision after the entries so far."""
        return self._reached.revision if self._builder is None else self._builder.revision

    def add(self, entry: Entry) -> int:
        """Settle one more entry; return the job that it made or concerns, 0 for none.

        Raises what folding raises; then the entry was not added and nothing is changed.
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

    def adding(self, entry: Entry) -> Steps[int]:
        """Do what `add` does, in steps; `facts` is nothing to decide by until it is done."""
        if self._builder is None:
            self._builder = StateBuilder(self._reached)
        try:
            job = yield from _applying_entry(self._builder, entry, self.at)
        except BaseException:
            self._begin_again()
            raise
        self.entries.append(entry)
        return job

    def _begin_again(self) -> None:
        """Forget a part of an entry's events that may be on the builder: begin again from what was whole."""
        self._builder = StateBuilder(self._reached)
        for settled in self.entries[self._settled :]:
            _apply_entry(self._builder, settled, self.at)

    def state(self) -> State:
        """Return the State after the entries so far."""
        if self._builder is not None:
            self._reached, self._builder = self._builder.finish(), None
            self._settled = len(self.entries)
        return self._reached


def _apply_entry(builder: StateBuilder, entry: Entry, at: Instant) -> int:
    builder.at = at
    builder.revision += 1
    fold_into(builder, entry.events)
    return _settled(builder, entry)


def _applying_entry(builder: StateBuilder, entry: Entry, at: Instant) -> Steps[int]:
    builder.at = at
    builder.revision += 1
    yield from folding(builder, entry.events)
    return _settled(builder, entry)


def _settled(builder: StateBuilder, entry: Entry) -> int:
    """Keep the receipt of an entry whose events are folded; return the job that it made or concerns."""
    job = _job_concerned(entry)
    if entry.id:
        builder.settle(entry.id, Receipt(Revision(builder.revision), job, entry.refusal, entry.digest, entry.actor))
    return job


def _job_concerned(entry: Entry) -> int:
    """Return the job that the entry made or concerns, 0 for none: what its receipt says."""
    for event in entry.events:
        job = job_of(event)
        if job is not None:
            return job
    return 0
