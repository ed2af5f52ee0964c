"""Committed history for audits, replay and verification. Reads are short steps that check every checksum and digest.

A reader in another process must not write, while the replica keeps running. The replica may make a checkpoint after the
reader has read LMDB and before it reads the sync log, and a record may be half written. The reader therefore reads
LMDB's generation again after the log, and repeats a scan that seems to find damage.

History that a snapshot replaced is copied from another replica's ledger, from the end of the gap backwards. The digest
after the gap is known, and proves the last entry together with the digest before that entry. Each entry is thus proven
on arrival, each transaction shortens the gap, and a crash only interrupts the work. Finally the first entry of the gap
must follow the entry before the gap.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import lmdb

from forebay.wal import records
from forebay.wal.codec import CodecError, WrittenLater
from forebay.wal.environment import Environment, log_mark
from forebay.wal.failures import BrokenInvariant, Condition, RecoveryRefused
from forebay.wal.records import (
    ChainRow,
    DamagedValue,
    Entry,
    Gap,
    Incarnation,
    Marks,
    PrunedRange,
    PrunedSegment,
    chain_digest,
)
from forebay.wal.replay import Contradiction, replay
from forebay.wal.rows import read_chain_row
from forebay.wal.sync_log import SyncLog

SCANS_MAX: Final = 20
"""Maximum number of scans of a reader. A scan takes milliseconds; checkpoints are much further apart."""


class ReadView(NamedTuple):
    """Marks of the whole ledger, and the applied entries and rows that LMDB lacks."""

    marks: Marks
    entries: Mapping[int, Entry]
    chain: Mapping[int, ChainRow]
    revisions: list[tuple[int, int]]
    """Last revision that an entry settled, with the entry's index; ascending."""
    stored_revision: int
    """Highest revision whose row is in LMDB."""


def read_view(env: Environment) -> ReadView:
    """Return the rows that complete LMDB's ledger: those of the sync log; none in the replica's own process.

    The view stays valid while LMDB receives more, because applied entries never change. A scan that overlaps a
    checkpoint is repeated. The log is rejected as damaged only after a scan without a checkpoint, and as busy if every
    scan overlapped one.

    Raises:
        RecoveryRefused: The log is rejected; the message names location and remedy.
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
            # The scan mixed two states: its ledger would be too short, and damage found in it would not be real.
            refused = None
        elif isinstance(found, ReadView):
            return found
        else:
            refused = found
    raise refused or RecoveryRefused(Condition.SYNC_LOG_RESTLESS, str(env.log.path))


def _scan_once(env: Environment, log: SyncLog, transaction: "lmdb.Transaction[bytes]", generation: int) -> ReadView:
    """Return the read view of LMDB at this generation combined with the log."""
    marks = _marks(env, transaction)
    try:
        hard = records.unpack_hard(transaction.get(records.HARD_KEY, b"", db=env.table(records.STATE)))
    except DamagedValue as error:
        place = f"{env.directory}, table state, key hard ({error})"
        raise RecoveryRefused(Condition.HARD_STATE_DAMAGED, place) from error
    bodies = log.read(generation)

    def stored(index: int) -> Entry:
        key = records.index_key(index)
        return records.unpack_entry(key, transaction.get(key, b"", db=env.table(records.ENTRIES)))

    try:
        replayed = replay(hard, marks, bodies, stored)
    except (Contradiction, DamagedValue) as error:
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
    except DamagedValue as error:
        place = f"{env.directory}, table state, key marks ({error})"
        raise RecoveryRefused(Condition.MARKS_DAMAGED, place) from error


STEP_MAX_ENTRIES: Final = 256
STEP_MAX_BYTES: Final = 8 << 20
"""Limit of data read in one transaction. LMDB cannot reuse pages while a transaction is open, so keep them short."""


DAMAGED_MAX: Final = 512
"""Maximum number of consecutive damaged entries that are repaired: more than one page of the file holds."""


class SegmentName(NamedTuple):
    """Range of entries in an archive segment, first and last included."""

    first_index: int
    last_index: int

    def __str__(self) -> str:
        return f"segment-{self.first_index:020d}-{self.last_index:020d}.fbl"

    @classmethod
    def parse(cls, name: str) -> "SegmentName | None":
        """Parse the file name of a segment; return None for other names."""
        found = _SEGMENT_NAME.fullmatch(name)
        return None if found is None else cls(int(found[1]), int(found[2]))


_SEGMENT_NAME = re.compile(r"segment-([0-9]{20})-([0-9]{20})\.fbl")


class LedgerEntry(NamedTuple):
    """Committed entry with the ledger's digest after it, and the revisions before and after it."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which is not used here
    term: int
    data: bytes
    digest: bytes
    base: int
    revision: int
    seal: bytes = b""
    """Seal of the entry (`Entry.seal`); empty in archived history."""


