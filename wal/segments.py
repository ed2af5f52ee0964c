"""Archive segments: ranges of the ledger in separate files, each complete or absent, and read in blocks.

A file consists of MAGIC, the blocks, a manifest as JSON, the manifest's length, and the SHA-256 of everything before. A
block is a zlib stream of raw entries; before each entry stand its term, the revision after it, and its length. The
manifest names the cluster and the chain digests before and after the segment, so a segment can be verified without a
ledger. It also contains the checkpoint that was published when the segment was written, for verifiers that have the
replicas' keys.

The segments of a directory are contiguous and begin with the first entry, as their names show.
"""

import fcntl
import os
import struct
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Final

import msgspec

from forebay.replica.values import Instant
from forebay.wal.codec import CodecError, instant_of
from forebay.wal.ledger import LedgerEntry, SegmentName
from forebay.wal.records import (
    DIGEST_BYTES,
    ENTRY_MAX_BYTES,
    GENESIS,
    PRUNED_SEGMENTS_MAX,
    ChainRow,
    Entry,
    chain_digest,
)

SEGMENT_FORMAT: Final = "forebay-segment/1"
MAGIC: Final = SEGMENT_FORMAT.encode() + b"\n"

SEGMENT_ENTRIES: Final = 65_536
SEGMENT_BYTES: Final = 256 << 20
"""Limits of a segment (entries, data bytes): they bound the work lost by an interruption, and the time to verify."""

BLOCK_ENTRIES: Final = 1024
BLOCK_BYTES: Final = 512 * 1024
"""Limits of a block: entries, and their bytes without the last entry. Reading one entry decompresses its whole block,
which takes milliseconds.
"""

COMPRESSION_LEVEL: Final = 6
"""zlib's default. The next level takes twice the time and saves a twentieth of the space."""

MANIFEST_BYTES_MAX: Final = 4 << 20
"""Limit of a manifest: a row of 160 bytes for each block, and a checkpoint note of 64 KiB."""

READ_BYTES: Final = 1 << 20
"""Bytes read at a time while the SHA-256 of a file is computed."""

_HEAD = struct.Struct(">QQI")
_LENGTH = struct.Struct(">I")
_TAIL_BYTES: Final = _LENGTH.size + DIGEST_BYTES
_UNPACKED_MAX: Final = BLOCK_BYTES + ENTRY_MAX_BYTES + BLOCK_ENTRIES * _HEAD.size
_PART: Final = ".segment.part"


class SegmentBroken(Exception):
    """Broken segment or archive; `path` is the file or directory, `sentence` gives the evidence."""

    def __init__(self, path: Path, sentence: str) -> None:
        super().__init__(f"{path}: {sentence}")
        self.path = path
        self.sentence = sentence


class Block(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Position of a block in the file, and the ledger's row before its first entry."""

    first_index: int
    offset: int
    size_bytes: int
    revision_before: int
    digest_before: str


class SegmentManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Description of a segment. Digests are hexadecimal chain digests before and after the segment's entries."""

    format: str
    cluster_id: str
    first_index: int
    last_index: int
    first_term: int
    last_term: int
    revision_before: int
    revision_after: int
    digest_before: str
    digest_after: str
    first_at: Instant | None
    last_at: Instant | None
    """Clock of the segment's first and last batch; None if the segment has no batch."""
    data_bytes: int
    """Size of the segment's entries in the ledger, bytes."""
    checkpoint: str
    """Checkpoint note published when the segment was written; covers at least the segment's entries."""
    blocks: tuple[Block, ...]

    @property
    def name(self) -> SegmentName:
        """Name of the segment's file."""
        return SegmentName(self.first_index, self.last_index)

    @property
    def before(self) -> ChainRow:
        """Digest and revision before the first entry."""
        return ChainRow(bytes.fromhex(self.digest_before), self.revision_before)

    @property
    def after(self) -> ChainRow:
        """Digest and revision after the last entry."""
        return ChainRow(bytes.fromhex(self.digest_after), self.revision_after)


class SegmentDisk:
    """System calls that change a disk, in a class so that tests can make each fail. Methods raise OSError."""

    def create(self, directory: int, name: str) -> int:
        """Create a file that only its owner can read."""
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=directory)
        return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=directory)

    def write(self, file: int, data: bytes) -> None:
        """Write all of `data`."""
        left = memoryview(data)
        while left:
            left = left[os.write(file, left) :]

    def sync(self, file: int) -> None:
        """Make the content of a file, or the names in a directory, durable."""
        os.fsync(file)

    def rename(self, directory: int, old: str, new: str) -> None:
        """Rename a file."""
        os.rename(old, new, src_dir_fd=directory, dst_dir_fd=directory)


