"""Unmodified Slurm with Forebay as its burst buffer, by scripts/slurm, which also has longer exercises."""

import json
import subprocess

import pytest

from tests.benchmarks.users.slurm import missing
from tests.repo.tree import ROOT

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "Slurm is there")


QUICK_ROWS = "requests,users,two-clusters"
"""Exercises that take seconds; the others wait for files to expire, and run in campaigns."""


@pytest.mark.campaign(2)
@pytest.mark.parametrize("plugin", ["lua", "datawarp"])
def test_an_unmodified_slurm_uses_forebay_with_documented_errors(plugin: str) -> None:
    line = [str(ROOT / "scripts" / "slurm"), "exercise", "lifecycle", "refusals", "--plugin", plugin, "--rounds", "0"]
    done = subprocess.run(
        [*line, "--rows", QUICK_ROWS], capture_output=True, text=True, timeout=1_500, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["failed"], set(summary["rows"])) == (0, set(QUICK_ROWS.split(",")))
