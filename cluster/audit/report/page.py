"""The page: pictures, the figures under each as a table, and how to make it again. It needs nothing but itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any, Final

from cluster.audit.report.figures import COLUMNS, Bar, JobBars, PoolUse, Report
from cluster.audit.report.svg import Bar as Drawn
from cluster.audit.report.svg import Frame, Layer, bars, lines, moment, stacked
from cluster.cli.text import format_span
from replica.values import format_size

NODES_SHOWN_MAX: Final = 8
"""Nodes whose transfers are drawn by themselves: those that moved most; the others are one."""

REASONS_SHOWN_MAX: Final = 7
"""Reasons that are drawn by themselves; the others are one."""

_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"

# Colours that people with any kind of colour vision tell apart (Okabe and Ito, 2002).
_COLOURS: Final = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999")

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

_STYLE: Final = (
    """
:root { color-scheme: light dark; --ink: #222; --faint: #ddd; --page: #fff; }
@media (prefers-color-scheme: dark) { :root { --ink: #ddd; --faint: #444; --page: #181818; } }
body { font: 14px/1.4 sans-serif; color: var(--ink); background: var(--page); max-width: 1140px;
  margin: 1em auto; padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; }
svg { width: 100%; height: auto; display: block; }
svg text { font: 11px sans-serif; fill: var(--ink); } .label { text-anchor: end; } .time { text-anchor: middle; }
.axis { stroke: var(--ink); } .tick { stroke: var(--faint); } .line { fill: none; stroke-width: 1.5; }
table { border-collapse: collapse; } td, th { padding: 1px 10px 1px 0; text-align: left; } td.n { text-align: right; }
.key span { display: inline-block; width: 10px; height: 10px; margin: 0 4px 0 12px; } .key { margin: 4px 0; }
"""
    + "".join(f".{kind} {{ fill: {colour}; background: {colour}; }}\n" for kind, colour in KIND_COLOURS.items())
    + "".join(f".c{n} {{ fill: {colour}; background: {colour}; }}\n" for n, colour in enumerate(_COLOURS))
    + "".join(
        f".line.c{n} {{ fill: none; background: none; stroke: {colour}; }}\n" for n, colour in enumerate(_COLOURS)
    )
)


def page_of(report: Report, command: str) -> str:
    """Return the page as HTML; `command` makes it again."""
    source = report.source
    frame = Frame(source.from_us, source.to_us)
    title = f"Forebay: {source.cluster or source.cluster_id}, {moment(source.from_us)} to {moment(source.to_us)} UTC"
    parts = [f"<h1>{escape(title)}</h1>"]
    for draw in (_waiting, _pools, _terms, _transfers, _jobs):
        parts.extend(draw(report, frame))
    facts = (
        ("Revisions", f"{source.first_revision} to {source.last_revision}"),
        ("Ledger", f"{source.ledger_digest}@{source.last_index}"),
        ("State", source.state_digest),
        ("Made by", command),
    )
    parts.append("<h2>Where this is from</h2>")
    parts.append(_table(("", ""), facts))
    body = "\n".join(parts)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _jobs(report: Report, frame: Frame) -> Iterable[str]:
    yield "<h2>Jobs</h2>"
    if report.jobs_left_out:
        yield f"<p>The {len(report.jobs)} that waited longest; {report.jobs_left_out} more are not drawn.</p>"
    yield _key((kind, _LEGEND[kind]) for kind in _LEGEND)
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
    yield _details(_table(("job", "name", "user", "pool", "size", "pending", "stays", "became"), rows))


def _length(bar: Bar, frame: Frame) -> int:
    return (frame.to_us if bar.to_us is None else bar.to_us) - bar.from_us


def _bar_title(job: JobBars, bar: Bar, frame: Frame) -> str:
    why = f" ({', '.join(bar.reasons)})" if bar.reasons else ""
    begun = moment(bar.from_us)[11:]
    return f"{job.job} {job.name}: {bar.word}{why} from {begun}, {format_span(_length(bar, frame))}"


def _waiting(report: Report, frame: Frame) -> Iterable[str]:
    yield "<h2>Pending jobs, by why they waited</h2>"
    totals: dict[str, int] = {}
    for seen in report.waiting:
        for reason, count in seen.jobs.items():
            totals[reason] = totals.get(reason, 0) + count
    named = sorted(totals, key=lambda reason: (-totals[reason], reason))
    shown, others = named[:REASONS_SHOWN_MAX], named[REASONS_SHOWN_MAX:]
    layers = {reason: [seen.jobs.get(reason, 0) for seen in report.waiting] for reason in shown}
    if others:
        layers["others"] = [sum(seen.jobs.get(reason, 0) for reason in others) for seen in report.waiting]
    kinds = {name: f"c{place}" for place, name in enumerate(layers)}
    yield _key((kinds[name], name) for name in layers)
    yield stacked(frame, [seen.at_us for seen in report.waiting], layers, kinds)
    columns = [*shown, *(["others"] if others else [])]
    rows = [
        (moment(seen.at_us), *(int(layers[name][place]) for name in columns))
        for place, seen in enumerate(report.waiting)
    ]
    yield _details(_table(("at", *columns), rows))


def _pools(report: Report, frame: Frame) -> Iterable[str]:
    for pool in report.pools:
        yield f"<h2>Pool {escape(pool.name)}</h2>"
        most = max((max(held, total) for _, held, _, total in pool.steps), default=0) or 1
        yield _key((("c0", "held"), ("c5", "in service"), ("c7", "in all")))
        yield lines(
            frame,
            (
                Layer("held", "c0", [(at, held) for at, held, _, _ in pool.steps]),
                Layer("in service", "c5", [(at, served) for at, _, served, _ in pool.steps]),
                Layer("in all", "c7", [(at, total) for at, _, _, total in pool.steps]),
            ),
            most,
            _amount(pool, most),
        )
        rows = [
            (moment(at), _amount(pool, held), _amount(pool, served), _amount(pool, total))
            for at, held, served, total in pool.steps
        ]
        yield _details(_table(("at", "held", "in service", "in all"), rows))


def _amount(pool: PoolUse, units: int) -> str:
    return format_size(units) if pool.unit == "bytes" else f"{units}"


def _terms(report: Report, frame: Frame) -> Iterable[str]:
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
    yield _details(_table(("term", "first entry", "from", "to", "entries", "nothing before it for"), rows))


def _transfers(report: Report, frame: Frame) -> Iterable[str]:
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
    yield _key((kinds[name], f"{name} {format_size(sum(map(int, layer)))}") for name, layer in layers.items())
    width_us = max(1, frame.to_us - frame.from_us) / COLUMNS
    moments = [int(frame.from_us + place * width_us) for place in range(COLUMNS)]
    rates = {name: [value / width_us for value in layer] for name, layer in layers.items()}
    yield "<p>MB/s, as if each transfer had gone at its mean rate; by the clocks of the nodes.</p>"
    yield stacked(frame, moments, rates, kinds)
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
    yield _details(_table(heads, rows))


def _key(kinds: Iterable[tuple[str, str]]) -> str:
    return '<p class="key">' + "".join(f'<span class="{kind}"></span>{escape(name)}' for kind, name in kinds) + "</p>"


def _details(table: str) -> str:
    return f"<details><summary>as a table</summary>{table}</details>"


def _table(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    cell: Callable[[Any], str] = lambda value: (  # noqa: E731
        f'<td class="n">{value}</td>' if isinstance(value, int) else f"<td>{escape(str(value))}</td>"
    )
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "".join(f"<tr>{''.join(cell(value) for value in row)}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"