DISK: Final = SegmentDisk()


def _write_segment(
    directory: Path,
    folder: int,
    following: int,
    entries: Iterable[LedgerEntry],
    before: ChainRow,
    *,
    cluster_id: str,
    checkpoint: str,
    disk: SegmentDisk = DISK,
) -> SegmentManifest:
    """Write as many entries as one segment may hold; return the manifest once the segment would survive a power cut.

    `following` is the index of the first entry, `before` the digest and revision before it, `folder` the directory's
    descriptor. Leftovers of a crash are overwritten.

    Raises:
        OSError: The disk fails.
        SegmentBroken: The entries are not contiguous.
    """
    file = disk.create(folder, _PART)
    try:
        manifest = _fill(directory, file, following, entries, before, cluster_id, checkpoint, disk)
        disk.sync(file)
    finally:
        os.close(file)
    disk.rename(folder, _PART, str(manifest.name))
    disk.sync(folder)
    return manifest


def _fill(
    directory: Path,
    file: int,
    following: int,
    entries: Iterable[LedgerEntry],
    before: ChainRow,
    cluster_id: str,
    checkpoint: str,
    disk: SegmentDisk,
) -> SegmentManifest:
    digest = sha256(MAGIC)
    disk.write(file, MAGIC)
    offset, data_bytes, row = len(MAGIC), 0, before
    blocks: list[Block] = []
    first = last = None
    first_at: Instant | None = None
    last_at: Instant | None = None
    for block in _in_blocks(entries):
        start, packed = row, bytearray()
        for entry in block:
            if entry.index != following:
                raise SegmentBroken(directory, f"the archive needs entry {following}, which this ledger lacks")
            after = chain_digest(row.digest, Entry(entry.index, entry.term, entry.data))
            if after != entry.digest or entry.base != row.revision:
                raise SegmentBroken(directory, f"entry {entry.index} does not continue the archive's last entry")
            following += 1
            packed += _HEAD.pack(entry.term, entry.revision, len(entry.data)) + entry.data
            data_bytes += len(entry.data)
            row, last, first = ChainRow(after, entry.revision), entry, first or entry
            at = _instant(entry.data)
            first_at, last_at = (at if first_at is None else first_at), (last_at if at is None else at)
        body = zlib.compress(packed, COMPRESSION_LEVEL)
        blocks.append(Block(block[0].index, offset, len(body), start.revision, start.digest.hex()))
        digest.update(body)
        disk.write(file, body)
        offset += len(body)
        if last is not None and first is not None and _is_full(first.index, last.index, data_bytes):
            break
    if first is None or last is None:
        raise SegmentBroken(directory, "there are no entries to write")
    manifest = SegmentManifest(
        format=SEGMENT_FORMAT,
        cluster_id=cluster_id,
        first_index=first.index,
        last_index=last.index,
        first_term=first.term,
        last_term=last.term,
        revision_before=before.revision,
        revision_after=row.revision,
        digest_before=before.digest.hex(),
        digest_after=row.digest.hex(),
        first_at=first_at,
        last_at=last_at,
        data_bytes=data_bytes,
        checkpoint=checkpoint,
        blocks=tuple(blocks),
    )
    tail = msgspec.json.encode(manifest)
    tail += _LENGTH.pack(len(tail))
    digest.update(tail)
    disk.write(file, tail + digest.digest())
    return manifest


def _is_full(first: int, last: int, data_bytes: int) -> bool:
    return last - first + 1 > SEGMENT_ENTRIES - BLOCK_ENTRIES or data_bytes >= SEGMENT_BYTES


def _in_blocks(entries: Iterable[LedgerEntry]) -> Iterator[list[LedgerEntry]]:
    block: list[LedgerEntry] = []
    size_bytes = 0
    for entry in entries:
        block.append(entry)
        size_bytes += len(entry.data)
        if len(block) == BLOCK_ENTRIES or size_bytes >= BLOCK_BYTES:
            yield block
            block, size_bytes = [], 0
    if block:
        yield block


def _instant(data: bytes) -> Instant | None:
    try:
        return instant_of(data)
    except CodecError:
        return None


