"""Page of a what-if with the charts of reports: its figures are those of `--json`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape

from forebay.cluster.audit.report import KIND_COLOURS, amount, waiting_picture
from forebay.cluster.audit.whatif.figures import MovedJob, WhatIf
from forebay.cluster.audit.whatif.text import (
    MOVED_HEADS,
    calibration_words,
    left_out_words,
    moved_row,
    rows_of,
    worlds_of,
)
from forebay.cluster.schemas.page import ChartBar as Drawn
from forebay.cluster.schemas.page import ChartFrame, Layer, bars, details, html_table, key, lines, moment, page

_COLOURS = {"recorded": "c7", "unchanged": "c4", "changed": "c0"}


def what_if_page(found: WhatIf, command: str) -> str:
    """Return the page as HTML; `command` reproduces it."""
    source = found.source
    frame = ChartFrame(source.from_us, source.to_us)
    window = f"{moment(source.from_us)} to {moment(source.to_us)} UTC"
    title = f"Forebay: what if, {source.cluster or source.cluster_id}, {window}"
    parts = list[str]()
    parts.append(f"<p>Changed: {escape(', '.join(found.changes) or 'nothing')}.</p>")
    parts.append(f"<p>{escape(calibration_words(found))}</p>")
    parts.append(html_table(("", *(name for name, _ in worlds_of(found))), rows_of(found)))
    parts.extend(_pools(found, frame))
    parts.extend(_waiting(found, frame))
    parts.extend(_moved("Jobs that start earlier", found.earlier, found.gaining, frame))
    parts.extend(_moved("Jobs that start later", found.later, found.losing, frame))
    parts.append("<h2>Assumptions</h2>")
    sentences = (*found.assumptions, *left_out_words(found))
    parts.append(f"<ul>{''.join(f'<li>{escape(sentence)}</li>' for sentence in sentences)}</ul>")
    parts.append("<h2>Source</h2>")
    facts = (
        ("Revisions", f"{source.first_revision} to {source.last_revision}"),
        ("Ledger", f"{source.ledger_digest}@{source.last_index}"),
        ("Command", command),
    )
    parts.append(html_table(("", ""), facts))
    return page(title, parts, KIND_COLOURS)


def _pools(found: WhatIf, frame: ChartFrame) -> Iterator[str]:
    worlds = worlds_of(found)
    for name in sorted({pool.name for _, world in worlds for pool in world.pools}):
        uses = {word: pool.use for word, world in worlds for pool in world.pools if pool.name == name}
        most = max((max(step[1], step[2]) for use in uses.values() for step in use.steps), default=0) or 1
        last = uses[list(uses)[-1]]
        # The first layer is drawn as an area, the others as lines over it.
        layers = [Layer(word, _COLOURS[word], [step[:2] for step in use.steps]) for word, use in reversed(uses.items())]
        served = Layer("in service", "c5", [(at, in_service) for at, _, in_service, _ in last.steps])
        yield f"<h2>Pool {escape(name)}</h2>"
        yield key((*((_COLOURS[word], word) for word in uses), ("c5", "in service")))
        yield lines(frame, (*layers, served), most, (amount(last, most), amount(last, most // 2), "0"))
        rows = [
            (word, moment(at), amount(use, held), amount(use, in_service))
            for word, use in uses.items()
            for at, held, in_service, _ in use.steps
        ]
        yield details(html_table(("World", "Time", "Used", "In service"), rows))


def _waiting(found: WhatIf, frame: ChartFrame) -> Iterator[str]:
    for word, world in worlds_of(found):
        yield f"<h2>Pending jobs by reason: {word}</h2>"
        yield from waiting_picture(world.waiting, frame)


def _moved(title: str, count: int, jobs: Iterable[MovedJob], frame: ChartFrame) -> Iterator[str]:
    named = list(jobs)
    if not named:
        return
    yield f"<h2>{escape(title)}</h2>"
    if count > len(named):
        yield f"<p>The {len(named)} jobs that move most; {count - len(named)} more are not drawn.</p>"
    yield key((("pending", "pending"),))
    rows: list[str] = []
    drawn: list[Drawn] = []
    for job in named:
        for word, started_us in (("unchanged", job.unchanged_us), ("changed", job.changed_us)):
            until_us = frame.to_us if started_us is None else started_us
            became = "does not start" if started_us is None else f"starts {moment(started_us)}"
            drawn.append(Drawn(len(rows), job.submitted_us, until_us, "pending", f"{job.job} {job.name}: {became}"))
            rows.append(f"{job.job} {job.name} {word}")
    yield bars(frame, rows, drawn)
    yield details(html_table([head.lower() for head in MOVED_HEADS], map(moved_row, named)))
