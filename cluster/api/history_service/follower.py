"""Ledger follower: folds every entry and indexes each job's state after each command about it.

The reason a job waited depends on all other jobs. It is therefore computed once, while following, so that a later query
reads only a dozen rows. The follower lags the replica by the entries it has not folded. It starts from a snapshot
before the end of the index, and folds up to there without indexing.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from heapq import merge
from itertools import groupby
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
from msgspec.structs import replace

from forebay.cluster.api.history_service.capacity import Capacity
from forebay.cluster.server.tlog import recorded_in
from forebay.cluster.system import free_bytes
from forebay.replica.fold import SpeculativeState, apply_batch
from forebay.replica.messages import EVENTS, Batch, Event, HistoriesCounted, concerns_cluster, jobs_of
from forebay.replica.model import BufferState, JobState
from forebay.replica.scheduler import SchedulingIndex, later_reason, verdicts_of
from forebay.replica.state import EMPTY, Facts, State
from forebay.replica.views import buffer_word
from forebay.snapshots import (
    Image,
    SnapshotFailed,
    SnapshotName,
    SnapshotRefused,
    UnsyncedDisk,
    load_snapshot,
    write_snapshot,
)
from forebay.wal import (
    CLUSTER,
    EntryKind,
    Hole,
    IndexPosition,
    JobIndex,
    JobIndexRow,
    Ledger,
    LedgerBroken,
    LedgerEntry,
    decode_batch,
    kind_of,
)

LOGGER = logging.getLogger(__name__)

STEP_ENTRIES = 32
STEP_BYTES = 128 * 1024
"""Entries followed in one step, count, and bytes before the last entry: about ten milliseconds between queries."""

WRITTEN_ROWS = 32_768
WRITTEN_S = 5.0
"""Rows and seconds after which rows are written; each write is a disk flush that competes with commits."""

POINTS_MAX = 64
"""States kept, count. A State is persistent: an old one costs only its differences."""

POINT_REVISIONS = 1024
"""Initial distance of kept states, revisions; doubled at each thinning."""

IMAGES_BYTES_MAX = 2 * 1024**3
"""Bytes of states kept on disk beside the index.

With ten thousand jobs each, any of ten million events is within a second of folding from one, even if each is an entry
of its own (28 us).
"""

IMAGES_ROOM_SHARE = 0.25
"""Share of their own and the free disk space they may take; the journal has priority, and states can be rebuilt."""

IMAGES_SHARE = 0.75
"""Share of the bytes left after thinning, which removes the closest states first."""

IMAGE_REVISIONS = 16_384
"""Initial distance of states on disk, revisions: half a second of folding."""

JOBS_PER_REVISION = 0.4
"""Jobs in a state that cost as much to write or read as following one revision, with a margin; measured: 1.5."""


class Note(msgspec.Struct, frozen=True, array_like=True):
    """State of a job after a command about it."""

    state: int
    """A JobState; 0 for a deleted job."""
    buffer: int
    """A displayed BufferState; 0 for none."""
    attempt: int
    reason: str | None
    """None only until it is computed."""


class Point(NamedTuple):
    """The state after an entry."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here
    state: State


