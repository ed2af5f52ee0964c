"""The committed history for audits, replay and verification: read in short steps, every checksum and digest checked.

A reader beside the replica must not write, and the replica goes on while its files are read: a checkpoint may come
between reading LMDB and reading the sync log, and a record may be half written. So LMDB's generation is read again
after the log, whatever was found in the log, and what seems damaged is read again.

History that a snapshot replaced is filled in by whoever holds it: a gap of the ledger from its end. The digest after
the gap is known, and a digest proves the one before it together with the entry in between. So each entry is proven as
it comes, the gap becomes shorter with each transaction, and what a crash interrupts goes on where it was. The first
entry of the gap must follow on what is held before it.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import lmdb

from wal import records
from wal.codec import CodecError, WrittenLater
from wal.environment import Environment, log_mark
from wal.failures import BrokenInvariant, Condition, RecoveryRefused
from wal.records import ChainRow, Damaged, Entry, Gap, Incarnation, Marks, Pruned, PrunedSegment, chained
from wal.replay import Contradiction, replay
from wal.rows import read_chain_row
from wal.sync_log import SyncLog

SCANS_MAX: Final = 20
"""How often a reader scans before it gives up: a scan takes milliseconds, and checkpoints are much further apart."""


class ReadView(NamedTuple):
    """The marks of the whole ledger, and those applied entries and rows that LMDB does not have or has otherwise."""

    marks: Marks
    entries: Mapping[int, Entry]
    chain: Mapping[int, ChainRow]
    revisions: list[tuple[int, int]]
    """The last revision that an entry settled, and its index; ascending."""
    stored_revision: int
    """LMDB has the rows of revisions up to here."""


def read_view(env: Environment) -> ReadView:
    """What is to be added to LMDB's rows now; nothing for the replica's own process. Raises RecoveryRefused.

    What it says stays true while LMDB is given more: nothing that was applied is ever changed. A log is refused only by
    a scan during which no checkpoint came; if one came during the last one too, it is refused as restless.
    """
    if not env.readonly:
        with env.read() as transaction:
            marks = _marks(env, transaction)
        return ReadView(marks, {}, {}, [], marks.applied_revision)
    refused: RecoveryRefused | None = None
    for _ in range(SCANS_MAX):
        with env.read() as transaction:
            mark = log_mark(env.directory, transaction.get(records.LOG_KEY, db=env.table(records.STATE)))
            found: ReadView | RecoveryRefused
            try:
                found = _scan_once(env, env.log, transaction, mark.generation)
            except RecoveryRefused as error:
                found = error
        if env.log_mark().generation != mark.generation:
            # What was found is of two moments: as a ledger it would be too short, as a damage it would be none.
            refused = None
        elif isinstance(found, ReadView):
            return found
        else:
            refused = found
    raise refused or RecoveryRefused(Condition.SYNC_LOG_RESTLESS, str(env.log.path))


def _scan_once(env: Environment, log: SyncLog, transaction: "lmdb.Transaction[bytes]", generation: int) -> ReadView:
    """The read view by what LMDB says, which is of this generation, and then the log."""
    marks = _marks(env, transaction)
    try:
        hard = records.unpack_hard(transaction.get(records.HARD_KEY, b"", db=env.table(records.STATE)))
    except Damaged as error:
        place = f"{env.directory}, table state, key hard ({error})"
        raise RecoveryRefused(Condition.HARD_STATE_DAMAGED, place) from error
    bodies = log.read(generation)

    def stored(index: int) -> Entry:
        key = records.index_key(index)
        return records.unpack_entry(key, transaction.get(key, b"", db=env.table(records.ENTRIES)))

    try:
        replayed = replay(hard, marks, bodies, stored)
    except (Contradiction, Damaged) as error:
        raise RecoveryRefused(Condition.SYNC_LOG_CONTRADICTS, f"{log.path} ({error})") from error
    after = replayed.marks
    return ReadView(
        after,
        {entry.index: entry for entry in replayed.entries if entry.index <= after.applied_index},
        {applied.at: applied.row for applied in replayed.applied},
        [(applied.row.revision, applied.at) for applied in replayed.applied if applied.advanced],
        marks.applied_revision,
    )


def _marks(env: Environment, transaction: "lmdb.Transaction[bytes]") -> Marks:
    try:
        return records.unpack_marks(transaction.get(records.MARKS_KEY, b"", db=env.table(records.STATE)))
    except Damaged as error:
        place = f"{env.directory}, table state, key marks ({error})"
        raise RecoveryRefused(Condition.MARKS_DAMAGED, place) from error


STEP_MAX_ENTRIES: Final = 256
STEP_MAX_BYTES: Final = 8 << 20
"""What one read transaction reads: LMDB cannot reuse pages while one is open, so none waits for its caller."""


DAMAGED_MAX: Final = 512
"""The longest stretch of damaged entries that is mended, count: more than a page of the file has."""


class SegmentName(NamedTuple):
    """The entries that a segment of an archive has, first and last, both included."""

    first_index: int
    last_index: int

    def __str__(self) -> str:
        return f"segment-{self.first_index:020d}-{self.last_index:020d}.fbl"

    @classmethod
    def parse(cls, name: str) -> "SegmentName | None":
        """What the name says, or None if it is not the name of a segment."""
        found = _SEGMENT_NAME.fullmatch(name)
        return None if found is None else cls(int(found[1]), int(found[2]))


_SEGMENT_NAME = re.compile(r"segment-([0-9]{20})-([0-9]{20})\.fbl")


class LedgerEntry(NamedTuple):
    """A committed entry, with the digest of the ledger up to and with it, and the revisions before and after it."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here
    term: int
    data: bytes
    digest: bytes
    base: int
    revision: int
    seal: bytes = b""
    """As `Entry.seal`; empty where only the history was kept."""


