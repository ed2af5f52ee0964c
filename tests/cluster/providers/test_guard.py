"""The guard of a call: what it ends, and whom it reserve files."""

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
    """A process that is there before the call."""
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def hang(returned: int) -> None:
    time.sleep(600)


def test_what_was_there_before_a_call_is_spared_when_the_call_is_ended(other: subprocess.Popen[bytes]) -> None:
    finished = guard.run(hang, timeout_s=0.05, clock=SystemClock())
    assert (finished.timed_out, finished.code, finished.unkillable) == (True, -signal.SIGTERM, ())
    assert start_time(other.pid) is not None


def test_a_process_that_came_under_the_number_of_an_earlier_one_is_ended_with_the_call(
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
    """Return a function that gives `first`, and after that what `then` gives."""
    assert callable(then)
    given = iter([first])
    return lambda: next(given, None) or then()