class Segment:
    """Segment that is read. Opening reads the manifest; other content is verified on request."""

    def __init__(self, path: Path) -> None:
        """Read the manifest.

        Raises:
            SegmentBroken: The manifest is damaged, or the file cannot be read.
        """
        self.path = path
        name = SegmentName.parse(path.name)
        with _refusing(path), path.open("rb") as file:
            self.size_bytes = os.fstat(file.fileno()).st_size
            if self.size_bytes < len(MAGIC) + _TAIL_BYTES or file.read(len(MAGIC)) != MAGIC:
                raise SegmentBroken(path, "the file is not a segment, or is truncated")
            file.seek(self.size_bytes - _TAIL_BYTES)
            tail = file.read(_TAIL_BYTES)
            (length,) = _LENGTH.unpack(tail[: _LENGTH.size])
            self.body_end = self.size_bytes - _TAIL_BYTES - length
            if length > MANIFEST_BYTES_MAX or self.body_end < len(MAGIC):
                raise SegmentBroken(path, f"a manifest of {length} bytes does not fit into the file")
            file.seek(self.body_end)
            body = file.read(length)
        self.sha256: Final = tail[_LENGTH.size :]
        """SHA-256 stored at the end of the file; covers the rest of the file."""
        try:
            self.manifest: Final = _decoder.decode(body)
        except (msgspec.MsgspecError, UnicodeError) as error:
            raise SegmentBroken(path, f"its manifest cannot be read: {error}") from error
        self._check_manifest(name)

    def _check_manifest(self, name: SegmentName | None) -> None:
        manifest, path = self.manifest, self.path
        if manifest.format != SEGMENT_FORMAT:
            raise SegmentBroken(
                path, f"the segment has the format {manifest.format[:40]!r}; this release reads {SEGMENT_FORMAT!r}"
            )
        if manifest.name != name or not 0 < manifest.first_index <= manifest.last_index:
            raise SegmentBroken(path, f"its manifest lists the entries {manifest.first_index} to {manifest.last_index}")
        firsts = [block.first_index for block in manifest.blocks]
        places = [(block.offset, block.offset + block.size_bytes) for block in manifest.blocks]
        ends = [len(MAGIC), *(end for _, end in places)]
        digests = [manifest.digest_before, manifest.digest_after, *(block.digest_before for block in manifest.blocks)]
        if (
            firsts[:1] != [manifest.first_index]
            or any(
                one >= following for one, following in zip(firsts, [*firsts[1:], manifest.last_index + 1], strict=True)
            )
            or [begin for begin, _ in places] != ends[:-1]
            or ends[-1] != self.body_end
            or not all(_is_digest(one) for one in digests)
            or manifest.blocks[0].digest_before != manifest.digest_before
            or manifest.blocks[0].revision_before != manifest.revision_before
        ):
            raise SegmentBroken(path, "its manifest lacks the positions or contents of its blocks")

    def check_bytes(self) -> None:
        """Compute the SHA-256 of the file.

        Raises:
            SegmentBroken: The hash differs from the stored hash.
        """
        digest, left = sha256(), self.size_bytes - DIGEST_BYTES
        with _refusing(self.path), self.path.open("rb") as file:
            while left and (data := file.read(min(left, READ_BYTES))):
                digest.update(data)
                left -= len(data)
        if left or digest.digest() != self.sha256:
            raise SegmentBroken(self.path, f"the file has SHA-256 {digest.hexdigest()} instead of {self.sha256.hex()}")

    def block(self, number: int) -> list[LedgerEntry]:
        """Return the entries of a block, verified against the digests before and after the block.

        Raises:
            SegmentBroken: The block is damaged.
        """
        blocks, path = self.manifest.blocks, self.path
        row, end = blocks[number], self.manifest.after
        last = self.manifest.last_index
        if number + 1 < len(blocks):
            following = blocks[number + 1]
            end, last = (
                ChainRow(bytes.fromhex(following.digest_before), following.revision_before),
                following.first_index - 1,
            )
        with _refusing(path), path.open("rb") as file:
            file.seek(row.offset)
            body = file.read(row.size_bytes)
        place = f"its entries {row.first_index} to {last}"
        try:
            unpacking = zlib.decompressobj()
            held = unpacking.decompress(body, _UNPACKED_MAX)
        except zlib.error as error:
            raise SegmentBroken(path, f"{place} cannot be decompressed: {error}") from error
        if unpacking.unconsumed_tail or not unpacking.eof or unpacking.unused_data:
            raise SegmentBroken(path, f"{place} do not decompress to a block")
        found = list(self._unpacked(held, row))
        after = ChainRow(found[-1].digest, found[-1].revision) if found else None
        if after != end or found[-1].index != last:
            raise SegmentBroken(path, f"{place} do not match the digest after them")
        return found

    def _unpacked(self, held: bytes, row: Block) -> Iterator[LedgerEntry]:
        before, at = ChainRow(bytes.fromhex(row.digest_before), row.revision_before), 0
        for index in range(row.first_index, row.first_index + BLOCK_ENTRIES):
            if at == len(held):
                return
            body = at + _HEAD.size
            if body > len(held):
                break
            term, revision, size_bytes = _HEAD.unpack_from(held, at)
            at = body + size_bytes
            if at > len(held) or revision < before.revision:
                break
            data = held[body:at]
            after = ChainRow(chain_digest(before.digest, Entry(index, term, data)), revision)
            yield LedgerEntry(index, term, data, after.digest, before.revision, revision)
            before = after
        if at != len(held):
            raise SegmentBroken(self.path, f"its block of entry {row.first_index} has an incomplete entry")

    def number_of(self, index: int) -> int:
        """Return the number of the block with this entry."""
        return bisect_right(self.manifest.blocks, index, key=_first_of_block) - 1


