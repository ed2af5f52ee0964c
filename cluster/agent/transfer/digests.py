"""Digests: of bytes, of a file's chunks, and of what storage gives back."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Final

import blake3
import xxhash

from cluster.agent.transfer.options import Algorithm

READ_BYTES: Final = 1024 * 1024
"""Bytes read at once when only a digest is wanted."""


Hasher = xxhash.xxh3_128 | blake3.blake3
"""What takes a digest."""


def hasher(algorithm: Algorithm) -> Hasher:
    """Return a new one: 16 bytes for xxh3-128, 32 for blake3."""
    return xxhash.xxh3_128() if algorithm == "xxh3-128" else blake3.blake3()


def digest_of_bytes(algorithm: Algorithm, data: bytes) -> bytes:
    """Return the digest of bytes that are at hand as a whole."""
    return xxhash.xxh3_128_digest(data) if algorithm == "xxh3-128" else blake3.blake3(data).digest()


def combine(algorithm: Algorithm, chunk_bytes: int, digests: Iterable[bytes]) -> bytes:
    """Return the digest of a large file: over the length of its chunks and their digests, in order."""
    taken = hasher(algorithm)
    taken.update(b"%d:" % chunk_bytes)
    for digest in digests:
        taken.update(digest)
    return taken.digest()


def digest_of(descriptor: int, algorithm: Algorithm, offset: int = 0, size_bytes: int | None = None) -> bytes:
    """Return the digest of a part of an open file, to its end if `size_bytes` is None; OSError if it cannot be read."""
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
    """Return the digest of what storage holds of a synced file.

    Its pages are clean: dropped, they are read from the disk and not from memory.
    """
    os.posix_fadvise(descriptor, offset, size_bytes or 0, os.POSIX_FADV_DONTNEED)
    return digest_of(descriptor, algorithm, offset, size_bytes)
