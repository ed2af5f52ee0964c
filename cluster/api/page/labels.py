"""Formatting and templates of the status page: sizes, times, durations, labels, charts.

Templates are loaded from this package only and escape everything. An undefined name is an error, not an empty text.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from forebay.cluster.schemas import (
    EXPIRY_NOTICE_DAYS,
    HistoryRow,
    JobView,
    NeedView,
    PoolUseAnswer,
    PoolUseView,
    days_left,
)
from forebay.cluster.schemas.page import ChartBar, ChartFrame, Layer, areas, bar_strip
from forebay.cluster.system import SLOW_SYNC_S, parse_instant
from forebay.replica.values import MICROSECONDS_PER_SECOND, Instant

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

POLICY: Final = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self'; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'"
)
"""Content security policy: no foreign sources, no inline code, and connections and forms only to this server."""

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")

_SPANS_S: Final = ((86_400, "d"), (3_600, "h"), (60, "min"))

BAR_CLASSES: Final[Mapping[str, str]] = {
    "PENDING": "pending",
    "CONFIGURING": "staging",
    "RUNNING": "running",
    "SUSPENDED": "suspended",
    "STAGE_OUT": "staging",
    "COMPLETED": "finished",
    "FAILED": "failed",
    "CANCELLED": "finished",
    "TIMEOUT": "failed",
    "NODE_FAIL": "failed",
}
"""Job state -> class of its bar."""

STATE_SIGNS: Final[Mapping[str, str]] = {
    "RUNNING": "good",
    "COMPLETED": "good",
    "PENDING": "idle",
    "CONFIGURING": "idle",
    "STAGE_OUT": "idle",
    "SUSPENDED": "warn",
    "CANCELLED": "warn",
}
"""Job state -> sign beside it; `bad` for all others."""

_PREFIX: Final = re.compile(r"burst_buffer/\w+: (slurm_bb_\w+: )?")

LAG_SHOWN_S: Final = 60
"""Lag of the history from which it is mentioned, seconds."""

_OVER: Final = frozenset({"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"})

_STAGING_WORDS: Final = ("staging-in", "staging-out", "teardown")
_FAILED: Final = ("teardown-fail",)
_STAGE_FAILED: Final = "stage_failed"

KEYS: Final = (
    ("pending", "pending"),
    ("staging", "staging"),
    ("running", "running"),
    ("suspended", "suspended"),
    ("failed", "failed"),
    ("finished", "finished"),
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


def format_ago(iso: str | None, now: Instant) -> str:
    """Format a time relative to `now`: `3 min ago`, `in 2 h 5 min`, `now`; a dash for none."""
    if iso is None:
        return "–"
    away_s = (now - parse_instant(iso)) / MICROSECONDS_PER_SECOND
    if abs(away_s) < 1:
        return "now"
    shown = format_span(float(int(abs(away_s)))).replace(".0 s", " s")
    return f"{shown} ago" if away_s > 0 else f"in {shown}"


def format_after(iso: str, first: str) -> str:
    """Format a time as the time since another one, below an hour to the second: `+3.2 s`, `+4 min 12 s`."""
    since_s = max(0.0, (parse_instant(iso) - parse_instant(first)) / MICROSECONDS_PER_SECOND)
    minutes, seconds = divmod(int(since_s), 60)
    return f"+{minutes} min {seconds} s" if 0 < minutes < 60 else f"+{format_span(since_s)}"


def elapsed_s(since: str | None, now: Instant) -> float | None:
    """Return the time since `since`, seconds; None if it is unknown."""
    return None if since is None else max(0.0, (now - parse_instant(since)) / MICROSECONDS_PER_SECOND)


def format_count(value: int) -> str:
    """Format a count with separators: `1,463`."""
    return f"{value:,}"


def format_percent(share: float | None) -> str:
    """Format a share of one as a percentage."""
    return "–" if share is None else f"{share:.0%}"


def label(word: str) -> str:
    """Format an API word for display: `not_exported` as `not exported`."""
    return word.replace("_", " ").lower()


def strip_prefix(reason: str) -> str:
    """Return a reason from its cause on, without the names that Slurm's plugins put before it."""
    return _PREFIX.sub("", reason)


