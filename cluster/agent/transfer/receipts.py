"""Receipts of a transfer: a line for each file, a digest over the lines, and totals.

`recheck` compares a destination with the lines, to detect bits that changed long after the transfer.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from forebay.cluster.agent.files import join, kind_of
from forebay.cluster.agent.transfer.digests import combine, digest_on_disk, hasher
from forebay.cluster.agent.transfer.errors import TransferFailed, os_message
from forebay.cluster.agent.transfer.file_copy import open_source
from forebay.cluster.agent.transfer.manifest import DIRECTORY, FILE, LINK, ManifestRecord, TransferManifest
from forebay.cluster.agent.transfer.options import Algorithm, TransferItem, TransferOptions, chunk_bytes_again
from forebay.cluster.agent.transfer.progress import no_op
from forebay.cluster.agent.transfer.record_paths import RecordPaths
from forebay.cluster.agent.transfer.status_table import Flag, RecordState, StatusRow, StatusTable
from forebay.cluster.system import is_disk_full
from forebay.replica.model import LeftOut

LEFT_OUT_NAMED_MAX: Final = 16
"""Left-out entries listed in the receipt itself, count; the lines list all."""

_BLOCK_BYTES: Final = 256 * 1024
_LOOK_RECORDS: Final = 4096


class ReceiptLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Line of a file, directory, link or left-out entry. Sizes are bytes, times nanoseconds since the epoch."""

    item: int
    kind: str
    """file, directory, link, left out"""
    path: str
    """Path below the item; invalid UTF-8 as backslash escapes."""
    path_hex: str = ""
    """Bytes of the path, if they are not UTF-8."""
    size: int = 0
    mtime_ns: int = 0
    mode: str = ""
    digest: str = ""
    chunk_bytes: int = 0
    """Chunk length, if the digest is over the digests of chunks."""
    flags: tuple[str, ...] = ()
    """Remarks; `was_there` means a directory that kept its metadata."""
    reason: str = ""
    target: str = ""
    """Text of a link; invalid UTF-8 as backslash escapes."""


class ReceiptItem(msgspec.Struct, frozen=True, kw_only=True):
    """Destination of an item, at the head of the lines and not in their digest, which covers only what was moved."""

    place: int
    """Number of the item, used by its lines."""
    kind: str
    """file, directory"""
    root: str
    """Start of the path: a directory outside, or a variable of the job such as $DW_JOB_STRIPED."""
    path_hex: str
    """Bytes of the rest of the path."""


_PLACE: Final = b'{"place":'


class ReceiptBuilder:
    """Lines of a receipt in the making, with totals and digest."""

    def __init__(self, options: TransferOptions, items: Sequence[TransferItem] = (), *, complete: bool = True) -> None:
        """Begin; in an incomplete transfer, files not moved count as left out."""
        self._options = options
        self._moved = [item.move for item in items]
        self._items = items
        self._complete = complete
        self._taken = hasher(options.algorithm)
        self._encoder = msgspec.json.Encoder()
        self.files = self.directories = self.links = self.size_bytes = self.left_out = self.stripped = self.done = 0
        self.dangling = 0
        self.retries = 0
        self.left_out_first: list[LeftOut] = []

    @property
    def digest(self) -> str:
        """Digest over all lines so far."""
        return f"{self._options.algorithm}:{self._taken.digest().hex()}"

    def take(self, record: ManifestRecord, row: StatusRow) -> bytes | None:
        """Return the line of a record, or None if it was not processed."""
        if record.kind == FILE:
            self.retries += row.tries
            if row.state is not RecordState.DONE:
                if not self._complete:
                    self._leave_out(record, "not copied")
                return None
            copied = row.copied
            self.files += 1
            self.size_bytes += copied.size
            self.stripped += bool(copied.flags and copied.flags & Flag.SETID_STRIPPED)
            line = _line(
                record,
                kind="file",
                size=copied.size,
                mtime_ns=copied.mtime_ns,
                mode=f"{record.mode & 0o777:04o}",
                digest=copied.digest.hex(),
                chunk_bytes=chunk_bytes_again(record.size, copied.size, self._options)
                if record.is_large and copied.digest
                else 0,
                flags=_words(copied.flags),
            )
        elif record.kind == DIRECTORY:
            if row.state not in (RecordState.MADE, RecordState.THERE):
                return None
            self.directories += 1
            flags = _words(row.copied.flags)
            self.stripped += bool(row.copied.flags & Flag.SETID_STRIPPED)
            line = _line(
                record,
                kind="directory",
                mtime_ns=record.mtime_ns,
                mode=f"{record.mode & 0o3777:04o}",
                flags=flags if row.state is RecordState.MADE else ("was_there",),
            )
        elif record.kind == LINK:
            if row.state is not RecordState.DONE:
                if not self._complete:
                    self._leave_out(record, "not copied")
                return None
            self.links += 1
            self.dangling += bool(record.reason)
            line = _line(
                record, kind="link", mtime_ns=record.mtime_ns, target=_text(record.target), reason=record.reason
            )
        else:
            line = self._leave_out(record, self._why(record))
        return self._encoder.encode(line) + b"\n"

    def head(self) -> bytes:
        """Return the lines with the destinations, which precede the others."""
        return b"".join(
            self._encoder.encode(
                ReceiptItem(
                    place=number,
                    kind=item.kind.value,
                    root=os.fsencode(item.destination.shown).decode("utf-8", "backslashreplace"),
                    path_hex=b"/".join(map(os.fsencode, item.destination.parts)).hex(),
                )
            )
            + b"\n"
            for number, item in enumerate(self._items)
        )

    def digest_more(self, lines: bytes | bytearray) -> None:
        """Add lines to the digest, in order."""
        self._taken.update(lines)

    def _why(self, record: ManifestRecord) -> str:
        """Return the reason for leaving out a record."""
        if not record.mode:
            return record.reason
        stays = "; it stays at the source" if self._moved and self._moved[record.item] else ""
        to = f" to {_text(record.target)}" if record.target else ""
        return f"a {kind_of(record.mode)}{to}{', ' if record.reason else ''}{record.reason}{stays}"

    def _leave_out(self, record: ManifestRecord, reason: str) -> ReceiptLine:
        line = _line(record, kind="left out", reason=reason)
        self.left_out += 1
        if len(self.left_out_first) < LEFT_OUT_NAMED_MAX:
            self.left_out_first.append(LeftOut(line.path or self._item_name(record.item), reason))
        return line

    def _item_name(self, item: int) -> str:
        """Return the name of an item that was left out as a whole."""
        return _text(os.fsencode(self._items[item].source.path)) if self._items else ""


