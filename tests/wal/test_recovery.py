"""Recovery table: every condition is produced for real, and the documented reaction must follow."""

import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lmdb
import pytest

from forebay.wal import Environment, Journal, RecoveryRefused, records
from forebay.wal.environment import DATA_FILE
from forebay.wal.failures import READERS_FILE, Condition, Reaction
from forebay.wal.ledger import Ledger
from forebay.wal.records import CHAIN, ENTRIES, STATE, ChainRow, HardState, Marks
from forebay.wal.replay import pack
from forebay.wal.sectors import BLOCK_BYTES, SECTOR_BYTES
from tests.repo.tree import ROOT
from tests.wal.logs import (
    bit_flipped,
    content_of,
    foreign_log,
    forged,
    good_sync,
    log_cannot_be_made,
    log_edited,
    made_with_log,
    older_data,
    replaced,
    rewrite,
    sector_lost,
)
from tests.wal.support import CLUSTER, MAP_SIZE_BYTES, REPLICA, apply, edit, entry, fill, open_env, opened

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
META_TXNID_OFFSET = 16 + 4 + 4 + 8 + 8 + 48 + 48 + 8
Change = Callable[[lmdb.Transaction, dict[bytes, object]], None]


def made(directory: Path) -> None:
    """Create nine entries in terms 1 and 2, five of them applied, base 2."""
    with opened(directory) as journal:
        fill(journal, 6, applied=5)
        journal.compact_to(2)
        fill(journal, 9, term=2)
        journal.flush_hints()


def put(table: bytes, key: bytes, value: bytes) -> Callable[[Path], None]:
    return edited(lambda transaction, tables: transaction.put(key, value, db=tables[table]))


def delete(table: bytes, key: bytes) -> Callable[[Path], None]:
    return edited(lambda transaction, tables: transaction.delete(key, db=tables[table]))


def edited(change: Callable[..., object]) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        made(directory)
        edit(directory, lambda transaction, tables: change(transaction, tables) and None)

    return damage


