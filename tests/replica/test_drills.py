"""Drills: one at a time, none while somebody wants none, and each has an end that is told."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.replica.messages import commands as c
from forebay.replica.model import SCENARIOS, DrillVerdict
from forebay.replica.values import DRILL_S_MAX, DRILLS_KEPT, Rejection
from tests.replica.world import OPERATOR, World

ROOT, EVE = OPERATOR, c.Actor(c.ActorRole.OPERATOR, "eve")
START = c.StartDrill("switchover", "r2", 60)
SECOND_US = 1_000_000


def refused(found: Rejection | int) -> str:
    assert isinstance(found, Rejection), found
    return found.sentence


def test_a_drill_begins_is_measured_and_ends_in_the_state() -> None:
    world = World()
    assert world.settle(START) == 0
    begun = world.state.drills[1]
    assert (begun.scenario, begun.target, begun.by, begun.at) == ("switchover", "r2", ROOT.name, world.state.at)
    assert world.settle(c.ProbeDrill(1)) == 0
    assert world.state.drills[1] == begun
    figures = (("write_stop_us", 12_000),)
    assert world.settle(c.EndDrill(1, DrillVerdict.PASSED, "writes stopped for 12 ms", figures)) == 0
    ended = world.state.drills[1]
    assert (ended.verdict, ended.figures) == (DrillVerdict.PASSED, figures)
    assert ended.ended_at == world.state.at
    for late in (c.ProbeDrill(1), c.AbortDrill(1, "why"), c.EndDrill(1, DrillVerdict.FAILED, "again")):
        assert refused(world.settle(late)) == "drill 1 is passed"


def test_there_is_one_drill_at_a_time_and_one_that_was_not_heard_of_again_is_lost() -> None:
    world = World()
    world.settle(START)
    assert refused(world.settle(START, EVE)).startswith("drill 1 (switchover of r2, by ")
    world.at += 60 * SECOND_US
    assert refused(world.settle(c.ProbeDrill(1))) == "drill 1 is past its time limit"
    assert world.settle(START, EVE) == 0
    assert [world.state.drills[number].verdict for number in (1, 2)] == [DrillVerdict.LOST, DrillVerdict.UNDER_WAY]
    assert world.state.drills[1].sentence == "no probe came for 60 s"


LEASED = c.StartDrill("switchover", "r2", 60, lease_s=9)


def test_a_drill_is_over_when_nothing_was_heard_of_who_carries_it_out_for_as_long_as_its_lease() -> None:
    world = World()
    world.settle(LEASED)
    for _ in range(4):
        world.at += 8 * SECOND_US
        assert world.settle(c.ProbeDrill(1)) == 0
        assert world.state.drills[1].renewed_at == world.state.at
    renewed_at = world.state.drills[1].renewed_at
    world.at += 2 * SECOND_US
    assert world.settle(c.ProbeDrill(1)) == 0
    assert world.state.drills[1].renewed_at == renewed_at, "that is no event yet"
    world.at += 4 * SECOND_US
    assert world.settle(c.ProbeDrill(1), EVE) == 0
    assert world.state.drills[1].renewed_at == renewed_at, "somebody else keeps nobody alive"
    world.at += 3 * SECOND_US
    assert refused(world.settle(c.ProbeDrill(1))) == "drill 1 is past its time limit"
    assert world.settle(LEASED, EVE) == 0
    assert world.state.drills[1].sentence == "no probe came for 9 s"
    late = c.EndDrill(1, DrillVerdict.PASSED, "so")
    assert refused(world.settle(late)) == "drill 1 is lost", "it was said to be"


def test_who_was_silent_for_too_long_may_still_say_how_it_ended_until_another_begins_or_its_time_is_over() -> None:
    world = World()
    world.settle(LEASED)
    world.at += 59 * SECOND_US
    assert world.settle(c.EndDrill(1, DrillVerdict.ABORTED, "no write was acknowledged")) == 0
    world.settle(LEASED)
    world.at += 60 * SECOND_US
    assert refused(world.settle(c.EndDrill(2, DrillVerdict.ABORTED, "late"))) == "drill 2 is past its time limit"


def test_while_one_operator_wants_no_drills_there_is_none() -> None:
    world = World()
    for actor in (ROOT, EVE):
        assert world.settle(c.LockDrills("an audit"), actor) == 0
    assert world.settle(c.LockDrills("an audit"), EVE) == 0, "said again it is a repeat"
    assert refused(world.settle(START)) == "drills are locked by eve: an audit"
    assert world.settle(c.UnlockDrills(ROOT.name), EVE) == 0
    assert refused(world.settle(START)) == "drills are locked by eve: an audit"
    assert refused(world.settle(c.UnlockDrills(ROOT.name))) == f"{ROOT.name} has not locked drills"
    world.settle(c.UnlockDrills("eve"))
    assert world.settle(START) == 0


def test_a_drill_is_to_be_aborted_once_somebody_says_so() -> None:
    world = World()
    world.settle(START)
    assert world.settle(c.AbortDrill(1, "the phone rings"), EVE) == 0
    assert world.settle(c.AbortDrill(1, "it does not stop"), ROOT) == 0
    assert world.state.drills[1].abort == "eve: the phone rings", "who was first is shown"
    assert world.settle(c.EndDrill(1, DrillVerdict.ABORTED, "eve: the phone rings")) == 0


CARRIED_OUT: tuple[c.Command, ...] = (
    START, c.ProbeDrill(1), c.AbortDrill(1, "x"), c.EndDrill(1, DrillVerdict.PASSED, "x"),
)  # fmt: skip
LOCKS: tuple[c.Command, ...] = (c.LockDrills("x"), c.UnlockDrills("x"), c.ConfirmDrill(1))


@pytest.mark.parametrize("role", [role for role in c.ActorRole if role is not c.ActorRole.OPERATOR])
def test_drills_are_for_operators_and_the_role_that_carries_them_out(role: c.ActorRole) -> None:
    world, actor = World(), c.Actor(role, "n1")
    for command in LOCKS if role is c.ActorRole.DRILL else (*CARRIED_OUT, *LOCKS):
        assert "permission denied" in refused(world.settle(command, actor))


def test_who_has_the_role_drill_carries_one_out_from_its_beginning_to_its_end() -> None:
    world = World()
    for command in CARRIED_OUT:
        assert world.settle(command, c.Actor(c.ActorRole.DRILL, "dora")) == 0
    assert (world.state.drills[1].by, world.state.drills[1].verdict) == ("dora", DrillVerdict.PASSED)


def test_the_plan_that_was_confirmed_is_told_to_whoever_asks_for_the_drill() -> None:
    world = World()
    assert world.settle(c.StartDrill("leader-hang", "r1", 60, (), "f003ad4d")) == 0
    assert world.state.drills[1].plan == "f003ad4d"


def test_another_operator_agrees_to_a_drill_and_never_who_carries_it_out() -> None:
    world = World()
    world.settle(START)
    assert refused(world.settle(c.ConfirmDrill(1))).endswith("who cannot confirm it")
    for actor in (EVE, c.Actor(c.ActorRole.OPERATOR, "bob")):
        assert world.settle(c.ConfirmDrill(1), actor) == 0
    assert world.state.drills[1].second == "eve", "who was first is shown"
    world.settle(c.EndDrill(1, DrillVerdict.PASSED, "so"))
    assert refused(world.settle(c.ConfirmDrill(1), EVE)) == "drill 1 is passed"


MANY = tuple((f"a{number}", number) for number in range(65))

BAD: tuple[tuple[Any, str], ...] = (
    (c.StartDrill("flood", "r2", 60), "scenario 'flood'"),
    (c.StartDrill("switchover", "../r2", 60), "the target "),
    (c.StartDrill("switchover", "r2", 0), "lasts_s 0 is out of range"),
    (c.StartDrill("switchover", "r2", DRILL_S_MAX + 1), "lasts_s "),
    (c.StartDrill("switchover", "r2", 60, ("a b",)), "the forced "),
    (c.StartDrill("switchover", "r2", 60, (), "a b"), "the plan "),
    (c.StartDrill("switchover", "r2", 60, ("lag",) * 65), "forced has more than 64 preconditions"),
    (c.AbortDrill(7, "why"), "drill 7 does not exist"),
    (c.AbortDrill(1, " "), "the reason is empty"),
    (c.AbortDrill(1, "x" * 100_000), "the reason is empty"),
    (c.LockDrills("\x1b[2J"), "the reason is empty"),
    (c.EndDrill(1, DrillVerdict.LOST, "gone"), "verdict lost does not end a drill"),
    (c.EndDrill(1, DrillVerdict.UNDER_WAY, "gone"), "verdict under way does not end a drill"),
    (c.EndDrill(1, DrillVerdict.PASSED, "x", (("Stop", 1),)), "the figures are not valid: 'Stop' is not valid"),
    (c.EndDrill(1, DrillVerdict.PASSED, "x", (("a", 1), ("a", 2))), "the figures are not valid: a name occurs twice"),
    (c.EndDrill(1, DrillVerdict.PASSED, "x", (("a", 2**63),)), "the figures are not valid: 'a' is not valid"),
    (c.EndDrill(1, DrillVerdict.PASSED, "x", MANY), "the figures are not valid: there are 65 figures"),
)  # fmt: skip


@pytest.mark.parametrize(("command", "sentence"), BAD, ids=lambda value: str(value)[:60])
def test_what_no_drill_can_be_is_refused_by_name(command: c.Command, sentence: str) -> None:
    world = World()
    if not isinstance(command, c.StartDrill):
        world.settle(START)
    before = world.state.drills
    assert refused(world.settle(command)).startswith(sentence)
    assert world.state.drills == before


def test_the_last_drills_are_remembered_and_numbers_go_on() -> None:
    world = World()
    for number in range(1, DRILLS_KEPT + 4):
        world.settle(START)
        assert world.settle(c.EndDrill(number, DrillVerdict.PASSED, "well")) == 0
    assert (len(world.state.drills), min(world.state.drills), max(world.state.drills)) == (
        DRILLS_KEPT,
        4,
        DRILLS_KEPT + 3,
    )


STEPS = st.lists(
    st.one_of(
        st.builds(c.StartDrill, st.sampled_from((*SCENARIOS, "no")), st.sampled_from(("r1", "r2")), st.integers(0, 90)),
        st.builds(c.AbortDrill, st.integers(0, 4), st.sampled_from(("why", ""))),
        st.builds(c.EndDrill, st.integers(0, 4), st.sampled_from(DrillVerdict), st.just("so")),
        st.builds(c.ProbeDrill, st.integers(0, 4)),
        st.builds(c.ConfirmDrill, st.integers(0, 4)),
        st.builds(c.LockDrills, st.sampled_from(("why", ""))),
        st.builds(c.UnlockDrills, st.sampled_from((ROOT.name, "eve"))),
        st.integers(0, 100 * SECOND_US),
    ),
    max_size=30,
)


@given(STEPS)
@settings(max_examples=200, deadline=None)
def test_whatever_is_asked_at_most_one_drill_is_under_way_and_none_begins_behind_a_lock(steps: list[Any]) -> None:
    world = World()
    for step in steps:
        if isinstance(step, int):
            world.at += step
            continue
        locked, known = bool(world.state.drill_locks), set(world.state.drills)
        world.settle(step, EVE if isinstance(step, c.LockDrills) else ROOT)
        under_way = [one.id for one in world.state.drills.values() if one.verdict is DrillVerdict.UNDER_WAY]
        assert len(under_way) <= 1 and under_way in ([], [max(world.state.drills, default=0)])
        assert not (locked and set(world.state.drills) - known)
