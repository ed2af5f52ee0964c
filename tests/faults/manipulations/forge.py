"""Manipulations of a stopped replica's directory by an insider: bytes, rows, whole histories, snapshots.

Each is done as well as it can be by somebody who knows all formats and has every key that is on the replica's disk:
checksums are right afterwards, digests are chained to the end, and what would contradict is altered as well or removed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import lmdb
from msgspec.structs import replace

from forebay.replica.messages.entries import Batch
from forebay.replica.messages.entries import Entry as Settled
from forebay.replica.state.state import EMPTY, State
from forebay.snapshots.finalize import SnapshotName, write_snapshot
from forebay.snapshots.image import Image
from forebay.snapshots.restore import load_snapshot
from forebay.wal import records
from forebay.wal.codec import EntryKind, decode_batch, encode_batch, kind_of, revision_after
from forebay.wal.failures import DATA_FILE, LOG_FILE
from forebay.wal.records import ChainRow, Entry, Gap, HardState, Marks
from forebay.wal.sectors import BLOCK_BYTES
from tests.faults.manipulations.site import MAP_SIZE_BYTES, folded

FLIPPED: Final = 0x10
CRC_BYTES: Final = 4
PAGE_BYTES: Final = 4096
STAYS: Final = object()

Rewrite = Callable[[Entry], Entry | None]
"""Returns what is to stand in the place of an entry: itself, or another one of the same index; None: nothing."""


class Rows:
    """The tables of a stopped replica, in one transaction."""

    def __init__(self, transaction: lmdb.Transaction, tables: Mapping[bytes, lmdb._Database]) -> None:
        self.transaction = transaction
        self.tables = tables

    def raw(self, table: bytes, key: bytes) -> bytes:
        """Return the stored value of a row."""
        value = self.transaction.get(key, db=self.tables[table])
        assert value is not None, f"there is no row {key.hex()} in {table.decode()}"
        return bytes(value)

    def has(self, table: bytes, key: bytes) -> bool:
        """Say whether there is such a row."""
        return self.transaction.get(key, db=self.tables[table]) is not None

    def put(self, table: bytes, key: bytes, value: bytes | None) -> None:
        """Put a stored value, or delete the row."""
        if value is None:
            assert self.transaction.delete(key, db=self.tables[table])
        else:
            self.transaction.put(key, value, db=self.tables[table])

    def entry(self, index: int) -> Entry:
        """Return an entry."""
        key = records.index_key(index)
        return records.unpack_entry(key, self.raw(records.ENTRIES, key))

    def put_entry(self, entry: Entry) -> None:
        """Put an entry."""
        key = records.index_key(entry.index)
        self.put(records.ENTRIES, key, records.pack_entry(key, entry))

    def chain(self, index: int) -> ChainRow:
        """Return the chain row of an entry."""
        key = records.index_key(index)
        return ChainRow(records.GENESIS, 0) if not index else records.unpack_chain(key, self.raw(records.CHAIN, key))

    def put_chain(self, index: int, row: ChainRow) -> None:
        """Put the chain row of an entry."""
        key = records.index_key(index)
        self.put(records.CHAIN, key, records.pack_chain(key, row))

    def put_revision(self, revision: int, index: int | None) -> None:
        """Put or delete the row of a revision."""
        key = records.index_key(revision)
        self.put(records.REVISIONS, key, None if index is None else records.pack_number(key, index))

    def put_gap(self, gap: Gap) -> None:
        """Put a gap."""
        key = records.index_key(gap.first_index)
        self.put(records.GAPS, key, records.pack_gap(key, gap))

    @property
    def marks(self) -> Marks:
        """The marks."""
        return records.unpack_marks(self.raw(records.STATE, records.MARKS_KEY))

    def alter_marks(self, **changes: Any) -> None:
        """Alter some of the marks."""
        self.put(records.STATE, records.MARKS_KEY, records.pack_marks(self.marks._replace(**changes)))

    @property
    def hard(self) -> HardState:
        """Term and vote."""
        return records.unpack_hard(self.raw(records.STATE, records.HARD_KEY))

    def alter_hard(self, **changes: Any) -> None:
        """Alter term or vote."""
        self.put(records.STATE, records.HARD_KEY, records.pack_hard(self.hard._replace(**changes)))


@contextmanager
def rows_of(home: Path) -> Iterator[Rows]:
    """Open the tables of a replica behind its back."""
    environment = lmdb.open(str(home / "wal"), max_dbs=len(records.TABLES), map_size=MAP_SIZE_BYTES, lib_version=0)
    try:
        tables = {name: environment.open_db(name, create=False) for name in records.TABLES}
        with environment.begin(write=True) as transaction:
            yield Rows(transaction, tables)
    finally:
        environment.close()


def flip(path: Path, offset: int) -> None:
    """Flip one bit of a file; a negative offset counts from its end."""
    with path.open("r+b") as file:
        file.seek(offset, os.SEEK_SET if offset >= 0 else os.SEEK_END)
        position = file.tell()
        (byte,) = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ FLIPPED]))


def flip_index(home: Path) -> None:
    """Flip one bit of what the index by job says of the first job: every version of it that the file has."""
    environment = lmdb.open(str(home / "index"), max_dbs=4, readonly=True, lib_version=0)
    table = environment.open_db(b"rows", create=False)
    with environment.begin() as transaction, transaction.cursor(table) as cursor:
        assert cursor.first()
        value = bytes(cursor.value())
    environment.close()
    path = home / "index" / DATA_FILE
    path.write_bytes(path.read_bytes().replace(value, value[:-1] + bytes([value[-1] ^ FLIPPED])))


def flip_row(home: Path, table: bytes, key: bytes, *, offset: int = -1, key_byte: int | None = None) -> None:
    """Flip one bit of a stored value, or of its key, in the data file: every version of it that the file has."""
    with rows_of(home) as rows:
        stored = rows.raw(table, key)
    path = home / "wal" / DATA_FILE
    content = bytearray(path.read_bytes())
    wanted = key + stored
    position, found = content.find(wanted), 0
    while position >= 0:
        at = position + key_byte if key_byte is not None else position + len(key) + offset % len(stored)
        content[at] ^= FLIPPED
        found += 1
        position = content.find(wanted, position + 1)
    assert found, "the row is not in the file"
    path.write_bytes(content)


def flip_meta(home: Path) -> None:
    """Flip one bit of the transaction number of the newer meta page of the data file."""
    path = home / "wal" / DATA_FILE
    content = path.read_bytes()
    at = max((0, PAGE_BYTES), key=lambda page: int.from_bytes(content[page + 144 : page + 152], "little"))
    flip(path, at + 144)


def flip_log(home: Path, *, record: bool) -> None:
    """Flip one bit of the log of syncs: of its first record, or of the block before it."""
    flip(home / "wal" / LOG_FILE, BLOCK_BYTES + 100 if record else 20)


def cut(path: Path, size_bytes: int) -> None:
    """Cut a file by some bytes at its end."""
    os.truncate(path, path.stat().st_size - size_bytes)


def zero(path: Path, offset: int, size_bytes: int) -> None:
    """Put zeros into a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(bytes(size_bytes))


