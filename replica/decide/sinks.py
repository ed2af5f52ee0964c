"""Decide the marks of event sinks: how far their receivers have accepted the events of the ledger."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from forebay.replica.messages import Acceptance, Actor, Decision
from forebay.replica.messages import commands as c
from forebay.replica.messages import events as e
from forebay.replica.state import Facts
from forebay.replica.values import NAME_CHARACTERS_MAX, SINK_MARKS_MAX, Instant, Rejection, RejectionCode


def _advance_sinks(state: Facts, actor: Actor, command: c.AdvanceSinks, at: Instant) -> Decision:
    """Advance marks. A mark never goes back: a repeated or late command has no effect."""
    marks = dict(command.marks)
    removed = [name for name in dict.fromkeys(command.removed) if name in state.sink_marks and name not in marks]
    for name, revision in marks.items():
        if not 0 < len(name) <= NAME_CHARACTERS_MAX:
            sentence = f"found {name[:NAME_CHARACTERS_MAX]!r}"
            remedy = f"name a sink with 1 to {NAME_CHARACTERS_MAX} characters"
            return Rejection(RejectionCode.INVALID_FIELD, sentence, remedy, "marks")
        if not 0 <= revision <= state.revision:
            sentence = f"sink {name} cannot have the events up to revision {revision}: the last is {state.revision}"
            return Rejection(RejectionCode.WRONG_STATE, sentence, "name a settled revision", "marks")
    if len(marks.keys() | state.sink_marks.keys()) - len(removed) > SINK_MARKS_MAX:
        sentence = f"there would be more than {SINK_MARKS_MAX} marks of event sinks"
        return Rejection(RejectionCode.LIMIT_EXCEEDED, sentence, "remove the marks of former sinks", "marks")
    return Acceptance(
        (
            *(e.SinkRemoved(name) for name in removed),
            *(
                e.SinkAdvanced(name, revision)
                for name, revision in marks.items()
                if revision > state.sink_marks.get(name, -1)
            ),
        )
    )


SINKS_BY_KEY: dict[type, Callable[[Facts, Actor, Any, Instant], Decision]] = {c.AdvanceSinks: _advance_sinks}
"""Command type -> handler that needs lookups by key only."""
