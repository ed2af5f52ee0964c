"""Limits for pruning a ledger: configured age or size, and coverage by archives, checkpoint, snapshot and index."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from forebay.cluster.audit.archive.writing import NotArchived, checkpoint_in
from forebay.cluster.security.proofs.tiles import TILE_WIDTH
from forebay.replica.messages import StateDigested
from forebay.replica.values import Instant
from forebay.snapshots import SnapshotName
from forebay.wal import (
    Archive,
    CodecError,
    Environment,
    JobIndex,
    JobIndexBroken,
    Ledger,
    decode_batch,
    instant_of,
    prunable_below,
)


def below_of_age(ledger: Ledger, before: Instant) -> int:
    """Return the first entry to keep, so that all earlier entries were settled before an instant.

    This is a bisection, because the replicated clock never goes back. If an operator has set it back, more entries are
    kept.

    Raises:
        LedgerBroken: An entry is damaged.
    """
    gaps = ledger.gaps()
    low = max((gap.revision_after for gap in gaps), default=0)
    first, high = low, ledger.applied_revision
    while low < high:
        middle = (low + high + 1) // 2
        index = ledger.index_of_revision(middle)
        entry = next(iter(ledger.read(index, limit=1)))
        at = _instant(entry.data)
        if at is not None and at < before:
            low = middle
        else:
            high = middle - 1
    return ledger.index_of_revision(low) + 1 if low > first else ledger.whole_from


def below_of_size(ledger: Ledger, keep_bytes: int) -> int:
    """Return the first entry to keep, so that the kept entries have at least `keep_bytes` bytes, in whole tiles.

    Raises:
        LedgerBroken: An entry is damaged.
    """
    sizes: list[int] = []
    first = ledger.whole_from
    for entry in ledger.read(first, limit=ledger.applied_index - first + 1):
        if (entry.index - first) % TILE_WIDTH == 0:
            sizes.append(0)
        sizes[-1] += len(entry.data)
    kept, number = 0, len(sizes)
    while number and kept < keep_bytes:
        number -= 1
        kept += sizes[number]
    return first + number * TILE_WIDTH


def within(env: Environment, home: Path, archives: Sequence[Archive]) -> tuple[int, str]:
    """Return the first entry that must be kept, and a description of the data that requires it."""
    ledger = Ledger(env).as_of_now()
    bounds = {
        "the compaction of the journal": prunable_below(env),
        "an archive": min(one.last_index for one in archives) + 1,
    }
    try:
        bounds["the last checkpoint"] = checkpoint_in(home, ledger)[1].size + 1
    except NotArchived:
        bounds["the last checkpoint"] = 1
    directory = home / "snapshots"
    names = [name.index for one in directory.iterdir() if (name := SnapshotName.parse(one.name))]
    held = [index for index in names if index <= ledger.applied_index]
    digested = _last_digested(ledger)
    # Prefer a snapshot with a later recorded digest. If snapshots are more frequent than digests, the newest never has
    # one.
    bound = max((index for index in held if index <= digested), default=max(held, default=0))
    bounds["the newest snapshot with a recorded digest"] = bound + 1
    try:
        index = JobIndex(home / "index", readonly=True)
        bounds["the index by job"] = index.position.index + 1
        index.close()
    except (JobIndexBroken, OSError):
        bounds["the index by job"] = 1
    last = min(bounds, key=lambda what: bounds[what])
    return bounds[last], last


def _last_digested(ledger: Ledger) -> int:
    """Return the last entry whose state digest the ledger records; 0 if none.

    Raises:
        LedgerBroken: An entry is damaged.
    """
    last = ledger.applied_index
    while last >= ledger.whole_from:
        first = max(ledger.whole_from, last - TILE_WIDTH + 1)
        for entry in reversed([*ledger.read(first, limit=last - first + 1)]):
            if entry.revision == entry.base:
                continue  # a no-op or a void batch
            for command in reversed(decode_batch(entry.data).entries):
                for event in command.events:
                    if isinstance(event, StateDigested):
                        return ledger.index_of_revision(event.revision) if event.revision else 0
        last = first - 1
    return 0


def _instant(data: bytes) -> Instant | None:
    try:
        return instant_of(data)
    except CodecError:
        return None
