"""The guard of a call: which processes it ends, and which it spares."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator

import pytest

from forebay.cluster.providers import guard
from forebay.cluster.system.clock import SystemClock
from forebay.cluster.system.processes import start_time


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """Process that exists before the call."""
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def hang(returned: int) -> None:
    time.sleep(600)


def test_processes_older_than_a_call_survive_its_end(other: subprocess.Popen[bytes]) -> None:
    finished = guard.run(hang, timeout_s=0.05, clock=SystemClock())
    assert (finished.timed_out, finished.code, finished.unkillable) == (True, -signal.SIGTERM, ())
    assert start_time(other.pid) is not None


def test_a_new_process_with_a_reused_pid_is_killed_with_the_call(
    other: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "start_time", lambda pid: 1)
    before = guard._tree()
    assert (other.pid, 1) in before
    monkeypatch.undo()
    monkeypatch.setattr(guard, "_tree", iter_of(before, guard._tree))
    finished = guard.run(hang, timeout_s=0.05, clock=SystemClock())
    assert finished.timed_out
    assert start_time(other.pid) is None


def iter_of(first: guard.Tree, then: object) -> object:
    """Return a function that returns `first` once, then the results of `then`."""
    assert callable(then)
    given = iter([first])
    return lambda: next(given, None) or then()
