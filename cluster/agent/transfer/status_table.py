"""How far a transfer is, so that a crash costs at most what is under way: a row per record, a mark per chunk.

Both are files of fixed places, so nothing is searched for and nothing is in memory. Every place has a checksum: one
that was torn counts as empty. What a row or a mark promises is durable before the promise is."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Sequence
from enum import IntEnum, IntFlag
from typing import Final, NamedTuple

import msgspec

HEADER_BYTES: Final = 64 * 1024
"""Bytes before the first row: two copies of the header, which names the items."""

ROW_BYTES: Final = 64
MARK_BYTES: Final = 40

ITEMS_NAMED_BYTES_MAX: Final = 24 * 1024
"""Bytes of the items' names in a header; where there are more, they are only told apart by their digest."""

FORMAT: Final = 1
"""Number of the records' format: others are not read, and the transfer begins again."""

_NOTHING: Final = bytes(ROW_BYTES)
_HALF: Final = HEADER_BYTES // 2
_FRAME: Final = struct.Struct("<II")
_ROW: Final = struct.Struct("<BBBBIQqQ32s")
_HEAD: Final = struct.Struct("<BBBB")
_REST: Final = struct.Struct("<QqQ32s")
_MARK: Final = struct.Struct("<BBHI32s")


class RecordsFailed(OSError):
    """The agent's disk does not take the records of a transfer: nothing is wrong with the files that it moves."""


class State(IntEnum):
    """What a row says of its record."""

    NEW = 0
    STARTED = 1
    """A large file: its temporary file is there, and its chunks are marked."""
    READY = 2
    """The temporary file is whole and durable, and has its name in the next moment or already."""
    DONE = 3
    LEFT_OUT = 4
    MADE = 5
    """A directory that this transfer made."""
    THERE = 6
    """A directory that was there before."""


class Flag(IntFlag):
    """What is to be said about a file or a directory in its receipt."""

    SETID_STRIPPED = 1
    SPARSE = 2
    REFLINKED = 4
    KERNEL_COPIED = 8
    XATTRS_LOST = 16
    RESUMED = 32
    """An earlier attempt had moved it."""
    XATTRS = 64
    """It has extended attributes of the `user.` class."""
    ACLS_LOST = 128
    """Its source has access control lists that its copy does not have."""


NO_FLAG: Final = Flag(0)


class ChunkState(IntEnum):
    """What a mark says of its chunk."""

    NONE = 0
    COPIED = 1
    """Written, but perhaps in memory only."""
    DURABLE = 2


class Copied(NamedTuple):
    """What is known of a file at its destination."""

    size: int
    mtime_ns: int
    inode: int
    digest: bytes = b""
    flags: Flag = NO_FLAG


class StatusRow(NamedTuple):
    """What is kept of a record."""

    state: State
    tries: int
    copied: Copied


_STATES: Final = tuple(State)

