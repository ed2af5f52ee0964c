"""The present state in the history service: what it has followed, and the entries that the replica sent since.

The ledger on the disk lags by the journal's lazy marks, and rows are noted only up to there. A read wants everything
that is applied. So the replica sends each entry that it applies, and they are folded on top of the followed state. When
the follower has caught up, its state is used again, so that memory holds one state and not two.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from itertools import count
from typing import Final, NamedTuple

from forebay.cluster.api.history_service.follower import STEP_BYTES, STEP_ENTRIES, Follower, Point
from forebay.cluster.api.history_service.frames import EntriesApplied
from forebay.cluster.server import AppliedEntry
from forebay.replica.fold import apply_batch
from forebay.replica.state import State
from forebay.wal import EntryKind, decode_batch, kind_of

PENDING_BYTES_MAX: Final = 64 * 1024 * 1024
"""Entries that cannot be folded yet, bytes; beyond that all are dropped, and the follower gets there by the ledger."""

RECENT_MAX: Final = 4096
"""Folded entries kept for a scheduling index that follows from query to query, count."""


class _Entry(NamedTuple):
    """Applied entry."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here
    data: bytes


class PresentState:
    """The replica's applied state."""

    def __init__(self, follower: Follower) -> None:
        """Start from the followed state."""
        self._follower: Final = follower
        self._reached: Point = follower.reached
        self._pending: deque[_Entry] = deque()
        self._pending_bytes = 0
        self._recent: deque[AppliedEntry] = deque(maxlen=RECENT_MAX)

    @property
    def index(self) -> int:
        """Last folded entry."""
        return self._reached.index

    @property
    def state(self) -> State:
        """State after that entry."""
        return self._reached.state

    def take(self, applied: EntriesApplied) -> None:
        """Add entries that the replica applied."""
        self._pending.extend(map(_Entry, count(applied.first_index), applied.entries))
        self._pending_bytes += sum(map(len, applied.entries))
        if self._pending_bytes > PENDING_BYTES_MAX:
            self._pending.clear()
            self._pending_bytes = 0

    def step(self) -> bool:
        """Fold a few entries; return True if more can be folded."""
        followed = self._follower.reached
        if followed.index >= self._reached.index:
            if followed.index > self._reached.index:
                self._recent.clear()
            self._reached = followed
        folded = size_bytes = 0
        while self._pending and self._pending[0].index <= self._reached.index + 1:
            if folded >= STEP_ENTRIES or size_bytes >= STEP_BYTES:
                return True
            entry = self._pending.popleft()
            self._pending_bytes -= len(entry.data)
            if entry.index > self._reached.index:
                self._fold(entry)
                folded, size_bytes = folded + 1, size_bytes + len(entry.data)
        return False

    def _fold(self, entry: _Entry) -> None:
        before, data = self._reached.state, entry.data
        batch = decode_batch(data) if kind_of(data) is EntryKind.BATCH else None
        after = None if batch is None else apply_batch(before, batch)
        state = before if after is None else after
        self._reached = Point(entry.index, state)
        is_void = batch is not None and after is None
        self._recent.append(
            AppliedEntry(entry.index, 0, b"", before.revision, state.revision, batch, is_void, len(data))
        )

    # As `cluster.server.AppliedLog`, for a scheduling index

    def index_of(self, revision: int) -> int:
        """Return the entry that settled `revision`; LookupError if it is not kept."""
        position = bisect_right(self._recent, revision - 1, key=lambda one: one.revision)
        if position == len(self._recent) or self._recent[position].base >= revision:
            raise LookupError(f"revision {revision} is not kept")
        return self._recent[position].index

    def recent(self, first: int) -> list[AppliedEntry] | None:
        """Return the kept entries from index `first` on, or None if the first is not kept."""
        if not self._recent or first < self._recent[0].index:
            return None
        skipped = first - self._recent[0].index
        return [self._recent[position] for position in range(skipped, len(self._recent))]
