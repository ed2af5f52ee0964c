"""Sessions, instances and configurations that burst_buffer/datawarp reads."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from forebay.cluster.schemas.external_jobs import ExternalJobView
from forebay.cluster.slurm import calls
from forebay.cluster.slurm import files as module
from forebay.cluster.slurm.bridge import Bridge
from forebay.cluster.slurm.files import LEAVING_S, LEFT_S, BufferSession, SlurmFiles, session_of
from forebay.replica.operations import ExternalJobPhase
from tests.cluster.harness import story, until
from tests.cluster.slurm.host import UID, Host
from tests.cluster.slurm.leader import GRAIN, put_programs

COUNTED = {
    "waiting", "set-up", "staging-in", "stage-in-failed", "staged-in", "running", "post-run", "staging-out",
    "stage-out-failed",
}  # fmt: skip
"""Phases from setup to the end of teardown, in which Slurm's plugin has a record of a job."""


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def external_job(job: str, phase: str, epoch: int = 1) -> ExternalJobView:
    return ExternalJobView(
        scheduler="slurm", job=job, epoch=epoch, phase=phase, user="alice", uid=1000, size=8 * GRAIN,
        submit_time="2026-11-20T10:00:00Z",
    )  # fmt: skip


def shown(run: Path, what: str) -> list[dict[str, Any]]:
    """Return the listed sessions, as slurmctld gets them."""
    command = [str(put_programs(run.parent, run)), "--function", f"show_{what}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    [(name, rows)] = json.loads(done.stdout).items()
    assert name == what
    found: list[dict[str, Any]] = rows
    return found


def tokens(run: Path) -> list[str]:
    return [row["token"] for row in shown(run, "sessions")]


def test_a_session_has_a_size_and_a_numeric_owner(tmp_path: Path) -> None:
    files = SlurmFiles(tmp_path / "run", "head1")
    files.update_listing(external_job("42", "staged-in"))
    files.update_listing(external_job("43", "running"))
    sessions = {row["token"]: row for row in shown(tmp_path / "run", "sessions")}
    assert (sessions["42"]["owner"], sessions["42"]["created"]) == (1000, 1763632800 + 365 * 86_400)
    instances = shown(tmp_path / "run", "instances")
    assert {row["links"]["session"]: row["capacity"]["bytes"] for row in instances} == {
        sessions[job]["id"]: 8 * GRAIN for job in ("42", "43")
    }
    configurations = shown(tmp_path / "run", "configurations")
    assert {row["links"]["instance"] for row in configurations} == {row["id"] for row in instances}


@pytest.mark.parametrize("before", [None, *ExternalJobPhase])
@pytest.mark.parametrize("phase", list(ExternalJobPhase))
def test_exactly_the_buffers_counted_by_slurm_are_listed(
    tmp_path: Path, before: ExternalJobPhase | None, phase: ExternalJobPhase
) -> None:
    files = SlurmFiles(tmp_path / "run", "head1")
    if before is not None:
        files.update_listing(external_job("42", before.value))
    files.update_listing(external_job("42", phase.value))
    assert os.listdir(tmp_path / "run" / "sessions") == (["42"] if phase.value in COUNTED else [])


def test_an_outdated_list_does_not_undo_a_change(tmp_path: Path) -> None:
    files = SlurmFiles(tmp_path / "run", "head1")
    ended, begun, gone = (BufferSession(token, 1, 1000, GRAIN, 0) for token in ("1", "2", "3"))
    files.list_all([ended, gone])
    files.ask()
    files.update_listing(external_job("1", "lingering"))
    files.update_listing(external_job("2", "set-up"))
    files.list_all([ended])
    assert sorted(os.listdir(tmp_path / "run" / "sessions")) == ["2"]
    files.ask()
    files.list_all([], unsure=["2"])
    assert sorted(os.listdir(tmp_path / "run" / "sessions")) == ["2"]
    files.ask()
    files.list_all([begun, gone], whole=False)
    assert sorted(os.listdir(tmp_path / "run" / "sessions")) == ["2", "3"]


def test_a_job_in_setup_is_listed_before_forebay_knows_it(tmp_path: Path) -> None:
    files, listed = SlurmFiles(tmp_path / "run", "head1"), tmp_path / "run" / "sessions"
    for _ in range(2):  # Slurm may repeat a call while the first one waits
        files.setup_begins(BufferSession("42", 42, 1000, GRAIN, 0))
    files.update_listing(external_job("42", "none", 0))
    files.ask()
    files.list_all([])
    files.setup_ends("42", failed=True)
    assert os.listdir(listed) == ["42"]
    files.setup_ends("42", failed=True)
    assert os.listdir(listed) == []


async def _listed_anew(bridge: Bridge, host: Host, jobs: list[str]) -> None:
    """Wait until the list for Slurm has these jobs."""
    for _ in range(100):
        await bridge._list()
        if tokens(host.run) == jobs:
            return
        await asyncio.sleep(0.02)
    assert tokens(host.run) == jobs


@story
async def test_a_job_is_listed_from_setup_to_the_end_of_teardown(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEFT_S", 0.0)
    async with host.bridge():
        host.leader.away = True
        setup = await host.start("setup", "42", UID, UID, "fast", str(8 * GRAIN), str(host.script))
        # Slurm already counts the job, and drops jobs that are not listed for a minute.
        await until(lambda: tokens(host.run) == ["42"])
        host.leader.away = False
        assert await host.end_of(setup) == (0, "")
        [row] = shown(host.run, "sessions")
        assert (row["token"], row["owner"]) == ("42", int(UID))
        assert shown(host.run, "instances")[0]["capacity"]["bytes"] == 8 * GRAIN
    assert tokens(host.run) == ["42"]
    async with host.bridge() as bridge:
        assert tokens(host.run) == ["42"]
        assert await host.call("job_teardown", "42", str(host.script), "true") == (0, "")
        await _listed_anew(bridge, host, [])


@story
async def test_a_failed_setup_is_not_listed(host: Host) -> None:
    async with host.bridge():
        host.script.write_text("#!/bin/sh\n#BB_LUA pool=fast capacity=8MiB\n#BB_LUA frob\n")
        assert (await host.set_up())[0] == -1
        assert tokens(host.run) == []


@story
async def test_a_starting_bridge_publishes_pools_and_sessions_together(host: Host) -> None:
    async with host.bridge():
        assert await host.set_up() == (0, "")
    for name in ("pools.json", "site.json", "sessions/42"):
        (host.run / name).unlink()  # as after a restart of the host
    async with host.bridge():
        await until(lambda: (host.run / "pools.json").exists())
        assert tokens(host.run) == ["42"]


def test_before_the_first_bridge_pools_and_sessions_are_errors(tmp_path: Path) -> None:
    # Slurm's plugin keeps its records if it cannot read pools, but not if it cannot read sessions.
    program = put_programs(tmp_path, tmp_path)
    for what in ("pools", "show_sessions", "show_instances", "show_configurations"):
        done = subprocess.run(
            [str(program), "--function", what],
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        assert done.returncode == 1 and not done.stdout.startswith("{"), what


def test_a_torn_down_session_is_listed_as_young_until_slurm_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_s = 1000.0
    monkeypatch.setattr(module, "uptime_s", lambda: at_s)
    files, listed = SlurmFiles(tmp_path / "run", "head1"), tmp_path / "run" / "sessions"

    def look(*external_jobs: ExternalJobView) -> list[str]:
        files.ask()
        files.list_all(map(session_of, external_jobs))
        return sorted(os.listdir(listed))

    files.update_listing(external_job("42", "staging-out"))
    files.teardown_begins("42", 2_000_000_000)
    files.update_listing(external_job("42", "over"))
    assert look() == ["42"]
    assert [row["created"] for row in shown(tmp_path / "run", "sessions")] == [2_000_000_000]
    at_s += LEAVING_S - 1
    assert look() == ["42"]
    files.teardown_read("42", done=True)
    # slurmscriptd has read the reply; slurmctld may get it only when another call ends.
    at_s += LEFT_S - 1
    assert look() == ["42"]
    at_s += 2
    assert look() == []
    # The reply was never read.
    files.update_listing(external_job("43", "staging-out"))
    files.teardown_begins("43", 2_000_000_000)
    at_s += LEAVING_S + 1
    assert look() == []
    # It failed.
    failed = external_job("44", "stage-out-failed")
    files.update_listing(failed)
    files.teardown_begins("44", 2_000_000_000)
    files.teardown_read("44", done=False)
    at_s += LEFT_S + 1
    assert look(failed) == ["44"]
    # The job ID is used again meanwhile.
    again = BufferSession("44", 44, 1000, GRAIN, 2_000_000_001)
    files.teardown_begins("44", 2_000_000_000)
    files.setup_begins(again)
    files.teardown_read("44", done=True)
    at_s += LEFT_S + 1
    assert look() == ["44"]


@story
async def test_a_teardown_with_a_killed_caller_stays_listed_for_a_repeat(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LEFT_S", 0.0)
    # No further call of the stage-in is expected, for which a teardown would wait.
    monkeypatch.setattr(calls, "_NEXT_S", {})
    program = str(put_programs(host.run.parent, host.run))
    words = ("--function", "teardown", "--token", "42", "--job", str(host.script))
    async with host.bridge() as bridge:
        assert await host.set_up() == (0, "")
        for is_slow in (False, True):
            host.leader.external_jobs["42"] |= {"phase": "staging-out"}
            await until(lambda: tokens(host.run) == ["42"])
            host.leader.hold = {"teardown"}
            asking = await asyncio.create_subprocess_exec(program, *words)
            await until(lambda: host.leader.asked[-1] == ("tear_down_external_job", "42"))
            if is_slow:  # it reads a FIFO by then
                await until(lambda: len(host.waiting()) == 1)
            asking.kill()
            await asking.wait()
            host.leader.end("42", "over")
            await asyncio.sleep(0.1)
            await bridge._list()
            assert tokens(host.run) == ["42"]
            host.leader.asked.append(("", ""))
        host.leader.hold = set()
        again = await asyncio.create_subprocess_exec(program, *words)
        assert await again.wait() == 0
        await _listed_anew(bridge, host, [])


def test_an_unauthorised_caller_gets_an_error_without_waiting() -> None:
    is_root = os.geteuid() == 0
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory) / "run"
        run.mkdir(mode=0o700 if is_root else 0)
        program = put_programs(Path(directory), run)
        Path(directory).chmod(0o755)
        done = subprocess.run(
            [str(program), "--function", "teardown", "--token", "42"],
            capture_output=True, text=True, check=False, timeout=60, user=65534 if is_root else None, cwd="/",
        )  # fmt: skip
        run.chmod(0o700)
    assert (done.returncode, done.stdout) == (1, f"only SlurmUser, the account of the bridge, may use {run}\n")
