"""Verification of an archive against itself and the replicas' signatures, without a live ledger.

Every byte is read: each file is compared with its SHA-256, each entry with the digest chain, and each revision with the
contents of its entry. The tree is rebuilt from the entries and compared with the root of each checkpoint in the
segments. If the replicas' keys are given, the valid signatures of each checkpoint are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from forebay.cluster.security.proofs import (
    Checkpoint,
    NoteError,
    RightEdge,
    UnsignedNoteError,
    VerifierKey,
    leaf_hash,
    parse_checkpoint,
    parse_key,
    parse_note,
    verify_note,
)
from forebay.cluster.security.proofs.notes import NOTE_KEY
from forebay.cluster.server.tlog import disclosure_key_in, leaf_of_entry, origin_of, parse_origin
from forebay.replica.messages import ClusterRecovered
from forebay.wal import (
    FIRST_INCARNATION,
    KEPT_ENTRIES,
    Archive,
    ChangeKind,
    CodecError,
    Incarnation,
    LedgerEntry,
    Segment,
    SegmentBroken,
    counted_revision_after,
    decode_batch,
    decode_configuration,
    instant_of,
    is_configuration,
)

Progress = Callable[[int, int], None]

PROGRESS_ENTRIES = 4096
"""Number of entries between two progress reports."""


class Keys(NamedTuple):
    """Keys with which replicas sign checkpoints, as printed by `forebay audit keys`; `place` is their file.

    Each incarnation of a cluster has its own keys, so a majority counts only the keys with a checkpoint's origin.
    """

    place: Path
    known: tuple[VerifierKey, ...]

    def of(self, origin: str) -> tuple[VerifierKey, ...]:
        """Return the keys that sign checkpoints of an origin."""
        return tuple(key for key in self.known if key.name == origin)

    def majority(self, origin: str) -> int:
        """Return the number of keys that form a majority of an origin's keys; 1 if no key is known."""
        return len(self.of(origin)) // 2 + 1


