"""Drills of a real cluster, as an operator types them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from forebay.cluster.schemas import operations as ops
from forebay.cluster.schemas.drills import EndDrillRequest
from tests.cluster.drills.helper.held import state_of
from tests.faults.local_cluster import USER, LocalCluster
from tests.ports import free_ports


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    made = LocalCluster(tmp_path / "c")
    made.found({"fast": "64MiB/1MiB,default"}, "1GiB")
    made.start_all()
    yield made
    made.stop_all()


class Operator:
    """Operator who runs commands and gets their exit codes."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster

    def types(self, *words: str, identity: str = "operator") -> subprocess.CompletedProcess[str]:
        command = self.cluster.command(*words, identity=identity)
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)

    def json(self, *words: str) -> dict[str, Any]:
        done = self.types(*words, "--json")
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def plan(self, scenario: str = "switchover", *more: str) -> dict[str, Any]:
        """Return a plan whose preconditions hold; states are compared about once a minute."""
        for _ in range(100):
            made = self.json("drill", "plan", scenario, *more)
            if all(one["holds"] or one["name"] in made["forced"] for one in made["preconditions"]):
                return made
        raise AssertionError(made)


@pytest.mark.campaign(4)
def test_a_switchover_is_planned_run_measured_and_unnoticed_by_jobs(
    cluster: LocalCluster,
) -> None:
    async def ready() -> None:
        async with cluster.client() as client:
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
    run = (
        "drill",
        "run",
        "switchover",
        "--target",
        made["target"],
        "--goal-ms",
        "30000",
        "--abort-after-s",
        "30",
        "--abort-if-slower",
        "0",
    )

    unconfirmed, stale = operator.types(*run), operator.types(*run, "--confirm", "00000000")
    assert (unconfirmed.returncode, stale.returncode) == (2, 1), (unconfirmed, stale)
    assert f"--confirm {made['id']}" in unconfirmed.stderr and "is outdated" in stale.stderr
    assert operator.json("drill", "list")["drills"] == [], "nothing was done"

    done = operator.types(*run, "--confirm", operator.plan()["id"], "--json")
    assert done.returncode == 0, done
    ended = json.loads(done.stdout)
    figures = ended["figures"]
    assert (ended["verdict"], figures["writes_lost"], figures["states_agree"]) == ("passed", 0, 1)
    assert figures["writes_acknowledged"] > 0 < figures["write_stop_us"]
    assert figures["user_write_stop_us"] > 0
    assert (figures["stages_again"], figures["runs_again"], figures["nodes_lost"]) == (0, 0, 0)
    assert operator.json("cluster", "members")["leader"] == made["target"]

    again = operator.types(*run, "--confirm", operator.json("drill", "plan", "switchover")["id"])
    assert again.returncode == 1 and f"{made['target']} is the leader" in again.stderr

    story = operator.types("audit", "history").stdout
    assert f"began drill 1: switchover of {made['target']}" in story and "drill 1 passed: " in story
    shown = operator.types("drill", "show", "1", identity=USER)
    assert shown.returncode == 0 and "Writes stopped" in shown.stdout
    assert operator.types("drill", "lock", "--reason", "x", identity=USER).returncode == 6
    page = cluster.work / "page.html"
    assert operator.types("drill", "show", "1", "--html", str(page)).returncode == 0
    drawn = page.read_text()
    assert f"{made['target']} led term" in drawn and f'<td class="n">{figures["write_stop_us"]}</td>' in drawn
    assert operator.types("drill", "show", "1", "--html", str(page / "x")).returncode == 2

    operator.types("drill", "lock", "--reason", "an audit")
    refused = operator.types("drill", "run", "switchover", "--confirm", made["id"])
    assert refused.returncode == 1 and "locked by operator: an audit" in refused.stderr
    assert operator.types("drill", "unlock", "operator").returncode == 0
    assert operator.types("drill", "abort", "1", "--reason", "late").returncode == 1
    assert operator.types("drill", "show", "9").returncode == 3

    (cluster.work / "gate").touch()
    for _ in range(200):
        job = operator.json("job", "show", "1")
        if job["state"] == "COMPLETED":
            break
    assert job["state"] == "COMPLETED", job


# ---- with a helper


FORCE = ("--force", "digests")
"""States are compared about once a minute of change, and these tests are shorter."""
HOLD = ("--hold-s", "4", *FORCE)
OUTDATED = "is outdated: the cluster or the options have changed"
"""Message of a run with an outdated plan, for example after a change of the leader; plan again."""

