"""The check on a real GlusterFS with one brick, mounted with FUSE on loopback (`tests/faults/gluster`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

TREE: Final = Path(__file__).parents[3]
CANNOT: Final = 77
"""Exit code of tests/faults/gluster where it cannot run."""

GLUSTER_S: Final = 900.0
"""Seconds for the start of the servers and the check, on a busy machine."""

CHECK: Final = """
import os, sys
from forebay.cluster.agent.filesystem_check import probes, runner
from forebay.cluster.cli import main
probes.PROBE_S, runner.CHECK_S_MAX = 120.0, 600.0
os.mkdir(os.path.join(os.environ["MOUNTED"], "bb"))
sys.argv[1:] = ["pool", "filesystem", "check", "--path", os.path.join(os.environ["MOUNTED"], "bb"), "--json"]
sys.exit(main())
"""


@pytest.mark.campaign(7)
def test_all_that_movers_need_works_on_glusterfs() -> None:
    if os.geteuid():
        pytest.skip("tests/faults/gluster needs root")
    done = subprocess.run(
        ["tests/faults/gluster", sys.executable, "-c", CHECK],
        cwd=TREE,
        capture_output=True,
        text=True,
        timeout=GLUSTER_S,
    )
    if done.returncode == CANNOT:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert {one["name"] for one in report["checks"] if one["status"] != "ok"} == {"quota"}
