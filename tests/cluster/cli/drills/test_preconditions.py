"""A plan: each thing that must hold is seen not to, and its id is another one as soon as it would be another drill."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from cluster.cli.drills.preconditions import Found, Plan, plan_of
from cluster.schemas import DigestsAnswer, MembersAnswer, MemberView, StatusView
from cluster.schemas.drills import DrillLockView, DrillsAnswer, DrillView

NAMES = ("r1", "r2", "r3")
STATUS = StatusView(
    cluster="c", cluster_id="1f", replica="", role="follower", term=7, leader="r1", ready=True, commit_index=9,
    applied_index=9, last_index=9, revision=8,
)  # fmt: skip


def member(name: str, **more: object) -> MemberView:
    role = "leader" if name == "r1" else "follower"
    return replace(MemberView(name=name, peer="p", api="a", role=role, reachable=True, lag_entries=0), **more)


def drill(number: int, **more: object) -> DrillView:
    shown = DrillView(
        drill=number, scenario="switchover", target="r2", by="root", verdict="passed", began=None, until="10:03"
    )
    return replace(shown, **more)


WELL = Found(
    members=MembersAnswer(
        revision=8, replica="r1", leader="r1", term=7, version=1, members=tuple(member(name) for name in NAMES)
    ),
    statuses={name: replace(STATUS, replica=name) for name in NAMES},
    digests={name: DigestsAnswer(revision=8, replica=name, digests={5: "d"}, verdict="agrees") for name in NAMES},
    drills=DrillsAnswer(revision=8, drills=(), locks=()),
)


def of_members(**of: dict[str, object]) -> Found:
    rows = tuple(member(name, **of.get(name, {})) for name in NAMES)
    return replace(WELL, members=replace(WELL.members, members=rows))


def status(name: str, **more: object) -> Found:
    return replace(WELL, statuses={**WELL.statuses, name: replace(WELL.statuses[name], **more)})


def without(name: str) -> Found:
    return replace(WELL, statuses={one: found for one, found in WELL.statuses.items() if one != name})


def digests(name: str, **more: object) -> Found:
    return replace(WELL, digests={**WELL.digests, name: replace(WELL.digests[name], **more)})


UNMET: dict[str, tuple[Found, str | None, str]] = {
    "one does not answer": (without("r3"), "r2", "members: 2 of 3 answer; not r3"),
    "nobody leads": (replace(WELL, members=replace(WELL.members, leader=None)), "r2", "members: 3 of 3 answer"),
    "two vote": (of_members(r3={"votes": False}), "r2", "members: 2 of 2 answer"),
    "no such member": (WELL, "r9", "target: there is no member r9"),
    "it leads": (WELL, "r1", "target: r1 leads already"),
    "it learns": (of_members(r3={"votes": False}), "r3", "target: r3 does not vote yet"),
    "far behind": (of_members(r3={"lag_entries": 101}), "r2", "lag: at most 101 entries behind the leader"),
    "not ready": (
        status("r3", ready=False, not_ready="it reads its snapshot"),
        "r2",
        "ready: r3 it reads its snapshot",
    ),
    "another term": (status("r3", term=6), "r2", "term: r3 has term 6 and leader r1"),
    "a clock": (status("r2", clock_off=True), "r2", "clocks: r2 has a wall clock that is off"),
    "damage": (status("r2", damaged_entries=3), "r2", "ledgers: r2 has 3 damaged entries"),
    "odd": (digests("r2", verdict="odd"), "r2", "digests: r2 differ"),
    "different": (digests("r2", digests={5: "e"}), "r2", "digests: replicas differ after entry 5"),
    "not compared": (digests("r2", digests={}), "r2", "digests: nothing was compared yet"),
    "another one": (
        replace(WELL, drills=replace(WELL.drills, drills=(drill(3, verdict="under way"), drill(2)))),
        "r2",
        "drills: drill 3 is under way until 10:03",
    ),
    "locked": (
        replace(WELL, drills=replace(WELL.drills, locks=(DrillLockView(by="eve", reason="no", since=None),))),
        "r2",
        "drills: eve wants none: no",
    ),
}
NEVER_FORCED = {"members", "target", "drills"}


def test_a_well_cluster_has_a_plan_that_nothing_refuses() -> None:
    made = plan_of(WELL, "switchover", None)
    assert made.refused == () and made.target == "r2" and len(made.preconditions) == 9
    assert all(one.holds and one.figure for one in made.preconditions)
    assert "r2 takes the leadership over from r1" in made.will_happen


@pytest.mark.parametrize("name", UNMET)
def test_what_must_hold_and_does_not_refuses_the_drill_by_name_figure_and_remedy(name: str) -> None:
    found, target, said = UNMET[name]
    refused = plan_of(found, "switchover", target).refused
    assert said in [f"{one.name}: {one.figure}" for one in refused]
    assert all(one.remedy for one in refused)


@pytest.mark.parametrize("name", UNMET)
def test_what_may_be_overridden_is_by_its_own_name_only(name: str) -> None:
    found, target, said = UNMET[name]
    unmet = said.partition(":")[0]
    made = plan_of(found, "switchover", target, [unmet, "flood"])
    assert (unmet in [one.name for one in made.refused]) == (unmet in NEVER_FORCED)
    assert set(made.forced) == {unmet} or unmet in NEVER_FORCED
    others = [one.name for one in plan_of(found, "switchover", target, ["flood"]).refused]
    assert unmet in others, "another name overrides nothing"


CHANGES: dict[str, Callable[[], Plan]] = {
    "target": lambda: plan_of(WELL, "switchover", "r3"),
    "leader": lambda: plan_of(replace(WELL, members=replace(WELL.members, leader="r3")), "switchover", "r2"),
    "term": lambda: plan_of(replace(WELL, members=replace(WELL.members, term=8)), "switchover", "r2"),
    "members": lambda: plan_of(replace(WELL, members=replace(WELL.members, version=2)), "switchover", "r2"),
    "what does not hold": lambda: plan_of(of_members(r3={"lag_entries": 101}), "switchover", "r2"),
    "what is overridden": lambda: plan_of(of_members(r3={"lag_entries": 101}), "switchover", "r2", ["lag"]),
    "cluster": lambda: plan_of(status("r1", cluster_id="2f"), "switchover", "r2"),
}


def test_a_plan_has_another_id_as_soon_as_it_would_be_another_drill() -> None:
    ids = [plan_of(WELL, "switchover", "r2").id, *(make().id for make in CHANGES.values())]
    assert len(set(ids)) == len(ids)
    later = of_members(r3={"lag_entries": 3})
    assert plan_of(later, "switchover", "r2").id == ids[0], "what holds all the same is no change"


def test_a_plan_says_what_earlier_ones_took() -> None:
    took = tuple(drill(number, figures={"write_stop_us": 1000 * number}) for number in range(9, 2, -1))
    made = plan_of(replace(WELL, drills=replace(WELL.drills, drills=took)), "switchover", "r2")
    assert made.earlier_us == (9000, 8000, 7000, 6000, 5000)
    assert "for some 7 ms, as in the last 5 of these drills" in made.will_happen
