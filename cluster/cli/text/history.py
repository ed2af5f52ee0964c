"""Text of events, leaders' terms and changes between two revisions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from forebay.cluster.cli.text.output import Listing, size, table
from forebay.cluster.cli.text.tables import format_time
from forebay.replica.values import plain

if TYPE_CHECKING:
    from forebay.cluster.schemas import ChangeView, DiffAnswer, LeadersAnswer, StoryRow

VALUE_CHARACTERS_MAX = 120
"""Longest value shown, characters."""


def event_line(row: StoryRow) -> str:
    """Format an event as one line: time, revision, actor, job with its user, and sentence."""
    job = f"job {row.job_id}" if row.job_id is not None else ""
    whose = f"{job} ({row.user})" if job and row.user else job
    refused = f"rejected {row.command}: " if row.event == "rejected" else ""
    remedy = f"; {row.remedy}" if row.remedy else ""
    return plain(
        f"{format_time(row.at)}  {row.revision:>8}  {row.actor:<16}  {whose:<18}  {refused}{row.sentence}{remedy}"
    )


def terms_table(answer: LeadersAnswer) -> Listing:
    """Return the table of the leaders' terms."""
    rows = [
        (
            str(term.term),
            term.leader or "-",
            format_time(term.from_at),
            format_time(term.to_at),
            str(term.last_index - term.first_index + 1),
            "-" if term.silent_s is None else f"{term.silent_s:.3f}",
        )
        for term in answer.terms
    ]
    columns = ("TERM", "LEADER", "FROM", "TO", "ENTRIES", "GAP_S")
    return table(columns, rows, right=frozenset({"TERM", "ENTRIES", "GAP_S"}))


def changes_text(answer: DiffAnswer) -> str:
    """Format the changes between two revisions, one paragraph for each object."""
    return "\n".join(plain(line) for line in _lines(answer))


def _lines(answer: DiffAnswer) -> Iterator[str]:
    since, until = answer.since, answer.until
    count = f"{'at least ' if answer.more else ''}{len(answer.changes)}"
    yield (
        f"from revision {since.revision} ({format_time(since.at)}) "
        f"to revision {until.revision} ({format_time(until.at)}): "
        f"{count} change{'' if len(answer.changes) == 1 and not answer.more else 's'}"
    )
    for change in answer.changes:
        yield ""
        yield f"{change.kind} {change.name}".rstrip() + f" {_WORDS[change.change]}{_changed_by(change)}"
        for field, (before, after) in change.fields.items():
            if change.change == "new":
                yield f"   {field}: {_value(field, after)}"
            else:
                yield f"   {field}: {_value(field, before)} -> {_value(field, after)}"
    if answer.more:
        yield ""
        yield "more changes are not shown: use --job, --of or a larger --limit"


_WORDS = {"new": "created", "gone": "deleted", "changed": "changed"}


def _changed_by(change: ChangeView) -> str:
    if change.revision is None:
        return ""
    return f", last at revision {change.revision}, {format_time(change.at)}, by {change.actor}: {change.command}"


def _value(field: str, value: Any) -> str:
    if value in (None, "", []):
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if field.endswith("_bytes") and isinstance(value, int):
        return size(value)
    words = value if isinstance(value, str) else str(value)
    return words if len(words) <= VALUE_CHARACTERS_MAX else f"{words[:VALUE_CHARACTERS_MAX]}..."
