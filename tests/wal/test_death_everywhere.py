"""A replica dies at every single operation on its disk, and again while it starts: what it had promised is there, and
what it had not is there as a whole or not at all.

The disk is the simulator's: LMDB's semantics in memory, and a log of which any sectors may be lost that are not synced.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from forebay.wal import Entry, RecoveryRefused
from forebay.wal.recovery import Condition
from tests.simulation.bugs import planted
from tests.wal.lives import Died, Life, lives, state_of
from tests.wal.support import entry

TEARS = 3
"""How often each death is tried, each time with other sectors lost."""

DEATHS_AT_START = (None, 1, 2, 3, 5, 8, 13)
"""The operations of the next start at which it dies again; None if it does not."""


OPERATIONS_MAX = 500
"""More than a life has."""


@pytest.fixture
def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Life]:
    return lives(tmp_path, monkeypatch)


def lived(life: Life) -> None:
    """A life in which everything happens that a journal does, at every place of a log with few blocks."""
    journal = life.open()
    life.create = False
    sync, flush = journal.sync, journal.flush_hints

    def note_applied(last: int) -> None:
        journal.set_commit(last)
        for index in range(journal.applied_index + 1, last + 1):
            journal.record_applied(journal.entry(index), index)

    journal.set_term(1, "r1")
    life.sync(journal, sync)
    journal.append([entry(index, 1, 300) for index in (1, 2, 3)])
    life.sync(journal, sync)
    journal.append([entry(4, 1, 1800), entry(5, 1, 100)])
    life.sync(journal, sync)
    journal.set_term(2, None)
    note_applied(3)
    life.sync(journal, sync)
    journal.truncate_from(5)
    journal.append([entry(5, 2, 700)])
    life.sync(journal, sync)
    life.sync(journal, flush)
    journal.append([entry(6, 2), entry(7, 2)])
    note_applied(5)
    life.sync(journal, sync)
    journal.set_term(3, "r3")
    journal.truncate_from(6)
    journal.append([entry(index, 3, 500) for index in (6, 7, 8)])
    life.sync(journal, sync)
    note_applied(6)
    journal.compact_to(2)
    life.sync(journal, sync)
    journal.append([entry(9, 3, 2000)])
    life.sync(journal, sync)
    journal.append([Entry(10, 3, bytes(200_000))])
    life.sync(journal, sync)
    journal.set_term(4, None)
    life.sync(journal, sync)
    life.sync(journal, flush)
    journal.reset_to(20, 4, b"d" * 32, 50)
    life.sync(journal, sync)
    journal.append([entry(21, 4)])
    life.sync(journal, sync)
    journal.set_term(5, "r2")
    journal.truncate_from(21)
    life.sync(journal, sync)
    journal = life.open()
    journal.append([entry(21, 5, 3000)])
    life.sync(journal, journal.sync)


def walk(at: Callable[[int], Life], deaths_at_start: tuple[int | None, ...] = DEATHS_AT_START) -> int:
    """Die everywhere; return how often. AssertionError, or an exception of the storage, where a promise is broken."""
    count = 0
    for number, again in enumerate(deaths_at_start):
        for seed in range(TEARS):
            for operation in range(1, OPERATIONS_MAX):
                life = at(1000 * operation + 10 * number + seed)
                if not life.dies(operation, lambda life=life: lived(life)):
                    break
                if life.promised is None:
                    life.create = True
                if again is not None:
                    life.dies(again, life.open)
                life.check()
                count += 1
            else:
                raise AssertionError("a life has an end")
    return count


@pytest.mark.campaign(3)
def test_whatever_operation_it_dies_at_nothing_promised_is_lost_and_nothing_else_is_made_up(
    at: Callable[[int], Life],
) -> None:
    assert walk(at) > 1500


@pytest.mark.parametrize(
    "bug", ["record_not_synced", "torn_record_believed", "generation_ignored", "generation_kept", "no_sync"]
)
def test_the_walk_finds_a_bug_that_is_planted(at: Callable[[int], Life], bug: str) -> None:
    with planted(bug), pytest.raises(BaseException) as found:
        walk(at, (None, 5))
    assert not isinstance(found.value, (Died, KeyboardInterrupt, TypeError, AttributeError)), found.value


def test_a_founding_that_dies_anywhere_can_be_made_again_and_is_refused_without_leave(
    at: Callable[[int], Life],
) -> None:
    for operation in range(1, 100):
        life = at(operation)
        if not life.dies(operation, life.open):
            assert operation > 10
            return
        if life.disk.transactions == 0:
            life.create = False
            with pytest.raises(RecoveryRefused) as refused:
                life.open()
            assert refused.value.condition is Condition.DIRECTORY_EMPTY
            life.create = True
        assert state_of(life.open()).term == 0
