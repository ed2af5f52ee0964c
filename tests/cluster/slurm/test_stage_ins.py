"""Jobs cancelled during stage-in: no call fails, and the teardown is answered last."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from forebay.cluster.slurm import calls, stage_ins
from tests.cluster.harness import story, until
from tests.cluster.slurm.host import Host
from tests.cluster.slurm.releases import RELEASES
from tests.fuzzing.external_jobs import interpreters

pytestmark = pytest.mark.skipif(not interpreters(), reason="no Lua is installed: scripts/install-backends --slurm")


@pytest.fixture(autouse=True)
def settles_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have Slurm mark buffers as staged in within a moment."""
    monkeypatch.setattr(stage_ins, "SETTLE_S", 0.5)


@pytest.fixture(params=["24.05", "26.05"])
def polled(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    """Host with a polling Slurm, whose bridge delays queries only briefly."""
    monkeypatch.setattr(calls, "HOLD_S", 0.1)
    host = Host(tmp_path, RELEASES[request.param])
    host.leader.hold.add("staging-in")
    return host


class Ending:
    """Concurrent calls of Slurm, in the order of their replies."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self.order: list[str] = []

    async def call(self, function: str) -> tuple[int, str]:
        found = await self._host.perform(function)
        self.order.append(function)
        return found


async def torn_down(host: Host) -> None:
    """Wait until the leader has heard of the teardown."""
    await until(lambda: ("tear_down_external_job", "42") in host.leader.asked)


@story
async def test_a_stage_in_query_after_a_cancel_succeeds_before_the_teardown_reply(polled: Host) -> None:
    async with polled.bridge():
        for function, said in (("setup", ""), ("data_in", ""), ("test_data_in", "BUSY")):
            assert await polled.perform(function) == (0, said)
        ending = Ending(polled)
        teardown = asyncio.create_task(ending.call("job_teardown"))
        await torn_down(polled)
        assert await ending.call("test_data_in") == (0, "")
        assert await teardown == (0, "")
        assert ending.order == ["test_data_in", "job_teardown"]
        assert polled.leader.external_jobs["42"]["phase"] == "lingering"


@pytest.mark.parametrize("release", ["22.05", "23.11", "24.05"])
@story
async def test_a_cancel_between_setup_and_stage_in_is_no_failure(release: str, tmp_path: Path) -> None:
    host = Host(tmp_path, RELEASES[release])
    async with host.bridge():
        assert await host.perform("setup") == (0, "")
        ending = Ending(host)
        teardown = asyncio.create_task(ending.call("job_teardown"))
        await torn_down(host)
        rest = ("data_in", "test_data_in") if host.release.polls else ("data_in",)
        for function in rest:
            assert await ending.call(function) == (0, "")
        assert await teardown == (0, "")
        assert ending.order == [*rest, "job_teardown"]
        assert host.leader.external_jobs["42"]["phase"] == "lingering"


@pytest.mark.parametrize("killed", [True, False])
@story
async def test_a_stage_in_query_during_a_cancel_is_killed_or_succeeds(
    killed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "HOLD_S", 60)
    host = Host(tmp_path, RELEASES["24.11"])
    host.leader.hold.add("staging-in")
    async with host.bridge():
        assert await host.perform("setup") == (0, "")
        assert await host.perform("data_in") == (0, "")
        question = await host.begin("test_data_in")
        await until(lambda: len(host.waiting()) == 1)
        if killed:
            os.killpg(question.pid, signal.SIGKILL)
        ending = Ending(host)
        teardown = asyncio.create_task(ending.call("job_teardown"))
        assert killed or await host.end_of(question) == (0, "")
        assert killed or not ending.order
        assert await teardown == (0, "")
        await question.wait()


@pytest.mark.parametrize("killed", [True, False])
@pytest.mark.parametrize("release", ["22.05", "23.11"])
@story
async def test_a_waiting_stage_in_during_a_cancel_is_killed_or_succeeds(
    release: str, killed: bool, tmp_path: Path
) -> None:
    host = Host(tmp_path, RELEASES[release])
    host.leader.hold.add("staging-in")
    async with host.bridge():
        assert await host.perform("setup") == (0, "")
        stage_in = await host.begin("data_in")
        await until(lambda: len(host.waiting()) == 1)
        if killed:
            os.killpg(stage_in.pid, signal.SIGKILL)
        ending = Ending(host)
        teardown = asyncio.create_task(ending.call("job_teardown"))
        assert killed or await host.end_of(stage_in) == (0, "")
        assert killed or not ending.order
        assert await teardown == (0, "")
        await stage_in.wait()
        assert host.leader.external_jobs["42"]["phase"] == "lingering"


@story
async def test_a_stage_in_query_answered_after_the_teardown_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "HOLD_S", 60)
    host = Host(tmp_path, RELEASES["24.11"])
    host.leader.hold.add("staging-in")
    async with host.bridge():
        assert await host.perform("setup") == (0, "")
        assert await host.perform("data_in") == (0, "")
        host.leader.late_s = 2 * stage_ins.READ_S
        question = await host.begin("test_data_in")
        await until(lambda: len(host.waiting()) == 1)
        ending = Ending(host)
        teardown = asyncio.create_task(ending.call("job_teardown"))
        assert await host.end_of(question) == (0, "")
        assert not ending.order
        assert await teardown == (0, "")


@story
async def test_a_teardown_waits_for_unread_replies_and_the_next_call() -> None:
    now_s = 100.0
    found = stage_ins.StageIns(lambda: now_s)
    with found.running_call("42"):
        pass
    over = asyncio.Event()

    async def tear_down() -> None:
        async with found.leaving("42"):
            pass
        over.set()

    teardown = asyncio.create_task(tear_down())
    await asyncio.sleep(0)
    found.note_reply("42", stage_ins.NEXT_S)
    await asyncio.sleep(0.01)
    assert not over.is_set() and found.is_leaving("42")
    with found.running_call("42"):
        await asyncio.sleep(0.01)
        assert not over.is_set()
    now_s += 2 * stage_ins.READ_S  # the caller was killed
    await teardown


@story
async def test_an_abandoned_stage_in_delays_its_teardown_only_for_a_time(
    polled: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "_NEXT_S", {("test_data_in", "busy"): 0.5})
    async with polled.bridge():
        for function, said in (("setup", ""), ("data_in", ""), ("test_data_in", "BUSY")):
            assert await polled.perform(function) == (0, said)
        assert await polled.perform("job_teardown") == (0, "")
        # The buffer can be set up again without traces of the cancel.
        polled.leader.failing["staging-in"] = "/in/a: no such file"
        polled.leader.hold.clear()
        assert await polled.perform("setup") == (0, "")
        assert await polled.perform("data_in") == (-1, "/in/a: no such file")


@story
async def test_teardowns_of_staged_jobs_do_not_wait(polled: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_ins, "SETTLE_S", 3600)
    monkeypatch.setattr(stage_ins, "READ_S", 3600)
    polled.leader.hold.clear()
    async with polled.bridge():
        for function in ("setup", "data_in", "test_data_in", "job_teardown"):
            assert await polled.perform(function) == (0, ""), function
