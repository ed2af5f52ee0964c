"""Reading of snapshots, with every byte checked.

The file is read in one pass, in bounded memory. Each frame's checksum is compared before its records are decoded. The
order and the number of records are checked while reading. At the end, the file's SHA-256, the derived free capacity
(law 8) and the invariants of the state are checked.
"""

from __future__ import annotations

import gc
import os
import stat
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path

import msgpack  # type: ignore[import-untyped]
import msgspec

from forebay.snapshots.finalize import (
    FORMAT_VERSION,
    MAGIC,
    MAGIC_OF_A_STEP,
    PREAMBLE,
    SNAPSHOT_BYTES_MAX,
    TRAILER_BYTES,
    SnapshotName,
    frame_checksum,
)
from forebay.snapshots.image import SLICE_BYTES_MAX, Assembly, Image, ImageRejected, nothing

READ_BYTES = 256 * 1024
"""Size of one read: large enough to make system calls cheap, and small in memory."""

FRAME_FIELDS = 4
"""Section, sequence, payload, checksum."""

_BUFFER_BYTES_MAX = SLICE_BYTES_MAX + READ_BYTES + 64
"""Limit of the frame reader's buffer: the largest frame with its header, and one read beyond it."""


class SnapshotRefused(Exception):
    """File that is not a valid snapshot; `sentence` names the problem and its position."""

    def __init__(self, path: Path, sentence: str) -> None:
        super().__init__(f"{path}: {sentence}")
        self.path = path
        self.sentence = sentence


class PoolSummary(msgspec.Struct, frozen=True):
    """Pool of a snapshot; `held_bytes` and `free_bytes` were derived from its buffers when reading."""

    name: str
    quantity_bytes: int
    held_bytes: int
    free_bytes: int


class Summary(msgspec.Struct, frozen=True):
    """Summary of a snapshot. `at` is an Instant, digests are hexadecimal."""

    index: int
    term: int
    revision: int
    at: int
    cluster_id: str
    cluster: str
    jobs: int
    buffers: int
    pools: tuple[PoolSummary, ...]
    digest: str
    """Digest of the ledger's chain at `index`."""
    file_digest: str
    size_bytes: int


def load_snapshot(path: Path) -> Image:
    """Return the image in the file.

    Raises:
        SnapshotRefused: The file is not a sound snapshot.
    """
    return load_open(open_snapshot(path), path)


def inspect(path: Path) -> Summary:
    """Return a summary of the file. Checks everything except invariants between records; jobs are not kept in memory.

    Raises:
        SnapshotRefused: The file is not a sound snapshot.
    """
    file = open_snapshot(path)
    try:
        assembly, digest, size_bytes = _read(file, path, keep=False)
    finally:
        os.close(file)
    header = assembly.header
    capacity = {row.name: row for row in assembly.capacity}
    return Summary(
        index=header.index,
        term=header.term,
        revision=header.revision,
        at=header.at,
        cluster_id=header.cluster_id,
        cluster=header.name,
        jobs=header.count("jobs"),
        buffers=header.count("buffers"),
        pools=tuple(
            PoolSummary(pool.name, pool.quantity_bytes, capacity[pool.name].held_bytes, capacity[pool.name].free_bytes)
            for pool in assembly.pools
        ),
        digest=header.chain_digest.hex(),
        file_digest=digest.hex(),
        size_bytes=size_bytes,
    )


def load_open(file: int, path: Path, *, breathe: Callable[[], None] = nothing) -> Image:
    """Return the image in an open file, and close it; `path` is for messages.

    `breathe` is called between two slices; it may block to let other threads run, and may raise.

    Raises:
        SnapshotRefused: The file is not a sound snapshot.
    """
    # Records contain no cycles, and searching for them while records are created would triple the time.
    collecting = gc.isenabled()
    gc.disable()
    try:
        assembly, _, _ = _read(file, path, keep=True, breathe=breathe)
        return assembly.image(breathe)
    except ImageRejected as why:
        raise SnapshotRefused(path, why.sentence) from why
    finally:
        os.close(file)
        if collecting:
            gc.enable()


def sound_prefix_bytes(file: int) -> int:
    """Return the size of an unfinished snapshot's valid part, bytes: complete frames, in order, with correct checksums.

    Ignores data that a power cut left after this part. Reads the file from its start.

    Raises:
        OSError: The file cannot be read.
    """
    size_bytes = os.fstat(file).st_size
    os.lseek(file, 0, os.SEEK_SET)
    sound_bytes = 0
    try:
        _check_preamble(_exactly(file, len(PREAMBLE)))
        for sound_bytes, _, _ in _frames(file, size_bytes - len(PREAMBLE), nothing):  # noqa: B007
            pass
    except ImageRejected:
        pass
    return sound_bytes


def open_snapshot(path: Path, directory: int | None = None) -> int:
    """Return a descriptor of the file, looked up in the open `directory` if given. Never follows a link.

    Raises:
        SnapshotRefused: The file cannot be opened.
    """
    name, flags = path if directory is None else path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        return os.open(name, flags, dir_fd=directory)
    except OSError as why:
        raise SnapshotRefused(path, f"the file cannot be opened: {why.strerror}") from why


