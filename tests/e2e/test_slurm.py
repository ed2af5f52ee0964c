"""An unmodified Slurm with Forebay as its burst buffer, through the script that people run; longer by hand."""

import json
import subprocess

import pytest

from tests.benchmarks.users.slurm import missing
from tests.repo.tree import ROOT

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "Slurm is there")


QUICK_ROWS = "requests,users,two-clusters"
"""Those that take seconds; the others wait for files to be old, and are run by hand."""


@pytest.mark.campaign(2)
@pytest.mark.parametrize("plugin", ["lua", "datawarp"])
def test_an_unmodified_slurm_has_forebay_as_its_buffer_and_reports_errors_as_documented(plugin: str) -> None:
    line = [str(ROOT / "scripts" / "slurm"), "exercise", "lifecycle", "refusals", "--plugin", plugin, "--rounds", "0"]
    done = subprocess.run(
        [*line, "--rows", QUICK_ROWS], capture_output=True, text=True, timeout=1_500, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["failed"], set(summary["rows"])) == (0, set(QUICK_ROWS.split(",")))
