"""Compares a drill's verdict, sentence and figures with the cluster's history.

The history is the ledger as `forebay audit leaders` and `forebay audit history` show it. A drill may know less than the
history, and has to say so; it may not say anything else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from forebay.cluster.drills.scenarios import SCENARIOS
from forebay.cluster.schemas import LeaderTermView, StoryRow
from forebay.cluster.schemas.drills import DrillView
from forebay.cluster.system import parse_instant

MEASURED = frozenset(
    "write_stop_us write_stop_at_us user_write_stop_us read_stop_us stale_read_stop_us control_write_gap_us "
    "client_late_us writes_acknowledged writes_unanswered fault_at_us watched_us goal_us".split()
)
"""Figures of every drill whose fault was begun."""

COUNTED = {
    "stage_retried": "stages_again",
    "job_requeued": "runs_again",
    "run_requeued": "runs_again",
    "node_went_down": "nodes_lost",
}
CHECKS = {
    "acknowledged writes": "writes_lost",
    "replica states": "states_agree",
    "events": "runs_again",
}
"""Check -> a figure that is there exactly if it was made."""

SLACK_US = 50_000
"""By how much two clocks, and an answer on its way, may shift a moment, µs, beside what the drill itself says."""


class History(msgspec.Struct, frozen=True):
    """What the ledger has of one drill, from its beginning to its end."""

    planned_term: int
    """The term in which the plan was made."""
    leader: str
    """The leader then."""
    terms: Sequence[LeaderTermView]
    """All terms, oldest first."""
    rows: Sequence[StoryRow]
    """Events from the beginning of the drill to its end."""
    states_differ: str = ""
    """Why replicas hold different states, compared independently of the drill; empty: they do not."""


def disagreements(drill: DrillView, history: History) -> list[str]:
    """Return each statement of a drill that has ended that its history contradicts."""
    return [
        *_of_figures(drill),
        *_of_events(drill, history),
        *_of_leaders(drill, history),
        *_of_stops(drill, history),
        *_of_states(drill, history),
    ]


def _of_figures(drill: DrillView) -> list[str]:
    """Return what is said without its figure, or measured and discarded."""
    figures, said, found = drill.figures, drill.sentence, list[str]()
    if "fault_at_us" in figures:
        missing = sorted(MEASURED - figures.keys())
        found += [f"figures were discarded: {', '.join(missing)}"] if missing else []
        unchecked = said.partition("; not checked: ")[2]
        found += [
            f"{check} was {'not ' if check in unchecked else ''}checked, and {figure} is "
            f"{'there' if figure in figures else 'missing'}"
            for check, figure in CHECKS.items()
            if check != "acknowledged writes" and (check in unchecked) == (figure in figures)
        ]
        if drill.verdict == "passed" and (unchecked or figures.get("writes_lost") or not figures.get("states_agree")):
            found.append("it passed, and a check is missing or failed")
    elif drill.verdict in ("passed", "failed"):
        found.append(f"it {drill.verdict} without a fault")
    if drill.verdict == "passed" and figures.get("write_stop_us", 0) > figures.get("goal_us", 0):
        found.append("it passed, and writes stopped for longer than the goal")
    if "no write was acknowledged for" in said and "write_stop_us" in figures:
        stop_s = float(said.partition("no write was acknowledged for ")[2].partition(" s")[0])
        if figures["write_stop_us"] < stop_s * 1e6 - SLACK_US:
            found.append(f"writes stopped for {stop_s:g} s, and write_stop_us is {figures['write_stop_us']}")
    return found


def _of_events(drill: DrillView, history: History) -> list[str]:
    """Return counts that the events contradict."""
    is_down, counts = False, Counter(dict.fromkeys(COUNTED.values(), 0))
    for row in history.rows:
        if row.event == "node_went_down" and row.detail.get("node") == drill.target:
            is_down = True
        elif row.event in COUNTED:
            counts[COUNTED[row.event]] += 1
    found = [
        f"{figure} is {drill.figures[figure]}, and the history has {count}"
        for figure, count in counts.items()
        # Events between the check and the end of the drill are later than what it says.
        if figure in drill.figures and drill.figures[figure] > count
    ]
    if f"{drill.target} did not go DOWN" in drill.sentence and is_down:
        found.append(f"{drill.target} did not go DOWN, and the history has it as DOWN")
    return found


def _of_leaders(drill: DrillView, history: History) -> list[str]:
    """Return statements about leaders that the terms contradict."""
    scenario, said, target = SCENARIOS[drill.scenario], drill.sentence, drill.target
    later = [term for term in history.terms if term.term > history.planned_term]
    took = any(term.leader == target for term in later)
    found = []
    if drill.scenario == "switchover":
        if "took over" in said and not took:
            found.append(f"{target} took over, and no term of it follows")
        if f"leads, not {target}" in said and took:
            found.append(f"{target} did not take over, and a term of it follows")
    if "no other replica led while" in said:
        began = parse_instant(drill.began or "")
        figures = drill.figures
        undone = began + figures["fault_at_us"] + figures["begun_us"] + figures["held_us"]
        found += [
            f"no other replica led, and {term.leader} led term {term.term} from {term.from_at} on"
            for term in later
            if term.leader not in (None, target) and term.from_at and parse_instant(term.from_at) < undone - SLACK_US
        ]
    if drill.verdict == "passed" and scenario.takes_over and target == history.leader:
        if not any(term.leader not in (None, target) for term in later):
            found.append("it passed, and no other replica has a term")
    return found


def _of_stops(drill: DrillView, history: History) -> list[str]:
    """Return terms that began after a longer silence than the drill measured."""
    figures = drill.figures
    if "write_stop_us" not in figures:
        return []
    since = parse_instant(drill.began or "") + figures["fault_at_us"] + SLACK_US
    until = since + figures["watched_us"] - 2 * SLACK_US
    # An answer that was on its way when the leader ended is acknowledged into the silence.
    late_us = figures.get("write_p99_us", 0) + figures["client_late_us"] + SLACK_US
    return [
        f"nothing was settled for {term.silent_s:g} s before term {term.term}, and writes stopped for "
        f"{figures['write_stop_us'] / 1e6:g} s"
        for term in history.terms
        if term.from_at
        and term.silent_s is not None
        and since <= parse_instant(term.from_at) - round(term.silent_s * 1e6)
        and parse_instant(term.from_at) <= until
        and figures["write_stop_us"] + late_us < term.silent_s * 1e6
    ]


def _of_states(drill: DrillView, history: History) -> list[str]:
    agree = drill.figures.get("states_agree")
    if agree is None or bool(agree) is not bool(history.states_differ):
        return []
    return [f"states_agree is {agree}, and compared again: {history.states_differ or 'they are the same'}"]
