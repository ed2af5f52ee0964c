"""Progress records of a transfer, so that a crash loses only work in progress: a row per record, a mark per chunk.

Both are files with fixed positions, so nothing is searched for or held in memory. Each entry has a checksum; a torn one
counts as empty. Data is durable before the row or mark that promises it.
"""

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
"""Space for item names in a header, bytes; if there are more, only a digest identifies them."""

FORMAT: Final = 1
"""Format number of the records; records of another format are ignored and the transfer starts over."""

_NOTHING: Final = bytes(ROW_BYTES)
_HALF: Final = HEADER_BYTES // 2
_FRAME: Final = struct.Struct("<II")
_ROW: Final = struct.Struct("<BBBBIQqQ32s")
_HEAD: Final = struct.Struct("<BBBB")
_REST: Final = struct.Struct("<QqQ32s")
_MARK: Final = struct.Struct("<BBHI32s")


class RecordsFailed(OSError):
    """The agent's disk cannot take the transfer's records; the files being moved are not affected."""


class RecordState(IntEnum):
    """State of a record."""

    NEW = 0
    STARTED = 1
    """Large file with a temporary file and chunk marks."""
    READY = 2
    """Temporary file is complete and durable, and is being renamed or already has been."""
    DONE = 3
    LEFT_OUT = 4
    MADE = 5
    """Directory created by this transfer."""
    THERE = 6
    """Directory that existed before."""


class Flag(IntFlag):
    """Remarks about a file or directory for its receipt line."""

    SETID_STRIPPED = 1
    SPARSE = 2
    REFLINKED = 4
    KERNEL_COPIED = 8
    XATTRS_LOST = 16
    RESUMED = 32
    """Moved by an earlier attempt."""
    XATTRS = 64
    """Has extended attributes of class `user.`."""
    ACLS_LOST = 128
    """Source has access control lists that the copy lacks."""


NO_FLAG: Final = Flag(0)


class ChunkState(IntEnum):
    """State of a chunk."""

    NONE = 0
    COPIED = 1
    """Written, but perhaps only in memory."""
    DURABLE = 2


class CopiedFile(NamedTuple):
    """Properties of a file at its destination."""

    size: int
    mtime_ns: int
    inode: int
    digest: bytes = b""
    flags: Flag = NO_FLAG


class StatusRow(NamedTuple):
    """Row of a record."""

    state: RecordState
    tries: int
    copied: CopiedFile


_STATES: Final = tuple(RecordState)

EMPTY: Final = StatusRow(RecordState.NEW, 0, CopiedFile(0, 0, 0))


class RecordsHeader(msgspec.Struct, frozen=True, kw_only=True):
    """Header of a generation of records."""

    format: int = FORMAT
    sequence: int
    """Generation number; the highest is current."""
    items: tuple[tuple[str, bytes, bytes], ...]
    """Kind, source and destination of each item; empty if there are too many to name."""
    items_digest: bytes
    boot: str
    """Boot ID of the machine: data that is not durable is lost after another boot."""
    shape: tuple[int, int, str, int]
    """Chunk length, size limit of small files, algorithm and verification level that marks and digests are based on."""
    records: int
    files: int
    directories: int
    left_out: int
    size_bytes: int
    manifest_bytes: int
    manifest_digest: bytes
    chunks: int
    complete: bool = False
    """True when everything is durable at its destination."""


_HEADERS: Final = msgspec.msgpack.Decoder(RecordsHeader)


def read_header(control: int) -> RecordsHeader | None:
    """Return the newest intact header, or None.

    Raises:
        OSError: The file cannot be read.
    """
    found: list[RecordsHeader] = []
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


def write_header(control: int, header: RecordsHeader) -> None:
    """Write the header durably; the previous one stays intact meanwhile.

    Raises:
        OSError: The disk is full or fails.
    """
    data = msgspec.msgpack.encode(header)
    _write(control, _FRAME.pack(len(data), zlib.crc32(data)) + data, _HALF if header.complete else 0)
    _sync(control)


def reserve(control: int, records: int, chunks: int, marks: int) -> None:
    """Allocate the blocks of rows, marks and headers, so that a disk that fills up later does not affect updates in
    place.

    Raises:
        OSError: There is no space.
    """
    os.posix_fallocate(control, 0, HEADER_BYTES + records * ROW_BYTES)
    if marks:
        os.posix_fallocate(chunks, 0, marks * MARK_BYTES)
        os.fdatasync(chunks)