def flipped(table: bytes, key: bytes, bit: int = -1) -> Callable[[Path], None]:
    """Return a damage: flip one bit of a stored value, as a disk without checksums may do."""

    def flip(transaction: lmdb.Transaction, tables: dict[bytes, object]) -> bool:
        value = bytearray(transaction.get(key, db=tables[table]))
        value[bit // 8 % len(value)] ^= 1 << (bit % 8)
        return transaction.put(key, bytes(value), db=tables[table])

    return edited(flip)


def marks(**changed: int | bytes) -> Callable[[Path], None]:
    def change(transaction: lmdb.Transaction, tables: dict[bytes, object]) -> bool:
        stored: Marks = records.unpack_marks(transaction.get(records.MARKS_KEY, db=tables[STATE]))
        return transaction.put(records.MARKS_KEY, records.pack_marks(stored._replace(**changed)), db=tables[STATE])

    return edited(change)


def key(index: int) -> bytes:
    return records.index_key(index)


def entry_of_term(term: int) -> bytes:
    return records.pack_entry(key(7), entry(7, term))


def unfinished_transaction(directory: Path) -> None:
    """Leave the data pages of a last transaction without its meta page, as after a power failure."""
    made(directory)
    metas = (directory / DATA_FILE).read_bytes()[: 2 * PAGE_BYTES]
    with opened(directory) as journal:
        journal.append([entry(index, 2, 5000) for index in range(10, 20)])
        journal.flush_hints()
    with (directory / DATA_FILE).open("r+b") as file:
        file.write(metas)


def creation_unfinished(directory: Path) -> None:
    directory.mkdir()
    lmdb.open(str(directory), map_size=MAP_SIZE_BYTES, max_dbs=5, lib_version=0).close()


def meta_page_flipped(bit: int) -> Callable[[Path], None]:
    """Return a damage: flip one bit of the newest transaction number, so that LMDB alone would silently go back."""

    def damage(directory: Path) -> None:
        made(directory)
        with opened(directory) as journal:
            for index in range(10, 21):
                journal.append([entry(index, 2)])
                journal.flush_hints()
        numbers = [_txnid(directory, page) for page in (0, 1)]
        newest = numbers.index(max(numbers))
        assert max(numbers) == 15, "all lower bits must be set, so that each flip lowers the number"
        with (directory / DATA_FILE).open("r+b") as file:
            file.seek(newest * PAGE_BYTES + META_TXNID_OFFSET)
            file.write(struct.pack("=Q", numbers[newest] ^ (1 << bit)))

    return damage


def _txnid(directory: Path, page: int) -> int:
    content = (directory / DATA_FILE).read_bytes()
    return int(struct.unpack_from("=Q", content, page * PAGE_BYTES + META_TXNID_OFFSET)[0])


def truncated_file(directory: Path) -> None:
    made(directory)
    with (directory / DATA_FILE).open("r+b") as file:
        file.truncate(3 * PAGE_BYTES)


def dropped_table(directory: Path) -> None:
    made(directory)
    edit(directory, lambda transaction, tables: transaction.drop(tables[CHAIN], delete=True))
    # Opening with `edit` would create the table again, so nothing else may touch the directory here.


def first_block_flipped(byte: int) -> Callable[[Path], None]:
    return log_edited(lambda content, at: content.__setitem__(byte, content[byte] ^ 1))


def checkpoint_survived_by_its_log(directory: Path) -> None:
    """Crash after a checkpoint: LMDB has begun the next generation, and the log still holds the previous one."""
    made_with_log(directory)
    before = content_of(directory)
    with opened(directory):
        pass
    assert content_of(directory) == before, "a checkpoint does not touch the log"


def data_file_behind_a_link(directory: Path) -> None:
    """Move the data file elsewhere and leave a symbolic link, as an operator might do for a larger disk."""
    made_with_log(directory)
    (directory / DATA_FILE).rename(directory / "elsewhere")
    (directory / DATA_FILE).symlink_to("elsewhere")


def readers_file_is_a_directory(directory: Path) -> None:
    made_with_log(directory)
    (directory / READERS_FILE).unlink()
    (directory / READERS_FILE).mkdir()


def data_file_lost(left: bytes | None) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        made_with_log(directory)
        (directory / DATA_FILE).unlink()
        if left is not None:
            (directory / DATA_FILE).write_bytes(left)

    return damage


def data_file_never_written(directory: Path) -> None:
    """Leave the file that LMDB creates before its first transaction, beside a used log."""
    creation_unfinished(directory)
    unwritten = (directory / DATA_FILE).read_bytes()
    shutil.rmtree(directory)
    data_file_lost(unwritten)(directory)


DAMAGE: dict[Condition, list[Callable[[Path], None]]] = {
    Condition.FIRST_START: [lambda directory: None, lambda directory: directory.mkdir()],
    Condition.DIRECTORY_EMPTY: [lambda directory: None, lambda directory: directory.mkdir(), creation_unfinished],
    Condition.CREATION_UNFINISHED: [creation_unfinished],
    Condition.TRANSACTION_UNFINISHED: [unfinished_transaction],
    Condition.HINT_BEHIND: [
        marks(commit_index=5),
        lambda directory: made(directory),
    ],
    Condition.DIRECTORY_UNUSABLE: [lambda directory: directory.write_text("a file") and None],
    Condition.HELD_BY_ANOTHER_PROCESS: [],
    Condition.CANNOT_BE_OPENED: [data_file_behind_a_link],
    Condition.TABLE_OF_READERS_UNUSABLE: [readers_file_is_a_directory],
    Condition.DATA_FILE_MISSING: [data_file_lost(None), data_file_lost(b""), data_file_never_written],
    Condition.DATA_FILE_UNREADABLE: [
        lambda directory: (directory.mkdir(), (directory / DATA_FILE).write_bytes(b"x" * 9000)) and None,
        lambda directory: (directory.mkdir(), (directory / DATA_FILE).write_bytes(b"x")) and None,
        truncated_file,
    ],
    Condition.META_PAGES_DISAGREE: [meta_page_flipped(bit) for bit in (0, 2, 3, 4, 40, 63)],
    Condition.TABLE_MISSING: [dropped_table],
    Condition.FORMAT_UNKNOWN: [put(STATE, records.FORMAT_KEY, records.pack_format(2))],
    Condition.FORMAT_OF_A_CONSTRUCTION_STEP: [
        put(STATE, records.FORMAT_KEY, records.pack_number(records.FORMAT_KEY, version)) for version in (1, 2)
    ],
    Condition.IDENTITY_DAMAGED: [
        flipped(STATE, records.IDENTITY_KEY),
        flipped(STATE, records.FORMAT_KEY),
        delete(STATE, records.IDENTITY_KEY),
        delete(STATE, records.FORMAT_KEY),
        put(STATE, records.IDENTITY_KEY, records.pack_checked(records.IDENTITY_KEY, b"\xff")),
        put(STATE, records.IDENTITY_KEY, records.pack_checked(records.IDENTITY_KEY, b"\x01\xff\xff")),
        *[
            put(STATE, records.INCARNATION_KEY, records.pack_checked(records.INCARNATION_KEY, wrong))
            for wrong in (b"", bytes(8), bytes(7) + b"\x02", bytes(7) + b"\x02" + b"x" * 16)
        ],
        put(STATE, records.INCARNATION_KEY, bytes(12)),
    ],
    Condition.CLUSTER_FOREIGN: [
        put(STATE, records.IDENTITY_KEY, records.pack_identity(records.StorageIdentity("cluster-2", REPLICA)))
    ],
    Condition.REPLICA_FOREIGN: [
        put(STATE, records.IDENTITY_KEY, records.pack_identity(records.StorageIdentity(CLUSTER, "r2")))
    ],
    Condition.HARD_STATE_MISSING: [delete(STATE, records.HARD_KEY)],
    Condition.HARD_STATE_DAMAGED: [
        *[flipped(STATE, records.HARD_KEY, bit) for bit in range(0, 96, 7)],
        put(STATE, records.HARD_KEY, records.pack_checked(records.HARD_KEY, b"")),
    ],
    Condition.MARKS_MISSING: [delete(STATE, records.MARKS_KEY)],
    Condition.MARKS_DAMAGED: [
        *[flipped(STATE, records.MARKS_KEY, bit) for bit in range(0, 8 * 84, 61)],
        put(STATE, records.MARKS_KEY, records.pack_checked(records.MARKS_KEY, bytes(79))),
    ],
    Condition.MARKS_OUT_OF_ORDER: [
        marks(base_index=6),
        marks(applied_index=6, commit_index=5),
        marks(base_index=10, applied_index=10, commit_index=10),
    ],
    Condition.COMMIT_BEYOND_LAST: [marks(commit_index=10)],
    Condition.APPLIED_ENTRY_DAMAGED: [flipped(ENTRIES, key(5), bit) for bit in range(0, 500, 37)],
    Condition.TAIL_ENTRY_DAMAGED: [
        *[flipped(ENTRIES, key(9), bit) for bit in range(0, 500, 37)],
        flipped(ENTRIES, key(6)),
        put(ENTRIES, key(9), b"short"),
    ],
    Condition.ENTRY_MISSING: [delete(ENTRIES, key(3)), delete(ENTRIES, key(7)), delete(ENTRIES, key(9))],
    Condition.ENTRY_BEYOND_LAST: [
        put(ENTRIES, key(10), records.pack_entry(key(10), entry(10, 2))),
        put(ENTRIES, key(12), records.pack_entry(key(12), entry(12, 2))),
        marks(last_index=8),
    ],
    Condition.TERM_OUT_OF_ORDER: [
        put(ENTRIES, key(7), entry_of_term(0)),
        put(ENTRIES, key(7), entry_of_term(3)),
        put(STATE, records.HARD_KEY, records.pack_hard(HardState(1, None))),
        put(STATE, records.HARD_KEY, records.pack_hard(HardState(0, None))),
    ],
    Condition.CHAIN_ROW_MISSING: [delete(CHAIN, key(2)), delete(CHAIN, key(4)), delete(CHAIN, key(5))],
    Condition.CHAIN_ROW_DAMAGED: [
        flipped(CHAIN, key(2)),
        flipped(CHAIN, key(5)),
        put(CHAIN, key(5), records.pack_checked(key(5), b"?")),
    ],
    Condition.CHAIN_MISMATCH: [
        marks(applied_digest=b"d" * 32),
        put(CHAIN, key(4), records.pack_chain(key(4), ChainRow(b"d" * 32, 8))),
        put(ENTRIES, key(4), records.pack_entry(key(4), entry(4)._replace(data=b"another history"))),
        put(CHAIN, key(2), records.pack_chain(key(2), ChainRow(b"d" * 32, 4))),
    ],
    Condition.SYNC_UNFINISHED: [
        *[sector_lost(number) for number in range(8)],
        sector_lost(0, old=b"\xff" * SECTOR_BYTES),
    ],
    Condition.GENERATION_OVER: [checkpoint_survived_by_its_log],
    Condition.LOG_MARK_MISSING: [delete(STATE, records.LOG_KEY)],
    Condition.LOG_MARK_DAMAGED: [
        *[flipped(STATE, records.LOG_KEY, bit) for bit in range(0, 160, 13)],
        put(STATE, records.LOG_KEY, records.pack_checked(records.LOG_KEY, bytes(15))),
    ],
    Condition.SYNC_LOG_NOT_MADE: [log_cannot_be_made],
    Condition.SYNC_LOG_MISSING: [replaced(lambda path: None)],
    Condition.SYNC_LOG_UNREADABLE: [
        replaced(lambda path: path.mkdir()),
        replaced(lambda path: path.symlink_to("away")),
        replaced(os.mkfifo),
    ],
    Condition.SYNC_LOG_OF_ANOTHER_SIZE: [
        replaced(lambda path: path.touch()),
        log_edited(lambda content, at: content.pop()),
        log_edited(lambda content, at: content.append(0)),
        log_edited(lambda content, at: content.__delitem__(slice(at, None))),
    ],
    Condition.SYNC_LOG_FOREIGN: [foreign_log("cluster-2", REPLICA), foreign_log(CLUSTER, "r2")],
    Condition.SYNC_LOG_DAMAGED: [
        *[bit_flipped(bit) for bit in (0, 63, 64, 100, 300, 8 * 100, 8 * 512, 8 * 4095 + 7)],
        *[bit_flipped(bit, sequence=1) for bit in (1, 70, 8 * 512)],
        sector_lost(0, sequence=1),
        sector_lost(1, sequence=2),
        *[first_block_flipped(byte) for byte in (0, 8, 20, 3000, BLOCK_BYTES - 1)],
    ],
    Condition.SYNC_LOG_AHEAD: [older_data],
    Condition.SYNC_LOG_CONTRADICTS: [
        forged(b"short"),
        forged(pack(good_sync())[:-1]),
        forged(pack(good_sync()) + b"more"),
        forged(good_sync(last_before=11)),
        forged(good_sync(last_before=13)),
        forged(good_sync(first=14, entries=[entry(14, 3)])),
        forged(good_sync(first=8, entries=[entry(8, 3)])),
        forged(good_sync(entries=[entry(13, 2)])),
        forged(good_sync(entries=[entry(13, 4)])),
        forged(good_sync(hard=HardState(2, None))),
        forged(good_sync(hard=HardState(3, "r3"))),
        forged(good_sync(hard=HardState(3, None))),
        forged(good_sync(commit_index=7)),
        forged(good_sync(commit_index=14)),
        forged(good_sync(applied_index=7)),
        forged(good_sync(applied_index=9)),
        forged(good_sync(commit_index=9, applied_index=9, revisions=[15])),
        forged(good_sync(commit_index=9, applied_index=9, revisions=[18])),
        forged(good_sync(applied_digest=bytes(32))),
    ],
    Condition.SYNC_LOG_RESTLESS: [],
}

ELSEWHERE = {
    Condition.HELD_BY_ANOTHER_PROCESS: "tests/wal/test_environment.py",
    Condition.SYNC_LOG_RESTLESS: "tests/wal/test_read_view.py",
}
"""Conditions tested elsewhere, because they need another process. Files of higher layers: test_storage_recovery.py."""


def test_every_condition_has_a_row_and_is_produced_for_real() -> None:
    assert set(Condition) > set(DAMAGE)
    assert [condition for condition, ways in DAMAGE.items() if not ways] == [*ELSEWHERE]
    assert all(condition.name in (ROOT / path).read_text() for condition, path in ELSEWHERE.items())
    assert all(all(condition.value) for condition in Condition)


@pytest.mark.parametrize(
    ("condition", "damage"),
    [
        pytest.param(condition, way, id=f"{condition.title}-{number}")
        for condition, ways in DAMAGE.items()
        if condition.value.action is Reaction.REFUSE
        for number, way in enumerate(ways)
    ],
)
def test_unsafe_condition_is_rejected_by_name(
    tmp_path: Path, condition: Condition, damage: Callable[[Path], None]
) -> None:
    directory = tmp_path / "wal"
    damage(directory)
    for _ in range(2):
        with pytest.raises(RecoveryRefused) as refused, opened(directory, create=condition is not _EMPTY):
            pass
        assert refused.value.condition is condition
        sentence = str(refused.value)
        assert str(directory) in sentence and condition.value.reason in sentence and condition.value.remedy in sentence


_EMPTY = Condition.DIRECTORY_EMPTY


@pytest.mark.parametrize("condition", [Condition.FIRST_START, Condition.CREATION_UNFINISHED])
def test_storage_without_promises_is_created_again(tmp_path: Path, condition: Condition) -> None:
    assert condition.value.action is Reaction.CREATE
    for number, damage in enumerate(DAMAGE[condition]):
        directory = tmp_path / f"wal-{number}"
        damage(directory)
        with opened(directory) as journal:
            fill(journal, 2)
        with opened(directory, create=False) as journal:
            assert journal.last_index == 2


def test_torn_tail_is_cut_and_acknowledged_entries_stay(tmp_path: Path) -> None:
    assert Condition.TRANSACTION_UNFINISHED.value.action is Reaction.CUT
    unfinished_transaction(tmp_path)
    with opened(tmp_path, create=False) as journal:
        assert journal.last_index == 9 and journal.entry(9) == entry(9, 2)
        journal.append([entry(10, 2)])
        journal.sync()
    with opened(tmp_path, create=False) as journal:
        assert journal.last_index == 10


@pytest.mark.parametrize("kept_pages", range(0, 40, 3))
def test_partly_written_transaction_has_no_effect(tmp_path: Path, kept_pages: int) -> None:
    made(tmp_path)
    before = (tmp_path / DATA_FILE).read_bytes()
    with opened(tmp_path) as journal:
        journal.append([entry(index, 2, 5000) for index in range(10, 20)])
        journal.flush_hints()
    after = (tmp_path / DATA_FILE).read_bytes()
    torn, kept = bytearray(before.ljust(len(after), b"\0")), 0
    for position in range(2 * PAGE_BYTES, len(after), PAGE_BYTES):
        page = after[position : position + PAGE_BYTES]
        if page != torn[position : position + PAGE_BYTES] and kept < kept_pages:
            torn[position : position + PAGE_BYTES] = page
            kept += 1
    (tmp_path / DATA_FILE).write_bytes(torn)
    with opened(tmp_path, create=False) as journal:
        assert [one.index for one in journal.entries(3, max_bytes=1 << 20, max_entries=99)] == list(range(3, 10))


def test_lagging_hint_is_corrected_by_applying_again(tmp_path: Path) -> None:
    assert Condition.HINT_BEHIND.value.action is Reaction.CONTINUE
    for number, damage in enumerate(DAMAGE[Condition.HINT_BEHIND]):
        directory = tmp_path / f"wal-{number}"
        damage(directory)
        with opened(directory, create=False) as journal:
            assert journal.applied_index == 5
            apply(journal, 9)
            journal.flush_hints()
        with opened(directory, create=False) as journal:
            assert journal.applied_index == journal.commit_index == 9


def test_damaged_tail_entry_above_the_commit_hint_is_not_cut(tmp_path: Path) -> None:
    """The hint is written lazily: a follower synced entry 9 and acknowledged it, and the client has its reply."""
    flipped(ENTRIES, key(9))(tmp_path)
    with open_env(tmp_path, create=False) as env:
        with pytest.raises(RecoveryRefused) as refused:
            Journal(env)
        assert refused.value.condition is Condition.TAIL_ENTRY_DAMAGED
        with env.read() as transaction:
            assert transaction.get(key(9), db=env.table(ENTRIES)) is not None


def test_damage_below_the_base_passes_the_start_and_is_found_by_verify(
    tmp_path: Path,
) -> None:
    from forebay.wal.ledger import LedgerBroken

    flipped(ENTRIES, key(2))(tmp_path)
    with open_env(tmp_path, create=False) as env:
        assert Journal(env).last_index == 9
        with pytest.raises(LedgerBroken) as broken:
            Ledger(env).verify()
        assert broken.value.index == 2


def test_directory_copied_to_another_replica_is_rejected(tmp_path: Path) -> None:
    made(tmp_path / "r1")
    shutil.copytree(tmp_path / "r1", tmp_path / "r2")
    with pytest.raises(RecoveryRefused, match="belongs to replica r1, not r2"):
        Environment.open(tmp_path / "r2", cluster_id=CLUSTER, replica="r2", create=False)


def test_audit_rejects_a_truncated_file_that_would_kill_the_reader(tmp_path: Path) -> None:
    truncated_file(tmp_path)
    with pytest.raises(RecoveryRefused, match="the file ends before its last page"):
        Environment.open_readonly(tmp_path)


def test_sync_with_a_missing_sector_is_cut_and_earlier_syncs_stay(tmp_path: Path) -> None:
    assert Condition.SYNC_UNFINISHED.value.action is Reaction.CUT
    for number, damage in enumerate(DAMAGE[Condition.SYNC_UNFINISHED]):
        directory = tmp_path / f"wal-{number}"
        damage(directory)
        with opened(directory, create=False) as journal:
            assert (journal.last_index, journal.term, journal.voted_for) == (11, 3, "r2")
            assert (journal.applied_index, journal.commit_index) == (7, 7)
            assert journal.entries(3, max_bytes=1 << 20, max_entries=99) == [
                entry(index, 1 if index < 7 else 2 if index < 11 else 3) for index in range(3, 12)
            ]
            fill(journal, 12, term=3)
        with opened(directory, create=False) as journal:
            assert journal.last_index == 12


def test_remains_of_a_cut_sync_are_not_completed_by_a_later_sync(tmp_path: Path) -> None:
    """Sectors of the torn third record remain, and the new third record tears at the same place."""
    sector_lost(0)(tmp_path)
    torn = content_of(tmp_path)
    with opened(tmp_path, create=False) as journal:
        assert journal.last_index == 11
    assert content_of(tmp_path) == torn
    with opened(tmp_path, create=False) as journal:
        assert journal.last_index == 11
        for index in (12, 13, 14):
            fill(journal, index, term=3)
    content = bytearray(content_of(tmp_path))
    at = 3 * BLOCK_BYTES
    content[at + SECTOR_BYTES : at + BLOCK_BYTES] = torn[at + SECTOR_BYTES : at + BLOCK_BYTES]
    rewrite(tmp_path, bytes(content))
    with opened(tmp_path, create=False) as journal:
        assert journal.last_index == 13


def test_records_of_an_older_generation_are_not_added_again(tmp_path: Path) -> None:
    assert Condition.GENERATION_OVER.value.action is Reaction.CONTINUE
    checkpoint_survived_by_its_log(tmp_path)
    with opened(tmp_path, create=False) as journal:
        journal.truncate_from(11)
        fill(journal, 11, term=4)
        journal.flush_hints()
    with opened(tmp_path, create=False) as journal:
        assert (journal.last_index, journal.entry(11), journal.term) == (11, entry(11, 4), 4)


def test_older_copy_of_the_data_file_is_detected_by_the_log(tmp_path: Path) -> None:
    """The meta pages agree: in the copy, the transaction before the newest is the newest."""
    older_data(tmp_path)
    with pytest.raises(RecoveryRefused, match="generation"), opened(tmp_path, create=False):
        pass


def test_file_that_legitimately_ends_before_its_last_page_can_start(tmp_path: Path) -> None:
    """A page that one transaction allocated and freed is counted but never written."""
    made(tmp_path)
    with open_env(tmp_path, create=False) as env, cut_between_commit_and_lengthening(), env.write() as transaction:
        take_and_give_back(env, transaction)
    path = tmp_path / DATA_FILE
    content = path.read_bytes()
    newest = max((0, PAGE_BYTES), key=lambda page: int.from_bytes(content[page + 144 : page + 152], "little"))
    last_page = int.from_bytes(content[newest + 136 : newest + 144], "little")
    assert len(content) < (last_page + 1) * PAGE_BYTES
    with opened(tmp_path, create=False) as journal:
        assert journal.last_index == 9
    assert path.stat().st_size == (last_page + 1) * PAGE_BYTES


def test_file_that_legitimately_ended_early_can_be_read_beside_its_replica(tmp_path: Path) -> None:
    made(tmp_path)
    with open_env(tmp_path, create=False) as env:
        for _ in range(3):
            with env.write() as transaction:
                take_and_give_back(env, transaction)
            # LMDB opens a file once in a process, but auditors are other processes.
            audit = "import sys, pathlib, wal; wal.Environment.open_readonly(pathlib.Path(sys.argv[1]))"
            subprocess.run([sys.executable, "-c", audit, tmp_path], cwd=ROOT, check=True)


def take_and_give_back(env: Environment, transaction: Any) -> None:
    table = env.table(records.ENTRIES)
    transaction.put(b"large", bytes(300 * PAGE_BYTES), db=table)
    transaction.delete(b"large", db=table)


def cut_between_commit_and_lengthening() -> AbstractContextManager[object]:
    return patch("forebay.wal.directory.lengthen")


def test_audit_rejects_disagreeing_meta_pages_like_a_start(tmp_path: Path) -> None:
    made(tmp_path)
    path = tmp_path / DATA_FILE
    content = bytearray(path.read_bytes())
    newest = max((0, PAGE_BYTES), key=lambda page: int.from_bytes(content[page + 144 : page + 152], "little"))
    content[newest + 144] ^= 0x10
    path.write_bytes(content)
    for read in (Environment.open_readonly, lambda directory: open_env(directory, create=False)):
        with pytest.raises(RecoveryRefused) as refused:
            read(tmp_path)
        assert refused.value.condition is Condition.META_PAGES_DISAGREE
