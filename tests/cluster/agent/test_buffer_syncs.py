"""What the supervisor of a script does for post-run, which needs a process where that was not done, or not in time."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forebay.cluster.agent.files import filesystems
from forebay.cluster.agent.files.filesystems import sync_written
from forebay.cluster.agent.operation import WorkerOperation
from forebay.cluster.agent.processes import ENDED, SYNCED
from forebay.cluster.agent.runtime import buffer_syncs
from forebay.cluster.agent.runtime.buffer_syncs import BufferSync, BufferSyncs
from forebay.cluster.agent.scripts import ScriptOrder, remove_record, supervisor
from forebay.replica.messages.commands import OperationDone, ScriptEnded
from forebay.replica.model.job_states import JobState
from forebay.replica.model.orders import OrderFilesystem
from tests.cluster.agent.double import script_of
from tests.cluster.agent.test_operations import Node, node

__all__ = ["node"]

WORKER, SUPERVISOR = "forebay.cluster.agent.worker.worker", "forebay.cluster.agent.scripts.supervisor"
IN_TIME_S = 10.0


def told(node: Node, story: Callable[[], Any]) -> Any:
    async def whole() -> Any:
        try:
            return await story()
        finally:
            while node.home.buffer_syncs._following:
                await asyncio.sleep(0.005)
            await node.home.buffer_syncs.let_go()

    return asyncio.run(whole())


async def operate(node: Node, stage: str) -> object:
    return await WorkerOperation(node.home, node.order(stage), node.settings).run()


def test_post_run_has_no_process_where_the_supervisor_did_what_there_is_to_do_and_only_once(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = node.spawned(monkeypatch)

    async def story() -> None:
        assert await operate(node, "stage_in") == OperationDone()
        for _ in range(2):
            assert await node.step(script_of("echo x > $FOREBAY_JOB_DIR/out")).run() == ScriptEnded(
                JobState.COMPLETED, 0, 0
            )
            assert await operate(node, "post_run") == OperationDone()
            assert ran == [WORKER, SUPERVISOR], "the second post-run of one script has a worker"
            assert await operate(node, "post_run") == OperationDone()
            assert ran.pop() == WORKER
            assert ran.pop() == SUPERVISOR
            assert not node.home.buffer_syncs._by_job
            remove_record(node.home.steps, 7)

    monkeypatch.setattr(buffer_syncs, "SYNC_WAIT_S", IN_TIME_S)
    told(node, story)


def test_post_run_has_a_worker_where_the_supervisor_was_killed_or_its_sync_failed_or_is_late(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = node.spawned(monkeypatch)
    monkeypatch.setattr(buffer_syncs, "SYNC_WAIT_S", 0.05)

    async def story() -> None:
        await operate(node, "stage_in")
        step = node.step(script_of("echo begun > begun", "sleep 600"))
        running = asyncio.create_task(step.run())
        while not (node.work / "begun").exists():
            await asyncio.sleep(0.01)
        assert step._child is not None
        os.kill(step._child.pid, signal.SIGKILL)
        ended = await running
        assert isinstance(ended, ScriptEnded) and ended.result is JobState.NODE_FAIL
        for said in (b"", ENDED, ENDED + b"?"):
            del ran[:]
            pipe, child = saying(said)
            node.home.buffer_syncs.take(7, BufferSync(pipe, child))
            assert await operate(node, "post_run") == OperationDone()
            assert ran == [WORKER], said
            child.wait()

    told(node, story)


class Child:
    """A process that ends when it is told to."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        self.pid = self._process.pid
        self.poll, self.wait, self.kill = self._process.poll, self._process.wait, self._process.kill

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()


def saying(said: bytes, *, goes_on: bool = False) -> tuple[int, Child]:
    """Return the pipe of a supervisor that said so much and ended, or `goes_on`, and itself."""
    reads, says = os.pipe2(os.O_CLOEXEC)
    os.write(says, said)
    child = Child()
    if not goes_on:
        os.close(says)
        child.end()
    return reads, child


