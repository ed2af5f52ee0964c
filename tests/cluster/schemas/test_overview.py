"""Figures of the overview."""

from hypothesis import given
from hypothesis import strategies as st

from forebay.cluster.schemas import days_left
from forebay.cluster.system.clock import format_instant
from forebay.replica.values.units import Instant

DAY_US = 86_400_000_000


@given(st.integers(1, 4_000 * DAY_US), st.integers(-3 * DAY_US, 400 * DAY_US))
def test_days_left_are_whole_days_and_none_after_the_end(now: int, left_us: int) -> None:
    until = max(1, now + left_us)
    days = days_left(format_instant(Instant(until)), Instant(now))
    assert days == max(0, (until - now) // DAY_US) and isinstance(days, int)
    assert days_left(None, Instant(now)) is None
