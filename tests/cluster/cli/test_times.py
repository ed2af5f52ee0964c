"""Durations and begin times: every form of sbatch is parsed exactly, and any other text is rejected."""

import datetime
import zoneinfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.cluster.cli.text.times import (
    format_duration,
    format_elapsed,
    parse_begin,
    parse_duration,
    parse_past,
)
from forebay.cluster.system.clock import parse_instant
from forebay.cluster.system.measures import format_span
from forebay.replica.values.limits import TIME_LIMIT_S_MAX

NOW = parse_instant("2026-01-31T12:00:00Z")
UTC = datetime.UTC
BERLIN = zoneinfo.ZoneInfo("Europe/Berlin")


@pytest.mark.parametrize(
    ("text", "duration_s"),
    [
        ("90", 5_400),
        ("1", 60),
        ("0:01", 1),
        ("90:30", 5_430),
        ("1:00:00", 3_600),
        ("36:00:00", 129_600),
        ("2-0", 172_800),
        ("2-12", 216_000),
        ("0-1:30", 5_400),
        ("1-02:03:04", 93_784),
        ("365-0", TIME_LIMIT_S_MAX),
    ],
)
def test_every_form_of_a_duration_is_parsed(text: str, duration_s: int) -> None:
    assert parse_duration(text) == duration_s


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "0:00",
        "0-0",
        "-5",
        "+5",
        "1.5",
        "1h",
        "1:90",
        "1:60:00",
        "1:00:60",
        "1-24",
        "1-1:60",
        "1-1:1:60",
        "1:2:3:4",
    ]
    + ["1-", "-", ":", "1:", ":1", "365-00:00:01", "9" * 40, "99999999999", "UNLIMITED", "infinite", "１", "1 ", " 1"],
)
def test_an_invalid_duration_is_rejected_with_a_remedy(text: str) -> None:
    with pytest.raises(ValueError, match=r"write|longest|at most") as refused:
        parse_duration(text)
    assert "\n" not in str(refused.value)


@given(st.integers(1, TIME_LIMIT_S_MAX))
def test_a_formatted_duration_is_parsed_back(duration_s: int) -> None:
    assert parse_duration(format_duration(duration_s)) == duration_s


@given(st.integers(0, 364), st.integers(0, 23), st.integers(0, 59), st.integers(1, 59))
def test_all_forms_of_a_duration_are_equal(days: int, hours: int, minutes: int, seconds: int) -> None:
    duration_s = days * 86_400 + hours * 3_600 + minutes * 60 + seconds
    whole_minutes, whole_hours = duration_s // 60, duration_s // 3_600
    assert parse_duration(f"{days}-{hours}:{minutes}:{seconds}") == duration_s
    assert parse_duration(f"{whole_hours}:{minutes:02d}:{seconds:02d}") == duration_s
    assert parse_duration(f"{whole_minutes}:{seconds}") == duration_s
    if hours or minutes or days:
        assert parse_duration(f"{days}-{hours}:{minutes}") == duration_s - seconds or whole_minutes == 0
    if hours or days:
        assert parse_duration(f"{days}-{hours}") == duration_s - seconds - 60 * minutes


@given(st.text(max_size=30))
def test_any_text_is_a_bounded_duration_or_is_rejected(text: str) -> None:
    try:
        duration_s = parse_duration(text)
    except ValueError as refused:
        assert str(refused)
    else:
        assert 0 < duration_s <= TIME_LIMIT_S_MAX


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [(0, "0:00"), (59, "0:59"), (61, "1:01"), (3_600, "1:00:00"), (36_000, "10:00:00"), (90_000, "1-01:00:00")],
)
def test_elapsed_time_has_the_squeue_format(duration_s: int, text: str) -> None:
    assert format_elapsed(duration_s) == text


