"""Comparison of two releases folding the same ledger: finds the first entry after which the states differ."""

from collections.abc import Mapping, Sequence
from typing import Final

from forebay.cluster.audit.release import Release
from forebay.cluster.audit.replay import Progress, ReplayFailed, ReplayFold, ReplayRefused
from forebay.replica.state import table_digests
from forebay.wal import Ledger, LedgerEntry

COMPARED_ENTRIES: Final = 4_096
COMPARED_BYTES: Final = 8 << 20
"""Limits of the entries between two comparisons, count and bytes: each comparison visits all jobs."""


def fold_with(release: Release, ledger: Ledger, replaying: ReplayFold, progress: Progress | None = None) -> int:
    """Fold a ledger to its end in both releases; return the number of comparisons, which all succeeded.

    Exceptions of `replay` also propagate.

    Raises:
        ReplayFailed: The states differ; the error names the first entry after which they do.
        ReleaseFailed: The other release fails.
    """
    release.begin(replaying.state)
    compared = 0
    while replaying.last_index < ledger.applied_index:
        before = replaying.branch()
        entries = ledger.read_some(before.last_index + 1, entries_max=COMPARED_ENTRIES, bytes_max=COMPARED_BYTES)
        if not entries:
            raise ReplayRefused(f"this replica does not hold the entries from {before.last_index + 1} on")
        for entry in entries:
            replaying.take(entry)
        release.mark()
        release.fold(entry.data for entry in entries)
        differ = tables_that_differ(table_digests(replaying.state), release.digests())
        if differ:
            raise _first_difference(release, before, entries, differ)
        compared += 1
        if progress is not None:
            progress(replaying.last_index, ledger.applied_index)
    return compared


def tables_that_differ(here: Mapping[str, bytes], there: Mapping[str, bytes]) -> tuple[str, ...]:
    """Return the tables that differ between two states."""
    return tuple(sorted(table for table in {*here, *there} if here.get(table) != there.get(table)))


def _first_difference(
    release: Release, before: ReplayFold, entries: Sequence[LedgerEntry], differ: tuple[str, ...]
) -> ReplayFailed:
    """Return the failure for the first entry after which the states differ.

    They differ after the last of these entries.
    """
    same, other = 0, len(entries)
    while other - same > 1:
        middle = (same + other) // 2
        folding = before.branch()
        for entry in entries[:middle]:
            folding.take(entry)
        release.back()
        release.fold(entry.data for entry in entries[:middle])
        found = tables_that_differ(table_digests(folding.state), release.digests())
        if found:
            other, differ = middle, found
        else:
            same = middle
    sentence = f"after it the release in {release.tree} differs in {', '.join(differ)}"
    return ReplayFailed(entries[other - 1].index, sentence)
