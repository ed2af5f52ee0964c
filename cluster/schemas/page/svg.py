"""Charts over one time axis as SVG and HTML: bars, steps and stacked steps. Equal figures give equal bytes.

Shapes are stretched to the available width, and texts are HTML or positioned in percent, so that they stay readable on
a phone. The page supplies the style sheet (`cluster.schemas.page.document`, or its own).
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Final, NamedTuple

STRIP: Final = 1000
"""Width of a strip, units; it is stretched to the available width."""

HEIGHT: Final = 100
"""Height of a strip, units; it is stretched to that of the style sheet."""

MARGIN: Final = 2
"""Margin above and below a plot, so that lines at its edges are visible, units."""

BAR_WIDTH_MIN: Final = 1.0
"""Width of the shortest bar, units."""

TICKS: Final = 3
"""Intervals between the labelled times of an axis, count: as many as fit on a phone."""

_STEPS_US: Final = tuple(
    seconds * 1_000_000
    for seconds in (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 10_800, 21_600, 43_200, 86_400)
)
_DAY_US: Final = 86_400_000_000
_LABELS_TO_MINUTES_US: Final = 600_000_000
"""Length of an axis from which labels have no seconds, microseconds."""

_EDGE: Final = 0.125
"""Share of an axis at its ends in which labels are aligned with the end."""

_EDGE_INTERVAL: Final = 0.4
"""Share of an axis between two labels, of which one is aligned with an end; with less, that one is left out."""


class ChartFrame(NamedTuple):
    """Time axis shared by all charts of a page; microseconds since 1970."""

    from_us: int
    to_us: int

    def share(self, at_us: float) -> float:
        """Return the position of a time on the axis, from 0 to 1."""
        return min(max((at_us - self.from_us) / max(1, self.to_us - self.from_us), 0.0), 1.0)

    def x(self, at_us: float) -> float:
        """Return the x coordinate of a time in a strip."""
        return self.share(at_us) * STRIP

    def ticks(self) -> list[int]:
        """Return round times for the axis labels, at most TICKS + 1."""
        span = self.to_us - self.from_us
        step = next((step for step in _STEPS_US if span // step <= TICKS), 0)
        if not step:
            step = -(-span // (TICKS * _DAY_US)) * _DAY_US
        first = -(-self.from_us // step) * step
        return list(range(first, self.to_us + 1, step))

    def label(self, at_us: int) -> str:
        """Format a tick's time as precisely as the axis needs: to the day, minute or second."""
        span, shown = self.to_us - self.from_us, moment(at_us)
        return shown[5:16] if span > _DAY_US else shown[11:16] if span > _LABELS_TO_MINUTES_US else shown[11:]


def moment(at_us: int, *, seconds: bool = True) -> str:
    """Format a time for display, UTC."""
    at = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC) + datetime.timedelta(microseconds=at_us)
    return at.strftime("%Y-%m-%d %H:%M:%S" if seconds else "%Y-%m-%d %H:%M")


def number(value: float) -> str:
    """Format a coordinate to a hundredth, as short as possible."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


class ChartBar(NamedTuple):
    """Bar: row, start, end, colour class and title."""

    row: int
    from_us: int
    to_us: int
    kind: str
    title: str


class Layer(NamedTuple):
    """Line or area: name, class, and steps (at_us, value), each valid until the next."""

    name: str
    kind: str
    steps: Sequence[tuple[int, float]]


def bars(frame: ChartFrame, rows: Sequence[str], found: Iterable[ChartBar]) -> str:
    """Return rows of bars, each with its name and its bars' titles, over one axis."""
    drawn: list[list[ChartBar]] = [[] for _ in rows]
    for bar in found:
        drawn[bar.row].append(bar)
    parts = [
        f'<div class="name">{escape(name)}</div>{bar_strip(frame, line, name)}'
        for name, line in zip(rows, drawn, strict=True)
    ]
    return f'<div class="rows">{"".join(parts)}{_times(frame)}</div>'


def lines(frame: ChartFrame, layers: Sequence[Layer], most: float, scale: Sequence[str]) -> str:
    """Return overlaid steps: the first as an area, the others as lines.

    `most` is the value at the top edge; `scale` labels the values from there to 0 at equal distances.
    """
    parts = []
    for place, layer in enumerate(layers):
        points = _corners(frame, layer.steps, most)
        if points:
            shape = _area(points, layer.kind, layer.name) if place == 0 else _line(points, layer.kind, layer.name)
            parts.append(shape)
    return _plot(frame, parts, ", ".join(layer.name for layer in layers), scale)


