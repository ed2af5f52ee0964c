"""One job in words: the timeline of `job history`, the answer of `job why`."""

from collections.abc import Iterator
from typing import Final, NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text

from cluster.cli.moments import format_span
from cluster.cli.output import table
from cluster.cli.tables import moment
from cluster.schemas import HistoryAnswer, HistoryRow, WhyView
from cluster.system import parse_instant
from replica.model import ENDED
from replica.values import Instant, plain

BAR_CELLS: Final = 32
"""Characters of the longest duration bar: the rest of an 80-character line says what it means."""

_ENDED_WORDS: Final = frozenset(state.name for state in ENDED)


class Span(NamedTuple):
    """A time during which a job's state, reason and buffer state stayed the same; `until` None: it still does."""

    label: str
    start: Instant
    until: Instant | None


def spans(rows: tuple[HistoryRow, ...]) -> list[Span]:
    """Return the spans between the changes of state in a history, oldest first; what is over has no last span."""
    found: list[Span] = []
    for row in rows:
        at, label = parse_instant(row.at), _label(row)
        if found and found[-1].label == label:
            continue
        if found:
            found[-1] = found[-1]._replace(until=at)
        found.append(Span(label, at, None))
    if rows and _is_over(rows[-1]):
        found.pop()
    return found


def _label(row: HistoryRow) -> str:
    words = [row.state]
    if row.burst_buffer_state is not None:
        words.append(row.burst_buffer_state)
    if row.reason not in ("", "None"):
        words.append(f"({row.reason})")
    return plain(" ".join(words))


def _is_over(row: HistoryRow) -> bool:
    return row.state in _ENDED_WORDS and row.burst_buffer_state in (None, "complete")


def timeline(history: HistoryAnswer, now: Instant) -> RenderableType:
    """Return the job's history as a timeline: each event with time, revision and actor, then where the time went."""
    rows, called = history.rows, plain(history.task or str(history.job_id))
    parts: list[RenderableType] = []
    if not rows:
        return Text(f"Job {called}: this replica holds nothing of its history")
    first, last = parse_instant(rows[0].at), parse_instant(rows[-1].at)
    events = "1 event" if len(rows) == 1 else f"{len(rows)} events"
    parts.append(
        Text(
            f"Job {called}: {events} in {format_span(last - first)}, {moment(rows[0].at)} to {moment(rows[-1].at)}",
            style="bold",
        )
    )
    if not history.complete:
        parts.append(
            Text(
                "The beginning is missing: this replica was caught up by a snapshot. Ask another replica for it.",
                style="yellow",
            )
        )
    parts.append(Text())
    parts.append(
        table(
            ("TIME (UTC)", "AFTER", "", "REVISION", "STATE", "WHAT HAPPENED", "BY"),
            _event_rows(rows, first),
            right=frozenset({"AFTER", "REVISION"}),
            flexible=frozenset({"WHAT HAPPENED", "STATE"}),
        )
    )
    bars = list(_bars(spans(rows), now))
    if bars:
        parts += [
            Text(),
            Text("Where the time went", style="bold"),
            table(("STATE", "DURATION", "SHARE", ""), bars, right=frozenset({"DURATION", "SHARE"})),
        ]
    return Group(*parts)


def _event_rows(rows: tuple[HistoryRow, ...], first: Instant) -> Iterator[tuple[str | int | Text, ...]]:
    for number, row in enumerate(rows):
        rail = "┌" if number == 0 else "└" if number == len(rows) - 1 else "├"
        state = row.state if row.burst_buffer_state is None else f"{row.state} {row.burst_buffer_state}"
        yield (
            _time_of_day(row.at),
            f"+{format_span(max(0, parse_instant(row.at) - first))}",
            Text("●" if len(rows) == 1 else f"{rail}●"),
            row.revision,
            plain(state),
            row.sentence,
            row.actor,
        )


def _time_of_day(iso: str) -> str:
    return plain(iso.partition("T")[2][:12])


def _bars(found: list[Span], now: Instant) -> Iterator[tuple[str, str, str, str]]:
    lengths = [max(0, (now if span.until is None else span.until) - span.start) for span in found]
    total, longest = sum(lengths), max(lengths, default=0)
    for span, length in zip(found, lengths, strict=True):
        cells = max(1, round(BAR_CELLS * length / longest)) if length else 0
        share = f"{100 * length / total:.0f} %" if total else "0 %"
        duration = format_span(length) + (" so far" if span.until is None else "")
        yield span.label, duration, share, "█" * cells or "▏"


def why_text(why: WhyView) -> str:
    """Return what holds a job back at a moment, in words and figures."""
    at = f"At revision {why.revision} ({moment(why.at)})"
    buffer = f", BurstBufferState={plain(why.burst_buffer_state)}" if why.burst_buffer_state is not None else ""
    lines = [
        f"Job {plain(why.name) or why.job_id}: JobState={plain(why.state)}, Reason={plain(why.reason)}{buffer}",
        f"{at}: {plain(why.sentence)}",
    ]
    if why.blockers:
        jobs = "job" if len(why.blockers) == 1 else "jobs"
        names = [plain(name) for name in why.blocking] or map(str, why.blockers)
        lines.append(f"It waits for {jobs} {', '.join(names)}.")
    if why.remedy:
        lines.append(f"What to do: {plain(why.remedy)}")
    return "\n".join(lines)
