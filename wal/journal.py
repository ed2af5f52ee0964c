"""Raft log for consensus, with commit and applied marks. Changes are buffered in memory and made durable by one write.

A sync writes to the sync log. A later transaction, the checkpoint, copies many syncs to LMDB. LMDB's table of entries
is the ledger: a commit moves a mark, applying adds a digest, and compaction moves the first index visible to consensus.
The journal never deletes applied entries.

The newest entries and the terms of all entries are kept in memory.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

from forebay.wal import records, recovery, replay, rows
from forebay.wal.environment import Environment
from forebay.wal.failures import BrokenInvariant
from forebay.wal.records import ENTRY_MAX_BYTES, SEAL_MAX_BYTES, ChainRow, Entry, Gap, HardState, Incarnation, Marks
from forebay.wal.replay import ReplayedLog, Sync
from forebay.wal.rows import AppliedRow, CheckpointChanges
from forebay.wal.sync_log import RECORD_MAX_BYTES

RECENT_MAX_BYTES: Final = 32 << 20
"""Maximum size of the entries in memory, for followers that lag slightly: about 30 full entries."""

RECENT_MAX_ENTRIES: Final = 16_384
"""Maximum number of entries in memory: the objects of small entries take more memory than the data."""


class Suffix:
    """Newest entries, contiguous up to the end of the journal; empty when `first == next`.

    `evict` restores the bounds on bytes and count.
    """

    def __init__(self, next_index: int, *, max_bytes: int = RECENT_MAX_BYTES, max_entries: int = RECENT_MAX_ENTRIES):
        self._entries: list[Entry] = []
        self._bytes = 0
        self._next = next_index
        self._max_bytes = max_bytes
        self._max_entries = max_entries

    @property
    def first(self) -> int:
        """Index of the oldest entry; `next` if the suffix is empty."""
        return self._next - len(self._entries)

    @property
    def next(self) -> int:
        """Index of the next entry to append."""
        return self._next

    def append(self, entry: Entry) -> None:
        """Append the entry at index `next`."""
        assert entry.index == self._next
        self._entries.append(entry)
        self._bytes += len(entry.data)
        self._next += 1

    def cut(self, index: int) -> None:
        """Drop the entries from `index` on, so that `index` is appended next."""
        keep = max(0, index - self.first)
        self._bytes -= sum(len(entry.data) for entry in self._entries[keep:])
        del self._entries[keep:]
        self._next = index

    def restart(self, next_index: int) -> None:
        """Drop all entries and continue at `next_index`."""
        self._entries.clear()
        self._bytes = 0
        self._next = next_index

    def evict(self) -> None:
        """Drop the oldest entries if a bound is exceeded, a quarter at a time to keep the cost per entry low.

        Call it only when LMDB has every entry, because entries that LMDB lacks exist nowhere else.
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
        """Return the entry at `index`, which must be in the suffix."""
        return self._entries[index - self.first]

    def extend(self, out: list[Entry], first: int, *, max_bytes: int, max_entries: int) -> None:
        """Append entries from `first` on to `out`, within both bounds; an empty `out` receives at least one."""
        size_bytes = sum(len(entry.data) for entry in out)
        for position in range(first - self.first, len(self._entries)):
            entry = self._entries[position]
            size_bytes += len(entry.data)
            if out and (size_bytes > max_bytes or len(out) >= max_entries):
                return
            out.append(entry)

    def since(self, first: int) -> list[Entry]:
        """Return the entries from `first` on, all of which must be in the suffix."""
        return self._entries[first - self.first :]


class TermRuns:
    """Terms of all indexes from a start on, stored as runs of equal terms to take little memory."""

    def __init__(self, index: int, term: int) -> None:
        self._starts = [index]
        self._terms = [term]

    def append(self, index: int, term: int) -> None:
        """Append the term of the next index."""
        if term != self._terms[-1]:
            self._starts.append(index)
            self._terms.append(term)

    def at(self, index: int) -> int:
        """Return the term of `index`, which must not lie before the start."""
        return self._terms[bisect_right(self._starts, index) - 1]

    def cut(self, index: int) -> None:
        """Drop the terms from `index` on; `index` must lie after the start."""
        while self._starts[-1] >= index:
            self._starts.pop()
            self._terms.pop()

    def compact(self, index: int) -> None:
        """Drop the runs that end before `index`."""
        position = bisect_right(self._starts, index) - 1
        del self._starts[:position], self._terms[:position]


