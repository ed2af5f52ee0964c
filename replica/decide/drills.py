"""Decide drill commands: one drill at a time, none while an operator's lock exists, and each with a time limit.

The program that runs a drill measures it, and may disappear. A drill that exceeds its time limit is recorded as lost
when the next one starts.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

from forebay.replica.messages import NOTHING, Acceptance, Decision
from forebay.replica.messages import commands as c
from forebay.replica.messages import events as e
from forebay.replica.model import SCENARIOS, Drill, DrillVerdict
from forebay.replica.state import Facts
from forebay.replica.values import (
    DRILL_FIGURES_MAX,
    DRILL_LEASE_S_LEAST,
    DRILL_LOCKS_MAX,
    DRILL_S_MAX,
    DRILLS_KEPT,
    MESSAGE_CHARACTERS_MAX,
    NAME_CHARACTERS_MAX,
    Instant,
    Rejection,
    RejectionCode,
    name_fault,
)

_FIGURE: Final = re.compile(r"[a-z][a-z0-9_]{0,47}", re.ASCII)
_FIGURE_MAX: Final = 2**63 - 1


def _start_drill(state: Facts, actor: c.Actor, command: c.StartDrill, at: Instant) -> Decision:
    rejection = _start_fault(command) or _lock_rejection(state)
    if rejection is not None:
        return rejection
    newest = max(state.drills, default=0)
    last = state.drills.get(newest)
    events: list[e.Event] = []
    if last is not None and last.verdict is DrillVerdict.UNDER_WAY:
        if last.is_under_way(at):
            return Rejection(
                RejectionCode.WRONG_STATE,
                f"drill {last.id} ({last.scenario} of {last.target}, by {last.by}) is under way",
                f"wait for its end, or end it: forebay drill abort {last.id}",
                "scenario",
            )
        silent_s = last.lease_s or last.lasts_s
        events.append(e.DrillEnded(last.id, DrillVerdict.LOST, f"no probe came for {silent_s} s"))
    forgotten = min(state.drills) if len(state.drills) >= DRILLS_KEPT else 0
    events.append(
        e.DrillStarted(
            newest + 1,
            command.scenario,
            command.target,
            command.lasts_s,
            actor.name,
            command.forced,
            forgotten,
            command.plan,
            command.lease_s,
        )
    )
    return Acceptance(tuple(events))


def _start_fault(command: c.StartDrill) -> Rejection | None:
    if command.scenario not in SCENARIOS:
        sentence = f"scenario {command.scenario[:NAME_CHARACTERS_MAX]!r} does not exist"
        return Rejection(RejectionCode.INVALID_FIELD, sentence, f"use one of: {', '.join(SCENARIOS)}", "scenario")
    names = [("target", command.target), *(("forced", one) for one in command.forced[:DRILL_FIGURES_MAX])]
    for field, name in (*names, *((("plan", command.plan),) if command.plan else ())):
        fault = name_fault(name)
        if fault is not None:
            return Rejection(RejectionCode.INVALID_FIELD, f"the {field} {fault}", "use the name in the plan", field)
    if len(command.forced) > DRILL_FIGURES_MAX:
        sentence = f"forced has more than {DRILL_FIGURES_MAX} preconditions"
        return Rejection(RejectionCode.INVALID_FIELD, sentence, "list only the plan's failed preconditions", "forced")
    if not 1 <= command.lasts_s <= DRILL_S_MAX:
        sentence = f"lasts_s {command.lasts_s} is out of range"
        return Rejection(RejectionCode.INVALID_FIELD, sentence, f"use 1 to {DRILL_S_MAX}", "lasts_s")
    if command.lease_s and not DRILL_LEASE_S_LEAST <= command.lease_s <= DRILL_S_MAX:
        remedy = f"use {DRILL_LEASE_S_LEAST} to {DRILL_S_MAX}, or 0 for none"
        return Rejection(RejectionCode.INVALID_FIELD, f"lease_s {command.lease_s} is out of range", remedy, "lease_s")
    return None


def _lock_rejection(state: Facts) -> Rejection | None:
    for name in sorted(state.drill_locks)[:1]:
        return Rejection(
            RejectionCode.WRONG_STATE,
            f"drills are locked by {name}: {state.drill_locks[name].reason}",
            f"ask {name}; then: forebay drill unlock {name}",
        )
    return None


def _find_active_drill(state: Facts, number: int, at: Instant) -> Drill | Rejection:
    drill = state.drills.get(number)
    if drill is None:
        last = max(state.drills, default=0)
        remedy = f"the last one is {last}" if last else "no drill has run yet"
        return Rejection(RejectionCode.INVALID_FIELD, f"drill {number} does not exist", remedy, "drill")
    if not drill.is_under_way(at):
        word = drill.verdict.word if drill.verdict is not DrillVerdict.UNDER_WAY else "past its time limit"
        return Rejection(RejectionCode.WRONG_STATE, f"drill {number} is {word}", "start another one", "drill")
    return drill


def _confirm_drill(state: Facts, actor: c.Actor, command: c.ConfirmDrill, at: Instant) -> Decision:
    drill = _find_active_drill(state, command.drill, at)
    if isinstance(drill, Rejection):
        return drill
    if actor.name == drill.by:
        sentence = f"drill {drill.id} was started by {drill.by}, who cannot confirm it"
        return Rejection(RejectionCode.PERMISSION_DENIED, sentence, "ask another operator to confirm it", "drill")
    return NOTHING if drill.second else Acceptance((e.DrillConfirmed(drill.id, actor.name),))


def _abort_drill(state: Facts, actor: c.Actor, command: c.AbortDrill, at: Instant) -> Decision:
    rejection = _text_fault(command.reason, "reason")
    if rejection is not None:
        return rejection
    drill = _find_active_drill(state, command.drill, at)
    if isinstance(drill, Rejection):
        return drill
    return NOTHING if drill.abort else Acceptance((e.DrillAbortRequested(drill.id, f"{actor.name}: {command.reason}"),))


def _end_drill(state: Facts, actor: c.Actor, command: c.EndDrill, at: Instant) -> Decision:
    rejection = _text_fault(command.sentence, "sentence")
    if rejection is not None:
        return rejection
    drill = state.drills.get(command.drill)
    # A drill that stops writes may exceed its lease. Its result is still accepted until another drill starts.
    if drill is None or drill.verdict is not DrillVerdict.UNDER_WAY or at >= drill.hard_deadline:
        late = _find_active_drill(state, command.drill, at)
        if isinstance(late, Rejection):
            return late
        drill = late
    if command.verdict not in (DrillVerdict.PASSED, DrillVerdict.FAILED, DrillVerdict.ABORTED):
        sentence = f"verdict {command.verdict.word} does not end a drill"
        return Rejection(RejectionCode.INVALID_FIELD, sentence, "use passed, failed or aborted", "verdict")
    figures = command.figures
    wrong = next((name for name, value in figures if not _FIGURE.fullmatch(name) or abs(value) > _FIGURE_MAX), None)
    if len(figures) > DRILL_FIGURES_MAX or wrong is not None or len(dict(figures)) < len(figures):
        what = "a name occurs twice" if wrong is None else f"{wrong[:NAME_CHARACTERS_MAX]!r} is not valid"
        what = f"there are {len(figures)} figures" if len(figures) > DRILL_FIGURES_MAX else what
        remedy = f"send at most {DRILL_FIGURES_MAX} with distinct names such as write_stop_us"
        return Rejection(RejectionCode.INVALID_FIELD, f"the figures are not valid: {what}", remedy, "figures")
    return Acceptance((e.DrillEnded(drill.id, command.verdict, command.sentence, figures),))


def _text_fault(text: str, field: str) -> Rejection | None:
    if text.strip() and len(text) <= MESSAGE_CHARACTERS_MAX and text.isprintable():
        return None
    remedy = f"write a sentence of 1 to {MESSAGE_CHARACTERS_MAX} printable characters"
    return Rejection(RejectionCode.INVALID_FIELD, f"the {field} is empty, too long or not printable", remedy, field)


def _probe_drill(state: Facts, actor: c.Actor, command: c.ProbeDrill, at: Instant) -> Decision:
    drill = _find_active_drill(state, command.drill, at)
    if isinstance(drill, Rejection):
        return drill
    if drill.by == actor.name and drill.needs_renewal(at):
        return Acceptance((e.DrillRenewed(drill.id),))
    return NOTHING


def _lock_drills(state: Facts, actor: c.Actor, command: c.LockDrills, at: Instant) -> Decision:
    rejection, known = _text_fault(command.reason, "reason"), state.drill_locks.get(actor.name)
    if rejection is not None:
        return rejection
    if known is None and len(state.drill_locks) >= DRILL_LOCKS_MAX:
        sentence = f"the limit of {DRILL_LOCKS_MAX} drill locks is reached"
        return Rejection(RejectionCode.LIMIT_EXCEEDED, sentence, "ask one of the operators to unlock drills")
    if known is not None and known.reason == command.reason:
        return NOTHING
    return Acceptance((e.DrillsLocked(actor.name, command.reason),))


def _unlock_drills(state: Facts, actor: c.Actor, command: c.UnlockDrills, at: Instant) -> Decision:
    if command.by in state.drill_locks:
        return Acceptance((e.DrillsUnlocked(command.by),))
    listed = ", ".join(sorted(state.drill_locks)) or "none"
    sentence = f"{command.by[:NAME_CHARACTERS_MAX]} has not locked drills"
    return Rejection(RejectionCode.INVALID_FIELD, sentence, f"operators with a lock: {listed}", "by")


DRILLS_BY_KEY: dict[type, Callable[[Facts, c.Actor, Any, Instant], Decision]] = {
    c.StartDrill: _start_drill,
    c.ConfirmDrill: _confirm_drill,
    c.AbortDrill: _abort_drill,
    c.EndDrill: _end_drill,
    c.ProbeDrill: _probe_drill,
    c.LockDrills: _lock_drills,
    c.UnlockDrills: _unlock_drills,
}
"""Command type -> handler that needs lookups by key only."""
