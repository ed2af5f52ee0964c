"""Rows of docs/operate/tasks.md, typed on three machines during jobs; scripts/day2 types all rows."""

import pytest

from tests.e2e.scripts import run_script

ROWS = ("transfer", "revoke", "drain", "clock", "lost")
"""Rows that need no restart of a replica."""


@pytest.mark.campaign(4)
def test_each_day_two_task_works_and_loses_nothing() -> None:
    done = run_script("day2", "--seed", "7", *(word for row in ROWS for word in ("--row", row)))
    assert done.code == 0, done.said
    assert (sorted(done.summary["rows"]), done.summary["left"]) == (sorted(ROWS), [])
    assert done.summary["acknowledged"] > 0 < done.summary["jobs_completed"]
