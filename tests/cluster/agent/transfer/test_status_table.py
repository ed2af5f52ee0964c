"""The checkpoint: what it promises was kept, and what was torn promises nothing."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.cluster.agent.transfer.status_table import (
    EMPTY,
    FORMAT,
    HEADER_BYTES,
    MARK_BYTES,
    ROW_BYTES,
    Chunks,
    ChunkState,
    CopiedFile,
    Flag,
    RecordsFailed,
    RecordsHeader,
    RecordState,
    StatusRow,
    StatusTable,
    read_header,
    write_header,
)

digests = st.one_of(st.just(b""), st.binary(min_size=16, max_size=16), st.binary(min_size=32, max_size=32))
copies = st.builds(
    CopiedFile,
    st.integers(0, 2**64 - 1),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(0, 2**64 - 1),
    digests,
    st.integers(0, 63).map(Flag),
)
table = st.builds(StatusRow, st.sampled_from(list(RecordState)[1:]), st.integers(0, 255), copies)


@pytest.fixture(name="file")
def open_file() -> Iterator[int]:
    descriptor = os.memfd_create("checkpoint")
    yield descriptor
    os.close(descriptor)


def header(sequence: int = 1, **fields: object) -> RecordsHeader:
    standard = {
        "sequence": sequence, "items": (("file", b"/a\xff", b"/b"),), "items_digest": b"d" * 16, "boot": "b",
        "shape": (1, 2, "xxh3-128", 2), "records": 3, "files": 2, "directories": 1, "left_out": 0, "size_bytes": 9,
        "manifest_bytes": 100, "manifest_digest": b"m" * 16, "chunks": 0,
    }  # fmt: skip
    return RecordsHeader(**standard | fields)  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(st.lists(table, min_size=1, max_size=20))
def test_rows_come_back_as_they_were_put_one_by_one_and_many(kept: list[StatusRow]) -> None:
    file = os.memfd_create("slots")
    one, count = StatusTable(file), len(kept)
    for index, row in enumerate(kept):
        one.put(index, row)
    assert [one.get(index) for index in range(count)] == kept == one.many(0, count)
    one.put_many(count, kept)
    assert one.many(0, 2 * count) == kept * 2
    assert one.states(0, count + 3)[:count] == bytes(row.state for row in kept)
    assert one.many(2 * count, 5) == [EMPTY] * 5 and one.get(10**6) == EMPTY
    assert one.states(2 * count, 5) == bytes(5)
    os.close(file)


@settings(max_examples=200, deadline=None)
@given(table, st.integers(0, ROW_BYTES * 8 - 1))
def test_a_slot_with_a_flipped_bit_counts_as_empty(row: StatusRow, bit: int) -> None:
    file = os.memfd_create("slots")
    kept = StatusTable(file)
    kept.put(0, row)
    _flip(file, HEADER_BYTES * 8 + bit)
    assert kept.get(0) == EMPTY
    os.close(file)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, MARK_BYTES * 8 - 1), st.sampled_from([b"", b"d" * 16, b"d" * 32]))
def test_a_mark_with_a_flipped_bit_counts_as_none(bit: int, digest: bytes) -> None:
    file = os.memfd_create("marks")
    chunks = Chunks(file, 3, 2, 4096)
    chunks.mark_copied(1, digest)
    assert (chunks.state(1), chunks.digest(1)) == (ChunkState.COPIED, digest)
    chunks.mark_durable([1])
    assert (chunks.state(1), chunks.digest(1)) == (ChunkState.DURABLE, digest)
    at = 4 * MARK_BYTES * 8 + bit
    _flip(file, at)
    if 16 <= bit < 32:
        assert chunks.state(1) is ChunkState.DURABLE, "two bytes of a mark mean nothing"
    else:
        assert (chunks.state(1), chunks.digest(1)) == (ChunkState.NONE, b"")
    os.close(file)


def test_marks_of_one_file_are_cleared_and_those_of_others_stay(file: int) -> None:
    before, mine, after = Chunks(file, 0, 2, 1), Chunks(file, 2, 3, 1), Chunks(file, 5, 1, 1)
    for chunks in (before, mine, after):
        for number in range(chunks.count):
            chunks.mark_copied(number, b"d" * 16)
    mine.clear()
    states = [chunks.state(number) for chunks in (before, mine, after) for number in range(chunks.count)]
    assert states == [ChunkState.COPIED] * 2 + [ChunkState.NONE] * 3 + [ChunkState.COPIED]


def test_tries_are_counted_and_kept_whatever_becomes_of_the_record(file: int) -> None:
    kept = StatusTable(file)
    assert [kept.count_try(4), kept.count_try(4)] == [1, 2]
    kept.mark(4, RecordState.STARTED, CopiedFile(0, 0, 99))
    kept.mark(4, RecordState.READY, CopiedFile(1, 2, 3))
    kept.mark(4, RecordState.DONE, CopiedFile(1, 2, 3))
    assert kept.get(4) == StatusRow(RecordState.DONE, 2, CopiedFile(1, 2, 3))
    for _ in range(300):
        kept.count_try(4)
    assert kept.get(4).tries == 255


def test_the_newest_whole_header_counts_and_a_complete_one_before_its_like(file: int) -> None:
    assert read_header(file) is None
    write_header(file, header(4))
    assert read_header(file) == header(4)
    write_header(file, header(4, complete=True))
    assert read_header(file) == header(4, complete=True)
    write_header(file, header(5))
    assert read_header(file) == header(5)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 8 * 100 - 1))
def test_a_torn_header_is_not_believed_and_the_one_beside_it_is(bit: int) -> None:
    file = os.memfd_create("control")
    write_header(file, header(4, complete=True))
    write_header(file, header(5))
    _flip(file, bit)
    found = read_header(file)
    assert found == header(4, complete=True)
    os.close(file)


def test_records_of_another_format_are_not_read(file: int) -> None:
    write_header(file, msgspec.structs.replace(header(), format=FORMAT + 1))
    assert read_header(file) is None


def _flip(file: int, bit: int) -> None:
    (byte,) = os.pread(file, 1, bit // 8)
    os.pwrite(file, bytes((byte ^ 1 << bit % 8,)), bit // 8)


def test_a_record_that_a_full_disk_does_not_take_is_an_error() -> None:
    full = os.open("/dev/full", os.O_RDWR)
    try:
        with pytest.raises(RecordsFailed) as failed:
            Chunks(full, 0, 4, 1 << 20).mark_copied(1, b"")
        assert failed.value.errno == errno.ENOSPC
    finally:
        os.close(full)
