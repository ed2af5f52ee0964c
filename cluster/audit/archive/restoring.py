"""Restoring the tree and proof data from an archive to a replica whose peers have all pruned them.

A joining replica gets recent entries from its peers, but no pruned entries. Without the leaves of pruned entries it has
no tree and cannot sign checkpoints. The leaves are derived from the archive, after checking that the archive leads to
the digest of the last missing entry, which the replica has. The entries themselves stay in the archive.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from forebay.cluster.audit.archive.pruning import sync_leaves
from forebay.cluster.audit.archive.verifying import Progress, verify_stretch
from forebay.cluster.audit.archive.writing import NotArchived
from forebay.cluster.security.proofs.tiles import TILE_WIDTH
from forebay.cluster.server.tlog import LOG_DIRECTORY, LedgerTree, NoDisclosureKey
from forebay.wal import (
    KEPT_ENTRIES,
    Archive,
    ArchivedLedger,
    Entry,
    Environment,
    Gap,
    Ledger,
    PrunedRange,
    PrunedSegment,
    authorise,
    insert_beginning,
)


class RestoreResult(NamedTuple):
    """Result of a restore: the size of the tree, and the first entry that is not only in the archive."""

    tree_size: int
    below: int


def restore(env: Environment, home: Path, archive: Archive, *, progress: Progress) -> RestoreResult:
    """Restore the first entries and the tree from an archive to a stopped replica's directory; durable on return.

    Raises:
        NotArchived: Nothing is missing, or the archive ends too early.
        SegmentBroken: The archive is damaged, or of another history.
        LedgerBroken: The ledger is damaged.
        StorageFailed: The ledger cannot be written.
        OSError: The tree cannot be written.
    """
    gap = _gap(Ledger(env), archive)
    verify_stretch(archive, 1, gap.last_index, progress)
    ledger = ArchivedLedger(env, archive)
    if gap.first_index <= KEPT_ENTRIES:
        first = archive.read_some(1, entries_max=KEPT_ENTRIES, bytes_max=2**40)
        held = [one for one in first if one.index >= gap.first_index]
        insert_beginning(env, gap, [(Entry(one.index, one.term, one.data), one.digest, one.revision) for one in held])
    try:
        tree = LedgerTree(ledger.as_stored, home / LOG_DIRECTORY)
    except NoDisclosureKey as error:
        raise NotArchived(f"the tree cannot be derived: {error}", "nothing needs to be restored") from error
    while tree.size < gap.last_index and tree.step():
        progress(tree.size, gap.last_index)
    sync_leaves(home / LOG_DIRECTORY, 1, gap.last_index)
    below = gap.last_index + 1
    manifests = (segment.manifest for segment in archive.segments)
    segments = tuple(
        PrunedSegment(one.first_index, one.last_index, one.revision_after, one.last_at or 0)
        for one in manifests
        if one.first_index <= gap.last_index
    )
    authorise(env, PrunedRange(below, segments))
    return RestoreResult(tree.size, below)


def _gap(ledger: Ledger, archive: Archive) -> Gap:
    gaps = ledger.gaps()
    if not gaps:
        raise NotArchived("the replica has its complete ledger", "nothing needs to be restored")
    gap = gaps[0]
    if len(gaps) > 1 or gap.last_index % TILE_WIDTH:
        raise NotArchived(
            f"the replica still lacks entries that its peers have: {gap.first_index} to {gap.last_index}",
            "run the replica until its log reports that all peers have pruned the missing entries, then stop it",
        )
    if archive.last_index < gap.last_index:
        raise NotArchived(
            f"the archive ends with entry {archive.last_index}, but entries up to {gap.last_index} are missing",
            "name an archive with these entries",
        )
    return gap
