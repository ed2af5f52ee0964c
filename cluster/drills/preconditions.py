"""Preconditions of a drill with their findings, and the plan of a drill, which an operator confirms by its ID."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Final

import msgspec

from forebay.cluster.client import ATTEMPT_S
from forebay.cluster.drills.copies.resources import COPIES, Resources, backup_fault, release_fault
from forebay.cluster.drills.helper import DURATION_S_MAX, HelperAnswer
from forebay.cluster.drills.scenarios import AWAY_S, HOLD_S, NODE_DOWN_MORE_S, SCENARIOS, Scenario
from forebay.cluster.schemas import DigestsAnswer, MembersAnswer, NodeView, StatusView, group_by_point
from forebay.cluster.schemas.drills import DrillsAnswer, DrillView
from forebay.replica.values import format_size

LAG_ENTRIES_MAX: Final = 100
"""Largest lag of a member behind the leader, entries: one or two heartbeats suffice to catch up."""

MIB: Final = 1 << 20

MEMBERS_LEAST: Final = 3
"""Minimum number of members that tolerates the failure of one."""

ID_DIGITS: Final = 8
"""Digits of a plan's ID: short enough to type, long enough to distinguish plans."""

CERTIFICATES_S_LEAST: Final = 7 * 86_400
"""Least remaining validity of the certificates involved, seconds."""

HELPER_CLOCK_S_MAX: Final = 5.0
"""Largest clock offset between the helper's machine and this one, seconds."""

SNAPSHOT_PERIODS_MAX: Final = 2
"""Number of snapshot periods that may pass without a snapshot, which is written with low priority."""

DURATION_MORE_S: Final = 5
"""Seconds by which the duration requested from a helper exceeds the hold time, because a busy machine is late."""

BY_HAND: Final = 3
"""Number of consecutive passed drills of a kind that allow a timer to run the next."""

COMPARED: Final = 5
"""Number of earlier drills of the same kind that a plan and a report show."""


class Site(msgspec.Struct, frozen=True, kw_only=True):
    """Drill settings in the configuration of the planning machine."""

    node_down_s: int = 30
    snapshot_every_entries: int = 10_000
    never: str = ""
    """Present period without drills; empty if drills are allowed now."""
    halt: str = ""
    """Path of the file that forbids drills; empty if it does not exist."""


class ClusterFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about the cluster, gathered for a plan."""

    members: MembersAnswer
    statuses: dict[str, StatusView]
    """Status by name of the replicas that answered."""
    digests: dict[str, DigestsAnswer]
    drills: DrillsAnswer
    nodes: tuple[NodeView, ...] = ()
    stage_outs: tuple[int, ...] = ()
    """Jobs whose results are being staged out."""
    certificates_s: dict[str, float] = {}
    """Remaining validity of certificates, seconds, by holder."""
    helper: HelperAnswer | str = ""
    """Answer of the target's helper, or an error sentence with its remedy."""
    helper_clock_s: float = 0.0
    """Clock offset of the helper's machine, seconds."""
    site: Site = Site()
    room: Resources | None = None
    """Resources for a copy, in drills on a copy."""


class DrillRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Requested drill, from the command line."""

    scenario: str
    target: str | None = None
    hold_s: int | None = None
    """Duration of the fault, seconds; None for the scenario's default."""
    spare_jobs: bool = False
    """True if the drill requires that no job is staging out."""
    forced: tuple[str, ...] = ()
    release: Path | None = None
    """Directory of the release to upgrade a copy to; None for the running one."""
    backup: Path | None = None
    """Backup to make a copy of; None to have the target write a new snapshot."""
    scratch: Path | None = None
    """Parent of the copy's directory; None for the directory of temporary files."""

    @property
    def place(self) -> Path:
        """Parent of the copy's directory."""
        return Path(tempfile.gettempdir()) if self.scratch is None else self.scratch


