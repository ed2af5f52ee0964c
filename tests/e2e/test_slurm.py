"""An unmodified Slurm with Forebay as its burst buffer, through the script that people run; longer by hand."""

import json
import subprocess

import pytest

from tests.benchmarks.users.slurm import missing
from tests.repo.tree import ROOT

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "Slurm is there")


QUICK_ROWS = "requests,users,two-clusters"
"""Those that take seconds; the others wait for files to be old, and are run by hand."""


@pytest.mark.parametrize("plugin", ["lua", "datawarp"])
def test_an_unmodified_slurm_has_forebay_as_its_buffer(plugin: str) -> None:
    line = [str(ROOT / "scripts" / "slurm"), "exercise", "lifecycle", "--plugin", plugin, "--rounds", "0"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=900, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["failed"] == 0


@pytest.mark.parametrize("plugin", ["lua", "datawarp"])
def test_what_is_refused_is_said_as_the_table_of_errors_says(plugin: str) -> None:
    line = [str(ROOT / "scripts" / "slurm"), "exercise", "refusals", "--plugin", plugin, "--rows", QUICK_ROWS]
    done = subprocess.run(line, capture_output=True, text=True, timeout=600, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(json.loads(done.stdout.splitlines()[-1])["rows"]) == set(QUICK_ROWS.split(","))
