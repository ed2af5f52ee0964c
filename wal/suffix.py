"""In-memory suffix of the journal: the newest entries whole, the term of every one, and what a store lacks of them."""

from bisect import bisect_right
from typing import Final

from wal.records import Entry

RECENT_MAX_BYTES: Final = 32 << 20
"""Data kept in memory for followers that are a little behind: some 30 full entries, or seconds of a busy cluster."""

RECENT_MAX_ENTRIES: Final = 16_384
"""Bound on the count, for entries so small that their objects weigh more than their data."""


class Suffix:
    """The newest entries, contiguous up to the last one of the journal; empty when `first == next`.

    Bounded by bytes and count whenever `evict` is called.
    """

    def __init__(self, next_index: int, *, max_bytes: int = RECENT_MAX_BYTES, max_entries: int = RECENT_MAX_ENTRIES):
        self._entries: list[Entry] = []
        self._bytes = 0
        self._next = next_index
        self._max_bytes = max_bytes
        self._max_entries = max_entries

    @property
    def first(self) -> int:
        """Index of the oldest entry held; `next` if none is."""
        return self._next - len(self._entries)

    @property
    def next(self) -> int:
        """Index that the next appended entry must have."""
        return self._next

    def append(self, entry: Entry) -> None:
        """Hold the entry at `next`."""
        assert entry.index == self._next
        self._entries.append(entry)
        self._bytes += len(entry.data)
        self._next += 1

    def cut(self, index: int) -> None:
        """Forget the entries from `index` on; the next one is `index`."""
        keep = max(0, index - self.first)
        self._bytes -= sum(len(entry.data) for entry in self._entries[keep:])
        del self._entries[keep:]
        self._next = index

    def restart(self, next_index: int) -> None:
        """Forget everything; the next entry is `next_index`."""
        self._entries.clear()
        self._bytes = 0
        self._next = next_index

    def evict(self) -> None:
        """Drop the oldest entries if a bound is passed, a quarter at a time so that it costs little per entry.

        Called only when LMDB has every entry: what it has not can be read nowhere else.
        """
        if self._bytes <= self._max_bytes and len(self._entries) <= self._max_entries:
            return
        dropped = 0
        while dropped < len(self._entries) and (
            self._bytes > self._max_bytes * 3 // 4 or len(self._entries) - dropped > self._max_entries * 3 // 4
        ):
            self._bytes -= len(self._entries[dropped].data)
            dropped += 1
        del self._entries[:dropped]

    def get(self, index: int) -> Entry:
        """The entry at `index`, which must be held."""
        return self._entries[index - self.first]

    def extend(self, out: list[Entry], first: int, *, max_bytes: int, max_entries: int) -> None:
        """Append entries from `first` on to `out`, while `out` stays within both bounds or has only one entry."""
        size_bytes = sum(len(entry.data) for entry in out)
        for position in range(first - self.first, len(self._entries)):
            entry = self._entries[position]
            size_bytes += len(entry.data)
            if out and (size_bytes > max_bytes or len(out) >= max_entries):
                return
            out.append(entry)

    def since(self, first: int) -> list[Entry]:
        """The entries from `first` on, all of which must be held."""
        return self._entries[first - self.first :]


class TermRuns:
    """The term of every index from some start on, as runs of one term: a few numbers, however long the journal is."""

    def __init__(self, index: int, term: int) -> None:
        self._starts = [index]
        self._terms = [term]

    def append(self, index: int, term: int) -> None:
        """Note the term of the index after the last one."""
        if term != self._terms[-1]:
            self._starts.append(index)
            self._terms.append(term)

    def at(self, index: int) -> int:
        """The term of `index`, which must not lie before the start."""
        return self._terms[bisect_right(self._starts, index) - 1]

    def cut(self, index: int) -> None:
        """Forget the terms from `index` on; `index` must lie after the start."""
        while self._starts[-1] >= index:
            self._starts.pop()
            self._terms.pop()

    def compact(self, index: int) -> None:
        """Forget the runs that end before `index`."""
        position = bisect_right(self._starts, index) - 1
        del self._starts[:position], self._terms[:position]


class Lag:
    """What a store lacks of the journal: LMDB until the next checkpoint, the disk as a whole until the next sync."""

    def __init__(self, last: int) -> None:
        self.caught_up(last)

    def caught_up(self, last: int) -> None:
        """It has everything, up to `last`."""
        self.last = last
        """The last index that it holds."""
        self.first = last + 1
        """Entries from here on it lacks."""
        self.cut: int | None = None
        """Entries that it holds from here on are no longer part of the journal."""
        self.hard = False
        """It lacks term and vote."""

    def truncated(self, index: int) -> None:
        """The journal lost its entries from `index` on."""
        if index <= self.last:
            self.cut = index if self.cut is None else min(self.cut, index)
            self.first = min(self.first, index)