class Follower:
    """Follows the live ledger of a replica in steps, and maintains the per-job index."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        snapshots: Path,
        index: JobIndex,
        monotonic_s: Callable[[], float],
        images: Path | None = None,
    ) -> None:
        """`ledger`: read-only view of the replica's ledger; `snapshots`: their directory.

        `images`: directory of kept states.
        """
        self.ledger = ledger
        """The ledger as stored at the last look."""
        self.live: Final = ledger
        """The growing ledger."""
        self.snapshots: Final = snapshots
        self._monotonic_s = monotonic_s
        self.jobs = index
        self._rows: defaultdict[int, list[JobIndexRow]] = defaultdict(list)
        """Unwritten rows."""
        self._noted = 0
        self._written_s = monotonic_s()
        self._points: list[Point] = []
        self._stride = POINT_REVISIONS
        self._images = images
        self._imaged = IMAGE_REVISIONS
        self.on_record: Callable[[int], None] = _ignore
        """Called with the job of each indexed record."""
        self.on_counted: Callable[[int, HistoriesCounted], None] = _ignore
        """Called with each indexed record of counts, and its entry."""
        self.capacity = Capacity()
        """Pool use of the folded states."""
        self.begun = 0
        """Number of times the index was created or opened."""
        self.is_confirmed = False
        """True if this process wrote all rows itself, or compared them with the ledger."""
        self._begin()

    @property
    def index(self) -> int:
        """Last entry that is folded and indexed."""
        return min(self._reached.index, self._position.index)

    @property
    def revision(self) -> int:
        """Revision after that entry."""
        return int(self._reached.state.revision)

    @property
    def state(self) -> State:
        """State after that entry."""
        return self._reached.state

    @property
    def reached(self) -> Point:
        """State after the last folded entry, indexed or not."""
        return self._reached

    @property
    def noted_index(self) -> int:
        """Last indexed entry, even if not folded yet."""
        return self._position.index

    def noted_jobs(self, after: int) -> Iterator[int]:
        """Yield the indexed jobs after one, ascending."""
        unwritten = sorted(job for job, rows in self._rows.items() if job > max(after, CLUSTER) and rows)
        for job, _ in groupby(merge(self.jobs.jobs(max(after, CLUSTER)), unwritten)):
            yield job

    @property
    def points(self) -> list[Point]:
        """Kept states, oldest first."""
        return self._points

    @property
    def holes(self) -> tuple[Hole, ...]:
        """Entries without index rows."""
        return self._position.holes

    def step(self) -> bool:
        """Follow a few more entries; return True if more are left."""
        if self._reached.index >= self.ledger.applied_index:
            self.ledger = self.live.as_stored()  # it may have grown
            if self._position.holes and not self.ledger.gaps():
                LOGGER.info("entries that a snapshot had replaced were fetched: rebuilding the index by job")
                self.begin_anew()
        found = self.ledger.read_some(self._reached.index + 1, entries_max=STEP_ENTRIES, bytes_max=STEP_BYTES)
        if not found and self._reached.index < self.ledger.applied_index:
            self._leap(self.ledger.applied_index + 1)  # no entry follows the installed snapshot yet
        for entry in found:
            if entry.index != self._reached.index + 1:
                self._leap(entry.index)
                break
            self._follow(entry)
        if self._noted >= WRITTEN_ROWS or (self._noted and self._monotonic_s() - self._written_s >= WRITTEN_S):
            self.write()
        if self._reached.index >= self.ledger.applied_index:
            self.ledger = self.live.as_stored()
        return self._reached.index < self.ledger.applied_index

    def rows(self, job: int, after: int = 0) -> list[JobIndexRow]:
        """Return the rows of a job, or of CLUSTER, after a revision, oldest first."""
        return [*self.jobs.rows(job, after), *(row for row in self._rows.get(job, ()) if row.revision > after)]

    def write(self) -> None:
        """Write the pending rows."""
        self.jobs.add(self._rows, self._position)
        self._rows.clear()
        self._noted, self._written_s = 0, self._monotonic_s()

    def begin_anew(self) -> None:
        """Discard the index and follow the ledger from its beginning."""
        self.jobs.begin_anew()
        self._begin()

    def keep(self, point: Point) -> None:
        """Keep a state for later queries."""
        position = bisect_right(self._points, point.index, key=lambda kept: kept.index)
        if position and self._points[position - 1].index == point.index:
            return
        self._points.insert(position, point)
        if len(self._points) > POINTS_MAX:
            # Dropping every second one keeps the rest evenly spaced.
            last = self._points[-1]
            self._points = self._points[::2]
            if self._points[-1] is not last:
                self._points.append(last)
            self._stride *= 2

    def _save(self, point: Point, term: int, digest: bytes) -> None:
        """Save a state to disk, and thin out the others; a full disk only slows later queries."""
        if self._images is None:
            return
        try:
            self._images.mkdir(mode=0o700, exist_ok=True)
            write_snapshot(self._images, Image(point.state, point.index, term, digest), disk=UnsyncedDisk())
            self._thin(self._images)
        except (SnapshotFailed, OSError) as error:
            LOGGER.warning("a past state could not be saved: %s", error)

    def _thin(self, directory: Path) -> None:
        """Remove states until there is space, keeping the rest evenly spaced by revision."""
        there: list[tuple[int, int, Path]] = []
        for name, path in sorted((name, one) for one in directory.iterdir() if (name := SnapshotName.parse(one.name))):
            try:
                there.append((self.ledger.row_at(name.index).revision, path.stat().st_size, path))
            except LedgerBroken:
                path.unlink(missing_ok=True)  # of another branch of the ledger
        size_bytes = sum(size for _, size, _ in there)
        bytes_max = min(IMAGES_BYTES_MAX, IMAGES_ROOM_SHARE * (size_bytes + free_bytes(directory)))
        if size_bytes <= bytes_max:
            return
        while size_bytes > IMAGES_SHARE * bytes_max and len(there) > 2:
            gaps = [after - before for (before, *_), (after, *_) in zip(there, there[2:], strict=False)]
            _, size, path = there.pop(1 + gaps.index(min(gaps)))
            path.unlink(missing_ok=True)
            size_bytes -= size

    def images(self, *, first: int, last: int, least: int = 0) -> Iterator[Point]:
        """Yield the saved states of entries `first` to `last` that match this ledger, newest first.

        States before revision `least` are skipped.
        """
        found: list[tuple[SnapshotName, Path]] = []
        for directory in filter(None, (self.snapshots, self._images)):
            with suppress(OSError):
                found += [(name, path) for path in directory.iterdir() if (name := SnapshotName.parse(path.name))]
        for name, path in sorted(found, reverse=True):
            if not first <= name.index <= min(last, self.ledger.applied_index):
                continue
            try:
                row = self.ledger.row_at(name.index)
                if row.revision < least:
                    return
                image = load_snapshot(path)
                if image.chain_digest == row.digest:
                    yield Point(image.index, image.state)
            except (SnapshotRefused, LedgerBroken, OSError):
                continue

    def _begin(self) -> None:
        """Start at the end of the index, or from a state before it; create the index if missing."""
        self._rows.clear()
        self._noted = 0
        self.begun += 1
        self.ledger = self.live.as_stored()
        self._position, self._points, self._stride = self.jobs.position, [], POINT_REVISIONS
        self._index: SchedulingIndex | None = None
        self._unread: list[Event] = []
        """Events not yet in the index."""
        start = self._before(self._position) if self._is_of_this_ledger(self._position) else None
        if start is None:
            if self._position.index:
                LOGGER.warning("the index by job belongs to another ledger: rebuilding it")
                self.jobs.begin_anew()
            self._position, start = self.jobs.position, Point(0, EMPTY)
        self.is_confirmed = not self._position.index
        self._reached = start
        self.capacity = Capacity()
        if start.index:
            self.capacity.note(start.state)
        self._imaged = self._position.revision + IMAGE_REVISIONS
        self.keep(start)

    def _is_of_this_ledger(self, position: IndexPosition) -> bool:
        if position.index > self.ledger.applied_index:
            return False
        try:
            return self.ledger.row_at(position.index).digest == position.digest
        except LedgerBroken:
            return False

    def _before(self, position: IndexPosition) -> Point | None:
        """Return a state from which to fold up to an index's position; None if there is none."""
        first = max((hole.last_index for hole in position.holes), default=0)
        found = next(self.images(first=max(first, 1), last=position.index), None)
        if found is not None:
            return found
        return None if position.holes or self.ledger.first_index > 1 else Point(0, EMPTY)

    def _leap(self, index: int) -> None:
        """Continue after missing entries, on the next snapshot."""
        found = list(self.images(first=index - 1, last=self.ledger.applied_index))
        if not found:
            raise LedgerBroken(self._reached.index + 1, "this entry is missing, and no snapshot replaces it")
        point = found[-1]
        noted = max(self._reached.index, self._position.index)
        if point.index > noted:
            hole = Hole(noted + 1, point.index)
            LOGGER.warning("the index by job skips the entries %d to %d, which are missing here", *hole)
            digest = self.ledger.row_at(point.index).digest
            self._position = IndexPosition(
                point.index, int(point.state.revision), digest, (*self._position.holes, hole)
            )
        self._reached, self._index = point, None
        self.capacity.note(point.state)
        self._unread.clear()
        self.keep(point)
        self.write()

    def _follow(self, entry: LedgerEntry) -> None:
        state, notes = self._reached.state, entry.index > self._position.index
        if kind_of(entry.data) is EntryKind.BATCH:
            batch = decode_batch(entry.data)
            if batch.base != state.revision:
                pass  # void: decided on another revision
            elif notes:
                state = self._settle(state, batch)
                for _, event in recorded_in(batch):
                    self.on_counted(entry.index, event)
            else:
                state = apply_batch(state, batch) or state
        self._reached = Point(entry.index, state)
        self.capacity.note(state)
        if notes:
            self._position = IndexPosition(entry.index, int(state.revision), entry.digest, self._position.holes)
        if state.revision - self._points[-1].state.revision >= self._stride:
            self.keep(self._reached)
        if notes and state.revision >= self._imaged:
            self._save(self._reached, entry.term, entry.digest)
            self._imaged = int(state.revision + max(IMAGE_REVISIONS, len(state.jobs) / JOBS_PER_REVISION))

    def _settle(self, state: State, batch: Batch) -> State:
        """Return the state after a batch, and index each job after each command about it.

        A batch is settled at one time. Reasons are therefore computed once, after the whole batch, or just before the
        next event of the same job.
        """
        settling = SpeculativeState(state, batch.at)
        waiting: dict[int, tuple[int, Note]] = {}
        for entry in batch.entries:
            concerned = dict.fromkeys(job for event in entry.events for job in jobs_of(event))
            self._explain(settling, waiting, [job for job in concerned if job in waiting])
            settling.add(entry)
            self._unread.extend(entry.events)
            facts, revision = settling.facts, settling.revision
            for job_id in concerned:
                note = _note(facts, job_id)
                if note.reason is None:
                    waiting[job_id] = revision, note
                else:
                    self._rows[job_id].append(JobIndexRow(revision, _encoder.encode(note)))
            self._noted += len(concerned)
            for job_id in concerned:
                self.on_record(job_id)
            if entry.rejection is not None or not _OF_CLUSTER.isdisjoint(map(type, entry.events)):
                self._rows[CLUSTER].append(JobIndexRow(revision, b""))
                self._noted += 1
        self._explain(settling, waiting, list(waiting))
        return settling.state()

    def _explain(self, settling: SpeculativeState, waiting: dict[int, tuple[int, Note]], jobs: list[int]) -> None:
        """Record the reasons these jobs wait now."""
        if not jobs:
            return
        state = settling.state()
        if self._index is None:
            self._index = SchedulingIndex(state)
        else:
            self._index.advance(state, self._unread)
        self._unread.clear()
        prepare_whole(self._index)
        verdicts = verdicts_of(self._index, jobs, state.at)
        for job_id in jobs:
            revision, note = waiting.pop(job_id)
            explained = replace(note, reason=str(verdicts[job_id].reason))
            self._rows[job_id].append(JobIndexRow(revision, _encoder.encode(explained)))


