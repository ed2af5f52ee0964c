"""Tables of a what-if: the same rows on a terminal and on the page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import click

from forebay.cluster.audit.report import amount
from forebay.cluster.audit.whatif.figures import Figures, MovedJob, PoolFigures, Waits, WhatIf
from forebay.cluster.cli.text import fields_table, show, table
from forebay.cluster.schemas.page import moment
from forebay.cluster.system import format_span
from forebay.replica.values import plain

Row = tuple[str, ...]
"""Label, and a cell for each world."""

NONE: Final = "-"

REASON_CHARACTERS: Final = 18
"""Displayed characters of a reason, so that the figures fit on an 80-column terminal; `--json` has the full text."""

REASONS_SHOWN_MAX: Final = 15
"""Maximum number of displayed reasons for waiting: those with the longest waits."""


def worlds_of(found: WhatIf) -> list[tuple[str, Figures]]:
    """Return the worlds to compare, with their names."""
    worlds = [("recorded", found.recorded), ("unchanged", found.unchanged)]
    return [*worlds, ("changed", found.changed)] if found.changed is not None else worlds


def rows_of(found: WhatIf) -> list[Row]:
    """Return all figures, one row each."""
    worlds = [figures for _, figures in worlds_of(found)]
    return [
        *_counts(worlds),
        *_spans("waits", [world.wait for world in worlds]),
        *_by_reason(worlds),
        *_pools(worlds),
        ("makespan", *(format_span(world.makespan_us) for world in worlds)),
    ]


def _counts(worlds: Sequence[Figures]) -> Iterator[Row]:
    def row(name: str, count: Callable[[Figures], int]) -> Row:
        return (name, *(str(count(world)) for world in worlds))

    yield row("jobs submitted", lambda world: world.submitted)
    yield row("jobs started", lambda world: world.started)
    for result in sorted({result for world in worlds for result in world.ended}):
        yield (f"ended {result}", *(str(world.ended.get(result, 0)) for world in worlds))
    yield row("unfinished at the end", lambda world: world.unfinished)
    yield row("of these not started", lambda world: world.unstarted)
    yield row("commands rejected only here", lambda world: world.refused)


def _spans(name: str, waits: Sequence[Waits | None]) -> Iterator[Row]:
    """Yield the number of waiting jobs, the median, and the 95th percentile."""
    yield (f"{name}, jobs: p50", *(NONE if one is None else f"{one.jobs}: {format_span(one.p50_us)}" for one in waits))
    yield ("    p95", *(NONE if one is None else format_span(one.p95_us) for one in waits))


def _by_reason(worlds: Sequence[Figures]) -> Iterator[Row]:
    by_world = [{one.reason: one for one in world.waits} for world in worlds]
    longest: dict[str, int] = {}
    for reason, waits in (pair for one in by_world for pair in one.items()):
        longest[reason] = max(waits.p95_us, longest.get(reason, 0))
    named = sorted(longest, key=lambda reason: (-longest[reason], reason))
    for reason in named[:REASONS_SHOWN_MAX]:
        shown = reason if len(reason) <= REASON_CHARACTERS else reason[: REASON_CHARACTERS - 1] + "…"
        yield from _spans(f"  for {shown}", [one.get(reason) for one in by_world])
    if len(named) > REASONS_SHOWN_MAX:
        yield (f"  for {len(named) - REASONS_SHOWN_MAX} other reasons", *("see --json" for _ in worlds))


def _pools(worlds: Sequence[Figures]) -> Iterator[Row]:
    by_world = [{pool.name: pool for pool in world.pools} for world in worlds]
    for name in sorted({name for pools in by_world for name in pools}):
        pools = [pools.get(name) for pools in by_world]
        yield (
            f"pool {name}: held, mean",
            *(NONE if one is None else _held(one, one.mean, one.mean_share) for one in pools),
        )
        yield (
            f"pool {name}: held, peak",
            *(NONE if one is None else _held(one, one.peak, one.peak_share) for one in pools),
        )


def _held(pool: PoolFigures, held: float, share: float) -> str:
    return f"{amount(pool.use, _readable(held) if pool.unit == 'bytes' else round(held))} ({share:.0%})"


def _readable(held: float) -> int:
    """Round bytes to three digits, so that they have a short suffix."""
    step = 1
    while held >= step * 1024 * 1024:
        step *= 1024
    return round(held / step) * step


def calibration_words(found: WhatIf) -> str:
    """Format how well the unchanged replay agrees with the ledger."""
    one = found.calibration
    place, times = one.in_place, one.by_times
    rough = " ROUGH: differences are unreliable." if one.is_rough else ""
    return (
        f"{place.identical} of {place.starts} starts ({place.share:.1%}) are at the recorded time, the median start is "
        f"{format_span(place.median_off_us)} off; {one.same} of {one.decisions} decisions are the same. By service "
        f"times alone: {times.identical} of {times.starts} ({times.share:.1%}), {format_span(times.median_off_us)} "
        f"off.{rough}"
    )


def left_out_words(found: WhatIf) -> list[str]:
    """Format the commands that could not be replayed."""
    said = []
    if found.left_out:
        listed = ", ".join(f"{count} {kind}" for kind, count in found.left_out.items())
        said.append(f"Left out, because the ledger lacks data to rebuild them: {listed}.")
    if found.unproven:
        listed = ", ".join(f"{count} {kind}" for kind, count in found.unproven.items())
        said.append(f"Rebuilt without the proof of a digest: {listed}.")
    return said


MOVED_HEADS: Final = ("JOBID", "NAME", "USER", "SUBMIT", "RECORDED", "UNCHANGED", "CHANGED", "EARLIER-BY")


def moved_row(job: MovedJob) -> tuple[str | int, ...]:
    """Return the cells of a job that starts at another time."""
    return (
        job.job,
        job.name,
        job.user,
        moment(job.submitted_us),
        *(NONE if at is None else moment(at) for at in (job.recorded_us, job.unchanged_us, job.changed_us)),
        format_span(job.gain_us) if job.gain_us >= 0 else f"-{format_span(-job.gain_us)}",
    )


def show_what_if(found: WhatIf) -> None:
    """Print all tables."""
    source = found.source
    rows = [
        ("Window", f"{moment(source.from_us)} to {moment(source.to_us)} UTC"),
        ("Revisions", f"{source.first_revision} to {source.last_revision}"),
        ("Changed", ", ".join(found.changes) or "nothing"),
        ("Calibration", calibration_words(found)),
    ]
    show(fields_table(rows))
    click.echo()
    heads = ("FIGURE", *(name.upper() for name, _ in worlds_of(found)))
    show(table(heads, rows_of(found), right=frozenset(heads[1:])))
    for word, count, moved in (("earlier", found.earlier, found.gaining), ("later", found.later, found.losing)):
        if moved:
            click.echo(f"\n{count} jobs start {word}; the largest differences:")
            show(table(MOVED_HEADS, map(moved_row, moved), right=frozenset({"JOBID", "EARLIER-BY"})))
    click.echo("\nAssumed:")
    for sentence in (*found.assumptions, *left_out_words(found)):
        click.echo(plain(f"- {sentence}"))