def write_lines(descriptor: int, manifest: TransferManifest, table: StatusTable, summed: ReceiptBuilder) -> None:
    """Write the lines of all records durably; if the disk is full, only add them to `summed`.

    Raises:
        OSError: The disk fails or the records cannot be read.
    """
    os.ftruncate(descriptor, 0)
    os.lseek(descriptor, 0, os.SEEK_SET)
    kept, block = _write_block(descriptor, bytearray(summed.head())), bytearray()
    for record, row in with_rows(manifest, table):
        data = summed.take(record, row)
        if data is None:
            continue
        block += data
        if len(block) >= _BLOCK_BYTES:
            summed.digest_more(block)
            kept = kept and _write_block(descriptor, block)
            block.clear()
    summed.digest_more(block)
    if kept:
        _write_block(descriptor, block, durably=True)


def _write_block(descriptor: int, block: bytearray, *, durably: bool = False) -> bool:
    view = memoryview(bytes(block))
    try:
        while view:
            view = view[os.write(descriptor, view) :]
        if durably:
            os.fsync(descriptor)
    except OSError as error:
        if not is_disk_full(error):
            raise
        # A part of the lines would look complete and take space that others need.
        os.ftruncate(descriptor, 0)
        return False
    return True


def with_rows(manifest: TransferManifest, table: StatusTable) -> Iterator[tuple[ManifestRecord, StatusRow]]:
    """Yield every record with its row.

    Raises:
        OSError: The records cannot be read.
    """
    known: list[StatusRow] = []
    base = 0
    for record in manifest.records():
        if record.index >= base + len(known):
            base = record.index
            known = table.many(base, _LOOK_RECORDS)
        yield record, known[record.index - base]


def _text(path: bytes) -> str:
    return path.decode("utf-8", "backslashreplace")


def _line(record: ManifestRecord, **fields: Any) -> ReceiptLine:
    try:
        text = record.path.decode()
        exact = ""
    except UnicodeDecodeError:
        text = _text(record.path)
        exact = record.path.hex()
    return ReceiptLine(item=record.item, path=text, path_hex=exact, **fields)


def _words(flags: Flag) -> tuple[str, ...]:
    if not flags:
        return ()
    # RESUMED is only in the totals, so that two attempts at the same files have the same lines.
    return tuple(flag.name.lower() for flag in Flag if flag in flags and flag is not Flag.RESUMED and flag.name)


def read_lines(descriptor: int) -> Iterator[ReceiptLine]:
    """Yield the lines of an open receipt file, from its start.

    Raises:
        ValueError: A line is damaged.
        OSError: The file cannot be read.
    """
    decoder = msgspec.json.Decoder(ReceiptLine)
    for number, line in raw_lines(descriptor):
        try:
            yield decoder.decode(line)
        except msgspec.DecodeError as error:
            raise ValueError(f"line {number} of the receipts is damaged: {error}") from error


