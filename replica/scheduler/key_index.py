"""Indexes with at most one sorted key per job, grouped by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from forebay.replica.scheduler.index_row import IndexRow, update_keys
from forebay.replica.values import SortedKeys

N = TypeVar("N", bound=object)
K = TypeVar("K", bound=object)


class KeyIndex(Generic[N, K]):
    """Sorted keys by name, for example the holders of each pool by expected release."""

    def __init__(self, entry: Callable[[IndexRow], tuple[N, K] | None]) -> None:
        """Create an empty index; `entry` returns the name and the key of a row, or None if the row has no key."""
        self.keys: dict[N, SortedKeys[K]] = {}
        self._entry = entry

    def apply(self, job_id: int, before: IndexRow, after: IndexRow) -> None:
        """Replace the key of the job's former row by that of its new one."""
        left, entered = self._entry(before), self._entry(after)
        if left == entered:
            return
        if left is not None:
            update_keys(self.keys, *left, False)
        if entered is not None:
            update_keys(self.keys, *entered, True)


class TimerIndex:
    """Instants at which something is due by time alone, each with its job."""

    def __init__(self) -> None:
        self.timers: SortedKeys[tuple[int, int]] = SortedKeys()

    def apply(self, job_id: int, before: IndexRow, after: IndexRow) -> None:
        """Replace the instant of the job's former row by that of its new one."""
        if before.due_at != after.due_at:
            if before.due_at:
                self.timers.discard((before.due_at, job_id))
            if after.due_at:
                self.timers.add((after.due_at, job_id))
