"""Job index: for each job, the ledger's revisions that concern the job, each with a note, in separate LMDB files.

The index is derived from the ledger and promises nothing. One process beside the replica writes the index, slightly
behind the applied state. Damage is repaired by rebuilding the index. Each transaction also stores the index's position
and the ledger's digest there, so that an index of another history is detected.

The rows of a job are packed into a few values, and only the last value grows: a row takes about ten bytes beside its
note, and has no key of its own.
"""

import errno
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

import lmdb

from forebay.wal.directory import ends_early, lengthen
from forebay.wal.environment import LMDB_ENGINE, MAP_SIZE_BYTES
from forebay.wal.failures import DATA_FILE, READERS_FILE
from forebay.wal.records import DIGEST_BYTES, GENESIS, DamagedValue, pack_checked, unpack_checked

CLUSTER: Final = 0
"""Key for rejections and for events that concern no job, such as events of pools and nodes."""

JOB_INDEX_VERSION: Final = 2
"""Version of this layout and of the notes. An index of another version is rebuilt."""

VALUE_MAX_BYTES: Final = 1024
"""Maximum size of a value of rows: a quarter of a page, to avoid overflow pages."""

_ROWS: Final = b"rows"
_MARK: Final = b"mark"
_KEY = struct.Struct(">QQ")
_ROW = struct.Struct(">IH")
_POSITION = struct.Struct(f">HQQ{DIGEST_BYTES}s")
_HOLE = struct.Struct(">QQ")
_DELTA_MAX: Final = 0xFFFF_FFFF
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)


class JobIndexRow(NamedTuple):
    """Revision that concerns a job, with its note."""

    revision: int
    note: bytes


class Hole(NamedTuple):
    """Range of entries that the index lacks because a snapshot replaced them, both ends included."""

    first_index: int
    last_index: int


