"""What large files have besides their contents: extended attributes, and where their data lies between holes.

Taken at the walk from one open descriptor, which costs a file that is copied in chunks nothing that could be measured.
Of smaller ones it would cost as much again as the look at each file itself (DESIGN.md); their receipt lines say that
they had attributes."""

from __future__ import annotations

import errno
import os
from typing import Final

import msgspec
import xxhash

from cluster.agent.files import READ_FLAGS, XATTR_CLASS

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
