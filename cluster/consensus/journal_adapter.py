"""The journal in the shape that PySyncObj expects of one, and the parts of wal's journal that consensus uses.

The stock engine always holds a first entry that it never applies. The adapter shows the base, the entry just before
the first that consensus sees, in that place: position 0 is the base, position p the entry at index base + p.
"""

from collections.abc import Sequence
from typing import Protocol

from wal import Entry

EngineEntry = tuple[bytes, int, int]
"""The stock order: data, index, term."""


class JournalLike(Protocol):
    """What consensus uses of `wal.journal.Journal`; a test may put a disk that forgets behind it."""

    @property
    def first_index(self) -> int: ...
    @property
    def last_index(self) -> int: ...
    @property
    def last_term(self) -> int: ...
    @property
    def base_index(self) -> int: ...
    @property
    def base_term(self) -> int: ...
    @property
    def term(self) -> int: ...
    @property
    def voted_for(self) -> str | None: ...
    @property
    def commit_index(self) -> int: ...
    @property
    def applied_index(self) -> int: ...
    @property
    def dirty(self) -> bool: ...
    def entry(self, index: int) -> Entry: ...
    def term_of(self, index: int) -> int | None: ...
    def entries(self, first: int, *, max_bytes: int, max_entries: int) -> list[Entry]: ...
    def append(self, entries: Sequence[Entry]) -> None: ...
    def truncate_from(self, index: int) -> None: ...
    def set_term(self, term: int, voted_for: str | None) -> None: ...
    def set_commit(self, index: int) -> None: ...
    def compact_to(self, index: int) -> None: ...
    def sync(self) -> None: ...
    def flush_hints(self) -> None: ...


class JournalAdapter:
    """PySyncObj's journal over ours. It has no file of its own, and what it is told is durable after `sync` only."""

    def __init__(self, journal: JournalLike) -> None:
        self._journal = journal

    def add(self, command: bytes, idx: int, term: int) -> None:
        self._journal.append([Entry(idx, term, command)])

    def __len__(self) -> int:
        return self._journal.last_index - self._journal.base_index + 1

    def __getitem__(self, position: int) -> EngineEntry:
        # Positions only: the engine's slices copied the whole tail of the log (H26), so there are none.
        journal = self._journal
        if position in (-1, len(self) - 1):
            return b"", journal.last_index, journal.last_term
        if position == 0:
            return b"", journal.base_index, journal.base_term
        entry = journal.entry(journal.base_index + position)
        return entry.data, entry.index, entry.term

    def deleteEntriesFrom(self, entryFrom: int) -> None:
        self._journal.truncate_from(self._journal.base_index + entryFrom)

    def setRaftCommitIndex(self, raftCommitIndex: int) -> None:
        self._journal.set_commit(raftCommitIndex)

    def getRaftCommitIndex(self) -> int:
        return self._journal.commit_index

    def setCurrentTerm(self, term: int, votedForNodeId: str | None) -> None:
        self._journal.set_term(term, votedForNodeId)

    def getCurrentTerm(self) -> int:
        return self._journal.term

    def getVotedForNodeId(self) -> str | None:
        return self._journal.voted_for

    def onOneSecondTimer(self) -> None:
        """Nothing: the stock journal wrote its metadata here, long after the promises that needed it."""

    def _destroy(self) -> None:
        """Nothing: who opened the journal closes it."""
