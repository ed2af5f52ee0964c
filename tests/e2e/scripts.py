"""Scripts of fault injection, run as people do; a test is skipped with the machine's own reason where it cannot."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 1800
"""Seconds that one run may take at most: a bound against hanging, not a measure of speed."""

UNABLE = 77
"""Exit code of a run on a machine that lacks something, with the reason on standard error."""


class ScriptEnded(NamedTuple):
    """How a run ended: its last line, and all that it said."""

    code: int
    summary: dict[str, Any]
    said: str


def run_script(script: str, *options: str) -> ScriptEnded:
    """Run a script to its end; skips the test where the machine cannot run it."""
    line = [str(ROOT / "scripts" / script), *options]
    done = subprocess.run(line, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=ROOT)
    if done.returncode == UNABLE:
        pytest.skip(done.stderr.strip())
    said = done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines, said
    return ScriptEnded(done.returncode, json.loads(lines[-1]), said)


def remove_kept(script: str, said: str) -> None:
    """Remove the directory that a failed run keeps and names: here it was meant to fail."""
    for line in said.splitlines():
        if line.startswith(f"{script}: again"):
            path = Path(line.rpartition(": ")[2])
            assert path.name.startswith(f"forebay-{script}-")
            shutil.rmtree(path)
