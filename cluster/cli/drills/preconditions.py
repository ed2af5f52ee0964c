"""What must hold before a drill begins, each with its figure, and the plan, which is confirmed by its id."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Final

import msgspec

from cluster.cli.commands.member import by_point
from cluster.schemas import DigestsAnswer, MembersAnswer, StatusView
from cluster.schemas.drills import DrillsAnswer, DrillView

LAG_ENTRIES_MAX: Final = 100
"""Entries that a member may be behind the leader, count: it has them within a heartbeat or two."""

MEMBERS_LEAST: Final = 3
"""Members of which one may be lost, count."""

ID_DIGITS: Final = 8
"""Digits of a plan's id: typed by a person, and told from that of a moment ago."""

COMPARED: Final = 5
"""Earlier drills of the same kind that a plan and a report name, count."""


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What the cluster said of itself when it was asked for a plan."""

    members: MembersAnswer
    statuses: dict[str, StatusView]
    """By replica; who did not answer is missing."""
    digests: dict[str, DigestsAnswer]
    drills: DrillsAnswer


class Precondition(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that must hold; `figure` is what was found."""

    name: str
    holds: bool
    figure: str
    remedy: str = ""
    may_be_forced: bool = True


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What would be done to whom. `id` is another one as soon as that would be something else."""

    id: str
    scenario: str
    target: str
    leader: str
    term: int
    preconditions: tuple[Precondition, ...]
    forced: tuple[str, ...]
    will_happen: str
    earlier_us: tuple[int, ...] = ()
    """How long writes stopped in the last drills of its kind, µs, the newest first."""

    @property
    def refused(self) -> tuple[Precondition, ...]:
        """What keeps it from being carried out."""
        return tuple(
            one for one in self.preconditions if not (one.holds or (one.may_be_forced and one.name in self.forced))
        )


def plan_of(found: Found, scenario: str, target: str | None, forced: Iterable[str] = ()) -> Plan:
    """Return the plan of a drill; without a target, of the member that is furthest and answers."""
    members = found.members
    leader = members.leader or ""
    chosen = target or _furthest(found)
    judged = (
        _members(found),
        _target(found, chosen),
        *_of_members(found),
        _agreement(found),
        _other_drills(found.drills),
    )
    unmet = tuple(sorted(one.name for one in judged if not one.holds))
    overridden = tuple(sorted(set(forced) & set(unmet)))
    earlier = earlier_stops_us(found.drills.drills, scenario)
    said = (scenario, chosen, leader, str(members.term), str(members.version), *unmet, "", *overridden)
    digest = hashlib.sha256("\0".join((_cluster(found), *said)).encode()).hexdigest()
    return Plan(
        id=digest[:ID_DIGITS],
        scenario=scenario,
        target=chosen,
        leader=leader,
        term=members.term,
        preconditions=judged,
        forced=overridden,
        will_happen=(
            f"{chosen or 'another replica'} takes the leadership over from {leader or 'nobody'}; writes stop "
            f"{_expected(earlier)}. No process ends: scripts and transfers go on, agents report to who leads then."
        ),
        earlier_us=earlier,
    )


def earlier_stops_us(drills: Iterable[DrillView], scenario: str) -> tuple[int, ...]:
    """Return how long writes stopped in the last of these drills that were of a kind, µs, in their order."""
    stops = (one.figures.get("write_stop_us") for one in drills if one.scenario == scenario)
    return tuple(stop_us for stop_us in stops if stop_us is not None)[:COMPARED]


def _expected(earlier: tuple[int, ...]) -> str:
    if not earlier:
        return "for some ten milliseconds"
    return f"for some {sorted(earlier)[len(earlier) // 2] / 1000:.0f} ms, as in the last {len(earlier)} of these drills"


def _cluster(found: Found) -> str:
    return next((status.cluster_id for status in found.statuses.values()), "")


def _furthest(found: Found) -> str:
    candidates = [
        (one.lag_entries or 0, one.name)
        for one in found.members.members
        if one.votes and one.name != found.members.leader and one.name in found.statuses
    ]
    return min(candidates, default=(0, ""))[1]


def _members(found: Found) -> Precondition:
    voters = [one.name for one in found.members.members if one.votes]
    answer = [name for name in voters if name in found.statuses]
    lost = ", ".join(sorted(set(voters) - set(answer)))
    return Precondition(
        name="members",
        holds=len(voters) >= MEMBERS_LEAST and not lost and bool(found.members.leader),
        figure=f"{len(answer)} of {len(voters)} answer" + (f"; not {lost}" if lost else ""),
        remedy="have at least three members, all of them up: forebay member status",
        may_be_forced=False,
    )


def _target(found: Found, target: str) -> Precondition:
    row = next((one for one in found.members.members if one.name == target), None)
    if row is None:
        figure = f"there is no member {target}" if target else "nobody could take over"
    elif target == found.members.leader:
        figure = f"{target} leads already"
    elif not row.votes:
        figure = f"{target} does not vote yet"
    else:
        figure = f"{target}, a {row.role}"
    names = ", ".join(one.name for one in found.members.members if one.votes and one.name != found.members.leader)
    holds = row is not None and row.votes and target != found.members.leader
    return Precondition(
        name="target", holds=holds, figure=figure, remedy=f"name one of: {names or 'none'}", may_be_forced=False
    )


def _of_members(found: Found) -> Iterable[Precondition]:
    """Yield what must hold of each member, with the worst figure of all."""
    statuses, rows = found.statuses, found.members.members
    behind = {one.name: one.lag_entries or 0 for one in rows if one.votes}
    most = max(behind.values(), default=0)
    yield Precondition(
        name="lag",
        holds=most <= LAG_ENTRIES_MAX,
        figure=f"at most {most} entries behind the leader",
        remedy=f"wait until nobody is more than {LAG_ENTRIES_MAX} behind: forebay member list",
    )
    for name, unwell, remedy in (
        (
            "ready",
            {one: status.not_ready for one, status in statuses.items() if not status.ready},
            "wait, or see its log",
        ),
        (
            "term",
            {
                one: f"has term {status.term} and leader {status.leader}"
                for one, status in statuses.items()
                if (status.term, status.leader) != (found.members.term, found.members.leader)
            },
            "wait until all know who leads",
        ),
        (
            "clocks",
            {one: "has a wall clock that is off" for one, status in statuses.items() if status.clock_off},
            "set it right: forebay cluster clock",
        ),
        (
            "ledgers",
            {
                one: f"has {status.damaged_entries} damaged entries"
                for one, status in statuses.items()
                if status.damaged_entries
            },
            "wait until its peers have given them again, or see its log",
        ),
    ):
        said = "; ".join(f"{one} {why or 'is not'}" for one, why in sorted(unwell.items()))
        yield Precondition(
            name=name, holds=not unwell, figure=said or f"all {len(statuses)} that answer are well", remedy=remedy
        )


def _agreement(found: Found) -> Precondition:
    odd = sorted(name for name, one in found.digests.items() if one.verdict in ("disputed", "odd"))
    after = by_point((name, one.digests) for name, one in found.digests.items())
    compared = max((index for index, of in after.items() if len(of) == len(found.digests) > 1), default=0)
    differ = sorted(index for index, of in after.items() if len(set(of.values())) > 1)
    if odd or differ:
        figure = f"{', '.join(odd) or 'replicas'} differ" + (f" after entry {differ[0]}" if differ else "")
    else:
        figure = f"the same state after entry {compared}" if compared else "nothing was compared yet"
    return Precondition(
        name="digests",
        holds=not odd and not differ and bool(compared),
        figure=figure,
        remedy="compare them: forebay member status --digest; they do by themselves every minute",
    )


def _other_drills(drills: DrillsAnswer) -> Precondition:
    under_way = next((one for one in drills.drills if one.verdict == "under way"), None)
    if drills.locks:
        lock = drills.locks[0]
        figure, remedy = f"{lock.by} wants none: {lock.reason}", f"ask {lock.by}; then: forebay drill unlock {lock.by}"
    elif under_way is not None:
        figure = f"drill {under_way.drill} is under way until {under_way.until}"
        remedy = f"wait for its end, or end it: forebay drill abort {under_way.drill}"
    else:
        figure, remedy = "no other one", ""
    holds = not drills.locks and under_way is None
    return Precondition(name="drills", holds=holds, figure=figure, remedy=remedy, may_be_forced=False)
