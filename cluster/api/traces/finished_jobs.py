"""Finished jobs in order, read from the replica's ledger and its per-job index.

It reads only as far as the history service has indexed. Nothing is kept of unfinished jobs; their events are read when
they finish.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Final, NamedTuple

from forebay.cluster.api.history_service import note_of
from forebay.cluster.api.traces.spans import JobStep, ended_with
from forebay.replica.messages import jobs_of
from forebay.replica.model import BufferState, JobState
from forebay.replica.values import MICROSECONDS_PER_SECOND, NEVER, Instant
from forebay.wal import (
    EntryKind,
    JobIndex,
    JobIndexBroken,
    JobIndexRow,
    Ledger,
    LedgerBroken,
    LedgerEntry,
    decode_batch,
    instant_of,
    kind_of,
    one_of_batch,
)

LOGGER = logging.getLogger(__name__)

ENTRIES_READ_MAX: Final = 256
BYTES_READ_MAX: Final = 1024 * 1024
"""Entries read at once, count and bytes, so that the process reacts to a stop request."""

LATE_US: Final = 30 * MICROSECONDS_PER_SECOND
"""Largest age of a finished job that is still sent, microseconds: it may have ended before this process started or its
replica became leader. IDs are deterministic, so duplicates are harmless.
"""

LOOK_BACK_ENTRIES: Final = 1024
"""Entries before the last one that a new process reads, count, to include recently finished jobs."""

STEPS_MAX: Final = 2_000
"""Commands of one job read, count; a job with more, retried forever, gets no trace."""


class FinishedJob(NamedTuple):
    """A finished job, and the command that finished it."""

    job: int
    revision: int
    at: Instant
    steps: tuple[JobStep, ...]


class FinishedJobReader:
    """Incremental reader of finished jobs."""

    def __init__(self, ledger: Ledger, index: Path) -> None:
        """`ledger`: read-only view of the replica's ledger; `index`: directory of the per-job index."""
        self._live = ledger
        self._directory = index
        self._reached: int | None = None
        """Last entry read; None: none yet."""
        self._since = NEVER
        """Jobs finished earlier are skipped."""

    def read(self) -> tuple[list[FinishedJob], bool]:
        """Return the jobs finished by the next entries, and whether there are more entries.

        Unreadable entries are skipped.
        """
        try:
            with closing(JobIndex(self._directory, readonly=True)) as index:
                ledger, last = self._live.as_stored(), index.position.index
                if self._reached is None or self._reached > last:  # the index was rebuilt
                    self._begin(ledger, last)
                first = (self._reached or 0) + 1
                if first > last:
                    return [], False
                found = ledger.read_some(first, entries_max=ENTRIES_READ_MAX, bytes_max=BYTES_READ_MAX)
                entries = [entry for entry in found if entry.index <= last]
                self._reached = entries[-1].index if entries else last
                over = [one for entry in entries for one in self._finished_in(ledger, index, entry)]
                return over, self._reached < last
        except JobIndexBroken as error:
            LOGGER.debug("the index by job cannot be read now: %s", error)
        except LedgerBroken as error:
            LOGGER.warning("no traces of the entries from %s on: %s", self._reached, error)
            self._reached = None if self._reached is None else self._reached + ENTRIES_READ_MAX
        return [], False

    def _begin(self, ledger: Ledger, last: int) -> None:
        self._reached = max(last - LOOK_BACK_ENTRIES, 0)
        newest = ledger.read_some(last, entries_max=1, bytes_max=1) if last else []
        self._since = Instant(max((instant_of(entry.data) or 0 for entry in newest), default=0) - LATE_US)

    def _finished_in(self, ledger: Ledger, index: JobIndex, entry: LedgerEntry) -> Iterator[FinishedJob]:
        if kind_of(entry.data) is not EntryKind.BATCH:
            return
        batch = decode_batch(entry.data)
        if batch.at < self._since:
            return
        for number, command in enumerate(batch.entries, 1):
            revision = int(entry.base) + number
            for job in sorted({job for event in command.events for job in jobs_of(event)}):
                row = next(iter(index.rows(job, revision - 1)), None)
                if row is None or row.revision != revision or not _step(row, batch.at).is_over:
                    continue
                steps = self._steps(ledger, index, job, revision)
                if ended_with(steps, revision):
                    yield FinishedJob(job, revision, batch.at, steps)

    def _steps(self, ledger: Ledger, index: JobIndex, job: int, last: int) -> tuple[JobStep, ...]:
        rows = [row for row in index.rows(job) if row.revision <= last]
        if len(rows) > STEPS_MAX:
            return ()
        steps = []
        for row in rows:
            try:
                number = ledger.index_of_revision(row.revision)
            except LookupError:  # pruned, or replaced by a snapshot
                continue
            (entry,) = ledger.read_some(number, entries_max=1, bytes_max=1)
            batch = decode_batch(one_of_batch(entry.data, row.revision - entry.base - 1))
            (command,) = batch.entries
            events = tuple(event for event in command.events if job in jobs_of(event))
            steps.append(_step(row, batch.at)._replace(events=events))
        return tuple(steps)


def _step(row: JobIndexRow, at: Instant) -> JobStep:
    """Return the step in an index row, without events."""
    noted = note_of(row)
    return JobStep(
        row.revision,
        at,
        JobState(noted.state) if noted.state else None,
        BufferState(noted.buffer) if noted.buffer else None,
        noted.attempt,
        (),
    )
