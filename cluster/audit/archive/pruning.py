"""Pruning of a replica's ledger: preconditions, and the removal by this process.

All archives are read completely and must lead to the ledger's digest at the last removed entry. The last checkpoint
must be signed by a majority and match the tree. A snapshot at or after the last removed entry must match a digest
recorded in the ledger. The leaves and the index by job, which remain after the removal, must cover the removed entries.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from forebay.cluster.audit.archive.verifying import Keys, Progress, signers_of, verify_stretch
from forebay.cluster.audit.archive.writing import NotArchived, checkpoint_in
from forebay.cluster.audit.replay import ReplayFailed, ReplayRefused, fold, from_image
from forebay.cluster.security.proofs import NoteError, Tile, leaves_in
from forebay.cluster.security.proofs.tiles import TILE_WIDTH
from forebay.cluster.server.tlog import LOG_DIRECTORY, LedgerTree, NoDisclosureKey, NotInTree, leaf_of_entry
from forebay.replica.state import StateDigestMismatch
from forebay.snapshots import SnapshotName, SnapshotRefused, load_snapshot
from forebay.wal import (
    KEPT_ENTRIES,
    Archive,
    Environment,
    JobIndex,
    JobIndexBroken,
    Ledger,
    LedgerBroken,
    PrunedRange,
    PrunedSegment,
    SegmentBroken,
    authorise,
    prunable_below,
    prune_some,
)

COPIES_MIN = 2
"""Minimum number of archives with the removed entries: a single copy could be lost with one disk."""


class PruneRefused(Exception):
    """Pruning is not possible as requested; the sentence is the cause, `remedy` the correction."""

    def __init__(self, sentence: str, remedy: str) -> None:
        super().__init__(sentence)
        self.remedy = remedy


class PrunePlan(NamedTuple):
    """Entries to remove: `first_index` to `pruned.below` - 1, whose last digest is `digest`. The range may be empty."""

    pruned: PrunedRange
    first_index: int
    digest: bytes
    checkpoint_size: int
    signers: int
    snapshot_index: int

    @property
    def entries(self) -> int:
        """Return the number of entries to remove."""
        return max(0, self.pruned.below - self.first_index)


def prune_plan(
    env: Environment,
    home: Path,
    below: int,
    archives: Sequence[Path],
    keys: Keys,
    *,
    progress: Progress,
) -> PrunePlan:
    """Return a plan to remove the entries before `below`, in whole tiles.

    `home` is the replica's directory, which is only read.

    Raises:
        PruneRefused: A precondition fails.
        SegmentBroken: An archive is damaged, or differs from the ledger.
        LedgerBroken: The ledger, its tree or a snapshot is damaged.
    """
    ledger = Ledger(env).as_of_now()
    asked, below = below, (below - 1) // TILE_WIDTH * TILE_WIDTH + 1
    last = below - 1
    front = next((gap for gap in ledger.gaps() if gap.first_index <= KEPT_ENTRIES + 1 <= gap.last_index), None)
    first = KEPT_ENTRIES + 1 if front is None else front.last_index + 1
    if last < TILE_WIDTH:
        raise PruneRefused(
            f"only whole tiles of {TILE_WIDTH} entries are pruned, and no whole tile ends before entry {asked}",
            f"use --below {TILE_WIDTH + 1} or more",
        )
    if asked > ledger.applied_index + 1:
        raise PruneRefused(
            f"there is no entry {asked - 1}: the ledger ends with entry {ledger.applied_index}",
            f"use --below {ledger.applied_index + 1} or less",
        )
    _check_consensus(env, below)
    size, signers = _check_checkpoint(ledger, home, last, keys)
    opened = _open_archives(archives, ledger, below)
    digest = ledger.row_at(last).digest
    _check_index(ledger, home, last)
    snapshot = _check_snapshot(ledger, home, last, progress)
    for archive in opened:
        if archive.row_at(last).digest != digest:
            raise SegmentBroken(archive.directory, f"its entry {last} differs from the ledger's")
        verify_stretch(archive, first, last, progress)
    _check_tree(ledger, home, size, first, last, opened[0])
    segments = tuple(
        PrunedSegment(one.first_index, one.last_index, one.revision_after, one.last_at or 0)
        for one in (segment.manifest for segment in opened[0].segments)
        if one.first_index <= last
    )
    return PrunePlan(PrunedRange(below, segments), first, digest, size, signers, snapshot)


def _check_consensus(env: Environment, below: int) -> None:
    most = prunable_below(env)
    if below > most:
        raise PruneRefused(
            f"consensus needs entry {most} and later ones: only entries before its last compaction are pruned",
            f"use --below {most}, or compact more with `forebay cluster snapshot`",
        )


def _check_checkpoint(ledger: Ledger, home: Path, last: int, keys: Keys) -> tuple[int, int]:
    """Return the size of the last checkpoint, and the number of keys that signed it."""
    try:
        note, found = checkpoint_in(home, ledger)
    except NotArchived as error:
        raise PruneRefused(str(error), error.remedy) from error
    if found.size < last:
        raise PruneRefused(
            f"the last checkpoint covers {found.size} entries, but entries up to {last} would be pruned",
            f"use --below {found.size + 1}, or wait for the next one",
        )
    if found.size > ledger.applied_index:
        raise PruneRefused(
            f"the checkpoint covers {found.size} entries, but only {ledger.applied_index} are stored here",
            "try again in a moment",
        )
    try:
        signers = signers_of(note, keys)
    except NoteError as error:
        sentence = f"the signatures of the last checkpoint cannot be verified: {error}"
        raise PruneRefused(sentence, f"check the keys in {keys.place}") from error
    if signers < keys.majority(found.origin):
        raise PruneRefused(
            f"{keys.place} has {len(keys.of(found.origin))} keys of {found.origin}; {signers} of them signed the last "
            f"checkpoint, and {keys.majority(found.origin)} are a majority",
            "wait for a checkpoint with more signatures; after a replacement, write the keys again "
            "(`forebay audit keys`)",
        )
    return found.size, signers


def _open_archives(archives: Sequence[Path], ledger: Ledger, below: int) -> list[Archive]:
    """Open the archives, after checking that they are separate copies of this ledger with the entries to remove."""
    places = {os.path.realpath(directory) for directory in archives}
    if len(places) < COPIES_MIN:
        raise PruneRefused(
            f"{len(places)} archive is named, but entries to be pruned must be in {COPIES_MIN}",
            "name two directories with --archive, on file systems that do not fail together",
        )
    opened = [Archive(directory) for directory in archives]
    files: dict[tuple[int, int], Path] = {}
    for archive in opened:
        for segment in archive.segments:
            status = segment.path.stat()
            other = files.setdefault((status.st_dev, status.st_ino), segment.path)
            if other != segment.path:
                raise PruneRefused(f"{segment.path} and {other} are the same file", "make a separate copy")
        if archive.segments and archive.cluster_id != ledger.cluster_id:
            raise SegmentBroken(
                archive.directory, f"it belongs to cluster {archive.cluster_id}, but the ledger to {ledger.cluster_id}"
            )
        if archive.last_index < below - 1:
            raise PruneRefused(
                f"{archive.directory} ends with entry {archive.last_index}, but entries up to {below - 1} would be "
                "pruned",
                f"use --below {archive.last_index + 1}, or run `forebay audit archive` for it first",
            )
    return opened


def _check_index(ledger: Ledger, home: Path, last: int) -> None:
    """Check that the index by job, which keeps job histories after pruning, covers the removed entries."""
    directory = home / "index"
    try:
        stored = JobIndex(directory, readonly=True)
        try:
            position = stored.position
        finally:
            stored.close()
    except (JobIndexBroken, OSError) as error:
        raise PruneRefused(f"the index by job cannot be read ({error})", "start the replica: it creates it") from error
    if position.index < last:
        raise PruneRefused(
            f"the index by job ends at entry {position.index}, but entries up to {last} would be pruned",
            f"use --below {position.index + 1}, or let the replica run until the index covers more",
        )
    try:
        known = ledger.row_at(position.index).digest
    except LedgerBroken as error:
        raise PruneRefused(
            f"the index by job cannot be compared: {error}", "start the replica: it rebuilds it"
        ) from error
    if known != position.digest:
        raise PruneRefused("the index by job belongs to another ledger", "start the replica: it rebuilds it")


def _check_snapshot(ledger: Ledger, home: Path, last: int, progress: Progress) -> int:
    """Return the entry of a snapshot at or after `last` that a state digest in the ledger confirms."""
    directory = home / "snapshots"
    names = directory.iterdir() if directory.is_dir() else ()
    found = sorted(
        ((name.index, path) for path in names if (name := SnapshotName.parse(path.name)) is not None), reverse=True
    )
    beyond = [(index, path) for index, path in found if last <= index <= ledger.applied_index]
    if not beyond:
        newest = found[0][0] if found else 0
        sentence = f"the newest snapshot is of entry {newest}, but entries up to {last} would be pruned"
        raise PruneRefused(
            sentence if newest else "there is no snapshot",
            f"run `forebay cluster snapshot` first{f', or use --below {newest + 1}' if newest else ''}",
        )
    why: Exception | None = None
    for index, path in beyond:
        try:
            replayed = from_image(ledger, load_snapshot(path), every_digest=True)
            while replayed.last_index < ledger.applied_index and not replayed.digests.compared:
                fold(ledger, replayed, min(replayed.last_index + TILE_WIDTH, ledger.applied_index), progress)
        except (StateDigestMismatch, ReplayFailed) as error:
            raise LedgerBroken(index, f"the snapshot {path.name} contradicts the ledger: {error}") from error
        except (SnapshotRefused, ReplayRefused) as error:
            why = error
            continue
        if replayed.digests.compared:
            return index
    raise PruneRefused(
        str(why)
        if why is not None
        else f"the ledger does not confirm the snapshot of entry {beyond[-1][0]} yet: it records no state digest after "
        "that entry",
        "wait: the leader records a state digest about once a minute while jobs change",
    )


def _check_tree(ledger: Ledger, home: Path, size: int, first: int, last: int, archive: Archive) -> None:
    """Compare the leaves with the entries to remove, and the tree with the checkpoint; sync the leaves."""
    directory = home / LOG_DIRECTORY
    try:
        _, found = checkpoint_in(home, ledger)
        tree = LedgerTree(lambda: ledger, directory, readonly=True)
        if tree.size < last:
            raise PruneRefused(
                f"the tree of the ledger ends at entry {tree.size}, but entries up to {last} would be pruned",
                f"use --below {tree.size + 1}, or let the replica run until the tree covers more",
            )
        while tree.size < size and tree.step():
            pass
        if tree.root(size) != found.root:
            raise LedgerBroken(size, "the entries up to here differ from those that a majority signed")
        for number in range((first - 1) // TILE_WIDTH, last // TILE_WIDTH):
            leaves = leaves_in(tree.tile(Tile(None, number)))
            begin = max(first, number * TILE_WIDTH + 1)
            entries = archive.read_some(begin, entries_max=(number + 1) * TILE_WIDTH - begin + 1, bytes_max=2**40)
            derived = [leaf_of_entry(tree.disclosure_key, entry).encode() for entry in entries]
            if leaves[-len(derived) :] != derived:
                raise LedgerBroken(begin, "the leaf in the tree does not match the entry in the archive")
        sync_leaves(directory, first, last)
    except (NoDisclosureKey, NotInTree, OSError) as error:
        raise PruneRefused(
            f"the tree of the ledger, which must outlive the entries, is incomplete: {error}",
            "let the replica run until the tree is complete",
        ) from error
    if tree.made_again:
        raise PruneRefused(
            f"{tree.made_again} files of the tree of the ledger are missing or damaged",
            "let the replica run and request a proof: it rebuilds them",
        )


def sync_leaves(directory: Path, first: int, last: int) -> None:
    """Sync the leaves of the entries `first` to `last`, and their directories; `last` is the end of a tile.

    Leaves are not synced when written, because they can be derived again until their entries are pruned.

    Raises:
        OSError: A file cannot be synced.
    """
    folders = {directory}
    for number in range((first - 1) // TILE_WIDTH, last // TILE_WIDTH):
        for level in (None, 0):
            path = directory / Tile(level, number).path
            _sync(path, 0)
            folders.update(folder for folder in path.parents if directory in folder.parents)
    for folder in folders:
        _sync(folder, os.O_DIRECTORY)


def _sync(path: Path, kind: int) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | kind)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def prune(env: Environment, plan: PrunePlan, progress: Callable[[int, int], None]) -> None:
    """Remove the entries of a plan from a storage open for writing; durable on return."""
    authorise(env, plan.pruned)
    while prune_some(env):
        gap = next(one for one in Ledger(env).gaps() if one.last_index < plan.pruned.below)
        progress(gap.last_index, plan.pruned.below - 1)
