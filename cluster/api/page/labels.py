"""Formatting and templates of the status page: sizes, times, durations, labels.

Templates are loaded from this package only and escape everything. An undefined name is an error, not an empty text.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

from cluster.schemas import EXPIRY_NOTICE_DAYS, HistoryRow, JobView, PoolUseAnswer, PoolUseView, days_left
from cluster.schemas.page import ChartBar, ChartFrame, Layer, area_strip, bar_strip
from cluster.system import SLOW_SYNC_S, parse_instant
from replica.values import MICROSECONDS_PER_SECOND, Instant

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

POLICY: Final = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
"""Content security policy: no foreign sources, no inline code, and connections only to this server."""

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")

_SPANS_S: Final = ((86_400, "d"), (3_600, "h"), (60, "min"))

STAYS: Final[Mapping[str, str]] = {
    "PENDING": "waits",
    "CONFIGURING": "moves",
    "RUNNING": "runs",
    "SUSPENDED": "stands",
    "STAGE_OUT": "moves",
    "COMPLETED": "over",
    "FAILED": "failed",
    "CANCELLED": "over",
    "TIMEOUT": "failed",
    "NODE_FAIL": "failed",
}
"""Job state -> class of its bar."""

_OVER: Final = frozenset({"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"})

_STAGING: Final = ("staging-in", "staging-out", "teardown")
_FAILED: Final = ("teardown-fail",)
_STAGE_FAILED: Final = "stage_failed"

KEYS: Final = (
    ("waits", "waits"),
    ("moves", "data is moved"),
    ("runs", "runs"),
    ("stands", "suspended"),
    ("failed", "failed"),
    ("over", "over"),
)
"""Bar classes and their meaning."""


def page_headers() -> dict[str, str]:
    """Return the additional headers of a page."""
    return {"Content-Security-Policy": POLICY, "Referrer-Policy": "no-referrer"}


def format_size(value: float | None, unit: str = "bytes") -> str:
    """Format an amount to three digits, `1.5 GiB`; units other than bytes are unchanged."""
    if value is None:
        return "–"
    if unit != "bytes":
        return f"{value:g}"
    power = 0
    while abs(value) >= 1024 and power < len(_UNITS) - 1:
        value, power = value / 1024, power + 1
    digits = 0 if value >= 100 or value == int(value) else 1 if value >= 10 else 2
    return f"{value:.{digits}f} {_UNITS[power]}"


def format_moment(iso: str | None) -> str:
    """Format a time to the second, UTC; a dash for none."""
    return "–" if iso is None else iso.partition(".")[0].removesuffix("Z").replace("T", " ")


def format_span(seconds: float | None) -> str:
    """Format a duration in at most two units: `2 d 4 h`, `12 min`, `3.4 s`."""
    if seconds is None:
        return "–"
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    parts = []
    for length_s, word in _SPANS_S:
        count, seconds = divmod(seconds, length_s)
        if count:
            parts.append(f"{count:.0f} {word}")
    return " ".join(parts[:2])


def format_percent(share: float | None) -> str:
    """Format a share of one as a percentage."""
    return "–" if share is None else f"{share:.0%}"


def label(word: str) -> str:
    """Format an API word for display: `not_exported` as `not exported`."""
    return word.replace("_", " ").lower()


def format_offset(seconds: float | None) -> str:
    """Format a clock offset to the millisecond."""
    return "–" if seconds is None else f"{round(seconds, 3) + 0.0:+.3f} s"


def pool_strip(pool: PoolUseView, answer: PoolUseAnswer, until: Instant) -> Markup:
    """Return the chart of a pool's use until a time; NEVER: until the end of the data."""
    from markupsafe import Markup

    frame, most = frame_of(answer, until), max((step.quantity_bytes for step in pool.steps), default=0) or 1
    at = [parse_instant(step.at) for step in pool.steps]
    layers = [
        Layer(name, name, [(moment_us, getattr(step, field)) for moment_us, step in zip(at, pool.steps, strict=True)])
        for name, field in (("total", "quantity_bytes"), ("served", "served_bytes"), ("held", "held_bytes"))
    ]
    last = pool.steps[-1]
    held, total = format_size(last.held_bytes, pool.unit), format_size(last.quantity_bytes, pool.unit)
    title = f"Pool {pool.name}: {held} of {total} in use"
    return Markup(area_strip(frame, layers, most, title))


def frame_of(answer: PoolUseAnswer, until: Instant) -> ChartFrame:
    """Return the time axis of the pool charts."""
    since, told = (0 if at is None else parse_instant(at) for at in (answer.from_time, answer.to_time))
    return ChartFrame(since, max(until, told, since + MICROSECONDS_PER_SECOND))


def stage_bars(rows: Iterable[HistoryRow], until: Instant) -> list[ChartBar]:
    """Return the bars of a job, from each event to the next, the last until `until`."""
    found: list[ChartBar] = []
    known = list(rows)
    for place, row in enumerate(known):
        from_us = parse_instant(row.at)
        to_us = parse_instant(known[place + 1].at) if place + 1 < len(known) else max(until, from_us)
        word = row.burst_buffer_state
        kind = STAYS.get(row.state, "over")
        if word in _STAGING and kind in ("waits", "over", "runs"):
            kind = "moves"
        if word in _FAILED or row.event == _STAGE_FAILED:
            kind = "failed"
        says = label(row.state) + (f", buffer {word}" if word else "")
        if found and found[-1].kind == kind and found[-1].title.endswith(says):
            found[-1] = found[-1]._replace(to_us=to_us)
        elif to_us > from_us or place + 1 == len(known):
            found.append(ChartBar(0, from_us, to_us, kind, f"{format_moment(row.at)}: {says}"))
    return found


def is_over(job: JobView) -> bool:
    """Return True if the job has finished."""
    return job.state in _OVER and job.burst_buffer_state in (None, "complete")


def job_strip(bars: list[ChartBar], name: str) -> Markup:
    """Return the timeline of a job."""
    from markupsafe import Markup

    frame = ChartFrame(bars[0].from_us, max(bars[-1].to_us, bars[0].from_us + MICROSECONDS_PER_SECOND))
    return Markup(bar_strip(frame, bars, f"Timeline of job {name}, as the table below says it"))


@functools.lru_cache(maxsize=1)
def environment() -> Environment:
    """Compile the templates. The first call takes a tenth of a second, so run it in a thread."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    made = Environment(
        loader=PackageLoader("cluster.api.page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    made.filters |= {
        "size": format_size,
        "moment": format_moment,
        "span": format_span,
        "percent": format_percent,
        "offset": format_offset,
        "spoken": label,
    }
    made.globals |= {
        "pool_strip": pool_strip, "job_strip": job_strip, "days_left": days_left, "KEYS": KEYS,
        "SLOW_SYNC_S": SLOW_SYNC_S,
        "SOON_DAYS": EXPIRY_NOTICE_DAYS,
    }  # fmt: skip
    for name in made.list_templates():
        made.get_template(name)
    return made
