"""What a source holds, as a file of records: as many as there are, never in memory.

What large files have besides their contents, extended attributes and where their data lies between holes, is taken at
the walk from one open descriptor, which costs a file that is copied in chunks nothing that could be measured. Of
smaller ones it would cost as much again as the look at each file itself (DESIGN.md); their receipt lines say that they
had attributes."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

import msgspec
import xxhash

from cluster.agent.files import READ_FLAGS, XATTR_CLASS
from cluster.agent.transfer.digests import hasher

VALUE_BYTES: Final = 64
"""Values of attributes up to this length are kept as they are, bytes; of longer ones their digest is."""

ATTRIBUTES_MAX: Final = 64
"""Attributes of a file that are kept, count; of more their number and one digest are. With names of 255 bytes that is
20 KiB, which a frame of the manifest has room for."""

SEGMENTS_MAX: Final = 256
"""Segments of data of a file that are kept, count; of more their number and a digest are."""

SEGMENTS_WALKED_MAX: Final = 65_536
"""Segments of data that are looked for, count: about 0.2 s. A file with more is described up to there."""


class Attribute(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An extended attribute of the class `user.`."""

    name: bytes
    size: int
    """Bytes of its value."""
    value: bytes
    """The value itself, or its digest (xxh3-128) where it has more than VALUE_BYTES."""


