"""Report page: headline figures, charts with their data as tables, and the command that reproduces the page."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Final

from forebay.cluster.audit.report.figures import (
    COLUMNS,
    NO_WAIT,
    JobBars,
    PendingJobs,
    PoolUsage,
    StateBar,
    WindowReport,
)
from forebay.cluster.schemas.page import ChartBar as Drawn
from forebay.cluster.schemas.page import (
    ChartFrame,
    HeadlineFigure,
    Layer,
    bars,
    details,
    html_table,
    key,
    lines,
    moment,
    page,
    stacked_areas,
    tiles,
)
from forebay.cluster.system import format_span, readable_size
from forebay.replica.model import JobState
from forebay.replica.values import MICROSECONDS_PER_SECOND

NODES_SHOWN_MAX: Final = 8
"""Number of nodes drawn separately, those with the most bytes; the other nodes are combined."""

REASONS_SHOWN_MAX: Final = 7
"""Number of reasons drawn separately; the others are combined."""

JOBS_DRAWN_MAX: Final = 40
"""Maximum number of jobs drawn: those that waited longest; the others are counted by reason."""

_LONG_US: Final = 10_000_000
"""Shortest interval that is displayed in whole seconds, microseconds."""

_PREFIX: Final = re.compile(r"burst_buffer/\w+: (slurm_bb_\w+: )?")
"""Names that Slurm's plugins put before a reason."""

KINDS: Final = {
    "pending": "pending",
    "allocating": "staging-in",
    "allocated": "staging-in",
    "staging-in": "staging-in",
    "staged-in": "staged",
    "configuring": "around",
    "pre-run": "around",
    "running": "running",
    "suspended": "staged",
    "post-run": "around",
    "staging-out": "staging-out",
    "stage_out": "staging-out",
    "deleting": "teardown",
    "deleted": "teardown",
    "teardown": "teardown",
    "completed": "teardown",
    "failed": "teardown",
    "cancelled": "teardown",
    "timeout": "teardown",
    "node_fail": "teardown",
    "alloc-revoke": "failed",
    "teardown-fail": "failed",
}
_LEGEND: Final = {
    "pending": "pending",
    "staging-in": "staging in",
    "staged": "staged in or suspended",
    "around": "before or after the run",
    "running": "running",
    "staging-out": "staging out",
    "teardown": "teardown",
    "failed": "failed or revoked",
}
KIND_COLOURS: Final = dict(
    zip(_LEGEND, ("#9aa3ad", "#0072b2", "#56b4e9", "#c9b800", "#009e73", "#e69f00", "#cc79a7", "#d55e00"), strict=True)
)


def page_of(report: WindowReport, command: str) -> str:
    """Return the page as HTML; `command` reproduces it."""
    source = report.source
    frame = ChartFrame(source.from_us, max(source.to_us, source.from_us + MICROSECONDS_PER_SECOND))
    title = f"Forebay: {source.cluster or source.cluster_id}, {moment(source.from_us)} to {moment(source.to_us)} UTC"
    parts = [tiles(_headline(report))]
    for draw in (_waiting, _pools, _jobs, _transfers, _terms):
        parts.extend(draw(report, frame))
    facts = (
        ("Revisions", f"{source.first_revision} to {source.last_revision}"),
        ("Ledger", f"{source.ledger_digest}@{source.last_index}"),
        ("State", source.state_digest),
        ("Command", command),
    )
    parts.append("<h2>Source</h2>")
    parts.append(html_table(("", ""), facts))
    return page(title, parts, KIND_COLOURS)


_FAILURES: Final = frozenset({JobState.FAILED.name, JobState.TIMEOUT.name, JobState.NODE_FAIL.name})


def _headline(report: WindowReport) -> Iterable[HeadlineFigure]:
    """Yield the headline figures."""
    totals = report.totals
    jobs = sum(totals.outcomes.values())
    failed = sum(count for outcome, count in totals.outcomes.items() if outcome in _FAILURES)
    outcomes = ", ".join(f"{count:,} {outcome.lower()}" for outcome, count in totals.outcomes.items())
    yield HeadlineFigure("Jobs", f"{jobs:,}", outcomes or "none")
    yield HeadlineFigure(
        "Failed jobs", f"{failed:,}", f"{failed / jobs:.1%} of all" if jobs else "", "warn" if failed else "good"
    )
    yield HeadlineFigure(
        "Median wait", format_span(totals.wait_p50_us), f"95th percentile {format_span(totals.wait_p95_us)}"
    )
    moved = totals.staged_in_bytes + totals.staged_out_bytes
    more = f"{readable_size(totals.staged_in_bytes)} in, {readable_size(totals.staged_out_bytes)} out"
    yield HeadlineFigure("Data moved", readable_size(moved), more)
    yield HeadlineFigure("Failovers", f"{totals.failovers:,}", "changes of the leader's term")
    kind = "bad" if totals.interruptions else "good"
    yield HeadlineFigure("Unplanned interruptions", f"{totals.interruptions:,}", "runs lost with their node", kind)


