"""The mark of an event sink only advances, is removed with its sink, and never passes the ledger."""

from __future__ import annotations

import pytest

from forebay.replica.fold.fold import fold
from forebay.replica.messages import commands as c
from forebay.replica.messages import events as e
from forebay.replica.state import find_violations
from forebay.replica.values.errors import LedgerViolation, Rejection, RejectionCode
from forebay.replica.values.limits import NAME_CHARACTERS_MAX, SINK_MARKS_MAX
from tests.replica.world import World


def advance(world: World, *marks: tuple[str, int], removed: tuple[str, ...] = ()) -> Rejection | int:
    return world.settle(c.AdvanceSinks(marks, removed), c.CONTROLLER)


def code_of(outcome: Rejection | int) -> RejectionCode | None:
    return outcome.code if isinstance(outcome, Rejection) else None


def last_events(world: World) -> tuple[e.Event, ...]:
    return world.ledger[-1].entries[-1].events


def test_a_mark_advances_and_never_goes_back() -> None:
    world = World()
    begin = world.state.revision
    advance(world, ("audit", begin), ("monitor", 0))
    assert dict(world.state.sink_marks) == {"audit": begin, "monitor": 0}
    advance(world, ("audit", begin - 1), ("monitor", 0))
    assert last_events(world) == ()
    advance(world, ("audit", begin + 1), ("monitor", 0))
    assert last_events(world) == (e.SinkAdvanced("audit", begin + 1),)
    assert dict(world.state.sink_marks) == {"audit": begin + 1, "monitor": 0}
    assert not find_violations(world.state)


def test_a_mark_is_removed_once_and_one_that_advances_is_kept() -> None:
    world = World()
    advance(world, ("audit", 1), ("monitor", 1))
    advance(world, ("audit", 2), removed=("audit", "monitor", "monitor", "unknown"))
    assert last_events(world) == (e.SinkRemoved("monitor"), e.SinkAdvanced("audit", 2))
    assert dict(world.state.sink_marks) == {"audit": 2}


@pytest.mark.parametrize(
    ("marks", "code"),
    [
        ((("", 0),), RejectionCode.INVALID_FIELD),
        ((("x" * (NAME_CHARACTERS_MAX + 1), 0),), RejectionCode.INVALID_FIELD),
        ((("audit", -1),), RejectionCode.WRONG_STATE),
        ((("audit", 10_000),), RejectionCode.WRONG_STATE),
        (tuple((f"s{number}", 1) for number in range(SINK_MARKS_MAX + 1)), RejectionCode.LIMIT_EXCEEDED),
    ],
)
def test_marks_that_cannot_be_are_rejected(marks: tuple[tuple[str, int], ...], code: RejectionCode) -> None:
    world = World()
    assert code_of(advance(world, *marks)) is code
    assert not world.state.sink_marks


def test_all_sinks_can_be_replaced_at_once_within_the_limit() -> None:
    world = World()
    before = tuple(f"a{number}" for number in range(SINK_MARKS_MAX))
    assert code_of(advance(world, *((name, 1) for name in before))) is None
    assert code_of(advance(world, ("b", 1))) is RejectionCode.LIMIT_EXCEEDED
    assert code_of(advance(world, *((f"b{number}", 1) for number in range(SINK_MARKS_MAX)), removed=before)) is None
    assert len(world.state.sink_marks) == SINK_MARKS_MAX


def test_only_the_leader_advances_sinks() -> None:
    world = World()
    assert code_of(world.settle(c.AdvanceSinks((("audit", 1),)))) is RejectionCode.PERMISSION_DENIED


def test_a_ledger_with_an_impossible_mark_stops_the_replica() -> None:
    state = World().state
    for event in (e.SinkAdvanced("audit", state.revision + 2), e.SinkRemoved("audit")):
        with pytest.raises(LedgerViolation):
            fold(state, (event,), state.at)
    marked = fold(state, (e.SinkAdvanced("audit", state.revision),), state.at)
    with pytest.raises(LedgerViolation):
        fold(marked, (e.SinkAdvanced("audit", state.revision),), state.at)


def test_a_mark_beyond_the_ledger_is_a_violation() -> None:
    from msgspec.structs import replace

    state = World().state
    broken = replace(state, sink_marks=state.sink_marks.set("audit", state.revision + 1))
    assert len(find_violations(broken)) == 1
