"""Deep verification of derived data against the ledger: snapshots, the index by job, and the tree."""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from forebay.cluster.api.history_service import Follower
from forebay.cluster.audit.replay import (
    Progress,
    ReplayFailed,
    ReplayFold,
    failing_at,
    finish_replay,
    fold,
    from_image,
    from_nothing,
)
from forebay.cluster.security.proofs import Checkpoint, NoteError, parse_checkpoint, parse_note
from forebay.cluster.server.tlog import (
    CHECKPOINT_NAME,
    LOG_DIRECTORY,
    SIGNED_NAME,
    SIGNING_DIRECTORY,
    LedgerTree,
    NoDisclosureKey,
)
from forebay.cluster.system import SystemClock
from forebay.replica.state import state_digest
from forebay.snapshots import SnapshotName, SnapshotRefused, load_snapshot
from forebay.wal import Gap, IndexPosition, JobIndex, JobIndexBroken, Ledger, LedgerBroken

MADE_ANEW = "remove that directory: the replica rebuilds it"


class SnapshotCheck(NamedTuple):
    """Snapshot of a replica at `entry`. `proven` is False if the snapshot only replaces missing history."""

    path: Path
    entry: int
    state_digest: bytes
    proven: bool


class Deep(NamedTuple):
    """Result of deep verification: final state digest, recorded and compared state digests, and snapshots in order."""

    state_digest: bytes
    digests_recorded: int
    digests_compared: int
    snapshots: tuple[SnapshotCheck, ...]


def snapshots_in(directory: Path) -> list[tuple[int, Path]]:
    """Return the finalized snapshots of a directory with their entries, in order.

    Raises:
        OSError: The directory cannot be read.
    """
    names = directory.iterdir() if directory.is_dir() else ()
    found = [(name, path) for path in names if (name := SnapshotName.parse(path.name)) is not None]
    return [(name.index, path) for name, path in sorted(found)]


def verify_deep(
    ledger: Ledger, gaps: Sequence[Gap], snapshots: Sequence[tuple[int, Path]], progress: Progress | None = None
) -> Deep:
    """Fold the ledger to its end, and compare each snapshot with the state at its entry.

    After missing history, the replay continues from the next snapshot without comparing it. Every state digest recorded
    in the ledger is compared. Raises:
        ReplayFailed: A snapshot differs from the fold; the message names its file.
        StateDigestMismatch: A state differs from its recorded digest.
        ReplayRefused: History is missing, and no snapshot replaces it.
        LedgerBroken: The ledger is damaged.
        SnapshotRefused: A snapshot is damaged.
    """
    ledger = ledger.as_of_now()
    folding, found = from_nothing(every_digest=True), list[SnapshotCheck]()
    recorded = compared = 0
    missing = [(gap.first_index, gap.last_index) for gap in gaps]
    for index, path in snapshots:
        while missing and missing[0][1] <= folding.last_index:
            del missing[0]
        is_before = not missing or index < missing[0][0]
        if index > ledger.applied_index:
            raise ReplayFailed(ledger.applied_index, f"{path} is of entry {index}, but the ledger ends here")
        if is_before:
            fold(ledger, folding, index, progress)
        try:
            image = load_snapshot(path)
        except SnapshotRefused:
            if not path.exists():
                continue  # the replica has deleted it meanwhile
            raise
        digest = state_digest(image.state)
        if is_before:
            _compare(folding, path, image.chain_digest, digest)
        elif index >= missing[0][1]:
            recorded, compared = recorded + folding.digests.recorded, compared + folding.digests.compared
            folding = from_image(ledger, image, every_digest=True)
        found.append(SnapshotCheck(path, index, digest, is_before))
    fold(ledger, folding, ledger.applied_index, progress)
    end = finish_replay(ledger, folding)
    recorded, compared = recorded + end.digests.recorded, compared + end.digests.compared
    return Deep(end.state_digest, recorded, compared, tuple(found))


