"""Recoveries: a new incarnation is a fact of the ledger, and leaves out what lost jobs may have been called."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.replica.fold.fold import fold
from forebay.replica.messages import commands as c
from forebay.replica.messages import events as e
from forebay.replica.model import Recovery
from forebay.replica.state import EMPTY
from forebay.replica.values import MEMBERS_MAX, RECOVERIES_KEPT, Instant, LedgerViolation, Rejection
from tests.replica.world import OPERATOR, World

MARK = "0123456789abcdef"
ALL = ("r1", "r2", "r3")


def test_a_recovery_is_kept_with_who_did_it_and_numbers_of_lost_jobs_are_not_given_out_again() -> None:
    world = World()
    before, at = world.state.next_job, world.state.at
    world.at += 60_000_000
    assert world.settle(c.RecoverCluster(MARK, "r1", ALL, 42, 40)) == 0
    begun = world.state.recoveries[2]
    assert (begun.incarnation, begun.mark, begun.by, begun.members) == (2, MARK, OPERATOR.name, ALL)
    assert (begun.kept_index, begun.known_index, begun.kept_at, begun.at) == (42, 40, at, world.state.at)
    assert begun.last_job == before - 1 and begun.first_job > before
    assert world.state.next_job == begun.first_job


@given(
    st.lists(
        st.tuples(st.sampled_from(["submits", "recovers"]), st.integers(0, 9), st.integers(1, 10**10)),
        min_size=2,
        max_size=25,
    )
)
def test_no_number_is_given_out_twice_however_often_the_cluster_goes_back(steps: list[tuple[str, int, int]]) -> None:
    """Each recovery goes back to any state that there ever was, of any incarnation, and knows nothing of the others."""
    world = World()
    states = [world.state]
    given_out: set[int] = set()
    for what, which, later_us in steps:
        world.at = Instant(world.at + later_us)
        if what == "recovers":
            world.state = states[which % len(states)]
            assert world.settle(c.RecoverCluster(MARK, "r1", ALL, 42, 40)) == 0
        else:
            # As many as may be in that time.
            for _ in range(min(which, later_us // 1_000)):
                job = world.submit()
                assert job not in given_out
                given_out.add(job)
        states.append(world.state)


def test_recoveries_are_numbered_and_the_oldest_are_forgotten() -> None:
    world = World()
    for number in range(RECOVERIES_KEPT + 3):
        assert world.settle(c.RecoverCluster(MARK, "r1", ALL, number, 0)) == 0
    assert sorted(world.state.recoveries) == list(range(5, RECOVERIES_KEPT + 5))


@pytest.mark.parametrize(
    "command",
    [
        c.RecoverCluster("2-x", "r1", ALL, 42, 40),
        c.RecoverCluster(MARK, "r1", ("r1",) * (MEMBERS_MAX + 1), 42, 40),
        c.RecoverCluster(MARK, "r1", ALL, 42, 43),
        c.RecoverCluster(MARK, "r1", ALL, 42, -1),
    ],
)
def test_what_cannot_be_a_recovery_is_refused(command: c.RecoverCluster) -> None:
    assert isinstance(World().settle(command), Rejection)


def test_no_ledger_has_a_recovery_out_of_turn_or_one_that_gives_numbers_out_again() -> None:
    for recovery in (Recovery(3, MARK, "ops", "r1", first_job=9), Recovery(2, MARK, "ops", "r1", first_job=0)):
        with pytest.raises(LedgerViolation):
            fold(EMPTY, (e.ClusterRecovered(recovery),), Instant(1))