def _read(file: int, path: Path, *, keep: bool, breathe: Callable[[], None] = nothing) -> tuple[Assembly, bytes, int]:
    """Return the file's content, its digest, and its size, bytes."""
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode):
        raise SnapshotRefused(path, "the snapshot is not a regular file")
    size_bytes = found.st_size
    if size_bytes > SNAPSHOT_BYTES_MAX:
        raise SnapshotRefused(path, f"it has {size_bytes} bytes; at most {SNAPSHOT_BYTES_MAX} are read")
    if size_bytes < len(PREAMBLE) + TRAILER_BYTES:
        raise SnapshotRefused(path, f"it has only {size_bytes} bytes: it is truncated")
    try:
        preamble = _exactly(file, len(PREAMBLE))
        _check_preamble(preamble)
        digest = sha256(preamble)
        assembly = Assembly(keep=keep)
        for offset, section, payload in _frames(file, size_bytes - len(PREAMBLE) - TRAILER_BYTES, digest.update):
            breathe()
            try:
                assembly.add(section, payload)
            except ImageRejected as why:
                raise ImageRejected(f"{why.sentence} (before byte {offset})") from why
        if _exactly(file, TRAILER_BYTES) != digest.digest():
            raise ImageRejected("the checksum of the whole file does not match: it is truncated or damaged")
        assembly.finish()
        named = SnapshotName.parse(path.name)
        held = SnapshotName(assembly.header.index, assembly.header.term)
        if named is not None and named != held:
            raise ImageRejected(
                f"its name states index {named.index} of term {named.term}; it contains {held.index} of {held.term}"
            )
    except ImageRejected as why:
        raise SnapshotRefused(path, why.sentence) from why
    except OSError as why:
        raise SnapshotRefused(path, f"it cannot be read: {why.strerror}") from why
    return assembly, digest.digest(), size_bytes


def _check_preamble(preamble: bytes) -> None:
    if preamble[: len(MAGIC)] == MAGIC_OF_A_STEP:
        raise ImageRejected(
            "the file has a preliminary format (0.1 to 0.3), which no release reads; use the source tree that "
            "wrote the file"
        )
    if preamble[: len(MAGIC)] != MAGIC:
        raise ImageRejected("the file is not a Forebay snapshot")
    version = int.from_bytes(preamble[len(MAGIC) :], "big")
    if version != FORMAT_VERSION:
        raise ImageRejected(f"it has format version {version}; this release reads version {FORMAT_VERSION}")


def _frames(file: int, left: int, seen: Callable[[bytes], object]) -> Iterator[tuple[int, int, bytes]]:
    """Yield (end offset, section, payload) of each frame in the next `left` bytes; pass every byte to `seen`."""
    unpacker = msgpack.Unpacker(
        use_list=False,
        max_buffer_size=_BUFFER_BYTES_MAX,
        max_bin_len=SLICE_BYTES_MAX,
        max_array_len=FRAME_FIELDS,
        max_str_len=0,
        max_map_len=0,
        max_ext_len=0,
    )
    sequence = 0
    end = 0
    fed = 0
    while left:
        data = os.read(file, min(READ_BYTES, left))
        if not data:
            raise ImageRejected(f"it ended at byte {len(PREAMBLE) + fed} while it was read")
        left -= len(data)
        fed += len(data)
        seen(data)
        try:
            unpacker.feed(data)
            for frame in unpacker:
                end = unpacker.tell()
                offset = len(PREAMBLE) + end
                section, payload = _checked(frame, sequence, offset)
                sequence += 1
                yield offset, section, payload
        except (ValueError, msgpack.UnpackException) as why:
            place = len(PREAMBLE) + end
            raise ImageRejected(
                f"the frame at byte {place} cannot be read: it is damaged ({type(why).__name__})"
            ) from why
    if end != fed:
        raise ImageRejected(f"the frame at byte {len(PREAMBLE) + end} is truncated")


def _checked(frame: object, sequence: int, offset: int) -> tuple[int, bytes]:
    if not isinstance(frame, tuple) or len(frame) != FRAME_FIELDS:
        raise ImageRejected(f"the data before byte {offset} is not a frame: it is damaged")
    section, number, payload, checksum = frame
    if type(section) is not int or type(number) is not int or type(payload) is not bytes or type(checksum) is not int:
        raise ImageRejected(f"the data before byte {offset} is not a frame: it is damaged")
    if number != sequence:
        raise ImageRejected(
            f"the frame that ends at byte {offset} is number {number}, but number {sequence} was expected"
        )
    if not 0 <= section < 2**63 or checksum != frame_checksum(section, number, payload):
        raise ImageRejected(f"frame {number}, which ends at byte {offset}, does not match its checksum: it is damaged")
    return section, payload


def _exactly(file: int, size_bytes: int) -> bytes:
    pieces = b""
    while len(pieces) < size_bytes:
        piece = os.read(file, size_bytes - len(pieces))
        if not piece:
            raise ImageRejected("it is truncated")
        pieces += piece
    return pieces
