"""Record counts of all jobs: updated while the ledger is followed, and read from the index at startup.

A replica confirms only counts it made itself. It recounts what the ledger records. On a difference its tree ends before
that entry, so that it signs nothing that contains it.
"""

from __future__ import annotations

import logging
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

from forebay.cluster.api.history_service.follower import Follower
from forebay.cluster.security.proofs import HistoryCounts
from forebay.cluster.server.tlog import (
    CountLeaf,
    NoDisclosureKey,
    TooFar,
    disclosure_key_of,
    last_recorded,
    records_between,
)
from forebay.cluster.system import replace_private
from forebay.replica.messages import HistoriesCounted
from forebay.wal import JobIndexBroken, LedgerBroken

LOGGER = logging.getLogger(__name__)

JOBS_PER_STEP: Final = 256
"""Jobs counted in one startup step, count: about five milliseconds."""


TILES_PER_STEP: Final = 8
"""Tiles of 256 jobs hashed in one startup step, count: about ten milliseconds."""


DISPUTED_NAME: Final = "disputed"
"""File with the index of the first entry that records different counts, in decimal."""


class RecordCount(NamedTuple):
    """Counts over the first entries of the ledger: the highest job, and the root."""

    jobs: int
    root: bytes


class CountUnavailable(LookupError):
    """The counts are unavailable; the message gives the reason."""


class RecordCounts:
    """Record counts of one replica."""

    def __init__(self, follower: Follower, directory: Path) -> None:
        """`directory`: index directory, which also holds the note of a disputed entry."""
        self._follower = follower
        self._note = directory / DISPUTED_NAME
        self._read_through, self._is_read, self._is_prepared, self._is_compared = 0, False, False, False
        """Highest job whose earlier records are counted; whether all are counted, hashed, and compared."""
        follower.on_record = self._add
        follower.on_counted = self._unchecked_too
        self._begin()

    @property
    def ends_before(self) -> int | None:
        """Index of the first entry with counts that differ from this replica's, or None."""
        return self._disputed

    @property
    def first_unchecked(self) -> int | None:
        """Index of the first entry whose counts are not verified yet."""
        return self._unchecked[0][0] if self._unchecked else None

    def step(self) -> bool:
        """Count some more, or recount what the ledger records; return True if work is left.

        Raises:
            JobIndexBroken: The index and the ledger record different counts.
        """
        if self._begun != self._follower.begun:
            self._begin()
        if self._counts is None:
            return self._open()
        if not self._is_read and self._follower.index < self._follower.noted_index:
            return False  # the index covers more than the folded state, which must catch up first
        if not self._is_read:
            found = [*islice(self._follower.noted_jobs(self._read_through), JOBS_PER_STEP)]
            for job in found:
                self._counts.add(job, len(self._follower.rows(job)))
                self._read_through = job
            self._is_read = len(found) < JOBS_PER_STEP
            return True
        if not self._is_prepared:
            self._is_prepared = not self._counts.prepare(TILES_PER_STEP)
            return True
        if not self._is_compared:
            self._compare()
            self._is_compared = True
            return True
        if self._unchecked:
            self._check(*self._unchecked.pop(0))
        return bool(self._unchecked)

    @property
    def is_reading(self) -> bool:
        """Return whether rows from before this process started are still to be compared with the ledger."""
        return self._counts is not None and not self._is_compared

    def _compare(self) -> None:
        """Compare the counts of an existing index with the last ones in the ledger."""
        follower = self._follower
        if follower.is_confirmed or self._disputed is not None:
            return
        try:
            found = last_recorded(follower.ledger, min(follower.noted_index, follower.ledger.applied_index))
            mine = None if found is None else self.count_first(found.event.index)
        except (CountUnavailable, LedgerBroken) as error:
            LOGGER.info("the index by job cannot be compared with the ledger's record counts now: %s", error)
            return
        if found is None or mine is None:
            return
        if mine != (found.event.jobs, found.event.root):
            raise JobIndexBroken(
                f"its record counts over the first {found.event.index} entries have the root {mine.root.hex()[:16]}, "
                f"but the ledger records {found.event.root.hex()[:16]}: the index was altered"
            )
        follower.is_confirmed = True

    def count_first(self, size: int) -> RecordCount:
        """Return the counts over the first `size` entries.

        Raises:
            CountUnavailable: They are not known.
        """
        counts, less = self._at(size)
        return RecordCount(counts.jobs(less), counts.root(less))

    def leaf(self, job: int, size: int) -> CountLeaf | None:
        """Return a job's leaf in the tree of counts over the first `size` entries, or None.

        Raises:
            CountUnavailable: The counts are not known.
        """
        counts, less = self._at(size)
        position, count = counts.position(job), counts.count(job, less)
        return None if position is None or not count else CountLeaf(position, count, counts.path(job, less))

    def last_recorded_root(self, size: int) -> bytes:
        """Return the last root recorded in the first `size` entries, or nothing."""
        found = last_recorded(self._follower.ledger, size)
        return b"" if found is None else found.event.root

    def _at(self, size: int) -> tuple[HistoryCounts, dict[int, int]]:
        if self._follower.holes:
            raise CountUnavailable("this replica lacks some of the history")
        if self._counts is None or not self._is_prepared:
            raise CountUnavailable("the jobs' records are not counted yet")
        if size > self._follower.noted_index:
            raise CountUnavailable(f"records are counted up to entry {self._follower.noted_index}")
        try:
            return self._counts, dict(records_between(self._follower.ledger, size, self._follower.noted_index))
        except TooFar as error:
            raise CountUnavailable(str(error)) from error

    def _begin(self) -> None:
        self._begun = self._follower.begun
        self._counts: HistoryCounts | None = None
        self._read_through, self._is_read, self._is_prepared, self._is_compared = 0, False, False, False
        self._unchecked: list[tuple[int, HistoriesCounted]] = []
        if not self._follower.noted_index:
            self._note.unlink(missing_ok=True)  # everything is followed again, and verified
        self._disputed = _read_note(self._note)

    def _open(self) -> bool:
        try:
            self._counts = HistoryCounts(disclosure_key_of(self._follower.ledger))
        except (NoDisclosureKey, LedgerBroken):
            return False
        return True

    def _add(self, job: int) -> None:
        if self._begun != self._follower.begun:
            self._begin()
        if self._counts is not None and (self._is_read or job <= self._read_through):
            self._counts.add(job)

    def _unchecked_too(self, index: int, event: HistoriesCounted) -> None:
        if self._begun != self._follower.begun:
            self._begin()
        self._unchecked.append((index, event))

    def _check(self, index: int, event: HistoriesCounted) -> None:
        try:
            mine = self.count_first(event.index)
        except (CountUnavailable, LedgerBroken) as error:
            LOGGER.warning("the record counts in entry %d cannot be verified: %s", index, error)
            return
        if mine != (event.jobs, event.root) and self._disputed is None:
            self._disputed = index
            # The next start continues after this entry.
            replace_private(self._note, f"{index}\n".encode("ascii"))
            LOGGER.critical(
                "the record counts in entry %d are wrong (their root is %s, but %s when counted here): this replica "
                "signs nothing that contains this entry",
                index,
                event.root.hex()[:16],
                mine.root.hex()[:16],
            )


def _read_note(path: Path) -> int | None:
    """Return the entry named in the note, None without a note; an unreadable note disputes every entry."""
    try:
        return int(path.read_text(encoding="ascii"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return 1