class Extra(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Extended attributes and segments of data of one file."""

    attributes: tuple[Attribute, ...] = ()
    """In the order of their names; empty if there are more than ATTRIBUTES_MAX."""
    attributes_count: int = 0
    attributes_digest: bytes = b""
    """Over all of them, where they are not kept."""
    segments: tuple[int, ...] = ()
    """Where each segment of data begins and ends, one after the other; empty if there are more than SEGMENTS_MAX."""
    segments_count: int = 0
    """-1: of a file whose holes were not looked for."""
    segments_digest: bytes = b""
    """Over all of them, where they are not kept."""

    @property
    def size_bytes(self) -> int:
        """What it takes in a manifest, bytes, about."""
        return sum(len(one.name) + len(one.value) + 16 for one in self.attributes) + 9 * len(self.segments) + 64


def extra_of(directory: int, name: bytes, status: os.stat_result, *, xattrs: bool, sparse: bool) -> Extra | None:
    """Return what a file has besides its contents, None if there is nothing, or if it cannot be opened: then copying it
    will say so. `sparse`: whether its holes are looked for.
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
        # A file system without them; if it is something else, copying the file will meet it, too.
        return []
    found = []
    for name in names:
        value = os.getxattr(descriptor, name)
        kept = value if len(value) <= VALUE_BYTES else xxhash.xxh3_128_digest(value)
        found.append(Attribute(name, len(value), kept))
    return found


def _segments(descriptor: int, size_bytes: int) -> tuple[tuple[int, ...], int, bytes]:
    """Return where the data of an open file lies, in how many segments, and a digest where those are too many."""
    bounds: list[int] = []
    taken = xxhash.xxh3_128()
    count = at = 0
    while at < size_bytes and count < SEGMENTS_WALKED_MAX:
        try:
            begin = os.lseek(descriptor, at, os.SEEK_DATA)
            at = os.lseek(descriptor, begin, os.SEEK_HOLE)
        except OSError as error:
            if error.errno == errno.ENXIO:
                # Nothing but a hole to the end.
                break
            raise
        count += 1
        taken.update(b"%d-%d," % (begin, at))
        if count <= SEGMENTS_MAX:
            bounds += (begin, at)
    return (tuple(bounds), count, b"") if count <= SEGMENTS_MAX else ((), count, taken.digest())


FRAME_RECORDS: Final = 512
"""Records that are encoded together, count: decoding them one by one costs four times as much."""

FRAME_PATH_BYTES: Final = 64 * 1024
"""Bytes of paths from which on a frame has no more records."""

BLOCK_BYTES: Final = 256 * 1024
"""Bytes read at once; a frame has FRAME_PATH_BYTES, one more path with its extra, and a hundred bytes for each
record."""

_INDEX_BITS: Final = 10
"""Bits of a place that say which record of the frame it is."""

_LENGTH: Final = struct.Struct("<I")

MANIFEST_DIGEST: Final = "xxh3-128"
"""What the digest of a manifest is taken with, against accidents."""

FILE: Final = 0
DIRECTORY: Final = 1
ODD: Final = 2
"""Something that is left out."""

LINK: Final = 3
"""A symbolic link that is made again."""


class Record(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One file, directory or link of the source. Sizes are bytes, times nanoseconds since the epoch."""

    index: int
    item: int
    kind: int
    path: bytes
    """Beneath the item; empty for the item itself."""
    size: int
    mtime_ns: int
    ctime_ns: int
    mode: int
    inode: int
    device: int
    data_bytes: int
    """What the source takes on its disk: less than `size` means that it has holes."""
    links: int
    chunk_at: int = -1
    """A large file's first mark in the table of chunks; -1: it is copied as a whole."""
    extra: Extra | None = None
    """What a large file has besides its contents, if it has."""
    target: bytes = b""
    """What a link is to say at its destination, or says where it is left out. Of a file or a directory: what the link
    says that was followed to it."""
    reason: str = ""
    """Why something is left out, where its kind does not say it."""

    @property
    def is_large(self) -> bool:
        """Whether it is copied in chunks."""
        return self.chunk_at >= 0

    @property
    def is_sparse(self) -> bool:
        """Whether the source has holes."""
        return self.data_bytes < self.size

    def lies_in(self, directory: Record) -> bool:
        """Whether it comes beneath a directory of the same item."""
        beneath = not directory.path or self.path.startswith(directory.path + b"/")
        return self.item == directory.item and beneath

    def is_as(self, other: Record) -> bool:
        """Whether the source did not change between two polls at it; a device may have another number after a boot."""
        return (self.kind, self.target, self.size, self.mtime_ns, self.ctime_ns, self.inode) == (
            other.kind,
            other.target,
            other.size,
            other.mtime_ns,
            other.ctime_ns,
            other.inode,
        )


class Totals(NamedTuple):
    """What a manifest comes to."""

    records: int = 0
    files: int = 0
    directories: int = 0
    left_out: int = 0
    size_bytes: int = 0
    chunks: int = 0
    manifest_bytes: int = 0
    manifest_digest: bytes = b""


class ManifestWriter:
    """Writes records one after the other; OSError if the disk does not take them."""

    def __init__(self, descriptor: int) -> None:
        """Begin an empty manifest in the open file."""
        self._descriptor = descriptor
        self._encoder = msgspec.msgpack.Encoder()
        self._frame: list[Record] = []
        self._frame_bytes = 0
        self._digest = hasher(MANIFEST_DIGEST)
        self._at = 0
        self.records = self.files = self.directories = self.left_out = self.size_bytes = self.chunks = 0

    def add(self, record: Record, chunks: int) -> int:
        """Add a record, whose index has to be the number of those before it, and return its place."""
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
        """Make all of it durable, and return what it comes to."""
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


_RECORDS: Final = msgspec.msgpack.Decoder(list[Record])


class Manifest:
    """A sealed manifest; any number of processes may read it at once. OSError if it cannot be read."""

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        """Take the open file and how much of it there is."""
        self._descriptor = descriptor
        self._end = size_bytes
        self._decoder = _RECORDS
        self._near: tuple[int, list[Record]] = -1, []

    def records(self, place: int = 0, count: int | None = None) -> Iterator[Record]:
        """Yield records from a place on, `count` of them or all."""
        left = count
        for _, frame in self._frames(place):
            if left is not None:
                if left < len(frame):
                    yield from frame[:left]
                    return
                left -= len(frame)
            yield from frame

    def at(self, place: int) -> Record:
        """Return the record at a place; those of one frame cost little."""
        start = place >> _INDEX_BITS << _INDEX_BITS
        if self._near[0] != start:
            self._near = next(self._frames(start))
        return self._near[1][place - start]

    def located(self) -> Iterator[tuple[int, Record]]:
        """Yield all records, each with its place."""
        for place, frame in self._frames(0):
            yield from enumerate(frame, start=place)

    def _frames(self, place: int) -> Iterator[tuple[int, list[Record]]]:
        """Yield the records of each frame from a place on, with the place of the first one."""
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
