"""SVG charts over one time axis: bars, steps and stacked steps. Equal figures give equal bytes."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Final, NamedTuple

WIDTH: Final = 1100
LEFT: Final = 170
RIGHT: Final = 16
TOP: Final = 8
AXIS: Final = 26
BAR: Final = 14
ROW: Final = 18

_STEPS_US: Final = tuple(
    seconds * 1_000_000
    for seconds in (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 10_800, 21_600, 43_200, 86_400)
)
_TICKS_MAX: Final = 8
_DAY_US: Final = 86_400_000_000


class ChartFrame(NamedTuple):
    """Time axis shared by all charts of a page; microseconds since 1970."""

    from_us: int
    to_us: int

    def x(self, at_us: float) -> float:
        """Return the x coordinate of a time, clipped to the chart."""
        return LEFT + self.share(at_us) * (WIDTH - LEFT - RIGHT)

    def share(self, at_us: float) -> float:
        """Return the position of a time on the axis, from 0 to 1."""
        return min(max((at_us - self.from_us) / max(1, self.to_us - self.from_us), 0.0), 1.0)

    def ticks(self) -> list[int]:
        """Return at most eight round times for the axis labels."""
        span = self.to_us - self.from_us
        step = next((step for step in _STEPS_US if span // step <= _TICKS_MAX), 0)
        if not step:
            step = -(-span // (_TICKS_MAX * _DAY_US)) * _DAY_US
        first = -(-self.from_us // step) * step
        return list(range(first, self.to_us + 1, step))


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
    """Return rows of bars with their titles."""
    height = TOP + len(rows) * ROW
    parts = [
        f'<text x="{LEFT - 8}" y="{number(TOP + row * ROW + BAR - 3)}" class="label">{escape(name)}</text>'
        for row, name in enumerate(rows)
    ]
    for bar in found:
        left, right = frame.x(bar.from_us), frame.x(bar.to_us)
        parts.append(
            f'<rect x="{number(left)}" y="{number(TOP + bar.row * ROW)}" width="{number(max(right - left, 0.5))}" '
            f'height="{BAR}" class="{escape(bar.kind)}"><title>{escape(bar.title)}</title></rect>'
        )
    return _picture(frame, height, parts)


def lines(frame: ChartFrame, layers: Sequence[Layer], most: float, top: str, height: int = 120) -> str:
    """Return step lines; the first is an area. `most` is the value at the top edge, `top` its label."""
    parts = [_scale(height, top)]
    for place, layer in enumerate(layers):
        points = _corners(frame, layer.steps, most, height)
        if not points:
            continue
        path = " ".join(f"{number(x)},{number(y)}" for x, y in points)
        name = f"<title>{escape(layer.name)}</title>"
        if place == 0:
            base = number(TOP + height)
            closed = f"{number(points[0][0])},{base} {path} {number(points[-1][0])},{base}"
            parts.append(f'<polygon points="{closed}" class="area {escape(layer.kind)}">{name}</polygon>')
        else:
            parts.append(f'<polyline points="{path}" class="line {escape(layer.kind)}">{name}</polyline>')
    return _picture(frame, TOP + height, parts)


def stacked_areas(
    frame: ChartFrame,
    moments: Sequence[int],
    layers: Mapping[str, Sequence[float]],
    kinds: Mapping[str, str],
    height: int = 160,
) -> str:
    """Return stacked areas, the first at the bottom, with one value per time, valid until the next."""
    sums = [sum(layer[place] for layer in layers.values()) for place in range(len(moments))]
    most = max(sums, default=0) or 1
    below = [0.0] * len(moments)
    parts = [_scale(height, f"{most:g}")]
    for name, layer in layers.items():
        above = [low + value for low, value in zip(below, layer, strict=True)]
        upper = _corners(frame, list(zip(moments, above, strict=True)), most, height)
        lower = _corners(frame, list(zip(moments, below, strict=True)), most, height)
        path = " ".join(f"{number(x)},{number(y)}" for x, y in (*upper, *reversed(lower)))
        parts.append(f'<polygon points="{path}" class="{escape(kinds[name])}"><title>{escape(name)}</title></polygon>')
        below = above
    return _picture(frame, TOP + height, parts)


STRIP: Final = 1000
"""Width of a strip, units; it is stretched to the available width."""


def area_strip(frame: ChartFrame, layers: Sequence[Layer], most: float, label: str, height: int = 100) -> str:
    """Return steps as areas without text, stretched to the available width; the page prints the scale beside them.

    `label` describes the chart for screen readers.
    """
    parts = []
    for layer in layers:
        points = [
            (frame.share(at_us) * STRIP, height - min(value / most, 1.0) * height) for at_us, value in layer.steps
        ]
        corners: list[tuple[float, float]] = []
        for x, y in points:
            if corners:
                corners.append((x, corners[-1][1]))
            corners.append((x, y))
        if not corners:
            continue
        path = " ".join(f"{number(x)},{number(y)}" for x, y in (*corners, (STRIP, corners[-1][1])))
        closed = f"{number(corners[0][0])},{height} {path} {STRIP},{height}"
        parts.append(f'<polygon points="{closed}" class="{escape(layer.kind)}"/>')
    return _strip(parts, label, height)


def bar_strip(frame: ChartFrame, found: Iterable[ChartBar], label: str, height: int = 100) -> str:
    """Return bars in one row with their titles, stretched to the available width."""
    parts = []
    for bar in found:
        left, right = frame.share(bar.from_us) * STRIP, frame.share(bar.to_us) * STRIP
        parts.append(
            f'<rect x="{number(left)}" y="0" width="{number(max(right - left, 1))}" height="{height}" '
            f'class="{escape(bar.kind)}"><title>{escape(bar.title)}</title></rect>'
        )
    return _strip(parts, label, height)


def _strip(parts: Iterable[str], label: str, height: int) -> str:
    return (
        f'<svg class="strip" viewBox="0 0 {STRIP} {height}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(label)}">{"".join(parts)}</svg>'
    )


def _corners(
    frame: ChartFrame, steps: Sequence[tuple[int, float]], most: float, height: int
) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    for at_us, value in steps:
        x, y = frame.x(at_us), TOP + height - min(value / most, 1.0) * height
        if found:
            found.append((x, found[-1][1]))
        found.append((x, y))
    if found:
        found.append((frame.x(frame.to_us), found[-1][1]))
    return found


def _scale(height: int, top: str) -> str:
    return (
        f'<text x="{LEFT - 8}" y="{TOP + 10}" class="label">{escape(top)}</text>'
        f'<text x="{LEFT - 8}" y="{TOP + height}" class="label">0</text>'
    )


def _picture(frame: ChartFrame, height: int, parts: Iterable[str]) -> str:
    axis = [f'<line x1="{LEFT}" y1="{height}" x2="{WIDTH - RIGHT}" y2="{height}" class="axis"/>']
    long = frame.to_us - frame.from_us > _DAY_US
    for at_us in frame.ticks():
        x = number(frame.x(at_us))
        shown = moment(at_us, seconds=False)[5:] if long else moment(at_us)[11:]
        axis.append(f'<line x1="{x}" y1="{TOP}" x2="{x}" y2="{height}" class="tick"/>')
        axis.append(f'<text x="{x}" y="{height + 16}" class="time">{shown}</text>')
    body = "".join((*axis, *parts))
    return f'<svg viewBox="0 0 {WIDTH} {height + AXIS}" role="img">{body}</svg>'
