"""Journal in memory with wal's interface, over a disk that forgets unsynced data, for simulations."""

from collections.abc import Callable, Sequence

from forebay.wal.failures import BrokenInvariant, StorageFailed
from forebay.wal.journal import Entry


class Disk:
    """Data that survives a crash. `syncs` counts all writes; `fail_next` makes the next write fail permanently."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.base = (0, 0)
        self.hard: tuple[int, str | None] = (0, None)
        self.commit = 0
        self.applied = 0
        self.syncs = 0
        self.fail_next: Exception | None = None
        self.before_sync: Callable[[], None] = lambda: None

    @property
    def last_index(self) -> int:
        return self.base[0] + len(self.entries)

    def holds(self, index: int, term: int) -> bool:
        """Return whether an entry is on the disk, or in the snapshot at its base."""
        at = index - self.base[0] - 1
        return at < 0 or (at < len(self.entries) and self.entries[at].term == term)


class MemoryJournal:
    """Journal that is buffered until `sync()` and enforces the rules of the real one."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self._entries = list(disk.entries)
        self._base = disk.base
        self._hard = disk.hard
        self._commit = disk.commit
        self._applied = disk.applied
        self._dirty = False
        self._hints = False
        self._failure: Exception | None = None

    @property
    def base_index(self) -> int:
        return self._base[0]

    @property
    def base_term(self) -> int:
        return self._base[1]

    @property
    def first_index(self) -> int:
        return self._base[0] + 1

    @property
    def last_index(self) -> int:
        return self._base[0] + len(self._entries)

    @property
    def last_term(self) -> int:
        return self._entries[-1].term if self._entries else self._base[1]

    @property
    def term(self) -> int:
        return self._hard[0]

    @property
    def voted_for(self) -> str | None:
        return self._hard[1]

    @property
    def commit_index(self) -> int:
        return self._commit

    @property
    def applied_index(self) -> int:
        return self._applied

    @property
    def dirty(self) -> bool:
        return self._dirty

    def entry(self, index: int) -> Entry:
        if not self._base[0] < index <= self.last_index:
            raise LookupError(index)
        return self._entries[index - self._base[0] - 1]

    def digest_at(self, index: int) -> bytes | None:
        return None  # nothing is chained here

    def term_of(self, index: int) -> int | None:
        if index == self._base[0]:
            return self._base[1]
        if self._base[0] < index <= self.last_index:
            return self._entries[index - self._base[0] - 1].term
        return None

    def entries(self, first: int, *, max_bytes: int, max_entries: int) -> list[Entry]:
        if first <= self._base[0]:
            raise LookupError(first)
        found: list[Entry] = []
        size = 0
        start = first - self._base[0] - 1
        for entry in self._entries[start : start + max_entries]:
            size += len(entry.data)
            if found and size > max_bytes:
                break
            found.append(entry)
        return found

    def append(self, entries: Sequence[Entry]) -> None:
        self._check()
        for entry in entries:
            if entry.index != self.last_index + 1 or not self.last_term <= entry.term <= self.term:
                raise BrokenInvariant(f"{entry} after {self.last_index}, {self.last_term} in term {self.term}")
            self._entries.append(entry)
        self._dirty = self._dirty or bool(entries)

    def truncate_from(self, index: int) -> None:
        self._check()
        if index <= max(self._commit, self._applied):
            raise BrokenInvariant(f"truncation from {index}, but {self._commit} is committed")
        del self._entries[index - self._base[0] - 1 :]
        self._dirty = True

    def set_term(self, term: int, voted_for: str | None) -> None:
        self._check()
        if (term, voted_for) == self._hard:
            return
        if term < self._hard[0] or (term == self._hard[0] and self._hard[1] is not None):
            raise BrokenInvariant(f"term {term}, vote {voted_for} after {self._hard}")
        self._hard = (term, voted_for)
        self._dirty = True

    def set_commit(self, index: int) -> None:
        if index > self.last_index:
            raise BrokenInvariant(f"commit {index} beyond {self.last_index}")
        if index > self._commit:
            self._commit = index
            self._hints = True

    def compact_to(self, index: int) -> None:
        if index > self._applied:
            raise BrokenInvariant(f"compaction to {index}, applied {self._applied}")
        if index > self._base[0]:
            term = self.term_of(index)
            assert term is not None
            del self._entries[: index - self._base[0]]
            self._base = (index, term)
            self._hints = True

    def reset_to(self, index: int, term: int, digest: bytes, revision: int) -> None:
        if index <= self._applied:
            raise BrokenInvariant(f"snapshot at {index}, applied {self._applied}")
        if self.term_of(index) == term:
            del self._entries[: index - self._base[0]]
        else:
            if index <= self._commit:
                raise BrokenInvariant("a snapshot contradicts what is committed")
            self._entries.clear()
        self._base = (index, term)
        self._applied = index
        self._commit = max(self._commit, index)
        self._dirty = True

    def record_applied(self, entry: Entry, revision: int) -> bytes:
        if entry.index != self._applied + 1 or entry.index > self._commit:
            raise BrokenInvariant(f"{entry.index} applied after {self._applied}, commit {self._commit}")
        self._applied = entry.index
        self._hints = True
        return b""

    def sync(self) -> None:
        self._check()
        if not (self._dirty or self._hints):
            return
        disk = self.disk
        disk.before_sync()
        if disk.fail_next is not None:
            self._failure = disk.fail_next
            raise self._failure
        disk.syncs += 1
        disk.entries = list(self._entries)
        disk.base, disk.hard, disk.commit, disk.applied = self._base, self._hard, self._commit, self._applied
        self._dirty = self._hints = False

    def flush_hints(self) -> None:
        self.sync()

    def _check(self) -> None:
        if self._failure is not None:
            raise StorageFailed("this journal has failed before") from self._failure