class LedgerSummary(NamedTuple):
    """Result of `Ledger.verify`: number and range of entries, last digest, and gaps."""

    entries: int
    first_index: int
    last_index: int
    digest: bytes
    gaps: tuple[Gap, ...]


class _Scan(NamedTuple):
    """Last entries of the ledger at one moment. Later transactions read no further."""

    view: ReadView
    gaps: tuple[Gap, ...]

    def after_gaps(self, index: int) -> int:
        """Return the first index from `index` on that lies in no gap."""
        for gap in self.gaps:
            if gap.first_index <= index <= gap.last_index:
                index = gap.last_index + 1
        return index

    def with_gaps(self, gaps: tuple[Gap, ...]) -> "_Scan":
        """Return a copy that includes these gaps."""
        return self if gaps == self.gaps else self._replace(gaps=tuple(sorted({*self.gaps, *gaps})))


class LedgerBroken(Exception):
    """Ledger that differs from the agreed history from `index` on; `sentence` gives the evidence."""

    def __init__(self, index: int, sentence: str) -> None:
        super().__init__(f"the ledger is broken at entry {index}: {sentence}")
        self.index = index
        self.sentence = sentence


class Ledger:
    """Reader of an Environment's ledger, in the replica's process or read-only in another process.

    In the process of a live journal, the reader sees LMDB; after `flush_hints` LMDB has all applied entries. In another
    process, it sees LMDB and the sync log, whether or not the replica runs. Other threads than the journal's may use
    it. Every method may raise StorageFailed, or RecoveryRefused for conditions that also prevent a start.

    Each call reads the current ledger. To get consistent results from several calls on a running replica, call the
    methods of the ledger that `as_of_now` returns.
    """

    def __init__(self, env: Environment) -> None:
        self._env = env
        self._seen: _Scan | None = None

    def as_of_now(self) -> "Ledger":
        """Return a view of the ledger up to the entries applied now; the ledger itself if it already is such a view.

        The view reads the marks and the sync log once and keeps no transaction open. Entries are read on request,
        because applied entries never change.
        """
        if self._seen is not None:
            return self
        ledger = Ledger(self._env)
        ledger._seen = self._scan()
        return ledger

    def as_stored(self) -> "Ledger":
        """Return a view of the ledger up to the last checkpoint, without the sync log.

        The call reads only the marks, so a process that follows a running replica may call it many times a second.
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
        """Return the digest and revision after the entry at `index`.

        Raises:
            LedgerBroken: This replica does not have them.
        """
        view = self._view()
        with self._env.read() as transaction:
            return self._chain_row(view, transaction, index)

    @property
    def cluster_id(self) -> str:
        """ID of the cluster."""
        return self._env.identity.cluster_id

    @property
    def incarnation(self) -> Incarnation:
        """Incarnation of the cluster."""
        return self._env.incarnation

    @property
    def first_index(self) -> int:
        """Index of the first entry on this replica; `applied_index + 1` if there is none."""
        scan = self._scan()
        view = scan.view
        with self._env.read() as transaction:
            cursor = transaction.cursor(self._env.table(records.ENTRIES))
            try:
                stored = records.key_index(cursor.key()) if cursor.first() else view.marks.applied_index + 1
            except DamagedValue as error:
                raise LedgerBroken(0, str(error)) from error
        return scan.after_gaps(min([stored, view.marks.applied_index + 1, *view.entries]))

    @property
    def applied_index(self) -> int:
        """Index of the last entry of the ledger; 0 when it is empty."""
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
        """Ranges that this replica lacks, because a snapshot replaced them or they were pruned."""
        if self._seen is not None:
            return self._seen.gaps
        with self._env.read() as transaction:
            return self._gaps(transaction)

    def pruned_range(self) -> PrunedRange | None:
        """Return the pruned range and its archive segments; None if nothing was pruned.

        Raises:
            LedgerBroken: The record of the pruned range is damaged.
        """
        with self._env.read() as transaction:
            value = transaction.get(records.PRUNED_KEY, db=self._env.table(records.STATE))
        try:
            return None if value is None else records.unpack_pruned(value)
        except DamagedValue as error:
            raise LedgerBroken(0, f"the record of pruned entries: {error}") from error

    def missing(self) -> tuple[Gap, ...]:
        """Return the gaps to fill: all gaps outside the pruned range.

        Raises:
            LedgerBroken: The table of gaps, or the record of pruned entries, is damaged.
        """
        pruned, gaps = self.pruned_range(), self.gaps()
        below = 0 if pruned is None else pruned.below
        return tuple(
            gap if gap.first_index >= below else gap._replace(first_index=below)
            for gap in gaps
            if gap.last_index >= below
        )

    @property
    def whole_from(self) -> int:
        """First index after the last gap: from there on this replica has the complete ledger."""
        return max((gap.last_index for gap in self.gaps()), default=0) + 1

    def describe_location(self, revision: int) -> str:
        """Explain why this replica lacks a revision: pruned (with the archive segment), or replaced by a snapshot."""
        pruned = self.pruned_range()
        for segment in () if pruned is None else pruned.segments:
            if revision <= segment.revision_after:
                return _in_archive(segment)
        return "a snapshot was installed instead"

    def describe_location_at(self, at: int) -> str:
        """Name the archive segment with a time of the replicated clock; empty if that time was not pruned."""
        found = self.pruned_part()
        if found is None:
            return ""
        pruned, gap = found
        segments = (one for one in pruned.segments if at <= one.last_at and one.first_index <= gap.last_index)
        return next(map(_in_archive, segments), "")

    def pruned_part(self) -> tuple[PrunedRange, Gap] | None:
        """Return the range to prune and the gap that pruning has left so far; None if nothing was removed yet."""
        pruned = self.pruned_range()
        with self._env.read() as transaction:
            gaps = self._gaps(transaction)
        gap = None if pruned is None else next((gap for gap in gaps if gap.first_index < pruned.below), None)
        return None if pruned is None or gap is None else (pruned, gap)

    def read_some(self, first: int, *, entries_max: int, bytes_max: int) -> list[LedgerEntry]:
        """Return entries from `first` on, in order, up to one of the bounds, but at least one if it exists.

        Gaps are skipped.

        Raises:
            LedgerBroken: An entry is damaged.
        """
        return self._step(self._scan(), first, entries_max, bytes_max)

    def read(self, first: int, *, limit: int) -> Iterator[LedgerEntry]:
        """Yield up to `limit` entries from `first` on, in order; gaps are skipped.

        Entries applied after the first step are not included.

        Raises:
            LedgerBroken: The next entry is damaged.
        """
        scan = self._scan()
        step = self._step(scan, first, min(limit, STEP_MAX_ENTRIES))
        while step:
            yield from step
            limit -= len(step)
            step = self._step(scan, step[-1].index + 1, min(limit, STEP_MAX_ENTRIES))

    def index_of_revision(self, revision: int) -> int:
        """Return the index of the entry that settled `revision`.

        Raises:
            LookupError: This replica lacks the entry; the message names the ranges it has.
        """
        scan = self._scan()
        view, marks = scan.view, scan.view.marks
        if not 0 < revision <= marks.applied_revision:
            raise LookupError(f"no revision {revision}: the ledger holds {_held(scan)}")
        for gap in scan.gaps:
            if gap.revision_before < revision <= gap.revision_after:
                raise LookupError(
                    f"revision {revision} is not available on this replica, {self.describe_location(revision)}; the "
                    f"ledger holds {_held(scan)}"
                )
        if revision > view.stored_revision:
            return view.revisions[bisect_left(view.revisions, (revision, 0))][1]
        with self._env.read() as transaction:
            cursor = transaction.cursor(self._env.table(records.REVISIONS))
            if not cursor.set_range(records.index_key(revision)):
                raise LedgerBroken(marks.applied_index, f"no entry is recorded for revision {revision}")
            if any(gap.revision_before < revision <= gap.revision_after for gap in self._gaps(transaction)):
                raise LookupError(
                    f"revision {revision} is no longer available on this replica, {self.describe_location(revision)}"
                )
            key, value = cursor.item()
            try:
                return records.unpack_number(key, value)
            except DamagedValue as error:
                raise LedgerBroken(marks.applied_index, f"the row of revision {revision}: {error}") from error

    def verify(
        self,
        *,
        revision_after: Callable[[bytes, int], int] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> LedgerSummary:
        """Check every entry up to the present `applied_index`, and all stored rows derived from the entries.

        Checks each entry's checksum, order and digest; the rows of revisions, gaps and marks; and the last digest.
        `revision_after` computes the revision after an entry from the revision before it (`wal.codec`); without this
        function, the stored revisions are trusted. Calls `progress(checked index, last index)` from time to time.

        Raises:
            LedgerBroken: The first damage found.
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
            raise LedgerBroken(following, f"it is missing, although entries up to {marks.applied_index} are applied")
        if digest != marks.applied_digest:
            raise LedgerBroken(marks.applied_index, "its digest differs from the recorded one")
        self._check_behind(scan)
        with self._env.read() as transaction:
            recorded = self._chain_row(view, transaction, marks.applied_index).revision
        if recorded != marks.applied_revision:
            raise LedgerBroken(
                marks.applied_index, f"its revision is {recorded}, but the marks name revision {marks.applied_revision}"
            )
        return LedgerSummary(count, first or marks.applied_index + 1, marks.applied_index, digest, gaps)

    def check_some(
        self, first: int, *, entries_max: int, bytes_max: int, revision_after: Callable[[bytes, int], int]
    ) -> tuple[int, int] | None:
        """Check entries from `first` on as `verify` does, within both bounds but at least one.

        Returns the next index and the number of bytes read. After the last entry, checks the gaps and the recorded
        applied digest, and returns None.

        Raises:
            LedgerBroken: The first damage found.
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
            raise LedgerBroken(marks.applied_index, "its digest or revision differs from the marks")
        return None

    def damaged_from(self, first: int, revision_after: Callable[[bytes, int], int]) -> Gap | None:
        """Return the damaged range from `first` to the next entry whose digest and revision the following entry
        confirms.

        The content of the range can be proven from its end, like a gap. Returns None if no entry confirms an end, or if
        the entry before `first` is damaged too.
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
                # A row derived from the entries must not contradict the stored revision if the digests are equal.
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
        """Derive a row from the previous row and the entry; return None if either is unknown."""
        if before is None:
            return None
        try:
            entry = self._stored(view, transaction, index)
            revision = revision_after(entry.data, before.revision)
        except (LedgerBroken, CodecError):
            return None
        return ChainRow(records.chain_digest(before.digest, entry), revision)

    def held_in(self, stretch: Gap, revision_after: Callable[[bytes, int], int]) -> "list[HistoryEntry]":
        """Return the entries of a damaged range, newest first, with digests computed again from the row before the
        range.

        Raises:
            LedgerBroken: The data of an entry is damaged.
        """
        view = self._view()
        found: list[HistoryEntry] = []
        with self._env.read() as transaction:
            row = self._chain_row(view, transaction, stretch.first_index - 1)
            for index in range(stretch.first_index, stretch.last_index + 1):
                entry = self._stored(view, transaction, index)
                found.append(HistoryEntry(entry, row.digest, row.revision))
                row = ChainRow(records.chain_digest(row.digest, entry), revision_after(entry.data, row.revision))
        return found[::-1]

    def _stored(self, view: ReadView, transaction: "lmdb.Transaction[bytes]", index: int) -> Entry:
        key = records.index_key(index)
        value = transaction.get(key, db=self._env.table(records.ENTRIES))
        return view.entries.get(index) or self._entry(index, None if value is None else (key, value))

    def _check_derived(
        self, scan: _Scan, step: Sequence[LedgerEntry], revision_after: Callable[[bytes, int], int] | None
    ) -> None:
        """Check the stored rows that are derived from verified entries."""
        marks = scan.view.marks
        expected: list[tuple[int, int]] = []
        for entry in step:
            if entry.revision < entry.base:
                raise LedgerBroken(
                    entry.index, f"its revision {entry.revision} is lower than the previous one, {entry.base}"
                )
            if revision_after is not None:
                try:
                    found = revision_after(entry.data, entry.base)
                except WrittenLater:
                    raise
                except CodecError as error:
                    raise LedgerBroken(entry.index, str(error)) from error
                if found != entry.revision:
                    raise LedgerBroken(
                        entry.index, f"its data gives revision {found}, but {entry.revision} is recorded"
                    )
            if entry.index == marks.base_index and entry.term != marks.base_term:
                raise LedgerBroken(entry.index, f"it has term {entry.term}, but {marks.base_term} is recorded")
            if entry.base < entry.revision <= scan.view.stored_revision:
                expected.append((entry.revision, entry.index))
        # Entries of a step need not be contiguous: another process may be filling a gap between them.
        for after, last, rows in _runs(step, expected):
            stored = self._revision_rows(after, min(last, scan.view.stored_revision), step[-1].index)
            if stored != rows and not self._is_pruned(step[0].index):
                odd = min(set(stored) ^ set(rows))
                raise LedgerBroken(
                    step[-1].index,
                    f"revision {odd[0]} is not recorded for the entry that settled it: {_rows_said(odd, stored)}",
                )

    def _revision_rows(self, after: int, last: int, index: int) -> list[tuple[int, int]]:
        """Return the stored rows (revision, index) of the revisions `after + 1` to `last`."""
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
                except DamagedValue as error:
                    raise LedgerBroken(index, f"the row of revision {int.from_bytes(key)}: {error}") from error
                more = cursor.next()
        return found

    def _check_behind(self, scan: _Scan) -> None:
        """Check that the marks are in order and that nothing is stored beyond them."""
        with self._env.read() as transaction:
            # Read the marks again, in the transaction of the rows: a running replica writes both together.
            marks = _marks(self._env, transaction)
            revisions = transaction.cursor(self._env.table(records.REVISIONS))
            entries = transaction.cursor(self._env.table(records.ENTRIES))
            try:
                settled = records.key_index(revisions.key()) if revisions.last() else 0
                stored = records.key_index(entries.key()) if entries.last() else 0
            except DamagedValue as error:
                raise LedgerBroken(scan.view.marks.applied_index, str(error)) from error
        applied, last = scan.view.marks.applied_index, marks.last_index
        if not marks.base_index <= marks.applied_index <= marks.commit_index <= last:
            raise LedgerBroken(
                applied,
                f"the marks are out of order: base {marks.base_index}, applied {marks.applied_index}, commit "
                f"{marks.commit_index}, last {last}",
            )
        if stored > last or (stored < last and last > marks.base_index):
            raise LedgerBroken(applied, f"the last stored entry is {stored}, but {last} is marked as last")
        if settled > marks.applied_revision:
            raise LedgerBroken(
                applied, f"revision {settled} is recorded as settled, but the last one is {marks.applied_revision}"
            )

    def _check_gaps(self, scan: _Scan) -> None:
        """Check that each gap lies between held entries, before the end, and that no entry lies in it."""
        with self._env.read() as transaction:
            stored = transaction.get(records.MARKS_KEY, db=self._env.table(records.STATE)) or b""
            try:
                # Use the marks of the same transaction: installing a snapshot moves the end and adds a gap.
                end = max(records.unpack_marks(stored).applied_index, scan.view.marks.applied_index)
            except DamagedValue as error:
                raise LedgerBroken(0, f"the marks: {error}") from error
            beyond = next((gap for gap in self._gaps(transaction) if gap.last_index > end), None)
        if beyond is not None:
            raise LedgerBroken(
                beyond.first_index,
                f"a gap is recorded from here to {beyond.last_index}, but the ledger ends with entry {end}",
            )
        behind = 0
        for gap in scan.gaps:
            if not behind < gap.first_index <= gap.last_index:
                raise LedgerBroken(
                    gap.first_index,
                    f"a gap is recorded from here to {gap.last_index}, which is empty or overlaps another gap",
                )
            behind = gap.last_index
            with self._env.read() as transaction:
                # Read the gap again: another process may have shortened it.
                held = next((now for now in self._gaps(transaction) if now.first_index == gap.first_index), None)
                if held is None:
                    continue
                before = self._chain_row(scan.view, transaction, held.first_index - 1).revision
                after = self._chain_row(scan.view, transaction, held.last_index).revision
                if (before, after) != (held.revision_before, held.revision_after):
                    raise LedgerBroken(
                        held.first_index,
                        f"the gap that begins here is recorded with revisions {held.revision_before} to "
                        f"{held.revision_after}; the entries around it show {before} to {after}",
                    )
                cursor = transaction.cursor(self._env.table(records.ENTRIES))
                if cursor.set_range(records.index_key(held.first_index)):
                    index = records.key_index(cursor.key())
                    if index <= held.last_index:
                        raise LedgerBroken(index, "it exists, but is recorded as missing")

    def _is_pruned(self, index: int) -> bool:
        """Return whether an entry lies in the pruned range."""
        pruned = self.pruned_range()
        return pruned is not None and records.KEPT_ENTRIES < index < pruned.below

    def rows_before(self, first: int, last: int) -> list[ChainRow]:
        """Return digest and revision before each of the held entries `first` to `last`.

        Raises:
            LedgerBroken: An entry or its row is missing.
        """
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
        # Ignore the gap of a snapshot that was installed after the marks were read: it begins after these marks.
        return _Scan(view, tuple(gap for gap in gaps if gap.first_index <= view.marks.applied_index))

    def _step(self, scan: _Scan, first: int, limit: int, bytes_max: int = STEP_MAX_BYTES) -> list[LedgerEntry]:
        found: list[LedgerEntry] = []
        view, size_bytes = scan.view, 0
        with self._env.read() as transaction:
            # Entries pruned since the scan are a gap now.
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
                if records.chain_digest(before.digest, entry) != row.digest:
                    raise LedgerBroken(following, "it does not match its digest")
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
        except DamagedValue as error:
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
        except DamagedValue as error:
            raise LedgerBroken(index, f"its digest: {error}") from error

    def _gaps(self, transaction: "lmdb.Transaction[bytes]") -> tuple[Gap, ...]:
        try:
            rows = transaction.cursor(self._env.table(records.GAPS))
            return tuple(records.unpack_gap(key, value) for key, value in rows)
        except DamagedValue as error:
            raise LedgerBroken(0, f"the table of gaps: {error}") from error