def test_a_buffer_counts_as_synced_if_and_only_if_its_supervisor_has_said_so_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(buffer_syncs, "SYNC_WAIT_S", 0.02)

    async def story(said: tuple[bytes, ...], goes_on: bool, forgotten: bool, is_ending: bool) -> None:
        syncs, ending = BufferSyncs(), asyncio.Event()
        pipe, child = saying(b"".join(said), goes_on=goes_on)
        sync = BufferSync(pipe, child)
        assert sync.has_ended() == (ENDED in said)
        syncs.take(7, sync)
        if forgotten:
            syncs.forget(7)
        if is_ending:
            ending.set()
        assert await syncs.is_done(7, ending) == (SYNCED in said and not forgotten)
        assert not await syncs.is_done(7, ending), "it is asked once"
        if not goes_on:
            while syncs._following:
                await asyncio.sleep(0.005)
            assert child.poll() == 0, "it is waited for"
        await syncs.let_go()
        child.kill()
        child.wait()

    for said in ((), (ENDED,), (ENDED, SYNCED), (SYNCED,)):
        for goes_on, forgotten, is_ending in itertools.product((False, True), repeat=3):
            asyncio.run(story(said, goes_on, forgotten, is_ending))


def test_what_a_supervisor_says_late_is_heard_within_the_time_that_is_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffer_syncs, "SYNC_WAIT_S", IN_TIME_S)

    async def story() -> None:
        reads, says = os.pipe2(os.O_CLOEXEC)
        child, syncs = Child(), BufferSyncs()
        syncs.take(7, BufferSync(reads, child))
        asked = asyncio.create_task(syncs.is_done(7, asyncio.Event()))
        await asyncio.sleep(0.02)
        assert not asked.done()
        os.write(says, SYNCED)
        assert await asked
        os.close(says)
        child.end()
        await syncs.let_go()
        child.wait()

    asyncio.run(story())


def test_a_script_has_no_descriptor_on_which_it_could_say_that_it_was_synced(node: Node) -> None:
    async def story() -> None:
        await operate(node, "stage_in")
        ended = await node.step(script_of("ls -l /proc/self/fd > fds")).run()
        assert ended == ScriptEnded(JobState.COMPLETED, 0, 0)

    told(node, story)
    assert "/dev/null" in (text := (node.work / "fds").read_text()) and "pipe:" not in text


@pytest.mark.parametrize("fails", [None, OSError(5, "x"), FileNotFoundError(2, "x")])
def test_a_supervisor_says_that_it_synced_after_it_did_and_only_then(
    fails: OSError | None, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, says = os.pipe2(os.O_CLOEXEC)
    heard: list[bytes] = []

    def sync(home: str, order: object, *, switch: bool) -> None:
        heard.append(os.read(reads, 16))
        if fails is not None:
            raise fails

    monkeypatch.setattr(supervisor, "sync_written", sync)
    wanted = ScriptOrder(
        order=node.order("run"), node="n1", home=str(node.home.path), storage_id="s", accounts="own", kill_wait_s=1.0
    )
    supervisor._sync(wanted, says)
    os.close(says)
    assert (heard, os.read(reads, 16)) == ([ENDED], b"" if fails else SYNCED)
    os.close(reads)


def test_what_a_script_may_have_written_to_is_synced_once_a_file_system(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(
        filesystems, "sync_file_system", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    )
    home = Path(node.home.path)
    order = node.order("post_run", uses=("lake", "sea", "gone"))
    sync_written(str(home), order, switch=False)
    assert synced == [], "what is gone needs none"
    (home / "persistent" / "lake").mkdir()
    sync_written(str(home), order, switch=False)
    assert synced == [str(home / "persistent" / "lake")]
    (home / "persistent" / "sea").mkdir()
    (home / "buffers" / "7").mkdir()
    del synced[:]
    sync_written(str(home), order, switch=False)
    assert synced == [str(home / "buffers" / "7")], "they are on one file system"
    placed = (("lake", OrderFilesystem("p", "/proc/nowhere", "", "c/lake")),)
    sync_written(str(home), node.order("post_run", uses=("lake",), persistent=placed), switch=False)