def _jobs(report: WindowReport, frame: ChartFrame) -> Iterable[str]:
    yield "<h2>Jobs</h2>"
    jobs = drawn_jobs(report.jobs)
    if not jobs:
        yield "<p>No jobs in this window.</p>"
        return
    if len(jobs) < sum(report.totals.outcomes.values()):
        yield f"<p>The {len(jobs)} jobs that waited longest, one for each array:</p>"
    yield key((kind, _LEGEND[kind]) for kind in _LEGEND)
    drawn = [
        Drawn(row, bar.from_us, frame.to_us if bar.to_us is None else bar.to_us, KINDS[bar.word], title)
        for row, job in enumerate(jobs)
        for bar in job.bars
        for title in (_bar_title(job, bar, frame),)
    ]
    yield bars(frame, [f"{job.called} {job.name}" for job in jobs], drawn)
    rows = [
        (
            job.called,
            job.name,
            job.user,
            job.pool,
            readable_size(job.size_bytes),
            format_span(job.waited_us),
            ", ".join(f"{bar.word} {format_span(_length(bar, frame))}" for bar in job.bars),
            job.result.lower() or "unfinished",
        )
        for job in jobs
    ]
    yield details(html_table(("Job", "Name", "User", "Pool", "Size", "Pending", "States", "Result"), rows))
    yield from _other_jobs(report, jobs)


def drawn_jobs(jobs: Sequence[JobBars]) -> list[JobBars]:
    """Return the jobs to draw, ordered by start: those that waited longest, at most one of each array."""
    found: dict[str, JobBars] = {}
    for job in sorted(jobs, key=lambda job: (-job.waited_us, job.job)):
        found.setdefault(job.called.partition("_")[0], job)
    drawn = {job.job for job in list(found.values())[:JOBS_DRAWN_MAX]}
    return [job for job in jobs if job.job in drawn]


