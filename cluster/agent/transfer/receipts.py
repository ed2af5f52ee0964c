"""What a transfer did: a line for every file, a digest over the lines, and the sum of it.

`recheck` compares a destination with the lines: for bits that flip at rest, long after the transfer."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from cluster.agent.files import join, kind_of
from cluster.agent.transfer.digests import combine, digest_on_disk, hasher
from cluster.agent.transfer.errors import TransferFailed, os_message
from cluster.agent.transfer.file_copy import open_source
from cluster.agent.transfer.manifest import DIRECTORY, FILE, LINK, Manifest, Record
from cluster.agent.transfer.options import Algorithm, Item, Options, chunk_bytes_again
from cluster.agent.transfer.progress import nothing
from cluster.agent.transfer.record_paths import RecordPaths
from cluster.agent.transfer.status_table import Flag, State, StatusRow, StatusTable
from cluster.system import is_disk_full
from replica.model import LeftOut

LEFT_OUT_NAMED_MAX: Final = 16
"""Things left out that the receipt itself names, count; the lines name all."""

_BLOCK_BYTES: Final = 256 * 1024
_LOOK_RECORDS: Final = 4096


class Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One file, directory, link or thing left out. Sizes are bytes, times nanoseconds since the epoch."""

    item: int
    kind: str
    """file, directory, link, left out"""
    path: str
    """Beneath the item; bytes that are no UTF-8 as backslash escapes."""
    path_hex: str = ""
    """The path's bytes, where they are no UTF-8."""
    size: int = 0
    mtime_ns: int = 0
    mode: str = ""
    digest: str = ""
    chunk_bytes: int = 0
    """Where the digest is over the digests of chunks: their length."""
    flags: tuple[str, ...] = ()
    """What is to be said of it; `was_there`: a directory that keeps what it had."""
    reason: str = ""
    target: str = ""
    """What a link says; bytes that are no UTF-8 as backslash escapes."""


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where an item went: at the head of the lines, and not in their digest, which is of what was moved alone."""

    place: int
    """The item's number, which its lines name it by."""
    kind: str
    """file, directory"""
    root: str
    """Where its path begins: a directory outside, or a variable of the job such as $DW_JOB_STRIPED."""
    path_hex: str
    """The bytes of the rest of it."""


_PLACE: Final = b'{"place":'