def stacked_areas(
    frame: ChartFrame,
    moments: Sequence[int],
    layers: Mapping[str, Sequence[float]],
    kinds: Mapping[str, str],
    label_of: Callable[[float], str] = lambda value: f"{value:.3g}" if value < 1000 else f"{value:,.0f}",
) -> str:
    """Return stacked areas, the first at the bottom, with one value per time, valid until the next.

    `label_of` formats the greatest sum, which is the label of the top edge.
    """
    sums = [sum(layer[place] for layer in layers.values()) for place in range(len(moments))]
    most = max(sums, default=0) or 1
    below = [0.0] * len(moments)
    parts = []
    for name, layer in layers.items():
        above = [low + value for low, value in zip(below, layer, strict=True)]
        upper = _corners(frame, list(zip(moments, above, strict=True)), most)
        lower = _corners(frame, list(zip(moments, below, strict=True)), most)
        path = " ".join(f"{number(x)},{number(y)}" for x, y in (*upper, *reversed(lower)))
        parts.append(f'<polygon points="{path}" class="{escape(kinds[name])}"><title>{escape(name)}</title></polygon>')
        below = above
    return _plot(frame, parts, ", ".join(layers), (label_of(most), "0"))


def areas(frame: ChartFrame, layers: Sequence[Layer], most: float, label: str, scale: Sequence[str]) -> str:
    """Return steps as areas, each in front of its predecessor; `label` describes the chart for screen readers."""
    parts = []
    for layer in layers:
        points = _corners(frame, layer.steps, most)
        if points:
            parts.append(_area(points, layer.kind))
    return _plot(frame, parts, label, scale)


def bar_strip(frame: ChartFrame, found: Iterable[ChartBar], label: str) -> str:
    """Return bars in one row with their titles."""
    parts = []
    for bar in found:
        left, right = frame.x(bar.from_us), frame.x(bar.to_us)
        parts.append(
            f'<rect x="{number(left)}" y="0" width="{number(max(right - left, BAR_WIDTH_MIN))}" height="{HEIGHT}" '
            f'class="{escape(bar.kind)}"><title>{escape(bar.title)}</title></rect>'
        )
    return _strip(parts, label)


def _plot(frame: ChartFrame, parts: Iterable[str], label: str, scale: Sequence[str]) -> str:
    """Return a strip with both axes."""
    levels = len(scale) - 1
    grid = [_grid_line(0, STRIP, HEIGHT * place / levels, HEIGHT * place / levels) for place in range(1, levels)]
    grid += [_grid_line(frame.x(at_us), frame.x(at_us), 0, HEIGHT) for at_us in frame.ticks()]
    values = "".join(f"<span>{escape(one)}</span>" for one in scale)
    strip = _strip((*parts, f'<g class="grid">{"".join(grid)}</g>'), label, MARGIN)
    return f'<div class="plot"><div class="y" aria-hidden="true">{values}</div>{strip}{_times(frame)}</div>'


def _grid_line(x1: float, x2: float, y1: float, y2: float) -> str:
    return f'<line x1="{number(x1)}" x2="{number(x2)}" y1="{number(y1)}" y2="{number(y2)}"/>'


def _times(frame: ChartFrame) -> str:
    texts, ticks = [], frame.ticks()
    crowded = len(ticks) > 1 and frame.share(ticks[1]) - frame.share(ticks[0]) < _EDGE_INTERVAL
    for at_us in ticks:
        share = frame.share(at_us)
        if crowded and not _EDGE <= share <= 1 - _EDGE:
            continue
        anchor = "start" if share < _EDGE else "end" if share > 1 - _EDGE else "middle"
        shown = escape(frame.label(at_us))
        texts.append(f'<text x="{number(100 * share)}%" y="1em" text-anchor="{anchor}">{shown}</text>')
    return f'<svg class="x" aria-hidden="true">{"".join(texts)}</svg>'


def _strip(parts: Iterable[str], label: str, margin: int = 0) -> str:
    return (
        f'<svg class="strip" viewBox="0 {-margin} {STRIP} {HEIGHT + 2 * margin}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(label)}">{"".join(parts)}</svg>'
    )


def _corners(frame: ChartFrame, steps: Sequence[tuple[int, float]], most: float) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    for at_us, value in steps:
        x, y = frame.x(at_us), HEIGHT - min(value / most, 1.0) * HEIGHT
        if found:
            found.append((x, found[-1][1]))
        found.append((x, y))
    if found:
        found.append((STRIP, found[-1][1]))
    return found


def _area(points: Sequence[tuple[float, float]], kind: str, name: str = "") -> str:
    path = " ".join(f"{number(x)},{number(y)}" for x, y in points)
    closed = f"{number(points[0][0])},{HEIGHT} {path} {STRIP},{HEIGHT}"
    return f'<polygon points="{closed}" class="{escape(kind)}">{_title(name)}</polygon>'


def _line(points: Sequence[tuple[float, float]], kind: str, name: str) -> str:
    path = " ".join(f"{number(x)},{number(y)}" for x, y in points)
    return f'<polyline points="{path}" class="line {escape(kind)}">{_title(name)}</polyline>'


def _title(name: str) -> str:
    return f"<title>{escape(name)}</title>" if name else ""
