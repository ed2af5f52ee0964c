"""Query execution of the history service: job records from the index, and past states by folding."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from forebay.cluster.api.history_service.difference import changes_between
from forebay.cluster.api.history_service.event_pages import EventPages
from forebay.cluster.api.history_service.follower import (
    JOBS_PER_REVISION,
    STEP_BYTES,
    STEP_ENTRIES,
    Follower,
    Point,
    fold_to,
    note_of,
    prepare_whole,
)
from forebay.cluster.api.history_service.frames import (
    NO_JOB,
    NOT_HELD,
    REVERSED,
    ArchivedRecords,
    ChangesQuery,
    ChangesReply,
    EventPageQuery,
    EventPageReply,
    JobRecord,
    PastQuery,
    QueryFailure,
    RecordsQuery,
    RecordsReply,
    WhyQuery,
    WhyReply,
)
from forebay.cluster.api.render import JobVerdicts, why_view
from forebay.replica.decide import job_of_task
from forebay.replica.messages import Batch, Event, jobs_of
from forebay.replica.model import BufferState, JobState
from forebay.replica.scheduler import SchedulingIndex, verdicts_of
from forebay.replica.state import EMPTY, State
from forebay.replica.values import NEVER, Instant, Verdict
from forebay.wal import (
    JobIndexRow,
    LedgerBroken,
    LedgerEntry,
    SegmentName,
    batch_of_encoded,
    decode_batch,
    encode_entry,
    instant_of,
    one_of_batch,
)

RECORDS_READ_MAX = 3
"""Attempts to read a job's records while they are being pruned, count."""

ENTRIES_KEPT = 8
"""Entries cached during a query, count; a job's records often share a few."""

ASKED_MAX = 32
"""Queried states kept, count; the next query is often about a nearby revision."""

NEAR_REVISIONS = 512
"""Distance of a further state kept before a queried revision, revisions, for slightly earlier queries."""

FOLLOWED_MAX = 2_000
"""Commands an index follows to the next queried revision, count; beyond that a new one is hardly slower."""


class NotHeld(LookupError):
    """This replica lacks the required history; the message says from which revision it is held."""


class _BatchEntry(NamedTuple):
    """A ledger entry with commands."""

    entry: LedgerEntry
    batch: Batch


