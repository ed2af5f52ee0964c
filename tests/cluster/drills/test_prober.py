"""Priority of the measuring process, which is raised as far as its account permits."""

import os
from collections.abc import Callable

import pytest

from forebay.cluster.drills import prober


def said(answer: Callable[[], None]) -> str:
    """Return the priority that a child reports after raising it, with these answers of the kernel."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reads)
            real = os.sched_setscheduler
            os.sched_setscheduler = lambda *asked: answer() or real(*asked)  # type: ignore[func-returns-value]
            prober._raise_priority()
            os.write(writes, f"{os.sched_getscheduler(0)} {os.getpriority(os.PRIO_PROCESS, 0)}".encode())
        finally:
            os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as file:
        found = file.read()
    os.waitpid(child, 0)
    return found


def refused() -> None:
    raise PermissionError


def test_the_prober_uses_real_time_priority_if_permitted() -> None:
    child = os.fork()
    if child == 0:
        try:
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
        except OSError:
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1] or len(os.sched_getaffinity(0)) == 1:
        pytest.skip("this account may have no priority of real time, or there is one processor")
    assert said(lambda: None) == f"{os.SCHED_RR} {os.getpriority(os.PRIO_PROCESS, 0)}"


def test_the_prober_uses_no_real_time_priority_on_one_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    assert said(lambda: None).startswith(f"{os.SCHED_OTHER} ")


@pytest.mark.skipif(os.geteuid() != 0, reason="this account may not come first")
def test_the_prober_uses_a_nice_value_without_real_time_priority() -> None:
    assert said(refused) == f"{os.SCHED_OTHER} {prober.NICENESS}"


def test_the_prober_works_without_any_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def no(*given: object) -> None:
        asked.append(given)
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", no)
    monkeypatch.setattr(os, "setpriority", no)
    prober._raise_priority()
    assert len(asked) == 2