class Lag:
    """Part of the journal that a store lacks: LMDB lacks it until the next checkpoint, the disk until the next sync."""

    def __init__(self, last: int) -> None:
        self.caught_up(last)

    def caught_up(self, last: int) -> None:
        """Record that the store has all entries up to `last`."""
        self.last = last
        """Last index the store holds."""
        self.first = last + 1
        """First entry the store lacks."""
        self.cut: int | None = None
        """Index from which on stored entries are no longer part of the journal; None if all are."""
        self.hard = False
        """True if the store lacks the current term and vote."""

    def note_truncation(self, index: int) -> None:
        """Record that the journal removed its entries from `index` on."""
        if index <= self.last:
            self.cut = index if self.cut is None else min(self.cut, index)
            self.first = min(self.first, index)


HINTS_MAX_ROWS: Final = 16_384
"""Maximum number of buffered applied rows: more are written without a sync, to bound memory during a long replay."""

CHECKPOINT_BYTES: Final = 1 << 20
"""Bytes in the sync log that cause a checkpoint: a larger checkpoint would block the event loop too long."""

CHECKPOINT_ROWS: Final = 1024
"""Number of entries and applied rows that LMDB lacks and that cause a checkpoint, for the same reason."""


class Journal:
    """Journal of one replica, on an Environment open for writing; used by one thread.

    Reads return buffered changes at once. Nothing is durable before `sync`, and the caller must not send a promise
    while the journal is `dirty`. Once a sync has failed, every method raises StorageFailed, and the replica must stop.
    """

    def __init__(self, env: Environment, *, recent_max_bytes: int = RECENT_MAX_BYTES):
        """Check the storage (wal.recovery), merge the sync log into LMDB, and load the entries kept in memory.

        Raises:
            RecoveryRefused: A check of the storage failed.
            StorageFailed: The storage cannot be written.
        """
        self._env = env
        self._sync_log = env.log
        base_index, base_term = rows.peek_base(env)
        self._runs = TermRuns(base_index, base_term)
        self._suffix = Suffix(base_index + 1, max_bytes=recent_max_bytes)
        checked = recovery.check(env, self._load)
        self._hard = checked.hard
        self._base_index = checked.marks.base_index
        self._commit_index = checked.marks.commit_index
        self._applied_index = checked.marks.applied_index
        self._applied_revision = checked.marks.applied_revision
        self._applied_digest = checked.marks.applied_digest
        self._stored = Lag(checked.marks.last_index)
        """Part that LMDB lacks; all of its entries are in memory."""
        self._synced = Lag(checked.marks.last_index)
        """Part that LMDB and the sync log together lack."""
        self._logged_bytes = 0
        self._logged_applied = 0
        """Number of `_applied` rows in the sync log."""
        self._applied: list[AppliedRow] = []
        """Contiguous part of the chain that LMDB lacks."""
        self._gaps: list[Gap] = []
        self._hints_changed = self._rebased = self._reset = False
        self._take_over(recovery.replay_log(env, checked, self.entry))

    def _load(self, entry: Entry) -> None:
        self._runs.append(entry.index, entry.term)
        self._suffix.append(entry)
        self._suffix.evict()

    def _take_over(self, replayed: ReplayedLog) -> None:
        """Merge the sync log into LMDB before the replica makes any promise. This drops a torn tail for good."""
        if replayed.kept < self.last_index:
            self._cut(replayed.kept + 1)
        for entry in replayed.entries:
            self._runs.append(entry.index, entry.term)
            self._suffix.append(entry)
        self._stored.hard = replayed.hard != self._hard
        self._hard = replayed.hard
        self._applied.extend(replayed.applied)
        self._commit_index = replayed.marks.commit_index
        self._applied_index = replayed.marks.applied_index
        self._applied_revision = replayed.marks.applied_revision
        self._applied_digest = replayed.marks.applied_digest
        self._checkpoint()

    # Properties that consensus reads

    @property
    def base_index(self) -> int:
        """Index just before the first entry visible to consensus; 0 at the beginning."""
        return self._base_index

    @property
    def base_term(self) -> int:
        """Term of the entry at `base_index`; 0 at the beginning."""
        return self._runs.at(self._base_index)

    @property
    def first_index(self) -> int:
        """First index visible to consensus, whether or not an entry exists there yet."""
        return self._base_index + 1

    @property
    def last_index(self) -> int:
        """Index of the last entry, durable or not; `base_index` if there is none after it."""
        return self._suffix.next - 1

    @property
    def last_term(self) -> int:
        """Term of the last entry; `base_term` if there is none after the base."""
        return self._runs.at(self.last_index)

    @property
    def term(self) -> int:
        """Current term of this replica."""
        return self._hard.term

    @property
    def voted_for(self) -> str | None:
        """Replica for which this replica voted in the current term; None if it has not voted."""
        return self._hard.voted_for

    @property
    def commit_index(self) -> int:
        """Index of the last entry known to be committed. It is written lazily: too low after a restart."""
        return self._commit_index

    @property
    def applied_index(self) -> int:
        """Index of the last entry applied and chained; after a restart it may be lower than before."""
        return self._applied_index

    @property
    def applied_digest(self) -> bytes:
        """Digest of the ledger up to `applied_index`."""
        return self._applied_digest

    @property
    def applied_revision(self) -> int:
        """Revision after the entry at `applied_index`."""
        return self._applied_revision

    def entry(self, index: int) -> Entry:
        """Return the entry at `index`.

        Raises:
            LookupError: The entry is not visible to consensus.
        """
        self._env.check()
        if not self._base_index < index <= self.last_index:
            raise LookupError(f"no entry {index}: the journal holds {self.first_index} to {self.last_index}")
        if index >= self._suffix.first:
            return self._suffix.get(index)
        return rows.read_entries(self._env, index, index, max_bytes=0, max_entries=1)[0]

    def term_of(self, index: int) -> int | None:
        """Return the term of the entry at `index`, from `base_index` to `last_index`; None outside that range."""
        self._env.check()
        return self._runs.at(index) if self._base_index <= index <= self.last_index else None

    def entries(self, first: int, *, max_bytes: int, max_entries: int) -> list[Entry]:
        """Return entries from `first` on, within both bounds (data bytes, count), but at least one if it exists.

        Recent entries come from memory.

        Raises:
            LookupError: Entry `first` was compacted.
        """
        self._env.check()
        if first <= self._base_index:
            raise LookupError(f"entry {first} was compacted: the journal begins at {self.first_index}")
        found: list[Entry] = []
        if first < self._suffix.first:
            last = min(self.last_index, self._suffix.first - 1)
            found = rows.read_entries(self._env, first, last, max_bytes=max_bytes, max_entries=max_entries)
            first += len(found)
            if first < self._suffix.first:
                return found
        if first <= self.last_index:
            self._suffix.extend(found, first, max_bytes=max_bytes, max_entries=max_entries)
        return found

    # Changes, buffered until the next sync

    def append(self, entries: Sequence[Entry]) -> None:
        """Append contiguous entries whose terms do not fall and do not exceed `term`.

        Raises:
            BrokenInvariant: The entries leave a gap, a term falls or exceeds `term`, or an entry is too large.
        """
        self._env.check()
        index, term = self.last_index, self.last_term
        for entry in entries:
            if entry.index != index + 1:
                raise BrokenInvariant(f"entry {entry.index} appended after entry {index}")
            if not term <= entry.term <= self._hard.term:
                raise BrokenInvariant(
                    f"entry {entry.index} of term {entry.term} appended after term {term}, in term {self._hard.term}"
                )
            if len(entry.data) > ENTRY_MAX_BYTES:
                raise BrokenInvariant(
                    f"entry {entry.index} has {len(entry.data)} bytes; the maximum is {ENTRY_MAX_BYTES}"
                )
            if len(entry.seal) > SEAL_MAX_BYTES:
                raise BrokenInvariant(
                    f"the seal of entry {entry.index} has {len(entry.seal)} bytes; the maximum is {SEAL_MAX_BYTES}"
                )
            index, term = entry.index, entry.term
        for entry in entries:
            self._runs.append(entry.index, entry.term)
            self._suffix.append(entry)

    def truncate_from(self, index: int) -> None:
        """Remove the entries from `index` on.

        Raises:
            BrokenInvariant: One of these entries is committed or applied.
        """
        self._env.check()
        if index <= max(self._commit_index, self._applied_index):
            raise BrokenInvariant(
                f"truncation from entry {index}, but {self._commit_index} is committed, {self._applied_index} applied"
            )
        if index > self.last_index:
            return
        self._cut(index)

    def set_term(self, term: int, voted_for: str | None) -> None:
        """Set the current term, and the vote in that term.

        Raises:
            BrokenInvariant: The term falls, or a vote changes within its term.
        """
        self._env.check()
        wanted = HardState(term, voted_for)
        if wanted == self._hard:
            return
        if term < self._hard.term:
            raise BrokenInvariant(f"term {term} after term {self._hard.term}")
        if term == self._hard.term and self._hard.voted_for is not None:
            raise BrokenInvariant(f"vote for {voted_for} in term {term} after a vote for {self._hard.voted_for}")
        if voted_for is not None:
            records.name_bytes("replica name", voted_for)
        self._hard = wanted
        self._stored.hard = self._synced.hard = True

    def set_commit(self, index: int) -> None:
        """Record that entries up to `index` are committed; ignore a lower index.

        Raises:
            BrokenInvariant: The index lies beyond the last entry.
        """
        self._env.check()
        if index > self.last_index:
            raise BrokenInvariant(f"commit index {index} beyond the last entry {self.last_index}")
        if index > self._commit_index:
            self._commit_index = index
            self._hints_changed = True

    def compact_to(self, index: int) -> None:
        """Hide entries up to `index` from consensus. The ledger keeps them.

        Raises:
            BrokenInvariant: The index lies beyond the applied index.
        """
        self._env.check()
        if index > self._applied_index:
            raise BrokenInvariant(f"compaction to entry {index}, but only {self._applied_index} is applied")
        if index > self._base_index:
            self._rebase(index)

    def reset_to(self, index: int, term: int, digest: bytes, revision: int) -> None:
        """Continue from an installed snapshot at `index`; `digest` and `revision` are the ledger's after that entry.

        If the journal holds (index, term), entries up to `index` are chained and later entries stay. Otherwise all
        unapplied entries are dropped, and the missing range before `index` is recorded as a gap in the ledger. Buffered
        changes are written first.

        Raises:
            BrokenInvariant: The snapshot lies at or below the applied index, contradicts committed entries, or has
                another
                digest or revision than the journal's entries.
        """
        self.flush_hints()
        if index <= self._applied_index:
            raise BrokenInvariant(f"snapshot at entry {index} installed, but {self._applied_index} is applied")
        if len(digest) != records.DIGEST_BYTES or revision < self._applied_revision:
            raise BrokenInvariant(
                f"snapshot at entry {index}: revision {revision} after {self._applied_revision}, digest {digest.hex()}"
            )
        matching = self.term_of(index) == term
        if index <= self._commit_index and not matching:
            raise BrokenInvariant(
                f"snapshot at entry {index} of term {term}, but the committed one has term {self.term_of(index)}"
            )
        if term > self._hard.term:
            self.set_term(term, None)
        if matching:
            self._chain_to(index, digest, revision)
            self._rebase(index)
            self._reset = True
            return
        self._gaps.append(Gap(self._applied_index + 1, index, self._applied_revision, revision))
        for lag in (self._stored, self._synced):
            lag.note_truncation(self._applied_index + 1)
            lag.last, lag.first = index, index + 1
        self._base_index = index
        self._runs = TermRuns(index, term)
        self._suffix.restart(index + 1)
        self._reset = True
        self._note_applied(AppliedRow(index, ChainRow(digest, revision), False))

    def begin_incarnation(self, incarnation: Incarnation, term: int, entries: Sequence[Entry]) -> None:
        """Continue as another incarnation: commit all present entries, then append and commit `entries` of `term`.

        Buffered changes are written first. Everything else is one transaction, so after a crash the storage belongs to
        exactly one of the two incarnations.

        Raises:
            BrokenInvariant: The number of the incarnation or the term is not greater than the present one.
        """
        if incarnation.number <= self._env.incarnation.number or term <= self._hard.term:
            raise BrokenInvariant(
                f"incarnation {incarnation} in term {term} begins after {self._env.incarnation} in {self._hard.term}"
            )
        self.flush_hints()
        self.set_term(term, None)
        self.append(entries)
        self.set_commit(self.last_index)
        self._checkpoint(incarnation)
        self._env.incarnation = incarnation

    def record_applied(self, entry: Entry, revision: int) -> bytes:
        """Chain the next applied entry, which ends with `revision`, and return the ledger's digest after the entry.

        After a restart, entries at or below `applied_index` are applied again: they are compared with the recorded
        rows.

        Raises:
            BrokenInvariant: Entry, order, digest or revision disagrees with the journal.
        """
        self._env.check()
        if entry.index <= self._applied_index:
            return self._compare_applied(entry, revision)
        if entry.index != self._applied_index + 1 or self.entry(entry.index)[:3] != entry[:3]:
            raise BrokenInvariant(
                f"entry {entry.index} of term {entry.term} applied after {self._applied_index}, "
                "but it is not the journal's next one"
            )
        if revision < self._applied_revision:
            raise BrokenInvariant(f"entry {entry.index} ends with revision {revision} after {self._applied_revision}")
        digest = self._chain(entry, revision)
        if len(self._applied) >= HINTS_MAX_ROWS:
            self._checkpoint()
        return digest

    def digest_at(self, index: int) -> bytes | None:
        """Return the ledger's digest up to `index`; None if the entry was not applied here or lies inside a gap."""
        self._env.check()
        if index == self._applied_index:
            return self._applied_digest
        if not 0 < index < self._applied_index:
            return records.GENESIS if index == 0 else None
        row = self._chain_row(index)
        return None if row is None else row.digest

    @property
    def dirty(self) -> bool:
        """Return whether a change that promises depend on is not durable: entries, cut, term, vote or reset."""
        lag = self._synced
        return lag.hard or lag.first <= self.last_index or lag.cut is not None or self._reset

    @property
    def behind_bytes(self) -> int:
        """Size of the entries that LMDB lacks, bytes: in the sync log or buffered."""
        return self._logged_bytes + sum(len(entry.data) for entry in self._suffix.since(self._synced.first))

    def sync(self) -> None:
        """Write all buffered changes, durable on return.

        Raises:
            StorageFailed: The write failed, now or in an earlier call.
        """
        self._env.check()
        if not (self.dirty or self._hints_changed):
            return
        if self._reset or self._rebased or self._is_checkpoint_due() or not self._log():
            self._checkpoint()

    def flush_hints(self) -> None:
        """Write buffered changes and merge the sync log into LMDB, which completes the ledger.

        Called when idle. An idle replica writes once and then stops writing.
        """
        self._env.check()
        if self.dirty or self._hints_changed or not self._sync_log.is_empty:
            self._checkpoint()

    def _is_checkpoint_due(self) -> bool:
        rows_behind = self.last_index + 1 - self._stored.first + len(self._applied)
        return self._logged_bytes >= CHECKPOINT_BYTES or rows_behind >= CHECKPOINT_ROWS

    def _log(self) -> bool:
        """Write all buffered changes to the sync log; return False, without any effect, if they do not fit."""
        lag = self._synced
        entries = self._suffix.since(lag.first)
        if sum([len(entry.data) for entry in entries]) > RECORD_MAX_BYTES:
            return False
        body = replay.pack(
            Sync(
                last_before=lag.last,
                first=lag.first,
                entries=entries,
                hard=self._hard if lag.hard else None,
                commit_index=self._commit_index,
                applied_index=self._applied_index,
                applied_digest=self._applied_digest,
                revisions=[applied.row.revision for applied in self._applied[self._logged_applied :]],
            )
        )
        if not self._sync_log.fits(len(body)):
            return False
        self._env.append(body)
        lag.caught_up(self.last_index)
        self._logged_bytes += len(body)
        self._logged_applied = len(self._applied)
        self._hints_changed = False
        return True

    def _checkpoint(self, incarnation: Incarnation | None = None) -> None:
        """Write all changes that LMDB lacks, synced or buffered, in one transaction."""
        lag = self._stored
        rows.write(
            self._env,
            CheckpointChanges(
                delete_from=lag.cut,
                entries=self._suffix.since(lag.first),
                applied=self._applied,
                gaps=self._gaps,
                hard=self._hard if lag.hard else None,
                marks=self._marks(),
                incarnation=incarnation,
            ),
        )
        self._stored.caught_up(self.last_index)
        self._synced.caught_up(self.last_index)
        self._logged_bytes = self._logged_applied = 0
        self._hints_changed = self._rebased = self._reset = False
        self._applied.clear()
        self._gaps.clear()
        self._suffix.evict()

    def _cut(self, index: int) -> None:
        self._stored.note_truncation(index)
        self._synced.note_truncation(index)
        self._suffix.cut(index)
        self._runs.cut(index)

    def _rebase(self, index: int) -> None:
        self._base_index = index
        self._runs.compact(index)
        self._hints_changed = self._rebased = True

    def _note_applied(self, applied: AppliedRow) -> None:
        self._applied.append(applied)
        self._applied_index = applied.at
        self._applied_digest, self._applied_revision = applied.row
        self._commit_index = max(self._commit_index, applied.at)
        self._hints_changed = True

    def _chain(self, entry: Entry, revision: int) -> bytes:
        digest = records.chain_digest(self._applied_digest, entry)
        self._note_applied(AppliedRow(entry.index, ChainRow(digest, revision), revision > self._applied_revision))
        return digest

    def _chain_to(self, index: int, digest: bytes, revision: int) -> None:
        """Chain the entries up to a snapshot: they were applied before a crash, or the snapshot skips them."""
        start = ChainRow(self._applied_digest, self._applied_revision)
        held = [self.entry(at) for at in range(self._applied_index + 1, index + 1)]
        for applied in replay.chain_up_to(start, held, ChainRow(digest, revision)):
            self._note_applied(applied)

    def _compare_applied(self, entry: Entry, revision: int) -> bytes:
        row, previous = self._chain_row(entry.index), self.digest_at(entry.index - 1)
        if row is None or previous is None:
            raise BrokenInvariant(f"entry {entry.index} applied again, but this replica holds no digest of it")
        if records.chain_digest(previous, entry) != row.digest or revision != row.revision:
            raise BrokenInvariant(
                f"entry {entry.index} applied again with revision {revision}, but it was applied before with another "
                f"digest, or with revision {row.revision}"
            )
        return row.digest

    def _chain_row(self, index: int) -> ChainRow | None:
        if self._applied and index >= self._applied[0].at:
            return self._applied[index - self._applied[0].at].row
        return rows.read_chain_row(self._env, index)

    def _marks(self) -> Marks:
        return Marks(
            base_index=self._base_index,
            base_term=self.base_term,
            last_index=self.last_index,
            commit_index=self._commit_index,
            applied_index=self._applied_index,
            applied_revision=self._applied_revision,
            applied_digest=self._applied_digest,
        )
