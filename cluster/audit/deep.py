"""Snapshots held against the ledger: each must be what the entries before it fold to."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from cluster.audit.replay import Progress, Replayed, ReplayFailed, finished, fold, from_image, from_nothing
from replica.state import state_digest
from snapshots import SnapshotName, SnapshotRefused, load_snapshot
from wal import Gap, Ledger


class Found(NamedTuple):
    """A snapshot of a replica, of `entry`. `proven`: it was compared; else it stands for history that is not held."""

    path: Path
    entry: int
    state_digest: bytes
    proven: bool


class Deep(NamedTuple):
    """What a ledger folds to at its end, how many digests of states it records and how many of those were compared,
    and its snapshots in their order.
    """

    state_digest: bytes
    digests_recorded: int
    digests_compared: int
    snapshots: tuple[Found, ...]


def snapshots_in(directory: Path) -> list[tuple[int, Path]]:
    """Return the finalized snapshots of a directory with the entries that they are of, in their order; OSError."""
    names = directory.iterdir() if directory.is_dir() else ()
    found = [(name, path) for path in names if (name := SnapshotName.parse(path.name)) is not None]
    return [(name.index, path) for name, path in sorted(found)]


def verify_deep(
    ledger: Ledger, gaps: Sequence[Gap], snapshots: Sequence[tuple[int, Path]], progress: Progress | None = None
) -> Deep:
    """Fold the ledger to its end, and compare each snapshot with the state at its entry.

    Behind history that is not held, the next snapshot is taken as it is. Every digest that the ledger records of a
    state is compared. Raises ReplayFailed, with the snapshot's file, where one is not what the ledger folds to;
    StateDiffers where a state is not the recorded one; ReplayRefused where history is missing that no snapshot stands
    for; LedgerBroken and SnapshotRefused for what cannot be read.
    """
    ledger = ledger.as_of_now()
    folding, found = from_nothing(every_digest=True), list[Found]()
    recorded = compared = 0
    missing = [(gap.first_index, gap.last_index) for gap in gaps]
    for index, path in snapshots:
        while missing and missing[0][1] <= folding.last_index:
            del missing[0]
        is_before = not missing or index < missing[0][0]
        if index > ledger.applied_index:
            raise ReplayFailed(ledger.applied_index, f"{path} is of entry {index}, and the ledger ends here")
        if is_before:
            fold(ledger, folding, index, progress)
        try:
            image = load_snapshot(path)
        except SnapshotRefused:
            if not path.exists():
                continue  # the replica has forgotten it meanwhile
            raise
        digest = state_digest(image.state)
        if is_before:
            _compare(folding, path, image.chain_digest, digest)
        elif index >= missing[0][1]:
            recorded, compared = recorded + folding.digests.recorded, compared + folding.digests.compared
            folding = from_image(ledger, image, every_digest=True)
        found.append(Found(path, index, digest, is_before))
    fold(ledger, folding, ledger.applied_index, progress)
    end = finished(ledger, folding)
    recorded, compared = recorded + end.digests.recorded, compared + end.digests.compared
    return Deep(end.state_digest, recorded, compared, tuple(found))


def _compare(folded: Replayed, path: Path, chain_digest: bytes, digest: bytes) -> None:
    if chain_digest != folded.ledger_digest:
        raise ReplayFailed(folded.last_index, f"{path} is of another ledger: {chain_digest.hex()} is not its digest")
    if digest != folded.state_digest:
        raise ReplayFailed(
            folded.last_index,
            f"{path} is not what the ledger comes to: its state digest is {digest.hex()}, and that of the ledger "
            f"{folded.state_digest.hex()}",
        )