class Precondition(msgspec.Struct, frozen=True, kw_only=True):
    """Precondition of a drill; `figure` is the text of the finding."""

    name: str
    holds: bool
    figure: str
    remedy: str = ""
    may_be_forced: bool = True


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Plan of a drill. Different plans have different values of `id`."""

    id: str
    scenario: str
    target: str
    leader: str
    term: int
    preconditions: tuple[Precondition, ...]
    forced: tuple[str, ...]
    will_happen: str
    stops_writes: bool = False
    """True if writes are expected to stop."""
    hold_s: int = 0
    """Duration of the fault, seconds; 0 if it needs no undoing."""
    earlier_us: tuple[int, ...] = ()
    """Write stops of the last drills of this kind, µs, newest first."""
    release: str = ""
    backup: str = ""
    scratch: str = ""
    """Options of a drill on a copy, as requested."""

    @property
    def refused(self) -> tuple[Precondition, ...]:
        """Unmet preconditions that are not forced."""
        return tuple(
            one for one in self.preconditions if not (one.holds or (one.may_be_forced and one.name in self.forced))
        )


def make_plan(found: ClusterFacts, wanted: DrillRequest) -> Plan:
    """Return the plan of the requested drill."""
    scenario, target = SCENARIOS[wanted.scenario], choose_target(found, wanted)
    hold_s = hold_time_s(found, wanted)
    judged = tuple(_check_all(found, wanted, scenario, target, hold_s))
    unmet = tuple(sorted(one.name for one in judged if not one.holds))
    overridden = tuple(sorted(set(wanted.forced) & set(unmet)))
    members = found.members
    leader = members.leader or ""
    earlier = earlier_stops_us(found.drills.drills, scenario.name)
    of_copy = {name: str(getattr(wanted, name) or "") for name in ("release", "backup", "scratch")}
    asked = (scenario.name, target, str(hold_s), str(wanted.spare_jobs), *of_copy.values())
    said = (*asked, leader, str(members.term), str(members.version), *unmet, "", *overridden)
    digest = hashlib.sha256("\0".join((_cluster(found), *said)).encode()).hexdigest()
    return Plan(
        id=digest[:ID_DIGITS],
        scenario=scenario.name,
        target=target,
        leader=leader,
        term=members.term,
        preconditions=judged,
        forced=overridden,
        will_happen=_steps(found, scenario, target, hold_s, earlier),
        stops_writes=scenario.stops_writes(leads=target == leader),
        hold_s=hold_s,
        earlier_us=earlier,
        **of_copy,
    )


def choose_target(found: ClusterFacts, wanted: DrillRequest) -> str:
    """Return the requested target, or the default: the leader, the best follower, or the busiest agent."""
    scenario = SCENARIOS[wanted.scenario]
    if wanted.target is not None:
        return wanted.target
    if scenario.targets_agent:
        return min(((-len(one.jobs), one.name) for one in found.nodes if one.state == "UP"), default=(0, ""))[1]
    if scenario.on_copy:
        return _best_follower(found) or found.members.leader or ""
    return _best_follower(found) if scenario.of == "follower" or not scenario.takes_over else found.members.leader or ""


def hold_time_s(found: ClusterFacts, wanted: DrillRequest) -> int:
    """Return the duration of the fault, seconds; 0 if it needs no undoing."""
    if wanted.scenario == "majority-lost":
        return wanted.hold_s or AWAY_S
    if not SCENARIOS[wanted.scenario].needed_capability:
        return 0
    if wanted.scenario == "node-down":
        return found.site.node_down_s + NODE_DOWN_MORE_S
    return wanted.hold_s or HOLD_S


def _check_all(
    found: ClusterFacts, wanted: DrillRequest, scenario: Scenario, target: str, hold_s: int
) -> Iterable[Precondition]:
    yield _members(found, target) if scenario.on_copy else _majority(found)
    yield _target(found, scenario, target)
    yield from _check_members(found)
    if scenario.on_copy:
        yield _other_drills(found.drills)
        yield _site(found)
        yield from _of_copy(found, wanted)
        yield _certificates(found)
        yield _jobs(found, wanted.spare_jobs)
        return
    yield _agreement(found)
    yield _other_drills(found.drills)
    yield _site(found)
    if scenario.needed_capability:
        yield _quorum(found, scenario, target)
        yield _helper(found, target)
        yield _duration(hold_s)
    yield _certificates(found)
    yield _snapshots(found)
    yield _jobs(found, wanted.spare_jobs)


def _steps(found: ClusterFacts, scenario: Scenario, target: str, hold_s: int, earlier: tuple[int, ...]) -> str:
    who, leader = target or "no target", found.members.leader or "no leader"
    kind = "agents" if scenario.targets_agent else "replicas"
    if scenario.on_copy:
        return _copy_steps(found, scenario, who, hold_s)
    count = len(found.nodes) if scenario.targets_agent else sum(one.votes for one in found.members.members)
    if not hold_s:
        return f"{who} {scenario.does} from {leader}; writes stop {_expected_stop(earlier)}. N{scenario.means[1:]}."
    if scenario.stops_writes(leads=target == found.members.leader):
        writes = f"writes stop {_expected_stop(earlier, 'until another replica leads')}"
    else:
        writes = "writes continue"
    if scenario.keeps_waiting:
        writes += f", but a client with a request to {who} waits up to {ATTEMPT_S:g} s before it tries another"
    jobs = next((one.jobs for one in found.nodes if one.name == target), ())
    of_jobs = f"; {len(jobs)} jobs are on it" if scenario.targets_agent else ""
    return f"{who}, 1 of {count} {kind}, {scenario.fault_for(hold_s)}{of_jobs}; {writes}; {scenario.means}."


def _copy_steps(found: ClusterFacts, scenario: Scenario, who: str, hold_s: int) -> str:
    assert found.room is not None
    does = scenario.does + (f", {hold_s} s behind" if hold_s else "")
    return (
        f"{who} provides a snapshot; {COPIES} replicas of its state run on this machine for some minutes, in "
        f"{found.room.directory}, isolated from the cluster; {does}. {scenario.means.capitalize()}."
    )


def earlier_stops_us(drills: Iterable[DrillView], scenario: str) -> tuple[int, ...]:
    """Return the write stops of the last completed drills of a kind, µs, in their order.

    Aborted drills are left out, because a problem distorted their figures.
    """
    ended = (one for one in drills if one.scenario == scenario and one.verdict in ("passed", "failed"))
    stops = (one.figures.get("write_stop_us") for one in ended)
    return tuple(stop_us for stop_us in stops if stop_us is not None)[:COMPARED]


def manual_reason(scenario: str, allowed: Collection[str], drills: Iterable[DrillView]) -> tuple[str, str] | None:
    """Return the reason why only an operator may run a drill, and the remedy; None if a timer may run it.

    `allowed` has the scenarios that this machine's configuration allows to a timer; `drills` are newest first.
    """
    if scenario not in allowed:
        remedy = f'add it to forebay.toml of this machine: [drill] automatic = ["{scenario}"]'
        return f"{scenario} is not enabled for --automatic on this machine", remedy
    last = [one for one in drills if one.scenario == scenario and one.verdict != "under way"][:BY_HAND]
    passed = sum(one.verdict == "passed" for one in last)
    if passed == BY_HAND:
        return None
    remedy = f"run it by hand until the last {BY_HAND} have passed: forebay drill plan {scenario}"
    return f"{passed} of the last {BY_HAND} {scenario} drills have passed", remedy


def _expected_stop(earlier: tuple[int, ...], unknown: str = "for tens of milliseconds") -> str:
    if not earlier:
        return unknown
    return f"for about {sorted(earlier)[len(earlier) // 2] / 1000:.0f} ms, as in the last {len(earlier)} such drills"


def _cluster(found: ClusterFacts) -> str:
    return next((status.cluster_id for status in found.statuses.values()), "")


def _best_follower(found: ClusterFacts) -> str:
    candidates = [
        (one.lag_entries or 0, one.name)
        for one in found.members.members
        if one.votes and one.name != found.members.leader and one.name in found.statuses
    ]
    return min(candidates, default=(0, ""))[1]


def _members(found: ClusterFacts, target: str) -> Precondition:
    voters = [one.name for one in found.members.members if one.votes]
    answer = [name for name in voters if name in found.statuses]
    return Precondition(
        name="members",
        holds=target in answer and bool(found.members.leader),
        figure=f"{len(answer)} of {len(voters)} answer" + ("" if target in answer else f"; not {target or 'one'}"),
        remedy="target a member that answers: forebay cluster probe",
        may_be_forced=False,
    )


def _of_copy(found: ClusterFacts, wanted: DrillRequest) -> Iterable[Precondition]:
    """Yield the preconditions of a copy on this machine."""
    room = found.room
    assert room is not None
    needed = format_size(-(-room.needed_bytes // MIB) * MIB)
    yield Precondition(
        name="room",
        holds=not room.fault and room.free_bytes >= room.needed_bytes,
        figure=f"{room.directory}: " + (room.fault or f"{room.free_bytes // MIB} MiB free, up to {needed} needed"),
        remedy="use a directory with more space that this account can write: --scratch DIR",
        may_be_forced=not room.fault,
    )
    yield Precondition(
        name="memory",
        holds=room.memory_bytes >= room.needed_memory_bytes,
        figure=f"{room.memory_bytes // MIB} MiB free, up to {room.needed_memory_bytes // MIB} MiB needed",
        remedy="use another machine that has an operator's certificate",
    )
    if wanted.backup is not None:
        fault = backup_fault(wanted.backup)
        yield Precondition(
            name="backup",
            holds=not fault,
            figure=f"{wanted.backup}: {fault or 'found'}",
            remedy="use a file that `forebay backup create` has written",
            may_be_forced=False,
        )
    if wanted.scenario == "upgrade":
        fault = "" if wanted.release is None else release_fault(wanted.release)
        yield Precondition(
            name="release",
            holds=not fault,
            figure=fault or (f"{wanted.release}" if wanted.release else "the running release"),
            remedy="use the directory of a checkout or of an unpacked release",
            may_be_forced=False,
        )


def _majority(found: ClusterFacts) -> Precondition:
    voters = [one.name for one in found.members.members if one.votes]
    answer = [name for name in voters if name in found.statuses]
    lost = ", ".join(sorted(set(voters) - set(answer)))
    return Precondition(
        name="members",
        holds=len(voters) >= MEMBERS_LEAST and not lost and bool(found.members.leader),
        figure=f"{len(answer)} of {len(voters)} answer" + (f"; not {lost}" if lost else ""),
        remedy="start all members, of which there must be at least three: forebay cluster probe",
        may_be_forced=False,
    )


def _target(found: ClusterFacts, scenario: Scenario, target: str) -> Precondition:
    if scenario.targets_agent:
        return _agent_target(found, target)
    row, leader = next((one for one in found.members.members if one.name == target), None), found.members.leader
    voters = [one.name for one in found.members.members if one.votes]
    fit = {"leader": [leader or ""], "follower": [one for one in voters if one != leader]}.get(scenario.of, voters)
    if row is None:
        figure = f"{target} is not a member" if target else "no member qualifies"
    elif not row.votes:
        figure = f"{target} does not vote yet"
    elif target not in fit:
        figure = f"{target} is the leader" if target == leader else f"{target} is not the leader"
    else:
        figure = f"{target}, a {row.role}"
    remedy = f"use one of: {', '.join(fit) or 'none'}"
    holds = row is not None and row.votes and target in fit
    return Precondition(name="target", holds=holds, figure=figure, remedy=remedy, may_be_forced=False)


def _agent_target(found: ClusterFacts, target: str) -> Precondition:
    row = next((one for one in found.nodes if one.name == target), None)
    up = [one.name for one in found.nodes if one.state == "UP"]
    if row is None:
        figure = f"{target} is not a node" if target else "no node is UP"
    else:
        figure = f"{target}, {row.state}, with {len(row.jobs)} jobs"
    remedy = f"use one of: {', '.join(up[:COMPARED]) or 'none'}"
    return Precondition(name="target", holds=target in up, figure=figure, remedy=remedy, may_be_forced=False)


def _quorum(found: ClusterFacts, scenario: Scenario, target: str) -> Precondition:
    voters = [one.name for one in found.members.members if one.votes]
    left = [one for one in voters if one in found.statuses and (scenario.targets_agent or one != target)]
    least = len(voters) // 2 + 1
    return Precondition(
        name="quorum",
        holds=len(left) >= least,
        figure=f"{len(left)} of {len(voters)} would be left, and {least} are needed",
        remedy="start all members first: without a majority the cluster stops",
        may_be_forced=False,
    )


def _helper(found: ClusterFacts, target: str) -> Precondition:
    if isinstance(found.helper, str):
        sentence, _, remedy = found.helper.rpartition("; ")
        return Precondition(name="helper", holds=False, figure=sentence, remedy=remedy, may_be_forced=False)
    off_s = abs(found.helper_clock_s)
    starts = {"up": "forebay cluster up", "command": "its [drill] start", "": "its service manager"}[
        found.helper.starts
    ]
    return Precondition(
        name="helper",
        holds=off_s <= HELPER_CLOCK_S_MAX,
        figure=f"allows it; clock offset {off_s:.1f} s; {starts} restarts {target}",
        remedy=f"correct its clock: at most {HELPER_CLOCK_S_MAX:g} s off",
    )


def _duration(hold_s: int) -> Precondition:
    most = DURATION_S_MAX - DURATION_MORE_S
    return Precondition(
        name="duration",
        holds=hold_s <= most,
        figure=f"{hold_s} s",
        remedy=f"use at most {most} s; node-down needs a node_down_s below that",
        may_be_forced=False,
    )


def _certificates(found: ClusterFacts) -> Precondition:
    known = found.certificates_s
    soon = {name: left_s for name, left_s in known.items() if left_s < CERTIFICATES_S_LEAST}
    if soon:
        figure = "valid: " + ", ".join(
            f"{name} for {left_s / 86_400:.1f} days" for name, left_s in sorted(soon.items())
        )
    else:
        figure = f"valid for at least {min(known.values()) / 86_400:.0f} days" if known else "no replica presented one"
    return Precondition(
        name="certificates",
        holds=bool(known) and not soon,
        figure=figure,
        remedy=_reissue_commands(found, soon),
    )


def _reissue_commands(found: ClusterFacts, names: Iterable[str]) -> str:
    """Return commands that reissue certificates, for the replicas among `names`."""
    replicas = {one.name for one in found.members.members}
    again = [f"forebay cert issue {name} --role replica --replace" for name in sorted(names) if name in replicas]
    return "reissue them first" + (f": {'; '.join(again)}" if again else "")


def _snapshots(found: ClusterFacts) -> Precondition:
    since = {name: one.applied_index - (one.snapshot_index or 0) for name, one in found.statuses.items()}
    most = SNAPSHOT_PERIODS_MAX * found.site.snapshot_every_entries
    late = sorted(name for name, entries in since.items() if entries > most)
    figure = (
        f"{', '.join(late)}: more than {most} entries since the last snapshot"
        if late
        else (f"at most {max(since.values(), default=0)} entries since the last snapshot")
    )
    remedy = "write one (forebay cluster snapshot), or see the replica's log"
    return Precondition(name="snapshots", holds=not late, figure=figure, remedy=remedy)


def _jobs(found: ClusterFacts, spare: bool) -> Precondition:
    count = len(found.stage_outs)
    return Precondition(
        name="jobs",
        holds=not (spare and count),
        figure=f"{count} jobs are being staged out",
        remedy="wait until they have finished (forebay transfer list), or remove --spare-jobs",
    )


def _site(found: ClusterFacts) -> Precondition:
    site = found.site
    figure = (
        f"no drills {site.never}" if site.never else f"{site.halt} exists" if site.halt else "drills are allowed now"
    )
    remedy = "try again outside of these hours" if site.never else "remove the file"
    return Precondition(name="site", holds=not (site.never or site.halt), figure=figure, remedy=remedy)


def _check_members(found: ClusterFacts) -> Iterable[Precondition]:
    """Yield the preconditions that every member must meet, with the worst finding."""
    statuses, rows = found.statuses, found.members.members
    behind = {one.name: one.lag_entries or 0 for one in rows if one.votes}
    most = max(behind.values(), default=0)
    yield Precondition(
        name="lag",
        holds=most <= LAG_ENTRIES_MAX,
        figure=f"at most {most} entries behind the leader",
        remedy=f"wait until no member is more than {LAG_ENTRIES_MAX} entries behind: forebay cluster members",
    )
    for name, unwell, remedy in (
        (
            "ready",
            {one: status.not_ready for one, status in statuses.items() if not status.ready},
            "wait, or see the replica's log",
        ),
        (
            "term",
            {
                one: f"has term {status.term} and leader {status.leader}"
                for one, status in statuses.items()
                if (status.term, status.leader) != (found.members.term, found.members.leader)
            },
            "wait until all agree on the leader",
        ),
        (
            "clocks",
            {one: "has a wrong wall clock" for one, status in statuses.items() if status.clock_off},
            "correct the clock: forebay cluster clock",
        ),
        (
            "ledgers",
            {
                one: f"has {status.damaged_entries} damaged entries"
                for one, status in statuses.items()
                if status.damaged_entries
            },
            "wait until its peers have repaired them, or see the replica's log",
        ),
    ):
        said = "; ".join(f"{one} {why or 'is not ready'}" for one, why in sorted(unwell.items()))
        yield Precondition(name=name, holds=not unwell, figure=said or f"{len(statuses)} replicas ok", remedy=remedy)


def _agreement(found: ClusterFacts) -> Precondition:
    odd = sorted(name for name, one in found.digests.items() if one.verdict in ("disputed", "odd"))
    after = group_by_point((name, one.digests) for name, one in found.digests.items())
    compared = max((index for index, of in after.items() if len(of) == len(found.digests) > 1), default=0)
    differ = sorted(index for index, of in after.items() if len(set(of.values())) > 1)
    if odd or differ:
        figure = f"{', '.join(odd) or 'replicas'} differ" + (f" after entry {differ[0]}" if differ else "")
    else:
        figure = f"same state after entry {compared}" if compared else "not compared yet"
    return Precondition(
        name="digests",
        holds=not odd and not differ and bool(compared),
        figure=figure,
        remedy="wait a minute, or compare them now: forebay cluster probe --digest",
    )


def _other_drills(drills: DrillsAnswer) -> Precondition:
    under_way = next((one for one in drills.drills if one.verdict == "under way"), None)
    if drills.locks:
        lock = drills.locks[0]
        figure = f"locked by {lock.by}: {lock.reason}"
        remedy = f"ask {lock.by}, then: forebay drill unlock {lock.by}"
    elif under_way is not None:
        figure = f"drill {under_way.drill} is running until {under_way.until}"
        remedy = f"wait for its end, or abort it: forebay drill abort {under_way.drill} --reason TEXT"
    else:
        figure, remedy = "no other drill, no lock", ""
    holds = not drills.locks and under_way is None
    return Precondition(name="drills", holds=holds, figure=figure, remedy=remedy, may_be_forced=False)