class HistoryQueries:
    """Executes queries on a follower's history."""

    def __init__(self, follower: Follower, monotonic_s: Callable[[], float]) -> None:
        self._follower = follower
        self._stories = EventPages(follower, monotonic_s)
        self._asked: deque[Point] = deque(maxlen=ASKED_MAX)
        """Queried states, and some slightly earlier ones."""
        self._past: SchedulingIndex | None = None
        """Scheduling index of the last queried revision."""

    def records(self, asked: RecordsQuery) -> RecordsReply:
        """Return the records of a job."""
        why = ""
        for _ in range(RECORDS_READ_MAX):
            try:
                return self._records(asked)
            except LookupError as error:
                why = str(error)  # it was just pruned
        raise LedgerBroken(0, f"the records of job {asked.job} are indexed but cannot be read: {why}")

    def _records(self, asked: RecordsQuery) -> RecordsReply:
        follower = self._follower
        read = lru_cache(ENTRIES_KEPT)(self._entry)
        found: list[JobRecord] = []
        first = 0
        rows, archived = self._held_rows(follower.rows(asked.job))
        if asked.newest and len(rows) > asked.limit:
            rows[1 : 1 - asked.limit] = []
        for row in rows[: asked.limit]:
            entry, note = read(follower.ledger.index_of_revision(row.revision)), note_of(row)
            first = first or entry.index
            batch = _concerning(asked.job, one_of_batch(entry.data, row.revision - entry.base - 1))
            state = JobState(note.state).name if note.state else ""
            word = BufferState(note.buffer).word if note.buffer else None
            found.append(JobRecord(row.revision, batch, state, word, note.attempt, note.reason or ""))
        whole = follower.is_confirmed and not archived
        whole = whole and not any(hole.first_index > first for hole in follower.holes)
        return RecordsReply(tuple(found), whole, archived)

    def _held_rows(self, rows: list[JobIndexRow]) -> tuple[list[JobIndexRow], ArchivedRecords | None]:
        """Return the rows whose entries are held, and the archived location of the pruned ones."""
        found = self._follower.ledger.pruned_part()
        if found is None:
            return rows, None
        pruned, gap = found
        gone = [row.revision for row in rows if gap.revision_before < row.revision <= gap.revision_after]
        if not gone:
            return rows, None
        ends = [segment.revision_after for segment in pruned.segments]
        numbers = {bisect_left(ends, revision) for revision in gone}
        names = (SegmentName(*pruned.segments[number][:2]) for number in sorted(numbers) if number < len(ends))
        archived = ArchivedRecords(len(gone), gone[0], gone[-1], tuple(map(str, names)))
        return [row for row in rows if not gap.revision_before < row.revision <= gap.revision_after], archived

    def why(self, asked: WhyQuery) -> WhyReply | QueryFailure:
        """Return the reason a job waited."""
        state = self.moment(asked)
        if isinstance(state, QueryFailure):
            return state
        revision = int(state.revision)
        job_id = self._named_job(state, asked)
        if job_id not in state.jobs:
            what = asked.external_job or f"{asked.job}" + "".join(f"_{task}" for task in asked.tasks or ())
            return QueryFailure(asked.number, NO_JOB, revision, f"job {what} did not exist at revision {revision}")
        job, verdict = state.jobs[job_id], self._verdict(state, job_id)
        view = why_view(state, job_id, verdict)
        return WhyReply(
            asked.number, view, job.request.user, "" if job.external_job is None else job.external_job.scheduler
        )

    def event_page(self, asked: EventPageQuery) -> EventPageReply | QueryFailure:
        """Return a page of events."""
        last = self._follower.ledger.applied_revision
        after = asked.after
        try:
            if not after:
                after = self._beginning() if asked.since == NEVER else self._revision_at(Instant(asked.since - 1))
            until = min(asked.until, last)
            if not until:
                until = last if asked.before == NEVER else self._revision_at(asked.before)
            found = self._stories.read_page(asked.sought, after, until, asked.limit)
        except LookupError as error:
            return QueryFailure(0, NOT_HELD, after + 1, str(error))
        at = found.at if found.at != NEVER else self._stories.at(found.read)
        return EventPageReply(found.happened, found.read, at, until)

    def changes(self, asked: ChangesQuery) -> ChangesReply | QueryFailure:
        """Return the differences between two states."""
        before = self._moment(asked.number, asked.revision, asked.at)
        if isinstance(before, QueryFailure):
            return before
        after = self._moment(asked.number, asked.to_revision, asked.to_at)
        if isinstance(after, QueryFailure):
            return after
        if before.revision > after.revision:
            words = f"the start, revision {before.revision}, is after the end, revision {after.revision}"
            return QueryFailure(asked.number, REVERSED, before.revision, words)
        try:
            found = changes_between(self._follower, asked, before, after)
        except LookupError as error:
            return QueryFailure(asked.number, NOT_HELD, asked.to_revision, str(error))
        return ChangesReply(asked.number, msgspec.json.encode(found))

    def moment(self, asked: WhyQuery | PastQuery) -> State | QueryFailure:
        """Return the queried state."""
        return self._moment(asked.number, asked.revision, asked.at)

    def _moment(self, number: int, revision: int, at: Instant) -> State | QueryFailure:
        """Return the state after a revision or, if that is 0, at an instant."""
        try:
            revision = revision or self._revision_at(at)
            return self.state_at(revision)
        except LookupError as error:
            where = self._follower.ledger.describe_location_at(at) if at != NEVER else ""
            return QueryFailure(number, NOT_HELD, revision, where or str(error))

    def state_at(self, revision: int) -> State:
        """Return the state after a revision.

        Raises:
            NotHeld, LookupError: The state is not available here.
        """
        if revision == 0:
            return EMPTY
        follower = self._follower
        ledger = follower.ledger
        last = ledger.index_of_revision(revision)
        near = self._before(last, revision)
        index, state = near
        while int(state.revision) < revision:
            found = ledger.read_some(index + 1, entries_max=min(STEP_ENTRIES, last - index), bytes_max=STEP_BYTES)
            if not found or found[0].index != index + 1:
                raise NotHeld(f"the entries from {index + 1} on are not held by this replica")
            for entry in found:
                if entry.index != index + 1:
                    break
                if state.revision <= revision - NEAR_REVISIONS:
                    near = Point(index, state)
                if entry.revision > revision:
                    # The revision lies within this batch; keep the state before it.
                    self._asked += near, Point(index, state)
                    return fold_to(state, decode_batch(entry.data), revision)
                if entry.revision > entry.base:
                    state = fold_to(state, decode_batch(entry.data), revision)
                index = entry.index
        self._asked += near, Point(index, state)
        return state

    def _before(self, index: int, revision: int) -> Point:
        """Return the nearest state at or before an entry, with a revision of at most `revision`."""
        follower = self._follower
        known = (point for point in (*follower.points, *self._asked) if point.index <= index)
        best = max(
            (point for point in known if point.state.revision <= revision),
            key=lambda point: point.state.revision,
            default=None,
        )
        # Reading another state must be faster than folding from the one at hand.
        least = 0 if best is None else int(best.state.revision + len(best.state.jobs) / JOBS_PER_REVISION)
        for point in follower.images(first=1 + (0 if best is None else best.index), last=index, least=least):
            if point.state.revision <= revision:
                return point
        if best is not None:
            return best
        first_index = follower.ledger.first_index
        if first_index > 1:
            raise NotHeld(f"this replica holds the ledger from entry {first_index} on, and no snapshot before it")
        return Point(0, EMPTY)

    def _verdict(self, state: State, job_id: int) -> Verdict:
        if state.jobs[job_id].state is not JobState.PENDING:
            return JobVerdicts(state).of(job_id)
        index = self._past
        events = None if index is None else self._between(index.state, state)
        if index is None or events is None:
            index = SchedulingIndex(state)
        else:
            index.advance(state, events)
        self._past = index
        prepare_whole(index)
        return verdicts_of(index, (job_id,), state.at)[job_id]

    def _between(self, before: State, after: State) -> list[Event] | None:
        """Return the events between two states.

        None if there are too many, they are not held, or the order is reversed.
        """
        first, last = int(before.revision), int(after.revision)
        if not 0 < first <= last <= first + FOLLOWED_MAX:
            return None
        events: list[Event] = []
        while first < last:
            try:
                entry, batch = self._settled_by(self._follower.ledger.index_of_revision(first + 1))
            except LookupError:
                return None
            passed = batch.entries[first - entry.base : last - entry.base]
            events.extend(event for command in passed for event in command.events)
            first += len(passed)
        return events

    def _beginning(self) -> int:
        """Return the revision before the ledger's first entry: 0, or that of the restored snapshot."""
        recoveries = self._follower.state.recoveries.values()
        restored = max((one.kept_index for one in recoveries if one.is_snapshot), default=0)
        return self._entry(restored + 1).base if restored else 0

    def _revision_at(self, at: Instant) -> int:
        """Return the last revision settled up to an instant, by bisection; 0 before the first one.

        If an operator set the clock back, an instant can occur twice; the later one counts.
        """
        state = self._follower.points[-1].state
        last, set_back = self._follower.ledger.applied_revision, int(state.clock_set_back)
        if set_back and (found := self._bisect(set_back, last, at)) >= set_back:
            return found
        return self._bisect(1, (set_back or last + 1) - 1, at)

    def _bisect(self, low: int, high: int, at: Instant) -> int:
        """Return the last revision from `low` to `high` settled up to an instant, or `low - 1`."""
        while low <= high:
            middle = (low + high) // 2
            try:
                settled = instant_of(self._entry(self._follower.ledger.index_of_revision(middle)).data)
            except LookupError:
                settled = None
            if settled is None or settled <= at:
                low = middle + 1
            else:
                high = middle - 1
        return low - 1

    def _settled_by(self, index: int) -> _BatchEntry:
        entry = self._entry(index)
        return _BatchEntry(entry, decode_batch(entry.data))

    def _entry(self, index: int) -> LedgerEntry:
        found = self._follower.ledger.read_some(index, entries_max=1, bytes_max=1)
        if not found or found[0].index != index:
            raise NotHeld(f"entry {index} is not held by this replica")
        return found[0]

    @staticmethod
    def _named_job(state: State, asked: WhyQuery) -> int:
        """Return the queried job in a state; 0 if it does not exist."""
        if asked.external_job:
            known = state.external_jobs.get(asked.external_job)
            return 0 if known is None else known.job
        return job_of_task(state, asked.job, asked.tasks) or (asked.job if asked.tasks is None else 0)


def _concerning(job: int, data: bytes) -> bytes:
    """Return a one-command batch with only the events about a job."""
    batch = decode_batch(data)
    (command,) = batch.entries
    events = tuple(event for event in command.events if job in jobs_of(event))
    if len(events) == len(command.events):
        return data
    return batch_of_encoded(batch.base, batch.at, (encode_entry(replace(command, events=events)),))
