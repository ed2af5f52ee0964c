"""Fault-injection scripts, run as users run them.

A test is skipped with the script's reason if the machine cannot run it.
"""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 1800
"""Time limit of one run, seconds: it detects a hang."""

UNABLE = 77
"""Exit code of a run on a machine that lacks something, with the reason on standard error."""


class ScriptEnded(NamedTuple):
    """End of a run: its last line and all output."""

    code: int
    summary: dict[str, Any]
    said: str


def run_script(script: str, *options: str) -> ScriptEnded:
    """Run a script to its end; skip the test if the machine cannot run it."""
    line = [str(ROOT / "scripts" / script), *options]
    done = subprocess.run(line, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=ROOT)
    if done.returncode == UNABLE:
        pytest.skip(done.stderr.strip())
    said = done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines, said
    return ScriptEnded(done.returncode, json.loads(lines[-1]), said)


def remove_kept(script: str, said: str) -> None:
    """Remove the directory that a failed run keeps; the failure was intended."""
    for line in said.splitlines():
        if line.startswith(f"{script}: again"):
            path = Path(line.rpartition(": ")[2])
            assert path.name.startswith(f"forebay-{script}-")
            shutil.rmtree(path)