class StatusTable:
    """Rows of all records, in a file shared by the transfer's processes. Every method may raise OSError."""

    def __init__(self, control: int) -> None:
        """Use the open file."""
        self._control = control

    def get(self, index: int) -> StatusRow:
        """Return the row of a record."""
        return _row(os.pread(self._control, ROW_BYTES, HEADER_BYTES + index * ROW_BYTES))

    def many(self, index: int, count: int) -> list[StatusRow]:
        """Return the rows of consecutive records."""
        data = os.pread(self._control, count * ROW_BYTES, HEADER_BYTES + index * ROW_BYTES)
        found = [_row(data[at : at + ROW_BYTES]) for at in range(0, len(data), ROW_BYTES)]
        return found + [EMPTY] * (count - len(found))

    def states(self, index: int, count: int) -> bytes:
        """Return the states of consecutive records, one byte each; fast enough to scan all."""
        return os.pread(self._control, count * ROW_BYTES, HEADER_BYTES + index * ROW_BYTES)[::ROW_BYTES].ljust(
            count, b"\0"
        )

    def put(self, index: int, row: StatusRow) -> None:
        """Write the row of a record."""
        _write(self._control, _pack_row(row), HEADER_BYTES + index * ROW_BYTES)

    def put_many(self, index: int, rows: list[StatusRow]) -> None:
        """Write the rows of consecutive records."""
        _write(self._control, b"".join(map(_pack_row, rows)), HEADER_BYTES + index * ROW_BYTES)

    def put_files(self, index: int, state: RecordState, files: Sequence[tuple[int, CopiedFile]]) -> None:
        """Write the same state for consecutive records, each with its tries and properties."""
        data = b"".join([_pack_fields(state, tries, copied) for tries, copied in files])
        _write(self._control, data, HEADER_BYTES + index * ROW_BYTES)

    def mark(self, index: int, state: RecordState, copied: CopiedFile) -> None:
        """Set the state of a record, keeping its number of tries."""
        self.put(index, StatusRow(state, self.get(index).tries, copied))

    def count_try(self, index: int) -> int:
        """Count a try of a record and return the total."""
        row = self.get(index)
        self.put(index, row._replace(tries=min(row.tries + 1, 255)))
        return row.tries + 1

    def sync(self) -> None:
        """Make all writes durable."""
        _sync(self._control)


class Chunks:
    """Chunk marks of a large file. Every method may raise OSError."""

    def __init__(self, chunks: int, first: int, count: int, chunk_bytes: int) -> None:
        """Use the open file and the position of the first mark."""
        self._chunks = chunks
        self._first = first
        self.count = count
        self.chunk_bytes = chunk_bytes

    def state(self, number: int) -> ChunkState:
        """Return the state of a chunk."""
        return self._mark(number)[0]

    def digest(self, number: int) -> bytes:
        """Return the digest of a chunk, or b"" if none was computed."""
        return self._mark(number)[1]

    def mark_copied(self, number: int, digest: bytes) -> None:
        """Mark a chunk as written."""
        self._write_mark(number, ChunkState.COPIED, digest)

    def mark_durable(self, numbers: list[int]) -> None:
        """Mark COPIED chunks as durable, after a sync of the temporary file that began later than the copy."""
        for number in numbers:
            self._write_mark(number, ChunkState.DURABLE, self.digest(number))
        _sync(self._chunks)

    def clear(self) -> None:
        """Clear all marks durably: a mark that reappeared would be trusted for the next temporary file."""
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

    def _write_mark(self, number: int, state: ChunkState, digest: bytes) -> None:
        head = bytes((state, len(digest)))
        padded = digest.ljust(32, b"\0")
        data = _MARK.pack(state, len(digest), 0, zlib.crc32(head + padded), padded)
        _write(self._chunks, data, (self._first + number) * MARK_BYTES)


def _write(descriptor: int, data: bytes, at: int) -> None:
    """Write all bytes; a nearly full disk may first take a part.

    Raises:
        RecordsFailed: The disk is full or fails.
    """
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


def _pack_row(row: StatusRow) -> bytes:
    if row is EMPTY:
        return _NOTHING
    return _pack_fields(row.state, row.tries, row.copied)


def _pack_fields(state: RecordState, tries: int, copied: CopiedFile) -> bytes:
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
        _STATES[state], tries, CopiedFile(size, mtime_ns, inode, digest[:length], Flag(flags) if flags else NO_FLAG)
    )