class Summed:
    """Lines as they are written, and what they come to."""

    def __init__(self, options: Options, items: Sequence[Item] = (), *, complete: bool = True) -> None:
        """Begin; of a transfer that is not complete, what was not moved counts as left out."""
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
        """The digest over all lines so far."""
        return f"{self._options.algorithm}:{self._taken.digest().hex()}"

    def take(self, record: Record, row: StatusRow) -> bytes | None:
        """Return the line of a record, None if nothing has been done about it."""
        if record.kind == FILE:
            self.retries += row.tries
            if row.state is not State.DONE:
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
            if row.state not in (State.MADE, State.THERE):
                return None
            self.directories += 1
            flags = _words(row.copied.flags)
            self.stripped += bool(row.copied.flags & Flag.SETID_STRIPPED)
            line = _line(
                record,
                kind="directory",
                mtime_ns=record.mtime_ns,
                mode=f"{record.mode & 0o3777:04o}",
                flags=flags if row.state is State.MADE else ("was_there",),
            )
        elif record.kind == LINK:
            if row.state is not State.DONE:
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
        """Return what stands before the lines."""
        return b"".join(
            self._encoder.encode(
                Place(
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
        """Take lines into the digest, in their order."""
        self._taken.update(lines)

    def _why(self, record: Record) -> str:
        """Return why something was left out."""
        if not record.mode:
            return record.reason
        stays = "; it stays at the source" if self._moved and self._moved[record.item] else ""
        to = f" to {_text(record.target)}" if record.target else ""
        return f"a {kind_of(record.mode)}{to}{', ' if record.reason else ''}{record.reason}{stays}"

    def _leave_out(self, record: Record, reason: str) -> Line:
        line = _line(record, kind="left out", reason=reason)
        self.left_out += 1
        if len(self.left_out_first) < LEFT_OUT_NAMED_MAX:
            self.left_out_first.append(LeftOut(line.path or self._named(record.item), reason))
        return line

    def _named(self, item: int) -> str:
        """Return how an item is called that is all that was left out."""
        return _text(os.fsencode(self._items[item].source.path)) if self._items else ""


def write_lines(descriptor: int, manifest: Manifest, table: StatusTable, summed: Summed) -> None:
    """Write the lines of all records durably; if the disk has no room, then only `summed` has them. OSError."""
    os.ftruncate(descriptor, 0)
    os.lseek(descriptor, 0, os.SEEK_SET)
    kept, block = _written(descriptor, bytearray(summed.head())), bytearray()
    for record, row in with_rows(manifest, table):
        data = summed.take(record, row)
        if data is None:
            continue
        block += data
        if len(block) >= _BLOCK_BYTES:
            summed.digest_more(block)
            kept = kept and _written(descriptor, block)
            block.clear()
    summed.digest_more(block)
    if kept:
        _written(descriptor, block, durably=True)


def _written(descriptor: int, block: bytearray, *, durably: bool = False) -> bool:
    view = memoryview(bytes(block))
    try:
        while view:
            view = view[os.write(descriptor, view) :]
        if durably:
            os.fsync(descriptor)
    except OSError as error:
        if not is_disk_full(error):
            raise
        # Half of the lines would look like all of them, and take room that others need.
        os.ftruncate(descriptor, 0)
        return False
    return True


def with_rows(manifest: Manifest, table: StatusTable) -> Iterator[tuple[Record, StatusRow]]:
    """Yield every record with what is kept of it. OSError."""
    known: list[StatusRow] = []
    base = 0
    for record in manifest.records():
        if record.index >= base + len(known):
            base = record.index
            known = table.many(base, _LOOK_RECORDS)
        yield record, known[record.index - base]


def _text(path: bytes) -> str:
    return path.decode("utf-8", "backslashreplace")


def _line(record: Record, **fields: Any) -> Line:
    try:
        text = record.path.decode()
        exact = ""
    except UnicodeDecodeError:
        text = _text(record.path)
        exact = record.path.hex()
    return Line(item=record.item, path=text, path_hex=exact, **fields)


def _words(flags: Flag) -> tuple[str, ...]:
    if not flags:
        return ()
    # Which attempt moved it is in the counts: the lines of two attempts at the same files are the same.
    return tuple(flag.name.lower() for flag in Flag if flag in flags and flag is not Flag.RESUMED and flag.name)


def read_lines(descriptor: int) -> Iterator[Line]:
    """Yield the lines of an open file of receipts, from its start. ValueError if one is damaged, OSError."""
    decoder = msgspec.json.Decoder(Line)
    for number, line in raw_lines(descriptor):
        try:
            yield decoder.decode(line)
        except msgspec.DecodeError as error:
            raise ValueError(f"line {number} of the receipts is damaged: {error}") from error


def raw_lines(descriptor: int) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of an open file of receipts as they were digested, each with its number in the file. OSError."""
    with os.fdopen(os.dup(descriptor), "rb") as file:
        file.seek(0)
        for number, line in enumerate(file, start=1):
            if not line.startswith(_PLACE):
                yield number, line


def read_places(descriptor: int) -> list[Place]:
    """Return where the items of an open file of receipts went. ValueError if that is damaged, OSError."""
    decoder = msgspec.json.Decoder(Place)
    found: list[Place] = []
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
                raise ValueError(f"line {number + 1} of the receipts is damaged: it is not in its order")
            found.append(place)
    return found


class Difference(NamedTuple):
    """File that is not what was moved there."""

    path: str
    """The destination, as messages name it."""
    why: str


def recheck(
    receipts: int, items: Sequence[Item], algorithm: Algorithm, advanced: Callable[[int, int], None] = nothing
) -> Iterator[Difference]:
    """Yield the files of an open file of receipts that are not at the items' destinations as they were put there.

    Read from storage, not from memory. Sizes alone are compared where a receipt has no digest. `advanced` is called
    with the files and bytes that were checked since the last time. ValueError if the receipts are damaged, OSError.
    """
    destinations = [item._replace(source=item.destination) for item in items]
    with contextlib.closing(RecordPaths(destinations, "")) as paths:
        for number, line in enumerate(read_lines(receipts)):
            if line.kind in ("file", "link"):
                if line.item >= len(items):
                    raise ValueError(f"the receipts are damaged: they name item {line.item + 1} of {len(items)}")
                path = bytes.fromhex(line.path_hex) if line.path_hex else os.fsencode(line.path)
                record = Record(number, line.item, FILE, path, line.size, 0, 0, 0, 0, 0, 0, 1)
                shown = join(items[line.item].destination.path, (line.path,) if line.path else ())
                why = _difference(paths, record, line, shown, algorithm, advanced)
                advanced(1, 0)
                if why is not None:
                    yield Difference(shown, why)


def _difference(
    paths: RecordPaths,
    record: Record,
    line: Line,
    shown: str,
    algorithm: Algorithm,
    advanced: Callable[[int, int], None],
) -> str | None:
    if line.kind == "link":
        return _link_difference(paths, record, line)
    try:
        # As a source: nothing is made on the way.
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


def _link_difference(paths: RecordPaths, record: Record, line: Line) -> str | None:
    try:
        directory, name = paths.source(record)
        found = _text(os.readlink(name, dir_fd=directory))
    except TransferFailed as error:
        return str(error)
    except OSError as error:
        return "is no link any more" if error.errno == errno.EINVAL else os_message(error)
    return None if found == line.target else f"is a link to {found} instead of {line.target}"


def _digest(descriptor: int, line: Line, algorithm: Algorithm, advanced: Callable[[int, int], None]) -> bytes:
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
