"""Job index: added rows are found again in order, for each job, and the position is kept."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.wal.codec import NO_OP, CodecError, decode_batch, encode_batch, one_of_batch
from forebay.wal.environment import Environment
from forebay.wal.job_index import NOTHING, VALUE_MAX_BYTES, Hole, IndexPosition, JobIndex, JobIndexBroken, JobIndexRow
from forebay.wal.ledger import Ledger, LedgerBroken
from tests.cluster.audit.ledgers import lived, make

MAP_SIZE_BYTES = 16 << 20

NOTES = st.binary(max_size=VALUE_MAX_BYTES // 2)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 2**33), NOTES), max_size=30), max_size=6))
def test_rows_are_found_by_job_in_insertion_order(
    added: Sequence[Sequence[tuple[int, int, bytes]]],
) -> None:
    expected: dict[int, list[JobIndexRow]] = {}
    revision = 0
    with tempfile.TemporaryDirectory() as place:
        index = JobIndex(Path(place) / "index", map_size_bytes=MAP_SIZE_BYTES)
        for number, rows in enumerate(added, start=1):
            together: dict[int, list[JobIndexRow]] = {}
            for job, step, note in rows:
                revision += step
                together.setdefault(job, []).append(JobIndexRow(revision, note))
                expected.setdefault(job, []).append(JobIndexRow(revision, note))
            position = IndexPosition(number, revision, bytes([number]) * 32, (Hole(number, number + 3), Hole(9, 9)))
            index.add(together, position)
            assert index.position == position
            if number % 2:
                index.close()
                index = JobIndex(Path(place) / "index", map_size_bytes=MAP_SIZE_BYTES)
                assert index.position == position
        assert {job: index.rows(job) for job in range(8) if index.rows(job)} == expected
        assert list(index.jobs()) == sorted(expected)
        index.begin_anew()
        assert (index.position, list(index.jobs())) == (NOTHING, [])
        index.close()


def test_read_only_index_creates_and_changes_nothing(tmp_path: Path) -> None:
    with pytest.raises(JobIndexBroken):
        JobIndex(tmp_path / "index", readonly=True)
    assert not (tmp_path / "index").exists()
    made = JobIndex(tmp_path / "index", map_size_bytes=MAP_SIZE_BYTES)
    made.add({1: [JobIndexRow(5, b"five")]}, NOTHING._replace(index=1))
    made.close()
    read = JobIndex(tmp_path / "index", readonly=True)
    assert read.rows(1) == [JobIndexRow(5, b"five")]
    with pytest.raises(JobIndexBroken):
        read.add({1: [JobIndexRow(6, b"six")]}, NOTHING)
    read.close()


def test_one_command_is_extracted_from_a_batch_as_a_batch_of_its_own() -> None:
    for batch in lived():
        for position, entry in enumerate(batch.entries):
            alone = decode_batch(one_of_batch(encode_batch(batch), position))
            assert (alone.base, alone.at, alone.entries) == (batch.base + position, batch.at, (entry,))
        with pytest.raises(IndexError):
            one_of_batch(encode_batch(batch), len(batch.entries))
    for wrong in (NO_OP, encode_batch(lived()[0])[:-5]):
        with pytest.raises(CodecError):
            one_of_batch(wrong, 0)


def test_ledger_as_stored_equals_the_last_checkpoint(tmp_path: Path) -> None:
    made = make(tmp_path)
    with Environment.open_readonly(tmp_path / "wal") as environment:
        stored = Ledger(environment).as_stored()
        assert stored.applied_index == len(made.entries)
        rows = [stored.row_at(index) for index in range(1, len(made.entries) + 1)]
        assert [row.digest for row in rows] == list(made.digests)
        assert [row.revision for row in rows] == [state.revision for state in made.states]
        with pytest.raises(LedgerBroken):
            stored.row_at(len(made.entries) + 1)


@pytest.mark.parametrize(("more", "values"), [(0, 1), (1, 2)])
def test_value_is_filled_up_to_its_maximum_size(tmp_path: Path, more: int, values: int) -> None:
    index = JobIndex(tmp_path / "index", map_size_bytes=MAP_SIZE_BYTES)
    header_bytes = 6
    notes = [b"a" * (VALUE_MAX_BYTES // 2 - header_bytes), b"b" * (VALUE_MAX_BYTES // 2 - header_bytes + more)]
    rows = [JobIndexRow(revision, note) for revision, note in enumerate(notes, start=1)]
    index.add({7: rows}, IndexPosition(1, 2, b"d" * 32))
    with index._environment.begin(index._rows) as transaction:
        assert transaction.stat(index._rows)["entries"] == values
    assert index.rows(7) == rows
    index.close()
