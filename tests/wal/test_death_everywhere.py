"""A replica dies at every disk operation, and again during the next start. Promised data must survive.

Unpromised data must survive completely or not at all. The disk is the simulator's: LMDB in memory, and a sync log of
which any unsynced sectors may be lost.
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
"""Number of trials of each death, each with other lost sectors."""

DEATHS_AT_START = (None, 1, 2, 3, 5, 8, 13)
"""Operations of the next start at which it dies again; None for no second death."""


OPERATIONS_MAX = 500
"""More operations than a life has."""


@pytest.fixture
def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Life]:
    return lives(tmp_path, monkeypatch)


def lived(life: Life) -> None:
    """Perform every operation of a journal, at every position of a log with few blocks."""
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
    """Die at every operation; return the number of deaths. A broken promise raises an error."""
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
def test_death_at_any_operation_loses_no_promise_and_invents_nothing(
    at: Callable[[int], Life],
) -> None:
    assert walk(at) > 1500


@pytest.mark.parametrize(
    "bug", ["record_not_synced", "torn_record_believed", "generation_ignored", "generation_kept", "no_sync"]
)
def test_walk_finds_a_planted_bug(at: Callable[[int], Life], bug: str) -> None:
    with planted(bug), pytest.raises(BaseException) as found:
        walk(at, (None, 5))
    assert not isinstance(found.value, (Died, KeyboardInterrupt, TypeError, AttributeError)), found.value


def test_interrupted_founding_can_be_repeated_and_is_rejected_without_permission(
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