def _other_jobs(report: WindowReport, drawn: Sequence[JobBars]) -> Iterable[str]:
    """Yield the jobs that are not drawn, by the reason for which they waited longest."""
    rest = {reason: [found.jobs, found.waited_us] for reason, found in report.totals.reasons.items()}
    for job in drawn:
        found = rest.setdefault(job.main_reason, [0, 0])
        found[0], found[1] = found[0] - 1, found[1] - job.waited_us
    rows = [
        (
            "no reason sampled" if reason == NO_WAIT else _reason_label(reason),
            count,
            format_span(max(0, waited_us) // count),
        )
        for reason, (count, waited_us) in sorted(rest.items(), key=lambda item: -item[1][0])
        if count > 0
    ]
    if rows:
        yield f"<h3>The other {sum(row[1] for row in rows):,} jobs</h3>"
        yield html_table(("Main reason", "Jobs", "Mean wait"), rows)


def _length(bar: StateBar, frame: ChartFrame) -> int:
    return (frame.to_us if bar.to_us is None else bar.to_us) - bar.from_us


def _bar_title(job: JobBars, bar: StateBar, frame: ChartFrame) -> str:
    why = f" ({', '.join(bar.reasons)})" if bar.reasons else ""
    begun = moment(bar.from_us)[11:]
    return f"{job.called} {job.name}: {bar.word}{why} from {begun}, {format_span(_length(bar, frame))}"


def _waiting(report: WindowReport, frame: ChartFrame) -> Iterable[str]:
    yield "<h2>Pending jobs by reason</h2>"
    yield from waiting_picture(report.waiting, frame)


def waiting_picture(waiting: Sequence[PendingJobs], frame: ChartFrame) -> Iterable[str]:
    """Yield the numbers of pending jobs by reason, as a chart and its table."""
    totals: dict[str, int] = {}
    for seen in waiting:
        for reason, count in seen.jobs.items():
            totals[reason] = totals.get(reason, 0) + count
    if not totals:
        yield "<p>No pending jobs in this window.</p>"
        return
    named = sorted(totals, key=lambda reason: (-totals[reason], reason))
    shown, others = named[:REASONS_SHOWN_MAX], named[REASONS_SHOWN_MAX:]
    layers = {reason: [seen.jobs.get(reason, 0) for seen in waiting] for reason in shown}
    if others:
        layers["others"] = [sum(seen.jobs.get(reason, 0) for reason in others) for seen in waiting]
    kinds = {name: f"c{place}" for place, name in enumerate(layers)}
    yield key((kinds[name], _reason_label(name)) for name in layers)
    yield from _axis_label("Pending jobs")
    yield stacked_areas(frame, [seen.at_us for seen in waiting], layers, kinds)
    rows = [(moment(seen.at_us), *(int(layers[name][place]) for name in layers)) for place, seen in enumerate(waiting)]
    yield details(html_table(("Time", *map(_reason_label, layers)), rows))


def _reason_label(reason: str) -> str:
    """Return a reason for display; a pending job without a reason starts in the next scheduling cycle."""
    return "ready to start" if reason == NO_WAIT else _PREFIX.sub("", reason)


def _axis_label(words: str) -> Iterable[str]:
    """Yield the label of the following chart's vertical axis."""
    yield f'<p class="small">{escape(words)}</p>'


def _pools(report: WindowReport, frame: ChartFrame) -> Iterable[str]:
    for pool in report.pools:
        yield f"<h2>Pool {escape(pool.name)}</h2>"
        most = max((max(held, total) for _, held, _, total in pool.steps), default=0) or 1
        yield key((("c0", "used"), ("c5", "in service"), ("c7", "total")))
        yield lines(
            frame,
            (
                Layer("used", "c0", [(at, held) for at, held, _, _ in pool.steps]),
                Layer("total", "c7", [(at, total) for at, _, _, total in pool.steps]),
                Layer("in service", "c5", [(at, served) for at, _, served, _ in pool.steps]),
            ),
            most,
            (amount(pool, most), amount(pool, most // 2), "0"),
        )
        rows = [
            (moment(at), amount(pool, held), amount(pool, served), amount(pool, total))
            for at, held, served, total in pool.steps
        ]
        yield details(html_table(("Time", "Used", "In service", "Total"), rows))


def amount(pool: PoolUsage, units: int) -> str:
    """Format a pool quantity for display."""
    return readable_size(units).replace(".0 ", " ") if pool.unit == "bytes" else f"{units}"


def _terms(report: WindowReport, frame: ChartFrame) -> Iterable[str]:
    yield "<h2>Leaders and commands</h2>"
    if report.terms_left_out:
        yield f"<p>The last {len(report.terms)} terms; {report.terms_left_out:,} earlier ones are not drawn.</p>"
    drawn = [
        Drawn(0, term.from_us, term.to_us, f"c{place % 2 * 4}", f"term {term.term}, {term.entries} entries")
        for place, term in enumerate(report.terms)
    ]
    yield '<p class="small">Terms of leaders; the colour changes with the term</p>'
    yield bars(frame, ["Terms"], drawn)
    width_us = max(1, frame.to_us - frame.from_us) / COLUMNS
    steps = [(int(frame.from_us + place * width_us), count) for place, count in enumerate(report.commands)]
    most = max(report.commands, default=0) or 1
    interval = format_span(round(width_us)) if width_us < _LONG_US else f"{width_us / MICROSECONDS_PER_SECOND:.0f} s"
    yield from _axis_label(f"Commands in intervals of {interval}")
    yield lines(frame, (Layer("commands", "c0", steps),), most, (f"{most:,}", "0"))
    rows = [
        (
            term.term,
            term.first_index,
            moment(term.from_us),
            moment(term.to_us),
            term.entries,
            "" if term.silent_us is None else format_span(term.silent_us),
        )
        for term in report.terms
    ]
    yield details(html_table(("Term", "First entry", "From", "To", "Entries", "Gap before"), rows))


def _transfers(report: WindowReport, frame: ChartFrame) -> Iterable[str]:
    yield "<h2>Data moved by node</h2>"
    if not report.moved:
        yield "<p>No transfers ended in this window.</p>"
        return
    totals = {node: sum(columns) for node, columns in report.moved.items()}
    named = sorted(totals, key=lambda node: (-totals[node], node))
    layers: dict[str, Sequence[float]] = {node: report.moved[node] for node in named[: NODES_SHOWN_MAX - 1]}
    if others := named[NODES_SHOWN_MAX - 1 :]:
        layers["others"] = [sum(report.moved[node][place] for node in others) for place in range(COLUMNS)]
    kinds = {name: f"c{place}" for place, name in enumerate(layers)}
    yield key((kinds[name], f"{name} {readable_size(sum(map(int, layer)))}") for name, layer in layers.items())
    width_us = max(1, frame.to_us - frame.from_us) / COLUMNS
    moments = [int(frame.from_us + place * width_us) for place in range(COLUMNS)]
    rates: Mapping[str, Sequence[float]] = {
        name: [value * MICROSECONDS_PER_SECOND / width_us for value in layer] for name, layer in layers.items()
    }
    yield from _axis_label("Mean rate of each transfer, by the clocks of the nodes")
    yield stacked_areas(frame, moments, rates, kinds, _rate)
    if report.transfers_left_out:
        left_out = f"{report.transfers_left_out:,} more are not listed"
        yield f"<p>The {len(report.transfers)} largest transfers; {left_out}.</p>"
    rows = [
        (
            f"{made.job}",
            made.node,
            made.stage.replace("_", " "),
            made.attempt,
            "yes" if made.complete else "no",
            made.files,
            readable_size(made.size_bytes),
            moment(made.from_us),
            format_span(made.to_us - made.from_us),
            _rate(made.size_bytes * MICROSECONDS_PER_SECOND / max(1, made.to_us - made.from_us)),
        )
        for made in report.transfers
    ]
    heads = ("Job", "Node", "Stage", "Attempt", "Complete", "Files", "Size", "Start", "Duration", "Rate")
    yield details(html_table(heads, rows))


def _rate(bytes_s: float) -> str:
    return f"{readable_size(bytes_s)}/s"
