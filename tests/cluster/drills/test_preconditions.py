"""Plans: each precondition can fail, and different drills have different plan IDs."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
from msgspec.structs import replace

from forebay.cluster.drills.copies.resources import Resources
from forebay.cluster.drills.helper import NEEDS, HelperAnswer
from forebay.cluster.drills.preconditions import (
    BY_HAND,
    MIB,
    ClusterFacts,
    DrillRequest,
    Plan,
    make_plan,
    manual_reason,
)
from forebay.cluster.drills.scenarios import SCENARIOS
from forebay.cluster.schemas import DigestsAnswer, MembersAnswer, MemberView, NodeView, StatusView
from forebay.cluster.schemas.drills import DrillLockView, DrillsAnswer, DrillView
from forebay.replica.model import SCENARIOS as KNOWN
from forebay.replica.model import DrillVerdict

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


WELL = ClusterFacts(
    members=MembersAnswer(
        revision=8, replica="r1", leader="r1", term=7, version=1, members=tuple(member(name) for name in NAMES)
    ),
    statuses={name: replace(STATUS, replica=name) for name in NAMES},
    digests={name: DigestsAnswer(revision=8, replica=name, digests={5: "d"}, verdict="agrees") for name in NAMES},
    drills=DrillsAnswer(revision=8, drills=(), locks=()),
    nodes=tuple(
        NodeView(
            name=name, state="UP", reason="", cpus=2, cpus_in_use=1, instance="i", storage_id="s",
            registered_time=None, jobs=jobs, revision=8,
        )
        for name, jobs in (("n1", (4,)), ("n2", (5, 6)), ("n3", ()))
    ),
    certificates_s={"root": 30 * 86_400.0, "r1": 30 * 86_400.0},
    helper=HelperAnswer(done=True),
    room=Resources(directory="/tmp", snapshot_bytes=MIB, free_bytes=1024 * MIB, memory_bytes=1024 * MIB),
)  # fmt: skip


def of_members(**of: dict[str, object]) -> ClusterFacts:
    rows = tuple(member(name, **of.get(name, {})) for name in NAMES)
    return replace(WELL, members=replace(WELL.members, members=rows))


def status(name: str, **more: object) -> ClusterFacts:
    return replace(WELL, statuses={**WELL.statuses, name: replace(WELL.statuses[name], **more)})


def without(name: str) -> ClusterFacts:
    return replace(WELL, statuses={one: found for one, found in WELL.statuses.items() if one != name})


def digests(name: str, **more: object) -> ClusterFacts:
    return replace(WELL, digests={**WELL.digests, name: replace(WELL.digests[name], **more)})


def node(name: str, **more: object) -> ClusterFacts:
    return replace(WELL, nodes=tuple(replace(one, **more) if one.name == name else one for one in WELL.nodes))


def site(**more: object) -> ClusterFacts:
    return replace(WELL, site=replace(WELL.site, **more))


def room(**more: object) -> ClusterFacts:
    assert WELL.room is not None
    return replace(WELL, room=replace(WELL.room, **more))


def plan(found: ClusterFacts, target: str | None, *forced: str, scenario: str = "switchover", **more: object) -> Plan:
    return make_plan(found, replace(DrillRequest(scenario=scenario, target=target, forced=forced), **more))


UNMET: dict[str, tuple[ClusterFacts, str | None, str]] = {
    "one does not answer": (without("r3"), "r2", "members: 2 of 3 answer; not r3"),
    "nobody leads": (replace(WELL, members=replace(WELL.members, leader=None)), "r2", "members: 3 of 3 answer"),
    "two vote": (of_members(r3={"votes": False}), "r2", "members: 2 of 2 answer"),
    "no such member": (WELL, "r9", "target: r9 is not a member"),
    "it leads": (WELL, "r1", "target: r1 is the leader"),
    "it learns": (of_members(r3={"votes": False}), "r3", "target: r3 does not vote yet"),
    "far behind": (of_members(r3={"lag_entries": 101}), "r2", "lag: at most 101 entries behind the leader"),
    "not ready": (
        status("r3", ready=False, not_ready="it reads its snapshot"),
        "r2",
        "ready: r3 it reads its snapshot",
    ),
    "another term": (status("r3", term=6), "r2", "term: r3 has term 6 and leader r1"),
    "a clock": (status("r2", clock_off=True), "r2", "clocks: r2 has a wrong wall clock"),
    "damage": (status("r2", damaged_entries=3), "r2", "ledgers: r2 has 3 damaged entries"),
    "odd": (digests("r2", verdict="odd"), "r2", "digests: r2 differ"),
    "different": (digests("r2", digests={5: "e"}), "r2", "digests: replicas differ after entry 5"),
    "not compared": (digests("r2", digests={}), "r2", "digests: not compared yet"),
    "another one": (
        replace(WELL, drills=replace(WELL.drills, drills=(drill(3, verdict="under way"), drill(2)))),
        "r2",
        "drills: drill 3 is running until 10:03",
    ),
    "locked": (
        replace(WELL, drills=replace(WELL.drills, locks=(DrillLockView(by="eve", reason="no", since=None),))),
        "r2",
        "drills: locked by eve: no",
    ),
    "the site's hours": (site(never="Mon-Fri 08:00-18:00"), "r2", "site: no drills Mon-Fri 08:00-18:00"),
    "a file against it": (site(halt="/etc/drill.halt"), "r2", "site: /etc/drill.halt exists"),
    "a certificate ends": (
        replace(WELL, certificates_s={"r1": 86_400.0, "r2": 8 * 86_400.0}),
        "r2",
        "certificates: valid: r1 for 1.0 days",
    ),
    "no certificate": (replace(WELL, certificates_s={}), "r2", "certificates: no replica presented one"),
    "an old snapshot": (
        status("r3", applied_index=30_000, snapshot_index=9_999),
        "r2",
        "snapshots: r3: more than 20000 entries since the last snapshot",
    ),
}
OF_MACHINES: dict[str, tuple[str, ClusterFacts, str | None, str]] = {
    "it follows": ("leader-hang", WELL, "r2", "target: r2 is not the leader"),
    "it leads": ("follower-stop", WELL, "r1", "target: r1 is the leader"),
    "no agent": ("agent-kill", WELL, "n9", "target: n9 is not a node"),
    "a replica for an agent": ("agent-kill", WELL, "r1", "target: r1 is not a node"),
    "an agent for a replica": ("leader-kill", WELL, "n1", "target: n1 is not a member"),
    "its node is DOWN": ("node-down", node("n1", state="DOWN"), "n1", "target: n1, DOWN, with 1 jobs"),
    "no node": ("agent-kill", replace(WELL, nodes=()), None, "target: no node is UP"),
    "the last majority": ("leader-kill", without("r2"), "r1", "quorum: 1 of 3 would be left, and 2 are needed"),
    "no helper": ("leader-hang", replace(WELL, helper="h1 is away; start it"), "r1", "helper: h1 is away"),
    "its clock": (
        "leader-hang",
        replace(WELL, helper_clock_s=-6.0),
        "r1",
        "helper: allows it; clock offset 6.0 s; its service manager restarts r1",
    ),
    "too long": ("node-down", site(node_down_s=300), "n1", "duration: 305 s"),
}
TREE = Path(__file__).parents[3]
OF_COPIES: dict[str, tuple[str, ClusterFacts, str | None, str, dict[str, object]]] = {
    "who gives the snapshot is away": ("restore", without("r3"), "r3", "members: 2 of 3 answer; not r3", {}),
    "no such member": ("upgrade", WELL, "r9", "target: r9 is not a member", {}),
    "locked": (
        "restore",
        replace(WELL, drills=replace(WELL.drills, locks=(DrillLockView(by="eve", reason="no", since=None),))),
        "r2",
        "drills: locked by eve: no",
        {},
    ),
    "a file against it": ("restore", site(halt="/etc/drill.halt"), "r2", "site: /etc/drill.halt exists", {}),
    "no room": (
        "restore",
        room(free_bytes=100 * MIB),
        "r2",
        "room: /tmp: 100 MiB free, up to 365MiB needed",
        {},
    ),
    "no directory": ("restore", room(fault="No such file"), "r2", "room: /tmp: No such file", {}),
    "no memory": (
        "majority-lost",
        room(memory_bytes=100 * MIB),
        "r2",
        "memory: 100 MiB free, up to 624 MiB needed",
        {},
    ),
    "no backup": (
        "restore",
        WELL,
        "r2",
        "backup: /proc/nowhere/x.fbs: No such file or directory",
        {"backup": Path("/proc/nowhere/x.fbs")},
    ),
    "no release": (
        "upgrade",
        WELL,
        "r2",
        "release: /proc/nowhere is not a directory",
        {"release": Path("/proc/nowhere")},
    ),
    "a tree without a release": (
        "upgrade",
        WELL,
        "r2",
        f"release: {TREE / 'docs'} is not a release of Forebay: forebay/cluster/serve.py is missing",
        {"release": TREE / "docs"},
    ),
    "a certificate ends": (
        "restore",
        replace(WELL, certificates_s={"r1": 86_400.0}),
        "r2",
        "certificates: valid: r1 for 1.0 days",
        {},
    ),
}


@pytest.mark.parametrize("name", OF_COPIES)
def test_missing_resources_reject_a_copy_with_figure_and_remedy(name: str) -> None:
    scenario, found, target, said, more = OF_COPIES[name]
    refused = plan(found, target, scenario=scenario, **more).refused
    assert said in [f"{one.name}: {one.figure}" for one in refused] and all(one.remedy for one in refused)
    unmet = said.partition(":")[0]
    forced = plan(found, target, unmet, scenario=scenario, **more)
    never = unmet in {"members", "target", "drills", "backup", "release"} or name == "no directory"
    assert (unmet in [one.name for one in forced.refused]) == never


def test_a_copy_has_fewer_preconditions_than_a_drill_on_the_cluster() -> None:
    found = replace(without("r3"), helper="h1 is away; so", digests={})
    made = plan(found, None, scenario="restore")
    assert made.refused == () and made.target == "r2"
    assert made.will_happen.startswith("r2 provides a snapshot; 3 replicas of its state run on this machine")
    alone = replace(WELL, members=replace(WELL.members, members=WELL.members.members[:1]))
    assert plan(alone, None, scenario="restore").target == "r1", "who leads gives it where nobody follows"
    lost = plan(WELL, None, scenario="majority-lost", hold_s=4)
    assert (lost.hold_s, plan(WELL, None, scenario="majority-lost").hold_s) == (
        4,
        1,
    ) and "4 s behind" in lost.will_happen


ALL = {
    **{name: ("switchover", *of) for name, of in UNMET.items()},
    **{f"{of[0]}, {name}": of for name, of in OF_MACHINES.items()},
}
NEVER_FORCED = {"members", "target", "drills", "quorum", "duration"}
"""A missing helper is an unmet precondition as well."""


def test_a_healthy_cluster_meets_every_precondition() -> None:
    made = plan(WELL, None)
    assert made.refused == () and made.target == "r2" and len(made.preconditions) == 13
    assert all(one.holds and one.figure for one in made.preconditions)
    assert "r2 takes over the leadership from r1" in made.will_happen


@pytest.mark.parametrize("name", ALL)
def test_each_unmet_precondition_rejects_the_drill_with_figure_and_remedy(name: str) -> None:
    scenario, found, target, said = ALL[name]
    refused = plan(found, target, scenario=scenario).refused
    assert said in [f"{one.name}: {one.figure}" for one in refused]
    assert all(one.remedy for one in refused)


@pytest.mark.parametrize("name", ALL)
def test_each_precondition_is_forced_only_by_its_own_name(name: str) -> None:
    scenario, found, target, said = ALL[name]
    unmet = said.partition(":")[0]
    never = unmet in NEVER_FORCED or isinstance(found.helper, str)
    made = plan(found, target, unmet, "flood", scenario=scenario)
    assert (unmet in [one.name for one in made.refused]) == never
    assert unmet in made.forced or never
    others = [one.name for one in plan(found, target, "flood", scenario=scenario).refused]
    assert unmet in others, "another name overrides nothing"


CHANGES: dict[str, Callable[[], Plan]] = {
    "target": lambda: plan(WELL, "r3"),
    "leader": lambda: plan(replace(WELL, members=replace(WELL.members, leader="r3")), "r2"),
    "term": lambda: plan(replace(WELL, members=replace(WELL.members, term=8)), "r2"),
    "members": lambda: plan(replace(WELL, members=replace(WELL.members, version=2)), "r2"),
    "what does not hold": lambda: plan(of_members(r3={"lag_entries": 101}), "r2"),
    "what is overridden": lambda: plan(of_members(r3={"lag_entries": 101}), "r2", "lag"),
    "how long": lambda: plan(WELL, "r1", scenario="leader-hang", hold_s=7),
    "scenario": lambda: plan(WELL, "r1", scenario="leader-hang"),
    "another scenario": lambda: plan(WELL, "r1", scenario="leader-kill"),
    "release": lambda: plan(WELL, "r2", scenario="upgrade", release=TREE),
    "no release": lambda: plan(WELL, "r2", scenario="upgrade"),
    "backup": lambda: plan(WELL, "r2", scenario="restore", backup=TREE / "README.md"),
    "scratch": lambda: plan(WELL, "r2", scenario="restore", scratch=TREE),
    "jobs": lambda: plan(WELL, "r2", spare_jobs=True),
    "cluster": lambda: plan(status("r1", cluster_id="2f"), "r2"),
}


def test_different_drills_have_different_plan_ids() -> None:
    ids = [plan(WELL, "r2").id, *(make().id for make in CHANGES.values())]
    assert len(set(ids)) == len(ids)
    later = of_members(r3={"lag_entries": 3})
    assert plan(later, "r2").id == ids[0], "what holds all the same is no change"


def test_a_plan_shows_the_stops_of_earlier_drills() -> None:
    took = tuple(drill(number, figures={"write_stop_us": 1000 * number}) for number in range(9, 2, -1))
    made = plan(replace(WELL, drills=replace(WELL.drills, drills=took)), "r2")
    assert made.earlier_us == (9000, 8000, 7000, 6000, 5000)
    assert "for about 7 ms, as in the last 5 such drills" in made.will_happen


def test_every_scenario_can_be_planned_and_described() -> None:
    assert set(SCENARIOS) == set(KNOWN)
    assert {name for name, one in SCENARIOS.items() if one.needed_capability} == set(NEEDS)
    targets = {}
    for name in SCENARIOS:
        made = plan(WELL, None, scenario=name)
        assert made.refused == (), name
        assert made.will_happen.startswith(f"{made.target}") and (made.hold_s > 0) == (
            bool(SCENARIOS[name].needed_capability) or name == "majority-lost"
        )
        targets[name] = made.target
    assert targets["leader-hang"] == "r1" and targets["follower-stop"] == "r2" and targets["disk-full"] == "r2"
    assert targets["agent-kill"] == targets["node-down"] == "n2", "who has the most jobs shows most"


@pytest.mark.parametrize("scenario", NEEDS)
@pytest.mark.parametrize("target", ["r1", "r2", "n1"])
def test_a_plan_expects_a_stop_exactly_if_the_scenario_does(scenario: str, target: str) -> None:
    made = plan(WELL, target, scenario=scenario)
    if not next(one for one in made.preconditions if one.name == "target").holds:
        return
    assert ("writes continue" in made.will_happen) != made.stops_writes
    assert ("writes stop " in made.will_happen) == made.stops_writes
    assert made.stops_writes == (target == made.leader), "a follower and an agent are not needed for a write"
    # If writes continue, a user's program notices only a fault that leaves requests without an answer.
    waits = any(word in scenario for word in ("hang", "stop", "partition"))
    assert (f"a client with a request to {target} waits up to 5 s" in made.will_happen) == waits


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_plan_shows_the_hold_time_without_placeholders(scenario: str) -> None:
    made = plan(WELL, None, scenario=scenario, hold_s=7)
    assert not re.search(r"[{}]|\b[A-Z]*NAME\b|after 7 s[^a]*$", made.will_happen)
    if not NEEDS.get(scenario):
        return
    held = f"{made.hold_s} s"
    ends = {"leader-kill", "agent-kill"}
    said = f"restarted after at most {held}" if scenario in ends else f"for {held}"
    assert said in made.will_happen and made.will_happen.count(held) == 1


def test_the_certificate_remedy_names_expiring_certificates() -> None:
    soon = replace(WELL, certificates_s={"r1": 86_400.0, "r3": 1.0, "ann": 1.0, "r2": 9e6})
    (refused,) = plan(soon, "r2").refused
    assert refused.remedy == (
        "reissue them first: forebay cert issue r1 --role replica --replace; "
        "forebay cert issue r3 --role replica --replace"
    )


def test_aborted_drills_do_not_count_as_forecast() -> None:
    took = tuple(
        drill(number, verdict=verdict, figures={"write_stop_us": 1000 * number})
        for number, verdict in ((9, "aborted"), (8, "failed"), (7, "lost"), (6, "passed"))
    )
    assert plan(replace(WELL, drills=replace(WELL.drills, drills=took)), "r2").earlier_us == (8000, 6000)


def test_a_node_down_drill_outlasts_the_node_timeout() -> None:
    assert plan(site(node_down_s=40), "n1", scenario="node-down", hold_s=3).hold_s == 45


def test_spare_jobs_rejects_a_drill_during_a_stage_out() -> None:
    moving = replace(WELL, stage_outs=(4, 5))
    assert plan(moving, "r2").refused == ()
    (refused,) = plan(moving, "r2", spare_jobs=True).refused
    assert f"{refused.name}: {refused.figure}" == "jobs: 2 jobs are being staged out"
    assert plan(WELL, "r2", spare_jobs=True).refused == ()


@pytest.mark.parametrize("allowed", [(), ("leader-kill",), ("switchover",)])
def test_a_timer_runs_only_enabled_scenarios_after_three_passes(
    allowed: tuple[str, ...],
) -> None:
    words = [verdict.word for verdict in DrillVerdict]
    for verdicts in product(words, repeat=BY_HAND + 1):
        drills = [drill(9 - number, verdict=verdict) for number, verdict in enumerate(verdicts)]
        drills.insert(1, drill(20, verdict="failed", scenario="leader-kill"))
        ended = [verdict for verdict in verdicts if verdict != "under way"][:BY_HAND]
        may = "switchover" in allowed and ended == ["passed"] * BY_HAND
        assert (manual_reason("switchover", allowed, drills) is None) is may, verdicts
    assert manual_reason("switchover", ("switchover",), []) is not None