def raw_lines(descriptor: int) -> Iterator[tuple[int, bytes]]:
    """Yield the digested lines of an open receipt file with their line numbers.

    Raises:
        OSError: The file cannot be read.
    """
    with os.fdopen(os.dup(descriptor), "rb") as file:
        file.seek(0)
        for number, line in enumerate(file, start=1):
            if not line.startswith(_PLACE):
                yield number, line


def read_places(descriptor: int) -> list[ReceiptItem]:
    """Return the destinations in an open receipt file.

    Raises:
        ValueError: A line is damaged.
        OSError: The file cannot be read.
    """
    decoder = msgspec.json.Decoder(ReceiptItem)
    found: list[ReceiptItem] = []
    with os.fdopen(os.dup(descriptor), "rb") as file:
        file.seek(0)
        for number, line in enumerate(file):
            if not line.startswith(_PLACE):
                return found
            try:
                place = decoder.decode(line)
            except msgspec.DecodeError as error:
                raise ValueError(f"line {number + 1} of the receipts is damaged: {error}") from error
            if place.place != number:
                raise ValueError(f"line {number + 1} of the receipts is damaged: it is out of order")
            found.append(place)
    return found


class ReceiptDifference(NamedTuple):
    """Destination file that differs from the receipt."""

    path: str
    """Destination path for messages."""
    why: str


def recheck(
    receipts: int, items: Sequence[TransferItem], algorithm: Algorithm, advanced: Callable[[int, int], None] = no_op
) -> Iterator[ReceiptDifference]:
    """Yield the files of an open receipt file that differ at the items' destinations.

    Reads from storage, not from memory; compares only sizes if the receipt has no digest. `advanced` is called with the
    files and bytes checked since its last call.

    Raises:
        ValueError: The receipts are damaged.
        OSError: The receipt file cannot be read.
    """
    destinations = [item._replace(source=item.destination) for item in items]
    with contextlib.closing(RecordPaths(destinations, "")) as paths:
        for number, line in enumerate(read_lines(receipts)):
            if line.kind in ("file", "link"):
                if line.item >= len(items):
                    raise ValueError(f"the receipts are damaged: they refer to item {line.item + 1} of {len(items)}")
                path = bytes.fromhex(line.path_hex) if line.path_hex else os.fsencode(line.path)
                record = ManifestRecord(number, line.item, FILE, path, line.size, 0, 0, 0, 0, 0, 0, 1)
                shown = join(items[line.item].destination.path, (line.path,) if line.path else ())
                why = _difference(paths, record, line, shown, algorithm, advanced)
                advanced(1, 0)
                if why is not None:
                    yield ReceiptDifference(shown, why)


def _difference(
    paths: RecordPaths,
    record: ManifestRecord,
    line: ReceiptLine,
    shown: str,
    algorithm: Algorithm,
    advanced: Callable[[int, int], None],
) -> str | None:
    if line.kind == "link":
        return _link_difference(paths, record, line)
    try:
        # Resolve it like a source, so that no directory is created.
        descriptor, status = open_source(*paths.source(record), shown)
    except TransferFailed as error:
        return str(error)
    except OSError as error:
        return os_message(error)
    try:
        if status.st_size != line.size:
            return f"has {status.st_size} bytes instead of {line.size}"
        if not line.digest:
            return None
        found = _digest(descriptor, line, algorithm, advanced)
        return None if found.hex() == line.digest else f"has the {algorithm} {found.hex()} instead of {line.digest}"
    except OSError as error:
        return os_message(error)
    finally:
        os.close(descriptor)


def _link_difference(paths: RecordPaths, record: ManifestRecord, line: ReceiptLine) -> str | None:
    try:
        directory, name = paths.source(record)
        found = _text(os.readlink(name, dir_fd=directory))
    except TransferFailed as error:
        return str(error)
    except OSError as error:
        return "is no longer a link" if error.errno == errno.EINVAL else os_message(error)
    return None if found == line.target else f"is a link to {found} instead of {line.target}"


def _digest(descriptor: int, line: ReceiptLine, algorithm: Algorithm, advanced: Callable[[int, int], None]) -> bytes:
    if not line.chunk_bytes:
        found = digest_on_disk(descriptor, algorithm)
        advanced(0, line.size)
        return found

    def chunks() -> Iterator[bytes]:
        for offset in range(0, line.size, line.chunk_bytes):
            size_bytes = min(line.chunk_bytes, line.size - offset)
            yield digest_on_disk(descriptor, algorithm, offset, size_bytes)
            advanced(0, size_bytes)

    return combine(algorithm, line.chunk_bytes, chunks())
