"""A gap of the ledger is filled from its end. Each entry is proven by the digest after it, or nothing is written."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.wal import BrokenInvariant, Environment, Journal
from forebay.wal.ledger import HistoryEntry, Ledger, NotThisHistory, export_history
from forebay.wal.ledger import fill as fill_gap
from forebay.wal.records import ENTRIES, GAPS, Gap
from tests.wal.support import apply, edit, entry, fill, open_env, opened

LAST = 60


def _whole(directory: Path) -> Journal:
    journal = Journal(open_env(directory))
    fill(journal, LAST, applied=LAST)
    journal.flush_hints()
    return journal


def _with_gap(directory: Path, whole: Journal, before: int, behind: int) -> tuple[Environment, Journal]:
    """Return a replica with the entries up to `before`, a snapshot of entry `behind`, and later entries."""
    env = open_env(directory)
    journal = Journal(env)
    if before:
        fill(journal, before, applied=before)
    digest = whole.digest_at(behind)
    assert digest is not None
    journal.set_term(1, None)
    journal.reset_to(behind, 1, digest, 2 * behind)
    journal.sync()
    fill(journal, LAST, applied=LAST)
    journal.flush_hints()
    return env, journal


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_gap_is_filled_completely_in_steps_of_any_size(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    directory = tmp_path_factory.mktemp("gap")
    before = data.draw(st.integers(0, LAST - 2), label="before")
    behind = data.draw(st.integers(before + 1, LAST), label="behind")
    whole = _whole(directory / "r2")
    donor = Ledger(whole._env)
    env, journal = _with_gap(directory / "r1", whole, before, behind)
    ledger = Ledger(env)
    gap: Gap | None = ledger.gaps()[0]
    assert gap == Gap(before + 1, behind, 2 * before, 2 * behind)
    while gap is not None:
        steps = data.draw(st.integers(1, LAST), label="step")
        handed = export_history(donor, gap.last_index, entries_max=steps)[: gap.last_index - gap.first_index + 1]
        gap = fill_gap(env, gap, handed)
        assert ledger.gaps() == (() if gap is None else (gap,))
        assert ledger.verify().digest == whole.applied_digest
    assert ledger.verify().entries == LAST and ledger.first_index == 1
    assert [ledger.index_of_revision(revision) for revision in range(1, 2 * LAST + 1)] == [
        (revision + 1) // 2 for revision in range(1, 2 * LAST + 1)
    ]
    env.close()
    with opened(directory / "r1", create=False) as again:
        assert (again.applied_index, again.applied_digest) == (LAST, journal.applied_digest)
    whole._env.close()


def test_foreign_history_is_rejected_and_nothing_is_written(tmp_path: Path) -> None:
    whole = _whole(tmp_path / "r2")
    env, _ = _with_gap(tmp_path / "r1", whole, 10, 30)
    gap = Ledger(env).gaps()[0]
    good = export_history(Ledger(whole._env), 30)
    first = good[0]
    wrong: list[list[HistoryEntry]] = [
        [first._replace(entry=entry(30, term=2))],
        [first._replace(entry=first.entry._replace(data=first.entry.data + b"x"))],
        [first._replace(digest_before=bytes(32))],
        [first._replace(digest_before=b"")],
        [first._replace(revision_before=61)],
        [first._replace(revision_before=19)],
        [good[1]],
        [first, first],
        [first, good[2]],
        good,  # continues before the gap
    ]
    for handed in wrong:
        with pytest.raises(NotThisHistory):
            fill_gap(env, gap, handed)
        assert Ledger(env).gaps() == (gap,)
        with env.read() as transaction:
            assert transaction.stat(env.table(ENTRIES))["entries"] == LAST - 20
    assert fill_gap(env, gap, []) == gap
    env.close()
    whole._env.close()


def test_replica_with_a_different_history_is_detected(tmp_path: Path) -> None:
    whole = _whole(tmp_path / "r2")
    env = open_env(tmp_path / "r1")
    journal = Journal(env)
    journal.set_term(1, None)
    journal.append([entry(index)._replace(data=b"another") for index in range(1, 11)])
    apply(journal, 10)
    journal.sync()
    digest = whole.digest_at(30)
    assert digest is not None
    journal.reset_to(30, 1, digest, 60)
    journal.sync()
    gap = Ledger(env).gaps()[0]
    handed = export_history(Ledger(whole._env), 30)[:20]
    left = fill_gap(env, gap, handed[:19])
    assert left == Gap(11, 11, 20, 22)
    with pytest.raises(BrokenInvariant, match="the history up to entry 10 differs from the cluster's"):
        fill_gap(env, left, handed[19:])
    env.close()
    whole._env.close()


def test_missing_entry_is_reported_and_a_gap_ends_the_export(tmp_path: Path) -> None:
    whole = _whole(tmp_path / "r2")
    env, _ = _with_gap(tmp_path / "r1", whole, 10, 30)
    ledger = Ledger(env)
    assert [one.entry.index for one in export_history(ledger, 33)] == [33, 32, 31]
    assert [one.entry.index for one in export_history(ledger, 10)] == list(range(10, 0, -1))
    for missing in (11, 30, LAST + 1):
        with pytest.raises(LookupError, match=f"entry {missing} is not available on this replica"):
            export_history(ledger, missing)
    assert len(export_history(ledger, LAST, bytes_max=1)) == 1
    assert len(export_history(ledger, LAST, bytes_max=2 * len(entry(1).data))) == 2
    env.close()
    whole._env.close()


def test_crash_between_two_steps_leaves_a_shorter_gap(tmp_path: Path) -> None:
    whole = _whole(tmp_path / "r2")
    env, _ = _with_gap(tmp_path / "r1", whole, 0, 30)
    gap = Ledger(env).gaps()[0]
    left = fill_gap(env, gap, export_history(Ledger(whole._env), 30, entries_max=7))
    assert left == Gap(1, 23, 0, 46)
    env.close()
    found: list[int] = []
    edit(tmp_path / "r1", lambda transaction, tables: found.append(transaction.stat(tables[GAPS])["entries"]))
    assert found == [1]
    with Environment.open_readonly(tmp_path / "r1") as reader:
        assert Ledger(reader).gaps() == (left,)
        assert [one.index for one in Ledger(reader).read(1, limit=3)] == [24, 25, 26]
        assert Ledger(reader).verify().entries == LAST - 23
    whole._env.close()
