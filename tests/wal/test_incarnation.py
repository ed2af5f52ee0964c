"""A new incarnation of the cluster in a storage is complete or absent, and no entry is lost."""

from collections.abc import Callable
from pathlib import Path

import pytest

from forebay.wal import (
    FIRST_INCARNATION,
    BrokenInvariant,
    Entry,
    Environment,
    Incarnation,
    Journal,
    Ledger,
    lineage_of,
    parse_lineage,
)
from tests.wal.lives import Life, lives, state_of
from tests.wal.support import apply, entry, fill, opened

SECOND = Incarnation(2, "0123456789abcdef")


@pytest.fixture
def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Life]:
    return lives(tmp_path, monkeypatch)


def test_incarnation_begins_after_all_entries_and_survives_a_restart(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        fill(journal, 5, applied=3, term=4)
        journal.begin_incarnation(SECOND, 5, [Entry(6, 5, b"\x01a", b"seal"), Entry(7, 5, b"\x01b")])
        held = state_of(journal)
    with opened(tmp_path, create=False) as journal:
        assert state_of(journal) == held
        assert (journal.commit_index, journal.applied_index, journal.last_index) == (7, 3, 7)
        assert [one.term for one in held.entries] == [4] * 5 + [5, 5]
        apply(journal, 7)
        for incarnation, term in ((SECOND, 6), (FIRST_INCARNATION, 6), (Incarnation(3, "f" * 16), 5)):
            with pytest.raises(BrokenInvariant, match="begins after"):
                journal.begin_incarnation(incarnation, term, [])
    with Environment.open_readonly(tmp_path) as environment:
        assert environment.incarnation == SECOND
        assert Ledger(environment).applied_index == 3, "unsynced entries are not applied"


def test_death_at_any_operation_leaves_exactly_one_incarnation(
    at: Callable[[int], Life],
) -> None:
    """Also with a sync log that adds to LMDB, and with a torn sync log."""
    seen = set()
    for operation in range(1, 200):
        life = at(operation)
        journal = life.open()
        life.create = False
        journal.set_term(3, "r1")
        journal.append([entry(index, 3, 300) for index in (1, 2, 3, 4)])
        journal.set_commit(2)
        journal.record_applied(journal.entry(1), 1)
        journal.sync()
        before = state_of(journal)

        def begin(journal: Journal = journal) -> None:
            journal.begin_incarnation(SECOND, 4, [Entry(5, 4, b"\x01a", b"seal"), Entry(6, 4, b"\x01b")])

        died = life.dies(operation, begin)
        if not died:
            life.lose_power()
        journal = life.open()
        assert life.env is not None
        found, incarnation = state_of(journal), life.env.incarnation
        seen.add(incarnation)
        if incarnation == SECOND:
            assert found.entries[:4] == before.entries and [one.term for one in found.entries[4:]] == [4, 4]
            assert (found.term, found.voted_for, journal.commit_index) == (4, None, 6)
        else:
            assert (found, incarnation, died) == (before, FIRST_INCARNATION, True)
        if not died:
            assert (seen, operation > 5) == ({FIRST_INCARNATION, SECOND}, True)
            return
    raise AssertionError("the operation must end")


@pytest.mark.parametrize("incarnation", [FIRST_INCARNATION, SECOND, Incarnation(10**9 - 1, "f" * 16)])
def test_incarnation_text_can_be_parsed(incarnation: Incarnation) -> None:
    assert parse_lineage(lineage_of("ab12", incarnation)) == ("ab12", incarnation)


@pytest.mark.parametrize(
    "text", ["", "/2-0123456789abcdef", "ab12/2", "ab12/0-0123456789abcdef", "ab12/2-xyz", "a/b/c"]
)
def test_malformed_incarnation_text_gives_none(text: str) -> None:
    assert parse_lineage(text) is None
