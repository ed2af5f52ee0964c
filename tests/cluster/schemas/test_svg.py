"""Charts: each figure has its shape, at the place of its time on the axis."""

import re
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from forebay.cluster.schemas.page import BAR_WIDTH_MIN, ChartBar, ChartFrame, Layer, areas, bar_strip
from forebay.cluster.schemas.page.svg import HEIGHT, STRIP, TICKS

FRAME = ChartFrame(0, 1_000_000)
times = st.integers(-100_000, 1_100_000)
drawn_bars = st.lists(
    st.builds(
        lambda at, length, title: ChartBar(0, at, at + length, "c1", title),
        times,
        st.integers(0, 500_000),
        st.text(alphabet='a<&"', max_size=4),
    ),
    max_size=5,
)
layers = st.lists(
    st.lists(st.tuples(times, st.integers(0, 9)), max_size=5).map(lambda steps: Layer("use", "c2", sorted(steps))),
    max_size=4,
)


@given(drawn_bars)
def test_each_bar_is_drawn_from_its_begin_to_its_end(found: list[ChartBar]) -> None:
    drawn = re.findall(r'<rect x="([0-9.]+)" y="0" width="([0-9.]+)"', bar_strip(FRAME, found, "jobs"))
    for (x, width), bar in zip(drawn, found, strict=True):
        left, right = (min(max(at, 0), 1_000_000) / 1_000_000 * STRIP for at in (bar.from_us, bar.to_us))
        assert abs(float(x) - left) < 0.01
        assert abs(float(width) - max(right - left, BAR_WIDTH_MIN)) < 0.02


@given(layers)
def test_each_layer_with_steps_is_an_area_within_the_strip(found: list[Layer]) -> None:
    drawn = re.findall(r'<polygon points="([^"]*)"', areas(FRAME, found, 9, "use", ("9", "0")))
    assert len(drawn) == sum(bool(layer.steps) for layer in found)
    for points in drawn:
        corners = [tuple(map(float, point.split(","))) for point in points.split()]
        assert all(0 <= x <= STRIP and 0 <= y <= HEIGHT for x, y in corners)


@given(st.integers(0, 10**15), st.integers(4_000_000, 4_000 * 86_400_000_000))
def test_an_axis_has_a_few_times_at_equal_distances(from_us: int, span_us: int) -> None:
    ticks = ChartFrame(from_us, from_us + span_us).ticks()
    assert 1 <= len(ticks) <= TICKS + 1
    assert from_us <= ticks[0] and ticks[-1] <= from_us + span_us
    distances = {later - earlier for earlier, later in pairwise(ticks)}
    assert len(distances) <= 1 and all(at % distance == 0 for distance in distances for at in ticks)


PLOT_PX = 298
"""Width of a plot on a phone of 390 px."""
CHARACTER_PX = 6.6


@given(st.integers(0, 10**15), st.integers(4_000_000, 4_000 * 86_400_000_000))
def test_labels_of_an_axis_do_not_overlap_on_a_phone(from_us: int, span_us: int) -> None:
    drawn = areas(ChartFrame(from_us, from_us + span_us), [], 9, "use", ("9", "0"))
    right = 0.0
    labels = re.findall(r'<text x="([0-9.]+)%" y="1em" text-anchor="(\w+)">([^<]+)</text>', drawn)
    assert labels
    for percent, anchor, text in labels:
        width = len(text) * CHARACTER_PX
        left = float(percent) / 100 * PLOT_PX - {"start": 0, "middle": width / 2, "end": width}[anchor]
        assert left >= right
        right = left + width
