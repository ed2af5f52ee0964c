"""Replay: folds the ledger again from its first entry or a snapshot, and checks the state digests."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from forebay.replica.fold import HistoryFold, apply_entry
from forebay.replica.messages import Batch, ReleaseNeeded
from forebay.replica.state import EMPTY, DigestChecker, State, StateDigestMismatch, find_violations, state_digest
from forebay.replica.values import LedgerViolation, Revision
from forebay.snapshots import Image
from forebay.wal import (
    CodecError,
    EntryKind,
    Ledger,
    LedgerBroken,
    LedgerEntry,
    decode_batch,
    decode_configuration,
    kind_of,
)

READ_ENTRIES = 1_024
"""Number of entries read between two progress reports."""

Progress = Callable[[int, int], None]


class ReplayRefused(Exception):
    """Replay impossible as requested: required data is not held here."""


class ReplayFailed(Exception):
    """Ledger that this release cannot have agreed on; `index` is the first entry that proves this."""

    def __init__(self, index: int, sentence: str) -> None:
        super().__init__(f"the replay fails at entry {index}: {sentence}")
        self.index = index
        self.sentence = sentence


@contextmanager
def failing_at(index: int) -> Iterator[None]:
    """Convert errors from folding a forged ledger into ReplayFailed at an entry.

    A fold is total only for decided events. Forged events can cause any error, for example for an unknown node or a
    negative size.
    """
    try:
        yield
    except ReleaseNeeded:
        raise
    except (CodecError, LedgerViolation) as error:
        raise ReplayFailed(index, str(error)) from error
    except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ReplayFailed(index, f"its events cannot have been decided: {type(error).__name__}: {error}") from error


class EntryCounts(NamedTuple):
    """Numbers of entries by kind, and of recorded and compared state digests."""

    batches: int
    no_ops: int
    void_batches: int
    recorded: int
    compared: int


class ReplayFold:
    """State of a replay, which compares the recorded state digests as it reads them."""

    def __init__(self, state: State, index: int, digest: bytes, at_revision: int | None, *, every_digest: bool) -> None:
        self.history = HistoryFold(state, every_digest=every_digest)
        self.last_index, self.ledger_digest = index, digest
        self.first_index = index + 1
        self.at_revision = at_revision
        self.batches = self.no_ops = self.void_batches = 0

    def counts(self) -> EntryCounts:
        """Return the counts of entries and digests."""
        return EntryCounts(self.batches, self.no_ops, self.void_batches, self.digests.recorded, self.digests.compared)

    def add(self, before: EntryCounts) -> None:
        """Add the counts of another replay that ended where this one begins."""
        self.batches += before.batches
        self.no_ops += before.no_ops
        self.void_batches += before.void_batches
        self.first_index -= before.batches + before.no_ops + before.void_batches
        self.digests.recorded += before.recorded
        self.digests.compared += before.compared

    def branch(self) -> "ReplayFold":
        """Return an independent copy that continues from here."""
        other = copy.copy(self)
        other.history = self.history.branch()
        return other

    @property
    def state(self) -> State:
        """Return the state after the entries.

        Reading this property after each entry costs more than folding the entry.
        """
        return self.history.state

    @state.setter
    def state(self, state: State) -> None:
        self.history.state = state

    @property
    def digests(self) -> DigestChecker:
        """Return the state digests recorded in the ledger so far."""
        return self.history.digests

    @property
    def entries(self) -> int:
        """Return the number of entries read."""
        return self.last_index - self.first_index + 1

    @property
    def state_digest(self) -> bytes:
        """Return the digest of the state after the entries."""
        return state_digest(self.state)

    @property
    def has_arrived(self) -> bool:
        """Return whether the requested revision is reached."""
        return self.at_revision is not None and self.history.revision >= self.at_revision

    def take(self, entry: LedgerEntry) -> None:
        """Fold the next entry.

        Raises:
            ReplayRefused: The entry does not follow the last one.
            ReplayFailed: It cannot be folded.
            StateDigestMismatch: It records another state digest than the replay's.
        """
        if entry.index != self.last_index + 1:
            raise ReplayRefused(
                f"this replica does not hold the entries {self.last_index + 1} to {entry.index - 1}; replay the ledger "
                f"of a replica that does, or start from a snapshot with --from-snapshot"
            )
        with failing_at(entry.index):
            match kind_of(entry.data):
                case EntryKind.NO_OP:
                    self._settle_nothing(entry.index)
                case EntryKind.CONFIGURATION:
                    decode_configuration(entry.data)
                    self._settle_nothing(entry.index)
                case EntryKind.BATCH:
                    self._settle(entry.index, decode_batch(entry.data))
        self.last_index, self.ledger_digest = entry.index, entry.digest

    def _settle_nothing(self, index: int) -> None:
        self.no_ops += 1
        self.history.take(index, None)

    def _settle(self, index: int, batch: Batch) -> None:
        last = batch.base + len(batch.entries)
        if self.at_revision is not None and batch.base == self.history.revision and last > self.at_revision:
            # The requested revision is inside this batch, so only the first entries of the batch are settled.
            self.batches += 1
            state = self.state
            for record in batch.entries[: self.at_revision - batch.base]:
                state = apply_entry(state, record, batch.at)
            self.state = state
        elif self.history.take(index, batch):
            self.batches += 1
        else:
            self.void_batches += 1


def replay(
    ledger: Ledger,
    *,
    start: Image | None = None,
    at_revision: int | None = None,
    progress: Progress | None = None,
) -> ReplayFold:
    """Fold the ledger from its start or from a snapshot's image, up to `at_revision` or to its end.

    The end is determined at the start of the call, because a running replica continues to append. `progress(done index,
    last index)` is called regularly.

    Raises:
        ReplayRefused: Entries are not held here, or the revision does not exist.
        ReplayFailed: An entry cannot have been agreed on.
        LedgerBroken: The ledger is damaged.
        StateDigestMismatch: A state differs from its recorded digest.
    """
    ledger = ledger.as_of_now()
    try:
        return _replay_once(ledger, start, at_revision, progress, every_digest=False)
    except StateDigestMismatch:
        # Only some digests were compared: repeat with every digest, to locate the first difference.
        return _replay_once(ledger, start, at_revision, progress, every_digest=True)


def _replay_once(
    ledger: Ledger, start: Image | None, at_revision: int | None, progress: Progress | None, *, every_digest: bool
) -> ReplayFold:
    if start is None:
        replaying = from_nothing(at_revision, every_digest=every_digest)
    else:
        replaying = from_image(ledger, start, at_revision, every_digest=every_digest)
    if at_revision is not None and at_revision < replaying.state.revision:
        raise ReplayRefused(f"revision {at_revision} lies before revision {replaying.state.revision} of the snapshot")
    fold(ledger, replaying, ledger.applied_index, progress)
    return finish_replay(ledger, replaying)


def from_nothing(at_revision: int | None = None, *, every_digest: bool = False) -> ReplayFold:
    """Return a replay that starts with the first entry."""
    return ReplayFold(EMPTY, 0, b"", at_revision, every_digest=every_digest)


def from_image(
    ledger: Ledger, image: Image, at_revision: int | None = None, *, every_digest: bool = False
) -> ReplayFold:
    """Return a replay that starts after a snapshot.

    Raises:
        ReplayRefused: The ledger ends before the snapshot.
        ReplayFailed: The snapshot belongs to another ledger.
    """
    if image.index > ledger.applied_index:
        raise ReplayRefused(
            f"the snapshot is of entry {image.index}, the ledger ends at {ledger.applied_index}; use an older snapshot"
        )
    known = next(iter(ledger.read(image.index, limit=1)), None)
    if known is not None and known.index == image.index and known.digest != image.chain_digest:
        raise ReplayFailed(image.index, "the snapshot belongs to another ledger: their digests differ")
    return ReplayFold(image.state, image.index, image.chain_digest, at_revision, every_digest=every_digest)


def fold(ledger: Ledger, replaying: ReplayFold, last_index: int, progress: Progress | None = None) -> None:
    """Fold up to an entry, or to the requested revision. Exceptions as `replay`."""
    while replaying.last_index < last_index and not replaying.has_arrived:
        before = replaying.last_index
        for entry in ledger.read(before + 1, limit=min(READ_ENTRIES, last_index - before)):
            replaying.take(entry)
            if replaying.has_arrived:
                break
        if replaying.last_index == before:
            raise ReplayRefused(
                f"this replica does not hold the entries {before + 1} to {last_index}; replay the ledger of a replica "
                f"that does, or start from a snapshot with --from-snapshot"
            )
        if progress is not None:
            progress(replaying.last_index, ledger.applied_index)


def finish_replay(ledger: Ledger, replaying: ReplayFold) -> ReplayFold:
    """Check the result of a replay at its end, and return it. Exceptions as `replay`."""
    with failing_at(replaying.last_index):
        state = replaying.state
        replaying.digests.finish()
    if replaying.at_revision is not None and state.revision != replaying.at_revision:
        raise ReplayRefused(f"revision {replaying.at_revision} is not settled; the last one is {state.revision}")
    if replaying.at_revision is None:
        _compare(ledger, replaying)
    with failing_at(replaying.last_index):
        faults = find_violations(state)
        state_digest(state)
    if faults:
        raise ReplayFailed(replaying.last_index, "; ".join(faults))
    return replaying


def _compare(ledger: Ledger, replaying: ReplayFold) -> None:
    revision: Revision | int = ledger.applied_revision
    if revision != replaying.state.revision:
        raise ReplayFailed(
            replaying.last_index,
            f"the ledger ends at revision {replaying.state.revision}, not {revision}, which the replica recorded",
        )
    if replaying.ledger_digest and ledger.applied_digest != replaying.ledger_digest:
        raise LedgerBroken(replaying.last_index, "the ledger's digest differs from the one that the replica recorded")
