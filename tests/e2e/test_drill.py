"""The whole cluster as processes, with one of them killed at a random moment, through the script that people run."""

import json
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROUNDS = 4
"""Kills, count: minutes of CI buy more with scripts/drill run by hand; this many show that the whole path works."""


def test_killing_any_process_at_any_moment_loses_nothing_and_runs_nothing_twice() -> None:
    line = [str(ROOT / "scripts" / "drill"), "--rounds", str(ROUNDS)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["rounds"], summary["failed"]) == (ROUNDS, 0)
    assert summary["acknowledged"] >= ROUNDS
