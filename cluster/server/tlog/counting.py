"""Jobs concerned by each command, and the record counts stored in the ledger.

While entries are committed, the leader submits `RecordHistories` about once a minute, after a majority counted the
same. A proof of a job's records is complete up to the last recorded count that a checkpoint covers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final, NamedTuple

from forebay.replica.messages import Batch, HistoriesCounted, jobs_of
from forebay.wal import EntryKind, Ledger, LedgerEntry, decode_batch, kind_of

RECORDING: Final = "record_histories"
"""Name of the recording command in an entry."""

SOUGHT_ENTRIES_MAX: Final = 16_384
"""Number of entries searched for the last recorded count. It is recorded once a minute of change, and a minute rarely
has more entries, each with up to 512 commands.
"""

UNDONE_COMMANDS_MAX: Final = 65_536
"""Maximum number of commands counted backwards, about two seconds of work. The rest is provable a minute later."""

STEP_ENTRIES: Final = 256
STEP_BYTES: Final = 1 << 20


class RecordedCounts(NamedTuple):
    """Counts recorded in the ledger, and the revision of the recording command."""

    revision: int
    event: HistoriesCounted


class TooFar(LookupError):
    """The requested position lies too many commands in the past."""


def jobs_concerned(batch: Batch) -> Iterator[tuple[int, ...]]:
    """Yield the jobs concerned by each command of a batch: each gains one record."""
    for command in batch.entries:
        yield tuple(dict.fromkeys(job for event in command.events for job in jobs_of(event)))


def recorded_in(batch: Batch) -> Iterator[tuple[int, HistoriesCounted]]:
    """Yield the count records in a batch, each with its revision."""
    for revision, command in enumerate(batch.entries, start=batch.base + 1):
        if command.command == RECORDING:
            yield from ((revision, event) for event in command.events if type(event) is HistoriesCounted)


def settled_batch(entry: LedgerEntry) -> Batch | None:
    """Return the batch settled by an entry, or None."""
    is_settled = kind_of(entry.data) is EntryKind.BATCH and entry.revision != entry.base
    return decode_batch(entry.data) if is_settled else None


def last_recorded(ledger: Ledger, size: int) -> RecordedCounts | None:
    """Return the last count recorded in the first `size` entries; None if it is more than SOUGHT_ENTRIES_MAX back.

    Raises:
        LedgerBroken: An entry is damaged.
    """
    word, last = RECORDING.encode(), size
    while last > max(0, size - SOUGHT_ENTRIES_MAX):
        first = max(1, last - STEP_ENTRIES + 1)
        for entry in reversed([*ledger.read(first, limit=last - first + 1)]):
            if word in entry.data and (batch := settled_batch(entry)) is not None:
                for revision, event in reversed([*recorded_in(batch)]):
                    return RecordedCounts(revision, event)
        last = first - 1
    return None


def records_between(ledger: Ledger, after: int, last: int, *, bounded: bool = True) -> Counter[int]:
    """Return the number of records of each job in the entries after `after` up to `last`.

    Raises:
        LedgerBroken: An entry is damaged.
        TooFar: `bounded`, and there are more than UNDONE_COMMANDS_MAX commands.
    """
    found: Counter[int] = Counter()
    if last <= after:
        return found
    if bounded and ledger.row_at(last).revision - ledger.row_at(after).revision > UNDONE_COMMANDS_MAX:
        raise TooFar(f"the ledger has more than {UNDONE_COMMANDS_MAX} commands after entry {after}")
    for entry in ledger.read(after + 1, limit=last - after):
        if (batch := settled_batch(entry)) is not None:
            for jobs in jobs_concerned(batch):
                found.update(jobs)
    return found
