"""Workers that are late, stubborn, stopped or hung: each is ended within a second, or known to hang; nobody waits."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from forebay.cluster.agent.limits import KILL_WAIT_S, POLLS_PER_STALL, WORKER_GRACE_S
from forebay.cluster.agent.runtime import worker_watchdog
from forebay.cluster.agent.runtime.worker_watchdog import (
    HungWorkers,
    WorkerEnd,
    WorkerLimits,
    kernel_location,
    supervise,
)
from forebay.cluster.system.processes import start_time
from tests.cluster.agent.double import DEADLINE_S

STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
)
OBEDIENT = "import sys, time; print('ready', flush=True); time.sleep(600)"
STOPPED = "import os, signal; print('ready', flush=True); os.kill(os.getpid(), signal.SIGSTOP)"
WITH_A_HELPER = (
    "import os, signal, time\n"
    "helper = os.fork()\n"
    "if helper: print(helper, flush=True)\n"
    "if not helper: signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "time.sleep(600)"
)


def start(program: str) -> tuple[subprocess.Popen[bytes], bytes]:
    """Start a worker in a group of its own, and return it with its first line."""
    worker = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, process_group=0)
    assert worker.stdout is not None
    line = worker.stdout.readline()
    return worker, line


def see(
    worker: subprocess.Popen[bytes], bounds: WorkerLimits, *, end: bool = False, signs: Callable[[], object] = lambda: 0
) -> WorkerEnd:
    async def story() -> WorkerEnd:
        ending = asyncio.Event()
        if end:
            ending.set()
        return await supervise(worker, 7, ending, bounds, HungWorkers(), signs=signs, stop=lambda: None)

    return asyncio.run(asyncio.wait_for(story(), DEADLINE_S))


def test_what_is_cancelled_is_over_within_a_second_by_the_bounds_themselves() -> None:
    assert WORKER_GRACE_S + KILL_WAIT_S < 1


@pytest.mark.parametrize("program", [OBEDIENT, STUBBORN, STOPPED])
def test_whatever_a_worker_does_it_is_ended_when_nobody_wants_it(program: str) -> None:
    worker, _ = start(program)
    assert see(worker, WorkerLimits(), end=True) == WorkerEnd()
    assert worker.returncode is not None and worker.returncode < 0


def test_a_worker_that_takes_too_long_is_ended_and_it_is_said() -> None:
    worker, _ = start(OBEDIENT)
    assert see(worker, WorkerLimits(limit_s=0.2)) == WorkerEnd("took longer than 0.2 s")
    assert worker.returncode is not None


def test_a_worker_that_stands_still_is_ended_and_one_that_advances_is_not() -> None:
    worker, _ = start(OBEDIENT)
    looks = iter(range(1000))
    alive = [next(looks) for _ in range(1)]

    def signs() -> object:
        # It advances for twenty looks, which is far longer than it may stand still, and then no more.
        alive.append(min(next(looks), 20))
        return alive[-1]

    assert see(worker, WorkerLimits(stall_s=0.4), signs=signs) == WorkerEnd("made no progress for 0.4 s")
    assert len(alive) > 24 and alive.count(20) >= POLLS_PER_STALL


def test_a_worker_that_ends_by_itself_is_no_matter_of_time() -> None:
    worker, _ = start("print('ready')")
    assert see(worker, WorkerLimits(limit_s=30, stall_s=30)) == WorkerEnd()
    assert worker.returncode == 0


def test_helpers_end_with_their_worker_however_it_ends() -> None:
    for end in (True, False):
        worker, line = start(WITH_A_HELPER)
        helper = int(line)
        if not end:
            worker.kill()
        assert see(worker, WorkerLimits(), end=end) == WorkerEnd()
        # It is somebody else's child now, and may take a moment to be gone.
        while start_time(helper) is not None:
            os.sched_yield()


def test_a_worker_that_no_signal_ends_is_left_to_itself_and_known(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(worker_watchdog, "_kill_group", lambda leader: None)
    monkeypatch.setattr(worker_watchdog, "KILL_WAIT_S", 0.05)
    worker, _ = start(STUBBORN)

    async def story() -> None:
        hung, ending = HungWorkers(), asyncio.Event()
        ending.set()
        end = await supervise(worker, 7, ending, WorkerLimits(grace_s=0.05), hung, signs=lambda: 0, stop=lambda: None)
        assert end.hangs.startswith(f"process {worker.pid} is ") and not end.late
        assert len(hung) == 1 and hung.of(7) == [worker.pid] and hung.of(8) == []
        worker.kill()
        while len(hung):
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(story(), DEADLINE_S))
    assert "which hung in the kernel, has ended" in caplog.text and worker.returncode is not None


def test_a_helper_that_no_signal_ends_is_known_though_its_worker_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_watchdog, "_kill_group", lambda leader: None)
    monkeypatch.setattr(worker_watchdog, "KILL_WAIT_S", 0.05)
    worker, line = start(WITH_A_HELPER)
    helper = int(line)

    async def story() -> None:
        hung, ending = HungWorkers(), asyncio.Event()
        worker.kill()
        end = await supervise(worker, 7, ending, WorkerLimits(), hung, signs=lambda: 0, stop=lambda: None)
        assert end.hangs.startswith(f"process {helper} is ") and not end.late
        assert hung.of(7) == [helper]
        os.kill(helper, signal.SIGKILL)
        while len(hung):
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(story(), DEADLINE_S))
    assert worker.returncode == -signal.SIGKILL


def test_an_agent_that_ends_does_not_wait_for_what_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_watchdog, "_kill_group", lambda leader: None)
    monkeypatch.setattr(worker_watchdog, "KILL_WAIT_S", 0.05)
    worker, _ = start(STUBBORN)

    async def story() -> None:
        hung, ending = HungWorkers(), asyncio.Event()
        ending.set()
        await supervise(worker, 7, ending, WorkerLimits(grace_s=0.05), hung, signs=lambda: 0, stop=lambda: None)
        await hung.let_go()

    asyncio.run(asyncio.wait_for(story(), DEADLINE_S))
    assert worker.poll() is None
    worker.kill()
    worker.wait()


def test_where_a_process_is_is_said_in_words(tmp_path: Path) -> None:
    worker, _ = start(STOPPED)
    while (said := kernel_location(worker.pid)).startswith(f"process {worker.pid} is running"):
        os.sched_yield()
    assert said.startswith(f"process {worker.pid} is stopped")
    worker.kill()
    worker.wait()
    assert kernel_location(worker.pid) == f"process {worker.pid} is running"