EMPTY: Final = StatusRow(State.NEW, 0, Copied(0, 0, 0))


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What a generation of records is about."""

    format: int = FORMAT
    sequence: int
    """The higher one counts."""
    items: tuple[tuple[str, bytes, bytes], ...]
    """Kind, source and destination of each; empty if there are too many to name."""
    items_digest: bytes
    boot: str
    """Of which boot of the machine: what is not durable is of this one or lost."""
    shape: tuple[int, int, str, int]
    """Chunk and large bytes, algorithm and level: marks and digests are of these."""
    records: int
    files: int
    directories: int
    left_out: int
    size_bytes: int
    manifest_bytes: int
    manifest_digest: bytes
    chunks: int
    complete: bool = False
    """Everything is at its destination and durable there."""


_HEADERS: Final = msgspec.msgpack.Decoder(Header)


def read_header(control: int) -> Header | None:
    """Return the newest header that is whole, None if there is none. OSError."""
    found: list[Header] = []
    for offset in (0, _HALF):
        frame = os.pread(control, _HALF, offset)
        if len(frame) < _FRAME.size:
            continue
        length, checksum = _FRAME.unpack_from(frame)
        data = frame[_FRAME.size : _FRAME.size + length]
        if len(data) != length or not length or zlib.crc32(data) != checksum:
            continue
        try:
            header = _HEADERS.decode(data)
        except msgspec.DecodeError:
            continue
        if header.format == FORMAT:
            found.append(header)
    return max(found, key=lambda header: (header.sequence, header.complete), default=None)


def write_header(control: int, header: Header) -> None:
    """Write the header durably; the one before it is whole until then. OSError."""
    data = msgspec.msgpack.encode(header)
    _write(control, _FRAME.pack(len(data), zlib.crc32(data)) + data, _HALF if header.complete else 0)
    _sync(control)


def reserve(control: int, records: int, chunks: int, marks: int) -> None:
    """Give rows, marks and both headers blocks of their own, so that a disk that fills up later does not matter where
    files are overwritten in place. OSError if there is no room.
    """
    os.posix_fallocate(control, 0, HEADER_BYTES + records * ROW_BYTES)
    if marks:
        os.posix_fallocate(chunks, 0, marks * MARK_BYTES)
        os.fdatasync(chunks)


class StatusTable:
    """A row for each record, in a file that all processes of a transfer share. Every method may raise OSError."""

    def __init__(self, control: int) -> None:
        """Take the open file."""
        self._control = control

    def get(self, index: int) -> StatusRow:
        """Return what is kept of a record."""
        return _row(os.pread(self._control, ROW_BYTES, HEADER_BYTES + index * ROW_BYTES))

    def many(self, index: int, count: int) -> list[StatusRow]:
        """Return what is kept of records in a row."""
        data = os.pread(self._control, count * ROW_BYTES, HEADER_BYTES + index * ROW_BYTES)
        found = [_row(data[at : at + ROW_BYTES]) for at in range(0, len(data), ROW_BYTES)]
        return found + [EMPTY] * (count - len(found))

    def states(self, index: int, count: int) -> bytes:
        """Return the states of records in a row, a byte each: quick, for looking through all of them."""
        return os.pread(self._control, count * ROW_BYTES, HEADER_BYTES + index * ROW_BYTES)[::ROW_BYTES].ljust(
            count, b"\0"
        )

    def put(self, index: int, row: StatusRow) -> None:
        """Keep something of a record."""
        _write(self._control, _packed(row), HEADER_BYTES + index * ROW_BYTES)

    def put_many(self, index: int, rows: list[StatusRow]) -> None:
        """Keep something of records in a row."""
        _write(self._control, b"".join(map(_packed, rows)), HEADER_BYTES + index * ROW_BYTES)

    def put_files(self, index: int, state: State, files: Sequence[tuple[int, Copied]]) -> None:
        """Keep the same state of records in a row, each with its tries and what is known of it."""
        data = b"".join([_packed_fields(state, tries, copied) for tries, copied in files])
        _write(self._control, data, HEADER_BYTES + index * ROW_BYTES)

    def mark(self, index: int, state: State, copied: Copied) -> None:
        """Keep a state of a record, which does not change how often it was tried."""
        self.put(index, StatusRow(state, self.get(index).tries, copied))

    def tried(self, index: int) -> int:
        """Count another try of a record, and return how many there were."""
        row = self.get(index)
        self.put(index, row._replace(tries=min(row.tries + 1, 255)))
        return row.tries + 1

    def sync(self) -> None:
        """Make durable what was put."""
        _sync(self._control)


class Chunks:
    """Which chunks of a large file are in its temporary file. Every method may raise OSError."""

    def __init__(self, chunks: int, first: int, count: int, chunk_bytes: int) -> None:
        """Take the open file and where the file's marks are in it."""
        self._chunks = chunks
        self._first = first
        self.count = count
        self.chunk_bytes = chunk_bytes

    def state(self, number: int) -> ChunkState:
        """Return what is known of a chunk."""
        return self._mark(number)[0]

    def digest(self, number: int) -> bytes:
        """Return the digest of a chunk, empty if none was taken."""
        return self._mark(number)[1]

    def copied(self, number: int, digest: bytes) -> None:
        """The chunk is written."""
        self._put(number, ChunkState.COPIED, digest)

    def durable(self, numbers: list[int]) -> None:
        """The chunks are on the disk: to be called after a sync of the temporary file that began when they were
        COPIED."""
        for number in numbers:
            self._put(number, ChunkState.DURABLE, self.digest(number))
        _sync(self._chunks)

    def clear(self) -> None:
        """Forget all of it, for good: a mark that came back would be believed of the next temporary file."""
        size_bytes, at = self.count * MARK_BYTES, self._first * MARK_BYTES
        if any(os.pread(self._chunks, size_bytes, at)):
            _write(self._chunks, bytes(size_bytes), at)
            _sync(self._chunks)

    def _mark(self, number: int) -> tuple[ChunkState, bytes]:
        data = os.pread(self._chunks, MARK_BYTES, (self._first + number) * MARK_BYTES)
        if len(data) < MARK_BYTES:
            return ChunkState.NONE, b""
        state, length, _, checksum, digest = _MARK.unpack(data)
        if not state or zlib.crc32(data[:2] + data[8:]) != checksum:
            return ChunkState.NONE, b""
        return ChunkState(state), digest[:length]

    def _put(self, number: int, state: ChunkState, digest: bytes) -> None:
        head = bytes((state, len(digest)))
        padded = digest.ljust(32, b"\0")
        data = _MARK.pack(state, len(digest), 0, zlib.crc32(head + padded), padded)
        _write(self._chunks, data, (self._first + number) * MARK_BYTES)


def _write(descriptor: int, data: bytes, at: int) -> None:
    """Write all of it: a disk that is nearly full takes a part first. RecordsFailed."""
    try:
        written = os.pwrite(descriptor, data, at)
        while written < len(data):
            written += os.pwrite(descriptor, data[written:], at + written)
    except OSError as error:
        raise RecordsFailed(error.errno, error.strerror) from error


def _sync(descriptor: int) -> None:
    try:
        os.fdatasync(descriptor)
    except OSError as error:
        raise RecordsFailed(error.errno, error.strerror) from error


def _packed(row: StatusRow) -> bytes:
    if row is EMPTY:
        return _NOTHING
    return _packed_fields(row.state, row.tries, row.copied)


def _packed_fields(state: State, tries: int, copied: Copied) -> bytes:
    size, mtime_ns, inode, digest, flags = copied
    head = _HEAD.pack(state, flags, tries, len(digest))
    rest = _REST.pack(size, mtime_ns, inode, digest)
    return b"%b%b%b" % (head, zlib.crc32(rest, zlib.crc32(head)).to_bytes(4, "little"), rest)


def _row(data: bytes) -> StatusRow:
    if len(data) < ROW_BYTES:
        return EMPTY
    state, flags, tries, length, checksum, size, mtime_ns, inode, digest = _ROW.unpack(data)
    if not state and not tries or zlib.crc32(data[:4] + data[8:]) != checksum:
        return EMPTY
    return StatusRow(
        _STATES[state], tries, Copied(size, mtime_ns, inode, digest[:length], Flag(flags) if flags else NO_FLAG)
    )