def _first_of_block(block: Block) -> int:
    return block.first_index


def _is_digest(text: str) -> bool:
    try:
        return len(bytes.fromhex(text)) == DIGEST_BYTES and len(text) == 2 * DIGEST_BYTES
    except ValueError:
        return False


@contextmanager
def _refusing(path: Path) -> Iterator[None]:
    """Convert system errors into SegmentBroken with the path."""
    try:
        yield
    except OSError as error:
        raise SegmentBroken(path, f"cannot be read ({error.strerror or error})") from error


_decoder: Final = msgspec.json.Decoder(SegmentManifest)

BLOCKS_KEPT: Final = 8
"""Number of decompressed blocks in the cache: some megabytes. Consecutive requests often need the same block."""


class Archive:
    """Read-only view of the segments in a directory, in the order of their entries."""

    def __init__(self, directory: Path) -> None:
        """Read the manifests.

        Raises:
            SegmentBroken: A segment is broken, missing or of another cluster.
        """
        self.directory = directory
        names = _names_in(directory)
        if len(names) > PRUNED_SEGMENTS_MAX:
            raise SegmentBroken(directory, f"it has {len(names)} segments; the maximum is {PRUNED_SEGMENTS_MAX}")
        self.segments: Final = tuple(Segment(directory / str(name)) for name in names)
        self._check_order()
        self._firsts = [segment.manifest.first_index for segment in self.segments]
        self._revisions = [segment.manifest.revision_before for segment in self.segments]
        self._block = lru_cache(BLOCKS_KEPT)(self._read_block)

    def _check_order(self) -> None:
        before, following = ChainRow(GENESIS, 0), 1
        term, cluster = 0, ""
        for segment in self.segments:
            manifest = segment.manifest
            if cluster and manifest.cluster_id != cluster:
                raise SegmentBroken(
                    segment.path, f"the segment belongs to cluster {manifest.cluster_id}, earlier ones to {cluster}"
                )
            if manifest.first_index != following:
                least = SegmentName(following, manifest.first_index - 1)
                raise SegmentBroken(
                    self.directory,
                    f"the segments of entries {least.first_index} to {least.last_index} are missing"
                    if manifest.first_index > following
                    else f"{segment.path.name} has entries that another segment also has",
                )
            if manifest.before != before or manifest.first_term < term:
                raise SegmentBroken(
                    segment.path, "the segment does not continue the digest, revision and term of the previous segment"
                )
            before, following = manifest.after, manifest.last_index + 1
            term, cluster = manifest.last_term, manifest.cluster_id

    @property
    def cluster_id(self) -> str:
        """ID of the cluster whose history is archived; empty if there is no segment."""
        return self.segments[0].manifest.cluster_id if self.segments else ""

    @property
    def last_index(self) -> int:
        """Index of the last archived entry; 0 if there is none."""
        return self.segments[-1].manifest.last_index if self.segments else 0

    @property
    def end(self) -> ChainRow:
        """Digest and revision after the last archived entry."""
        return self.segments[-1].manifest.after if self.segments else ChainRow(GENESIS, 0)

    def read_some(self, first: int, *, entries_max: int, bytes_max: int) -> list[LedgerEntry]:
        """Return entries from `first` on, in order, up to one of the bounds, but at least one if it exists.

        Raises:
            SegmentBroken: A segment is broken or missing.
        """
        found: list[LedgerEntry] = []
        size_bytes = 0
        while len(found) < entries_max and size_bytes < bytes_max and first + len(found) <= self.last_index:
            for entry in self._of(first + len(found)):
                found.append(entry)
                size_bytes += len(entry.data)
                if len(found) == entries_max or size_bytes >= bytes_max:
                    break
        return found

    def row_at(self, index: int) -> ChainRow:
        """Return digest and revision after an archived entry, or before the first one.

        Raises:
            SegmentBroken: A segment is broken or missing.
        """
        if index == 0:
            return ChainRow(GENESIS, 0)
        entry = self._of(index)[0]
        return ChainRow(entry.digest, entry.revision)

    def index_of_revision(self, revision: int) -> int:
        """Return the index of the entry that settled a revision.

        Raises:
            LookupError: The entry is not archived.
            SegmentBroken: A segment is broken.
        """
        if not 0 < revision <= self.end.revision:
            raise LookupError(f"revision {revision} is not in {self.directory}, which ends with {self.end.revision}")
        # An entry that settles nothing repeats the revision before it. Take the last segment and the last block that
        # begin below `revision`.
        number = _last_before(self._revisions, revision)
        blocks = self.segments[number].manifest.blocks
        block = _last_before([one.revision_before for one in blocks], revision)
        for entry in self._block(number, block):
            if entry.base < revision <= entry.revision:
                return entry.index
        raise SegmentBroken(self.segments[number].path, f"no entry of this segment settled revision {revision}")

    def entries(self, first: int = 1) -> Iterator[LedgerEntry]:
        """Yield all entries from `first` on, block by block.

        Raises:
            SegmentBroken: A segment is broken or missing.
        """
        while first <= self.last_index:
            block = self._of(first)
            yield from block
            first = block[-1].index + 1

    def _of(self, index: int) -> Sequence[LedgerEntry]:
        """Return the entries from `index` to the end of its block."""
        number = bisect_right(self._firsts, index) - 1
        segment = self.segments[number]
        block = segment.number_of(index)
        return self._block(number, block)[index - segment.manifest.blocks[block].first_index :]

    def _read_block(self, number: int, block: int) -> list[LedgerEntry]:
        return self.segments[number].block(block)