class Verified(NamedTuple):
    """What `Ledger.verify` found: how many entries, from where to where, the last digest, and what is not held here."""

    entries: int
    first_index: int
    last_index: int
    digest: bytes
    gaps: tuple[Gap, ...]


class _Scan(NamedTuple):
    """What the ledger was at one moment: all that later transactions read is read under these marks."""

    view: ReadView
    gaps: tuple[Gap, ...]

    def after_gaps(self, index: int) -> int:
        """The first index from this one on that lies in no gap."""
        for gap in self.gaps:
            if gap.first_index <= index <= gap.last_index:
                index = gap.last_index + 1
        return index

    def with_gaps(self, gaps: tuple[Gap, ...]) -> "_Scan":
        """The same with these gaps as well."""
        return self if gaps == self.gaps else self._replace(gaps=tuple(sorted({*self.gaps, *gaps})))


class LedgerBroken(Exception):
    """The history is not what was once agreed, from `index` on; `sentence` says how that shows."""

    def __init__(self, index: int, sentence: str) -> None:
        super().__init__(f"the ledger is broken at entry {index}: {sentence}")
        self.index = index
        self.sentence = sentence


class Ledger:
    """Reads the ledger of an Environment, live or read-only from another process.

    In the process of a live journal it sees what LMDB was given: all that was applied after `flush_hints`. From another
    process it sees what was synced, in LMDB and in the sync log, whether the replica runs or not. May be used in other
    threads than the journal's. Besides what it says itself, every method raises RecoveryRefused for what would be
    refused at a start, and StorageFailed.

    Each call reads the ledger as it is then. What several calls answer, of a replica that goes on, belongs
    together only if they are made on what `as_of_now` returned.
    """

    def __init__(self, env: Environment) -> None:
        self._env = env
        self._seen: _Scan | None = None

    def as_of_now(self) -> "Ledger":
        """The ledger up to what is applied now, whatever is applied, installed or fetched later; itself if it is one.

        It reads the marks and the sync log this once, and holds no transaction between two calls: entries are
        never changed once they are applied, so they are read when they are asked for.
        """
        if self._seen is not None:
            return self
        ledger = Ledger(self._env)
        ledger._seen = self._scan()
        return ledger

    def as_stored(self) -> "Ledger":
        """The ledger up to what LMDB was given by the last checkpoint, without what the sync log adds to it.

        Costs a look at the marks, so whoever follows a replica that goes on can afford it many times a second.
        """
        with self._env.read() as transaction:
            marks = _marks(self._env, transaction)
            gaps = self._gaps(transaction)
        ledger = Ledger(self._env)
        ledger._seen = _Scan(
            ReadView(marks, {}, {}, [], marks.applied_revision),
            tuple(gap for gap in gaps if gap.first_index <= marks.applied_index),
        )
        return ledger

    def row_at(self, index: int) -> ChainRow:
        """Digest up to the entry at `index`, and revision after it. LedgerBroken where they are not known here."""
        view = self._view()
        with self._env.read() as transaction:
            return self._chain_row(view, transaction, index)

    @property
    def cluster_id(self) -> str:
        """The cluster whose history it is."""
        return self._env.identity.cluster_id

    @property
    def incarnation(self) -> Incarnation:
        """The incarnation of the cluster that the storage is of."""
        return self._env.incarnation

    @property
    def first_index(self) -> int:
        """First entry held; the one after `applied_index` if none is."""
        scan = self._scan()
        view = scan.view
        with self._env.read() as transaction:
            cursor = transaction.cursor(self._env.table(records.ENTRIES))
            try:
                stored = records.key_index(cursor.key()) if cursor.first() else view.marks.applied_index + 1
            except Damaged as error:
                raise LedgerBroken(0, str(error)) from error
        return scan.after_gaps(min([stored, view.marks.applied_index + 1, *view.entries]))

    @property
    def applied_index(self) -> int:
        """Last entry of the ledger; 0 when it is empty."""
        return self._view().marks.applied_index

    @property
    def applied_revision(self) -> int:
        """Revision after the entry at `applied_index`."""
        return self._view().marks.applied_revision

    @property
    def applied_digest(self) -> bytes:
        """Digest of the whole ledger."""
        return self._view().marks.applied_digest

    def gaps(self) -> tuple[Gap, ...]:
        """What this replica does not hold, because a snapshot was installed instead."""
        if self._seen is not None:
            return self._seen.gaps
        with self._env.read() as transaction:
            return self._gaps(transaction)

    def pruned(self) -> Pruned | None:
        """What this replica is not to hold any more, and where it is; None where nothing was pruned. LedgerBroken."""
        with self._env.read() as transaction:
            value = transaction.get(records.PRUNED_KEY, db=self._env.table(records.STATE))
        try:
            return None if value is None else records.unpack_pruned(value)
        except Damaged as error:
            raise LedgerBroken(0, f"what is recorded as pruned: {error}") from error

    def missing(self) -> tuple[Gap, ...]:
        """What this replica does not hold and is to hold: gaps, without what was pruned. LedgerBroken."""
        pruned, gaps = self.pruned(), self.gaps()
        below = 0 if pruned is None else pruned.below
        return tuple(
            gap if gap.first_index >= below else gap._replace(first_index=below)
            for gap in gaps
            if gap.last_index >= below
        )

    @property
    def whole_from(self) -> int:
        """The first entry from which on this replica holds all of the ledger."""
        return max((gap.last_index for gap in self.gaps()), default=0) + 1

    def where(self, revision: int) -> str:
        """Where a revision is that is not held here, in words: a segment of the archive, or nowhere that is known."""
        pruned = self.pruned()
        for segment in () if pruned is None else pruned.segments:
            if revision <= segment.revision_after:
                return _in_archive(segment)
        return "a snapshot came in its place"

    def where_at(self, at: int) -> str:
        """Where a moment is that was pruned, by the replicated clock, in words; empty where it was not."""
        found = self.pruned_part()
        if found is None:
            return ""
        pruned, gap = found
        segments = (one for one in pruned.segments if at <= one.last_at and one.first_index <= gap.last_index)
        return next(map(_in_archive, segments), "")

    def pruned_part(self) -> tuple[Pruned, Gap] | None:
        """What is not to be held any more, and the gap that is there instead by now; None where there is none yet."""
        pruned = self.pruned()
        with self._env.read() as transaction:
            gaps = self._gaps(transaction)
        gap = None if pruned is None else next((gap for gap in gaps if gap.first_index < pruned.below), None)
        return None if pruned is None or gap is None else (pruned, gap)

    def read_some(self, first: int, *, entries_max: int, bytes_max: int) -> list[LedgerEntry]:
        """Entries from `first` on, in order, until one of the bounds is reached, but at least one if there is one.

        Gaps are passed over. LedgerBroken at the first damage.
        """
        return self._step(self._scan(), first, entries_max, bytes_max)

    def read(self, first: int, *, limit: int) -> Iterator[LedgerEntry]:
        """Up to `limit` entries from `first` on, in order; gaps are passed over. LedgerBroken at the first damage.

        What is applied after the first one was asked for is not among them.
        """
        scan = self._scan()
        step = self._step(scan, first, min(limit, STEP_MAX_ENTRIES))
        while step:
            yield from step
            limit -= len(step)
            step = self._step(scan, step[-1].index + 1, min(limit, STEP_MAX_ENTRIES))

    def index_of_revision(self, revision: int) -> int:
        """The entry that settled `revision`. LookupError, naming what is held, before or after it or inside a gap."""
        scan = self._scan()
        view, marks = scan.view, scan.view.marks
        if not 0 < revision <= marks.applied_revision:
            raise LookupError(f"no revision {revision}: the ledger holds {_held(scan)}")
        for gap in scan.gaps:
            if gap.revision_before < revision <= gap.revision_after:
                raise LookupError(
                    f"revision {revision} is not held here, {self.where(revision)}; the ledger holds {_held(scan)}"
                )
        if revision > view.stored_revision:
            return view.revisions[bisect_left(view.revisions, (revision, 0))][1]
        with self._env.read() as transaction:
            cursor = transaction.cursor(self._env.table(records.REVISIONS))
            if not cursor.set_range(records.index_key(revision)):
                raise LedgerBroken(marks.applied_index, f"no entry is recorded for revision {revision}")
            if any(gap.revision_before < revision <= gap.revision_after for gap in self._gaps(transaction)):
                raise LookupError(f"revision {revision} is not held here any more, {self.where(revision)}")
            key, value = cursor.item()
            try:
                return records.unpack_number(key, value)
            except Damaged as error:
                raise LedgerBroken(marks.applied_index, f"the row of revision {revision}: {error}") from error

    def verify(
        self,
        *,
        revision_after: Callable[[bytes, int], int] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Verified:
        """Check every entry held up to the present `applied_index`, and what is stored beside it and follows from it.

        Of each entry checksum, order and digest; what is recorded of revisions, gaps and marks; the last digest.
        `revision_after` says to what revision the data of an entry leads from the one before (`wal.codec`): without it
        the revisions of entries are believed. `progress(done index, last index)` is called now and then. LedgerBroken
        at the first damage.
        """
        scan = self._scan()
        view, gaps = scan
        marks = view.marks
        self._check_gaps(scan)
        count, following, digest, first = 0, 1, records.GENESIS, 0
        while following <= marks.applied_index:
            step = self._step(scan, following, STEP_MAX_ENTRIES)
            if not step:
                break
            first = first or step[0].index
            count += len(step)
            self._check_derived(scan, step, revision_after)
            following, digest = step[-1].index + 1, step[-1].digest
            if progress is not None:
                progress(step[-1].index, marks.applied_index)
        if gaps and gaps[-1].last_index == marks.applied_index:
            with self._env.read() as transaction:
                digest = self._chain_row(view, transaction, marks.applied_index).digest
            following = marks.applied_index + 1
        if following != marks.applied_index + 1:
            raise LedgerBroken(following, f"it is missing; {marks.applied_index} is applied")
        if digest != marks.applied_digest:
            raise LedgerBroken(marks.applied_index, "its digest is not the one that was recorded as applied")
        self._check_behind(scan)
        with self._env.read() as transaction:
            recorded = self._chain_row(view, transaction, marks.applied_index).revision
        if recorded != marks.applied_revision:
            raise LedgerBroken(
                marks.applied_index, f"it leads to revision {recorded}; {marks.applied_revision} is recorded as applied"
            )
        return Verified(count, first or marks.applied_index + 1, marks.applied_index, digest, gaps)

    def check_some(
        self, first: int, *, entries_max: int, bytes_max: int, revision_after: Callable[[bytes, int], int]
    ) -> tuple[int, int] | None:
        """Check entries from `first` on as `verify` does, within both bounds but at least one; return the index that
        follows, and how many bytes were read.

        None where there is none: then the gaps are checked, and that all of it comes to what was recorded as applied.
        LedgerBroken at the first damage.
        """
        scan = self._scan()
        step = self._step(scan, first, entries_max, bytes_max)
        if step:
            self._check_derived(scan, step, revision_after)
            return step[-1].index + 1, sum(len(entry.data) for entry in step)
        self._check_gaps(scan)
        self._check_behind(scan)
        marks = scan.view.marks
        with self._env.read() as transaction:
            row = self._chain_row(scan.view, transaction, marks.applied_index)
        if row != ChainRow(marks.applied_digest, marks.applied_revision):
            raise LedgerBroken(marks.applied_index, "it is not what was recorded as applied")
        return None

    def damaged_from(self, first: int, revision_after: Callable[[bytes, int], int]) -> Gap | None:
        """The stretch from `first` on to the first entry whose digest and revision are confirmed by the next one.

        What is damaged there can be proven from its end, like a gap. None where no end of it is found, or what is held
        before it is damaged too.
        """
        try:
            scan = self._scan()
        except LedgerBroken:
            return None
        marks, view = scan.view.marks, scan.view
        ends = {gap.first_index - 1 for gap in scan.gaps}
        with self._env.read() as transaction:
            try:
                before = self._chain_row(view, transaction, first - 1)
            except LedgerBroken:
                return None
            known: ChainRow | None = before
            for last in range(first, min(marks.applied_index, first + DAMAGED_MAX) + 1):
                if last in ends:
                    return None
                known = self._derived(view, transaction, known, last, revision_after)
                try:
                    row = self._chain_row(view, transaction, last)
                    if last < marks.applied_index:
                        after = self._derived(view, transaction, row, last + 1, revision_after)
                        confirmed = after == self._chain_row(view, transaction, last + 1)
                    else:
                        confirmed = row == ChainRow(marks.applied_digest, marks.applied_revision)
                except LedgerBroken:
                    continue
                # The next entry may not tell another revision; the entry itself does, if it is the one of the digest.
                if confirmed and (known is None or known.digest != row.digest or known == row):
                    return Gap(first, last, before.revision, row.revision)
        return None

    def _derived(
        self,
        view: ReadView,
        transaction: "lmdb.Transaction[bytes]",
        before: ChainRow | None,
        index: int,
        revision_after: Callable[[bytes, int], int],
    ) -> ChainRow | None:
        """The row that follows from the one before and the entry; None where one of them is not known."""
        if before is None:
            return None
        try:
            entry = self._stored(view, transaction, index)
            revision = revision_after(entry.data, before.revision)
        except (LedgerBroken, CodecError):
            return None
        return ChainRow(records.chained(before.digest, entry), revision)

    def held_in(self, stretch: Gap, revision_after: Callable[[bytes, int], int]) -> "list[Handed]":
        """What is held of a damaged stretch, chained anew, the newest first; LedgerBroken if an entry is damaged."""
        view = self._view()
        found: list[Handed] = []
        with self._env.read() as transaction:
            row = self._chain_row(view, transaction, stretch.first_index - 1)
            for index in range(stretch.first_index, stretch.last_index + 1):
                entry = self._stored(view, transaction, index)
                found.append(Handed(entry, row.digest, row.revision))
                row = ChainRow(records.chained(row.digest, entry), revision_after(entry.data, row.revision))
        return found[::-1]

    def _stored(self, view: ReadView, transaction: "lmdb.Transaction[bytes]", index: int) -> Entry:
        key = records.index_key(index)
        value = transaction.get(key, db=self._env.table(records.ENTRIES))
        return view.entries.get(index) or self._entry(index, None if value is None else (key, value))

    def _check_derived(
        self, scan: _Scan, step: Sequence[LedgerEntry], revision_after: Callable[[bytes, int], int] | None
    ) -> None:
        """Check what is stored beside entries that were read and proven: it follows from them."""
        marks = scan.view.marks
        expected: list[tuple[int, int]] = []
        for entry in step:
            if entry.revision < entry.base:
                raise LedgerBroken(entry.index, f"revision {entry.revision} is recorded for it, after {entry.base}")
            if revision_after is not None:
                try:
                    found = revision_after(entry.data, entry.base)
                except WrittenLater:
                    raise
                except CodecError as error:
                    raise LedgerBroken(entry.index, str(error)) from error
                if found != entry.revision:
                    raise LedgerBroken(
                        entry.index, f"it leads to revision {found}; {entry.revision} is recorded for it"
                    )
            if entry.index == marks.base_index and entry.term != marks.base_term:
                raise LedgerBroken(
                    entry.index, f"it is of term {entry.term}; {marks.base_term} is recorded as its term"
                )
            if entry.base < entry.revision <= scan.view.stored_revision:
                expected.append((entry.revision, entry.index))
        # Between two entries of a step there may be a gap, in which others may be filling in history now.
        for after, last, rows in _runs(step, expected):
            stored = self._revision_rows(after, min(last, scan.view.stored_revision), step[-1].index)
            if stored != rows and not self._is_pruned(step[0].index):
                odd = min(set(stored) ^ set(rows))
                raise LedgerBroken(
                    step[-1].index,
                    f"revision {odd[0]} is not recorded for the entry that settled it: {_rows_said(odd, stored)}",
                )

    def _revision_rows(self, after: int, last: int, index: int) -> list[tuple[int, int]]:
        """The stored rows of the revisions behind `after` up to `last`, which entries up to `index` settled: revision
        and index.
        """
        found: list[tuple[int, int]] = []
        with self._env.read() as transaction:
            cursor = transaction.cursor(self._env.table(records.REVISIONS))
            more = cursor.set_range(records.index_key(after + 1))
            while more:
                key, value = cursor.item()
                try:
                    revision = records.key_index(key)
                    if revision > last:
                        break
                    found.append((revision, records.unpack_number(key, value)))
                except Damaged as error:
                    raise LedgerBroken(index, f"the row of revision {int.from_bytes(key)}: {error}") from error
                more = cursor.next()
        return found

    def _check_behind(self, scan: _Scan) -> None:
        """Check that the marks are in order, and that nothing is stored behind what they speak of."""
        with self._env.read() as transaction:
            # As they are now: a replica that goes on writes rows and marks in one transaction.
            marks = _marks(self._env, transaction)
            revisions = transaction.cursor(self._env.table(records.REVISIONS))
            entries = transaction.cursor(self._env.table(records.ENTRIES))
            try:
                settled = records.key_index(revisions.key()) if revisions.last() else 0
                stored = records.key_index(entries.key()) if entries.last() else 0
            except Damaged as error:
                raise LedgerBroken(scan.view.marks.applied_index, str(error)) from error
        applied, last = scan.view.marks.applied_index, marks.last_index
        if not marks.base_index <= marks.applied_index <= marks.commit_index <= last:
            raise LedgerBroken(
                applied,
                f"the marks are out of order: base {marks.base_index}, applied {marks.applied_index}, commit "
                f"{marks.commit_index}, last {last}",
            )
        if stored > last or (stored < last and last > marks.base_index):
            raise LedgerBroken(applied, f"entry {stored} is the last one that is stored, and {last} is marked as such")
        if settled > marks.applied_revision:
            raise LedgerBroken(
                applied, f"revision {settled} is recorded as settled, and {marks.applied_revision} is the last one"
            )

    def _check_gaps(self, scan: _Scan) -> None:
        """Check that each gap lies between what is held, before the end, and holds nothing itself."""
        with self._env.read() as transaction:
            stored = transaction.get(records.MARKS_KEY, db=self._env.table(records.STATE)) or b""
            try:
                # Of the same transaction: a snapshot that is installed moves the end with the gap that it leaves.
                end = max(records.unpack_marks(stored).applied_index, scan.view.marks.applied_index)
            except Damaged as error:
                raise LedgerBroken(0, f"the marks: {error}") from error
            beyond = next((gap for gap in self._gaps(transaction) if gap.last_index > end), None)
        if beyond is not None:
            raise LedgerBroken(
                beyond.first_index,
                f"a gap is recorded from there to {beyond.last_index}, and the ledger ends with entry {end}",
            )
        behind = 0
        for gap in scan.gaps:
            if not behind < gap.first_index <= gap.last_index:
                raise LedgerBroken(
                    gap.first_index, f"a gap is recorded from there to {gap.last_index}, which none can be"
                )
            behind = gap.last_index
            with self._env.read() as transaction:
                # As it is now: whoever fills it in makes it shorter with the same transaction.
                held = next((now for now in self._gaps(transaction) if now.first_index == gap.first_index), None)
                if held is None:
                    continue
                before = self._chain_row(scan.view, transaction, held.first_index - 1).revision
                after = self._chain_row(scan.view, transaction, held.last_index).revision
                if (before, after) != (held.revision_before, held.revision_after):
                    raise LedgerBroken(
                        held.first_index,
                        f"the gap from there is recorded with revisions {held.revision_before} to "
                        f"{held.revision_after}; what is held beside it says {before} to {after}",
                    )
                cursor = transaction.cursor(self._env.table(records.ENTRIES))
                if cursor.set_range(records.index_key(held.first_index)):
                    index = records.key_index(cursor.key())
                    if index <= held.last_index:
                        raise LedgerBroken(index, "it is held, and recorded as missing")

    def _is_pruned(self, index: int) -> bool:
        """Whether an entry that was read is not held any more."""
        pruned = self.pruned()
        return pruned is not None and records.KEPT_ENTRIES < index < pruned.below

    def rows_before(self, first: int, last: int) -> list[ChainRow]:
        """Digest and revision before each of the held entries `first` to `last`. LedgerBroken if one is missing."""
        view = self._view()
        with self._env.read() as transaction:
            return [self._chain_row(view, transaction, index - 1) for index in range(first, last + 1)]

    def _view(self) -> ReadView:
        return read_view(self._env) if self._seen is None else self._seen.view

    def _scan(self) -> _Scan:
        if self._seen is not None:
            return self._seen
        view = read_view(self._env)
        with self._env.read() as transaction:
            gaps = self._gaps(transaction)
        # A snapshot may have been installed since the marks were read; its gap begins behind what was applied then.
        return _Scan(view, tuple(gap for gap in gaps if gap.first_index <= view.marks.applied_index))

    def _step(self, scan: _Scan, first: int, limit: int, bytes_max: int = STEP_MAX_BYTES) -> list[LedgerEntry]:
        found: list[LedgerEntry] = []
        view, size_bytes = scan.view, 0
        with self._env.read() as transaction:
            # What is pruned meanwhile is a gap by now, whatever it was when the scan was made.
            scan = scan.with_gaps(self._gaps(transaction))
            gaps = {gap.first_index: gap for gap in scan.gaps}
            following = scan.after_gaps(max(first, 1))
            applied_index = view.marks.applied_index
            before = (
                self._chain_row(view, transaction, following - 1) if following <= applied_index else ChainRow(b"", 0)
            )
            cursor = transaction.cursor(self._env.table(records.ENTRIES))
            more = cursor.set_range(records.index_key(following))
            while following <= applied_index and len(found) < limit and size_bytes < bytes_max:
                if following in gaps:
                    following = scan.after_gaps(following)
                    before = self._chain_row(view, transaction, following - 1)
                    continue
                entry = view.entries.get(following)
                if entry is None:
                    entry = self._entry(following, cursor.item() if more else None)
                row = self._chain_row(view, transaction, following)
                _, term, data, seal = entry
                if records.chained(before.digest, entry) != row.digest:
                    raise LedgerBroken(following, "it is not the entry that its digest speaks of")
                found.append(LedgerEntry(following, term, data, row.digest, before.revision, row.revision, seal))
                before = row
                size_bytes += len(data)
                following += 1
                more = cursor.next()
        return found

    def _entry(self, index: int, item: tuple[bytes, bytes] | None) -> Entry:
        if item is None or item[0] != records.index_key(index):
            raise LedgerBroken(index, "it is missing")
        try:
            return records.unpack_entry(*item)
        except Damaged as error:
            raise LedgerBroken(index, str(error)) from error

    def _chain_row(self, view: ReadView, transaction: "lmdb.Transaction[bytes]", index: int) -> ChainRow:
        row = view.chain.get(index)
        if row is not None:
            return row
        if index == 0:
            return ChainRow(records.GENESIS, 0)
        key = records.index_key(index)
        try:
            return records.unpack_chain(key, transaction.get(key, b"", db=self._env.table(records.CHAIN)))
        except Damaged as error:
            raise LedgerBroken(index, f"its digest: {error}") from error

    def _gaps(self, transaction: "lmdb.Transaction[bytes]") -> tuple[Gap, ...]:
        try:
            rows = transaction.cursor(self._env.table(records.GAPS))
            return tuple(records.unpack_gap(key, value) for key, value in rows)
        except Damaged as error:
            raise LedgerBroken(0, f"the table of gaps: {error}") from error


def _runs(
    step: Sequence[LedgerEntry], expected: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
    """The stretches of a step without a gap: the revisions before and after each, and the rows expected of it."""
    rows = iter(expected)
    row = next(rows, None)
    start = 0
    for position, entry in enumerate(step):
        is_last = position + 1 == len(step) or step[position + 1].index != entry.index + 1
        if not is_last:
            continue
        found = []
        while row is not None and row[1] <= entry.index:
            found.append(row)
            row = next(rows, None)
        yield step[start].base, entry.revision, found
        start = position + 1


def _rows_said(odd: tuple[int, int], stored: Sequence[tuple[int, int]]) -> str:
    return f"entry {odd[1]} is named" if odd in stored else "none is named"


def _held(scan: _Scan) -> str:
    """The ranges of revisions that are held, in words."""
    ranges, start = [], 1
    for gap in scan.gaps:
        if start <= gap.revision_before:
            ranges.append(f"{start} to {gap.revision_before}")
        start = gap.revision_after + 1
    last = scan.view.marks.applied_revision
    if start <= last:
        ranges.append(f"{start} to {last}")
    return " and ".join(ranges) or "none"


HANDED_ENTRIES_MAX: Final = 512
HANDED_BYTES_MAX: Final = 1 << 20
"""Entries handed over at once, count and bytes, but at least one: a transaction of a few milliseconds for each side."""


class Handed(NamedTuple):
    """An entry of the ledger, with the digest and the revision before it."""

    entry: Entry
    digest_before: bytes
    revision_before: int


class NotThisHistory(Exception):
    """What was handed over is not what the digests speak of; nothing was written."""


def hand_over(
    ledger: Ledger, last: int, *, entries_max: int = HANDED_ENTRIES_MAX, bytes_max: int = HANDED_BYTES_MAX
) -> list[Handed]:
    """Entries of a ledger that end with `last`, the newest first, within both bounds but at least one.

    LookupError if `last` is not held; LedgerBroken.
    """
    behind = max((gap.last_index for gap in ledger.gaps() if gap.first_index <= last), default=0)
    count = min(entries_max, last - max(behind, ledger.first_index - 1))
    if count < 1 or last > ledger.applied_index:
        raise LookupError(f"entry {last} is not held here{_where_entry(ledger.pruned(), last)}")
    try:
        held = list(ledger.read(last - count + 1, limit=count))
    except LedgerBroken as error:
        if not last - count < error.index < last:
            raise
        # What comes behind the damage can be handed over all the same.
        held = list(ledger.read(error.index + 1, limit=last - error.index))
    rows = ledger.rows_before(held[0].index, last)
    found: list[Handed] = []
    size_bytes = 0
    for one, row in zip(reversed(held), reversed(rows), strict=True):
        size_bytes += len(one.data)
        if found and size_bytes > bytes_max:
            break
        found.append(Handed(Entry(one.index, one.term, one.data, one.seal), row.digest, row.revision))
    return found


def _in_archive(segment: PrunedSegment) -> str:
    return f"it was pruned, and is in the archive: {SegmentName(segment.first_index, segment.last_index)}"


def _where_entry(pruned: Pruned | None, index: int) -> str:
    segments = () if pruned is None else pruned.segments
    found = next((one for one in segments if index <= one.last_index), None)
    return "" if found is None else f": it was pruned, and is in the archive, {SegmentName(*found[:2])}"


def fill(env: Environment, gap: Gap, handed: Sequence[Handed]) -> Gap | None:
    """Give the ledger entries that end with the last one of a gap, the newest first; return what is left of the gap.

    Durable on return. NotThisHistory if they do not follow from each other and from what is held behind the gap;
    BrokenInvariant if they do, but not on what is held before it: then this replica's own history is another one.
    Raises StorageFailed.
    """
    rows, left = _proven(env, gap, handed)
    if rows:
        with env.write() as transaction:
            _put(env, transaction, gap, rows)
            gaps, key = env.table(records.GAPS), records.index_key(gap.first_index)
            if left is None:
                transaction.delete(key, db=gaps)
            else:
                transaction.put(key, records.pack_gap(key, left), db=gaps)
    return left


def mend(env: Environment, stretch: Gap, handed: Sequence[Handed]) -> Gap | None:
    """Put entries in the place of those that end a damaged stretch (`Ledger.damaged_from`), the newest first.

    Returns what is left of the stretch. What stands beside the entries is made anew from them. Proofs, durability and
    errors are those of `fill`.
    """
    rows, left = _proven(env, stretch, handed)
    if rows:
        with env.write() as transaction:
            cursor = transaction.cursor(env.table(records.REVISIONS))
            more = cursor.set_range(records.index_key(rows[-1][1].revision + 1))
            while more and cursor.key() <= records.index_key(rows[0][2].revision):
                more = cursor.delete()
            cursor.close()
            _put(env, transaction, stretch, rows)
    return left


def _proven(
    env: Environment, gap: Gap, handed: Sequence[Handed]
) -> tuple[list[tuple[Entry, ChainRow, ChainRow]], Gap | None]:
    """What was handed over with the rows before and after it, once it is proven; and what is left of the gap."""
    last = read_chain_row(env, gap.last_index)
    if last is None:
        raise BrokenInvariant(f"the gap {gap.first_index} to {gap.last_index} has no digest at its end")
    rows: list[tuple[Entry, ChainRow, ChainRow]] = []
    after, index = last, gap.last_index
    for entry, digest_before, revision_before in handed:
        if entry.index != index or index < gap.first_index:
            raise NotThisHistory(f"entry {entry.index} came where entry {index} was to come")
        if len(digest_before) != records.DIGEST_BYTES or chained(digest_before, entry) != after.digest:
            raise NotThisHistory(f"entry {index} is not the one that the digest behind it speaks of")
        if not gap.revision_before <= revision_before <= after.revision:
            raise NotThisHistory(f"revision {revision_before} before entry {index}, and {after.revision} after it")
        before = ChainRow(digest_before, revision_before)
        rows.append((entry, before, after))
        after, index = before, index - 1
    if not rows:
        return rows, gap
    if index < gap.first_index:
        held = ChainRow(records.GENESIS, 0) if index == 0 else read_chain_row(env, index)
        if after != held:
            raise BrokenInvariant(
                f"the history up to entry {index} is not the cluster's: entry {index + 1} follows on digest "
                f"{after.digest.hex()[:16]} and revision {after.revision}"
            )
    left = Gap(gap.first_index, index, gap.revision_before, after.revision) if index >= gap.first_index else None
    return rows, left


def _put(
    env: Environment,
    transaction: "lmdb.Transaction[bytes]",
    gap: Gap,
    rows: Sequence[tuple[Entry, ChainRow, ChainRow]],
) -> None:
    entries, chain, revisions = (env.table(name) for name in (records.ENTRIES, records.CHAIN, records.REVISIONS))
    for entry, before, after in rows:
        key = records.index_key(entry.index)
        transaction.put(key, records.pack_entry(key, entry), db=entries)
        if after.revision > before.revision:
            key = records.index_key(after.revision)
            transaction.put(key, records.pack_number(key, entry.index), db=revisions)
        if entry.index > gap.first_index:
            key = records.index_key(entry.index - 1)
            transaction.put(key, records.pack_chain(key, before), db=chain)