def _runs(
    step: Sequence[LedgerEntry], expected: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
    """Yield each contiguous part of a step: the revisions before and after it, and its expected rows."""
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
    """Format the ranges of revisions held."""
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
"""Limits of one transfer of history, but at least one entry, so that each side needs only milliseconds."""


class HistoryEntry(NamedTuple):
    """Entry of the ledger with the digest and revision before it."""

    entry: Entry
    digest_before: bytes
    revision_before: int


class NotThisHistory(Exception):
    """Received entries do not match the digests; nothing was written."""


def export_history(
    ledger: Ledger, last: int, *, entries_max: int = HANDED_ENTRIES_MAX, bytes_max: int = HANDED_BYTES_MAX
) -> list[HistoryEntry]:
    """Return entries of a ledger that end with `last`, newest first, within both bounds but at least one.

    Raises:
        LookupError: Entry `last` is not held here.
        LedgerBroken: An entry is damaged.
    """
    behind = max((gap.last_index for gap in ledger.gaps() if gap.first_index <= last), default=0)
    count = min(entries_max, last - max(behind, ledger.first_index - 1))
    if count < 1 or last > ledger.applied_index:
        raise LookupError(f"entry {last} is not available on this replica{_where_entry(ledger.pruned_range(), last)}")
    try:
        held = list(ledger.read(last - count + 1, limit=count))
    except LedgerBroken as error:
        if not last - count < error.index < last:
            raise
        # The entries after the damaged one can still be sent.
        held = list(ledger.read(error.index + 1, limit=last - error.index))
    rows = ledger.rows_before(held[0].index, last)
    found: list[HistoryEntry] = []
    size_bytes = 0
    for one, row in zip(reversed(held), reversed(rows), strict=True):
        size_bytes += len(one.data)
        if found and size_bytes > bytes_max:
            break
        found.append(HistoryEntry(Entry(one.index, one.term, one.data, one.seal), row.digest, row.revision))
    return found


def _in_archive(segment: PrunedSegment) -> str:
    return f"it was pruned, and is in the archive: {SegmentName(segment.first_index, segment.last_index)}"


def _where_entry(pruned: PrunedRange | None, index: int) -> str:
    segments = () if pruned is None else pruned.segments
    found = next((one for one in segments if index <= one.last_index), None)
    return "" if found is None else f": it was pruned, and is in the archive, {SegmentName(*found[:2])}"


def fill(env: Environment, gap: Gap, handed: Sequence[HistoryEntry]) -> Gap | None:
    """Add entries to the end of a gap, newest first, durable on return; return the remaining gap.

    Raises:
        NotThisHistory: The entries do not form a chain, or do not lead to the entry after the gap.
        BrokenInvariant: The entries form a chain, but do not continue the entry before the gap: this replica's own
            history differs from the cluster's.
        StorageFailed: The entries cannot be written.
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


def replace_damaged(env: Environment, stretch: Gap, handed: Sequence[HistoryEntry]) -> Gap | None:
    """Replace entries at the end of a damaged range (`Ledger.damaged_from`), newest first; return the remaining range.

    Derived rows are rebuilt. Proofs, durability and exceptions are as for `fill`.
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
    env: Environment, gap: Gap, handed: Sequence[HistoryEntry]
) -> tuple[list[tuple[Entry, ChainRow, ChainRow]], Gap | None]:
    """Verify received entries; return each with the rows before and after it, and the remaining gap."""
    last = read_chain_row(env, gap.last_index)
    if last is None:
        raise BrokenInvariant(f"the gap {gap.first_index} to {gap.last_index} has no digest at its end")
    rows: list[tuple[Entry, ChainRow, ChainRow]] = []
    after, index = last, gap.last_index
    for entry, digest_before, revision_before in handed:
        if entry.index != index or index < gap.first_index:
            raise NotThisHistory(f"entry {entry.index} followed where entry {index} was expected")
        if len(digest_before) != records.DIGEST_BYTES or chain_digest(digest_before, entry) != after.digest:
            raise NotThisHistory(f"entry {index} does not match the digest after it")
        if not gap.revision_before <= revision_before <= after.revision:
            raise NotThisHistory(f"entry {index} cannot lead from revision {revision_before} to {after.revision}")
        before = ChainRow(digest_before, revision_before)
        rows.append((entry, before, after))
        after, index = before, index - 1
    if not rows:
        return rows, gap
    if index < gap.first_index:
        held = ChainRow(records.GENESIS, 0) if index == 0 else read_chain_row(env, index)
        if after != held:
            raise BrokenInvariant(
                f"the history up to entry {index} differs from the cluster's: the cluster's entry {index + 1} follows "
                f"digest {after.digest.hex()[:16]} at revision {after.revision}"
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
