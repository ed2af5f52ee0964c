"""Self-contained HTML report of a drill: verdict, timeline, figures, events, and earlier drills."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Final

from forebay.cluster.drills.figure_labels import display_order, format_duration, format_figure, label_of
from forebay.cluster.schemas.drills import DrillAnswer, DrillView
from forebay.cluster.schemas.ledger import LeaderTermView, StoryRow
from forebay.cluster.schemas.page import (
    ChartBar,
    ChartFrame,
    HeadlineFigure,
    bars,
    details,
    html_table,
    key,
    moment,
    page,
    tiles,
)
from forebay.cluster.system import parse_instant
from forebay.replica.values import Instant

COMPARED: Final = 20
"""Number of earlier drills of the same scenario that are listed."""

ROWS_MAX: Final = 500
"""Maximum number of events listed."""

_FAULT, _STOPPED, _ANSWERED, _CONTROL = "c1", "c5", "c2", "c4"
_LASTED: Final = ("held_us", "handover_us", "stands_loss_us", "upgraded_us")
"""Figures for the duration of a fault or of its recovery; the first that exists is used."""

_TERMS: Final = ("c0", "c3")


def render_page(
    drill: DrillAnswer,
    earlier: Sequence[DrillView],
    terms: Sequence[LeaderTermView],
    story: Sequence[StoryRow],
    command: str,
) -> str:
    """Return the page of a drill that has ended.

    `earlier` has other drills, newest first; `terms` and `story` have the leaders and events during the drill;
    `command` reproduces the page.
    """
    began, ended = _instant(drill.began), _instant(drill.ended)
    frame = ChartFrame(began, max(ended, began + 1))
    title = f"Forebay: drill {drill.drill}, {drill.scenario} of {drill.target}, {moment(began)} UTC"
    facts = (
        ("Result", drill.sentence),
        ("By", drill.by + (f", approved by {drill.second}" if drill.second else "")),
        ("Plan", drill.plan or "none"),
        ("Preconditions overridden", ", ".join(drill.forced) or "none"),
        ("Ended", f"{moment(ended)} UTC"),
        ("Command", command),
    )
    return page(
        title,
        (
            tiles(_headline(drill)),
            html_table(("", ""), facts),
            *_timeline(drill, terms, frame),
            *_goals(drill),
            *_earlier_drills(drill, earlier),
            *_meanwhile(story),
        ),
    )


_VERDICT_KINDS: Final = {"passed": "good", "failed": "bad"}


def _headline(drill: DrillAnswer) -> Iterable[HeadlineFigure]:
    """Yield the verdict and the figures that determine it."""
    figures = drill.figures
    kind = _VERDICT_KINDS.get(drill.verdict, "warn")
    yield HeadlineFigure("Verdict", drill.verdict, f"{drill.scenario} of {drill.target}", kind)
    goal, stop = figures.get("goal_us"), figures.get("write_stop_us")
    yield HeadlineFigure(
        "Goal", "none" if goal is None else f"≤ {format_duration(goal)}", "without acknowledged writes"
    )
    met = "" if goal is None or stop is None else "good" if stop <= goal else "bad"
    yield HeadlineFigure("Measured", "–" if stop is None else format_duration(stop), "without acknowledged writes", met)
    for name, label in (("writes_lost", "Acknowledged writes lost"), ("runs_again", "Jobs re-run")):
        value = figures.get(name)
        kind = "" if value is None else "bad" if value else "good"
        yield HeadlineFigure(
            label, "–" if value is None else f"{value:,}", "not checked" if value is None else "goal: 0", kind
        )


def _instant(text: str | None) -> Instant:
    return parse_instant(text) if text else Instant(0)


def _timeline(drill: DrillAnswer, terms: Sequence[LeaderTermView], frame: ChartFrame) -> Iterable[str]:
    """Yield the timeline: the fault, writes, and leaders."""
    figures, began = drill.figures, frame.from_us
    yield "<h2>Timeline</h2>"
    drawn = []
    if "fault_at_us" in figures:
        fault = began + figures["fault_at_us"]
        lasted = next((figures[name] for name in _LASTED if name in figures), 0)
        over = fault + figures.get("begun_us", 0) + lasted
        stop, stop_us = fault + figures["write_stop_at_us"], figures["write_stop_us"]
        drawn = [
            ChartBar(0, fault, over, _FAULT, f"{drill.scenario} of {drill.target}, {format_duration(over - fault)}"),
            ChartBar(1, began, fault, _CONTROL, "writes before the fault, for comparison"),
            ChartBar(1, fault, fault + figures["watched_us"], _ANSWERED, "writes from the fault on"),
            ChartBar(1, stop, stop + stop_us, _STOPPED, f"no write was acknowledged for {format_duration(stop_us)}"),
        ]
    seen = [
        (max(frame.from_us, since), min(frame.to_us, until), term)
        for term in terms
        for since, until in ((_instant(term.from_at), _instant(term.to_at) or frame.to_us),)
        if term.from_at is not None and since <= frame.to_us and until >= frame.from_us
    ]
    drawn += [
        ChartBar(2, since, until, _TERMS[place % 2], f"{term.leader or 'unknown'}: leader in term {term.term}")
        for place, (since, until, term) in enumerate(seen)
    ]
    yield key(
        (
            (_FAULT, "fault"),
            (_CONTROL, "writes before the fault"),
            (_ANSWERED, "writes from the fault on"),
            (_STOPPED, "no write acknowledged"),
            *zip(_TERMS, ("leader", "next leader"), strict=True),
        )
    )
    yield bars(frame, [drill.scenario, "Writes", "Leaders"], drawn)
    rows = [
        (
            str(term.term),
            term.leader or "unknown",
            moment(since),
            moment(until),
            "" if term.silent_s is None else f"{term.silent_s:g} s",
        )
        for since, until, term in seen
    ]
    yield details(html_table(("Term", "Leader", "From", "To", "Gap before"), rows))


def _goals(drill: DrillAnswer) -> Iterable[str]:
    """Yield every figure with its goal."""
    figures = drill.figures
    goals = {"writes_lost": "0", "runs_again": "0", "states_agree": "yes", "folds_agree": "yes"}
    if "goal_us" in figures:
        goals["write_stop_us"] = f"at most {format_duration(figures['goal_us'])}"
    yield "<h2>Figures</h2>"
    names = display_order(figures)
    yield html_table(
        ("Figure", "Value", "Goal"),
        ((label_of(name), format_figure(name, figures[name]), goals.get(name, "")) for name in names),
    )


def _earlier_drills(drill: DrillAnswer, earlier: Sequence[DrillView]) -> Iterable[str]:
    same = [one for one in earlier if one.scenario == drill.scenario and one.drill < drill.drill][:COMPARED]
    if not same:
        return
    yield f"<h2>Earlier {escape(drill.scenario)} drills: {len(same)}</h2>"
    rows = [
        (
            str(one.drill),
            moment(_instant(one.began)),
            one.target,
            one.verdict,
            *(format_figure(name, one.figures[name]) if name in one.figures else "" for name in _COMPARED_FIGURES),
        )
        for one in same
    ]
    yield html_table(("Drill", "Began", "Target", "Verdict", *map(label_of, _COMPARED_FIGURES)), rows)


_COMPARED_FIGURES: Final = ("write_stop_us", "read_stop_us", "target_back_us", "writes_lost")


def _meanwhile(story: Sequence[StoryRow]) -> Iterable[str]:
    yield "<h2>Events during the drill</h2>"
    if len(story) > ROWS_MAX:
        yield f"<p>The first {ROWS_MAX} events; there are more.</p>"
    rows = [
        (one.at.partition("T")[2].removesuffix("Z")[:12] or one.at, one.actor, str(one.job_id or ""), one.sentence)
        for one in story[:ROWS_MAX]
    ]
    yield html_table(("Time", "By", "Job", "Event"), rows)
