"""Sync records: their bytes, and the result or rejection of a replay."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.wal.records import ENTRY_MAX_BYTES, GENESIS, DamagedValue, Entry, HardState, Marks, chain_digest
from forebay.wal.replay import Contradiction, Sync, pack, replay, unpack
from tests.wal.support import entry

NUMBERS = st.integers(0, 2**64 - 1)
HARD = st.one_of(
    st.none(),
    st.builds(HardState, NUMBERS, st.one_of(st.none(), st.text(min_size=1, max_size=60))),
)


@given(
    st.tuples(NUMBERS, NUMBERS, NUMBERS),
    st.integers(1, 2**63),
    st.lists(st.tuples(NUMBERS, st.binary(max_size=80)), max_size=6),
    HARD,
    st.binary(min_size=32, max_size=32),
    st.lists(NUMBERS, max_size=6),
)
def test_packed_sync_is_unpacked_unchanged(
    numbers: tuple[int, int, int],
    first: int,
    entries: list[tuple[int, bytes]],
    hard: HardState | None,
    digest: bytes,
    revisions: list[int],
) -> None:
    last_before, commit, applied = numbers
    numbered = [Entry(first + at, term, data) for at, (term, data) in enumerate(entries)]
    sync = Sync(last_before, first, numbered, hard, commit, applied, digest, revisions)
    assert unpack(pack(sync)) == sync._replace(revisions=tuple(revisions))


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_a_sync_or_damaged(body: bytes) -> None:
    try:
        assert pack(unpack(body)) == body
    except DamagedValue as damaged:
        assert str(damaged)


def test_entry_larger_than_the_maximum_is_damage() -> None:
    sync = Sync(0, 1, [Entry(1, 1, bytes(ENTRY_MAX_BYTES + 1))], None, 0, 0, GENESIS, [])
    with pytest.raises(DamagedValue, match="the maximum is"):
        unpack(pack(sync))


def stored(index: int) -> Entry:
    return entry(index)


MARKS = Marks(
    base_index=1, base_term=1, last_index=4, commit_index=2, applied_index=1, applied_revision=2,
    applied_digest=chain_digest(GENESIS, entry(1)),
)  # fmt: skip


def test_records_that_cut_lmdb_and_log_leave_the_remaining_entries() -> None:
    two = chain_digest(MARKS.applied_digest, entry(2))
    three = chain_digest(two, entry(3, 2))
    bodies = [
        pack(Sync(4, 5, [entry(5), entry(6)], None, 2, 2, two, [4])),
        pack(Sync(6, 3, [entry(3, 2), entry(4, 2)], HardState(2, "r2"), 2, 2, two, [])),
        pack(Sync(4, 4, [entry(4, 3)], HardState(3, None), 3, 3, three, [4])),
        pack(Sync(4, 5, [], HardState(3, "r1"), 4, 3, three, [])),
    ]
    replayed = replay(HardState(1, "r1"), MARKS, bodies, stored)
    assert replayed.hard == HardState(3, "r1")
    assert (replayed.kept, replayed.entries) == (2, [entry(3, 2), entry(4, 3)])
    assert [(one.at, one.row.revision, one.advanced) for one in replayed.applied] == [(2, 4, True), (3, 4, False)]
    after = replayed.marks
    assert (after.last_index, after.commit_index, after.applied_index, after.applied_revision) == (4, 4, 3, 4)
    assert (after.base_index, after.applied_digest) == (1, three)


def test_empty_log_replays_to_the_stored_state() -> None:
    replayed = replay(HardState(1, "r1"), MARKS, [], stored)
    assert replayed == (HardState(1, "r1"), MARKS, 4, [], [])


def test_contradiction_names_the_record() -> None:
    good = pack(Sync(4, 5, [entry(5)], None, 2, 1, MARKS.applied_digest, []))
    with pytest.raises(Contradiction, match="record 2: the record follows entry 4, but the last entry is 5"):
        replay(HardState(1, "r1"), MARKS, [good, good], stored)