def _last_before(revisions: Sequence[int], revision: int) -> int:
    return bisect_right(revisions, revision - 1) - 1


def _names_in(directory: Path) -> list[SegmentName]:
    try:
        found = sorted(name for one in os.scandir(directory) if (name := SegmentName.parse(one.name)) is not None)
    except FileNotFoundError as error:
        raise SegmentBroken(directory, "the directory does not exist") from error
    except OSError as error:
        raise SegmentBroken(directory, f"the directory cannot be read ({error.strerror})") from error
    return found


def archive_from(
    directory: Path,
    read: Callable[[int, int], Iterable[LedgerEntry]],
    *,
    cluster_id: str,
    last_index: int,
    checkpoint: str,
    progress: Callable[[int, int], None],
    disk: SegmentDisk = DISK,
) -> list[SegmentManifest]:
    """Write the segments that an archive lacks up to an entry; return their manifests.

    `read(first, last)` yields entries of the ledger, both ends included. Writing continues after the last complete
    segment.

    Raises:
        SegmentBroken: The archive is broken or belongs to another ledger.
        BlockingIOError: Another process is writing the archive.
        OSError: The disk fails.
    """
    folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        archive = Archive(directory)
        if archive.segments and archive.cluster_id != cluster_id:
            raise SegmentBroken(
                directory, f"the archive belongs to cluster {archive.cluster_id}, but the ledger to {cluster_id}"
            )
        row, following = archive.end, archive.last_index + 1
        written: list[SegmentManifest] = []
        while following <= last_index:
            entries = read(following, last_index)
            manifest = _write_segment(
                directory, folder, following, entries, row, cluster_id=cluster_id, checkpoint=checkpoint, disk=disk
            )
            written.append(manifest)
            row, following = manifest.after, manifest.last_index + 1
            progress(manifest.last_index, last_index)
        return written
    finally:
        os.close(folder)