def format_offset(seconds: float | None) -> str:
    """Format a clock offset to the millisecond."""
    return "–" if seconds is None else f"{round(seconds, 3) + 0.0:+.3f} s"


class NeedGroup(NamedTuple):
    """Items that need attention for the same reason: the first one, and all of them."""

    first: NeedView
    members: tuple[NeedView, ...]


def group_needs(needs: Iterable[NeedView]) -> list[NeedGroup]:
    """Group the items of one kind, user and reason, so that each problem is shown once."""
    found: dict[tuple[str, ...], list[NeedView]] = {}
    for need in needs:
        key = (need.kind, need.user, need.sentence) if need.job_id else (need.kind, need.subject, need.sentence)
        found.setdefault(key, []).append(need)
    return [NeedGroup(items[0], tuple(items)) for items in found.values()]


def pool_chart(pool: PoolUseView, answer: PoolUseAnswer, until: Instant, held_bytes: int) -> Markup:
    """Return the chart of a pool's use until a time; NEVER: until the end of the data.

    A replica that has just started reads its history first. While the last step differs from `held_bytes`, the present
    use, the chart ends with the data.
    """
    from markupsafe import Markup

    frame, most = frame_of(answer, until), max((step.quantity_bytes for step in pool.steps), default=0) or 1
    read_until = Instant(0) if answer.to_time is None else parse_instant(answer.to_time)
    is_behind = pool.steps[-1].held_bytes != held_bytes and until > read_until
    at = [parse_instant(step.at) for step in pool.steps]
    layers = [
        Layer(
            name,
            name,
            [(moment_us, getattr(step, field)) for moment_us, step in zip(at, pool.steps, strict=True)]
            + [(int(read_until), 0)] * is_behind,
        )
        for name, field in (("total", "quantity_bytes"), ("served", "served_bytes"), ("held", "held_bytes"))
    ]
    held, total = format_size(held_bytes, pool.unit), format_size(pool.steps[-1].quantity_bytes, pool.unit)
    title = f"Pool {pool.name}: {held} of {total} used"
    scale = [format_size(most * share, pool.unit) for share in (1, 0.5)]
    chart = Markup(areas(frame, layers, most, title, (*scale, "0")))
    if is_behind and until - read_until > LAG_SHOWN_S * MICROSECONDS_PER_SECOND:
        chart += Markup('<p class="small">This replica is still reading earlier history.</p>')
    return chart


def used_bar(used: int, total: int) -> Markup:
    """Return a bar of the used share."""
    from markupsafe import Markup

    share = min(1.0, used / total) if total > 0 else 0.0
    return Markup(
        f'<svg class="meter" aria-hidden="true"><rect width="100%" height="100%" class="served"/>'
        f'<rect width="{100 * share:.2f}%" height="100%" class="held"/></svg>'
    )


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
        kind = BAR_CLASSES.get(row.state, "finished")
        if word in _STAGING_WORDS and kind in ("pending", "finished", "running"):
            kind = "staging"
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
    return Markup(bar_strip(frame, bars, f"Timeline of job {name}; the table below has the same"))


@functools.lru_cache(maxsize=1)
def environment() -> Environment:
    """Compile the templates. The first call takes a tenth of a second, so run it in a thread."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    made = Environment(
        loader=PackageLoader("forebay.cluster.api.page"),
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
        "ago": format_ago,
        "after": format_after,
        "elapsed": elapsed_s,
        "count_of": format_count,
        "percent": format_percent,
        "offset": format_offset,
        "spoken": label,
        "cause": strip_prefix,
    }
    made.globals |= {
        "pool_chart": pool_chart,
        "used_bar": used_bar,
        "job_strip": job_strip,
        "group_needs": group_needs,
        "days_left": days_left,
        "KEYS": KEYS,
        "STATE_SIGNS": STATE_SIGNS,
        "SLOW_SYNC_S": SLOW_SYNC_S,
        "SOON_DAYS": EXPIRY_NOTICE_DAYS,
    }
    for name in made.list_templates():
        made.get_template(name)
    return made
