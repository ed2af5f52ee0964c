"""SystemComment: a line for each thing that went wrong, with its time, and never more than Slurm's limit."""

from __future__ import annotations

import datetime

from hypothesis import given
from hypothesis import strategies as st

from forebay.replica.model.jobs import COMMENT_CHARACTERS_MAX, append_comment, civil_date, format_comment_time
from forebay.replica.values.units import Instant

AT = Instant(1_795_212_897_000_000)  # 2026-11-20T22:14:57Z


def test_a_line_has_the_time_as_slurm_writes_it() -> None:
    assert append_comment("", "burst_buffer/lua: data_in: lustre source missing", AT) == (
        "11/20/26 22:14:57 burst_buffer/lua: data_in: lustre source missing"
    )


def test_lines_follow_each_other_and_the_same_thing_at_the_same_second_is_said_once() -> None:
    once = append_comment("", "setup: no", AT)
    assert append_comment(once, "setup: no", AT) == once
    later = append_comment(once, "setup: no", Instant(AT + 10_000_000))
    assert later.split("\n") == ["11/20/26 22:14:57 setup: no", "11/20/26 22:15:07 setup: no"]
    assert append_comment(later, "", AT) == later


@given(st.integers(-700_000, 2_900_000))
def test_the_calendar_is_that_of_everybody(days: int) -> None:
    wanted = datetime.date(1970, 1, 1) + datetime.timedelta(days=days)
    assert civil_date(days) == (wanted.year, wanted.month, wanted.day)


@given(st.integers(0, 4_000_000_000))
def test_the_stamp_is_utc(second: int) -> None:
    wanted = datetime.datetime.fromtimestamp(second, tz=datetime.UTC)
    assert format_comment_time(Instant(second * 1_000_000)) == f"{wanted:%m/%d/%y %H:%M:%S}"


@given(st.lists(st.text(max_size=COMMENT_CHARACTERS_MAX * 2), max_size=20))
def test_a_comment_is_bounded_and_ends_with_what_happened_last(texts: list[str]) -> None:
    comment = ""
    for number, text in enumerate(texts):
        at = Instant(AT + number * 1_000_000)
        comment = append_comment(comment, text, at)
        assert len(comment) <= COMMENT_CHARACTERS_MAX
        assert not text or comment.endswith(f"{format_comment_time(at)} {text}"[:COMMENT_CHARACTERS_MAX][-50:])
