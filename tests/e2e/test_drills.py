"""A switchover drilled in a real cluster, with a job under way, as an operator types it."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.schemas import operations as ops
from tests.faults.local_cluster import USER, LocalCluster


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    made = LocalCluster(tmp_path / "c")
    made.found({"fast": "64MiB/1MiB,default"}, "1GiB")
    made.start_all()
    yield made
    made.stop_all()


class Operator:
    """Who types commands, and has their exit codes."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster

    def types(self, *words: str, identity: str = "operator") -> subprocess.CompletedProcess[str]:
        command = self.cluster.command(*words, identity=identity)
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)

    def json(self, *words: str) -> dict[str, Any]:
        done = self.types(*words, "--json")
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def plan(self) -> dict[str, Any]:
        """Return a plan that nothing refuses; states are compared about once a minute of change."""
        for _ in range(100):
            made = self.json("drill", "plan", "switchover")
            if all(one["holds"] for one in made["preconditions"]):
                return made
        raise AssertionError(made)


def test_a_switchover_is_planned_confirmed_measured_and_told_and_no_job_notices_it(
    cluster: LocalCluster,
) -> None:
    async def ready() -> None:
        async with cluster.client(deadline_s=60) as client:
            await client.call(ops.LIST_MEMBERS)

    asyncio.run(ready())
    operator = Operator(cluster)
    script = cluster.work / "job"
    script.write_text("#!/bin/sh\nuntil [ -e gate ]; do sleep 0.1; done\necho $SLURM_RESTART_COUNT > ran\n")
    cluster.forebay("submit", "--chdir", str(cluster.work), str(script))
    for _ in range(200):
        if operator.json("job", "show", "1")["state"] == "RUNNING":
            break
    made = operator.plan()
    run = ("drill", "run", "switchover", "--target", made["target"], "--goal-ms", "30000", "--abort-after-s", "30")

    unconfirmed, stale = operator.types(*run), operator.types(*run, "--confirm", "00000000")
    assert (unconfirmed.returncode, stale.returncode) == (2, 1), (unconfirmed, stale)
    assert f"--confirm {made['id']}" in unconfirmed.stderr and "is not what would be done now" in stale.stderr
    assert operator.json("drill", "list")["drills"] == [], "nothing was done"

    done = operator.types(*run, "--confirm", operator.plan()["id"], "--json")
    assert done.returncode == 0, done
    ended = json.loads(done.stdout)
    figures = ended["figures"]
    assert (ended["verdict"], figures["writes_lost"], figures["states_agree"]) == ("passed", 0, 1)
    assert figures["writes_acknowledged"] > 0 < figures["write_stop_us"]
    assert (figures["stages_again"], figures["runs_again"], figures["nodes_lost"]) == (0, 0, 0)
    assert operator.json("member", "list")["leader"] == made["target"]

    again = operator.types(*run, "--confirm", operator.json("drill", "plan", "switchover")["id"])
    assert again.returncode == 1 and f"{made['target']} leads already" in again.stderr

    story = operator.types("history").stdout
    assert f"began drill 1: switchover of {made['target']}" in story and "drill 1 passed: " in story
    shown = operator.types("drill", "show", "1", identity=USER)
    assert shown.returncode == 0 and "Write stop" in shown.stdout
    assert operator.types("drill", "lock", "--reason", "x", identity=USER).returncode == 6

    operator.types("drill", "lock", "--reason", "an audit")
    refused = operator.types("drill", "run", "switchover", "--confirm", made["id"])
    assert refused.returncode == 1 and "operator wants none: an audit" in refused.stderr
    assert operator.types("drill", "unlock", "operator").returncode == 0
    assert operator.types("drill", "abort", "1", "--reason", "late").returncode == 1
    assert operator.types("drill", "show", "9").returncode == 3

    (cluster.work / "gate").touch()
    for _ in range(200):
        job = operator.json("job", "show", "1")
        if job["state"] == "COMPLETED":
            break
    assert job["state"] == "COMPLETED", job
