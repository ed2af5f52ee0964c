"""Manifest of a source: a file of records, never held in memory as a whole.

Extended attributes and data segments of large files are read during the walk from one open descriptor, at no measurable
cost. For smaller files this would double the cost of the walk (DESIGN.md); their receipt lines only note that they have
attributes.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

import msgspec
import xxhash

from forebay.cluster.agent.files import READ_FLAGS, XATTR_CLASS
from forebay.cluster.agent.transfer.digests import hasher

VALUE_BYTES: Final = 64
"""Attribute values up to this length are stored, bytes; longer ones as a digest."""

ATTRIBUTES_MAX: Final = 64
"""Attributes stored for a file, count; beyond that, their number and one digest. With names of 255 bytes that is 20
KiB, which fits into a frame.
"""

SEGMENTS_MAX: Final = 256
"""Data segments stored for a file, count; beyond that, their number and a digest."""

SEGMENTS_WALKED_MAX: Final = 65_536
"""Data segments searched for, count: about 0.2 s. Files with more are described up to this point."""


class Attribute(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Extended attribute of class `user.`."""

    name: bytes
    size: int
    """Length of the value, bytes."""
    value: bytes
    """Value, or its digest (xxh3-128) if longer than VALUE_BYTES."""


class Extra(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Extended attributes and data segments of one file."""

    attributes: tuple[Attribute, ...] = ()
    """Sorted by name; empty if there are more than ATTRIBUTES_MAX."""
    attributes_count: int = 0
    attributes_digest: bytes = b""
    """Digest over all attributes, if they are not stored."""
    segments: tuple[int, ...] = ()
    """Begin and end of each data segment in sequence; empty if there are more than SEGMENTS_MAX."""
    segments_count: int = 0
    """-1 if holes were not searched for."""
    segments_digest: bytes = b""
    """Digest over all segments, if they are not stored."""

    @property
    def size_bytes(self) -> int:
        """Approximate size in a manifest, bytes."""
        return sum(len(one.name) + len(one.value) + 16 for one in self.attributes) + 9 * len(self.segments) + 64


def extra_of(directory: int, name: bytes, status: os.stat_result, *, xattrs: bool, sparse: bool) -> Extra | None:
    """Return a file's attributes and segments; None if it has none, or cannot be opened, which copying will report.

    `sparse` searches for holes.
    """
    try:
        descriptor = os.open(name, READ_FLAGS, dir_fd=directory)
    except OSError:
        return None
    try:
        found = os.fstat(descriptor)
        if (found.st_dev, found.st_ino, found.st_mode) != (status.st_dev, status.st_ino, status.st_mode):
            return None
        attributes = _attributes(descriptor) if xattrs else []
        if not attributes and not sparse:
            return None
        segments, count, digest = _segments(descriptor, status.st_size) if sparse else ((), -1, b"")
        many = len(attributes) > ATTRIBUTES_MAX
        return Extra(
            attributes=() if many else tuple(attributes),
            attributes_count=len(attributes),
            attributes_digest=xxhash.xxh3_128_digest(msgspec.msgpack.encode(attributes)) if many else b"",
            segments=segments,
            segments_count=count,
            segments_digest=digest,
        )
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _attributes(descriptor: int) -> list[Attribute]:
    try:
        names = sorted(os.fsencode(name) for name in os.listxattr(descriptor) if name.startswith(XATTR_CLASS))
    except OSError:
        # The filesystem has no attributes; copying reports any other error.
        return []
    found = []
    for name in names:
        value = os.getxattr(descriptor, name)
        kept = value if len(value) <= VALUE_BYTES else xxhash.xxh3_128_digest(value)
        found.append(Attribute(name, len(value), kept))
    return found


def _segments(descriptor: int, size_bytes: int) -> tuple[tuple[int, ...], int, bytes]:
    """Return data segments of an open file, their count, and a digest if there are too many."""
    bounds: list[int] = []
    taken = xxhash.xxh3_128()
    count = at = 0
    while at < size_bytes and count < SEGMENTS_WALKED_MAX:
        try:
            begin = os.lseek(descriptor, at, os.SEEK_DATA)
            at = os.lseek(descriptor, begin, os.SEEK_HOLE)
        except OSError as error:
            if error.errno == errno.ENXIO:
                # Only a hole up to the end.
                break
            raise
        count += 1
        taken.update(b"%d-%d," % (begin, at))
        if count <= SEGMENTS_MAX:
            bounds += (begin, at)
    return (tuple(bounds), count, b"") if count <= SEGMENTS_MAX else ((), count, taken.digest())


FRAME_RECORDS: Final = 512
"""Records per frame, count: decoding them individually takes four times as long."""

FRAME_PATH_BYTES: Final = 64 * 1024
"""Bytes of paths after which a frame is closed."""

BLOCK_BYTES: Final = 256 * 1024
"""Bytes read at a time; a frame has FRAME_PATH_BYTES, one more path with attributes, and a hundred bytes per record."""

_INDEX_BITS: Final = 10
"""Bits of a place that select the record in its frame."""

_LENGTH: Final = struct.Struct("<I")

MANIFEST_DIGEST: Final = "xxh3-128"
"""Digest algorithm of manifests, against accidental damage."""

FILE: Final = 0
DIRECTORY: Final = 1
ODD: Final = 2
"""Left out of the transfer."""

LINK: Final = 3
"""Symbolic link that is recreated."""


class ManifestRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """File, directory or link of the source. Sizes are bytes, times nanoseconds since the epoch."""

    index: int
    item: int
    kind: int
    path: bytes
    """Path below the item; empty for the item itself."""
    size: int
    mtime_ns: int
    ctime_ns: int
    mode: int
    inode: int
    device: int
    data_bytes: int
    """Bytes allocated on the source's disk; less than `size` means that it has holes."""
    links: int
    chunk_at: int = -1
    """First mark of a large file in the chunk table; -1 if it is copied as a whole."""
    extra: Extra | None = None
    """Attributes and segments of a large file, if any."""
    target: bytes = b""
    """Text of a link at its destination, or of a link that is left out; for a file or directory, the text of the link
    that was followed to it.
    """
    reason: str = ""
    """Reason for leaving it out, if its kind does not explain it."""

    @property
    def is_large(self) -> bool:
        """True if it is copied in chunks."""
        return self.chunk_at >= 0

    @property
    def is_sparse(self) -> bool:
        """True if the source has holes."""
        return self.data_bytes < self.size

    def lies_in(self, directory: ManifestRecord) -> bool:
        """Return whether it lies below a directory of the same item."""
        beneath = not directory.path or self.path.startswith(directory.path + b"/")
        return self.item == directory.item and beneath

    def is_as(self, other: ManifestRecord) -> bool:
        """Return whether the source is unchanged; device numbers may differ after a reboot."""
        return (self.kind, self.target, self.size, self.mtime_ns, self.ctime_ns, self.inode) == (
            other.kind,
            other.target,
            other.size,
            other.mtime_ns,
            other.ctime_ns,
            other.inode,
        )


class Totals(NamedTuple):
    """Totals of a manifest."""

    records: int = 0
    files: int = 0
    directories: int = 0
    left_out: int = 0
    size_bytes: int = 0
    chunks: int = 0
    manifest_bytes: int = 0
    manifest_digest: bytes = b""


class ManifestWriter:
    """Writes records sequentially. Every method may raise OSError."""

    def __init__(self, descriptor: int) -> None:
        """Begin an empty manifest in the open file."""
        self._descriptor = descriptor
        self._encoder = msgspec.msgpack.Encoder()
        self._frame: list[ManifestRecord] = []
        self._frame_bytes = 0
        self._digest = hasher(MANIFEST_DIGEST)
        self._at = 0
        self.records = self.files = self.directories = self.left_out = self.size_bytes = self.chunks = 0

    def add(self, record: ManifestRecord, chunks: int) -> int:
        """Add a record, whose index must equal the number of earlier ones, and return its place."""
        place = self._at << _INDEX_BITS | len(self._frame)
        self._frame.append(record)
        self._frame_bytes += len(record.path) + len(record.target) + len(record.reason)
        self._frame_bytes += 0 if record.extra is None else record.extra.size_bytes
        self.records += 1
        self.chunks += chunks
        if record.kind == FILE:
            self.files += 1
            self.size_bytes += record.size
        elif record.kind == DIRECTORY:
            self.directories += 1
        elif record.kind == ODD:
            self.left_out += 1
        if len(self._frame) == FRAME_RECORDS or self._frame_bytes >= FRAME_PATH_BYTES:
            self._flush()
        return place

    def seal(self) -> Totals:
        """Make the manifest durable and return its totals."""
        self._flush()
        os.fdatasync(self._descriptor)
        return Totals(
            self.records,
            self.files,
            self.directories,
            self.left_out,
            self.size_bytes,
            self.chunks,
            self._at,
            self._digest.digest(),
        )

    def _flush(self) -> None:
        if not self._frame:
            return
        body = self._encoder.encode(self._frame)
        self._frame, self._frame_bytes = [], 0
        data = _LENGTH.pack(len(body)) + body
        self._digest.update(data)
        view = memoryview(data)
        while view:
            written = os.pwrite(self._descriptor, view, self._at)
            self._at += written
            view = view[written:]


_RECORDS: Final = msgspec.msgpack.Decoder(list[ManifestRecord])


class TransferManifest:
    """Complete manifest, which several processes may read concurrently. Every method may raise OSError."""

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        """Use the open file and its length."""
        self._descriptor = descriptor
        self._end = size_bytes
        self._decoder = _RECORDS
        self._near: tuple[int, list[ManifestRecord]] = -1, []

    def records(self, place: int = 0, count: int | None = None) -> Iterator[ManifestRecord]:
        """Yield `count` records, or all, from a place on."""
        left = count
        for _, frame in self._frames(place):
            if left is not None:
                if left < len(frame):
                    yield from frame[:left]
                    return
                left -= len(frame)
            yield from frame

    def at(self, place: int) -> ManifestRecord:
        """Return the record at a place; records of the same frame are cached."""
        start = place >> _INDEX_BITS << _INDEX_BITS
        if self._near[0] != start:
            self._near = next(self._frames(start))
        return self._near[1][place - start]

    def records_with_places(self) -> Iterator[tuple[int, ManifestRecord]]:
        """Yield all records with their places."""
        for place, frame in self._frames(0):
            yield from enumerate(frame, start=place)

    def _frames(self, place: int) -> Iterator[tuple[int, list[ManifestRecord]]]:
        """Yield each frame's records from a place on, with the place of its first record."""
        at, skipped = place >> _INDEX_BITS, place & (1 << _INDEX_BITS) - 1
        while at < self._end:
            data = os.pread(self._descriptor, min(BLOCK_BYTES, self._end - at), at)
            inside = 0
            while len(data) - inside >= _LENGTH.size:
                start = inside + _LENGTH.size
                length = _LENGTH.unpack_from(data, inside)[0]
                if len(data) - start < length:
                    break
                frame = self._decoder.decode(memoryview(data)[start : start + length])
                yield (at + inside) << _INDEX_BITS | skipped, frame[skipped:] if skipped else frame
                skipped, inside = 0, start + length
            if not inside:
                raise OSError(errno.EIO, "the manifest of a transfer is damaged")
            at += inside