def verify_index(ledger: Ledger, directory: Path, snapshots: Path) -> IndexPosition | None:
    """Rebuild the index by job in a temporary directory, up to the end of the replica's index, and compare them.

    Return the last compared entry, or None without an index. A running replica may extend its index meanwhile.

    Raises:
        ReplayFailed: The job histories differ.
        LedgerBroken: The ledger is damaged.
    """
    if not directory.is_dir():
        return None
    try:
        stored = JobIndex(directory, readonly=True)
    except JobIndexBroken as error:
        raise ReplayFailed(ledger.applied_index, f"{error}; {MADE_ANEW}") from error
    try:
        position = stored.position
        with TemporaryDirectory(prefix="forebay-index-") as place:
            made = JobIndex(Path(place) / "index")
            following = Follower(ledger, snapshots=snapshots, index=made, monotonic_s=SystemClock().monotonic_s)
            with failing_at(position.index):
                while following.index < position.index and following.step():
                    pass
                following.write()
            if position.index > following.index or following.ledger.row_at(position.index).digest != position.digest:
                raise ReplayFailed(position.index, f"{directory} belongs to another ledger; {MADE_ANEW}")
            # The rebuilt index lacks pruned entries.
            unknown = [
                (ledger.row_at(hole.first_index - 1).revision, ledger.row_at(hole.last_index).revision)
                for hole in following.holes
            ]
            for job in merge(stored.jobs(), made.jobs()):
                says, should = (
                    [
                        row
                        for row in index.rows(job)
                        if row.revision <= position.revision
                        and not any(after < row.revision <= last for after, last in unknown)
                    ]
                    for index in (stored, made)
                )
                if says != should and not position.holes:
                    raise ReplayFailed(
                        position.index, f"{directory} contradicts the ledger about job {job}; {MADE_ANEW}"
                    )
            made.close()
    except JobIndexBroken as error:
        raise ReplayFailed(ledger.applied_index, f"{error}; {MADE_ANEW}") from error
    finally:
        stored.close()
    return position


def verify_tree(running: Ledger, home: Path, progress: Progress | None = None) -> int | None:
    """Rebuild a replica's tree, and compare it with the replica's tiles and signed checkpoints.

    Return the size of the last comparable checkpoint, None without one.

    Raises:
        LedgerBroken: Tiles belong to another ledger, or signed entries are no longer in this one.
    """
    signed = _signed_in(home)  # before the ledger is opened: later checkpoints cover later entries
    ledger = running.as_of_now()
    try:
        tree = LedgerTree(lambda: ledger, home / LOG_DIRECTORY, readonly=True)
    except NoDisclosureKey:
        return None
    while _derived(tree):
        if progress is not None:
            progress(tree.verified, ledger.applied_index)
    if tree.altered:
        raise LedgerBroken(
            tree.altered[0], f"the tile of {home / LOG_DIRECTORY} that begins there is intact, but of another ledger"
        )
    compared = None
    for path, found in signed:
        if found.size > ledger.applied_index:
            raise LedgerBroken(
                ledger.applied_index,
                f"the ledger ends there, but {path} covers {found.size} entries: the ledger was rolled back",
            )
        if found.size <= tree.size:
            if tree.root(found.size) != found.root:
                raise LedgerBroken(found.size, f"the entries up to here differ from those of {path}")
            compared = max(found.size, compared or 0)
    return compared


def _derived(tree: LedgerTree) -> bool:
    with failing_at(tree.size + 1):
        return tree.step() or tree.check()


def _signed_in(home: Path) -> list[tuple[Path, Checkpoint]]:
    """Return the checkpoints last signed by a replica and by a majority."""
    found = []
    for path in (home / SIGNING_DIRECTORY / SIGNED_NAME, home / LOG_DIRECTORY / CHECKPOINT_NAME):
        try:
            found.append((path, parse_checkpoint(parse_note(path.read_bytes())[0])))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except NoteError as error:
            raise LedgerBroken(0, f"{path} is not a checkpoint: {error}") from error
    return found


def merge(first: Iterable[int], second: Iterable[int]) -> Iterator[int]:
    """Yield the union of two ascending sequences, without duplicates."""
    return (number for number, _ in groupby(heapq.merge(first, second)))


def _compare(folded: ReplayFold, path: Path, chain_digest: bytes, digest: bytes) -> None:
    if chain_digest != folded.ledger_digest:
        raise ReplayFailed(folded.last_index, f"{path} belongs to another ledger, of digest {chain_digest.hex()}")
    if digest != folded.state_digest:
        raise ReplayFailed(
            folded.last_index,
            f"{path} does not match the ledger: its state digest is {digest.hex()}, and the ledger's is "
            f"{folded.state_digest.hex()}",
        )