class VerifiedArchive(NamedTuple):
    """Result of verifying an archive.

    `roots` counts the checkpoints whose root matches the entries, `later` those that cover more entries than the
    archive has. `signed` counts the checkpoints in `roots` with a majority of signatures, and `signed_size` the entries
    that the largest of these covers. Only the digest chain protects entries after `signed_size`.
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
    signed_size: int


def read_keys(path: Path, cluster_id: str) -> Keys:
    """Return the replicas' keys in a file, one on each line, of any incarnation of the cluster.

    Raises:
        NoteError: a key belongs to another cluster, or no key belongs to a replica.
        OSError: the file cannot be read.
    """
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    found = tuple(dict.fromkeys(parse_key(line) for line in lines if line and not line.startswith("#")))
    of_replicas = tuple(key for key in found if key.kind == NOTE_KEY)
    for key in of_replicas:
        origin = parse_origin(key.name)
        if origin is None or origin[0] != cluster_id:
            raise NoteError(f"it contains a key of {key.name}, but the ledger belongs to {origin_of(cluster_id)}")
    if not of_replicas:
        raise NoteError("it contains no key of a replica")
    return Keys(path, of_replicas)


def signers_of(note: str, keys: Keys) -> int:
    """Return how many of its origin's keys signed a checkpoint.

    Raises:
        NoteError: A signature is false.
    """
    origin = parse_checkpoint(parse_note(note.encode())[0]).origin
    try:
        return len(verify_note(note.encode(), keys.of(origin))[1])
    except UnsignedNoteError:
        return 0


def verify_archive(
    archive: Archive,
    *,
    keys: Keys | None = None,
    following: Iterable[LedgerEntry] = (),
    progress: Progress | None = None,
) -> VerifiedArchive:
    """Check a whole archive.

    `following`: ledger entries that continue it, for checkpoints that cover more than the archive.

    Raises:
        SegmentBroken: The first fault found.
    """
    for segment in archive.segments:
        segment.check_bytes()
        if progress is not None:
            progress(0, archive.last_index)
    notes, lineage = _Notes(archive, keys), _Lineage(archive.directory)
    tree = _Tree(archive.directory, _key_of(archive))
    term = 0
    for segment in archive.segments:
        for entry in _checked(archive, segment, term, progress):
            tree.append(entry)
            lineage.follow(entry)
            notes.reached(tree, lineage)
        term = segment.manifest.last_term
    for entry in following:
        if not notes.left:
            break
        if entry.index != tree.size + 1:
            break
        tree.append(entry)
        lineage.follow(entry)
        notes.reached(tree, lineage)
    notes.check_origins(lineage)
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
        later=sum(map(len, notes.left.values())),
        signed=notes.signed,
        signed_size=notes.signed_size,
    )


def verify_stretch(archive: Archive, first: int, last: int, progress: Progress | None = None) -> None:
    """Check the segments that contain the entries `first` to `last`, each as a whole.

    Raises:
        SegmentBroken: The first fault found.
    """
    for segment in archive.segments:
        if segment.manifest.last_index < first or segment.manifest.first_index > last:
            continue
        segment.check_bytes()
        for _ in _checked(archive, segment, 0, progress):
            pass


class _Tree:
    """Merkle tree that computes roots only; without the key that salts the leaves it has no root."""

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
            self._edge.append(leaf_hash(leaf_of_entry(self._key, entry).encode()))
        except CodecError as error:
            raise SegmentBroken(self._directory, f"entry {entry.index} cannot be read: {error}") from error

    def root(self) -> bytes | None:
        return None if self._key is None else self._edge.root()


class _Lineage:
    """Incarnations of a cluster recorded in its ledger, oldest first."""

    def __init__(self, directory: Path) -> None:
        self.reached = [FIRST_INCARNATION]
        self._directory = directory
        self._begins = False

    def follow(self, entry: LedgerEntry) -> None:
        """Record a new incarnation if the entry starts one.

        Such an entry follows the configuration with one survivor.
        """
        try:
            if is_configuration(entry.data):
                self._begins = decode_configuration(entry.data).change.action is ChangeKind.RECOVER
                return
            if not self._begins:
                return
            self._begins = False
            commands = decode_batch(entry.data).entries
        except CodecError as error:
            raise SegmentBroken(self._directory, f"entry {entry.index} cannot be read: {error}") from error
        for event in (event for command in commands for event in command.events):
            if isinstance(event, ClusterRecovered):
                self.reached.append(Incarnation(event.recovery.incarnation, event.recovery.mark))


class _Note(NamedTuple):
    """Checkpoint in a segment of an archive."""

    found: Checkpoint
    incarnation: Incarnation
    text: str
    path: Path


class _Notes:
    """Checkpoints in an archive's segments, by size, and the subset that matches the entries."""

    def __init__(self, archive: Archive, keys: Keys | None) -> None:
        self.left: dict[int, dict[str, _Note]] = {}
        self.roots = self.signed = self.signed_size = 0
        self._keys = keys
        self._numbers: list[tuple[_Note, int]] = []
        """Confirmed checkpoints, each with the number of the incarnation of its last entry."""
        for segment in archive.segments:
            note = segment.manifest.checkpoint
            try:
                found = parse_checkpoint(parse_note(note.encode())[0])
            except NoteError as error:
                raise SegmentBroken(segment.path, f"its checkpoint cannot be read: {error}") from error
            origin = parse_origin(found.origin)
            if origin is None or origin[0] != segment.manifest.cluster_id or found.size < segment.manifest.last_index:
                raise SegmentBroken(
                    segment.path,
                    f"its checkpoint, of {found.size} entries of {found.origin}, does not cover its entries",
                )
            self.left.setdefault(found.size, {})[note] = _Note(found, origin[1], note, segment.path)

    def reached(self, tree: _Tree, lineage: _Lineage) -> None:
        if tree.size not in self.left:
            return
        root = tree.root()
        if root is None:
            return
        for note in self.left.pop(tree.size).values():
            if root != note.found.root:
                raise SegmentBroken(
                    note.path,
                    f"its checkpoint does not match its entries: the first {tree.size} have root {root.hex()[:16]}",
                )
            self.roots += 1
            self._numbers.append((note, lineage.reached[-1].number))
            # Replaced replicas had other keys, so former signers may be unknown.
            if self._keys is not None and self._is_signed(note, self._keys):
                self.signed += 1
                self.signed_size = tree.size

    def _is_signed(self, note: _Note, keys: Keys) -> bool:
        try:
            return signers_of(note.text, keys) >= keys.majority(note.found.origin)
        except NoteError as error:
            raise SegmentBroken(note.path, f"the signatures of its checkpoint cannot be verified: {error}") from error

    def check_origins(self, lineage: _Lineage) -> None:
        """Reject a checkpoint of an incarnation that is not recorded, or that ended before the checkpoint's last entry.

        A checkpoint of an incarnation that starts after the last archived entry is accepted.
        """
        last = lineage.reached[-1].number
        unreached = [(note, last) for notes in self.left.values() for note in notes.values()]
        for note, number in [*self._numbers, *unreached]:
            mine = note.incarnation
            if mine.number < number or (mine.number <= last and mine not in lineage.reached):
                raise SegmentBroken(
                    note.path,
                    f"its checkpoint of {note.found.size} entries belongs to {note.found.origin}; the entries record "
                    f"the incarnations {', '.join(map(str, lineage.reached))}",
                )


def _checked(archive: Archive, segment: Segment, term: int, progress: Progress | None) -> Iterable[LedgerEntry]:
    """Yield the entries of a segment, checked against its digests and revisions.

    The preceding entry has term `term`.
    """
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
        raise SegmentBroken(segment.path, "its terms, times or size differ from its manifest")


def _check_entry(path: Path, entry: LedgerEntry, term: int) -> None:
    if entry.term < term:
        raise SegmentBroken(path, f"entry {entry.index} has term {entry.term}, after term {term}")
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
