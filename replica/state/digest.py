"""Digest of a State: equal states have equal digests on every machine, regardless of PYTHONHASHSEED.

Replicas digest their states at the same entries, and the leader records the digest of the majority (`StateDigested`).
A ledger thus contains the digests it must lead to, and every reader that folds it can compare them.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import msgspec

from forebay.replica.messages import Batch, Entry, StateDigested
from forebay.replica.state.state import TABLES, State
from forebay.replica.values import Instant, Revision, seconds

_ENCODER = msgspec.msgpack.Encoder()

CHECKPOINT_ENTRIES: Final = 4096
"""Maximum entries between digested states, count: under full load a few times a minute."""

CHECKPOINT_S: Final = 60
"""Period of the leader's clock after which a state is digested, whole seconds."""

STATES_HELD_MAX: Final = 8
"""States held for future digest records, count: those of four checkpoints. A record follows some seconds later; under
full load the states of two checkpoints share little memory.
"""

RECORDS_PER_EVENT: Final = 1
"""Maximum records of a digested state per folded command and event. A record takes 0.7 us and a command with its event
15, so that comparing takes a tenth of the time of folding, for states of any size.
"""

RECORDS_ALWAYS: Final = 1_000
"""Records up to which a state is always digested, count: they take less than a millisecond."""

_RECORDING: Final = "record_state_digest"
"""Name of the command that records a digest, as in entries."""


def state_records(state: State) -> Iterator[tuple[str, object]]:
    """Yield (section, record) in canonical order: the scalars, then the maps of TABLES, without derived maps."""
    yield (
        "state",
        (
            state.cluster_id,
            state.name,
            state.feature_level,
            state.revision,
            state.at,
            state.site,
            state.scheduling_rules,
            state.transfer_rules,
            state.next_job,
            state.receipt_seconds,
            state.oldest_receipt,
            state.receipts_horizon_ms,
            state.clock_set_back,
        ),
    )
    for table in TABLES:
        for record in table.rows(state):
            yield table.field, record


def state_digest(state: State) -> bytes:
    """Return SHA-256 over the canonical records of the state, 32 bytes."""
    digest = hashlib.sha256()
    for section, record in state_records(state):
        encoded = _ENCODER.encode((section, record))
        digest.update(len(encoded).to_bytes(8, "big"))
        digest.update(encoded)
    return digest.digest()


def table_digests(state: State) -> dict[str, bytes]:
    """Return SHA-256 over the canonical records of each nonempty table, 32 bytes each."""
    digests: dict[str, Any] = {}
    for section, record in state_records(state):
        if section not in digests:
            digests[section] = hashlib.sha256()
        digests[section].update(_ENCODER.encode(record))
    return {section: digest.digest() for section, digest in digests.items()}


def is_checkpoint(index: int, before: Instant, after: Instant) -> bool:
    """Return whether all replicas digest the state after entry `index`; otherwise none does."""
    return index % CHECKPOINT_ENTRIES == 0 or _passes_a_minute(before, after)


def _passes_a_minute(before: Instant, after: Instant) -> bool:
    period = seconds(CHECKPOINT_S)
    return before // period != after // period


def recorded_digests(batch: Batch) -> Iterator[StateDigested]:
    """Yield the digests that a batch records.

    The entries' commands are compared first, because this runs for each batch.
    """
    for entry in batch.entries:
        if entry.command == _RECORDING:
            yield from _recorded_by(entry)


def _recorded_by(entry: Entry) -> Iterator[StateDigested]:
    return (event for event in entry.events if type(event) is StateDigested)


class StateDigestMismatch(Exception):
    """A state whose digest differs from the one that entry `index` records.

    The states first differ between `after`, the last revision compared, and `revision`.
    """

    def __init__(self, index: int, after: Revision, recorded: StateDigested, digest: bytes) -> None:
        revision = Revision(recorded.revision)
        super().__init__(
            f"the state after revision {revision} has the digest {digest.hex()}, and entry {index} records "
            f"{recorded.state.hex()}: they differ first between revision {after} and revision {revision}"
        )
        self.index, self.after, self.revision = index, after, revision


class _PendingComparison(NamedTuple):
    entry_index: int
    recorded: StateDigested
    state: State


class DigestChecker:
    """Compares states of a replay with the digests recorded in the ledger.

    A leader records the digest of a checkpoint, or of a state that did not change for a minute. The states before and
    after each checkpoint entry are held until then. Large states are not all digested, but the last one always is.
    """

    def __init__(self, start: State, *, every: bool = False) -> None:
        """Begin with `start`; `every` compares each digest at any cost."""
        self.recorded = self.compared = 0
        """Numbers of digests recorded in the ledger, and of those compared."""
        self.agreed = start.revision
        """Last revision whose state matched its recorded digest; at first where the fold begins."""
        self._every = every
        self._held: dict[int, State] = {start.revision: start}
        self._waiting: _PendingComparison | None = None
        """The last digest, if it was not compared."""
        self._folded = 0
        """Events folded since the last comparison."""
        self._holds = True

    @property
    def awaits_record(self) -> bool:
        """Return whether the ledger may still record the digest of a held state."""
        return bool(self._held)

    def stop_holding(self, last: State) -> None:
        """Hold no states from `last` on, from which another reader continues."""
        self._holds = False
        self._held.pop(last.revision, None)

    def observe(self, index: int, before: State, batch: Batch | None, after: State) -> None:
        """Process a folded entry; `batch` is None if it settled nothing.

        Raises:
            StateDigestMismatch: a state differs from its recorded digest.
        """
        is_held = is_checkpoint(index, before.at, after.at)
        if is_held:
            self._hold(before)
        if batch is not None:
            self.observe_batch(index, batch)
        if is_held:
            self._hold(after)

    def observe_batch(self, index: int, batch: Batch) -> None:
        """Process the batch of a folded entry that is not a checkpoint.

        Raises:
            StateDigestMismatch: a state differs from its recorded digest.
        """
        for entry in batch.entries:
            self._folded += 1 + len(entry.events)
            if entry.command == _RECORDING:
                for recorded in _recorded_by(entry):
                    self._take(index, recorded)

    def _hold(self, state: State) -> None:
        if not self._holds:
            return
        self._held[state.revision] = state
        if len(self._held) > STATES_HELD_MAX:
            del self._held[next(iter(self._held))]

    def branch(self) -> DigestChecker:
        """Return an independent copy that continues from here."""
        other = copy.copy(self)
        other._held = dict(self._held)
        return other

    def finish(self) -> None:
        """Compare the last digest, if it was not compared.

        Raises:
            StateDigestMismatch: the state differs from its recorded digest.
        """
        if self._waiting is not None:
            self._compare(self._waiting)

    def _take(self, index: int, recorded: StateDigested) -> None:
        self.recorded += 1
        state = self._held.get(recorded.revision)
        if state is None:  # older than the start, or the clock stood still
            return
        for revision in [revision for revision in self._held if revision < recorded.revision]:
            del self._held[revision]  # records arrive in the order of revisions
        self._waiting = _PendingComparison(index, recorded, state)
        records = sum(len(getattr(state, row.field)) for row in TABLES)
        if self._every or records <= max(RECORDS_ALWAYS, RECORDS_PER_EVENT * self._folded):
            self._compare(self._waiting)

    def _compare(self, waiting: _PendingComparison) -> None:
        index, recorded, state = waiting
        digest = state_digest(state)
        if digest != recorded.state:
            raise StateDigestMismatch(index, self.agreed, recorded, digest)
        self.compared += 1
        self.agreed = state.revision
        self._waiting, self._folded = None, 0
