"""Leader terms of a ledger, found by bisection."""

from __future__ import annotations

from forebay.cluster.api.history_service.frames import LeaderTerm
from forebay.replica.values import NEVER, Instant
from forebay.wal import ChangeKind, EntryKind, Ledger, LedgerEntry, decode_configuration, instant_of, kind_of, leader_of
from forebay.wal.configuration import name_of

LOOKED_AT_MAX = 256
"""Entries searched for one with a clock, count; a term without one in these counts as having none."""


def terms_of(ledger: Ledger, limit: int) -> tuple[LeaderTerm, ...]:
    """Return the last terms of a ledger, oldest first."""
    found: list[LeaderTerm] = []
    last, first_held = ledger.applied_index, ledger.first_index
    while last >= first_held and len(found) < limit:
        entry = _held_entry(ledger, last)
        if entry is None:
            break
        first = _first_of(ledger, entry.term, first_held, last)
        beginning = _held_entry(ledger, first)
        assert beginning is not None, first
        found.append(
            LeaderTerm(
                term=entry.term,
                leader=_leader(beginning),
                first_index=first,
                last_index=last,
                began=_clock(ledger, first, last, forwards=True),
                ended=_clock(ledger, first, last, forwards=False),
                last_before=_clock(ledger, first_held, first - 1, forwards=False),
            )
        )
        last = first - 1
    return tuple(reversed(found))


def _first_of(ledger: Ledger, term: int, low: int, high: int) -> int:
    """Return the first entry of a term that includes `high`; terms only grow."""
    while low < high:
        middle = (low + high) // 2
        entry = _held_entry(ledger, middle)
        if entry is not None and entry.term >= term:
            high = middle
        else:
            low = middle + 1
    return high


def _leader(entry: LedgerEntry) -> str:
    """Return the name of the leader whose term begins with an entry; empty if unknown."""
    if kind_of(entry.data) is EntryKind.CONFIGURATION:
        change = decode_configuration(entry.data).change
        return name_of(change.actor) if change.action is ChangeKind.FOUND else ""
    return name_of(leader_of(entry.data))


def _clock(ledger: Ledger, first: int, last: int, *, forwards: bool) -> Instant:
    """Return the clock of the first or the last batch in a range."""
    stretch = range(first, min(last, first + LOOKED_AT_MAX - 1) + 1)
    if not forwards:
        stretch = range(last, max(first, last - LOOKED_AT_MAX + 1) - 1, -1)
    for index in stretch:
        entry = _held_entry(ledger, index)
        at = None if entry is None else instant_of(entry.data)
        if at is not None:
            return at
    return NEVER


def _held_entry(ledger: Ledger, index: int) -> LedgerEntry | None:
    found = ledger.read_some(index, entries_max=1, bytes_max=1)
    return found[0] if found and found[0].index == index else None