class IndexPosition(NamedTuple):
    """Position of an index: its last entry, and the ledger's revision and digest after it."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which is not used here
    revision: int
    digest: bytes
    holes: tuple[Hole, ...] = ()


NOTHING: Final = IndexPosition(0, 0, GENESIS)
"""Position of an empty index."""


class JobIndexBroken(Exception):
    """Unreadable or unwritable index; the message gives the reason."""


class JobIndex:
    """Job index of one replica, for one process at a time."""

    def __init__(self, directory: Path, *, map_size_bytes: int = MAP_SIZE_BYTES, readonly: bool = False) -> None:
        """Open the index. A missing, outdated or damaged index is replaced by an empty one.

        With `readonly`, open the index without changes while another process owns it.

        Raises:
            OSError: The disk fails or is full.
            JobIndexBroken: The index cannot be read or written; with `readonly`, also a missing or outdated index.
        """
        self._directory = directory
        self._map_size_bytes = map_size_bytes
        self._readonly = readonly
        if readonly:
            self._open()
            return
        directory.mkdir(mode=0o700, exist_ok=True)
        try:
            self._open()
        except JobIndexBroken:
            self.begin_anew()

    @property
    def position(self) -> IndexPosition:
        """Position up to which the ledger is indexed."""
        return self._position

    @property
    def size_bytes(self) -> int:
        """Size of the file on disk."""
        return (self._directory / DATA_FILE).stat().st_blocks * 512

    def begin_anew(self) -> None:
        """Remove the files and start with an empty index.

        Raises:
            OSError: The disk fails.
            JobIndexBroken: LMDB rejects an operation.
        """
        self.close()
        for name in (DATA_FILE, READERS_FILE):
            with suppress(FileNotFoundError):
                os.unlink(self._directory / name)
        self._open()

    def close(self) -> None:
        """Close the files; may be called again."""
        environment: lmdb.Environment | None = getattr(self, "_environment", None)
        if environment is not None:
            environment.close()

    def jobs(self, after: int = -1) -> Iterator[int]:
        """Yield the indexed jobs with an ID greater than `after`, ascending.

        Raises:
            JobIndexBroken: The index is damaged.
        """
        last = after
        while True:
            try:
                with self._environment.begin(self._rows) as transaction:
                    cursor = transaction.cursor()
                    if not cursor.set_range(_KEY.pack(last + 1, 0)):
                        return
                    last = _KEY.unpack(cursor.key())[0]
            except (lmdb.Error, struct.error) as error:
                raise self._failure(error) from error
            yield last

    def rows(self, job: int, after: int = 0) -> list[JobIndexRow]:
        """Return the rows of a job after a revision, oldest first.

        Raises:
            JobIndexBroken: The index is damaged.
        """
        found: list[JobIndexRow] = []
        try:
            with self._environment.begin(self._rows) as transaction:
                cursor = transaction.cursor()
                more = _seek_value(cursor, job, after)
                while more:
                    key, value = cursor.item()
                    of, first = _KEY.unpack(key)
                    if of != job:
                        break
                    found += _unpack(first, unpack_checked(key, value))
                    more = cursor.next()
        except (lmdb.Error, DamagedValue, struct.error) as error:
            raise self._failure(error) from error
        return found if not after else [row for row in found if row.revision > after]

    def add(self, rows: Mapping[int, Sequence[JobIndexRow]], position: IndexPosition) -> None:
        """Append rows to the jobs' rows, durable on return. No new row may be older than a present one.

        Raises:
            OSError: The disk is full; nothing was added.
            JobIndexBroken: The index cannot be read or written.
        """
        try:
            with self._environment.begin(self._rows, write=True) as transaction:
                cursor = transaction.cursor()
                for job in sorted(rows):
                    key, body = _last_value(cursor, job)
                    for row in rows[job]:
                        first = _KEY.unpack(key)[1] if key else 0
                        size_bytes = len(body) + _ROW.size + len(row.note)
                        if not key or size_bytes > VALUE_MAX_BYTES or row.revision - first > _DELTA_MAX:
                            if key:
                                transaction.put(key, pack_checked(key, bytes(body)))
                            key, body, first = _KEY.pack(job, row.revision), bytearray(), row.revision
                        body += _ROW.pack(row.revision - first, len(row.note)) + row.note
                    if key:
                        transaction.put(key, pack_checked(key, bytes(body)))
                transaction.put(_MARK, pack_checked(_MARK, _pack(position)), db=self._mark)
            lengthen(self._environment, self._directory / DATA_FILE)
        except (OSError, lmdb.Error, DamagedValue, struct.error) as error:
            raise self._failure(error) from error
        self._position = position

    def _open(self) -> None:
        try:
            self._environment = lmdb.open(
                os.fspath(self._directory),
                map_size=self._map_size_bytes,
                max_dbs=2,
                mode=0o600,
                readonly=self._readonly,
                create=not self._readonly,
                lib_version=LMDB_ENGINE,
            )
            if self._environment.info()["last_txnid"] and ends_early(self._environment, self._directory / DATA_FILE):
                raise JobIndexBroken(f"{self._directory / DATA_FILE} ends before its last page")
            self._rows = self._environment.open_db(_ROWS, create=not self._readonly)
            self._mark = self._environment.open_db(_MARK, create=not self._readonly)
            with self._environment.begin(self._mark) as transaction:
                value = transaction.get(_MARK)
            self._position = NOTHING if value is None else _position(unpack_checked(_MARK, value))
        except (lmdb.Error, DamagedValue, struct.error) as error:
            raise self._failure(error) from error

    def _failure(self, error: Exception) -> JobIndexBroken | OSError:
        """Return the exception for an error. A full disk is an OSError, because the index stays intact."""
        path, code = self._directory / DATA_FILE, getattr(error, "code", 0)
        if isinstance(error, lmdb.Error) and code in _NO_ROOM:
            return OSError(code, os.strerror(code), os.fspath(path))
        return JobIndexBroken(f"{path}: {error}")


def _last_value(cursor: "lmdb.Cursor[bytes]", job: int) -> tuple[bytes, bytearray]:
    """Return key and body of a job's last value; both empty if the job has no rows."""
    found = cursor.prev() if cursor.set_range(_KEY.pack(job + 1, 0)) else cursor.last()
    if not found:
        return b"", bytearray()
    key, value = cursor.item()
    if _KEY.unpack(key)[0] != job:
        return b"", bytearray()
    return key, bytearray(unpack_checked(key, value))


def _seek_value(cursor: "lmdb.Cursor[bytes]", job: int, after: int) -> bool:
    """Move to the first value of a job that may hold rows after `after`; return False if there is none."""
    key = _KEY.pack(job, after)
    if cursor.set_range(key) and cursor.key() == key:
        return True
    if cursor.prev() if cursor.key() else cursor.last():
        if cursor.key()[: _KEY.size // 2] == key[: _KEY.size // 2]:
            return True
        return bool(cursor.next())
    return bool(cursor.set_range(key))


def _unpack(first: int, body: bytes) -> list[JobIndexRow]:
    found, at = list[JobIndexRow](), 0
    while at < len(body):
        delta, note_bytes = _ROW.unpack_from(body, at)
        at += _ROW.size
        if at + note_bytes > len(body):
            raise DamagedValue("a row has data after its value")
        found.append(JobIndexRow(first + delta, body[at : at + note_bytes]))
        at += note_bytes
    return found


def _pack(position: IndexPosition) -> bytes:
    head = _POSITION.pack(JOB_INDEX_VERSION, position.index, position.revision, position.digest)
    return head + b"".join(_HOLE.pack(*hole) for hole in position.holes)


def _position(body: bytes) -> IndexPosition:
    version, index, revision, digest = _POSITION.unpack_from(body)
    if version != JOB_INDEX_VERSION:
        raise DamagedValue(f"the index has version {version}")
    return IndexPosition(index, revision, digest, tuple(map(Hole._make, _HOLE.iter_unpack(body[_POSITION.size :]))))
