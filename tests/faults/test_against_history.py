"""The comparison of drills with the history finds contradictions, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from forebay.cluster.schemas import LeaderTermView, StoryRow
from forebay.cluster.schemas.drills import DrillView
from tests.faults.against_history import MEASURED, History, disagreements

FIGURES = dict.fromkeys(MEASURED, 0) | {
    "write_stop_us": 400_000, "fault_at_us": 2_000_000, "watched_us": 9_000_000, "goal_us": 500_000,
    "writes_lost": 0, "states_agree": 1, "runs_again": 0, "stages_again": 0, "nodes_lost": 0, "begun_us": 0,
    "held_us": 4_000_000,
}  # fmt: skip
DRILL = DrillView(
    drill=3, scenario="leader-hang", target="r1", by="root", verdict="passed", began="2026-01-31T12:00:00Z",
    until=None, ended="2026-01-31T12:00:20Z", sentence="r1 is back; writes stopped for 400.0 ms", figures=FIGURES,
)  # fmt: skip


def term(number: int, leader: str, from_at: str, silent_s: float | None = None) -> LeaderTermView:
    return LeaderTermView(
        term=number, leader=leader, first_index=number, last_index=9, from_at=from_at, to_at=None, silent_s=silent_s
    )


BEFORE = term(7, "r1", "2026-01-31T11:00:00Z")
HISTORY = History(7, "r1", (BEFORE, term(8, "r2", "2026-01-31T12:00:02.5Z", 0.4)), ())


def event(name: str, **detail: str) -> StoryRow:
    return StoryRow(revision=9, at="", actor="a", command="c", event=name, sentence="s", detail=detail)


def figures(**more: int) -> DrillView:
    return replace(DRILL, figures=FIGURES | more)


def without(*names: str) -> DrillView:
    return replace(DRILL, figures={name: value for name, value in FIGURES.items() if name not in names})


def said(verdict: str, sentence: str, **more: Any) -> DrillView:
    return replace(DRILL, verdict=verdict, sentence=sentence, **more)


UNCHECKED = said("failed", "the completed checks found no fault; not checked: replica states (r3 did not say)")
SWITCHOVER = {"scenario": "switchover", "target": "r2"}
ALONE = replace(HISTORY, terms=(BEFORE,))

AGREE = {
    "it is as it is said": (DRILL, HISTORY),
    "a switchover": (said("passed", "r2 took over; writes", **SWITCHOVER), HISTORY),
    "a switchover that did not come": (said("failed", "r1 leads, not r2", **SWITCHOVER), ALONE),
    "a leader that came later": (
        said("failed", "no other replica led while r1 could not; r2 led afterwards"),
        replace(HISTORY, terms=(BEFORE, term(8, "r2", "2026-01-31T12:00:07Z", 0.4))),
    ),
    "a check that is missing": (replace(UNCHECKED, figures=without("states_agree").figures), HISTORY),
    "aborted before the fault": (said("aborted", "eve: enough", figures={"client_late_us": 1}), ALONE),
    "an event after the check": (DRILL, replace(HISTORY, rows=(event("stage_retried"),))),
}

DISAGREE = {
    "figures discarded": (without("write_stop_us"), HISTORY, "figures were discarded: write_stop_us"),
    "a check without its figure": (without("states_agree"), HISTORY, "was checked, and states_agree is missing"),
    "a figure without its check": (UNCHECKED, HISTORY, "was not checked, and states_agree is there"),
    "passed in spite of a loss": (figures(writes_lost=1), HISTORY, "a check is missing or failed"),
    "passed in spite of a stop": (figures(write_stop_us=600_000), HISTORY, "longer than the goal"),
    "an abort without its stop": (
        said("aborted", "no write was acknowledged for 5 s"),
        HISTORY,
        "write_stop_us is 400000",
    ),
    "a count": (figures(runs_again=1), HISTORY, "runs_again is 1, and the history has 0"),
    "a node that was DOWN": (
        said("failed", "n1 did not go DOWN", scenario="node-down", target="n1"),
        replace(HISTORY, rows=(event("node_went_down", node="n1"),)),
        "the history has it as DOWN",
    ),
    "a switchover that came": (
        said("failed", "r1 leads, not r2: r2 has not taken over", **SWITCHOVER),
        HISTORY,
        "r2 did not take over, and a term of it follows",
    ),
    "a switchover that did not come": (said("passed", "r2 took over", **SWITCHOVER), ALONE, "no term of it follows"),
    "somebody led": (
        said("failed", "no other replica led while r1 could not"),
        HISTORY,
        "no other replica led, and r2 led",
    ),
    "nobody led": (DRILL, ALONE, "no other replica has a term"),
    "a longer silence": (
        figures(write_stop_us=300_000),
        replace(HISTORY, terms=(BEFORE, term(8, "r2", "2026-01-31T12:00:05Z", 2.5))),
        "nothing was settled for 2.5 s before term 8",
    ),
    "states that are the same": (figures(states_agree=0), HISTORY, "states_agree is 0"),
    "states that differ": (DRILL, replace(HISTORY, states_differ="they differ"), "states_agree is 1"),
}


@pytest.mark.parametrize("name", AGREE)
def test_figures_confirmed_by_the_history_are_no_disagreement(name: str) -> None:
    assert disagreements(*AGREE[name]) == []


@pytest.mark.parametrize("name", DISAGREE)
def test_figures_contradicted_by_the_history_are_found(name: str) -> None:
    drill, history, found = DISAGREE[name]
    assert any(found in one for one in disagreements(drill, history)), disagreements(drill, history)
