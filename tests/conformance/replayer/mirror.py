"""Everything that Forebay showed of its jobs: the replica's own ledger, folded event by event.

The ledger is read from the replica's directory while it runs, as `forebay audit` does, so nothing is sampled: each
event gives the state, reason and buffer state that a listing at that very moment would have given.
"""

from pathlib import Path
from typing import NamedTuple

from forebay.replica.fold.apply import apply_entry
from forebay.replica.fold.fold import fold_into
from forebay.replica.messages.entries import Batch
from forebay.replica.model.jobs import Hold
from forebay.replica.state.builder import StateBuilder
from forebay.replica.state.state import EMPTY, State
from forebay.replica.values.units import Revision
from forebay.replica.views.jobs import buffer_word, reason_of
from forebay.wal.codec import EntryKind, decode_batch, kind_of
from forebay.wal.environment import Environment
from forebay.wal.failures import RecoveryRefused
from forebay.wal.ledger import Ledger
from tests.conformance.replayer.compare import Shown

READ_ENTRIES = 256
"""Entries read at once, count."""


class Moment(NamedTuple):
    """The state after one event, and when the leader's clock said it happened, seconds."""

    state: State
    at_s: float


class Mirror:
    """A copy of the state of one replica, and everything that each job ever showed."""

    def __init__(self, directory: Path) -> None:
        """Prepare to read the ledger in `directory`, which may not be there yet."""
        self._directory = directory
        self._environment: Environment | None = None
        self._index = 0
        self.state: State = EMPTY
        self.moments: list[Moment] = []
        """After each event, oldest first; the State of an older one is shared with the newer ones."""
        self.shown: dict[int, list[Shown]] = {}
        self.setups: list[int] = []
        """Jobs in the order in which their space was reserved."""

    def poll(self) -> int:
        """Read what is new; return how many events that were."""
        if self._environment is None:
            try:
                self._environment = Environment.open_readonly(self._directory)
            except RecoveryRefused:
                return 0
        before = len(self.moments)
        try:
            for entry in Ledger(self._environment).read(self._index + 1, limit=READ_ENTRIES):
                if kind_of(entry.data) is EntryKind.BATCH:
                    self._settle(decode_batch(entry.data))
                self._index = entry.index
        except RecoveryRefused:
            return 0
        return len(self.moments) - before

    def close(self) -> None:
        """Stop reading."""
        if self._environment is not None:
            self._environment.close()
            self._environment = None

    def until(self, at_s: float) -> None:
        """Let the last thing that each job showed last until `at_s`."""
        for shown in self.shown.values():
            if shown:
                self._lasts(shown, at_s)

    def _settle(self, batch: Batch) -> None:
        if batch.base != self.state.revision:
            return
        at_s = batch.at / 1_000_000
        for entry in batch.entries:
            for count in range(1, len(entry.events)):
                builder = StateBuilder(self.state)
                builder.at = batch.at
                builder.revision += 1
                fold_into(builder, entry.events[:count])
                self._record(builder.finish(), at_s)
            self.state = apply_entry(self.state, entry, batch.at)
            for event in entry.events:
                if type(event).__name__ == "BufferAllocated":
                    self.setups.append(event.job)  # type: ignore[union-attr]
            self._record(self.state, at_s)

    def _record(self, state: State, at_s: float) -> None:
        previous = self.moments[-1].state if self.moments else None
        self.moments.append(Moment(state, at_s))
        for job_id in set(state.unfinished) | (set() if previous is None else set(previous.unfinished)):
            job = state.jobs.get(job_id)
            if job is None:
                continue
            one = Shown(
                revision=int(Revision(state.revision)),
                at_s=at_s,
                lasted_s=0.0,
                state=job.state.name,
                reason=reason_of(state, job_id),
                buffer=buffer_word(state, job_id) or "",
                held=job.hold is not Hold.NONE,
            )
            known = self.shown.setdefault(job_id, [])
            if known:
                self._lasts(known, at_s)
                if known[-1].text == one.text:
                    continue
            known.append(one)

    @staticmethod
    def _lasts(known: list[Shown], at_s: float) -> None:
        last = known[-1]
        known[-1] = Shown(
            last.revision, last.at_s, max(0.0, at_s - last.at_s), last.state, last.reason, last.buffer, last.held
        )
