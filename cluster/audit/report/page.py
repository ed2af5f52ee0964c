"""Report page: charts, each with its figures as a table, and the command that reproduces it. It is self-contained."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Final

from cluster.audit.report.figures import COLUMNS, JobBars, PendingJobs, PoolUsage, StateBar, WindowReport
from cluster.cli.text import format_span
from cluster.schemas.page import ChartBar as Drawn
from cluster.schemas.page import ChartFrame, Layer, bars, details, html_table, key, lines, moment, page, stacked_areas
from replica.values import format_size

NODES_SHOWN_MAX: Final = 8
"""Nodes whose transfers are drawn separately, those with most bytes; the others are combined."""

REASONS_SHOWN_MAX: Final = 7
"""Reasons drawn separately; the others are combined."""

KINDS: Final = {
    "pending": "waits",
    "allocating": "moves",
    "allocated": "moves",
    "staging-in": "moves",
    "staged-in": "staged",
    "configuring": "begins",
    "pre-run": "begins",
    "running": "runs",
    "suspended": "staged",
    "post-run": "begins",
    "staging-out": "exports",
    "stage_out": "exports",
    "deleting": "ends",
    "deleted": "ends",
    "teardown": "ends",
    "completed": "ends",
    "failed": "ends",
    "cancelled": "ends",
    "timeout": "ends",
    "node_fail": "ends",
    "alloc-revoke": "fails",
    "teardown-fail": "fails",
}
_LEGEND: Final = {
    "waits": "waits",
    "moves": "staged in",
    "staged": "staged, not running",
    "begins": "begins or ends",
    "runs": "runs",
    "exports": "staged out",
    "ends": "torn down",
    "fails": "failed or revoked",
}
KIND_COLOURS: Final = dict(
    zip(_LEGEND, ("#bbbbbb", "#0072b2", "#56b4e9", "#f0e442", "#009e73", "#e69f00", "#cc79a7", "#d55e00"), strict=True)
)


def page_of(report: WindowReport, command: str) -> str:
    """Return the page as HTML; `command` reproduces it."""
    source = report.source
    frame = ChartFrame(source.from_us, source.to_us)
    title = f"Forebay: {source.cluster or source.cluster_id}, {moment(source.from_us)} to {moment(source.to_us)} UTC"
    parts = list[str]()
    for draw in (_waiting, _pools, _terms, _transfers, _jobs):
        parts.extend(draw(report, frame))
    facts = (
        ("Revisions", f"{source.first_revision} to {source.last_revision}"),
        ("Ledger", f"{source.ledger_digest}@{source.last_index}"),
        ("State", source.state_digest),
        ("Made by", command),
    )
    parts.append("<h2>Where this is from</h2>")
    parts.append(html_table(("", ""), facts))
    return page(title, parts, KIND_COLOURS)


def _jobs(report: WindowReport, frame: ChartFrame) -> Iterable[str]:
    yield "<h2>Jobs</h2>"
    if report.jobs_left_out:
        yield f"<p>The {len(report.jobs)} that waited longest; {report.jobs_left_out} more are not drawn.</p>"
    yield key((kind, _LEGEND[kind]) for kind in _LEGEND)
    drawn = [
        Drawn(row, bar.from_us, frame.to_us if bar.to_us is None else bar.to_us, KINDS[bar.word], title)
        for row, job in enumerate(report.jobs)
        for bar in job.bars
        for title in (_bar_title(job, bar, frame),)
    ]
    yield bars(frame, [f"{job.job} {job.name}"[:26] for job in report.jobs], drawn)
    rows = [
        (
            job.job,
            job.name,
            job.user,
            job.pool,
            format_size(job.size_bytes),
            format_span(job.waited_us),
            ", ".join(f"{bar.word} {format_span(_length(bar, frame))}" for bar in job.bars),
            job.result or "goes on",
        )
        for job in report.jobs
    ]
    yield details(html_table(("job", "name", "user", "pool", "size", "pending", "stays", "became"), rows))


def _length(bar: StateBar, frame: ChartFrame) -> int:
    return (frame.to_us if bar.to_us is None else bar.to_us) - bar.from_us


def _bar_title(job: JobBars, bar: StateBar, frame: ChartFrame) -> str:
    why = f" ({', '.join(bar.reasons)})" if bar.reasons else ""
    begun = moment(bar.from_us)[11:]
    return f"{job.job} {job.name}: {bar.word}{why} from {begun}, {format_span(_length(bar, frame))}"


def _waiting(report: WindowReport, frame: ChartFrame) -> Iterable[str]:
    yield "<h2>Pending jobs, by why they waited</h2>"
    yield from waiting_picture(report.waiting, frame)


def waiting_picture(waiting: Sequence[PendingJobs], frame: ChartFrame) -> Iterable[str]:
    """Yield the numbers of pending jobs by reason, as a chart and its table."""
    totals: dict[str, int] = {}
    for seen in waiting:
        for reason, count in seen.jobs.items():
            totals[reason] = totals.get(reason, 0) + count
    named = sorted(totals, key=lambda reason: (-totals[reason], reason))
    shown, others = named[:REASONS_SHOWN_MAX], named[REASONS_SHOWN_MAX:]
    layers = {reason: [seen.jobs.get(reason, 0) for seen in waiting] for reason in shown}
    if others:
        layers["others"] = [sum(seen.jobs.get(reason, 0) for reason in others) for seen in waiting]
    kinds = {name: f"c{place}" for place, name in enumerate(layers)}
    yield key((kinds[name], name) for name in layers)
    yield stacked_areas(frame, [seen.at_us for seen in waiting], layers, kinds)
    columns = [*shown, *(["others"] if others else [])]
    rows = [(moment(seen.at_us), *(int(layers[name][place]) for name in columns)) for place, seen in enumerate(waiting)]
    yield details(html_table(("at", *columns), rows))


def _pools(report: WindowReport, frame: ChartFrame) -> Iterable[str]:
    for pool in report.pools:
        yield f"<h2>Pool {escape(pool.name)}</h2>"
        most = max((max(held, total) for _, held, _, total in pool.steps), default=0) or 1
        yield key((("c0", "held"), ("c5", "in service"), ("c7", "in all")))
        yield lines(
            frame,
            (
                Layer("held", "c0", [(at, held) for at, held, _, _ in pool.steps]),
                Layer("in service", "c5", [(at, served) for at, _, served, _ in pool.steps]),
                Layer("in all", "c7", [(at, total) for at, _, _, total in pool.steps]),
            ),
            most,
            amount(pool, most),
        )
        rows = [
            (moment(at), amount(pool, held), amount(pool, served), amount(pool, total))
            for at, held, served, total in pool.steps
        ]
        yield details(html_table(("at", "held", "in service", "in all"), rows))


def amount(pool: PoolUsage, units: int) -> str:
    """Format a pool quantity for display."""
    return format_size(units) if pool.unit == "bytes" else f"{units}"


def _terms(report: WindowReport, frame: ChartFrame) -> Iterable[str]:
    yield "<h2>Leaders' terms, and commands settled</h2>"
    if report.terms_left_out:
        yield f"<p>The last {len(report.terms)}; {report.terms_left_out} more are not drawn.</p>"
    drawn = [
        Drawn(0, term.from_us, term.to_us, f"c{place % 2 * 4}", f"term {term.term}, {term.entries} entries")
        for place, term in enumerate(report.terms)
    ]
    yield bars(frame, ["terms"], drawn)
    width_us = max(1, frame.to_us - frame.from_us) / COLUMNS
    steps = [(int(frame.from_us + place * width_us), count) for place, count in enumerate(report.commands)]
    most = max(report.commands, default=0) or 1
    yield lines(frame, (Layer("commands", "c0", steps),), most, f"{most} in {format_span(int(width_us))}", height=80)
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
    yield details(html_table(("term", "first entry", "from", "to", "entries", "nothing before it for"), rows))


def _transfers(report: WindowReport, frame: ChartFrame) -> Iterable[str]:
    yield "<h2>Bytes moved, by node</h2>"
    if not report.moved:
        yield "<p>No transfer ended in this window.</p>"
        return
    totals = {node: sum(columns) for node, columns in report.moved.items()}
    named = sorted(totals, key=lambda node: (-totals[node], node))
    layers: dict[str, Sequence[float]] = {node: report.moved[node] for node in named[: NODES_SHOWN_MAX - 1]}
    if others := named[NODES_SHOWN_MAX - 1 :]:
        layers["others"] = [sum(report.moved[node][place] for node in others) for place in range(COLUMNS)]
    kinds = {name: f"c{place}" for place, name in enumerate(layers)}
    yield key((kinds[name], f"{name} {format_size(sum(map(int, layer)))}") for name, layer in layers.items())
    width_us = max(1, frame.to_us - frame.from_us) / COLUMNS
    moments = [int(frame.from_us + place * width_us) for place in range(COLUMNS)]
    rates = {name: [value / width_us for value in layer] for name, layer in layers.items()}
    yield "<p>MB/s, as if each transfer had gone at its mean rate; by the clocks of the nodes.</p>"
    yield stacked_areas(frame, moments, rates, kinds)
    if report.transfers_left_out:
        yield f"<p>The {len(report.transfers)} largest; {report.transfers_left_out} more are not listed.</p>"
    rows = [
        (
            made.job,
            made.node,
            made.stage,
            made.attempt,
            "yes" if made.complete else "no",
            made.files,
            format_size(made.size_bytes),
            moment(made.from_us),
            format_span(made.to_us - made.from_us),
            f"{made.size_bytes / max(1, made.to_us - made.from_us):.1f}",
        )
        for made in report.transfers
    ]
    heads = ("job", "node", "stage", "attempt", "complete", "files", "size", "from", "took", "MB/s")
    yield details(html_table(heads, rows))