def cut_tail(home: Path, count: int, *, below_base: bool = False) -> None:
    """Set the ledger back by its last entries, as if they had never come; the newest snapshots with it."""
    with rows_of(home) as rows:
        marks = rows.marks
        # Entries that were not applied when the replica stopped have no row in the chain; they go, too.
        applied = marks.last_index
        while not rows.has(records.CHAIN, records.index_key(applied)):
            applied -= 1
        last = applied - count
        for index in range(last + 1, marks.last_index + 1):
            rows.put(records.ENTRIES, records.index_key(index), None)
        for index in range(last + 1, applied + 1):
            before, after = rows.chain(index - 1), rows.chain(index)
            if after.revision > before.revision:
                rows.put_revision(after.revision, None)
        row = rows.chain(last)
        for index in range(last + 1, applied + 1):
            rows.put(records.CHAIN, records.index_key(index), None)
        rows.alter_marks(
            last_index=last,
            commit_index=last,
            applied_index=last,
            applied_revision=row.revision,
            applied_digest=row.digest,
            **({"base_index": last, "base_term": rows.entry(last).term} if below_base else {}),
        )
    forget_derived(home)
    for path in snapshots_of(home):
        name = SnapshotName.parse(path.name)
        if name is not None and name.index > last:
            path.unlink()