LONG = ("--hold-s", "60", *FORCE)
PATIENT = ("--goal-ms", "30000", "--abort-after-s", "30", "--abort-if-slower", "0")


class Up:
    """Cluster under `forebay cluster up` with a helper that may send signals."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        (port,) = free_ports(1)
        with cluster.file.open("a") as file:
            file.write(
                f'[[helper]]\nname = "h1"\naddress = "127.0.0.1:{port}"\n'
                f'targets = ["r1", "r2", "r3", "n1", "n2"]\n[drill]\nallow = ["process"]\n'
            )
        cluster.forebay("cert", "issue", "h1", "--role", "helper")
        self.log = cluster.directory / "up.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                cluster.command("cluster", "up"), stdout=log, stderr=log, start_new_session=True
            )

    def pid(self, name: str) -> int:
        """Return the process that was started last under a name."""
        found = re.findall(rf"^{name} +\| started[a-z, ]*, process (\d+)$", self.log.read_text(), re.MULTILINE)
        assert found, self.log.read_text()
        return int(found[-1])

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    made = LocalCluster(tmp_path / "c")
    made.found({"fast": "64MiB/1MiB,default"}, "1GiB")
    running = Up(made)
    yield running
    running.stop()


def drilled(operator: Operator, scenario: str) -> dict[str, Any]:
    while True:
        made = operator.plan(scenario, *HOLD)
        words = ("drill", "run", scenario, "--target", made["target"], *HOLD, *PATIENT)
        done = operator.types(*words, "--confirm", made["id"], "--json")
        if OUTDATED not in done.stderr:
            break
    assert done.returncode == 0, done
    ended: dict[str, Any] = json.loads(done.stdout)
    figures = ended["figures"]
    assert (ended["verdict"], figures["writes_lost"], figures["states_agree"]) == ("passed", 0, 1)
    assert (figures["runs_again"], figures["nodes_lost"]) == (0, 0) and figures["write_stop_us"] > 0
    return ended


def until(holds: Callable[[], bool]) -> None:
    while not holds():
        threading.Event().wait(0.02)


def begun(operator: Operator, up: Up) -> tuple[dict[str, Any], subprocess.Popen[str]]:
    """Start to stop the leader; return the plan and the running command."""
    while True:
        made = operator.plan("leader-hang", *LONG)
        words = ("drill", "run", "leader-hang", "--target", made["target"], *LONG, *PATIENT, "--confirm", made["id"])
        running = subprocess.Popen(up.cluster.command(*words), stderr=subprocess.PIPE, text=True)
        target = made["target"]
        until(lambda one=running, target=target: one.poll() is not None or state_of(up.pid(target)) == "T")
        if running.poll() is None:
            return made, running
        _, said = running.communicate()
        assert OUTDATED in said, said


@pytest.mark.campaign(4)
def test_leader_hang_and_leader_kill_drills_leave_no_trace(up: Up) -> None:
    async def ready() -> None:
        async with up.cluster.client() as client:
            await client.call(ops.LIST_MEMBERS)

    asyncio.run(ready())
    operator = Operator(up.cluster)
    refused = operator.types("drill", "plan", "clock-skew")
    assert refused.returncode == 1 and "clock-skew is not possible: the clock of a single process" in refused.stderr
    ended = drilled(operator, "leader-hang")
    assert state_of(up.pid(ended["target"])) in ("S", "R")

    before = up.pid(operator.json("cluster", "members")["leader"])
    ended = drilled(operator, "leader-kill")
    assert up.pid(ended["target"]) != before, "it was started again"

    # The coordinator is killed, and the fault ends with its lease.
    made, running = begun(operator, up)
    running.kill()
    running.communicate()
    until(lambda: state_of(up.pid(made["target"])) != "T")

    async def end() -> None:
        async with up.cluster.client() as client:
            (last, *_) = (await client.call(ops.LIST_DRILLS)).drills
            assert last.verdict == "under way", "nobody has said how it ended"
            request = EndDrillRequest(command_id=client.new_command_id(), verdict="aborted", sentence="it was killed")
            await client.call(ops.END_DRILL, request, drill=last.drill)

    asyncio.run(end())

    # The helper is killed, and the process that caused the fault undoes it.
    made, again = begun(operator, up)
    os.kill(up.pid("h1"), signal.SIGKILL)
    until(lambda: state_of(up.pid(made["target"])) != "T")
    _, said = again.communicate()
    assert again.returncode == 7, said
    # The helper may die before its answer that the fault has begun is read.
    assert (
        "aborted: the fault ended early" in said or "aborted: the helper failed: helper h1 does not answer" in said
    ), said
