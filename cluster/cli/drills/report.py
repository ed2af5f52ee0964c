"""Self-contained HTML page of a drill: leaders, write stops, figures, earlier drills."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from cluster.schemas.drills import DrillAnswer, DrillView
from cluster.schemas.ledger import LeaderTermView, StoryRow
from cluster.schemas.page import ChartBar, ChartFrame, bars, details, html_table, key, moment, page
from cluster.system import parse_instant
from replica.values import Instant

COMPARED: Final = 20
"""Earlier drills of its kind in the comparison, count."""

ROWS_MAX: Final = 500
"""Events on the page, count."""

_FAULT, _STOPPED, _ANSWERED, _CONTROL = "c1", "c5", "c2", "c4"
_LASTED: Final = ("held_us", "handover_us", "stands_loss_us", "upgraded_us")
"""Figures with the duration of the fault, or of the recovery."""

_TERMS: Final = ("c0", "c3")


def render_page(
    drill: DrillAnswer,
    earlier: Sequence[DrillView],
    terms: Sequence[LeaderTermView],
    story: Sequence[StoryRow],
    command: str,
) -> str:
    """Return the page of an ended drill.

    `earlier` has previous drills, newest first; `terms` and `story` are the leaders' terms and events of its period;
    `command` is the command that makes the page.
    """
    began, ended = _instant(drill.began), _instant(drill.ended)
    frame = ChartFrame(began, max(ended, began + 1))
    title = f"Forebay: drill {drill.drill}, {drill.scenario} of {drill.target}, {moment(began)} UTC"
    facts = (
        ("Verdict", f"{drill.verdict}: {drill.sentence}"),
        ("By", drill.by + (f", approved by {drill.second}" if drill.second else "")),
        ("Plan", drill.plan),
        ("Preconditions overridden", ", ".join(drill.forced) or "none"),
        ("Ended", f"{moment(ended)} UTC"),
        ("Made by", command),
    )
    return page(
        title,
        (
            html_table(("", ""), facts),
            *_timeline(drill, terms, frame),
            *_goals(drill),
            *_earlier_drills(drill, earlier),
            *_meanwhile(story),
        ),
    )


def _instant(text: str | None) -> Instant:
    return parse_instant(text) if text else Instant(0)


def _timeline(drill: DrillAnswer, terms: Sequence[LeaderTermView], frame: ChartFrame) -> Iterable[str]:
    """Yield the timeline: a row each for the fault, the writes and the leaders."""
    figures, began = drill.figures, frame.from_us
    yield "<h2>What happened when</h2>"
    drawn = []
    if "fault_at_us" in figures:
        fault = began + figures["fault_at_us"]
        lasted = next((figures[name] for name in _LASTED if name in figures), 0)
        over = fault + figures.get("begun_us", 0) + lasted
        stop, stop_us = fault + figures["write_stop_at_us"], figures["write_stop_us"]
        drawn = [
            ChartBar(0, fault, over, _FAULT, f"{drill.scenario} of {drill.target}, {_ms(over - fault)}"),
            ChartBar(1, began, fault, _CONTROL, "writes before it, to see what is normal"),
            ChartBar(1, fault, fault + figures["watched_us"], _ANSWERED, "writes from it on"),
            ChartBar(1, stop, stop + stop_us, _STOPPED, f"no write was acknowledged for {_ms(stop_us)}"),
        ]
    seen = [
        (max(frame.from_us, since), min(frame.to_us, until), term)
        for term in terms
        for since, until in ((_instant(term.from_at), _instant(term.to_at) or frame.to_us),)
        if term.from_at is not None and since <= frame.to_us and until >= frame.from_us
    ]
    drawn += [
        ChartBar(2, since, until, _TERMS[place % 2], f"{term.leader or 'an unknown replica'} led term {term.term}")
        for place, (since, until, term) in enumerate(seen)
    ]
    legend = ((_FAULT, "the fault"), (_CONTROL, "control"), (_ANSWERED, "writes"), (_STOPPED, "none acknowledged"))
    yield key((*legend, *((kind, "leaders' terms") for kind in _TERMS[:1])))
    yield bars(frame, [drill.scenario, "writes", "leaders"], drawn)
    rows = [
        (
            term.term,
            term.leader or "",
            moment(since),
            moment(until),
            "" if term.silent_s is None else f"{term.silent_s:g} s",
        )
        for since, until, term in seen
    ]
    yield details(html_table(("term", "leader", "from", "to", "nothing before it for"), rows))


def _goals(drill: DrillAnswer) -> Iterable[str]:
    """Yield every figure with its goal."""
    figures = drill.figures
    goals = {
        "write_stop_us": figures.get("goal_us"),
        "writes_lost": 0,
        "runs_again": 0,
        "states_agree": 1,
        "folds_agree": 1,
    }
    yield "<h2>Figures</h2>"
    rows = []
    for name, value in sorted(figures.items()):
        goal = goals.get(name)
        shown = "" if goal is None else (f"at most {_ms(goal)}" if name.endswith("_us") else f"{goal}")
        read = _ms(value) if name.endswith("_us") else ""
        rows.append((name, value, read, shown))
    yield html_table(("figure", "value", "", "goal"), rows)


def _earlier_drills(drill: DrillAnswer, earlier: Sequence[DrillView]) -> Iterable[str]:
    kind = [one for one in earlier if one.scenario == drill.scenario and one.drill < drill.drill][:COMPARED]
    yield f"<h2>The ones before it of its kind: {len(kind)}</h2>"
    rows = [
        (one.drill, one.began or "", one.target, one.verdict, *(_figure(one, name) for name in _COMPARED_FIGURES))
        for one in (drill, *kind)
    ]
    heads = ("drill", "began", "target", "verdict", "writes stopped", "reads stopped", "target back", "lost")
    yield html_table(heads, rows)


_COMPARED_FIGURES: Final = ("write_stop_us", "read_stop_us", "target_back_us", "writes_lost")


def _figure(one: DrillView, name: str) -> str:
    value = one.figures.get(name)
    return "" if value is None else (_ms(value) if name.endswith("_us") else str(value))


def _meanwhile(story: Sequence[StoryRow]) -> Iterable[str]:
    yield "<h2>What happened meanwhile</h2>"
    if len(story) > ROWS_MAX:
        yield f"<p>The first {ROWS_MAX}; there is more.</p>"
    rows = [(one.at, one.actor, one.job_id or "", one.sentence) for one in story[:ROWS_MAX]]
    yield html_table(("at", "who", "job", "what"), rows)


def _ms(length_us: int) -> str:
    return f"{length_us / 1000:.1f} ms"
