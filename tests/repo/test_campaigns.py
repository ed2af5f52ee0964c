"""Campaigns: tests that run once in several days. Within a cycle each of them runs exactly once."""

import os
import subprocess
import sys

import pytest

from tests.campaigns import is_due_on
from tests.repo.tree import ROOT

MODULE = "tests/e2e/test_transfers.py"
"""Its tests share one attack, and run together every fourth day."""

DUE = next(day for day in range(738_000, 738_004) if is_due_on(day, 4, MODULE, 0))


@pytest.mark.parametrize("days", range(2, 7))
@pytest.mark.parametrize("position", range(3))
def test_every_test_runs_exactly_once_in_a_cycle(days: int, position: int) -> None:
    for number in range(50):
        due = [is_due_on(day, days, f"tests/test_{number}.py", position) for day in range(738_000, 738_000 + days)]
        assert due.count(True) == 1


@pytest.mark.parametrize(
    ("day", "arguments", "runs"),
    [
        (DUE, (MODULE,), True),
        (DUE + 1, (MODULE,), False),
        (DUE + 1, ("--every", MODULE), True),
        (DUE + 1, (f"{MODULE}::test_all_transfer_attacks_are_tested",), True),
    ],
)
def test_today_s_share_is_collected(day: int, arguments: tuple[str, ...], runs: bool) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "--co", *arguments]
    environment = {**os.environ, "FOREBAY_TEST_DAY": str(day)}
    environment.pop("PYTEST_XDIST_WORKER", None)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (f"{MODULE}::test_all_transfer_attacks_are_tested" in done.stdout) == runs
