"""Digests of bytes, of chunked files, and of data read back from storage."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Final

import blake3
import xxhash

from forebay.cluster.agent.transfer.options import Algorithm

READ_BYTES: Final = 1024 * 1024
"""Bytes read at a time when only a digest is computed."""


Hasher = xxhash.xxh3_128 | blake3.blake3
"""Digest object of either algorithm."""


def hasher(algorithm: Algorithm) -> Hasher:
    """Return a new digest object: 16 bytes for xxh3-128, 32 for blake3."""
    return xxhash.xxh3_128() if algorithm == "xxh3-128" else blake3.blake3()


def digest_of_bytes(algorithm: Algorithm, data: bytes) -> bytes:
    """Return the digest of bytes in memory."""
    return xxhash.xxh3_128_digest(data) if algorithm == "xxh3-128" else blake3.blake3(data).digest()


def combine(algorithm: Algorithm, chunk_bytes: int, digests: Iterable[bytes]) -> bytes:
    """Return the digest of a large file: over its chunk length and the digests of its chunks, in order."""
    taken = hasher(algorithm)
    taken.update(b"%d:" % chunk_bytes)
    for digest in digests:
        taken.update(digest)
    return taken.digest()


def digest_of(descriptor: int, algorithm: Algorithm, offset: int = 0, size_bytes: int | None = None) -> bytes:
    """Return the digest of part of an open file, to its end if `size_bytes` is None.

    Raises:
        OSError: The file cannot be read.
    """
    taken = hasher(algorithm)
    end = None if size_bytes is None else offset + size_bytes
    while end is None or offset < end:
        data = os.pread(descriptor, READ_BYTES if end is None else min(READ_BYTES, end - offset), offset)
        if not data:
            break
        taken.update(data)
        offset += len(data)
    return taken.digest()


def digest_on_disk(descriptor: int, algorithm: Algorithm, offset: int = 0, size_bytes: int | None = None) -> bytes:
    """Return the digest of a synced file as stored on disk.

    Its clean pages are dropped from the page cache, so that they are read from the disk.
    """
    os.posix_fadvise(descriptor, offset, size_bytes or 0, os.POSIX_FADV_DONTNEED)
    return digest_of(descriptor, algorithm, offset, size_bytes)