@pytest.mark.parametrize(
    ("span_us", "text"),
    [
        (0, "0 ms"),
        (7_999, "7 ms"),
        (999_999, "999 ms"),
        (1_250_000, "1.25 s"),
        (59_999_999, "59.99 s"),
        (185_000_000, "3 min 05 s"),
    ]
    + [(7_440_000_000, "2 h 04 min")],
)
def test_spans_are_rounded_down_for_display(span_us: int, text: str) -> None:
    assert format_span(span_us) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("now", None),
        ("now+90", "2026-01-31T12:01:30.000000Z"),
        ("now+2hours", "2026-01-31T14:00:00.000000Z"),
        ("now+1minute", "2026-01-31T12:01:00.000000Z"),
        ("now+1week", "2026-02-07T12:00:00.000000Z"),
        ("today", "2026-01-31T12:00:00.000000Z"),
        ("tomorrow", "2026-02-01T12:00:00.000000Z"),
        ("midnight", "2026-02-01T00:00:00.000000Z"),
        ("noon", "2026-02-01T12:00:00.000000Z"),
        ("16:00", "2026-01-31T16:00:00.000000Z"),
        ("9:30", "2026-02-01T09:30:00.000000Z"),
        ("16:00:01", "2026-01-31T16:00:01.000000Z"),
        ("2026-03-01", "2026-03-01T00:00:00.000000Z"),
        ("2026-03-01T08:00", "2026-03-01T08:00:00.000000Z"),
        ("2026-03-01T08:00:00", "2026-03-01T08:00:00.000000Z"),
        ("2026-03-01T08:00:00Z", "2026-03-01T08:00:00.000000Z"),
        ("2026-03-01T08:00:00+01:00", "2026-03-01T07:00:00.000000Z"),
    ],
)
def test_every_form_of_a_begin_time_is_parsed(text: str, expected: str | None) -> None:
    assert parse_begin(text, NOW, UTC) == expected


def test_times_without_a_zone_are_local_even_across_summer_time() -> None:
    before_the_change = parse_instant("2026-03-28T20:00:00Z")
    assert parse_begin("tomorrow", before_the_change, BERLIN) == "2026-03-29T19:00:00.000000Z"
    assert parse_begin("2026-07-01T12:00", NOW, BERLIN) == "2026-07-01T10:00:00.000000Z"
    assert parse_begin("noon", NOW, BERLIN) == "2026-02-01T11:00:00.000000Z"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "soon",
        "now+",
        "now+2fortnights",
        "now-1hour",
        "25:00",
        "12:60",
        "2026-02-30",
        "2026-13-01",
        "01/31/26",
        "1969-01-01",
    ]
    + ["now+99999999weeks", "2026-03-01T08:00:00X", "99999-01-01", "2026-03-01Z"],
)
def test_an_invalid_begin_time_is_rejected_with_a_remedy(text: str) -> None:
    with pytest.raises(ValueError, match=r"; (write|use)"):
        parse_begin(text, NOW, UTC)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10:03", "2026-01-31T10:03:00.000000Z"),
        ("0:00:01", "2026-01-31T00:00:01.000000Z"),
        ("2026-01-30", "2026-01-30T00:00:00.000000Z"),
        ("2026-01-30T08:00", "2026-01-30T08:00:00.000000Z"),
        ("2026-01-30T08:00:00+01:00", "2026-01-30T07:00:00.000000Z"),
        ("2026-01-30T08:00:00.123456Z", "2026-01-30T08:00:00.123456Z"),
        ("2026-01-31T12:00:00Z", "2026-01-31T12:00:00.000000Z"),
    ],
)
def test_every_form_of_a_past_time_is_parsed(text: str, expected: str) -> None:
    assert parse_past(text, NOW, UTC) == expected


def test_a_past_time_of_day_is_local_today() -> None:
    assert parse_past("12:30", NOW, BERLIN) == "2026-01-31T11:30:00.000000Z"


@pytest.mark.parametrize(
    "text", ["", "soon", "now", "13:00", "25:00", "2026-02-01", "2026-02-30", "-5", "1e3", "99999-01-01"]
)
def test_an_invalid_past_time_is_rejected_with_a_remedy(text: str) -> None:
    with pytest.raises(ValueError, match=r"; write a time of today such as 16:00"):
        parse_past(text, NOW, UTC)