def forget_derived(home: Path) -> None:
    """Remove what a replica derives again: the index by job, and the tiles; its last checkpoint with them."""
    for name in ("index", "tlog"):
        shutil.rmtree(home / name, ignore_errors=True)


def snapshots_of(home: Path) -> list[Path]:
    """Return the snapshots of a replica, the oldest first."""
    return sorted(path for path in (home / "snapshots").iterdir() if SnapshotName.parse(path.name) is not None)


def rewrite(home: Path, change: Rewrite, *, folds: bool = False) -> None:
    """Rewrite the history of a replica and chain it to its end; what lies beside it is made to fit.

    Snapshots speak of the new digest and revision; `folds`: they have the state that the new history leads to, too.
    """
    states: dict[int, State] = {}
    chain: dict[int, ChainRow] = {}
    with rows_of(home) as rows:
        marks, row, state = rows.marks, ChainRow(records.GENESIS, 0), EMPTY
        wanted = {name.index for path in snapshots_of(home) if (name := SnapshotName.parse(path.name)) is not None}
        for index in range(1, marks.last_index + 1):
            before, held = row, rows.entry(index)
            entry = change(held) or held
            old = rows.chain(index)
            try:
                revision = revision_after(entry.data, before.revision)
            except Exception:  # what cannot be decoded settles what was there
                revision = old.revision
            row = ChainRow(records.chain_digest(before.digest, entry), revision)
            if folds:
                state = folded(state, entry)
            if index in wanted:
                states[index] = state
            chain[index] = row
            if row == old and entry == held:
                continue
            rows.put_entry(entry)
            rows.put_chain(index, row)
            if old.revision != row.revision:
                key = records.index_key(old.revision)
                if rows.transaction.get(key, db=rows.tables[records.REVISIONS]) is not None:
                    rows.put_revision(old.revision, None)
            if row.revision > before.revision:
                rows.put_revision(row.revision, index)
        rows.alter_marks(
            applied_digest=row.digest,
            applied_revision=row.revision,
            base_term=rows.entry(marks.base_index).term,
        )
    for path in snapshots_of(home):
        image = load_snapshot(path)
        row = chain[image.index]
        state = states[image.index] if folds else replace(image.state, revision=row.revision)
        path.unlink()
        write_snapshot(path.parent, replace(image, state=state, chain_digest=row.digest))
    shutil.rmtree(home / "index", ignore_errors=True)


def forge_snapshots(home: Path, change: Callable[[State], State]) -> None:
    """Put other states into all snapshots; everything in them that is derived is derived from the new state."""
    for path in snapshots_of(home):
        image: Image = load_snapshot(path)
        path.unlink()
        write_snapshot(path.parent, replace(image, state=change(image.state)))
    # States of former moments lie in the index as well.
    shutil.rmtree(home / "index", ignore_errors=True)


def in_batch(index: int, change: Callable[[Batch], Batch]) -> Rewrite:
    """Return what rewrites the batch of one entry."""

    def rewritten(entry: Entry) -> Entry:
        if entry.index != index:
            return entry
        assert kind_of(entry.data) is EntryKind.BATCH
        batch = decode_batch(entry.data)
        changed = change(batch)
        assert changed != batch
        return entry._replace(data=encode_batch(changed))

    return rewritten


def in_command(index: int, change: Callable[[Settled], Settled]) -> Rewrite:
    """Return what rewrites the first command of one entry."""
    return in_batch(index, lambda batch: replace(batch, entries=(change(batch.entries[0]), *batch.entries[1:])))


def in_event(index: int, change: Callable[[Any], Any]) -> Rewrite:
    """Return what rewrites the first event of the first command of one entry."""
    return in_command(index, lambda one: replace(one, events=(change(one.events[0]), *one.events[1:])))


def in_data(index: int, change: Callable[[bytes], bytes]) -> Rewrite:
    """Return what rewrites the bytes of one entry."""
    return lambda entry: entry._replace(data=change(entry.data)) if entry.index == index else entry