def _ignore(*noted: object) -> None:
    """Ignore a callback."""


def _note(facts: Facts, job_id: int) -> Note:
    """Return a job's state, leaving the reason of a waiting job open."""
    job = facts.jobs.get(job_id)
    if job is None:
        return _GONE
    reason = None
    if job.state is not JobState.PENDING:
        reason = str(later_reason(facts, job, facts.buffers.get(job_id)).reason)
    word = buffer_word(facts, job_id)
    return Note(job.state.value, 0 if word is None else _BUFFER_STATES[word].value, job.attempt, reason)


_GONE = Note(0, 0, 0, "None")

_BUFFER_STATES = {state.word: state for state in BufferState}

_encoder = msgspec.msgpack.Encoder()
_note_decoder = msgspec.msgpack.Decoder(Note)

_OF_CLUSTER = frozenset(filter(concerns_cluster, EVENTS))

JOBS_PREPARED = 1024


def note_of(row: JobIndexRow) -> Note:
    """Decode the state in a row."""
    return _note_decoder.decode(row.note)


def prepare_whole(index: SchedulingIndex) -> None:
    """Prepare an index completely."""
    while not index.prepare(JOBS_PREPARED):
        pass


def fold_to(state: State, batch: Batch, revision: int) -> State:
    """Return the state after the commands of a batch up to `revision`."""
    following = apply_batch(state, Batch(state.revision, batch.at, batch.entries[: revision - int(state.revision)]))
    return state if following is None else following
