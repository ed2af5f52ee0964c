"""Clocks, and instants as text."""

import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.cluster.system.clock import SystemClock, format_instant, parse_instant
from forebay.replica.values.units import NEVER, Instant
from tests.clocks import ManualClock

LAST_INSTANT = 253_402_300_799_999_999
"""9999-12-31T23:59:59.999999Z."""


def test_system_clock_counts_microseconds_and_its_monotonic_time_never_decreases() -> None:
    clock = SystemClock()
    before = clock.monotonic_s()
    age_s = datetime.datetime.now(datetime.UTC).timestamp() - clock.now() / 1_000_000
    assert abs(age_s) < 60
    assert clock.monotonic_s() >= before


def test_manual_clock_advances_both_times_and_jumps_only_the_wall_clock() -> None:
    clock = ManualClock(Instant(5))
    clock.advance(1.5)
    assert (clock.now(), clock.monotonic_s()) == (1_500_005, 1.5)
    clock.set_wall(Instant(1))
    assert (clock.now(), clock.monotonic_s()) == (1, 1.5)
    with pytest.raises(ValueError, match="cannot advance"):
        clock.advance(-1.0)


@given(st.integers(1, LAST_INSTANT))
def test_instant_survives_conversion_to_text(instant: int) -> None:
    text = format_instant(Instant(instant))
    assert text is not None
    assert len(text) == len("2026-01-31T12:00:00.000000Z")
    assert parse_instant(text) == instant


def test_never_has_no_text() -> None:
    assert format_instant(NEVER) is None


@pytest.mark.parametrize(
    ("text", "instant"),
    [
        ("1970-01-01T00:00:01Z", 1_000_000),
        ("1970-01-01T01:00:01+01:00", 1_000_000),
        ("1970-01-01T00:00:00.000001Z", 1),
        ("2026-01-31 12:00Z", 1_769_860_800_000_000),
    ],
)
def test_time_with_a_zone_is_read(text: str, instant: int) -> None:
    assert parse_instant(text) == instant


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("2026-01-31T12:00:00", "2026-01-31T12:00:00Z for UTC"),
        ("soon", "write it as 2026-01-31T12:00:00Z"),
        ("", "write it as"),
        ("2026-02-30T00:00:00Z", "write it as"),
    ],
)
def test_invalid_time_or_missing_zone_is_rejected_with_the_right_form(text: str, remedy: str) -> None:
    with pytest.raises(ValueError, match="zone|not a time") as caught:
        parse_instant(text)
    assert remedy in str(caught.value)
