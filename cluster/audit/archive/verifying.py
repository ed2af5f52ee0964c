"""An archive held against itself and against what replicas have signed, without a live ledger.

Every byte is read: each file against its SHA-256, each entry against the chain, the revisions against what the entries
settle. Leaves are derived on the way, as the tree of the ledger has them, so that the root of each checkpoint that the
segments carry is compared with what the entries come to; who knows the replicas' keys has its signatures counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from cluster.security.proofs import (
    Checkpoint,
    NoteRefused,
    RightEdge,
    VerifierKey,
    leaf_hash,
    parse_checkpoint,
    parse_key,
    parse_note,
    verify_note,
)
from cluster.security.proofs.notes import NOTE_KEY
from cluster.server.tlog import disclosure_key_in, leaf_of_entry, origin_of
from wal import (
    KEPT_ENTRIES,
    Archive,
    CodecError,
    LedgerEntry,
    Segment,
    SegmentBroken,
    counted_revision_after,
    instant_of,
)

Progress = Callable[[int, int], None]

PROGRESS_ENTRIES = 4096
"""Entries between two reports of progress, count."""


class Keys(NamedTuple):
    """The keys that replicas sign checkpoints with, as `forebay ledger keys` prints them; `place` is their file."""

    place: Path
    known: tuple[VerifierKey, ...]

    @property
    def majority(self) -> int:
        """How many of them are one."""
        return len(self.known) // 2 + 1


class VerifiedArchive(NamedTuple):
    """What an archive was found to hold. `roots`: checkpoints whose root its entries come to; `later`: the others.

    `signed`: of the first, those that a majority of the keys that were given has signed.
    """

    segments: int
    entries: int
    last_index: int
    revision: int
    digest: bytes
    data_bytes: int
    size_bytes: int
    roots: int
    later: int
    signed: int


def read_keys(path: Path, cluster_id: str) -> Keys:
    """Return the keys of a file, one a line. NoteRefused for one that is no key of a replica of it; OSError."""
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    found = tuple(dict.fromkeys(parse_key(line) for line in lines if line and not line.startswith("#")))
    of_replicas = tuple(key for key in found if key.kind == NOTE_KEY)
    for key in of_replicas:
        if key.name != origin_of(cluster_id):
            raise NoteRefused(f"it has a key of {key.name}, and the ledger is of {origin_of(cluster_id)}")
    if not of_replicas:
        raise NoteRefused("it has no key of a replica")
    return Keys(path, of_replicas)


def signers_of(note: str, keys: Keys) -> int:
    """Return how many of these keys have signed a note; NoteRefused where a signature is false."""
    parse_note(note.encode())
    try:
        return len(verify_note(note.encode(), keys.known)[1])
    except NoteRefused as error:
        if "no key that is known" in str(error):
            return 0
        raise


def verify_archive(
    archive: Archive,
    *,
    keys: Keys | None = None,
    following: Iterable[LedgerEntry] = (),
    progress: Progress | None = None,
) -> VerifiedArchive:
    """Check all of an archive. SegmentBroken where something of it is not what it must be.

    `following`: entries of a ledger that go on behind it, for checkpoints that cover more than it has.
    """
    for segment in archive.segments:
        segment.check_bytes()
        if progress is not None:
            progress(0, archive.last_index)
    notes = _Notes(archive, keys)
    tree = _Tree(archive.directory, _key_of(archive))
    term = 0
    for segment in archive.segments:
        for entry in _checked(archive, segment, term, progress):
            tree.append(entry)
            notes.reached(tree)
        term = segment.manifest.last_term
    for entry in following:
        if not notes.left:
            break
        if entry.index != tree.size + 1:
            break
        tree.append(entry)
        notes.reached(tree)
    manifests = [segment.manifest for segment in archive.segments]
    return VerifiedArchive(
        segments=len(manifests),
        entries=archive.last_index,
        last_index=archive.last_index,
        revision=archive.end.revision,
        digest=archive.end.digest,
        data_bytes=sum(manifest.data_bytes for manifest in manifests),
        size_bytes=sum(segment.size_bytes for segment in archive.segments),
        roots=notes.roots,
        later=len(notes.left),
        signed=notes.signed,
    )


def verify_stretch(archive: Archive, first: int, last: int, progress: Progress | None = None) -> None:
    """Check the segments that have the entries `first` to `last`, each whole; SegmentBroken."""
    for segment in archive.segments:
        if segment.manifest.last_index < first or segment.manifest.first_index > last:
            continue
        segment.check_bytes()
        for _ in _checked(archive, segment, 0, progress):
            pass


class _Tree:
    """The tree of a ledger, as far as a root needs it; none where no key was drawn that leaves are salted with."""

    def __init__(self, directory: Path, key: bytes | None) -> None:
        self._directory = directory
        self._key = key
        self._edge = RightEdge()
        self.size = 0

    def append(self, entry: LedgerEntry) -> None:
        self.size += 1
        if self._key is None:
            return
        try:
            self._edge.append(leaf_hash(leaf_of_entry(self._key, entry).encoded()))
        except CodecError as error:
            raise SegmentBroken(self._directory, f"entry {entry.index} cannot be read: {error}") from error

    def root(self) -> bytes | None:
        return None if self._key is None else self._edge.root()


class _Notes:
    """The checkpoints that the segments of an archive carry, by size, and which of them its entries come to."""

    def __init__(self, archive: Archive, keys: Keys | None) -> None:
        self.left: dict[int, tuple[Checkpoint, str, Path]] = {}
        self.roots = self.signed = 0
        self._keys = keys
        for segment in archive.segments:
            note = segment.manifest.checkpoint
            try:
                found = parse_checkpoint(parse_note(note.encode())[0])
            except NoteRefused as error:
                raise SegmentBroken(segment.path, f"its checkpoint cannot be read: {error}") from error
            if found.origin != origin_of(segment.manifest.cluster_id) or found.size < segment.manifest.last_index:
                raise SegmentBroken(
                    segment.path,
                    f"its checkpoint, of {found.size} entries of {found.origin}, does not cover its entries",
                )
            self.left[found.size] = found, note, segment.path

    def reached(self, tree: _Tree) -> None:
        if tree.size not in self.left:
            return
        root = tree.root()
        if root is None:
            return
        found, note, path = self.left.pop(tree.size)
        if root != found.root:
            raise SegmentBroken(
                path, f"its checkpoint is not of these entries: the root of the first {found.size} is {root.hex()[:16]}"
            )
        self.roots += 1
        if self._keys is None:
            return
        try:
            signers = signers_of(note, self._keys)
        except NoteRefused as error:
            raise SegmentBroken(path, f"its checkpoint is not believed: {error}") from error
        # Keys of replicas that were replaced since are others: who signed then may be known no more.
        self.signed += signers >= self._keys.majority


def _checked(archive: Archive, segment: Segment, term: int, progress: Progress | None) -> Iterable[LedgerEntry]:
    """Yield the entries of a segment, after one of `term`: they lead to what it says, and settle what it says."""
    manifest, data_bytes = segment.manifest, 0
    first_term = first_at = last_at = None
    for number in range(len(manifest.blocks)):
        for entry in segment.block(number):
            _check_entry(segment.path, entry, term)
            at = instant_of(entry.data)
            first_at, last_at = (at if first_at is None else first_at), (last_at if at is None else at)
            first_term = entry.term if first_term is None else first_term
            term, data_bytes = entry.term, data_bytes + len(entry.data)
            yield entry
            if progress is not None and not entry.index % PROGRESS_ENTRIES:
                progress(entry.index, archive.last_index)
    found = (first_term, term, data_bytes, first_at, last_at)
    said = (manifest.first_term, manifest.last_term, manifest.data_bytes, manifest.first_at, manifest.last_at)
    if found != said:
        raise SegmentBroken(segment.path, "its terms, its times or its size are not what its manifest says")


def _check_entry(path: Path, entry: LedgerEntry, term: int) -> None:
    if entry.term < term:
        raise SegmentBroken(path, f"entry {entry.index} is of term {entry.term}, after {term}")
    try:
        revision = counted_revision_after(entry.data, entry.base)
    except CodecError as error:
        raise SegmentBroken(path, f"entry {entry.index} cannot be read: {error}") from error
    if revision != entry.revision:
        raise SegmentBroken(
            path, f"entry {entry.index} leads to revision {revision}; {entry.revision} is recorded for it"
        )


def _key_of(archive: Archive) -> bytes | None:
    first: Sequence[LedgerEntry] = archive.read_some(1, entries_max=KEPT_ENTRIES, bytes_max=2**40)
    try:
        return disclosure_key_in(first)
    except CodecError as error:
        raise SegmentBroken(archive.directory, f"its first entries cannot be read: {error}") from error
