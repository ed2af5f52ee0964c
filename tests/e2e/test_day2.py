"""Rows of "Day 2: what to type", typed at three machines with jobs under way; scripts/day2 by itself types all."""

import pytest

from tests.e2e.scripts import run_script

ROWS = ("transfer", "revoke", "drain", "clock", "lost")
"""Those that need least: no replica is started again."""


@pytest.mark.campaign(4)
def test_what_is_typed_on_day_two_does_what_its_row_says_and_loses_nothing() -> None:
    done = run_script("day2", "--seed", "7", *(word for row in ROWS for word in ("--row", row)))
    assert done.code == 0, done.said
    assert (sorted(done.summary["rows"]), done.summary["left"]) == (sorted(ROWS), [])
    assert done.summary["acknowledged"] > 0 < done.summary["jobs_completed"]
