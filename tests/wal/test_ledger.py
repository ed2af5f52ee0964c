"""Ledger: applied entries in order, each proven by its digest. Damage and gaps are named."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import lmdb
import pytest

from forebay.wal import CodecError, Environment, Journal, RecoveryRefused, records
from forebay.wal.ledger import Gap, Ledger, LedgerBroken, LedgerSummary, export_history
from forebay.wal.ledger import fill as fill_gap
from forebay.wal.records import CHAIN, ENTRIES, GAPS, GENESIS, REVISIONS, STATE, ChainRow, Entry, chain_digest
from tests.wal.support import apply, edit, entry, fill, open_env


def _made(directory: Path, last: int = 600, applied: int = 590) -> bytes:
    with open_env(directory) as env:
        journal = Journal(env)
        fill(journal, last, applied=applied)
        return journal.applied_digest


def test_applied_entries_are_read_in_order_across_transactions(tmp_path: Path) -> None:
    _made(tmp_path)
    digest = GENESIS
    with Environment.open_readonly(tmp_path) as env:
        ledger = Ledger(env)
        assert (ledger.first_index, ledger.applied_index, ledger.applied_revision) == (1, 590, 1180)
        entries = list(ledger.read(1, limit=10_000))
        assert [one.index for one in entries] == list(range(1, 591))
        for one in entries:
            digest = chain_digest(digest, entry(one.index))
            assert (one.term, one.data, one.digest) == (1, entry(one.index).data, digest)
        assert digest == ledger.applied_digest
        assert [one.index for one in ledger.read(300, limit=3)] == [300, 301, 302]
        assert list(ledger.read(591, limit=3)) == list(ledger.read(1, limit=0)) == []


def test_verify_checks_the_whole_history_and_reports_progress(tmp_path: Path) -> None:
    digest = _made(tmp_path)
    seen: list[tuple[int, int]] = []
    with Environment.open_readonly(tmp_path) as env:
        verified = Ledger(env).verify(progress=lambda done, last: seen.append((done, last)))
    assert verified == LedgerSummary(590, 1, 590, digest, ())
    assert seen == [(256, 590), (512, 590), (590, 590)]


def test_empty_ledger_is_valid(tmp_path: Path) -> None:
    with open_env(tmp_path) as env:
        ledger = Ledger(env)
        assert ledger.verify() == LedgerSummary(0, 1, 0, GENESIS, ())
        assert list(ledger.read(1, limit=9)) == [] and ledger.first_index == 1
        with pytest.raises(LookupError, match="holds none"):
            ledger.index_of_revision(1)


def test_ledger_has_synced_and_applied_entries_only(tmp_path: Path) -> None:
    with open_env(tmp_path) as env:
        journal, ledger = Journal(env), Ledger(env)
        fill(journal, 5)
        apply(journal, 3)
        assert list(ledger.read(1, limit=9)) == []
        journal.flush_hints()
        assert [one.index for one in ledger.read(1, limit=9)] == [1, 2, 3]


def test_revision_leads_to_the_entry_that_settled_it(tmp_path: Path) -> None:
    with open_env(tmp_path) as env:
        journal, ledger = Journal(env), Ledger(env)
        fill(journal, 6)
        journal.set_commit(6)
        # Entries 1 and 4 settle nothing, like a no-op or a batch with another base.
        for index, revision in enumerate([0, 3, 4, 4, 10, 11], start=1):
            journal.record_applied(journal.entry(index), revision)
        journal.flush_hints()
        found = [ledger.index_of_revision(revision) for revision in range(1, 12)]
        assert found == [2, 2, 2, 3, 5, 5, 5, 5, 5, 5, 6]
        for revision in (-1, 0, 12):
            with pytest.raises(LookupError, match="holds 1 to 11"):
                ledger.index_of_revision(revision)
        journal.reset_to(20, 1, b"d" * 32, 30)
        fill(journal, 21, applied=21)
        journal.flush_hints()
        assert ledger.index_of_revision(11) == 6 and ledger.index_of_revision(31) == 21
        for revision in (12, 30):
            with pytest.raises(LookupError, match="holds 1 to 11 and 31 to 32"):
                ledger.index_of_revision(revision)


def test_reading_from_inside_a_gap_begins_after_the_gap(tmp_path: Path) -> None:
    with open_env(tmp_path) as env:
        journal, ledger = Journal(env), Ledger(env)
        journal.reset_to(20, 1, b"d" * 32, 30)
        journal.sync()
        assert ledger.verify() == LedgerSummary(0, 21, 20, b"d" * 32, ledger.gaps())
        fill(journal, 23, applied=23)
        journal.flush_hints()
        assert ledger.first_index == 21
        for first in (1, 7, 20, 21):
            assert [one.index for one in ledger.read(first, limit=2)] == [21, 22]
        assert ledger.verify().entries == 3


def test_ledger_as_of_now_ignores_later_entries_snapshots_and_fetched_history(tmp_path: Path) -> None:
    with open_env(tmp_path / "whole") as whole, open_env(tmp_path / "spared") as env:
        fill(donor := Journal(whole), 40, applied=40)
        donor.flush_hints()
        row = Ledger(whole).rows_before(21, 21)[0]
        journal = Journal(env)
        journal.reset_to(20, 1, row.digest, row.revision)
        fill(journal, 25, applied=25)
        journal.flush_hints()
        ledger = Ledger(env).as_of_now()
        assert ledger.as_of_now() is ledger

        def said() -> list[object]:
            with pytest.raises(LookupError) as refused:
                ledger.index_of_revision(52)
            with pytest.raises(LookupError):
                ledger.index_of_revision(40)
            return [
                ledger.first_index,
                ledger.applied_index,
                ledger.applied_revision,
                ledger.applied_digest,
                ledger.gaps(),
                list(ledger.read(1, limit=99)),
                ledger.index_of_revision(41),
                str(refused.value),
                ledger.verify(),
            ]

        before = said()
        assert before[:3] == [21, 25, 50]
        fill(journal, 30, applied=30)
        journal.flush_hints()
        assert said() == before, "more was applied"
        journal.reset_to(35, 1, b"d" * 32, 70)
        journal.flush_hints()
        assert said() == before, "a snapshot was installed"
        gap = Ledger(env).gaps()[0]
        fill_gap(env, gap, export_history(Ledger(whole), gap.last_index))
        assert said() == before, "the history before it was fetched"
        assert (Ledger(env).first_index, Ledger(env).applied_index) == (1, 35)


@pytest.mark.parametrize("at", [1, 2, 3])
def test_snapshot_installed_during_verification_is_seen_completely_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    with open_env(tmp_path) as env:
        journal = Journal(env)
        fill(journal, 5, applied=5)
        journal.flush_hints()
        original, begun = env.read, 0
        before = Ledger(env).verify()

        def read() -> AbstractContextManager["lmdb.Transaction[bytes]"]:
            nonlocal begun
            begun += 1
            if begun == at:
                journal.reset_to(20, 1, b"d" * 32, 30)
                journal.sync()
            return original()

        monkeypatch.setattr(env, "read", read)
        verified = Ledger(env).verify()
        assert begun >= at
        gap = Gap(6, 20, 10, 30)
        assert verified == (LedgerSummary(5, 1, 20, b"d" * 32, (gap,)) if at == 1 else before)


def _forged(index: int) -> tuple[bytes, bytes]:
    key = records.index_key(index)
    return key, records.pack_entry(key, Entry(index, 1, b"a history that did not happen"))


@pytest.mark.parametrize("index", [1, 2, 255, 256, 257, 590])
@pytest.mark.parametrize(
    "damage", ["forged", "flipped", "missing", "digest forged", "digest flipped", "digest missing"]
)
def test_damage_to_any_entry_is_found_and_named(tmp_path: Path, index: int, damage: str) -> None:
    _made(tmp_path)
    table = CHAIN if damage.startswith("digest") else ENTRIES
    key = records.index_key(index)

    def change(transaction, tables) -> None:  # type: ignore[no-untyped-def]
        if damage.endswith("missing"):
            transaction.delete(key, db=tables[table])
        elif damage.endswith("flipped"):
            value = bytearray(transaction.get(key, db=tables[table]))
            value[-1] ^= 1
            transaction.put(key, bytes(value), db=tables[table])
        elif table == CHAIN:
            transaction.put(key, records.pack_chain(key, ChainRow(b"f" * 32, 2 * index)), db=tables[table])
        else:
            transaction.put(*_forged(index), db=tables[table])

    edit(tmp_path, change)
    with Environment.open_readonly(tmp_path) as env:
        ledger = Ledger(env)
        for check in (ledger.verify, lambda: list(ledger.read(1, limit=1000))):
            with pytest.raises(LedgerBroken) as broken:
                check()
            assert broken.value.index == index and broken.value.sentence in str(broken.value)


PLACES = (1, 2, 255, 256, 257, 589, 590)
"""Entries at the ends of the ledger and at the ends of a read step."""


def _altered(tables: dict[bytes, Any], what: str, index: int) -> dict[bytes, dict[bytes, bytes | None]]:
    """Return replacement values by table and key, with valid checksums; None to delete a row."""
    revision = records.index_key(2 * index)
    key = records.index_key(index)
    match what:
        case "revision redirected":
            return {REVISIONS: {revision: records.pack_number(revision, index - 1 or 2)}}
        case "revision deleted":
            return {REVISIONS: {revision: None}}
        case "revision added":
            odd = records.index_key(2 * index - 1)
            return {REVISIONS: {odd: records.pack_number(odd, index)}}
        case "chain revision raised" | "chain revision lowered":
            digest = records.unpack_chain(key, tables[CHAIN][key]).digest
            other = 2 * index + (1 if what.endswith("raised") else -1)
            return {CHAIN: {key: records.pack_chain(key, ChainRow(digest, other))}}
        case "gap over what is held":
            return {GAPS: {key: records.pack_gap(key, Gap(index, index, 2 * index - 2, 2 * index))}}
    raise AssertionError(what)


ALTERATIONS = (
    "revision redirected",
    "revision deleted",
    "revision added",
    "chain revision raised",
    "chain revision lowered",
    "gap over what is held",
)


@pytest.mark.parametrize("what", ALTERATIONS)
def test_derived_rows_are_checked_even_if_their_checksums_are_valid(tmp_path: Path, what: str) -> None:
    for index in PLACES:
        directory = tmp_path / str(index)
        directory.mkdir()
        _made(directory)

        def change(transaction, tables, index=index) -> None:  # type: ignore[no-untyped-def]
            stored = {name: dict(transaction.cursor(tables[name])) for name in (CHAIN, REVISIONS)}
            for name, rows in _altered(stored, what, index).items():
                for key, value in rows.items():
                    if value is None:
                        assert transaction.delete(key, db=tables[name])
                    else:
                        transaction.put(key, value, db=tables[name])

        edit(directory, change)
        with Environment.open_readonly(directory) as env, pytest.raises(LedgerBroken):
            Ledger(env).verify(revision_after=lambda data, before: before + 2)


def test_gap_that_contradicts_its_neighbours_is_named(tmp_path: Path) -> None:
    def with_gap(name: str, *gaps: Gap) -> Path:
        directory = tmp_path / name
        directory.mkdir()
        _made(directory, 30, 30)

        def change(transaction, tables) -> None:  # type: ignore[no-untyped-def]
            for gap in gaps:
                for index in range(gap.first_index, min(gap.last_index, 30) + 1):
                    transaction.delete(records.index_key(index), db=tables[ENTRIES])
                    transaction.delete(records.index_key(2 * index), db=tables[REVISIONS])
                key = records.index_key(gap.first_index)
                transaction.put(key, records.pack_gap(key, gap), db=tables[GAPS])

        edit(directory, change)
        return directory

    with Environment.open_readonly(with_gap("true", Gap(5, 9, 8, 18))) as env:
        # The ledger alone cannot show that these entries ever existed: use `--complete` and `--expect` for that.
        assert Ledger(env).verify(revision_after=lambda data, before: before + 2).gaps == (Gap(5, 9, 8, 18),)
    beyond = Gap(31, 40, 60, 80)
    misfits = [
        (Gap(5, 9, 7, 18),),
        (Gap(5, 9, 8, 17),),
        (Gap(5, 9, 8, 18), Gap(8, 12, 14, 24)),
        (beyond,),
        (Gap(5, 9, 8, 18), beyond._replace(first_index=37)),
    ]
    for number, gaps in enumerate(misfits):
        with Environment.open_readonly(with_gap(str(number), *gaps)) as env, pytest.raises(LedgerBroken, match="gap"):
            Ledger(env).verify()
        with Environment.open_readonly(tmp_path / str(number)) as env, pytest.raises(LedgerBroken, match="gap"):
            Ledger(env).as_of_now().verify()


def test_recorded_revision_and_term_must_match_the_last_entries(tmp_path: Path) -> None:
    for field, value in (("applied_revision", 59), ("base_term", 2)):
        directory = tmp_path / field
        directory.mkdir()
        with open_env(directory) as env:
            fill(journal := Journal(env), 30, applied=30)
            journal.compact_to(20)
            journal.flush_hints()

        def change(transaction, tables, field=field, value=value) -> None:  # type: ignore[no-untyped-def]
            marks = records.unpack_marks(transaction.get(records.MARKS_KEY, db=tables[STATE]))
            transaction.put(records.MARKS_KEY, records.pack_marks(marks._replace(**{field: value})), db=tables[STATE])

        edit(directory, change)
        with Environment.open_readonly(directory) as env, pytest.raises(LedgerBroken, match="recorded"):
            Ledger(env).verify()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"last_index": 29}, "the marks are out of order"),
        ({"last_index": 31}, "the last stored entry is 30, but 31 is marked"),
        ({"commit_index": 29}, "the marks are out of order"),
        ({}, "revision 61 is recorded as settled, but the last one is 60"),
    ],
)
def test_rows_beyond_the_marks_are_named(tmp_path: Path, change: dict[str, int], said: str) -> None:
    with open_env(tmp_path) as env:
        fill(journal := Journal(env), 30, applied=30)
        journal.flush_hints()

    def alter(transaction, tables) -> None:  # type: ignore[no-untyped-def]
        marks = records.unpack_marks(transaction.get(records.MARKS_KEY, db=tables[STATE]))
        transaction.put(records.MARKS_KEY, records.pack_marks(marks._replace(**change)), db=tables[STATE])
        if not change:
            key = records.index_key(61)
            transaction.put(key, records.pack_number(key, 30), db=tables[REVISIONS])

    edit(tmp_path, alter)
    with Environment.open_readonly(tmp_path) as env:
        with pytest.raises(LedgerBroken, match=said):
            Ledger(env).verify()
        with pytest.raises(LedgerBroken, match=said):
            Ledger(env).check_some(31, entries_max=1, bytes_max=1, revision_after=lambda data, before: before + 2)


def test_undecodable_entry_is_named(tmp_path: Path) -> None:
    def revision_after(data: bytes, before: int) -> int:
        if data == entry(7).data:
            raise CodecError("it is nothing that is known")
        return before + 2

    _made(tmp_path, 30, 30)
    with (
        Environment.open_readonly(tmp_path) as env,
        pytest.raises(LedgerBroken, match="nothing that is known") as broken,
    ):
        Ledger(env).verify(revision_after=revision_after)
    assert broken.value.index == 7


def test_damaged_revision_row_is_named(tmp_path: Path) -> None:
    _made(tmp_path)
    key = records.index_key(4)
    edit(tmp_path, lambda transaction, tables: transaction.put(key, b"12345678abcd", db=tables[REVISIONS]) and None)
    with Environment.open_readonly(tmp_path) as env:
        assert Ledger(env).index_of_revision(2) == 1
        with pytest.raises(LedgerBroken, match="revision 3"):
            Ledger(env).index_of_revision(3)


def test_directory_without_a_ledger_is_rejected_for_reading(tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "missing"):
        with pytest.raises(RecoveryRefused, match="directory empty"):
            Environment.open_readonly(directory)
    assert list(tmp_path.iterdir()) == []
