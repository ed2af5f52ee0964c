"""Runs the exercises of scripts/ as people do, and skips with the machine's own reason where it cannot."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 300
"""Seconds that one exercise may take at most: a bound against hanging, not a measure of speed."""

UNABLE = 77
"""Exit code of an exercise on a machine that lacks something, with the reason on standard error."""


class Exercised(NamedTuple):
    """How an exercise ended: its last line, and all that it said."""

    code: int
    summary: dict[str, Any]
    said: str


def exercise(script: str, *options: str) -> Exercised:
    """Run a script to its end; skips the test where the machine cannot run it."""
    line = [str(ROOT / "scripts" / script), *options]
    done = subprocess.run(line, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=ROOT)
    if done.returncode == UNABLE:
        pytest.skip(done.stderr.strip())
    said = done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines, said
    return Exercised(done.returncode, json.loads(lines[-1]), said)


def remove_kept(script: str, said: str) -> None:
    """Remove the directory that a failed exercise keeps and names: here it was meant to fail."""
    for line in said.splitlines():
        if line.startswith(f"{script}: again"):
            path = Path(line.rpartition(": ")[2])
            assert path.name.startswith(f"forebay-{script}-")
            shutil.rmtree(path)
