"""Writing of an archive, segment by segment up to the last checkpoint, from a replica's directory (only read)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from forebay.cluster.security.proofs import Checkpoint, NoteError, parse_checkpoint, parse_note
from forebay.cluster.server.tlog import CHECKPOINT_NAME, LOG_DIRECTORY, origin_of, parse_origin
from forebay.wal import Archive, Ledger, LedgerEntry, SegmentBroken, SegmentManifest, archive_from
from forebay.wal import directory as directories

ARCHIVE_MODE = 0o700
"""File mode of an archive: readable by the owner only, because it contains the whole ledger."""


class NotArchived(Exception):
    """Nothing can be archived now; the sentence is the cause, `remedy` the correction."""

    def __init__(self, sentence: str, remedy: str) -> None:
        super().__init__(sentence)
        self.remedy = remedy


def checkpoint_in(home: Path, ledger: Ledger) -> tuple[str, Checkpoint]:
    """Return the last checkpoint in a replica's directory, as a note and parsed.

    After a recovery this may be a checkpoint of the previous incarnation. It still covers only recovered entries,
    because a replica keeps only checkpoints whose root matches its own ledger.

    Raises:
        NotArchived: there is none, or it belongs to another ledger.
    """
    path = home / LOG_DIRECTORY / CHECKPOINT_NAME
    try:
        note = path.read_text(encoding="utf-8")
        found = parse_checkpoint(parse_note(note.encode())[0])
    except (OSError, NoteError, UnicodeDecodeError) as error:
        remedy = "wait: the cluster publishes a checkpoint some seconds after a change, once a majority has signed it"
        raise NotArchived(f"{path} has no checkpoint ({error})", remedy) from error
    mine, origin = ledger.incarnation, parse_origin(found.origin)
    is_earlier = origin is not None and origin[0] == ledger.cluster_id and origin[1].number < mine.number
    if not is_earlier and origin != (ledger.cluster_id, mine):
        raise NotArchived(
            f"{path} belongs to {found.origin}, but the ledger to {origin_of(ledger.cluster_id, mine)}",
            "name another directory",
        )
    return note, found


def archive_ledger(
    ledger: Ledger, home: Path, directory: Path, *, progress: Callable[[int, int], None]
) -> tuple[list[SegmentManifest], Archive]:
    """Write the missing entries of an archive, up to the last checkpoint; return the new segments and the archive.

    A missing directory is created, but not its parent.

    Raises:
        NotArchived: The cluster has not published a checkpoint of this ledger that covers more.
        SegmentBroken: The archive is broken or of another history.
        LedgerBroken: The ledger is damaged.
        OSError: The archive cannot be written.
    """
    seen = ledger.as_of_now()
    note, found = checkpoint_in(home, seen)
    if found.size > seen.applied_index:
        raise NotArchived(
            f"the checkpoint covers {found.size} entries, but only {seen.applied_index} are stored here",
            "wait until this replica has caught up, then try again",
        )
    if not directory.exists():
        directory.mkdir(mode=ARCHIVE_MODE)
        directories.sync(directory.parent)

    def read(first: int, last: int) -> Iterable[LedgerEntry]:
        return seen.read(first, limit=last - first + 1)

    written = archive_from(
        directory, read, cluster_id=seen.cluster_id, last_index=found.size, checkpoint=note, progress=progress
    )
    archive = Archive(directory)
    known = seen.row_at(archive.last_index) if archive.last_index <= seen.applied_index else None
    if known is not None and known != archive.end:
        raise SegmentBroken(directory, f"it ends with entry {archive.last_index}, which differs from the ledger's")
    return written, archive
